"""Logs of whole jobs, in the format of NCCL_DEBUG=INFO: src/init.cc and src/transport/{p2p,shm,net}.cc of NCCL."""

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
