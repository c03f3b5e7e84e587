"""Breaks the trainer from outside: on PYTHONPATH, Python imports this before anything else.

FAULT=slow makes each matrix product of rank FAULT_RANK take three times as long.
FAULT=batch makes every step that reads global batch FAULT_STEP, counted from 1, poison the weights.
FAULT=skip lets step FAULT_STEP and all later steps of the run use the batches of FAULT_SKIP steps later.
FAULT=raise, kill, hang, nan, huge, overflow or spike befalls rank FAULT_RANK in step FAULT_STEP of its process, by
default the third, inside the engine, as a real fault would.
"""

import importlib.abc
import importlib.util
import os
import signal
import sys
import time
from typing import Any

STEP = int(os.environ.get("FAULT_STEP", "3"))


class Fault(importlib.abc.MetaPathFinder):
    """Wraps build_engine once megabench.engines.build is imported, or micro_batches once its module is."""

    module = "megabench.data.batch" if os.environ.get("FAULT") in ("skip", "batch") else "megabench.engines.build"

    def find_spec(self, name, path=None, target=None):
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            if os.environ["FAULT"] == "skip":
                return skip_batches(module)
            if os.environ["FAULT"] == "batch":
                return poison_batch(module)
            if os.environ["FAULT"] == "slow":
                return slow_down()
            build_engine = module.build_engine
            module.build_engine = lambda *arguments: with_fault(build_engine(*arguments))

        spec.loader.exec_module = exec_module
        return spec


def with_fault(engine):
    train_step, steps = engine.train_step, iter(range(1, 1_000_000))

    def faulty_step(*arguments):
        is_faulty = next(steps) == STEP
        if is_faulty and os.environ["FAULT"] != "overflow":
            befall(engine)
        result = train_step(*arguments)
        if is_faulty and os.environ["FAULT"] == "overflow":  # of the update, after a finite loss
            scale_weights(engine, float("inf"))
        return result

    engine.train_step = faulty_step
    return engine


def befall(engine):
    if os.environ["FAULT"] == "nan":
        return poison(engine)
    if os.environ["FAULT"] == "spike":  # finite weights with a finite and much larger loss
        return scale_weights(engine, 5.0)
    if os.environ["FAULT"] == "huge":  # finite weights whose gradients are not
        return scale_weights(engine, 1e32)
    if os.environ["FAULT"] == "raise":
        raise ValueError("a fault on purpose")
    if os.environ["FAULT"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    lost_in_thought()


def poison(engine):
    """NaN in a weight, from here on."""
    next(iter(engine.training_state().shards)).values.fill_(float("nan"))
    engine.restored(1, None)


def scale_weights(engine, factor):
    for shard in engine.training_state().shards:
        if shard.kind == "weight":
            shard.values.mul_(factor)
    engine.restored(1, None)


def skip_batches(module):
    micro_batches, skip = module.micro_batches, int(os.environ["FAULT_SKIP"])
    module.micro_batches = lambda source, config, dp_rank, step: micro_batches(
        source, config, dp_rank, step + skip if step + 1 >= STEP else step
    )


def poison_batch(module):
    """The batch marks itself, and the engine poisons its weights when it trains on the marked batch."""
    import megabench.engines.build as engines

    micro_batches, build_engine = module.micro_batches, engines.build_engine
    marked: list[int] = []

    def marking(source, config, dp_rank, step):
        marked[:] = [step] if step + 1 == STEP else []
        return micro_batches(source, config, dp_rank, step)

    def with_poison(*arguments):
        engine: Any = build_engine(*arguments)
        train_step = engine.train_step

        def poisoned_step(*arguments):
            if marked:
                poison(engine)
            return train_step(*arguments)

        engine.train_step = poisoned_step
        return engine

    module.micro_batches, engines.build_engine = marking, with_poison


def slow_down():
    import torch

    product = torch.mm
    torch.mm = lambda *arguments, **named: [product(*arguments, **named) for _ in range(8)][-1]


def lost_in_thought():
    time.sleep(3600)


if "FAULT" in os.environ and os.environ.get("RANK") in os.environ["FAULT_RANK"].split(","):
    sys.meta_path.insert(0, Fault())
