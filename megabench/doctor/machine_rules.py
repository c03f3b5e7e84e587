"""Diagnosis rules for the hosts: other GPU processes, throttling, power limits, shared memory and compile cache."""

from collections.abc import Iterator

from megabench.doctor.finding import Case, Finding

# Tolerated fraction of throttled samples during the timed steps. A single sample at the start or end of a step may be
# wrong.
MOST_THROTTLED = 0.05
# Tolerated memory of other processes on a GPU, in GiB. A display or a monitoring tool uses less, a job uses more.
MOST_OF_OTHERS_GIB = 0.5
# A power limit of at least this fraction of the default counts as the default. The driver rounds the power limit.
LEAST_POWER_LIMIT = 0.98
# Size of /dev/shm in GiB that NCCL's manual recommends for containers. Docker's default is 64 MiB.
LEAST_SHM_GIB = 1.0
# A first step longer than this mostly compiled kernels, so the compile cache is worth keeping.
LONG_FIRST_STEP_SECONDS = 20.0

# NVML's throttle reasons and the component to check. A power cap is normal at full load and not listed.
_CAUSES = {
    "hardware slowdown": "cooling and power supply (nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER)",
    "too hot (hardware)": "cooling (nvidia-smi -q -d TEMPERATURE)",
    "too hot (driver)": "cooling (nvidia-smi -q -d TEMPERATURE)",
    "power brake": "the rack's power supply",
    "sync boost": "the sync boost group that this GPU is in (nvidia-smi -q -d PERFORMANCE)",
}


def other_processes(case: Case) -> Iterator[Finding]:
    """Report GPUs that other processes used during the run."""
    for record in case.on_gpus:
        for machine in record.machines:
            number, gib = machine.num_other_gpu_processes, machine.other_gpu_processes_gib
            if number and (gib is None or gib > MOST_OF_OTHERS_GIB):
                yield Finding(
                    "untrustworthy",
                    (record.trial,),
                    "the trial shared its GPUs with other processes",
                    f"{machine.host}: {number} other processes" + (f", using {gib:.1f} GiB" if gib else ""),
                    "end the processes that nvidia-smi lists, or set CUDA_VISIBLE_DEVICES; then repeat the trial",
                )


def throttled(case: Case) -> Iterator[Finding]:
    """Report GPUs whose clocks were throttled because of temperature, power supply or another hardware limit."""
    for record in case.on_gpus:
        for machine in record.machines:
            reasons = machine.throttle or {}
            found = [(share, name) for name, share in reasons.items() if name in _CAUSES and share > MOST_THROTTLED]
            if found:
                share, name = max(found)
                yield Finding(
                    "untrustworthy",
                    (record.trial,),
                    "the trial ran on throttled GPUs",
                    f"{machine.host}: {name} in {share:.0%} of the samples taken during the timed steps",
                    f"check {_CAUSES[name]}, then repeat the trial",
                )


def stragglers(case: Case) -> Iterator[Finding]:
    """Report ranks that were slower than the others at the same local matrix product."""
    for record in case.records:
        for found in record.stragglers:
            yield Finding(
                "untrustworthy",
                (record.trial,),
                "a slow rank made all other ranks wait",
                f"{found.place} takes {found.slowdown:.2f} times the median of all ranks for the same matrix product, "
                f"from step {found.step} on",
                "check the temperature, clocks and other processes of that GPU or host, or replace it",
            )


def power_limit(case: Case) -> Iterator[Finding]:
    """Report GPUs that were slowed down by a power limit below the default limit."""
    for record in case.on_gpus:
        for machine in record.machines:
            limit, capped = machine.power_limit_share, (machine.throttle or {}).get("power cap", 0.0)
            if limit is not None and limit < LEAST_POWER_LIMIT and capped > MOST_THROTTLED:
                yield Finding(
                    "slow",
                    (record.trial,),
                    "a power limit below the default slowed the GPUs down",
                    f"{machine.host}: a limit of {limit:.0%} of the default slowed the GPU down in {capped:.0%} of the "
                    "samples",
                    "reset the limit with nvidia-smi -pl WATTS (nvidia-smi -q -d POWER shows the default), or state "
                    "the limit with the results",
                )


def small_shm(case: Case) -> Iterator[Finding]:
    """Report a /dev/shm that is too small for NCCL or for the workers of a data loader."""
    for record in case.on_gpus:
        if record.world_size == 1:
            continue
        for machine in record.machines:
            if machine.shm_total_gib is not None and machine.shm_total_gib < LEAST_SHM_GIB:
                yield Finding(
                    "note",
                    (record.trial,),
                    "/dev/shm is small; NCCL may run out of shared memory with more ranks or channels",
                    f"{machine.host}: {machine.shm_total_gib * 1024:.0f} MiB",
                    "use docker run --shm-size=1g, or mount an emptyDir with medium: Memory on /dev/shm",
                )


def lost_compile_cache(case: Case) -> Iterator[Finding]:
    """Report trials that repeat torch.compile's compilation at every start because the cache is not kept."""
    for record in case.on_gpus:
        long = record.first_step_seconds is not None and record.first_step_seconds > LONG_FIRST_STEP_SECONDS
        for machine in record.machines:
            if record.options.get("compile") and long and machine.is_compile_cache_kept is False:
                yield Finding(
                    "note",
                    (record.trial,),
                    "torch.compile compiles again at every container start because the compile cache is not kept",
                    f"the first step took {record.first_step_seconds:.0f} s; the cache directory of {machine.host} is "
                    f"{machine.compile_cache}, in memory or inside the container",
                    "set TORCHINDUCTOR_CACHE_DIR to a directory on a persistent disk, for all runs",
                )
