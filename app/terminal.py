"""How answers of the service look in a terminal: JSON becomes tables, sentences and sizes.

A value is printed as it came with `-o json` and `-o yaml`, so that scripts see what the API says; a
table shows what a person wants first.  What tenants wrote is printed as text, never as markup or as
commands to the terminal.  Nothing here asks the service for anything.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import yaml
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

JSON = dict[str, Any]

Output = StrEnum("Output", ["table", "json", "yaml"])

WIDE = 250  # columns, where no terminal says how wide it is

_COLOURS = {
    "ok": "green",
    "done": "green",
    "running": "cyan",
    "starting": "cyan",
    "pausing": "cyan",
    "failed": "red",
    "down": "red",
    "cancelled": "yellow",
    "blocked": "yellow",
    "cordoned": "yellow",
}
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0a-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class Column:
    heading: str
    of: Callable[[JSON], object]
    right: bool = False


def out() -> Console:
    return _console(sys.stdout)


def err() -> Console:
    """Where everything goes that is not the answer itself."""
    return _console(sys.stderr)


def _console(file: Any) -> Console:
    width = None if file.isatty() else WIDE
    return Console(file=file, width=width, highlight=False, emoji=False, markup=False)


# --- whole answers --------------------------------------------------------------------------------


def show(value: Any, output: Output, as_table: Callable[[], RenderableType]) -> None:
    if output == Output.json:
        sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    elif output == Output.yaml:
        sys.stdout.write(yaml.safe_dump(value, sort_keys=False, allow_unicode=True))
    else:
        out().print(as_table())


def show_line(value: JSON, output: Output, line: Callable[[], Text]) -> None:
    """One of many values that come in time: a line of JSON, a document of YAML, or words."""
    if output == Output.json:
        sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    elif output == Output.yaml:
        sys.stdout.write(yaml.safe_dump(value, sort_keys=False, explicit_start=True))
    else:
        out().print(line(), soft_wrap=True)
    sys.stdout.flush()


def table(items: Iterable[JSON], columns: Iterable[Column]) -> Table:
    columns = list(columns)
    grid = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for column in columns:
        grid.add_column(
            column.heading, justify="right" if column.right else "left", overflow="fold"
        )
    for item in items:
        grid.add_row(*(cell(column.of(item)) for column in columns))
    return grid


def facts(pairs: Iterable[tuple[str, object]]) -> Table:
    """One thing, a line for each fact; those without a value are left out."""
    grid = Table(box=None, padding=(0, 2, 0, 0), show_header=False, pad_edge=False)
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for name, value in pairs:
        if value not in (None, "", [], {}):
            grid.add_row(name, cell(value))
    return grid


# --- single values --------------------------------------------------------------------------------


def cell(value: object) -> Text:
    if isinstance(value, Text):
        return value
    if value is None or value == "":
        return Text("-", style="dim")
    if isinstance(value, dict):
        return words(", ".join(f"{name}={number(v)}" for name, v in value.items()))
    return words(number(value))


def words(text: str, style: str = "") -> Text:
    """What somebody wrote, without what would steer the terminal."""
    return Text(_CONTROL.sub("", text), style=style)


def state(name: str) -> Text:
    return words(name, _COLOURS.get(name, ""))


def number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def seconds(us: int | float | None) -> str:
    """Microseconds as a person says them: 0.4 s, 12.3 s, 4 m 05 s, 3 h 12 m."""
    if us is None:
        return ""
    s = us / 1e6
    if s < 60:
        return f"{s:.1f} s"
    if s < 3600:
        return f"{int(s // 60)} m {int(s % 60):02} s"
    return f"{int(s // 3600)} h {int(s % 3600 // 60):02} m"


def size(count: int | float | None) -> str:
    if not count:
        return ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def ago(iso: str | None, *, now: datetime | None = None) -> str:
    if not iso:
        return ""
    passed = (now or datetime.now(UTC)) - datetime.fromisoformat(iso)
    s = max(0, int(passed.total_seconds()))
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if s >= length:
            return f"{s // length}{unit} ago"
    return f"{s}s ago"


def clock(iso: str | None) -> str:
    """The time of day here."""
    return datetime.fromisoformat(iso).astimezone().strftime("%H:%M:%S") if iso else ""
