"""Make megatron-core and megatron-fsdp run on a machine without a GPU.

Both ask for CUDA by name in many places. `install()` redirects tensors and devices to the CPU, only for callers in
these libraries, so that a wrong device in megabench still fails. Streams and the random state are replaced for all
callers. The libraries' coalesced collectives finish before they return. `install()` does nothing if there is a GPU,
and must run before these libraries are first imported. The mode is thread-local: call it in the thread that trains.

Transformer Engine, FP8, CUDA graphs and the timing of streams do not work on CPU.
"""

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_mode: TorchFunctionMode | None = None


def _called_by_megatron() -> bool:
    """Return whether megatron-core or megatron-fsdp called the torch function, two stack frames above this one."""
    return sys._getframe(2).f_globals.get("__name__", "").startswith(("megatron.core", "megatron_fsdp"))


def _is_cuda(device: Any) -> bool:
    return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"


class _Stream:
    """A CUDA stream for the CPU, where operations run in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self) -> "_Event":
        return _Event()


class _Event:
    def wait(self, stream: Any = None) -> None:
        pass


class _CudaMeansCpu(TorchFunctionMode):
    """Rewrite the CUDA requests of these libraries: tensor devices, pinned memory, `.cuda()`, and type names."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.device and args and str(args[0]).startswith("cuda") and _called_by_megatron():
            return _CPU
        if _is_cuda(kwargs.get("device")) and _called_by_megatron():
            kwargs = {**kwargs, "device": _CPU}
        if kwargs.get("pin_memory") and _called_by_megatron():
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.cuda and _called_by_megatron():
            return args[0]
        # megatron-core's optimizers compare `param.type()` with names such as 'torch.cuda.FloatTensor'
        if func is torch.Tensor.type and len(args) == 1 and not kwargs and _called_by_megatron():
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


def install() -> None:
    """Make megatron-core importable and usable on CPU. Does nothing on a machine with a GPU, or if called twice."""
    global _mode
    if _mode is not None or torch.cuda.is_available():
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("megatron.core was imported before megatron_cpu.install()")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # megatron-core requires this variable even without a GPU
    # torch's builds for CUDA warn that they find no GPU when megatron-core imports this module
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    _answer_cuda_calls()
    _wait_for_coalesced_collectives()
    _import_megatron()
    _answer_random_state()
    _mode = _CudaMeansCpu()
    _mode.__enter__()


def _answer_cuda_calls() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.synchronize = cuda.empty_cache = lambda *args, **kwargs: None
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.manual_seed = cuda.random.manual_seed = torch.default_generator.manual_seed
    cuda.Stream = cuda.current_stream = cuda.default_stream = _Stream
    cuda.stream = lambda stream: contextlib.nullcontext()


def _wait_for_coalesced_collectives() -> None:
    """Make asynchronous coalesced collectives synchronous. Both libraries import the context manager by name.

    Gloo in torch 2.13 corrupts the heap if several coalesced all-gathers run at once, as Megatron-FSDP's prefetch
    starts them. Worker processes then die with SIGSEGV or SIGABRT.
    """
    coalesce = dist._coalescing_manager
    dist._coalescing_manager = lambda group=None, device=None, async_ops=False: coalesce(group, device)


def _import_megatron() -> None:
    """Import modules that use torch.compile with compilation disabled, because on CPU it takes minutes."""
    compiler = torch.compile
    torch.compile = lambda function=None, **_: function if function else (lambda inner: inner)  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # hide the warnings that Transformer Engine and apex are missing
            import megatron.core.distributed
            import megatron.core.models.gpt
            import megatron.core.optimizer
            import megatron.core.pipeline_parallel.schedules  # noqa: F401
    finally:
        torch.compile = compiler


def _answer_random_state() -> None:
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    is_expected = "CPU RNG state changed"
    logging.getLogger(random.__name__).addFilter(lambda record: is_expected not in record.getMessage())
