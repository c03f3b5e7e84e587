"""The search for micro-batch and recomputation, on machines that are formulas, against trying everything."""

import itertools
from dataclasses import dataclass
from typing import Any

import pytest

from megabench.autotune.probe import probe_config
from megabench.autotune.setting_search import MOST_PROBES, Search
from megabench.autotune.step_model import StepModel
from megabench.config import ConfigError, RunConfig
from megabench.config.auto import AutoSetting, apply_setting, legal_settings
from megabench.record import Probe

WORLD_SIZE = 4


@dataclass(frozen=True)
class Machine:
    """Seconds and GiB of a micro-batch: `fixed` whatever its size (weights to gather, launches), `each` a sequence."""

    fixed: float = 0.1
    each: float = 0.3
    update: float = 0.2
    state_gib: float = 40.0
    each_gib: dict[str, float] | None = None
    device_gib: float | None = 140.0

    def run(self, config: RunConfig, setting: AutoSetting) -> Probe:
        run = apply_setting(config, setting).resolve(WORLD_SIZE, "cpu")
        each_gib = (self.each_gib or {"none": 20.0, "selective": 15.0, "full": 3.0})[setting.recompute]
        memory = self.state_gib + each_gib * setting.micro_batch
        result: dict[str, Any] = {
            "micro_batch": setting.micro_batch,
            "recompute": setting.recompute,
            "global_batch": run.global_batch,
        }
        if memory > 0.98 * (self.device_gib or 1e9):
            return Probe(**result, status="oom", error="rank 0 ran out of memory")
        compute = {"none": 1.0, "selective": 1.05, "full": 4 / 3}[setting.recompute]
        one = self.fixed + self.each * compute * setting.micro_batch
        seconds = self.update + (run.num_micro_batches + (run.pp - 1) / run.vp) * one
        return Probe(**result, status="ok", step_seconds=seconds, peak_memory_gib=memory)


def search(config: RunConfig, machine: Machine) -> Search:
    run = apply_setting(config, legal_settings(config, WORLD_SIZE, "cpu")[0]).resolve(WORLD_SIZE, "cpu")
    found = Search(legal_settings(config, WORLD_SIZE, "cpu"), run)
    while setting := found.next():
        assert len(found.probes) < found.most_probes <= 10
        found.tell(machine.run(probe_config(config, setting, WORLD_SIZE, "cpu"), setting), machine.device_gib)
    return found


def tried(found: Search) -> list[tuple[int, str]]:
    return [(probe.micro_batch, probe.recompute) for probe in found.probes]


def loss(config: RunConfig, machine: Machine, found: Search) -> float:
    """Seconds of a step under what was found, as a multiple of what trying everything finds."""
    legal = legal_settings(config, WORLD_SIZE, "cpu")
    assert found.best
    return seconds(config, machine, found.best) / min(seconds(config, machine, setting) for setting in legal)


def seconds(config: RunConfig, machine: Machine, setting: AutoSetting) -> float:
    """Of the run's own step; infinite where it does not fit."""
    probe = machine.run(config, setting)
    return probe.step_seconds if probe.step_seconds is not None else float("inf")


def config(**fields: object) -> RunConfig:
    return RunConfig.parse({"model": "llama3-8b", "micro_batch": "auto", "global_batch": 256, **fields})


MACHINES = [
    Machine(fixed=fixed, state_gib=state, device_gib=device)
    for fixed, (state, device) in itertools.product((0.0, 0.3, 2.0), ((10.0, None), (60.0, 140.0), (115.0, 140.0)))
]
LAYOUTS = [
    {},
    {"engine": "deepspeed"},
    {"tp": 4},
    {"pp": 4},
    {"pp": 2, "tp": 2},
    {"pp": 2, "vp": 2, "tp": 2},
    {"global_batch": 16},
    {"global_batch": 24},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_four_probes_find_what_trying_everything_finds(machine, layout):
    run = config(**layout)
    found = search(run, machine)
    assert loss(run, machine, found) <= 1.03
    assert len(found.probes) <= MOST_PROBES


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_with_recomputation_four_that_fit_find_it(machine, layout):
    run = config(**layout, recompute="auto")
    found = search(run, machine)
    assert loss(run, machine, found) <= 1.03
    fitting = [probe for probe in found.probes if probe.status == "ok"]
    assert len(fitting) <= MOST_PROBES and len(found.probes) <= MOST_PROBES + 2


@pytest.mark.parametrize("update", [10.0, 20.0])
@pytest.mark.parametrize("fields", [*LAYOUTS, {"global_batch": 4096, "pp": 4}, {"global_batch": 4096}], ids=str)
@pytest.mark.parametrize("fixed", [0.1, 3.0])
def test_an_update_that_takes_long_is_not_charged_to_micro_batches(fixed, fields, update):
    """An optimizer in host memory takes 10 to 20 s a step, beside which the probes' micro-batches take few."""
    for recompute in ("none", "auto"):
        run = config(**fields, recompute=recompute)
        for state in (10.0, 60.0, 115.0):
            machine = Machine(fixed=fixed, update=update, state_gib=state)
            found = search(run, machine)
            assert loss(run, machine, found) <= 1.03, (recompute, state, tried(found))


def test_steps_of_different_batches_are_compared_by_what_each_micro_batch_takes():
    """Charged to micro-batches, 20 s of update would make the longer step of the larger micro-batch look cheaper."""
    run = apply_setting(config(global_batch=1024), AutoSetting(1, "none")).resolve(WORLD_SIZE, "cpu")
    found = Search([AutoSetting(size, level) for level in ("none", "full") for size in (1, 2, 64)], run)
    for size, level, sequences, seconds in ((1, "none", 16, 36.0), (2, "none", 16, 32.0), (64, "full", 128, 117.7)):
        probe = Probe(micro_batch=size, recompute=level, global_batch=4 * sequences, status="ok", step_seconds=seconds)
        found.tell(probe, None)
    # u = 20, a = 0.5, b = 0.5: 212 s a step of 256 sequences at micro-batch 2, and 192.7 with whole layers again
    assert found.best == AutoSetting(64, "full")
    found.probes[-1].step_seconds = 150.0
    assert found.best == AutoSetting(2, "none")


def test_noise_is_not_drawn_out():
    """A second probe that took less time than the first says nothing of the fiftieth."""
    run = config(global_batch=1024)
    found = Search(
        legal_settings(run, WORLD_SIZE, "cpu"), apply_setting(run, AutoSetting(1, "none")).resolve(WORLD_SIZE, "cpu")
    )
    for size, seconds in ((1, 6.4), (2, 3.1)):
        probe = Probe(micro_batch=size, recompute="none", global_batch=256, status="ok", step_seconds=seconds)
        found.tell(probe, None)
    assert found.next() == AutoSetting(256, "none")


def test_probes_of_equal_compute_are_one_point():
    """Three sequences of whole layers computed again take as much of it as four without."""
    run = apply_setting(config(global_batch=96), AutoSetting(1, "none")).resolve(WORLD_SIZE, "cpu")
    good = [
        Probe(micro_batch=size, recompute=level, global_batch=96, status="ok", step_seconds=seconds)
        for size, level, seconds in ((1, "none", 24.0), (4, "none", 15.0), (3, "full", 20.0))
    ]
    assert StepModel(run, good).predicted(AutoSetting(6, "full"), 0.0) == pytest.approx(4 * (2.5 + 4 * 1.5 / 3))


def test_where_two_do_not_fit_two_probes_suffice():
    found = search(config(), Machine(state_gib=115.0))
    assert tried(found) == [(1, "none"), (2, "none")] and found.best == AutoSetting(1, "none")


def test_of_settings_as_fast_the_one_with_less_memory_is_taken():
    assert search(config(), Machine(fixed=0.0, update=0.0)).best == AutoSetting(1, "none")


def test_nothing_fits():
    found = search(config(), Machine(state_gib=150.0))
    assert found.best is None and tried(found) == [(1, "none")]


def test_recomputation_is_tried_where_nothing_fits_without():
    machine = Machine(state_gib=123.0)
    assert tried(search(config(recompute="auto"), machine))[:2] == [(1, "none"), (1, "selective")]
    deepspeed = config(recompute="auto", engine="deepspeed")
    found = search(deepspeed, machine)
    assert tried(found)[:2] == [(1, "none"), (1, "full")]
    assert found.best == AutoSetting(4, "full")


def test_recomputation_wins_where_a_micro_batch_costs_much_beside_its_compute():
    """ZeRO-3 across a slow network gathers all weights for every micro-batch, however large that is."""
    run = config(recompute="auto", engine="deepspeed", global_batch=64)
    slow = Machine(fixed=5.0, state_gib=60.0)
    found = search(run, slow)
    assert found.best and found.best.recompute == "full"
    best = min(seconds(run, slow, setting) for setting in legal_settings(run, WORLD_SIZE, "cpu"))
    assert seconds(run, slow, found.best) <= best * 1.03
    near = search(run, Machine(fixed=0.01, state_gib=60.0))
    assert near.best and near.best.recompute == "none" and "full" not in {level for _, level in tried(near)}


def test_where_two_do_not_fit_whole_layers_again_are_tried_as_far_as_they_win():
    """Micro-batch 2 loses by it here, and 8 wins: half of what is fixed does not pay for the compute."""
    run = config(recompute="auto", engine="deepspeed", global_batch=64)
    machine = Machine(fixed=0.16, state_gib=112.0)
    assert seconds(run, machine, AutoSetting(2, "full")) > seconds(run, machine, AutoSetting(1, "none"))
    found = search(run, machine)
    assert tried(found) == [(1, "none"), (2, "none"), (4, "full"), (8, "full")]
    assert found.best == AutoSetting(8, "full") and loss(run, machine, found) == 1


def test_a_probe_is_short_and_the_run_s_own_batch_decides():
    """Of 1024 sequences, 64 of a stage's round are enough to see; the bubble of the whole step is what counts."""
    run = config(pp=4, global_batch=1024)
    long = run.model_copy(update={"steps": 5000, "save": "x", "profile": True})
    short = probe_config(long, AutoSetting(4, "none"), WORLD_SIZE, "cpu")
    assert (short.global_batch, short.micro_batch, short.steps, short.warmup_steps) == (64, 4, 3, 1)
    assert short.save is None and short.auto_settings == () and not short.profile
    # at 64 sequences a micro-batch of 16 loses more to the bubble than it gains, at 1024 it wins
    assert search(run, Machine(fixed=0.2, device_gib=None)).best == AutoSetting(16, "none")


def test_settings_that_the_layout_forbids_are_not_tried():
    run = config(pp=2, vp=2, tp=2, global_batch=12)
    assert [s.micro_batch for s in legal_settings(run, WORLD_SIZE, "cpu")] == [1, 2, 3, 6]
    with pytest.raises(ConfigError, match="works only with megabench train and compare"):
        run.resolve(WORLD_SIZE, "cpu")
    with pytest.raises(ConfigError, match="zero_stage"):
        legal_settings(config(zero_stage=1), WORLD_SIZE, "cpu")


def test_one_setting_alone_is_left_open():
    fixed = config(micro_batch=4, recompute="auto")
    assert {s.micro_batch for s in legal_settings(fixed, WORLD_SIZE, "cpu")} == {4}
    assert search(fixed, Machine()).best == AutoSetting(4, "none")
    assert search(fixed, Machine(state_gib=110.0)).best == AutoSetting(4, "full")
