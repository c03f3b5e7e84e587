"""Convert text into a token file that ranks map into memory: `megabench preprocess TEXT... --out PREFIX`."""

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from megabench.data import DataError
from megabench.data.text import TextPiece, check_text_file, read_text
from megabench.data.token_file import TokenFacts, beside, open_token_file, scan, write_facts
from megabench.data.tokenizer import (
    BYTES,
    check_end_of_document,
    default_tokenizer,
    open_tokenizer,
    token_dtype,
    tokenize,
)
from megabench.models.find import find_model
from megabench.runtime.process import collect_garbage, exit_on_sigterm

PIECES_PER_TASK = 16
tokenizer_of = cache(open_tokenizer)  # each process opens the tokenizer once

app = typer.Typer(add_completion=False, rich_markup_mode=None)


class Tokenized(NamedTuple):
    """The tokens of a piece of text, whether the piece ends a document, and its size in bytes."""

    tokens: NDArray[Any]
    ends_document: bool
    input_bytes: float


@app.command()
def preprocess(
    inputs: Annotated[list[Path], typer.Argument(metavar="INPUT...", help=".txt, .jsonl or .parquet files.")],
    out: Annotated[Path, typer.Option(metavar="PREFIX", help="Output: PREFIX.bin, PREFIX.idx and PREFIX.json.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="bytes|DIR", help="bytes, or a Hugging Face tokenizer.  [default: that of --model, or bytes]"
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="DIR", help="Use the tokenizer in the directory of this model.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that tokenize.")] = os.cpu_count() or 1,
    append_eod: Annotated[bool, typer.Option(help="Append the end-of-document token to each document.")] = True,
) -> None:
    """Tokenize text into a token file, for training with `--data PREFIX`."""
    exit_on_sigterm()
    collect_garbage()
    started = time.perf_counter()
    if tokenizer is None and model is not None:
        find_model(model)
        tokenizer = default_tokenizer(model)
    num_documents, facts = write_tokens(inputs, out, tokenizer or BYTES, workers, append_eod)
    seconds = time.perf_counter() - started
    print(
        f"{out}.bin and .idx: {num_documents:,} documents, {facts.num_tokens:,} tokens, "
        f"{beside(out, '.bin').stat().st_size:,} bytes in {seconds:.1f} s, tokenizer {facts.tokenizer}"
    )


def write_tokens(
    inputs: list[Path], prefix: Path, tokenizer_name: str, workers: int, append_eod: bool
) -> tuple[int, TokenFacts]:
    """Write the token file `prefix` atomically. Return the number of documents and facts about the tokens."""
    outputs = [beside(prefix, suffix) for suffix in (".bin", ".json", ".idx")]
    if folders := [path for path in outputs if path.is_dir()]:
        raise DataError(f"cannot write {folders[0]}, which is a directory; remove it, or give another prefix")
    for path in inputs:
        check_text_file(path)
    tokenizer = tokenizer_of(tokenizer_name)
    if append_eod:
        check_end_of_document(tokenizer, "add --no-append-eod")
    if tokenizer.warning:
        print(f"WARNING: {tokenizer.warning}", file=sys.stderr)
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{prefix.name}-", dir=prefix.parent) as folder:
            partial_prefix = Path(folder) / "tokens"
            num_documents = _write(
                partial_prefix,
                _with_progress(_tokenized(inputs, tokenizer_name, workers, append_eod), inputs),
                token_dtype(tokenizer.vocab_size),
            )
            facts = scan(open_token_file(partial_prefix)).model_copy(update={"tokenizer": tokenizer.used})
            write_facts(partial_prefix, facts)
            beside(prefix, ".idx").unlink(missing_ok=True)
            for path in outputs:  # the index is written last, because a token file without its index is ignored
                beside(partial_prefix, path.suffix).replace(path)
    except OSError as error:
        raise DataError(f"cannot write {prefix}.bin: {error.strerror}; give a prefix in a writable directory") from None
    return num_documents, facts


def _tokenized(inputs: list[Path], tokenizer_name: str, workers: int, append_eod: bool) -> Iterator[Tokenized]:
    """Yield the tokens of every piece of the inputs, in order."""
    pieces = chain.from_iterable(map(read_text, inputs))
    work = partial(_tokenize, tokenizer_name, append_eod)
    # byte tokens are only copied, which is cheaper than sending them to a process
    if workers == 1 or tokenizer_name == BYTES:
        yield from map(work, pieces)
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from pool.imap(work, pieces, chunksize=PIECES_PER_TASK)


def _tokenize(tokenizer_name: str, append_eod: bool, piece: TextPiece) -> Tokenized:
    tokens = tokenize(piece, tokenizer_of(tokenizer_name), append_eod)
    return Tokenized(tokens, piece.ends_document, piece.input_bytes)


def _with_progress(tokenized: Iterable[Tokenized], inputs: list[Path]) -> Iterator[Tokenized]:
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("tokenizing", total=sum(path.stat().st_size for path in inputs))
        for piece in tokenized:
            yield piece
            progress.advance(task, piece.input_bytes)


def _write(prefix: Path, tokenized: Iterable[Tokenized], dtype: type[np.integer[Any]]) -> int:
    """Write PREFIX.bin and .idx with each piece as a sequence of its document. Return the number of documents."""
    # imported late, because importing torch takes seconds, and a wrong path must be refused at once
    from megabench.runtime import megatron_cpu

    megatron_cpu.install()
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(beside(prefix, ".bin")), dtype=dtype)
    num_documents = 0
    for piece in tokenized:
        builder.add_item(torch.from_numpy(piece.tokens))
        if piece.ends_document:
            builder.end_document()
            num_documents += 1
    builder.finalize(str(beside(prefix, ".idx")))
    return num_documents
