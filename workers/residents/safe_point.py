"""Stop at a safe point between two steps, alone or with all ranks of a gang."""

from __future__ import annotations

from workers.graph.executor_job import ExecutorJob
from workers.graph.runner import GraphJob
from workers.ranks.turns import GangFailed
from workers.residents import inbox, late_inputs, orders
from workers.residents.endings import as_ending
from workers.residents.work import Work


def safe_point(work: Work) -> None:
    """Read orders between two steps and obey them.  Returns when the next step may begin."""
    if work.member is None:
        orders.obey(work)
        if isinstance(work.job, GraphJob):
            late_inputs.await_inputs(work, work.job)
        return
    is_ready = False
    try:
        while not is_ready:
            # An executor waits for its next node's inputs here, and can be stopped while it waits.
            is_ready = not isinstance(work.job, ExecutorJob) or work.job.await_next(work.outside)
            with work.member.between(work.step + 1, lambda: _stand_at_cut(work)):
                orders.obey(work)
    except (GangFailed, TimeoutError) as error:
        raise as_ending(error) from error


def _stand_at_cut(work: Work) -> None:
    """Wait until all ranks stand at the cut, and its step and reason are known."""
    if isinstance(work.job, ExecutorJob):
        work.job.stand()
    work.say("at_cut", ran=work.ran)
    while "on" not in work.wishes:
        inbox.listen(work, None)
    work.wishes -= {"on"}
    work.step = work.stands_at
