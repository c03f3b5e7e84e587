"""Study files: expansion, names, identities, and one sentence for each mistake. Nothing here starts a process."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from megabench.study.compare_request import Request
from megabench.study.expand import SAFE_NAME, expand, numbered, with_fields
from megabench.study.study import Study, StudyError, StudyFile, plan_study
from megabench.train.flags import parse_flags

BASE = "base: {model: llama-tiny, world_size: 4}\n"


@pytest.fixture
def plan(tmp_path):
    def plan(text: str, num_processes: int = 4) -> Study:
        path = tmp_path / "study.yaml"
        path.write_text(text)
        return plan_study(StudyFile.read(path), path, num_processes, "cpu")

    return plan


def names(study: Study) -> list[str]:
    return [trial.name for trial in study.trials]


def test_lists_expand_to_their_product_and_betas_is_a_value():
    assert expand({"tp": [1, 2], "micro_batch": [4, 8], "betas": [0.9, 0.95]}) == [
        {"tp": tp, "micro_batch": micro_batch, "betas": [0.9, 0.95]} for tp in (1, 2) for micro_batch in (4, 8)
    ]
    assert [values["betas"] for values in expand({"betas": [[0.9, 0.95], [0.8, 0.9]]})] == [[0.9, 0.95], [0.8, 0.9]]


def test_names_come_from_the_layout_and_what_varies(plan):
    study = plan(
        BASE
        + """
trials:
  - {tp: 2, pp: 2}
  - {tp: [1, 2], micro_batch: [2, 4]}
  - {pp: 2, vp: 2, recompute: full}
  - {engine: deepspeed}
  - {engine: deepspeed, zero_stage: 2}
  - {name: mine, tp: 4}
  - {name: both, tp: 2, seed: [1, 2]}
"""
    )
    assert names(study) == [
        *("tp2-pp2", "dp4-mb2", "dp4-mb4", "tp2-dp2-mb2", "tp2-dp2-mb4"),
        *("pp2-vp2-dp2-recompute-full", "zero3", "zero2", "mine", "both-seed1", "both-seed2"),
    ]
    assert study.reference == "zero3"


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (
            "name: zero, engine: deepspeed, zero_stage: [1, 2], precision: [bf16, fp32]",
            "zero1-bf16 zero1-fp32 zero2-bf16",
        ),
        ("name: zero, engine: deepspeed, precision: [bf16, fp32], zero_stage: [1, 2]", "zero1-bf16 zero2-bf16"),
        ("name: ddp, precision: [bf16, fp32]", "ddp-bf16 ddp-fp32"),
        ("name: ddp, micro_batch: [2, 4]", "ddp-mb2 ddp-mb4"),
        ("name: ddp-bf16, precision: [bf16]", "ddp-bf16"),
        ("name: a, micro_batch: [auto, 4]", "a-mb-auto a-mb4"),
        ("name: a, global_batch: [16, 64], seq_length: [32]", "a-gbs16-seq32 a-gbs64-seq32"),
        ("name: a, compile: [true, false], engine: [fsdp]", "a-compile-fsdp a-no-compile-fsdp"),
        ("name: a, weight_decay: [0.1, 0.0]", "a-weight-decay-0.1 a-weight-decay-0.0"),
        ("name: a, betas: [[0.9, 0.95], [0.8, 0.9]]", "a-betas-0.9_0.95 a-betas-0.8_0.9"),
        ("pp: 4, vp: [1, 2]", "pp4 pp4-vp2"),
        ("tp: 2, pp: 2, micro_batch: [2, 4]", "tp2-pp2-mb2 tp2-pp2-mb4"),
        ("engine: deepspeed, zero_stage: 1, precision: [bf16, fp32]", "zero1-bf16 zero1-fp32"),
        (
            "tp: 2, emulate_hosts: 2, emulate_network: [{gb_per_s: 1.5}, {gb_per_s: 3, latency_us: 50}]",
            "tp2-dp2-network1.5 tp2-dp2-network3-50us",
        ),
    ],
)
def test_names_read_as_people_write_them(plan, entry, expected):
    found = names(plan(BASE + f"trials: [{{{entry}}}]"))
    assert set(expected.split()) <= set(found) and len(set(found)) == len(found)
    assert all(SAFE_NAME.fullmatch(name) for name in found)


def test_a_short_name_that_another_trial_has_is_written_in_full(plan):
    sweep, zero1 = "{name: zero, engine: deepspeed, zero_stage: [1, 2]}", "{name: zero1, tp: 2}"
    assert names(plan(BASE + f"trials: [{sweep}, {zero1}]")) == ["zero-zero_stage1", "zero2", "zero1"]
    assert names(plan(BASE + f"trials: [{zero1}, {sweep}]")) == ["zero1", "zero-zero_stage1", "zero2"]


def test_a_name_must_name_a_folder(plan):
    assert names(plan(BASE + f"trials: [{{tp: 2, name: {'x' * 200}}}]")) == ["x" * 200]
    with pytest.raises(StudyError, match="xx is too long for a directory name; add a shorter name"):
        plan(BASE + f"trials: [{{tp: 2, name: {'x' * 201}}}]")


def test_names_are_unique_and_safe(plan):
    assert numbered(["a", "b", "a", "a"]) == ["a", "b", "a-2", "a-3"]
    assert with_fields("tp2", {"data": "../other file.txt", "lr": 0.001}) == "tp2-data-.._other_file.txt-lr0.001"
    study = plan(BASE + "trials: [{tp: 2}, {tp: 2, env: {A: 1}}]")
    assert names(study) == ["tp2-dp2", "tp2-dp2-2"]


def test_reference_is_the_first_zero3_trial_else_the_first_else_the_one_named(plan):
    assert plan(BASE + "trials: [{tp: 2}, {tp: 4}]").reference == "tp2-dp2"
    assert plan(BASE + "reference: tp4\ntrials: [{engine: deepspeed}, {tp: 4}]").reference == "tp4"


def test_environment_and_world_size_of_a_trial(plan):
    study = plan(
        """
base: {model: llama-tiny, env: {A: 1, B: base}}
trials: [{tp: 2}, {tp: 2, world_size: 2, env: {B: 2.5}}]
""",
        num_processes=8,
    )
    assert [trial.env for trial in study.trials] == [{"A": "1", "B": "base"}, {"A": "1", "B": "2.5"}]
    assert [trial.world_size for trial in study.trials] == [8, 2]
    assert names(study) == ["tp2-dp4", "tp2-ranks2"]


def test_a_trial_may_have_a_time_limit_of_its_own(plan):
    study = plan(BASE + "timeout_seconds: 60\ntrials: [{tp: 2, timeout_seconds: 9.5}, {tp: 4}]")
    assert [(trial.name, trial.timeout_seconds) for trial in study.trials] == [("tp2-dp2", 9.5), ("tp4", 60)]


def test_identity_is_of_all_that_shapes_the_run_and_nothing_else(plan):
    def id_of(fields: str, more: str = "") -> str:
        return plan(f"{BASE}{more}\ntrials: [{{{fields}}}]").trials[0].id

    assert (
        id_of("tp: 2")
        == id_of("tp: 2, name: other")
        == id_of("tp: 2, micro_batch: 4")
        == id_of("tp: 2", "repeats: 3")
        == id_of("tp: 2, timeout_seconds: 5")
    )
    others = ["tp: 4", "tp: 2, seed: 1", "tp: 2, env: {A: 1}", "tp: 2, world_size: 2", "tp: 2, lr: 0.1"]
    assert len({id_of("tp: 2"), *map(id_of, others)}) == 1 + len(others)


def test_attempts_have_folders_of_their_own(plan):
    study = plan(BASE + "repeats: 2\ntrials: [{tp: 2}, {tp: 4}]")
    folders = [attempt.folder.as_posix() for attempt in study.attempts]
    assert folders == ["tp2-dp2", "tp4", "tp2-dp2/repeat-1", "tp4/repeat-1"]


def test_a_trial_may_be_repeated_by_itself(plan):
    study = plan(BASE + "trials: [{tp: 2}, {tp: 4, repeats: 2}]")
    folders = [attempt.folder.as_posix() for attempt in study.attempts]
    assert folders == ["tp2-dp2", "tp4", "tp4/repeat-1"]


def test_repeats_run_in_rounds_of_all_trials_that_have_so_many(plan):
    """A B C A B C removes slow changes of the machine from the comparison, which A A B B C C does not."""
    study = plan(BASE + "repeats: 2\ntrials: [{name: a, repeats: 3}, {name: b, tp: 2}, {name: c, tp: 4, repeats: 4}]")
    runs = [(attempt.trial.name, attempt.repeat) for attempt in study.attempts]
    assert runs == [("a", 0), ("b", 0), ("c", 0), ("a", 1), ("b", 1), ("c", 1), ("a", 2), ("c", 2), ("c", 3)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trials: [{tp: 3}]", "trial 1 (tp=3): tp=3 × cp=1 × pp=1 needs a multiple of 3 processes"),
        ("trials: [{tp: 2}, {name: bad, tp: 4, cp: 2}]", "trial 2 (bad): tp=4 × cp=2"),
        ("trials: [{tpp: 2}]", "unknown setting 'tpp'; did you mean tp"),
        ("trials: [{wrold_size: 2}]", "did you mean world_size or shard_size?"),
        ("trials: [{out: here}]", "unknown setting 'out'"),
        ("trial: [{tp: 2}]", "unknown setting 'trial'; did you mean trials?"),
        ("name: empty", "has no trials"),
        ("trials: []", "has no trials"),
        ("trials: [{tp: []}, {}]", "trial 1: tp is an empty list"),
        ("trials: [{steps: 3, warmup_steps: 3}]", "steps=3 leaves no step to time after warmup_steps=3"),
        ("trials: [{on_nan: rollback}]", "trial 1 (on_nan=rollback): on_nan=rollback works only with megabench train"),
        ("trials: [{emulate_network: {gb_per_s: 1}}]", "use emulate_hosts=2 or more, or omit emulate_network"),
        ("trials: [{emulate_hosts: 1, emulate_network: {gb_per_s: 1}}]", "but emulate_hosts=1; use emulate_hosts=2"),
        ("emulate_network: {gb_per_s: 1}\ntrials: [{tp: 2}]", "limits the network between emulated hosts"),
        ("emulate_network: fast\ntrials: [{tp: 2}]", "emulate_network=fast is no bandwidth and latency"),
        ("trials: [{emulate_network: {gb_per_s: 0}}]", "emulate_network={'gb_per_s': 0} is no bandwidth and latency"),
        ("trials: [{emulate_network: {gb: 1}}]", "use a mapping such as {gb_per_s: 1.5, latency_us: 50}"),
        ("trials: [{emulate_network: 2}]", "emulate_network=2 is no bandwidth and latency"),
        ("trials: [{emulate_network: {gb_per_s: 9, transport: ib}}]", "sockets or shared_memory as transport"),
        ("trials: [{tp: 2, tp: 4}]", "tp occurs twice"),
        ("trials: [3]", "trials=3 is not valid"),
        ("trials: [{tp: 2}]\nrepeat: 2", "unknown setting 'repeat'; did you mean repeats?"),
        ("trials: [{tp: 2}]\nrepeats: 0", "repeats=0 is not valid"),
        ("trials: [{tp: 2, repeats: 0}]", "trial 1 (tp=2, repeats=0): repeats=0 must be a whole number of runs"),
        ("trials: [{tp: 2}]\nreference: tp2", "reference 'tp2' is not a trial of the study; did you mean tp2-dp2?"),
        ("trials: [{name: a/b}]", "name 'a/b' cannot be used as a directory name"),
        ("trials: [{name: a}, {name: a, tp: 2}]", "an earlier trial is also called 'a'"),
        ("trials: [{tp: 2}, {tp: 2, name: twin}]", "is the same run as trial 'tp2-dp2'"),
        ("trials: [{world_size: 8}]", "needs 8 processes but the launch has 4"),
        ("trials: [{world_size: many}]", "world_size='many' must be a whole number"),
        ("trials: [{timeout_seconds: soon}]", "timeout_seconds='soon' must be a positive number of seconds"),
        ("trials: [{timeout_seconds: 0}]", "timeout_seconds=0 must be"),
        ("trials: [{timeout_seconds: .inf}]", "timeout_seconds=inf must be"),
        ("trials: [{repeats: 99999999}]", "repeats=99999999 must be a whole number of runs from 1 to 1000"),
        ("repeats: 99999999\ntrials: [{tp: 2}]", "repeats=99999999 is not valid"),
        ("trials: [{world_size: 100000000}]", "world_size=100000000 must be a whole number"),
        ("trials: [{steps: 010}]", "010 is octal in YAML"),
        ("trials: [{steps: 1.0e+20}]", "steps=1e+20 is not valid"),
        ('trials: [{env: {A: "x\\0y"}}]', "env A contains a NUL byte"),
        (f"trials: [{{env: {{A: {'x' * 200_000}}}}}]", "env A contains a NUL byte or exceeds 131071 bytes"),
        (f"trials: [{{seed: {[*range(300)]}, steps: {[*range(10, 300)]}, tp: [1, 2]}}]", "expands to 174,000 trials"),
        ("a: " + "[" * 5000, "nested too deeply"),
        (
            "a: &a [1, 2]\n" + "".join(f"{k}: &{k} [{', '.join(['*' + p] * 9)}]\n" for p, k in pairwise("abcdefghi")),
            "more than 100,000 values",
        ),
        ("a: &a [*a]", "nested too deeply"),
        ("name: " + "x" * 2**21, "is larger than 1 MiB"),
        ("trials: [{env: {A: true}}]", "env={'A': True} must map variables to text or numbers"),
        ("trials: [{env: NCCL_DEBUG}]", "env='NCCL_DEBUG' must map"),
        ("trials: [{device: cuda}]", "no NVIDIA GPU was found"),
        (
            "trials: [{engine: deepspeed, tp: 2}]",
            "ZeRO-3 of the deepspeed engine supports only data parallelism",
        ),
        ("trials: [{model: llama-tiney}]", "did you mean llama-tiny"),
    ],
)
def test_mistakes_are_told_in_one_sentence_with_the_file(plan, tmp_path, text, words):
    with pytest.raises(StudyError) as raised:
        plan(BASE + text)
    assert words in str(raised.value)
    assert str(raised.value).startswith(str(tmp_path / "study.yaml"))
    assert "\n" not in str(raised.value)


def test_lists_in_base_are_refused(plan):
    with pytest.raises(StudyError, match=r"base\.tp is a list; lists expand only in trials"):
        plan("base: {tp: [1, 2]}\ntrials: [{}]")


@pytest.mark.parametrize(
    ("base", "gpus", "asked", "size"),
    [
        ("world_size: 4", 0, None, 4),
        ("world_size: 4", 8, None, 8),
        ("world_size: 4, device: cpu", 8, None, 4),
        ("tp: 1", 2, None, 2),
        ("tp: 1", 0, 3, 3),
    ],
)
def test_processes_of_one_machine(tmp_path, monkeypatch, base, gpus, asked, size):
    monkeypatch.setattr("megabench.study.compare_request.gpu_names", lambda: ["NVIDIA H200"] * gpus)
    path = tmp_path / "study.yaml"
    path.write_text(f"base: {{model: llama-tiny, global_batch: 96, {base}}}\ntrials: [{{}}]")
    assert Request(path, tmp_path).plan_here(asked)[1] == size


@pytest.mark.parametrize(
    ("base", "gpus", "words"),
    [
        ("tp: 1", 0, "has no world_size and no NVIDIA GPU was found; add --nproc N"),
        ("device: cpu", 2, "has no world_size and it runs on CPU alone"),
        ("world_size: 4", 2, "needs 4 processes but the launch has 2"),
    ],
)
def test_too_few_processes_on_one_machine(tmp_path, monkeypatch, base, gpus, words):
    monkeypatch.setattr("megabench.study.compare_request.gpu_names", lambda: ["NVIDIA H200"] * gpus)
    path = tmp_path / "study.yaml"
    path.write_text(f"base: {{model: llama-tiny, {base}}}\ntrials: [{{}}]")
    with pytest.raises(StudyError, match=words):
        Request(path, tmp_path).plan_here(None)


@pytest.mark.parametrize(("only", "refused"), [(("one",), None), (("o*", "one"), None), (("two",), "two"), ((), "two")])
def test_trials_that_are_left_out_may_need_a_larger_machine(tmp_path, monkeypatch, only, refused):
    monkeypatch.setattr("megabench.study.compare_request.gpu_names", lambda: ["NVIDIA H200"])
    path = tmp_path / "study.yaml"
    path.write_text(
        "base: {model: llama-tiny}\ntrials: [{name: one, world_size: 1}, {name: two, tp: 2, world_size: 2}]"
    )
    request = Request(path, tmp_path, only=only)
    if refused is None:
        study, size = request.plan_here(None)
        assert size == 1 and [trial.name for trial in study.trials] == ["one", "two"]
        assert request.plan_launched(1).trials == study.trials
    else:
        with pytest.raises(StudyError, match=r"trial .*two.* needs 2 processes but the launch has 1"):
            request.plan_here(None)


def test_a_study_for_gpus_is_refused_without_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr("megabench.study.compare_request.gpu_names", lambda: [])
    source = Path(__file__).parents[2] / "configs/studies/gpt2-zero.yaml"
    request = Request(source, tmp_path)
    for plan in (lambda: request.plan_here(None), lambda: request.plan_launched(1)):
        with pytest.raises(StudyError, match=r"needs GPUs, and no NVIDIA .*; megabench compare gpt2-zero-small runs"):
            plan()
    study, _ = request.plan_here(None, starts=False)
    assert {trial.resolved.device for trial in study.trials} == {"cuda"}
    assert not Request(source, tmp_path, settings=("device=cpu",)).read_study().needs_gpus


def test_more_processes_than_gpus_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("megabench.study.compare_request.gpu_names", lambda: ["NVIDIA H200"] * 2)
    path = tmp_path / "study.yaml"
    path.write_text("base: {model: llama-tiny}\ntrials: [{tp: 4}]")
    with pytest.raises(StudyError, match="trial tp4 needs 4 GPUs and this machine has 2; use --nproc 2"):
        Request(path, tmp_path).plan_here(4)


def test_the_command_line_sets_fields_of_the_base(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text("base: {model: llama3-8b, tp: 2}\ntrials: [{name: one}, {name: two, tp: 2}]")
    settings = ("model=llama-tiny", "micro_batch=auto", "global_batch=8", "betas=[0.5, 0.6]", "world_size=2", "tp=1")
    study, size = Request(path, tmp_path, settings=settings).plan_here(None)
    assert size == 2
    for trial in study.trials:
        assert (trial.config.model, trial.config.micro_batch, trial.config.global_batch) == ("llama-tiny", "auto", 8)
        assert trial.config.betas == (0.5, 0.6)
    assert [trial.config.tp for trial in study.trials] == [1, 2], "what a trial says of itself stays"
    path.write_text(study.as_run)
    assert study.name == "study" and StudyFile.read(path).base["model"] == "llama-tiny"
    emulated = Request(path, tmp_path, emulate_hosts=2).plan_here(2)[0]
    assert emulated.as_run and "emulate_hosts: 2" in emulated.as_run


def test_the_network_of_emulated_hosts_is_set_for_all_trials_or_on_the_command_line(tmp_path, plan):
    head = BASE + "emulate_hosts: 2\nemulate_network: {gb_per_s: 2}\n"
    study = plan(head + "trials: [{tp: 2}, {tp: 4, emulate_network: {gb_per_s: 0.5}}, {tp: 4, emulate_network: null}]")
    limits = [trial.resolved.emulate_network for trial in study.trials]
    assert [limit and limit.gb_per_s for limit in limits] == [2, 0.5, None]
    command = study.trials[1].config.command(4)
    assert "--emulate-hosts 2 --emulate-network '{gb_per_s: 0.5}'" in command
    assert parse_flags(study.trials[1].config.flags()) == study.trials[1].config
    path = tmp_path / "study.yaml"
    for value in ("{gb_per_s: 3, latency_us: 50}", "gb_per_s: 3.0"):
        request = Request(path, tmp_path, settings=(f"emulate_network={value}",))
        changed, _ = request.plan_here(4, starts=False)
        limit = changed.trials[0].resolved.emulate_network
        assert limit.gb_per_s == 3 and limit.latency_us == 50 * ("latency" in value)
        path.write_text(changed.as_run)
    assert StudyFile.read(path).emulate_network.gb_per_s == 2
    with pytest.raises(StudyError, match="start megabench compare on one machine without torchrun"):
        Request(path, tmp_path).plan_launched(4)


def test_trials_over_several_networks_have_the_network_in_their_names(plan):
    networks = "[{gb_per_s: 0.75}, {gb_per_s: 3, latency_us: 50}, null]"
    trials = f"trials: [{{name: pp2, pp: 2, emulate_network: {networks}}}, {{name: one-host, emulate_hosts: null}}]"
    study = plan(BASE + f"answers: crossover\nemulate_hosts: 2\n{trials}")
    assert [trial.name for trial in study.trials] == [
        "pp2-network0.75",
        "pp2-network3-50us",
        "pp2-network-unlimited",
        "one-host",
    ]
    assert study.trials[2].resolved.emulate_hosts == 2 and study.trials[2].resolved.emulate_network is None
    assert study.trials[3].resolved.emulate_hosts is None and study.answers == "crossover"


def test_the_command_line_sets_the_repeats_of_all_trials(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(
        "base: {model: llama-tiny, repeats: 2}\ntrials: [{name: one}, {name: two, tp: 2, repeats: 7}]\nrepeats: 4"
    )
    study, _ = Request(path, tmp_path, repeats=3).plan_here(2)
    assert [trial.repeats for trial in study.trials] == [3, 3]
    path.write_text(study.as_run)
    again = Request(path, tmp_path).plan_launched(2)
    assert [trial.repeats for trial in again.trials] == [3, 3], "the copy in the output directory says so, too"
    assert Request(path, tmp_path).plan_launched(2).digest != Request(path, tmp_path, repeats=5).plan_launched(2).digest


@pytest.mark.parametrize(
    ("repeats", "settings", "words"),
    [
        (0, (), "--repeats 0 must be a whole number of runs from 1 to 1000, e.g. 3"),
        (1001, (), "--repeats 1001 must be a whole number of runs from 1 to 1000, e.g. 3"),
        (2.0, (), "--repeats 2.0 must be"),
        (3, ("repeats=2",), "--repeats 3 and --set repeats=2 both set the repeats; use one of them"),
        (3, ("tp=1", "one.repeats=2"), "--repeats 3 and --set one.repeats=2 both set the repeats; use one of them"),
    ],
)
def test_repeats_that_the_command_line_cannot_set(tmp_path, repeats, settings, words):
    path = tmp_path / "study.yaml"
    path.write_text("base: {model: llama-tiny}\ntrials: [{name: one}]")
    for plan in (lambda request: request.plan_here(1), lambda request: request.plan_launched(1)):
        with pytest.raises(StudyError, match=re.escape(words)):
            plan(Request(path, tmp_path, settings=settings, repeats=repeats))


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("tp", "--set tp has no value"),
        ("=2", "--set =2 has no value"),
        ("wrold_size=2", "--set wrold_size=2: unknown setting 'wrold_size'; did you mean world_size"),
        ("env={A: 1}", "env is not a setting of a run"),
        ("tp={2", "is not valid YAML"),
        ("micro_batches=2", "unknown setting 'micro_batches'; did you mean micro_batch"),
        ("tp=[1, 2]", "base.tp is a list"),
    ],
)
def test_what_the_command_line_cannot_set(tmp_path, setting, words):
    path = tmp_path / "study.yaml"
    path.write_text("base: {model: llama-tiny}\ntrials: [{}]")
    with pytest.raises(StudyError, match=re.escape(words)):
        Request(path, tmp_path, settings=(setting,)).plan_here(1)


def test_the_quickstart_is_a_study():
    path = Path(__file__).parents[2] / "configs/studies/quickstart.yaml"
    file = StudyFile.read(path)
    study = plan_study(file, path, file.largest_world_size or 0, "cpu")
    assert names(study) == ["tp2-pp2", "tp4", "pp2-vp2-dp2", "tp2-dp2", "zero3"]
    assert study.reference == "zero3" and {trial.world_size for trial in study.trials} == {4}
