"""Fill in the fields that records of older versions lack. Loads no torch.

Only this module parses messages, commands and kernel names of megabench, because current records have fields for their
meaning.
"""

import re
from typing import Any

_STOOD_STILL = "no progress for"  # the watchdog of the run ended it before the time limit of the study
_RANKS = re.compile(r"\branks? (\d+)")
# functions in which ranks were at a timeout "ranks 0, 2 in recv (x.py:1), 3–4 of 9 steps done"
_STAND = re.compile(r"ranks? (\d+)([^;]*?),? (?:(\d+)(?:–\d+)? of \d+ steps done|before (?:its|their) first step)")
_SHARED_MEMORY = re.compile(r"SIGBUS|/dev/shm|shared memory segment")


def complete(content: Any) -> Any:
    """Add the fields that older versions did not write to the JSON of a record. Other content is returned unchanged."""
    if not isinstance(content, dict):
        return content
    command = str(content.get("command"))
    older = {
        "failure": _failure(content.get("status"), content.get("error")),
        "auto_settings": [name for name in ("micro_batch", "recompute") if _flag(name, "auto") in command],
        "requested_kernels": "reference" if _flag("kernels", "reference") in command else "auto",
        "kernel_traits": _kernel_traits(content.get("kernels")),
    }
    return older | content | _with_output_gradient(content.get("kernel_traits"), content.get("kernels"))


def _flag(setting: str, value: str) -> str:
    return f"--{setting.replace('_', '-')} {value}"


def _failure(status: Any, error: Any) -> dict[str, Any] | None:
    """What `RunRecord.failure` would be."""
    words = str(error or "")
    if status == "timeout":
        return {"kind": "hang", "rank": _behind(words)}
    if status == "oom":
        return {"kind": "oom", "rank": _first_rank(words)}
    if status != "failed":
        return None
    if _STOOD_STILL in words:
        return {"kind": "hang", "rank": _first_rank(words.partition(_STOOD_STILL)[2])}
    kind = "shared-memory" if _SHARED_MEMORY.search(words) else "killed" if "SIGKILL" in words else "error"
    return {"kind": kind, "rank": _first_rank(words)}


def _first_rank(words: str) -> int | None:
    found = _RANKS.search(words)
    return int(found[1]) if found else None


def _behind(words: str) -> int | None:
    """Return the first rank of the group with fewer finished steps than the others, or None if all are equal."""
    stands = sorted((int(steps or 0), int(rank)) for rank, _, steps in _STAND.findall(words))
    is_clear = len(stands) == 1 or (len(stands) > 1 and stands[0][0] < stands[1][0])
    return stands[0][1] if is_clear else None


def _kernel_traits(kernels: Any) -> dict[str, bool | None] | None:
    """What `RunRecord.kernel_traits` would be."""
    if not isinstance(kernels, dict):
        return None
    return {
        "flash_attention": _is_fused(kernels, "attention", "eager", "unfused"),
        "fused_norm": _is_fused(kernels, "norm", "transformers RMSNorm", "transformers LlamaRMSNorm"),
        "fused_activation": _is_fused(kernels, "activation", "unfused"),
        "fused_loss": _is_fused(kernels, "cross_entropy", "fp32 logits"),
        "exchanges_heads": "part of the heads" in str(kernels.get("attention")),
        "fuses_weight_gradient": kernels.get("weight_gradient") in ("apex", "summed up by its product"),
    }


def _with_output_gradient(traits: Any, kernels: Any) -> dict[str, Any]:
    """Return `RunRecord.kernel_traits` with `adds_output_gradient`, if a version that had this trait wrote them.

    Such versions also write `fuses_fp8_weight_gradient`, and say in the name of the kernel if the trait is missing.
    """
    if not (isinstance(traits, dict) and isinstance(kernels, dict) and "fuses_fp8_weight_gradient" in traits):
        return {}
    adds = "except that of the output layer" not in str(kernels.get("weight_gradient"))
    return {"kernel_traits": {"adds_output_gradient": adds and traits.get("fuses_weight_gradient")} | traits}


def _is_fused(kernels: dict[str, Any], operation: str, *plain: str) -> bool | None:
    """Return whether the name of an operation's kernel has none of the `plain` words, or None if it is unknown."""
    name = kernels.get(operation, "transformers")
    return None if name == "transformers" else not any(words in str(name) for words in plain)
