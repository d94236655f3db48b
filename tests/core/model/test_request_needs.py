"""When a task may start that comes after other requests."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import product

import pytest

from app.core.model.lifecycle import ENDED
from app.core.model.request_needs import (
    AWAITED,
    OTHERWISE,
    NeededState,
    NeedOutcome,
    RequestStanding,
    decide,
    standing,
)
from tests.thoroughness import rest_long

#: What is true of a needed request, and what is decided about each condition: "." waits, "+" met,
#: "-" never. The columns are AWAITED: done, ended, failed, started.
TABLE = {
    ("queued", False): "....",
    ("queued", True): "...+",  # retried: it had started before
    ("running", False): "....",
    ("running", True): "...+",
    ("done", True): "++-+",
    ("failed", True): "-+++",
    ("failed", False): "----",  # such as packages that cannot be locked
    ("cancelled", True): "-+-+",
    ("cancelled", False): "----",
}


@pytest.mark.parametrize(("needed", "expected"), TABLE.items())
@pytest.mark.parametrize("otherwise", OTHERWISE)
def test_whole_table(needed, expected, otherwise):
    signs = {".": NeedOutcome.waits, "+": NeedOutcome.met, "-": NeedOutcome(otherwise)}
    found = [decide(awaited, otherwise, NeededState(*needed)) for awaited in AWAITED]
    assert found == [signs[sign] for sign in expected]


def test_nothing_waits_for_an_ended_request():
    for (state, started), awaited, otherwise in product(TABLE, AWAITED, OTHERWISE):
        if state in ENDED:
            assert decide(awaited, otherwise, NeededState(state, started)) != NeedOutcome.waits


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([], RequestStanding.free),
        (["met", "run", "waived"], RequestStanding.free),
        (["met", ""], RequestStanding.waits),
        (["", "hold"], RequestStanding.held),
        (["", "hold", "fail"], RequestStanding.never),
    ],
)
def test_standing_over_all_needs(outcomes, expected):
    assert standing(outcomes) == expected


# --- graphs ---------------------------------------------------------------------------------------


@dataclass
class Node:
    """A request of one task; `plan` is how it ends once it may start."""

    plan: str
    needs: list[tuple[int, str, str]]
    outcomes: list[NeedOutcome] = field(default_factory=list)
    state: str = "queued"
    started: bool = False


def random_graph(rng: random.Random, size: int) -> list[Node]:
    """Each request names some that exist already, so there is no cycle."""
    nodes = []
    for n in range(size):
        near = range(max(0, n - 30), n)
        needed = rng.sample(near, min(len(near), rng.choice([0, 1, 1, 2, 4])))
        edges = [(at, rng.choice(AWAITED), rng.choice(OTHERWISE)) for at in needed]
        plan = rng.choice(["done", "done", "done", "failed", "cancelled", "never started"])
        nodes.append(Node(plan, edges, [NeedOutcome.waits] * len(edges)))
    return nodes


def oracle(nodes: list[Node]) -> list[tuple[str, bool]]:
    """The ends by a walk in topological order, from what each word means; "held" is an end here."""
    ends: list[tuple[str, bool]] = []
    for node in nodes:
        never = set()
        for at, awaited, otherwise in node.needs:
            state, started = ends[at]
            happened = {
                "done": state == "done",
                "ended": started,
                "failed": started and state == "failed",
                "started": started,
            }[awaited]
            if state == "held":
                never.add("waits")  # as long as the other one is held
            elif not happened:
                never.add(otherwise)
        if "fail" in never:
            ends.append(("failed", False))
        elif "hold" in never or "waits" in never:
            ends.append(("held", False))
        elif node.plan == "never started":
            ends.append(("cancelled", False))
        else:
            ends.append((node.plan, True))
    return ends


def run(nodes: list[Node], rng: random.Random) -> None:
    """Look at the requests in any order, each as often as it likes, until nothing changes."""
    quiet = 0
    while quiet < 2 * len(nodes):
        node = nodes[rng.randrange(len(nodes))] if quiet < len(nodes) else None
        some = [node] if node is not None else nodes
        changed = any([step(nodes, one) for one in some])
        quiet = 0 if changed else quiet + 1


def step(nodes: list[Node], node: Node) -> bool:
    if node.state in ENDED:
        return False
    before = node.state, node.started, [*node.outcomes]
    for n, (at, awaited, otherwise) in enumerate(node.needs):
        if node.outcomes[n] in (NeedOutcome.waits, NeedOutcome.hold):
            needed = NeededState(nodes[at].state, nodes[at].started)
            node.outcomes[n] = decide(awaited, otherwise, needed)
    stands = standing(node.outcomes)
    if node.started:
        node.state = node.plan
    elif stands == RequestStanding.never:
        node.state = "failed"
    elif stands == RequestStanding.free and node.plan == "never started":
        node.state = "cancelled"
    elif stands == RequestStanding.free:
        node.state, node.started = "running", True
    return (node.state, node.started, node.outcomes) != before


@pytest.mark.parametrize("seed", rest_long(range(5), keep=2))
def test_random_graph_ends_as_the_topological_order_says(seed):
    rng = random.Random(seed)
    nodes = random_graph(rng, 1000)
    run(nodes, rng)
    found = [("held" if n.state == "queued" else n.state, n.started) for n in nodes]
    assert found == oracle(nodes)
    assert {state for state, _ in found} == {"done", "failed", "cancelled", "held"}


@pytest.mark.parametrize("seed", range(5))
def test_retry_of_all_that_failed_frees_what_was_held_by_them(seed):
    rng = random.Random(seed)
    first = Node("failed", [])
    held = [Node("done", [(0, "done", "hold")], [NeedOutcome.waits]) for _ in range(20)]
    nodes = [first, *held]
    run(nodes, rng)
    assert {node.state for node in held} == {"queued"}
    first.state, first.plan = "queued", "done"
    run(nodes, rng)
    assert {node.state for node in nodes} == {"done"}
