"""Crossovers: which networks trials ran on, where curves cross ZeRO-3's, what is predicted, and what is said of it."""

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from megabench.cost.profile import profile_for
from megabench.hardware.topology import Host, build
from megabench.planner.costs import Costs
from megabench.planner.predict import candidate_of, job_of
from megabench.record import (
    EmulatedNetworkUsed,
    Group,
    LayoutSizes,
    LinkBandwidth,
    RunRecord,
    StepSeconds,
)
from megabench.study.answers import Answer, answer
from megabench.study.crossover import Crossing, Crossover, Place, crossings, marks
from megabench.study.parity import judge_parity
from megabench.study.summary import summarize
from megabench.study.table import markdown, show
from tests.study.records import make_record, work_class

H100 = "NVIDIA H100 80GB HBM3"
ZERO3: dict[str, Any] = {"engine": "deepspeed", "options": {"zero_stage": 3, "recompute": "none"}}
FSDP: dict[str, Any] = {"engine": "fsdp"}
PP2: dict[str, Any] = {"layout": LayoutSizes(tp=1, cp=1, pp=2, vp=2, dp=1)}
TP2: dict[str, Any] = {"layout": LayoutSizes(tp=2, cp=1, pp=1, vp=1, dp=1)}


def trial(name: str, gb_per_s: float | None, speed: float, batch: int = 16, device: str = H100, **changes) -> RunRecord:
    """A trial of Llama-3-8B with 12 layers on two emulated hosts, or on one host over NVLink without `gb_per_s`."""
    limit = EmulatedNetworkUsed(gb_per_s=gb_per_s, latency_us=0) if gb_per_s else None
    work = {"model": "llama3-8b", "precision": "bf16", "seq_length": 4096, "global_batch": batch}
    seconds = batch * 4096 / (2 * speed)
    fields = {
        **work,
        "trial": f"{name}-{batch}-{gb_per_s}",
        "device": device,
        "micro_batch": 1,
        "num_hosts": 2 if gb_per_s else 1,
        "emulated_hosts": 2 if gb_per_s else None,
        "emulated_network": limit,
        "work_class": work_class(num_layers=12, **work),
        "step_seconds": StepSeconds(median=seconds, p10=seconds, p90=seconds, all=[seconds]),
    }
    return make_record([6.0, 5.9], speed, **fields | changes)


def curve(name: str, speeds: dict[float | None, float], batch: int = 16, **changes) -> list[RunRecord]:
    return [trial(name, rate, speed, batch, **changes) for rate, speed in speeds.items()]


def found_in(records: list[RunRecord]) -> Crossover:
    return Crossover(summarize(records, records[0].trial), records)


def answered(records: list[RunRecord]) -> Answer:
    reference = records[0].trial
    return answer(judge_parity(records, reference), reference, "crossover")


def test_a_crossing_is_interpolated_between_near_points_alone():
    (near,) = crossings([(1.5, 4.0), (3.0, 2.0), (6.0, 0.5)])
    assert (near.low, near.high, near.is_faster_below) == (3.0, 6.0, True)
    assert near.at == pytest.approx(18**0.5)
    assert crossings([(6.0, 2.0), (450.0, 0.5)]) == [Crossing(6.0, 450.0, None, is_faster_below=True)]
    assert [one.is_faster_below for one in crossings([(1, 0.5), (2, 2.0), (3, 0.9)])] == [False, True]
    assert crossings([(1, 1.0), (2, 0.9)]) == [], "equal is not faster"


def test_the_answer_names_the_bandwidth_below_which_a_pipeline_is_faster():
    records = curve("zero3", {0.75: 1000, 1.5: 2000, 3: 4000, None: 8000}, **ZERO3)
    records += curve("pp2", {0.75: 2000, 1.5: 2500, 3: 3200, None: 7000}, **PP2)
    records += curve("tp2", {0.75: 100, 1.5: 200, 3: 400, None: 8800}, **TP2)
    found = answered(records)
    assert found.headline == "Below about 2.1 GB/s per GPU, PP2·VP2 is faster than ZeRO-3."
    tp2 = found.particulars[0]
    assert tp2.startswith("Above some bandwidth between 3 and 450 GB/s per GPU") and "TP2 is faster than ZeRO-3" in tp2
    points, errors = found.tables
    assert points.heads == ("work", "network, per GPU", "fastest ZeRO-3", "PP2·VP2, ×", "TP2, ×")
    assert [row[1] for row in points.rows] == ["0.75 GB/s", "1.5 GB/s", "3 GB/s", "NVLink"]
    assert points.rows[0][3].startswith("2.00 [") and points.rows[3][4].startswith("1.10 [")
    assert [row[:2] for row in errors.rows] == [(row[1], "3") for row in points.rows]


def test_the_tables_are_printed_in_the_terminal_and_as_markdown():
    records = curve("zero3", {0.75: 1000}, **ZERO3) + curve("pp2", {0.75: 2000}, **PP2)
    judged, output = judge_parity(records, records[0].trial), StringIO()
    show(Console(file=output, width=200, color_system=None), judged, records[0].trial, "crossover")
    for text in (output.getvalue(), markdown(judged, records[0].trial, "crossover")):
        assert "Throughput relative to the fastest trial with ZeRO-3; in brackets, as predicted:" in text
        assert "PP2·VP2, × |" in text and "| 16 sequences a step |" in text and "| 2.00 [" in text
        assert "Errors of the predicted step times:" in text and "largest error |" in text


def test_batches_with_the_same_answer_are_named_together():
    records: list[RunRecord] = []
    for batch, pipeline in ((16, 3000), (64, 3000), (256, 500)):
        records += curve("zero3", {0.75: 1000, 1.5: 1000}, batch, **ZERO3)
        records += curve("pp2", {0.75: pipeline, 1.5: pipeline}, batch, **PP2)
    assert answered(records).headline == (
        "PP2·VP2 is faster than ZeRO-3 on every measured network at 16 and 64 sequences a step; on no measured network "
        "at 256 sequences a step."
    )


def test_the_answer_says_so_where_nothing_crosses_or_is_known():
    zero3 = curve("zero3", {0.75: 1000, 1.5: 1000}, **ZERO3)
    slower, faster = (curve("pp2", {0.75: speed, 1.5: speed}, **PP2) for speed in (900, 1100))
    assert answered([*zero3, *slower]).headline == "On no measured network is a layout faster than ZeRO-3."
    assert answered([*zero3, *faster]).headline == "PP2·VP2 is faster than ZeRO-3 on every measured network."
    alone = "PP2·VP2 is faster than ZeRO-3 on every measured network (0.75 GB/s per GPU alone)."
    assert answered([*zero3, faster[0]]).headline == alone
    assert answered(faster).headline == "Not known: no trial trains with ZeRO-3 or FSDP2."
    apart = answered([zero3[0], faster[1]])
    assert apart.headline == "Not known: no network has a result of a layout and one of ZeRO-3."


def test_the_baseline_is_the_faster_of_zero3_and_fsdp_with_their_best_settings():
    records = curve("zero3", {0.75: 1000}, **ZERO3) + curve("fsdp", {0.75: 1250}, **FSDP)
    records += curve("fsdp-small", {0.75: 1200}, **FSDP, micro_batch=2)
    broken = trial("fsdp-broken", 0.75, 9000, **FSDP, status="failed", error="lost")
    records += [broken, *curve("pp2", {0.75: 2500}, **PP2), *curve("pp2-small", {0.75: 2300}, micro_batch=2, **PP2)]
    found = found_in(records)
    (work,), (place,) = found.works, found.places
    assert (found.baselines, found.methods) == (["ZeRO-3", "FSDP2"], ["PP2·VP2"])
    assert found.ratio(work, "PP2·VP2", place) == 2.0
    assert answered(records).headline == (
        "PP2·VP2 is faster than ZeRO-3 and FSDP2 on every measured network (0.75 GB/s per GPU alone)."
    )


def test_places_of_limited_networks_of_sockets_and_of_one_host():
    layout = LayoutSizes(tp=2, cp=1, pp=2, vp=1, dp=1)
    four = [trial("four", 3.0, 1000, world_size=4, layout=layout)]
    assert found_in(four).places == [Place(2, 1.5, is_limited=True)], "two GPUs share the network of a host"
    slow = EmulatedNetworkUsed(gb_per_s=3.0, latency_us=50)
    assert found_in([trial("slow", 3.0, 1000, emulated_network=slow)]).places[0].label == "3 GB/s, 50 µs"
    sockets = [
        trial("dp2", None, 1000, trial=f"dp2-{rate}", num_hosts=2, emulated_hosts=2, link_bandwidth=bandwidth(rate))
        for rate in (6.0, 6.2, 7.0)
    ]
    failed = trial("dp2", None, 1, trial="lost", num_hosts=None, emulated_hosts=2, status="failed", error="lost")
    limited = trial("dp2", 1.5, 900, link_bandwidth=bandwidth(1.4))
    places = found_in([*sockets, failed, limited]).places
    assert places == [Place(2, 1.5, is_limited=True), Place(2, 6.2)], "the median of the runs without a limit"
    assert places[1].label == "6.2 GB/s, not limited"
    assert found_in([trial("dp2", None, 1000)]).places[0].label == "NVLink"
    shm = [Group(kind="dp", ranks=[0, 1], link="shm")]
    assert found_in([trial("dp2", None, 1000, groups=shm)]).places == [Place(1, None)]


def bandwidth(rate: float) -> LinkBandwidth:
    return LinkBandwidth(all_gather_gb_per_s=rate - 1, send_recv_gb_per_s=1, all_rings_gb_per_s=rate, num_bytes=1)


def test_predictions_are_the_planners_and_their_errors_are_by_network():
    records = [*curve("zero3", {0.75: 1000, 3: 1000}, **ZERO3), *curve("pp2", {0.75: 1000, 3: 1000}, **PP2)]
    hosts = [(Host("h", H100, "pcie", "socket", network_gbits=24, nvlink_gb_per_s=450), 1, 1)] * 2
    candidate = candidate_of(records[3])
    assert candidate
    expected = Costs(job_of(records[3]), build(hosts), profile_for(H100)).estimate(candidate).step_seconds
    found = found_in(records)
    (work,), (slow, fast) = found.works, found.places
    assert found.predicted_seconds(work, "PP2·VP2", fast) == expected
    twice = StepSeconds(median=2 * expected, p10=1, p90=1, all=[1])
    again = found_in([*records[:3], records[3].model_copy(update={"step_seconds": twice})])
    of_slow, of_fast = again.errors
    assert of_fast.of_trials[1] == pytest.approx(-0.5) and of_slow.of_trials == found.errors[0].of_trials
    assert of_fast.mean == pytest.approx((abs(of_fast.of_trials[0]) + 0.5) / 2)
    zero3 = found.predicted_seconds(work, "ZeRO-3", fast)
    assert zero3 and found.predicted_ratio(work, "PP2·VP2", fast) == zero3 / expected > 1
    rates = [rate for rate, _ in found.curve(work, "PP2·VP2")]
    assert (rates[0], rates[-1]) == (pytest.approx(0.75), pytest.approx(100))
    assert found.curve(work, "PP2·VP2")[0][1] == pytest.approx(found.predicted_ratio(work, "PP2·VP2", slow))


def test_two_gpus_of_a_host_share_its_network_in_predictions():
    layout = LayoutSizes(tp=1, cp=1, pp=1, vp=1, dp=4)
    records = [trial(name, 3.0, 1000, world_size=4, layout=layout, **kind) for name, kind in (("z", ZERO3), ("d", {}))]
    hosts = [(Host("h", H100, "pcie", "socket", network_gbits=24, nvlink_gb_per_s=450), 2, 2)] * 2
    candidate = candidate_of(records[1])
    assert candidate
    expected = Costs(job_of(records[1]), build(hosts), profile_for(H100)).estimate(candidate).step_seconds
    found = found_in(records)
    assert found.predicted_seconds(found.works[0], "DP4", found.places[0]) == expected


def test_the_headline_is_about_the_layout_that_is_best_on_the_slowest_network():
    records = curve("zero3", {0.75: 1000, 3: 1000}, **ZERO3) + curve("pp2", {0.75: 1500, 3: 900}, **PP2)
    assert answered([*records, *curve("tp2", {3: 9000}, **TP2)]).headline.endswith("PP2·VP2 is faster than ZeRO-3.")


def test_what_was_not_measured_is_named_with_its_prediction():
    records = [*curve("zero3", {0.75: 1000, 3: 2000}, **ZERO3), *curve("tp2", {3: 900}, **TP2)]
    found = found_in(records)
    assert found.not_measured == [(found.works[0], "TP2", Place(2, 0.75, is_limited=True))]
    seconds = found.predicted_seconds(*found.not_measured[0])
    assert seconds and seconds > 10
    said = answered(records)
    assert (
        f"Without a result: TP2 at 16 sequences a step and 0.75 GB/s (predicted {seconds:.3g} s)." in said.particulars
    )
    assert said.tables[0].rows[0][3].startswith("– [")


def test_a_layout_without_a_trial_of_some_work_has_the_settings_of_its_other_trials():
    records = [*curve("zero3", {3: 1000}, 16, **ZERO3), *curve("zero3", {3: 1000}, 64, **ZERO3)]
    records += curve("tp2", {3: 900}, 16, **TP2)
    found = found_in(records)
    small, large = found.works
    place = found.places[0]
    one, four = (found.predicted_seconds(work, "TP2", place) for work in (small, large))
    assert one and four and 3 < four / one < 4.5
    own = trial("tp2", 3, 900, 64, micro_batch=8, **TP2)
    with_own = found_in([*records, own]).predicted_seconds(large, "TP2", place)
    assert with_own != four and with_own == found_in([records[1], own]).predicted_seconds(large, "TP2", place)
    wide = found_in([*records[:2], *curve("tp2", {3: 900}, 64, micro_batch=32, **TP2)])
    assert wide.predicted_seconds(small, "TP2", place) is None, "16 sequences are no micro-batch of 32"


def test_a_failed_trial_is_predicted_with_the_layers_of_the_others():
    records = [*curve("zero3", {3: 1000}, **ZERO3), *curve("tp2", {3: 900}, **TP2)]
    failed = records[1].model_copy(update={"status": "oom", "work_class": None, "step_seconds": None, "error": "full"})
    whole, lost = found_in(records), found_in([records[0], failed])
    cell = whole.works[0], "TP2", whole.places[0]
    assert lost.measured.keys() == whole.measured.keys() - {cell}
    assert lost.predicted_seconds(*cell) == whole.predicted_seconds(*cell)


def test_trials_on_other_numbers_of_gpus_are_left_out():
    records = [*curve("zero3", {3: 1000}, **ZERO3), *curve("pp2", {3: 1100}, **PP2)]
    layout = LayoutSizes(tp=1, cp=1, pp=4, vp=1, dp=1)
    other = trial("pp4", 3, 9000, world_size=4, layout=layout)
    assert found_in([*records, other]).methods == ["PP2·VP2"]
    assert "Left out: 1 trial on another number or kind of devices." in answered([*records, other]).particulars


def test_cpus_have_measured_points_and_no_predictions():
    cpu: dict[str, Any] = {"device": "cpu"}
    records = [*curve("zero3", {0.1: 100, 0.3: 300}, **ZERO3, **cpu), *curve("pp2", {0.1: 200, 0.3: 150}, **PP2, **cpu)]
    found = answered([*records, trial("zero3", None, 400, **ZERO3, **cpu)])
    assert found.headline.startswith("Below about 0.17 GB/s per process, PP2·VP2 is faster than ZeRO-3")
    assert len(found.tables) == 1 and [row[1] for row in found.tables[0].rows][-1] == "one host"
    assert not any("predicted" in sentence for sentence in found.particulars)


def test_marks_are_the_networks_of_instances_per_gpu():
    assert marks(H100) == [("ENI of p4d", 1.5625), ("p4d", 6.25), ("p5, p5en", 50), ("NVLink", 450)]
    assert "NVLink" not in dict(marks("NVIDIA L4"))
