"""Read the printed output of NVIDIA's nccl-tests. Loads no torch."""

import re
from dataclasses import dataclass, field

from megabench.cost.fabric import Collective, Kind
from megabench.settings.reading import ConfigError

# sendrecv_perf is not usable: it sends around a ring of all GPUs, so that only one GPU of each host sends to another
# host, while all GPUs of a pipeline stage send at once.
_KINDS: dict[str, Kind] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
}
_USABLE = ", ".join(f"{name}_perf" for name in _KINDS)
_MOST_WRONG = 0.05  # largest relative difference of a bandwidth factor from that of a kind

_TEST = re.compile(
    r"\b((?:all_)?reduce|(?:all_)?gather|(?:reduce_)?scatter|alltoallv?|sendrecv|broadcast|hypercube)_perf"
)
_RANK = re.compile(r"#\s+Rank\s+(?P<rank>\d+)(?:\s+Group\s+(?P<group>\d+))?\s+Pid\s+\d+\s+on\s+(?P<host>\S+)\s+device")
_NUMBER = r"\d{1,15}(?:\.\d+)?(?:e[+-]?\d{1,2})?"
# size, count and type; the operation of a reduction or "none"; the root, which not all versions print; and the
# out-of-place time with its bandwidths
_ROW = re.compile(
    r"\b(?P<bytes>\d{1,15})\s+\d+\s+(?:u?int\d+|half|float|double|bfloat16|f\w*8\w*)\s+"
    r"(?:(?P<operation>[a-z]\w*)\s+)?(?:-1\s+)?"
    rf"(?P<microseconds>{_NUMBER})\s+{_NUMBER}\s+(?P<bus_gb_per_s>{_NUMBER})(?:\s|$)"
)


@dataclass(frozen=True)
class _Row:
    num_bytes: int
    is_reduction: bool
    seconds: float
    bus_gb_per_s: float


@dataclass
class _Run:
    """The output of one test: the test's name if it is printed, the host of each group's ranks, and the rows."""

    test: str | None = None
    host_of: dict[tuple[int, int], str] = field(default_factory=dict)
    rows: list[_Row] = field(default_factory=list)


def read_nccl_tests(text: str, source: str) -> tuple[Collective, ...]:
    """Return the out-of-place collectives between hosts from the output of one or several tests.

    `source` names the text in error messages. Raises ConfigError if the text has no collective between hosts.
    """
    runs = [run for run in _runs(text) if run.rows]
    if not runs:
        raise ConfigError(
            f"{source} contains neither results of nccl-tests nor a profile. Use the printed output of {_USABLE}, or a "
            f"profile that megabench calibrate has measured on several hosts."
        )
    if any(not run.host_of for run in runs):
        raise ConfigError(
            f'{source} has results without lines "#  Rank  0 … on HOST device  0", so the hosts are unknown. Use the '
            f"whole output of nccl-tests."
        )
    across = [run for run in runs if len(set(run.host_of.values())) > 1]
    if not across:
        raise ConfigError(
            f"{source} was measured on one host ({runs[0].host_of.popitem()[1]}). Run nccl-tests on at least two "
            f"hosts, built with MPI=1."
        )
    found = [one for run in across if (kind := _kind_of(run)) for one in _collectives(run, kind, source)]
    if not found:
        tests = sorted({f"{run.test}_perf" if run.test else "a test without a name" for run in across})
        raise ConfigError(f"{source} has only results of {', '.join(tests)}. Use the output of {_USABLE}.")
    return tuple(found)


def _runs(text: str) -> list[_Run]:
    """Return the tests of a text. Each test prints its name and its ranks before its results."""
    runs = [_Run()]
    for line in text.splitlines():
        test, rank, row = _TEST.search(line), _RANK.search(line), _ROW.search(line)
        seat = (int(rank["group"] or 0), int(rank["rank"])) if rank else None
        last = runs[-1]
        if (test and last.host_of) or (rank and last.rows) or seat in last.host_of:
            runs.append(_Run())  # also after a test that printed its ranks and failed
        if test:
            runs[-1].test = test[1]
        elif seat and rank:
            runs[-1].host_of[seat] = rank["host"]
        elif row and (num_bytes := int(row["bytes"])) and (microseconds := float(row["microseconds"])):
            is_reduction = row["operation"] not in (None, "none")
            runs[-1].rows.append(_Row(num_bytes, is_reduction, microseconds / 1e6, float(row["bus_gb_per_s"])))
    return runs


def _kind_of(run: _Run) -> Kind | None:
    """Return the kind of a test, or None if its collectives are not usable.

    Older versions do not print the test's name. Their kind follows from the reduction and from the factor between
    bytes per second and bus bandwidth (doc/PERFORMANCE.md of nccl-tests). An all-to-all has the factor of an
    all-gather.
    """
    if run.test:
        return _KINDS.get(run.test)
    row = max(run.rows, key=lambda row: row.bus_gb_per_s)
    factor = row.bus_gb_per_s * 1e9 * row.seconds / row.num_bytes
    size = len(run.host_of) / len({group for group, _ in run.host_of})
    part = (size - 1) / size
    factors: dict[Kind, float] = (
        {"all_reduce": 2 * part, "reduce_scatter": part} if row.is_reduction else {"all_gather": part, "send": 1.0}
    )
    kind = min(factors, key=lambda kind: abs(factor / factors[kind] - 1))
    return kind if kind != "send" and abs(factor / factors[kind] - 1) < _MOST_WRONG else None


def _collectives(run: _Run, kind: Kind, source: str) -> list[Collective]:
    """Return the collectives of a test. Raises ConfigError if its groups or hosts are not alike."""
    ranks_at: dict[tuple[int, str], int] = {}  # by group and host
    for (group, _), host in run.host_of.items():
        ranks_at[group, host] = ranks_at.get((group, host), 0) + 1
    groups, hosts = {group for group, _ in ranks_at}, {host for _, host in ranks_at}
    num_hosts = {sum(group == other for other, _ in ranks_at) for group in groups}
    num_groups = {sum(host == other for _, other in ranks_at) for host in hosts}
    ranks_per_host = set(ranks_at.values())
    if max(map(len, (num_hosts, num_groups, ranks_per_host))) > 1:
        raise ConfigError(
            f"{source} has hosts with different numbers of ranks ({', '.join(sorted(hosts))}). Run nccl-tests with "
            f"equally many GPUs on each host."
        )
    where = num_hosts.pop(), ranks_per_host.pop()
    return [Collective(kind, *where, row.num_bytes, row.seconds, max(num_groups)) for row in run.rows]
