"""What a plan considers: every micro-batch that the batch allows, DDP, ZeRO-0, and the engines with the optimizer."""

from dataclasses import replace

import pytest

from megabench.config import ConfigError, RunConfig
from megabench.cost.job import Candidate, Job
from megabench.cost.profile import profile_for
from megabench.errors import UserError
from megabench.hardware.topology import Topology
from megabench.optim.optimizers import OPTIMIZERS
from megabench.parallel.layout import Layout, LayoutError, divisors
from megabench.planner.engines.sharding import Sharding
from megabench.planner.make_plan import make_plan
from megabench.planner.plan_json import describe
from megabench.planner.reasons import chosen, reason
from megabench.planner.search import candidates, plan, settings_of
from megabench.planner.train_command import train_command
from megabench.train.flags import parse_flags
from tests.planner.jobs import cluster, costs, hosts, job

FOUR = hosts(1, 4)


def sharding_stages(work: Job, topology: Topology = FOUR) -> set[tuple[str, int]]:
    found = (one for one in candidates(work, topology) if isinstance(one.variant, Sharding))
    return {(one.engine, one.variant.zero_stage) for one in found if isinstance(one.variant, Sharding)}


@pytest.mark.parametrize("number", [1, 2, 9, 12, 97, 360, 5040])
def test_divisors_are_all_divisors(number):
    assert divisors(number) == [one for one in range(1, number + 1) if number % one == 0]
    assert divisors(number, 10) == [one for one in range(1, min(number, 10) + 1) if number % one == 0]


@pytest.mark.parametrize("sizes", [{"dp": 1}, {"dp": 4}, {"dp": 3, "pp": 2}, {"dp": 2, "pp": 4, "vp": 2}, {"dp": 7}])
def test_micro_batches_are_those_that_the_check_of_a_layout_accepts(sizes):
    layout = Layout(**sizes)

    def is_accepted(micro_batch: int) -> bool:
        try:
            layout.check_batch(96, micro_batch)
        except LayoutError:
            return False
        return True

    assert layout.micro_batches(96) == [size for size in range(1, 97) if is_accepted(size)]


def test_every_micro_batch_is_planned():
    """A batch of 96 on 4 GPUs is 24 sequences per replica, and 3 · 2 stages interleave at most 12 of 24."""
    found = list(candidates(job("qwen3-0.6b", global_batch=96), FOUR))
    sizes = {one.micro_batch for one in found if one.engine == "ddp"}
    assert sizes == {1, 2, 3, 4, 6, 8, 12, 24}
    whole = {one.micro_batch for one in found if (one.layout.tp, one.layout.pp) == (4, 1)}
    assert whole == set(divisors(96))


def test_the_fastest_micro_batch_may_be_larger_than_16():
    """Short sequences need large micro-batches to keep a GPU busy."""
    topology = cluster("p5e.48xlarge:1:4")
    found = plan(job("qwen3-0.6b", 256, 1024), topology, profile_for(topology.hosts[0].device))
    assert found.ranked[0].candidate.micro_batch > 16
    small = replace(found.ranked[0].candidate, micro_batch=16)
    assert costs(found.job, topology).estimate(small).step_seconds > found.ranked[0].step_seconds


@pytest.mark.parametrize(
    ("model", "where", "seq_length", "settings"),
    [
        ("llama3-8b", "p5.48xlarge:2", 4096, {"precision": "fp8"}),
        ("llama3-70b", "p5.48xlarge:8", 8192, {"bytes_of_gradient": 2}),
        ("qwen3-0.6b", "p4d.24xlarge:1", 1024, {}),
    ],
)
def test_memory_grows_with_the_micro_batch_so_the_search_may_stop_early(model, where, seq_length, settings):
    """The search leaves out larger micro-batches than the first one without enough memory, except of data parallelism.

    Nothing that fits, or may fit, is left out.
    """
    work, topology = job(model, seq_length, 240, **settings), cluster(where)
    judge = costs(work, topology)
    smaller: Candidate | None = None
    for candidate in candidates(work, topology):
        if (
            smaller
            and candidate.engine == "megatron"
            and replace(candidate, micro_batch=smaller.micro_batch) == smaller
        ):
            assert judge.memory(candidate).total >= judge.memory(smaller).total * (1 - 1e-9), candidate.name
        smaller = candidate
    found = plan(work, topology, judge.profile)
    assert found.num_fitting == sum(judge.missing_bytes(candidate) <= 0 for candidate in candidates(work, topology))


def test_zero_0_and_ddp_are_planned_if_the_engine_accepts_the_gradient_dtype():
    """Without masters in fp32, DeepSpeed's ZeRO-0 accumulates gradients of 16 bits only in 16 bits."""
    assert {("ddp", 0), ("deepspeed", 1)} <= sharding_stages(job())
    assert ("deepspeed", 0) not in sharding_stages(job())
    assert ("deepspeed", 0) in sharding_stages(job(bytes_of_gradient=2))
    assert ("deepspeed", 0) in sharding_stages(job(precision="fp32"))
    for grad_dtype, is_planned in (("fp32", False), ("bf16", True)):
        run = RunConfig.parse({"engine": "deepspeed", "zero_stage": 0, "grad_dtype": grad_dtype})
        if is_planned:
            run.resolve(4, "cuda")
        else:
            with pytest.raises(ConfigError, match="only in bf16"):
                run.resolve(4, "cuda")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("bytes_of_gradient", [2, 4])
def test_engines_are_planned_with_exactly_the_optimizers_that_they_accept(optimizer, bytes_of_gradient):
    """Every variant that is planned with AdamW is planned with another optimizer if a run with it is accepted."""
    work = job(global_batch=32, optimizer=optimizer, bytes_of_gradient=bytes_of_gradient)
    planned = set(candidates(work, FOUR))
    grad_dtype = "fp32" if bytes_of_gradient == 4 else "bf16"
    kinds = {(one.engine, one.variant): one for one in candidates(replace(work, optimizer="adamw"), FOUR)}
    for candidate in kinds.values():
        fields = {"model": "llama3-8b", "seq_length": 4096, "global_batch": 32, "grad_dtype": grad_dtype}
        run = RunConfig.parse(fields | settings_of(candidate) | {"optimizer": optimizer})
        try:
            run.resolve(4, "cuda")
        except UserError:
            assert candidate not in planned, candidate.name
        else:
            assert candidate in planned, candidate.name


def test_the_optimizer_changes_state_and_update():
    """SGD has no state, so a DDP replica of 8 billion parameters needs 8 bytes per parameter less."""
    topology = cluster("p6-b200.48xlarge:1")
    work = job(global_batch=8)
    candidate = Candidate("ddp", Layout(dp=8), 1, Sharding(0), "full")
    adamw, sgd = (costs(replace(work, optimizer=name), topology).estimate(candidate) for name in ("adamw", "sgd"))
    assert adamw.memory.optimizer - sgd.memory.optimizer == pytest.approx(8 * work.num_parameters)
    assert sgd.parts["optimizer"] < adamw.parts["optimizer"]
    offloaded = Candidate("deepspeed", Layout(dp=8), 1, Sharding(3, "optimizer"))
    slow, fast = (costs(replace(work, optimizer=name), topology).estimate(offloaded) for name in ("adamw", "sgd"))
    assert fast.parts["offload"] < slow.parts["offload"]


def planned(optimizer: str):
    return make_plan("qwen3-0.6b", "p5.48xlarge:1", 4096, 64, None, "fp32", None, 12, None, optimizer=optimizer)


def test_the_command_of_a_plan_has_its_optimizer():
    found = planned("muon")
    command = train_command(found, chosen(found).candidate)
    run = parse_flags(command.partition("-m megabench.train ")[2].split())
    assert run and run.resolve(8, "cuda").optimizer == "muon"
    assert {one.candidate.engine for one in found.ranked} == {"ddp"}
    assert "No engine with tensor or pipeline parallelism has optimizer=muon" in reason(found)
    assert describe(found, 1)["optimizer"] == "muon"
    plain = planned("adamw")
    assert "--optimizer" not in train_command(plain, chosen(plain).candidate)


def test_an_optimizer_that_cannot_be_planned_is_refused():
    with pytest.raises(ConfigError, match=r"^optimizer='adam' is unknown; use adamw, sgd, adafactor, muon$"):
        planned("adam")
