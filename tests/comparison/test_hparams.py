"""The HPARAMS view, as TensorBoard's own server reads it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.hparams import api_pb2, get_experiment, list_session_groups
from tensorboard.plugins.hparams.backend_context import Context

from megabench.comparison.hparams import write_hparams
from megabench.comparison.tensorboard_export import export_records
from megabench.record import LayoutSizes
from tests.study.records import make_record

LAYOUT = {"tp", "pp", "vp", "cp", "dp", "micro_batch"}
NO_RESULT: dict[str, Any] = {
    "work_class": None,
    "status": "oom",
    "error": "CUDA out of memory",
    **dict.fromkeys(("step_seconds", "tokens_per_second", "tokens_per_second_per_device", "peak_memory_gib")),
}


def served(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return TensorBoard's experiment and its session groups by name."""
    runs = EventMultiplexer().AddRunsFromDirectory(str(folder)).Reload()
    context = Context(SimpleNamespace(data_provider=MultiplexerDataProvider(runs, str(folder)), multiplexer=runs))
    request = api_pb2.ListSessionGroupsRequest(allowed_statuses=api_pb2.Status.values(), slice_size=100)
    experiment = get_experiment.Handler(
        RequestContext(), context, "", api_pb2.GetExperimentRequest(include_metrics=True)
    ).run()
    groups = list_session_groups.Handler(RequestContext(), context, "", request).run()
    as_dict = MessageToDict(experiment, preserving_proto_field_name=True)
    return as_dict, {
        group.name: MessageToDict(group, preserving_proto_field_name=True) for group in groups.session_groups
    }


def metrics_of(group: dict[str, Any]) -> dict[str, float]:
    return {metric["name"]["tag"]: metric["value"] for metric in group.get("metric_values", [])}


def test_layouts_beside_throughput(tmp_path: Path) -> None:
    tp2 = LayoutSizes(tp=2, cp=1, pp=1, vp=1, dp=1)
    zero: dict[str, Any] = {"engine": "deepspeed", "options": {"zero_stage": 2, "recompute": "none"}}
    records = [
        make_record([6.0, 5.0, 4.0, 3.0], trial="dp2", mfu=0.4, **zero),
        make_record([6.0, 5.0, 4.0, 3.0], speed=2000.0, trial="tp2", layout=tp2, mfu=0.5),
        make_record([], trial="tp2-large", layout=tp2, micro_batch=16, **NO_RESULT),
    ]
    assert export_records(records, tmp_path) == 2
    experiment, groups = served(tmp_path)

    infos = {info["name"]: info for info in experiment["hparam_infos"]}
    assert infos.keys() == LAYOUT | {"engine", "status"}, "constant settings are left out"
    assert infos["tp"]["type"] == "DATA_TYPE_FLOAT64" and infos["tp"]["domain_discrete"] == [1, 2]
    assert infos["engine"]["domain_discrete"] == ["deepspeed ZeRO-2", "megatron"]
    assert {name for name, info in infos.items() if info.get("differs")} == {
        "tp", "dp", "micro_batch", "engine", "status",
    }  # fmt: skip
    assert [info["display_name"] for info in experiment["metric_infos"]] == [
        "tokens/s per device", "MFU", "step time (s)", "peak memory (GiB)",
    ]  # fmt: skip

    assert groups["tp2"]["hparams"] == {
        **dict.fromkeys(("pp", "vp", "cp", "dp"), 1), "tp": 2, "micro_batch": 4, "engine": "megatron", "status": "ok",
    }  # fmt: skip
    assert metrics_of(groups["tp2"]) == {
        "trial/tokens_per_second_per_device": 2000, "trial/mfu": 0.5, "trial/step_seconds": 0.5,
        "trial/peak_memory_gib": 1.25,
    }  # fmt: skip
    failed = groups["tp2-large"]
    assert failed["sessions"][0]["status"] == "STATUS_FAILURE" and not metrics_of(failed)
    assert (failed["hparams"]["micro_batch"], failed["hparams"]["status"]) == (16, "oom")
    assert EventAccumulator(str(tmp_path / "tp2-large")).Reload().Tags()["tensors"] == [
        "_hparams_/experiment", "_hparams_/session_start_info", "_hparams_/session_end_info", "error/text_summary",
    ]  # fmt: skip


def test_a_metric_that_no_run_measured_is_not_declared(tmp_path: Path) -> None:
    """TensorBoard draws no lines for runs that lack a declared metric, such as the MFU on CPU."""
    write_hparams(tmp_path, {Path("dp2"): make_record([6.0, 5.0])})
    experiment, groups = served(tmp_path)
    declared = {info["name"]["tag"] for info in experiment["metric_infos"]}
    assert declared == metrics_of(groups["run"]).keys() and "trial/mfu" not in declared
    assert {info["name"] for info in experiment["hparam_infos"]} == LAYOUT


def test_the_most_informative_axes_are_shown_first(tmp_path: Path) -> None:
    """TensorBoard shows 5 hyperparameters until the user selects others."""
    other = LayoutSizes(tp=2, cp=2, pp=2, vp=2, dp=4)
    runs = {
        Path("a"): make_record([6.0], trial="a"),
        Path("b"): make_record([6.0], trial="b", layout=other, engine="fsdp", precision="bf16", micro_batch=1),
    }
    write_hparams(tmp_path, runs)
    infos = served(tmp_path)[0]["hparam_infos"]
    assert {info["name"] for info in infos[:5]} == {"tp", "pp", "engine", "precision", "micro_batch"}
    assert {info["name"] for info in infos[5:]} == {"vp", "cp", "dp"}


def test_no_point_at_step_0_and_level_lines_for_results(tmp_path: Path) -> None:
    export_records([make_record([6.0, 5.0, 4.0, 3.0], mfu=0.5, first_step=5)], tmp_path)
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    steps = {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert steps["train/loss"] == [5, 6, 7, 8]
    assert all(len(numbers) > 1 and min(numbers) >= 5 for numbers in steps.values()), steps
    assert steps["trial/mfu"] == [6, 8], "the first and the last timed step"
    assert [event.value for event in events.Scalars("trial/mfu")] == [0.5, 0.5]
    assert min(steps).startswith("throughput/"), "TensorBoard sorts the groups of tags by name"


def test_repeats_are_sessions_of_one_trial(tmp_path: Path) -> None:
    records = [make_record([6.0, 5.0], speed=1000.0 * (1 + repeat), repeat=repeat) for repeat in (0, 1)]
    assert export_records(records, tmp_path) == 2
    _, groups = served(tmp_path)
    assert [session["name"] for session in groups["run"]["sessions"]] == ["run", "run/repeat-1"]
    assert metrics_of(groups["run"])["trial/tokens_per_second_per_device"] == 1500


def test_a_later_call_replaces_what_an_earlier_one_wrote(tmp_path: Path) -> None:
    """As with `compare --resume`, after the study was edited: one trial was removed, and one added."""
    first, second = make_record([6.0, 5.0], trial="a"), make_record([6.0, 5.0], trial="b", precision="bf16")
    write_hparams(tmp_path, {Path("a"): first, Path("removed"): make_record([6.0, 5.0], trial="removed")})
    write_hparams(tmp_path, {Path("a"): first, Path("b"): second})
    experiment, groups = served(tmp_path)
    assert "precision" in {info["name"] for info in experiment["hparam_infos"]}
    assert {name: group["hparams"]["precision"] for name, group in groups.items()} == {"a": "fp32", "b": "bf16"}
    assert len(list((tmp_path / "a").iterdir())) == 1
    assert metrics_of(groups["a"])["trial/step_seconds"] == pytest.approx(0.5)
