"""Ranks of torch scripts that go on on other devices, with the bits of an undisturbed run."""

from __future__ import annotations

import os
import random

import pytest

from app.core.model.protocol.messages import Finished, Started
from tests.workers.commands.gang.test_native_ranks import NATIVE, by_gloo
from tests.workers.commands.gang.test_ranks import parameters, train, undisturbed
from tests.workers.criu.test_commands_that_move import hosts

__all__ = ["by_gloo", "hosts", "undisturbed"]  # fixtures

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may store processes"),
]


def test_ranks_of_a_torch_script_end_with_the_same_parameters(hosts, undisturbed):
    assert _moved(hosts) == undisturbed


def test_ranks_with_native_collectives_end_with_the_parameters_of_gloo(hosts, by_gloo):
    assert _moved(hosts, **NATIVE) == by_gloo


def _moved(hosts, **more):
    """Return the parameters of a gang that goes over four devices.

    `more` is what the task asks for.
    """
    rig, images, at = hosts(), [], 0
    moments = random.Random(int(os.environ.get("MOVES_SEED", "26")))
    for epoch in (1, 2, 3):
        train(rig, epoch=epoch, images=images, **more)
        assert rig.event(Started, "t1", epoch).resumed == ("image" if images else "fresh")
        at += moments.randint(5, 12)
        rig.steps("t1", at, epoch)
        images = rig.paused_and_saved("t1", epoch)
        assert not rig.all(Finished, "t1", epoch)
        rig = hosts()
    train(rig, epoch=4, images=images, **more)
    assert rig.event(Started, "t1", 4).resumed == "image"
    return parameters(rig, epoch=4)
