"""How the metrics of a new task's first steps are kept."""

from __future__ import annotations

import socket

from tests.workers.starts import start_of
from workers.hardware.accelerator import Accelerator
from workers.process.slab import Slab, made
from workers.process.wire import Trust, TrustSeen, Wire, pair
from workers.residents import progress
from workers.residents.images import Images
from workers.residents.progress import FirstPoints
from workers.residents.work import Work


def test_first_points_are_evenly_thinned():
    points = progress.FirstPoints(until_s=1.0)
    for step in range(1, 1001):
        points.add(step, {"loss": 1 / step})
    steps = [step for step, _ in points.kept]
    assert progress.FIRST_POINTS / 2 <= len(steps) <= progress.FIRST_POINTS
    assert steps == list(range(1, 1001, points.stride))


def test_points_of_a_process_that_stood_still_are_in_its_next_report():
    wire, theirs = pair()
    bulk, bulk_end = socket.socketpair()
    supervisor, trust = Wire(theirs), Trust()
    work = Work(wire, bulk, TrustSeen(trust.fd), Slab(made(1 << 20)), watch=None)
    work.start, work.accelerator = start_of({"job": "m:J"}), Accelerator("cpu")
    work.images, work.points = Images(work), FirstPoints(until_s=0.0)  # which is over
    work.points.add(1, {"loss": 0.5})
    progress.report(work)
    progress.report(work)
    supervisor.wait(30.0)
    assert [message["points"] for message in supervisor.receive()] == [[[1, {"loss": 0.5}]], []]
    for end in (wire, supervisor, bulk, bulk_end, trust):
        end.close()
