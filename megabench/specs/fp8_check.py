"""Checks of the settings of fp8 runs. Loads no torch."""

from megabench.models.shape import ModelShape
from megabench.parallel.layout import Layout
from megabench.precision import FP8_MULTIPLE, POLICIES
from megabench.settings.reading import ConfigError
from megabench.specs.engine_spec import ResolvedRun

FP8_SETTINGS = ("fp8_recipe", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")


def check_fp8(run: ResolvedRun) -> None:
    """Raise ConfigError if the run has fp8 settings without fp8 products, or if the model does not support them.

    All sizes of a rank's matrices must be multiples of 16.
    """
    check_fp8_settings(run.shape, run.precision, *(getattr(run, name) for name in FP8_SETTINGS))
    if not run.policy.has_fp8_products:
        return
    if run.kernels == "reference":
        raise ConfigError(f"precision={run.precision} does not work with kernels=reference; use kernels=auto")
    if said := odd_size(run.shape, run.layout, run.micro_batch, run.seq_length):
        raise ConfigError(
            f"precision={run.precision} needs multiples of {FP8_MULTIPLE}, but {said}; change it, or use precision=bf16"
        )


def check_fp8_settings(
    shape: ModelShape, precision: str, fp8_recipe: str | None, num_at_start: int, num_at_end: int
) -> None:
    """Raise ConfigError if there are `FP8_SETTINGS` without fp8 products, or if the model does not support them."""
    if not POLICIES[precision].has_fp8_products:
        for name, value in zip(FP8_SETTINGS, (fp8_recipe, num_at_start, num_at_end), strict=True):
            if value:
                others = " or ".join(name for name, policy in POLICIES.items() if policy.has_fp8_products)
                raise ConfigError(
                    f"{name}={value} works only with precision={others}, but precision is {precision}; omit {name}"
                )
        return
    if shape.foreign or not shape.table.has_linear_layers:
        name = "no known linear layers" if shape.foreign else "no linear layers in fp8"
        raise ConfigError(f"precision={precision}: {shape.name} has {name}; use precision=bf16")
    if num_at_start + num_at_end >= shape.num_layers:
        raise ConfigError(
            f"num_layers_at_start_in_bf16={num_at_start} and num_layers_at_end_in_bf16={num_at_end} leave none of the "
            f"{shape.num_layers} layers in fp8; use smaller numbers, or precision=bf16"
        )


def check_keep_transposed(run: ResolvedRun, keep_transposed: bool, keeps_casts: bool) -> None:
    """Raise ConfigError if a run does not keep transposed fp8 weights, but would not keep any anyway."""
    if keep_transposed:
        return
    if run.fp8_recipe != "tensorwise":
        raise ConfigError("keep_transposed=false works only with precision=fp8 and fp8_recipe=tensorwise; omit it")
    if not keeps_casts:
        raise ConfigError(
            "keep_transposed=false works only if fp8 weights are kept for a whole step. ZeRO-3 and compiled blocks do "
            "not keep them; omit keep_transposed"
        )


def odd_size(shape: ModelShape, layout: Layout, micro_batch: int, seq_length: int) -> str | None:
    """Return the name and value of a size of a rank's matrices that is not a multiple of 16, or None."""
    tokens = micro_batch * seq_length
    sizes = {
        f"hidden_size={shape.hidden_size}": shape.hidden_size,
        f"ffn_size={shape.ffn_size} / tp={layout.tp}": shape.ffn_size // layout.tp,
        f"num_kv_heads·head_dim={shape.num_kv_heads * shape.head_dim} / tp={layout.tp}": (
            shape.num_kv_heads * shape.head_dim // layout.tp
        ),
        f"micro_batch·seq_length={tokens} / cp={layout.cp}": tokens // layout.cp,
    }
    return next((f"{name} is {size}" for name, size in sizes.items() if size % FP8_MULTIPLE), None)
