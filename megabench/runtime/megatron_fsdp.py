"""Import of megatron-fsdp, which must not depend on the installed version of megatron-core."""

import contextlib
import sys
import warnings
from collections.abc import Iterator

from megabench.runtime import megatron_cpu


def prepare() -> None:
    """Import megatron-fsdp so that it works on this machine, with or without GPUs.

    Call `prepare` before anything else imports megatron_fsdp, in the thread that trains.
    """
    if "megatron_fsdp" in sys.modules:
        return
    megatron_cpu.install()
    with _without_megatron_core(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hide the warnings that Transformer Engine and apex are missing
        import megatron_fsdp  # noqa: F401


@contextlib.contextmanager
def _without_megatron_core() -> Iterator[None]:
    """Hide megatron-core. Otherwise, megatron-fsdp uses its configuration, in which older versions lack fields."""
    hidden = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "megatron"}
    for name in hidden:
        del sys.modules[name]
    blocked = ("megatron", "megatron.core")
    sys.modules.update(dict.fromkeys(blocked))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in blocked:
            del sys.modules[name]
        sys.modules.update(hidden)
