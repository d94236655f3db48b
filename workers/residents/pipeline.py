"""Runs one task inside a resident: from its start to its end, with a safe point after each step.

The task passes through a pipeline of `stages`, each of which reads and fills one `Work`:

    take_start -> configure -> load_code -> bring_in -> take_seat -> build -> run -> settle

A stage that cannot go on raises `Ending` with the final message of the process.  Orders arrive over
`Wire` and wait as requested actions until the next safe point.  The trust deadline is read before
every step: after the deadline no step begins, even if the supervisor hangs.

A function may be followed by others in the same process (`shared_process`).

Images of the job are copied into its slab, mostly while the next step already runs (`staging`).
The supervisor is told where an image lies, and answers when it has stored the image.  Outputs leave
over the `bulk` socket.  Threads that only copy do both; nothing else runs beside the job.
"""

from __future__ import annotations

import contextlib
import socket

from app.core.model import codec
from workers.capture import data_loader
from workers.hardware import preset
from workers.hardware.dirty_pages import Watch
from workers.hardware.storages import follow_lending
from workers.process.slab import Slab
from workers.process.task_start import TaskStart
from workers.process.wire import TrustSeen, Wire
from workers.residents import progress, remote_ranks, stages
from workers.residents.endings import Abandoned, Ending
from workers.residents.work import Work


def prepare() -> None:
    """Do what every task would do again in its own process, and what fills caches.

    Called once in the process from which the residents are forked: what a fork writes to is copied.
    """
    descriptor = {"name": "prepared", "run": {"function": "module:function"}}
    start = {"task": "", "spec": descriptor, "inputs": {}, "preset": {}, "kind": "cpu"}
    folders = {"code": "", "scratch": "", "lease_margin_s": 0.0, "patience_s": 0.0}
    codec.from_json(TaskStart, start | folders)
    for setting in preset.SETTINGS.values():
        setting.read()
    data_loader.follow()
    follow_lending()


def execute(
    wire: Wire, bulk: socket.socket, trust: TrustSeen, slab: Slab, watch: Watch | None
) -> int:
    """Run the resident's task; return the exit status of the process."""
    work = Work(wire=wire, bulk=bulk, trust=trust, slab=slab, watch=watch)
    if not is_begun(work):
        return 1
    if work.spec.world_size > 1:
        return remote_ranks.conduct(work, run_stages)
    status = run_stages(work)
    while work.is_resting:
        work = Work(wire=wire, bulk=bulk, trust=trust, slab=slab, watch=watch, shared=work.shared)
        if not is_begun(work):
            return 0
        status = run_stages(work)
    return status


def is_begun(work: Work) -> bool:
    """Wait for the start of a task; False if the supervisor is gone, or has no further function."""
    try:
        stages.take_start(work)
    except Abandoned:
        return False
    if work.start is None:
        return False
    if work.is_graph:
        stages.read_graph(work)
    return True


def run_stages(work: Work) -> int:
    """Run a job, or one rank of it, to its end; return the exit status."""
    try:
        for stage in stages.ALL:
            stage(work)
    except Ending as ending:
        said = ending.message
        if work.start.rests and _goes_on(work, ending):
            said["rests"] = work.is_resting = True
        with contextlib.suppress(Abandoned):
            if work.rows:  # of the steps before the failure
                progress.report_all(work)
            work.say(said.pop("is"), **said)
    except Abandoned:
        return 1
    return 0


def _goes_on(work: Work, ending: Ending) -> bool:
    """Make the process ready for its next function; False if it cannot run one.

    It cannot if something other than the function ended the call, or if an output still leaves.
    """
    is_own = ending.message["is"] == "finished" or ending.message.get("cause") == "exception"
    return is_own and not work.outgoing.busy and work.shared.make_ready()
