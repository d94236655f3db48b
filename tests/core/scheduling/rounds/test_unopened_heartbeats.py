"""Which of the heartbeats that wait unopened is opened first."""

from __future__ import annotations

from app.core.scheduling.rounds.unopened_heartbeats import UnopenedHeartbeats


def test_newest_of_each_process_comes_first_and_processes_in_turn():
    unopened = UnopenedHeartbeats()
    for process, sealed in (("b", "b1"), ("a", "a1"), ("b", "b2"), ("b", "b3")):
        unopened.put(process, sealed)
    assert [[*each] for each in unopened.take()] == [["b3", "b2", "b1"], ["a1"]]
    assert [*unopened.take()] == []
