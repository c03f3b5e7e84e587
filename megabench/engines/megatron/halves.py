"""The two halves of a micro-batch in turns: one computes while the other waits for tensor parallelism's collectives.

As in DeepSpeed-Domino (arXiv 2409.15241). Each half has a stream of its own, in which autograd runs its backward pass,
too, and a communicator of its own, for the collectives of one communicator run one after the other. From a
column-parallel product to the row-parallel one that follows, and back again, is a turn. The halves take turns, or they
would end up computing, and then communicating, at the same time; their weight gradients, which go to the same place,
are kept in order by it.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.distributed import ProcessGroup

_end_of_turn: torch.cuda.Event | None = None


def take_turn() -> None:
    """Has this half's stream wait until the other's turn is over."""
    if _end_of_turn:
        torch.cuda.current_stream().wait_event(_end_of_turn)


def end_turn() -> None:
    """The other half may compute after what this one has queued so far."""
    global _end_of_turn
    if torch.cuda.is_available():
        _end_of_turn = torch.cuda.current_stream().record_event()


@dataclass
class Halves:
    """What one layer hands the next: [S/tp, B/2, H] of either half, each in its own stream."""

    parts: list[Tensor]


class HalvedLayer(TransformerLayer):
    """A layer that runs on either half of the micro-batch; the `is_last` of a chunk puts them together again."""

    def __init__(self, *args: Any, is_last: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_last = is_last
        self.groups = [self.tp_group, _twin(self.tp_group)]
        attention, mlp = self.self_attention, self.mlp
        self.linears = (attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2)

    def forward(self, hidden_states: Tensor | Halves, **kwargs: Any) -> tuple[Tensor | Halves, None]:
        self._await_weights()
        parts = _split(hidden_states) if isinstance(hidden_states, Tensor) else hidden_states.parts
        for turn in (lambda part: self._forward_attention(part, **kwargs)[0], self._forward_mlp):
            for number, (stream, group) in enumerate(zip(_streams(), self.groups, strict=True)):
                for linear in self.linears:
                    linear.tp_group = group
                with _on(stream):
                    parts[number] = turn(parts[number])
        return _join(parts) if self.is_last else Halves(parts), None

    def _await_weights(self) -> None:
        """Has this stream, and so those of both halves, wait for weights that are still being gathered.

        megatron-core's hooks of the modules wait but once, which would be in the first half's stream alone.
        """
        for module in self.modules():
            for hook in module._forward_pre_hooks.values():
                hook(module, ())


def _split(whole: Tensor) -> list[Tensor]:
    """[S/tp, B, H] -> [S/tp, B/2, H] of either half."""
    parts = []
    for part, stream in zip(whole.chunk(2, dim=1), _streams(), strict=True):
        with _on(stream):
            parts.append(part.contiguous())
            if stream:
                part.record_stream(stream)
    return parts


def _join(parts: list[Tensor]) -> Tensor:
    """[S/tp, B/2, H] of either half -> [S/tp, B, H]."""
    for part, stream in zip(parts, _streams(), strict=True):
        if stream:
            main = torch.cuda.current_stream()
            main.wait_stream(stream)
            part.record_stream(main)
    return torch.cat(parts, dim=1)


def _on(stream: torch.cuda.Stream | None) -> torch.cuda.StreamContext:
    """Runs in `stream`, after what is in the current one."""
    if stream:
        stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)


@cache
def _streams() -> list[torch.cuda.Stream | None]:
    """One for each half; on CPU, where everything is in order, none."""
    return [torch.cuda.Stream(), torch.cuda.Stream()] if torch.cuda.is_available() else [None, None]


@cache
def _twin(group: ProcessGroup) -> ProcessGroup:
    """Another communicator of the same ranks; all ranks of the world must call this, for NCCL splits the world's."""
    return dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)
