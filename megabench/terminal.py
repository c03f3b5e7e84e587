"""Console for the tables that commands print, and the progress line of long commands. Loads no torch."""

import sys
import time
from threading import Event, Thread
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

HEARTBEAT_SECONDS = 30.0  # between two progress lines in a file or pipe
_REFRESHES_PER_SECOND = 4.0

_PLAIN_WIDTH = 250  # files and pipes get a width that is larger than any table, so that no table is truncated


def standard_output() -> Console:
    """Return a console as wide as the terminal, or 250 columns wide if standard output is no terminal."""
    # a notebook gets the plain text of a file, because rich would write each line as an output of its own
    return Console() if sys.stdout.isatty() else Console(width=_PLAIN_WIDTH, force_jupyter=False)


class ProgressLine:
    """Shows the current activity of a command and its elapsed time, as a context manager.

    In a terminal, a thread redraws the line, so the time advances although the command reports nothing. In a file or
    pipe, the thread prints the line every HEARTBEAT_SECONDS. Lines start with `label` if there is one.
    """

    def __init__(self, console: Console, label: str = "") -> None:
        self._console, self._label, self._activity = console, label, "starting"
        self._started = time.monotonic()
        self._is_live = console.is_interactive and console.file.isatty()  # FORCE_COLOR makes any file interactive
        self._spinner = Spinner("dots")
        self._live = Live(
            console=console, get_renderable=self._line, transient=True, refresh_per_second=_REFRESHES_PER_SECOND
        )
        self._stopped = Event()
        self._heartbeats = Thread(target=self._print_heartbeats, daemon=True)

    def __enter__(self) -> Self:
        if self._is_live:
            self._live.start(refresh=True)
        else:
            self._heartbeats.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def update(self, activity: object) -> None:
        """Set the current activity."""
        self._activity = str(activity)

    def say(self, text: str) -> None:
        """Print a line that stays on the screen."""
        self._console.print(self._labelled(text), soft_wrap=True)

    def stop(self) -> None:
        """Remove the line from the terminal, and print no further heartbeats."""
        self._live.stop()
        self._stopped.set()
        if self._heartbeats.is_alive():
            self._heartbeats.join()

    @property
    def elapsed(self) -> str:
        """The time since the start, in whole seconds."""
        return f"{time.monotonic() - self._started:.0f} s"

    def _line(self) -> Spinner:
        self._spinner.update(text=self._labelled(f"{self._activity} ({self.elapsed})"))
        return self._spinner

    def _labelled(self, text: str) -> Text:
        return Text(f"{self._label} {text}" if self._label else text)

    def _print_heartbeats(self) -> None:
        while not self._stopped.wait(HEARTBEAT_SECONDS):
            self.say(f"{self._activity} ({self.elapsed})")
