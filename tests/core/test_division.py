from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.division import division


@pytest.mark.parametrize(
    ("capacity", "demands", "weights", "shares"),
    [
        (2, "9 9 9", "1 1 2", "1/2 1/2 1"),  # all want more than there is: by weight
        (4, "1 9 9", "1 1 1", "1 3/2 3/2"),  # a is content with 1; b and c divide 3
        (4, "9 0 9", "1 8 1", "2 0 2"),  # who has no work gets nothing, whatever the weight
        (8, "1 2 3", "1 1 1", "1 2 3"),  # enough for all
        (3, "2 9 9", "4 1 1", "2 1/2 1/2"),  # level 3/6 would give a 2: exactly what it asks
        (0, "1 1 1", "1 2 3", "0 0 0"),
    ],
)
def test_devices_are_divided_by_weight_among_those_who_want_them(
    capacity, demands, weights, shares
):
    got = division(capacity, named(demands, int), named(weights, int))
    assert got == named(shares, Fraction)


counts = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5000)), max_size=8)


@given(capacity=st.integers(0, 20), tenants=counts)
def test_nobody_could_get_more_without_taking_from_one_who_is_served_less(capacity, tenants):
    demands = {str(i): demand for i, (demand, _) in enumerate(tenants)}
    weights = {str(i): weight for i, (_, weight) in enumerate(tenants)}
    shares = division(capacity, demands, weights)
    assert sum(shares.values()) == min(capacity, sum(demands.values()))
    served = {name: shares[name] / weights[name] for name in shares}
    highest = max(served.values(), default=0)
    for name, share in shares.items():
        assert share <= demands[name]
        assert share == demands[name] or served[name] == highest


def named(line: str, kind: type) -> dict:
    return {name: kind(value) for name, value in zip("abc", line.split(), strict=True)}
