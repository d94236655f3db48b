"""The demo's view shows each device with the task that holds it."""

from __future__ import annotations

from examples import view


def test_lent_device_is_shown_with_its_task_like_the_home() -> None:
    ddp = {"name": "ddp-1", "state": "running", "seat": "d.0", "lent": ["d.1"], "step": 7}
    paused = {"name": "old", "state": "paused", "seat": None, "lent": [], "step": 3}
    shown = view._seats({"alpha": [ddp, paused]})
    assert shown == {"d.0": "alpha ddp-1 step 7", "d.1": "alpha ddp-1 step 7"}
