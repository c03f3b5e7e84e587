"""RunRecord, the record of a run from which the table, the CSV, TensorBoard and the report are generated.

Loads no torch.

Unknown values are None.
"""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from megabench.atomic_write import write_atomically
from megabench.errors import UserError, printable
from megabench.inputs import parse_json, read_text

SCHEMA_VERSION = 2  # of records; CONTRIBUTING.md says when it changes
_LARGEST = 2**30  # bytes of a results.jsonl
NETWORK_TOLERANCE = 0.1  # relative difference of a measured bandwidth from the setting emulate_network

Status = Literal["ok", "oom", "failed", "timeout", "diverged"]
FailureKind = Literal["hang", "oom", "shared-memory", "killed", "error"]
NicDistance = Literal["switch", "host bridge", "other bridge"]


# JSON cannot represent infinity and NaN, so both become null
Measure = Annotated[
    float | None, BeforeValidator(lambda x: None if isinstance(x, float) and not math.isfinite(x) else x)
]


def _printable(value: Any) -> Any:
    """Return `value` with printable strings, so that it can be written to any file."""
    match value:
        case str():
            return printable(value)
        case dict():
            return {_printable(key): _printable(item) for key, item in value.items()}
        case list() | tuple():
            return [_printable(item) for item in value]
        case _:
            return value


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _make_printable(cls, fields: Any) -> Any:
        return _printable(fields)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with some other fields, whose strings become printable, too."""
        return super().model_copy(update=_printable(dict(update or {})), deep=deep)


class LayoutSizes(_Part):
    tp: int
    cp: int
    pp: int
    vp: int
    dp: int


class Fp8Work(_Part):
    """The settings of a run with fp8 products."""

    recipe: str
    num_layers_at_start_in_bf16: int = 0
    num_layers_at_end_in_bf16: int = 0


class WorkClass(_Part):
    """The properties that must be equal for two trials to be comparable."""

    model: str
    num_layers: int
    data: str
    data_sha256: str
    seed: int
    optimizer: str
    schedule: dict[str, float | str]
    """The settings of the learning rate and of the optimizer. The schedule has a name if it is not cosine decay."""
    precision: str
    grad_dtype: str
    global_batch: int
    seq_length: int
    compression: str | None = None
    fp8: Fp8Work | None = None
    data_seed: int | None = None
    """The seed of the order of the data, if it is not `seed`."""

    @property
    def rules(self) -> dict[str, float | str]:
        """The settings of the learning rate and of the optimizer, with the name of every schedule."""
        return {"schedule": "cosine"} | self.schedule

    @property
    def id(self) -> str:
        """A short identifier of the work class.

        Trials with equal identifiers are comparable. The identifier contains the hash of the data, not its name.
        """
        return hashlib.sha256(self.model_dump_json(exclude={"data"}).encode()).hexdigest()[:12]


class TokenizerUsed(_Part):
    """The tokenizer of the training data.

    `name` is "bytes" or a directory. `sha256` is the hash of everything that maps text to token ids, and `num_tokens`
    is the largest token id plus 1.
    """

    name: str
    sha256: str
    num_tokens: int

    def __str__(self) -> str:
        return f"{self.name} ({self.num_tokens:,} tokens, sha256 {self.sha256[:12]})"


class StepSeconds(_Part):
    """Seconds of the timed steps on the slowest rank."""

    median: float
    p10: float
    p90: float
    all: list[float]


class TflopsPerDevice(_Part):
    """Model TFLOP/s per device. `causal` counts attention as half the square, `full` as the full square."""

    causal: float
    full: float


class PeakMemory(_Part):
    """Peak memory of the ranks in GiB: reserved by torch's allocator on a GPU, resident set size on CPU."""

    max: float
    per_rank: list[float]


class Sketches(_Part):
    """The sketches of the first steps that the run wrote, and what they cost.

    `problems` are sentences about the run itself, such as copies of a tensor that differ between ranks.
    """

    num_tensors: int
    num_bytes: int
    seconds: float
    problems: list[str] = []


class TensorParity(_Part):
    """Comparison of a run's sketches with those of the reference run, tensor by tensor.

    `largest` names the difference that is the largest part of its tolerance, and `part_of_tolerance` is that part.
    `problems` are sentences, the most telling first, and empty if the tensors are equal.
    """

    num_tensors: int
    largest: str
    part_of_tolerance: float
    problems: list[str] = []


class Parity(_Part):
    """Comparison of losses, gradient norms and tensors with those of a reference trial on the same model and data."""

    reference: str
    max_relative_difference: float | None
    """Largest relative difference of the loss at any step."""
    tolerance: float
    grad_norm_difference: float | None = None
    """Median relative difference over the first steps, or a single one that is far too large."""
    grad_norm_tolerance: float | None = None
    tensors: TensorParity | None = None
    """None if one of the runs wrote no sketches."""
    verdict: Literal["equal", "diverged", "unknown"]


class RunFailure(_Part):
    """The reason why a run has no result.

    `kind` is "hang" (no rank made progress, or the run exceeded its time limit), "oom" (out of memory), "shared-memory"
    (/dev/shm was too small), "killed" (SIGKILL from outside) or "error" (anything else). `rank` is the rank that
    failed, or that the others waited for. `rank` is None if no single rank is known.
    """

    kind: FailureKind
    rank: int | None = None


class KernelTraits(_Part):
    """What is known about the kernels that `RunRecord.kernels` names. An unknown trait is None.

    `flash_attention` means that no S×S scores are stored; `fused_norm` and `fused_activation` read and write their
    tensors once; `fused_loss` means that the logits of a micro-batch are never stored at once. With `exchanges_heads`,
    context parallelism exchanges parts of the sequence for parts of the heads. With `fuses_weight_gradient`, the matrix
    product of a weight gradient adds its result to the gradient buffer. `fuses_fp8_weight_gradient` means the same for
    products of fp8 matrices, and `adds_output_gradient` for those of the output layer. With `copies_tp`, copy engines
    exchange the activations of tensor parallelism between products.
    """

    flash_attention: bool | None = None
    fused_norm: bool | None = None
    fused_activation: bool | None = None
    fused_loss: bool | None = None
    exchanges_heads: bool = False
    fuses_weight_gradient: bool = False
    fuses_fp8_weight_gradient: bool = False
    adds_output_gradient: bool = False
    copies_tp: bool = False


class Group(_Part):
    """One process group: its kind, its ranks, and, if known, its link and its NCCL transport."""

    kind: str  # the name of a parallel axis
    ranks: list[int]
    link: str | None = None
    transport: str | None = None


class LinkBandwidth(_Part):
    """Bandwidth between hosts at the start of the run, in GB/s.

    `all_gather_gb_per_s` is the bus bandwidth of an all-gather over all ranks. `send_recv_gb_per_s` is the bandwidth
    from one rank to a rank of the next host. Both move `num_bytes` per rank. `all_rings_gb_per_s` is the rate at which
    a host sends during simultaneous all-gathers, one per local rank, of `num_bytes` in total. Several rings reach more
    bandwidth than one ring if one ring does not saturate the network. With one rank per host, `all_rings_gb_per_s` is
    the bandwidth of one ring.
    """

    all_gather_gb_per_s: float
    send_recv_gb_per_s: float
    all_rings_gb_per_s: float | None = None
    num_bytes: int


Transport = Literal["sockets", "shared_memory"]
"""How emulated hosts communicate."""


class LinkReached(_Part):
    """What connections between two emulated hosts reached: GB/s from the first host to the second and back.

    `round_trip_us` is the median time of one byte there and back, in microseconds.
    """

    hosts: tuple[int, int]
    forth_gb_per_s: float
    back_gb_per_s: float
    round_trip_us: float


class EmulatedNetworkUsed(_Part):
    """The setting `emulate_network`, and what connections of host 0 reached before and after the run.

    `gb_per_s` is the bandwidth (10^9 bytes per second) at which each host may send, and also receive. `latency_us` is
    the added delay of each packet or message, in microseconds. The hosts communicated over `transport`. A list is empty
    if the network was not measured.
    """

    gb_per_s: float
    latency_us: int
    transport: Transport = "sockets"
    before: list[LinkReached] = []
    after: list[LinkReached] = []

    @property
    def sentence(self) -> str:
        """The set and the measured values as one sentence."""
        times = [f"{_range(links)} {when} the run" for links, when in self._measured]
        trips = [link.round_trip_us for links, _ in self._measured for link in links]
        reached = f"; reached {' and '.join(times)}, round trip {max(trips):.0f} µs" if trips else ""
        delay = f" and {self.latency_us} µs" if self.latency_us else ""
        over = " over shared memory" if self.transport == "shared_memory" else ""
        return f"Network between emulated hosts{over}: set to {self.gb_per_s:g} GB/s{delay}{reached}."

    @property
    def warnings(self) -> list[str]:
        """A sentence for each measurement that differs from the setting by more than the tolerance of 10%."""
        return [
            f"the network between emulated hosts is set to {self.gb_per_s:g} GB/s, but reached {_range(links)} {when} "
            f"the run, which differs by more than {NETWORK_TOLERANCE:.0%}"
            for links, when in self._measured
            if any(abs(rate / self.gb_per_s - 1) > NETWORK_TOLERANCE for rate in _rates(links))
        ]

    @property
    def _measured(self) -> list[tuple[list[LinkReached], str]]:
        return [(links, when) for links, when in ((self.before, "before"), (self.after, "after")) if links]


def _rates(links: list[LinkReached]) -> list[float]:
    return [rate for link in links for rate in (link.forth_gb_per_s, link.back_gb_per_s)]


def _range(links: list[LinkReached]) -> str:
    slowest, fastest = (f"{rate:.3g}" for rate in (min(_rates(links)), max(_rates(links))))
    return f"{slowest} GB/s" if slowest == fastest else f"{slowest} to {fastest} GB/s"


class Straggler(_Part):
    """A rank that was slow at local work. From `step` on, the rank took `slowdown` times as long as the median rank.

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
    """Traffic of a network interface during the timed steps, in GB/s."""

    sent_gb_per_s: float
    received_gb_per_s: float


class HostRanks(_Part):
    """A host and the ranks of the run on this host."""

    name: str
    ranks: list[int]


class PlacementUsed(_Part):
    """The placement of the ranks. Rank n of the run is rank `launcher_ranks[n]` of the launcher.

    `nccl_num_nodes` is the number of hosts that NCCL detected, or None if it is not known.
    """

    policy: str
    launcher_ranks: list[int]
    hosts: list[HostRanks]
    nccl_num_nodes: int | None = None


class Rollback(_Part):
    """A rollback: after a problem at step `step`, the run was restored from the checkpoint of step `restored_step`.

    `next_batch` is the index of the global batch that step `restored_step` + 1 uses afterwards, counted from 0. Batches
    from the restored step to the problem are skipped.
    """

    step: int = Field(ge=0, le=10**9)
    restored_step: int = Field(ge=0, le=10**9)
    next_batch: int = Field(ge=0, le=10**12)
    problem: str

    @model_validator(mode="after")
    def _returns(self) -> Self:
        if self.restored_step > min(self.step, self.next_batch):
            raise ValueError("a rollback returns to an earlier step and to a later batch")
        return self

    @property
    def sentence(self) -> str:
        """The rollback as a sentence."""
        skipped = self.step - self.restored_step
        return (
            f"rolled back from step {self.step} to the checkpoint of step {self.restored_step}, and skipped the "
            f"{skipped} batches in between: {self.problem}"
        )


class SaveTimes(_Part):
    """Times of a saved checkpoint: seconds until the checkpoint was valid, and seconds that training waited.

    `check_seconds` is the part of the wait in which the state was searched for non-finite values. `error` is the reason
    why saving failed.
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
    """The checkpoint from which the run resumed, and the times of checking and loading its files."""

    folder: str
    num_bytes: int
    check_seconds: float
    load_seconds: float
    gb_per_second: float


class Probe(_Part):
    """A short run that measured a setting: median step time for `global_batch` sequences, and peak memory in GiB."""

    micro_batch: int
    recompute: str
    global_batch: int
    status: Status
    error: str | None = None
    step_seconds: float | None = None
    peak_memory_gib: float | None = None


class Communication(_Part):
    """Seconds of a step in which one kind of process group communicated, and the exposed part of them."""

    seconds: float
    exposed_seconds: float


class StepProfile(_Part):
    """The parts of one profiled step in seconds, as the mean of all ranks.

    `seconds` maps each part to its time, and adds up to the step. `communication` maps parallel axes to the times of
    their process groups. Waiting for another rank counts as communication, so the pipeline bubble is part of "exposed
    pp".
    """

    step_seconds: float
    seconds: dict[str, float]
    communication: dict[str, Communication]


class Prediction(_Part):
    """The planner's prediction for a run: seconds per step, and GiB of the device that uses the most memory.

    `relative_error` is the error of the planner's profile. `planned_rank` is the trial's rank among the predictions, if
    the plan added the trial.
    """

    step_seconds: float
    tokens_per_second_per_device: float
    peak_memory_gib: float
    profile: str
    relative_error: float
    planned_rank: int | None = None


class Machine(_Part):
    """The state of a host during the run, for the worst of its GPUs. Unknown values are None.

    `throttle` is the share of samples in which each reason slowed a GPU down. `power_limit_share` is the power limit as
    a share of the default limit. `nic_distance` is the PCIe connection between a GPU and its nearest RDMA NIC: a common
    switch or port, the same host bridge, or another host bridge. `is_compile_cache_kept` is true if torch.compile's
    cache survives a restart of the container.
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
    """Library versions and environment variables that affect a run."""

    versions: dict[str, str]
    variables: dict[str, str]
    host: str | None = None
    commit: str | None = None
    """Git commit of megabench, followed by "+" if files differ from it, or None outside a git checkout."""


class RunRecord(_Part):
    """The record of one trial: its configuration and its measurements. A record is one JSON line in `results.jsonl`."""

    schema_version: int = SCHEMA_VERSION
    trial: str
    trial_id: str | None = None
    """Hash of the full configuration, by which --resume finds completed trials."""
    repeat: int = 0
    engine: str
    layout: LayoutSizes
    options: dict[str, Any]
    optimizer: str
    work_class: WorkClass | None
    tokenizer: TokenizerUsed | None = None
    """Tokenizer of the data, or None for random tokens and for token files that do not name a tokenizer."""
    status: Status
    error: str | None = None
    failure: RunFailure | None = None
    """Cause of the status oom, failed or timeout."""
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
    requested_kernels: Literal["auto", "reference"] = "auto"
    """Value of the setting `kernels`."""
    kernels: dict[str, str] | None = None
    kernel_traits: KernelTraits | None = None
    num_steps: int
    warmup_steps: int
    first_step_seconds: float | None = None
    warmup_seconds: float | None = None
    wall_seconds: float | None = None
    ended_at: str | None = None
    """UTC time at which the run ended, as ISO 8601."""
    step_seconds: StepSeconds | None = None
    tokens_per_second: float | None = None
    tokens_per_second_per_device: float | None = None
    samples_per_second: float | None = None
    model_tflops_per_device: TflopsPerDevice | None = None
    mfu: float | None = None
    peak_tflops: float | None = None
    peak_memory_gib: PeakMemory | None = None
    device_memory_gib: float | None = None
    """Total memory of a GPU."""
    gpu_utilization: float | None = None
    """Mean over the timed steps and GPUs, 0 to 1."""
    gpu_watts: float | None = None
    """Mean power over the timed steps and GPUs."""
    nics: dict[str, dict[str, NicTraffic]] | None = None
    """Traffic by host and interface."""
    wire_bytes: dict[str, float] | None = None
    """Mean bytes that a rank sends per step with ring algorithms, by the axes of the process group."""
    days_per_100b_tokens: float | None = None
    first_step: int = 1
    """First step of this run, which is later than 1 in a resumed run."""
    stopped_by: str | None = None
    """Signal that ended the run before its last step."""
    losses: list[Measure] = []  # one value per step of this run
    grad_norms: list[Measure] = []
    learning_rates: list[float] | None = None
    """Learning rate of every step."""
    metrics: dict[str, list[Measure]] = {}
    """Metrics that callbacks added: one value per step of this run, or null."""
    peak_memory_gib_by_step: list[float | None] | None = None
    """Peak memory of rank 0 until each step."""
    gpu_utilization_by_step: list[float | None] | None = None
    """Utilization of rank 0's GPU, 0 to 1."""
    num_skipped_steps: int = 0
    parity: Parity | None = None
    sketches: Sketches | None = None
    placement: PlacementUsed | None = None
    groups: list[Group] = []
    link_bandwidth: LinkBandwidth | None = None
    emulated_network: EmulatedNetworkUsed | None = None
    saves: list[SaveTimes] = []
    load: LoadTimes | None = None
    warnings: list[str] = []
    rollbacks: list[Rollback] = []
    """All rollbacks of the run, including those before a restart."""
    stragglers: list[Straggler] = []
    """Ranks that were slow at a fixed local matrix product."""
    profile: StepProfile | None = None
    prediction: Prediction | None = None
    probes: list[Probe] | None = None
    """Short runs that measured micro_batch or recompute settings that are auto."""
    machines: list[Machine] = []
    environment: Environment | None = None
    auto_settings: list[str] = []
    """Settings that are auto in `command`."""
    extra: dict[str, dict[str, Any]] = {}
    """Sections of user callbacks by class name."""
    command: str

    def write(self, path: Path) -> None:
        """Write the record atomically as indented JSON."""
        write_atomically(path, self.model_dump_json(indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> "RunRecord":
        """Read a record. Raises RecordError if the file is not a record, or has another schema version."""
        return _parse(_read(path), str(path))


class RecordError(UserError):
    """Raised for records that this version cannot read. The message names the file and the line."""


def read_records(path: Path) -> list[RunRecord]:
    """Read the records of a `results.jsonl` in file order. Return [] if the file does not exist.

    Raises RecordError for records with another schema version, and for lines that are not records.
    """
    if not path.exists():
        return []
    # splitlines() would also split at U+2028, which JSON strings may contain
    lines = enumerate(_read(path).split("\n"), 1)
    return [_parse(line, f"{path}, line {number}") for number, line in lines if line.strip()]


def _read(path: Path) -> str:
    try:
        return read_text(path, _LARGEST)
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}; use the path of a readable file") from None
    except ValueError as error:
        raise RecordError(f"{path} is {error}; give the file that megabench has written") from None


def _parse(line: str, where: str) -> RunRecord:
    try:
        content = parse_json(line)
    except ValueError as error:
        raise RecordError(f"{where} is not JSON ({error}); its end may be missing") from None
    version = content.get("schema_version") if isinstance(content, dict) else None
    if not isinstance(version, int):
        raise RecordError(f"{where} is not a record of a trial")
    if version != SCHEMA_VERSION:
        raise RecordError(
            f"{where} was written by {'a newer' if version > SCHEMA_VERSION else 'an older'} megabench (record schema "
            f"{version}; this one reads schema {SCHEMA_VERSION}); use the version that wrote the record"
        )
    try:
        return RunRecord.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise RecordError(f"{where} is not a record that this megabench can read: {field}: {first['msg']}") from None


def write_records(path: Path, records: list[RunRecord]) -> None:
    """Replaces a `results.jsonl`, atomically."""
    write_atomically(path, "".join(record.model_dump_json() + "\n" for record in records))
