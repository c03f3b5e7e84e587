"""Picture of predicted and measured step times, by source. This module does not import torch."""

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib

from megabench.cost.profile import Profile
from tools.planner_validation.fit import predicted_seconds
from tools.planner_validation.published import Row

matplotlib.use("svg")
from matplotlib import pyplot

_OWN = "own records"
# first words of a source's name, and the label of its line in the picture, from top to bottom
_LABELS = {
    "NeMo": "NeMo",
    "SC21": "Megatron-LM papers",
    "Korthikanti": "Megatron-LM papers",
    "InternEvo": "InternEvo",
    "torchtitan": "FSDP (PyTorch, torchtitan)",
    "PyTorch FSDP": "FSDP (PyTorch, torchtitan)",
    "llm-foundry": "llm-foundry",
    "vTrain": "vTrain",
    "playbook sweep": "playbook sweep",
}
_TARGET = 0.08
_LOWEST, _HIGHEST = 0.4, 1.6  # ends of the axis; runs beyond them are drawn at the ends and counted


def draw(rows: Sequence[tuple[Row, Profile]], path: Path) -> None:
    """Write an SVG with predicted ÷ measured step time of each run. Each source is a line; fitted runs are pale."""
    runs: dict[str, list[tuple[Row, float]]] = {label: [] for label in (*_LABELS.values(), _OWN)}
    for row, profile in rows:
        if "seconds" in row.measured:
            ratio = predicted_seconds(row, profile) / row.measured["seconds"]
            runs[_label(row.source.name)].append((row, ratio))
    found = {label: members for label, members in runs.items() if members}
    # the same input produces the same file, and text is not drawn as outlines
    pyplot.rcParams |= {"svg.hashsalt": "megabench", "svg.fonttype": "none"}
    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    axes.axvspan(1 - _TARGET, 1 + _TARGET, color="0.9", zorder=0)
    axes.axvline(1, color="0.6", linewidth=0.8, zorder=0)
    for height, members in enumerate(reversed(found.values())):
        for is_fit, colour in ((True, "tab:orange"), (False, "tab:blue")):
            part = [ratio for row, ratio in members if row.is_fit == is_fit]
            spread = [height + 0.3 * math.sin(2.4 * number) for number in range(len(part))]
            shown = [min(max(ratio, _LOWEST), _HIGHEST) for ratio in part]
            axes.scatter(shown, spread, s=10, alpha=0.5, linewidths=0, color=colour, rasterized=True)
        below = sum(ratio < _LOWEST for _, ratio in members)
        if below:
            axes.text(_LOWEST * 0.99, height, f"{below} below ", ha="right", va="center", fontsize="small")
    axes.set_yticks(range(len(found)), [_title(*entry) for entry in reversed(found.items())])
    axes.set(xscale="log", xlim=(_LOWEST * 0.85, _HIGHEST), xlabel="predicted ÷ measured step time")
    axes.set_xticks([0.4, 0.5, 0.6, 0.8, 1, 1.25, 1.6], ["0.4", "0.5", "0.6", "0.8", "1", "1.25", "1.6"])
    axes.minorticks_off()
    axes.scatter([], [], s=10, color="tab:orange", label="constants fitted to these runs")
    axes.scatter([], [], s=10, color="tab:blue", label="not fitted")
    axes.legend(loc="upper left", fontsize="small")
    figure.savefig(path, dpi=120, metadata={"Date": None})
    pyplot.close(figure)


def _label(source: str) -> str:
    return next((label for start, label in _LABELS.items() if source.startswith(start)), _OWN)


def _title(label: str, members: Sequence[tuple[Row, float]]) -> str:
    sizes = [row.topology.world_size for row, _ in members]
    return f"{label}\n{len(members)} runs, {min(sizes):,} to {max(sizes):,} GPUs"
