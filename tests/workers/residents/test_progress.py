"""How the metrics of a task's steps are reported."""

from __future__ import annotations

import socket

from tests.workers.starts import start_of
from workers.hardware.accelerator import Accelerator
from workers.process.slab import Slab, made
from workers.process.wire import Trust, TrustSeen, Wire, pair
from workers.residents import progress
from workers.residents.images import Images
from workers.residents.work import Work


def test_rows_of_all_steps_are_reported_once():
    wire, theirs = pair()
    bulk, bulk_end = socket.socketpair()
    supervisor, trust = Wire(theirs), Trust()
    work = Work(wire, bulk, TrustSeen(trust.fd), Slab(made(1 << 20)), watch=None)
    work.start, work.accelerator = start_of({"job": "m:J"}), Accelerator("cpu")
    work.images = Images(work)
    for step in range(1, 121):
        progress.add_row(work, step, {"loss": 0.5})
    progress.report(work)
    progress.report(work)
    supervisor.wait(30.0)
    told = [message["points"] for message in supervisor.receive()]
    assert told == [[[step, {"loss": 0.5}] for step in range(1, 121)], []]
    assert not progress.is_due(work)
    work.reported_s -= progress.FULL_S
    assert not progress.is_due(work)
    for step in range(1200):
        progress.add_row(work, step, {"loss": 0.5})
    assert progress.is_due(work)
    progress.report_all(work)
    assert [len(message["points"]) for message in supervisor.receive()] == [500, 500, 200]
    for end in (wire, supervisor, bulk, bulk_end, trust):
        end.close()
