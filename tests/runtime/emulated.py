"""Whether this machine can emulate a network, and the state of its own network, for the tests of emulated hosts."""

import importlib.util
import os
from pathlib import Path

import pytest

from megabench.runtime.namespace import create_namespace


def _obstacle() -> str | None:
    if importlib.util.find_spec("pyroute2") is None:
        return "pyroute2 is not installed"
    try:
        os.close(create_namespace())
    except OSError as error:
        return f"network namespaces cannot be created here: {error.strerror}"
    return None


OBSTACLE = _obstacle()
needs_namespaces = pytest.mark.skipif(OBSTACLE is not None, reason=OBSTACLE or "")


def network_state() -> dict[str, set[object]]:
    """Return the interfaces, addresses and queues of this machine's namespace, and the namespaces with a name."""
    from pyroute2 import IPRoute

    with IPRoute() as network:
        return {
            "interfaces": {(link["index"], link.get("ifname"), link.get("mtu")) for link in network.get_links()},
            "addresses": {(one["index"], one.get("address")) for one in network.get_addr()},
            "queues": {(one["index"], one.get("kind")) for one in network.get_qdiscs()},
            "names": {path.name for path in Path("/run/netns").glob("*")},
        }


def namespace_of(pid: int | str) -> str | None:
    """Return the network namespace of a process, or None if the process has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None


def namespaces() -> set[str]:
    """Return the network namespaces of all processes of this machine."""
    found = {namespace_of(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()}
    return {name for name in found if name}
