"""What bf16 gradients and fp8 would gain."""

import pytest

from megabench.planner.gains import gains
from megabench.planner.make_plan import make_plan
from megabench.planner.reasons import chosen
from tests.planner.test_plan import written


def planned(where: str, **settings):
    given = {"grad_dtype": "fp32", "precision": None} | settings
    return make_plan("llama3-8b", where, 8192, 32, None, profile=None, top=12, emulate_hosts=None, **given)


def test_fp8_gains_on_hopper_and_is_impossible_on_a100():
    (fp8,) = [one for one in gains(planned("p5.48xlarge:1")) if one.flags == "--precision fp8"]
    full = planned("p5.48xlarge:1", precision="fp8")
    assert 1.05 < fp8.ratio <= chosen(planned("p5.48xlarge:1")).step_seconds / chosen(full).step_seconds + 1e-9
    assert fp8.estimate.fits
    assert [one.flags for one in gains(planned("p4d.24xlarge:4"))] == ["--grad-dtype bf16"]


def test_a_gain_is_one_line_of_the_plan():
    plan = planned("p4d.24xlarge:4")
    (one,) = gains(plan)
    other = planned("p4d.24xlarge:4", grad_dtype="bf16")
    assert one.ratio == pytest.approx(chosen(plan).step_seconds / chosen(other).step_seconds)
    line = f"- --grad-dtype bf16: {100 * (one.ratio - 1):.0f}% faster than the best layout above, with "
    assert line in written(plan)


def test_settings_in_use_are_not_gains():
    assert not gains(planned("p5.48xlarge:1", precision="fp8", grad_dtype="bf16"))
    assert "Faster with another dtype" not in written(planned("p5.48xlarge:1", precision="fp8", grad_dtype="bf16"))
