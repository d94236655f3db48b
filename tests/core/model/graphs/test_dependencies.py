"""Graphs are sound or say why not; what can never run here is told before it is queued."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.model.descriptor import Descriptor, parse
from app.core.model.device_choice import DeviceChoice, DeviceTraits, traits_in
from app.core.model.graphs import dependencies
from app.core.model.graphs.dependencies import Alike, DependencyEdge, Offer

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


def test_dependencies_come_from_after_and_from_inputs() -> None:
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
def test_task_comes_after_all_that_it_needs(edges: str, order: str) -> None:
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


def test_unknown_dependencies_are_all_reported() -> None:
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
def test_requests_are_valid_exactly_if_their_tasks_can_be_ordered(
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
            "must be 1: a function uses one device",
        ),
        (
            {"world_size": 2, "devices": {"max": 2}, "run": {"command": ["x"]}},
            "devices/max",
            "a command keeps the devices that it began with. For 2 devices set min to 2",
        ),
    ],
)
def test_task_that_can_never_run_is_refused_with_advice(
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
        ({"job": "m:C"}, {"min": 2, "hosts": 1}, None),
    ],
)
def test_only_jobs_and_graphs_may_lie_on_several_hosts(
    run: dict[str, Any], devices: dict[str, Any], pointer: str | None
) -> None:
    body = {"name": "t", "run": run, "world_size": 2, "devices": devices}
    faults = dependencies.unsatisfiable(tasks(body), HERE)
    assert [fault.pointer for fault in faults] == ([f"/tasks/0/{pointer}"] if pointer else [])


TWO_HOSTS = {"cpu": Offer((Alike("a", "g", 8, 1), Alike("a", "h", 8, 2)))}


@pytest.mark.parametrize(
    ("run", "told"),
    [
        ({"job": "m:C"}, None),
        ({"graph": "sha256:" + "0" * 64}, "only the ranks of a job are as many on each host"),
        ({"command": ["x"]}, "a command must stay on one host"),
        ({"function": "m:f"}, "a function must stay on one host"),
    ],
)
def test_only_jobs_may_name_a_number_of_hosts(run: dict[str, Any], told: str | None) -> None:
    body = {"name": "t", "run": run, "world_size": 2, "devices": {"min": 2, "hosts": 2}}
    faults = dependencies.unsatisfiable(tasks(body), TWO_HOSTS)
    first = [(fault.pointer, told and told in fault.detail) for fault in faults][:1]
    assert first == ([("/tasks/0/devices/hosts", True)] if told else [])


@pytest.mark.parametrize(
    ("hosts", "width", "told"),
    [
        (2, 4, None),
        (3, 6, None),  # g, and two like h
        (4, 8, "4 hosts with 2 cpu devices each are requested, but 3 here have as many"),
        (2, 6, None),
        (3, 9, "3 hosts with 3 cpu devices each are requested, but 2 here have as many"),
        (2, 8, "2 hosts with 4 cpu devices each are requested, but 0 here have as many"),
        (5, 5, "5 hosts with 1 cpu device each are requested, but 4 here have as many"),
    ],
)
def test_number_of_hosts_that_no_island_has_is_refused(
    hosts: int, width: int, told: str | None
) -> None:
    """g has two devices, h and its like three of two sizes, and e one."""
    alike = (
        Alike("a", "g", 8, 2),
        Alike("a", "h", 8, 2, hosts=2),
        Alike("a", "h", 16, 1, hosts=2),
        Alike("a", "e", 8, 1),
    )
    devices = {"min": width, "hosts": hosts}
    body = {"name": "t", "run": {"job": "m:C"}, "world_size": width, "devices": devices}
    faults = dependencies.unsatisfiable(tasks(body), {"cpu": Offer(alike)})
    assert [fault.pointer for fault in faults] == (["/tasks/0/devices/hosts"] if told else [])
    assert told is None or told in faults[0].detail
    can = Offer(alike).islands(tasks(body).tasks[0].devices)
    assert can == (told is None)


@pytest.mark.parametrize(
    ("run", "splices", "told"),
    [
        ({"job": "m:C"}, [True, True], None),
        ({"graph": "sha256:" + "0" * 64}, [True, True], None),
        ({"function": "m:f"}, [True, True], None),
        ({"job": "m:C"}, [True, False], "not every device of kind 'sim' lets ranks take turns"),
    ],
)
def test_ranks_need_devices_that_say_they_can_take_turns(
    run: dict[str, Any], splices: list[bool], told: str | None
) -> None:
    """What the devices say decides, and not their kind."""
    alike = (Alike("a", "h", 1, 1, DeviceTraits(splice=can)) for can in splices)
    body = {"name": "t", "run": run, "world_size": 2, "devices": {"kind": "sim"}}
    faults = dependencies.unsatisfiable(tasks(body), {"sim": Offer(tuple(alike))})
    assert [fault.pointer for fault in faults] == (["/tasks/0/world_size"] if told else [])
    assert told is None or told in faults[0].detail


@pytest.mark.parametrize(
    ("ranks", "devices", "pointer"),
    [
        (4, {"min": 2}, None),
        (4, {"min": 2, "max": 4}, "devices/max"),
        (4, {"kind": "cuda", "min": 4}, None),
        (4, {"kind": "cuda"}, "devices/min"),
        (4, {"kind": "cuda", "min": 2, "max": 4}, "devices/min"),
    ],
)
def test_command_holds_as_many_devices_all_the_time_and_each_rank_an_accelerator(
    ranks: int, devices: dict[str, Any], pointer: str | None
) -> None:
    kinds = {kind: Offer((Alike("a", "h", 1, 4),)) for kind in ("cpu", "cuda")}
    body = {"name": "t", "run": {"command": ["x"]}, "world_size": ranks, "devices": devices}
    faults = dependencies.unsatisfiable(tasks(body), kinds)
    assert [fault.pointer for fault in faults] == ([f"/tasks/0/{pointer}"] if pointer else [])


@pytest.mark.parametrize("run", [{"graph": "sha256:" + "0" * 64}, {"job": "m:C"}])
def test_task_on_one_host_that_needs_more_devices_than_any_host_has_is_refused(
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


def test_hosts_with_the_same_devices_count_for_the_island_and_not_for_one_host() -> None:
    many = Offer((Alike("a", "h0", 8, 4, hosts=3), Alike("a", "i", 8, 6)))
    assert many.by_island(8) == {"a": 18}
    assert many.together(8) == 6
    body = {"name": "t", "run": {"job": "m:C"}, "world_size": 20}
    for across, most in ((True, 18), (False, 6)):
        devices = {"max": 20, "across_hosts": across}
        faults = [
            dependencies.unsatisfiable(
                tasks({**body, "devices": {"min": n, **devices}}), {"cpu": many}
            )
            for n in (most, most + 1)
        ]
        assert [bool(one) for one in faults] == [False, True]


OLD = DeviceTraits(model="NVIDIA A100-SXM4-40GB", compute_capability="8.0", labels=("old",))
SPOT = DeviceTraits(model="NVIDIA H100 80GB HBM3", compute_capability="9.0", labels=("spot",))


@pytest.mark.parametrize(
    ("devices", "pointer"),
    [
        ({"avoid_labels": ["old"]}, None),
        ({"avoid_labels": ["spot"]}, None),
        ({"avoid_labels": ["spot"], "min": 2}, "/tasks/0/devices/min"),
        ({"avoid_labels": ["spot"], "memory_bytes": 8}, "/tasks/0/devices/memory_bytes"),
        ({"avoid_labels": ["old", "spot"]}, "/tasks/0/devices/avoid_labels"),
        ({"labels": ["spot"], "min": 2}, None),
        ({"labels": ["spot"], "min": 3}, "/tasks/0/devices/min"),
        ({"labels": ["fast"]}, "/tasks/0/devices/labels"),
        ({"model": "h100", "labels": ["spot"]}, None),
        ({"model": "H100", "labels": ["old"]}, "/tasks/0/devices/labels"),
        ({"model": "h200", "labels": ["fast"]}, "/tasks/0/devices/model"),
        ({"compute_capability": "8.0", "min": 2}, None),
        ({"compute_capability": "9.0", "labels": ["old"]}, "/tasks/0/devices/labels"),
        ({"compute_capability": "10.0"}, "/tasks/0/devices/compute_capability"),
    ],
)
def test_only_devices_that_suit_the_choice_count(
    devices: dict[str, Any], pointer: str | None
) -> None:
    body = {"name": "t", "run": {"job": "m:C"}, "world_size": 8, "devices": {"max": 8, **devices}}
    kinds = {"cpu": Offer((Alike("a", "h", 4, 1, OLD), Alike("a", "h", 8, 2, SPOT)))}
    faults = dependencies.unsatisfiable(tasks(body), kinds)
    assert [fault.pointer for fault in faults] == ([pointer] if pointer else [])


def test_task_that_needs_more_devices_than_exist_is_refused() -> None:
    body = {"name": "t", "run": {"job": "m:C"}, "world_size": 8, "devices": {"min": 4}}
    told = {fault.pointer for fault in dependencies.unsatisfiable(tasks(body), HERE)}
    assert told == {"/tasks/0/devices/min"}


@pytest.mark.parametrize("tier", ["premium", "standard", "basic"])
def test_task_that_fits_is_accepted_in_every_tier(tier: str) -> None:
    body = {"name": "t", "devices": {"memory_bytes": 4_000_000_000}}
    assert dependencies.unsatisfiable(tasks(body, tier=tier), HERE) == ()


def test_deployment_without_devices_is_reported_as_such() -> None:
    (fault,) = dependencies.unsatisfiable(tasks({"name": "t"}), {})
    assert "no device has joined" in fault.detail


def test_need_that_no_device_offers_is_a_fault_at_the_field_that_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = {"name": "t", "run": {"job": "m:C"}}
    request = tasks(body)
    (task,) = request.tasks
    choice = DeviceChoice(needs=("egress", "mount:corpus"))
    task = replace(task, devices=replace(task.devices, choice=choice))
    request = replace(request, tasks=(task,))
    asked = {"egress": "network", "mount:corpus": "mounts"}
    monkeypatch.setattr(dependencies, "needs_of", lambda _: asked)
    told = "there is no cpu device that offers egress and mount:corpus"

    def found(*offers: str) -> list[tuple[str, str]]:
        kinds = {"cpu": Offer((Alike("a", "h", 4, 1, DeviceTraits(offers=offers)),))}
        return [(each.pointer, each.detail) for each in dependencies.unsatisfiable(request, kinds)]

    assert found("egress") == [("/tasks/0/mounts", told)]
    assert found("egress", "mount:corpus") == []


def test_limit_of_which_no_device_gives_as_much_is_a_fault_at_its_field() -> None:
    said = {"cpus": 2, "memory_bytes": 4 * 2**30}
    body = {"tasks": [{"name": "t", "run": {"command": ["a"]}, "resources": said}]}
    request = parse(body)

    def found(*gives: dict[str, int]) -> list[tuple[str, str]]:
        traits = [traits_in({"gives": each}) for each in gives]
        alike = tuple(Alike("a", "h", 4, 1, each) for each in traits)
        faults = dependencies.unsatisfiable(request, {"cpu": Offer(alike)})
        return [(each.pointer, each.detail) for each in faults]

    enough = {"cpus": 2000, "memory": 4 * 2**30}
    assert found(enough) == []
    assert found({}, enough) == []  # it waits for the one that can
    [(pointer, told)] = found({"cpus": 1000, "memory": 2**33}, {"cpus": 4000, "memory": 2**31})
    assert pointer == "/tasks/0/resources/cpus"  # each is given by one, both by none
    assert told.endswith("gives a task 2 processors and 4.0 GiB of host memory at once")
    [(pointer, told)] = found({"cpus": 4000, "memory": 2**31}, {})
    assert pointer == "/tasks/0/resources/memory_bytes"
    assert told == (
        "4.0 GiB of host memory are requested, but no cpu device gives a task more than "
        "2.0 GiB of host memory"
    )
