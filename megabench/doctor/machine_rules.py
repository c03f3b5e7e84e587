"""What the hosts were like beside the run."""

from collections.abc import Iterator

from megabench.doctor.finding import Case, Finding

# of the timed steps' samples: one in twenty may be a border
MOST_THROTTLED = 0.05
# memory that other processes hold on a GPU: a display or a monitor has less, a job more
MOST_OF_OTHERS_GIB = 0.5
# the limit a GPU came with, but for the driver's rounding
LEAST_POWER_LIMIT = 0.98
# what NCCL's manual asks a container to be given; Docker's default is 64 MiB
LEAST_SHM_GIB = 1.0
# a first step that took longer was mostly compilation, worth keeping
LONG_FIRST_STEP_SECONDS = 20.0

_CAUSES = {  # of the reasons that NVML tells; a power cap at full load is how these GPUs work
    "hardware slowdown": "cooling and power supply (nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER)",
    "too hot (hardware)": "cooling (nvidia-smi -q -d TEMPERATURE)",
    "too hot (driver)": "cooling (nvidia-smi -q -d TEMPERATURE)",
    "power brake": "the rack's power supply",
    "sync boost": "the sync boost group that this GPU is in (nvidia-smi -q -d PERFORMANCE)",
}


def other_processes(case: Case) -> Iterator[Finding]:
    """Other users of the same GPUs."""
    for record in case.on_gpus:
        for machine in record.machines:
            number, gib = machine.num_other_gpu_processes, machine.other_gpu_processes_gib
            if number and (gib is None or gib > MOST_OF_OTHERS_GIB):
                yield Finding(
                    "untrustworthy",
                    (record.trial,),
                    "shared its GPUs with other processes",
                    f"{machine.host}: {number} beside the run's own" + (f", with {gib:.1f} GiB" if gib else ""),
                    "nvidia-smi names them; end them, or take other GPUs (CUDA_VISIBLE_DEVICES), and run it again",
                )


def throttled(case: Case) -> Iterator[Finding]:
    """GPUs that ran slower than they can, for their health's sake."""
    for record in case.on_gpus:
        for machine in record.machines:
            reasons = machine.throttle or {}
            found = [(share, name) for name, share in reasons.items() if name in _CAUSES and share > MOST_THROTTLED]
            if found:
                share, name = max(found)
                yield Finding(
                    "untrustworthy",
                    (record.trial,),
                    "ran on throttled GPUs",
                    f"{machine.host}: {name} in {share:.0%} of the timed steps' samples",
                    f"look at {_CAUSES[name]}, and run it again",
                )


def power_limit(case: Case) -> Iterator[Finding]:
    """GPUs whose power limit was lowered."""
    for record in case.on_gpus:
        for machine in record.machines:
            limit, capped = machine.power_limit_share, (machine.throttle or {}).get("power cap", 0.0)
            if limit is not None and limit < LEAST_POWER_LIMIT and capped > MOST_THROTTLED:
                yield Finding(
                    "slow",
                    (record.trial,),
                    "ran into a power limit below the GPUs' own",
                    f"{machine.host}: a limit of {limit:.0%} of the GPU's own held it back in {capped:.0%} of the "
                    "samples",
                    "nvidia-smi -pl WATTS back to the default limit (nvidia-smi -q -d POWER), or say it beside the "
                    "figures",
                )


def small_shm(case: Case) -> Iterator[Finding]:
    """Shared memory that NCCL, or a loader's workers, may run out of."""
    for record in case.on_gpus:
        if record.world_size == 1:
            continue
        for machine in record.machines:
            if machine.shm_total_gib is not None and machine.shm_total_gib < LEAST_SHM_GIB:
                yield Finding(
                    "note",
                    (record.trial,),
                    "has a small /dev/shm, which more ranks or channels of NCCL may fill",
                    f"{machine.host}: {machine.shm_total_gib * 1024:.0f} MiB",
                    "docker run --shm-size=1g, or an emptyDir of medium Memory on /dev/shm",
                )


def lost_compile_cache(case: Case) -> Iterator[Finding]:
    """Compilation that each start pays anew."""
    for record in case.on_gpus:
        long = record.first_step_seconds is not None and record.first_step_seconds > LONG_FIRST_STEP_SECONDS
        for machine in record.machines:
            if record.options.get("compile") and long and machine.is_compile_cache_kept is False:
                yield Finding(
                    "note",
                    (record.trial,),
                    "compiles at every start of a container: its cache is not kept",
                    f"first step {record.first_step_seconds:.0f} s; {machine.host} caches in {machine.compile_cache}, "
                    "in memory or inside the container",
                    "TORCHINDUCTOR_CACHE_DIR=DIR on a disk that stays, for all runs",
                )
