"""Breaks the trainer from outside: on PYTHONPATH, Python imports this before anything else.

FAULT=raise, kill, hang or nan befalls rank FAULT_RANK in its third step, inside the engine, as a real fault would.
"""

import importlib.abc
import importlib.util
import os
import signal
import sys
import time

STEP = 3


class EngineFault(importlib.abc.MetaPathFinder):
    """Wraps build_engine once megabench.engines.build is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "megabench.engines.build":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            build_engine = module.build_engine
            module.build_engine = lambda *arguments: with_fault(build_engine(*arguments))

        spec.loader.exec_module = exec_module
        return spec


def with_fault(engine):
    train_step, steps = engine.train_step, iter(range(1, 1_000_000))

    def faulty_step(*arguments):
        if next(steps) == STEP:
            befall(engine)
        return train_step(*arguments)

    engine.train_step = faulty_step
    return engine


def befall(engine):
    if os.environ["FAULT"] == "nan":  # in a weight, from here on
        next(iter(engine.training_state().shards)).values.fill_(float("nan"))
        return engine.restored(1, None)
    if os.environ["FAULT"] == "raise":
        raise ValueError("a fault on purpose")
    if os.environ["FAULT"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    lost_in_thought()


def lost_in_thought():
    time.sleep(3600)


if "FAULT" in os.environ and os.environ.get("RANK") == os.environ["FAULT_RANK"]:
    sys.meta_path.insert(0, EngineFault())
