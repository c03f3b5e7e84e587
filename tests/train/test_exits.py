"""Callbacks are closed before every exit that a training process makes itself."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from megabench.train import exits
from megabench.train.callbacks import Callback
from megabench.train.exits import Exits
from tests.train.resilience import REPOSITORY, TINY

# the fault of the callback, other flags, the status, and the start of the reason; None after success
ENDS: dict[str, tuple[str, tuple[str, ...], int, str | None]] = {
    "success": ("none", (), 0, None),
    "refused": ("none", ("--tp", "3"), 2, "tp=3"),
    "raised": ("raise", (), 1, "RuntimeError: the third step is one too many"),
    "not finite": ("nan", (), 1, "the loss is nan, which is not finite"),
    "Ctrl-C": ("interrupt", (), 130, "interrupted by Ctrl-C"),
    "SIGTERM": ("terminate", (), -signal.SIGTERM, "ended by SIGTERM"),
    "hang": ("hang", ("--stall-seconds", "1"), 1, "no progress for"),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[subprocess.Popen[str], Path]]]:
    """One process per end. All run at the same time."""
    folder, started = tmp_path_factory.mktemp("ends"), {}
    for name, (fault, flags, _, _) in ENDS.items():
        path = folder / name
        callback = f"tests.train.witness:Witness(path='{path}', fault={fault})"
        command = [sys.executable, "launch/pretrain.py", *TINY, "--steps", "5", *flags, "--callbacks", callback]
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # background processes may ignore it
        )
        started[name] = process, path
    yield started
    for process, _ in started.values():
        process.kill()


@pytest.mark.e2e
@pytest.mark.parametrize("name", ENDS)
def test_callbacks_learn_how_the_run_ended(ended, name: str) -> None:
    process, path = ended[name]
    output, _ = process.communicate(timeout=240)
    _, _, status, reason = ENDS[name]
    assert process.returncode == status, output
    *errors, last = path.read_text().splitlines()
    assert last == "closed"
    if reason is None:
        assert not errors
    else:
        (error,) = errors
        assert error.startswith(f"error: {reason}")


class Slow(Callback):
    def __init__(self) -> None:
        self.released, self.reasons = threading.Event(), list[str]()

    def on_error(self, reason: str) -> None:
        self.reasons.append(reason)
        self.released.wait(60)


def test_a_callback_that_does_not_close_does_not_keep_the_process(monkeypatch, capsys) -> None:
    monkeypatch.setattr(exits, "_CLOSE_SECONDS", 0.1)
    ways, slow = Exits(), Slow()
    ways.callbacks = [slow]
    began = time.monotonic()
    ways.close_callbacks("the first reason")
    ways.close_callbacks("the second reason")
    assert time.monotonic() - began < 5
    assert slow.reasons == ["the first reason"] and "did not close within 0.1 s" in capsys.readouterr().err
    slow.released.set()


def test_a_callback_that_fails_does_not_keep_others_from_closing(capsys) -> None:
    class Failing(Callback):
        def close(self) -> None:
            raise ValueError("no server")

    class Last(Callback):
        is_closed = False

        def close(self) -> None:
            self.is_closed = True

    ways, last = Exits(), Last()
    ways.callbacks = [Failing(), last]
    ways.close_callbacks(None)
    assert last.is_closed
    assert "callback Failing failed when the run ended: ValueError: no server" in capsys.readouterr().err
