"""The definitions, against counts done by hand."""

import pytest

from megabench.metrics import flops_per_token, quantile, throughput
from megabench.models.catalog import get_model


def test_flops_of_llama3_8b() -> None:
    flops = flops_per_token(get_model("llama3-8b"), 8192)
    matrices = 6 * (32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336) + 128256 * 4096)
    attention = 12 * 32 * 8192 * 4096  # full square
    assert flops.causal == pytest.approx(matrices + attention / 2)
    assert flops.full / flops.causal == pytest.approx(1.125, abs=0.001)  # as torchtitan's count differs


def test_throughput_goes_by_the_median() -> None:
    shape = get_model("llama3-8b")
    result = throughput([1.0, 2.0, 100.0], shape, seq_length=8192, global_batch=32, num_devices=4)
    assert result is not None
    assert result.tokens_per_second == pytest.approx(32 * 8192 / 2)
    assert result.tokens_per_second_per_device == pytest.approx(32 * 8192 / 8)
    assert result.days_per_100b_tokens == pytest.approx(100e9 / (32 * 8192 / 2) / 86400)
    assert result.mfu(None) is None
    assert result.mfu(989.4) == pytest.approx(result.tflops_per_device_causal / 989.4)


def test_no_timed_step_no_throughput() -> None:
    assert throughput([], get_model("llama3-8b"), 8192, 32, 4) is None


def test_quantile_is_numpys() -> None:
    import numpy as np

    values = [3.0, 1.0, 4.0, 1.5, 9.0, 2.6]
    for fraction in (0.0, 0.1, 0.5, 0.9, 1.0):
        assert quantile(values, fraction) == pytest.approx(np.quantile(values, fraction))
