"""Callbacks are closed before every exit that a training process makes itself."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from torch.distributed import DistError, HashStore

from megabench.runtime.messages import await_all
from megabench.runtime.rendezvous import Rendezvous
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


def begin_to_end(exits: Exits, reason: str, end: Callable[[], None], late: Callable[[], None]) -> None:
    """End "the process" in a thread, as the watchdog does."""

    def run() -> None:
        with suppress(AssertionError):  # the process has not ended
            exits._end(reason, end, late)

    threading.Thread(target=run, daemon=True).start()


def test_a_callback_that_does_not_close_does_not_keep_the_process(monkeypatch, capfd) -> None:
    monkeypatch.setattr("megabench.train.exits._CLOSE_SECONDS", 0.1)
    exits, slow, ended, late = Exits(), Slow(), threading.Event(), threading.Event()
    exits.callbacks = [slow]
    begin_to_end(exits, "the first reason", ended.set, late.set)
    while not slow.reasons:
        time.sleep(0.01)
    begin_to_end(exits, "the second reason", ended.set, late.set)
    assert late.wait(30) and not ended.is_set()
    assert slow.reasons == ["the first reason"] and "did not close within 0.1 s" in capfd.readouterr().err
    assert not exits.callbacks, "no hook is called after close"
    slow.released.set()


def test_a_callback_that_fails_does_not_keep_others_from_closing(capfd) -> None:
    class Failing(Callback):
        def close(self) -> None:
            raise ValueError("no server")

    class Last(Callback):
        closed_by = 0

        def close(self) -> None:
            self.closed_by = threading.get_ident()

    exits, last, ended = Exits(), Last(), list[bool]()
    exits.callbacks = [Failing(), last]
    with pytest.raises(AssertionError, match="the process has ended"):
        exits._end(None, lambda: ended.append(True), lambda: None)
    assert ended and last.closed_by == threading.get_ident(), "hooks are called by the thread that ends the process"
    assert "callback Failing failed when the run ended: ValueError: no server" in capfd.readouterr().err


def test_a_signal_does_not_hide_the_reason_of_a_run_that_stops(monkeypatch) -> None:
    monkeypatch.setattr("megabench.train.exits._CLOSE_SECONDS", 0.5)
    exits, ended = Exits(), list[str | None]()
    monkeypatch.setattr(exits, "_end", lambda reason, *_, **__: ended.append(reason))
    monkeypatch.setattr("megabench.runtime.messages.explain", lambda *_: exits.signalled(signal.SIGTERM))
    exits.rendezvous = Rendezvous(HashStore(), 0, 1, 0, 1)
    before = time.monotonic()
    exits.stop("the output directory is gone")
    assert time.monotonic() - before >= 0.5, "the process had time to end with its own reason"
    assert ended[-1] == "the output directory is gone"


def test_ranks_that_stop_wait_for_each_other() -> None:
    store, order = HashStore(), list[str]()

    def arrive(name: str) -> None:
        await_all(store, 2, "stop", timedelta(seconds=30))
        order.append(name)

    first = threading.Thread(target=arrive, args=("first",))
    first.start()
    time.sleep(0.2)
    assert not order
    await_all(store, 2, "stop", timedelta(seconds=30))
    first.join(30)
    assert order == ["first"]
    with pytest.raises(DistError):
        await_all(store, 2, "never", timedelta(seconds=0.1))
