"""The planner's advice before a run: the settings that it predicts to be faster, and sharding that nothing needs."""

import re
import time
from pathlib import Path

import pytest

from megabench.cost.job import Candidate, Job
from megabench.cost.profile import profile_for
from megabench.doctor import Finding
from megabench.doctor.finding import Case
from megabench.doctor.plan_rules import plan
from megabench.doctor.write_findings import findings_at
from megabench.models.find import find_model
from megabench.parallel.layout import Layout
from megabench.planner.costs import Costs
from megabench.planner.engines.sharding import Sharding
from tests.comparison.compare_process import REPOSITORY
from tests.planner.jobs import cluster

HALF_P5E = "p5e.48xlarge:1:4"
BASE = "model: qwen3-0.6b, global_batch: 128, steps: 20, warmup_steps: 5"


def advice(folder: Path, trials: str, where: str | None = HALF_P5E, base: str = BASE) -> list[Finding]:
    """The findings with predictions."""
    path = folder / "study.yaml"
    path.write_text(f"base: {{{base}}}\ntrials: [{trials}]\nrepeats: 3\n")
    return [finding for finding in findings_at(path, cluster=where) if "predicted" in finding.what]


def seconds(precision: str, micro_batch: int, engine: str = "deepspeed", stage: int = 2) -> float:
    job = Job(find_model("qwen3-0.6b"), 4096, 128, precision=precision)
    costs = Costs(job, cluster(HALF_P5E), profile_for("NVIDIA H200"))
    return costs.estimate(Candidate(engine, Layout(dp=4), micro_batch, Sharding(stage))).step_seconds


ZERO2 = "{name: zero2, engine: deepspeed, zero_stage: 2, micro_batch: 4, precision: fp32}"


def test_zero2_in_fp32_with_a_small_micro_batch(tmp_path):
    faster, ddp = advice(tmp_path, ZERO2)
    assert (faster.kind, faster.trials) == ("slow", ("zero2",))
    assert "most of the GPU memory is predicted to stay unused; bf16 with a larger micro-batch" in faster.what
    assert "48.4 of 141 GiB of GPU memory (34%)" in faster.evidence
    gain = seconds("fp32", 4) / seconds("bf16", 16)
    assert f"{gain:.1f} × as fast (bf16 alone {seconds('fp32', 4) / seconds('bf16', 4):.1f} ×)" in faster.evidence
    assert faster.change.startswith("set precision: bf16 and micro_batch: 16; this is a prediction")
    assert (ddp.kind, ddp.trials) == ("note", ("zero2",)) and "ZeRO-2 is not needed" in ddp.what
    assert "predicted for DDP: 49.1 of 141 GiB" in ddp.evidence and "state use 8.9 GiB" in ddp.evidence
    assert seconds("fp32", 4, "ddp", 0) <= seconds("fp32", 4)


def test_the_micro_batch_is_searched(tmp_path):
    """A short sequence needs a larger micro-batch, and a global batch limits it."""
    (found,) = [one for one in advice(tmp_path, ZERO2, base=f"{BASE}, seq_length: 256") if "micro-batch" in one.what]
    assert "micro_batch: 32" in found.change
    small = BASE.replace("128", "32")
    (found,) = [one for one in advice(tmp_path, ZERO2, base=f"{small}, seq_length: 256") if "micro-batch" in one.what]
    assert "micro_batch: 8" in found.change


def test_bf16_alone_where_memory_is_used(tmp_path):
    (found,) = advice(tmp_path, "{tp: 8, micro_batch: auto, precision: fp32}", "p5.48xlarge:1", "model: llama3-8b")
    assert found.what == "bf16 is predicted to be faster than fp32"
    assert found.change.startswith("set precision: bf16; ")


def test_a_gpu_without_bf16_is_advised_fp16(tmp_path):
    found = advice(tmp_path, ZERO2, "p3dn.24xlarge:1:4", f"{BASE}, seq_length: 1024")
    assert any("set precision: fp16" in finding.change for finding in found)


@pytest.mark.parametrize(
    "trials",
    [
        # DDP in bf16 with a large micro-batch has nothing to gain
        "{engine: ddp, micro_batch: 16}",
        # every alternative is measured
        "{engine: [ddp, fsdp], micro_batch: [4, 8, 16]}, {engine: [ddp, fsdp], precision: fp32, micro_batch: [4, 8]}",
    ],
)
def test_a_good_study_gets_no_advice(tmp_path, trials):
    assert advice(tmp_path, trials) == []


def test_sharding_that_memory_needs_is_no_fault(tmp_path):
    base = "model: llama3-8b, global_batch: 32"
    found = advice(tmp_path, "{engine: deepspeed, micro_batch: 2}", "p5.48xlarge:2", base)
    assert not any("not needed" in finding.what for finding in found)


def test_advice_is_a_valid_configuration(tmp_path):
    """With zero_stage 0, DeepSpeed sums bf16 gradients only in bf16, so bf16 alone is no advice."""
    trials = "{engine: deepspeed, zero_stage: 0, micro_batch: 16, precision: fp32}"
    assert not any("bf16" in finding.change for finding in advice(tmp_path, trials))


def test_another_number_of_layers_is_predicted(tmp_path):
    whole, part = (advice(tmp_path, ZERO2, base=f"{BASE}{more}")[0] for more in ("", ", num_layers: 4"))
    used = [float(re.search(r"([\d.]+) of 141 GiB", finding.evidence)[1]) for finding in (whole, part)]
    assert used[1] < used[0] / 2


def test_trials_on_cpus_are_not_predicted(tmp_path):
    assert advice(tmp_path, "{device: cpu, world_size: 2, micro_batch: 1}", None, "model: llama-tiny") == []


def test_shipped_studies_stay_trustworthy():
    for path in sorted((REPOSITORY / "configs/studies").glob("*.yaml")):
        for finding in findings_at(path, cluster="p5e.48xlarge:2"):
            assert finding.kind != "untrustworthy" or "predicted" not in finding.what


def test_a_large_study_is_quick(tmp_path):
    trials = (
        "{tp: [1, 2, 4], pp: [2, 4], vp: [1, 2], micro_batch: [1, 2], seq_length: [512, 1024, 2048], "
        "recompute: [none, full], lr: [1.0e-4, 2.0e-4]}"
    )
    path = tmp_path / "study.yaml"
    path.write_text(f"base: {{model: llama3-8b, global_batch: 256}}\ntrials: [{trials}]\n")
    records, reference, rules, _ = plan(path, None, "p5.48xlarge:4")
    started = time.process_time()
    found = [finding for rule in rules for finding in rule(Case(tuple(records), reference))]
    assert len(records) == 288 and found
    assert time.process_time() - started < 2.0
