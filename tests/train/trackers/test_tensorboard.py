"""TensorBoard scalars on a full disk."""

import errno
import os
from types import SimpleNamespace

import pytest
from torch.utils.tensorboard import SummaryWriter

from megabench.config import RunConfig
from megabench.engines.base import StepResult
from megabench.train.callbacks import Step
from megabench.train.trackers.tensorboard import TensorBoard


@pytest.mark.parametrize("failing", ["__init__", "add_scalar", "close"])
def test_a_full_disk_ends_them_and_not_the_run(tmp_path, monkeypatch, failing):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(SummaryWriter, failing, full)
    said: list[str] = []
    run = RunConfig.parse({"model": "llama-tiny"}).resolve(1, "cpu")
    scalars = TensorBoard(tmp_path)
    scalars.on_start(SimpleNamespace(run=run, num_before=0, peak_tflops=None, note=said.append))
    result = StepResult(loss=1.0, grad_norm=1.0, num_tokens=1, skipped=False)
    for number in (1, 2):
        scalars.on_metrics(Step(number, result, 1e-3, 1.0, 1.0, is_timed=True, metrics={"train/loss": 1.0}))
    scalars.close()
    assert said == ["ERROR: TensorBoard scalars are no longer written, because writing failed: No space left on device"]
