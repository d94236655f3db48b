"""When a session gives its device away, and when it ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.model import descriptor
from app.core.model.provisions.session import WARN_AT, SessionEnd, gives_way, judge_silence

seconds = st.floats(0, 1e6, allow_nan=False)


def parsed(session, **more):
    task = {"name": "t", "run": {"command": ["sleep", "9"]}, "session": session, **more}
    return descriptor.parse({"tasks": [task]})


def test_session_is_read_and_written_as_it_was_given():
    [task] = parsed({"idle_s": 30}).tasks
    assert task.session.idle_s == 30
    assert descriptor.from_json(descriptor.as_json(task)) == task
    assert descriptor.from_json(descriptor.to_wire(task)) == task
    assert task.devices.choice.needs == ("session",)


def test_task_without_a_session_needs_none():
    [task] = descriptor.parse({"tasks": [{"name": "t", "run": {"command": ["ls"]}}]}).tasks
    assert task.session is None
    assert "session" not in descriptor.to_wire(task)


BAD = [
    ({"idle_s": 4}, {}, "/tasks/0/session/idle_s"),
    ({"idle_s": 86401}, {}, "/tasks/0/session/idle_s"),
    ({"idle": 9}, {}, "/tasks/0/session/idle"),
    ({}, {"run": {"job": "train:Train"}}, "/tasks/0/session"),
    ({}, {"world_size": 2}, "/tasks/0/session"),
]


@pytest.mark.parametrize(("session", "more", "pointer"), BAD, ids=str)
def test_session_that_cannot_be_is_a_fault_at_its_place(session, more, pointer):
    with pytest.raises(descriptor.BadDescriptor) as found:
        parsed(session, **more)
    assert pointer in [fault.pointer for fault in found.value.faults]


@given(seconds, seconds, seconds)
def test_session_gives_way_only_when_it_neither_computes_nor_is_typed_into(idle_s, nothing, silent):
    gives = gives_way(idle_s, computed_nothing_s=nothing, silent_s=silent)
    assert gives == (min(nothing, silent) >= idle_s)


@given(seconds, st.none() | st.floats(1, 1e6), st.booleans())
def test_silent_session_is_warned_once_and_then_ended(silent_s, end_s, is_warned):
    step = judge_silence(silent_s, end_s, is_warned=is_warned)
    if end_s is None or silent_s < WARN_AT * end_s:
        assert step is None
    elif silent_s >= end_s:
        assert step == SessionEnd.END
    else:
        assert step == (None if is_warned else SessionEnd.WARN)
