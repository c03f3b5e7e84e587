"""The settings of a run that the files of a program contain."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megabench.settings.reading import ConfigError


def check_same(path: Path | None, said: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a file has and the run does not. Raise ConfigError if they contradict each other."""
    for name in given.keys() & said.keys() - {"steps"}:  # a measurement may be shorter
        if given[name] != said[name]:
            raise ConfigError(
                f"{path} sets {name}={said[name]}, but the run sets {name}={given[name]}; change one of them"
            )
    return {name: value for name, value in said.items() if name not in given}
