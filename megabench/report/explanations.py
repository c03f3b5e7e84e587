"""Explanations of layouts, engines and speed differences for readers who do not know these terms."""

import re

from megabench.models.catalog import CATALOG
from megabench.record import RunRecord
from megabench.specs.registry import ENGINES_AND_PROGRAMS

_SHARED_BY_ZERO = {
    1: "the optimizer state is sharded across the data-parallel ranks",
    2: "gradients and optimizer state are sharded across the data-parallel ranks",
    3: "weights, gradients and optimizer state are sharded across the data-parallel ranks, and the weights of each "
    "layer are gathered before the layer computes",
}


def explain_layout(record: RunRecord, device: str) -> list[tuple[str, str]]:
    """Return a sentence for each part of the layout, such as ("tp2", "every layer is split across 2 GPUs, …")."""
    layout = record.layout
    units = f"{device}s" if device == "GPU" else "processes"
    said = []
    if layout.tp > 1:
        said.append((f"tp{layout.tp}", f"every layer is split across {layout.tp} {units}, which compute it together"))
    if layout.cp > 1:
        said.append((f"cp{layout.cp}", f"every sequence is split into parts that {layout.cp} {units} compute together"))
    if layout.pp > 1:
        where = f"{layout.pp} pipeline stages, and each stage passes its results to the next stage"
        said.append((f"pp{layout.pp}", f"the layers are divided into {where}"))
    if layout.vp > 1:
        said.append(
            (
                f"vp{layout.vp}",
                f"each stage holds {layout.vp} separate groups of consecutive layers, which shortens the waiting time",
            )
        )
    if layout.dp > 1:
        said.append((f"dp{layout.dp}", _data_parallel(record, units)))
    if not said:
        said.append(("dp1", f"the whole model trains on one {device}"))
    return said


def _data_parallel(record: RunRecord, units: str) -> str:
    dp, spec = record.layout.dp, ENGINES_AND_PROGRAMS.get(record.engine)
    who = f"{dp} {units}" if record.world_size == dp else f"{dp} replicas of the model"
    work = f"{who} train on different sequences"
    if spec is None:
        return work
    shared = _SHARED_BY_ZERO.get(spec.stage_of(record.options))
    if not shared:
        return f"{work} and sum their gradients"
    return f"{work}; {shared}" if spec.is_data_parallel else f"{work} and sum their gradients; {shared}"


def explain_engine(record: RunRecord) -> str:
    """Return a short description of the engine. Return only the name of an unknown engine."""
    spec = ENGINES_AND_PROGRAMS.get(record.engine)
    return spec.summary if spec else record.engine


def why(best: RunRecord, other: RunRecord, device: str) -> list[str]:
    """Return the measurements that explain why `best` is faster than `other`, and name missing measurements."""
    said = []
    if best.profile and other.profile:
        mine, its = waiting_share(best), waiting_share(other)
        said.append(
            f"{best.trial} spends {mine:.0%} of a step idle or waiting for communication, and {other.trial} {its:.0%}."
        )
    if best.wire_bytes and other.wire_bytes:
        sent = [_size(sum(record.wire_bytes.values())) for record in (best, other) if record.wire_bytes]
        said.append(
            f"In each step, one {device} sends {sent[0]} to other ranks in {best.trial} and {sent[1]} in {other.trial}."
        )
    if best.micro_batch > other.micro_batch:
        said.append(
            f"The micro-batch of {best.trial} has {best.micro_batch} sequences and that of {other.trial} has "
            f"{other.micro_batch}. A larger micro-batch keeps a {device} busier and uses more memory."
        )
    if best.peak_memory_gib and other.peak_memory_gib:
        mine, its = best.peak_memory_gib.max, other.peak_memory_gib.max
        beside = "the same amount" if f"{mine:.1f}" == f"{its:.1f}" else f"{its:.1f} GiB"
        said.append(
            f"The peak memory of {best.trial} is {mine:.1f} GiB on one {device}, and {other.trial} uses {beside}."
        )
    if unknown := [record.trial for record in (best, other) if not record.profile]:
        whose = " and ".join(unknown)
        said.append(
            f"No step of {whose} was profiled. Set “profile: true” in the study to measure where the time is spent."
        )
    return said


def waiting_share(record: RunRecord) -> float:
    """Return the fraction of a profiled step in which no compute kernel ran."""
    assert record.profile is not None
    waiting = sum(
        seconds for part, seconds in record.profile.seconds.items() if part == "idle" or part.startswith("exposed ")
    )
    return waiting / sum(record.profile.seconds.values())


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


def train_command(record: RunRecord) -> str:
    """Return the command of a run. For a multi-host run, return the command to start on each host.

    The command is without --emulate-network, which only the trials of a study can have.
    """
    command = re.sub(r" --emulate-network[ =]('[^']*'|\S+)", "", record.command)
    return command if record.emulated_hosts else _launched_on(record.num_hosts or 1, record, command)


def command_on_real_hosts(record: RunRecord) -> str:
    """Return the command that repeats a run with emulated hosts on real hosts.

    Start the returned command on each host. Return "" for runs without emulated hosts.
    """
    if not record.emulated_hosts:
        return ""
    command = re.sub(r" --emulate-hosts[ =]\d+", "", train_command(record))
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
    """Return the number of trained layers and of layers in the catalog model.

    Return None if the run trained all layers, or if the model is not in the catalog.
    """
    shape = CATALOG.get(record.model)
    if not shape or not record.work_class or record.work_class.num_layers >= shape.num_layers:
        return None
    return record.work_class.num_layers, shape.num_layers
