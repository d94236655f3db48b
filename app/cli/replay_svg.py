"""Draws reports of `core.simulation.what_if` as one SVG: lost time of jobs, and devices held by
tenants over time.

The file needs no other file, and is readable on light and dark backgrounds. Names of tenants are
escaped. Colours never carry information alone; a text always says the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 860, 640
LEFT, RIGHT = 70, 650  # edges of both frames; the legend is to the right
UPPER, LOWER = (64, 290), (384, 580)  # top and bottom of the frames
COLOURS = 8
SHORTEST_S = 60.0  # shorter waits are drawn with this length
TIMES_S = (60.0, 600.0, 3600.0, 6 * 3600.0, 86400.0, 7 * 86400.0, 28 * 86400.0, 182 * 86400.0)
REST = "all others"

Value = dict[str, Any]

_STYLE = """
svg { color-scheme: light dark; background: #fff }
text { font: 12px system-ui, "Segoe UI", "Liberation Sans", sans-serif; fill: #5a606b }
.title { font-size: 14px; font-weight: 600; fill: #1c1f24 }
.name { fill: #1c1f24 }
.rule { stroke: #dedbd3; fill: none }
.axis { stroke: #868c96; fill: none }
.full { stroke: #1c1f24; stroke-dasharray: 5 4; fill: none }
.line { fill: none; stroke-width: 2; stroke-linejoin: round }
.s0 { color: #0072b2 } .s1 { color: #d98e00 } .s2 { color: #009e73 } .s3 { color: #c45f93 }
.s4 { color: #d55e00 } .s5 { color: #3f9bd1 } .s6 { color: #a39a00 } .s7 { color: #4b5563 }
.line { stroke: currentColor } .area { fill: currentColor; fill-opacity: .78 }
@media (prefers-color-scheme: dark) {
  svg { background: #15171b }
  text { fill: #a3abb8 } .title, .name { fill: #e8eaee }
  .rule { stroke: #343942 } .axis { stroke: #78808d } .full { stroke: #e8eaee }
  .s0 { color: #4aa8de } .s1 { color: #e69f00 } .s2 { color: #1fb98c } .s3 { color: #dd8fb6 }
  .s4 { color: #ee7a28 } .s5 { color: #8fd0f5 } .s6 { color: #f0e442 } .s7 { color: #b7bfca }
}
"""


def svg(runs: Sequence[Value], *, title: str) -> str:
    """Draw two frames: in the upper one a line for each run, in the lower one the devices held in
    the first run.
    """
    first = runs[0]
    told = "; ".join(f"{run['policy']}: {_lost(run)}" for run in runs)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        f' role="img" aria-label="{_quoted(title)}">',
        f"<title>{escape(title)}</title><desc>{escape(told)}</desc><style>{_STYLE}</style>",
        _text(LEFT, 24, title, "title"),
        _text(LEFT, UPPER[0] - 16, "Time lost (end - arrival - work) by jobs, the least first"),
        *_curves(runs),
        _text(LEFT, LOWER[0] - 16, f"Devices held over time, {first['policy']}"),
        *_areas(first),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _lost(run: Value) -> str:
    mean = run["lost_s"]["mean"]
    return "nothing ended" if mean is None else f"mean {duration(mean)}"


# --- the upper frame ----------------------------------------------------------------------------


def _curves(runs: Sequence[Value]) -> Iterable[str]:
    ends_s: list[float] = [max(run["lost_curve_s"], default=0.0) for run in runs]
    longest_s = max(2 * SHORTEST_S, *ends_s)
    top, bottom = UPPER

    def up(lost_s: float) -> float:
        times = max(lost_s, SHORTEST_S) / SHORTEST_S
        part = math.log(times) / math.log(longest_s / SHORTEST_S)
        return bottom - part * (bottom - top)

    for at_s in (at_s for at_s in TIMES_S if at_s <= longest_s):
        label = f"≤ {duration(at_s)}" if at_s == SHORTEST_S else duration(at_s)
        yield _rule(up(at_s), label)
    for percent in range(0, 101, 25):
        yield _text(_across(percent / 100), bottom + 18, f"{percent} %", anchor="middle")
    for n, run in enumerate(runs):
        curve = run["lost_curve_s"]
        points = ((_across(i / (len(curve) - 1)), up(lost_s)) for i, lost_s in enumerate(curve))
        yield f'<polyline class="line s{n % COLOURS}" points="{_points(points)}"/>'
        yield from _key(top + 22 * n, n, f"{run['policy']}: {_lost(run)}", wide=False)
    yield _axis(bottom)


# --- the lower frame ----------------------------------------------------------------------------


def _areas(run: Value) -> Iterable[str]:
    """Yield stacked areas, the tenant that held most at the bottom; the dashed line is all
    devices.
    """
    top, bottom = LOWER
    devices = sum(run["devices"].values())
    held = _largest(run["over_time"]["held"])
    count = len(run["over_time"]["wanted"])
    if not count or not devices:
        yield _text(LEFT, top + 20, "Nothing was held.")
        return

    def up(amount: float) -> float:
        return float(bottom - amount / devices * (bottom - top) * 0.94)

    below = [0.0] * count
    for n, (name, amounts) in enumerate(held):
        above = [low + amount for low, amount in zip(below, amounts, strict=True)]
        yield f'<path class="area s{n}" d="{_between(below, above, up)}"/>'
        yield from _key(top + 22 * n, n, f"{name}: {_share(run, name)}", wide=True)
        below = above
    yield f'<path class="full" d="M{LEFT} {up(devices):.1f}H{RIGHT}"/>'
    yield _text(LEFT - 8, up(devices) + 4, str(devices), anchor="end")
    yield _text(LEFT - 8, bottom + 4, "0", anchor="end")
    for quarter in range(5):
        at_s = run["lasted_s"] * quarter / 4
        yield _text(_across(quarter / 4), bottom + 18, duration(at_s), anchor="middle")
    yield _axis(bottom)


def _largest(held: dict[str, list[float]]) -> list[tuple[str, list[float]]]:
    """Return at most as many tenants as there are colours; all others are summed up as one."""
    ranked = sorted(held.items(), key=lambda item: (-sum(item[1]), item[0]))
    if len(ranked) <= COLOURS:
        return ranked
    rest = [sum(column) for column in zip(*(row for _, row in ranked[COLOURS - 1 :]), strict=True)]
    return [*ranked[: COLOURS - 1], (REST, rest)]


def _share(run: Value, name: str) -> str:
    of = {row["tenant"]: row["share"] for row in run["tenants"]}
    named = {shown for shown, _ in _largest(run["over_time"]["held"])}
    if name == REST and name not in of:
        return f"{sum(share for tenant, share in of.items() if tenant not in named):.1%}"
    return f"{of[name]:.1%}"


def _between(below: Sequence[float], above: Sequence[float], up: Any) -> str:
    """Build a path with a column for each interval, so that it shows exactly what was held."""
    step = (RIGHT - LEFT) / len(below)
    edge = "".join(
        f"V{up(amount):.1f}H{LEFT + step * (n + 1):.1f}" for n, amount in enumerate(above)
    )
    back = "".join(
        f"V{up(below[n]):.1f}H{LEFT + step * n:.1f}" for n in range(len(below) - 1, -1, -1)
    )
    return f"M{LEFT} {up(below[0]):.1f}{edge}{back}Z"


# --- marks --------------------------------------------------------------------------------------


def _across(part: float) -> float:
    return LEFT + part * (RIGHT - LEFT)


def _points(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _key(y: float, n: int, words: str, *, wide: bool) -> Iterable[str]:
    height = 10 if wide else 3
    fill = f'style="fill:currentColor" width="14" height="{height}"'
    yield f'<rect class="s{n % COLOURS}" x="{RIGHT + 18}" y="{y + 5 - height / 2:.1f}" {fill}/>'
    yield _text(RIGHT + 38, y + 9, words if len(words) <= 30 else words[:29] + "…", "name")


def _rule(y: float, label: str) -> str:
    line = f'<path class="rule" d="M{LEFT} {y:.1f}H{RIGHT}"/>'
    return line + _text(LEFT - 8, y + 4, label, anchor="end")


def _axis(y: float) -> str:
    return f'<path class="axis" d="M{LEFT} {y}H{RIGHT}"/>'


def _text(x: float, y: float, words: str, kind: str = "", *, anchor: str = "start") -> str:
    of = f' class="{kind}"' if kind else ""
    return f'<text{of} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _quoted(words: str) -> str:
    return escape(words, {'"': "&quot;"})


def duration(seconds: float) -> str:
    """Format as one figure and its unit: 45 s, 10 min, 2.5 h, 12 d."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s"
