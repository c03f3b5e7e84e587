"""Processes that a supervisor ends."""

import os
import sys
import time
from types import SimpleNamespace

from megabench.runtime import child
from megabench.runtime.child import Child, end_all

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"


def test_who_waits_for_a_deaf_process_gives_signs_of_life(tmp_path, monkeypatch):
    """Ending it may take longer than a supervisor may be silent."""
    deaf = Child([sys.executable, "-c", DEAF], os.environ, tmp_path / "log")
    while deaf.last_line() != "deaf":
        time.sleep(0.01)
    signs = []

    def breathe():
        signs.append(deaf.exit_status())
        time.sleep(0.01)

    monkeypatch.setattr(child, "TERM_GRACE_SECONDS", 5.0)
    monkeypatch.setattr(child, "time", SimpleNamespace(monotonic=lambda: float(len(signs))))
    end_all([deaf], breathe)
    assert signs[:5] == [None] * 5
    while deaf.exit_status() is None:
        time.sleep(0.01)
    assert deaf.exit_status() == -9
