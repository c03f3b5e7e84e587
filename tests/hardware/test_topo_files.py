"""Topologies that other tools wrote: nvidia-smi topo -m, NCCL_TOPO_DUMP_FILE, and the files of aws-ofi-nccl."""

import pytest

from megabench.hardware import checkup
from megabench.hardware.topo_files import (
    ANSI,
    MOST_DEVICES,
    distance_in_nccl_topology,
    is_matrix_line,
    read_matrices,
    read_nccl_topology,
    read_nvlinks,
    topology_of_hosts,
)
from megabench.hardware.topology import TopologyError

# The format of nvidia-smi topo -m (driver 550) on a server with H100s: tabs, an underlined header, a legend of NICs.
H100 = """\
\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tNV18\tPIX\tSYS\t0-47,96-143\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tNV18\tNODE\tSYS\t0-47,96-143\t0\t\tN/A
GPU2\tNV18\tNV18\t X \tNV18\tSYS\tPXB\t48-95,144-191\t1\t\tN/A
GPU3\tNV18\tNV18\tNV18\t X \tSYS\tPHB\t48-95,144-191\t1\t\tN/A
NIC0\tPIX\tNODE\tSYS\tSYS\t X \tSYS\t\t\t\t
NIC1\tSYS\tSYS\tPXB\tPHB\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_bond_1
"""

# An older driver: NICs under their own names, no legend, spaces in place of tabs, no NUMA column.
PAIRS = """\
        GPU0    GPU1    GPU2    GPU3    mlx5_0  CPU Affinity
GPU0     X      NV4     SYS     SYS     PIX     0-15
GPU1    NV4      X      SYS     SYS     PIX     0-15
GPU2    SYS     SYS      X      NV4     SYS     16-31
GPU3    SYS     SYS     NV4      X      SYS     16-31
mlx5_0  PIX     PIX     SYS     SYS      X
"""


def matrices(text: str, name: str = "node"):
    return read_matrices((line for line in map(plain, text.splitlines()) if is_matrix_line(line)), name)


def plain(line: str) -> str:
    return ANSI.sub("", line)


@pytest.mark.parametrize("colour", [("\x1b[4m", "\x1b[0m"), ("[4m", "[0m"), ("", ""), ("\x1b[1;4m\x1b[32m", "\x1b[m")])
@pytest.mark.parametrize("prefix", ["", "pod-0: "])
def test_one_nvlink_domain(colour, prefix):
    text = H100.replace("\x1b[4m", colour[0]).replace("\x1b[0m", colour[1])
    (host,) = matrices("".join(prefix + line for line in text.splitlines(keepends=True)))
    assert host.domains == ((0, 1, 2, 3),) and host.links == ("NV18",) and host.nics == ("mlx5_0", "mlx5_bond_1")
    assert [(gpu.nics, gpu.path, gpu.distance, gpu.numa) for gpu in host.gpus] == [
        (("mlx5_0",), "PIX", "switch", "0"),
        (("mlx5_0",), "NODE", "host bridge", "0"),
        (("mlx5_bond_1",), "PXB", "switch", "1"),
        (("mlx5_bond_1",), "PHB", "host bridge", "1"),
    ]
    assert topology_of_hosts([host]).link(0, 3) == "nvlink"


def test_two_nvlink_domains():
    (host,) = matrices(PAIRS)
    assert host.domains == ((0, 1), (2, 3)) and host.inside == "shm" and host.nics == ("mlx5_0",)
    assert [gpu.distance for gpu in host.gpus] == ["switch", "switch", "other bridge", "other bridge"]
    assert [gpu.numa for gpu in host.gpus] == [None] * 4
    topology = topology_of_hosts([host])
    assert (topology.link(0, 1), topology.link(1, 2)) == ("nvlink", "shm")


def test_gpus_without_nvlink_on_one_switch():
    (host,) = matrices("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tPHB\t0-7\nGPU1\tPHB\t X \t0-7\n")
    assert host.domains == ((0,), (1,)) and not host.nics and host.gpus[0].distance is None
    assert topology_of_hosts([host]).link(0, 1) == "pcie"


def test_the_matrices_of_several_hosts():
    hosts = matrices(H100 + H100)
    assert [host.name for host in hosts] == ["node#0", "node#1"]
    topology = topology_of_hosts(hosts)
    assert topology.ranks_by_domain == [[0, 1, 2, 3], [4, 5, 6, 7]] and topology.link(3, 4) == "infiniband"


@pytest.mark.parametrize(
    "cut",
    [
        lambda text: text[: text.index("GPU2\tNV18")],
        lambda text: text.replace("GPU3\tNV18\tNV18\tNV18\t X \tSYS\tPHB", "GPU3\tNV18\tNV18\tNV18\t X "),
        lambda text: text.replace("NV18\tNODE", "NV18\tFAR"),
    ],
)
def test_a_matrix_that_is_incomplete(cut):
    with pytest.raises(TopologyError, match=r"node: the row of GPU\d in the matrix of nvidia-smi topo -m"):
        matrices(cut(H100))


# The format of aws-ofi-nccl's files: PCI devices only, without <gpu>, <nic> and <nvlink>.
AWS = """\
<!-- Static topology -->
<system version="1">
  <cpu numaid="0" affinity="000000ff,ffff0000,00ffffff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="85">
    <pci busid="ffff:ff:01.0" class="0x060400" link_speed="8 GT/s" link_width="16">  <!-- switch -->
      <pci busid="0000:10:1c.0" class="0x030200" link_speed="8 GT/s" link_width="16"/>
      <pci busid="0000:10:1d.0" class="0x030200" link_speed="8 GT/s" link_width="16"/>
      <pci busid="0000:10:1b.0" class="0x020000" link_speed="8 GT/s" link_width="16"/>
    </pci>
    <pci busid="ffff:ff:02.0" class="0x060400" link_speed="8 GT/s" link_width="16">
      <pci busid="0000:20:1c.0" class="0x030200" link_speed="8 GT/s" link_width="16"/>
    </pci>
  </cpu>
  <cpu numaid="1">
    <pci busid="0000:90:1c.0" class="0x030200" link_speed="8 GT/s" link_width="16"/>
  </cpu>
</system>
"""

# The format that NCCL writes to NCCL_TOPO_DUMP_FILE, on a server with NVSwitches.
DUMP = """\
<system version="1">
  <cpu host_hash="0x1" numaid="0" affinity="ffff" arch="x86_64" vendor="AuthenticAMD" familyid="175" modelid="1">
    <pci busid="0000:04:00.0" class="0x030000" vendor="0x1a03" device="0x2000" link_speed="" link_width="0"/>
    <pci busid="0000:17:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">
      <pci busid="0000:19:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16">
        <gpu dev="0" sm="90" rank="0" gdr="1">
          <nvlink target="0000:c1:00.0" count="6" tclass="0x068000"/>
          <nvlink target="0000:c2:00.0" count="12" tclass="0x068000"/>
        </gpu>
      </pci>
      <pci busid="0000:1a:00.0" class="0x020700" link_speed="32.0 GT/s PCIe" link_width="16">
        <nic><net name="mlx5_0" dev="0" speed="400000" port="1" guid="0x1" maxconn="131072" gdr="1"/></nic>
      </pci>
    </pci>
    <pci busid="0000:3b:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16">
      <gpu dev="1" sm="90" rank="1" gdr="1">
        <nvlink target="0000:c1:00.0" count="18" tclass="0x068000"/>
      </gpu>
    </pci>
  </cpu>
</system>
"""


def test_nics_that_are_only_pci_devices():
    host = read_nccl_topology(AWS, "p4d")
    assert host.nics == ("0000:10:1b.0",) and host.domains is None
    assert [gpu.distance for gpu in host.gpus] == ["switch", "switch", "host bridge", "other bridge"]
    assert [gpu.numa for gpu in host.gpus] == ["0", "0", "0", "1"]
    with pytest.raises(TopologyError, match="lists no NVLinks"):
        topology_of_hosts([host])


def test_the_compare_command_finds_those_nics_too(tmp_path):
    file = tmp_path / "p4d-24xl-topo.xml"
    file.write_text(AWS)
    assert checkup.distance_in_nccl_topology(file, "00000000:10:1D.0") == "switch"
    assert distance_in_nccl_topology(file, "0000:90:1c.0") == "other bridge"


def test_a_file_that_nccl_wrote():
    host = read_nccl_topology(DUMP, "h100")
    assert host.domains == ((0, 1),) and host.links == ("NV18",) and host.nics == ("mlx5_0",)
    assert [gpu.name for gpu in host.gpus] == ["GPU0 0000:19:00.0", "GPU1 0000:3b:00.0"]
    assert [gpu.distance for gpu in host.gpus] == ["switch", "host bridge"]


def test_nvlinks_between_two_gpus():
    one = '<nvlink target="0000:3b:00.0" count="12" tclass="0x030200"/>'
    text = DUMP.replace('<nvlink target="0000:c1:00.0" count="18" tclass="0x068000"/>', "")
    text = text.replace('<nvlink target="0000:c2:00.0" count="12" tclass="0x068000"/>', one)
    text = text.replace('<nvlink target="0000:c1:00.0" count="6" tclass="0x068000"/>', "")
    host = read_nccl_topology(text, "a100")
    assert host.domains == ((0, 1),) and host.links == ("NV12",)


# NCCL merges the files of all hosts of a multi-node NVLink domain. The bus ids of the hosts are equal.
GB200 = "".join(
    f"""\
  <cpu host_hash="{host}" numaid="{socket}" arch="arm64">
    <pci busid="00{socket}8:01:00.0" class="0x030200"><gpu dev="{socket}" sm="100" rank="{rank}" gdr="1">
      <nvlink target="fffffff:ffff:ff" count="18" tclass="0x068000"/></gpu></pci>
    <pci busid="00{socket}a:03:00.0" class="0x020700"><nic><net name="mlx5_{socket}" speed="400000"/></nic></pci>
  </cpu>
"""
    for rank, (host, socket) in enumerate([("0xa", 0), ("0xb", 0), ("0xa", 1), ("0xb", 1)])
)
GB200 = f'<system version="1">\n{GB200}</system>\n'


def test_the_hosts_of_a_multi_node_nvlink_domain():
    host = read_nccl_topology(GB200, "rack")
    assert host.sizes == [2, 2] and host.domains == ((0, 1, 2, 3),) and host.links == ("NV18",)
    assert [(gpu.nics, gpu.distance) for gpu in host.gpus] == [
        (("mlx5_0",), "host bridge"),
        (("mlx5_1",), "host bridge"),
    ] * 2
    topology = topology_of_hosts([host])
    assert topology.ranks_by_host == [[0, 1], [2, 3]] and topology.link(0, 2) == "nvlink"
    assert [host.name for host in topology.hosts] == ["rack#0", "rack#1"]


def test_direct_nvlinks_stay_in_their_host():
    links = [f'<nvlink target="00{socket}8:01:00.0" count="4" tclass="0x030200"/>' for socket in (1, 0, 1, 0)]
    parts = GB200.split('<nvlink target="fffffff:ffff:ff" count="18" tclass="0x068000"/>')
    by_rank = [links[0], links[0], links[1], links[1]]
    text = parts[0] + "".join(link + part for link, part in zip(by_rank, parts[1:], strict=True))
    assert read_nccl_topology(text, "two").domains == ((0, 1), (2, 3))


def test_a_file_with_too_many_devices():
    gpus = '<pci class="0x030200"/>' * (MOST_DEVICES + 1)
    with pytest.raises(TopologyError, match="more than 1024 GPUs"):
        read_nccl_topology(f"<system>{gpus}</system>", "big")


@pytest.mark.parametrize(
    ("text", "states", "domains"),
    [
        (
            "GPU 0: NVIDIA X (UUID: GPU-1)\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n"
            "GPU 1: NVIDIA X (UUID: GPU-2)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n",
            [(2, 0), (1, 1)],
            None,
        ),
        (
            "pod-0: GPU 0: X (UUID: GPU-1)\npod-0: \t Link 0: 25 GB/s\n"
            "pod-0: GPU 1: X (UUID: GPU-2)\npod-0: Device does not have or support Nvlink\n",
            [(1, 0), (0, 0)],
            None,
        ),
        (
            "GPU 0: X (UUID: GPU-1)\nNVML: Unable to retrieve NVLink information as all links are inActive\n"
            "GPU 1: X (UUID: GPU-2)\nNVML: Unable to retrieve Nvlink information as all links are inActive\n",
            [(0, 0), (0, 0)],
            ((0,), (1,)),
        ),
    ],
)
def test_the_states_of_nvlinks(text, states, domains):
    host = read_nvlinks(text.splitlines(), "node")
    assert host and [(gpu.active, gpu.inactive) for gpu in host.gpus] == states and host.domains == domains


def test_a_list_of_gpus_tells_no_states():
    assert read_nvlinks(["GPU 0: NVIDIA X (UUID: GPU-1)"], "node") is None


def test_a_matrix_of_pcie_paths_alone_tells_nothing_about_nvlinks():
    matrix = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tPHB\t0-7\nGPU1\tPHB\t X \t0-7\n"
    legend = "Legend:\n\n  X    = Self\n  PHB  = Connection traversing PCIe\n"
    (host,) = matrices(matrix + legend)
    assert host.domains is None
    (host,) = matrices(matrix + legend + "  NV#  = Connection traversing a bonded set of # NVLinks\n")
    assert host.domains == ((0,), (1,))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<topology version='2.0'/>", r"<topology>, as lstopo \(hwloc\) writes it"),
        ("<system><cpu></system>", "the XML is malformed"),
        (DUMP[:300], "the XML is malformed"),
        ('<!DOCTYPE x [<!ENTITY a "aaaa">]><system>&a;</system>', "DOCTYPE"),
        ("<html><body/></html>", "the root element is <html>"),
        ("<system/>", "contains no GPU"),
    ],
)
def test_xml_that_is_no_topology(text, words):
    with pytest.raises(TopologyError, match=words):
        read_nccl_topology(text, "topo")
