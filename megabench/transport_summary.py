"""`megabench transport`: the transports between GPUs, from NCCL logs and topology files. Loads no torch."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megabench import topo
from megabench.errors import UserError
from megabench.hardware.nccl_job import JobCommunicator, NcclJob, Where, merge, network_of, topology_of
from megabench.hardware.topo_files import (
    ANSI,
    LARGEST_XML,
    HostFile,
    foreign_source,
    is_matrix_line,
    is_nvlink_line,
    read_matrices,
    read_nccl_topology,
    read_nvlinks,
    topology_of_hosts,
)
from megabench.hardware.topology import Topology
from megabench.hardware.transport import CHECK_EFA, EMULATED, INFINIBAND_VARIABLES, NcclLog, in_order, read_line
from megabench.inputs import open_regular
from megabench.parallel.layout import Layout
from megabench.parallel.placement import Placement, groups_on, neighbours, number_ranges, place
from megabench.record import Group

_ACCEPTED = (
    "an NCCL log (NCCL_DEBUG=INFO), the output of nvidia-smi topo -m or nvidia-smi nvlink -s, or an NCCL topology XML "
    "file (NCCL_TOPO_DUMP_FILE)"
)
_MOST_PAIRS = 6  # largest number of pairs of ranks in a table row
_MOST_HOSTS = 8  # largest number of hosts in the summary
_MOST_RANKS = 4096  # of a diagram
_WHERE: dict[Where, str] = {"inside": "inside hosts", "between": "between hosts"}
_DISTANCE_NAMES = {
    "switch": "same PCIe switch",
    "host bridge": "through the CPU's PCIe host bridge",
    "other bridge": "through another CPU socket",
}


@dataclass
class Inputs:
    """The contents of all files. `left_out` maps a file to the programs that wrote the parts that are not read."""

    logs: list[NcclLog] = field(default_factory=list)
    hosts: list[HostFile] = field(default_factory=list)
    left_out: dict[Path, list[str]] = field(default_factory=dict)


def read_files(paths: Sequence[Path]) -> Inputs:
    """Read the files, and detect the kind of each file from its content. Raise UserError for any other content."""
    inputs = Inputs()
    for path in paths:
        with open_regular(path) as file:
            start = file.peek(4096).lstrip(b"\xef\xbb\xbf \t\r\n")  # a pipe of the shell cannot seek
            if start.startswith(b"<"):
                inputs.hosts.append(read_nccl_topology(_xml_text(file.read(LARGEST_XML + 1), path), path.stem))
                continue
            log, matrix, nvlinks, foreign = NcclLog(), [], [], dict[str, None]()
            for raw in file:
                line = raw.decode(errors="replace").rstrip("\r\n")
                is_nccl = "NCCL" in line
                if not is_nccl or "\x1b" in line:
                    line = ANSI.sub("", line)
                if is_nccl:
                    read_line(line, log)
                    continue
                if source := foreign_source(line):
                    foreign[source] = None
                if is_matrix_line(line):
                    matrix.append(line)
                elif is_nvlink_line(line):
                    nvlinks.append(line)
        hosts = read_matrices(matrix, path.stem, foreign)
        if links := read_nvlinks(nvlinks, path.stem):
            hosts.append(links)
            foreign.pop("nvidia-smi -L", None)  # its lines are also those of nvidia-smi nvlink -s
        if log.hosts:
            inputs.logs.append(log)
        elif log.unknown or log.version:
            raise UserError(
                f"{path}: no line has the form HOST:PID:TID [GPU] NCCL INFO …, so the hosts are unknown. "
                "Use the unedited log of a run with NCCL_DEBUG=INFO."
            )
        elif not hosts:
            content = f"the output of {' and '.join(foreign)}, which is not read" if foreign else "unknown content"
            content = "a JSON file, which is not read" if start.startswith((b"{", b"[{")) else content
            raise UserError(f"{path}: {content}. Use {_ACCEPTED}.")
        elif foreign:
            inputs.left_out[path] = list(foreign)
        inputs.hosts += hosts
    return inputs


def _xml_text(content: bytes, path: Path) -> str:
    if len(content) > LARGEST_XML:
        raise UserError(f"{path}: the XML file is larger than {LARGEST_XML >> 20} MiB. Use an NCCL topology file.")
    return content.decode(errors="replace").lstrip("\ufeff \t\r\n")


@dataclass(frozen=True)
class _Drawing:
    placement: Placement
    layout: Layout
    groups: list[Group]


def write(console: Console, paths: Sequence[Path], layout: Layout, default_tp: bool, as_json: bool) -> None:
    """Print the answer, the tables and the diagram of the files, or JSON. With `default_tp`, TP spans a host."""
    inputs = read_files(paths)
    job = merge(inputs.logs) if inputs.logs else None
    drawing, reason = _drawing(inputs, job, layout, default_tp)
    lead = [*(_job_lead(job, inputs) if job else ()), *(line for host in inputs.hosts for line in _host_lead(host))]
    warnings = [
        *(f"{path}: the output of {' and '.join(names)} is left out" for path, names in inputs.left_out.items()),
        *(_warnings(job, inputs) if job else ()),
        *([reason] if reason else ()),
    ]
    if as_json:
        print(json.dumps(_as_json(job, inputs.hosts, lead, warnings, drawing), indent=2))
        return
    for line in lead:
        console.print(Text(line, style="bold"), soft_wrap=True)
    if job and (table := _connections_table(job)).row_count:
        console.print(table)
    for host in inputs.hosts:
        if host.kind != "nvidia-smi nvlink -s":
            console.print(_nics_table(host))
    for warning in warnings:
        console.print(Text(f"WARNING: {warning}", style="bold red"), soft_wrap=True)
    if drawing:
        topo.show(console, drawing.placement, drawing.layout, drawing.groups)


def summarize(paths: Sequence[Path]) -> dict[str, Any]:
    """Return what NCCL logs tell about a job: sentences, warnings, and the facts of `megabench transport --json`.

    The pairs of ranks are left out. Raises UserError if a file is not an NCCL log.
    """
    inputs = read_files(paths)
    if not inputs.logs:
        raise UserError(f"{paths[0]}: not an NCCL log. Use the log of a run with NCCL_DEBUG=INFO.")
    job = merge(inputs.logs)
    return {"summary": [*_job_lead(job, inputs)], "warnings": [*_warnings(job, inputs)], **_facts_of(job)}


def _drawing(
    inputs: Inputs, job: NcclJob | None, layout: Layout, default_tp: bool
) -> tuple[_Drawing | None, str | None]:
    """Return the diagram, or None and the reason why there is none."""
    if job:
        if any(made.num_ranks > _MOST_RANKS for made in job.communicators):
            return None, f"no diagram: the job has more than {_MOST_RANKS} ranks."
        topology = topology_of(job, p2p_is_nvlink=_intra_host_link(job, inputs) != "pcie")
        if topology is None:
            return None, (
                "no diagram: the logs do not tell the host of every rank. Also give the logs of the other hosts, with "
                "NCCL_DEBUG_SUBSYS unset."
            )
    elif sum(len(host.gpus) for host in inputs.hosts) == 1:
        return None, None
    elif all(host.domains is not None for host in inputs.hosts):
        topology = topology_of_hosts(inputs.hosts)
    else:
        return None, (
            "no diagram: a topology file lists no NVLinks, so the links between its GPUs are unknown. Use the output "
            "of nvidia-smi topo -m, or a file that NCCL wrote (NCCL_TOPO_DUMP_FILE)."
        )
    sizes = {len(ranks) for ranks in topology.ranks_by_host}
    if default_tp and len(sizes) == 1 and topology.world_size % (max(sizes) * layout.cp * layout.pp) == 0:
        layout = replace(layout, tp=max(sizes))
    layout = layout.with_world_size(topology.world_size)
    placement = place(topology, layout, "launcher" if job else "topology")
    groups = groups_on(layout, placement.topology)
    if job:
        groups = [_with_transport(group, job, placement.topology) for group in groups]
    return _Drawing(placement, layout, groups), None


def _with_transport(group: Group, job: NcclJob, topology: Topology) -> Group:
    """Add the transports that NCCL used between the ranks of a group, or between other ranks at equal places."""
    measured, found = job.communicators[0].transports, set[str]()
    for a, b in neighbours(group.kind, group.ranks):
        where: Where = "inside" if topology.host_of[a] == topology.host_of[b] else "between"
        direct = measured.get((a, b), set()) | measured.get((b, a), set())
        found.update(direct or job.transports(where))
    return group.model_copy(update={"transport": " + ".join(in_order(found)) or None})


def _intra_host_link(job: NcclJob, inputs: Inputs) -> str | None:
    """Return the link of P2P transports: from the topology files if they tell, else from the logs."""
    domains = [host.domains for host in inputs.hosts if host.domains is not None and max(host.sizes) > 1]
    if domains:
        return "nvlink" if any(len(domain) > 1 for host in domains for domain in host) else "pcie"
    return job.intra_host_link


def _job_lead(job: NcclJob, inputs: Inputs) -> Iterator[str]:
    """Yield the answer: the transport between hosts, the transport inside hosts, and where TP fits."""
    yield _between_lead(job)
    inside = job.transports("inside")
    on_network = [name for name in inside if name.startswith("NET")]
    link = _intra_host_link(job, inputs)
    if not job.communicators:
        yield "Inside hosts: the logs contain no communicator, so the number of GPUs per host is unknown."
    elif not inside:
        several = any(made.gpus_per_host != 1 for made in job.communicators)
        yield "Inside hosts: " + (
            "the logs contain no connections." if several else f"one GPU per host.{_one_pod(job)}"
        )
    elif on_network:
        yield (
            f"Inside hosts: the network ({', '.join(on_network)}) instead of P2P. TP will be slow: give each host's "
            "GPUs to one container, and remove NCCL_P2P_DISABLE and NCCL_SHM_DISABLE."
        )
    elif "SHM" in inside:
        others = ", ".join(name for name in inside if name != "SHM")
        yield (
            f"Inside hosts: shared memory (SHM){f' and {others}' if others else ''}. Data passes through host memory, "
            f"so TP will be slow. {_why_shared_memory(job)}"
        )
    else:
        names = {"nvlink": "NVLink", "pcie": "PCIe", None: "NVLink or PCIe, which the log does not tell"}
        fits = {"nvlink": " TP inside a host is fine.", "pcie": " TP will be slower than over NVLink.", None: ""}
        yield f"Inside hosts: {names[link]} ({', '.join(inside)}).{fits[link]}"
    plugin = job.first("plugin")
    facts = [f"NCCL {job.first('version')}" if job.first("version") else "", f"plugin {plugin}" if plugin else ""]
    facts += [f"libfabric provider {provider}" for provider in [job.first("provider")] if provider]
    hosts = job.hosts
    shown = ", ".join(hosts[:_MOST_HOSTS]) + f", … and {len(hosts) - _MOST_HOSTS} more" * (len(hosts) > _MOST_HOSTS)
    facts += [f"{len(hosts)} host{'s' * (len(hosts) != 1)}: {shown}"]
    yield " · ".join(filter(None, facts))


def _one_pod(job: NcclJob) -> str:
    """Return the advice to use one pod if hosts with one GPU each may be pods of one server."""
    places = job.communicators[0].places
    num_different = len({bus_id for _, bus_id in places.values()})
    if num_different < 2 or any(name.startswith("P2P") for name in job.transports("between")):
        return ""
    link = "NVLink" if job.intra_host_link == "nvlink" else "NVLink or PCIe"
    return (
        f" The {len(places)} GPUs have {num_different} different bus ids, so these hosts may be pods of one server. "
        f"If so, start one pod with all its GPUs: GPUs of one pod communicate over {link}, and GPUs of different pods "
        "over the network."
    )


def _why_shared_memory(job: NcclJob) -> str:
    """Say why NCCL uses shared memory, as far as the log tells, and what to do."""
    for name in ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"):
        for log in job.logs:
            if log.environment.get(name, "0") != "0":
                return f"{name}={log.environment[name]} is set. Unset it."
    return "Check NCCL_P2P_DISABLE and nvidia-smi topo -m."


def _between_lead(job: NcclJob) -> str:
    names = job.transports("between")
    on_network = [name for name in names if name.startswith("NET")]
    is_known = job.communicators and all(made.gpus_per_host for made in job.communicators)
    several = any((made.num_nodes or 1) > 1 for made in job.communicators) or len(job.hosts) > 1 or not is_known
    selected = job.first("network")
    if not names:
        chosen = f" NCCL selected the network {selected}." if selected and several else ""
        return f"Between hosts: {'the logs contain no connections' if several else 'the job has one host'}.{chosen}"
    if not on_network:
        return f"Between hosts: {', '.join(names)}."
    network = network_of(names, job.first("provider"))
    if on_network[0] == EMULATED:
        return f"Between hosts: shared memory at the rate of emulate_network ({EMULATED})."
    if network == "socket":
        return f"Between hosts: TCP sockets ({on_network[0]}). Training across hosts will be slow: {_why_sockets(job)}"
    shown = "EFA" if network == "efa" else "InfiniBand or RoCE"
    if network == "infiniband" and not on_network[0].startswith("NET/IB"):
        shown = f"an RDMA network, provider {job.first('provider')}" if job.first("provider") else "a network plugin"
    direct = [name for name in on_network if name.endswith("/GDRDMA")]
    if len(direct) == len(on_network):
        return f"Between hosts: {shown} with GPUDirect RDMA ({', '.join(on_network)})."
    extent = "on some connections only" if direct else "not used"
    return (
        f"Between hosts: {shown} ({', '.join(on_network)}). GPUDirect RDMA: {extent}, so data passes through host "
        "memory. Check the driver (nvidia-peermem or DMA-BUF), NCCL_NET_GDR_LEVEL and the NIC nearest to each GPU."
    )


def _why_sockets(job: NcclJob) -> str:
    """Say why NCCL uses sockets, as far as the log tells, and what to do."""
    set_to = {name: value for log in job.logs for name, value in log.environment.items()}
    if set_to.get("NCCL_NET", "").lower() == "socket":
        return "NCCL_NET=Socket selects sockets. Unset NCCL_NET."
    if job.first("provider"):
        return f"libfabric uses the provider {job.first('provider')}. Set FI_PROVIDER=efa and check the EFA devices."
    if set_to.get("NCCL_IB_DISABLE", "0") != "0" and not any(log.complaints for log in job.logs):
        return "NCCL_IB_DISABLE is set. Unset it if the hosts have InfiniBand."
    complaints = list(dict.fromkeys(text for log in job.logs for text in log.complaints))
    proof = f' (log: "{complaints[-1]}")' if complaints else ""
    return (
        f"the EFA plugin (aws-ofi-nccl) was not loaded, and NCCL found no InfiniBand device{proof}. "
        f"{CHECK_EFA} With InfiniBand, check {INFINIBAND_VARIABLES}."
    )


def _warnings(job: NcclJob, inputs: Inputs) -> Iterator[str]:
    if unknown := [line for log in job.logs for line in log.unknown]:
        yield (
            "lines about channels or communicators that are left out because their format is unknown: "
            f"{len(unknown):,}, for example {unknown[0][:200]!r}"
        )
    if num_repeated := sum(log.num_repeated for log in job.logs):
        yield f"Ray left {num_repeated:,} similar lines out of the logs. Set RAY_DEDUP_LOGS=0 for a complete report."
    for made in job.communicators[:1]:
        host_names = {host.partition("#")[0] for host in made.hosts.values()}
        if made.num_nodes and len(made.hosts) == made.num_ranks and made.num_nodes > len(host_names):
            yield (
                f"NCCL counts {made.num_nodes} hosts, but the logs name {len(host_names)}. NCCL connects processes of "
                "one host only if they share boot id, NCCL_HOSTID and /dev/shm. A GPU without NVLink may also be apart."
            )
    if job.strays:
        stray = ", ".join(in_order(connection.transport for connection in job.strays))
        yield (
            f"{len(job.strays):,} connections ({stray}) are left out, because the logs do not contain the creation of "
            "their communicators. Give complete logs, with NCCL_DEBUG_SUBSYS unset."
        )
    if job.num_ambiguous:
        yield (
            f"{job.num_ambiguous:,} times, the logs do not tell communicators of one size apart. The table counts each "
            "of their processes as a communicator."
        )
    if not job.strays and not any(made.transports for made in job.communicators):
        yield (
            "the logs contain no channel lines, so the transports are unknown. Run at least one collective with "
            "NCCL_DEBUG=INFO, with NCCL_DEBUG_SUBSYS unset."
        )
    if not job.communicators:
        return
    largest = job.communicators[0]
    missing = job.missing_ranks
    if missing and largest.places:
        guess = " Their hosts follow from the number of hosts and the rank order." * (
            len(largest.hosts) == largest.num_ranks
        )
        yield f"ranks {number_ranges(missing)} of {largest.num_ranks} wrote to none of the files.{guess}"
    p2p = any(name.startswith("P2P") for name in job.transports("inside"))
    if p2p and _intra_host_link(job, inputs) is None:
        yield (
            "the logs do not tell whether P2P uses NVLink or PCIe, and the diagram shows NVLink. Also give the output "
            "of nvidia-smi topo -m."
        )
    names = job.transports("between")
    if network_of(names, job.first("provider")) == "infiniband" and not names[0].startswith("NET/IB"):
        yield f"the diagram shows {names[0]} as InfiniBand."


def _alike(job: NcclJob) -> list[tuple[int, list[JobCommunicator]]]:
    """Return the communicators with connections by their number of ranks, largest first."""
    by_size: dict[int, list[JobCommunicator]] = {}
    for made in job.communicators:
        if made.transports:
            by_size.setdefault(made.num_ranks, []).append(made)
    return list(by_size.items())


def _connections_table(job: NcclJob) -> Table:
    table = Table("communicators", "where", "NCCL transport", "pairs of ranks", "e.g.", box=box.MARKDOWN)
    for num_ranks, alike in _alike(job):
        for where, title in _WHERE.items():
            pairs: dict[str, list[tuple[int, int]]] = {}
            for made in alike:
                for name, some in made.pairs_by_transport(where).items():
                    pairs.setdefault(name, []).extend(some)
            for name in in_order(pairs):
                distinct = sorted(set(pairs[name]))
                shown = ", ".join(f"{a} → {b}" for a, b in distinct[:_MOST_PAIRS])
                more = ", …" * (len(distinct) > _MOST_PAIRS)
                table.add_row(f"{len(alike)} × {num_ranks} ranks", title, name, f"{len(pairs[name]):,}", shown + more)
    return table


def _host_lead(host: HostFile) -> Iterator[str]:
    """Yield the answer for a host: its NVLink domains, and the NICs near its GPUs."""
    num_gpus, num_hosts = len(host.gpus), len(host.sizes)
    count = f"{num_gpus} GPU{'s' * (num_gpus != 1)}"
    links = f" ({', '.join(host.links)})" if host.links else ""
    if host.kind == "RCCL topology file":
        yield f"{host.name}: {count} of AMD. The links between them (XGMI) are not read."
    elif host.kind == "nvidia-smi nvlink -s" and host.domains is None:
        yield from _nvlinks_lead(host, count)
    elif num_gpus == 1:
        yield f"{host.name}: {count}{links}. The file lists no other GPU, so it tells nothing about links between GPUs."
    elif host.domains is None:
        yield f"{host.name}: {count}. The file lists no NVLinks."
    elif max(map(len, host.domains)) == 1:
        over = "PCIe" if host.inside == "pcie" else "host memory, because NCCL uses no P2P between CPU sockets"
        yield f"{host.name}: {count} without NVLink. TP communicates over {over}."
    elif len(host.domains) == 1 and num_hosts > 1:
        sizes = " and ".join(map(str, sorted(set(host.sizes))))
        yield (
            f"{host.name}: {num_hosts} hosts of {sizes} GPUs in one NVLink domain of {count}{links}. "
            f"TP up to {num_gpus} stays on NVLink."
        )
    elif len(host.domains) == 1:
        yield f"{host.name}: one NVLink domain of {count}{links}. TP up to {num_gpus} inside the host is fine."
    else:
        sizes = " and ".join(number_ranges(domain) for domain in host.domains)
        largest = min(len(domain) for domain in host.domains)
        yield f"{host.name}: NVLink domains of GPUs {sizes}{links}. TP up to {largest} stays on NVLink."
    distances = {gpu.distance for gpu in host.gpus}
    if host.kind == "nvidia-smi nvlink -s":
        return
    if distances == {None}:
        yield f"{host.name}: the file lists no NIC."
    elif distances == {"switch"}:
        yield f"{host.name}: every GPU has a NIC on its PCIe switch, as GPUDirect RDMA needs."
    else:
        far = [number for number, gpu in enumerate(host.gpus) if gpu.distance != "switch"]
        has = "have" if len(far) > 1 else "has"
        yield (
            f"{host.name}: {_gpu_names(far)} {has} no NIC on the same PCIe switch. NCCL may not use GPUDirect RDMA "
            "there; NCCL_NET_GDR_LEVEL=SYS allows it."
        )


def _nvlinks_lead(host: HostFile, count: str) -> Iterator[str]:
    """Yield the answer for the output of nvidia-smi nvlink -s, which does not name the ends of the links."""
    alike: dict[int, list[int]] = {}
    for number, gpu in enumerate(host.gpus):
        alike.setdefault(gpu.active or 0, []).append(number)
    shown = ", ".join(f"{active} on {_gpu_names(numbers)}" for active, numbers in alike.items())
    links = (
        f"{next(iter(alike))} active NVLinks{' each' * (len(host.gpus) > 1)}"
        if len(alike) == 1
        else f"active NVLinks: {shown}"
    )
    yield (
        f"{host.name}: {count}, {links}. The file does not tell which GPUs they connect. Add the output of "
        "nvidia-smi topo -m."
    )
    idle = [number for number, gpu in enumerate(host.gpus) if gpu.inactive or not gpu.active]
    if idle:
        yield (
            f"{host.name}: NVLinks of {_gpu_names(idle)} are inactive. Check nvidia-smi nvlink -e, the NVLink "
            "bridges, and nvidia-fabricmanager on servers with NVSwitches."
        )


def _gpu_names(numbers: Sequence[int]) -> str:
    return f"GPU{'s' * (len(numbers) > 1)} {number_ranges(numbers)}"


def _nics_table(host: HostFile) -> Table:
    table = Table(host.name, "nearest NIC", "distance", "NUMA node", box=box.MARKDOWN)
    for gpu in host.gpus:
        distance = _DISTANCE_NAMES[gpu.distance] + (f" ({gpu.path})" if gpu.path else "") if gpu.distance else "–"
        table.add_row(gpu.name, ", ".join(gpu.nics) or "–", distance, gpu.numa or "–")
    return table


def _as_json(
    job: NcclJob | None, hosts: Sequence[HostFile], lead: list[str], warnings: list[str], drawing: _Drawing | None
) -> dict[str, Any]:
    return {
        "summary": lead,
        "warnings": warnings,
        "job": _job_as_json(job) if job else None,
        "hosts": [
            {
                "name": host.name,
                "source": host.kind,
                "nics": host.nics,
                "nvlink_domains": host.domains,
                "gpus": [
                    {
                        "name": gpu.name,
                        "host": gpu.host,
                        "active_nvlinks": gpu.active,
                        "nearest_nics": gpu.nics,
                        "nic_distance": gpu.distance,
                        "numa_node": gpu.numa,
                    }
                    for gpu in host.gpus
                ],
            }
            for host in hosts
        ],
        "diagram": topo.describe(drawing.placement, drawing.layout, drawing.groups) if drawing else None,
    }


def _facts_of(job: NcclJob) -> dict[str, Any]:
    return {
        "hosts": job.hosts,
        "nccl_version": job.first("version"),
        "network": job.first("network"),
        "plugin": job.first("plugin"),
        "provider": job.first("provider"),
        "inside_hosts": job.transports("inside"),
        "between_hosts": job.transports("between"),
        "gpudirect_rdma": any(name.endswith("/GDRDMA") for name in job.transports("between")),
    }


def _job_as_json(job: NcclJob) -> dict[str, Any]:
    return _facts_of(job) | {
        "communicators": [
            {
                "num_ranks": made.num_ranks,
                "num_nodes": made.num_nodes,
                "hosts": {str(rank): made.hosts[rank] for rank in sorted(made.hosts)},
                "connections": [
                    {"sender": a, "receiver": b, "where": made.where((a, b)), "transports": in_order(names)}
                    for (a, b), names in sorted(made.transports.items())
                ],
            }
            for made in job.communicators
        ],
    }
