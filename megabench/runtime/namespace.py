"""Network namespaces without names. The kernel removes a namespace, with its interfaces, after its last user ends.

The users of a namespace are its file descriptors, its sockets and the processes in it, so a killed process leaves
nothing behind. Python has these calls only since version 3.12 (os.unshare, os.setns).
"""

import ctypes
import os
import threading
from collections.abc import Callable
from typing import TypeVar

_CLONE_NEWNET = 0x40000000
# load the library before any fork, because a child must not load libraries between fork and exec
_libc = ctypes.CDLL(None, use_errno=True)

T = TypeVar("T")


def create_namespace() -> int:
    """Return a file descriptor of a new network namespace. Raises OSError without the right to create one."""

    def create() -> int:
        _check(_libc.unshare(_CLONE_NEWNET))
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    return _in_thread(create)


def enter_namespace(namespace: int) -> None:
    """Move the calling thread, and the threads and processes that it starts later, into a network namespace.

    Sockets stay in the namespace in which they were created. Raises OSError.
    """
    _check(_libc.setns(namespace, _CLONE_NEWNET))


def call_in_namespace(namespace: int, function: Callable[[], T]) -> T:
    """Return the result of `function`, which runs in a thread in the network namespace."""

    def call() -> T:
        enter_namespace(namespace)
        return function()

    return _in_thread(call)


def _in_thread(function: Callable[[], T]) -> T:
    """Return the result of `function` in a new thread, or raise its exception. Only that thread changes namespaces."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _check(status: int) -> None:
    if status:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
