"""What the hardware does beside the run: GPU utilisation, power and throttling, sampled by a thread, and the network's
counters."""

import threading
import time
from dataclasses import dataclass

import torch

from megabench.hardware.checkup import shares, throttle_reasons
from megabench.hardware.nics import NicBytes, read_nics, since


@dataclass(frozen=True)
class Sample:
    """One look at a GPU: `utilization` is 0 to 1."""

    utilization: float
    watts: float


class Sampler:
    """Samples one GPU through NVML, twice a second; on CPU, and without NVML, it knows nothing of it.

    Every host's network counters are read at `reset` and at `close`, by whoever `reads_nics`.
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
            except Exception:  # no NVML here, or it went away: not known, and no reason to end a run
                return

    def reset(self) -> None:
        """Forgets what was sampled so far."""
        self.samples, self.throttled = [], []
        self._began, self._nics_before = time.perf_counter(), read_nics() if self._reads_nics else {}

    @property
    def latest(self) -> float | None:
        """The last utilisation that was sampled."""
        return self.samples[-1].utilization if self.samples else None

    @property
    def mean(self) -> Sample | None:
        """None when nothing was sampled."""
        samples = list(self.samples)
        if not samples:
            return None
        return Sample(
            sum(sample.utilization for sample in samples) / len(samples),
            sum(sample.watts for sample in samples) / len(samples),
        )

    @property
    def throttle(self) -> dict[str, float] | None:
        """In which part of the samples each reason slowed the GPU down; None when nothing was sampled."""
        throttled = list(self.throttled)
        return shares(throttled) if throttled else None

    def close(self) -> None:
        """Ends sampling; `nics` is what each interface moved since `reset`, in `nic_seconds`."""
        self._stop.set()
        if self._reads_nics:
            self.nics, self.nic_seconds = since(self._nics_before, read_nics()), time.perf_counter() - self._began
