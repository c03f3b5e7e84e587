"""What a run prints: a head, a line a step, a last line."""

import sys
from datetime import timedelta
from pathlib import Path

from megabench.checkpoint.manifest import TrainingEntry
from megabench.config import ResolvedConfig
from megabench.engines.base import StepResult
from megabench.metrics import throughput
from megabench.parallel.layout import Layout
from megabench.parallel.placement import Placement, number_ranges
from megabench.record import LoadTimes, RunRecord, SaveTimes
from megabench.train.network import Network, describe


class Console:
    """The log of a run on standard output."""

    def __init__(self, run: ResolvedConfig, device_name: str, peak_tflops: float | None) -> None:
        self.run = run
        self.device_name = device_name
        self.peak_tflops = peak_tflops
        self.seconds_so_far = 0.0
        self.num_steps_so_far = 0

    def note(self, text: str) -> None:
        """A line of its own."""
        print(text, flush=True)

    def resumed(self, load: LoadTimes, training: TrainingEntry) -> None:
        """Where the run goes on, and what it took to get there."""
        layout = Layout(**training.layout)
        print(
            f"resumed from {load.folder}, saved under {layout}: {training.step} steps are done · "
            f"{load.num_bytes / 1e9:.3g} GB, checked in {load.check_seconds:.1f} s, loaded in "
            f"{load.load_seconds:.1f} s ({load.gb_per_second:.3g} GB/s)",
            flush=True,
        )

    def saved(self, save: SaveTimes) -> None:
        """A checkpoint that is good now."""
        print(
            f"saved step {save.step}: {save.num_bytes / 1e9:.3g} GB in {save.seconds:.2f} s "
            f"({save.gb_per_second:.3g} GB/s), training waited {save.stall_seconds:.3f} s",
            flush=True,
        )

    def head(self, data_name: str) -> None:
        run = self.run
        what = f"{run.model}, {run.shape.num_layers} layers, {run.shape.num_parameters / 1e6:,.1f} M parameters"
        how = " ".join(filter(None, (run.engine, run.spec.mode(run.options))))
        print(f"{what} · {how} · {run.layout} on {run.world_size} × {self.device_name}")
        print(
            f"{run.precision}, gradients {run.grad_dtype} · sequence {run.seq_length}, micro-batch {run.micro_batch}, "
            f"global batch {run.global_batch} · {run.optimizer}, lr {run.lr:g} · data {data_name}",
            flush=True,
        )

    def network(self, placement: Placement, network: Network) -> None:
        """Where the ranks sit, what their groups ride on, and, loudly, what is wrong with that."""
        topology = placement.topology
        emulated = " (emulated)" if topology.emulated else ""
        if len(topology.hosts) > 1:
            hosts = zip(topology.hosts, topology.ranks_by_host, strict=True)
            print(f"hosts{emulated}: " + " · ".join(f"{host.name}: {number_ranges(ranks)}" for host, ranks in hosts))
        if placement.launcher_ranks != tuple(range(topology.world_size)):
            print(f"placement {placement.policy}: the launcher's ranks {number_ranges(placement.launcher_ranks)}")
        if network.groups:
            print("groups: " + " · ".join(describe(network.groups)))
        if network.bandwidth:
            link = network.bandwidth
            print(
                f"between hosts{emulated}: all-gather {link.all_gather_gb_per_s:.3g} GB/s, one rank to another "
                f"{link.send_recv_gb_per_s:.3g} GB/s, each of a host in its own ring {link.all_rings_gb_per_s:.3g} GB/s"
            )
        for warning in (*placement.warnings, *network.warnings):
            print(f"WARNING: {warning}")
        sys.stdout.flush()

    def step(self, step: int, result: StepResult, learning_rate: float, seconds: float, peak_memory_gib: float) -> None:
        """Prints the line of step `step`, counted from 1, that took `seconds`."""
        run = self.run
        self.seconds_so_far += seconds
        self.num_steps_so_far += 1
        eta = timedelta(seconds=round(self.seconds_so_far / self.num_steps_so_far * (run.steps - step)))
        achieved = throughput([seconds], run.shape, run.seq_length, run.global_batch, run.world_size)
        assert achieved is not None
        width = len(str(run.steps))
        parts = [
            f"step {step:{width}}/{run.steps} {step / run.steps:4.0%}",
            f"loss {result.loss:.4f}",
            f"grad {result.grad_norm:.3f}",
            f"lr {learning_rate:.2e}",
            f"{seconds:.3f} s",
            f"{achieved.tokens_per_second:,.0f} tok/s",
        ]
        if self.peak_tflops is not None:
            parts.append(f"{achieved.tflops_per_device_causal:.0f} TFLOP/s")
            parts.append(f"{achieved.mfu(self.peak_tflops):.1%} MFU")
        parts.append(f"{peak_memory_gib:.2f} GiB")
        parts.append(f"ETA {eta}")
        if self.num_steps_so_far <= run.warmup_steps:
            parts.append("warm-up")
        if result.skipped:
            parts.append("SKIPPED: gradients not finite, weights not updated")
        print("  ".join(parts), flush=True)

    def last(self, record: RunRecord, record_path: Path | None) -> None:
        if profile := record.profile:
            shares = sorted(profile.seconds.items(), key=lambda item: -item[1])
            parts = [f"{part} {seconds / sum(profile.seconds.values()):.0%}" for part, seconds in shares]
            print(f"a profiled step of {profile.step_seconds:.3f} s: " + " · ".join(parts))
        ends = record.losses[0], record.losses[-1]
        first, last = ("not finite" if loss is None else f"{loss:.4f}" for loss in ends)
        line = f"loss {first} -> {last}"
        if record.step_seconds and record.tokens_per_second:
            line += f" · {record.step_seconds.median:.3f} s a step (median of {len(record.step_seconds.all)})"
            line += f" · {record.tokens_per_second:,.0f} tok/s"
        else:
            ran = len(record.losses)
            line += f" · no throughput: {ran} steps are no more than the {record.warmup_steps} of warm-up"
        if record.stopped_by:
            line += f" · stopped by {record.stopped_by}, --load goes on"
        if record_path:
            line += f" · {record_path}"
        print(line, flush=True)
