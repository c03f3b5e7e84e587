"""TensorBoard scalars where the disk takes no more."""

import errno
import os

import pytest
from torch.utils.tensorboard import SummaryWriter

from megabench.config import RunConfig
from megabench.engines.base import StepResult
from megabench.train.scalars import Scalars


@pytest.mark.parametrize("failing", ["__init__", "add_scalar", "close"])
def test_a_full_disk_ends_them_and_not_the_run(tmp_path, monkeypatch, failing):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(SummaryWriter, failing, full)
    said: list[str] = []
    scalars = Scalars(tmp_path, RunConfig(model="llama-tiny").resolve(1, "cpu"), None, 0, said.append)
    for step in (1, 2):
        scalars.step(step, StepResult(loss=1.0, grad_norm=1.0, num_tokens=1, skipped=False), 1e-3, 1.0, 1.0, None)
    scalars.close()
    assert said == ["ERROR: TensorBoard's scalars end here: No space left on device"]
