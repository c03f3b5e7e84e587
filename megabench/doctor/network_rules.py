"""Diagnosis rules for the network: compare the transports that NCCL used with the links of the hosts."""

from collections.abc import Iterator

from megabench.doctor.finding import Case, Finding, is_on_gpu
from megabench.hardware.gpus import find_instance
from megabench.hardware.transport import disagreement
from megabench.parallel.placement import LINK_NAMES, number_ranges
from megabench.record import Group, RunRecord


def sockets_for_efa(case: Case) -> Iterator[Finding]:
    """Report sockets where EFA was expected, because of an EFA device or because of the instance type."""
    for record in case.good:
        if evidence := _sockets_for(record, "efa"):
            yield Finding(
                "slow",
                (record.trial,),
                "NCCL uses sockets where EFA was expected",
                evidence,
                "install the aws-ofi-nccl plugin and libfabric; on Kubernetes, request vpc.amazonaws.com/efa",
            )


def sockets_for_infiniband(case: Case) -> Iterator[Finding]:
    """Report sockets where InfiniBand was expected."""
    for record in case.good:
        if evidence := _sockets_for(record, "infiniband"):
            variables = record.environment.variables if record.environment else {}
            said = [f"{name}={variables[name]}" for name in ("NCCL_IB_DISABLE", "NCCL_IB_HCA") if name in variables]
            yield Finding(
                "slow",
                (record.trial,),
                "NCCL uses sockets where InfiniBand was expected",
                ", ".join([evidence, *said]),
                "check NCCL_IB_DISABLE and NCCL_IB_HCA, the output of ibstat, and /dev/infiniband in the container",
            )


def _sockets_for(record: RunRecord, network: str) -> str | None:
    """Describe the first process group that uses sockets instead of `network`. Return None if no group does."""
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
    """Report process groups inside one host that use shared memory or the network instead of a faster link."""
    for record in case.good:
        for group in record.groups:
            complaint = disagreement("", group.link, _transports(group))
            if complaint and group.link in ("nvlink", "pcie", "shm"):
                yield Finding(
                    "slow",
                    (record.trial,),
                    "NCCL does not use the fastest links inside a host",
                    f"{_name(group)}: {complaint}",
                    "use one container or pod per host, with all GPUs and a shared /dev/shm; unset NCCL_P2P_DISABLE, "
                    "NCCL_SHM_DISABLE and NCCL_P2P_LEVEL",
                )
                break


def hosts_that_nccl_counts(case: Case) -> Iterator[Finding]:
    """Report runs in which NCCL counts a different number of hosts than megabench."""
    for record in case.good:
        counted = record.placement.nccl_num_nodes if record.placement else None
        if counted and record.num_hosts and counted != record.num_hosts:
            yield Finding(
                "slow",
                (record.trial,),
                "NCCL counts a wrong number of hosts, and may use the network between ranks of one host",
                f"NCCL counts {counted} hosts, and megabench found {record.num_hosts}",
                "use the same hostname and the same /dev/shm for all processes of a host; check NCCL_HOSTID",
            )


def tensor_parallel_group(case: Case) -> Iterator[Finding]:
    """Report tensor-parallel groups that do not communicate over NVLink, except with `placement: spread-tp`.

    Planned trials that no layout of the plan beats are not reported: the GPUs may have no NVLink.
    """
    for record in case.good:
        if (record.placement and record.placement.policy == "spread-tp") or record.trial in case.unbeaten:
            continue
        slow = [group for group in record.groups if group.kind == "tp" and _leaves_nvlink(record, group)]
        if slow:
            group = slow[0]
            is_across = group.link in ("infiniband", "efa", "socket")
            yield Finding(
                "slow",
                (record.trial,),
                "tensor-parallel groups span several hosts"
                if is_across
                else "tensor-parallel groups do not use NVLink",
                f"{_name(group)} communicates over {LINK_NAMES[group.link or 'socket']}"
                + (f" ({group.transport})" if group.transport else ""),
                "set placement: topology and a tp that divides the number of GPUs in an NVLink domain (megabench topo "
                "shows the domains); use pp across hosts",
            )


def _leaves_nvlink(record: RunRecord, group: Group) -> bool:
    if group.link is None or group.link == "nvlink":
        return False
    return is_on_gpu(record) or group.link != "shm"  # on CPUs, shared memory is the fastest link between ranks


def nic_distance(case: Case) -> Iterator[Finding]:
    """Report GPUs that have no NIC on their own PCIe switch."""
    for record in case.on_gpus:
        if (record.num_hosts or 1) == 1 or record.emulated_hosts:
            continue
        far = [machine for machine in record.machines if machine.nic_distance in ("host bridge", "other bridge")]
        if far:
            where = {"host bridge": "through the host bridge", "other bridge": "through another host bridge"}
            worst = next((machine for machine in far if machine.nic_distance == "other bridge"), far[0])
            yield Finding(
                "slow",
                (record.trial,),
                "GPUs and NICs are on different PCIe switches",
                f"{worst.host}: a GPU reaches its nearest NIC only {where[worst.nic_distance or 'host bridge']}",
                "check nvidia-smi topo -m; put a NIC on the PCIe switch of each GPU, or set NCCL_NET_GDR_LEVEL=SYS to "
                "allow GPUDirect RDMA across host bridges; on a cloud, use the provider's NCCL_TOPO_FILE",
            )


def _transports(group: Group) -> list[str]:
    return group.transport.split(" + ") if group.transport else []


def _name(group: Group) -> str:
    return f"the {group.kind} group of ranks {number_ranges(group.ranks)}"
