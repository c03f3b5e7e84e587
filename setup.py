"""Packaging of megabench. `make venv` installs it with the versions of constraints.txt, which are the tested ones."""

import re
from pathlib import Path

from setuptools import find_packages, setup

SOURCE = (Path(__file__).parent / "megabench" / "__init__.py").read_text()
VERSION = re.search(r'^__version__ = "(.+)"$', SOURCE, re.MULTILINE)
assert VERSION, "megabench/__init__.py sets no __version__"

setup(
    name="megabench",
    version=VERSION[1],
    description="Which parallel layout trains fastest on this cluster, proven against ZeRO-3, and training with it",
    license="Apache-2.0",
    packages=find_packages(include=["megabench", "megabench.*"]),
    package_data={
        "megabench.cost": ["profiles/*.json"],
        "megabench.report": ["page.html.jinja", "page.css", "page.js"],
    },
    python_requires=">=3.11,<3.14",
    install_requires=[
        "deepspeed>=0.19",
        "einops",
        "jinja2",
        "matplotlib",
        "megatron-core==0.16.1",  # private names of it are used: see megabench/runtime/megatron_cpu.py
        "numpy",
        "nvidia-ml-py",
        "psutil",
        "pydantic>=2",
        "pyyaml",
        "rich",
        "tensorboard",
        "torch>=2.10",
        "transformers>=5.10",
        "typer",
    ],
    extras_require={
        "gpu": ["liger-kernel"],
        "test": [
            "hypothesis",
            "import-linter",
            "mypy",
            "playwright",
            "pyarrow",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "types-psutil",
            "types-PyYAML",
        ],
    },
    entry_points={"console_scripts": ["megabench = megabench.cli:main"]},
)
