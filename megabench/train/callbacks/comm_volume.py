"""Count the bytes that a training step of any engine sends: by torch.distributed's operations and by copy engines."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megabench.parallel.layout import Layout, differing_axes
from megabench.runtime.peer_copies import copied_bytes
from megabench.train.callbacks.callback import Callback

# For each collective: the position of an argument, and the bytes that each of n ranks sends with a ring algorithm as a
# multiple of the argument's size. Source: the bus bandwidth factors of NCCL tests,
# https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
_Share = Callable[[int], float]
_ALL_REDUCE: _Share = lambda n: 2 * (n - 1) / n  # noqa: E731
_TO_OTHERS: _Share = lambda n: n - 1.0  # noqa: E731
_PART: _Share = lambda n: (n - 1) / n  # noqa: E731
_ONCE: _Share = lambda n: 1.0  # noqa: E731
_SENT: dict[str, tuple[int, _Share]] = {
    "allreduce_": (0, _ALL_REDUCE),
    "allreduce_coalesced_": (0, _ALL_REDUCE),
    "allgather_": (1, _TO_OTHERS),
    "_allgather_base_": (1, _TO_OTHERS),
    "allgather_into_tensor_coalesced_": (1, _TO_OTHERS),
    "reduce_scatter_": (0, _TO_OTHERS),
    "_reduce_scatter_base_": (0, _TO_OTHERS),
    "reduce_scatter_tensor_coalesced_": (0, _TO_OTHERS),
    "broadcast_": (0, _PART),
    "reduce_": (0, _PART),
    "alltoall_base_": (1, _PART),
    "alltoall_": (1, _PART),
    "send": (0, _ONCE),
}


class SentBytes(TorchDispatchMode):
    """While active, count the bytes this rank sends, by the parallel axes of the process group: "tp", "dp·cp"."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self._layout = layout
        self.sent: Counter[str] = Counter()

    def __enter__(self) -> Self:
        self._copied = copied_bytes()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for ranks, num_bytes in (copied_bytes() - self._copied).items():
            self.sent[differing_axes(self._layout, ranks)] += num_bytes

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep compiled functions compiled, which torch.compile otherwise disables for good when a mode is active.

        Communication inside compiled functions is not counted. The engines compile no communication.
        """
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if func.namespace == "c10d" and (rule := _SENT.get(name)):
            position, share = rule
            ranks = _ranks_of(args)
            self.sent[differing_axes(self._layout, ranks)] += round(_num_bytes(args[position]) * share(len(ranks)))
        return func(*args, **(kwargs or {}))


class CommVolume(Callback):
    """Counts the bytes that a rank sends in one step, by process group.

    Counting takes time, so the callback counts in the last warm-up step, or in no step if there is only one warm-up
    step.
    """

    def __init__(self, layout: Layout, first_step: int, warmup_steps: int) -> None:
        self._counted: SentBytes | None = None
        self._layout = layout
        self._step = first_step + warmup_steps - 1 if warmup_steps >= 2 else None

    def around_step(self, step: int) -> AbstractContextManager[Any]:
        if step != self._step:
            return nullcontext()
        self._counted = SentBytes(self._layout)
        return self._counted

    def local(self) -> Counter[str] | None:
        return self._counted.sent if self._counted else None

    def section(self, by_rank: Sequence[Counter[str] | None]) -> Mapping[str, Any]:
        """Return the bytes that a rank sent by axes, as the mean over all ranks."""
        counts = [count for count in by_rank if count is not None]
        total = sum(counts, Counter())
        mean = {axes: number / len(counts) for axes, number in sorted(total.items()) if axes != "none"}
        return {"wire_bytes": mean if counts else None}


def _ranks_of(args: Iterable[Any]) -> list[int]:
    """Return the ranks of the process group that an operation received as an argument."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.get_process_group_ranks(dist.ProcessGroup.unbox(argument))
    raise AssertionError("a collective without a process group")


def _num_bytes(argument: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(argument))


def _tensors(argument: Any) -> Iterable[Tensor]:
    """Yield the tensors of an argument, which may be a tensor, a list, or a list of lists."""
    if isinstance(argument, Tensor):
        yield argument
    elif isinstance(argument, list | tuple):
        for part in argument:
            yield from _tensors(part)
