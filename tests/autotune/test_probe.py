"""The short run that tries a setting: how long it is, and which of its steps count."""

import json

import pytest

from megabench.autotune.probe import probe_config, probe_result
from megabench.config import RunConfig
from megabench.config.auto import AutoSetting, legal_settings
from megabench.record import StepSeconds
from tests.study.records import make_record

WORLD_SIZE = 4
SETTING = AutoSetting(2, "none")


def config(**fields: object) -> RunConfig:
    return RunConfig.parse({"model": "llama3-8b", "micro_batch": "auto", "global_batch": 256, **fields})


def micro_batches(config: RunConfig) -> list[int]:
    return [setting.micro_batch for setting in legal_settings(config, WORLD_SIZE, "cuda")]


def test_small_micro_batches_are_tried_with_the_same_sequences():
    for run, same in ((config(), 16 * 4), (config(pp=4), 16 * 4), (config(global_batch=4 * 48), 24 * 4)):
        tried = [probe_config(run, AutoSetting(size, "none"), WORLD_SIZE, "cuda").global_batch for size in (1, 2, 4, 8)]
        assert set(tried) == {same}
    assert probe_config(config(), AutoSetting(16, "none"), WORLD_SIZE, "cuda").global_batch == 32 * 4


def test_an_interleaved_schedule_gets_whole_rounds():
    run = config(pp=2, vp=2, tp=2, global_batch=96)
    for size in micro_batches(run):
        short = probe_config(run, AutoSetting(size, "none"), WORLD_SIZE, "cuda")
        assert short.resolve(WORLD_SIZE, "cuda").num_micro_batches >= min(4, 96 // size)


def test_fp16_has_steps_to_find_its_loss_scale():
    def of(precision: str) -> RunConfig:
        return probe_config(config(engine="fsdp", precision=precision), SETTING, WORLD_SIZE, "cuda")

    assert of("fp16").steps >= of("bf16").steps + 8 and of("fp16").warmup_steps == of("bf16").warmup_steps


@pytest.mark.parametrize(
    ("content", "fields", "sizes"),
    [
        ({"train_batch_size": 1536}, {}, (1, 2, 3, 4, 6, 8)),
        ({"train_batch_size": 1536}, {"global_batch": 1536}, (1, 2, 3, 4, 6, 8)),
        ({"gradient_accumulation_steps": 64}, {"global_batch": 1536}, (6,)),
    ],
    ids=str,
)
def test_a_deepspeed_json_that_names_the_batch_is_not_contradicted(tmp_path, content, fields, sizes):
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(content))
    given = {"model": "llama3-8b", "micro_batch": "auto", "engine": "deepspeed", "deepspeed_config": path}
    run = RunConfig.parse(given | fields)
    assert tuple(micro_batches(run)[: len(sizes)]) == sizes
    for size in sizes:
        short = probe_config(run, AutoSetting(size, "none"), WORLD_SIZE, "cuda")
        assert short.resolve(WORLD_SIZE, "cuda").global_batch == short.global_batch == 1536


def heard(grad_norms: list[float | None], seconds: list[float]):
    steps = StepSeconds(median=9.0, p10=9.0, p90=9.0, all=seconds)
    record = make_record([6.0] * len(grad_norms), grad_norms=grad_norms, step_seconds=steps)
    return probe_result(SETTING, config(global_batch=64), "ok", None, record)


def test_steps_that_were_skipped_do_not_count():
    """Nor does the first that was not: the optimizer makes its state in it."""
    assert heard([None, None, None, 2.0, 2.0, 2.0], [0.5, 0.5, 3.0, 1.0, 1.1]).step_seconds == 1.05
    assert heard([2.0, None, 2.0, 2.0], [0.5, 1.0, 1.2]).step_seconds == 1.1
    assert heard([2.0, 2.0, 2.0], [1.0, 1.2]).step_seconds == 1.1
    assert heard([2.0, 2.0, 2.0, 2.0, 2.0], [1.0, 1.2]).step_seconds == 1.1


def test_a_probe_without_a_step_that_counts_has_failed():
    probe = heard([2.0, None, None], [0.5, 0.5])
    assert (probe.status, probe.step_seconds) == ("failed", None) and "none of the 3 steps" in probe.error
