"""What a launch leaves to be found: its own processes try it, with the fake trainer in the trainer's place."""

import os
import signal
import sys

import pytest

from megabench.autotune import tune_launched
from megabench.config import RunConfig
from megabench.config.auto import AutoSetting
from megabench.record import Probe
from megabench.runtime import rendezvous
from megabench.supervisor import coordinator
from megabench.train.stopping import SignalledError
from tests.comparison.compare_process import finish, free_port, start, torchrun, wait_until_gone, wait_until_running

pytestmark = pytest.mark.distributed

FAKE_PRETRAIN = [sys.executable, "tests/comparison/pretrain_fake.py"]
FLAGS = ("--model", "llama-tiny", "--global-batch", "8", "--micro-batch", "auto", "--device", "cpu")


@pytest.fixture
def find(monkeypatch):
    """tune_launched for a launch of one process: what it has found, and what it tried for that."""
    monkeypatch.setattr(tune_launched, "TRAINER", (sys.executable, "-m", "tests.comparison.fake_trainer"))
    monkeypatch.setattr(coordinator, "POLL_SECONDS", 0.05)
    monkeypatch.setenv("SECONDS", "1:4.0 2:3.0 4:2.7 8:oom")

    def find(**fields: object) -> tuple[RunConfig, list[Probe]]:
        given = RunConfig.parse({"model": "llama-tiny", "global_batch": 8, "micro_batch": "auto", **fields})
        return tune_launched.tune_launched(given, rendezvous.join(), "cpu")

    return find


def test_what_is_found_is_settled(find, tmp_path, capsys):
    config, probes = find(out=tmp_path)
    assert config.micro_batch == 4 and config.auto_settings == ()
    assert [probe.micro_batch for probe in probes] == [1, 2, 8, 4]
    assert capsys.readouterr().out.count("\n") == 5
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_run_that_goes_on_takes_what_it_found(find, tmp_path, capsys, monkeypatch):
    save, out = tmp_path / "save", tmp_path / "out"
    save.mkdir()
    first = find(save=save, out=out)
    monkeypatch.setenv("SECONDS", "1:oom")
    capsys.readouterr()
    again = find(save=save, load=save, out=out, steps=7)
    assert (again[0].micro_batch, again[1]) == (4, first[1])
    assert capsys.readouterr().out == f"chosen before: {AutoSetting(4, 'none')} ({save / 'found.json'})\n"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert find(save=save, out=out)[0].micro_batch == 4


def test_another_run_and_one_that_begins_anew_try_again(find, tmp_path, monkeypatch):
    find(out=tmp_path)
    monkeypatch.setenv("SECONDS", "1:1.0 2:2.0")
    assert find(out=tmp_path)[0].micro_batch == 1
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("SECONDS", "1:2.0 2:1.0 4:1.0 8:1.0")
    assert find(out=tmp_path)[0].micro_batch == 1
    assert find(out=tmp_path, seq_length=128)[0].micro_batch == 2
    (tmp_path / "found.json").write_text("{")
    assert find(out=tmp_path)[0].micro_batch == 2


def test_without_a_folder_nothing_is_left_behind(find, tmp_path, monkeypatch):
    monkeypatch.setattr(tune_launched.tempfile, "tempdir", str(tmp_path))
    assert find()[0].micro_batch == 4
    assert list(tmp_path.iterdir()) == []


def test_probes_run_with_the_run_s_own_connections(find, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "7")
    monkeypatch.setenv("FAULT", "environment")
    find(out=tmp_path)
    (seen,) = (tmp_path / "probes" / "micro-batch1-none").glob("environment-0")
    assert "CUDA_DEVICE_MAX_CONNECTIONS=7" in seen.read_text().splitlines()


def test_a_signal_behind_the_last_look_is_not_lost(find, tmp_path, monkeypatch):
    part = coordinator.Coordinator._part

    def told_to_stop(self: coordinator.Coordinator) -> None:
        part(self)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(coordinator.Coordinator, "_part", told_to_stop)
    with pytest.raises(SignalledError) as stopped:
        find(out=tmp_path)
    assert stopped.value.number == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def launched(*flags: object, **variables: str) -> list:
    """Two processes, by a launcher that leaves the store to rank 0 and looks after none of them, as srun."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_WORLD_SIZE": "2"}
    return [
        start(FAKE_PRETRAIN, *FLAGS, *flags, RANK=str(rank), LOCAL_RANK=str(rank), **place, **variables)
        for rank in (0, 1)
    ]


SLEEPS = {"FAULT": "kill", "FAULT_RANK": "9"}  # until it is ended
PROBED = {"logs/probes/micro-batch1-none/pid-0", "logs/probes/micro-batch1-none/pid-1"}


@pytest.mark.parametrize("dead", [0, 1])
def test_a_lost_process_ends_the_search(tmp_path, dead):
    ranks = launched("--out", tmp_path / "logs", **SLEEPS)
    wait_until_running(tmp_path, PROBED)
    ranks[dead].kill()
    status, _, stderr = finish(ranks[1 - dead], 60)
    finish(ranks[dead])
    assert status == 1 and "Traceback" not in stderr
    reason = "the supervisor of rank 1 has been silent for" if dead else "the store at 127.0.0.1:"
    assert stderr.count(f"Error: the search for micro_batch stopped: {reason}") == 1
    wait_until_gone(tmp_path)


def test_a_process_that_is_told_to_stop_stops_all(tmp_path):
    ranks = launched("--out", tmp_path / "logs", **SLEEPS)
    wait_until_running(tmp_path, PROBED)
    ranks[1].send_signal(signal.SIGTERM)
    ends = [finish(rank, 60) for rank in ranks]
    assert [status for status, _, _ in ends] == [1, -signal.SIGTERM]
    assert "stopped: the supervisor of rank 1 on " in ends[0][2] and "was ended by SIGTERM" in ends[0][2]
    wait_until_gone(tmp_path)


def test_a_folder_that_cannot_be_made_is_told_before_anything_is_tried(tmp_path):
    (tmp_path / "file").touch()
    flags = (*FLAGS, "--out", tmp_path / "out", "--save", tmp_path / "file/save")
    status, stdout, stderr = finish(start(torchrun(1, 2, *flags, script=FAKE_PRETRAIN[1])))
    assert (status, stdout) == (1, "") and "exitcode  : 2" in stderr  # the first is torchrun's own
    assert stderr.count("Error: save=") == 1
    assert not (tmp_path / "out/probes").exists()


def test_a_run_with_nothing_left_to_train_tries_nothing(tmp_path):
    """Nor does it train: only its first start takes long."""
    flags = ("--num-layers", 1, "--seq-length", 32, "--save", tmp_path, "--load", tmp_path, "--steps", 1)
    command = [*FAKE_PRETRAIN, *FLAGS, *map(str, flags)]
    status, stdout, stderr = finish(start(command))
    assert status == 0 and "chosen: micro-batch " in stdout, stderr
    status, stdout, stderr = finish(start(command))
    assert status == 0 and "nothing is left to train" in stdout and "chosen" not in stdout, stderr
    command[-1] = "2"
    status, stdout, stderr = finish(start(command))
    assert status == 0 and "chosen before: micro-batch " in stdout and "step 2/2" in stdout, stdout + stderr
