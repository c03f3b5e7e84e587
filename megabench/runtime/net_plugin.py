"""The NCCL net plugin for emulated hosts: build it, and call it without NCCL. Loads no torch.

The source is tools/emulated_network/net_plugin.c, which a link adds to the package.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from megabench.errors import UserError
from megabench.runtime.emulated_network import HOST_VARIABLE

NAME = "Emulated"  # of the network, in NCCL_NET and in NCCL's log
SCHEDULE_VARIABLE = "MEGABENCH_EMULATED_SCHEDULE"
SOURCE = Path(__file__).with_suffix(".c")
FLAGS = ("-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
_HANDLE_BYTES = 128
_FUNCTIONS = (
    *("init", "devices", "get_properties", "listen", "connect", "accept", "register_memory", "register_dma_buf"),
    *("deregister_memory", "send", "receive", "flush", "test", "close_sender", "close_receiver", "close_listener"),
)
_POINTERS = POINTER(c_void_p)
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "init": (c_void_p,),
    "get_properties": (c_int, c_void_p),
    "listen": (c_int, c_void_p, _POINTERS),
    "connect": (c_int, c_void_p, _POINTERS, c_void_p),
    "accept": (c_void_p, _POINTERS, c_void_p),
    "send": (c_void_p, c_void_p, c_int, c_int, c_void_p, _POINTERS),
    "receive": (c_void_p, c_int, _POINTERS, POINTER(c_int), POINTER(c_int), c_void_p, _POINTERS),
    "test": (c_void_p, POINTER(c_int), POINTER(c_int)),
    "close_sender": (c_void_p,),
    "close_receiver": (c_void_p,),
    "close_listener": (c_void_p,),
}


class Properties(ctypes.Structure):
    """What NCCL asks about the network: ncclNetProperties_v8_t."""

    _fields_ = (
        ("name", c_char_p),
        ("pci_path", c_char_p),
        ("guid", c_uint64),
        ("pointers", c_int),
        ("registration_is_global", c_int),
        ("mbits_per_s", c_int),
        ("port", c_int),
        ("latency_us", c_float),
        ("max_connections", c_int),
        ("max_grouped_receives", c_int),
        ("device_type", c_int),
        ("device_version", c_int),
    )


class NetPluginError(UserError):
    """Raised if the plugin cannot be built here."""


def build() -> Path:
    """Return the compiled plugin. Compile it with $CC or cc once per source, into the user's cache directory.

    Raises NetPluginError.
    """
    compiler = os.environ.get("CC") or "cc"
    if not (found := shutil.which(compiler)):
        raise NetPluginError(
            f"the shared-memory network needs a C compiler, and {compiler} was not found. Install gcc or clang, or set "
            f"CC."
        )
    key = hashlib.sha256(repr((SOURCE.read_bytes(), found, FLAGS)).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megabench"
    library = cache / f"net_plugin-{key}.so"
    if library.exists():
        return library
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = Path(folder) / library.name
            command = [found, *FLAGS, str(SOURCE), "-o", str(made), "-pthread"]
            subprocess.run(command, check=True, capture_output=True, text=True)
            made.replace(library)
    except subprocess.CalledProcessError as error:
        problem = next(iter(error.stderr.splitlines()), f"exit status {error.returncode}")
        raise NetPluginError(f"{found} cannot compile {SOURCE.name} ({problem}). Set CC to gcc or clang.") from None
    except OSError as error:
        raise NetPluginError(
            f"cannot write the network plugin to {cache} ({error.strerror}). Set XDG_CACHE_HOME."
        ) from None
    return library


def variables(host: int, gb_per_s: float, latency_us: float, schedule: str | Path) -> dict[str, str]:
    """Return the environment variables that the plugin reads.

    `schedule` is a file that all processes of all hosts share. A new network needs a new file.
    """
    return {
        HOST_VARIABLE: str(host),
        "MEGABENCH_EMULATED_GB_PER_S": f"{gb_per_s:.10g}",
        "MEGABENCH_EMULATED_LATENCY_US": f"{latency_us:.10g}",
        SCHEDULE_VARIABLE: str(schedule),
    }


class NetPlugin:
    """The functions of a compiled plugin, called in this process as NCCL calls them.

    The environment variables of the plugin must be set. Functions raise ConnectionError if the plugin returns an error.
    Buffers are addresses of memory that the caller keeps.
    """

    def __init__(self, library: Path) -> None:
        table = (c_void_p * (1 + len(_FUNCTIONS))).in_dll(ctypes.CDLL(str(library)), "ncclNetPlugin_v8")
        for name, address in zip(_FUNCTIONS, table[1:], strict=True):
            if name in _ARGUMENTS:
                setattr(self, f"_{name}", ctypes.CFUNCTYPE(c_int, *_ARGUMENTS[name])(address or 0))
        self._call("init", None)

    def properties(self) -> Properties:
        """Return what NCCL asks about the network."""
        found = Properties()
        self._call("get_properties", 0, byref(found))
        return found

    def listen(self) -> tuple[bytes, int]:
        """Return a handle for `connect` in another process, and the listener."""
        handle, listener = ctypes.create_string_buffer(_HANDLE_BYTES), c_void_p()
        self._call("listen", 0, handle, byref(listener))
        return handle.raw, listener.value or 0

    def connect(self, handle: bytes) -> int | None:
        """Return the sending end of a connection, or None if this must be called again."""
        return self._opened("connect", 0, c_char_p(handle))

    def accept(self, listener: int) -> int | None:
        """Return the receiving end of a connection, or None if none has arrived."""
        return self._opened("accept", listener)

    def send(self, end: int, address: int, size: int, tag: int = 0) -> int | None:
        """Start to send. Return a request, or None if this must be called again."""
        request = c_void_p()
        self._call("send", end, address, size, tag, None, byref(request))
        return request.value

    def receive(self, end: int, address: int, capacity: int, tag: int = 0) -> int | None:
        """Start to receive. Return a request, or None if this must be called again."""
        request = c_void_p()
        sizes, tags, buffers = byref(c_int(capacity)), byref(c_int(tag)), byref(c_void_p(address))
        self._call("receive", end, 1, buffers, sizes, tags, None, byref(request))
        return request.value

    def test(self, request: int) -> int | None:
        """Return the number of bytes of a completed request, which ends then, or None."""
        done, size = c_int(), c_int()
        self._call("test", request, byref(done), byref(size))
        return size.value if done.value else None

    def close(self, *, sender: int = 0, receiver: int = 0, listener: int = 0) -> None:
        """Close ends of connections and listeners."""
        for name, given in (("sender", sender), ("receiver", receiver), ("listener", listener)):
            if given:
                self._call(f"close_{name}", given)

    def _opened(self, name: str, *given: Any) -> int | None:
        end = c_void_p()
        self._call(name, *given, byref(end), None)
        return end.value

    def _call(self, name: str, *given: Any) -> None:
        if status := getattr(self, f"_{name}")(*given):
            raise ConnectionError(f"the network plugin returned {status} from {name}")
