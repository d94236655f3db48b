"""What a board knows after any changes of tasks and devices is what a new board would know."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from app.core.model.lifecycle import State
from app.core.model.snapshot import BoardDevice, BoardTask
from app.core.scheduling.board import Board
from app.core.scheduling.cycle import cycle
from tests.core.pictures import NOW_S, island

DEVICES = ("d0", "d1")
TASKS = ("a", "b")
OFFER = "criu:1"

#: A task that holds no device: it waits or is paused by its user, and its image lies somewhere.
REST = st.fixed_dictionaries(
    {
        "state": st.sampled_from([State.waiting, State.blocked]),
        "image_on": st.sampled_from([None, *DEVICES]),
        "saved": st.booleans(),
        "moves_to": st.sampled_from([None, *DEVICES]),
        "restarts": st.booleans(),
        "movable": st.booleans(),
        "goes_on_with": st.sampled_from(["", OFFER]),
        "retry_at_s": st.sampled_from([0.0, NOW_S + 5.0]),
        "epoch": st.just(1),
    }
)
HOLD = st.fixed_dictionaries(
    {"state": st.just(State.running), "seats": st.sampled_from([("d0",), ("d1",)])}
)
ENDS = st.sampled_from([{"state": state} for state in (State.cancelled, State.done)])
CHANGE = st.one_of(
    st.tuples(st.sampled_from(TASKS), st.one_of(REST, HOLD, ENDS)),
    st.tuples(st.sampled_from(DEVICES), st.fixed_dictionaries({"cordoned": st.booleans()})),
)


def _board() -> tuple[Board, dict[str, BoardTask], dict[str, BoardDevice]]:
    drawn = island(". .", queue="a b")
    return Board.of(drawn, now_s=NOW_S), dict(drawn.tasks), dict(drawn.devices)


@given(st.lists(CHANGE, max_size=12))
def test_board_takes_every_order_of_moves_cordons_pauses_and_cancels(changes):
    board, tasks, devices = _board()
    for which, values in changes:
        if which in devices:
            devices[which] = replace(devices[which], **values)
            board.set_device(devices[which])
        elif values["state"] != State.running or not board.on(values["seats"][0]):
            fresh = replace(tasks[which], seats=(), image_on=None, moves_to=None)
            board.set_task(replace(fresh, **values))
    for device in DEVICES:
        assert set(board.pinned_to(device)) <= board.tasks.keys()
        assert board._pinned.get(device, set()) <= board.tasks.keys()


def test_cancelled_task_that_its_user_paused_is_forgotten_by_the_device_of_its_image():
    board, tasks, devices = _board()
    paused = replace(tasks["a"], state=State.blocked, image_on="d0", saved=False, epoch=1)
    board.set_task(paused)
    board.set_task(replace(paused, state=State.cancelled))
    board.set_device(replace(devices["d0"], cordoned=True))
    assert cycle(board) is not None
