"""Processes that a supervisor ends."""

import os
import sys
import time

from megabench.runtime import child
from megabench.runtime.child import Child, end_all

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"


def test_who_waits_for_a_deaf_process_gives_signs_of_life(tmp_path, monkeypatch):
    """Ending it may take longer than a supervisor may be silent."""
    monkeypatch.setattr(child, "TERM_GRACE_SECONDS", 1.0)
    deaf = Child([sys.executable, "-c", DEAF], os.environ, tmp_path / "log")
    while deaf.last_line() != "deaf":
        time.sleep(0.01)
    signs = []

    def breathe():
        signs.append(deaf.exit_status())
        time.sleep(0.1)

    end_all([deaf], breathe)
    assert deaf.exit_status() == -9
    assert len(signs) >= 5 and signs[0] is None
