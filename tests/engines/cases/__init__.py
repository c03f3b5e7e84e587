"""What the general tests of engines run each engine with: a module for each engine of the registry.

A module may define:

- `OPTIONS`: by name, world size and settings that change no result (`test_options`);
- `IN_BF16`: settings of runs in bf16 that agree with those of the other engines (`test_equivalence`);
- `ON_GPUS`: by name, world size and settings that train as one GPU does (`test_nccl`);
- `RESUMED`: settings of runs that are resumed on fewer ranks (`test_resume`);
- `WHOLE_MATRICES`: settings with which every rank holds whole matrices (`test_options`);
- `PARAM_GROUPS`: settings of layouts of two ranks that train with parameter groups (`test_options`);
- `REFUSED`: settings for four ranks, and words of the sentence that refuses them (`test_options`);
- `KERNELS`: by name, settings of runs whose records name their kernels (`test_kernel_traits`);
- `OUT_OF_MEMORY`: the engine's options in a record, and words of what the doctor recommends (`test_doctor`).
"""

from importlib import import_module
from types import ModuleType
from typing import Any

from megabench.specs.registry import ENGINES


def cases(name: str) -> dict[str, Any]:
    """The cases called `name` of all engines: a dict as it is, a list by engine and place ("fsdp-0")."""
    found: dict[str, Any] = {}
    for engine in ENGINES:
        own = getattr(_module_of(engine), name, {})
        own = own if isinstance(own, dict) else {f"{engine}-{place}": case for place, case in enumerate(own)}
        if twice := sorted(found.keys() & own.keys()):
            raise ValueError(
                f"{name} of the {engine} engine repeats the names {twice}. Rename them in {_path_of(engine)}."
            )
        found |= own
    return found


def _path_of(engine: str) -> str:
    return f"tests/engines/cases/{engine}.py"


def _module_of(engine: str) -> ModuleType:
    module = f"{__name__}.{engine}"
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:  # the file is there, and something that it imports is not
            raise
        raise LookupError(f"The {engine} engine has no test cases. Write {_path_of(engine)}.") from None
