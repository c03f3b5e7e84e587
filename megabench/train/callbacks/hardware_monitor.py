"""Monitor the GPU utilization, power, throttling, network interfaces and other processes of a machine during a run."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megabench.hardware.checkup import Checkup, worst_of_hosts
from megabench.hardware.sampler import Sample, Sampler
from megabench.record import Machine, NicTraffic, Rollback
from megabench.runtime import device as devices
from megabench.runtime.rendezvous import gather_objects
from megabench.train.callbacks.callback import Callback, Step, TrainerState


@dataclass(frozen=True)
class _Local:
    """The measurements of one rank during the timed steps. `gpu` is None on CPU and without NVML."""

    host: str
    gpu: Sample | None
    utilization_by_step: list[float | None]
    nics: dict[str, NicTraffic]
    machine: Machine


class HardwareMonitor(Callback):
    """Samples the GPU on each rank, and the network interfaces on one rank of each host."""

    def on_ready(self, trainer: TrainerState) -> None:
        device, rendezvous = trainer.device, trainer.rendezvous
        uuid = devices.gpu_uuid(rendezvous.gpu) if device.type == "cuda" else None
        self._host = trainer.hosts[trainer.rank]
        self._checkup = Checkup(self._host, uuid, own={*gather_objects(os.getpid())})
        self._utilization: list[float | None] = []
        self.sampler = Sampler(device, uuid, reads_nics=rendezvous.local_rank == 0)

    def on_timing_start(self) -> None:
        self.sampler.reset()

    def on_step_end(self, step: Step) -> None:
        self._utilization.append(self.sampler.latest)
        if self.sampler.latest is not None:
            step.metrics["usage/gpu_utilization"] = self.sampler.latest

    def on_rollback(self, trainer: TrainerState, rollback: Rollback) -> None:
        del self._utilization[len(trainer.steps) :]

    def on_training_end(self) -> None:
        self.sampler.close()

    def local(self) -> _Local:
        seconds = self.sampler.nic_seconds
        nics = {
            name: NicTraffic(sent_gb_per_s=nic.sent / 1e9 / seconds, received_gb_per_s=nic.received / 1e9 / seconds)
            for name, nic in self.sampler.nics.items()
        }
        return _Local(
            self._host, self.sampler.mean, self._utilization, nics, self._checkup.close(self.sampler.throttle)
        )

    def section(self, by_rank: Sequence[_Local]) -> Mapping[str, Any]:
        gpus = [seen.gpu for seen in by_rank if seen.gpu]
        return {
            "gpu_utilization": sum(gpu.utilization for gpu in gpus) / len(gpus) if gpus else None,
            "gpu_utilization_by_step": by_rank[0].utilization_by_step if by_rank[0].gpu else None,
            "gpu_watts": sum(gpu.watts for gpu in gpus) / len(gpus) if gpus else None,
            "nics": {seen.host: seen.nics for seen in by_rank if seen.nics},
            "machines": worst_of_hosts([seen.machine for seen in by_rank]),
        }
