"""The header of a run's log."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from megabench.config import RunConfig
from megabench.data.tokenizer import ByteTokenizer
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
    assert f"data stdlib · tokenizer {ByteTokenizer.used}\nWARNING: a warning\n" in header(given)
