"""Keeps rows of metrics until they are delivered, and thins them if they become too many.

A row has the metrics of one step. Rows that are thinned lose values, but every value that stays is
one that the task reported at that step. Of neighbouring rows, the lowest, the highest and the last
value of each metric stay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

Row = tuple[int, dict[str, Any]]

#: Most rows of one message, and their size as JSON; a task's message may hold 2,000 containers.
MESSAGE_ROWS, MESSAGE_BYTES = 500, 32 * 1024
#: Most rows that a process keeps of a task until they are delivered.
KEPT_ROWS, KEPT_BYTES = 10_000, 2**20
#: After so many steps, a report has only the lowest, highest and last value of each metric.
WHOLE_STEPS = 100_000
_GROUP = 8  # neighbouring rows that are thinned together at first


@dataclass(slots=True)
class MetricRows:
    """Keeps rows in the order of their arrival, at most `most_rows` of `most_bytes` together."""

    most_rows: int = KEPT_ROWS
    most_bytes: int = KEPT_BYTES
    rows: list[Row] = field(default_factory=list)
    size_bytes: int = 0
    thinned: int = 0  # how often rows had to be thinned
    _sent: tuple[int, int] | None = None  # (time of a report in microseconds, its number of rows)

    def __bool__(self) -> bool:
        return bool(self.rows)

    @property
    def fill_a_message(self) -> bool:
        return len(self.rows) >= MESSAGE_ROWS or self.size_bytes >= MESSAGE_BYTES

    def add(self, step: int, values: dict[str, Any]) -> None:
        """Add a row; rows of the same step that follow each other become one."""
        if not values:
            return
        if len(self.rows) >= self.most_rows or self.size_bytes >= self.most_bytes:
            self._make_room()
        may_join = len(self.rows) > (self._sent[1] if self._sent else 0)
        if may_join and self.rows[-1][0] == step:
            values = {**self.rows[-1][1], **values}
            self.size_bytes -= _size_bytes(self.rows.pop())
        self.rows.append((step, values))
        self.size_bytes += _size_bytes(self.rows[-1])

    def take(self) -> list[Row]:
        """Return the first rows, as many as a message may have, and forget them."""
        rows = self.part(MESSAGE_BYTES, now_us=0)
        self.delivered(0)
        return rows

    def part(self, limit_bytes: int, now_us: int) -> list[Row]:
        """Return the first rows that fit, at least one; they are kept until `delivered`."""
        number, size_bytes = 0, 0
        for row in self.rows[:MESSAGE_ROWS]:
            size_bytes += _size_bytes(row)
            if number and size_bytes > limit_bytes:
                break
            number += 1
        if number and self._sent is None:
            self._sent = (now_us, number)
        return self.rows[:number]

    def delivered(self, sent_us: int) -> None:
        """Forget the rows of a report that was sent at this time or before."""
        if self._sent is not None and self._sent[0] <= sent_us:
            gone, self.rows = self.rows[: self._sent[1]], self.rows[self._sent[1] :]
            self.size_bytes -= sum(map(_size_bytes, gone))
            self._sent = None

    def keep_extremes(self) -> None:
        """Keep the lowest, the highest and the last value of each metric only."""
        self._replace(extremes(self.rows))

    def _make_room(self) -> None:
        group = _GROUP
        while self._is_more_than_half() and group < _GROUP * len(self.rows):
            parts = range(0, len(self.rows), group)
            self._replace([row for at in parts for row in extremes(self.rows[at : at + group])])
            group *= _GROUP
        if self._is_more_than_half():  # each row has other metrics
            self._replace(self.rows[len(self.rows) // 2 + 1 :])

    def _is_more_than_half(self) -> bool:
        return 2 * len(self.rows) > self.most_rows or 2 * self.size_bytes > self.most_bytes

    def _replace(self, rows: list[Row]) -> None:
        if rows != self.rows:
            self.thinned += 1
            self.rows, self.size_bytes = rows, sum(map(_size_bytes, rows))
            self._sent = None


def extremes(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with the lowest, highest and last value of each metric, without the rest.

    Of values that are not finite numbers, the first and the last stay.
    """
    found: dict[tuple[str, bool], list[int]] = {}  # -> places of the lowest, highest and last value
    for place, (_, values) in enumerate(rows):
        for name, value in values.items():
            is_number = isinstance(value, int | float) and isfinite(value)
            known = found.setdefault((name, is_number), [place, place, place])
            known[2] = place
            if is_number and value < rows[known[0]][1][name]:
                known[0] = place
            if is_number and value > rows[known[1]][1][name]:
                known[1] = place
    names: dict[int, set[str]] = defaultdict(set)
    for (name, _), places in found.items():
        for place in places:
            names[place].add(name)
    return [
        (rows[place][0], {name: it for name, it in rows[place][1].items() if name in names[place]})
        for place in sorted(names)
    ]


def _size_bytes(row: Row) -> int:
    """Estimate the size of the row as JSON."""
    texts = (len(name) + (len(it) if isinstance(it, str) else 20) for name, it in row[1].items())
    return 24 + sum(texts) + 6 * len(row[1])
