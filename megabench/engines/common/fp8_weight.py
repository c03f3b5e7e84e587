"""Weights that exist only in fp8, as FSDP2 gathers them."""

from typing import Any

import torch
from torch import Tensor


class Fp8Weight(Tensor):
    """A weight [N, K] that exists only in fp8, as `rows` · `scale`. Its gradient is a plain tensor in its `dtype`.

    The class declares its parts to torch.compile (see `__tensor_flatten__` in torch's documentation).
    """

    rows: Tensor
    scale: Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type["Fp8Weight"], rows: Tensor, scale: Tensor, dtype: torch.dtype) -> "Fp8Weight":
        weight: Fp8Weight = Tensor._make_wrapper_subclass(
            cls, rows.shape, strides=rows.stride(), dtype=dtype, device=rows.device
        )
        weight.rows, weight.scale = rows, scale
        return weight

    def __repr__(self) -> str:  # type: ignore[override]  # torch.compile prints it, and no operation reads its elements
        return f"Fp8Weight({list(self.shape)}, {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["rows", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> "Fp8Weight":
        return Fp8Weight(parts["rows"], parts["scale"], dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> "Fp8Weight":
        if func not in (torch.ops.aten.detach.default, torch.ops.aten.as_strided.default):
            raise NotImplementedError(f"{func} of a weight that exists only in fp8")
        weight, *others = args
        return Fp8Weight(func(weight.rows, *others, **(kwargs or {})), weight.scale, weight.dtype)
