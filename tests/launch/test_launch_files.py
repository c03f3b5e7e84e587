"""The files for Kubernetes and SkyPilot: their fields, and their commands in local processes."""

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import kubernetes_validate
import psutil
import pytest
import yaml

from megabench.record import RunRecord
from megabench.study.archive import unpack
from megabench.study.results_directory import read_folder
from tests.comparison.compare_process import REPOSITORY, free_port, start
from tests.docs.command_blocks import flag_errors
from tests.launch.custom_resources import JOB_SET, PYTORCH_JOB, SKY_TASK, Fields, unknown_fields

KUBERNETES = "1.34"
FLAGS = ["--model", "llama-tiny", "--num-layers", "2", "--seq-length", "64", "--device", "cpu", "--tp", "2"]
SECONDS = 200
PATH = f"{Path(sys.executable).parent}:/usr/bin:/bin"
FILES = ("job", "jobset", "pytorchjob")
FIRST_PODS = ("megabench-0", "megabench-nodes-0-0")  # of job and jobset


def documents(file: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((REPOSITORY / f"launch/kubernetes/{file}.yaml").read_text()))


def manifest(file: str) -> dict[str, Any]:
    return documents(file)[-1]


def job_spec(file: str) -> dict[str, Any]:
    """The specification of the Job that starts the pods of `job` or of a job set."""
    spec: dict[str, Any] = manifest(file)["spec"]
    return spec if file == "job" else spec["replicatedJobs"][0]["template"]["spec"]


def pod_template(file: str) -> dict[str, Any]:
    if file == "pytorchjob":
        template: dict[str, Any] = manifest(file)["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    else:
        template = job_spec(file)["template"]
    return template


def container(file: str) -> dict[str, Any]:
    [found] = pod_template(file)["spec"]["containers"]
    return found


def sky_task() -> dict[str, Any]:
    task: dict[str, Any] = yaml.safe_load((REPOSITORY / "launch/skypilot.yaml").read_text())
    return task


def check_core(kind: str, api: str, spec: dict[str, Any]) -> None:
    resource = {"apiVersion": api, "kind": kind, "metadata": {"name": "megabench"}, "spec": spec}
    kubernetes_validate.validate(resource, KUBERNETES, strict=True)


def test_core_resources_match_the_schema() -> None:
    for document in documents("job"):
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    for file in ("jobset", "crossover-efa"):
        check_core("Job", "batch/v1", job_spec(file))
    pod = pod_template("pytorchjob")["spec"]
    check_core("Pod", "v1", pod)
    with pytest.raises(kubernetes_validate.ValidationError):
        check_core("Pod", "v1", pod | {"nodeselector": {}})


@pytest.mark.parametrize(
    ("document", "fields"),
    [
        (manifest("jobset"), JOB_SET),
        (manifest("crossover-efa"), JOB_SET),
        (manifest("pytorchjob"), PYTORCH_JOB),
        (sky_task(), SKY_TASK),
    ],
    ids=["jobset", "crossover-efa", "pytorchjob", "skypilot"],
)
def test_custom_resources_have_only_documented_fields(document: dict[str, Any], fields: Fields) -> None:
    assert unknown_fields(document, fields) == []
    assert unknown_fields(document | {"Spec": {}}, fields) == ["Spec"]


def test_pods_differ_only_where_the_controllers_differ() -> None:
    pods = {file: pod_template(file) for file in FILES}
    for template in pods.values():
        for name in ("subdomain", "restartPolicy"):  # the controllers of jobset and pytorchjob set one or both
            template["spec"].pop(name, None)
        only = template["spec"]["containers"][0]
        del only["name"], only["command"]
        only["env"] = [entry for entry in only["env"] if entry["name"] != "NAMESPACE"]
    assert pods["job"] == pods["jobset"] == pods["pytorchjob"]
    assert {mount["name"] for mount in only["volumeMounts"]} == {v["name"] for v in template["spec"]["volumes"]}


def test_the_crossover_has_the_pods_of_jobset() -> None:
    """Only the command, the name and the times after which pods are removed and started again differ."""
    given, other = job_spec("jobset"), job_spec("crossover-efa")
    for spec, name in (given, "megabench"), (other, "crossover-efa"):
        assert spec["template"]["metadata"]["labels"] == {"app": name}
        del spec["template"]["spec"]["terminationGracePeriodSeconds"]
        only = spec["template"]["spec"]["containers"][0]
        del only["command"], only["args"]
    assert json.loads(json.dumps(other).replace('{"app": "crossover-efa"}', '{"app": "megabench"}')) == given


def test_the_crossover_finds_the_first_pod_and_its_flags_parse() -> None:
    document = manifest("crossover-efa")
    name, [replicated] = document["metadata"]["name"], document["spec"]["replicatedJobs"]
    [script] = container("crossover-efa")["args"]
    assert f"--rdzv-endpoint={name}-{replicated['name']}-0-0.{name}.$(NAMESPACE).svc.cluster.local:" in script
    assert f"--nnodes={job_spec('crossover-efa')['completions']} " in script
    torchrun = script[script.index("torchrun") : script.index("status=")]
    assert flag_errors(torchrun) == [] and "compare crossover-efa --out=/shared/crossover-efa --resume" in torchrun
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


def test_every_file_sets_the_variables_of_efa_env() -> None:
    text = (REPOSITORY / "launch/efa.env").read_text()
    expected = dict(line.split("=", 1) for line in text.splitlines() if re.match(r"[A-Z]", line))
    assert "FI_PROVIDER" in expected
    for file in (*FILES, "crossover-efa"):
        given = {entry["name"]: entry.get("value") for entry in container(file)["env"]}
        assert {name: value for name, value in given.items() if name.startswith(("FI_", "NCCL_"))} == expected
    assert sky_task()["envs"] == expected


def test_pods_find_the_first_pod() -> None:
    service, job = documents("job")
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    jobset = manifest("jobset")
    name, [replicated] = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"]
    # Kubernetes calls a pod of an indexed job JOB-INDEX. JobSet calls a job JOBSET-REPLICATEDJOB-INDEX, and its service
    # has the name of the job set.
    first = {"job": f"{job['metadata']['name']}-0", "jobset": f"{name}-{replicated['name']}-0-0"}
    subdomain = {"job": service["metadata"]["name"], "jobset": name}
    for file in ("job", "jobset"):
        spec, command = job_spec(file), container(file)["command"]
        assert spec["completionMode"] == "Indexed" and f"--nnodes={spec['completions']}" in command
        assert spec["parallelism"] == spec["completions"]
        host = f"{first[file]}.{subdomain[file]}.$(NAMESPACE).svc.cluster.local"
        assert any(flag.startswith(f"--rdzv-endpoint={host}:") for flag in command)
        assert "NAMESPACE" in [entry["name"] for entry in container(file)["env"]]


@pytest.mark.parametrize("file", FILES)
def test_flags_of_both_programs_in_a_manifest_parse(file: str) -> None:
    """The arguments that train, and those of the comment below them, which run a study."""
    text = (REPOSITORY / f"launch/kubernetes/{file}.yaml").read_text()
    [study] = re.findall(r"^ *# args: (\[.*\])$", text, re.MULTILINE)
    for program, args in ("megabench.train", container(file)["args"]), ("megabench", yaml.safe_load(study)):
        assert args[:2] == ["-m", program]
        assert flag_errors(shlex.join(["torchrun", *args])) == []


@pytest.mark.parametrize("file", ["slurm.sbatch", "slurm-pyxis.sbatch", "skypilot.yaml"])
def test_flags_of_commands_and_comments_parse(file: str) -> None:
    text = (REPOSITORY / "launch" / file).read_text().replace("\\\n", " ")
    found = [line for line in text.splitlines() if re.search(r" -m megabench\b.* --", line)]
    assert len(found) >= (1 if "pyxis" in file else 2)
    for line in found:
        command = "torchrun" + line[line.index(" -m megabench") :]
        assert flag_errors(command) == [], line


def job_command(file: str, port: int) -> tuple[list[str], dict[str, str]]:
    """The command and the variables of a pod, with one CPU process per pod and a local endpoint."""
    here = {"--nproc-per-node": "1", "--rdzv-endpoint": f"localhost:{port}"}
    command = [
        f"{name}={here[name]}" if (name := word.split("=")[0]) in here else word for word in container(file)["command"]
    ]
    return command, {entry["name"]: entry.get("value", "default") for entry in container(file)["env"]}


def pytorchjob_command(port: int) -> tuple[list[str], dict[str, str]]:
    """The command of a pod, and the variables that the training operator adds.

    Source: elastic.go and envvar.go in pkg/controller.v1/pytorch of kubeflow/training-operator.
    """
    spec = manifest("pytorchjob")["spec"]
    policy, worker = spec["elasticPolicy"], spec["pytorchReplicaSpecs"]["Worker"]
    assert "minReplicas" not in policy and "maxReplicas" not in policy and "Master" not in spec["pytorchReplicaSpecs"]
    assert spec["nprocPerNode"] == "gpu"
    command, variables = job_command("pytorchjob", port)
    return command, variables | {
        "PET_RDZV_ENDPOINT": f"localhost:{port}",
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_RDZV_ID": policy["rdzvId"],
        "PET_RDZV_CONF": ",".join(f"{entry['key']}={entry['value']}" for entry in policy["rdzvConf"]),
        "PET_NNODES": str(worker["replicas"]),
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
        "PET_NPROC_PER_NODE": "1",
    }


PODS: dict[str, Callable[[int], tuple[list[str], dict[str, str]]]] = {
    "jobset": lambda port: job_command("jobset", port),
    "pytorchjob": pytorchjob_command,
}


def run_pods(commands: list[list[str]], variables: list[dict[str, str]]) -> list[tuple[str, str]]:
    """Run the commands until they end without an error, and return what each of them printed."""
    with ExitStack() as stack:
        running = []
        for command, more in zip(commands, variables, strict=True):
            process = start(command, **({"OMP_NUM_THREADS": "1", "PATH": PATH} | more))
            stack.callback(end, process.pid)
            running.append(process)
        printed = [process.communicate(timeout=SECONDS) for process in running]
    assert [process.returncode for process in running] == [0] * len(running), printed
    return printed


def train(commands: list[list[str]], variables: list[dict[str, str]], out: Path) -> RunRecord:
    """Run the commands until they end, and return the record of the run."""
    run_pods(commands, variables)
    return RunRecord.read(out / "record.json")


def end(pid: int) -> None:
    """End a process and all below it."""
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for member in [*root.children(recursive=True), root]:
            member.kill()


def test_job_and_jobset_run_the_same_command() -> None:
    """The command of `job` is therefore not run again below."""
    job, jobset = (container(file)["command"] for file in ("job", "jobset"))
    assert [pair for pair in zip(job, jobset, strict=True) if pair[0] != pair[1]] == [
        tuple(f"--rdzv-endpoint={pod}.megabench.$(NAMESPACE).svc.cluster.local:29500" for pod in FIRST_PODS)
    ]


@pytest.mark.e2e
@pytest.mark.parametrize("file", PODS)
def test_two_pods_train(file: str, tmp_path: Path) -> None:
    command, variables = PODS[file](free_port())
    args = [*container(file)["args"][:2], *FLAGS, "--steps", "3", "--out", str(tmp_path / "run")]
    record = train([[*command, *args]] * 2, [variables] * 2, tmp_path / "run")
    assert (record.world_size, record.layout.tp) == (2, 2)


def crossover_pods(folder: Path) -> tuple[list[str], list[dict[str, str]]]:
    """The command and the variables of two pods that run two trials of the small crossover study in `folder`."""
    [script] = container("crossover-efa")["args"]
    script = re.sub(r"--rdzv-endpoint=\S+", f"--rdzv-endpoint=localhost:{free_port()}", script)
    trials = "crossover-efa-small --only zero3-kept --only tp2-dp2"
    for old, new in ("=gpu", "=2"), ("compare crossover-efa", f"compare {trials}"), ("/shared", str(folder)):
        assert old in script
        script = script.replace(old, new)
    _, common = job_command("jobset", 0)
    variables = [common | {"JOB_COMPLETION_INDEX": str(index)} for index in range(2)]
    return [*container("crossover-efa")["command"], script], variables


def packed(folder: Path) -> list[tuple[str, str]]:
    """The trials in the archive that the pods wrote to `folder`, with their status."""
    found = read_folder(unpack(folder / "crossover-efa.tar.gz", folder / "record"))
    return [(record.trial, record.status) for record in found.records]


@pytest.mark.e2e
def test_two_pods_return_an_archive_of_the_crossover(tmp_path: Path) -> None:
    """The first pod packs the results, and no other pod does."""
    command, variables = crossover_pods(tmp_path)
    printed = run_pods([command] * 2, variables)
    assert [f"{tmp_path}/crossover-efa.tar.gz" in out for out, _ in printed] == [True, False], printed
    assert packed(tmp_path) == [("zero3-kept", "ok"), ("tp2-dp2", "ok")]


@pytest.mark.e2e
def test_two_pods_pack_what_was_measured_when_their_time_is_over(tmp_path: Path) -> None:
    """The time of one pod is over: the alarm of `timeout` rings early."""
    command, variables = crossover_pods(tmp_path)
    with ExitStack() as stack:
        pods = []
        for more in variables:
            pods.append(start(command, **{"OMP_NUM_THREADS": "1", "PATH": PATH} | more))
            stack.callback(end, pods[-1].pid)
        results, deadline = tmp_path / "crossover-efa" / "results.jsonl", time.monotonic() + SECONDS
        while not (results.exists() and results.stat().st_size):
            assert time.monotonic() < deadline and all(pod.poll() is None for pod in pods)
            time.sleep(0.1)
        [timeout] = [child for child in psutil.Process(pods[1].pid).children() if child.name() == "timeout"]
        timeout.send_signal(signal.SIGALRM)
        printed = [pod.communicate(timeout=SECONDS) for pod in pods]
    assert all(pod.returncode for pod in pods), printed
    first, *others = packed(tmp_path)
    assert first == ("zero3-kept", "ok") and ("tp2-dp2", "ok") not in others, printed


@pytest.mark.e2e
def test_two_skypilot_nodes_train(tmp_path: Path) -> None:
    task = sky_task()
    (tmp_path / "megabench-env" / "bin").mkdir(parents=True)
    (tmp_path / "megabench-env" / "bin" / "activate").touch()
    launcher, _, _ = task["run"].replace(":29500", f":{free_port()}").partition("megabench.train")
    script = f"{launcher} megabench.train {' '.join(FLAGS)} --steps 3 --out {tmp_path / 'run'}"
    common = {
        "HOME": str(tmp_path),
        "MEGABENCH_STORE_SECRET": "default",
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NUM_GPUS_PER_NODE": "1",
        "SKYPILOT_TASK_ID": "sky-2026-01-01_megabench-1",
    }
    variables = [common | task["envs"] | {"SKYPILOT_NODE_RANK": str(rank)} for rank in range(2)]
    record = train([["bash", "-c", script]] * 2, variables, tmp_path / "run")
    assert (record.world_size, record.layout.tp) == (2, 2)
