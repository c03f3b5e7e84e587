"""The list of axes: what groups, coordinates, records and drawings follow."""

from dataclasses import fields, replace
from itertools import product

import pytest

from megabench.config import SETTINGS
from megabench.parallel import axes, groups
from megabench.parallel.axes import AXES, FACTORS, Axis
from megabench.parallel.groups import rank_groups
from megabench.parallel.layout import Coordinates, Layout
from megabench.record import LayoutSizes
from megabench.specs.registry import ENGINES


def test_records_layouts_and_settings_have_every_axis() -> None:
    names = {axis.name for axis in AXES}
    assert names <= {*LayoutSizes.model_fields} and names <= {field.name for field in fields(Layout)}
    assert {*FACTORS} == {field.name for field in fields(Coordinates)}
    assert names - {"dp"} <= {*SETTINGS}, "dp follows from the world size"
    assert set().union(*(spec.axes for spec in ENGINES.values())) == names | {"vp"}


@pytest.mark.parametrize(("tp", "cp", "pp", "dp"), [*product((1, 2), (1, 3), (1, 2), (1, 4))])
def test_every_rank_is_once_in_a_group_of_each_axis(tp: int, cp: int, pp: int, dp: int) -> None:
    layout = Layout(tp=tp, cp=cp, pp=pp, dp=dp)
    for axis, members in rank_groups(layout).items():
        assert sorted(rank for group in members for rank in group) == [*range(layout.world_size)]
        for group in members if axis in FACTORS else ():
            places = [layout.coordinates(rank) for rank in group]
            assert [getattr(place, axis) for place in places] == [*range(layout.size(axis))]
            assert len({replace(place, **{axis: 0}) for place in places}) == 1


def test_an_axis_may_regroup_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of the data-parallel ranks that follow each other, as expert parallelism takes them."""
    expert = Axis("ep", "expert parallel", "expert-parallel communication", "expert", regroups="dp")
    monkeypatch.setattr(groups, "AXES", (*axes.AXES, expert))
    monkeypatch.setattr(Layout, "ep", 2, raising=False)
    found = rank_groups(Layout(tp=2, pp=2, dp=4))
    assert found["dp"][:2] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert found["ep"] == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
