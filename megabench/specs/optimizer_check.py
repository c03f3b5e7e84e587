"""Checks of a run's optimizer. Loads no torch."""

from megabench.models.shape import ModelShape
from megabench.optim.optimizers import OPTIMIZERS
from megabench.settings.reading import ConfigError


def check_optimizer(name: str, shape: ModelShape) -> None:
    """Raise ConfigError if the optimizer needs to know the matrices of layers, and those of the model are unknown."""
    if OPTIMIZERS[name].needs_layers and not shape.table.layer:
        raise ConfigError(
            f"optimizer={name} updates the weight matrices of layers differently from other parameters, but megabench "
            f"does not know which parameters of {shape.name} they are; use optimizer=adamw"
        )
