"""All that one run is made of. Loads no torch."""

from megabench.config.run import ResolvedConfig, RunConfig
from megabench.config.run_settings import SETTINGS, hint
from megabench.settings.reading import ConfigError, explain, literal_values, near_matches, read_yaml_mapping

__all__ = [
    "SETTINGS",
    "ConfigError",
    "ResolvedConfig",
    "RunConfig",
    "explain",
    "hint",
    "literal_values",
    "near_matches",
    "read_yaml_mapping",
]
