"""Division by guarantee, weight, demand and limit: examples by hand, and what always holds."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.fairness.water_filling import (
    Claim,
    Claimant,
    ShareRange,
    divide,
    divide_tree,
    exact,
    level,
)
from tests.thoroughness import examples

# --- by weight and demand -----------------------------------------------------------------------


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
    wanted, weight = named(demands, int), named(weights, int)
    claims = {name: Claim(weight=weight[name], demand=wanted[name]) for name in wanted}
    assert divide(capacity, claims) == named(shares, Fraction)


# --- guarantees and limits ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capacity", "claims", "shares"),
    [
        # a is owed 6 of 10. At equal levels it would have 10/3, so it stays at 6; b and c share 4.
        (10, "1 9 6 -, 1 9 0 -, 1 9 0 -", "6 2 2"),
        # a's 2 are less than its 10/3 by weight: a guarantee is not paid on top.
        (10, "1 9 2 -, 1 9 0 -, 1 9 0 -", "10/3 10/3 10/3"),
        # a wants 1 of its 6: 5 are lent, and 9 are left for b (weight 1) and c (weight 2).
        (10, "1 1 6 -, 1 9 0 -, 2 9 0 -", "1 3 6"),
        # c may hold 2: its weight 8 would give it 8. The other 8 go half and half.
        (10, "1 9 0 -, 1 9 0 -, 8 9 0 2", "4 4 2"),
        # a is owed 4, b may hold 3, weights 1 2 3. a at 4: 6 left for b and c, level 6/5: b 12/5 is
        # below its limit of 3, c 18/5; a would have 6/5 by weight and keeps its 4.
        (10, "1 9 4 -, 2 9 0 3, 3 9 0 -", "4 12/5 18/5"),
        # The limit is below the guarantee: the limit wins.
        (10, "1 9 6 3, 1 9 0 -, 1 9 0 -", "3 7/2 7/2"),
        # 12 are owed and 8 are there: weighted max-min over the owed parts 6, 4, 2. Level 8/3:
        # c has its 2; then 6 for a and b at 3 each.
        (8, "1 9 6 -, 1 9 4 -, 1 9 2 -", "3 3 2"),
        # The same, weights 3 1 1: a 24/5, b 8/5, c 8/5, nobody reaches what is owed.
        (8, "3 9 6 -, 1 9 4 -, 1 9 2 -", "24/5 8/5 8/5"),
        # All that is owed fits exactly: nothing goes by weight.
        (12, "1 9 6 -, 7 9 4 -, 9 9 2 -", "6 4 2"),
    ],
)
def test_a_guarantee_is_a_floor_and_a_limit_a_ceiling(capacity, claims, shares):
    assert divide(capacity, claimed(claims)) == named(shares, Fraction)


def test_numbers_are_what_was_written():
    # 0.1 + 0.2 is not 0.3 in floats; as written, all three demands fit exactly.
    claims = {name: Claim(demand=demand) for name, demand in named("0.1 0.2 0.3", float).items()}
    shares = divide(0.6, claims)
    assert shares == {"a": Fraction(1, 10), "b": Fraction(1, 5), "c": Fraction(3, 10)}
    assert exact(1e-7) == Fraction(1, 10**7)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"weight": 0}, "weight 0 is not above 0"),
        ({"demand": -1}, "demand -1 is below 0"),
        ({"guarantee": -2}, "guarantee -2 is below 0"),
        ({"limit": -3}, "limit -3 is below 0"),
    ],
)
def test_a_claim_that_means_nothing_is_refused(wrong, why):
    for kind in (Claim, Claimant):
        with pytest.raises(ValueError, match=why):
            kind(**wrong)


def test_a_capacity_below_zero_is_refused():
    with pytest.raises(ValueError, match="capacity -1 is below 0"):
        divide(-1, {})


# --- the level ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "spans", "found"),
    [
        (6, [(1, 0, None), (2, 0, None)], 2),
        (6, [(1, 4, None), (2, 0, None)], 1),  # 4 + 2 * 1
        (6, [(1, 4, None), (1, 4, None)], 0),  # the floors come to more
        (9, [(1, 0, 2), (1, 0, 3)], 3),  # the ceilings come to less: the last of them
        (5, [(1, 0, 2), (1, 4, 5)], 1),  # 1 + 4: between 2 and 4 nothing rises, 1 is enough
        (6, [(1, 0, 2), (1, 4, 5)], 2),  # 2 + 4 holds from 2 to 4: the lowest
        (0, [], 0),
        (7, [(0, 1, 3), (1, 0, None)], 6),  # weight 0 stays at its floor
    ],
)
def test_the_level_is_the_lowest_at_which_the_parts_add_up(total, spans, found):
    fractions = [ShareRange(*(n if n is None else Fraction(n) for n in span)) for span in spans]
    assert level(Fraction(total), fractions) == found


# --- trees --------------------------------------------------------------------------------------

LAB = {
    "lab": Claimant(
        weight=1,
        children={"vision": Claimant(demand=9), "speech": Claimant(demand=9, guarantee=4)},
    ),
    "shop": Claimant(weight=2, demand=9),
}


def test_each_branch_divides_its_own_part():
    # lab is owed 4 (speech's), shop nothing. 9 devices: by weight 3 and 6, but lab keeps 4 and shop
    # has 5. Inside lab all 4 are owed to speech.
    assert divide_tree(9, LAB) == {
        ("lab",): 4,
        ("shop",): 5,
        ("lab", "vision"): 0,
        ("lab", "speech"): 4,
    }
    # 18: lab 6 by weight (shop wants 9 at most, so lab has 9). Speech keeps 4 or more: 9/2 each.
    assert divide_tree(18, LAB)["lab", "vision"] == Fraction(9, 2)


def test_an_inner_branch_asks_for_no_more_than_its_children_may_hold():
    # a's children could use 2 (limit) and 1: a gets 3 of its 6 by weight, b the other 9.
    tree = {
        "a": Claimant(children={"x": Claimant(demand=9, limit=2), "y": Claimant(demand=1)}),
        "b": Claimant(demand=20),
    }
    shares = divide_tree(12, tree)
    assert shares == {("a",): 3, ("b",): 9, ("a", "x"): 2, ("a", "y"): 1}


def test_an_idle_guarantee_is_lent_to_the_whole_tree():
    # x is owed 4 and idle. a and b divide 8 evenly: y, its sibling, has no first right to x's 4.
    tree = {
        "a": Claimant(children={"x": Claimant(guarantee=4), "y": Claimant(demand=9)}),
        "b": Claimant(demand=9, weight=3),
    }
    assert divide_tree(8, tree)["a", "y"] == 2


def test_a_parents_own_guarantee_counts_when_it_is_more():
    # a is owed 6 for all its children together, of which x is owed 1: 6, by weight 3 and 3.
    tree = {
        "a": Claimant(
            guarantee=6, children={"x": Claimant(demand=9, guarantee=1), "y": Claimant(demand=9)}
        ),
        "b": Claimant(demand=9, weight=9),
    }
    assert divide_tree(8, tree) == {("a",): 6, ("b",): 2, ("a", "x"): 3, ("a", "y"): 3}


def test_a_parents_limit_holds_its_children_down():
    tree = {
        "a": Claimant(
            limit=3, children={"x": Claimant(demand=9, guarantee=5), "y": Claimant(demand=9)}
        ),
        "b": Claimant(demand=9),
    }
    assert divide_tree(10, tree) == {("a",): 3, ("b",): 7, ("a", "x"): 3, ("a", "y"): 0}


def test_a_tree_may_be_as_deep_as_it_likes():
    branch = Claimant(demand=7)
    for _ in range(2000):
        branch = Claimant(children={"down": branch})
    shares = divide_tree(5, {"down": branch})
    assert len(shares) == 2001
    assert set(shares.values()) == {5}


def test_only_leaves_have_a_demand():
    tree = {"a": Claimant(children={"b": Claimant(demand=1, children={"c": Claimant(demand=1)})})}
    with pytest.raises(ValueError, match="branch a/b has children and a demand of its own, 1"):
        divide_tree(1, tree)


# --- what always holds --------------------------------------------------------------------------

amounts = st.one_of(st.integers(0, 12), st.fractions(0, 12, max_denominator=6))
claims_of = st.builds(
    Claim,
    weight=st.integers(1, 5000),
    demand=amounts,
    guarantee=amounts,
    limit=st.one_of(st.none(), amounts),
)
claim_sets = st.lists(claims_of, max_size=8).map(
    lambda many: {str(i): c for i, c in enumerate(many)}
)


@given(capacity=amounts, claims=claim_sets)
def test_everything_that_is_wanted_is_given_and_no_more(capacity, claims):
    shares = divide(capacity, claims)
    ceilings = {name: claim.ceiling for name, claim in claims.items()}
    assert sum(shares.values()) == min(capacity, sum(ceilings.values()))
    assert all(0 <= shares[name] <= ceilings[name] for name in claims)


@given(capacity=amounts, claims=claim_sets)
def test_guarantees_are_honoured_when_they_fit_and_nobody_has_more_when_they_do_not(
    capacity, claims
):
    owed = {name: min(c.guarantee, c.ceiling) for name, c in claims.items()}
    shares = divide(capacity, claims)
    if sum(owed.values()) <= capacity:
        assert all(shares[name] >= owed[name] for name in claims)
    else:
        assert all(shares[name] <= owed[name] for name in claims)


@given(capacity=amounts, claims=claim_sets)
def test_who_has_less_by_weight_is_content_or_the_other_has_what_it_is_owed(capacity, claims):
    shares = divide(capacity, claims)
    short = sum(claim.floor for claim in claims.values()) > capacity
    served = {name: shares[name] / claims[name].weight for name in claims}
    for a, less in claims.items():
        for b, more in claims.items():
            if served[a] < served[b]:
                most = less.floor if short else less.ceiling
                assert shares[a] == most or (not short and shares[b] == more.floor)


@given(capacities=st.lists(amounts, min_size=2, max_size=4), claims=claim_sets)
def test_more_capacity_takes_nothing_from_anybody(capacities, claims):
    for less, more in pairwise(sorted(capacities)):
        before, after = divide(less, claims), divide(more, claims)
        assert all(before[name] <= after[name] for name in claims)


@given(capacity=amounts, claims=claim_sets)
def test_a_tree_of_one_level_is_the_flat_division(capacity, claims):
    leaves = {
        name: Claimant(weight=c.weight, demand=c.demand, guarantee=c.guarantee, limit=c.limit)
        for name, c in claims.items()
    }
    flat = divide(capacity, claims)
    assert divide_tree(capacity, leaves) == {(name,): share for name, share in flat.items()}


words = st.sampled_from("abc")
leaf = st.builds(
    Claimant,
    weight=st.integers(1, 9),
    demand=st.integers(0, 9),
    guarantee=st.integers(0, 4),
    limit=st.one_of(st.none(), st.integers(0, 9)),
)
branches = st.recursive(
    leaf,
    lambda below: st.builds(
        Claimant,
        weight=st.integers(1, 9),
        guarantee=st.integers(0, 9),
        limit=st.one_of(st.none(), st.integers(0, 20)),
        children=st.dictionaries(words, below, min_size=1, max_size=3),
    ),
    max_leaves=12,
)
trees = st.dictionaries(words, branches, max_size=3)


def could_hold(branch: Claimant) -> Fraction:
    """What a branch could use: computed apart from the code under test."""
    inside = sum((could_hold(child) for child in branch.children.values()), Fraction(0))
    wanted = inside if branch.children else Fraction(branch.demand)
    return wanted if branch.limit is None else min(wanted, Fraction(branch.limit))


def owed_to(branch: Claimant) -> Fraction:
    inside = sum((owed_to(child) for child in branch.children.values()), Fraction(0))
    return min(max(Fraction(branch.guarantee), inside), could_hold(branch))


def families(tree, path=()):
    yield path, tree
    for name, branch in tree.items():
        if branch.children:
            yield from families(branch.children, (*path, name))


@settings(max_examples=examples(200))
@given(capacity=st.integers(0, 30), tree=trees)
def test_in_a_tree_every_branch_gives_on_all_it_has_and_honours_what_is_owed_below(capacity, tree):
    shares = divide_tree(capacity, tree)
    for path, children in families(tree):
        part = shares[path] if path else capacity
        below = {name: shares[*path, name] for name in children}
        could = {name: could_hold(child) for name, child in children.items()}
        owed = {name: owed_to(child) for name, child in children.items()}
        assert sum(below.values()) == min(part, sum(could.values()))
        assert all(0 <= below[name] <= could[name] for name in children)
        if sum(owed.values()) <= part:
            assert all(below[name] >= owed[name] for name in children)


@given(less=st.integers(0, 30), more=st.integers(0, 30), tree=trees)
def test_more_capacity_takes_nothing_from_anybody_in_a_tree(less, more, tree):
    less, more = sorted((less, more))
    before, after = divide_tree(less, tree), divide_tree(more, tree)
    assert all(before[path] <= after[path] for path in before)


# --- how the tables above are written -----------------------------------------------------------


def named(line: str, kind: type) -> dict:
    return {name: kind(value) for name, value in zip("abc", line.split(), strict=True)}


def claimed(lines: str) -> dict[str, Claim]:
    """ "weight demand guarantee limit, ..." for a, b and c; "-" is no limit."""
    claims = {}
    for name, line in zip("abc", lines.split(","), strict=True):
        weight, demand, guarantee, limit = line.split()
        claims[name] = Claim(
            weight=int(weight),
            demand=int(demand),
            guarantee=int(guarantee),
            limit=None if limit == "-" else int(limit),
        )
    return claims
