"""All that one run is made of. Loads no torch."""

from megabench.config.run import ResolvedConfig, RunConfig
from megabench.settings.reading import ConfigError, explain, literal_values, near_matches, read_yaml_mapping

__all__ = [
    "ConfigError",
    "ResolvedConfig",
    "RunConfig",
    "explain",
    "literal_values",
    "near_matches",
    "read_yaml_mapping",
]
