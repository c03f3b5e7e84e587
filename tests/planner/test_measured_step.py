"""Measured steps of logs, and what explains their difference from the prediction."""

import json
from pathlib import Path

import pytest

from megabench.config import ConfigError
from megabench.planner.measured_step import MeasuredStep, explanations, read_measured
from megabench.planner.own_layout import find_own, read_layout
from tests.planner.jobs import job
from tests.planner.test_own_layout import planned

SUMMARY = (
    "{'train_runtime': 981.2, 'train_samples_per_second': 0.815, 'train_steps_per_second': 0.051, "
    "'train_loss': 8.1, 'epoch': 1.0}\n"
)
PROGRESS = (
    "  0%|          | 0/50 [00:00<?, ?it/s]\r  2%|2         | 1/50 [01:41<1:22:49, 101.4s/it]\r"
    " 10%|#         | 5/50 [02:57<26:33, 35.4s/it]\r{'loss': 10.5, 'epoch': 0.1}\r"
    "100%|##########| 50/50 [16:27<00:00, 18.1s/it]\n"
)
DEEPSPEED = "".join(
    f"[INFO] [timer.py:258:stop] epoch=0/micro_step={4 * step}/global_step={step}, RunningAvgSamplesPerSec=0.8, "
    f"CurrSamplesPerSec={rate}, MemAllocated=1.0GB, MaxMemAllocated=20.0GB\n"
    for step, rate in ((10, 0.4), (20, 0.8), (30, 0.82))
)


def step_of(tmp_path: Path, text: str, global_batch: int = 16) -> MeasuredStep:
    path = tmp_path / "log"
    path.write_text(text)
    return read_measured(str(path), job(global_batch=global_batch))


def test_a_number_is_the_seconds_of_a_step():
    assert read_measured("19.6", job()) == MeasuredStep(19.6, has_first_steps=True)
    for wrong in ("0", "-1", "nan", "inf"):
        with pytest.raises(ConfigError, match="is no step time"):
            read_measured(wrong, job())


def test_the_summary_of_hf_trainer_is_read(tmp_path):
    found = step_of(tmp_path, SUMMARY)
    assert found.seconds == pytest.approx(1 / 0.051) and found.has_first_steps
    as_strings = SUMMARY.replace("981.2", "'981.2'").replace("0.051", "'0.051'").replace("0.815", "'0.815'")
    assert step_of(tmp_path, as_strings).seconds == pytest.approx(1 / 0.051)


def test_trainer_state_counts_its_steps(tmp_path):
    summary = {"step": 50, "train_runtime": 981.2, "train_samples_per_second": 0.815, "train_steps_per_second": 0.051}
    state = {"global_step": 50, "log_history": [{"loss": 10.5, "step": 1}, summary]}
    assert step_of(tmp_path, json.dumps(state, indent=2)).seconds == pytest.approx(981.2 / 50)


def test_a_progress_bar_leaves_out_the_first_steps(tmp_path):
    """The first steps took 177 s; the other 45 took 810 s."""
    found = step_of(tmp_path, PROGRESS)
    assert found.seconds == pytest.approx(810 / 45) and not found.has_first_steps


def test_the_summary_is_preferred_to_other_numbers_of_the_log(tmp_path):
    for others in (PROGRESS, DEEPSPEED):
        assert step_of(tmp_path, others + SUMMARY).seconds == pytest.approx(1 / 0.051)


@pytest.mark.parametrize("unit", ["examples/s", "ex/s", "ba/s"])
def test_progress_bars_of_datasets_are_no_steps(tmp_path, unit):
    bars = (
        f"Map:  10%|#  | 1000/10000 [00:10<01:30, 100.00 {unit}]\rMap: 100%|###| 10000/10000 [01:40<00:00, 99 {unit}]\n"
    )
    assert step_of(tmp_path, bars + PROGRESS).seconds == pytest.approx(810 / 45)
    with pytest.raises(ConfigError, match="has no step time"):
        step_of(tmp_path, bars)


@pytest.mark.parametrize(
    "text",
    [
        "CurrSamplesPerSec=1.6., CurrSamplesPerSec=.",
        "CurrSamplesPerSec=0.0, CurrSamplesPerSec=0, ",
        "{'train_runtime': 1.2.3, 'train_steps_per_second': 0.5}",
        "{'train_runtime': 10.0, 'train_steps_per_second': 0.0}",
        "{'train_runtime': 1e400, 'train_steps_per_second': 1e-400}",
        f"{'9' * 5000}/{'9' * 5001} [00:10<00:00, 1.0s/it]",
    ],
)
def test_numbers_that_are_none_are_refused(tmp_path, text):
    with pytest.raises(ConfigError, match="has no step time"):
        step_of(tmp_path, text)


def test_zero_rates_do_not_count(tmp_path):
    zeros = "CurrSamplesPerSec=0.0, " * 5
    assert step_of(tmp_path, zeros + DEEPSPEED).seconds == pytest.approx(16 / 0.8)


def test_deepspeed_counts_sequences(tmp_path):
    found = step_of(tmp_path, DEEPSPEED)
    assert found.seconds == pytest.approx(16 / 0.8) and not found.has_first_steps


def test_a_log_of_another_batch_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"about 16 sequences, but the plan's have 32; use --global-batch 16"):
        step_of(tmp_path, SUMMARY, global_batch=32)


def test_a_file_without_a_step_time_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no step time; use trainer_state\.json"):
        step_of(tmp_path, "{'loss': 1.0, 'epoch': 0.1}\n")
    with pytest.raises(ConfigError, match="--measured no-such-log: No such file"):
        read_measured("no-such-log", job())


def said(text: str, ratio: float, where: str = "p5.48xlarge:2", has_first_steps: bool = True) -> list[str]:
    plan, own = planned(where), read_layout(text)
    predicted = find_own(plan, own)
    return explanations(plan, own, predicted, MeasuredStep(ratio * predicted.step_seconds, has_first_steps))


def test_a_step_within_the_error_needs_no_explanation():
    for ratio in (0.95, 1.05):
        (sentence,) = said("tp8 pp2", ratio)
        assert sentence.endswith("which agrees within the prediction error of 12%.")


def test_a_faster_step_asks_for_the_same_work():
    (sentence,) = said("tp8 pp2", 0.5)
    assert "faster than predicted" in sentence and "check that model, sequence length, global batch" in sentence


def test_only_plausible_causes_are_named():
    """Sockets make a step of ZeRO-3 over two hosts several times as long, and explain no 30%."""
    small, large = (" ".join(said("zero3 mb1 full", ratio)) for ratio in (1.3, 8.0))
    assert "1.30 × as long" in small and "over sockets" not in small
    assert "over sockets (NET/Socket in its log) would add" in large and "Unfused kernels" not in large
    assert "micro-batch of 1" not in small and "Full recomputation" not in small  # the text names both


def test_offload_explains_a_step_that_is_a_few_times_as_long():
    text = " ".join(said("zero3 mb1 full", 2.5, "p5.48xlarge:1"))
    assert "Offload of the optimizer to the CPU would add" in text


def test_first_steps_matter_only_to_means_over_all_steps():
    assert "first steps that compile" in said("tp8 pp2", 2.0)[-1]
    assert "first steps" not in said("tp8 pp2", 2.0, has_first_steps=False)[-1]
