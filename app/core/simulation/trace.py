"""Read a list of past jobs as arrivals for `core.simulation.simulator`.

There are two formats, recognised by their header.

* Comma-separated, as in the Philly trace: `timestamp` (submission), `duration` (seconds),
  `num_gpus`, `cluster` (the tenant), and optionally `user`, `kind`, `tier`, `priority`, `min_gpus`.
  A job with fewer `min_gpus` is elastic.  Other columns are ignored.
* The output of Slurm's `sacct --parsable2`: `Submit`, `ElapsedRaw` (seconds), `Account` (the
  tenant), `AllocTRES` or `ReqTRES` (`gres/gpu=8`), and optionally `User` and `JobID`.  Steps of
  jobs and jobs without accelerators are counted and left out.

A time is ISO 8601 with a space or a T, or seconds since 1970.  Lines need not be sorted; the first
job arrives at 0 s.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from app.core.model.snapshot import TIERS
from app.core.simulation.simulator import Arrival

COMMAS = ("timestamp", "duration", "num_gpus", "cluster")
SACCT = ("Submit", "ElapsedRaw", "Account")
WIDEST = 1_000_000  # most devices of one job
LONGEST_S = 100 * 365 * 86400.0

_GPUS = re.compile(r"(?:^|,)gres/gpu=(\d{1,20})(?=,|$)")
_DIGITS = 20  # most characters of a number; longer ones overflow or are not even read


class BadTrace(ValueError):
    """Raised for a line that cannot be read; says what is wrong and what would be right."""

    def __init__(self, line: int, what: str) -> None:
        self.line, self.what = line, what
        super().__init__(f"line {line}: {what}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Arrivals read from a list; `left_out` counts lines without a job to replay.

    `began_s` is the time of 0 s, in seconds since 1970.
    """

    arrivals: tuple[Arrival, ...]
    left_out: int
    began_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    at_s: float
    work_s: float
    width: int
    width_max: int
    tenant: str
    user: str
    kind: str
    tier: str
    priority: int


def read(
    lines: Iterable[str], *, kind: str = "cuda", tier: str = "basic", expected: bool = True
) -> Trace:
    """Read all jobs of a list; raises BadTrace at the first line that cannot be read.

    `kind` and `tier` are used for jobs that name none.  With `expected` the scheduler knows how
    long each job will run, as the published replays of such lists assume.
    """
    rows, left_out = list[_Row](), 0
    for row in _rows(iter(lines), kind, tier):
        if row is None:
            left_out += 1
        else:
            rows.append(row)
    rows.sort(key=lambda row: row.at_s)
    began_s = rows[0].at_s if rows else 0.0
    digits = len(str(len(rows)))
    arrivals = tuple(
        Arrival(
            at_s=row.at_s - began_s,
            task=f"j{n:0{digits}}",
            tenant=row.tenant,
            user=f"{row.tenant}/{row.user}",
            work_s=row.work_s,
            width=row.width,
            width_max=row.width_max if row.width_max > row.width else 0,
            kind=row.kind,
            tier=row.tier,
            priority=row.priority,
            expected_s=row.work_s if expected else None,
        )
        for n, row in enumerate(rows, start=1)
    )
    return Trace(arrivals=arrivals, left_out=left_out, began_s=began_s)


def _rows(lines: Iterator[str], kind: str, tier: str) -> Iterator[_Row | None]:
    header = next(lines, "").lstrip("\ufeff")
    delimiter = "|" if "|" in header else ","
    names = next(csv.reader([header], delimiter=delimiter), [])
    of_line = _sacct if all(name in names for name in SACCT) else _commas
    missing = [name for name in COMMAS if name not in names]
    if of_line is _commas and missing:
        raise BadTrace(
            1,
            f"missing column {missing[0]!r}; the columns must be {', '.join(COMMAS)}, or those "
            "of sacct",
        )
    for number, values in enumerate(csv.reader(lines, delimiter=delimiter), start=2):
        if not any(values):
            continue
        if len(values) < len(names):
            raise BadTrace(
                number, f"must have {len(names)} values, one for each column; got {len(values)}"
            )
        cells = _Cells(number, dict(zip(names, values, strict=False)))
        yield of_line(cells, kind, tier)


def _commas(cells: _Cells, kind: str, tier: str) -> _Row:
    most = cells.integer("num_gpus", cells.text("num_gpus"), least=1, most=WIDEST)
    return _Row(
        at_s=cells.time("timestamp"),
        work_s=cells.seconds("duration"),
        width=cells.integer("min_gpus", cells.get("min_gpus") or str(most), least=1, most=most),
        width_max=most,
        tenant=cells.text("cluster"),
        user=cells.get("user") or "all",
        kind=cells.get("kind") or kind,
        tier=cells.one_of("tier", TIERS, tier),
        priority=cells.integer("priority", cells.get("priority") or "0", least=-100, most=100),
    )


def _sacct(cells: _Cells, kind: str, tier: str) -> _Row | None:
    gpus = _GPUS.search(cells.get("AllocTRES") or cells.get("ReqTRES"))
    if gpus is None or not int(gpus[1]) or "." in cells.get("JobID"):
        return None
    if cells.text("ElapsedRaw") == "0":
        return None  # the job never ran
    width = cells.integer("gres/gpu", gpus[1], least=1, most=WIDEST)
    return _Row(
        at_s=cells.time("Submit"),
        work_s=cells.seconds("ElapsedRaw"),
        width=width,
        width_max=width,
        tenant=cells.text("Account"),
        user=cells.get("User") or "all",
        kind=kind,
        tier=tier,
        priority=0,
    )


class _Cells:
    """The cells of one line, by the names of their columns."""

    def __init__(self, line: int, values: Mapping[str, str]) -> None:
        self.line, self._values = line, values

    def get(self, name: str) -> str:
        return self._values.get(name, "").strip()

    def text(self, name: str) -> str:
        if not (found := self.get(name)):
            raise BadTrace(self.line, f"{name} must not be empty")
        return found

    def integer(self, name: str, text: str, *, least: int, most: int) -> int:
        plain = text.removeprefix("-").isdecimal() and text.isascii() and len(text) <= _DIGITS
        if not plain or not least <= int(text) <= most:
            raise BadTrace(self.line, f"{name} must be {least} to {most}; got {text!r}")
        return int(text)

    def seconds(self, name: str) -> float:
        text = self.text(name)
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not 0 < found <= LONGEST_S:
            raise BadTrace(self.line, f"{name} must be seconds above 0; got {text!r}")
        return found

    def time(self, name: str) -> float:
        """Return seconds since 1970; a time without a zone is UTC."""
        text = self.text(name)
        try:
            if text.replace(".", "", 1).isdecimal() and len(text) <= _DIGITS:
                return float(text)
            at = datetime.fromisoformat(text)
        except ValueError:
            raise BadTrace(self.line, f"{name} must be YYYY-MM-DD HH:MM:SS; got {text!r}") from None
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()

    def one_of(self, name: str, words: tuple[str, ...], without: str) -> str:
        text = self.get(name) or without
        if text not in words:
            raise BadTrace(self.line, f"{name} must be one of {', '.join(words)}; got {text!r}")
        return text
