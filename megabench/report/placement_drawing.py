"""Drawing of rank placement: hosts as boxes, GPUs as cells, and the links of each kind of process group."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from megabench.parallel.axes import AXIS_BY_NAME, FACTORS
from megabench.parallel.layout import Coordinates, Layout
from megabench.parallel.placement import LINK_NAMES, number_ranges
from megabench.record import Group, HostRanks, RunRecord
from megabench.report.svg import clip, picture, tag, text

_CELL, _GAP, _LINE = 68, 6, 15
_PER_ROW = 4
_MOST_HOSTS = 8
_SHADES = 7


@dataclass(frozen=True)
class GroupLine:
    """The process groups of one kind that use the same link, as text."""

    kind: str
    words: str
    num_groups: int
    ranks: str
    link: str
    transport: str


def hosts_of(record: RunRecord) -> list[HostRanks]:
    """Return the hosts of a run. If a single-host run did not record its placement, return one host."""
    if record.placement:
        return record.placement.hosts
    if record.num_hosts in (None, 1) and record.status in ("ok", "diverged"):
        name = (record.environment and record.environment.host) or "this host"
        return [HostRanks(name=name, ranks=list(range(record.world_size)))]
    return []


def draw_hosts(slug: str, record: RunRecord) -> list[Markup]:
    """Draw the first hosts of a run with their ranks and the process groups of each rank."""
    layout = Layout(**record.layout.model_dump())
    return [
        _host(f"{slug}-{number}", host, record, layout) for number, host in enumerate(hosts_of(record)[:_MOST_HOSTS])
    ]


def hosts_left_out(record: RunRecord) -> int:
    """Return the number of hosts that are not drawn."""
    return max(0, len(hosts_of(record)) - _MOST_HOSTS)


def group_lines(record: RunRecord) -> list[GroupLine]:
    """Combine process groups with equal kind, link and transport into one line."""
    alike: dict[tuple[str, str | None, str | None], list[Group]] = {}
    for group in record.groups:
        alike.setdefault((group.kind, group.link, group.transport), []).append(group)
    return [
        GroupLine(
            kind=kind,
            words=AXIS_BY_NAME[kind].title if kind in AXIS_BY_NAME else kind,
            num_groups=len(members),
            ranks="; ".join(number_ranges(group.ranks) for group in members[:4]) + "; …" * (len(members) > 4),
            link=LINK_NAMES.get(link or "", link or "not known"),
            transport=transport or ("gloo" if record.device == "cpu" else "not known"),
        )
        for (kind, link, transport), members in alike.items()
    ]


def _host(slug: str, host: HostRanks, record: RunRecord, layout: Layout) -> Markup:
    axes = [axis for axis in FACTORS if getattr(layout, axis) > 1]
    height = _LINE * (len(axes) + 1) + 10
    ranks = sorted(host.ranks)
    num_rows, num_columns = -(-len(ranks) // _PER_ROW), min(len(ranks), _PER_ROW)
    width = max(num_columns * (_CELL + _GAP) + _GAP + 8, 150)
    cells = []
    for number, rank in enumerate(ranks):
        row, column = divmod(number, _PER_ROW)
        cells.append(_cell(rank, layout, axes, _GAP + 4 + column * (_CELL + _GAP), 30 + row * (height + _GAP), height))
    total = 30 + num_rows * (height + _GAP) + 4
    described = "; ".join(f"rank {rank}: {', '.join(_words(layout.coordinates(rank), layout, axes))}" for rank in ranks)
    title = f"Host {host.name}: {len(ranks)} × {record.device or 'GPU'}"
    return Markup('<div class="host" style="width:{}px">{}</div>').format(
        width,
        picture(
            slug,
            title,
            described,
            total,
            tag("rect", x=0.5, y=0.5, width=width - 1, height=total - 1, rx=6, class_="box"),
            text(clip(host.name, 16 if num_columns < 3 else 34), 10, 20, "name"),
            *cells,
            full_width=width,
        ),
    )


def _cell(rank: int, layout: Layout, axes: Sequence[str], x: float, y: float, height: float) -> Markup:
    at = layout.coordinates(rank)
    # color by tensor-parallel group, or by pipeline stage if TP is 1
    shade = f"shade{(_tp_group(layout, at) if layout.tp > 1 else at.pp) % _SHADES}"
    middle = x + _CELL / 2
    words = [f"rank {rank}", *_words(at, layout, axes)]
    return (
        tag("rect", x=x, y=y, width=_CELL, height=height, rx=4, class_=f"gpu {shade}")
        + tag("rect", x=x, y=y, width=_CELL, height=4, class_=f"lid {shade}")
        + Markup("").join(
            text(word, middle, y + 18 + line * _LINE, "cell strong" if not line else "cell", "middle")
            for line, word in enumerate(words)
        )
    )


def _words(at: Coordinates, layout: Layout, axes: Sequence[str]) -> list[str]:
    places = {axis: _tp_group(layout, at) if axis == "tp" else getattr(at, axis) for axis in axes}
    return [f"{AXIS_BY_NAME[axis].member} {place}" for axis, place in places.items()]


def _tp_group(layout: Layout, at: Coordinates) -> int:
    return (at.pp * layout.data_parallel + at.dp) * layout.cp + at.cp
