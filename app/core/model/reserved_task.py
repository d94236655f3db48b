"""Lists how a task may stand to the reservation that it names, in whose windows alone it runs."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class ReservationStanding(StrEnum):
    """`planned` waits for the next window; `ended` has none left, or the reservation is removed."""

    free = ""  # it names none, or it is inside a window
    planned = "planned"
    ended = "ended"


class NamedReservation(NamedTuple):
    """Holds what people are told of the reservation that a task names."""

    name: str = ""
    opens_s: float | None = None  # when its next window begins, in s since 1970
    is_removed: bool = False

    def __str__(self) -> str:
        return f"reservation {self.name}" if self.name else "reservation"
