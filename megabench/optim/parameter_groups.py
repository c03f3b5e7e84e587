"""Parameter groups: learning rate, weight decay and betas by the names of parameters. Loads no torch."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache

# whether a value is allowed, and what is
_ALLOWED: dict[str, tuple[Callable[[float], bool], str]] = {
    "lr_scale": (lambda value: 0 <= value <= 1000, "between 0 and 1000"),
    "weight_decay": (lambda value: 0 <= value <= 100, "between 0 and 100"),
    "beta1": (lambda value: 0 < value < 1, "above 0 and below 1"),
    "beta2": (lambda value: 0 < value < 1, "above 0 and below 1"),
}
_EXAMPLE = '"embed_tokens: lr_scale=0.1 weight_decay=0"'


@dataclass(frozen=True)
class HyperParameters:
    """The hyper-parameters of one parameter. Its learning rate is that of the step, times `lr_scale`."""

    weight_decay: float
    betas: tuple[float, float]
    lr_scale: float


@dataclass(frozen=True)
class ParameterGroup:
    """Values for the parameters whose Hugging Face names contain a match of the regular expression `pattern`."""

    pattern: str
    values: Mapping[str, float]

    def __str__(self) -> str:
        values = (f"{name}={repr(value).removesuffix('.0')}" for name, value in sorted(self.values.items()))
        return f"{self.pattern}: {' '.join(values)}"

    def contains(self, name: str) -> bool:
        return re.search(self.pattern, name) is not None


@lru_cache(maxsize=64)
def read_groups(text: str | None) -> tuple[ParameterGroup, ...]:
    """Read groups as the setting param_groups gives them: "PATTERN: NAME=VALUE …; PATTERN: …".

    A pattern cannot contain a semicolon. Raises ValueError with a sentence for users.
    """
    return tuple(_read_group(part) for part in (text or "").split(";") if part.strip())


def _read_group(text: str) -> ParameterGroup:
    pattern, colon, assignments = text.rpartition(":")
    pattern, values = pattern.strip(), dict[str, float]()
    if not colon or not pattern or not assignments.strip():
        raise ValueError(
            f"{text.strip()!r} is not a parameter group; give a pattern of parameter names and the values of these "
            f"parameters, e.g. {_EXAMPLE}"
        )
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression ({error}); use e.g. {_EXAMPLE}") from None
    for assignment in assignments.split():
        name, _, value = assignment.partition("=")
        if name not in _ALLOWED or name in values:
            raise ValueError(f"{assignment!r} is not a value of a group; use each of {', '.join(_ALLOWED)} once")
        is_allowed, allowed = _ALLOWED[name]
        try:
            values[name] = float(value)
        except ValueError:
            values[name] = float("nan")
        if not is_allowed(values[name]):
            raise ValueError(f"{assignment!r} is not allowed; {name} must be a number {allowed}")
    return ParameterGroup(pattern, values)


def hyper_parameters(
    groups: Collection[ParameterGroup], name: str, num_dims: int, weight_decay: float, betas: tuple[float, float]
) -> HyperParameters:
    """Return the hyper-parameters of the parameter with this Hugging Face name and number of dimensions.

    Of several groups that set the same value, the first one applies.
    """
    # By default, weight decay applies to matrices, but not to vectors (GPT-3, Llama, Megatron-LM).
    values = {"weight_decay": weight_decay * (num_dims > 1), "beta1": betas[0], "beta2": betas[1]}
    for group in reversed(list(groups)):
        if group.contains(name):
            values |= group.values
    return HyperParameters(values["weight_decay"], (values["beta1"], values["beta2"]), values.get("lr_scale", 1.0))
