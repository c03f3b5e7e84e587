"""Print a run's log: a header, lines for steps, and a summary."""

import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from megabench.config import ResolvedConfig
from megabench.data.checks import SYNTHETIC
from megabench.metrics import BUILT_IN_METRICS
from megabench.parallel.layout import Layout
from megabench.parallel.placement import number_ranges
from megabench.record import RunRecord, SaveTimes
from megabench.specs.all_settings import labels
from megabench.train.callbacks.callback import Callback, Step, TrainerState
from megabench.train.comm_preflight import Network, describe

_SECONDS_BETWEEN_LINES = 1.0  # with log_every=auto

# the metrics of every step in the order of the line, and how they are printed
_COLUMNS = {
    "train/loss": "loss {:.4f}",
    "train/grad_norm": "grad {:.3f}",
    "train/learning_rate": "lr {:.2e}",
    "throughput/step_seconds": "{:.3f} s",
    "throughput/tokens_per_second": "{:,.0f} tok/s",
    "throughput/tokens_per_second_per_device": None,
    "throughput/tflops_per_device": "{:.0f} TFLOP/s",
    "throughput/mfu": "{:.1%} MFU",
    "usage/peak_reserved_gib": None,  # printed on every device
    "usage/gpu_utilization": None,
}


class Console(Callback):
    """Prints the log of a run to standard output: every step, every N steps, or about one line per second."""

    def on_start(self, trainer: TrainerState) -> None:
        run = self._run = trainer.run
        self._seconds_so_far, self._num_steps_so_far, self._last_line = 0.0, 0, 0.0
        self._unprinted: Step | None = None
        self._of_callbacks: dict[str, float] = {}  # since the last line
        what = f"{run.model}, {run.shape.num_layers} layers, {run.shape.num_parameters / 1e6:,.1f} M parameters"
        print(f"{what} · {_engine(run)} · {run.layout} on {run.world_size} × {trainer.device_name}")
        source = trainer.source
        tokenizer = "" if run.data == SYNTHETIC else f" · tokenizer {source.tokenizer or 'not known'}"
        precision = f"{run.precision} (emulated in fp32 on CPU)" if run.emulates_fp8 else run.precision
        print(
            f"{precision}, gradients {run.grad_dtype} · sequence {run.seq_length}, micro-batch {run.micro_batch}, "
            f"global batch {run.global_batch} · {run.optimizer}, lr {run.lr:g} · data {source.name}{tokenizer}"
        )
        for warning in source.warnings:
            print(f"WARNING: {warning}")
        sys.stdout.flush()

    def on_network(self, trainer: TrainerState, network: Network) -> None:
        """Print the hosts of the ranks, the transports of the process groups, and the warnings about them."""
        placement = trainer.placement
        topology = placement.topology
        emulated = " (emulated)" if topology.emulated else ""
        if len(topology.hosts) > 1:
            hosts = zip(topology.hosts, topology.ranks_by_host, strict=True)
            print(f"hosts{emulated}: " + " · ".join(f"{host.name}: {number_ranges(ranks)}" for host, ranks in hosts))
        if placement.launcher_ranks != tuple(range(topology.world_size)):
            order = number_ranges(placement.launcher_ranks)
            print(f"placement {placement.policy}: the launcher's ranks in the order {order}")
        if network.groups:
            print("groups: " + " · ".join(describe(network.groups)))
        if network.bandwidth:
            link = network.bandwidth
            print(
                f"bandwidth between hosts{emulated}: all-gather {link.all_gather_gb_per_s:.3g} GB/s, send/recv of one "
                f"pair {link.send_recv_gb_per_s:.3g} GB/s, one ring per local rank {link.all_rings_gb_per_s:.3g} GB/s"
            )
        for warning in (*placement.warnings, *network.warnings):
            print(f"WARNING: {warning}")
        sys.stdout.flush()

    def on_ready(self, trainer: TrainerState) -> None:
        """Print the checkpoint from which the run resumes, and how long loading took."""
        load, training = trainer.load, trainer.resume.training
        if load and training:
            print(
                f"resumed from {load.folder} after {training.step} steps · saved with {Layout(**training.layout)} "
                f"· {load.num_bytes / 1e9:.3g} GB, checked in {load.check_seconds:.1f} s, loaded in "
                f"{load.load_seconds:.1f} s ({load.gb_per_second:.3g} GB/s)",
                flush=True,
            )

    def on_note(self, text: str) -> None:
        print(text, flush=True)

    def on_save(self, save: SaveTimes) -> None:
        print(
            f"saved step {save.step}: {save.num_bytes / 1e9:.3g} GB in {save.seconds:.2f} s "
            f"({save.gb_per_second:.3g} GB/s), training waited {save.stall_seconds:.3f} s",
            flush=True,
        )

    def on_metrics(self, step: Step) -> None:
        self._seconds_so_far += step.seconds
        self._num_steps_so_far += 1
        self._of_callbacks |= {tag: value for tag, value in step.metrics.items() if tag not in BUILT_IN_METRICS}
        self._unprinted = step
        if self._is_due(step):
            self._print(step)

    def on_training_end(self) -> None:
        if self._unprinted:
            self._print(self._unprinted)

    def _print(self, step: Step) -> None:
        self._last_line = time.monotonic()
        print("  ".join(self._parts(step)), flush=True)
        self._unprinted, self._of_callbacks = None, {}

    def _is_due(self, step: Step) -> bool:
        """Return whether to print the step. The first, the last and skipped steps are always printed."""
        if step.number == self._run.steps or self._num_steps_so_far == 1 or step.result.skipped:
            return True
        if self._run.log_every == "auto":
            return time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES
        return step.number % self._run.log_every == 0

    def _parts(self, step: Step) -> Iterator[str]:
        number, steps, metrics = step.number, self._run.steps, dict(step.metrics)
        if "throughput/mfu" not in metrics:
            metrics.pop("throughput/tflops_per_device", None)  # TFLOP/s say little if the device's peak is unknown
        yield f"step {number:{len(str(steps))}}/{steps} {number / steps:4.0%}"
        for tag, text in _COLUMNS.items():
            if (value := metrics.get(tag)) is not None and text:
                yield text.format(value)
        for tag, value in self._of_callbacks.items():
            yield f"{tag} {value:.4g}"
        yield f"{step.peak_memory_gib:.2f} GiB"
        yield f"ETA {timedelta(seconds=round(self._seconds_so_far / self._num_steps_so_far * (steps - number)))}"
        if not step.is_timed:
            yield "warm-up"
        if step.result.skipped:
            yield "SKIPPED: gradients not finite, weights not updated"

    def on_end(self, record: RunRecord, path: Path | None) -> None:
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
        if path:
            line += f" · {path}"
        print(line, flush=True)


def _engine(run: ResolvedConfig) -> str:
    """Return the engine with its mode and its non-default options."""
    options = dict(run.options)
    file = options.pop("deepspeed_config", None)
    mode = run.spec.mode(run.options)
    parts = [f"{run.engine} {mode}" if mode else run.engine, *labels(options)]
    return ", ".join([*parts, f"--deepspeed-config {file}"] if file else parts)
