"""The backward pass of SwiGLU in Triton, which reads each input element once."""

import triton
import triton.language as tl


@triton.jit
def backward(both, grad, result, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the gradient of one row of `both` [rows, 2·width] to `result`, given `grad` [rows, width].

    The gate comes first.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gates = row * 2 * width + columns
    ups = gates + width
    gate = tl.load(both + gates, mask=inside).to(tl.float32)
    up = tl.load(both + ups, mask=inside).to(tl.float32)
    grad_output = tl.load(grad + row * width + columns, mask=inside).to(tl.float32)
    share = tl.sigmoid(gate)
    silu = gate * share
    slope = share + silu * (1 - share)  # of silu
    tl.store(result + gates, grad_output * up * slope, mask=inside)
    tl.store(result + ups, grad_output * silu, mask=inside)
