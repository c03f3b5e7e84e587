"""How a process ends in which gloo still works."""

import subprocess
import sys

# The first exit function is called last, and holds the interpreter while gloo ends its work: its threads wait then.
# What is taken down with the interpreter waits for them in turn.
BUSY = """
import atexit, ctypes, sys, threading, time
atexit.register(ctypes.PyDLL(None).usleep, 1_500_000)
import torch
import torch.distributed as dist
from megabench.runtime.exit import exit_process

class Waits:
    def __del__(self, sleep=time.sleep):
        sleep(20)  # ends with the process, as soon as one of gloo's threads needs the interpreter

store, sys.groups, waits = dist.HashStore(), [], Waits()
def join(rank):
    sys.groups.append(dist.ProcessGroupGloo(store, rank, 2))
threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
atexit.register(print, "exit function")
for _ in range(20):  # too many to be done before the exit functions begin
    for group in sys.groups:
        group.allreduce(torch.ones(5_000_000))
print("done")
"""


def run(last_line: str) -> subprocess.CompletedProcess[str]:
    """Runs BUSY and `last_line`."""
    return subprocess.run([sys.executable, "-c", BUSY + last_line], capture_output=True, text=True, check=False)


def test_a_process_that_gloo_still_works_in_ends_with_its_status() -> None:
    left = run("exit_process(3)")
    assert (left.returncode, left.stdout) == (3, "done\nexit function\n"), left.stderr


def test_taking_the_interpreter_down_would_abort_it() -> None:
    ended = run("sys.exit(3)")
    assert ended.returncode == -6 and "terminate called" in ended.stderr


def test_the_status_is_kept_where_nobody_reads_the_output() -> None:
    code = """
import os, sys
from megabench.runtime.exit import exit_process
read, write = os.pipe()
os.close(read)
sys.stdout = os.fdopen(write, "w")
print("done")
exit_process(3)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (3, "")
