"""Write TensorBoard's HPARAMS view of a study: the layout and the settings of each run, and what it measured."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import api_pb2, metadata
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo, SessionStartInfo
from torch.utils.tensorboard import SummaryWriter

from megabench.record import LayoutSizes, RunRecord
from megabench.study.summary import engine_name

# the suffix of the event files that this module writes; a later call finds the files by it and replaces them
_SUFFIX = ".hparams"
_ALWAYS_DECLARED = (*LayoutSizes.model_fields, "micro_batch")
# TensorBoard shows the first 5 hyperparameters until the user selects others
_NUM_SHOWN = 5


@dataclass(frozen=True)
class _Metric:
    """A metric of HPARAMS. TensorBoard reads it from the scalar `tag`."""

    tag: str
    title: str
    read: Callable[[RunRecord], float | None]


# TensorBoard colors the lines of the parallel coordinates by the first metric
_METRICS = (
    _Metric(
        "trial/tokens_per_second_per_device", "tokens/s per device", lambda record: record.tokens_per_second_per_device
    ),
    _Metric("trial/mfu", "MFU", lambda record: record.mfu),
    _Metric(
        "trial/step_seconds",
        "step time (s)",
        lambda record: record.step_seconds.median if record.step_seconds else None,
    ),
    _Metric(
        "trial/peak_memory_gib",
        "peak memory (GiB)",
        lambda record: record.peak_memory_gib.max if record.peak_memory_gib else None,
    ),
)


def write_hparams(folder: Path, runs: Mapping[Path, RunRecord]) -> None:
    """Add hyperparameters and metrics to the TensorBoard runs under `folder`, in place of those of an earlier call.

    `runs` maps the directory of each run, relative to `folder`, to its record. A run without a result has
    hyperparameters, a status and the text of its error, but no metrics.
    """
    values = {name: _hyperparameters(record) for name, record in runs.items()}
    infos = _hparam_infos(list(values.values()))
    metrics = [metric for metric in _METRICS if any(metric.read(record) is not None for record in runs.values())]
    experiment = api_pb2.Experiment(
        hparam_infos=infos,
        metric_infos=[
            api_pb2.MetricInfo(name=api_pb2.MetricName(tag=metric.tag), display_name=metric.title) for metric in metrics
        ],
    )
    # TensorBoard uses the declarations of any run, so those of trials that the study no longer has are removed too
    for earlier in folder.rglob(f"events.out.tfevents.*{_SUFFIX}"):
        earlier.unlink()
    for name, record in runs.items():
        start = SessionStartInfo(group_name=record.trial)
        for info in infos:
            _set(start.hparams[info.name], values[name][info.name])
        is_ok = record.status == "ok"
        end = SessionEndInfo(status=api_pb2.STATUS_SUCCESS if is_ok else api_pb2.STATUS_FAILURE)
        with SummaryWriter(str(folder / name), filename_suffix=_SUFFIX) as writer:
            for tag, content in (
                (metadata.EXPERIMENT_TAG, HParamsPluginData(experiment=experiment)),
                (metadata.SESSION_START_INFO_TAG, HParamsPluginData(session_start_info=start)),
                (metadata.SESSION_END_INFO_TAG, HParamsPluginData(session_end_info=end)),
            ):
                writer.file_writer.add_summary(_summary(tag, content))
            # HPARAMS needs scalars, and TensorBoard shows all scalars as curves: these are level lines
            for step in _first_and_last_timed_step(record):
                for metric in metrics:
                    if (value := metric.read(record)) is not None:
                        writer.add_scalar(metric.tag, value, step)
            if record.error:
                writer.add_text("error", record.error)


def _hyperparameters(record: RunRecord) -> dict[str, int | str]:
    """Return the hyperparameters of a run, the most informative ones first."""
    layout = record.layout
    return {
        "tp": layout.tp,
        "pp": layout.pp,
        "engine": engine_name(record),
        "precision": record.precision,
        "micro_batch": record.micro_batch,
        "vp": layout.vp,
        "cp": layout.cp,
        "world_size": record.world_size,
        "dp": layout.dp,  # follows from the world size and the other axes
        "recompute": record.options.get("recompute", "none"),
        "global_batch": record.global_batch,
        "seq_length": record.seq_length,
        "optimizer": record.optimizer,
        "model": record.model,
        "status": record.status,
    }


def _hparam_infos(runs: Sequence[Mapping[str, int | str]]) -> list[Any]:
    """Declare the layout of the runs, and the other hyperparameters that differ between them.

    TensorBoard sorts hyperparameters that are marked as differing before the others, each by name, and shows only the
    first few. So only the most informative hyperparameters are
    marked.
    """
    differing = [name for name in runs[0] if len({run[name] for run in runs}) > 1]
    infos = []
    for name, value in runs[0].items():
        if name in differing or name in _ALWAYS_DECLARED:
            is_text = isinstance(value, str)
            info = api_pb2.HParamInfo(
                name=name,
                type=api_pb2.DATA_TYPE_STRING if is_text else api_pb2.DATA_TYPE_FLOAT64,
                differs=name in differing[:_NUM_SHOWN],
            )
            info.domain_discrete.extend(sorted({run[name] for run in runs}))
            infos.append(info)
    return infos


def _set(field: Any, value: int | str) -> None:
    """Set a protobuf Value."""
    if isinstance(value, str):
        field.string_value = value
    else:
        field.number_value = value


def _summary(tag: str, content: Any) -> Any:
    """Return a summary that TensorBoard's hparams plugin reads."""
    value = Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(content), tensor=metadata.NULL_TENSOR)
    return Summary(value=[value])


def _first_and_last_timed_step(record: RunRecord) -> list[int]:
    last = record.first_step + max(len(record.losses), 1) - 1
    return sorted({min(record.first_step + record.warmup_steps, last), last})
