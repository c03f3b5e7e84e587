"""The header of a run's log, and the steps that are printed."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from megabench.config import RunConfig
from megabench.data.tokenizer import ByteTokenizer
from megabench.engines.base import StepResult
from megabench.train.callbacks import Step
from megabench.train.trackers.console import Console


def test_the_header_names_the_deepspeed_json_and_the_engine_s_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2, "overlap_comm": false}}')
    given = RunConfig.parse(
        {"model": "llama-tiny", "engine": "deepspeed", "offload": "optimizer", "deepspeed_config": path}
    )
    assert f"--deepspeed-config {path}" in given.command(2)

    source = SimpleNamespace(name="stdlib", tokenizer=ByteTokenizer.used, warnings=("a warning",))

    def header(config: RunConfig) -> str:
        trainer = SimpleNamespace(run=config.resolve(2, "cpu"), peak_tflops=None, device_name="cpu", source=source)
        Console().on_start(trainer)
        return capsys.readouterr().out

    assert f" · deepspeed ZeRO-2, offload optimizer, --deepspeed-config {path} · dp2 on 2 × cpu\n" in header(given)
    assert " · megatron · dp2 on 2 × cpu\n" in header(RunConfig.parse({"model": "llama-tiny"}))
    assert "\nbf16, gradients fp32 · " in header(RunConfig.parse({"model": "llama-tiny", "precision": "bf16"}))
    fp8 = RunConfig.parse({"model": "llama-tiny", "precision": "fp8"})
    assert "\nfp8 (emulated in fp32 on CPU), gradients fp32 · " in header(fp8)
    assert f"data stdlib · tokenizer {ByteTokenizer.used}\nWARNING: a warning\n" in header(given)


@pytest.mark.parametrize(
    ("log_every", "seconds", "printed"),
    [(1, 0.1, [1, 2, 3, 4, 5, 6, 7, 8, 9]), (3, 0.1, [1, 3, 5, 6, 9]), ("auto", 0.4, [1, 4, 5, 8, 9])],
)
def test_it_prints_the_first_the_last_skipped_and_due_steps(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    log_every: int | str,
    seconds: float,
    printed: list[int],
) -> None:
    """Step 5 is skipped; auto prints one line per second."""
    config = RunConfig.parse({"model": "llama-tiny", "steps": 9, "log_every": log_every})
    console, now = Console(), 100.0
    monkeypatch.setattr("megabench.train.trackers.console.time", SimpleNamespace(monotonic=lambda: now))
    source = SimpleNamespace(name="stdlib", tokenizer=None, warnings=())
    console.on_start(SimpleNamespace(run=config.resolve(1, "cpu"), device_name="cpu", source=source))
    for number in range(1, 10):
        now += seconds
        result = StepResult(loss=2.0, grad_norm=1.0, num_tokens=1, skipped=number == 5)
        metrics = {"train/loss": 2.0, "throughput/tflops_per_device": 3.0, "mine/entropy": 0.25}
        console.on_metrics(Step(number, result, 1e-3, seconds, 1.0, is_timed=True, metrics=metrics))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [int(line.split("/")[0].removeprefix("step ")) for line in lines] == printed
    assert all("loss 2.0000  mine/entropy 0.25  1.00 GiB" in line and "TFLOP" not in line for line in lines)
