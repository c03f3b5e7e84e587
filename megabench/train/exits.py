"""The ways in which a training process ends itself. Before each of them, the callbacks of the run are closed."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Literal, NoReturn

from megabench.errors import one_line
from megabench.runtime.process import exit_process

if TYPE_CHECKING:
    from megabench.runtime.rendezvous import Rendezvous
    from megabench.train.callbacks.callback import Callback

_libc = ctypes.CDLL(None)
_CLOSE_SECONDS = 10.0  # of all callbacks together


class Exits:
    """Ends this process: with status 0 after success, 2 for invalid input, and 1, 130 or a signal after other failures.

    `callbacks` are those that the Trainer calls. They are empty as soon as the process begins to end, so that no hook
    is called after `close`. `callbacks` and `rendezvous` are set as soon as they exist.

    Any thread may call the methods. The first one ends the process; other threads wait for that.
    """

    def __init__(self) -> None:
        self.callbacks: Sequence[Callback] = ()
        self.rendezvous: Rendezvous | None = None
        self._is_ending = threading.Lock()
        self._knows_why = threading.Event()  # set when this process begins to report why it ends

    def finish(self) -> NoReturn:
        """Exit with status 0."""
        self._end(None, partial(exit_process, 0), late=partial(os._exit, 0))

    def refuse(self, sentence: str, kind: Literal["invalid", "oom"] = "invalid", has_store: bool = True) -> NoReturn:
        """Exit with status 2. If all ranks of a launch refuse to start, only one of them prints the error message.

        Without a store, every rank prints the message.
        """
        self._begin_report()
        from megabench.runtime import messages
        from megabench.runtime import rendezvous as rendezvous_module

        rendezvous = self.rendezvous
        is_alone = os.environ.get("WORLD_SIZE", "1") == "1" or "MASTER_ADDR" not in os.environ
        if is_alone and not rendezvous_module.is_supervised():
            rendezvous = None
        elif rendezvous is None and has_store:
            with contextlib.suppress(Exception):  # out of reach
                rendezvous = rendezvous_module.join(timedelta(seconds=20))
        store, rank = (rendezvous.store, rendezvous.rank) if rendezvous else (None, 0)
        messages.explain(store, rank, kind, sentence)
        self._end(sentence, partial(exit_process, 2), late=partial(os._exit, 2))

    def stop(self, sentence: str) -> NoReturn:
        """Exit with status 1 after a failure that all ranks know. Only one rank prints the error message."""
        self._begin_report()
        from megabench.runtime.messages import await_all, explain

        rendezvous = self.rendezvous
        assert rendezvous is not None
        explain(rendezvous.store, rendezvous.rank, "failed", sentence)
        with contextlib.suppress(Exception):
            await_all(rendezvous.store, rendezvous.world_size, "stop", timedelta(seconds=10))
        self._leave(1, sentence)

    def fail(self, error: BaseException) -> NoReturn:
        """Print the traceback of `error` and exit with status 1.

        An orderly exit would wait for ranks that may never answer.
        """
        self._begin_report()
        import torch

        from megabench.runtime import messages

        is_oom = isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
        kind: messages.FailureKind = "oom" if is_oom else "failed"
        summary = one_line(error)
        messages.tell_launcher(summary)
        try:
            if self.rendezvous:
                messages.report_failure(self.rendezvous.store, self.rendezvous.rank, kind, summary[:2000])
        finally:
            traceback.print_exception(error)
            self._leave(1, summary)

    def interrupt(self) -> NoReturn:
        """Exit with status 130 after Ctrl-C."""
        if self.rendezvous is None or self.rendezvous.rank == 0:
            print(
                "Stopped by Ctrl-C without a save. SIGTERM saves after the current step and then stops.",
                file=sys.stderr,
            )
        self._leave(128 + signal.SIGINT, "interrupted by Ctrl-C")

    def signalled(self, number: int) -> NoReturn:
        """End the process by signal `number`, without a save, so that launchers see the signal.

        A process that already reports another reason gets 10 seconds to end itself: launchers send SIGTERM to all
        ranks when the first rank has reported it and exits.
        """
        if self._knows_why.is_set():
            time.sleep(_CLOSE_SECONDS)

        def die() -> None:
            _libc.signal(number, None)  # SIG_DFL; signal.signal works in the main thread only, which may hang
            os.kill(os.getpid(), number)
            os._exit(128 + number)

        self._end(f"ended by {signal.Signals(number).name}", die)

    def hang(self, explain: Callable[[], None], reason: str) -> NoReturn:
        """Call `explain` and exit with status 1. The main thread may never return."""
        self._knows_why.set()
        try:
            explain()
        finally:
            self._leave(1, reason)

    def _leave(self, status: int, reason: str) -> NoReturn:
        """Exit at once after the callbacks are closed, without functions that are registered with atexit."""
        self._end(reason, partial(os._exit, status), flushes=True)

    def _begin_report(self) -> None:
        self._wait_for_the_end_of_another_thread()
        self._knows_why.set()

    def _wait_for_the_end_of_another_thread(self) -> None:
        """Return if no thread ends the process yet. The errors of a run that ends already are not reported."""
        while self._is_ending.locked():
            time.sleep(1)

    def _end(
        self, reason: str | None, end: Callable[[], None], late: Callable[[], None] | None = None, flushes: bool = False
    ) -> NoReturn:
        """Close the callbacks in this thread, and end the process by calling `end`.

        A callback may wait for a server that does not answer, and standard output for its reader. So a second thread
        calls `late`, by default `end`, after 10 seconds.
        """
        if not self._is_ending.acquire(blocking=False):
            self._wait_for_the_end_of_another_thread()
        timer = threading.Timer(_CLOSE_SECONDS, _end_late, [late or end])
        timer.daemon = True
        try:
            timer.start()
            callbacks, self.callbacks = self.callbacks, ()
            for callback in callbacks:
                if reason is not None:
                    _call(callback, partial(callback.on_error, reason))
                _call(callback, callback.close)
            if flushes:
                sys.stdout.flush()
                sys.stderr.flush()
        finally:
            timer.cancel()
            end()
        raise AssertionError("the process has ended")


def _end_late(end: Callable[[], None]) -> None:
    try:
        os.write(2, f"WARNING: the callbacks did not close within {_CLOSE_SECONDS:g} s\n".encode())
    finally:
        end()


def _call(callback: "Callback", hook: Callable[[], None]) -> None:
    try:
        hook()
    except (Exception, SystemExit) as error:
        text = f"WARNING: callback {type(callback).__name__} failed when the run ended: {one_line(error)}"
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr)
