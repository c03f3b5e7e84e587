"""How many times as fast as ZeRO-3 layouts train, over the bandwidth of the network between hosts.

Measured points come from the records of a study, and predicted ones from the planner. Loads no torch.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from math import exp, inf, log
from statistics import median

from megabench.cost.job import Candidate, Job
from megabench.cost.profile import profile_for
from megabench.errors import UserError
from megabench.hardware.gpus import INSTANCE_NAMES, Network, find_instance
from megabench.hardware.topology import Host, Topology, build
from megabench.planner.costs import Costs
from megabench.planner.predict import candidate_of, job_of
from megabench.record import RunRecord, WorkClass
from megabench.specs.registry import ENGINES
from megabench.study.summary import Row, runs_by_trial
from megabench.study.sweep import setup_name

_NETWORKS: dict[str, Network] = {"efa": "efa", "infiniband": "infiniband", "socket": "socket"}


@dataclass(frozen=True)
class Place:
    """The hosts of a trial, and the bandwidth between its GPUs in 10^9 bytes per second, each way.

    `gb_per_s` is the part of one GPU in its host's network, or the NVLink bandwidth of a GPU on one host. It is None if
    no run measured it. `is_limited` means that `emulate_network` set it. `latency_us` is the added delay of packets.
    """

    num_hosts: int
    gb_per_s: float | None
    is_limited: bool = False
    latency_us: int = 0

    @property
    def label(self) -> str:
        """The bandwidth as text: "1.5 GB/s", "6.4 GB/s, not limited", "NVLink" or "one host"."""
        if self.num_hosts == 1:
            return "NVLink" if self.gb_per_s else "one host"
        if self.gb_per_s is None:
            return "unknown"
        rate = f"{self.gb_per_s:.3g} GB/s"
        return (
            f"{rate}, {self.latency_us} µs" if self.latency_us else rate if self.is_limited else f"{rate}, not limited"
        )

    @property
    def order(self) -> tuple[float, int]:
        """Slow networks first, and a place with an unknown bandwidth last."""
        return self.gb_per_s or inf, -self.latency_us


@dataclass(frozen=True, order=True)
class Work:
    """What a step of a trial trains. Trials of equal work are compared."""

    model: str
    precision: str
    seq_length: int
    global_batch: int


@dataclass(frozen=True)
class Crossing:
    """A place where a curve crosses ZeRO-3's, between two measured bandwidths in GB/s per GPU.

    `at` is the interpolated bandwidth, and None if the points are more than a factor of 4 apart. `is_faster_below`
    means that the layout is faster than ZeRO-3 on the slower network.
    """

    low: float
    high: float
    at: float | None
    is_faster_below: bool


@dataclass(frozen=True)
class Error:
    """The errors of the predicted step times at a place: predicted ÷ measured − 1, of each trial."""

    place: Place
    of_trials: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean of the absolute errors."""
        return sum(map(abs, self.of_trials)) / len(self.of_trials)


Cell = tuple[Work, str, Place]  # the work, the name of the method, and the place
_MOST_APART = 4.0  # interpolation between points that are further apart would be a guess
_POINTS_PER_DECADE = 12
_FASTEST_NETWORK = 100.0  # GB/s per GPU: the end of the predicted curves


class Crossover:
    """The trials of a study as points over the bandwidth of their network.

    A method is a layout, ZeRO-3 or FSDP2, with all its settings: at each place, its fastest trial counts. The baseline
    is the fastest method that shards the weights. Trials on another number of GPUs, or on another kind of GPU, than
    most trials are left out.
    """

    def __init__(self, rows: Sequence[Row], records: Sequence[RunRecord]) -> None:
        known = [row for row in rows if row.device] or rows
        kinds = Counter((row.world_size, row.device) for row in known)
        self.world_size, self.device = kinds.most_common(1)[0][0]
        self._records = {
            trial: runs[0]
            for trial, runs in runs_by_trial(records).items()
            if runs[0].world_size == self.world_size and runs[0].device in (self.device, None)
        }
        self._gb_per_s = _measured_networks(records)
        self._rows = [row for row in rows if row.trial in self._records]
        self.num_left_out = len(rows) - len(self._rows)

    @property
    def unit(self) -> str:
        """What has the bandwidth: "GPU", or "process" for runs on CPUs."""
        return "process" if self.device == "cpu" else "GPU"

    @cached_property
    def places(self) -> list[Place]:
        """The places of all trials, slow networks first."""
        return sorted({self._place(record) for record in self._records.values()}, key=lambda place: place.order)

    @cached_property
    def works(self) -> list[Work]:
        return sorted({_work(record) for record in self._records.values()})

    @cached_property
    def baselines(self) -> list[str]:
        """The methods that shard the weights, in the order of the records."""
        return self._methods(is_baseline=True)

    @cached_property
    def methods(self) -> list[str]:
        """The other methods, in the order of the records."""
        return self._methods(is_baseline=False)

    def _methods(self, is_baseline: bool) -> list[str]:
        found = [_method(record) for record in self._records.values() if _shards_weights(record) == is_baseline]
        return list(dict.fromkeys(found))

    @cached_property
    def measured(self) -> Mapping[Cell, Row]:
        """The fastest trial with a result of each method at each place."""
        found: dict[Cell, Row] = {}
        for row in self._rows:
            cell = self.cell(self._records[row.trial])
            if row.is_ok and row.tokens_per_second_per_device and (cell not in found or row.speed > found[cell].speed):
                found[cell] = row
        return found

    def cell(self, record: RunRecord) -> Cell:
        """Return the work, the method and the place of a trial."""
        return _work(record), _method(record), self._place(record)

    def fastest_baseline(self, work: Work, place: Place) -> Row | None:
        rows = [self.measured[cell] for method in self.baselines if (cell := (work, method, place)) in self.measured]
        return max(rows, key=lambda row: row.speed, default=None)

    def ratio(self, work: Work, method: str, place: Place) -> float | None:
        """Return the measured throughput ÷ that of the fastest baseline, or None if one of them was not measured."""
        row, baseline = self.measured.get((work, method, place)), self.fastest_baseline(work, place)
        return row.speed / baseline.speed if row and baseline else None

    def predicted_ratio(self, work: Work, method: str, place: Place) -> float | None:
        """Return the predicted value of `ratio`, or None if the planner cannot predict it."""
        seconds = self.predicted_seconds(work, method, place)
        baselines = [found for name in self.baselines if (found := self.predicted_seconds(work, name, place))]
        return min(baselines) / seconds if seconds and baselines else None

    def predicted_seconds(self, work: Work, method: str, place: Place) -> float | None:
        """Return the predicted seconds of a step of the method's fastest settings among those of its trials."""
        if place.gb_per_s is None:
            return None
        topology = self._topology(place)
        times = [_seconds(job, candidate, topology) for job, candidate in self._variants.get((work, method), ())]
        return min((time for time in times if time), default=None)

    def curve(self, work: Work, method: str) -> list[tuple[float, float]]:
        """Return predicted (GB/s per GPU, ratio) from the slowest network of the study to 100 GB/s per GPU."""
        across = [place for place in self.places if place.num_hosts > 1 and place.gb_per_s]
        if not across or (across[0].gb_per_s or 0.0) >= _FASTEST_NETWORK:
            return []
        num_hosts = Counter(place.num_hosts for place in across).most_common(1)[0][0]
        low = log(across[0].gb_per_s or 0.0)
        count = max(1, round((log(_FASTEST_NETWORK) - low) / log(10) * _POINTS_PER_DECADE))
        rates = [exp(low + (log(_FASTEST_NETWORK) - low) * step / count) for step in range(count + 1)]
        ratios = [(rate, self.predicted_ratio(work, method, Place(num_hosts, rate))) for rate in rates]
        return [(rate, ratio) for rate, ratio in ratios if ratio]

    def points(self, work: Work, method: str) -> list[tuple[float, float]]:
        """Return measured (GB/s per GPU, ratio), slow networks first."""
        ratios = [(place.gb_per_s, self.ratio(work, method, place)) for place in self.places]
        return [(rate, ratio) for rate, ratio in ratios if rate and ratio]

    @property
    def not_measured(self) -> list[Cell]:
        """The combinations of work, method and place without a result."""
        names = [*self.baselines, *self.methods]
        every = [(work, name, place) for work in self.works for name in names for place in self.places]
        return [cell for cell in every if cell not in self.measured]

    @property
    def errors(self) -> list[Error]:
        """The errors of the predictions of all trials with a result, for each place with a prediction."""
        found: dict[Place, list[float]] = {}
        for row in self._rows:
            record = self._records[row.trial]
            place, pair = self._place(record), _pair(record, _work(record), None)
            if not row.is_ok or not row.step_seconds or pair is None or place.gb_per_s is None:
                continue
            if predicted := _seconds(*pair, self._topology(place)):
                found.setdefault(place, []).append(predicted / row.step_seconds - 1)
        return [Error(place, tuple(found[place])) for place in self.places if place in found]

    def _place(self, record: RunRecord) -> Place:
        num_hosts, limit = record.emulated_hosts or record.num_hosts or 1, record.emulated_network
        if num_hosts == 1:
            return Place(1, _nvlink(record))
        if limit:
            return Place(num_hosts, limit.gb_per_s * num_hosts / record.world_size, True, limit.latency_us)
        of_host = self._gb_per_s.get((num_hosts, record.world_size))
        return Place(num_hosts, of_host and of_host * num_hosts / record.world_size)

    def _topology(self, place: Place) -> Topology:
        of_host = place.gb_per_s and place.gb_per_s * self.world_size / place.num_hosts
        host = Host(
            name="host",
            device=self.device or "",
            inside="pcie",
            network=self._network,
            network_gbits=of_host * 8 if of_host and place.num_hosts > 1 else None,
            nvlink_gb_per_s=_nvlink_of_gpu(self.device),
        )
        size = self.world_size // place.num_hosts
        return build([(host, size, size)] * place.num_hosts)

    @cached_property
    def _network(self) -> Network:
        """The kind of network between the hosts."""
        links = [group.link for record in self._records.values() for group in record.groups]
        return next((_NETWORKS[link] for link in links if link in _NETWORKS), "socket")

    @cached_property
    def _variants(self) -> Mapping[tuple[Work, str], Sequence[tuple[Job, Candidate]]]:
        """The jobs and candidates of each method with each work.

        A method without a trial of some work has the settings of its trials of other work, where they are valid.
        """
        known = {record.model: record.work_class for record in self._records.values() if record.work_class}
        found: dict[tuple[Work, str], dict[tuple[Job, Candidate], None]] = {}
        others: dict[tuple[Work, str], dict[tuple[Job, Candidate], None]] = {}
        for record in self._records.values():
            for work in self.works:
                if pair := _pair(record, work, known.get(record.model)):
                    own = found if work == _work(record) else others
                    own.setdefault((work, _method(record)), {})[pair] = None
        return {key: list(pairs) for key, pairs in (others | found).items()}


def crossings(points: Sequence[tuple[float, float]]) -> list[Crossing]:
    """Return where the ratios of (bandwidth, ratio) points, slow networks first, become larger than 1 or stop to be."""
    found = []
    for (low, ratio), (high, after) in pairwise(points):
        if (ratio > 1) != (after > 1):
            share = log(ratio) / (log(ratio) - log(after))
            near = high / low <= _MOST_APART
            at = exp(log(low) + share * (log(high) - log(low))) if near else None
            found.append(Crossing(low, high, at, ratio > 1))
    return found


def marks(device: str | None) -> list[tuple[str, float]]:
    """Return the names of known networks, and their bandwidths in GB/s per GPU, each way.

    All bandwidths are those of data sheets. "ENI of p4d" is for pods on several p4d instances without EFA. The
    pods of an instance share its first network card: the VPC CNI gives pods no addresses of other cards (release 1.7.10
    of amazon-vpc-cni-k8s). Pods of one instance use no network card between each other.
    """
    rates: dict[float, list[str]] = {}
    for name in ("p4d.24xlarge", "p5.48xlarge", "p5en.48xlarge"):
        instance = find_instance(name)
        assert instance
        short = name.partition(".")[0]
        if short == "p4d":
            rates[instance.nic_gbits / 8 / instance.num_gpus] = ["ENI of p4d"]
        rates.setdefault(instance.network_gbits / 8 / instance.num_gpus, []).append(short)
    found = [(", ".join(names), rate) for rate, names in rates.items()]
    nvlink = _nvlink_of_gpu(device)
    return [*found, ("NVLink", nvlink)] if nvlink else found


def _work(record: RunRecord) -> Work:
    return Work(record.model, record.precision, record.seq_length, record.global_batch)


def _method(record: RunRecord) -> str:
    name = setup_name(record)
    return name.upper() if record.engine in ENGINES and len(ENGINES[record.engine].axes) > 1 else name


def _shards_weights(record: RunRecord) -> bool:
    return record.engine in ENGINES and ENGINES[record.engine].gathers_weights(record.options)


def _measured_networks(records: Iterable[RunRecord]) -> dict[tuple[int, int], float]:
    """Return the median GB/s of a host that runs without a limit measured, by the number of hosts and of ranks."""
    found: dict[tuple[int, int], list[float]] = {}
    for record in records:
        link = record.link_bandwidth
        if link and not record.emulated_network:
            key = record.emulated_hosts or record.num_hosts or 1, record.world_size
            found.setdefault(key, []).append(link.all_rings_gb_per_s or link.all_gather_gb_per_s)
    return {key: median(rates) for key, rates in found.items()}


def _nvlink(record: RunRecord) -> float | None:
    """Return the NVLink bandwidth of a GPU, or None if the ranks of a run communicate over another link."""
    links = {group.link for group in record.groups if len(group.ranks) > 1}
    return _nvlink_of_gpu(record.device) if not links or "nvlink" in links else None


def _nvlink_of_gpu(device: str | None) -> float | None:
    instances = [find_instance(name) for name in INSTANCE_NAMES]
    return max((found.nvlink_gb_per_s for found in instances if found and found.gpu == device), default=0.0) or None


def _pair(record: RunRecord, work: Work, known: WorkClass | None) -> tuple[Job, Candidate] | None:
    """Return the job and the candidate of a trial with other work, or None if it cannot be predicted.

    `known` is the work class of another run of the model. It gives the number of layers if the trial failed.
    """
    candidate = candidate_of(record)
    if candidate is None or (record.model, record.precision) != (work.model, work.precision):
        return None
    changes = {"seq_length": work.seq_length, "global_batch": work.global_batch}
    try:
        candidate.layout.check_batch(work.global_batch, candidate.micro_batch)
        return job_of(record.model_copy(update={**changes, "work_class": record.work_class or known})), candidate
    except UserError:
        return None


@lru_cache(maxsize=2**10)
def _costs(job: Job, topology: Topology) -> Costs:
    return Costs(job, topology, profile_for(topology.hosts[0].device))


@lru_cache(maxsize=2**15)
def _seconds(job: Job, candidate: Candidate, topology: Topology) -> float | None:
    """Return the predicted seconds of a step, or None if the planner lacks the GPU's peak FLOP/s."""
    try:
        return _costs(job, topology).estimate(candidate).step_seconds
    except UserError:
        return None
