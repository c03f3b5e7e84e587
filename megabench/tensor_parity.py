"""Compare two runs tensor by tensor, from the sketches of their first steps, and name the place of a difference."""

import math
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from megabench import sketch
from megabench.errors import UserError
from megabench.inputs import parse_json
from megabench.record import TensorParity

# Largest relative difference of a tensor or a block, (in the first step, in later steps). The gradient of step 1 is
# computed from equal weights; every later tensor also contains what rounding changed before. Adam's first update is
# nearly the sign of the gradient, so rounding changes much of the updates of small gradients. "factor" is the factor by
# which all gradients differ. docs/comparing.md has the largest differences between correct runs.
_TOLERANCES: dict[str, dict[str, tuple[float, float]]] = {
    "fp32": {"gradient": (1e-5, 2e-3), "exp_avg_sq": (1e-5, 2e-3), "update": (0.02, 0.02), "factor": (1e-5, 2e-3)},
    "bf16": {"gradient": (0.15, 0.3), "exp_avg_sq": (0.15, 0.3), "update": (0.8, 0.8), "factor": (0.01, 0.02)},
    "fp8": {"gradient": (0.8, 1.2), "exp_avg_sq": (0.8, 1.2), "update": (1.3, 1.3), "factor": (0.1, 0.2)},
}
_TOLERANCES["fp16"] = _TOLERANCES["bf16"]  # an upper limit, because bf16 rounds more coarsely
_INITIAL_WEIGHTS = 1e-5  # of all precisions: the weights are equal, and the order of the sums is not
_TITLES = {"weight": "weight", "gradient": "gradient", "exp_avg_sq": "second moment", "update": "update"}
# of the reported gradient norm, by the dtype of the gradients: moments are sums in fp32, but DeepSpeed's ZeRO-0 rounds
# the norm to the gradients' dtype, by up to 2^-9 in bf16
_NORM_TOLERANCES = {"fp32": 1e-3, "fp16": 1e-3, "bf16": 5e-3}
_LAYER = re.compile(r"\.(\d+)\.")


class ParityError(UserError):
    """Raised if two files cannot be compared."""


def compare_files(ours: Path, theirs: Path) -> TensorParity:
    """Compare the sketches in two files.

    Raises ParityError if a file cannot be read, or if the runs have other tensors, steps or precisions.
    """
    (mine, facts), (expected, other_facts) = _read(ours), _read(theirs)
    if (precision := facts.get("precision")) != (other := other_facts.get("precision")):
        raise ParityError(f"{ours} is of a run in {precision} and {theirs} in {other}; compare runs of one precision")
    if precision not in _TOLERANCES:
        raise ParityError(f"no tolerances are known for precision={precision}; use {' or '.join(_TOLERANCES)}")
    # a run with another optimizer, or that hides its state, has fewer kinds of tensors
    kinds = {key[0] for key in mine} & {key[0] for key in expected}
    mine, expected = ({key: one for key, one in of.items() if key[0] in kinds} for of in (mine, expected))
    if missing := sorted(mine.keys() ^ expected.keys()):
        kind, step, name = missing[0]
        raise ParityError(
            f"{len(missing)} tensors are in only one of {ours} and {theirs}, such as the {_TITLES[kind]} of step "
            f"{step} of {name}; compare runs of one model"
        )
    if not expected:
        raise ParityError(f"{ours} and {theirs} have no tensors in common; write them again")
    tolerances = _TOLERANCES[precision]
    if facts.get("optimizer") == "muon":  # torch's Muon computes the updates of matrices in bf16
        tolerances = tolerances | {"update": max(tolerances["update"], _TOLERANCES["bf16"]["update"])}
    problems = _without_non_finite(mine, expected)
    if not problems:
        problems += _norm_problems(mine, facts)
    problems += _fact(ours, facts, "problems", [])
    problems += _hyper_parameter_problems(
        _fact(ours, facts, "hyper_parameters", {}), _fact(theirs, other_facts, "hyper_parameters", {})
    )
    found = _compare(mine, expected, tolerances)
    return found.model_copy(update={"problems": [*problems, *found.problems]})


def _read(path: Path) -> tuple[dict[sketch.Key, Tensor], dict[str, str]]:
    """Return the sketches and the facts of a file."""
    try:
        sketches, facts = sketch.read(path)
    except sketch.SketchError as error:
        raise ParityError(str(error)) from None
    if unknown := sorted({kind for kind, _, _ in sketches} - _TITLES.keys()):
        raise ParityError(f"{path} has tensors of kind {unknown[0]!r}; use {', '.join(_TITLES)}")
    return sketches, facts


def _without_non_finite(mine: dict[sketch.Key, Tensor], theirs: dict[sketch.Key, Tensor]) -> list[str]:
    """Remove the tensors that are not finite in one of the runs, and return a sentence for each run that has some."""
    problems = []
    for sketches, whose in ((mine, "this run"), (theirs, "the other run")):
        if wrong := [key for key, one in sketches.items() if not one.isfinite().all()]:
            kind, step, name = min(wrong, key=lambda key: key[1])
            problems.append(
                f"{len(wrong)} tensors of {whose} are not finite, such as the {_TITLES[kind]} of {name} in step {step}."
            )
        for key in wrong:
            del mine[key], theirs[key]
    return problems


def _fact(path: Path, facts: Mapping[str, str], name: str, default: Any) -> Any:
    """Return a fact that is a list of strings or a mapping of mappings, as `default` is."""
    item = str if isinstance(default, list) else dict
    try:
        value = parse_json(facts[name]) if name in facts else default
    except ValueError as error:
        raise ParityError(f"{name} of {path} is not JSON: {error}") from None
    if type(value) is not type(default) or not all(
        isinstance(one, item) for one in (value.values() if isinstance(value, dict) else value)
    ):
        raise ParityError(f"{name} of {path} is not what megabench writes; write the file again")
    return value


def verdict(parity: TensorParity) -> str:
    """Return the comparison as text: one sentence, and one line for each problem."""
    summary = (
        f"{'DIVERGED' if parity.problems else 'EQUAL'}: {parity.num_tensors} tensors. The largest difference is "
        f"{parity.part_of_tolerance:.2g} times its tolerance: {parity.largest}."
    )
    return "\n".join([summary, *parity.problems])


def _norm_problems(sketches: Mapping[sketch.Key, Tensor], facts: Mapping[str, str]) -> list[str]:
    """Return a sentence if the gradient norm that a run reported for step 1 is not that of all its gradients."""
    norm = math.hypot(
        *(sketch.norm(one) for (kind, step, _), one in sketches.items() if (kind, step) == ("gradient", 1))
    )
    try:
        reported = float(facts.get("grad_norm", norm))
    except ValueError:
        return [f"The file has {facts['grad_norm']!r} as the gradient norm of step 1, which is not a number."]
    if abs(norm - reported) <= _NORM_TOLERANCES.get(facts.get("grad_dtype", ""), 1e-3) * norm:
        return []
    return [
        f"The run reported {reported:.6g} as the gradient norm of step 1, but the norm of all its gradients is "
        f"{norm:.6g}: the clipping omits or repeats some of them."
    ]


def _hyper_parameter_problems(mine: dict[str, dict[str, Any]], theirs: dict[str, dict[str, Any]]) -> list[str]:
    """Return a sentence for each hyper-parameter, such as the weight decay, that is not exactly equal."""
    problems = []
    common = [name for name in mine if name in theirs]
    for value in sorted({value for name in common for value in (mine[name].keys() | theirs[name].keys())}):
        # as text, in which a NaN equals itself
        wrong = [name for name in common if repr(mine[name].get(value)) != repr(theirs[name].get(value))]
        if wrong:
            first = wrong[0]
            problems.append(
                f"{value} of {len(wrong)} of {len(common)} tensors is not that of the other run, such as "
                f"{mine[first].get(value)} instead of {theirs[first].get(value)} for {first}."
            )
    return problems


def _compare(
    ours: Mapping[sketch.Key, Tensor],
    theirs: Mapping[sketch.Key, Tensor],
    tolerances: Mapping[str, tuple[float, float]],
) -> TensorParity:
    problems: list[str] = []
    worst: tuple[float, sketch.Difference] | None = None
    moments = sorted({key[:2] for key in theirs}, key=lambda moment: (moment[1], list(_TITLES).index(moment[0])))
    gradients = {name: one for (kind, step, name), one in theirs.items() if (kind, step) == ("gradient", 1)}
    smallest = sketch.smallest_norm(gradients)
    # Gradients that are zero in theory consist of rounding errors, and Adam's updates then depend on the errors' signs.
    are_rounding = {name for name, one in gradients.items() if sketch.estimated_norm(one) < smallest}
    for kind, step in moments:
        mine, expected = (
            {
                name: one
                for (of, at, name), one in tensors.items()
                if (of, at) == (kind, step) and not (kind == "update" and name in are_rounding)
            }
            for tensors in (ours, theirs)
        )
        tolerance = _INITIAL_WEIGHTS if kind == "weight" else tolerances[kind][step > 1]
        if kind == "gradient":
            factor = sketch.common_factor(mine, expected)
            if abs(factor - 1) > tolerances["factor"][step > 1]:
                problems.append(f"All gradients of step {step} are {factor:.6g} times those of the other run.")
                mine = {name: one / factor for name, one in mine.items()}
        found = sketch.compare(mine, expected, kind, step)
        problems += _problems(found, tolerance)
        for one in found:
            part = one.judged / tolerance
            if worst is None or part > worst[0]:
                worst = part, one
    part, largest = worst or (0.0, None)
    return TensorParity(
        num_tensors=len({name for _, _, name in theirs}),
        largest=f"the {_TITLES[largest.kind]} of {largest.name} in step {largest.step}"
        if largest
        else "none is finite",
        part_of_tolerance=min(part, sys.float_info.max),
        problems=problems,
    )


def _problems(found: Sequence[sketch.Difference], tolerance: float) -> list[str]:
    """Return a sentence about the tensors of one kind and step that differ by more than the tolerance."""
    wrong = [one for one in found if one.judged > tolerance]
    if not wrong:
        return []
    first = min(wrong, key=lambda one: _distance_from_loss(one.name))
    kinds = Counter(_LAYER.sub(".*.", one.name) for one in wrong)
    named = ", ".join(f"{name} ({count})" if count > 1 else name for name, count in kinds.most_common(4))
    more = f" and {len(kinds) - 4} other kinds" if len(kinds) > 4 else ""
    axis, block = first.block
    what = f"{_TITLES[first.kind]}s of step {first.step}"
    return [
        f"{len(wrong)} of {len(found)} {what} differ by more than {tolerance:g}. Seen from the loss, the first is "
        f"{first.name}: by {first.relative:.2g}, and in block {block} of {sketch.NUM_BLOCKS} of its {axis} by "
        f"{first.of_block:.2g}. All: {named}{more}."
    ]


def _distance_from_loss(name: str) -> float:
    """Return the order of a tensor in the backward pass: the output layer, the layers from the last, the embeddings."""
    if number := _LAYER.search(name):
        return -float(number[1])
    is_embedding = "embed" in name or ".wte." in name or ".wpe." in name
    return math.inf if is_embedding else -math.inf
