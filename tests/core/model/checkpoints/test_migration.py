"""Moves on paper: when a round is worth it, when a move stops or fails; and on the board."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.model import codec
from app.core.model.checkpoints.migration import (
    Act,
    CopyRound,
    MovePolicy,
    MoveScene,
    Moving,
    bandwidth,
    expected_stop_s,
    next_act,
    told,
)
from app.core.model.lifecycle import State
from app.core.model.snapshot import Snapshot
from app.core.scheduling import record
from app.core.scheduling.board import Board
from app.core.scheduling.cycle import cycle, decide
from tests.core.pictures import NOW_S, island, seats

MB = 1_000_000
POLICY = MovePolicy()


def copied(step: int, megabytes: float, *, seconds: float = 1.0) -> CopyRound:
    """A round that is over: so much was fetched; half of the time is the writing."""
    us = int(seconds * 1e6 / 2)
    return CopyRound(
        sha256=f"{step:064x}",
        key="k",
        step=step,
        size_bytes=100 * MB,
        wrote_us=us,
        fetched_bytes=int(megabytes * MB),
        fetched_us=us,
    )


def move(*rounds: CopyRound, **more: Any) -> Moving:
    usual = {"to": "d1", "source": "d0", "epoch": 1, "until_s": 600.0, "asked": len(rounds)}
    return Moving(**{**usual, "rounds": rounds, **more})


def at(state: str = "running", **more: Any) -> MoveScene:
    usual = {"epoch": 1, "seat": "d0", "open": True, "now_s": 10.0}
    return MoveScene(state=state, **{**usual, **more})


def act(moving: Moving, scene: MoveScene | None = None) -> Act:
    return next_act(moving, scene or at(), POLICY).act


class TestRounds:
    def test_move_begins_with_a_checkpoint_while_the_task_runs(self) -> None:
        assert act(move()) == Act.copy

    def test_no_checkpoint_is_ordered_while_one_is_written(self) -> None:
        assert act(move(asked=1)) == Act.wait

    def test_no_checkpoint_is_ordered_while_the_target_fetches(self) -> None:
        assert act(move(replace(copied(1, 100), fetched_us=None))) == Act.wait

    def test_another_copy_round_follows_while_rounds_shrink(self) -> None:
        # 100 MB in a second, then 50: the next 50 would take half a second.
        assert act(move(copied(1, 100))) == Act.copy
        assert act(move(copied(1, 100), copied(2, 50))) == Act.copy

    def test_copying_stops_when_the_rest_does_not_shrink(self) -> None:
        assert act(move(copied(1, 100), copied(2, 95))) == Act.stop
        assert act(move(copied(1, 100), copied(2, 90))) == Act.copy

    def test_copying_stops_when_the_rest_is_sent_in_no_time(self) -> None:
        # 100 MB/s: 10 MB pass in 0.1 s.
        assert act(move(copied(1, 100), copied(2, 10))) == Act.stop
        assert act(move(copied(1, 100), copied(2, 11))) == Act.copy

    def test_copying_stops_after_five_rounds(self) -> None:
        rounds = [copied(n, 1000 * 0.85**n) for n in range(1, 6)]  # 444 MB are left
        assert act(move(*rounds[:4])) == Act.copy
        assert act(move(*rounds)) == Act.stop

    def test_allowed_pause_follows_from_what_is_left(self) -> None:
        found = next_act(move(copied(1, 100), copied(2, 95)), at(now_s=50.0), POLICY)
        assert found.until_s == pytest.approx(50 + 15 + 4 * 0.95)

    def test_bandwidth_is_measured_in_the_largest_round(self) -> None:
        rounds = (copied(1, 100, seconds=2), copied(2, 1, seconds=1))
        assert bandwidth(rounds) == pytest.approx(50 * MB)
        assert expected_stop_s(rounds) == pytest.approx(0.02)
        assert bandwidth(()) == 0.0

    def test_copying_stops_at_once_when_the_target_has_everything(self) -> None:
        assert act(move(copied(1, 0))) == Act.stop

    @given(st.lists(st.integers(0, 10**12), min_size=1, max_size=60))
    def test_every_move_stops_after_few_rounds(self, sizes: list[int]) -> None:
        moving, done = move(), 0
        for step, size in enumerate(sizes, start=1):
            if act(moving) == Act.stop:
                break
            assert act(moving) == Act.copy
            moving = replace(moving, asked=moving.asked + 1)
            assert act(moving) == Act.wait
            ordered = replace(copied(step, 0), fetched_us=None)
            moving = moving.saved(ordered).fetched(ordered.sha256, size, 10**6)
            done += 1
        assert done <= POLICY.rounds_max


class TestEnds:
    def test_move_is_abandoned_when_the_target_takes_no_work(self) -> None:
        assert act(move(), at(open=False)) == Act.off
        assert act(move(stopping=True), at("waiting", seat=None, open=False)) == Act.off

    def test_move_is_abandoned_when_it_takes_too_long(self) -> None:
        assert act(move(), at(now_s=599.9)) == Act.copy
        assert act(move(), at(now_s=600.0)) == Act.off

    def test_move_is_abandoned_when_the_task_gave_up_its_device_otherwise(self) -> None:
        assert act(move(copied(1, 9)), at("waiting", seat=None)) == Act.off
        assert act(move(copied(1, 9), stopping=True), at("blocked", seat=None)) == Act.off

    def test_move_waits_while_the_task_is_being_paused(self) -> None:
        stopping = move(copied(1, 9), stopping=True)
        for state in ("running", "pausing"):
            assert act(stopping, at(state)) == Act.wait
        assert act(stopping, at("waiting", seat=None)) == Act.wait

    def test_move_waits_for_the_launch_and_is_abandoned_if_that_fails(self) -> None:
        stopping = move(copied(1, 9), stopping=True)
        assert act(stopping, at("starting", epoch=2, seat="d1", open=False)) == Act.wait
        assert act(stopping, at("waiting", epoch=2, seat=None)) == Act.off
        assert act(stopping, at("starting", epoch=2, seat="d0")) == Act.off

    @given(
        st.sampled_from(list(State)),
        st.integers(1, 3),
        st.sampled_from([None, "d0", "d1"]),
        st.booleans(),
        st.floats(0, 1000),
        st.booleans(),
    )
    def test_checkpoints_are_ordered_only_of_a_task_running_at_its_source(
        self, state: State, epoch: int, seat: str | None, open_: bool, now_s: float, stop: bool
    ) -> None:
        scene = MoveScene(state=state, epoch=epoch, seat=seat, open=open_, now_s=now_s)
        found = next_act(move(stopping=stop), scene, POLICY)
        if found.act in (Act.copy, Act.stop):
            assert (state, epoch, stop) == ("running", 1, False)
        assert bool(found.because) == (found.act in (Act.off, Act.stop))


class TestWords:
    def test_explanation_says_how_far_the_move_is(self) -> None:
        assert told(move()) == "moving to d1: its first checkpoint is being written"
        on_its_way = replace(copied(1, 0), fetched_us=None)
        assert (
            told(move(on_its_way)) == "moving to d1: round 1, d1 fetches what it lacks of 100.0 MB"
        )
        assert told(move(copied(1, 40))) == "moving to d1: round 1 is there, 40.0 MB were new"
        stopping = move(copied(1, 40), stopping=True)
        assert told(stopping) == "moving to d1: the last difference is being copied"

    def test_move_survives_json(self) -> None:
        moving = move(copied(1, 40), replace(copied(2, 4), fetched_us=None), stopping=True)
        assert (
            codec.from_json(Moving, json.loads(json.dumps(codec.to_json(moving, whole=True))))
            == moving
        )

    def test_late_or_repeated_checkpoint_is_no_round(self) -> None:
        moving = move(copied(5, 40))
        assert moving.saved(copied(5, 1)) == moving
        assert moving.saved(copied(4, 1)) == moving
        assert replace(moving, stopping=True).saved(copied(6, 1)).rounds == moving.rounds


def mover(drawn: Snapshot, task: str, **changes: Any) -> Snapshot:
    tasks = {**drawn.tasks, task: replace(drawn.tasks[task], **changes)}
    return replace(drawn, tasks=tasks)


def on_the_way(cells: str = ". .", *, queue: str = "b", **more: Any) -> Snapshot:
    """a was paused on d0 for its move to d1; its image is durable unless `saved` is False."""
    image = {"image_on": "d0", "moves_to": "d1", "stops": True, "epoch": 1, **more}
    return island(cells, queue=f"a {queue}", tasks={"a": image}, used={"a": 100})


class TestOnTheBoard:
    def test_target_device_is_given_to_no_other_task(self) -> None:
        drawn = mover(island("a' . .", queue="b c"), "a", moves_to="d1")
        assert seats(decide(drawn, now_s=NOW_S)) == "d2: b"

    def test_task_runs_while_it_is_copied_and_is_paused_for_the_last_difference(self) -> None:
        drawn = mover(island("a' ."), "a", moves_to="d1")
        assert decide(drawn, now_s=NOW_S).decisions == ()
        (pause,) = decide(mover(drawn, "a", stops=True), now_s=NOW_S).decisions
        assert (pause.move, pause.rule, pause.devices) == ("Pause", "move", ("d0",))

    def test_task_is_launched_at_the_target_when_its_image_is_durable(self) -> None:
        # b, who used less, gets what a left.
        assert seats(decide(on_the_way(), now_s=NOW_S)) == "d0: b  d1: a"

    def test_task_waits_for_its_image_and_goes_nowhere_else(self) -> None:
        drawn = on_the_way(queue="b c", saved=False)
        assert seats(decide(drawn, now_s=NOW_S)) == "d0: b"

    def test_image_lost_with_its_device_is_not_waited_for(self) -> None:
        assert seats(decide(on_the_way("x ."), now_s=NOW_S)) == "d1: a"
        lost = on_the_way("x .", saved=False)
        assert seats(decide(lost, now_s=NOW_S)) == "d1: a"

    @pytest.mark.parametrize("cell", ["x", "#"])
    def test_task_queues_again_if_the_target_is_gone(self, cell: str) -> None:
        drawn = on_the_way(f". {cell}", queue="")
        assert seats(decide(drawn, now_s=NOW_S)) == "d0: a"

    def test_a_drained_device_lets_a_task_run_until_it_has_been_copied(self) -> None:
        devices = island("a' .").devices
        drained = replace(island("a' ."), devices=devices | {
            "d0": replace(devices["d0"], cordoned=True)
        })  # fmt: skip
        assert [d.rule for d in decide(drained, now_s=NOW_S).decisions] == ["drain"]
        for to in ("", "d1"):
            wished = mover(drained, "a", moves_to=to)
            assert decide(wished, now_s=NOW_S).decisions == ()

    def test_hold_or_cancel_comes_before_the_move(self) -> None:
        moving = mover(island("a' ."), "a", moves_to="d1", stops=True, cancel_asked=True)
        assert [d.move for d in decide(moving, now_s=NOW_S).decisions] == ["Cancel"]

    def test_target_is_free_again_when_the_move_is_abandoned(self) -> None:
        drawn = mover(island("a' .", queue="b"), "a", moves_to="d1")
        board = Board.of(drawn, now_s=NOW_S)
        assert cycle(board).decisions == ()
        board.set_task(replace(board.tasks["a"], moves_to=None))
        assert [(d.task, d.devices) for d in cycle(board).decisions] == [("b", ("d1",))]

    def test_target_is_free_again_when_the_task_ends(self) -> None:
        drawn = mover(island("a' . x", queue="b c"), "a", moves_to="d1")
        board = Board.of(drawn, now_s=NOW_S)
        cycle(board)
        board.drop_task("a")
        given = {(d.task, d.devices) for d in cycle(board).decisions}
        assert given == {("b", ("d0",)), ("c", ("d1",))}

    def test_round_with_a_move_is_repeated_from_its_record(self) -> None:
        board = Board.of(on_the_way(), now_s=NOW_S)
        plan = cycle(board)
        seen = record.seen_by(board, plan, plan.before, island="isle")
        again = record.from_json(json.loads(json.dumps(record.as_json(seen))))
        assert decide(again, now_s=NOW_S).decisions == plan.decisions
