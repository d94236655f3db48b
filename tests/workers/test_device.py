from __future__ import annotations

from app.core.messages import Finished, Paused, Saved, Started


def test_a_job_runs_to_its_end(ground):
    ground.launch("t1", "jobs:Count", params={"steps": 5})
    assert ground.event(Finished, "t1").result == {"done": 5}
    assert ground.event(Started, "t1").resumed == "fresh"
