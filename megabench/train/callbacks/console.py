"""Print a run's log: a header, one line per step, and a summary."""

import sys
from datetime import timedelta
from pathlib import Path

from megabench.config import ResolvedConfig
from megabench.data.checks import SYNTHETIC
from megabench.metrics import throughput
from megabench.parallel.layout import Layout
from megabench.parallel.placement import number_ranges
from megabench.record import RunRecord, SaveTimes
from megabench.specs.all_settings import labels
from megabench.train.callbacks.callback import Callback, Step, TrainerState
from megabench.train.comm_preflight import Network, describe


class Console(Callback):
    """Prints the log of a run to standard output."""

    def on_start(self, trainer: TrainerState) -> None:
        self._run, self._peak_tflops = trainer.run, trainer.peak_tflops
        self._seconds_so_far, self._num_steps_so_far = 0.0, 0
        run = self._run
        what = f"{run.model}, {run.shape.num_layers} layers, {run.shape.num_parameters / 1e6:,.1f} M parameters"
        print(f"{what} · {_engine(run)} · {run.layout} on {run.world_size} × {trainer.device_name}")
        source = trainer.source
        tokenizer = "" if run.data == SYNTHETIC else f" · tokenizer {source.tokenizer or 'not known'}"
        print(
            f"{run.precision}, gradients {run.grad_dtype} · sequence {run.seq_length}, micro-batch {run.micro_batch}, "
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

    def on_step_end(self, step: Step) -> None:
        run, number, result = self._run, step.number, step.result
        self._seconds_so_far += step.seconds
        self._num_steps_so_far += 1
        eta = timedelta(seconds=round(self._seconds_so_far / self._num_steps_so_far * (run.steps - number)))
        achieved = throughput([step.seconds], run.shape, run.seq_length, run.global_batch, run.world_size)
        assert achieved is not None
        width = len(str(run.steps))
        parts = [
            f"step {number:{width}}/{run.steps} {number / run.steps:4.0%}",
            f"loss {result.loss:.4f}",
            f"grad {result.grad_norm:.3f}",
            f"lr {step.learning_rate:.2e}",
            f"{step.seconds:.3f} s",
            f"{achieved.tokens_per_second:,.0f} tok/s",
        ]
        if self._peak_tflops is not None:
            parts.append(f"{achieved.tflops_per_device_causal:.0f} TFLOP/s")
            parts.append(f"{achieved.mfu(self._peak_tflops):.1%} MFU")
        parts.append(f"{step.peak_memory_gib:.2f} GiB")
        parts.append(f"ETA {eta}")
        if not step.is_timed:
            parts.append("warm-up")
        if result.skipped:
            parts.append("SKIPPED: gradients not finite, weights not updated")
        print("  ".join(parts), flush=True)

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
