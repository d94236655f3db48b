"""Holds the state of one task in this process; every stage reads it and adds to it."""

from __future__ import annotations

import contextlib
import math
import socket
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

from app.core.model.descriptor import TaskDescriptor
from app.core.model.graphs.task_graph import TaskGraph
from app.core.model.metric_rows import MetricRows
from app.core.placement.executors import ExecutorSpread
from workers.capture.capture import Surroundings
from workers.capture.tensor_io import Lent
from workers.graph.executor_job import PartitionLink
from workers.graph.runner import GraphJob
from workers.hardware.accelerator import Accelerator
from workers.hardware.dirty_pages import Watch
from workers.process.slab import Slab
from workers.process.task_start import TaskStart
from workers.process.wire import TrustSeen, Wire
from workers.residents.context import Context
from workers.residents.endings import JSON, Abandoned, Ending
from workers.residents.images import Images
from workers.residents.member import Member
from workers.residents.outputs import Outgoing
from workers.residents.shared_process import SharedProcess


@dataclass
class Work:
    """Holds the state of one task in this process. `step` is the last finished step."""

    wire: Wire
    bulk: socket.socket
    trust: TrustSeen
    slab: Slab
    watch: Watch | None
    shared: SharedProcess = field(default_factory=SharedProcess)
    is_resting: bool = False  # its function has ended, and its process can run another one
    start: TaskStart = None  # type: ignore[assignment]  # filled by take_start
    fds: list[int] = field(default_factory=list)
    graph: TaskGraph | None = None  # the graph, or the part of it that this task runs
    spread: ExecutorSpread | None = None  # executor of each node, if there are several
    entry: Any = None
    job: Any = None
    preset: JSON = field(default_factory=dict)
    capabilities: list[str] = field(default_factory=list)
    step: int = 0
    stands_at: int = 0  # the gang's step after which all ranks stop at a cut
    metrics: JSON = field(default_factory=dict)
    rows: MetricRows = field(default_factory=MetricRows)  # metrics that no report has had
    # the last reported value of the metric that ranks its checkpoints (`BestRule.ranked`)
    ranked: JSON = field(default_factory=dict)
    wishes: set[str] = field(default_factory=set)
    reported_s: float = -math.inf
    saved_s: float = 0.0
    # why no image can be made; reported when the task is back in the slot
    ending: Ending | None = None
    # port -> file of a late input that arrived
    arrived: dict[str, int] = field(default_factory=dict)
    seated_s: float = 0.0  # when the task last took the slot, except after slices of others
    patience_s: float = 0.0  # how long the task may wait for an input in the slot
    outside: PartitionLink | None = None  # set in the first executor of a partition
    base_bytes: int = 0
    # True if the task gave its slot up only for slices of co-located tasks, and will soon be back
    is_back_soon: bool = False
    turn: int = 0  # number of the last order to move memory off the device or back
    before_bytes: int = 0  # memory of the process when it was told to release memory
    # bytes that were released, not reused, and not yet taken back by the kernel
    lazy_bytes: int = 0
    granted_bytes: int = 0  # device memory that the task may take when it returns
    staged_s: float = 0.0  # time spent at safe points to copy the state
    ctx: Context = None  # type: ignore[assignment]  # filled by load_code
    around: Surroundings = None  # type: ignore[assignment]
    lent: Lent = field(default_factory=Lent)
    accelerator: Accelerator = None  # type: ignore[assignment]
    outgoing: Outgoing = None  # type: ignore[assignment]
    images: Images = None  # type: ignore[assignment]
    member: Member | None = None  # set in the process of a gang's rank
    whole: Slab | None = None  # the whole slab, if `slab` is only this rank's part
    _speaking: threading.Lock = field(default_factory=threading.Lock)

    @property
    def spec(self) -> TaskDescriptor:
        return self.start.spec

    @property
    def is_function(self) -> bool:
        return self.spec.run.kind == "function"

    @property
    def is_graph(self) -> bool:
        return self.spec.run.kind == "graph"

    @property
    def is_rank(self) -> bool:
        """True in the process of a gang's rank."""
        return self.member is not None

    @property
    def state(self) -> Any:
        """The content of the task's images: the job itself or, for a graph, its progress.

        A job that has ended is stored with its result, so that it runs no further step elsewhere.
        A graph that has ended gives its result again.
        """
        if isinstance(self.job, GraphJob):
            return self.job.state()
        if self.ctx.result is not None:
            return {"job": self.job, "result": self.ctx.result}
        return self.job

    def restore(self, state: Any) -> None:
        """Continue a job from the content of an image."""
        self.job = state
        if type(state) is dict:  # a job is an instance of a tenant's class
            self.job, self.ctx.result = state["job"], state["result"]

    @property
    def ran(self) -> int:
        """The number of steps that this process has run; for a graph, the number of nodes."""
        return self.job.count if isinstance(self.job, GraphJob) else self.step

    def away(self, waits_for: str) -> contextlib.AbstractContextManager[None]:
        """Let the other ranks of the gang run while this rank waits for something from outside."""
        return self.member.away(waits_for) if self.member else contextlib.nullcontext()

    def say(self, word: str, **said: Any) -> None:
        with contextlib.suppress(OSError, ValueError):  # the tenant closed it
            sys.stdout.flush()
            sys.stderr.flush()
        try:
            with self._speaking:
                self.wire.send({"is": word, "step": self.step, **said})
        except OSError as error:
            raise Abandoned from error
