"""Convert checkpoints from and to Hugging Face format, and verify that the logits are equal.

megabench convert import --hf DIR --out CKPT [--tp 2 --pp 2]
megabench convert export --ckpt CKPT --out DIR
megabench convert verify --hf DIR [--ckpt CKPT] [--tp 2 --pp 2]
megabench convert inspect CKPT
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from megabench.cli.suggestions import SuggestingGroup
from megabench.runtime.launcher import launcher_rank
from megabench.runtime.process import exit_on_sigterm

if TYPE_CHECKING:
    from megabench.checkpoint.weights_only import CheckpointWeights
    from megabench.convert.importing import Converted
    from megabench.convert.verifying import Comparison
    from megabench.models.weights import Weights

app = typer.Typer(cls=SuggestingGroup, add_completion=False, no_args_is_help=True, rich_markup_mode=None)

Hf = Annotated[Path, typer.Option(metavar="DIR", help="Directory of a Hugging Face model.")]
Tp = Annotated[int, typer.Option(min=1, help="Tensor-parallel size of the layout to verify.")]
Pp = Annotated[int, typer.Option(min=1, help="Pipeline-parallel size of the layout to verify.")]
Verify = Annotated[bool, typer.Option("--verify/--no-verify", help="Compare logits with transformers.")]


@app.callback()
def about() -> None:
    """Convert checkpoints from and to Hugging Face format, and verify that the logits are equal. Runs on CPU.

    The exit status is 1 if models are not equal, and 2 for invalid input.
    """
    exit_on_sigterm()


@app.command("import")
def import_command(
    hf: Hf,
    out: Annotated[Path, typer.Option(metavar="CKPT", help="Output checkpoint, for megabench train --model.")],
    tp: Tp = 1,
    pp: Pp = 1,
    verify: Verify = True,
) -> None:
    """Create a checkpoint from a Hugging Face model.

    Any layout can load the checkpoint, for all values of --tp and --pp.
    """
    from megabench.convert import ConvertError
    from megabench.convert.importing import check_new, import_model, owned_blocks
    from megabench.convert.verifying import comparison_run, num_parts, sample_tokens
    from megabench.hardware.host_memory import PeakMemoryMeter
    from megabench.models.model_directory import HuggingFaceWeights
    from megabench.runtime import ranks

    source = HuggingFaceWeights(hf)
    if not source.shape.table.has_parallel_blocks:
        raise ConvertError(
            f"{source.shape.why_no_blocks}, and it needs no checkpoint; train it with megabench train --model {hf}"
        )
    check_new(out)
    run = comparison_run(str(hf), tp, pp)
    with ranks.joined(tp * pp) as rank:
        tokens = sample_tokens(hf, source.shape) if verify else None
        memory = PeakMemoryMeter()
        num_steps = len(owned_blocks(source.shape, run.layout, rank)) + (num_parts(run) if verify else 0)
        with _progress(num_steps) as advance:
            done = import_model(source, out, run, tokens, advance)
        _print_result(done)
        peak = ranks.largest_of_all(memory.close())
        _print_first(f"peak memory of a process, without its imports: {peak / 2**30:.2f} GiB")


@app.command("export")
def export_command(
    ckpt: Annotated[
        Path,
        typer.Option(metavar="CKPT", help="A checkpoint, or a --save directory with checkpoints."),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Output directory in Hugging Face format.")],
    verify: Verify = True,
) -> None:
    """Export a checkpoint as a Hugging Face directory, in the training dtype."""
    from megabench.checkpoint.weights_only import open_weights
    from megabench.convert.exporting import export_dtype, export_model
    from megabench.convert.importing import check_new
    from megabench.convert.proof import proof_of
    from megabench.models.find import ASSETS, find_model
    from megabench.runtime import ranks

    check_new(out)
    weights = open_weights(ckpt)
    shape = find_model(str(weights.folder))
    proof = proof_of(weights.folder, shape, weights.folder / ASSETS) if verify else None
    with ranks.joined(1), _progress(len(weights.names) + (proof.num_parts if proof else 0)) as advance:
        prove = proof.compare if proof else None
        _print_result(export_model(weights, out, shape, export_dtype(weights), prove, advance))


@app.command("verify")
def verify_command(
    hf: Hf,
    ckpt: Annotated[Path | None, typer.Option(metavar="CKPT", help="A checkpoint [default: DIR itself].")] = None,
    tp: Tp = 1,
    pp: Pp = 1,
) -> None:
    """Compare the logits of transformers on DIR with those of a layout's tensor-parallel blocks on CKPT or DIR.

    A model without tensor-parallel blocks is compared with transformers on CKPT.
    """
    from megabench.checkpoint.weights_only import open_weights
    from megabench.convert import ConvertError
    from megabench.convert.exporting import Rounded, export_dtype
    from megabench.convert.importing import check_equal, check_same_model
    from megabench.convert.proof import proof_of
    from megabench.models.find import find_model
    from megabench.models.model_directory import HuggingFaceWeights
    from megabench.runtime import ranks

    source = HuggingFaceWeights(hf)
    weights: Weights = source
    shape = source.shape
    if ckpt:
        checkpoint = open_weights(ckpt)
        check_same_model(source, checkpoint)
        weights, shape = Rounded(checkpoint, export_dtype(checkpoint)), find_model(str(checkpoint.folder))
    elif not source.shape.table.has_parallel_blocks:
        raise ConvertError(
            f"{source.shape.why_no_blocks}: there are no tensor-parallel blocks to compare with; add --ckpt CKPT"
        )
    proof = proof_of(hf, shape, hf, tp, pp)
    with ranks.joined(tp * pp):
        with _progress(proof.num_parts) as advance:
            comparison = proof.compare(source, weights, advance)
        _print_comparison(comparison)
        check_equal(comparison, f"{ckpt or hf} under tp={tp}, pp={pp} computes other logits than transformers")


@app.command("inspect")
def inspect_command(ckpt: Annotated[Path, typer.Argument(metavar="CKPT")]) -> None:
    """Show the content of a checkpoint, and check its files."""
    from megabench.checkpoint.weights_only import open_weights

    Console().print(_description(open_weights(ckpt)))


def _description(weights: "CheckpointWeights") -> Table:
    """Return a table with the model of a checkpoint, its sizes, and the run that wrote the checkpoint."""
    from megabench.models.find import ASSETS

    manifest = weights.manifest
    table = Table(title=str(weights.folder), show_header=False, title_justify="left")
    shape = manifest.model.shape
    table.add_row("model", f"{manifest.model.name} ({shape['family']})")
    table.add_row(
        "layers, hidden, heads, KV heads", _words(shape, "num_layers", "hidden_size", "num_heads", "num_kv_heads")
    )
    table.add_row("FFN, vocabulary", _words(shape, "ffn_size", "vocab_size"))
    table.add_row("tied embeddings", "yes" if shape["tied_embeddings"] else "no")
    for kind, number in manifest.num_elements.items():
        table.add_row(f"{kind}, elements", f"{number:,}")
    table.add_row("dtypes of the weights", ", ".join(sorted({str(weights.dtype(name)) for name in weights.names})))
    table.add_row("files", f"{len(manifest.files)}, {manifest.num_bytes / 1e9:.3f} GB, all checksums match")
    prefix = f"{ASSETS}/"
    beside = [file.name.removeprefix(prefix) for file in manifest.files if file.name.startswith(prefix)]
    table.add_row("model files", ", ".join(beside) or "none")
    if training := manifest.training:
        sizes = " ".join(f"{axis}{size}" for axis, size in training.layout.items() if size)
        table.add_row("written by", f"a run of the {training.engine} engine, {sizes}, {training.world_size} ranks")
        table.add_row("step", f"{training.step} ({training.optimizer.name}, {training.optimizer.step} updates)")
        table.add_row("data", f"{training.data.name}, {training.data.next_sequence:,} sequences read")
    else:
        table.add_row("written by", "an import (weights only)")
    table.add_row("versions", ", ".join(f"{name} {version}" for name, version in sorted(manifest.versions.items())))
    return table


def _words(shape: dict[str, object], *fields: str) -> str:
    return ", ".join(f"{shape[field]:,}" for field in fields)


def _print_result(done: "Converted") -> None:
    gigabytes = done.num_bytes / 1e9
    _print_first(
        f"{done.folder}: {gigabytes:.3f} GB in {done.num_files} files, written in {done.write_seconds:.1f} s "
        f"({gigabytes / done.write_seconds:.2f} GB/s), bitwise equal to the source"
    )
    if done.comparison:
        _print_comparison(done.comparison)
    else:
        _print_first("logits were not compared (--no-verify)")
    for note in done.notes:
        _print_first(f"note: {note}")


def _print_comparison(comparison: "Comparison") -> None:
    verdict = "equal" if comparison.is_equal else "NOT EQUAL"
    _print_first(
        f"{verdict}: over {comparison.num_tokens} tokens in fp32, logits differ by at most "
        f"{comparison.max_difference:.1e} (largest logit {comparison.max_logit:.3g}), the KL divergence is at most "
        f"{comparison.kl:.1e} nats, and both predict the same token at {comparison.agreement:.2%} of the positions"
    )


def _is_first() -> bool:
    return launcher_rank() in (None, 0)


def _print_first(text: str) -> None:
    """Print on the first rank only."""
    if _is_first():
        print(text, flush=True)


@contextmanager
def _progress(num_steps: int) -> Iterator[Callable[[str], None]]:
    """Show a progress bar on the first rank's terminal. Yield a function that advances the bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not _is_first()) as progress:
        task = progress.add_task("starting", total=num_steps)
        yield lambda what: progress.update(task, description=what, advance=1)
