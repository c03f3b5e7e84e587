"""The configuration of a run. Loads no torch."""

from megabench.config.run_config import ResolvedConfig, RunConfig
from megabench.settings.reading import ConfigError, explain, literal_values, near_matches, read_yaml_mapping
from megabench.specs.all_settings import FIELDS, SETTINGS
from megabench.specs.hints import as_flag, choices_of, hint

__all__ = [
    "FIELDS",
    "SETTINGS",
    "ConfigError",
    "ResolvedConfig",
    "RunConfig",
    "as_flag",
    "choices_of",
    "explain",
    "hint",
    "literal_values",
    "near_matches",
    "read_yaml_mapping",
]
