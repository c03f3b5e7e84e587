"""Library versions and environment variables that affect a run. Loads no heavy library."""

import os
import platform
import re
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import megabench
from megabench.record import Environment
from megabench.runtime.process import host_name

_PACKAGES = (
    "torch",
    "megatron-core",
    "megatron-fsdp",
    "deepspeed",
    "transformers",
    "transformer-engine",
    "accelerate",
    "torchtitan",
    "torchao",
    "liger-kernel",
    "triton",
    "numpy",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
)
_VARIABLES = ("NCCL_", "FI_", "CUDA_", "TORCH_", "OMP_", "NVSHMEM_", "PYTORCH_")
_LOG_FILES = ("NCCL_DEBUG_FILE",)  # the output path does not affect the run
_SECRET = re.compile(
    r"SECRET|TOKEN|PASSW|PASSPHRASE|CREDENTIAL|AUTH|COOKIE|BEARER|WEBHOOK|CONN(ECTION)?_?STR"
    r"|(API|ACCESS|PRIVATE|SIGNING|ENCRYPTION|SSH)_?KEY|(^|_)(KEY|PASS|PAT|DSN)(_|$)|_PWD$"
    r"|(DATABASE|DB|REDIS|MONGO\w*|POSTGRES\w*|PG|MYSQL|AMQP|BROKER)_?UR[IL]",
    re.IGNORECASE,
)
_PASSWORD_IN_URL = re.compile(r"://[^/@\s]*:[^/@\s]+@")
# Tokens of AWS, GitHub, GitLab, Google, Hugging Face, NVIDIA, OpenAI and Slack, and JSON Web Tokens.
_ACCESS_TOKEN = re.compile(
    r"\b(?:A(?:KI|SI)A[0-9A-Z]{16}|gh[opsur]_\w{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}|AIza[\w-]{35}|hf_[A-Za-z0-9]{20,}"
    r"|nvapi-[\w-]{20,}|sk-[\w-]{20,}|xox[abeprs]-[\w-]{10,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+)"
)
_SHORTEST_SECRET = 8  # characters; a shorter value of a variable also occurs in other text


def is_secret(name: str, value: str) -> bool:
    """Return whether an environment variable seems to be a secret, which records and result files must not contain."""
    return bool(_SECRET.search(name) or _PASSWORD_IN_URL.search(value) or _ACCESS_TOKEN.search(value))


def secrets_in_text() -> re.Pattern[str]:
    """Return a pattern for access tokens, and for the values of this process's secret environment variables."""
    values = {value for name, value in os.environ.items() if len(value) >= _SHORTEST_SECRET and is_secret(name, value)}
    longest_first = sorted(values, key=len, reverse=True)
    return re.compile("|".join([*map(re.escape, longest_first), _ACCESS_TOKEN.pattern]))


def versions() -> dict[str, str]:
    """Return the versions of the installed libraries that affect a run."""
    found = {"megabench": megabench.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def collect() -> Environment:
    """Collect the library versions, megabench's commit and the environment variables of this process."""
    variables = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_VARIABLES) and name not in _LOG_FILES and not is_secret(name, value)
    }
    return Environment(versions=versions(), variables=variables, host=host_name(), commit=commit())


@cache
def commit() -> str | None:
    """Return megabench's git commit, followed by "+" if tracked files differ from it, or None outside a checkout."""
    root = Path(megabench.__file__).parents[1]
    if not (root / ".git").exists():  # another repository may contain an installed megabench
        return None
    try:
        found = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None
