"""The dependencies that pyproject.toml requires are those that megabench imports."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]
# packages that always come with a required package
PARTS = {
    "huggingface_hub": "transformers",
    "safetensors": "transformers",
    "tokenizers": "transformers",
    "markupsafe": "jinja2",
    "pydantic_core": "pydantic",
    "triton": "torch",
}
# imported only if installed
OPTIONAL = {"apex", "amp_C", "liger_kernel", "nvmath", "pyarrow", "pyroute2", "torchtitan"}


def imported() -> set[str]:
    """The top-level modules that megabench imports, except its own and those of Python."""
    names = set()
    for path in (ROOT / "megabench").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                # torch.utils.tensorboard is a front end of the tensorboard package
                names |= {node.module.partition(".")[0]} | (
                    {"tensorboard"} if node.module == "torch.utils.tensorboard" else set()
                )
    return names - set(sys.stdlib_module_names) - {"megabench"} - OPTIONAL


def test_required_dependencies_are_imported_and_imports_required() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {re.match(r"[A-Za-z0-9-]+", line)[0].lower() for line in project["dependencies"]}
    distributions = packages_distributions()
    found = {PARTS.get(module) or distributions[module][0].lower() for module in imported()}
    assert found == required
