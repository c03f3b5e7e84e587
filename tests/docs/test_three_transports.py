"""The predicted step times on docs/three-transports.md are those of the planner."""

import re
from pathlib import Path

import pytest

from megabench.config.clusters import read_cluster
from megabench.cost.job import Candidate, Recompute
from megabench.parallel.layout import Layout
from megabench.planner.engines.megatron_memory import MegatronVariant
from megabench.planner.engines.sharding import Sharding
from tests.docs.command_blocks import read_blocks
from tests.planner.jobs import costs, job

PAGE = (Path(__file__).parents[2] / "docs/three-transports.md").read_text(encoding="utf-8")
FILES = {block.title: block.text for block in read_blocks(PAGE) if block.title}
ENI = FILES["p4de-eni-pods.yaml"]
CLUSTERS = {
    "one pod": "p4d.24xlarge:1:4",
    "EFA": FILES["p4d-efa-pods.yaml"],
    "ENI": ENI.replace("p4de.24xlarge,", "p4d.24xlarge,"),
    "ENI, 80 GB": ENI,
    "p5, one pod": "p5.48xlarge:1:4",
    "p5, EFA": FILES["p4d-efa-pods.yaml"].replace("p4d.24", "p5.48"),
}
OFFLOAD = Sharding(3, "all")
KEPT = Sharding(3, keeps_weights=True)


def seconds(place: str, candidate: Candidate, folder: Path) -> float:
    text = CLUSTERS[place]
    path = folder / "cluster.yaml"
    path.write_text(text)
    topology = read_cluster(str(path) if "hosts:" in text else text)
    return costs(job(seq_length=2048, global_batch=16, bytes_of_gradient=2), topology).estimate(candidate).step_seconds


def zero3(micro_batch: int, sharding: Sharding = OFFLOAD, recompute: Recompute = "full") -> Candidate:
    return Candidate("deepspeed", Layout(dp=4), micro_batch, sharding, recompute)


def megatron(micro_batch: int, recompute: Recompute = "none", **sizes: int) -> Candidate:
    return Candidate("megatron", Layout(**sizes).with_world_size(4), micro_batch, MegatronVariant(), recompute)


@pytest.mark.parametrize(
    ("row", "column", "place", "candidate"),
    [
        ("one pod of four GPUs", 5, "one pod", zero3(1)),
        ("four pods of one GPU, EFA", 5, "EFA", zero3(1)),
        ("four pods of one GPU, ENI", 5, "ENI", zero3(1)),
        ("one pod", 3, "one pod", zero3(4)),
        ("one pod", 4, "one pod", megatron(2, "full", tp=2, pp=2, vp=8)),
        ("four pods, EFA", 3, "EFA", zero3(4)),
        ("four pods, EFA", 4, "EFA", megatron(2, "full", tp=2, pp=2, vp=4)),
        ("four pods, ENI", 3, "ENI", zero3(4)),
        ("four pods, ENI", 4, "ENI", megatron(2, "full", tp=2, pp=2, vp=16)),
        ("four pods, ENI, A100s with 80 GB (p4de)", 3, "ENI, 80 GB", zero3(4)),
        ("four pods, ENI, A100s with 80 GB (p4de)", 4, "ENI, 80 GB", megatron(1, pp=4, vp=2)),
        ("p5, one pod of four GPUs", 4, "p5, one pod", zero3(1)),
        ("p5, one pod of four GPUs", 5, "p5, one pod", megatron(4, tp=2)),
        ("p5, four pods of one GPU, EFA", 4, "p5, EFA", zero3(1)),
        ("p5, four pods of one GPU, EFA", 5, "p5, EFA", megatron(1, pp=4, vp=2)),
    ],
)
def test_a_table_has_the_predicted_seconds(row, column, place, candidate, tmp_path):
    rows = [line.split("|") for line in PAGE.splitlines() if line.startswith(f"| {row} |")]
    cell = next(cells[column] for cells in rows if len(cells) > column + 1)
    shown = re.search(r"(\d+\.\d+)(?= s\b|\b)", cell)[1]
    decimals = len(shown.partition(".")[2])
    assert f"{seconds(place, candidate, tmp_path):.{decimals}f}" == shown


def test_kept_weights_over_eni(tmp_path):
    assert f"ZeRO-3 with kept weights {seconds('ENI, 80 GB', zero3(4, KEPT), tmp_path):.1f} s" in PAGE
