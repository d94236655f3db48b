"""Prints on the terminal: turns the service's JSON into tables, sentences and sizes.

With `-o json` and `-o yaml` a value is printed as it came, so that scripts see what the API says. A
table shows the most important facts first and fits 80 columns; with `-o wide` it has full ids and
all columns. Tenants' text is printed as text, never as markup or as terminal commands. Nothing here
calls the service.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from app.core import units

JSON = dict[str, Any]

Output = StrEnum("Output", ["table", "wide", "json", "yaml"])

SHORT = 8  # characters of an id that are shown
NAME_LEAST = 16  # characters of a name that are shown however narrow the terminal
WIDE = 250  # columns, if the output is no terminal

_COLOURS = {
    "ok": "green",
    "done": "green",
    "running": "cyan",
    "starting": "cyan",
    "paused": "yellow",
    "preempted": "magenta",
    "failed": "red",
    "down": "red",
    "cancelled": "yellow",
    "cordoned": "yellow",
    "stopping": "yellow",
}
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0a-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class Column:
    """Describes a column of a table.

    `whole` values, such as ids and numbers, are never broken over lines; others are if the terminal
    is narrow, and names are shortened. A `wide` column is shown only with `-o wide`.
    """

    heading: str
    of: Callable[[JSON], object]
    right: bool = False
    whole: bool = False
    wide: bool = False


class Screen(Console):
    """A console that knows whether tables show all of their columns."""

    shows_all = False


def out(*, wide: bool = False) -> Screen:
    screen = _console(sys.stdout, WIDE if wide else None)
    screen.shows_all = wide
    return screen


def err() -> Screen:
    """Return the console for everything that is not the answer itself."""
    return _console(sys.stderr)


@contextmanager
def transfer(title: str, size_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr, if that is a terminal; the value is called with the number of
    bytes of each part that has passed.
    """
    if not sys.stderr.isatty():
        yield lambda size: None
        return
    from rich import progress  # imported here because it is slow and seldom needed

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=err(), transient=True) as bar:
        task = bar.add_task(title, total=size_bytes)
        yield lambda size: bar.advance(task, size)


def _console(file: Any, width: int | None = None) -> Screen:
    if width is None and not file.isatty():
        width = WIDE
    return Screen(file=file, width=width, highlight=False, emoji=False, markup=False)


# --- whole answers --------------------------------------------------------------------------------


def show(value: Any, output: Output, as_table: Callable[[], RenderableType]) -> None:
    if output == Output.json:
        sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    elif output == Output.yaml:
        sys.stdout.write(_yaml(value))
    else:
        out(wide=output == Output.wide).print(as_table())


def show_line(value: JSON, output: Output, line: Callable[[], Text]) -> None:
    """Print one value of a stream: as a line of JSON, a document of YAML, or words."""
    if output == Output.json:
        sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    elif output == Output.yaml:
        sys.stdout.write("---\n" + _yaml(value))
    else:
        out().print(line(), soft_wrap=True)
    sys.stdout.flush()


def _yaml(value: Any) -> str:
    import yaml  # imported here because it is slow and seldom needed

    return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True))


@dataclass(frozen=True, slots=True)
class Rows:
    """A table with columns that are chosen when it is printed."""

    items: list[JSON]
    columns: list[Column]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shows_all = isinstance(console, Screen) and console.shows_all
        columns = [column for column in self.columns if shows_all or not column.wide]
        grid = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
        for column in columns:
            whole = column.whole or column.right
            justify: Any = "right" if column.right else "left"
            grid.add_column(column.heading, justify=justify, overflow="fold", no_wrap=whole)
        rows = [[cell(column.of(item)) for column in columns] for item in self.items]
        if not shows_all:
            _shorten_names(rows, columns, options.max_width)
        for row in rows:
            grid.add_row(*row)
        yield grid


def _shorten_names(rows: list[list[Text]], columns: list[Column], width: int) -> None:
    """Leave out the middle of the longest names until the table fits the width in characters.

    A name is broken over lines otherwise. Its beginning and its end tell it from others.
    """
    of_column = list(zip(*rows, strict=True))
    widths = [
        max(len(column.heading), *(cell.cell_len for cell in cells))
        for column, cells in zip(columns, of_column, strict=False)
    ]
    excess = sum(widths) + 2 * len(columns) - width
    for index in sorted(range(len(widths)), key=lambda index: -widths[index]):
        is_of_names = not any(" " in cell.plain.strip() for cell in of_column[index])
        if excess <= 0 or columns[index].whole or columns[index].right or not is_of_names:
            continue
        most = max(NAME_LEAST, widths[index] - excess)
        for row in rows:
            row[index] = _shortened(row[index], most)
        excess -= max(0, widths[index] - most)


def _shortened(name: Text, most: int) -> Text:
    if len(name) <= most:
        return name
    end = (most - 1) // 2
    return Text.assemble(name[: most - 1 - end], "…", name[-end:])


def table(items: Iterable[JSON], columns: Iterable[Column], *, empty: str = "") -> RenderableType:
    """Show the items as a table, one in each row.

    If there are none, show the sentence `empty`, if it is given.
    """
    rows = Rows(list(items), list(columns))
    return words(empty) if empty and not rows.items else rows


def facts(pairs: Iterable[tuple[str, object]]) -> Table:
    """Show one object: a line for each fact. Facts without a value are left out."""
    grid = Table(box=None, padding=(0, 2, 0, 0), show_header=False, pad_edge=False)
    grid.add_column(style="dim", no_wrap=True)
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
    if isinstance(value, list):
        return words(", ".join(number(each) for each in value))
    return words(number(value))


def words(text: str, style: str = "") -> Text:
    """Return text from outside without the characters that control the terminal."""
    return Text(_CONTROL.sub("", text), style=style)


def state(name: str) -> Text:
    return words(name, _COLOURS.get(name, ""))


def short(id: str | None) -> str:
    """The last eight characters of an id. They are random, and enough to distinguish ids."""
    return id[-SHORT:] if id else ""


def number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def seconds(us: int | float | None) -> str:
    """Format microseconds for a person."""
    return "" if us is None else units.duration(us / 1e6)


def size(count: int | float | None) -> str:
    return units.size(int(count)) if count else ""


def ago(iso: str | None, *, now: datetime | None = None) -> str:
    if not iso:
        return ""
    passed = (now or datetime.now(UTC)) - datetime.fromisoformat(iso)
    told = units.age(passed.total_seconds())
    return told if told == "now" else f"{told} ago"


def clock(iso: str | None) -> str:
    """Format the local time of day."""
    return datetime.fromisoformat(iso).astimezone().strftime("%H:%M:%S") if iso else ""
