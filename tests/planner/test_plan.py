"""`megabench plan` as people type it, and the ranking behind it."""

import io
import itertools
import json
import re
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from megabench.config import ConfigError
from megabench.cost.job import Job
from megabench.cost.memory import LIKELY, fit_chance, likely_bytes
from megabench.cost.profile import profile_for, shipped_profiles
from megabench.hardware.topology import from_cluster
from megabench.models.find import find_model
from megabench.planner.explain import find_trial
from megabench.planner.layout_table import Training
from megabench.planner.plan_json import describe
from megabench.planner.plan_table import write
from megabench.planner.reasons import certainty, chosen, reason
from megabench.planner.search import candidates, plan, settings_of
from megabench.planner.train_command import train_command
from megabench.train.flags import parse_flags
from tests.comparison.compare_process import REPOSITORY
from tests.planner.jobs import cluster, costs, hosts, job, megatron


def megabench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megabench", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


def made(model: str, where: str, seq_length: int = 8192, global_batch: int = 256):
    topology = cluster(where)
    return plan(Job(find_model(model), seq_length, global_batch), topology, profile_for(topology.hosts[0].device))


@pytest.mark.e2e
def test_the_documented_command():
    arguments = ("--model", "llama3-70b", "--cluster", "p5.48xlarge:4", "--seq-length", "8192", "--global-batch", "256")
    shown = megabench("plan", *arguments)
    assert shown.returncode == 0 and not shown.stderr
    first, second, *_ = shown.stdout.splitlines()
    assert first == "llama3-70b on 32 × NVIDIA H100 80GB HBM3, 4 hosts · 256 × 8192 tokens a step"
    assert second.startswith("Best predicted layout: ") and " (rows 1 to 5 are equal within" in second
    found = json.loads(megabench("plan", *arguments, "--json").stdout)
    assert found["sweet_spot"] in shown.stdout
    run = parse_flags(shlex.split(found["command"].partition("-m megabench.train ")[2]))
    assert found["command"] in shown.stdout and found["command"].startswith("torchrun --nnodes 4 --nproc-per-node 8 ")
    assert run and run.resolve(32, "cuda").layout.tp == found["ranked"][0]["settings"]["tp"]
    assert (run.model, run.seq_length, run.global_batch) == ("llama3-70b", 8192, 256)
    alone = json.loads(megabench("plan", *arguments, "--json", "--explain", found["sweet_spot"]).stdout)
    assert alone == found["ranked"][0]
    one = json.loads(megabench("plan", *arguments, "--json", "--top", "1").stdout)
    assert len(one["ranked"]) == 1 and one["num_equal"] == found["num_equal"]
    explained = megabench("plan", *arguments, "--tokens", "1e12", "--explain", found["sweet_spot"].replace("·", " "))
    assert explained.returncode == 0 and "compute" in explained.stdout and "█" in explained.stdout
    assert "Training on 1 trillion tokens takes " in explained.stdout


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ("p5e.48xlarge:1", "measured on this kind of GPU"),
        ("p5.48xlarge:1", "measured on NVIDIA H200, and NOT on NVIDIA H100 80GB HBM3"),
    ],
)
def test_what_a_profile_was_measured_on_is_said(cluster, words):
    shown = megabench("plan", "--cluster", cluster, "--profile", "megabench/cost/profiles/h200.json")
    assert f"profile h200: {words}" in shown.stdout


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cluster", "p9.48xlarge:2"], "instance type 'p9.48xlarge' is not known"),
        (["--cluster", "p5.48xlarge:2", "--model", "llama4"], "unknown model 'llama4'"),
        (["--cluster", "p5.48xlarge:2", "--explain", "tp3"], "trial 'tp3' is not a predicted trial"),
        (["--cluster", "p5.48xlarge:2", "--grad-dtype", "fp8"], "grad_dtype='fp8' is unknown"),
        (["--cluster", "p5.48xlarge:2", "--profile", "none.json"], "cannot read none.json"),
        (["--cluster", "p5.48xlarge:2", "--model", "gpt2", "--seq-length", "2048"], "exceeds the 1024 positions"),
        (["--cluster", "p5.48xlarge:2", "--model", "gpt2", "--global-batch", "3"], "use a global batch"),
        (["--cluster", "p5.48xlarge:2", "--global-batch", "99999999999"], "global_batch=99999999999 is not valid"),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_sentence(arguments, words):
    ended = megabench("plan", *arguments)
    assert ended.returncode == 2 and not ended.stdout
    assert words in ended.stderr and len(ended.stderr.strip().splitlines()) == 1


def test_405b_on_sixteen_p5_fits_somewhere_and_is_planned_at_once():
    started = time.process_time()
    found = made("llama3-405b", "p5.48xlarge:16", global_batch=512)
    assert time.process_time() - started < 2.0
    assert found.ranked and found.ranked[0].fits


def test_ten_thousand_candidates_take_less_than_two_seconds():
    work, topology = Job(find_model("llama3-8b"), 8192, 2048), cluster("p5.48xlarge:16")
    everything = list(candidates(work, topology))

    def seconds() -> float:
        """CPU time, the least of a few: what else runs beside the tests takes caches away."""
        started = time.process_time()
        plan(work, topology, profile_for(topology.hosts[0].device))
        return time.process_time() - started

    assert min(seconds() for _ in range(3)) * 10_000 / len(everything) < 2.0


@pytest.mark.e2e
@pytest.mark.parametrize(("network", "is_assumed"), [("", True), (", network: infiniband", False)])
def test_assumed_sockets_are_told(tmp_path, network, is_assumed):
    path = tmp_path / "mine.yaml"
    path.write_text(f"hosts:\n  - {{count: 2, gpu: NVIDIA H200, num_gpus: 4{network}}}\n")
    shown = megabench("plan", "--cluster", str(path), "--seq-length", "4096").stdout
    assert ("names no network, so sockets were assumed between the hosts; set network: efa" in shown) == is_assumed
    found = json.loads(megabench("plan", "--cluster", str(path), "--seq-length", "4096", "--json").stdout)
    assert found["assumes_sockets"] == is_assumed


@pytest.mark.e2e
def test_a_model_that_fits_nowhere_says_what_is_missing():
    ended = megabench("plan", "--model", "llama3-405b", "--cluster", "p4d.24xlarge:2", "--global-batch", "16")
    assert ended.returncode == 1
    assert re.search(r"No layout of .* fits on this cluster: .* \(\d+\.\d GiB are missing\)", ended.stdout)


def test_the_ranking_is_that_of_all_candidates():
    """The lower bounds leave nothing out: every candidate estimated in full gives the same best."""
    work, topology = job(global_batch=32), hosts(2, 4)
    found = plan(work, topology, profile_for(topology.hosts[0].device))
    judge = costs(work, topology)
    estimates = [judge.estimate(candidate) for candidate in candidates(work, topology)]
    best = min((estimate for estimate in estimates if estimate.fits), key=lambda estimate: estimate.step_seconds)
    assert chosen(found).step_seconds == pytest.approx(best.step_seconds)
    assert found.num_candidates == len(estimates)
    assert found.num_fitting == sum(estimate.fits for estimate in estimates)


def test_the_parts_of_a_step_add_up_and_none_is_negative():
    work, topology = job(global_batch=32), hosts(2, 4)
    judge = costs(work, topology)
    for candidate in list(candidates(work, topology))[::7]:
        estimate = judge.estimate(candidate)
        assert sum(estimate.parts.values()) == pytest.approx(estimate.step_seconds)
        assert min(estimate.parts.values()) >= 0


def test_what_is_shown_can_be_run():
    """Every candidate is a legal configuration of the engine that it names."""
    from megabench.config import RunConfig

    work, topology = job(seq_length=4096, global_batch=32), hosts(2, 4)
    for candidate in list(candidates(work, topology))[::5]:
        fields = {"model": "llama3-8b", "seq_length": 4096, "global_batch": 32} | settings_of(candidate)
        run = RunConfig.parse(fields).resolve(topology.world_size, "cuda")
        assert run.layout == candidate.layout and run.num_micro_batches == candidate.num_micro_batches(work)


def test_layers_need_not_divide_by_the_model_chunks():
    """405B has 126 layers: 64 chunks have 1 or 2 layers each, and interleaving still divides the bubble."""
    work, topology = job("llama3-405b", 8192, 1024), cluster("p5.48xlarge:128")
    layouts = {str(candidate.layout) for candidate in candidates(work, topology)}
    assert {"tp8·cp2·pp8·vp8·dp8", "tp8·cp2·pp16·vp4·dp4"} <= layouts
    plain, interleaved = (megatron(topology, tp=8, cp=2, pp=16, vp=vp) for vp in (1, 4))
    a, b = (costs(work, topology).estimate(candidate).parts["bubble"] for candidate in (plain, interleaved))
    assert b < a / 2


def test_very_unequal_chunks_are_no_candidates():
    """With 80 layers, 24 chunks have 3 or 4 layers, as long as 24 · 4 = 96 layers."""
    work, topology = job("llama3-70b", 8192, 64), cluster("p5.48xlarge:8")
    counts = {candidate.layout.vp for candidate in candidates(work, topology) if candidate.layout.pp == 4}
    assert {1, 2, 4, 5, 10, 20} <= counts and 6 not in counts


def test_layouts_within_the_models_error_are_called_equal():
    found = made("llama3-70b", "p5.48xlarge:4")
    limit = chosen(found).step_seconds * (1 + found.profile.relative_error)
    assert [estimate.step_seconds <= limit for estimate in found.ranked].count(True) == found.equals > 1
    assert certainty(found).startswith("Rows marked = differ by less than the prediction error of 12%: measure them")
    rows = [line for line in written(found).splitlines() if re.match(r"\| \d+= ", line)]
    assert len(rows) == min(5, found.equals)


@pytest.mark.parametrize(
    ("model", "where", "global_batch", "words"),
    [
        ("gpt2", "p5.48xlarge:1", 256, "gpt2 has no tensor- or pipeline-parallel blocks here."),
        ("llama3-8b", "p5.48xlarge:1", 7, "need a global batch that is a multiple of the 8 GPUs."),
        ("llama3-8b", "g5.48xlarge:1", 32, "The best tensor- or pipeline-parallel layout, "),
        ("llama3-70b", "p5.48xlarge:8", 256, "The best data-parallel layout, "),
        ("llama3-70b", "p4d.24xlarge:8", 64, "No ZeRO, FSDP2 or DDP fits."),
    ],
)
def test_the_reason_has_three_short_sentences(model, where, global_batch, words):
    said = reason(made(model, where, {"gpt2": 1024}.get(model, 8192), global_batch))
    assert said.startswith("It is the fastest of ") and "fit with a chance of 95% or more. " in said
    assert words in said
    sentences = re.split(r"(?<=\.) ", said)
    assert len(sentences) == 3 and all(len(sentence.split()) <= 32 for sentence in sentences), sentences


def test_pure_data_parallelism_of_megatron_is_called_data_parallel():
    found = made("llama3-8b", "p6-b300.48xlarge:1", 8192, 128)
    best = chosen(found).candidate
    assert best.engine == "megatron" and best.layout.dp == 8, best.name
    assert "The best tensor- or pipeline-parallel layout, " in reason(found)


PLACES = [
    ("llama3-8b", "p5.48xlarge:1", 32),
    ("llama3-70b", "p5.48xlarge:8", 256),
    ("llama3-8b", "p5.48xlarge:64", 1024),
]


@pytest.mark.parametrize(("model", "where", "global_batch"), PLACES)
def test_the_first_row_is_the_fastest_layout_that_is_likely_to_fit(model, where, global_batch):
    found = made(model, where, global_batch=global_batch)
    assert LIKELY == 0.95 and all(one.fit_chance >= LIKELY for one in found.ranked)
    seconds = [one.step_seconds for one in found.ranked]
    assert seconds == sorted(seconds) and chosen(found) is found.ranked[0]
    assert all(one.fit_chance < LIKELY and one.step_seconds < seconds[0] for one in found.risky)


def test_a_second_layout_is_for_runs_that_run_out_of_memory():
    found = made("llama3-70b", "p5.48xlarge:4", global_batch=64)
    best, second = chosen(found), found.fallback
    assert second and second.memory.total <= 0.85 * best.memory.total and second.fit_chance > 0.999
    judge = costs(found.job, found.topology)
    small = (judge.estimate(one) for one in candidates(found.job, found.topology))
    fastest = min(one.step_seconds for one in small if one.memory.total <= 0.85 * best.memory.total)
    assert second.step_seconds == pytest.approx(fastest)
    said = written(found).partition("If it runs out of memory\n")[2]
    assert said.startswith(f"{second.candidate.name} needs {second.memory.total / 2**30:.1f} instead of ")
    assert said.splitlines()[3] == train_command(found, second.candidate)
    assert describe(found, 5)["fallback"]["command"] == train_command(found, second.candidate)


def test_a_layout_that_leaves_much_memory_free_needs_no_second_one():
    found = made("gpt2", "p5.48xlarge:1", 1024, 256)
    assert chosen(found).memory.total < 0.75 * found.usable_bytes
    assert found.fallback is None and "If it runs out of memory" not in written(found)


def test_rows_differ_in_more_than_their_context_parallelism():
    found = made("llama3-405b", "p5.48xlarge:128", global_batch=1024)
    error, rows = 1 + found.profile.relative_error, [one.candidate for one in found.ranked]
    for one, other in itertools.combinations(found.ranked, 2):
        a, b = one.candidate, other.candidate
        if (a.layout.tp, a.layout.pp, a.variant) == (b.layout.tp, b.layout.pp, b.variant):
            assert other.step_seconds > error * one.step_seconds
    names = {name for same in found.merged.values() for name in same}
    assert names and not names & {candidate.name for candidate in rows}


def written(found, width: int = 200, training: Training | None = None) -> str:
    text = io.StringIO()
    write(Console(file=text, width=width), found, 5, training)
    return text.getvalue()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("training", [None, Training(15e12, 2.5)], ids=["plain", "with days and price"])
@pytest.mark.parametrize(("model", "where", "global_batch"), [*PLACES, ("llama3-405b", "p5.48xlarge:64", 512)])
def test_the_tables_fit_the_terminal_and_cut_nothing(model, where, global_batch, training, width):
    found = made(model, where, global_batch=global_batch)
    lines = written(found, width, training).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert rows and max(map(len, rows)) <= width and "…" not in "".join(rows)
    for one in found.ranked[:5]:
        (row,) = [line for line in rows if f" {one.candidate.name} " in line]
        assert f" {one.tokens_per_second_per_device:,.0f} |" in row
    if training:
        head = next(line for line in lines if "tok/s/GPU" in line)
        assert " days |" in head and " price |" in head


def test_days_and_price_are_those_of_every_row():
    found = made("llama3-8b", "p5.48xlarge:1", global_batch=32)
    text = written(found, 120, Training(1e12, 2.0))
    assert "days and price of training on 1 trillion tokens, without interruptions" in text
    for one in found.ranked[:5]:
        hours = 1e12 / (8 * one.tokens_per_second_per_device) / 3600
        row = next(line for line in text.splitlines() if f" {one.candidate.name} " in line)
        assert f" {hours / 24:,.1f} |" in row and f" {hours * 8 * 2:,.0f} |" in row


def test_chances_below_99_percent_are_shown_in_a_narrow_terminal():
    found = made("llama3-70b", "p4d.24xlarge:8", global_batch=64)
    text = written(found, 80)
    assert " fits |" in text and "|  96% |" in text and "bubble" not in text


def test_the_legend_has_the_options_that_occur():
    legend = next(
        line for line in written(made("llama3-8b", "p5.48xlarge:2", global_batch=32)).splitlines() if "; vp" in line
    )
    assert legend.endswith(
        "mb micro-batch; full: full recomputation; shardN: shards over N GPUs, with replicas of the shards"
    )


def test_gains_of_dtypes_are_those_over_the_best_layout():
    found = made("llama3-8b", "p5.48xlarge:2", global_batch=32)
    (fp8,) = [line for line in written(found).splitlines() if line.startswith("- --precision fp8")]
    assert "faster than the best layout above, with " in fp8 and ", which fits only with this dtype; compare" in fp8
    small = written(made("gpt2", "a100-pairs", 1024, 32))
    assert "17% faster than the best layout above, with the same layout; compare" in small


def test_a_table_of_data_parallel_layouts_needs_no_second_one():
    title = "Best of each engine without tp, cp or pp\n"
    assert title not in written(made("gpt2", "a100-pairs", 1024, 32))
    assert title in written(made("llama3-8b", "p5.48xlarge:2", global_batch=32))


def test_few_sequences_are_noted():
    note = "32 sequences are few for 128 GPUs; --global-batch 128 allows data parallelism over all of them."
    assert note in written(made("llama3-8b", "p5.48xlarge:16", global_batch=32))
    assert "are few for" not in written(made("llama3-8b", "p5.48xlarge:16", global_batch=128))


def test_one_gpu_has_no_other_kind_of_layout():
    found = made("llama3-8b", "p5.48xlarge:1:1", global_batch=32)
    assert "parallel" not in reason(found) and "(rows 1 and 2 are equal within" in written(found)
    assert train_command(found, chosen(found).candidate).startswith(
        "torchrun --nproc-per-node 1 -m megabench.train --model llama3-8b "
    )


def test_the_whole_difference_comes_before_its_parts():
    found = made("llama3-8b", "p5.48xlarge:2", global_batch=32)
    parts = re.search(
        r"as long, ([\d.]+) s longer: ([\d.]+) s more on [a-z -]+, (\d+) ms less elsewhere\.", reason(found)
    )
    assert parts
    total, more, less = map(float, parts.groups())
    assert total == pytest.approx(more - less / 1000, abs=0.01)


def test_what_was_never_measured_says_so():
    new = written(made("llama3-8b", "p6-b200.48xlarge:1", global_batch=32))
    assert "8 × NVIDIA B200 †, 1 host" in new and "† never measured: p6-b200.48xlarge\n" in new
    tested = written(made("llama3-8b", "p5.48xlarge:1", global_batch=32))
    assert re.search(r"megatron_fsdp·dp8 mb\d+[a-z ]* †", tested)
    assert "† never measured: Megatron-FSDP on several GPUs" in tested and "HBM3 †" not in tested


def test_the_chance_to_fit_is_that_of_the_measured_errors():
    """Of layouts that are predicted to use all memory, 39% fit, and no layout within 10% is impossible."""
    assert fit_chance(80.0, 80.0) == pytest.approx(0.39, abs=0.02)
    assert fit_chance(likely_bytes(80.0), 80.0) == pytest.approx(LIKELY)
    chances = [fit_chance(gib, 80.0) for gib in (40.0, 72.0, 76.0, 80.0, 84.0, 88.0)]
    assert chances == sorted(chances, reverse=True) and chances[0] > 0.999 and chances[-1] > 0.001


def test_a_faster_layout_that_may_not_fit_is_named_with_its_chance():
    found = made("llama3-8b", "p5.48xlarge:1", global_batch=32)
    judge = costs(found.job, found.topology)
    assert found.risky and not {one.candidate.name for one in found.risky} & {
        one.candidate.name for one in found.ranked
    }
    for one in found.risky:
        assert one.step_seconds < chosen(found).step_seconds and 0 < one.fit_chance < LIKELY
        assert one.memory.total <= 1.1 * judge.available_bytes
    risk = found.risky[0]
    faster = f"{100 * (chosen(found).step_seconds / risk.step_seconds - 1):.0f}% faster"
    said = written(found).partition("Faster, but may run out of memory\n")[2]
    assert said.startswith(f"- {risk.candidate.name}: {faster}, fits with a chance of {int(100 * risk.fit_chance)}%\n")


def test_offload_is_never_faster():
    work, topology = job("llama3-8b", 8192, 1024), cluster("p5.48xlarge:64")
    judge, compared = costs(work, topology), 0
    for candidate in candidates(work, topology):
        if getattr(candidate.variant, "offload", "none") != "none":
            variant: Any = candidate.variant
            without = replace(candidate, variant=replace(variant, offload="none"))
            slow, fast = (judge.estimate(one).step_seconds for one in (candidate, without))
            assert slow >= fast, candidate.name
            compared += 1
    assert compared >= 20


@pytest.mark.parametrize(
    ("model", "where", "global_batch"),
    [("llama3-8b", "p5.48xlarge:64", 1024), ("llama3-8b", "g5.48xlarge:1", 32), ("bloom-7b1", "p4de.24xlarge:4", 32)],
)
def test_the_reason_compares_with_no_difference_of_nothing(model, where, global_batch):
    said = reason(made(model, where, 2048, global_batch))
    assert "0.00 s" not in said and not re.search(r"0\.\d\d × as long", said)


def test_16384_gpus_are_planned_in_seconds():
    topology = from_cluster("p5.48xlarge:2048")

    def seconds() -> float:
        started = time.process_time()
        work = Job(find_model("llama3-405b"), 8192, 2048)
        found = plan(work, topology, profile_for(topology.hosts[0].device))
        assert chosen(found).candidate.layout.vp > 1
        written(found)
        return time.process_time() - started

    assert min(seconds() for _ in range(2)) < 5.0


def test_a_model_with_too_many_layers_is_refused():
    many = find_model("llama3-8b", 20_000)
    with pytest.raises(ConfigError, match=r"num_layers=20000 is more than .* use num_layers ≤ 1000"):
        plan(Job(many, 8192, 32), cluster("p5.48xlarge:2"), profile_for("H100"))


def test_a_trial_is_found_whatever_stands_between_its_words():
    found = made("llama3-70b", "p5.48xlarge:4")
    assert find_trial(found, "TP8 pp4, vp5 mb1") == find_trial(found, "tp8·pp4·vp5 mb1")
    with pytest.raises(ConfigError, match="is not a predicted trial; did you mean"):
        find_trial(found, "tp8·pp4·vp6 mb1")


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "configs" / "clusters").glob("*.yaml")), ids=lambda path: path.stem
)
def test_every_cluster_file_can_be_planned_for(path):
    topology = cluster(str(path))
    work = job(global_batch=12 * topology.world_size)
    assert plan(work, topology, profile_for(topology.hosts[0].device), keep=3).ranked


def test_a_gpu_by_half_its_name_is_told_its_whole():
    with pytest.raises(ConfigError, match=r"'H200' in bf16 is unknown; name the GPU NVIDIA H200.* use a --profile"):
        profile_for("H200").peak("H200", "bf16")


def test_shipped_profiles_say_what_they_are():
    profiles = shipped_profiles()
    assert {"h200", "h100", "a100", "l40s", "blackwell", "generic"} == set(profiles)
    for profile in profiles.values():
        assert profile.origin.get("*") and profile.kind in ("measured", "fitted", "assumed")
    assert profile_for("some other GPU").name == "generic"
