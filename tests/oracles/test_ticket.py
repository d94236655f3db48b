"""Tickets: gangs never wait for each other, whatever happens first."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.tickets import interleave, scene
from tests.oracles.ticket import (
    UNHELD,
    UNSYNCHRONISED,
    Aside,
    Desk,
    Gang,
    Issued,
    Line,
    Misuse,
    Refusal,
    Scene,
    Ticket,
    play,
)


def gang(id: str, run: int = 0, stays: dict[str, int] | None = None, **needs: int) -> Gang:
    return Gang(id=id, run=run, needs=needs, stays=stays or {})


DESK = Desk(island="a", capacity={"x": 10, "y": 10})


def issued(desk: Desk, one: Gang) -> tuple[Desk, Issued]:
    desk, ticket = desk.ask(one)
    assert isinstance(ticket, Issued)
    return desk, ticket


# --- the desk -----------------------------------------------------------------------------------


def test_tickets_count_up_and_turns_count_per_device_without_gaps() -> None:
    desk, first = issued(DESK, gang("g", x=1, y=1))
    desk, second = issued(desk, gang("h", y=1))
    desk, third = issued(desk, gang("i", x=1, y=1))
    assert [one.ticket for one in (first, second, third)] == [Ticket(0), Ticket(1), Ticket(2)]
    assert [one.turns for one in (first, second, third)] == [
        {"x": 0, "y": 0},
        {"y": 1},
        {"x": 1, "y": 2},
    ]


def test_memory_is_reserved_on_all_devices_or_on_none() -> None:
    desk, _ = issued(DESK, gang("g", x=2, y=8))
    after, no = desk.ask(gang("h", x=3, y=3))
    assert no == Refusal(gang="h", reason="memory", where="y")
    assert after == desk
    assert (desk.used("x"), desk.used("y")) == (2, 8)


def test_what_fits_no_empty_device_is_never_admitted() -> None:
    _, no = DESK.ask(gang("g", x=11))
    assert no == Refusal(gang="g", reason="never", where="x")


def test_a_gang_that_ended_holds_only_its_outputs_until_they_are_freed() -> None:
    one = gang("g", x=8, y=8, stays={"x": 3})
    desk, _ = issued(DESK, one)
    desk = desk.finished(one)
    assert (desk.used("x"), desk.used("y")) == (3, 0)
    desk = desk.freed("g")
    assert desk.used("x") == 0
    assert desk.seq == 1, "numbers are not given twice"


def test_a_gang_gets_no_second_ticket() -> None:
    desk, _ = issued(DESK, gang("g", x=1))
    with pytest.raises(Misuse, match="g already has a ticket"):
        desk.ask(gang("g", x=1))
    with pytest.raises(Misuse, match="never had a ticket"):
        desk.finished(gang("h", x=1))


def test_a_held_desk_issues_nothing_to_others_until_it_is_told() -> None:
    wide = gang("wide", x=4, z=4)
    desk, no = DESK.hold(wide)
    assert no is None
    _, refused = desk.ask(gang("g", y=1))
    assert refused == Refusal(gang="g", reason="held", where="wide")
    committed, ticket = desk.commit(wide)
    assert (ticket.ticket, ticket.turns) == (Ticket(0), {"x": 0})
    issued(committed, gang("g", y=1))
    assert desk.let_go(wide) == DESK


def test_only_the_holder_commits() -> None:
    desk, _ = DESK.hold(gang("wide", x=4))
    with pytest.raises(Misuse, match="held for wide, and g speaks"):
        desk.commit(gang("g", x=1))
    with pytest.raises(Misuse, match="is not held, and g speaks"):
        DESK.let_go(gang("g", x=1))


def test_the_youngest_runs_outputs_are_put_aside_first_and_no_more_than_needed() -> None:
    desk = DESK
    for n, left in ((1, 4), (2, 3), (3, 2)):
        one = gang(f"g{n}", run=n, x=left, stays={"x": left})
        desk = issued(desk, one)[0].finished(one)
    oldest = gang("old", run=0, x=5)
    gone = desk.to_put_aside(oldest)  # 9 of 10 are held, 4 too many: 2 of run 3, then 3 of run 2
    assert gone == (
        Aside(gang="g3", device="x", bytes=2),
        Aside(gang="g2", device="x", bytes=3),
    )
    after = desk.put_aside(gone)
    assert after.used("x") == 4
    issued(after, oldest)


def test_nothing_is_put_aside_while_it_would_not_help_yet() -> None:
    left = gang("left", run=2, x=2, stays={"x": 2})
    desk = issued(DESK, left)[0].finished(left)
    desk, _ = issued(desk, gang("runs", run=1, x=6))
    assert desk.to_put_aside(gang("old", x=5)) == ()
    assert desk.to_put_aside(gang("old", x=4)) == (Aside(gang="left", device="x", bytes=2),)


# --- the devices --------------------------------------------------------------------------------


def at(turn: int, id: str) -> Issued:
    return Issued(gang=id, ticket=Ticket(turn), turns={"x": turn})


def test_a_device_waits_for_the_message_that_it_still_misses() -> None:
    line = Line(device="x").told(at(1, "h"))
    assert line.head is None
    line = line.told(at(0, "g"))
    assert line.head == "g"
    assert line.finished().head == "h"


def test_a_message_that_comes_twice_or_late_changes_nothing() -> None:
    line = Line(device="x").told(at(0, "g"))
    assert line.told(at(0, "g")) == line
    done = line.finished()
    assert done.told(at(0, "g")) == done


def test_a_turn_that_was_given_up_is_passed_over_in_whatever_order_that_is_heard() -> None:
    line = Line(device="x")
    messages = [lambda x: x.told(at(0, "g")), lambda x: x.told(at(1, "h"))]
    messages += [lambda x: x.given_up(at(1, "h")), lambda x: x.told(at(2, "i"))]
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)):
        at_last = line
        for n in order:
            at_last = messages[n](at_last)
        assert at_last.head == "g"
        assert at_last.finished().head == "i"
        assert at_last.finished().turn == 2


def test_nobody_ends_who_did_not_run() -> None:
    with pytest.raises(Misuse, match="nobody at turn 0"):
        Line(device="x").finished()


# --- no deadlock --------------------------------------------------------------------------------

TWO = Scene(
    islands={"a": {"x": 9, "y": 9}},
    runs=[[gang("g", run=0, x=1, y=1)], [gang("h", run=1, x=1, y=1)]],
)


def every_interleaving(one: Scene, by: str) -> tuple[int, int]:
    """(how many there are, how many got stuck): all of them, by counting through the choices."""
    played, stuck, script = 0, 0, list[int]()
    while True:
        sizes, n = list[int](), 0

        def choose(size: int, sizes: list[int] = sizes, script: list[int] = script) -> int:
            sizes.append(size)
            if len(sizes) > len(script):
                script.append(0)
            return script[len(sizes) - 1]

        stuck += bool(play(one, choose, by=by).stuck)
        played += 1
        for n in reversed(range(len(sizes))):
            if script[n] + 1 < sizes[n]:
                script[n] += 1
                del script[n + 1 :]
                break
        else:
            return played, stuck


def test_two_gangs_on_two_devices_never_get_stuck_in_any_interleaving() -> None:
    played, stuck = every_interleaving(TWO, "tickets")
    assert played > 1000
    assert stuck == 0


def test_without_tickets_some_interleavings_of_the_same_two_do() -> None:
    played, stuck = every_interleaving(TWO, UNSYNCHRONISED)
    assert 0 < stuck < played


def test_a_desk_that_does_not_hold_gets_gangs_of_two_islands_stuck() -> None:
    """Why the first phase holds: the gang is numbered on a, then a local one behind it there, then
    one that waits for that on b, and only then the gang on b."""
    wide, local = gang("wide", run=0, x=1, z=1), gang("local", run=1, x=1)
    waits = replace(gang("waits", run=1, z=1), after=("local",))
    one = Scene(islands={"a": {"x": 9}, "b": {"z": 9}}, runs=[[wide], [local, waits]])
    stuck = {
        by: sum(bool(play(one, seeded(seed), by=by).stuck) for seed in range(300))
        for by in ("tickets", UNHELD)
    }
    assert stuck["tickets"] == 0
    assert stuck[UNHELD] > 0


def seeded(seed: int) -> Callable[[int], int]:
    return random.Random(seed).randrange


@pytest.mark.parametrize("first", range(0, 2000, 500))
def test_in_thousands_of_scenes_every_gang_ends_and_in_order(first: int) -> None:
    for seed in range(first, first + 500):
        outcome = interleave(seed)
        assert outcome.stuck == (), seed
        assert outcome.disorders == 0, seed


def test_the_same_scenes_get_stuck_in_each_way_that_tickets_prevent() -> None:
    def stuck(**how: object) -> int:
        return sum(bool(interleave(seed, **how).stuck) for seed in range(150))  # type: ignore[arg-type]

    assert stuck(by=UNSYNCHRONISED) > 50
    assert stuck(by=UNHELD) > 0
    assert stuck(put_aside=False) > 50


@given(seed=st.integers(0, 10_000), choices=st.lists(st.integers(0, 1 << 20), max_size=200))
def test_no_choice_of_steps_gets_tickets_stuck(seed: int, choices: list[int]) -> None:
    rest = iter(choices)
    outcome = play(scene(seed), lambda size: next(rest, 0) % size)
    assert outcome.stuck == ()
    assert outcome.disorders == 0
