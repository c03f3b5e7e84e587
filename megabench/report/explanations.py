"""What a layout and an engine are, and why one is faster, in words for people who know neither."""

import re

from megabench.models.catalog import CATALOG
from megabench.record import RunRecord
from megabench.specs.registry import ENGINES

_SHARED_BY_ZERO = {
    1: "the optimizer's state is shared out among them",
    2: "gradients and the optimizer's state are shared out among them",
    3: "weights, gradients and the optimizer's state are shared out among them, and each layer's weights are gathered "
    "whenever it computes",
}


def explain_layout(record: RunRecord, device: str) -> list[tuple[str, str]]:
    """The layout's parts with a sentence each: ("tp2", "every layer is cut over 2 GPUs, …")."""
    layout = record.layout
    units = f"{device}s" if device == "GPU" else "processes"
    said = []
    if layout.tp > 1:
        said.append((f"tp{layout.tp}", f"every layer is cut over {layout.tp} {units}, which work on it together"))
    if layout.cp > 1:
        said.append((f"cp{layout.cp}", f"every sequence is cut into parts, worked on by {layout.cp} {units}"))
    if layout.pp > 1:
        where = f"{layout.pp} stages, which hand the work on as on an assembly line"
        said.append((f"pp{layout.pp}", f"the layers are dealt out to {where}"))
    if layout.vp > 1:
        said.append((f"vp{layout.vp}", f"each stage holds {layout.vp} separate runs of layers, so that it waits less"))
    if layout.dp > 1:
        said.append((f"dp{layout.dp}", _data_parallel(record, units)))
    if not said:
        said.append(("dp1", f"the whole model trains on one {device}"))
    return said


def _data_parallel(record: RunRecord, units: str) -> str:
    dp, spec = record.layout.dp, ENGINES.get(record.engine)
    who = f"{dp} {units}" if record.world_size == dp else f"{dp} copies of that"
    work = f"{who} work on different sequences"
    if spec is None:
        return work
    shared = _SHARED_BY_ZERO.get(spec.stage_of(record.options))
    if not shared:
        return f"{work} and add up their gradients"
    return f"{work}; {shared}" if spec.is_data_parallel else f"{work} and add up their gradients; {shared}"


def explain_engine(record: RunRecord) -> str:
    """Describe the engine in half a sentence; an engine that this version does not know is only named."""
    spec = ENGINES.get(record.engine)
    return spec.summary if spec else record.engine


def why(best: RunRecord, other: RunRecord, device: str) -> list[str]:
    """What was measured that helps to tell why `best` is faster than `other`, and what was not."""
    said = []
    if best.profile and other.profile:
        mine, its = waiting_share(best), waiting_share(other)
        said.append(
            f"Of its step {best.trial} spends {mine:.0%} waiting for communication or idle, {other.trial} {its:.0%}."
        )
    if best.wire_bytes and other.wire_bytes:
        sent = [_size(sum(record.wire_bytes.values())) for record in (best, other) if record.wire_bytes]
        said.append(
            f"In a step one {device} sends {sent[0]} to others under {best.trial}, {sent[1]} under {other.trial}."
        )
    if best.micro_batch > other.micro_batch:
        said.append(
            f"{best.trial} computes {_sequences(best.micro_batch)} at a time, {other.trial} {other.micro_batch}: more "
            f"at a time keeps a {device} busier and costs memory."
        )
    if best.peak_memory_gib and other.peak_memory_gib:
        mine, its = best.peak_memory_gib.max, other.peak_memory_gib.max
        beside = "as much" if f"{mine:.1f}" == f"{its:.1f}" else f"{its:.1f} GiB"
        said.append(f"At its peak {best.trial} holds {mine:.1f} GiB on one {device}, {other.trial} {beside}.")
    if unknown := [record.trial for record in (best, other) if not record.profile]:
        whose = " and of ".join(unknown)
        said.append(f"Where the time of {whose} goes was not looked into; “profile: true” in the study would show it.")
    return said


def waiting_share(record: RunRecord) -> float:
    """The share of a profiled step in which nothing computed."""
    assert record.profile is not None
    waiting = sum(
        seconds for part, seconds in record.profile.seconds.items() if part == "idle" or part.startswith("exposed ")
    )
    return waiting / sum(record.profile.seconds.values())


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


def _sequences(count: int) -> str:
    return f"{count} sequence{'s' * (count != 1)}"


def train_command(record: RunRecord) -> str:
    """The recorded command, as it is typed on each host where the run had several."""
    num_hosts = record.num_hosts or 1
    return record.command if record.emulated_hosts else _launched_on(num_hosts, record, record.command)


def command_on_real_hosts(record: RunRecord) -> str:
    """The command of a run on emulated hosts as it is typed on each of as many real ones; "" for any other run."""
    if not record.emulated_hosts:
        return ""
    command = re.sub(r" --emulate-hosts[ =]\d+", "", record.command)
    return _launched_on(record.emulated_hosts, record, command)


def _launched_on(num_hosts: int, record: RunRecord, command: str) -> str:
    if num_hosts == 1 or record.world_size % num_hosts:
        return command
    launch = (
        f"torchrun --nnodes {num_hosts} --nproc-per-node {record.world_size // num_hosts} --rdzv-backend c10d "
        "--rdzv-endpoint HOST:29500"
    )
    return command.replace(f"torchrun --nproc-per-node {record.world_size}", launch, 1)


def layers_left_out(record: RunRecord) -> tuple[int, int] | None:
    """How many layers trained and how many the catalogue's model has, where they are fewer; else None."""
    shape = CATALOG.get(record.model)
    if not shape or not record.work_class or record.work_class.num_layers >= shape.num_layers:
        return None
    return record.work_class.num_layers, shape.num_layers
