"""Background sampling of a GPU's utilization, power and throttling, and of the host's network counters."""

import threading
import time
from dataclasses import dataclass

import torch

from megabench.hardware.checkup import shares, throttle_reasons
from megabench.hardware.nics import NicBytes, read_nics, since


@dataclass(frozen=True)
class Sample:
    """One sample of a GPU. `utilization` is between 0 and 1."""

    utilization: float
    watts: float


class Sampler:
    """Sample one GPU through NVML every `interval_seconds`. Without a GPU or NVML, the sampler has no samples.

    With `reads_nics`, `reset` and `close` also read the host's network counters. One rank per host sets `reads_nics`.
    """

    def __init__(
        self, device: torch.device, gpu_uuid: str | None, reads_nics: bool, interval_seconds: float = 0.5
    ) -> None:
        self.device = device
        self.gpu_uuid = gpu_uuid
        self.interval_seconds = interval_seconds
        self.samples: list[Sample] = []
        self.throttled: list[frozenset[str]] = []
        self.nics: dict[str, NicBytes] = {}
        self.nic_seconds = 0.0
        self._reads_nics = reads_nics
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.reset()
        if device.type == "cuda":
            self._thread.start()

    def _sample(self) -> None:
        while not self._stop.wait(self.interval_seconds):
            try:
                watts = torch.cuda.power_draw(self.device) / 1000
                self.samples.append(Sample(torch.cuda.utilization(self.device) / 100, watts))
                reasons = throttle_reasons(self.gpu_uuid) if self.gpu_uuid else None
                if reasons is not None:
                    self.throttled.append(reasons)
            except Exception:  # If NVML is missing or fails, sampling stops and the run continues.
                return

    def reset(self) -> None:
        """Discard all samples and read the network counters again."""
        self.samples, self.throttled = [], []
        self._began, self._nics_before = time.perf_counter(), read_nics() if self._reads_nics else {}

    @property
    def latest(self) -> float | None:
        """The GPU utilization in the most recent sample, or None without samples."""
        return self.samples[-1].utilization if self.samples else None

    @property
    def mean(self) -> Sample | None:
        """The mean GPU utilization and power of all samples, or None without samples."""
        samples = list(self.samples)
        if not samples:
            return None
        return Sample(
            sum(sample.utilization for sample in samples) / len(samples),
            sum(sample.watts for sample in samples) / len(samples),
        )

    @property
    def throttle(self) -> dict[str, float] | None:
        """The share of the samples, 0 to 1, that contain each throttle reason, or None without samples."""
        throttled = list(self.throttled)
        return shares(throttled) if throttled else None

    def close(self) -> None:
        """Stop sampling. Set `nics` to the bytes that each interface transferred in the `nic_seconds` since `reset`."""
        self._stop.set()
        if self._reads_nics:
            self.nics, self.nic_seconds = since(self._nics_before, read_nics()), time.perf_counter() - self._began
