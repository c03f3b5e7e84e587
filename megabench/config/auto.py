"""Settings that are "auto", and the values that can replace them. Loads no torch."""

from dataclasses import dataclass
from typing import Literal

from megabench.config.run_config import ResolvedConfig, RunConfig
from megabench.parallel.layout import LayoutError, divisors
from megabench.settings.reading import ConfigError


@dataclass(frozen=True)
class AutoSetting:
    """A micro-batch size and a level of recomputation."""

    micro_batch: int
    recompute: str

    def __str__(self) -> str:
        return f"micro-batch {self.micro_batch}, recompute {self.recompute}"


def apply_setting(config: RunConfig, setting: AutoSetting) -> RunConfig:
    """Return `config` with the values of `setting` in place of "auto"."""
    return config.model_copy(update={name: getattr(setting, name) for name in config.auto_settings})


def legal_settings(config: RunConfig, world_size: int, device: Literal["cpu", "cuda"]) -> list[AutoSetting]:
    """Return the valid values for the "auto" settings of `config`, least recomputation and smallest micro-batch first.

    Without "auto" settings, return the only value. If no value is valid, raise the error of the first value.
    """
    legal, first_error = [], None
    for setting in _settings(config, world_size):
        try:
            apply_setting(config, setting).resolve(world_size, device)
            legal.append(setting)
        except (ConfigError, LayoutError) as error:
            first_error = first_error or error
    if not legal and first_error:
        raise first_error
    return legal


def resolve_first(config: RunConfig, world_size: int, device: Literal["cpu", "cuda"]) -> ResolvedConfig:
    """Resolve `config` with the first valid value of each "auto" setting."""
    first = legal_settings(config, world_size, device)[0]
    return apply_setting(config, first).resolve(world_size, device)


def _settings(config: RunConfig, world_size: int) -> list[AutoSetting]:
    shape = config.shape
    if config.micro_batch == "auto":
        replicas = config.layout.with_world_size(world_size).data_parallel
        without_auto = {name: value for name, value in config.given().items() if name not in config.auto_settings}
        named = RunConfig.parse(without_auto).with_file()
        micro_batches = divisors(max(1, (named.global_batch or shape.global_batch) // replicas))
    else:
        micro_batches = [config.micro_batch or shape.micro_batch]
    levels = ["none", "selective", "full"] if config.recompute == "auto" else [config.recompute]
    return [AutoSetting(micro_batch, level) for level in levels for micro_batch in micro_batches]
