"""The list of axes: what groups, coordinates, records and drawings follow."""

import os
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from itertools import product
from pathlib import Path

import pytest

from megabench.config import SETTINGS
from megabench.parallel import axes, layout
from megabench.parallel.axes import AXES, FACTORS, Axis
from megabench.parallel.layout import GIVEN_SIZES, Coordinates, Layout, rank_groups
from megabench.record import LayoutSizes
from megabench.specs.registry import ENGINES


def test_records_layouts_and_settings_have_every_axis() -> None:
    names = {axis.name for axis in AXES}
    assert names <= {*LayoutSizes.model_fields} and names <= {field.name for field in fields(Layout)}
    assert {*FACTORS} == {field.name for field in fields(Coordinates)}
    assert {*GIVEN_SIZES} == names - {"dp"} | {"vp"} and {*GIVEN_SIZES} <= {*SETTINGS}
    assert set().union(*(spec.axes for spec in ENGINES.values())) == names | {"vp"}


@pytest.mark.parametrize(("tp", "cp", "pp", "dp"), [*product((1, 2), (1, 3), (1, 2), (1, 4))])
def test_every_rank_is_once_in_a_group_of_each_axis(tp: int, cp: int, pp: int, dp: int) -> None:
    sizes = Layout(tp=tp, cp=cp, pp=pp, dp=dp)
    for axis, members in rank_groups(sizes).items():
        assert sorted(rank for group in members for rank in group) == [*range(sizes.world_size)]
        for group in members if axis in FACTORS else ():
            places = [sizes.coordinates(rank) for rank in group]
            assert [getattr(place, axis) for place in places] == [*range(sizes.size(axis))]
            assert len({replace(place, **{axis: 0}) for place in places}) == 1


def test_experts_have_a_grid_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same ranks of a stage form tp × dp for dense layers and etp × ep × edp for experts."""
    experts = {name: Axis(name, name, name, name, grid="experts") for name in ("etp", "ep", "edp")}
    monkeypatch.setattr(layout, "AXES", (*axes.AXES, *experts.values()))
    monkeypatch.setattr(layout, "AXIS_BY_NAME", axes.AXIS_BY_NAME | experts)
    for name, size in {"etp": 1, "ep": 4, "edp": 2}.items():
        monkeypatch.setattr(Layout, name, size, raising=False)
    found = rank_groups(Layout(tp=2, pp=2, dp=4))
    assert found["dp"][:2] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert found["ep"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert found["edp"][:2] == [[0, 4], [1, 5]] and found["edp"][-1] == [11, 15]
    assert all(len(group) == 1 for group in found["etp"])


# the steps of docs/extending.md for expert parallelism: a file, a line in it, and the lines that follow this line
RECIPE = (
    (
        "parallel/axes.py",
        "AXES: tuple",
        '    Axis("ep", "expert parallel", "tokens to experts", "expert", grid="experts"),',
    ),
    ("parallel/layout.py", "    vp: int = 1", "    ep: int = 1"),
    ("record.py", "class LayoutSizes", "    ep: int = 1"),
    (
        "settings/run_settings.py",
        '    """Context-parallel size."""',
        '    ep: NumRanks = setting(1, "Run", "size", "free")',
    ),
)
TRY = """
from megabench.config import ConfigError, RunConfig
from megabench.config.record_fields import requested_fields
from megabench.parallel.layout import rank_groups
from megabench.parallel.layout import Layout
from megabench.specs.registry import ENGINES
from megabench.study.expand import expand

for name in ENGINES:
    small = {"engine": name, "model": "llama-tiny"}
    try:
        RunConfig.parse({**small, "ep": 2}).resolve(4, "cpu")
    except ConfigError as error:
        print(error)
    else:
        print(f"{name} ACCEPTS ep=2")
    alone = RunConfig.parse(small)
    assert requested_fields(alone.resolve(4, "cpu"), alone)["layout"].ep == 1
run = RunConfig.parse({"model": "llama-tiny", "ep": 2})
assert run.flags()[-2:] == ["--ep", "2"] and run.layout == Layout(ep=2) and str(run.layout) == "ep2", run
assert rank_groups(Layout(ep=2, dp=4))["ep"] == [[0, 1], [2, 3]]
"""


def follow(recipe: tuple[tuple[str, str, str], ...], folder: Path) -> None:
    """Copy the package to `folder`, and make the changes."""
    package = shutil.copytree(Path(axes.__file__).parents[1], folder / "megabench")
    for file, after, new in recipe:
        lines = (package / file).read_text().split("\n")
        (place,) = [number for number, line in enumerate(lines) if line.startswith(after)]
        (package / file).write_text("\n".join([*lines[: place + 1], new, *lines[place + 1 :]]))


def try_axis(recipe: tuple[tuple[str, str, str], ...], folder: Path) -> subprocess.CompletedProcess[str]:
    """Use the axis after these steps."""
    follow(recipe, folder)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, "-c", TRY], env=environment, cwd=folder, capture_output=True, text=True)


def test_every_engine_refuses_an_axis_that_it_does_not_declare(tmp_path: Path) -> None:
    done = try_axis(RECIPE, tmp_path)
    assert done.returncode == 0, done.stderr
    refusals = done.stdout.splitlines()
    assert len(refusals) == len(ENGINES)
    assert all(line.endswith("but ep=2; use ep=1") for line in refusals), refusals


@pytest.mark.parametrize("forgotten", range(len(RECIPE)), ids=[file for file, _, _ in RECIPE])
def test_a_forgotten_step_is_an_error(tmp_path: Path, forgotten: int) -> None:
    done = try_axis(RECIPE[:forgotten] + RECIPE[forgotten + 1 :], tmp_path)
    assert done.returncode != 0 and "ACCEPTS" not in done.stdout
