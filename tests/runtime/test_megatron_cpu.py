"""What the replacements of `megatron_cpu` do for megatron-core and Megatron-FSDP on CPU."""

import time

import pytest
import torch
import torch.distributed as dist

from tests import distributed


def gather_from_a_late_rank(library: str) -> list[float]:
    """Gather as the libraries do, but read the result before waiting for it."""
    if library == "megatron_fsdp":
        from megabench.runtime.megatron_fsdp import prepare

        prepare()
        from megatron_fsdp import param_and_grad_buffer
    else:
        from megatron.core.distributed import param_and_grad_buffer
    rank = dist.get_rank()
    gathered = torch.zeros(2)
    time.sleep(0.5 * rank)
    with param_and_grad_buffer._coalescing_manager(dist.group.WORLD, async_ops=True) as works:
        dist.all_gather_into_tensor(gathered, torch.tensor([rank + 1.0]), async_op=True)
    values = gathered.tolist()
    works.wait()
    return values


@pytest.mark.distributed
@pytest.mark.skipif(torch.cuda.is_available(), reason="megatron_cpu replaces nothing on a machine with a GPU")
@pytest.mark.parametrize("library", ["megatron_core", "megatron_fsdp"])
def test_coalesced_gathers_never_overlap(library: str) -> None:
    """Gloo corrupts the heap if several run at once; see `megatron_cpu._wait_for_coalesced_collectives`."""
    assert distributed.run(gather_from_a_late_rank, 2, library) == [[1.0, 2.0]] * 2
