"""Sketches name the place of errors that losses and gradient norms hide, and report no rounding."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megabench import sketch
from megabench.config import ConfigError, ResolvedConfig
from megabench.data.batch import micro_batches
from megabench.data.source import open_source
from megabench.engines.base import Engine
from megabench.engines.build import build_engine
from megabench.precision import POLICIES
from megabench.study.parity import compare_grad_norms, loss_problem
from megabench.tensor_parity import ParityError, TensorParity, compare_files
from megabench.train.callbacks.tensor_sketches import TensorSketches
from tests import distributed
from tests.engines.equivalence import device_of, resolve

BASE: dict[str, Any] = {"optimizer": "adamw", "lr": 1e-3, "eps": 1e-8, "seq_length": 64, "clip_grad": 1.0}
NUM_STEPS = 3
Series = tuple[list[float], list[float]]
Edit = Callable[[dict[str, Tensor]], None]  # of the gradients by name
LAYER = "model.layers.1."


def _scaled(name: str, factor: float, rows: slice = slice(None)) -> Edit:
    def edit(gradients: dict[str, Tensor]) -> None:
        gradients[name][rows] *= factor

    return edit


def _all_scaled(gradients: dict[str, Tensor]) -> None:
    for gradient in gradients.values():
        gradient *= 2


def _swapped(gradients: dict[str, Tensor]) -> None:
    for name, gradient in gradients.items():
        if name.startswith(LAYER):
            other = gradients[name.replace(LAYER, "model.layers.2.")]
            gradient.copy_(other.clone()), other.copy_(gradient.clone())


def _of_another_layer(gradients: dict[str, Tensor]) -> None:
    gradients[f"{LAYER}mlp.up_proj.weight"].copy_(gradients[f"{LAYER}mlp.gate_proj.weight"])


# planted errors in gradients: the edit, and a part of the sentence that names the place
EDITS: dict[str, tuple[Edit, str]] = {
    "a norm's gradient of half the tokens": (
        _scaled(f"{LAYER}input_layernorm.weight", 0.5),
        "the first is model.layers.1.input_layernorm.weight: by 0.",
    ),
    "a norm's gradient added twice": (
        _scaled("model.norm.weight", 2.0),
        "the first is model.norm.weight: by ",
    ),
    "gradients not divided by dp": (_all_scaled, "All gradients of step 1 are 2 times those of the other run"),
    "one head 5% off": (
        _scaled(f"{LAYER}self_attn.q_proj.weight", 1.05, slice(16, 32)),
        "the first is model.layers.1.self_attn.q_proj.weight: by ",
    ),
    "a key without a gradient": (
        _scaled(f"{LAYER}self_attn.k_proj.weight", 0.0),
        "the first is model.layers.1.self_attn.k_proj.weight: by 1,",
    ),
    "a part of the vocabulary 1% off": (
        _scaled("lm_head.weight", 1.01, slice(0, 64)),
        "the first is lm_head.weight: by ",
    ),
    "an embedding row without a gradient": (_scaled("model.embed_tokens.weight", 0.0, slice(32, 33)), "embed_tokens"),
    "gradients of two layers swapped": (_swapped, "All: model.layers.*."),
    "up and gate confused": (_of_another_layer, "the first is model.layers.1.mlp.up_proj.weight: by "),
}
# planted errors in settings of the optimizer and the model
SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "another beta2": ({"betas": (0.9, 0.98)}, "39 of 39 second moments of step 1"),
    "weight decay on norms": ({"param_groups": "norm: weight_decay=0.1"}, "updates of step 1 differ"),
    "a learning rate 5% too high": ({"lr": 1.05e-3}, "updates of step 1 differ"),
    "eps outside the root": ({"eps": 1e-5}, "updates of step 1 differ"),
    "no clipping": ({"clip_grad": 0.0}, "second moments of step 1 differ"),
}

# planted errors of other kinds
EXPECTED = {
    "a dropped micro-batch": "39 of 39 gradients of step 1",
    "a stale weight": "the first is model.layers.1.mlp.down_proj.weight",
    "clipping without the output layer": "the clipping omits or repeats some of them",
}
# errors that change every tensor, so that no place can be named
WITHOUT_PLACE = (
    *("gradients not divided by dp", "another beta2", "a learning rate 5% too high", "eps outside the root"),
    *("no clipping", "a dropped micro-batch"),
)


def train(run: ResolvedConfig, path: Path, error: str | None = None) -> Series:
    """Write the sketches of a few steps. Returns losses and gradient norms."""
    device = device_of(run)
    engine = build_engine(run, device)
    source, rank = open_source(run), dist.get_rank()
    observer = TensorSketches(path)
    trainer: Any = SimpleNamespace(
        run=run,
        engine=engine,
        device=device,
        rank=rank,
        num_before=0,
        watchdog=SimpleNamespace(touch=lambda: None),
    )
    observer.on_ready(trainer)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        batches = micro_batches(source, run, run.layout.coordinates(rank).dp, step)
        if error == "a dropped micro-batch":
            batches = [*batches[:-1], batches[0]]
        engine.accumulate(batches)
        observer.before_update(step + 1)
        if error in EDITS:
            gradients = {name: one.grad for name, one in engine.model.named_parameters()}  # type: ignore[attr-defined]
            EDITS[error][0](gradients)
        if error == "clipping without the output layer":
            _omit_last(engine)
        with _stale(engine) if error == "a stale weight" else _nothing():
            result = engine.update(run.lr)
        observer.between_steps(SimpleNamespace(number=step + 1, result=result))  # type: ignore[arg-type]
        losses.append(result.loss)
        norms.append(result.grad_norm)
    return losses, norms


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _omit_last(engine: Any) -> None:
    squared_norm = type(engine)._squared_norm
    engine._squared_norm = lambda grads: squared_norm(engine, grads[:-1])


@contextmanager
def _stale(engine: Engine) -> Iterator[None]:
    """A weight keeps its value, while its moments change."""
    weight = dict(engine.model.named_parameters())[f"{LAYER}mlp.down_proj.weight"]  # type: ignore[attr-defined]
    before = weight.detach().clone()
    yield
    with torch.no_grad():
        weight.copy_(before)


class Sketched:
    """The files of sketches, losses and gradient norms of runs by name. Each run is trained once."""

    def __init__(self, folder: Path, job: Callable[[ResolvedConfig, Path, str | None], Series]) -> None:
        self._folder, self._job = folder, job
        self._made: dict[str, tuple[Path, Series]] = {}

    def __call__(self, name: str, world_size: int = 1, error: str | None = None, **fields: Any) -> tuple[Path, Series]:
        if name not in self._made:
            path = self._folder / f"{len(self._made)}.safetensors"
            run = resolve(world_size, **BASE | fields)
            self._made[name] = path, distributed.run(self._job, world_size, run, path, error)[0]
        return self._made[name]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Sketched:
    return Sketched(tmp_path_factory.mktemp("sketches"), train)


def print_row(error: str, layout: str, by_losses: bool, found: TensorParity, place: str) -> None:
    """Print a row of the table in docs/comparing.md: error, layout, who sees it, and whether the place is named."""
    seen = ("no", "yes")
    print(f"\n| {error} | {layout} | {seen[by_losses]} | {seen[bool(found.problems)]} | {place} |")


def seen_by_losses(ours: Series, theirs: Series, precision: str = "fp32") -> bool:
    policy = POLICIES[precision]
    norm = compare_grad_norms(ours[1], theirs[1], may_skip=False)
    return loss_problem(ours[0], theirs[0], precision) is not None or (norm or 0) > policy.grad_norm_tolerance


@pytest.mark.distributed
@pytest.mark.parametrize("error", [*EDITS, *SETTINGS, *EXPECTED])
def test_a_planted_error_is_placed(trained: Sketched, error: str) -> None:
    settings, words = SETTINGS.get(error, ({}, EDITS[error][1] if error in EDITS else EXPECTED.get(error, "")))
    path, series = trained(error, error=error, engine="ddp", **settings)
    reference, other = trained("reference", engine="ddp")
    found = compare_files(path, reference)
    assert found.problems and words in " ".join(found.problems), found
    place = "every tensor" if error in WITHOUT_PLACE else "yes"
    print_row(error, "one process, ddp", seen_by_losses(series, other), found, place)


@pytest.mark.distributed
def test_a_missing_weight_decay_of_small_weights_is_seen_in_the_settings_alone(trained: Sketched) -> None:
    """It changes the first updates by 0.2%, less than the signs of small gradients that rounding changes may."""
    path, series = trained("no weight decay", engine="ddp", weight_decay=0.0)
    reference, other = trained("reference", engine="ddp")
    assert not seen_by_losses(series, other)
    found = compare_files(path, reference)
    print_row("no weight decay", "one process, ddp", False, found, "yes")
    (problem,) = found.problems
    assert problem.startswith(
        "weight_decay of 30 of 39 tensors is not that of the other run, such as 0.0 instead of 0.1"
    )


@pytest.mark.distributed
def test_gradients_do_not_depend_on_the_betas_of_a_group(trained: Sketched) -> None:
    path, _ = trained("a group", engine="ddp", param_groups="norm: beta1=0.5")
    problems = compare_files(path, trained("reference", engine="ddp")[0]).problems
    assert not [problem for problem in problems if "step 1" in problem], problems


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world_size", "fields"),
    [
        (2, {"engine": "ddp"}),
        (2, {"engine": "deepspeed", "zero_stage": 3}),
        (2, {"engine": "fsdp"}),
        (2, {"tp": 2}),
        (2, {"pp": 2}),
        (2, {"cp": 2}),
        (4, {"tp": 2, "pp": 2, "vp": 2}),
    ],
    ids=lambda value: str(value),
)
def test_rounding_is_no_error(trained: Sketched, world_size: int, fields: dict[str, Any]) -> None:
    path, _ = trained(str(fields), world_size, **fields)
    found = compare_files(path, trained("reference", engine="ddp")[0])
    print(f"{fields}: {found.part_of_tolerance:.2g} times the tolerance of {found.largest}")
    assert found.problems == []


def test_parts_add_up_to_the_sketch_of_the_tensor() -> None:
    torch.manual_seed(0)
    whole = torch.randn(90, 70)
    parts = [(0, 40, 0, 70), (40, 90, 0, 33), (40, 90, 33, 70)]
    total = torch.stack([sketch.sketch("a", (90, 70), whole[a:b, c:d], (a, c)) for a, b, c, d in parts]).sum(0)
    torch.testing.assert_close(total, sketch.sketch("a", (90, 70), whole), rtol=1e-4, atol=1e-4)
    assert sketch.norm(total) == pytest.approx(whole.norm().item(), rel=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", ["cuda", "cpu"])
@pytest.mark.parametrize(
    ("shape", "start", "size"),
    [((8200, 2100), (100, 50), (8000, 2000)), ((5, 300), (1, 20), (3, 200)), ((5000,), (100,), (4900,))],
)
@pytest.mark.parametrize("has_row_stride", [True, False])
def test_a_gpu_computes_the_same_sketch(
    shape: tuple[int, ...],
    start: tuple[int, ...],
    size: tuple[int, ...],
    where: str,
    dtype: torch.dtype,
    has_row_stride: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sketch, "_COPIED", 1 << 20)
    whole = torch.randn(*size[:-1], 2 * size[-1], dtype=dtype)
    # one of two columns has a stride, and the first half of the columns has rows that do not follow each other
    part, same = ((one[..., : size[-1]] if has_row_stride else one[..., ::2]) for one in (whole, whole.to(where)))
    expected = sketch.sketch("a", shape, part, start)
    found = sketch.sketch("a", shape, same, start, torch.device("cuda"))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def test_the_signs_are_even_and_independent() -> None:
    """The estimated squared norms of many tensors scatter as those with independent signs: by sqrt(2/64)."""
    torch.manual_seed(0)
    vector = torch.randn(512)
    ratios = torch.tensor(
        [
            sketch.estimated_norm(sketch.sketch(f"tensor {number}", (512,), vector)) ** 2 / float(vector.square().sum())
            for number in range(300)
        ]
    )
    deviation = math.sqrt(2 / sketch.NUM_SIGNS)
    assert ratios.mean() == pytest.approx(1, abs=4 * deviation / math.sqrt(300))
    assert ratios.std() == pytest.approx(deviation, rel=0.2)


@cache
def _file(folder: Path, **facts: str) -> Path:
    path = folder / f"{len(list(folder.iterdir()))}.safetensors"
    sketch.write(path, {("weight", 1, "a.weight"): sketch.sketch("a.weight", (8,), torch.ones(8))}, **facts)
    return path


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"steps": 2}, "needs 3 steps"), ({"optimizer": "sgd", "warmup_steps": 2}, "needs 3 warm-up steps")],
)
def test_runs_without_all_sketches_are_refused(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(1, **BASE | fields | {"sketches": tmp_path / "a"})


def test_files_that_cannot_be_compared(tmp_path: Path) -> None:
    good = _file(tmp_path, precision="fp32")
    with pytest.raises(ParityError, match=r"fp32 and .* in bf16"):
        compare_files(good, _file(tmp_path, precision="bf16"))
    with pytest.raises(ParityError, match="is not a file of sketches"):
        compare_files(good, tmp_path / "missing")
    (tmp_path / "text").write_text("a" * 100)
    with pytest.raises(ParityError, match="is not a file of sketches"):
        compare_files(tmp_path / "text", good)


def test_equal_files_are_equal(tmp_path: Path) -> None:
    good = _file(tmp_path, precision="fp32")
    found = compare_files(good, good)
    assert isinstance(found, TensorParity) and found.problems == [] and found.part_of_tolerance == 0


def _written(path: Path, value: float, **facts: str) -> Path:
    names = ("a.weight", "b.weight")
    vectors = {name: torch.ones(8) for name in names} | {"b.weight": torch.full((8,), value)}
    sketches = {
        (kind, step, name): sketch.sketch(name, (8,), vector)
        for kind, step in (("weight", 0), ("gradient", 2))
        for name, vector in vectors.items()
    }
    sketch.write(path, sketches, precision="fp32", **facts)
    return path


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_tensors_that_are_not_finite_are_not_equal(tmp_path: Path, value: float) -> None:
    good, bad = _written(tmp_path / "good", 1.0), _written(tmp_path / "bad", value)
    for ours, theirs, whose in ((bad, good, "this run"), (good, bad, "the other run")):
        found = compare_files(ours, theirs)
        assert found.problems[0] == f"2 tensors of {whose} are not finite, such as the weight of b.weight in step 0."
        assert TensorParity.model_validate_json(found.model_dump_json()) == found


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"hyper_parameters": '{"a": 1}'}, "hyper_parameters of .* is not what megabench writes"),
        ({"problems": "[1]"}, "problems of .* is not what megabench writes"),
        ({"problems": "["}, "problems of .* is not JSON"),
    ],
)
def test_files_with_odd_facts(tmp_path: Path, facts: dict[str, str], words: str) -> None:
    with pytest.raises(ParityError, match=words):
        compare_files(_written(tmp_path / "odd", 1.0, **facts), _written(tmp_path / "good", 1.0))


def test_files_with_an_unknown_kind_of_tensor(tmp_path: Path) -> None:
    sketch.write(tmp_path / "a", {("exp_avg", 1, "a"): sketch.sketch("a", (8,), torch.ones(8))}, precision="fp32")
    with pytest.raises(ParityError, match="has tensors of kind 'exp_avg'; use weight, gradient, exp_avg_sq, update"):
        compare_files(tmp_path / "a", tmp_path / "a")


def test_a_small_tensor_has_a_small_second_moment() -> None:
    """The floor of gradients is relative to the norms of all tensors, and that of their squares to the squares."""
    torch.manual_seed(0)
    scales = {"large": 1.0, "small": 0.008}
    moments = {
        name: sketch.sketch(name, (64, 64), (scale * torch.randn(64, 64)).square()) for name, scale in scales.items()
    }
    wrong = moments | {"small": torch.zeros_like(moments["small"])}
    found = {one.name: one for one in sketch.compare(wrong, moments, "exp_avg_sq", 1)}
    assert found["small"].relative == pytest.approx(1)
