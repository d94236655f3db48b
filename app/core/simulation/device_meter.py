"""Measures the devices held and wanted over time, in a limited number of intervals.

A quantity that changes at instants is summed exactly between the changes. Time is divided into
intervals of equal length. When there are too many intervals, each pair is merged into one of double
length. So a minute and a year both end with between MOST / 2 and MOST intervals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from app.core.model.device_choice import WHOLE_MILLI

MOST = 256  # intervals; an even number
SHORTEST_US = 1_000_000

Key = tuple[str, str]  # tenant, kind of device


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Holds the mean number of devices held and wanted, by (tenant, kind), from `from_s` for
    `lasts_s`.

    Wanted is what running and waiting tasks need; `barred` of it is kept from them by budgets.
    """

    from_s: float
    lasts_s: float
    held: Mapping[Key, float]
    wanted: Mapping[Key, float]
    barred: Mapping[Key, float]


class _Sums:
    """Sums up a quantity by key: its current value, and its integral over each interval."""

    def __init__(self) -> None:
        self.now: Counter[Key] = Counter()
        self.since_us: dict[Key, int] = {}
        self.open: Counter[Key] = Counter()  # thousandths times µs in the current interval
        self.closed: list[Counter[Key]] = []

    def add(self, at_us: int, key: Key, change: int) -> None:
        self.open[key] += self.now[key] * (at_us - self.since_us.get(key, at_us))
        self.since_us[key] = at_us
        self.now[key] += change

    def close(self, at_us: int) -> None:
        for key in self.now:
            self.add(at_us, key, 0)
        self.closed.append(self.open)
        self.open = Counter()

    def merge(self) -> None:
        self.closed = [
            self.closed[n] + self.closed[n + 1] for n in range(0, len(self.closed) - 1, 2)
        ]


def _means(sums: Counter[Key], length_us: int) -> dict[Key, float]:
    """Return the mean number of devices over an interval."""
    return {key: sum_us / (WHOLE_MILLI * length_us) for key, sum_us in sums.items() if sum_us}


class Meter:
    """Records how many devices are held and wanted, at each change; changes must come in order of
    time.
    """

    def __init__(self) -> None:
        self._every_us, self._ends_us = SHORTEST_US, SHORTEST_US
        self._held, self._wanted, self._barred = self._all = _Sums(), _Sums(), _Sums()

    def hold(self, at_us: int, key: Key, change: int, milli: int = WHOLE_MILLI) -> None:
        """Note that `change` more devices are held, or `milli` thousandths of each."""
        if at_us >= self._ends_us:
            self._close_until(at_us)
        self._held.add(at_us, key, change * milli)

    def want(self, at_us: int, key: Key, change: int, milli: int = WHOLE_MILLI) -> None:
        if at_us >= self._ends_us:
            self._close_until(at_us)
        self._wanted.add(at_us, key, change * milli)

    def bar(self, at_us: int, key: Key, change_milli: int) -> None:
        """Note that budgets keep so many more thousandths of devices from waiting tasks."""
        if at_us >= self._ends_us:
            self._close_until(at_us)
        self._barred.add(at_us, key, change_milli)

    def _close_until(self, at_us: int) -> None:
        while self._ends_us <= at_us:
            for sums in self._all:
                sums.close(self._ends_us)
            if len(self._held.closed) == MOST:
                for sums in self._all:
                    sums.merge()
                self._every_us *= 2
            self._ends_us += self._every_us

    def intervals(self, until_us: int) -> tuple[Interval, ...]:
        """Return all intervals up to now; no change may be recorded afterwards."""
        self._close_until(until_us)
        last_us = until_us - (self._ends_us - self._every_us)
        lengths = [self._every_us] * len(self._held.closed)
        if last_us > 0:
            for sums in self._all:
                sums.close(until_us)
            lengths.append(last_us)
        return tuple(
            Interval(
                from_s=n * self._every_us / 1e6,
                lasts_s=length / 1e6,
                held=_means(held, length),
                wanted=_means(wanted, length),
                barred=_means(barred, length),
            )
            for n, (length, held, wanted, barred) in enumerate(
                zip(lengths, *(sums.closed for sums in self._all), strict=True)
            )
        )
