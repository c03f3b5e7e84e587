"""Find the parallel layout that trains fastest on this cluster, compare the layout with ZeRO-3, and train with it.

The functions of the Python interface are `compare`, `load` and `plan` (megabench/api.py).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megabench.errors import UserError as UserError

if TYPE_CHECKING:
    from megabench.api import Layout as Layout
    from megabench.api import StudyPlan as StudyPlan
    from megabench.api import StudyResults as StudyResults
    from megabench.api import compare as compare
    from megabench.api import load as load
    from megabench.api import plan as plan

__version__ = "0.2.0"
_INTERFACE = ("Layout", "StudyPlan", "StudyResults", "compare", "load", "plan")


def __getattr__(name: str) -> Any:
    """Import the Python interface when it is first used, because the import takes a second."""
    if name not in _INTERFACE:
        raise AttributeError(f"module 'megabench' has no attribute {name!r}")
    return getattr(import_module("megabench.api"), name)
