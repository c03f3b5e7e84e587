"""fp8 trials are compared with bf16 trials of otherwise equal work, and never ranked with them."""

import csv
import io
from typing import Any

import pytest
from rich.console import Console

from megabench.record import Fp8Work, LayoutSizes, RunRecord
from megabench.study.bf16_reference import bf16_reference, classes_compared_with_bf16, compare_with_bf16
from megabench.study.parity import judge_parity
from megabench.study.summary import class_titles, write_csv
from megabench.study.table import show
from tests.study.records import make_record, work_class

NUM_STEPS = 200
ZERO3: dict[str, Any] = {"engine": "deepspeed", "options": {"zero_stage": 3, "recompute": "none"}}


def losses(factor: float = 1.0, num_steps: int = NUM_STEPS) -> list[float]:
    return [9.0] + [factor * max(1.0, 4.0 - step / 20) for step in range(1, num_steps)]


def bf16(trial: str, factor: float = 1.0, speed: float = 1000, work=None, num_steps=NUM_STEPS, **changes) -> RunRecord:
    fields = {
        "precision": "bf16",
        "work_class": work_class(**{"precision": "bf16"} | (work or {})),
        "device": "NVIDIA H200",
    }
    return make_record(losses(factor, num_steps), speed, **fields | {"trial": trial} | changes)


def fp8(trial: str = "fp8", factor: float = 1.02, speed: float = 1300, work=None, **changes) -> RunRecord:
    work = {"precision": "fp8", "fp8": Fp8Work(recipe="tensorwise")} | (work or {})
    return bf16(trial, factor, speed, work, **{"precision": "fp8"} | changes)


def other_seed(number: int, factor: float) -> RunRecord:
    """The reference has seed 1234 for weights and data, so its work class names no seed of the data."""
    return bf16(f"bf16-seed-{number}", factor, work={"seed": number, "data_seed": 1234})


def text_of(records: list[RunRecord], reference: str = "bf16") -> str:
    written = io.StringIO()
    console = Console(file=written, width=250)
    show(console, judge_parity(records, reference), reference, "fastest")
    return written.getvalue()


@pytest.mark.parametrize(
    "work", [{"num_layers": 4}, {"data_sha256": "1" * 64}, {"schedule": {"lr": 1e-3}}, {"seed": 2}, {"data_seed": 2}]
)
def test_only_the_precision_may_differ(work):
    record = fp8(work={"fp8": Fp8Work(recipe="bf16-gradients", num_layers_at_end_in_bf16=1)})
    assert bf16_reference(record, [record, bf16("bf16")]).trial == "bf16"
    assert bf16_reference(record, [record, bf16("bf16", work=work)]) is None
    assert bf16_reference(record, [record, bf16("bf16", status="failed"), bf16("fp32", precision="fp32")]) is None


def test_only_fp8_trials_have_a_bf16_reference():
    records = [bf16("a"), bf16("b")]
    assert bf16_reference(records[0], records) is None and classes_compared_with_bf16(records) == {}


def test_the_reference_is_that_of_its_class():
    records = judge_parity([fp8(), bf16("a"), bf16("b"), bf16("zero3", **ZERO3)], "zero3")
    assert bf16_reference(records[0], records).trial == "zero3"
    (record, *others) = judge_parity([fp8(), bf16("a"), bf16("b")], "fp8")
    assert bf16_reference(record, others).trial == "a"


def test_the_mean_loss_of_the_last_steps():
    found = compare_with_bf16(fp8(factor=0.97), [bf16("bf16")])
    assert (found.num_steps, found.is_long_enough) == (100, True)
    assert found.reference_loss == pytest.approx(sum(losses()[100:]) / 100)
    assert found.difference == pytest.approx(-0.03) and found.of_seeds == (found.reference_loss,)


def test_the_losses_of_initial_weights_do_not_count():
    """The first step has the same loss in both trials."""
    found = compare_with_bf16(fp8(factor=1.5, num_steps=3), [bf16("bf16", num_steps=4)])
    assert (found.num_steps, found.is_long_enough) == (2, False) and found.difference == pytest.approx(0.5)


def test_a_run_that_went_on_is_compared_at_its_own_steps():
    record = fp8(factor=1.0)
    later = record.model_copy(update={"first_step": 151, "losses": record.losses[150:]})
    found = compare_with_bf16(later, [bf16("bf16")])
    assert found.num_steps == 49 and found.difference == pytest.approx(0)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([9.0], "fp8 trains 1.30 × as fast as bf16, and their losses cannot be compared."),
        ([], "fp8 trains 1.30 × as fast as bf16, and their losses cannot be compared."),
        ([9.0, 2.0, None], "fp8 (DIVERGED): its losses are not finite"),
    ],
)
def test_losses_that_cannot_be_compared(found, words):
    record = fp8().model_copy(update={"losses": found})
    assert compare_with_bf16(record, [bf16("bf16")]) is None
    assert words in text_of([bf16("bf16"), record])


def test_other_seeds_show_what_is_chance():
    seeds = [other_seed(2, 0.99), other_seed(3, 1.03), bf16("other-data", 0.5, work={"seed": 4, "data_seed": 4})]
    found = compare_with_bf16(fp8(), [bf16("bf16"), *seeds])
    assert len(found.of_seeds) == 3 and found.is_within_seeds
    assert min(found.of_seeds) / found.reference_loss == pytest.approx(0.99)
    assert max(found.of_seeds) / found.reference_loss == pytest.approx(1.03)
    assert not compare_with_bf16(fp8(factor=1.04), [bf16("bf16"), *seeds]).is_within_seeds
    short = other_seed(2, 0.9).model_copy(update={"losses": [9.0]})
    assert len(compare_with_bf16(fp8(), [bf16("bf16"), short]).of_seeds) == 1


def test_the_classes_that_are_compared():
    records = [fp8(), bf16("bf16"), other_seed(2, 1.0), bf16("other", work={"global_batch": 64})]
    roles = classes_compared_with_bf16(records)
    assert [roles.get(record.work_class.id) for record in records] == ["fp8", "bf16", "seed", None]
    both = [fp8(), bf16("bf16"), other_seed(2, 1.0), fp8("fp8-2", work={"seed": 2, "data_seed": 1234})]
    assert [classes_compared_with_bf16(both)[record.work_class.id] for record in both] == ["fp8", "bf16", "bf16", "fp8"]


def test_the_table_says_what_fp8_gains_and_costs():
    text = text_of([bf16("bf16"), fp8()])
    words = "fp8 trains 1.30 × as fast as bf16, and its loss is 2.0% higher."
    assert f"{words} The difference in speed is not confirmed: each trial ran once.\n" in text
    assert (
        "The fastest trial in fp8 is fp8 with 1,300 tokens/s per GPU, and the fastest in bf16 is bf16 with 1,000"
        in text
    )
    assert "With the same layout and settings, fp8 trains 1.30 × as fast as bf16.\n" in text
    assert (
        "The mean loss of the last 100 steps is 1.0200 in fp8 (fp8) and 1.0000 in bf16 (bf16): the loss of fp8 is 2.0% "
        "higher.\n" in text
    )
    assert "bf16 was trained with one seed, so the part of the difference that is chance is unknown.\n" in text


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (1.02, "its loss is within the range of 3 bf16 seeds."),
        (1.05, "its loss is 5.0% higher, outside the range of 3 bf16 seeds."),
        (0.95, "its loss is 5.0% lower, outside the range of 3 bf16 seeds."),
    ],
)
def test_the_headline_names_the_spread_of_the_seeds(factor, words):
    text = text_of([bf16("bf16"), other_seed(2, 0.99), other_seed(3, 1.03), fp8(factor=factor)])
    headline = f"fp8 trains 1.30 × as fast as bf16, and {words}"
    assert f"{headline} The difference in speed is not confirmed: each trial ran once.\n" in text
    assert "With 3 seeds of the initial weights, the bf16 loss is 0.99" in text


def test_equal_losses_and_short_runs():
    assert "and its loss is the same within 0.05%." in text_of([bf16("bf16"), fp8(factor=1.0001)])
    short = text_of([bf16("bf16", num_steps=6), fp8(num_steps=6)])
    words = "fp8 trains 1.30 × as fast as bf16, but the runs are too short to show whether it learns as well."
    assert f"{words} The difference in speed is not confirmed: each trial ran once.\n" in short
    assert "The mean loss of the last 5 steps is" in short and "chance" not in short


def test_each_layout_is_compared_with_the_same_in_bf16():
    tp2: dict[str, Any] = {"layout": LayoutSizes(tp=2, cp=1, pp=1, vp=1, dp=1)}
    records = [
        bf16("zero3", speed=1000, **ZERO3),
        bf16("tp2", speed=900, **tp2),
        bf16("tp2-slow", speed=800, **tp2),
        fp8("zero3-fp8", speed=1200, **ZERO3),
        fp8("tp2-fp8", speed=1350, **tp2),
        fp8("tp2-fp8-wide", speed=1300, micro_batch=8, **tp2),
    ]
    text = text_of(records, "zero3")
    assert "fp8 trains 1.35 × as fast as bf16, and" in text
    assert (
        "With the same layout and settings, tp2-fp8 trains 1.50 × as fast as tp2 and zero3-fp8 trains 1.20 × as fast "
        "as zero3.\n" in text
    )
    assert "× ZeRO-3, equal work" in text, "each class is ranked"
    assert "No fp8 trial has the same layout and settings" in text_of([records[0], records[4]], "zero3")


def test_an_option_of_fp8_runs_alone_does_not_make_a_layout_another():
    records = [bf16("dp", options={"keep_transposed": True}), fp8(options={"keep_transposed": False})]
    assert "With the same layout and settings, fp8 trains 1.30 × as fast as dp." in text_of(records, "dp")


def test_speeds_within_the_spread_are_equal():
    runs = [bf16("bf16", speed=speed, repeat=number) for number, speed in enumerate((1000, 1400))]
    assert "fp8 trains as fast as bf16 within the spread, and" in text_of([*runs, fp8()])


def test_a_diverged_trial_gains_nothing():
    records = [bf16("bf16"), fp8("a"), fp8("b", factor=1.2, speed=9000)]
    text = text_of(records)
    assert "b (DIVERGED)" in text and "fp8 trains 1.30 × as fast" in text and "b trains" not in text


def test_no_word_about_precision_without_both():
    for records in ([bf16("bf16")], [fp8(), bf16("other", work={"seed": 9})]):
        assert "as fast as bf16" not in text_of(records, records[0].trial)


def test_repeats_are_compared_by_their_median():
    runs = [fp8(repeat=number, factor=factor) for number, factor in enumerate((1.02, 1.008, 1.004))]
    text = text_of([bf16("bf16"), *runs])
    assert "its loss is 0.8% higher" in text


def test_the_csv_has_the_difference(tmp_path):
    records = judge_parity([bf16("bf16"), fp8(), fp8(repeat=1, factor=1.0)], "bf16")
    write_csv(tmp_path / "summary.csv", records, "bf16")
    with (tmp_path / "summary.csv").open() as file:
        found = {row["trial"]: row["loss_difference_from_bf16"] for row in csv.DictReader(file)}
    assert found["bf16"] == "" and float(found["fp8"]) == pytest.approx(0.01)


def test_titles_name_the_recipe():
    records = [
        bf16("bf16"),
        fp8(),
        fp8("last", work={"fp8": Fp8Work(recipe="tensorwise", num_layers_at_end_in_bf16=1)}),
    ]
    titles = [class_titles(records)[record.work_class.id] for record in records]
    assert [title.split("H200")[1] for title in titles] == [
        ", num_layers_at_end_in_bf16=0",
        ", fp8_recipe=tensorwise, num_layers_at_end_in_bf16=0",
        ", fp8_recipe=tensorwise, num_layers_at_end_in_bf16=1",
    ]


NORMS = [5.0 / (1 + step) for step in range(NUM_STEPS)]


@pytest.mark.parametrize(
    ("name", "loss_factor", "norm_factor", "verdict"),
    [
        ("another engine, Llama-3-8B", 10.3342 / 10.3112, 1.0, "equal"),
        ("another layout, llama-tiny", 1.0002, 1.0004, "equal"),
        ("E5M2 gradients, Qwen3-0.6B", 1.097 / 1.012, 1.0, "diverged"),
        ("amax of one rank, llama-tiny", 1.004, 1.045, "diverged"),
        ("fp8 all-gathers of torchao, Llama-3-8B", 7.47 / 10.31, 119 / 153, "diverged"),
    ],
)
def test_mistakes_in_fp8_exceed_its_tolerances(name, loss_factor, norm_factor, verdict):
    """Measured differences between two fp8 trials, of correct engines and of mistakes."""
    reference = fp8("zero3", factor=1.0, grad_norms=NORMS)
    other = fp8("tp2", factor=loss_factor, grad_norms=[norm * norm_factor for norm in NORMS])
    judged, _ = judge_parity([other, reference], "zero3")
    assert (judged.parity.verdict, judged.status) == (verdict, "ok" if verdict == "equal" else "diverged"), name
