"""Jobs of the zoo inside walls: saved in one epoch, and put back in the next by the device."""

from __future__ import annotations

import pytest

from app.core.model.protocol.messages import Finished, Saved, Started
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
MB = 2**20


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        ("mlp", "cpu"),
        pytest.param("loading", "sim", marks=pytest.mark.sim),
        pytest.param("loading", "cpu", marks=pytest.mark.long),
        pytest.param("mlp", "sim", marks=[pytest.mark.sim, pytest.mark.long]),
    ],
)
def test_job_is_restored_inside_the_sandbox(rigs, accelerators, module, kind):
    rig = accelerators(256 * MB) if kind == "sim" else rigs(sandbox="preferred")

    def launch(task: str, nap_s: float, epoch: int = 1, **more: object) -> None:
        files = {path.name: path.read_text() for path in ZOO.glob("*.py")}
        files["told.py"] = TOLD.format(module=module, steps=STEPS, nap_s=nap_s)
        bundle, _ = rig.store.put([bundled(files)])
        rig.launch(task, "told:Told", epoch=epoch, bundle=bundle, **more)

    launch("alone", 0.0)
    expected = rig.event(Finished, "alone").result
    launch("moved", 0.3)  # slow: it does not end before it is saved
    rig.steps("moved", 4)
    rig.save("moved")
    saved = rig.event(Saved, "moved")
    assert 0 < saved.step < STEPS
    rig.cancel("moved")
    rig.until(lambda: rig.view("moved") is None)
    launch("moved", 0.0, epoch=2, images=[rig.image(saved)])
    assert rig.event(Started, "moved", epoch=2).resumed == "image"
    assert rig.event(Finished, "moved", epoch=2).result == expected
