"""`megabench plan` with several clusters: the same work, the ratios, and reasons that follow from the predictions."""

import io
import json
import re
from collections.abc import Sequence

import pytest
from rich.console import Console

from megabench.config import ConfigError
from megabench.planner.compare_clusters import ClusterPlan, _product_rates, _reason, as_json, make_plans, reasons, write
from megabench.planner.layout_table import Training
from megabench.planner.make_plan import make_plan
from megabench.planner.search import plan
from tests.planner.jobs import cluster, costs, job
from tests.planner.test_plan import megabench

A100, H100, H200 = "p4d.24xlarge:1:4", "p5.48xlarge:1:4", "p5e.48xlarge:1:4"


def plans(
    *clusters: str,
    model: str = "qwen3-0.6b",
    global_batch: int | None = 128,
    tokens: float = 100e9,
    prices: Sequence[float | None] | None = None,
) -> list[ClusterPlan]:
    trainings = [Training(tokens, price) for price in prices or [None] * len(clusters)]
    return make_plans(
        clusters,
        trainings,
        lambda one: make_plan(model, one, None, global_batch, None, "fp32", None, top=12, emulate_hosts=None),
    )


def shown(compared: list[ClusterPlan], width: int = 220) -> str:
    written = io.StringIO()
    write(Console(file=written, width=width), compared)
    return written.getvalue()


def test_every_pair_is_compared_and_the_faster_comes_first():
    found = json.loads(as_json(plans(A100, H100, H200), top=3))
    speeds = {one["cluster"]: one["tokens_per_second"] for one in found["clusters"]}
    assert [(one["faster"], one["slower"]) for one in found["ratios"]] == [(H200, H100), (H200, A100), (H100, A100)]
    for one in found["ratios"]:
        assert one["ratio"] == pytest.approx(speeds[one["faster"]] / speeds[one["slower"]]) and one["ratio"] > 1
        assert one["reasons"]
    days = found["clusters"][0]["days"]
    assert days == pytest.approx(100e9 / speeds[A100] / 86400)
    assert all(len(one["plan"]["ranked"]) == 3 for one in found["clusters"])


def test_reasons_name_the_parts_and_the_constants():
    slow, fast = plans(A100, H200)
    found = reasons(fast, slow)
    assert found[0].startswith("matrix products and attention take") and "at peaks of 989 and 312" in found[0]
    assert found[1].startswith("memory-bound kernels take") and "GB/s of memory bandwidth" in found[1]
    assert f"lacks 50.5 GiB per GPU on {A100}" in found[-1]
    own = costs(slow.plan.job, cluster(A100)).missing_bytes(fast.best.candidate)
    assert own / 2**30 == pytest.approx(50.5, abs=0.05)


def test_a_constant_that_does_not_explain_the_difference_is_left_out():
    slow, fast = plans(H100, H200)
    for reason in reasons(fast, slow):
        if reason.startswith("the optimizer"):
            assert "bandwidth" not in reason
    assert not any(reason.startswith("matrix products") for reason in reasons(fast, slow))  # they have the same chip
    assert "at the same peak of 989 TFLOP/s" in _product_rates(1.0, 2.0, fast, slow)


def test_recomputation_that_memory_forces_is_a_reason():
    slow, fast = plans("p4d.24xlarge:8", "p5e.48xlarge:4", model="llama3-70b", global_batch=64, tokens=15e12)
    found = reasons(fast, slow)
    assert slow.best.candidate.recompute == "full"
    assert any(one.startswith("recomputing activations takes 0.000 s") for one in found)
    assert any("p4d.24xlarge:8 needs recomputation" in one and "without it" in one for one in found)
    text = shown([slow, fast])
    assert "(32 instead of 64 GPUs" in text and "days of training on 15 trillion tokens" in text


def test_a_batch_that_does_not_divide_is_said():
    uneven = "configs/clusters/h200-uneven.yaml"
    text = shown(plans(uneven, "p5e.48xlarge:1", model="llama3-8b", global_batch=64))
    assert f"not a multiple of the 20 GPUs of {uneven}" in text and "--global-batch 80 works" in text
    with pytest.raises(ConfigError, match=r"--cluster configs/clusters/h200-uneven.yaml: 20 GPUs cannot divide gpt2"):
        plans("p4d.24xlarge:1", uneven, model="gpt2", global_batch=32)


def test_a_cluster_that_is_too_small_has_no_row():
    text = shown(plans("p4d.24xlarge:1", "p5e.48xlarge:16", model="llama3-405b", global_batch=128))
    assert "p4d.24xlarge:1: no layout of llama3-405b fits" in text and "× as fast" not in text
    assert "Only p5e.48xlarge:16 can train this." in text


def test_equal_clusters_are_called_equal():
    (one, other) = plans(H200, H200)
    assert reasons(one, other) == [] and "equal within the prediction error" in shown([one, other])


@pytest.mark.parametrize("name", ["g5.48xlarge:1", "g6e.48xlarge:2", "p5.48xlarge:1", "p4d.24xlarge:2"])
def test_no_layout_is_listed_twice(name):
    topology = cluster(name)
    found = plan(job("llama-tiny", 256, 16), topology, costs(job(), topology).profile, keep=24)
    candidates = [one.candidate for one in found.ranked]
    assert len({one.name for one in candidates}) == len(candidates)
    spread = [one.name for one in candidates if one.placement == "spread-tp"]
    assert not spread or max(len(ranks) for ranks in topology.ranks_by_domain) > 1


def test_one_table_and_one_reason_for_each_slower_cluster():
    compared = plans("p4d.24xlarge:1", "p5.48xlarge:1", "p5e.48xlarge:1", "p6-b200.48xlarge:1", model="llama3-8b")
    for width in (80, 120):
        lines = shown(compared, width).splitlines()
        assert max(len(line) for line in lines if line.startswith("|")) <= width
    assert lines[0].startswith("Fastest: p6-b200.48xlarge:1, 2.")
    whys = [line for line in lines if line.startswith("- p6-b200.48xlarge:1 is ")]
    assert [why.split(" × as fast as ")[1].split(":")[0] for why in whys] == [
        "p4d.24xlarge",
        "p5.48xlarge",
        "p5e.48xlarge",
    ]
    assert any("| p6-b200.48xlarge:1 † |" in line for line in lines) and "† never measured: p6-b200.48xlarge" in lines


def test_prices_name_the_cheapest_cluster():
    compared = plans(A100, H200, prices=[1.0, 9.0])
    text = shown(compared)
    assert text.startswith(f"Fastest: {H200}, ") and f"Cheapest: {A100}." in text.splitlines()[0]
    for plan_, price in zip(compared, (1.0, 9.0), strict=True):
        hours = 100e9 / plan_.speed / 3600
        row = next(line for line in text.splitlines() if line.startswith(f"| {plan_.cluster} "))
        assert f" {hours * plan_.num_gpus * price:,.0f} |" in row


def test_a_price_of_nothing_is_the_cheapest():
    assert f"Cheapest: {A100}." in shown(plans(A100, H200, prices=[0.0, 2.0])).splitlines()[0]


@pytest.mark.e2e
def test_the_command():
    two = ("--model", "qwen3-0.6b", "--cluster", A100, "--cluster", H200)
    ended = megabench("plan", *two)
    assert ended.returncode == 0 and f"- {H200} is " in ended.stdout and ": matrix products" in ended.stdout
    found = json.loads(megabench("plan", *two, "--json", "--tokens", "1e9").stdout)
    assert found["tokens"] == 1e9 and found["clusters"][1]["cluster"] == H200
    small = megabench("plan", "--model", "llama3-405b", "--cluster", A100, "--cluster", H200)
    assert small.returncode == 1
    one = megabench("plan", "--model", "qwen3-0.6b", "--cluster", H200, "--tokens", "100e9")
    assert one.returncode == 0 and "days of training on 100 billion tokens" in one.stdout


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--explain", "dp4 mb1", "--cluster", H200), "--explain needs a single cluster"),
        (("--layout", "dp4", "--cluster", H200), "--layout needs a single cluster"),
        (("--layout", "dp4", "--explain", "dp4 mb1"), "--explain and --layout show different things"),
        (("--measured", "19.6"), "--measured needs the layout that was measured"),
        (("--price-per-gpu-hour", "1", "--price-per-gpu-hour", "2"), "is given 2 times for 1 clusters"),
        (("--map", "--tokens", "1e12"), "--map does not use --tokens"),
        (("--map", "--price-per-gpu-hour", "0"), "--map does not use --price-per-gpu-hour"),
        (("--map", "--top", "5"), "--map does not use --top"),
        (("--map",), "--map needs an instance type and the largest number of hosts"),
    ],
)
def test_options_that_contradict_each_other_are_refused(arguments, words):
    where = "p4d" if "--map" in arguments else A100
    ended = megabench("plan", "--cluster", where, *arguments)
    assert ended.returncode == 2 and words in ended.stderr and not ended.stdout
    assert len(ended.stderr.strip().splitlines()) == 1


@pytest.mark.e2e
@pytest.mark.parametrize("price", ["inf", "nan", "-1"])
def test_a_price_is_finite(price):
    ended = megabench("plan", "--cluster", A100, "--price-per-gpu-hour", price)
    assert ended.returncode == 2 and not ended.stdout and "Invalid value for '--price-per-gpu-hour'" in ended.stderr


def test_no_ratio_to_a_rounding_error():
    """A part that is 1e-16 s on one cluster has no ratio."""
    fast, slow = plans(H200, A100)
    assert _reason("dp", 0.2, 3e-16, fast, slow) == "data-parallel communication takes 0.200 s instead of 0.000 s"
    assert "(0.50 ×)" in _reason("dp", 0.1, 0.2, fast, slow)


def test_b300_is_not_called_slower_than_b200():
    b200, b300 = "p6-b200.48xlarge:1", "p6-b300.48xlarge:1"
    text = shown(plans(b200, b300, model="llama3-8b"))
    assert f"{b300} is 1.0" in text and f"as fast as {b200}" in text
    assert all(0.01 < float(ratio) < 100 for ratio in re.findall(r"\(([\d.]+) ×\)", text))
