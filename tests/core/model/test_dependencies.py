"""Graphs are sound or say why not; what can never run here is told before it is queued."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.model import dependencies
from app.core.model.dependencies import Alike, DependencyEdge, Offer
from app.core.model.descriptor import Descriptor, parse

HERE = {"cpu": Offer((Alike("a", "h", 4_000_000_000, 2),))}


def tasks(*tasks: dict[str, Any], **request: Any) -> Descriptor:
    filled = [{"run": {"function": "m:f"}, **task} for task in tasks]
    return parse({"tasks": filled, "bundle": "sha256:" + "0" * 64, **request})


def drawn(edges: str) -> Descriptor:
    """ "a<b" reads: a starts after b; "c" alone stands for itself."""
    after: dict[str, list[str]] = {}
    for word in edges.split():
        task, _, needed = word.partition("<")
        after.setdefault(task, [])
        if needed:
            after[task].append(needed)
    return tasks(*({"name": name, "start": {"after": a}} for name, a in after.items()))


def test_needs_are_the_edges_of_after_and_of_data() -> None:
    descriptor = tasks(
        {"name": "prep", "outputs": ["x", "y"]},
        {"name": "check"},
        {
            "name": "train",
            "start": {"after": ["check"]},
            "inputs": {"a": "prep.x", "b": "prep.y", "c": "datablock:corpus"},
        },
    )
    assert dependencies.check(descriptor) == ()
    assert dependencies.needs(descriptor) == {
        "prep": (),
        "check": (),
        "train": (
            DependencyEdge(task="check"),
            DependencyEdge(task="prep", port="a", output="x"),
            DependencyEdge(task="prep", port="b", output="y"),
        ),
    }


@pytest.mark.parametrize(
    ("edges", "order"),
    [
        ("a b c", "a b c"),
        ("c<b b<a a", "a b c"),
        ("d<b d<c b<a c<a a", "a b c d"),
        ("a<b b<a c", "c"),
    ],
)
def test_a_task_stands_behind_what_it_needs(edges: str, order: str) -> None:
    assert dependencies.order(drawn(edges)) == tuple(order.split())


@pytest.mark.parametrize(
    ("edges", "pointer", "told"),
    [
        ("a<b b<a", "/tasks/0", "the tasks form a cycle: a needs b needs a"),
        (
            "x a<b b<c c<a",
            "/tasks/1",
            "the tasks form a cycle: a needs b needs c needs a",
        ),
        (
            "a<b b<c c<b",
            "/tasks/1",
            "the tasks form a cycle: b needs c needs b",
        ),  # a only leads there
        ("a<a", "/tasks/0/start/after/0", "task 'a' must not need itself"),
    ],
)
def test_a_cycle_is_named(edges: str, pointer: str, told: str) -> None:
    (fault,) = dependencies.check(drawn(edges))
    assert (fault.pointer, fault.detail, fault.code) == (pointer, told, "cycle")


def test_edges_that_lead_nowhere_are_all_told() -> None:
    descriptor = tasks(
        {"name": "prep", "outputs": ["tokens"]},
        {
            "name": "train",
            "start": {"after": ["prpe"]},
            "inputs": {"a": "prep.token", "b": "zz.out"},
        },
    )
    assert [(f.pointer, f.code, f.detail) for f in dependencies.check(descriptor)] == [
        (
            "/tasks/1/start/after/0",
            "unknown-task",
            "unknown task 'prpe'; did you mean 'prep'?",
        ),
        (
            "/tasks/1/inputs/a",
            "unknown-output",
            "task 'prep' has no 'token' in its outputs; did you mean 'tokens'?",
        ),
        ("/tasks/1/inputs/b", "unknown-task", "unknown task 'zz'"),
    ]


def test_a_chain_of_a_thousand_tasks_is_walked_without_recursion() -> None:
    edges = " ".join(f"t{n}<t{n + 1}" for n in range(999))
    assert dependencies.check(drawn(f"{edges} t999")) == ()
    (fault,) = dependencies.check(drawn(f"{edges} t999<t0"))
    assert fault.detail.count("needs") == 1000


@given(pairs=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), unique=True, max_size=20))
def test_a_graph_is_sound_exactly_if_all_its_tasks_can_be_ordered(
    pairs: list[tuple[int, int]],
) -> None:
    edges = " ".join(f"t{a}<t{b}" for a, b in pairs if a != b)
    descriptor = drawn(f"{edges} " + " ".join(f"t{n}" for n in range(8)))
    order = dependencies.order(descriptor)
    assert (dependencies.check(descriptor) == ()) == (len(order) == 8)
    for name in order:
        before = order[: order.index(name)]
        assert all(need.task in before for need in dependencies.needs(descriptor)[name])


# --- what can never run here --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "pointer", "told"),
    [
        ({"devices": {"kind": "cuda"}}, "devices/kind", "no device of kind 'cuda'"),
        ({"devices": {"memory_bytes": 5e9}}, "devices/memory_bytes", "the largest cpu device has"),
        ({"world_size": 65}, "world_size", "at most 64 ranks can share one device"),
        (
            {"world_size": 2, "devices": {"max": 2}, "run": {"function": "m:f"}},
            "devices/max",
            "only jobs and graphs can change their devices",
        ),
        (
            {"world_size": 2, "devices": {"max": 2}, "run": {"command": ["x"]}},
            "devices/max",
            "only jobs and graphs can change their devices",
        ),
    ],
)
def test_what_can_never_run_here_is_told_with_what_to_do(
    task: dict[str, Any], pointer: str, told: str
) -> None:
    (fault,) = dependencies.unsatisfiable(tasks({"name": "t", **task}), HERE)
    assert (fault.pointer, fault.code) == (f"/tasks/0/{pointer}", "unsatisfiable")
    assert told in fault.detail


@pytest.mark.parametrize(
    ("run", "devices", "pointer"),
    [
        ({"job": "m:C"}, {"min": 2}, None),
        ({"job": "m:C"}, {"min": 2, "across_hosts": True}, None),
        ({"graph": "sha256:" + "0" * 64}, {"min": 2}, None),
        ({"graph": "sha256:" + "0" * 64}, {"min": 2, "across_hosts": True}, None),
        ({"job": "m:C"}, {"max": 2, "across_hosts": True}, None),
        ({"command": ["x"]}, {"across_hosts": True}, "devices/across_hosts"),
        ({"function": "m:f"}, {"across_hosts": True}, "devices/across_hosts"),
    ],
)
def test_only_jobs_and_graphs_may_lie_on_several_hosts(
    run: dict[str, Any], devices: dict[str, Any], pointer: str | None
) -> None:
    body = {"name": "t", "run": run, "world_size": 2, "devices": devices}
    faults = dependencies.unsatisfiable(tasks(body), HERE)
    assert [fault.pointer for fault in faults] == ([f"/tasks/0/{pointer}"] if pointer else [])


@pytest.mark.parametrize("run", [{"graph": "sha256:" + "0" * 64}, {"job": "m:C"}])
def test_who_stays_on_a_host_and_needs_more_devices_than_any_has_is_told(
    run: dict[str, Any],
) -> None:
    apart = {"cpu": Offer((Alike("a", "h", 1, 2), Alike("a", "i", 1, 2)))}
    two, three = (
        dependencies.unsatisfiable(
            tasks({"name": "t", "run": run, "world_size": 4, "devices": {"min": n, "max": 4}}),
            apart,
        )
        for n in (2, 3)
    )
    assert two == ()
    assert [fault.pointer for fault in three] == ["/tasks/0/devices/min"]
    assert "no single host has more than 2" in three[0].detail


@pytest.mark.parametrize(
    ("devices", "islands", "told"),
    [
        ({"min": 2, "memory_bytes": 8}, 1, "no single host has more than 1"),
        ({"min": 2, "memory_bytes": 8, "across_hosts": True}, 1, None),
        ({"min": 3, "memory_bytes": 8, "across_hosts": True}, 1, "on the largest island"),
        ({"min": 3, "memory_bytes": 8, "across_hosts": True}, 2, None),
        ({"min": 4, "memory_bytes": 8, "across_hosts": True}, 2, "on the largest 2 islands"),
        ({"min": 5, "memory_bytes": 4, "across_hosts": True}, 2, None),
    ],
)
def test_only_devices_that_are_large_enough_count(
    devices: dict[str, Any], islands: int, told: str | None
) -> None:
    """Two hosts of an island with a large and a small device each, another island with a large."""
    east = [Alike("a", host, memory, 1) for host in "hi" for memory in (4, 8)]
    kinds = {"cpu": Offer((*east, Alike("b", "j", 8, 1)))}
    body = {"name": "t", "run": {"job": "m:C"}, "world_size": 8, "islands": islands}
    faults = dependencies.unsatisfiable(tasks({**body, "devices": {"max": 8, **devices}}), kinds)
    assert [fault.pointer for fault in faults] == (["/tasks/0/devices/min"] if told else [])
    assert all(told in fault.detail for fault in faults if told)


def test_more_devices_than_there_are_is_told() -> None:
    body = {"name": "t", "run": {"job": "m:C"}, "world_size": 8, "devices": {"min": 4}}
    told = {fault.pointer for fault in dependencies.unsatisfiable(tasks(body), HERE)}
    assert told == {"/tasks/0/devices/min"}


@pytest.mark.parametrize("tier", ["premium", "standard", "basic"])
def test_what_fits_is_not_refused_whatever_its_tier(tier: str) -> None:
    body = {"name": "t", "devices": {"memory_bytes": 4_000_000_000}}
    assert dependencies.unsatisfiable(tasks(body, tier=tier), HERE) == ()


def test_a_deployment_without_devices_says_so() -> None:
    (fault,) = dependencies.unsatisfiable(tasks({"name": "t"}), {})
    assert "no device has joined" in fault.detail
