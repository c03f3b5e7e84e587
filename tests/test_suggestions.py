"""A wrong command, option or name is answered with one sentence that names the right one, and with exit status 2."""

import shlex
import sys
from pathlib import Path

import pytest

from megabench.cli import main
from megabench.hardware.gpus import INSTANCE_NAMES, find_instance, near_gpus, near_instances
from megabench.models.catalog import CATALOG, HUB_NAMES, UnknownModelError
from megabench.models.find import find_model

HUB = "is not in the catalogue, and megabench downloads no models. Use hf download "


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("tarin --model llama-tiny", "megabench has no command 'tarin'; did you mean train?"),
        ("pretrain", "megabench has no command 'pretrain'; did you mean megabench train?"),
        ("finetun", "megabench has no command 'finetun'; did you mean train?"),
        ("quickstart", "megabench has no command 'quickstart'; did you mean megabench compare quickstart?"),
        (
            "qqqq",
            "megabench has no command 'qqqq'; use one of compare, doctor, report, pack, unpack, parity, topo",
        ),
        ("convert imprt", "megabench convert has no command 'imprt'; did you mean import?"),
        ("--verison", "megabench has no option --verison; did you mean --version?"),
        ("--tp 2 train", "megabench has no option --tp; begin with the command, as in megabench train --tp"),
        ("compare quickstart --nprocs 2", "megabench compare has no option --nprocs; did you mean --nproc?"),
        ("compare quickstart --num_processes 2", "megabench compare has no option --num_processes; use --nproc 2"),
        ("compare quickstart --tp 2", "megabench compare has no option --tp; here it is --set tp=2: Tensor-parallel"),
        ("compare quickstart --bf16", "megabench compare has no option --bf16; use --set precision=bf16"),
        ("compare quickstart --save x", "megabench compare has no option --save; trials write no checkpoints, and"),
        (
            "compare quickstart --tpp 2",
            "megabench compare has no option --tpp; did you mean --set tp=VALUE or --set pp=",
        ),
        ("compare quickstart --onyl x", "megabench compare has no option --onyl; did you mean --only?"),
        ("plan --seq_length 64", "megabench plan has no option --seq_length; did you mean --seq-length?"),
        ("plan --max_seq_len=64", "megabench plan has no option --max_seq_len; here it is --seq-length 64: Tokens per"),
        ("plan --gpus 16", "megabench plan has no option --gpus; use --cluster TYPE:COUNT"),
        (
            "plan --tp 2",
            "megabench plan has no option --tp; settings of a run are options of megabench train; megabench",
        ),
        ("plan --qqqq", "megabench plan has no option --qqqq; see megabench plan --help"),
        ("topo --tensor-parallel-size 2", "megabench topo has no option --tensor-parallel-size; here it is --tp 2: "),
        ("convert export --checkpoint x", "megabench convert export has no option --checkpoint; use --ckpt x"),
        ("preprocess a.txt --num_proc 4", "megabench preprocess has no option --num_proc; use --workers 4"),
        ("plan --cluster p5:4", "instance type 'p5' is not known; did you mean p5.48xlarge?"),
        ("topo --cluster gb200-nvl7", "instance type 'gb200-nvl7' is not known; did you mean gb200-nvl72?"),
        ("train --model Qwen/Qwen3-0.6B", f"model=Qwen/Qwen3-0.6B {HUB}Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B, and"),
        ("train tp=2", "'tp=2' is not an option; did you mean --tp 2?"),
        ("train trainer.devices=2", "'trainer.devices=2' is not an option; set the number of processes: --nproc 2"),
        ("train quickstart", "'quickstart' is not an option; to run the study of this name, use megabench compare"),
        ("train llama-tiny", "'llama-tiny' is not an option; did you mean --model llama-tiny?"),
        (
            "train run.yaml",
            "'run.yaml' is not an option; did you mean --config run.yaml, or megabench compare run.yaml",
        ),
        ("train --compile true", "'true' is not an option; options such as --compile have no value"),
        ("train qqqq", "'qqqq' is not an option; use options, such as --model llama3-8b"),
        ("train -tp 2", "unknown option -tp; did you mean --tp?"),
        ("train --model", "Option '--model' requires an argument; see --help"),
        ("train --seq_length 64", "unknown option --seq_length; did you mean --seq-length?"),
    ],
)
def test_a_mistake_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, sentence: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["megabench", *shlex.split(line)])
    with pytest.raises(SystemExit) as end:
        main()
    printed = capsys.readouterr()
    assert (end.value.code, printed.out) == (2, "")
    assert printed.err.startswith(f"Error: {sentence}") and printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("study", "sentence"),
    [
        (
            "model: llama-tiny\nsteps: 20\nbetas: [0.9, 0.95]\ntrials: [{tp: 1}]",
            "unknown setting 'model'; move settings of all trials into base: "
            "'base: {model: llama-tiny, steps: 20, betas: …}'",
        ),
        ("bf16: true\ntrials: [{tp: 1}]", "unknown setting 'bf16'; in base, which has the settings of all trials, use"),
        ("triasl: [{tp: 1}]", "unknown setting 'triasl'; did you mean trials?"),
        ("base: {bf16: true}\ntrials: [{tp: 1}]", "trial 1 (tp=1): unknown setting 'bf16'; use precision=bf16"),
        ("base: {engine: zero2}\ntrials: [{}]", "engine='zero2' is not known; use engine=deepspeed and zero_stage=2"),
        (
            "trials: [{tp: 1, save: x}]",
            "unknown setting 'save'; trials write no checkpoints, and megabench compare --out",
        ),
        ("trials: [{tp: 1, qqqq: x}]", "unknown setting 'qqqq'; megabench train --help lists the settings"),
    ],
)
def test_a_mistake_in_a_study_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, study: str, sentence: str
) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(study)
    monkeypatch.setattr(sys, "argv", ["megabench", "compare", str(path), "--nproc", "1", "--dry-run"])
    with pytest.raises(SystemExit) as end:
        main()
    printed = capsys.readouterr()
    assert (end.value.code, printed.out) == (2, "")
    assert f"{path}: " in printed.err and sentence in printed.err and printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("p5", ["p5.48xlarge"]),
        ("P5.48xlage", ["p5.48xlarge"]),
        ("p4", ["p4d.24xlarge", "p4de.24xlarge"]),
        ("ND96isr_H200", ["Standard_ND96isr_H200_v5"]),
        ("8xA100", ["p4d.24xlarge", "p4de.24xlarge"]),
        ("dgx-b200", ["p6-b200.48xlarge", "a4-highgpu-8g"]),
        ("u-p6e-gb200", ["u-p6e-gb200x72", "u-p6e-gb200x36"]),
        ("qqqq", []),
    ],
)
def test_instances_by_family_by_gpu_and_by_spelling(name: str, near: list[str]) -> None:
    assert near_instances(name) == near


def test_the_nearest_instance_of_an_instance_is_itself() -> None:
    assert all(find_instance(near_instances(f"{name[:-1]}")[0]) for name in INSTANCE_NAMES)


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("H100", "NVIDIA H100 80GB HBM3"),
        ("h100 sxm", "NVIDIA H100 80GB HBM3"),
        ("A100 80GB", "NVIDIA A100-SXM4-80GB"),
        ("V100", "Tesla V100-SXM2-32GB"),
        ("NVIDIA H200 141GB", "NVIDIA H200"),
    ],
)
def test_gpus_by_short_name(name: str, first: str) -> None:
    assert near_gpus(name)[0] == first


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("meta-llama/Meta-Llama-3-8B", "For the same shape with random weights, use --model llama3-8b."),
        ("meta-llama/Llama-3.1-8B", "For a similar shape with random weights, use --model llama3-8b."),
        ("some/thing", f"model=some/thing {HUB}some/thing --local-dir thing, and --model thing."),
        ("Meta-Llama-3-8B", "unknown model 'Meta-Llama-3-8B'; did you mean llama3-8b?"),
        ("LLaMA-3-8B", "did you mean llama3-8b?"),
        ("gpt-2", "did you mean gpt2?"),
        ("llama3", "did you mean llama3-8b or llama3-70b or llama3-405b?"),
        ("tests/nowhere", "model=tests/nowhere is neither a directory nor a name of the catalogue"),
        ("./nowhere", "model=./nowhere is neither a directory nor a name of the catalogue"),
    ],
)
def test_models_of_the_hub_and_near_names(name: str, sentence: str) -> None:
    with pytest.raises(UnknownModelError) as error:
        find_model(name)
    assert sentence in str(error.value)


def test_models_of_the_hub_are_in_the_catalogue() -> None:
    assert {*HUB_NAMES.values()} <= {*CATALOG}
    assert all(name == name.lower() and name.count("/") == 1 for name in HUB_NAMES)
