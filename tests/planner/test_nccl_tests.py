"""The output of nccl-tests is read in the layouts of several versions, and unusable output is refused."""

from pathlib import Path

import pytest

from megabench.cost.fabric import Collective
from megabench.cost.fabric_files import read_fabric
from megabench.cost.nccl_tests import read_nccl_tests
from megabench.errors import UserError
from tests.planner.nccl_output import output

GATHERS = tuple(Collective("all_gather", 2, 8, 2.0**power, 2.0**power / 90e9) for power in (26, 28, 30))
REDUCTIONS = tuple(Collective("all_reduce", 2, 8, one.num_bytes, one.seconds) for one in GATHERS)
SCATTERS = tuple(Collective("reduce_scatter", 2, 8, one.num_bytes, one.seconds) for one in GATHERS)
EXCHANGES = tuple(Collective("all_to_all", 2, 8, one.num_bytes, one.seconds) for one in GATHERS)


def read(text: str) -> tuple[Collective, ...]:
    """The collectives, with the microseconds of the text rounded as in `GATHERS`."""
    found = read_nccl_tests(text, "nccl.log")
    exact = {one.num_bytes: one.seconds for one in GATHERS}
    assert all(one.seconds == pytest.approx(exact[one.num_bytes], rel=1e-4) for one in found)
    return tuple(
        Collective(one.kind, one.num_hosts, one.ranks_per_host, one.num_bytes, exact[one.num_bytes])
        for one in found
        if one.groups_per_host == 1
    )


@pytest.mark.parametrize(
    ("rows", "test", "layout"),
    [
        (GATHERS, "all_gather_perf", {"redop": "none"}),
        (GATHERS, None, {"redop": "none"}),
        (GATHERS, None, {"redop": ""}),  # an empty cell
        (GATHERS, None, {"redop": None, "root": "", "has_groups": False}),
        (REDUCTIONS, "all_reduce_perf_mpi", {}),
        (REDUCTIONS, None, {"root": "", "has_groups": False}),
        (SCATTERS, "reduce_scatter_perf", {}),
        (SCATTERS, None, {}),
        (EXCHANGES, "alltoall_perf", {"redop": "none"}),
        (GATHERS, "all_gather_perf", {"redop": "none", "prefix": "[1,0]<stdout>:"}),
        (GATHERS, "all_gather_perf", {"redop": "none", "prefix": " 0: "}),
    ],
)
def test_layouts_of_several_versions(rows, test, layout):
    assert read(output(rows, test, **layout)) == rows


def test_several_tests_in_one_file():
    texts = [output(GATHERS, "all_gather_perf", redop="none"), output(REDUCTIONS, "all_reduce_perf")]
    assert read("\n".join([*texts, "# Collective test concluded: all_reduce_perf"])) == GATHERS + REDUCTIONS
    unnamed = [output(GATHERS, redop=None, root=""), output(REDUCTIONS), output(SCATTERS)]
    assert read("\n".join(unnamed)) == GATHERS + REDUCTIONS + SCATTERS


def test_rows_without_bytes_and_tests_on_one_host_are_left_out():
    alone = output([Collective("all_gather", 1, 8, 2.0**30, 0.01)], "all_gather_perf", redop="none")
    empty = "           0             0     float    none      -1     6.36    0.00    0.00      0\n"
    assert read(alone + output(GATHERS, "all_gather_perf", redop="none") + empty) == GATHERS


def test_split_communicators_are_groups_at_once():
    """With NCCL_TESTS_SPLIT_MASK=7, each group has one GPU of each host."""
    split = Collective("all_gather", 4, 1, 2.0**28, 0.02, groups_per_host=8)
    (found,) = read_nccl_tests(output([split], "all_gather_perf", redop="none"), "nccl.log")
    assert (found.num_hosts, found.ranks_per_host, found.groups_per_host) == (4, 1, 8)


SEND = [Collective("send", 2, 8, 2.0**28, 0.01)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nothing of the kind\n", "neither results of nccl-tests nor a profile"),
        (output(GATHERS).replace("# ", "- "), "the hosts are unknown. Use the whole output"),
        (output(GATHERS, hosts=["host-a", "host-a"]), r"measured on one host \(host-a\)"),
        (output(SEND, "sendrecv_perf", redop="none"), "has only results of sendrecv_perf. Use the"),
        (output(SEND, redop="none"), "has only results of a test without a name"),
        (
            output(GATHERS, "all_gather_perf", hosts=["a", "b", "b"]),
            r"hosts with different numbers of ranks \(a, b\)",
        ),
    ],
)
def test_unusable_output_is_refused(tmp_path: Path, text, said):
    path = tmp_path / "nccl.log"
    path.write_text(text)
    with pytest.raises(UserError, match=said) as raised:
        read_fabric(path)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"cannot read .*; use the path of a readable file"):
        read_fabric(tmp_path)


def test_repeated_sizes_count_once(tmp_path: Path):
    path = tmp_path / "nccl.log"
    slow = [Collective("all_gather", 2, 8, one.num_bytes, 9 * one.seconds) for one in GATHERS]
    path.write_text("".join(output(rows, "all_gather_perf") for rows in (GATHERS, slow, GATHERS)))
    found = read_fabric(path)
    assert found.source == str(path)
    assert [one.bus_gb_per_s for one in found.collectives] == pytest.approx([one.bus_gb_per_s for one in GATHERS], 1e-3)


@pytest.mark.parametrize("test", ["all_gather_perf", None])
def test_ranks_of_a_test_that_failed_are_not_those_of_the_next(test):
    failed = output([Collective("all_gather", 16, 8, 1.0, 1.0)], test, redop="none")
    failed = "".join(line for line in failed.splitlines(keepends=True) if line.startswith("#"))
    found = read_nccl_tests(failed + output(GATHERS, test, redop="none"), "nccl.log")
    assert {(one.num_hosts, one.ranks_per_host) for one in found} == {(2, 8)}


@pytest.mark.parametrize("time", ["1.2.3", "1e400", "1e-320", "-5"])
def test_impossible_times_are_not_results(time):
    text = output(GATHERS[:1], "all_gather_perf", redop="none")
    row = next(line for line in text.splitlines() if line.strip()[:1].isdigit())
    words = row.split()
    broken = text.replace(row, row.replace(words[5], time))
    with pytest.raises(UserError, match="contains neither results of nccl-tests nor a profile"):
        read_nccl_tests(broken, "nccl.log")
