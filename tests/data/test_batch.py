"""Which rank reads what: the same sequences a step under any layout."""

from typing import Any

import numpy as np
import pytest
import torch

from megabench.data import DataError
from megabench.data.batch import Batch, micro_batches
from megabench.data.source import Corpus, Synthetic, open_source, window_order


def step_sequences(config, source, step):
    """All sequences of a step over ranks and micro-batches, as a sorted list of tuples."""
    batches = [
        batch for rank in range(config.layout.data_parallel) for batch in micro_batches(source, config, rank, step)
    ]
    return sorted(tuple(row.tolist()) for batch in batches for row in batch.tokens)


def test_inputs_and_labels_are_one_token_apart():
    tokens = torch.arange(10).reshape(2, 5)
    batch = Batch(tokens)
    assert batch.inputs.tolist() == [[0, 1, 2, 3], [5, 6, 7, 8]]
    assert batch.labels.tolist() == [[1, 2, 3, 4], [6, 7, 8, 9]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory is for GPUs")
def test_a_batch_is_copied_without_waiting_for_the_gpu():
    tokens = torch.arange(4 * 4097).reshape(4, 4097)
    torch.zeros(1, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        there = Batch(tokens).to(torch.device("cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert there.tokens.is_cuda and torch.equal(there.tokens.cpu(), tokens)


@pytest.mark.parametrize("step", [0, 3])
def test_the_sequences_of_a_step_do_not_depend_on_the_layout(resolve, step):
    reference = resolve(1, data="synthetic")
    source = open_source(reference)
    first = step * reference.global_batch
    expected = sorted(tuple(source.sequence(first + i).tolist()) for i in range(reference.global_batch))
    assert len(set(expected)) == reference.global_batch
    layouts: list[tuple[int, dict[str, Any]]] = [
        (1, {}),
        (1, {"micro_batch": 4}),
        (2, {"micro_batch": 2}),
        (8, {}),
        (4, {"tp": 2, "micro_batch": 2}),
        (8, {"tp": 2, "pp": 2, "micro_batch": 4}),
        (4, {"cp": 2}),
        (2, {"engine": "deepspeed", "micro_batch": 4}),
    ]
    for world_size, fields in layouts:
        config = resolve(world_size, data="synthetic", **fields)
        assert step_sequences(config, open_source(config), step) == expected, config.layout


def test_steps_follow_one_another_without_gap_or_overlap(resolve):
    class Numbered(Synthetic):
        def sequence(self, index):
            return torch.full((self.seq_length + 1,), index)

    config = resolve(2, micro_batch=2)
    source = Numbered(vocab_size=512, seq_length=16, seed=0)
    seen = [
        batch.tokens[:, 0].tolist()
        for step in (0, 1)
        for rank in (0, 1)
        for batch in micro_batches(source, config, rank, step)
    ]
    # [step 0: rank 0, rank 1; step 1: rank 0, rank 1], two micro-batches of two sequences each
    assert seen == [[0, 1], [4, 5], [2, 3], [6, 7], [8, 9], [12, 13], [10, 11], [14, 15]]


@pytest.mark.parametrize("token", [-1, 512])
def test_a_token_outside_the_vocabulary_stops_the_batch(resolve, token):
    """The check at the start cannot see a file that another process changes during training."""
    tokens = np.full(16 * 40 + 1, 7, dtype=np.int64)
    corpus = Corpus("tokens", tokens, "", seq_length=16, seed=1)
    config = resolve(1, data="synthetic")
    micro_batches(corpus, config, 0, 0)
    start = int(window_order(1, 0, 40)[5]) * 16
    tokens[start + 3] = token
    with pytest.raises(
        DataError, match=rf"contains token {token} in tokens {start:,} to {start + 16:,}, but llama-tiny"
    ):
        micro_batches(corpus, config, 0, 0)
    micro_batches(corpus, config, 0, 1)


def test_batches_have_the_promised_shape_and_dtype(resolve):
    config = resolve(2, micro_batch=2)
    batches = micro_batches(open_source(resolve(2, micro_batch=2, data="synthetic")), config, 1, 0)
    assert len(batches) == config.num_micro_batches == 2
    for batch in batches:
        assert batch.tokens.shape == (2, 17)
        assert batch.tokens.dtype == torch.int64
