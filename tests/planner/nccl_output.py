"""Text in the format of nccl-tests, for tests."""

from collections.abc import Sequence

from megabench.cost.fabric import Collective


def output(
    collectives: Sequence[Collective],
    test: str | None = None,
    redop: str | None = "sum",
    root: str = "-1",
    hosts: Sequence[str] | None = None,
    has_groups: bool = True,
    prefix: str = "",
) -> str:
    """The output of one test with a row for each collective. Without `test`, the test's name is not printed."""
    first = collectives[0]
    names = hosts or [f"host-{number}" for number in range(first.num_hosts)]
    lines = [f"# Collective test starting: {test}"] if test else []
    lines += ["# nThread 1 nGpus 1 minBytes 8 maxBytes 1073741824 step: 2(factor) warmup iters: 5 iters: 20", "#"]
    lines.append("# Using devices")
    per_host = first.ranks_per_host * first.groups_per_host
    for rank in range(per_host * len(names)):
        seat = rank % per_host
        group = f" Group {seat % first.groups_per_host:2}" if has_groups else ""
        host = names[rank // per_host]
        lines.append(f"#  Rank {rank:2}{group} Pid {4000 + rank} on {host:>10} device {seat:2} [0x10] NVIDIA H100")
    columns = ["size", "count", "type"] + ["redop"] * (redop is not None) + ["root"] * bool(root)
    lines.append("#" + "".join(f"{column:>14}" for column in columns) + "     time   algbw   busbw #wrong" * 2)
    for one in collectives:
        algorithm = one.num_bytes / one.seconds / 1e9
        half = f"{one.seconds * 1e6:9.2f} {algorithm:7.2f} {one.bus_gb_per_s:7.2f}      0"
        lines.append(f"{one.num_bytes:14.0f}{one.num_bytes / 4:14.0f}   float{redop or '':>8}{root:>8} {half}  {half}")
    lines += ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 12.3"]
    return "".join(f"{prefix}{line}\n" for line in lines)
