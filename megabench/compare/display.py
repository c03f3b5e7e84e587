"""Show the progress of a study in the terminal."""

import time
from typing import Self

from rich.console import Console
from rich.status import Status
from rich.text import Text

from megabench.record import RunRecord
from megabench.runtime.messages import Progress


class RunDisplay:
    """Shows the progress of one run: a live line in a terminal, or one line at the start and one at the end."""

    def __init__(self, console: Console, number: int, num_runs: int, name: str) -> None:
        self._console = console
        self._label = f"[{number}/{num_runs}] {name}"
        self._started = time.monotonic()
        self._status = Status(Text(f"{self._label} starts"), console=console)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._status.start()
        else:
            self._say("…")
        return self

    def __exit__(self, *exception: object) -> None:
        self._status.stop()

    def update(self, progress: Progress) -> None:
        step = f" step {progress.step}/{progress.num_steps}" if progress.num_steps else ""
        self._status.update(Text(f"{self._label}{step} {progress.activity} ({self._elapsed})"))

    def note(self, text: str) -> None:
        """Print a message that stays on the screen."""
        self._say(text)

    def end(self, record: RunRecord) -> None:
        """Print the status of a finished run."""
        self._status.stop()
        speed = record.tokens_per_second_per_device
        if record.status == "ok" and speed is not None:
            self._say(f"ok: {speed:,.0f} tokens/s per device ({self._elapsed})")
        elif record.status == "diverged":
            self._say(f"DIVERGED: {record.error} ({self._elapsed})")
        else:
            self._say(record.status + (f": {record.error}" if record.error else "") + f" ({self._elapsed})")

    @property
    def _elapsed(self) -> str:
        return f"{time.monotonic() - self._started:.0f} s"

    def _say(self, text: str) -> None:
        self._console.print(Text(f"{self._label} {text}"), soft_wrap=True)
