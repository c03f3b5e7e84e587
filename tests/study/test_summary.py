"""The table: best first, ratios inside a work class only, and nothing bad ranked among the good."""

import csv
import io
from typing import Any

import pytest
from rich.console import Console

from megabench.record import EmulatedNetworkUsed, RunRecord
from megabench.study.parity import judge_parity
from megabench.study.summary import summarize, write_csv
from megabench.study.table import show
from tests.study.records import make_record, work_class

ZERO3: dict[str, Any] = {"trial": "zero3", "engine": "deepspeed", "options": {"zero_stage": 3}}


def shown(records, reference="zero3", width=250) -> str:
    written = io.StringIO()
    console = Console(file=written, width=width)
    show(console, judge_parity(records, reference), reference, "fastest")
    return written.getvalue()


def trials_in(table: str) -> list[str]:
    """The first column of all tables, heads aside."""
    lines = [line for line in table.splitlines() if line.startswith("|") and not line.startswith("|-")]
    return [name for line in lines if (name := line.split("|")[1].strip()) != "trial"]


def lost(**fields: Any) -> RunRecord:
    """A record without a result."""
    measured = ("tokens_per_second", "tokens_per_second_per_device", "step_seconds", "model_tflops_per_device")
    fields = {"status": "failed", "error": "rank 1 failed", "work_class": None, "peak_memory_gib": None} | fields
    return make_record([], **dict.fromkeys(measured), **fields)


def test_best_first_and_the_others_behind():
    records = [
        lost(trial="broken"),
        make_record([6.0], 1000, **ZERO3),
        make_record([6.0], 1430, trial="tp2"),
        make_record([9.0], 9000, trial="wrong"),
        make_record([6.0], 500, trial="tp4"),
    ]
    text = shown(records)
    assert trials_in(text) == ["tp2", "zero3", "tp4", "wrong", "broken"]
    assert text.startswith(
        "tp2 trains fastest: 1,430 tokens/s per process, 1.43 × ZeRO-3 (zero3: 1,000). "
        "Not confirmed: each trial ran once.\n"
    )
    assert "× ZeRO-3 |" in text
    assert "DIVERGED 0.5 | DIVERGED" in text and "broken (failed): rank 1 failed" in text
    assert "wrong (DIVERGED): its losses differ from those of zero3" in text
    assert [row.ratio for row in summarize(judge_parity(records, "zero3"), "zero3")] == [1.43, 1.0, 0.5, None, None]


def test_zero3_wins_in_the_same_words():
    text = shown([make_record([6.0], 1000, **ZERO3), make_record([6.0], 900, trial="tp2")])
    assert "No layout beat it; the next, tp2, reached 0.90 × ZeRO-3. Not confirmed: each trial ran once.\n" in text


ONE_HOST = {"num_hosts": 1, "world_size": 2, "device": "NVIDIA H200"}
TWO_HOSTS = ONE_HOST | {"num_hosts": 2, "emulated_hosts": 2}


def test_each_number_of_hosts_has_its_own_fastest():
    """One layout wins where GPUs share a host, another where a slow link lies between them."""
    records = [
        make_record([6.0], 1000, **ZERO3, **ONE_HOST),
        make_record([6.0], 1200, trial="dp", **ONE_HOST),
        make_record([6.0], 400, **ZERO3 | {"trial": "zero3-across"}, **TWO_HOSTS),
        make_record([6.0], 1100, trial="pp2-across", **TWO_HOSTS),
    ]
    text = shown(records)
    assert text.startswith(
        "dp trains fastest: 1,200 tokens/s per GPU, 1.20 × ZeRO-3 (zero3: 1,000). Not confirmed: each trial ran once.\n"
    )
    assert "On 2 GPUs of 1 host, dp is fastest, 1.20 × ZeRO-3 there (zero3).\n" in text
    assert "On 2 GPUs of 2 emulated hosts, pp2-across is fastest, 2.75 × ZeRO-3 there (zero3-across).\n" in text
    assert "On 2" not in shown(records[:2])
    slow = {"emulated_network": EmulatedNetworkUsed(gb_per_s=0.5, latency_us=0)}
    text = shown([*records, make_record([6.0], 90, trial="pp2-slow", **slow, **TWO_HOSTS)])
    assert "On 2 GPUs of 2 emulated hosts at 0.5 GB/s, pp2-slow is the only trial.\n" in text
    late = {"emulated_network": EmulatedNetworkUsed(gb_per_s=0.5, latency_us=40)}
    both = [make_record([6.0], 90, trial=name, **network, **TWO_HOSTS) for name, network in (("a", slow), ("b", late))]
    assert "at 0.5 GB/s and 40 µs, b is the only trial.\n" in shown([*records, *both])
    assert "On 2 GPUs of 2 emulated hosts, pp2-across is fastest" in text and "| 2 emulated at 0.5 GB/s |" in text


def test_a_place_has_no_winner_within_the_spread_and_zero3_none_over_itself():
    def of(name: str, *speeds: float, **fields):
        return [make_record([6.0], speed, **fields | {"trial": name, "repeat": n}) for n, speed in enumerate(speeds)]

    records = [
        *of("zero3", 1000, 1010, **ZERO3, **ONE_HOST),
        *of("zero3-slow", 900, 910, **ZERO3, **ONE_HOST),
        *of("tp2-across", 500, 520, **TWO_HOSTS),
        *of("dp-across", 510, 490, **TWO_HOSTS),
    ]
    text = shown(records)
    assert "On 2 GPUs of 1 host, zero3 is fastest.\n" in text
    assert "On 2 GPUs of 2 emulated hosts, tp2-across and dp-across are equal within their spread.\n" in text


def test_the_first_of_a_class_is_no_evidence_of_itself():
    alone = {"trial": "alone", "work_class": work_class(seed=2)}
    records = [make_record([6.0], 1000, **ZERO3), make_record([5.0], 900, **alone)]
    text = shown(records)
    assert "| reference |" in text and "equal 0" not in text
    assert "equal 0 " in shown([*records, make_record([5.0], 900, repeat=1, **alone)]), "but its second run is"
    assert "DIVERGED 0.2 " in shown([*records, make_record([6.0], 900, repeat=1, **alone)])


def test_another_reference_is_named_in_the_head():
    text = shown([make_record([6.0], 1000, trial="tp2"), make_record([6.0], 1500, trial="tp4")], "tp2")
    assert (
        "| × tp2 |" in text
        and "tp4 trains fastest: 1,500 tokens/s per process, 1.50 × tp2 (1,000). Not confirmed: each trial ran once.\n"
        in text
        and "ZeRO" not in text
    )


def test_no_ratio_without_a_result_of_the_reference():
    text = shown([lost(**ZERO3), make_record([6.0], 1000, trial="tp2")])
    assert (
        "tp2 is the only trial with a result: 1,000 tokens/s per process. There was nothing to compare it with." in text
    )
    assert "No trial has a result that counts: zero3 failed." in shown([lost(**ZERO3)])


def test_a_trial_without_a_result_joins_the_trials_that_requested_equal_work():
    other = {"work_class": work_class(precision="fp8"), "precision": "fp8"}
    text = shown(
        [
            make_record([5.0], 9000, trial="fp8", **other),
            lost(trial="broken-fp8", precision="fp8"),
            make_record([6.0], 1000, **ZERO3),
            lost(trial="broken"),
        ]
    )
    assert trials_in(text) == ["zero3", "broken", "fp8", "broken-fp8"]


def test_work_classes_are_never_ranked_together():
    other = work_class(seed=2)
    text = shown(
        [
            make_record([5.0], 9000, trial="other", work_class=other),
            make_record([6.0], 1000, **ZERO3),
            make_record([6.0], 1100, trial="tp2"),
            lost(trial="broken"),
        ]
    )
    assert trials_in(text) == ["tp2", "zero3", "other", "broken"]
    assert "work 1: llama-tiny" in text and "seed=1234" in text and "seed=2" in text
    assert "tp2 trains fastest: 1,100 tokens/s per process, 1.10 × ZeRO-3" in text
    assert "seed=2: other is the only trial with a result: 9,000 tokens/s" in text
    assert "throughput × ZeRO-3 |" in text and "equal work" not in text, "no class but the first has a reference"


def test_each_work_class_is_measured_by_a_zero3_trial_of_its_own():
    other = work_class(global_batch=64)
    slow, fast = ({"trial": name, "work_class": other} for name in ("zero3-64", "tp2-64"))
    records = [
        make_record([6.0], 1000, **ZERO3),
        make_record([6.0], 1200, trial="tp2"),
        make_record([5.0], 900, **fast),
        make_record([5.0], 600, **ZERO3 | slow),
    ]
    rows = {row.trial: row for row in summarize(judge_parity(records, "zero3"), "zero3")}
    assert {name: (row.reference, row.ratio) for name, row in rows.items()} == {
        "tp2": ("zero3", 1.2),
        "zero3": ("zero3", 1.0),
        "tp2-64": ("zero3-64", 1.5),
        "zero3-64": ("zero3-64", 1.0),
    }
    assert rows["tp2-64"].parity == "equal"
    by_tp2 = {row.trial: row.ratio for row in summarize(judge_parity(records, "tp2"), "tp2")}
    assert by_tp2["tp2-64"] is None, "ZeRO-3 stands in for ZeRO-3 alone"


def test_repeats_are_one_row_with_their_spread():
    records = [make_record([6.0], speed, repeat=n, **ZERO3) for n, speed in enumerate((900.0, 1000.0, 1200.0))]
    text = shown([*records, make_record([6.0], 1, trial="tp2"), lost(trial="tp2", repeat=1)])
    assert "1,000 (900–1,200)" in text
    assert trials_in(text) == ["zero3", "tp2"]
    assert "tp2 (failed): 1 of 2 runs: rank 1 failed" in text


def test_mfu_is_shown_when_it_is_known_and_cpu_is_called_cpu():
    cpu = shown([make_record([6.0], **ZERO3)])
    assert "MFU" not in cpu and "These are CPU timings: no evidence about GPUs." in cpu
    gpu = shown([make_record([6.0], mfu=0.412, device="NVIDIA H200", **ZERO3)])
    assert "41.2%" in gpu and "CPU timings" not in gpu


@pytest.mark.parametrize("width", [70, 80, 100])
def test_a_narrow_terminal_keeps_what_matters(width):
    text = shown([make_record([6.0], 1000, **ZERO3), make_record([6.0], 1430, trial="tp2-pp2")], width=width)
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert max(map(len, table)) <= width
    assert len(table) == 4, "no cell is folded"
    assert all(
        word in text
        for word in ("1,430", "1.43", "reference", "columns omitted because the terminal is narrow: engine")
    )


def test_the_csv_has_the_same_rows(tmp_path):
    records = [
        make_record([6.0], 1000, **ZERO3, gpu_watts=500.0, samples_per_second=2.0, wire_bytes={"dp": 3e9, "tp": 1e9}),
        lost(trial="tp2"),
    ]
    write_csv(tmp_path / "summary.csv", records, "zero3")
    with (tmp_path / "summary.csv").open() as file:
        found = list(csv.DictReader(file))
    assert [(row["trial"], row["status"], row["tokens_per_second_per_device"]) for row in found] == [
        ("zero3", "ok", "1000.0"),
        ("tp2", "failed", ""),
    ]
    first, second = found
    assert (first["gpu_joules_per_token"], first["sent_gb_per_rank_and_step"]) == ("0.5", "4.0")
    assert (first["samples_per_second"], first["model"], first["dp"]) == (
        "2.0",
        records[0].model,
        str(records[0].layout.dp),
    )
    assert (second["gpu_watts"], second["precision"]) == ("", records[1].precision)
