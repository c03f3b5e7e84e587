"""Advice for planned trials on several pods of one server."""

from megabench.doctor.write_findings import findings_at


def findings(folder, cluster: str) -> list:
    path = folder / "study.yaml"
    path.write_text("base: {model: qwen3-0.6b, global_batch: 128}\ntrials: [{name: dp}, {name: ddp, engine: ddp}]\n")
    return [one for one in findings_at(path, cluster=cluster) if "of one server" in one.what]


def test_pods_of_one_server_are_reported(tmp_path):
    (found,) = findings(tmp_path, "one-gpu-pods")
    assert found.kind == "slow" and found.trials == ("dp", "ddp")
    assert found.what == "4 hosts (pods) of one server communicate over sockets instead of NVLink or PCIe"
    assert found.evidence == "pod-0, pod-1, pod-2, pod-3 are on server-0, and share its memory, CPUs and NICs"
    assert "use one pod per server" in found.change


def test_hosts_of_their_own_are_not_reported(tmp_path):
    assert not findings(tmp_path, "p5.48xlarge:2")
