"""`megabench plan --layout`: what people write, at its best, beside the recommended layout."""

import json

import pytest

from megabench.config import ConfigError
from megabench.errors import UserError
from megabench.planner.make_plan import make_plan
from megabench.planner.own_layout import find_own, read_layout
from megabench.planner.own_layout_report import OwnLayoutReport
from megabench.planner.reasons import chosen
from megabench.planner.search import Plan, candidates
from tests.planner.jobs import costs
from tests.planner.test_plan import megabench


def planned(where: str = "p5.48xlarge:2", model: str = "llama3-8b") -> Plan:
    return make_plan(model, where, None, None, None, "fp32", None, top=12, emulate_hosts=None)


@pytest.mark.parametrize(
    ("text", "engine", "sizes", "options"),
    [
        ("tp8 pp2", None, {"tp": 8, "pp": 2}, set()),
        ("TP=8, PP=2", None, {"tp": 8, "pp": 2}, set()),
        ("tp8pp2", None, {"tp": 8, "pp": 2}, set()),
        ("tp8·pp2·vp4·dp2 mb1 full", None, {"tp": 8, "pp": 2, "vp": 4, "dp": 2, "mb": 1}, {"full"}),
        ("8-way tensor parallel, 2 pipeline stages", None, {"tp": 8, "pp": 2}, set()),
        ("tensor parallel 8 and pipeline parallel 2", None, {"tp": 8, "pp": 2}, set()),
        ("Megatron-LM tp 4 x cp 2, micro-batch 2", None, {"tp": 4, "cp": 2, "mb": 2}, set()),
        ("zero3", "zero3", {}, set()),
        ("DeepSpeed ZeRO stage 3, activation checkpointing", "zero3", {}, {"full"}),
        ("ZeRO-2 with cpu offload mbs 4", "zero2", {"mb": 4}, {"offload"}),
        ("stage 1", "zero1", {}, set()),
        ("fsdp dp16", "fsdp", {"dp": 16}, set()),
        ("FSDP2 shard8", "fsdp", {}, {"shard8"}),
        ("megatron-fsdp", "megatron_fsdp", {}, set()),
        ("ddp", "ddp", {}, set()),
        ("tp8 selective recomputation", None, {"tp": 8}, {"selective"}),
        ("data parallel 16", None, {"dp": 16}, set()),
    ],
)
def test_what_people_write_is_understood(text, engine, sizes, options):
    found = read_layout(text)
    assert (found.engine, found.sizes, set(found.options)) == (engine, sizes, options)


@pytest.mark.parametrize("text", ["", "foo", "tp", "tp0", "tp8 tp4", "zero3 fsdp", "zero4", "full", "tp8 banana"])
def test_what_is_not_understood_is_refused_in_one_sentence(text):
    with pytest.raises(ConfigError, match=r'^--layout .*, such as "tp8 pp2", "zero3" or "fsdp mb2 full"$'):
        read_layout(text)


@pytest.mark.parametrize("text", ["zero3 offload full none", "tp8 topology spread-tp"])
def test_options_that_exclude_each_other_are_refused(text):
    with pytest.raises(ConfigError, match="which exclude each other; use one of them"):
        read_layout(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tp3", r"tp=3 .* needs a multiple of 3 processes"),
        ("tp16", r"tp=16 does not divide num_kv_heads=8"),
        ("tp8 dp4", r"dp=4 with 8 GPUs per replica needs 32 GPUs, but the cluster has 16; use dp=2"),
        ("zero3 tp2", r"zero3 has no tp"),
        ("tp8 mb5", r"global_batch=32 is not divisible"),
        ("zero3 shard8", r"no such candidate with shard8"),
    ],
)
def test_an_impossible_layout_names_what_clashes(text, words):
    with pytest.raises(UserError, match=words):
        find_own(planned(), read_layout(text))


def test_the_best_of_what_the_text_leaves_open_is_found():
    plan = planned()
    found = find_own(plan, read_layout("tp8 pp2"))
    judge = costs(plan.job, plan.topology)
    same = [one for one in candidates(plan.job, plan.topology) if (one.layout.tp, one.layout.pp) == (8, 2)]
    estimates = [judge.estimate(one) for one in same if one.layout.cp == 1 and one.placement == "topology"]
    plain = [one for one in estimates if one.fits and not one.candidate.variant.words]
    assert len(plain) > 10
    assert found.step_seconds == pytest.approx(min(one.step_seconds for one in plain))
    fixed = find_own(plan, read_layout("tp8 pp2 vp2 mb1 full")).candidate
    assert (fixed.layout.vp, fixed.micro_batch, fixed.recompute) == (2, 1, "full")


def test_a_layout_that_does_not_fit_says_so():
    plan = planned("p5.48xlarge:2")
    report = OwnLayoutReport(plan, "ddp", None)
    assert not report.estimate.fits and "Its chance to fit is <1%: it lacks " in report.verdict


def test_models_without_parallel_blocks_mean_ddp():
    plan = planned("p5.48xlarge:1", "gpt2")
    assert find_own(plan, read_layout("dp8")).candidate.engine == "ddp"
    with pytest.raises(ConfigError, match="gpt2 has no tp"):
        find_own(plan, read_layout("tp8"))


def test_the_recommended_layout_is_called_so():
    plan = planned()
    report = OwnLayoutReport(plan, chosen(plan).candidate.name, None)
    assert report.ratio == pytest.approx(1.0)
    assert report.verdict == f"{chosen(plan).candidate.name} is the recommended layout."


@pytest.mark.e2e
def test_the_command():
    asked = ("plan", "--cluster", "p5.48xlarge:2", "--layout", "tp8 pp2", "--measured", "4.9")
    shown = megabench(*asked)
    assert shown.returncode == 0 and not shown.stderr
    found = json.loads(megabench(*asked, "--json", "--tokens", "1e12").stdout)
    assert found["ratio"] == pytest.approx(found["layout"]["step_seconds"] / found["recommended"]["step_seconds"])
    assert found["ratio"] > 1.1 and found["layout"]["settings"]["tp"] == 8 and found["layout"]["days"] > 0
    assert shown.stdout.startswith(f"{found['reason']}\n") and f"is {found['ratio']:.2f} × as fast" in found["reason"]
    for name in ("layout", "recommended"):
        assert found[name]["command"] in shown.stdout
    assert all(line in shown.stdout for line in found["explanations"])
