"""RunRecord: the one truth that table, CSV, TensorBoard and report are drawn from. Loads no torch.

A value that is not known is None, never a guess.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from megabench import UserError, older_records
from megabench.atomic_write import write_atomically

# The schema version increases with the first change of a field after a release (0.1.0 wrote version 1). An older
# megabench refuses records of a newer schema. A newer megabench reads records of all older schemas.
SCHEMA_VERSION = 2

Status = Literal["ok", "oom", "failed", "timeout", "diverged"]
FailureKind = Literal["hang", "oom", "shared-memory", "killed", "error"]
NicDistance = Literal["switch", "host bridge", "other bridge"]


# JSON cannot represent infinity and NaN, so both become null
Measure = Annotated[
    float | None, BeforeValidator(lambda x: None if isinstance(x, float) and not math.isfinite(x) else x)
]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class LayoutSizes(_Part):
    tp: int
    cp: int
    pp: int
    vp: int
    dp: int


class WorkClass(_Part):
    """What must be equal for two trials to be comparable."""

    model: str
    num_layers: int
    data: str
    data_sha256: str
    seed: int
    optimizer: str
    schedule: dict[str, float]
    precision: str
    grad_dtype: str
    global_batch: int
    seq_length: int
    compression: str | None = None

    @property
    def id(self) -> str:
        """A short name of the class: equal ids mean comparable trials. Data goes by its hash, not by its name."""
        return hashlib.sha256(self.model_dump_json(exclude={"data"}).encode()).hexdigest()[:12]


class StepSeconds(_Part):
    """Seconds of the timed steps alone, the slowest rank of each."""

    median: float
    p10: float
    p90: float
    all: list[float]


class TflopsPerDevice(_Part):
    """Model TFLOP/s per device: attention counted as half the square (causal) and as the full square."""

    causal: float
    full: float


class PeakMemory(_Part):
    """GiB at the peak of each rank: reserved by the allocator on a GPU, resident set of the process on CPU."""

    max: float
    per_rank: list[float]


class Parity(_Part):
    """Comparison of losses and gradient norms with the reference trial of the same work class."""

    reference: str
    max_relative_difference: float | None = Field(description="of the loss of any step")
    tolerance: float
    grad_norm_difference: float | None = Field(
        default=None, description="relative, in the median of the first steps, or of one far off"
    )
    grad_norm_tolerance: float | None = None
    verdict: Literal["equal", "diverged", "unknown"]


class RunFailure(_Part):
    """Why a run has no result.

    `kind` is "hang" if no rank made progress, or if the run did not end in time; "oom" where memory ran out;
    "shared-memory" where /dev/shm was too small; "killed" for SIGKILL from outside; "error" for anything else. `rank`
    is the one that failed, or that the others waited for; None where no single one is known.
    """

    kind: FailureKind
    rank: int | None = None


class KernelTraits(_Part):
    """Traits of the kernels in `RunRecord.kernels`. None where that is not known.

    `flash_attention` holds no S×S scores; `fused_norm` and `fused_activation` read and write once; `fused_loss` holds
    no logits of a whole micro-batch. Where it `exchanges_heads`, context parallelism swaps parts of the sequence for
    parts of the heads; where it `fuses_weight_gradient`, the product that makes a weight's gradient adds it up.
    """

    flash_attention: bool | None = None
    fused_norm: bool | None = None
    fused_activation: bool | None = None
    fused_loss: bool | None = None
    exchanges_heads: bool = False
    fuses_weight_gradient: bool = False


class Group(_Part):
    """One process group: its kind, its ranks, and, where known, the link it runs over and the NCCL transport."""

    kind: str  # name of a parallel axis
    ranks: list[int]
    link: str | None = None
    transport: str | None = None


class LinkBandwidth(_Part):
    """What the network between hosts achieved at the start of the run, in GB/s.

    `all_gather_gb_per_s` is the bus bandwidth of an all-gather over all ranks, `send_recv_gb_per_s` that of one rank
    sending to one on the next host; each moved `num_bytes` a rank. `all_rings_gb_per_s` is what a host sent while its
    ranks, as many as the smallest host has, were each in an all-gather with one rank of every other host, `num_bytes`
    together: more than a single ring's where that leaves the network idle. With one rank a host it is that ring's.
    """

    all_gather_gb_per_s: float
    send_recv_gb_per_s: float
    all_rings_gb_per_s: float | None = None
    num_bytes: int


class Straggler(_Part):
    """A rank that was slow at local work: from step `step` on, by the factor `slowdown` against the median rank.

    `gpu` is the index of the GPU on the host, or None on CPU.
    """

    rank: int
    host: str
    gpu: int | None
    step: int
    slowdown: float

    @property
    def place(self) -> str:
        """The rank with its host and GPU."""
        return f"rank {self.rank} on {self.host}" + (f" (GPU {self.gpu})" if self.gpu is not None else "")


class NicTraffic(_Part):
    """What a network interface moved during the timed steps, in GB/s."""

    sent_gb_per_s: float
    received_gb_per_s: float


class HostRanks(_Part):
    """A host and the run's ranks on it."""

    name: str
    ranks: list[int]


class PlacementUsed(_Part):
    """How the ranks were placed: rank n of the run is the launcher's rank `launcher_ranks[n]`.

    `nccl_num_nodes` is how many hosts NCCL itself counted; None where it did not say.
    """

    policy: str
    launcher_ranks: list[int]
    hosts: list[HostRanks]
    nccl_num_nodes: int | None = None


class SaveTimes(_Part):
    """A checkpoint that was saved: seconds until it was good, and how long training waited for it.

    `check_seconds` is the part of the wait in which the state was searched for non-finite values; None in records of
    versions that did not. `error` tells why there is no checkpoint.
    """

    step: int
    mode: Literal["sync", "async"]
    num_bytes: int
    seconds: float
    stall_seconds: float
    check_seconds: float | None = None
    gb_per_second: float | None
    error: str | None = None


class LoadTimes(_Part):
    """The checkpoint that the run went on from, and what it took to check its files and to load them."""

    folder: str
    num_bytes: int
    check_seconds: float
    load_seconds: float
    gb_per_second: float


class Probe(_Part):
    """A short run that tried a setting: the median step of `global_batch` sequences, and GiB at its peak."""

    micro_batch: int
    recompute: str
    global_batch: int
    status: Status
    error: str | None = None
    step_seconds: float | None = None
    peak_memory_gib: float | None = None


class Communication(_Part):
    """Seconds of a step in which a kind of group communicated, and those of them in which nothing computed."""

    seconds: float
    exposed_seconds: float


class StepProfile(_Part):
    """Where one more step went, under a profiler: the mean of all ranks, in seconds.

    `seconds` is by part and adds up to the step; `communication` by the axes along which the ranks of a group differ.
    A rank that waits for another does so in communication: a pipeline's bubble is in "exposed pp".
    """

    step_seconds: float
    seconds: dict[str, float]
    communication: dict[str, Communication]


class Prediction(_Part):
    """What the planner said of a run: seconds of a step, and GiB of its fullest device.

    `relative_error` is the profile's own; `planned_rank` the place among the best predicted, where the plan added it.
    """

    step_seconds: float
    tokens_per_second_per_device: float
    peak_memory_gib: float
    profile: str
    relative_error: float
    planned_rank: int | None = None


class Machine(_Part):
    """What a host was like beside the run: the worst of its GPUs. None where it does not show.

    `throttle` tells in which part of the timed steps' samples each reason slowed a GPU down, `power_limit_share` the
    power limit as a part of the GPU's own. `nic_distance` tells where the ways of a GPU and of the nearest NIC that
    reads memory itself meet: at a PCIe switch or port, at the host bridge above all of them, or further on.
    `is_compile_cache_kept` says whether torch.compile's cache outlives a container and a restart.
    """

    host: str
    instance_type: str | None = None
    shm_total_gib: float | None = None
    shm_free_gib: float | None = None
    num_other_gpu_processes: int | None = None
    other_gpu_processes_gib: float | None = None
    throttle: dict[str, float] | None = None
    power_limit_share: float | None = None
    nic_distance: NicDistance | None = None
    compile_cache: str | None = None
    is_compile_cache_kept: bool | None = None


class Environment(_Part):
    """Versions and environment variables that shape a run."""

    versions: dict[str, str]
    variables: dict[str, str]
    host: str | None = None


class RunRecord(_Part):
    """One trial: what ran, how, and what was measured. One JSON line in `results.jsonl`."""

    schema_version: int = SCHEMA_VERSION
    trial: str
    trial_id: str | None = Field(default=None, description="hash of the full configuration, which --resume goes by")
    repeat: int = 0
    engine: str
    layout: LayoutSizes
    options: dict[str, Any]
    optimizer: str
    work_class: WorkClass | None
    status: Status
    error: str | None = None
    failure: RunFailure | None = Field(default=None, description="why the status is oom, failed or timeout")
    world_size: int
    num_hosts: int | None
    emulated_hosts: int | None = None
    device: str | None
    model: str
    num_parameters: int
    seq_length: int
    micro_batch: int
    global_batch: int
    precision: str
    grad_dtype: str
    requested_kernels: Literal["auto", "reference"] | None = Field(default=None, description="the setting `kernels`")
    kernels: dict[str, str] | None = None
    kernel_traits: KernelTraits | None = None
    num_steps: int
    warmup_steps: int
    first_step_seconds: float | None = None
    warmup_seconds: float | None = None
    wall_seconds: float | None = None
    step_seconds: StepSeconds | None = None
    tokens_per_second: float | None = None
    tokens_per_second_per_device: float | None = None
    samples_per_second: float | None = None
    model_tflops_per_device: TflopsPerDevice | None = None
    mfu: float | None = None
    peak_tflops: float | None = None
    peak_memory_gib: PeakMemory | None = None
    device_memory_gib: float | None = Field(default=None, description="of a GPU")
    gpu_utilization: float | None = Field(default=None, description="mean over the timed steps and GPUs, 0 to 1")
    gpu_watts: float | None = Field(default=None, description="mean over the timed steps and GPUs")
    nics: dict[str, dict[str, NicTraffic]] | None = Field(default=None, description="by host and interface")
    wire_bytes: dict[str, float] | None = Field(
        default=None,
        description="what a rank sends in a step by ring algorithms, the mean of all ranks, by the axes along which "
        "the ranks of a group differ",
    )
    days_per_100b_tokens: float | None = None
    first_step: int = Field(default=1, description="the first step of this run: later than 1 where it was resumed")
    stopped_by: str | None = Field(default=None, description="the signal that ended the run before its last step")
    losses: list[Measure] = []  # one value per step of this run
    grad_norms: list[Measure] = []
    learning_rates: list[float] | None = Field(default=None, description="of every step")
    peak_memory_gib_by_step: list[float | None] | None = Field(default=None, description="of rank 0, up to each step")
    gpu_utilization_by_step: list[float | None] | None = Field(default=None, description="of rank 0's GPU, 0 to 1")
    num_skipped_steps: int = 0
    parity: Parity | None = None
    placement: PlacementUsed | None = None
    groups: list[Group] = []
    link_bandwidth: LinkBandwidth | None = None
    saves: list[SaveTimes] = []
    load: LoadTimes | None = None
    warnings: list[str] = []
    stragglers: list[Straggler] = Field(default=[], description="ranks that were slow at a fixed local product")
    profile: StepProfile | None = None
    prediction: Prediction | None = None
    probes: list[Probe] | None = Field(default=None, description="what was tried for micro_batch or recompute: auto")
    machines: list[Machine] = []
    environment: Environment | None = None
    auto_settings: list[str] | None = Field(default=None, description="what `command` leaves to be found by trying")
    extra: dict[str, dict[str, Any]] = Field(default={}, description="sections of users' callbacks, by class name")
    command: str

    def write(self, path: Path) -> None:
        """Writes the record as indented JSON, atomically."""
        write_atomically(path, self.model_dump_json(indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> "RunRecord":
        """Raises ValueError for what is no record."""
        return cls.model_validate(older_records.complete(json.loads(path.read_text())))


class RecordError(UserError):
    """Records that this version cannot read; the message names the file and the line."""


def read_records(path: Path) -> list[RunRecord]:
    """The records of a `results.jsonl`, in file order; an absent file holds none.

    Fields that an older version did not write are None or empty, or follow from others (older_records.py). Raises
    RecordError for a newer version's records, and for what is none.
    """
    if not path.exists():
        return []
    try:
        # splitlines() would also split at U+2028, which JSON strings may contain
        lines = enumerate(path.read_text().split("\n"), 1)
    except UnicodeDecodeError:
        raise RecordError(f"{path} is not a text file of records") from None
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from None
    return [_read_line(line, f"{path}, line {number}") for number, line in lines if line.strip()]


def _read_line(line: str, where: str) -> RunRecord:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{where} is not JSON ({error}); its end may be missing") from None
    version = content.get("schema_version", SCHEMA_VERSION) if isinstance(content, dict) else None
    if not isinstance(version, int):
        raise RecordError(f"{where} is not a record of a trial")
    if version > SCHEMA_VERSION:
        raise RecordError(
            f"{where} has record schema {version}, and this megabench reads schemas up to {SCHEMA_VERSION}; "
            "use the version that wrote it, or a newer one"
        )
    try:
        return RunRecord.model_validate(older_records.complete(content))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise RecordError(f"{where} is not a record that this megabench can read: {field}: {first['msg']}") from None


def write_records(path: Path, records: list[RunRecord]) -> None:
    """Replaces a `results.jsonl`, atomically."""
    write_atomically(path, "".join(record.model_dump_json() + "\n" for record in records))
