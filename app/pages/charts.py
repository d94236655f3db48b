"""Converts values for templates and charts: to words, columns, lengths.  All functions are pure."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any

from app.core import units
from app.insight.forecast import Start
from app.insight.reports import Curve, Happened, Queued, ReportedStay, TenantShare, UsageRow
from app.insight.reports.work import LotMember
from app.insight.time_spent import TimeSpent

METRICS_SHOWN = 4  # most metrics that the table of a lot's members has columns for
COLOURS = 8  # most series that can be told apart; roundhouse.css has their colours


# --- words --------------------------------------------------------------------------------------


def duration(span: timedelta | float) -> str:
    return units.duration(span.total_seconds() if isinstance(span, timedelta) else span)


def about(seconds: float) -> str:
    """Format a duration that is only roughly known, in whole seconds."""
    return f"{seconds:.0f} s" if seconds < 59.5 else units.duration(max(seconds, 60.0))


def age(span: timedelta) -> str:
    return units.age(span.total_seconds())


def held(us: float) -> str:
    """Format micro-device-seconds as a duration."""
    return units.duration(us / 1e6)


def figure(value: Any) -> str:
    """Format a tenant's metric: a number with four digits; anything else as a text, which is cut if
    long.
    """
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)[:40]


# how the audit log's columns are written: by the unit at the end of their names
_UNITS: dict[str, Callable[[float], str]] = {
    "_milli": lambda value: f"{value / 1000:g}",
    "_bytes": lambda value: units.size(int(value)),
    "_us": lambda value: units.duration(value / 1e6),
    "_s": units.duration,
}
_UNTOLD = ("carried",)  # usage in a form that only the scheduler reads


def changes(
    before: Mapping[str, Any], after: Mapping[str, Any], names: Mapping[str, str]
) -> list[tuple[str, str]]:
    """Return what an entry of the audit log changed, as a name and a text; `names` are of ids."""
    found = []
    for column in after or before:
        if column in _UNTOLD or not (before.get(column) or after.get(column)):
            continue
        unit = next((unit for unit in _UNITS if column.endswith(unit)), "")
        sides = [value(side[column], unit, names) for side in (before, after) if column in side]
        word = column.removesuffix(unit).removesuffix("_id").replace("_", " ")
        found.append((word, " → ".join(sides)))
    return found


def value(given: Any, unit: str, names: Mapping[str, str]) -> str:
    """Format a changed value of the audit log; numbers with their unit, tenants by name."""
    if given is None or given in ([], {}, ""):
        return "nothing"
    if isinstance(given, bool):
        return "yes" if given else "no"
    if unit and isinstance(given, int | float):
        return _UNITS[unit](given)
    if isinstance(given, str):
        return names.get(given, given)
    if isinstance(given, list):
        return ", ".join(value(one, "", names) for one in given)
    return json.dumps(given, ensure_ascii=False)


def utc(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%d %b %H:%M:%S UTC")


# --- usage over time ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The period of a chart, and its interval, a key of `app.insight.reports.INTERVALS`."""

    words: str
    span_s: int
    interval: str
    interval_words: str


WINDOWS = {
    "15m": Window(words="15 minutes", span_s=900, interval="10s", interval_words="10 seconds"),
    "1h": Window(words="hour", span_s=3600, interval="1m", interval_words="a minute"),
    "24h": Window(words="day", span_s=86400, interval="10m", interval_words="10 minutes"),
    "7d": Window(words="week", span_s=7 * 86400, interval="1h", interval_words="an hour"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    name: str
    held_us: int
    charged_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageChart:
    """Holds the mean number of devices held in each whole interval, one column per name, most used
    first.
    """

    by: str
    names: tuple[str, ...]
    totals: tuple[Total, ...]
    rows: tuple[tuple[datetime, tuple[float, ...]], ...]

    def colour(self, name: str) -> int:
        return self.names.index(name) % COLOURS


REST = "all others"


def usage_chart(
    rows: Sequence[UsageRow],
    *,
    by: str,
    since: datetime,
    until: datetime,
    interval_s: int,
    devices: int,
) -> UsageChart:
    """Build the chart of usage rows that are grouped by bucket and `by`.

    The open interval is left out of the columns, where it would look like a fall, but not out of
    the totals.  A device reports usage a moment after it held the slot.  So usage beyond what all
    `devices` can give in an interval belongs to the interval before.
    """
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for row in rows:
        sums[getattr(row, by)][0] += row.held_us
        sums[getattr(row, by)][1] += row.charged_us
    ranked = sorted(sums, key=lambda name: (-sums[name][1], name))
    shown = ranked if len(ranked) <= COLOURS else [*ranked[: COLOURS - 1], REST]
    column = {name: shown.index(name) if name in shown else COLOURS - 1 for name in ranked}
    cells: dict[int, list[float]] = defaultdict(lambda: [0.0] * len(shown))
    totals = [[0, 0] for _ in shown]
    for row in rows:
        assert row.bucket is not None
        place = column[getattr(row, by)]
        cells[int(row.bucket.timestamp())][place] += row.held_us / 1e6 / interval_s
        totals[place][0] += row.held_us
        totals[place][1] += row.charged_us
    first, last = (int(at.timestamp()) // interval_s * interval_s for at in (since, until))
    _carry_back(cells, range(last, first - 1, -interval_s), devices)
    return UsageChart(
        by=by,
        names=tuple(shown),
        totals=tuple(
            Total(name=name, held_us=held_us, charged_us=charged_us)
            for name, (held_us, charged_us) in zip(shown, totals, strict=True)
        ),
        rows=tuple(
            (datetime.fromtimestamp(at, UTC), tuple(cells[at]))
            for at in range(first, last, interval_s)
        ),
    )


def _carry_back(cells: dict[int, list[float]], latest_first: range, devices: int) -> None:
    """Move the usage that exceeds `devices` in an interval to the interval before, in
    proportion.
    """
    for at in latest_first:
        whole = sum(cells[at])
        if whole <= devices:
            continue
        before = cells[at + latest_first.step]
        for place, value in enumerate(cells[at]):
            kept = value * devices / whole
            before[place] += value - kept
            cells[at][place] = kept


# --- progress and metrics -----------------------------------------------------------------------


def metric_names(rows: Sequence[LotMember]) -> list[str]:
    """Return the names of the metrics that these members of a lot reported, in order."""
    return list(dict.fromkeys(name for row in rows for name in row.metrics))[:METRICS_SHOWN]


def not_numbers(metrics: dict[str, Any]) -> list[str]:
    """Return the metrics reported as "nan", "inf" or "-inf", as a diverged loss is."""
    return [name for name, told in metrics.items() if told in ("nan", "inf", "-inf")]


def sparkline(values: Sequence[float], *, width: int = 80, height: int = 20) -> str:
    """Return the points of an SVG polyline; "" for fewer than two values."""
    if len(values) < 2:
        return ""
    # Halves, because the difference of two floats can exceed the largest float.
    low, high = min(values) / 2, max(values) / 2
    spread = (high - low) or 1.0
    step = width / (len(values) - 1)
    return " ".join(
        f"{n * step:.1f},{height - 1 - (value / 2 - low) / spread * (height - 2):.1f}"
        for n, value in enumerate(values)
    )


def queued_words(queue: Sequence[Queued], waiting: int | None) -> str:
    """Return a text like "11 queued, 1 preempted, 1 paused".

    `waiting` is the number of all waiting tasks if `queue` is only a part of them, else None.
    """
    if waiting is not None:
        return f"{waiting:,} queued"
    counts = Counter(item.phase for item in queue)
    words = [f"{counts['queued']} queued"]
    words += [f"{counts[phase]} {phase}" for phase in ("preempted", "paused") if counts[phase]]
    return ", ".join(words)


def next_start(queue: Sequence[Queued]) -> Start | None:
    """Return the estimate of the task that is expected to start first."""
    estimates = [item.estimate for item in queue if item.estimate is not None]
    return min(estimates, key=lambda estimate: estimate.p50_s, default=None)


def by_place(queue: Sequence[Queued]) -> list[Queued]:
    """Sort by expected start; tasks without a place come last, the oldest first."""
    return sorted(queue, key=lambda item: (item.place is None, item.place or 0, item.id))


def own_reasons_first(queue: Sequence[Queued]) -> list[Queued]:
    """Put the reasons first that the fewest of these tasks share; the others keep their order."""
    shared = Counter(reason["message"] for item in queue for reason in item.reasons)
    return [
        replace(item, reasons=tuple(sorted(item.reasons, key=lambda one: shared[one["message"]])))
        for item in queue
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveChart:
    """Holds the values of one metric in several tasks, by step; None where a task has no value."""

    name: str
    tasks: tuple[str, ...]
    rows: tuple[tuple[int, tuple[float | None, ...]], ...]


def curve_charts(curves: Sequence[Curve], *, most: int = 24) -> list[CurveChart]:
    by_name: dict[str, list[Curve]] = defaultdict(list)
    for curve in curves:
        by_name[curve.name].append(curve)
    return [_curve_chart(name, lines) for name, lines in list(by_name.items())[:most]]


def _curve_chart(name: str, lines: Sequence[Curve]) -> CurveChart:
    values = [dict(line.points) for line in lines]
    steps = sorted(set().union(*values))
    return CurveChart(
        name=name,
        tasks=tuple(line.task for line in lines),
        rows=tuple((step, tuple(value.get(step) for value in values)) for step in steps),
    )


# --- placements ---------------------------------------------------------------------------------

LANE_HEIGHT = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartBar:
    """Describes a stay on a device as a bar: `x` and `width` in percent of the line, `y` and
    `height` in pixels of its `LANE_HEIGHT`.
    """

    x: float
    width: float
    colour: int
    words: str
    y: float = 2
    height: float = LANE_HEIGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartLane:
    """Holds the bars of a line that begins at `begins` percent."""

    name: str
    parts: tuple[ChartBar, ...]
    note: str = ""
    begins: float = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLine:
    """Holds lanes of bars; `key` are the names of their colours."""

    since: datetime
    until: datetime
    key: tuple[str, ...]
    lanes: tuple[ChartLane, ...]


def time_line(stays: Sequence[ReportedStay], *, since: datetime, until: datetime) -> TimeLine:
    """Build the chart: one lane per task, a second one for borrowed devices, one bar per stay.

    Colours are by device.  The axis begins at the request's submission (`since`), and ends at its
    end or now (`until`).
    """
    devices = tuple(sorted({stay.device for stay in stays}))
    lanes: dict[str, list[ChartBar]] = defaultdict(list)
    for stay in stays:
        lane = f"{stay.task}, lent" if stay.guest else stay.task
        lanes[lane].append(_part(stay, since, until, devices))
    return TimeLine(
        since=since,
        until=until,
        key=devices,
        lanes=tuple(ChartLane(name=task, parts=tuple(parts)) for task, parts in lanes.items()),
    )


def _part(stay: ReportedStay, since: datetime, until: datetime, devices: Sequence[str]) -> ChartBar:
    begun, ended = stay.started_at or stay.launched_at, stay.ended_at or until
    x, width = extent((begun, ended), (since, until))
    return ChartBar(
        x=x,
        width=width,
        colour=devices.index(stay.device) % COLOURS,
        words=f"{stay.device}, start {stay.epoch}, {duration(ended - begun)}, "
        f"{stay.end or 'still there'}",
    )


def extent(bar: tuple[datetime, datetime], line: tuple[datetime, datetime]) -> tuple[float, float]:
    """Return where a bar begins and how wide it is, in percent of the line."""
    since, until = line
    whole_s = max((until - since).total_seconds(), 1e-3)
    x, end = (100 * (at - since).total_seconds() / whole_s for at in bar)
    return round(x, 3), round(max(end - x, 0.2), 3)


# --- tenants ------------------------------------------------------------------------------------


def parts_of_level(shares: Sequence[TenantShare]) -> dict[str, int]:
    """Return each tenant's weight as whole percentage of its siblings' weights, by its id.

    The percentages of siblings add up to 100: those with the largest remainders are rounded up.
    """
    levels = defaultdict(list)
    for share in shares:
        levels[share.parent_id].append(share)
    return {id: percent for level in levels.values() for id, percent in _percentages(level)}


def _percentages(level: Sequence[TenantShare]) -> Iterator[tuple[str, int]]:
    whole = sum(share.weight for share in level)
    exact = {share.id: 100 * share.weight / whole for share in level}
    missing = 100 - sum(int(part) for part in exact.values())
    up = sorted(exact, key=lambda id: int(exact[id]) - exact[id])[:missing]
    return ((id, int(part) + (id in up)) for id, part in exact.items())


# --- time breakdown -----------------------------------------------------------------------------

#: The fields of `TimeSpent` in the words and the order of the page.
TIMES = {
    "waited_s": "Queued",
    "switched_s": "Starting",
    "moved_s": "Migrating",
    "computed_s": "Running",
    "staged_s": "Saving state",
}


def breakdown(spent: TimeSpent) -> list[tuple[str, float, int]]:
    """Return word, seconds and whole percentage of the sum, for each of `TIMES`."""
    seconds = {word: getattr(spent, name) for name, word in TIMES.items()}
    whole_s = max(sum(seconds.values()), 1e-6)
    return [(word, part_s, round(100 * part_s / whole_s)) for word, part_s in seconds.items()]


# --- events -------------------------------------------------------------------------------------

#: Events that repeat in every slice of a task: a single one is of interest, but not hundreds of
#: them.
TURN = frozenset({"task.launched", "task.started", "task.pausing", "task.paused", "task.saved"})
#: Events that need no action; they are shown on the page of their request only.
ROUTINE = TURN | {"request.submitted"}
FOLDED_ABOVE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedTurns:
    """Stands for more than `FOLDED_ABOVE` events in a row of one task's slices, shown as one
    line.
    """

    at: datetime
    task: str | None
    message: str
    turns: tuple[Happened, ...]


def folded(happened: Sequence[Happened]) -> list[Happened | FoldedTurns]:
    """Return the events in order, with long runs of one task's slices folded."""
    told: list[Happened | FoldedTurns] = []
    for (_, is_turn), run in groupby(happened, key=lambda one: (one.task_id, one.type in TURN)):
        events = tuple(run)
        if is_turn and len(events) > FOLDED_ABOVE:
            told.append(_turns(events))
        else:
            told.extend(events)
    return told


def _turns(events: tuple[Happened, ...]) -> FoldedTurns:
    kinds = [event.type for event in events]
    count = max(kinds.count("task.launched"), kinds.count("task.started"), 1)
    return FoldedTurns(
        at=events[0].at,
        task=events[0].task,
        message=f"{count} turn{'' if count == 1 else 's'}: paused and resumed",
        turns=events,
    )
