"""Draws who held each device when: one lane for each device, one bar for each stay.

Stays too short to be seen are drawn as one bar with their neighbours. All functions are pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from app.core import units
from app.insight.reports.device_stays import DeviceHistory, DeviceStay, TaskName
from app.pages.charts import (
    COLOURS,
    LANE_HEIGHT,
    REST,
    ChartBar,
    ChartLane,
    TimeLine,
    extent,
    utc,
)

BARS_MOST = 3000  # bars in all lanes
NARROW = 0.001  # part of the line: about a pixel
MIXED_LENGTH = 10  # of a bar of several tenants, in narrow widths
ROWS_MOST = 6  # stays drawn above each other where tasks share a device
MIXED = COLOURS  # the colour of a bar of several tenants


@dataclass(frozen=True, slots=True)
class HeldBar:
    """Describes one stay, or several that are drawn as one bar.

    `begins` to `ends` is what is drawn, `launched_at` the first launch. `held_s` counts the
    seconds of each tenant. `last_s` is the width of the last stay, `widest_s` of the widest.
    """

    device: str
    row: int
    begins: datetime
    ends: datetime
    launched_at: datetime
    is_open: bool
    held_s: Mapping[str, float]
    tasks: frozenset[str]
    stays: int
    last_s: float
    widest_s: float

    @property
    def tenants(self) -> str:
        """The tenant, or all with the part of each, the largest first."""
        if len(self.held_s) == 1:
            return next(iter(self.held_s))
        whole = sum(self.held_s.values()) or 1.0
        ranked = sorted(self.held_s.items(), key=lambda each: (-each[1], each[0]))
        named = [f"{name} {100 * held_s / whole:.0f} %" for name, held_s in ranked[:COLOURS]]
        return ", ".join(named + ["others"] * (len(ranked) > COLOURS))

    @property
    def only_task(self) -> str | None:
        return next(iter(self.tasks)) if len(self.tasks) == 1 else None

    def counted(self, names: Mapping[str, TaskName]) -> str:
        """Return what held the device: a request and its task, or how many stays and tasks."""
        name = names.get(self.only_task) if self.only_task else None
        words = f"{name.request} · {name.task}" if name else ""
        if self.stays == 1:
            return words
        tasks = words or units.counted(len(self.tasks), "task")
        return f"{units.counted(self.stays, 'stay')} of {tasks}"


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleShare:
    device: str
    percent: int
    since: datetime
    note: str  # why it does not count from the beginning of the line


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLanes:
    line: TimeLine
    bars: tuple[HeldBar, ...]
    idle: tuple[IdleShare, ...]
    names: Mapping[str, TaskName]
    mixed: bool


# --- bars ---------------------------------------------------------------------------------------


def held_bars(
    histories: Sequence[DeviceHistory], since: datetime, until: datetime, *, most: int = BARS_MOST
) -> list[HeldBar]:
    """Return the bars of all lanes, at most `most`; the more there are, the wider is a bar that
    still counts as too narrow.
    """
    drawn = [list(_drawn(history, until)) for history in histories]
    whole_s = (until - since).total_seconds()
    narrow_s = whole_s * NARROW
    while True:
        bars = [bar for stays in drawn for bar in _merged(stays, narrow_s)]
        if len(bars) <= most or narrow_s > whole_s:  # then each row is one bar
            return bars
        narrow_s *= 2


def _drawn(history: DeviceHistory, until: datetime) -> Iterator[HeldBar]:
    """Yield each stay in its row, by begin.

    A task that has the device alone is launched while its predecessor still leaves, and is drawn
    from the end of that.
    """
    row_ends = [history.since]
    alone_ends = history.since
    for stay in history.stays:
        begins, ends = _clipped(stay, history.since, until)
        if not stay.shared:
            begins = min(max(begins, alone_ends), ends)
            alone_ends = max(alone_ends, ends)
        row = _free_row(row_ends, begins)
        row_ends[row] = max(row_ends[row], ends)
        width_s = (ends - begins).total_seconds()
        yield HeldBar(
            device=history.device,
            row=row,
            begins=begins,
            ends=ends,
            launched_at=stay.launched_at,
            is_open=stay.ended_at is None,
            held_s={stay.tenant: width_s},
            tasks=frozenset([stay.task_id]),
            stays=1,
            last_s=width_s,
            widest_s=width_s,
        )


def _free_row(row_ends: list[datetime], begins: datetime) -> int:
    """Return the first row that is empty then, or a new one; of ROWS_MOST, the one that ends
    first.
    """
    for row, end in enumerate(row_ends):
        if end <= begins:
            return row
    if len(row_ends) == ROWS_MOST:
        return row_ends.index(min(row_ends))
    row_ends.append(begins)
    return len(row_ends) - 1


def _clipped(stay: DeviceStay, since: datetime, until: datetime) -> tuple[datetime, datetime]:
    ends = min(stay.ended_at or until, until)
    return min(max(stay.launched_at, since), max(ends, since)), max(ends, since)


def _merged(drawn: Sequence[HeldBar], narrow_s: float) -> list[HeldBar]:
    bars: list[HeldBar] = []
    last: dict[int, int] = {}  # by row: the place of its last bar
    for bar in drawn:
        place = last.get(bar.row)
        if place is not None and _are_one(bars[place], bar, narrow_s):
            bars[place] = _joined(bars[place], bar)
        else:
            last[bar.row] = len(bars)
            bars.append(bar)
    return bars


def _are_one(bar: HeldBar, following: HeldBar, narrow_s: float) -> bool:
    """Say whether both are drawn as one bar: they touch and are too narrow to be told apart.

    Of one tenant, one of the two may be wide; of several, neither, nor may their bar become long,
    as it no longer says which of them came when.
    """
    if (following.begins - bar.ends).total_seconds() >= narrow_s:
        return False
    if bar.held_s.keys() == following.held_s.keys() and len(bar.held_s) == 1:
        return min(bar.last_s, following.last_s) < narrow_s
    if max(bar.widest_s, following.widest_s) >= narrow_s:
        return False
    return (following.ends - bar.begins).total_seconds() <= MIXED_LENGTH * narrow_s


def _joined(bar: HeldBar, following: HeldBar) -> HeldBar:
    return HeldBar(
        device=bar.device,
        row=bar.row,
        begins=min(bar.begins, following.begins),
        ends=max(bar.ends, following.ends),
        launched_at=min(bar.launched_at, following.launched_at),
        is_open=bar.is_open or following.is_open,
        held_s={
            tenant: bar.held_s.get(tenant, 0.0) + following.held_s.get(tenant, 0.0)
            for tenant in (*bar.held_s, *following.held_s)
        },
        tasks=bar.tasks | following.tasks,
        stays=bar.stays + following.stays,
        last_s=following.last_s,
        widest_s=max(bar.widest_s, following.widest_s),
    )


# --- idle ---------------------------------------------------------------------------------------


def idle_share(history: DeviceHistory, until: datetime) -> IdleShare:
    """Return the part of the time in which no task held the device; 0 and 100 only if exact."""
    held, reached = timedelta(), history.since
    for stay in history.stays:
        begins, ends = _clipped(stay, history.since, until)
        held += max(timedelta(), ends - max(begins, reached))
        reached = max(reached, ends)
    whole_s = max((until - history.since).total_seconds(), 1e-3)
    percent = 100 * (1 - held.total_seconds() / whole_s)
    if 0 < percent < 100:
        percent = min(max(percent, 1), 99)
    note = "joined then" if history.joined else ""
    return IdleShare(
        device=history.device,
        percent=round(percent),
        since=history.since,
        note="too many stays before" if history.cut else note,
    )


# --- the chart ----------------------------------------------------------------------------------


def device_lanes(
    histories: Sequence[DeviceHistory],
    bars: Sequence[HeldBar],
    names: Mapping[str, TaskName],
    *,
    since: datetime,
    until: datetime,
) -> DeviceLanes:
    """Draw the bars; `names` are of their tasks, where a bar has only one."""
    key = _key(bars)
    mixed = any(len(bar.held_s) > 1 for bar in bars)
    rows: dict[str, int] = defaultdict(int)
    parts: dict[str, list[HeldBar]] = defaultdict(list)
    for bar in bars:
        rows[bar.device] = max(rows[bar.device], bar.row + 1)
        parts[bar.device].append(bar)
    idle = tuple(idle_share(history, until) for history in histories)
    lanes = tuple(
        ChartLane(
            name=share.device,
            note=f"{share.percent} % idle",
            begins=extent((share.since, until), (since, until))[0],
            parts=tuple(
                _chart_bar(bar, (since, until), rows[share.device], _colour(bar, key), names)
                for bar in parts[share.device]
            ),
        )
        for share in idle
    )
    line = TimeLine(since=since, until=until, key=key, lanes=lanes)
    return DeviceLanes(line=line, bars=tuple(bars), idle=idle, names=names, mixed=mixed)


def _key(bars: Sequence[HeldBar]) -> tuple[str, ...]:
    """Return the tenants in the order of their colours; those that held least share the last."""
    held_s: dict[str, float] = defaultdict(float)
    for bar in bars:
        for tenant, seconds in bar.held_s.items():
            held_s[tenant] += seconds
    if len(held_s) <= COLOURS:
        return tuple(sorted(held_s))
    ranked = sorted(held_s, key=lambda tenant: (-held_s[tenant], tenant))
    return (*sorted(ranked[: COLOURS - 1]), REST)


def _colour(bar: HeldBar, key: Sequence[str]) -> int:
    if len(bar.held_s) > 1:
        return MIXED
    tenant = next(iter(bar.held_s))
    return key.index(tenant) if tenant in key else COLOURS - 1


def _chart_bar(
    bar: HeldBar,
    line: tuple[datetime, datetime],
    rows: int,
    colour: int,
    names: Mapping[str, TaskName],
) -> ChartBar:
    x, width = extent((bar.begins, bar.ends), line)
    height = LANE_HEIGHT / rows
    until = "now" if bar.is_open else utc(bar.ends)
    return ChartBar(
        x=min(x, 100 - 0.2),
        width=width,
        y=round(2 + bar.row * height, 2),
        height=round(height, 2),
        colour=colour,
        words=f"{bar.tenants}: {bar.counted(names)}, {utc(bar.launched_at)} until {until}",
    )
