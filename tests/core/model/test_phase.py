from __future__ import annotations

import pytest

from app.core.model.lifecycle import NOT_STARTED, State
from app.core.model.phase import OF_STATE, Phase, request_phase, task_phase


def phase(state, *, hold="", begun=False, retries=False, has_image=False):
    return task_phase(state, hold=hold, begun=begun, retries=retries, has_image=has_image)


def test_every_state_has_a_phase():
    assert {*OF_STATE, *NOT_STARTED} == set(State)


@pytest.mark.parametrize("state", sorted(NOT_STARTED))
def test_a_task_without_a_device_is_queued_until_somebody_pauses_it(state):
    assert phase(state) == Phase.queued
    assert phase(state, hold="user") == phase(state, hold="admin", begun=True) == Phase.paused


def test_a_task_that_has_run_and_waits_is_preempted():
    assert phase("waiting", begun=True) == Phase.preempted
    assert phase("waiting", begun=True, has_image=True, retries=True) == Phase.preempted


def test_a_task_that_is_tried_again_is_queued():
    assert phase("waiting", begun=True, retries=True) == Phase.queued


def test_a_task_on_a_device_runs_until_it_has_left():
    told = {state: phase(state, hold="user") for state in ("running", "pausing", "stopping")}
    assert set(told.values()) == {Phase.running}
    assert phase("starting", begun=True) == Phase.starting


@pytest.mark.parametrize(
    ("state", "phases", "word"),
    [
        ("queued", [], "queued"),
        ("running", ["paused", "queued"], "queued"),
        ("running", ["paused", "done"], "paused"),
        ("running", ["queued", "preempted", "paused"], "preempted"),
        ("running", ["preempted", "starting"], "starting"),
        ("running", ["starting", "running", "done"], "running"),
        ("failed", ["failed", "done"], "failed"),
    ],
)
def test_a_request_has_the_phase_of_its_most_advanced_task(state, phases, word):
    assert request_phase(state, phases) == word
