"""Ratios of step times that users measured with programs of their own, and the predicted ratios.

The programs are HF Trainer and plain DeepSpeed, FSDP and DDP, with unfused kernels. Their steps take several times as
long as predicted, so only ratios are compared. docs/planning.md has all figures and the differences of the programs.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from megabench.cost.job import Candidate, Job, Recompute
from megabench.cost.profile import profile_for
from megabench.hardware.gpus import Network
from megabench.hardware.topology import Host, Topology, build, from_cluster
from megabench.models.find import find_model
from megabench.parallel.layout import Layout
from megabench.planner.costs import Costs
from megabench.planner.engines.sharding import Offload, Sharding

DOCUMENT = Path(__file__).parents[2] / "docs/planning.md"
TOLERANCE = 0.15  # of the ratios that the model reaches; chosen after the predictions were known
_LEAST_EFFECT = (
    0.05  # predicted difference of a ratio from 1, as a share of the measured one, below which none is reached
)
SEQ_LENGTH = 2048  # of Llama-3-8B; the users did not state it


@dataclass(frozen=True)
class Run:
    """A data-parallel run: its layout, its batch and its kernels' precision."""

    topology: Topology
    model: str
    engine: str = "deepspeed"
    stage: int = 3
    micro_batch: int = 1
    accumulation: int = 1
    seq_length: int = SEQ_LENGTH
    recompute: Recompute = "none"
    offload: Offload = "none"
    precision: str = "bf16"
    bytes_of_gradient: int = 4
    optimizer: str = "adamw"

    @property
    def tokens(self) -> int:
        return self.micro_batch * self.accumulation * self.seq_length * self.topology.world_size

    @cache  # noqa: B019 - a run is frozen, and there are few
    def step_seconds(self) -> float:
        ranks = self.topology.world_size
        work = Job(
            find_model(self.model),
            self.seq_length,
            self.micro_batch * self.accumulation * ranks,
            precision=self.precision,
            bytes_of_gradient=self.bytes_of_gradient,
            optimizer=self.optimizer,
        )
        sharding = Sharding(self.stage, self.offload)
        candidate = Candidate(self.engine, Layout(dp=ranks), self.micro_batch, sharding, self.recompute)
        return Costs(work, self.topology, profile_for(self.topology.hosts[0].device)).estimate(candidate).step_seconds

    def seconds_per_token(self) -> float:
        return self.step_seconds() / self.tokens


def pods(one_pod: Topology, kind: Network, gbits: float | None = None) -> Topology:
    """The GPUs of a host as pods with one GPU each, on one server with the NICs of the host, or with `gbits`."""
    host = one_pod.hosts[0]
    pod = replace(host, network=kind, network_gbits=gbits or host.network_gbits, server="server-0")
    return build([(replace(pod, name=f"pod-{number}"), 1, 1) for number in range(one_pod.world_size)])


P4D, P5 = from_cluster("p4d.24xlarge:1:4"), from_cluster("p5.48xlarge:1:4")
P4D_EFA, P4D_SOCKETS = pods(P4D, "efa"), pods(P4D, "socket")
P5_EFA, P5_ONE_NIC_EACH = pods(P5, "efa"), pods(P5, "efa", 4 * 100.0)


def llama(topology: Topology, **changes) -> Run:
    """ZeRO-3 with both offloads. DeepSpeed reduces and accumulates bf16 gradients in bf16."""
    settings: dict[str, Any] = {"accumulation": 4, "recompute": "full", "offload": "all", "bytes_of_gradient": 2}
    return Run(topology, "llama3-8b", **(settings | changes))


H100_NVL = build([(Host("host", "NVIDIA H100 NVL", "pcie", "socket"), 1, 1)])


def gpt2(stage: int, precision: str = "fp16") -> Run:
    return Run(H100_NVL, "gpt2", stage=stage, micro_batch=32, seq_length=128, precision=precision)


@cache
def omni_path(num_gpus: int) -> Topology:
    """Hosts of up to eight A100s with one Omni-Path port of 100 Gbit/s each. The users did not state their number."""
    host = Host("host", "NVIDIA A100-SXM4-80GB", "pcie", "infiniband", 100.0, 300.0)
    size = min(num_gpus, 8)
    return build([(replace(host, name=f"host-{number}"), size, size) for number in range(num_gpus // size)])


def bloom(num_gpus: int, engine: str = "deepspeed", stage: int = 1, accumulation: int = 256, **changes) -> Run:
    settings: dict[str, Any] = {"micro_batch": 2, "seq_length": 1024} | changes
    topology = omni_path(num_gpus)
    return Run(topology, "bloom-7b1", engine, stage, accumulation=accumulation, **settings)


bloom_2048 = partial(bloom, seq_length=2048, recompute="full")
adafactor = partial(
    bloom, engine="ddp", stage=0, accumulation=1, micro_batch=1, recompute="full", optimizer="adafactor"
)


def steps(one: Run, other: Run) -> Callable[[], float]:
    return lambda: one.step_seconds() / other.step_seconds()


def tokens(one: Run, other: Run) -> Callable[[], float]:
    """The ratio of the seconds per token, which is that of the days of a training run."""
    return lambda: one.seconds_per_token() / other.seconds_per_token()


@dataclass(frozen=True)
class Case:
    """A measured ratio and its prediction. docs/planning.md says why the model does not reach some of them."""

    name: str
    measured: float
    predicted: Callable[[], float]

    @property
    def reached(self) -> str:
        """What the model reaches, in the words of docs/planning.md: the ratio, only the order, or neither.

        A ratio is reached if it is within TOLERANCE and its difference from 1 is within a factor of two.
        """
        predicted = self.predicted()
        effect = (predicted - 1) / (self.measured - 1)
        if abs(predicted / self.measured - 1) <= TOLERANCE and 0.5 <= effect <= 2:
            return "ratio"
        return "order only" if effect > _LEAST_EFFECT else "no"


def minutes(text: str) -> float:
    numbers = [int(part) for part in text.split(":")]
    return numbers[0] * 60 + numbers[1]


CASES = [
    Case(
        "A100: four pods over EFA ÷ one pod",
        minutes("39:32") / minutes("16:21"),
        steps(llama(P4D_EFA), llama(P4D)),
    ),
    Case(
        "A100: four pods over sockets ÷ one pod",
        minutes("80:29") / minutes("16:21"),
        steps(llama(P4D_SOCKETS), llama(P4D)),
    ),
    Case(
        "A100: four pods over sockets ÷ four pods over EFA",
        minutes("80:29") / minutes("39:32"),
        steps(llama(P4D_SOCKETS), llama(P4D_EFA)),
    ),
    Case(
        "H100: four pods over EFA, with all 32 NICs ÷ one pod",
        minutes("66:09") / minutes("20:06"),
        steps(llama(P5_EFA), llama(P5)),
    ),
    Case(
        "H100: the same with one NIC per pod",
        minutes("66:09") / minutes("20:06"),
        steps(llama(P5_ONE_NIC_EACH), llama(P5)),
    ),
    Case("one pod: H100 ÷ A100", minutes("20:06") / minutes("16:21"), steps(llama(P5), llama(P4D))),
    Case(
        "A100, four pods over EFA: micro-batch 4 without recomputation ÷ micro-batch 1 with it",
        minutes("28:15") / minutes("39:32"),
        steps(llama(P4D_EFA, micro_batch=4, recompute="none"), llama(P4D_EFA)),
    ),
    Case("GPT-2 in fp16: ZeRO-1 ÷ ZeRO-0", 0.200 / 0.185, steps(gpt2(1), gpt2(0))),
    Case("GPT-2 in fp16: ZeRO-2 ÷ ZeRO-0", 0.199 / 0.185, steps(gpt2(2), gpt2(0))),
    Case("GPT-2 in fp16: ZeRO-3 ÷ ZeRO-0", 0.361 / 0.185, steps(gpt2(3), gpt2(0))),
    Case("GPT-2 in fp16: ZeRO-3 ÷ ZeRO-2", 0.361 / 0.199, steps(gpt2(3), gpt2(2))),
    Case("GPT-2 in fp32: ZeRO-1 ÷ ZeRO-0", 7445 / 7195, steps(gpt2(1, "fp32"), gpt2(0, "fp32"))),
    Case("GPT-2 in fp32: ZeRO-2 ÷ ZeRO-0", 7445 / 7187, steps(gpt2(2, "fp32"), gpt2(0, "fp32"))),
    Case("GPT-2 in fp32: ZeRO-3 ÷ ZeRO-0", 0.617 / 0.576, steps(gpt2(3, "fp32"), gpt2(0, "fp32"))),
    Case("BLOOM, ZeRO-1, accumulation 256: 32 ÷ 16 GPUs", 29 / 57, tokens(bloom(32), bloom(16))),
    Case("BLOOM, ZeRO-1, accumulation 256: 40 ÷ 16 GPUs", 23 / 57, tokens(bloom(40), bloom(16))),
    Case("BLOOM, ZeRO-1, accumulation 256: 48 ÷ 16 GPUs", 19 / 57, tokens(bloom(48), bloom(16))),
    Case("BLOOM, ZeRO-1, recomputation: 48 ÷ 32 GPUs", 28 / 40, tokens(bloom_2048(48), bloom_2048(32))),
    Case("BLOOM, DDP with Adafactor: 8 ÷ 2 GPUs", 350 / 1200, tokens(adafactor(8), adafactor(2))),
    Case("BLOOM, DDP with Adafactor: 16 ÷ 8 GPUs", 700 / 350, tokens(adafactor(16), adafactor(8))),
    Case(
        "BLOOM, FSDP without accumulation: 16 ÷ 8 GPUs",
        2.0,
        tokens(bloom(16, "fsdp", 3, accumulation=1), bloom(8, "fsdp", 3, accumulation=1)),
    ),
    Case("BLOOM, 32 GPUs, accumulation 256: ZeRO-3 ÷ ZeRO-1", 218 / 29, tokens(bloom(32, stage=3), bloom(32))),
    Case(
        "BLOOM, 32 GPUs, ZeRO-3: accumulation 16 ÷ 256",
        252 / 218,
        tokens(bloom(32, stage=3, accumulation=16), bloom(32, stage=3)),
    ),
]


@pytest.mark.parametrize("seq_length", [512, 1024, 2048, 4096, 8192])
def test_one_pod_is_faster_than_four_at_every_length(seq_length):
    for one_pod, others in ((P4D, (P4D_EFA, P4D_SOCKETS)), (P5, (P5_EFA, P5_ONE_NIC_EACH))):
        places = (one_pod, *others)
        found = [llama(topology, seq_length=seq_length).step_seconds() for topology in places]
        assert found == sorted(found)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_page_has_the_ratios_and_what_is_reached(case: Case):
    (row,) = re.findall(rf"^\| {re.escape(case.name)} \| (.*) \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert row == f"{case.measured:.2f} | {case.predicted():.2f} | {case.reached}"


def test_most_ratios_are_reached():
    """Nine of the ratios, among them those of pods of one server and of numbers of GPUs."""
    reached = {case.name for case in CASES if case.reached == "ratio"}
    assert len(reached) == 9
    assert {case.name for case in CASES if case.name.startswith(("A100: ", "BLOOM, ZeRO-1"))} <= reached
