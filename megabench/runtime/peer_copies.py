"""Count the bytes that this process copies into the memory of other GPUs without torch.distributed."""

from collections import Counter

_sent: Counter[tuple[int, ...]] = Counter()


def count_copy(ranks: tuple[int, ...], num_bytes: int) -> None:
    """Count a copy to one of the `ranks` of a group."""
    _sent[ranks] += num_bytes


def copied_bytes() -> Counter[tuple[int, ...]]:
    """Return the bytes that this process has copied so far, by the ranks of the group."""
    return _sent.copy()
