"""All that one run is made of. Loads no torch."""

from megabench.config.run import ResolvedConfig, RunConfig, choices_of
from megabench.settings.reading import ConfigError, explain, literal_values, near_matches, read_yaml_mapping
from megabench.settings.run import SETTINGS, hint

__all__ = [
    "SETTINGS",
    "ConfigError",
    "ResolvedConfig",
    "RunConfig",
    "choices_of",
    "explain",
    "hint",
    "literal_values",
    "near_matches",
    "read_yaml_mapping",
]
