"""Reading published runs, and the scores."""

import lzma
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megabench.cost.memory import fit_chance
from megabench.cost.profile import profile_for, shipped_profiles
from megabench.planner.engines.megatron_memory import megatron_variant
from tests.comparison.compare_process import REPOSITORY
from tests.planner.jobs import costs
from tools.planner_validation.__main__ import (
    INTERNEVO,
    RUNS,
    TESTED,
    _by_source,
    _own_parts,
    _published_parts,
    _tested_parts,
)
from tools.planner_validation.collectives import read_collectives
from tools.planner_validation.draw import draw
from tools.planner_validation.fit import MEMORY, predicted_gib, predicted_seconds
from tools.planner_validation.internevo import read_internevo
from tools.planner_validation.own import read_own
from tools.planner_validation.profiles import OWN_FITTED_MEMORY, for_own_engines, is_memory_fitted
from tools.planner_validation.program_costs import costs as program_costs
from tools.planner_validation.programs import Program
from tools.planner_validation.published import DATA, DataError, Row, check_sources, read_rows, read_table
from tools.planner_validation.report import Line, check_against, measured_profile
from tools.planner_validation.score import Accuracy, accuracy, alarm, is_in_first_two, regret, spearman
from tools.planner_validation.tested_nodes import on_healthy_nodes, read_tested

HEAD = (
    "source,model,params_b,layers,hidden,heads,kv_heads,ffn,vocab,seq,gpu,gpus,gpus_per_node,inter_node_gbps_per_node,"
    "tp,pp,vp,cp,dp,zero_stage,micro_batch,global_batch,precision,recompute,metric,value,note"
)
SWEEP = "HF Ultra-Scale,llama-1B-mha,1.34,16,2048,32,32,8192,131072,4096,H100-80GB-SXM"
SC21 = "arXiv:2104.04473 Table 1 (image),gpt-1.7B,1.7,24,2304,24,24,9216,51200,2048,A100-80GB-SXM"


def sweep(gpus: int, tp: int, pp: int, dp: int, micro_batch: int, outcome: str, zero_stage: int = 1) -> str:
    return f"{SWEEP},{gpus},8,,{tp},{pp},1,1,{dp},{zero_stage},{micro_batch},256,bf16,,{outcome},"


def compressed(folder: Path, text: str) -> Path:
    path = folder / "table.csv.xz"
    path.write_bytes(lzma.compress(text.encode()))
    return path


def rows_of(folder, *lines: str):
    return read_rows(compressed(folder, "\n".join([HEAD, *lines]) + "\n"))


@pytest.fixture
def table(tmp_path):
    lines = [
        HEAD,
        f"{SWEEP},8,8,,2,1,1,1,4,1,1,256,bf16,,tokens_per_s_per_gpu,27877,one node",
        f"{SWEEP},8,8,,2,1,1,1,4,1,1,256,bf16,,peak_mem_gb,12.5,one node",
        f"{SWEEP},64,8,,2,1,1,1,32,1,8,256,bf16,,oom_or_crash,1,",
        f"{SC21},32,8,1600,1,1,1,1,32,,16,512,fp16,full,hw_tflops_per_gpu,137,",
        f"{SWEEP},8,8,,2,1,1,1,4,1,,256,bf16,,tokens_per_s_per_gpu,1,no micro-batch",
        "somebody else,m,1,1,1,1,1,1,1,1,H100,8,8,,1,1,1,1,8,1,1,8,bf16,none,step_time_s,1,",
    ]
    return compressed(tmp_path, "\n".join(lines) + "\n")


def test_rows_of_one_configuration_are_one(table):
    one_node, many_nodes, sc21 = read_rows(table)
    assert one_node.is_fit and not many_nodes.is_fit and not sc21.is_fit
    assert one_node.measured["seconds"] == pytest.approx(256 * 4096 / 27877 / 8)
    assert one_node.measured["memory_gib"] == 12.5
    assert many_nodes.measured == {"oom": 1.0} and len(many_nodes.topology.hosts) == 8


def test_of_repeated_runs_the_fastest_counts(tmp_path):
    found = rows_of(
        tmp_path,
        sweep(16, 8, 1, 2, 1, "tokens_per_s_per_gpu,3449"),
        sweep(16, 8, 1, 2, 1, "tokens_per_s_per_gpu,737"),
        sweep(16, 8, 1, 2, 1, "peak_mem_gb,17.8"),
        sweep(16, 8, 1, 2, 1, "peak_mem_gb,19.2"),
    )
    assert len(found) == 1
    assert found[0].measured == {"seconds": pytest.approx(256 * 4096 / 3449 / 16), "memory_gib": 19.2}


def test_embeddings_are_tied_where_the_stated_parameters_say_so(tmp_path):
    (small,) = rows_of(tmp_path, sweep(8, 1, 1, 8, 1, "peak_mem_gb,24.2"))
    assert small.job.shape.tied_embeddings
    assert small.job.num_parameters == pytest.approx(1.34e9, rel=0.01)


def test_layouts_that_leave_the_loss_before_the_last_stage_are_refused(tmp_path):
    sizes = (1, 2, 4, 8, 16, 32)
    found = rows_of(tmp_path, *(sweep(64, 1, size, 64 // size, 1, "oom_or_crash,1") for size in sizes))
    assert {row.candidate.layout.pp: row.is_refused for row in found} == {size: size >= 16 for size in sizes}


def test_the_sweeps_memory_is_the_first_rank_s(tmp_path):
    # one micro-batch: no stage holds more than one, and the last has the logits
    (row,) = rows_of(tmp_path, sweep(64, 1, 2, 32, 8, "peak_mem_gb,44.9"))
    profile = profile_for("NVIDIA H100 80GB HBM3")
    assert predicted_gib(row, profile) < costs(row.job, row.topology).memory(row.candidate).total / 2**30


def test_shipped_profiles_have_the_allocator_of_megabenchs_engines():
    profiles = shipped_profiles()
    for name in MEMORY:
        assert {getattr(profile, name) for profile in for_own_engines(profiles, profiles["h200"]).values()} == {
            getattr(profiles["h200"], name)
        }
        assert getattr(profiles["h100"], name) == getattr(profiles["a100"], name) == getattr(profiles["h200"], name)


def test_sc21_counts_its_own_flops(table):
    sc21 = read_rows(table)[2]
    flops = 96 * 512 * 2048 * 24 * 2304**2 * (1 + 2048 / (6 * 2304) + 51200 / (16 * 24 * 2304))
    assert sc21.measured["seconds"] == pytest.approx(flops / (137e12 * 32))


def test_a_table_of_something_else_is_refused(tmp_path):
    with pytest.raises(DataError, match="no columns source and metric"):
        read_rows(compressed(tmp_path, "a,b\n1,2\n"))
    plain = tmp_path / "plain.csv"
    plain.write_text("a,b\n1,2\n")
    for path in (plain, tmp_path / "none.csv"):
        with pytest.raises(DataError, match="cannot read"):
            read_rows(path)


def test_the_repository_has_the_published_runs_that_validation_md_scores():
    published, tested = (read(DATA / name) for read, name in ((read_rows, RUNS), (read_tested, TESTED)))
    check_sources(published, DATA)
    parts = [*_published_parts(published), *_by_source(read_internevo(DATA / INTERNEVO)), *_tested_parts(tested)]
    table = (REPOSITORY / "benchmarks" / "planner" / "validation.md").read_text()
    for name, rows in parts:
        assert f"\n| {name} | {sum('seconds' in row.measured for row in rows)} |" in table
    assert len(read_collectives(DATA)) == 61 + 3 * 7


@pytest.mark.parametrize("path", sorted(DATA.iterdir()), ids=lambda path: path.name)
def test_every_published_row_names_its_source(path: Path):
    rows = read_table(path)
    assert rows and all(row["source"] for row in rows)


def test_of_layouts_said_to_fit_with_a_chance_about_this_share_ran():
    sweep = [row for row in read_rows(DATA / RUNS) if row.source.name == "playbook sweep" and not row.is_refused]
    ended = [row for row in sweep if ("oom" in row.measured) != ("seconds" in row.measured)]
    profile = profile_for("NVIDIA H100 80GB HBM3")
    ran: dict[str, list[bool]] = {}
    for row in ended:
        found = program_costs(row.job, row.topology, profile)
        chance = fit_chance(found.memory(row.candidate).total, found.available_bytes)
        ran.setdefault(
            "<20" if chance < 0.2 else "<80" if chance < 0.8 else "<95" if chance < 0.95 else "≥95", []
        ).append("seconds" in row.measured)
    shares = {name: sum(members) / len(members) for name, members in ran.items()}
    assert len(ended) == 1171
    assert shares["<20"] < 0.1 and 0.3 < shares["<80"] < 0.8 and 0.8 <= shares["<95"] <= 0.95 and shares["≥95"] >= 0.95


def test_own_records_are_read():
    rows = read_own(REPOSITORY / "benchmarks")
    names = {row.source.name for row in rows}
    assert {"llama3-8b-first-look", "placement-two-hosts"} <= names
    across = [row for row in rows if row.candidate.placement == "spread-tp"]
    assert across and all(len(row.topology.hosts) == 2 for row in across)


def test_scores():
    assert accuracy([1.1, 0.8, 2.0], [1.0, 1.0, 2.0]).mape == pytest.approx(0.1)
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1.0)
    assert spearman([1, 2, 2, 4], [4, 3, 2, 1]) == pytest.approx(-0.9486832980505138)
    assert spearman([1, 1, 1], [1, 2, 3]) is None
    assert regret([1.0, 2.0], [3.0, 2.0]) == pytest.approx(0.5)
    assert regret([1.0, 1.0], [3.0, 2.0]) == pytest.approx(0.25)
    assert regret([1.0, math.inf], [2.0, 1.0]) == pytest.approx(1.0)
    found = alarm([True, True, False, False], [True, False, True, False])
    assert (found.precision, found.recall, found.count) == (0.5, 0.5, 2)


def test_memory_that_was_fitted_is_not_among_what_was_tried():
    own = read_own(REPOSITORY / "benchmarks")
    (fitted,) = {name for name in OWN_FITTED_MEMORY if name.endswith("-scaling")}
    parts = dict(_own_parts(own))
    tried = [row for name, rows in parts.items() if "all others" in name for row in rows]
    assert {fitted, "llama3-8b-nvlink"} <= {row.source.name for row in tried}
    # of FSDP2 and DDP some records tell nothing: see below
    plain = [row for row in tried if row.candidate.engine in ("megatron", "deepspeed")]
    assert all(("memory_gib" in row.measured) != is_memory_fitted(row) for row in plain)
    assert all("memory_gib" in row.measured for row in parts[f"own records, {fitted} (memory fitted)"])


def measured_parts() -> dict[tuple[str, str, bool], set[str]]:
    """What the own records measured, by study, engine, and whether a step had several micro-batches."""
    return {
        (row.source.name, row.candidate.engine, row.candidate.num_micro_batches(row.job) > 1): set(row.measured)
        for row in read_own(REPOSITORY / "benchmarks")
    }


def test_the_memory_of_gradients_held_twice_tells_nothing():
    measured = measured_parts()
    assert measured["llama3-8b-two-gpus", "fsdp", True] == {"seconds"}
    for of in (
        ("llama3-8b-two-gpus-again", "fsdp", True),
        ("llama3-8b-two-gpus", "deepspeed", True),
    ):
        assert measured[of] == {"seconds", "memory_gib"}


def test_a_source_without_rows_is_an_error(tmp_path, table):
    with pytest.raises(DataError, match="no usable row of vTrain"):
        check_sources(read_rows(table), table)


INTERNEVO_RUNS = (
    "source,model,layers,hidden,heads,kv_heads,ffn,vocab,seq,gpus,gpus_per_node,inter_node_gbps_per_node,tp,dp,"
    "zero1_shard_ranks,micro_batch,global_batch,tokens_per_second_per_gpu\n"
    "InternEvo,internlm-7b,32,4096,32,32,11008,103168,2048,1024,8,400,1,1024,1024,2,8192,2271\n"
    "InternEvo,internlm-7b,32,4096,32,32,11008,103168,2048,1024,8,400,1,1024,8,2,8192,3625\n"
)


def test_internevo_shards_over_all_ranks_or_inside_nodes(tmp_path):
    everywhere, inside = read_internevo(compressed(tmp_path, INTERNEVO_RUNS))
    variants: list[Any] = [run.candidate.variant for run in (everywhere, inside)]
    assert [variant.shard_size for variant in variants] == [None, 8]
    assert everywhere.source is not inside.source and not everywhere.is_fit
    assert everywhere.measured["seconds"] == pytest.approx(8192 * 2048 / 2271 / 1024)
    profile = profile_for("NVIDIA A100-SXM4-80GB")
    seconds = [predicted_seconds(row, profile) for row in (everywhere, inside)]
    assert seconds[0] > 1.5 * seconds[1], "hundreds of broadcasts pass 1,024 ranks one after another"


def test_a_run_is_predicted_with_its_own_nccl_test(tmp_path):
    columns = {
        "source": "a sweep", "job_id": "7", "nodes": "8.0", "dp": "64", "pp": "1", "tp": "1", "mbs": "1",
        "gbs": "256.0", "seq_len": "4096", "zero_stage": "1", "hidden_size": "2048", "num_layers": "16",
        "num_heads": "32", "num_kv_heads": "32.0", "vocab_size": "131072", "tie_word_embeddings": "True",
        "tok/s/gpu": "20000", "AllReduce (GB/s)": "100", "AllGather (GB/s)": "17", "ReduceScatter (GB/s)": "17",
    }  # fmt: skip
    (row,) = read_tested(compressed(tmp_path, ",".join(columns) + "\n" + ",".join(columns.values()) + "\n"))
    assert row.job.shape.tied_embeddings and row.candidate.layout.dp == 64 and len(row.topology.hosts) == 8
    healthy = profile_for("NVIDIA H100 80GB HBM3")
    own = measured_profile(row, {"h100": healthy})
    gather = next(one for one in row.fabric.collectives if one.kind == "all_gather")
    assert gather.bus_gb_per_s == pytest.approx(17)
    assert gather.predicted(own, row.topology.hosts[0], "nvlink") == pytest.approx(gather.seconds, rel=0.05)
    assert predicted_seconds(row, own) > 1.05 * predicted_seconds(row, healthy)


def test_the_picture_has_every_kind_of_source(tmp_path, table):
    rows = [row for row in read_rows(table) if "seconds" in row.measured]
    draw([(row, measured_profile(row, shipped_profiles())) for row in rows], tmp_path / "picture.svg")
    text = (tmp_path / "picture.svg").read_text()
    assert "playbook sweep" in text and "Megatron-LM papers" in text and "InternEvo" not in text


def test_the_best_in_the_first_two_of_a_sweep_counts():
    assert is_in_first_two([1.0, 2.0, 3.0], [5.0, 4.0, 6.0])
    assert not is_in_first_two([1.0, 2.0, 3.0], [5.0, 6.0, 4.0])


def test_a_fit_that_worsens_another_source_is_rejected():
    kept = "| rows | n | MAPE |\n| --- | --- | --- |\n| NeMo | 5 | 3.0% |\n| · constant MFU | 5 | 1.0% |"

    def lines(nemo: float, other: float) -> list[Line]:
        errors = {"NeMo": nemo, "a new source": other}
        return [Line(name, (8, 8), Accuracy(5, error, error, None), None, [], []) for name, error in errors.items()]

    check_against(kept, lines(nemo=0.05, other=0.9))
    with pytest.raises(DataError, match=r"increases the mean error of NeMo from 3\.0% to 5\.1%"):
        check_against(kept, lines(nemo=0.051, other=0.01))


def test_nodes_are_healthy_if_their_tests_reach_half_of_the_usual_bandwidth():
    rows = [row for row in read_tested(DATA / TESTED) if row.topology.world_size == 64]
    healthy = on_healthy_nodes(rows)
    assert (len(rows), len(healthy)) == (283, 39)
    assert all(row.fabric is None for row in healthy)


def test_copies_per_replica_take_time_in_the_program_that_makes_them():
    """Only runs with a sharded optimizer copy slices, and the time grows with the replicas."""
    profile = profile_for("NVIDIA H100 80GB HBM3")
    tested = [row for row in read_tested(DATA / TESTED) if row.topology.world_size == 256]

    def copying(row: Row) -> float:
        assert isinstance(row.job.stack, Program)
        stack = replace(row.job.stack, sliced_tensors=0)
        without = replace(row, job=replace(row.job, stack=stack))
        return predicted_seconds(row, profile) - predicted_seconds(without, profile)

    for row in (row for row in tested if row.candidate.layout.pp == 1):
        is_sharded = megatron_variant(row.candidate).shards_optimizer
        slices = 6 * row.job.shape.num_layers * row.candidate.layout.dp
        assert copying(row) == pytest.approx(12e-6 * slices if is_sharded else 0.0, abs=1e-9)
