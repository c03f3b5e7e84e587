"""Predictions of fp8 runs: products, casts, communication and memory."""

from dataclasses import astuple, replace
from typing import Any, get_args

import pytest

from megabench.config import ConfigError
from megabench.cost import compute, network
from megabench.cost.compute import GpuModel
from megabench.cost.job import FUSED_LOSS_CHUNK, Candidate, Job, Product, Stack
from megabench.cost.profile import profile_for
from megabench.engines.common import cross_entropy
from megabench.parallel.layout import Layout
from megabench.planner.engines.data_parallel_cost import DataParallel
from megabench.planner.engines.megatron_cost import Pipeline
from megabench.planner.engines.sharding import Sharding
from megabench.planner.make_plan import make_plan
from megabench.planner.plan_json import describe
from megabench.planner.predict import candidate_of, job_of
from megabench.planner.search import candidates, plan
from megabench.planner.train_command import train_command
from megabench.precision import Fp8Recipe
from megabench.record import Fp8Work
from megabench.specs.fp8_check import odd_size
from tests.planner.jobs import costs, hosts, job, megatron, zero
from tests.planner.test_plan import megabench
from tests.study.records import make_record, work_class

FOUR = hosts(1, 4)
H200 = GpuModel(profile_for("NVIDIA H200"), 989.4e12, 1978.9e12)


def in_fp8(**settings) -> Job:
    return job(precision="fp8", **settings)


def step(work: Job, candidate: Candidate) -> float:
    return costs(work, FOUR).estimate(candidate).step_seconds


def fsdp(**settings) -> Candidate:
    return Candidate("fsdp", Layout(dp=4), 1, Sharding(3, **settings))


def ddp(**settings) -> Candidate:
    return Candidate("ddp", Layout(dp=4), 1, Sharding(0), **settings)


@pytest.mark.parametrize(
    ("product", "least", "most"),
    [("forward", 1020, 1310), ("input_gradient", 930, 1240), ("weight_gradient", 1140, 1230)],
)
def test_rates_of_products_are_within_what_was_measured_on_an_h200(product: Product, least: float, most: float):
    for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
        sizes = {"forward": (8192, n, k), "input_gradient": (8192, k, n), "weight_gradient": (n, k, 8192)}[product]
        rate = 2 * 8192 * n * k / compute.fp8_gemm_seconds(H200, product, *sizes) / 1e12
        assert least < rate < most


def test_large_products_gain_more_than_small_ones():
    def gain(size: int) -> float:
        sizes = size, size, size
        return compute.gemm_seconds(H200, *sizes) / compute.fp8_gemm_seconds(H200, "forward", *sizes)

    assert gain(512) < gain(2048) < gain(8192) < 2


def test_wide_layers_train_faster_in_fp8_and_attention_does_not():
    candidate = megatron(FOUR, 2, pp=4)  # with one short sequence per micro-batch, the host would limit the step in fp8
    for seq_length, least, most in ((4096, 1.25, 1.5), (65536, 1.0, 1.2)):
        plain, fp8 = (job(precision=name, seq_length=seq_length, global_batch=64) for name in ("bf16", "fp8"))
        assert least < step(plain, candidate) / step(fp8, candidate) < most
    layer, other = (costs(work, FOUR).base.layer(1, 1, 1) for work in (job(), in_fp8()))
    assert layer.attention == other.attention
    ends, others = (costs(work, FOUR).base.output(1, 1, 1) for work in (job(), in_fp8()))
    assert ends == others


def test_casts_eat_what_small_products_gain():
    small, large = (
        step(job(model), megatron(FOUR)) / step(in_fp8(model=model), megatron(FOUR))
        for model in ("qwen3-0.6b", "llama3-8b")
    )
    assert small < 1.15 < large


def test_what_is_cast():
    """Inputs and gradients of four products, once each: 6 bytes an element for the largest value and two layouts."""
    h, q, kv, f = 4096, 4096, 1024, 14336
    bytes_of = compute.activation_cast_bytes(in_fp8(), 1)
    assert bytes_of == (6 * (2 * h + q + f), 6 * (q + 2 * kv + 2 * f + 2 * h))
    # before a gather 5 bytes for a part, and 2 for turning what was gathered: two inputs and two gradients
    bytes_of = compute.activation_cast_bytes(in_fp8(), 4)
    gathered = 5 * 2 * h / 4
    assert bytes_of == (6 * (q + f) / 4 + gathered, 6 * (q + 2 * kv + 2 * f) / 4 + gathered + 2 * 4 * h)
    # only the inputs, in one layout: 5 bytes
    in_bf16 = in_fp8(fp8_recipe="bf16-gradients")
    assert compute.activation_cast_bytes(in_bf16, 1) == (5 * (2 * h + q + f), 0)
    assert compute.activation_cast_bytes(in_bf16, 4) == (5 * (2 * h + q + f) / 4, 0)


def test_the_weight_gradient_is_added_after_its_product():
    stack = replace(job().stack, fuses_weight_gradient=True)
    assert compute.accumulated_bytes(job(stack=stack)) == 8
    assert compute.accumulated_bytes(in_fp8(stack=stack), fp8_share=1) == 12
    assert compute.accumulated_bytes(in_fp8(stack=stack), fp8_share=0.25) == 9
    stack = replace(stack, fuses_fp8_weight_gradient=True)
    assert compute.accumulated_bytes(in_fp8(stack=stack), fp8_share=1) == 8


def test_the_output_gradient_is_added_by_the_products_of_the_loss():
    """Bytes per parameter beside products and logits: 8 per chunk of tokens; without, 8 and 12 for another gradient."""
    unlimited = GpuModel(H200.profile.model_copy(update={"memory_gb_per_s": 1e18}), H200.peak)
    weights = job().embedding_parameters
    assert cross_entropy._CHUNK_LOGITS == FUSED_LOSS_CHUNK
    for micro_batch, chunks in ((1, 2), (2, 4)):  # a chunk has about 2,048 tokens
        logits = 4096 * micro_batch * job().shape.vocab_size
        for adds, forward, backward in ((True, 8 * chunks, 0), (False, 8 * chunks + 8, 12)):
            work = job(
                seq_length=4096, stack=replace(job().stack, adds_output_gradient=adds, fuses_weight_gradient=adds)
            )
            found, products = (compute.output_seconds(one, work, 1, 1, micro_batch) for one in (H200, unlimited))
            moved = [(a - b) * H200.profile.memory_gb_per_s * 1e9 for a, b in zip(found, products, strict=True)]
            assert moved == pytest.approx([12 * logits + forward * weights, backward * weights], rel=1e-6, abs=1)
    saved = [
        costs(job(stack=replace(job().stack, adds_output_gradient=adds)), FOUR).memory(megatron(FOUR)).logits
        for adds in (False, True)
    ]
    assert saved[0] - saved[1] == 6 * weights


@pytest.mark.parametrize(
    ("candidate", "once", "each", "once_in_rows", "each_in_rows"),
    [
        (zero(FOUR, 1), 6, 0, 5, 0),
        (zero(FOUR, 2), 6, 0, 5, 0),
        (ddp(), 6, 0, 5, 0),
        # forward: the largest value and one layout; backward: the other layout
        (ddp(is_compiled=True), 0, 5 + 3, 0, 5),
        (ddp(is_compiled=True, recompute="full"), 0, 5 + 5 + 3, 0, 5 + 5),
        (zero(FOUR, 3), 0, 5 + 3, 0, 5),
        (replace(zero(FOUR, 3), recompute="full"), 0, 5 + 5 + 3, 0, 5 + 5),
        (fsdp(), 0, 2, 0, 5),  # gathered in fp8, and turned for backward; in bf16 with bf16 gradients
    ],
)
def test_weights_are_cast_once_a_step_where_they_are_kept_and_in_each_pass_otherwise(
    candidate: Candidate, once: int, each: int, once_in_rows: int, each_in_rows: int
):
    def cast_seconds(work: Job, candidate: Candidate) -> float:
        model = DataParallel(costs(work, FOUR).base)
        geometry = model.base.geometry_of(candidate)
        plain = DataParallel(costs(replace(work, precision="bf16"), FOUR).base)
        once = model._once_a_step(candidate, geometry, 1.0)[1] - plain._once_a_step(candidate, geometry, 1.0)[1]
        return once + candidate.num_micro_batches(work) * model._weight_cast_seconds(candidate)

    for count in (1, 8):
        work = in_fp8(global_batch=4 * count)
        seconds = compute.cast_seconds(costs(work, FOUR).base.machine, work.block_parameters)
        assert cast_seconds(work, candidate) / seconds == pytest.approx(once + count * each)
        in_rows = replace(work, fp8_recipe="bf16-gradients")
        assert cast_seconds(in_rows, candidate) / seconds == pytest.approx(once_in_rows + count * each_in_rows)


def test_megatron_casts_weights_in_one_layout_with_bf16_gradients():
    updates = []
    for work in (job(), in_fp8(fp8_recipe="bf16-gradients"), in_fp8()):
        updates.append(costs(work, FOUR).estimate(megatron(FOUR)).parts["optimizer"])
    seconds = compute.cast_seconds(costs(in_fp8(), FOUR).base.machine, job().block_parameters)
    assert updates[1] - updates[0] == pytest.approx(5 * seconds)
    assert updates[2] - updates[0] == pytest.approx(6 * seconds)


def test_compiled_ddp_repeats_casts_and_is_slower_in_fp8_alone():
    assert step(job(), ddp(is_compiled=True)) == step(job(), ddp())
    assert step(in_fp8(), ddp(is_compiled=True)) > step(in_fp8(), ddp())


def test_tensor_parallel_gathers_are_halved_and_reductions_are_not():
    topology, tp = hosts(1, 2, nvlink_gb_per_s=1), 2  # so slow that products cannot hide what is sent
    work = in_fp8(seq_length=65536, stack=Stack(copies="never"))
    candidate = megatron(topology, tp=tp)
    found = {}
    works = {recipe: replace(work, fp8_recipe=recipe) for recipe in get_args(Fp8Recipe)}
    for recipe, chosen in {"bf16": replace(work, precision="bf16"), **works}.items():
        model = Pipeline(costs(chosen, topology).base)
        found[recipe] = model._communication(model.base.sizes(candidate), 1)[:2]
    forward, backward = found["bf16"]
    assert found["tensorwise"][0] / forward == pytest.approx(3 / 4, rel=0.01)
    assert found["tensorwise"][1] < 0.75 * backward
    assert found["bf16-gradients"][0] == found["tensorwise"][0] and found["bf16-gradients"][1] == backward


def test_parts_of_a_tensor_agree_on_their_largest_value():
    """Four times in each pass, also under context parallelism alone."""
    topology = hosts(1, 4)
    for sizes in ({"tp": 4}, {"cp": 4}):
        waits = []
        for work in (job(), in_fp8()):
            model = Pipeline(costs(work, topology).base)
            waits.append(model._communication(model.base.sizes(megatron(topology, **sizes)), 1))
        if "cp" in sizes:
            world = model.base.geometry_of(megatron(topology, **sizes)).world
            agree = 4 * network.all_reduce_seconds(model.profile, world, 4)
            assert waits[1][2] - waits[0][2] == pytest.approx(agree)
        assert waits[1][4] == waits[0][4] + 4


def test_fsdp_gathers_half_and_zero_3_the_same():
    slow = hosts(2, 1, network_gbits=10)
    for candidate, ratio in ((fsdp(), 0.5), (zero(FOUR), 1.0)):
        candidate = replace(candidate, layout=Layout(dp=2))
        gathers = []
        for work in (job(global_batch=2), in_fp8(global_batch=2)):
            model = DataParallel(costs(work, slow).base)
            gathers.append(model._sharded_seconds(candidate, model.base.geometry_of(candidate)))
        (forward, backward, reduce, ends), (*others, reduce_fp8, ends_fp8) = gathers
        assert others == pytest.approx([ratio * forward, ratio * backward], rel=0.01)
        assert (reduce_fp8, ends_fp8) == (reduce, ends)


def test_inputs_are_saved_in_half_the_bytes_and_casts_of_weights_are_kept():
    candidate = megatron(FOUR)
    plain, fp8 = (costs(work, FOUR).memory(candidate) for work in (job(), in_fp8()))
    h, f, tokens = 4096, 14336, 4096
    # attention keeps its output in bf16 for itself, beside its fp8 copy
    assert plain.activations - fp8.activations == tokens * 32 * (2 * h + f - h)
    assert fp8.weights - plain.weights == 2 * job().block_parameters
    shares = costs(in_fp8(), FOUR).memory(megatron(FOUR, tp=2, pp=2))
    halves = costs(job(), FOUR).memory(megatron(FOUR, tp=2, pp=2))
    assert shares.weights - halves.weights == pytest.approx(2 * job().block_parameters / 4, rel=0.1)
    in_bf16 = costs(in_fp8(fp8_recipe="bf16-gradients"), FOUR).memory(candidate)
    assert in_bf16.activations == plain.activations
    assert in_bf16.weights - plain.weights == job().block_parameters


@pytest.mark.parametrize("recipe", ["tensorwise", "bf16-gradients"])
@pytest.mark.parametrize(
    "candidate",
    [megatron(FOUR), megatron(FOUR, tp=2, pp=2), zero(FOUR, 1), zero(FOUR), fsdp(), ddp(), ddp(is_compiled=True)],
)
def test_layers_in_bf16_cost_what_they_cost_in_bf16(candidate: Candidate, recipe: Fp8Recipe):
    """With 8 of 32 layers in bf16, costs are three quarters of those in fp8 and a quarter of those in bf16."""
    candidate = replace(candidate, micro_batch=4)  # large enough that no layer waits for the host
    work = in_fp8(fp8_recipe=recipe)
    bf16, mixed, fp8 = (costs(one, FOUR) for one in (job(), replace(work, num_layers_at_end_in_bf16=8), work))
    seconds = [model.estimate(candidate).step_seconds for model in (bf16, mixed, fp8)]
    assert seconds[1] == pytest.approx(seconds[0] / 4 + 3 * seconds[2] / 4, rel=3e-3)
    for before, found, after in zip(*(astuple(model.memory(candidate)) for model in (bf16, mixed, fp8)), strict=True):
        assert found == pytest.approx(before / 4 + 3 * after / 4)


def test_a_record_tells_its_layers_in_bf16_and_whether_it_was_compiled():
    fp8 = Fp8Work(recipe="bf16-gradients", num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=2)
    record = make_record(
        [5.0], engine="ddp", options={"compile": True}, precision="fp8", work_class=work_class(fp8=fp8)
    )
    work = job_of(record)
    assert (work.num_layers_at_start_in_bf16, work.num_layers_at_end_in_bf16) == (1, 2)
    assert work.fp8_recipe == "bf16-gradients"
    assert candidate_of(record).is_compiled


@pytest.mark.parametrize(
    ("candidate", "bytes_a_parameter"),
    [
        (zero(FOUR, 1), 2),
        (zero(FOUR, 3), 0),
        (fsdp(keeps_weights=True), -1),
        (ddp(), 0),  # in place of the casts to bf16
        (ddp(recompute="full"), 2),
        (ddp(is_compiled=True), -2),  # casts are not kept
        (ddp(is_compiled=True, recompute="full"), 0),
    ],
)
def test_what_weights_take_in_fp8(candidate: Candidate, bytes_a_parameter: int):
    plain, fp8 = (costs(work, FOUR).memory(candidate).weights for work in (job(), in_fp8()))
    assert fp8 - plain == bytes_a_parameter * job().block_parameters


def test_mfu_is_of_the_peak_in_fp8():
    estimate = costs(in_fp8(), FOUR).estimate(megatron(FOUR))
    assert estimate.mfu * 1978.9e12 == pytest.approx(estimate.tokens_per_second_per_device * in_fp8().flops_per_token)


def test_only_sizes_that_divide_by_16_are_planned():
    work = in_fp8(model="qwen3-0.6b", seq_length=24)
    odd = [one for one in candidates(work, FOUR) if odd_size(work.shape, one.layout, one.micro_batch, work.seq_length)]
    assert not odd
    assert {one.micro_batch for one in candidates(work, FOUR) if one.layout.cp == 1} == {2, 4, 8, 16, 32, 64}


@pytest.mark.parametrize(
    ("num_hosts", "seq_length", "global_batch", "shape", "says"),
    [
        (1, 8191, 8, {}, "16, but micro_batch·seq_length=8191 / cp=1 is 8191; use seq_length=8192, or precision=bf16"),
        # one sequence on 512 GPUs needs context parallelism
        (64, 8208, 1, {}, "16, but micro_batch·seq_length=8208 / cp=8 is 1026; use seq_length=8224, or precision=bf16"),
        (1, 8192, 8, {"num_kv_heads": 1, "head_dim": 24}, "num_kv_heads·head_dim=24 / tp=1 is 24; use precision=bf16"),
        (1, 8191, 3, {"num_layers": 7}, "8 GPUs cannot divide .* multiple of the number of GPUs, e.g. 8"),
    ],
)
def test_an_empty_plan_names_its_cause_and_a_remedy(
    num_hosts: int, seq_length: int, global_batch: int, shape: dict[str, Any], says: str
):
    work = in_fp8(seq_length=seq_length, global_batch=global_batch)
    with pytest.raises(ConfigError, match=says):
        plan(replace(work, shape=replace(work.shape, **shape)), hosts(num_hosts, 8), profile_for("NVIDIA H200"))


def planned(precision: str, model: str = "llama3-8b", cluster: str = "p5e.48xlarge:1", **settings: Any):
    return make_plan(model, cluster, 8192, 64, None, "fp32", None, 12, None, precision=precision, **settings)


def test_a_plan_in_fp8_is_faster_and_its_command_says_so():
    plain, fp8 = planned("bf16"), planned("fp8")
    assert 1.15 < plain.ranked[0].step_seconds / fp8.ranked[0].step_seconds < 1.5
    fp8_command, plain_command = (train_command(one, one.ranked[0].candidate) for one in (fp8, plain))
    assert fp8_command.endswith("--precision fp8") and "--precision" not in plain_command
    layers: dict[str, Any] = {"num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 2}
    mixed = planned("fp8", fp8_recipe="bf16-gradients", **layers)
    flags = "--fp8-recipe bf16-gradients --num-layers-at-start-in-bf16 1 --num-layers-at-end-in-bf16 2"
    assert train_command(mixed, mixed.ranked[0].candidate).endswith(f"--precision fp8 {flags}")
    assert mixed.job.fp8_share("forward") == pytest.approx(29 / 32)
    told, of_plain = describe(mixed, 1), describe(plain, 1)
    assert told.items() >= {"fp8_recipe": "bf16-gradients", **layers}.items() and of_plain["fp8_recipe"] is None


def test_fp8_that_a_gpu_a_profile_or_a_model_lacks_is_refused():
    for cluster in ("p4de.24xlarge:1", "g6e.48xlarge:1"):
        with pytest.raises(ConfigError, match=r"needs Hopper GPUs or newer ones, but the cluster has NVIDIA .*bf16"):
            planned("fp8", cluster=cluster)
    with pytest.raises(ConfigError, match="gpt2 has no linear layers in fp8; use precision=bf16"):
        make_plan("gpt2", "p5.48xlarge:1", 1024, 64, None, "fp32", None, 12, None, precision="fp8")
    older = profile_for("NVIDIA H200").model_copy(update={"fp8": None})
    with pytest.raises(ConfigError, match="profile h200 has no costs of fp8 products"):
        older.peak("NVIDIA H200", "fp8")


@pytest.mark.e2e
def test_the_command_line_plans_in_fp8():
    shown = megabench("plan", "--cluster", "p6-b200.48xlarge:1", "--precision", "fp8")
    assert shown.returncode == 0 and "· fp8" in shown.stdout and "--precision fp8" in shown.stdout
    assert "fp8 products: estimated" in shown.stdout
    for arguments, words in (
        (("--cluster", "p4d.24xlarge:2", "--precision", "fp8"), "precision=fp8 needs Hopper GPUs or newer ones"),
        (("--cluster", "p5.48xlarge:1", "--precision", "fp4"), "precision='fp4' is unknown; use bf16, fp16, fp8"),
        (("--cluster", "p5.48xlarge:1", "--precision", "fp16", "--grad-dtype", "bf16"), "use grad_dtype=fp32"),
        (
            ("--cluster", "p5.48xlarge:1", "--fp8-recipe", "tensorwise"),
            "works only with precision=fp8, but precision is bf16",
        ),
        (
            ("--cluster", "p5.48xlarge:1", "--precision", "fp8", "--num-layers-at-end-in-bf16", "32"),
            "leave none of the 32 layers in fp8",
        ),
    ):
        ended = megabench("plan", *arguments)
        assert ended.returncode == 2 and not ended.stdout
        assert words in ended.stderr and len(ended.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("candidate", [megatron(FOUR, dp=4), ddp()])
def test_transposing_in_backward_saves_a_byte_per_parameter_and_costs_time(candidate: Candidate):
    kept = in_fp8()
    stack = replace(kept.stack, keeps_transposed=False)
    less, in_bf16 = replace(kept, stack=stack), replace(job(), stack=stack)
    saved = costs(kept, FOUR).memory(candidate).weights - costs(less, FOUR).memory(candidate).weights
    assert saved == pytest.approx(kept.block_parameters)
    assert step(kept, candidate) < step(less, candidate) < 1.03 * step(kept, candidate)
    assert step(in_bf16, candidate) == step(job(), candidate)
