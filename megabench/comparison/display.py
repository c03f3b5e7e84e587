"""Show the progress of a study in the terminal."""

from typing import Self

from rich.console import Console

from megabench.record import RunRecord
from megabench.terminal import ProgressLine


class RunDisplay(ProgressLine):
    """Shows the progress of one run. A file or pipe also receives a line at the start, and every output one at the end.

    The number of the run and its name start each line.
    """

    def __init__(self, console: Console, number: int, num_runs: int, name: str) -> None:
        super().__init__(console, f"[{number}/{num_runs}] {name}")

    def __enter__(self) -> Self:
        if not self._is_live:
            self.say("…")
        return super().__enter__()

    def end(self, record: RunRecord) -> None:
        """Print the status of a finished run."""
        self.stop()
        speed = record.tokens_per_second_per_device
        if record.status == "ok" and speed is not None:
            self.say(f"ok: {speed:,.0f} tokens/s per device ({self.elapsed})")
        elif record.status == "diverged":
            self.say(f"DIVERGED: {record.error} ({self.elapsed})")
        else:
            self.say(record.status + (f": {record.error}" if record.error else "") + f" ({self.elapsed})")
