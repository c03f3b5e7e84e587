"""What a host is like, from made-up files of Linux and NCCL."""

import os
from pathlib import Path

import pytest

from megabench.hardware import checkup
from megabench.record import Machine

GPU = "00000000:3B:00.0"  # as NVML writes it


def device(sys: Path, way: str) -> Path:
    """A PCI device at the end of `way`, found by its address as well."""
    folder = sys / "devices" / way
    folder.mkdir(parents=True)
    by_address = sys / "bus/pci/devices" / folder.name
    by_address.parent.mkdir(parents=True, exist_ok=True)
    by_address.symlink_to(folder)
    return folder


def nic(sys: Path, name: str, way: str) -> None:
    folder = sys / "class/infiniband" / name
    folder.mkdir(parents=True)
    (folder / "device").symlink_to(device(sys, way))


@pytest.mark.parametrize(
    ("ways", "expected"),
    [
        (["pci0000:3a/0000:3a:00.0/0000:3c:00.0"], "switch"),
        (["pci0000:3a/0000:3a:01.0/0000:3c:00.0"], "host bridge"),
        (["pci0000:80/0000:80:00.0/0000:81:00.0"], "other bridge"),
        (["pci0000:80/0000:80:00.0/0000:81:00.0", "pci0000:3a/0000:3a:00.0/0000:3c:00.0"], "switch"),
        ([], None),
    ],
)
def test_nic_distance_in_sys(tmp_path, ways, expected):
    device(tmp_path, "pci0000:3a/0000:3a:00.0/0000:3b:00.0")
    for number, way in enumerate(ways):
        nic(tmp_path, f"mlx5_{number}", way)
    assert checkup.distance_in_sys(tmp_path, GPU) == expected


def test_a_gpu_that_sys_does_not_know(tmp_path):
    nic(tmp_path, "mlx5_0", "pci0000:3a/0000:3a:00.0/0000:3c:00.0")
    assert checkup.distance_in_sys(tmp_path, GPU) is None


NEAR = '<pci busid="0000:3c:00.0"><nic><net name="mlx5_0" dev="0"/></nic></pci>'
ON_SWITCH = '<pci busid="0000:3a:00.0" class="0x060400"><pci busid="0000:3b:00.0"><gpu dev="0"/></pci>{}</pci>'


@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        (ON_SWITCH.format(NEAR), "switch"),
        (ON_SWITCH.format("") + NEAR, "host bridge"),
        (ON_SWITCH.format("") + "</cpu><cpu numaid='1'>" + NEAR, "other bridge"),
        (ON_SWITCH.format(""), None),
        (NEAR, None),
        ("<unclosed>", None),
    ],
)
def test_nic_distance_in_nccl_topology(tmp_path, inside, expected):
    file = tmp_path / "topology.xml"
    file.write_text(f'<system version="1"><cpu numaid="0">{inside}</cpu></system>')
    assert checkup.distance_in_nccl_topology(file, GPU) == expected


def test_no_topology_file(tmp_path):
    assert checkup.distance_in_nccl_topology(tmp_path / "none.xml", GPU) is None


def test_virtual_machines_show(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu vme hypervisor avx2\n")
    assert checkup.is_virtual(cpuinfo)
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu vme avx2\n")
    assert not checkup.is_virtual(cpuinfo)
    assert not checkup.is_virtual(tmp_path / "none")


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        ({7: 2**30}, (0, 0.0)),
        ({7: 2**30, 70: 2**30}, (0, 0.0)),
        ({7: 2**30, 8: 2**31, 9: 2**30}, (2, 3.0)),
        ({7: 2**30, 8: None}, (1, None)),
        ({4711: 2**30}, (0, None)),  # a container: this process under the host's number
        ({4711: 2**30, 4712: 2**30}, (1, None)),
        ({}, (0, None)),
    ],
)
def test_processes_beside_this_one(memory, expected):
    assert checkup.beside_us(memory, own={7, 70}) == expected


MOUNTS = "overlay / overlay rw 0 0\n/dev/nvme1 /fsx lustre rw 0 0\ntmpfs /fsx/tmp tmpfs rw 0 0\n"


@pytest.mark.parametrize(("folder", "expected"), [("/tmp/cache", False), ("/fsx/cache", True), ("/fsx/tmp/c", False)])
def test_whether_the_compile_cache_is_kept(tmp_path, folder, expected):
    mounts = tmp_path / "mounts"
    mounts.write_text(MOUNTS)
    assert checkup.is_kept(Path(folder), mounts) is expected
    assert checkup.is_kept(Path(folder), tmp_path / "none") is None


def test_where_the_compile_cache_is(monkeypatch):
    assert checkup.compile_cache({"TORCHINDUCTOR_CACHE_DIR": "/fsx/cache"}) == Path("/fsx/cache")
    monkeypatch.setattr(checkup, "getuser", lambda: "ada")
    assert checkup.compile_cache({}).name == "torchinductor_ada"

    def nobody():
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(checkup, "getuser", nobody)
    assert checkup.compile_cache({}).name == f"torchinductor_{os.getuid()}"


def test_shared_memory(tmp_path):
    total, free = checkup.read_shm(tmp_path)
    assert total >= free > 0
    assert checkup.read_shm(tmp_path / "none") is None


def test_shares_of_the_samples():
    hot, capped = "too hot (driver)", "power cap"
    samples = [frozenset({hot}), frozenset({hot, capped}), frozenset(), frozenset()]
    assert checkup.shares(samples) == {capped: 0.25, hot: 0.5}


def test_the_worst_of_a_hosts_gpus_counts():
    seen = [
        Machine(host="a", num_other_gpu_processes=0, throttle={}, nic_distance="switch", power_limit_share=1.0),
        Machine(host="b"),
        Machine(
            host="a",
            num_other_gpu_processes=1,
            other_gpu_processes_gib=2.0,
            throttle={"power brake": 0.5},
            nic_distance="other bridge",
            power_limit_share=0.5,
        ),
    ]
    first, second = checkup.worst_of_hosts(seen)
    assert first == seen[2] and second == Machine(host="b")


def test_a_machine_without_nvml_says_what_it_can():
    machine = checkup.Checkup("a", "GPU-00000000-0000-0000-0000-000000000000", {1}).close(None)
    assert machine.shm_total_gib and machine.compile_cache
    assert machine.num_other_gpu_processes is None and machine.nic_distance is None and machine.throttle is None
