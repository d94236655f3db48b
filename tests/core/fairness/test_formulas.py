"""The published formulas: the sources' own examples, and more worked out by hand from the text."""

from __future__ import annotations

import doctest
import inspect
import math
import re
from collections.abc import Callable
from fractions import Fraction as F
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.fairness import dominant_resource, water_filling
from app.core.fairness.water_filling import Claim, divide
from tests.oracles import formulas_history, formulas_resources, formulas_shares, stride
from tests.oracles.formulas_history import (
    condor_effective,
    condor_priority,
    kai_time_weights,
    kueue_consumed,
    kueue_entry_penalty,
    kueue_usage,
    slurm_billing,
    slurm_classic,
    slurm_fair_tree,
)
from tests.oracles.formulas_resources import (
    armada_cost,
    divisible_filling,
    dominant_share,
    kueue_share,
    progressive_filling,
)
from tests.oracles.formulas_shares import (
    KaiQueue,
    YarnQueue,
    armada_fairness_error,
    armada_shares,
    armada_theoretical_share,
    condor_slices,
    condor_spins,
    jain_index,
    kai_shares,
    yarn_shares,
)

DAY = 86400.0

# --- Slurm, classic -----------------------------------------------------------------------------

FIGURE_3 = {  # classic_fair_share.html: name -> (parent, shares, usage)
    "A": (None, 40, 0),
    "B": ("A", 30, 0),
    "C": ("A", 10, 0),
    "D": (None, 60, 0),
    "E": ("D", 25, 0),
    "F": ("D", 35, 0),
    "User 1": ("B", 1, 0.2),
    "User 2": ("C", 1, 0.25),
    "User 3": ("C", 1, 0),
    "User 4": ("E", 1, 0.25),
    "User 5": ("F", 1, 0),
}


def tables(rows):
    parents = {name: parent for name, (parent, _, _) in rows.items()}
    shares = {name: shares for name, (_, shares, _) in rows.items()}
    usage = {name: usage for name, (_, _, usage) in rows.items() if usage}
    return parents, shares, usage


@pytest.mark.parametrize(
    ("user", "norm_shares", "effective", "fairshare"),
    [
        ("User 1", 0.3, 0.3875, 0.408479),
        ("User 2", 0.05, 0.275, 0.022097),
        ("User 3", 0.05, 0.15, 0.125),
        ("User 4", 0.25, 0.25, 0.5),
        ("User 5", 0.35, 0.1458, 0.749154),
    ],
)
def test_slurm_classic_gives_the_table_of_its_manual(user, norm_shares, effective, fairshare):
    row = slurm_classic(*tables(FIGURE_3))[user]
    assert row.norm_shares == F(str(norm_shares))
    assert float(row.effective_usage) == pytest.approx(effective, abs=5e-5)
    assert row.fairshare == pytest.approx(fairshare, abs=5e-5)


def test_slurm_classic_is_exact_where_the_manual_rounds():
    rows = slurm_classic(*tables(FIGURE_3))
    used = {name: rows[name].effective_usage for name in "ABCDEF"}
    assert used == {
        "A": F(45, 100),
        "D": F(25, 100),
        "B": F(3875, 10000),
        "C": F(3, 10),
        "E": F(1, 4),
        "F": F(7, 48),  # 0.25 * 35 / 60, which the manual writes as 0.1458
    }
    assert rows["User 5"].fairshare == pytest.approx(2 ** -(F(7, 48) / F(35, 100)), rel=1e-15)


def test_slurm_classic_on_one_tier_is_usage_over_share():
    # Shares 1 and 3, usage 1/2 and 1/2: UE/S is 2 and 2/3. Damping 2 halves the exponents.
    flat = {"x": (None, 1, 0.5), "y": (None, 3, 0.5)}
    rows = slurm_classic(*tables(flat))
    assert rows["x"].fairshare == 0.25
    assert rows["y"].fairshare == pytest.approx(2 ** (-2 / 3))
    assert slurm_classic(*tables(flat), damping=2)["x"].fairshare == 0.5


def test_slurm_classic_without_usage_is_one_and_without_shares_zero():
    rows = slurm_classic(*tables({"x": (None, 1, 0), "y": (None, 0, 0), "z": (None, 1, 1)}))
    assert [rows[name].fairshare for name in "xyz"] == [1.0, 0.0, 0.25]  # z: 1 / (1/2)


def test_a_broken_tree_says_what_is_wrong():
    with pytest.raises(ValueError, match="x: parent 'y' is not in the tree"):
        slurm_classic({"x": "y"}, {"x": 1}, {})
    with pytest.raises(ValueError, match="x, y: a circle of parents"):
        slurm_classic({"x": "y", "y": "x"}, {"x": 1, "y": 1}, {})
    with pytest.raises(ValueError, match="x: usage is given for users only"):
        slurm_fair_tree({"x": None, "y": "x"}, {"x": 1, "y": 1}, {"x": 1})


# --- Slurm, Fair Tree ---------------------------------------------------------------------------


def order(rows):
    """Fair Tree's ranks, the best first, as (user, rank)."""
    ranked = ((name, row.rank) for name, row in rows.items() if row.rank)
    return sorted(ranked, key=lambda pair: (-pair[1], pair[0]))


def test_fair_tree_puts_all_of_a_better_account_before_all_of_a_worse():
    # A: 1/2 of shares, 1/4 of usage: LF 2. B: 1/2, 3/4: LF 2/3. Inside, by shares / usage:
    # a1 1/10 against a2 1/20: a1 LF (1/2)/(2/3) and a2 (1/2)/(1/3): a2 first.
    rows = slurm_fair_tree(
        *tables(
            {
                "A": (None, 1, 0),
                "B": (None, 1, 0),
                "a1": ("A", 1, 20),
                "a2": ("A", 1, 10),
                "b1": ("B", 1, 0),
                "b2": ("B", 1, 90),
            }
        )
    )
    assert order(rows) == [("a2", 4), ("a1", 3), ("b1", 2), ("b2", 1)]
    assert rows["A"].level_fs == 2
    assert rows["B"].level_fs == F(2, 3)
    assert rows["a1"].level_fs == F(3, 4)
    assert rows["b1"].level_fs == math.inf  # shares and no usage
    assert [rows[name].fairshare for name in ("a2", "a1", "b1", "b2")] == [
        1,
        F(3, 4),
        F(1, 2),
        F(1, 4),
    ]


def test_tied_sibling_users_share_a_rank_and_the_next_is_as_far_down():
    # LF of u, v, w: (1/4)/(1/5), the same, (2/4)/(3/5): 5/4, 5/4, 5/6.
    rows = slurm_fair_tree(*tables({"u": (None, 1, 1), "v": (None, 1, 1), "w": (None, 2, 3)}))
    assert order(rows) == [("u", 3), ("v", 3), ("w", 1)]


TIED_ACCOUNTS = {
    # A and B: half of the shares and half of the usage each. Their children are ranked together:
    # a1 (1/2)/(1/4) = 2, a2 (1/2)/(3/4) = 2/3, b1 (1/3)/(1/6) = 2, b2 (2/3)/(5/6) = 4/5.
    "A": (None, 1, 0),
    "B": (None, 1, 0),
    "a1": ("A", 1, 15),
    "a2": ("A", 1, 45),
    "b1": ("B", 1, 10),
    "b2": ("B", 2, 50),
}


def test_children_of_tied_accounts_are_merged_and_ranked_together():
    rows = slurm_fair_tree(*tables(TIED_ACCOUNTS))
    assert rows["A"].level_fs == rows["B"].level_fs == 1
    assert order(rows) == [("a1", 4), ("b1", 4), ("b2", 2), ("a2", 1)]


def test_a_tie_that_floats_would_miss_is_a_tie():
    # A: 1/10 of shares, (1/10 + 1/5) of usage; B: the same by one number of 3/10.
    thirds = {
        "A": (None, 1, 0),
        "B": (None, 1, 0),
        "a1": ("A", 1, 0.1),
        "a2": ("A", 1, 0.2),
        "b1": ("B", 1, 0.3),
    }
    rows = slurm_fair_tree(*tables(thirds))
    assert rows["A"].level_fs == rows["B"].level_fs
    # a1 (1/2)/(1/3) = 3/2; b1 1/1; a2 (1/2)/(2/3) = 3/4: b1 lies between the children of A.
    assert order(rows) == [("a1", 3), ("b1", 2), ("a2", 1)]


def test_a_user_tied_with_an_account_has_the_rank_of_its_best_user():
    # u, A: LF 1 each. A's users: a1 (1/2)/(1/4) = 2, a2 2/3.
    rows = slurm_fair_tree(
        *tables({"u": (None, 1, 4), "A": (None, 1, 0), "a1": ("A", 1, 1), "a2": ("A", 1, 3)})
    )
    assert order(rows) == [("a1", 3), ("u", 3), ("a2", 1)]


def test_ties_go_down_through_accounts_that_were_merged():
    # A and B tie; so do their only accounts AA and BB (LF 1 each: no siblings); so do a and b.
    # The user u of A has the LF of nobody: (1/2)/(0): infinite, so it comes first.
    rows = slurm_fair_tree(
        *tables(
            {
                "A": (None, 1, 0),
                "B": (None, 1, 0),
                "AA": ("A", 1, 0),
                "BB": ("B", 1, 0),
                "u": ("A", 1, 0),
                "a": ("AA", 1, 6),
                "b": ("BB", 1, 5),
                "c": ("BB", 1, 1),
            }
        )
    )
    # AA: (1/2)/1 = 1/2; BB: 1. So u (infinite), then BB's c (1/2)/(1/6) = 3, b 3/5, then a.
    assert order(rows) == [("u", 4), ("c", 3), ("b", 2), ("a", 1)]


def test_an_account_without_users_takes_no_rank():
    rows = slurm_fair_tree(
        {"A": None, "B": None, "b": "B"}, {"A": 1, "B": 1, "b": 1}, {"b": 1}, users=["b"]
    )
    assert order(rows) == [("b", 1)]
    assert rows["b"].fairshare == 1
    assert rows["A"].rank == 0


def test_who_has_no_shares_comes_last_even_without_usage():
    rows = slurm_fair_tree(*tables({"u": (None, 0, 0), "v": (None, 1, 7)}))
    assert order(rows) == [("v", 2), ("u", 1)]
    assert rows["u"].level_fs == 0


fair_trees = st.dictionaries(
    st.text("abc", min_size=1, max_size=4),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
    max_size=14,
)


@given(fair_trees)
def test_in_a_fair_tree_siblings_never_interleave_unless_they_tie(found):
    # A name's parent is the longest shorter name in the tree that it starts with.
    parents = {
        name: next((name[:n] for n in range(len(name) - 1, 0, -1) if name[:n] in found), None)
        for name in found
    }
    users = set(found) - set(parents.values())
    shares = {name: pair[0] for name, pair in found.items()}
    rows = slurm_fair_tree(parents, shares, {name: found[name][1] for name in users})
    assert all((rows[name].rank > 0) == (name in users) for name in found)
    under = {name: [u for u in users if u.startswith(name)] for name in found}
    for a in found:
        for b in found:
            if a != b and parents[a] == parents[b] and rows[a].level_fs > rows[b].level_fs:
                lowest = min(
                    (rows[u].rank for u in under[a] if a in lineage(u, parents)), default=99
                )
                highest = max(
                    (rows[u].rank for u in under[b] if b in lineage(u, parents)), default=0
                )
                assert lowest > highest


def lineage(name, parents):
    line = []
    while name is not None:
        line.append(name)
        name = parents[name]
    return line


# --- Slurm, billing -----------------------------------------------------------------------------

PER_CORE = {"cpu": 1.0, "mem": 0.25}  # TRESBillingWeights="CPU=1.0,Mem=0.25G", memory in GiB


@pytest.mark.parametrize(
    ("mode", "cpu", "mem", "billed"),
    [
        ("sum", 1, 60, 16),
        ("sum", 16, 1, F("16.25")),
        ("sum", 16, 60, 31),
        ("max_tres", 1, 60, 15),
        ("max_tres", 15, 1, 15),
        ("max_tres", 16, 64, 16),
    ],
)
def test_billing_gives_the_examples_of_the_manual(mode, cpu, mem, billed):
    assert slurm_billing({"cpu": cpu, "mem": mem}, PER_CORE, mode=mode) == billed


@pytest.mark.parametrize(
    ("mode", "billed"),
    [
        ("sum", 4 + 8 + 6 + 2),
        ("max_tres", 8 + 2),  # the heaviest of 4, 8, 6; licences on top
        ("max_tres_gres", 8 + 6 + 2),  # the heaviest of 4, 8; GPUs and licences on top
    ],
)
def test_billing_adds_what_is_cluster_wide_and_gpus_on_demand(mode, billed):
    tres = {"cpu": 4, "mem": 32, "gres/gpu": 3, "license/matlab": 2, "node": 1}
    weights = {"cpu": 1, "mem": 0.25, "gres/gpu": 2, "license/matlab": 1}
    got = slurm_billing(tres, weights, mode=mode, cluster_wide={"license/matlab"})
    assert got == billed


# --- HTCondor -----------------------------------------------------------------------------------


def test_an_idle_users_priority_halves_each_day():
    assert condor_priority(10, 0, elapsed_s=DAY, half_life_s=DAY) == 5
    assert condor_priority(10, 0, elapsed_s=2 * DAY, half_life_s=DAY) == 2.5
    assert condor_priority(0.6, 0, elapsed_s=DAY, half_life_s=DAY) == 0.5  # 0.3, but never below


def test_a_hundred_cores_for_two_days_make_seventy_five():
    # The manual says "about 75.0"; exactly 0.25 * 0.5 + 0.75 * 100.
    grown = condor_priority(0.5, 100, elapsed_s=2 * DAY, half_life_s=DAY)
    assert grown == 75.125
    assert 75.0 / 0.5 == 150  # so much more does one at the floor deserve, as the manual says


@given(st.floats(0.5, 1e4), st.floats(0, 1e4), st.floats(0, 1e6), st.floats(0, 1e6))
def test_a_priority_does_not_depend_on_how_often_it_is_updated(priority, used, first_s, then_s):
    once = condor_priority(priority, used, elapsed_s=first_s + then_s)
    half_way = condor_priority(priority, used, elapsed_s=first_s)
    twice = condor_priority(half_way, used, elapsed_s=then_s)
    # The floor may cut in between only if it cuts at the end: used < 0.5 pulls monotonously down.
    assert twice == pytest.approx(once, rel=1e-9)


def test_the_effective_priority_is_factored():
    assert condor_effective(75.125) == 75125
    assert condor_effective(0.5, 10) == 5


def test_pie_slices_go_by_the_inverse_of_priority():
    # Manual: A (5) gets twice B (10) and four times C (20). Worth 4, 2, 1 of 7; a pie of 70.
    slices = condor_slices(70, {"A": 5, "B": 10, "C": 20})
    assert slices == {"A": 40, "B": 20, "C": 10}


def test_what_a_submitter_holds_comes_off_its_slice():
    slices = condor_slices(70, {"A": 5, "B": 10, "C": 20}, used={"A": 15, "C": 12})
    assert slices == {"A": 25, "B": 20, "C": 0}


def test_the_pie_spins_until_it_is_eaten():
    # A wants 10 of its 40. The second spin is over B and C, worth 2 and 1: slices of the whole pie
    # 140/3 and 70/3, less 20 and 10: 80/3 and 40/3. 30 are left: B takes 80/3, C the last 10/3.
    spins = condor_spins(70, {"A": 5, "B": 10, "C": 20}, {"A": 10, "B": 99, "C": 99})
    assert spins == [
        {"A": 10, "B": 20, "C": 10},
        {"A": 0, "B": F(80, 3), "C": F(10, 3)},
    ]


def test_ceilings_hold_and_floors_come_first():
    # Floor round: C to its 15, but within its slice of 10. Then A stops at 25, B 20; 15 are left.
    # Second spin, B alone (C holds its share, worth 1 of 3: 70/3 - 10 = 40/3; B 140/3 - 20).
    spins = condor_spins(
        70,
        {"A": 5, "B": 10, "C": 20},
        {"A": 99, "B": 99, "C": 99},
        floors={"C": 15},
        ceilings={"A": 25},
    )
    assert spins == [
        {"A": 0, "B": 0, "C": 10},
        {"A": 25, "B": 20, "C": 0},
        {"A": 0, "B": 15, "C": 0},
    ]


@given(
    pie=st.integers(0, 100),
    table=st.dictionaries(
        st.sampled_from("abcdef"), st.tuples(st.integers(1, 50), st.integers(0, 60))
    ),
)
def test_spinning_leaves_nothing_that_somebody_wants(pie, table):
    wants = {name: want for name, (_, want) in table.items()}
    spins = condor_spins(pie, {name: prio for name, (prio, _) in table.items()}, wants)
    given_to = {name: sum(spin[name] for spin in spins) for name in table}
    assert sum(given_to.values()) == min(pie, sum(wants.values()))
    assert all(given_to[name] <= wants[name] for name in table)


# --- dominant resource fairness -----------------------------------------------------------------

PAPER = {"A": {"cpu": 1, "memory": 4}, "B": {"cpu": 3, "memory": 1}}
POOL = {"cpu": 9, "memory": 18}


def test_progressive_filling_gives_the_table_of_the_paper():
    filled = progressive_filling(POOL, PAPER, order=["B", "A"])  # the paper starts with B
    table = [
        (s.user, s.shares["A"], s.shares["B"], s.used["cpu"], s.used["memory"])
        for s in filled.steps
    ]
    assert table == [
        ("B", 0, F(3, 9), 3, 1),
        ("A", F(4, 18), F(3, 9), 4, 5),
        ("A", F(8, 18), F(3, 9), 5, 9),
        ("B", F(8, 18), F(6, 9), 8, 10),
        ("A", F(12, 18), F(6, 9), 9, 14),
    ]
    assert filled.tasks == {"A": 3, "B": 2}
    assert filled.shares == {"A": F(2, 3), "B": F(2, 3)}
    assert filled.used == {"cpu": 9, "memory": 14}


def test_ties_go_as_they_are_told():
    # A first: 4/18; B 3/9; A (4/18 < 3/9) 8/18; B (3/9 < 8/18) 6/9; A 12/18. The same end.
    filled = progressive_filling(POOL, PAPER)
    assert "".join(s.user for s in filled.steps) == "ABABA"
    assert filled.tasks == {"A": 3, "B": 2}


def test_a_weight_of_two_makes_twice_the_dominant_share():
    # 12 CPUs, tasks of 1: shares over weight 0 0, A 1/24, B 1/12, A 2/24 ... : 8 and 4.
    one = {"A": {"cpu": 1}, "B": {"cpu": 1}}
    assert progressive_filling({"cpu": 12}, one, weights={"A": 2}).tasks == {"A": 8, "B": 4}


def test_who_does_not_fit_is_out_and_the_others_go_on():
    # A's task is 3 of 7 CPUs, B's 1 of 6 GB. A 3/7; B to 3/6, the first above 3/7; A 6/7; B to 6/6,
    # the first above 6/7. A would need 3 CPUs of 1, and B's memory is full.
    tasks = {"A": {"cpu": 3}, "B": {"gb": 1}}
    filled = progressive_filling({"cpu": 7, "gb": 6}, tasks)
    assert "".join(s.user for s in filled.steps) == "ABBBABBB"
    # With 9 GB: A 3/7, B to 4/9, A 6/7, B to 8/9. Algorithm 1 to the letter ends here, where A is
    # next and does not fit; else B has the last GB.
    stopped = progressive_filling({"cpu": 7, "gb": 9}, tasks, stop_at_misfit=True)
    assert stopped.tasks == {"A": 2, "B": 8}
    assert progressive_filling({"cpu": 7, "gb": 9}, tasks).tasks == {"A": 2, "B": 9}


def test_who_wants_no_more_is_out():
    for stop_at_misfit in (False, True):  # to have enough is not to be a misfit
        filled = progressive_filling(POOL, PAPER, most={"A": 1}, stop_at_misfit=stop_at_misfit)
        assert filled.tasks == {"A": 1, "B": 2}  # 1 + 3 * 2 of 9 CPUs; a third would need 10


def test_three_users_and_three_resources():
    # Of 10 CPUs, 20 GB, 4 GPUs: x (1, 4, 0) 1/5 memory; y (2, 1, 0) 1/5 CPU; z (1, 1, 1) 1/4 GPU.
    # x y z, x y (1/5 each), z (1/4), x (2/5), y (2/5): CPUs 1+2+1+1+2+1+1 = 9 before y, y needs 2:
    # out. GB 4+1+1+4+1+1+4 = 16. z (2/4) fits: CPU 10. Nothing fits any more.
    tasks = {
        "x": {"cpu": 1, "gb": 4},
        "y": {"cpu": 2, "gb": 1},
        "z": {"cpu": 1, "gb": 1, "gpu": 1},
    }
    filled = progressive_filling({"cpu": 10, "gb": 20, "gpu": 4}, tasks)
    assert "".join(s.user for s in filled.steps) == "xyzxyzxz"
    assert filled.tasks == {"x": 3, "y": 2, "z": 3}
    assert filled.shares == {"x": F(3, 5), "y": F(2, 5), "z": F(3, 4)}
    assert filled.used == {"cpu": 10, "gb": 17, "gpu": 3}


def test_a_task_that_needs_nothing_is_refused():
    with pytest.raises(ValueError, match="A: a task that needs nothing"):
        progressive_filling({"cpu": 1}, {"A": {"cpu": 0}})
    with pytest.raises(ValueError, match="1 of gpu, of which there is none"):
        progressive_filling({"cpu": 1}, {"A": {"gpu": 1}})


def test_divisible_tasks_meet_the_linear_programme_of_the_paper():
    # max x, y with x + 3y <= 9, 4x + y <= 18, 4x/18 = 3y/9: x = 3, y = 2.
    assert divisible_filling(POOL, PAPER) == {"A": 3, "B": 2}
    # With 10 CPUs: 2x/9 = 3y/10 makes y = 20x/27; x + 60x/27 = 10 makes x = 90/29, y = 200/87.
    got = divisible_filling({"cpu": 10, "memory": 18}, PAPER)
    assert got == {"A": F(90, 29), "B": F(200, 87)}


def test_when_one_resource_is_full_the_others_rise_on():
    # A needs CPU only (1 of 4), B and C memory (1 of 12), C also CPU (1): dominant 1/4, 1/12, 1/4.
    # Level l: A 4l, B 12l, C 4l tasks; CPU 8l = 4 at l = 1/2: A 2, C 2, B 6; memory 8 of 12 used.
    # B goes on alone to 10.
    tasks = {"A": {"cpu": 1}, "B": {"gb": 1}, "C": {"cpu": 1, "gb": 1}}
    assert divisible_filling({"cpu": 4, "gb": 12}, tasks) == {"A": 2, "B": 10, "C": 2}
    # With A content at 1: l = 1/4 (A 1, B 3, C 1), then 2 CPUs for C alone: 4 * 1/2: C 3, B 9.
    got = divisible_filling({"cpu": 4, "gb": 12}, tasks, most={"A": 1})
    assert got == {"A": 1, "B": 9, "C": 3}


def test_the_dominant_share_names_its_resource():
    assert dominant_share({"cpu": 2, "memory": 8}, POOL) == (F(4, 9), "memory")
    assert dominant_share({"memory": 9, "cpu": F(9, 2)}, POOL) == (F(1, 2), "cpu")  # tie: by name
    assert dominant_share({}, POOL) == (0, "")


@given(
    capacity=st.lists(st.integers(1, 20), min_size=2, max_size=2),
    needs=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=1, max_size=4),
)
def test_filling_is_feasible_and_nobody_fits_at_the_end(capacity, needs):
    pool = dict(zip(("p", "q"), capacity, strict=True))
    tasks = {str(i): {"p": p, "q": q} for i, (p, q) in enumerate(needs)}
    filled = progressive_filling(pool, tasks)
    for name in pool:
        total = sum(filled.tasks[user] * tasks[user][name] for user in tasks)
        assert total == filled.used[name] <= pool[name]
    for need in tasks.values():
        assert any(filled.used[name] + need[name] > pool[name] for name in pool)
    fluid = divisible_filling(pool, tasks)
    for user, need in tasks.items():  # sharing incentive: as good as 1/n of everything
        alone = min(F(pool[name], need[name] * len(tasks)) for name in pool if need[name])
        assert fluid[user] >= alone


# --- stride -------------------------------------------------------------------------------------


def test_strides_and_picks_are_those_of_the_textbook():
    race = stride.start({"A": 100, "B": 50, "C": 250}, k=10_000)
    assert [stride.stride(t, k=10_000) for t in (100, 50, 250)] == [100, 200, 40]
    trace = [(p.name, *p.passes.values()) for p in stride.picks(race, 8)]
    assert trace == [
        ("A", 100, 0, 0),
        ("B", 100, 200, 0),
        ("C", 100, 200, 40),
        ("C", 100, 200, 80),
        ("C", 100, 200, 120),
        ("A", 200, 200, 120),
        ("C", 200, 200, 160),
        ("C", 200, 200, 200),
    ]


def test_three_to_two_to_one_as_in_the_paper():
    # Tickets 3, 2, 1 with K = 6: strides 2, 3, 6, from one stride each, as the paper starts.
    race = stride.start({"A": 3, "B": 2, "C": 1}, k=6, passes={"A": 2, "B": 3, "C": 6})
    assert "".join(p.name for p in stride.picks(race, 6)) == "ABAABC"


def test_a_stride_that_is_not_whole_stays_exact():
    race = stride.start({"A": 3, "B": 7}, k=1)
    done = stride.picks(race, 10)
    assert done[-1].passes == {"A": 1, "B": 1}  # 3 picks of 1/3 and 7 of 1/7
    assert sum(p.name == "A" for p in done) == 3


def test_who_leaves_and_comes_back_gains_nothing_and_loses_nothing():
    # Tickets 1 and 1, K = 2: strides 2, the global pass moves by 1. After A ran: A 2, B 0, global
    # pass 1; A leaves 1 ahead. B runs twice alone: the global pass moves by 2, to 5; A comes to 6.
    _, race = stride.pick(stride.start({"A": 1, "B": 1}, k=2))
    remain, race = stride.leave(race, "A")
    assert remain == 1
    for _ in range(2):
        name, race = stride.pick(race)
        assert name == "B"
    assert race.global_pass == 5
    race = stride.join(race, "A", 1, remain=remain)
    assert race.passes == {"B": 4, "A": 6}
    assert "".join(p.name for p in stride.picks(race, 3)) == "BBA"  # 4, then 6 against 6, then 8


def test_a_newcomer_starts_one_stride_after_the_global_pass():
    race = stride.start({"A": 1}, k=12)
    for _ in range(5):
        _, race = stride.pick(race)
    race = stride.join(race, "B", 3)
    assert race.passes == {"A": 60, "B": 64}  # 60 + 12 / 3
    with pytest.raises(ValueError, match="B takes part already"):
        stride.join(race, "B", 3)
    with pytest.raises(ValueError, match="0 tickets"):
        stride.join(race, "C", 0)
    with pytest.raises(ValueError, match="nobody takes part"):
        stride.pick(stride.start({}))


@given(
    st.dictionaries(st.sampled_from("abcde"), st.integers(1, 9), min_size=2),
    st.integers(1, 60),
)
def test_two_clients_are_never_more_than_one_quantum_apart(tickets, count):
    done = stride.picks(stride.start(tickets), count)
    ran = {name: sum(p.name == name for p in done) for name in tickets}
    for a in tickets:
        for b in tickets:  # of the quanta these two had, a's due is ta / (ta + tb)
            due = F((ran[a] + ran[b]) * tickets[a], tickets[a] + tickets[b])
            assert abs(ran[a] - due) <= 1


# --- Kueue --------------------------------------------------------------------------------------

A100, H100 = ("a100", "gpu"), ("h100", "gpu")


def test_the_share_is_of_what_is_borrowed_only():
    quota = {A100: 4, ("any", "cpu"): 10}
    lendable = {"gpu": 20, "cpu": 100}
    below = kueue_share({A100: 4, ("any", "cpu"): 3}, quota, lendable)
    assert (below.share, below.borrowing, below.resource) == (0, False, "")
    # 3 GPUs of 20 are 150 of 1000, 20 CPUs of 100 are 200: CPU; weight 2 halves it.
    above = kueue_share({A100: 7, ("any", "cpu"): 30}, quota, lendable, weight=2)
    assert (above.resource, above.ratio, above.share) == ("cpu", 200, 100)


def test_borrowing_on_flavors_adds_up_and_unused_quota_of_one_does_not_help_another():
    # a100: 5 - 4 = 1 over, h100: 2 of 6, nothing over; with a request of 6 h100, 2 over: 3 of 30.
    usage, quota = {A100: 5, H100: 2}, {A100: 4, H100: 6}
    assert kueue_share(usage, quota, {"gpu": 30}).ratio == F(1000, 30)
    assert kueue_share(usage, quota, {"gpu": 30}, request={H100: 6}).share == 100


def test_weight_zero_is_infinite_and_ordered_by_ratio():
    def share(used, weight):
        return kueue_share({A100: used}, {A100: 0}, {"gpu": 10}, weight=weight)

    queues = {
        "greedy": share(5, 0),
        "small": share(1, 0),
        "heavy": share(9, 3),
        "light": share(2, 1),
        "idle": share(0, 0),
    }
    assert queues["small"].share == queues["greedy"].share == math.inf
    assert queues["idle"].share == 0
    ranked = sorted(queues, key=lambda name: queues[name].rank)
    assert ranked == ["idle", "light", "heavy", "small", "greedy"]  # 0, 200, 300, then 100 < 500


def test_what_nobody_can_lend_does_not_count_but_is_borrowed():
    share = kueue_share({A100: 3}, {A100: 1}, {"gpu": 0})
    assert (share.ratio, share.borrowing, share.share) == (0, True, 0)


def test_consumed_usage_fades_half_way_to_what_is_used():
    # A = 1 - 0.5 = 1/2 after one half-life: 8/2 + 4/2; 3/4 after two.
    assert kueue_consumed(8, 4, elapsed_s=600, half_life_s=600) == 6
    assert kueue_consumed(8, 4, elapsed_s=1200, half_life_s=600) == 5
    assert kueue_entry_penalty(8, sampling_s=600, half_life_s=600) == 4
    assert kueue_entry_penalty(8, sampling_s=300, half_life_s=300 * 3) == pytest.approx(
        8 * (1 - 2 ** (-1 / 3))
    )


def test_a_penalty_stands_for_the_first_sample():
    # Charged on entry and not yet sampled, or sampled after one interval: the same usage.
    entered = 0.0 + kueue_entry_penalty(8, sampling_s=300, half_life_s=700)
    sampled = kueue_consumed(0.0, 8, elapsed_s=300, half_life_s=700)
    assert entered == pytest.approx(sampled)


def test_a_local_queues_usage_is_weighted():
    # gpu (3 + 1) * 10 + cpu 8 * 1 = 48, over weight 2.
    usage = kueue_usage({"gpu": 3, "cpu": 8}, {"gpu": 1}, weight=2, resource_weights={"gpu": 10})
    assert usage == 24
    assert kueue_usage({"gpu": 0}, weight=0) == math.inf


# --- KAI ----------------------------------------------------------------------------------------


def test_kai_gives_what_is_deserved_and_then_by_weight():
    # 10 GPUs: 4 + 2 deserved, 4 over: weights 1 and 3: 1 and 3.
    queues = {
        "a": KaiQueue(request=9, deserved=4, weight=1),
        "b": KaiQueue(request=9, deserved=2, weight=3),
    }
    assert kai_shares(10, queues) == {"a": 5, "b": 5}


def test_kai_rounds_down_and_gives_the_rest_by_remainder_then_age_then_name():
    # 8 over, by thirds: 2 each; 2/3 lost by all three; the two left to c (older) and a (name).
    queues = {n: KaiQueue(request=9, created=0 if n == "c" else 1) for n in "abc"}
    assert kai_shares(8, queues) == {"a": 3, "b": 2, "c": 3}
    # Weights 1, 2, 4 of 7 units to 10: 10/7, 20/7, 40/7: 1, 2, 5; lost 3/7, 6/7, 5/7: b, then c.
    weighted = {n: KaiQueue(request=9, weight=w) for n, w in (("a", 1), ("b", 2), ("c", 4))}
    assert kai_shares(10, weighted) == {"a": 1, "b": 3, "c": 6}


def test_kai_offers_again_what_one_did_not_want():
    # 12 over: 4 each; a wants 1: 3 over. b and c have 4 each; again 3/2 each: 1 each; b by name.
    queues = {"a": KaiQueue(request=1), "b": KaiQueue(request=9), "c": KaiQueue(request=9)}
    assert kai_shares(12, queues) == {"a": 1, "b": 6, "c": 5}


def test_kai_serves_higher_priorities_first_over_quota_but_not_under():
    queues = {
        "low": KaiQueue(request=9, deserved=2, priority=1),
        "high": KaiQueue(request=9, deserved=1, priority=5),
    }
    assert kai_shares(6, queues) == {"low": 2, "high": 4}
    assert kai_shares(20, queues) == {"low": 9, "high": 9}


def test_kai_keeps_limits_and_may_promise_more_than_there_is():
    queues = {
        "a": KaiQueue(request=9, deserved=None, limit=5),  # unlimited quota, up to its limit
        "b": KaiQueue(request=9, deserved=4),
        "c": KaiQueue(request=9),
    }
    assert kai_shares(6, queues) == {"a": 5, "b": 4, "c": 0}


def test_kai_gives_nothing_over_quota_to_weight_zero():
    queues = {"a": KaiQueue(request=9, deserved=1, weight=0), "b": KaiQueue(request=3)}
    assert kai_shares(10, queues) == {"a": 1, "b": 3}


kai_queues = st.builds(
    KaiQueue,
    request=st.integers(0, 12),
    deserved=st.integers(0, 4),
    limit=st.one_of(st.none(), st.integers(0, 9)),
    weight=st.integers(1, 5),
    priority=st.integers(0, 2),
    created=st.integers(0, 2),
)


@given(st.integers(0, 40), st.dictionaries(st.sampled_from("abcdef"), kai_queues))
def test_kai_gives_whole_units_until_all_is_given(total, queues):
    parts = kai_shares(total, queues)
    owed = {n: min(q.deserved, q.ceiling) for n, q in queues.items()}
    assert all(part.denominator == 1 for part in parts.values())
    assert all(owed[name] <= parts[name] <= queues[name].ceiling for name in queues)
    wanted = sum(queue.ceiling for queue in queues.values())
    assert sum(parts.values()) == min(max(total, sum(owed.values())), wanted)
    for high in queues:  # a lower priority is over quota only if a higher wants no more
        for low in queues:
            if queues[high].priority > queues[low].priority and parts[low] > owed[low]:
                assert parts[high] == queues[high].ceiling


def test_time_based_weights_shrink_with_usage():
    # docs/time-based-fairshare: 24 GPU-hours of 10 GPUs * 10 hours are 0.24. W = 1/2 each:
    # 1/2 + (1/2 - 0.24) = 0.76, and 1/2 + 1/2 = 1 for who used nothing.
    assert kai_time_weights({"a": 1, "b": 1}, {"a": 0.24}) == {"a": F(76, 100), "b": 1}
    assert kai_time_weights({"a": 1, "b": 3}, {"a": 0.9}, k=0) == {"a": F(1, 4), "b": F(3, 4)}
    # k = 2: 1/4 + 2 * (1/4 - 0.9) is below 0: nothing; 3/4 + 2 * 3/4.
    assert kai_time_weights({"a": 1, "b": 3}, {"a": 0.9}, k=2) == {"a": 0, "b": F(9, 4)}


def test_usage_bends_what_is_over_quota_only():
    # W 1/2 each, k 1. a used 1/2: 1/2; b nothing: 1. 9 over by 1 to 2; a's quota of 3 stays.
    queues = {"a": KaiQueue(request=20, deserved=3), "b": KaiQueue(request=20)}
    assert kai_shares(12, queues, usage={"a": F(1, 2)}, k=1) == {"a": 6, "b": 6}


# --- YARN ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "queues", "shares"),
    [
        # The kinds of case that Hadoop's TestComputeFairShares tries:
        (40, [(1, 0, None), (1, 0, None), (1, 0, None), (1, 0, None)], [10, 10, 10, 10]),
        (40, [(1, 0, None), (1, 0, 50), (1, 0, 11), (1, 0, 3)], [13, 13, 11, 3]),
        (40, [(1, 20, None), (1, 18, None), (1, 0, None), (1, 2, None)], [20, 18, 0, 2]),
        (40, [(1, 20, None), (1, 18, None), (1, 0, None)], [20, 18, 2]),
        (45, [(2, 0, None), (1, 0, None), (1, 0, None), (0.5, 0, None)], [20, 10, 10, 5]),
        (50, [(1, 0, None), (1, 0, 11), (1, 0, 3), (0, 0, None)], [36, 11, 3, 0]),
        # R = 5/2: 5/2 < 4, 5, 5/2 > 2: clamped at 4, 2: 6 of 12 left at weight 2: R = 3.
        (12, [(1, 4, None), (2, 0, None), (1, 0, 2)], [4, 6, 2]),
        (5, [(1, 4, None), (1, 4, None)], [4, 4]),  # min shares are granted even beyond the total
        (9, [(1, 0, 2), (3, 0, 4)], [2, 4]),  # more than all max shares
    ],
)
def test_yarn_finds_the_ratio_exactly(total, queues, shares):
    table = {
        str(i): YarnQueue(weight=weight, least=least, most=most)
        for i, (weight, least, most) in enumerate(queues)
    }
    assert list(yarn_shares(total, table).values()) == shares


@given(
    st.integers(0, 50),
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9)), max_size=6),
)
def test_yarn_and_roundhouse_agree_while_min_shares_fit(total, rows):
    claims = {
        str(i): Claim(weight=w, guarantee=least, demand=most)
        for i, (w, least, most) in enumerate(rows)
    }
    if sum(claim.floor for claim in claims.values()) <= total:
        queues = {
            name: YarnQueue(weight=c.weight, least=c.guarantee, most=c.demand)
            for name, c in claims.items()
        }
        assert yarn_shares(total, queues) == divide(total, claims)


# --- Armada -------------------------------------------------------------------------------------


def test_armada_costs_the_largest_part_times_its_multiplier():
    held, pool = {"cpu": 10, "gpu": 2}, {"cpu": 100, "gpu": 8}
    assert armada_cost(held, pool) == F(1, 4)
    assert armada_cost(held, pool, multipliers={"cpu": 3}) == F(3, 10)
    assert armada_cost({}, pool) == 0


def test_armada_reshares_what_a_queue_does_not_want():
    # Thirds. a wants 1/10: 7/30 are over, half each to b and c: 1/3 + 7/60 = 27/60. If a wanted
    # endlessly much it would have its third and nothing of its own leavings.
    shares = armada_shares({"a": 1, "b": 1, "c": 1}, {"a": 0.1, "b": 1, "c": 1})
    assert [shares[name].fair for name in "abc"] == [F(1, 3)] * 3
    assert [shares[name].adjusted for name in "abc"] == [F(1, 10), F(9, 20), F(9, 20)]
    assert [shares[name].uncapped for name in "abc"] == [F(1, 3), F(9, 20), F(9, 20)]


def test_armada_reshares_in_rounds():
    # Weights 1 1 2, b wants 0.3, a 0.1. Round 1: 1/4 1/4 1/2, a leaves 0.15. Round 2, b and c 1:2:
    # b 0.3 exactly, c 0.6; nothing is over.
    shares = armada_shares({"a": 1, "b": 1, "c": 2}, {"a": 0.1, "b": 0.3, "c": 1})
    assert [shares[name].adjusted for name in "abc"] == [F(1, 10), F(3, 10), F(6, 10)]
    # If a wanted all that it could get: 1/4 in round 1. In round 2 it would get 1/(3+1) of what the
    # others leave, and they leave nothing: the 0.15 were its own.
    assert shares["a"].uncapped == F(1, 4)


def test_armada_counts_other_queues_leavings_for_one_that_is_served():
    # Halves; both want 1/4, so both leave 1/4. Unbounded, a would also have all that b leaves: 3/4.
    shares = armada_shares({"a": 1, "b": 1}, {"a": 0.25, "b": 0.25})
    assert [shares[name].adjusted for name in "ab"] == [F(1, 4)] * 2
    assert [shares[name].uncapped for name in "ab"] == [F(3, 4)] * 2


def test_armada_leaves_the_last_percent():
    # a leaves 1/200 of the pool: less than 1 %, so b stays at its half. 1/50 is shared out again.
    assert armada_shares({"a": 1, "b": 1}, {"a": 0.495, "b": 1})["b"].adjusted == F(1, 2)
    assert armada_shares({"a": 1, "b": 1}, {"a": 0.48, "b": 1})["b"].adjusted == F(52, 100)


def test_armada_stops_after_ten_rounds():
    # Queue i has 7/10 of the weight of those from i on, and wants just what it has before round i:
    # so it returns all of that round, and each round leaves 7/10 of the one before: (7/10)^10 is
    # more than 1 % and stays undivided. Before round i it has, from each round j < i,
    # (7/10)^(j-1) * weight_i / (3/10)^(j-1).
    weights = {f"{i:02}": F(7, 10) * F(3, 10) ** (i - 1) for i in range(1, 12)} | {
        "12": F(3, 10) ** 11
    }
    demands = {
        name: weights[name] * sum(F(7, 3) ** (j - 1) for j in range(1, int(name)))
        for name in weights
    } | {"12": F(1)}
    shares = armada_shares(weights, demands)
    assert sum(share.adjusted for share in shares.values()) == 1 - F(7, 10) ** 10


def test_armada_tells_a_newcomer_its_share():
    # One queue wants everything, another 1/10: 1/3 each, 7/30 over, half to the newcomer: 9/20.
    got = armada_theoretical_share({"a": 1, "b": 1}, {"a": 1, "b": 0.1}, weight=1)
    assert got == F(9, 20)
    assert armada_theoretical_share({}, {}, weight=3) == 1


def test_the_fairness_error_adds_up_what_is_lacking():
    adjusted = {"a": F(1, 2), "b": F(1, 4), "c": F(1, 4)}
    assert armada_fairness_error(adjusted, {"a": F(1, 4), "b": F(3, 4)}) == F(1, 2)
    assert armada_fairness_error(adjusted, adjusted) == 0


# --- Jain ---------------------------------------------------------------------------------------


def test_jains_index_is_one_for_equals_and_one_nth_for_one_that_has_all():
    assert jain_index({"a": 3, "b": 3}) == 1
    assert jain_index({"a": 9, "b": 0, "c": 0}) == F(1, 3)
    assert jain_index({"a": 1, "b": 2, "c": 3}) == F(6, 7)  # 36 / (3 * 14)
    assert jain_index({"a": 1, "b": 2}, {"a": 1, "b": 2}) == 1  # per weight they are equal
    assert jain_index({}) == jain_index({"a": 0}) == 1


# --- the page -----------------------------------------------------------------------------------

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "internals" / "fair_share.md").read_text()
TABLES = PAGE + (ROOT / "tests" / "oracles" / "README.md").read_text()


def test_the_examples_of_the_page_come_out_as_printed():
    [block, *others] = re.findall(r"```python\n(>>>.*?)```", PAGE, re.DOTALL)
    for text in (block, *others):
        example = doctest.DocTestParser().get_doctest(text, {}, "fair_share.md", None, 0)
        report: list[str] = []
        doctest.DocTestRunner().run(example, out=report.append)
        assert not report, "".join(report)


@pytest.mark.parametrize(
    "module",
    [
        water_filling,
        dominant_resource,
        formulas_resources,
        formulas_history,
        formulas_shares,
        stride,
    ],
    ids=lambda m: m.__name__,
)
def test_the_page_lists_every_public_function_with_its_arguments(module):
    rows = dict(re.findall(r"^\| `(\w+)\(([^`]*)\)` \|", TABLES, re.MULTILINE))
    here = {
        name: value
        for name, value in inspect.getmembers(module, inspect.isfunction)
        if value.__module__ == module.__name__ and not name.startswith("_")
    }
    assert here.keys() <= rows.keys()
    for name, function in here.items():
        assert rows[name].split(", ") == written(function), name


def written(function):
    """Arguments as the page writes them: optional ones with a question mark, * before keywords."""
    found, keywords = [], False
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and not keywords:
            keywords = True
            found.append("*")
        found.append(name if parameter.default is parameter.empty else f"{name}?")
    return found


# --- numbers that no formula can work with ------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "asked"),
    [
        ("a: priority 0", lambda: condor_slices(10, {"a": 0, "b": 1})),
        ("damping 0", lambda: slurm_classic({"a": None}, {"a": 1}, {"a": 1}, damping=0)),
        ("a: weight 0", lambda: progressive_filling({"g": 2}, {"a": {"g": 1}}, weights={"a": 0})),
        ("a: weight 0", lambda: divisible_filling({"g": 2}, {"a": {"g": 1}}, weights={"a": 0})),
        ("a: weight 0", lambda: jain_index({"a": 1}, {"a": 0})),
        ("demand inf", lambda: divide(4, {"a": Claim(demand=math.inf)})),
        ("limit nan is below 0", lambda: divide(4, {"a": Claim(demand=1, limit=math.nan)})),
        ("weight inf", lambda: divide(4, {"a": Claim(demand=1, weight=math.inf)})),
        ("inf is not a finite number", lambda: divide(math.inf, {"a": Claim(demand=1)})),
    ],
)
def test_a_formula_given_an_impossible_number_names_it(
    what: str, asked: Callable[[], object]
) -> None:
    with pytest.raises(ValueError, match=what):
        asked()


def test_armada_cost_in_a_pool_with_nothing_is_1() -> None:
    assert armada_cost({"gpu": 4}, {}) == 1
    assert armada_cost({"gpu": 4}, {"gpu": 0, "cpu": 0}) == 1
    assert armada_cost({"gpu": 4}, {"gpu": 0, "cpu": 8}) == 0
