"""Reading published runs, and the scores."""

import math

import pytest

from megabench.planner.validation.own import read_own
from megabench.planner.validation.published import DataError, read_rows
from megabench.planner.validation.score import accuracy, alarm, regret, spearman
from tests.study.compare_process import REPOSITORY

HEAD = (
    "source,model,params_b,layers,hidden,heads,kv_heads,ffn,vocab,seq,gpu,gpus,gpus_per_node,inter_node_gbps_per_node,"
    "tp,pp,vp,cp,dp,zero_stage,micro_batch,global_batch,precision,recompute,metric,value,note"
)
SWEEP = "HF Ultra-Scale,llama-1B-mha,1.34,16,2048,32,32,8192,131072,4096,H100-80GB-SXM"
SC21 = "arXiv:2104.04473 Table 1 (image),gpt-1.7B,1.7,24,2304,24,24,9216,51200,2048,A100-80GB-SXM"


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
    path = tmp_path / "runs.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_rows_of_one_configuration_are_one(table):
    one_node, many_nodes, sc21 = read_rows(table)
    assert one_node.is_fit and not many_nodes.is_fit and not sc21.is_fit
    assert one_node.measured["seconds"] == pytest.approx(256 * 4096 / 27877 / 8)
    assert one_node.measured["memory_gib"] == 12.5
    assert many_nodes.measured == {"oom": 1.0} and len(many_nodes.topology.hosts) == 8


def test_sc21_counts_its_own_flops(table):
    sc21 = read_rows(table)[2]
    flops = 96 * 512 * 2048 * 24 * 2304**2 * (1 + 2048 / (6 * 2304) + 51200 / (16 * 24 * 2304))
    assert sc21.measured["seconds"] == pytest.approx(flops / (137e12 * 32))


def test_a_table_of_something_else_is_refused(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="no columns source and metric"):
        read_rows(path)
    with pytest.raises(DataError, match="cannot read"):
        read_rows(tmp_path / "none.csv")


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
