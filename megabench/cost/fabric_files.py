"""Read measured collectives between hosts from a file. Loads no torch."""

import statistics
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from megabench.cost.fabric import KINDS, Collective, Fabric, kind_name
from megabench.cost.nccl_tests import read_nccl_tests
from megabench.cost.profile import Measurement, read_profile
from megabench.inputs import LARGE, read_bytes
from megabench.settings.reading import ConfigError

_KINDS = {kind_name(kind): kind for kind in KINDS}
_MOST = 1000  # number of collectives, to which a model is fitted in about a second
_SIZES = {"bytes", "hosts", "ranks_per_host", "groups_per_host"}  # of a measurement between hosts


def read_fabric(path: Path) -> Fabric:
    """Read the output of nccl-tests, or a profile that `megabench calibrate` has measured on several hosts.

    Raises ConfigError if the file contains no collective between hosts.
    """
    try:
        text = read_bytes(path, LARGE).decode(errors="replace")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; use the path of a readable file") from None
    if not text.lstrip().startswith("{"):
        found = _medians(read_nccl_tests(text, str(path)))
        if len(found) > _MOST:
            raise ConfigError(f"{path} has {len(found):,} different collectives. Use a file with at most {_MOST:,}.")
        return Fabric(str(path), found)
    found = collectives_of(read_profile(path).measurements)
    if not found:
        raise ConfigError(
            f"{path} is a profile without measurements between hosts. Run megabench calibrate under torchrun on at "
            f"least two hosts."
        )
    return Fabric(str(path), _medians(found))


def collectives_of(measurements: Iterable[Measurement]) -> tuple[Collective, ...]:
    """Return the collectives between hosts among the measurements of a profile."""
    return tuple(
        Collective(
            kind=_KINDS[one.kind],
            num_hosts=int(one.sizes["hosts"]),
            ranks_per_host=int(one.sizes["ranks_per_host"]),
            num_bytes=one.sizes["bytes"],
            seconds=one.seconds,
            groups_per_host=int(one.sizes["groups_per_host"]),
        )
        for one in measurements
        if one.kind in _KINDS and one.sizes.keys() >= _SIZES and one.sizes["hosts"] >= 2 and one.seconds > 0
    )


def _medians(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
    """Return one collective for all that differ only in their seconds."""
    seconds: dict[Collective, list[float]] = {}
    for one in collectives:
        seconds.setdefault(replace(one, seconds=0.0), []).append(one.seconds)
    return tuple(replace(one, seconds=statistics.median(times)) for one, times in seconds.items())
