"""Imports the callbacks that a user names."""

import sys
from importlib import import_module

from megabench.config import ConfigError
from megabench.train.callbacks.callback import Callback


def load_callbacks(names: str) -> list[Callback]:
    """Create an instance of each class in `names` ("module:Class,module:Class").

    Raises ConfigError if a class cannot be imported or created.
    """
    if "" not in sys.path:
        sys.path.append("")  # search the working directory last, because a file in it may have the name of a library
    found: dict[str, Callback] = {}
    for name in names.split(","):
        module, _, attribute = name.strip().partition(":")
        if not (module and attribute):
            raise ConfigError(
                f"callbacks={name!r} does not name a class; use module:Class, e.g. my_callbacks:LossSpikes"
            )
        try:
            kind = getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"callbacks={name}: {error}; use a class from a module in the working directory or on PYTHONPATH"
            ) from None
        if not (isinstance(kind, type) and issubclass(kind, Callback)):
            raise ConfigError(
                f"callbacks={name} is not a subclass of megabench.train.callbacks.Callback; derive it from Callback"
            )
        if attribute in found:
            raise ConfigError(f"callbacks={names} contains two classes named {attribute}; rename one of them")
        found[attribute] = kind()
    return [*found.values()]
