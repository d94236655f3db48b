"""A device offers `command-images` exactly where the trial of its start passes."""

from __future__ import annotations

import logging
import os

import pytest

from app.core.model.provisions.process_images import OFFER
from tests.workers.criu.moving import skip_without_layers

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may store processes")


def test_device_offers_images_from_its_first_report_on(criu, rigs):
    rig = rigs(criu=str(criu))
    skip_without_layers(rig)
    assert {OFFER, "env"} <= {*rig.until(lambda: rig.reports)[0].facts["offers"]}
    assert rig.supervisor.images.version >= "4.2.1"


def test_device_without_the_program_serves_without_images(rigs, caplog):
    with caplog.at_level(logging.INFO, "workers.device.stays.command_images"):
        rig = rigs(criu="/nowhere")
        assert rig.until(lambda: "cannot be stored here" in caplog.text)
    assert "there is no CRIU at /nowhere" in caplog.text
    rig.launch("t1", "jobs:Look", params={"paths": []})
    assert rig.until(lambda: rig.events)
    assert OFFER not in rig.reports[-1].facts["offers"]


def test_device_that_closes_during_the_trial_leaves_nothing(criu, rigs):
    rig = rigs(criu=str(criu))
    rig.close()
    assert rig.supervisor.images._trial is not None
    child = rig.supervisor.images._trial._child
    assert child is None or child.poll() is not None
