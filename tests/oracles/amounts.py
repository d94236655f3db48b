"""Checks the amounts that the published formulas get."""

from __future__ import annotations

import math
from fractions import Fraction

from app.core.fairness.water_filling import Amount, exact


def above_0(word: str, amount: Amount) -> Fraction:
    """Return the amount, exact. If it is not above 0, raises a ValueError that calls it `word`."""
    if not 0 < amount < math.inf:
        raise ValueError(f"{word} {amount} is not a finite number above 0")
    return exact(amount)
