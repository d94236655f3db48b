"""Jobs of the zoo inside walls: saved in one epoch, and put back in the next by the device."""

from __future__ import annotations

import pytest

from app.core.model.messages import Finished, Saved, Started
from tests.workers.conftest import bundled
from tests.workers.journeys import ZOO

#: What a tenant would add to see all that the job computed.
TOLD = """
import time
from {module} import Train

class Told(Train):
    trace = ()
    def step(self, ctx):
        metrics = super().step(ctx)
        self.trace = (*self.trace, *(float(value).hex() for value in metrics.values()))
        time.sleep({nap_s})
        if ctx.step == {steps}:
            ctx.finish({{"trace": list(self.trace)}})
        return metrics
"""
STEPS = 30


@pytest.mark.parametrize("module", ["mlp", "loading"])
def test_a_job_is_put_back_inside_walls(grounds, module):
    ground = grounds(sandbox="preferred")

    def launch(task: str, nap_s: float, epoch: int = 1, **more: object) -> None:
        files = {path.name: path.read_text() for path in ZOO.glob("*.py")}
        files["told.py"] = TOLD.format(module=module, steps=STEPS, nap_s=nap_s)
        bundle, _ = ground.store.put([bundled(files)])
        ground.launch(task, "told:Told", epoch=epoch, bundle=bundle, **more)

    launch("alone", 0.0)
    expected = ground.event(Finished, "alone", timeout_s=60).result
    launch("moved", 0.05)
    ground.steps("moved", 4)
    ground.save("moved")
    saved = ground.event(Saved, "moved")
    assert 0 < saved.step < STEPS
    ground.cancel("moved")
    ground.until(lambda: ground.view("moved") is None)
    launch("moved", 0.0, epoch=2, images=[ground.image(saved)])
    assert ground.event(Started, "moved", epoch=2).resumed == "image"
    assert ground.event(Finished, "moved", epoch=2, timeout_s=60).result == expected
