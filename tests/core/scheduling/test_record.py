"""What is kept of a round is little, and enough: the same decisions are made of it again."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from app.core.model.provisions.process_images import marked
from app.core.model.snapshot import (
    BoardDevice,
    BoardTask,
    BoardTenant,
    BoardUser,
    Conditions,
    Policy,
    Snapshot,
)
from app.core.scheduling.board import Board
from app.core.scheduling.cycle import cycle, decide
from app.core.scheduling.record import as_json, from_json, seen_by
from benchmarks.no_cycles import ELASTIC, NOW_S, TIGHT, Shop, island
from tests.thoroughness import rest_long

ROUNDS = 6  # of each island; half of them at another instant than the round before


def _as_drawn(drawn: Snapshot, dice: random.Random) -> Snapshot:
    return drawn


def _nobody_used_anything(drawn: Snapshot, dice: random.Random) -> Snapshot:
    """Most scores are equal: the age of who waits decides."""
    return replace(drawn, users={id: replace(u, faded_us=0) for id, u in drawn.users.items()})


def _without_turns(drawn: Snapshot, dice: random.Random) -> Snapshot:
    """What may be done behind a gang that does not fit depends on when others end."""
    policy = replace(drawn.policy, turns=False, backfill=dice.choice(["easy", "strict", "greedy"]))
    tasks = {
        id: replace(task, expected_s=dice.choice([None, 1.0, 5.0, 50.0]))
        for id, task in drawn.tasks.items()
    }
    return replace(drawn, policy=policy, tasks=tasks)


def _crowded(drawn: Snapshot, dice: random.Random) -> Snapshot:
    """Many wait, in many lanes; some can go on from one device only."""
    users, devices = sorted(drawn.users), sorted(drawn.devices)
    likes = sorted(drawn.tasks.values(), key=lambda task: task.id)
    tasks = dict(drawn.tasks)
    for n in range(40):
        like, user = dice.choice(likes), dice.choice(users)
        task = BoardTask(
            id=f"w{n:02}",
            request="",
            tenant=user.split(":")[0],
            user=user,
            state="waiting",
            epoch=like.epoch,
            kind=like.kind,
            width=like.width,
            memory_bytes=dice.choice([0, 2, 4, 6, 8]),
            tier=like.tier,
            priority=dice.choice([0, 0, 1]),
            submitted_s=like.submitted_s,
        )
        lies_on = [id for id in devices if drawn.devices[id].kind == like.kind]
        if lies_on and dice.random() < 0.1:
            task = replace(task, width=1, image_on=dice.choice(lies_on), saved=False)
        tasks[task.id] = task
    return replace(drawn, tasks=tasks)


def _stored(drawn: Snapshot, dice: random.Random) -> Snapshot:
    """Some that wait are commands with stored processes, which need hosts of one of two kinds."""
    marks = [marked("aa11"), marked("bb22")]
    devices = {
        id: replace(device, traits=replace(device.traits, offers=(dice.choice(marks),)))
        for id, device in drawn.devices.items()
    }
    tasks = {
        id: replace(task, movable=True, restarts=True, goes_on_with=dice.choice(marks))
        if task.state == "waiting" and dice.random() < 0.3
        else task
        for id, task in drawn.tasks.items()
    }
    return replace(drawn, devices=devices, tasks=tasks)


@pytest.mark.parametrize("part", rest_long(range(5)))
@pytest.mark.parametrize("kind", [0, TIGHT, ELASTIC], ids=["loose", "tight", "elastic"])
@pytest.mark.parametrize(
    ("seeds", "drawn"),
    [
        (80, _as_drawn),
        (40, _nobody_used_anything),
        (100, _without_turns),
        (20, _crowded),
        (20, _stored),
    ],
)
@pytest.mark.slow
def test_recorded_round_gives_the_same_decisions_again(
    kind: int, seeds: int, drawn: Callable[[Snapshot, random.Random], Snapshot], part: int
) -> None:
    compared, left_out, first = 0, 0, kind + part * seeds
    for seed in range(first, first + seeds):
        shop = Shop(drawn(island(seed, timeless=seed % 2 == 0), random.Random(seed)))
        for n in range(ROUNDS):
            board = Board.of(shop.snapshot(), now_s=shop.now_s)
            plan = cycle(board, lift=False)
            if plan.decisions:
                seen = from_json(as_json(seen_by(board, plan, plan.before, island="i")))
                again = decide(seen, now_s=shop.now_s)
                assert again.decisions == plan.decisions, f"seed {seed}, round {n}"
                compared += 1
                left_out += len(shop.tasks.keys() - seen.tasks.keys())
            cycle(shop.board, lift=False)
            shop.obey(plan)
            shop.later(0.5 * (n % 2))
    assert compared >= seeds / 5
    assert left_out > compared  # it is not all that there was


def test_record_of_a_round_does_not_grow_with_the_waiting_tasks() -> None:
    """8 devices; 3,000 wait, of 300 tenants, in 40 lanes, a third of them started once."""
    small, big = (_size(_island(waiting)) for waiting in (300, 3000))
    assert small[0] <= 80
    assert big[0] <= small[0] + 8
    assert big[1] <= 1.3 * small[1]


def _size(drawn: Snapshot) -> tuple[int, int]:
    board = Board.of(drawn, now_s=NOW_S)
    plan = cycle(board, lift=False)
    assert len([decision for decision in plan.decisions if decision.move == "Launch"]) >= 4
    seen = seen_by(board, plan, plan.before, island="i")
    assert decide(seen, now_s=NOW_S).decisions == plan.decisions
    return len(seen.tasks), len(repr(as_json(seen)))


def _island(waiting: int) -> Snapshot:
    tenants = [f"t{n:03}" for n in range(300)]
    tasks = [
        BoardTask(
            id=f"w{n:04}",
            request="",
            tenant=tenants[n % 300],
            user=f"{tenants[n % 300]}:u",
            state="waiting",
            epoch=int(n % 3 == 0),
            kind="cpu",
            memory_bytes=n % 40,
            priority=n % 2,
            submitted_s=NOW_S - n,
        )
        for n in range(waiting)
    ]
    tasks += [
        BoardTask(
            id=f"r{n}",
            request="",
            tenant=tenants[n],
            user=f"{tenants[n]}:u",
            state="running",
            epoch=1,
            kind="cpu",
            seats=(f"d{n}",),
            started_s=NOW_S - 1000.0,
            held_us=10**9,
            accrued_us=10**9,
        )
        for n in range(4)
    ]
    return Snapshot(
        island="i",
        policy=Policy(half_life_s=0.0),
        tenants={
            id: BoardTenant(id=id, name=id, weight=1000, guarantee={"cpu": 1}) for id in tenants
        },
        users={f"{id}:u": BoardUser(id=f"{id}:u", tenant=id) for id in tenants},
        devices={
            f"d{n}": BoardDevice(
                id=f"d{n}", host="h", kind="cpu", memory_bytes=64, lease_until_s=NOW_S + 1e6
            )
            for n in range(8)
        },
        tasks={task.id: task for task in tasks},
    )


def test_tasks_left_out_of_the_record_are_still_counted() -> None:
    """Two started tasks wait that are promised 0.9 of two devices each, and one more runs.

    Three promises do not fit into two devices, so nobody's is kept, on the record as well.
    """
    drawn = _island(0)
    like = drawn.tasks["r0"]
    waits = {
        id: replace(
            like, id=id, state="blocked", seats=(), started_s=None, held_us=0, accrued_us=0,
            tier="premium", conditions=Conditions(hold="user"),
        )
        for id in ("h1", "h2")
    }  # fmt: skip
    new = replace(waits["h1"], id="n", state="waiting", epoch=0, conditions=Conditions())
    devices = {id: drawn.devices[id] for id in ("d0", "d1")}
    runs = replace(like, tier="premium")
    policy = replace(drawn.policy, tier_share={"premium": 0.9})
    seen_whole = replace(
        drawn, policy=policy, devices=devices, tasks={"r0": runs, "n": new, **waits}
    )
    board = Board.of(seen_whole, now_s=NOW_S)
    assert board.urgency.honoured("cpu") == ()
    plan = cycle(board, lift=False)
    seen = seen_by(board, plan, plan.before, island="i")
    assert not {"h1", "h2"} <= seen.tasks.keys()
    assert Board.of(seen, now_s=NOW_S).urgency.honoured("cpu") == ()
