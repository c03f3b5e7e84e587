"""What groups ride on, against what the machines have."""

from collections.abc import Iterator

from megabench.doctor.finding import Case, Finding, is_on_gpu
from megabench.hardware.gpus import find_instance
from megabench.hardware.transport import disagreement
from megabench.parallel.placement import LINK_NAMES, number_ranges
from megabench.record import Group, RunRecord


def sockets_for_efa(case: Case) -> Iterator[Finding]:
    """EFA expected, by its device or by the type of instance, and sockets found."""
    for record in case.good:
        if evidence := _sockets_for(record, "efa"):
            yield Finding(
                "slow",
                (record.trial,),
                "talks over sockets where EFA was expected",
                evidence,
                "install the aws-ofi-nccl plugin and libfabric; under Kubernetes request vpc.amazonaws.com/efa",
            )


def sockets_for_infiniband(case: Case) -> Iterator[Finding]:
    """InfiniBand expected and sockets found."""
    for record in case.good:
        if evidence := _sockets_for(record, "infiniband"):
            variables = record.environment.variables if record.environment else {}
            said = [f"{name}={variables[name]}" for name in ("NCCL_IB_DISABLE", "NCCL_IB_HCA") if name in variables]
            yield Finding(
                "slow",
                (record.trial,),
                "talks over sockets where InfiniBand was expected",
                ", ".join([evidence, *said]),
                "look at NCCL_IB_DISABLE and NCCL_IB_HCA, at ibstat, and at the container's /dev/infiniband",
            )


def _sockets_for(record: RunRecord, network: str) -> str | None:
    """The first group that shows sockets in the place of `network`."""
    if record.emulated_hosts:
        return None
    for group in record.groups:
        if group.link == network and "NET/Socket" in _transports(group):
            return f"{_name(group)} uses NET/Socket"
    types = {machine.instance_type for machine in record.machines if machine.instance_type}
    expected = [instance for name in types if (instance := find_instance(name)) and instance.network == network]
    over_sockets = [group for group in record.groups if group.link == "socket"]
    if expected and over_sockets and (record.num_hosts or 1) > 1:
        return f"{expected[0].name} has {LINK_NAMES[expected[0].network]}, and {_name(over_sockets[0])} uses sockets"
    return None


def slow_transport(case: Case) -> Iterator[Finding]:
    """Shared memory or the network between GPUs of one host that could do better."""
    for record in case.good:
        for group in record.groups:
            complaint = disagreement("", group.link, _transports(group))
            if complaint and group.link in ("nvlink", "pcie", "shm"):
                yield Finding(
                    "slow",
                    (record.trial,),
                    "does not use the links inside a host",
                    f"{_name(group)}: {complaint}",
                    "one container or pod a host, which sees all GPUs and one /dev/shm; unset NCCL_P2P_DISABLE, "
                    "NCCL_SHM_DISABLE and NCCL_P2P_LEVEL",
                )
                break


def hosts_that_nccl_counts(case: Case) -> Iterator[Finding]:
    """NCCL sees more hosts than there are, and sends over the network between ranks of one."""
    for record in case.good:
        counted = record.placement.nccl_num_nodes if record.placement else None
        if counted and record.num_hosts and counted != record.num_hosts:
            yield Finding(
                "slow",
                (record.trial,),
                "NCCL counts other hosts than there are, and may use the network between ranks of one",
                f"NCCL counts {counted}, and {record.num_hosts} were found",
                "one hostname and one /dev/shm for all processes of a host; look at NCCL_HOSTID",
            )


def tensor_parallel_group(case: Case) -> Iterator[Finding]:
    """Tensor parallelism outside NVLink, unless it was put there."""
    for record in case.good:
        if record.placement and record.placement.policy == "spread-tp":
            continue
        slow = [group for group in record.groups if group.kind == "tp" and _leaves_nvlink(record, group)]
        if slow:
            group = slow[0]
            is_across = group.link in ("infiniband", "efa", "socket")
            yield Finding(
                "slow",
                (record.trial,),
                "has tensor parallelism across hosts" if is_across else "has tensor parallelism outside NVLink",
                f"{_name(group)} rides on {LINK_NAMES[group.link or 'socket']}"
                + (f" ({group.transport})" if group.transport else ""),
                "placement: topology, and a tp that divides the GPUs of an NVLink domain (megabench topo shows them); "
                "pp across hosts instead",
            )


def _leaves_nvlink(record: RunRecord, group: Group) -> bool:
    if group.link is None or group.link == "nvlink":
        return False
    return is_on_gpu(record) or group.link != "shm"  # ranks on CPU have shared memory at best


def nic_distance(case: Case) -> Iterator[Finding]:
    """GPUs whose nearest NIC hangs on another PCIe switch."""
    for record in case.on_gpus:
        if (record.num_hosts or 1) == 1 or record.emulated_hosts:
            continue
        far = [machine for machine in record.machines if machine.nic_distance in ("host bridge", "other bridge")]
        if far:
            where = {"host bridge": "at the host bridge", "other bridge": "behind another host bridge"}
            worst = next((machine for machine in far if machine.nic_distance == "other bridge"), far[0])
            yield Finding(
                "slow",
                (record.trial,),
                "has GPUs and NICs on different PCIe switches",
                f"{worst.host}: a GPU meets its nearest NIC {where[worst.nic_distance or 'host bridge']} only",
                "look at nvidia-smi topo -m; a NIC under each GPU's switch, or NCCL_NET_GDR_LEVEL=SYS to read GPU "
                "memory over the distance; on a cloud the provider's NCCL_TOPO_FILE",
            )


def _transports(group: Group) -> list[str]:
    return group.transport.split(" + ") if group.transport else []


def _name(group: Group) -> str:
    return f"the {group.kind} group of ranks {number_ranges(group.ranks)}"
