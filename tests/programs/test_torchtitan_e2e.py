"""A study runs torchtitan in its own loop, and its losses and tensors are those of the engines."""

from pathlib import Path

import pytest

from megabench.record import RunRecord, read_records
from tests.comparison.compare_process import REAL, REPOSITORY, compare

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STUDY = """
base:
  {model: llama-tiny, num_layers: 2, seq_length: 64, device: cpu, world_size: WORLD, steps: 4, warmup_steps: 2,
   precision: fp32, global_batch: 8, micro_batch: 2, param_groups: "norm: weight_decay=0.3 lr_scale=0.5"}
trials:
"""
TRIALS = {
    2: """
  - {name: tp2, tp: 2}
  - {name: fsdp, program: torchtitan, torchtitan_config: replaced.toml}
  - {name: tp, program: torchtitan, tp: 2}
  - {name: pp, program: torchtitan, pp: 2, micro_batch: 1, torchtitan_config: passes.toml}
  - {name: recompute, program: torchtitan, recompute: selective}
  - {name: replicas, program: torchtitan, torchtitan_config: replicas.toml}
  - {name: changed, program: torchtitan, callbacks: "planted:Changed"}
""",
    4: """
  - {name: tp2, tp: 2}
  - {name: tp-fsdp, program: torchtitan, tp: 2}
  - {name: replicas-of-shards, program: torchtitan, torchtitan_config: replicas.toml}
""",
}
REPLACED = """
[metrics]
log_freq = 50

[profiling]
enable_profiling = true
save_traces_folder = "{folder}/traces"

[validation]
enable = true

[checkpoint]
folder = "{folder}/checkpoint"

[training]
gc_freq = 10
"""
PLANTED = """
from megabench.train.callbacks import Callback


class Changed(Callback):
    def on_ready(self, trainer):
        part = trainer.engine._trainer.model_parts[0]
        part.layers["1"].feed_forward.w2.weight.data.mul_(1.01)
"""


def run(folder: Path, world_size: int) -> tuple[int, str, dict[str, RunRecord]]:
    (folder / "replicas.toml").write_text("[parallelism]\ndata_parallel_replicate_degree = 2\n")
    (folder / "passes.toml").write_text("[training]\nlocal_batch_size = 4\n")
    (folder / "checkpoint").mkdir()  # torchtitan would not load the study's weights if this were its own directory
    (folder / "replaced.toml").write_text(REPLACED.format(folder=folder))
    (folder / "planted.py").write_text(PLANTED)
    study = STUDY.replace("WORLD", str(world_size)) + TRIALS[world_size].strip("\n") + "\nreference: tp2\n"
    for name in ("replicas", "passes", "replaced"):
        study = study.replace(f"{name}.toml", str(folder / f"{name}.toml"))
    (folder / "study.yaml").write_text(study)
    path = f"{REPOSITORY}:{folder}"
    status, out, err = compare(
        folder / "study.yaml", "--out", folder / "out", command=REAL, OMP_NUM_THREADS="1", PYTHONPATH=path
    )
    assert status in (0, 1), out + err
    return status, out, {record.trial: record for record in read_records(folder / "out" / "results.jsonl")}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunRecord]:
    status, out, records = run(tmp_path_factory.mktemp("two"), 2)
    assert status == 1 and "DIVERGED" in out, out  # the planted error
    return records


@pytest.mark.parametrize("name", ["fsdp", "tp", "pp", "recompute", "replicas"])
def test_losses_and_tensors_are_those_of_the_reference(two: dict[str, RunRecord], name: str) -> None:
    assert_equal(two[name])


def assert_equal(record: RunRecord) -> None:
    parity = record.parity
    assert record.status == "ok" and parity and parity.tensors, record.error
    assert parity.max_relative_difference is not None and parity.max_relative_difference < 1e-5
    assert parity.grad_norm_difference is not None and parity.grad_norm_difference < 1e-5
    assert parity.tensors.num_tensors == 21 and parity.tensors.problems == []
    assert 0 < parity.tensors.part_of_tolerance < 1


def test_shards_on_two_axes(tmp_path: Path) -> None:
    status, out, records = run(tmp_path, 4)
    assert status == 0, out
    for name in ("tp-fsdp", "replicas-of-shards"):
        assert_equal(records[name])


def test_another_weight_shows(two: dict[str, RunRecord]) -> None:
    assert two["changed"].status == "diverged"
    assert two["changed"].error and "its tensors differ from those of tp2" in two["changed"].error


def test_the_record_says_what_ran(two: dict[str, RunRecord]) -> None:
    fsdp = two["fsdp"]
    assert fsdp.engine == "torchtitan" and fsdp.options["torchtitan_config"]["training"] == {"gc_freq": 10}
    assert any("checkpoint, metrics, profiling, validation" in warning for warning in fsdp.warnings)
    assert any("the loss is multiplied by" in warning for warning in two["pp"].warnings)
    assert fsdp.kernels and fsdp.kernels["norm"] == "torch, unfused"
    assert fsdp.environment and "torchtitan" in fsdp.environment.versions
    assert fsdp.wire_bytes and set(fsdp.wire_bytes) == {"dp"} and set(two["tp"].wire_bytes or {}) == {"tp"}
    assert len(fsdp.losses) == 4 and fsdp.step_seconds and fsdp.tokens_per_second
