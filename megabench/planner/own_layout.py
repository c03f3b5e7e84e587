"""Find the layout that a person has in mind, from text such as "tp8 pp2" or "zero3", at its best. Loads no torch."""

import re
from dataclasses import dataclass

from megabench.config import ConfigError
from megabench.cost.job import Candidate
from megabench.parallel.layout import Layout
from megabench.planner.costs import Estimate
from megabench.planner.search import Plan, candidates, fastest
from megabench.specs.registry import ENGINES

_MODEL_AXES = ("tp", "cp", "pp")
_SIZE = r"(tp|cp|pp|vp|dp|mb)"
# what people write, and the words of candidates' names
_SPELLINGS = (
    (r"[·,;/+×()]", " "),
    (r"(?:deepspeed[- _]?)?zero[- _]?(?:stage)?[- _=]*([0-3])\b", r" zero\1 "),
    (r"\bstage[- _=]*([0-3])\b", r" zero\1 "),
    (r"\btensor([- _]?(model[- _]?)?parallel\w*)?", "tp"),
    (r"\bcontext([- _]?parallel\w*)?", "cp"),
    (r"\b(pipeline([- _]?(model[- _]?)?parallel\w*|[- _]?stages?)?|stages?)\b", "pp"),
    (r"\bdata[- _]?parallel\w*", "dp"),
    (r"\b(virtual([- _]?(pipeline|pp))?|interleav\w*|chunks?)\b", "vp"),
    (r"\b(micro[- _]?batch(es)?([- _]?size)?|mbs)(?![a-z])", "mb"),
    (r"\bmegatron[- _]?fsdp\b", "megatron_fsdp"),
    (r"\bfsdp ?2\b", "fsdp"),
    (r"\b(none|selective)[- _]*((activation|gradient)[- _]*)?(checkpointing|recompute|recomputation)\b", r"\1"),
    (r"\b((activation|gradient)[- _]?checkpointing|(full[- _]?)?recompute|(full[- _]?)?recomputation)\b", "full"),
    (r"\b(cpu|host)[- _]?offload\w*", "offload"),
    (rf"\b(\d+)[- ]*way[- ]*{_SIZE}\b", r" \2\1 "),
    (rf"(?<![a-z]){_SIZE}\s*[=:-]?\s*(\d+)", r" \1\2 "),
    (rf"(?<!\w)(\d+)[- ]*{_SIZE}\b", r" \2\1 "),
)
_ENGINES = ("zero0", "zero1", "zero2", "zero3", "megatron_fsdp", "fsdp", "ddp")
_RECOMPUTES, _PLACEMENTS = {"none", "selective", "full"}, {"topology", "spread-tp"}
_OPTION = r"none|selective|full|topology|spread-tp|kept|offload(-all|-optimizer)?|(shard|hpz)\d+"
_FILLERS = {"and", "with", "of", "on", "x", "size", "layout", "megatron", "megatron-core", "megatron-lm", "deepspeed"}
_EXAMPLES = '"tp8 pp2", "zero3" or "fsdp mb2 full"'


@dataclass(frozen=True)
class OwnLayout:
    """What a text fixes of a layout. Sizes of tp, cp and pp that it does not name are 1; all else is free.

    `engine` is the first word of a candidate's name, such as "zero3", or None for megatron.
    """

    text: str
    engine: str | None
    sizes: dict[str, int]
    options: frozenset[str]

    def matches(self, candidate: Candidate) -> bool:
        """Return whether a candidate has the sizes and options that the text names."""
        found = {axis: candidate.layout.size(axis) for axis in (*_MODEL_AXES, "vp", "dp")} | {
            "mb": candidate.micro_batch
        }
        expected = dict.fromkeys(_MODEL_AXES, 1) | self.sizes
        if any(found[axis] != size for axis, size in expected.items()):
            return False
        if candidate.recompute not in (self.options & _RECOMPUTES or _RECOMPUTES):
            return False
        if candidate.placement not in (self.options & _PLACEMENTS or {"topology"}):
            return False
        words = set(candidate.variant.words)
        if "offload" in self.options:
            words = {"offload" if word.startswith("offload") else word for word in words}
        return words == self.options - _RECOMPUTES - _PLACEMENTS


def read_layout(text: str) -> OwnLayout:
    """Return what a text fixes of a layout. Raises ConfigError for words that are not understood."""
    rest = text.lower()
    for spelling, word in _SPELLINGS:
        rest = re.sub(spelling, word, rest)
    engines, sizes, options = set[str](), dict[str, int](), set[str]()
    for word in rest.split():
        if (found := re.fullmatch(rf"{_SIZE}([1-9]\d{{0,5}})", word)) and sizes.get(found[1], int(found[2])) == int(
            found[2]
        ):
            sizes[found[1]] = int(found[2])
        elif word in _ENGINES and engines <= {word}:
            engines.add(word)
        elif re.fullmatch(_OPTION, word):
            options.add(word)
        elif word not in _FILLERS:
            raise ConfigError(
                f"--layout {text!r}: {word!r} is not understood here; write sizes and options, such as {_EXAMPLES}"
            )
    if not engines and not sizes:
        raise ConfigError(f"--layout {text!r} names no layout; write sizes or an engine, such as {_EXAMPLES}")
    for group in (_RECOMPUTES, _PLACEMENTS):
        if len(several := sorted(options & group)) > 1:
            raise ConfigError(
                f"--layout {text!r} has {' and '.join(several)}, which exclude each other; use one of them"
            )
    return OwnLayout(text, next(iter(engines), None), sizes, frozenset(options))


def find_own(plan: Plan, own: OwnLayout) -> Estimate:
    """Return the fastest candidate with the sizes and options of a layout that is likely to fit.

    If none is likely to fit, return the one that needs the least memory. Raises ConfigError if the layout is impossible
    for the model, the batch or the number of GPUs.
    """
    members = [one for one in candidates(plan.job, plan.topology) if _engine_of(plan, one) == own.engine]
    members = [one for one in members if own.matches(one)]
    if not members:
        raise ConfigError(f"--layout {own.text!r}: {_why_impossible(plan, own)}")
    lacks = {one: plan.costs.missing_bytes(one) for one in members}
    fitting = [one for one, missing in lacks.items() if missing <= 0]
    found = fastest(plan.costs, fitting or [min(lacks, key=lacks.__getitem__)])
    assert found
    return found


def _engine_of(plan: Plan, candidate: Candidate) -> str | None:
    """Return the first word of a candidate's name. None is megatron, or DDP for models that megatron cannot train."""
    if not ENGINES[candidate.engine].is_data_parallel:
        return None
    word = candidate.variant.prefix(candidate.engine).rstrip("·")
    return None if word == "ddp" and not plan.job.shape.table.has_parallel_blocks else word


def _why_impossible(plan: Plan, own: OwnLayout) -> str:
    """Return which size clashes with the model, the batch or the GPUs. Raises LayoutError for most of them."""
    job, world_size = plan.job, plan.topology.world_size
    sizes = {axis: size for axis, size in own.sizes.items() if axis in (*_MODEL_AXES, "vp")}
    parallel = [axis for axis in _MODEL_AXES if own.sizes.get(axis, 1) > 1]
    if parallel and (own.engine or not job.shape.table.has_parallel_blocks):
        return f"{own.engine or job.shape.name} has no {parallel[0]}; use {_EXAMPLES}"
    layout = Layout(**sizes).with_world_size(world_size)
    layout.check_model(job.shape, job.seq_length)
    dp = own.sizes.get("dp", layout.data_parallel)
    if dp != layout.data_parallel:
        model_ranks = world_size // layout.data_parallel
        return (
            f"dp={dp} with {model_ranks} GPUs per replica needs {dp * model_ranks} GPUs, but the cluster has "
            f"{world_size}; use dp={layout.data_parallel}"
        )
    layout.check_batch(job.global_batch, own.sizes.get("mb", 1))
    options = f" with {' '.join(sorted(own.options))}" if own.options else ""
    return f"the plan has no such candidate{options}; use {_EXAMPLES}"
