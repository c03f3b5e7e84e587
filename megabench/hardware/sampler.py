"""What a GPU does beside the run: its utilisation, sampled by a thread."""

import threading

import torch


class Sampler:
    """Samples the utilisation of one GPU through NVML, twice a second; on CPU, and without NVML, it knows nothing."""

    def __init__(self, device: torch.device, interval_seconds: float = 0.5) -> None:
        self.device = device
        self.interval_seconds = interval_seconds
        self.samples: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        if device.type == "cuda":
            self._thread.start()

    def _sample(self) -> None:
        while not self._stop.wait(self.interval_seconds):
            try:
                self.samples.append(torch.cuda.utilization(self.device) / 100)
            except Exception:  # no NVML here, or it went away: not known, and no reason to end a run
                return

    def reset(self) -> None:
        """Forgets what was sampled so far."""
        self.samples = []

    @property
    def latest(self) -> float | None:
        return self.samples[-1] if self.samples else None

    @property
    def mean(self) -> float | None:
        """0 to 1; None when nothing was sampled."""
        samples = list(self.samples)
        return sum(samples) / len(samples) if samples else None

    def close(self) -> None:
        self._stop.set()
