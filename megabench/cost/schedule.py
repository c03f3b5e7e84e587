"""Simulate a pipeline's step as a timeline of events. Loads no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil

_MOST_EXACT = 2000  # the most forward passes, summed over all stages, for which the timeline is simulated exactly


@dataclass(frozen=True)
class Chunk:
    """Seconds of one model chunk and micro-batch."""

    forward: float
    backward: float


Chunks = Sequence[Chunk]  # the model chunks of a pipeline stage, in the order of the model


@dataclass(frozen=True)
class Timeline:
    """The end of each stage's last backward, and the seconds that each stage computed and was blocked by sending."""

    ends: tuple[float, ...]
    busy: tuple[float, ...]
    sending: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return max(self.ends)


# one operation of a stage: whether it is a forward, its chunk and its micro-batch
Operation = tuple[bool, int, int]


def order(stage: int, num_stages: int, chunks: int, num_micro_batches: int) -> list[Operation]:
    """Return the operations of a stage in order: warm-up forwards, alternating forwards and backwards, and the rest.

    1F1B and its interleaved form: arXiv 2104.04473, section 2.2, with megatron-core's number of warm-up forwards
    (schedules.py, get_pp_rank_microbatches).
    """
    total = num_micro_batches * chunks
    if chunks == 1:
        warm_up = min(num_stages - stage - 1, total)
    else:
        warm_up = min(2 * (num_stages - stage - 1) + (chunks - 1) * num_stages, total)
    forwards = [(True, *_chunk(number, num_stages, chunks)) for number in range(total)]
    backwards = []
    for number in range(total):
        chunk, micro_batch = _chunk(number, num_stages, chunks)
        backwards.append((False, chunks - 1 - chunk, micro_batch))
    turns = [operation for pair in zip(forwards[warm_up:], backwards, strict=False) for operation in pair]
    return forwards[:warm_up] + turns + backwards[total - warm_up :]


def _chunk(number: int, num_stages: int, chunks: int) -> tuple[int, int]:
    """Return the chunk and the micro-batch of the `number`-th forward.

    Each chunk processes P micro-batches before the next chunk.
    """
    if chunks == 1:
        return 0, number
    group, within = divmod(number, num_stages * chunks)
    chunk, place = divmod(within, num_stages)
    return chunk, group * num_stages + place


def simulate(stages: Sequence[Chunks], num_micro_batches: int, send: float, blocking: bool = True) -> Timeline:
    """Simulate the timeline of a step.

    `stages` contains the model chunks of each stage. All stages have equal numbers of chunks, which may take unequal
    times. `send` is the time to send a stage's output to the next stage, in either direction.

    A blocking sender does no other work during a send. The steady state repeats every P micro-batches, so a very long
    step is extrapolated from a shorter timeline. The extrapolation is exact for equal stages, and within a few percent
    for very unequal ones.
    """
    num_stages, chunks = len(stages), len(stages[0])
    rounds = max(3, ceil(8 / num_stages), _MOST_EXACT // (num_stages * num_stages * chunks))
    short = rounds * num_stages + num_micro_batches % num_stages
    longer = short + num_stages
    if num_micro_batches <= longer:
        return _simulate(stages, num_micro_batches, send, blocking)
    first = _simulate(stages, short, send, blocking)
    second = _simulate(stages, longer, send, blocking)
    times = (num_micro_batches - longer) // num_stages

    def drawn_out(a: tuple[float, ...], b: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(y + times * (y - x) for x, y in zip(a, b, strict=True))

    return Timeline(
        ends=drawn_out(first.ends, second.ends),
        busy=drawn_out(first.busy, second.busy),
        sending=drawn_out(first.sending, second.sending),
    )


def _simulate(stages: Sequence[Chunks], num_micro_batches: int, send: float, blocking: bool) -> Timeline:
    chunks = len(stages[0])
    last, size = len(stages) - 1, chunks * num_micro_batches
    # the duration of each forward and backward of a stage, by chunk and micro-batch
    forward_seconds = [[chunk.forward for chunk in stage for _ in range(num_micro_batches)] for stage in stages]
    backward_seconds = [[chunk.backward for chunk in stage for _ in range(num_micro_batches)] for stage in stages]
    # the time at which the next stage has received an output, by chunk and micro-batch; negative before
    forwards, backwards = ([[-1.0] * size for _ in stages] for _ in range(2))
    orders = [_places(stage, len(stages), chunks, num_micro_batches) for stage in range(len(stages))]
    clock, sending, position = [0.0] * len(stages), [0.0] * len(stages), [0] * len(stages)
    left = 2 * size * len(stages)
    while left:
        before = left
        for stage, operations in enumerate(orders):
            now, next_one = clock[stage], position[stage]
            while next_one < len(operations):
                is_forward, at = operations[next_one]
                leaves = last > 0
                if is_forward:
                    duration = forward_seconds[stage][at]
                    if stage:
                        ready = forwards[stage - 1][at]
                    else:
                        ready = forwards[last][at - num_micro_batches] if at >= num_micro_batches else 0.0
                    leaves = leaves and (stage < last or at < size - num_micro_batches)
                else:
                    duration = backward_seconds[stage][at]
                    if stage < last:
                        ready = backwards[stage + 1][at]
                    elif at < size - num_micro_batches:
                        ready = backwards[0][at + num_micro_batches]
                    else:
                        ready = forwards[last][at]
                    leaves = leaves and (stage > 0 or at >= num_micro_batches)
                if ready < 0:
                    break
                now = max(now, ready) + duration
                (forwards if is_forward else backwards)[stage][at] = now + send if leaves else now
                if leaves and blocking:
                    now += send
                    sending[stage] += send
                next_one += 1
            left -= next_one - position[stage]
            clock[stage], position[stage] = now, next_one
        assert left < before, "the schedule has a deadlock"
    busy = tuple(num_micro_batches * sum(chunk.forward + chunk.backward for chunk in stage) for stage in stages)
    return Timeline(tuple(clock), busy, tuple(sending))


@cache
def _places(stage: int, num_stages: int, chunks: int, num_micro_batches: int) -> list[tuple[bool, int]]:
    """Return `order` as pairs of `is_forward` and chunk · num_micro_batches + micro_batch."""
    operations = order(stage, num_stages, chunks, num_micro_batches)
    return [(is_forward, chunk * num_micro_batches + micro_batch) for is_forward, chunk, micro_batch in operations]


def shortest(stages: Sequence[Chunks], num_micro_batches: int, send: float, blocking: bool) -> float:
    """Return a lower bound of the step time in seconds.

    For equal stages, the bound is (P − 1)·(forward + backward)/v + m·(forward + backward), as in arXiv 2104.04473,
    section 2.2. Each stage waits for the first micro-batch, computes all micro-batches, and the first stage ends last.
    """
    num_stages, chunks = len(stages), len(stages[0])
    held = send if blocking and num_stages > 1 else 0.0
    best, before = 0.0, 0.0
    for stage, parts in enumerate(stages):
        # A stage sends the output of every chunk in forward and backward. The last stage does not send its last forward
        # output, and the first stage does not send its last backward output.
        leaving = 2 * chunks - (stage == num_stages - 1) - (stage == 0)
        work = num_micro_batches * (sum(chunk.forward + chunk.backward for chunk in parts) + leaving * held)
        # the send of the stage's last output is counted on the way back to the first stage
        best = max(best, before + work - held * (stage > 0))
        before += parts[0].forward + parts[0].backward + 2 * send
    return best


def two_streams(compute: float, communicate: float, times: int, interference: float) -> float:
    """Return the seconds of L layers when each layer's compute overlaps the next layer's communication.

    The formula is g + (L − 1)·max(c, g) + c for c seconds of compute and g seconds of communication. `interference`
    adds a fraction of the overlapped time, because communication uses SMs and memory bandwidth.
    """
    hidden = min(compute, communicate)
    return communicate + (times - 1) * (max(compute, communicate) + interference * hidden) + compute


def hidden_tail(work: float, communicate: float, pieces: int) -> float:
    """Return the seconds by which communication outlasts the work that overlaps it.

    Each of `pieces` is sent when its part of `work` is done.
    """
    if communicate == 0:
        return 0.0
    return max(communicate / pieces, communicate - work * (pieces - 1) / pieces)
