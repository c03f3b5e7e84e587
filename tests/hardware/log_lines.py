"""Logs of whole jobs, in the format of NCCL_DEBUG=INFO: src/init.cc and src/transport/{p2p,shm,net}.cc of NCCL."""

from collections.abc import Iterator

OFI = (
    "NET/Plugin: Loaded net plugin Libfabric (v10)",
    "NET/OFI Initializing aws-ofi-nccl 1.16.2",
    "NET/OFI Running on p4d.24xlarge platform, topology file /opt/amazon/ofi-nccl/share/aws-ofi-nccl/xml/p4d-24xl.xml",
    "NET/OFI Selected provider is efa, fabric is efa (found 4 nics)",
    "Using network Libfabric",
)
NO_PLUGIN = (
    "NET/Plugin: Could not find: libnccl-net.so",
    "NET/IB : No device found.",
    "NET/Socket : Using [0]eth0:10.0.5.112<0>",
    "Using network Socket",
)


def job_log(
    host: int,
    num_hosts: int = 2,
    num_gpus: int = 4,
    inside: str = "P2P/CUMEM/read",
    between: str = "NET/Libfabric/{nic}/GDRDMA",
    start: tuple[str, ...] = OFI,
    prefix: str = "",
    old: bool = False,
) -> str:
    """The log of one pod, which runs all ranks of one host: a ring over all ranks, in rank order.

    `old` is the format of NCCL 2.10, with bus ids in place of device numbers, and with the communicator at the end.
    """
    world, lines = num_hosts * num_gpus, []
    for gpu in range(num_gpus):
        rank = host * num_gpus + gpu
        process = f"{prefix}train-node-0-{host}:{188 + gpu}:{585 + gpu} [{gpu}] NCCL INFO "
        bus = f"{16 + gpu:x}1c0"
        handle = f"0x556d504b{rank:04x}"

        def name(rank: int) -> str:
            return f"{rank}[{16 + rank % num_gpus:x}1c0]" if old else f"{rank}[{rank % num_gpus}]"

        lines += [process + message for message in start]
        init = f"comm {handle} rank {rank} nranks {world} cudaDev {gpu} busId {bus}"
        if not old:
            init = f"ncclCommInitRankConfig {init.replace(' busId', f' nvmlDev {gpu} busId')} commId 0xb079519ed44b724"
            lines.append(f"{process}{init} - Init START")
            lines.append(
                f"{process}comm {handle} rank {rank} nRanks {world} nNodes {num_hosts} localRanks {num_gpus} "
                f"localRank {gpu} MNNVL 0"
            )
        lines.append(f"{process}Channel 00/02 : " + " ".join(map(str, range(world))))
        before, after = (rank - 1) % world, (rank + 1) % world
        if gpu == 0 and num_hosts > 1:
            via = between.format(nic=gpu // 2)
            lines.append(f"{process}Channel 00/0 : {name(before)} -> {name(rank)} [receive] via {via}")
        if after // num_gpus != host:
            via = between.format(nic=gpu // 2)
            lines.append(f"{process}Channel 00/0 : {name(rank)} -> {name(after)} [send] via {via}")
        elif num_gpus > 1:
            lines.append(f"{process}Channel 00/0 : {name(rank)} -> {name(after)} via {inside}")
        lines.append(f"{process}Connected all rings")
        lines.append(f"{process}{init} - Init COMPLETE")
    return "step 1: loss 9.5\n" + "\n".join(lines) + "\n"


# How NCCL logs the creation of a communicator: by ncclCommInitRankConfig, and by ncclCommSplit.
INITS = {
    "2.18": ("comm {handle} {rank} {device} commId 0x77{end}", "comm {handle} {rank} {device} commId 0x9{color}{end}"),
    "2.21": (
        "ncclCommInitRank comm {handle} {rank} {device} commId 0x77{end}",
        "ncclCommSplit comm {handle} {rank} {device} parent 0xa0 color {color} key 0 commId 0x9{color}{end}",
    ),
    "2.23": (
        "ncclCommInitRankConfig comm {handle} {rank} {device} commId 0x77{end}",
        "ncclCommSplit comm {handle} {rank} {device} parent 0xa0 color {color} key 0{end}",
    ),
    "2.28": (
        "ncclCommInitRankConfig comm {handle} {rank} {device} commId 0x77{end}",
        "ncclCommSplit comm {handle} {rank} {device} parent 0xa0 splitCount {split} color {color} key 0{end}",
    ),
    "2.30": (
        "[Rank 0] ncclCommInitRankConfig comm {handle} {rank} {device} commId 0x77{end}",
        "ncclCommSplit comm {handle} {rank} {device} parent 0xa0 childCount {split} color {color} key 0{end}",
    ),
    "RCCL": (
        "ncclCommInitRank comm {handle} {rank} {device} commId 0x77 localSize 312 used 6712 bytes{end}",
        "comm {handle} {rank} {device} commId 0x9{color} localSize 312 used 6712 bytes on core 17{end}",
    ),
}


def split_job_log(version: str, num_gpus: int = 4, num_hosts: int = 2) -> str:
    """The log of a job that splits its communicator into TP groups, one per host, and DP groups across the hosts."""
    lines = []
    for rank in range(num_hosts * num_gpus):
        host, gpu = divmod(rank, num_gpus)
        start = f"node-{host}:{1000 + gpu}:{2000 + gpu} [{gpu}] NCCL INFO "
        device = f"cudaDev {gpu} nvmlDev {gpu} busId {gpu + 9}01000"
        across = f"[send] via NET/IB/{gpu}/GDRDMA"
        world = num_hosts * num_gpus
        after = (rank + 1) % world
        link = across if after // num_gpus != host else "via P2P/CUMEM"
        for split, handle, own, size, local, color, connection in (
            (0, "0xa0", rank, world, num_gpus, 0, f"{rank}[{gpu}] -> {after}[{after % num_gpus}] {link}"),
            (
                1,
                "0xb0",
                gpu,
                num_gpus,
                num_gpus,
                host,
                f"{gpu}[{gpu}] -> {(gpu + 1) % num_gpus}[{(gpu + 1) % num_gpus}]",
            ),
            (2, "0xc0", host, num_hosts, 1, gpu, f"{host}[{gpu}] -> {(host + 1) % num_hosts}[{gpu}] {across}"),
        ):
            words = {"handle": handle, "rank": f"rank {own} nranks {size}", "device": device}
            form = INITS[version][split > 0]
            lines.append(start + form.format(**words, split=split, color=color, end="- Init START"))
            lines.append(f"{start}comm {handle} rank {own} nRanks {size} nNodes {size // local} localRanks {local} …")
            for channel in range(2):
                via = "" if " via " in connection else " via P2P/CUMEM"
                lines.append(f"{start}Channel {channel:02}/0 : {connection}{via}")
            lines.append(start + form.format(**words, split=split, color=color, end=" - Init COMPLETE"))
    return "\n".join(lines) + "\n"


def big_job_log(num_ranks: int, num_gpus: int = 8, num_channels: int = 24) -> Iterator[str]:
    """The lines of a job with one communicator over all ranks, TP in each host and DP across the hosts (NCCL 2.28).

    With 24 channels, each rank writes about 240 lines: rings and trees of the three communicators, and other messages.
    """
    num_hosts = num_ranks // num_gpus
    for rank in range(num_ranks):
        host, gpu = divmod(rank, num_gpus)
        start = f"node-{host:04}:{1000 + gpu}:{2000 + gpu} [{gpu}] NCCL INFO "
        device = f"cudaDev {gpu} nvmlDev {gpu} busId {gpu + 1}b000"
        yield f"{start}NCCL version 2.28.9+cuda13.0\n"
        yield f"{start}Bootstrap: Using eth0:10.0.{host // 250}.{host % 250}<0>\n"
        for handle, own, size, local, made in (
            ("0xa0", rank, num_ranks, num_gpus, "commId 0x77"),
            ("0xb0", gpu, num_gpus, num_gpus, f"parent 0xa0 splitCount 1 color {host} key 0"),
            ("0xc0", host, num_hosts, 1, f"parent 0xa0 splitCount 2 color {gpu} key 0"),
        ):
            init = f"{start}ncclCommInitRankConfig comm {handle} rank {own} nranks {size} {device} {made} - Init "
            yield f"{init}START\n"
            yield f"{start}comm {handle} rank {own} nRanks {size} nNodes {size // local} localRanks {local} MNNVL 0\n"
            yield f"{start}Trees [0] {own + 1}/-1/-1->{own}->{own - 1}\n"
            yield f"{start}Init timings: total 0.42 (kernels 0.35, alloc 0.03, bootstrap 0.02, topo 0.01)\n"
            for other in (1, 4):  # the next rank in a ring and in a tree
                before, after = (own - other) % size, (own + other) % size
                for channel in range(num_channels):
                    line = f"{start}Channel {channel:02}/0 : "
                    names = [f"{peer}[{peer % num_gpus if local > 1 else gpu}]" for peer in (before, own, after)]
                    if after // local == own // local:
                        yield f"{line}{names[1]} -> {names[2]} via P2P/CUMEM\n"
                    else:
                        yield f"{line}{names[1]} -> {names[2]} [send] via NET/IB/{gpu}/GDRDMA\n"
                    if before // local != own // local:
                        yield f"{line}{names[0]} -> {names[1]} [receive] via NET/IB/{gpu}/GDRDMA\n"
            for number in range(5):
                yield f"{start}Connected to proxy localRank {gpu} -> connection 0x7f29{rank:04x}{number:04x}\n"
            yield f"{start}Connected all trees\n"
            yield f"{init}COMPLETE\n"
