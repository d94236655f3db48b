"""Runs one task inside a resident: from its spec to its end, with a safe point after each step.

The task passes through a pipeline of small stages, each of which reads and fills one `Work`:

    take_spec -> configure -> load_code -> bring_in -> take_seat -> build -> run -> settle

A stage that cannot go on raises `Ending` with the final message of the process.  Orders arrive over
`Wire` and wait as requested actions until the next safe point.  The trust deadline is read before
every step: after the deadline no step begins, even if the supervisor hangs.

Images of the job are copied into its slab, mostly while the next step already runs (`staging`).
The supervisor is told where an image lies, and answers when it has stored the image.  Outputs leave
over the `bulk` socket.  Threads that only copy do both; nothing else runs beside the job.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import math
import os
import random
import resource
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy
import torch

from app.core.model import task_graph
from app.core.model.task_graph import TaskGraph
from app.core.placement import partitions
from app.core.placement.executors import Spread, spread
from workers.capture import data_loader, tensor_io
from workers.capture.capture import Captured, Surroundings, Uncapturable, capture
from workers.capture.tensor_io import Lent, Published, Unpublishable
from workers.graph import node_rng, runner
from workers.graph.lane import LaneJob, LoadedLane
from workers.graph.runner import GraphJob, NodeFailed
from workers.hardware import preset
from workers.hardware.accelerator import Accelerator
from workers.hardware.dirty_pages import Watch
from workers.process import slab as slabs
from workers.process.image_layout import Layout, from_json
from workers.process.slab import Slab
from workers.process.wire import TrustSeen, Wire
from workers.ranks.turns import GangFailed
from workers.residents import coordinator, remote_ranks
from workers.residents.coordinator import Member
from workers.switching import context_switch, offload
from workers.switching import image_file as images
from workers.switching.context_switch import Spare
from workers.switching.image_file import Image
from workers.switching.offload import Absence, CalledOff
from workers.switching.staging import Staging, TooLarge

JSON = dict[str, Any]

SAVES_APART_S = 1.0  # least time from one image to the image of a pause, unless requested
AFTER_PAUSING_S = 0.02  # delay of a pause's image, so that the next task can take the slot
AFTER_LEAVING_S = 0.25  # delay of the image after releasing memory for another task
TOLD_BYTES = 16 * 2**20  # report at least this many bytes of released device memory at once
LOOK_S = 0.05  # interval of checks off the slot whether a copy is complete
UNHEARD_S = 0.1  # wait for a late input, usually on its way, before asking for it
PUT_AGAIN_S = 1.0  # before a failed output is stored again
REPORT_S = 0.2  # progress and metrics are reported at most this often
FIRST_POINTS_S = 2.0  # how long a new task also reports the metrics of steps in between
FIRST_POINTS = 32  # most steps with metrics that a new task reports
FIRST_VALUES = 640  # most metric values that a new task reports, over all steps
DETAIL_LIMIT = 60_000  # characters of a traceback
RESULT_LIMIT_BYTES = 256 * 1024  # as JSON; larger values must be outputs
METRICS_LIMIT = 100
SEED = 0  # seed of every job that sets none itself
_HERE = {__file__, runner.__file__, node_rng.__file__}
_NOT_LOADED = "An input could not be loaded: "


class Ending(Exception):
    """Ends the task; carries the final message of the process."""

    def __init__(self, word: str, **said: Any) -> None:
        self.message = {"is": word, **said}
        super().__init__(word)


class Abandoned(BaseException):
    """Raised when the supervisor is gone: nothing waits for results of this process."""


class Context:
    """The `ctx` that a tenant's code gets.  `step` is the number of the current step, from 1."""

    def __init__(self, *, device: torch.device, rank: int, world_size: int, params: JSON) -> None:
        self.device = device
        self.rank = rank
        self.world_size = world_size
        self.params = params
        self.inputs: JSON = {}
        self.blocks: dict[str, str] = {}  # "NAME@VERSION" -> input port of this datablock
        self.step = 0
        self.result: JSON | None = None
        self.logged: JSON = {}
        self.allocate: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None = None

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return memory for a node's result; other devices can read a block in it without a
        copy.
        """
        if self.allocate is not None:
            return self.allocate(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=self.device)

    def finish(self, result: JSON | None = None) -> None:
        """End the task when this step returns; `result` also holds the declared outputs."""
        if not isinstance(result, dict | None):
            raise TypeError(f"ctx.finish takes a dict, not a {type(result).__name__}")
        self.result = result or {}

    def log(self, **metrics: Any) -> None:
        """Add metrics of this step to the dict that `step` returns."""
        self.logged.update(metrics)

    def datablock(self, name: str) -> Any:
        """Return the input that is this datablock: "NAME" (the newest) or "NAME@VERSION"."""
        named = [block for block in self.blocks if name in (block, block.partition("@")[0])]
        if not named:
            there = ", ".join(sorted(self.blocks)) or "none"
            raise LookupError(
                f"ctx.datablock({name!r}): no input of this task is that datablock. Declare it in"
                f' the descriptor: `inputs: {{PORT: "datablock:{name}"}}`. Declared: {there}.'
            )
        newest = max(named, key=lambda block: int(block.partition("@")[2]))
        return self.inputs[self.blocks[newest]]


@dataclass(slots=True)
class FirstPoints:
    """Keeps the metrics of a new task's first steps, evenly thinned over the steps.

    Reports and heartbeats have only the newest metrics, so a run shorter than a heartbeat would
    leave a single point.
    """

    until_s: float
    kept: list[tuple[int, JSON]] = field(default_factory=list)
    stride: int = 1  # in steps

    def add(self, step: int, metrics: JSON) -> None:
        numbers = {k: v for k, v in metrics.items() if not isinstance(v, str)}
        if not numbers or (step - 1) % self.stride:
            return
        self.kept.append((step, numbers))
        while len(self.kept) > min(FIRST_POINTS, max(1, FIRST_VALUES // len(numbers))):
            self.stride *= 2
            self.kept = [point for point in self.kept if (point[0] - 1) % self.stride == 0]

    def is_over(self, now_s: float) -> bool:
        return now_s > self.until_s


@dataclass
class Work:
    """The state of one task in this process.  `step` is the last finished step."""

    wire: Wire
    bulk: socket.socket
    trust: TrustSeen
    slab: Slab
    watch: Watch | None
    spec: JSON = field(default_factory=dict)
    fds: list[int] = field(default_factory=list)
    graph: TaskGraph | None = None  # the graph, or the part of it that this task runs
    spread: Spread | None = None  # executor of each node, if there are several
    entry: Any = None
    job: Any = None
    preset: JSON = field(default_factory=dict)
    capabilities: list[str] = field(default_factory=list)
    step: int = 0
    stands_at: int = 0  # the gang's step after which all ranks stop at a cut
    metrics: JSON = field(default_factory=dict)
    points: FirstPoints | None = None
    wishes: set[str] = field(default_factory=set)
    reported_s: float = -math.inf
    saved_s: float = 0.0
    ending: Ending | None = None  # why no image can be made; reported once it is back in the slot
    # port -> file of a late input that arrived
    arrived: dict[str, int] = field(default_factory=dict)
    seated_s: float = 0.0  # when it last took the slot, except after slices of others
    patience_s: float = 0.0  # how long it may wait for an input in the slot
    outside: FirstExecutor | None = None  # for the first executor of a partition
    base_bytes: int = 0
    is_back_soon: bool = False  # off the slot only for the slices of co-located tasks
    turn: int = 0  # number of the last order about the place of its memory
    before_bytes: int = 0  # its memory when it was told to release memory
    lazy_bytes: int = 0  # released, not reused, and not yet taken back by the kernel
    granted_bytes: int = 0  # device memory granted for its return
    staged_s: float = 0.0  # time at safe points spent on copying its state
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
    def is_function(self) -> bool:
        return "function" in self.spec["run"]

    @property
    def is_graph(self) -> bool:
        return "graph" in self.spec["run"]

    @property
    def state(self) -> Any:
        """The content of its images: the job itself or, for a graph, its progress."""
        return self.job.state() if isinstance(self.job, GraphJob) else self.job

    @property
    def ran(self) -> int:
        """The steps that this process has run; for a graph, the nodes that it ran itself."""
        return self.job.count if isinstance(self.job, GraphJob) else self.step

    def away(self, waits_for: str) -> contextlib.AbstractContextManager[None]:
        """Let the other ranks of its gang run while it waits for something from outside."""
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


Memory = list[torch.UntypedStorage]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """An output to store.

    Its `memory` is needed until it is stored.  `early`: made before the task's end.
    """

    what: str
    body: Image | Published
    memory: Memory
    early: bool

    def said(self) -> JSON:
        sizes = {"size_bytes": self.body.size_bytes, "head_bytes": self.body.head_bytes}
        return {"what": self.what, "early": self.early, **sizes}


class Outgoing:
    """Sends outputs to the store, one after the other; `settled` are the answers.

    `values` are all outputs that were put; a graph puts some while it runs.  `leaving` are sent and
    not stored yet.  A thread writes them one after the other, without a safe point between them, as
    other tasks may wait for each.  No image leaves at the same time.
    """

    def __init__(self, work: Work) -> None:
        self.work = work
        self.waiting, self.leaving = deque[Output](), dict[str, Output]()
        self.spare = Spare()
        self.values: JSON = {}
        self.settled: dict[str, JSON] = {}
        self.lie: dict[str, int] = {}  # stored outputs, as files of this host
        self.is_held = False
        self._writes, self._lock = False, threading.Lock()

    def put(self, value: object, name: str) -> None:
        """Store an output, unless it is stored or on its way; raises Ending."""
        if name in self.values and self.values[name] is value and name not in self.unkept:
            return
        self.values[name] = value
        self._put(value, name)

    def _put(self, value: object, name: str) -> None:
        memory = Memory()

        def new(size: int) -> torch.UntypedStorage:
            memory.append(self.spare.take(size))
            return memory[-1]

        output = Output(
            what=f"output:{name}",
            body=_output(self.work, value, name, new),
            memory=memory,
            early=self.work.ctx.result is None,  # else the final message names all outputs
        )
        self.waiting.append(output)
        self.next()

    def kept(self, message: JSON, files: list[int]) -> None:
        output = self.leaving.pop(message["what"])
        if not message.get("error"):
            self.spare.give_back(output.memory)
        self.settled[message["what"]] = message
        self.lie.update((message["what"].partition(":")[2], fd) for fd in files)
        self.next()

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.leaving)

    @property
    def unkept(self) -> list[str]:
        """The outputs that could not be stored."""
        settled = (name for name in self.values if f"output:{name}" in self.settled)
        return [name for name in settled if self.settled[f"output:{name}"].get("error")]

    def put_again(self) -> None:
        """Store the failed outputs again; raises Ending."""
        for name in self.unkept:
            del self.settled[f"output:{name}"]
            self._put(self.values[name], name)

    def hold(self) -> None:
        """Send no more outputs, and wait until all that have left are stored."""
        with self._lock:
            self.is_held = True
        while self.leaving:
            _listen(self.work, None)

    def go_on(self) -> None:
        self.is_held = False
        self.next()

    def next(self) -> None:
        """Start to send the waiting outputs, unless an image is leaving."""
        with self._lock:
            if self._writes or not self._may_leave():
                return
            self._writes = True
        threading.Thread(target=self._write_all, daemon=True).start()

    def _may_leave(self) -> bool:
        """True if the next output may leave; in a gang only after the previous one is stored."""
        if not self.waiting or self.is_held:
            return False  # the task may be over by now
        return not (self.work.images.busy or (self.work.member and self.leaving))

    def _write_all(self) -> None:
        with contextlib.suppress(Abandoned):  # the main thread will notice
            while (output := self._taken()) is not None:
                self.work.say("saving", at_step=self.work.step, **output.said())
                _write(self.work.bulk, output.body)

    def _taken(self) -> Output | None:
        with self._lock:
            self._writes = self._may_leave()
            if not self._writes:
                return None
            output = self.waiting[0]
            self.leaving[output.what] = output  # first, so that it is always in one of the two
            return self.waiting.popleft()


@dataclass(frozen=True, slots=True)
class Lies:
    """The content of the slab, now or after staging: the state of a job off its slot."""

    step: int
    fingerprint: JSON
    captured: Captured
    layout: Layout
    round: int = 0

    def index(self) -> JSON:
        layout, tensors = self.layout.as_json(), self.captured.tensors
        return {"layout": layout, "fingerprint": self.fingerprint, "tensors": tensors}


class Images:
    """Makes the job's images, one at a time: stages each into the slab and tells the supervisor.

    Off the slot an image may be staged and not reported, because device memory is wanted.
    """

    def __init__(self, work: Work) -> None:
        self.work, self.staging = work, Staging(work.slab, work.watch)
        self.absence = Absence(work.slab, work.accelerator, self.staging.pinned)
        self.lies: Lies | None = None  # set while nothing steps
        self.busy = False  # an image is in the slab or on its way there
        self.failed = False  # the last image was not stored; the supervisor says when to retry
        self.last_step: int | None = None  # step of the newest image that is stored or on its way
        self.left_s = -math.inf  # when the newest image left
        self.round = 0  # number of the gang's image; all ranks cancel it together

    def put(self) -> None:
        """Make an image of the last finished step and have it stored; raises Ending."""
        self.failed = False
        if self.lies_there:
            self._is_leaving()
            self._tell(replace(cast(Lies, self.lies), round=self.round))
            return
        with _told():
            captured = self._captured()
            lies = partial(Lies, self.work.step, preset.fingerprint(), captured)
            self._is_leaving()
            told = partial(lies, round=self.round)
            layout = self.staging.begin(captured, lambda layout: self._tell(told(layout)))
        self.lies = lies(layout)

    def _captured(self) -> Captured:
        work = self.work
        work.accelerator.synchronize()
        return capture(work.state, around=work.around, accelerator=work.accelerator)

    def _is_leaving(self) -> None:
        self.busy, self.last_step, self.left_s = True, self.work.step, time.monotonic()

    @property
    def lies_there(self) -> bool:
        """True if the slab holds the complete state of this step."""
        here = self.lies is not None and self.lies.step == self.work.step
        return here and not self.staging.is_copying and not self.staging.spoiled

    def may_leave(self) -> bool:
        """True if the slab is free or holds this step; else an older image in it is being
        stored.
        """
        self.staging.join()
        self.look()
        return self.lies_there or not self.busy

    def leave(self, freed: Callable[[], None]) -> None:
        """Release device memory while off the slot; raises Ending.  Call only if `may_leave`."""
        if self.lies_there:
            lies = cast(Lies, self.lies)
            lying = zip(lies.captured.storages, lies.layout.storages, strict=True)
            self.absence.leave(lying, freed)
            return
        with _told():
            captured = self._captured()
            layout, brought = self.staging.bring(captured)
        self.absence.leave(brought, freed)
        self.lies = Lies(self.work.step, preset.fingerprint(), captured, layout)

    def come_back(self, room: Callable[[int], None]) -> None:
        self.staging.lies(self.absence.come_back(room))

    def settle(self) -> bool:
        """Finish staging between two steps; False if the image was spoiled."""
        self.staging.join()
        return not self._is_spoiled()

    def kept(self, message: JSON) -> None:
        self.busy = False
        if message.get("error"):
            self.last_step, self.failed = None, True
        self.work.outgoing.next()

    def call_off(self, round: int) -> None:
        """Cancel this rank's image, as not all ranks have made theirs."""
        self.round = round
        if self.busy:
            self.busy, self.last_step = False, None
            self.work.outgoing.next()

    def wait(self, for_s: float) -> None:
        """Delay the image of a pause, to leave the cores to others; a save order still counts at
        once.
        """
        self.left_s = max(self.left_s, time.monotonic() + for_s - SAVES_APART_S)

    def look(self) -> None:
        """Check off the slot whether a process of the job has spoiled the image."""
        if not self.staging.is_copying and self._is_spoiled():
            self.left_s = time.monotonic()  # retry soon, but not in a tight loop

    def _is_spoiled(self) -> bool:
        spoiled, self.staging.spoiled = self.staging.spoiled, False
        if spoiled:
            self.busy, self.last_step = False, None
            # if memory is away, only the report failed
            self.lies = self.lies if self.absence.away else None
            self.work.outgoing.next()
        return spoiled

    def _tell(self, lies: Lies) -> None:
        """Write the index and report the image.  Runs in the thread that copied its end.

        The slab belongs to the supervisor until the image is stored.
        """
        index, about = lies.index(), {"at_step": lies.step, "round": lies.round}
        try:
            size = self.work.slab.write_index(index)
            self.work.say("saving", what="image", **about, index_bytes=size)
        except Abandoned:
            pass  # the main thread will notice
        except (OSError, slabs.BadIndex):
            traceback.print_exc()  # into the job's log; the next image retries
            self.staging.spoiled = True


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Turn the reason why no image can be made into the job's final message."""
    try:
        yield
    except Uncapturable as error:
        raise _uncapturable(error) from error
    except TooLarge as error:
        raise _too_large(error) from error


def _write(bulk: socket.socket, body: Image | Published) -> None:
    with contextlib.suppress(OSError):  # the reader is gone; the main thread will notice
        for piece in body.pieces():
            bulk.sendall(piece)


# --- the stages of a task -------------------------------------------------------------------------


def execute(
    wire: Wire, bulk: socket.socket, trust: TrustSeen, slab: Slab, watch: Watch | None
) -> int:
    """Run the resident's task; return the exit status of the process."""
    work = Work(wire=wire, bulk=bulk, trust=trust, slab=slab, watch=watch)
    if not is_begun(work):
        return 1
    if work.spec["world_size"] > 1:
        return remote_ranks.conduct(work, live)
    return live(work)


def is_begun(work: Work) -> bool:
    """Wait for the spec; False if the supervisor is gone."""
    try:
        take_spec(work)
    except Abandoned:
        return False
    if work.is_graph:
        read_graph(work)
    return True


def live(work: Work) -> int:
    """Run a job, or one rank of it, from its spec on; return the exit status."""
    try:
        for stage in (configure, join, load_code, bring_in, take_seat, build, run, settle):
            stage(work)
    except Ending as ending:
        with contextlib.suppress(Abandoned):
            work.say(ending.message.pop("is"), **ending.message)
    except Abandoned:
        return 1
    return 0


def take_spec(work: Work) -> None:
    while not work.spec:
        _listen(work, None)


def read_graph(work: Work) -> None:
    """Read the graph and decide which executor runs each node, before the executors fork."""
    work.graph = partitions.of_run(task_graph.parse(_read_json(work.fds.pop(0))), work.spec["run"])
    if (executors := work.spec["world_size"]) > 1:
        work.spread = spread(work.graph, executors, order=partitions.order(work.spec["run"]))


def configure(work: Work) -> None:
    work.base_bytes = _anonymous_bytes()
    try:
        work.accelerator = Accelerator(work.spec["kind"])
        work.outgoing, work.images = Outgoing(work), Images(work)
        work.preset = preset.configure(work.spec["preset"])
    except preset.NotTaken as error:
        detail = "\n".join(error.differences)
        raise Ending("failed", cause="preset", message=str(error), detail=detail) from error
    except RuntimeError as error:
        raise Ending("failed", cause="preset", message=str(error), detail="") from error


def join(work: Work) -> None:
    """Prepare the default process group, so that the code of a rank finds it ready."""
    if work.member is not None:
        try:
            work.member.begin()
        except BaseException as error:
            raise _failed(error) from error


def load_code(work: Work) -> None:
    spec, code = work.spec, Path(work.spec["code"])
    rank, ranks = (0, 1) if work.is_graph else (spec["rank"], spec["world_size"])
    work.ctx = Context(
        device=work.accelerator.device, rank=rank, world_size=ranks, params=spec["params"]
    )
    work.around = Surroundings(code=code, scratch=Path(spec["scratch"]), ctx=work.ctx)
    work.around.lent = work.lent
    seed()
    data_loader.follow()
    offload.follow()
    try:
        if work.is_graph:
            work.entry = _load_graph(work, code)
        else:
            work.entry = load_entry(code, spec["run"].get("job") or spec["run"]["function"])
    except BaseException as error:
        raise _failed(error, cause="bundle") from error


def _load_graph(work: Work, code: Path) -> runner.Loaded:
    host_bytes = work.slab.limit_bytes
    memory = {"budget_bytes": work.spec["memory_bytes"], "host_bytes": host_bytes}
    assert work.graph is not None, "read before anything else"
    late = partitions.late(work.spec["run"])
    if work.spread is None or work.member is None:
        order = partitions.order(work.spec["run"])
        return load_graph(code, work.graph, work.accelerator, late=late, order=order, **memory)
    _make_room_for(code)
    return LoadedLane(
        *(work.graph, partial(_entry, code), work.accelerator),
        spread=work.spread,
        turns=work.member.rank.turns,
        around=work.around,
        late=late,
        is_part="part" in work.spec["run"],
        **memory,
    )


def bring_in(work: Work) -> None:
    """Load the inputs and, for a task that has run before, its image."""
    spec = work.spec
    try:
        for port, source in sorted(spec["inputs"].items()):
            work.ctx.inputs[port] = _input(work, source["format"], source["datablock"])
            if source["datablock"]:
                work.ctx.blocks[source["datablock"]] = port
    except BaseException as error:
        raise _failed(error, cause="exception", begun=_NOT_LOADED) from error
    work.capabilities = [] if work.is_function else ["pause", "save", "move", "exact"]
    if not spec["image"]:
        return
    try:
        index = slabs.read_index(work.slab.fd, spec["image"]["index_bytes"])
        if preset.impose(index["fingerprint"]):
            work.capabilities = ["pause", "save", "move", "equivalent"]
        restored = _restored(work, index["layout"])
        work.job = _go_on(work, restored) if work.is_graph else restored
        work.step = spec["image"]["step"]
        work.images.last_step = work.step if spec["image"].get("is_kept", True) else None
    except BaseException as error:
        raise _failed(error, cause="image", begun="The image could not be restored: ") from error


def _go_on(work: Work, state: Any) -> GraphJob:
    """Restore the graph's job, and give it the inputs that came after its image was made."""
    job: GraphJob = work.entry.go_on(state)
    for port in job.lacks.copy().values():
        if port in work.ctx.inputs:
            job.take(port, work.ctx.inputs.pop(port))
    return job


def _image_value(work: Work, fd: int) -> Any:
    """Load the value of an image from `fd`; closes `fd`."""
    try:
        image = images.load(fd)
    finally:
        os.close(fd)
    around, accelerator = work.around, work.accelerator
    return context_switch.value(
        image, around=around, accelerator=accelerator, mapped=_may_be_mapped(work)
    )


def _may_be_mapped(work: Work) -> bool:
    """True if an input may be mapped from its file instead of copied.

    A function has no images, and a graph hardly writes to its inputs.  With a memory limit the
    inputs of a graph must be copies, which can be released.
    """
    if work.graph is None:
        return work.is_function
    return work.member is None and not (work.graph.memory_bytes or work.spec["memory_bytes"])


def _input(work: Work, format: str, block: str) -> Any:
    fd = work.fds.pop(0)
    if not format:
        return _image_value(work, fd)
    try:
        # A mapped value is not part of an image, only a reference to it; a function has no images.
        tensors = tensor_io.given(fd, mapped=bool(block) or work.is_function)
    finally:
        os.close(fd)
    if block:
        work.lent.add(block, tensors)
    return tensor_io.value(tensors)


def _restored(work: Work, layout: JSON) -> Any:
    around, accelerator, lies = work.around, work.accelerator, work.images.staging.lies
    if work.whole is None:
        return context_switch.restored(
            work.slab, layout, around=around, accelerator=accelerator, then=lies
        )
    whole = from_json(layout, limit_bytes=work.whole.limit_bytes)
    own = coordinator.parted(work.whole, whole, work.spec["rank"]).as_json()
    return context_switch.restored(work.whole, own, around=around, accelerator=accelerator)


def take_seat(work: Work) -> None:
    """Report that all work without the device is done; wait for the slot."""
    with work.away("its seat"):
        work.say("prepared", preset=work.preset, capabilities=work.capabilities)
        _wait_for_seat(work)


def build(work: Work) -> None:
    if work.job is not None or work.is_function:
        return
    try:
        if work.is_graph:
            work.job = work.entry.begin(work.ctx.inputs)
        else:
            work.job = work.entry(work.ctx, **work.spec["params"])
    except BaseException as error:
        raise _failed(error) from error


def run(work: Work) -> None:
    work.saved_s = time.monotonic()
    if isinstance(work.job, LaneJob):
        work.ctx.allocate = work.job.passing.empty
        if "part" in work.spec["run"] and not work.spec["rank"]:
            work.outside = FirstExecutor(work, work.job)
    checked = work.spec["image"]
    if not checked and not work.is_graph and work.member is None:
        work.points = FirstPoints(until_s=time.monotonic() + FIRST_POINTS_S)
    if work.is_graph and work.member is None:
        _give_early(work)  # blocks in the image, in case they were not stored before
    while work.ctx.result is None:
        one_step(work)
        if not checked and work.ctx.result is None:
            _must_be_capturable(work)
            checked = True


def one_step(work: Work) -> None:
    """Run one step: from one safe point to the next."""
    safe_point(work)
    work.images.lies = None
    try:
        if work.is_function:
            work.ctx.result = call(work.entry, work.ctx)
            work.metrics = metrics_of(work.ctx.logged)
        else:
            work.metrics = take_step(work.job, work.ctx, work.step + 1)
            if work.points is not None:
                work.points.add(work.step + 1, work.metrics)
    except NodeFailed as failed:
        raise _failed(failed.__cause__ or failed, begun=f"In the {failed}: ") from failed
    except BaseException as error:
        raise _failed(error) from error
    work.step = work.job.count if work.is_graph else work.step + 1
    if work.is_graph and work.member is None:
        _give_early(work)
    if time.monotonic() - work.reported_s >= REPORT_S:
        _report(work)


def _give_early(work: Work) -> None:
    """Store the outputs of a graph once they are made: other tasks wait for the last of them."""
    for name, value in work.job.made().items():
        if name in work.spec["outputs"]:
            work.outgoing.put(value, name)


def settle(work: Work) -> None:
    """Store the outputs, then send the final message."""
    work.images.settle()
    result = dict(work.ctx.result or {})
    if work.member is not None and work.spec["rank"]:
        result = {}  # the first rank's result is the gang's result
    for name in work.spec["outputs"]:
        if name not in result:
            told = f"the result lacks {name!r}, which the descriptor names in `outputs`"
            raise Ending("failed", cause="exception", message=told, detail="")
        work.outgoing.put(result.pop(name), name)
    try:
        said = plain(result, "result")
        _must_be_small(said)
    except (TypeError, ValueError) as error:
        raise _failed(error) from error
    if work.member is not None:
        work.member.end()
    while work.images.busy or work.outgoing.busy:
        _listen(work, None)
    for name in work.spec["outputs"]:
        if why := work.outgoing.settled[f"output:{name}"].get("error"):
            told = f"the output {name!r} could not be stored: {why}"
            raise Ending("failed", cause="exit", message=told, detail="")
    _report(work)
    passed = work.job.passed() if isinstance(work.job, LaneJob) else []
    took_ms = work.job.took_ms() if work.is_graph else {}
    made_bytes = work.job.made_bytes() if work.is_graph else {}
    measured = {"took_ms": took_ms, "made_bytes": made_bytes}
    raise Ending("finished", result=said, passed=passed, **measured)


def _must_be_small(result: JSON) -> None:
    size = len(json.dumps(result))
    if size > RESULT_LIMIT_BYTES:
        raise ValueError(
            f"the result must be at most {RESULT_LIMIT_BYTES} bytes as JSON; got {size}. Name "
            "large values in the descriptor's `outputs`"
        )


# --- at a safe point ------------------------------------------------------------------------------


def safe_point(work: Work) -> None:
    """Read orders between two steps and obey them.  Returns when the next step may begin."""
    if work.member is None:
        _safe_point(work)
        if isinstance(work.job, GraphJob):
            _await_inputs(work, work.job)
        return
    is_ready = False
    try:
        while not is_ready:
            # An executor waits for its next node's inputs, and can be stopped while it waits.
            is_ready = not isinstance(work.job, LaneJob) or work.job.await_next(work.outside)
            with work.member.between(work.step + 1, lambda: _stand_at_cut(work)):
                _safe_point(work)
    except (GangFailed, TimeoutError) as error:
        raise _failed(error) from error


def _stand_at_cut(work: Work) -> None:
    """Wait until all ranks stand at the cut, and the step and reason of the cut are known."""
    work.say("at_cut", ran=work.ran)
    while "on" not in work.wishes:
        _listen(work, None)
    work.wishes -= {"on"}
    work.step = work.stands_at


def _safe_point(work: Work) -> None:
    _listen(work, 0)
    if not work.images.settle():
        _save_again(work)
    while True:
        if "cancel" in work.wishes:
            raise Ending("stopped")
        if "pause" in work.wishes:
            _pause(work)
        elif work.trust.left_us() <= 0:
            _stand_still(work)
        else:
            break
    _save_if_wished(work)


def _await_inputs(work: Work, job: GraphJob) -> None:
    """Wait for the inputs of the graph's next node: a moment in the slot, then off it.

    Waiting in the slot costs other tasks the device; leaving the slot costs a launch.  So the task
    waits for each input about as long as a launch takes, or longer while no other task wants the
    device.  It leaves the slot only when all its outputs are durable: other tasks may wait for
    them, and it is not launched again before its missing input is there.
    """
    awaited, since_s, asked = None, 0.0, False
    while (port := _awaited(work, job)) is not None:
        if awaited != (port, work.seated_s):
            awaited, since_s, asked = (port, work.seated_s), time.monotonic(), False
            work.patience_s = work.spec["patience_s"]
        waited_s = time.monotonic() - since_s
        if waited_s >= UNHEARD_S and not asked:
            work.say("awaits", port=port)
            asked = True
        if waited_s < work.patience_s:
            _listen(work, (work.patience_s if asked else UNHEARD_S) - waited_s)
        elif work.outgoing.busy:
            _listen(work, None)
        elif work.outgoing.unkept:
            _listen(work, PUT_AGAIN_S)
            work.outgoing.put_again()
        else:
            _pause(work, lacks=port)
        _safe_point(work)


class FirstExecutor:
    """The ties of a partition's first executor to the outside: late inputs, and early outputs.

    The gang waits on its slots for an input as a single executor does (`_await_inputs`): for the
    time that a launch takes, or longer while no other task wants the device.
    """

    def __init__(self, work: Work, job: LaneJob) -> None:
        self.work, self.job = work, job
        self.since_s: float | None = None  # since when the next node has been waiting
        self.seated_s = work.seated_s  # as `Work.seated_s` at that time
        self.has_asked = self.has_left = False

    @property
    def fd(self) -> int:
        return self.work.wire.fileno()

    def look(self) -> None:
        _listen(self.work, 0)
        _take_arrived(self.work, self.job)
        _give_early(self.work)

    def has_news(self) -> bool:
        return self.must_stop() or self.work.wire.wait(0) or self._may_ask() or self._may_leave()

    def must_stop(self) -> bool:
        return self.work.trust.left_us() <= 0

    def waits(self) -> None:
        if self.since_s is None or self.seated_s != self.work.seated_s:
            self.since_s, self.work.patience_s = time.monotonic(), self.work.spec["patience_s"]
            self.seated_s = self.work.seated_s
            self.has_asked = self.has_left = False
        if self._may_ask():
            self.work.say("awaits", port=self.job.lacked())
            self.has_asked = True
        if not self._may_leave():
            return
        if self.work.outgoing.unkept:
            self.since_s += PUT_AGAIN_S
            self.work.outgoing.put_again()
        else:
            self.work.say("lacks", port=self.job.lacked())
            self.has_left = True

    def runs(self) -> None:
        self.since_s = None

    def _may_ask(self) -> bool:
        return not self.has_asked and bool(self.job.lacks) and self._waited_s() >= UNHEARD_S

    def _may_leave(self) -> bool:
        """True if the gang has waited for too long, and all that it made is durable or lost."""
        if self.has_left or not self.job.lacks or self._waited_s() < self.work.patience_s:
            return False
        return self.job.stands_still and not self.work.outgoing.busy

    def _waited_s(self) -> float:
        return 0.0 if self.since_s is None else time.monotonic() - self.since_s


def _awaited(work: Work, job: GraphJob) -> str | None:
    """Take in the inputs that arrived; return the port that the next node waits for, if any."""
    _let_lie(work, job)
    _take_arrived(work, job)
    return job.awaited()


def _take_arrived(work: Work, job: GraphJob) -> None:
    try:
        for port in list(work.arrived):
            fd = work.arrived.pop(port)
            if port not in job.lacks.values():  # it came before the gang was forked anew
                os.close(fd)
                continue
            job.take(port, _image_value(work, fd))
            work.images.lies = None  # the image lacks the new input
    except BaseException as error:
        raise _failed(error, begun=_NOT_LOADED) from error


def _let_lie(work: Work, job: GraphJob) -> None:
    """Map outputs from their stored files instead of the memory in which they were made.

    A part of a graph holds all its outputs until its end, and would need new memory for each.
    """
    outgoing = work.outgoing
    for name, fd in outgoing.lie.items():
        if not _may_be_mapped(work):
            os.close(fd)
            continue
        value = _image_value(work, fd)
        outgoing.values |= dict.fromkeys(job.let_lie(name, value), value)
        work.images.lies = None  # outdated
    outgoing.lie.clear()


def _save_again(work: Work) -> None:
    """Request another image, as this one was spoiled; in a gang all ranks make it at one step."""
    if work.member is None:
        work.wishes.add("save")
    else:
        work.say("spoiled")


def _pause(work: Work, **told: str) -> None:
    """Leave the slot.  The process keeps its state; its image can be made while another task runs.

    A task that is back soon makes only requested images, and reports no more often than otherwise.
    """
    work.is_back_soon = "yield" in work.wishes
    work.wishes -= {"pause", "yield"}
    if work.is_back_soon:
        work.accelerator.synchronize()  # the device work that it began is part of its slice
    if not work.is_back_soon or time.monotonic() - work.reported_s >= REPORT_S:
        _report(work)
    if work.member is not None:  # this process ends if the gang changes its hosts
        work.outgoing.hold()
    work.say("paused", has_state=work.job is not None, **told)
    work.images.wait(AFTER_PAUSING_S)
    saved_s = work.saved_s
    _wait_for_seat(work)
    work.outgoing.go_on()
    if not work.is_back_soon:
        work.seated_s = time.monotonic()
    work.saved_s = saved_s if work.is_back_soon else work.seated_s
    work.is_back_soon = False
    if work.ending is not None:
        raise work.ending


def _wait_for_seat(work: Work) -> None:
    """Wait off the slot: orders are answered, no step runs.

    The image of the pause leaves at once, or SAVES_APART_S after the previous image: a task with
    many slices a second does not write an image for each.
    """
    while "go" not in work.wishes or work.images.absence.away:
        if "cancel" in work.wishes:
            raise Ending("stopped")
        if "go" in work.wishes:  # the supervisor stopped waiting for the release, which did happen
            work.granted_bytes = work.images.absence.bytes
            _return(work)
            continue
        if "pause" in work.wishes:  # the co-located tasks stay longer
            work.wishes -= {"pause"}
            work.is_back_soon = False
        wait_s = _save_in_s(work)
        if "return" in work.wishes:
            _return(work)
        elif "leave" in work.wishes and work.images.may_leave():
            _leave(work)
        elif wait_s is not None and wait_s <= 0:
            _save_off_the_seat(work)
        else:
            _listen(work, wait_s)
            work.images.look()
    work.wishes -= {"go"}


def _leave(work: Work) -> None:
    """Release device memory; report the released bytes step by step."""
    work.wishes -= {"leave"}
    images, told_bytes = work.images, 0
    work.outgoing.spare.let_go()
    absent = images.absence
    if not absent.away:
        work.before_bytes = _memory_bytes(work)

    def freed() -> None:
        nonlocal told_bytes
        if absent.bytes >= told_bytes + TOLD_BYTES:
            told_bytes = absent.bytes
            _say_away(work, settled=False)

    try:
        if work.job is not None and work.ending is None:
            images.leave(freed)
    except Ending as ending:
        work.ending = ending
    _say_away(work)
    # First the task that waits for this memory returns; then the image goes to the store.
    images.wait(AFTER_LEAVING_S)


def _return(work: Work) -> None:
    """Take device memory again, as far as it is granted."""
    work.wishes -= {"return", "leave"}

    def room(size: int) -> None:
        while work.granted_bytes < size:
            if work.wishes & {"leave", "cancel"}:
                raise CalledOff
            _listen(work, None)
        work.granted_bytes -= size

    work.images.come_back(room)
    work.granted_bytes = 0
    work.wishes -= {"return"}
    if not work.images.absence.away and work.accelerator.kind == "cpu":
        # Malloc took new memory; the kernel may reclaim the old memory.
        grown_bytes = _memory_bytes(work) + work.lazy_bytes - work.before_bytes
        work.lazy_bytes = max(0, grown_bytes)
    if "leave" not in work.wishes:  # else reported after the release
        _say_away(work)


def _say_away(work: Work, *, settled: bool = True) -> None:
    away_bytes = work.images.absence.bytes
    memory_bytes = _memory_bytes(work) if settled else 0
    said = {"bytes": away_bytes, "settled": settled, "memory_bytes": memory_bytes}
    work.say("away", turn=work.turn, **said)


def _save_in_s(work: Work) -> float | None:
    """Return the seconds until the image of the pause leaves; None if there is nothing to wait
    for.
    """
    images = work.images
    if images.staging.is_copying:
        return LOOK_S
    if images.busy or work.outgoing.busy:
        return None  # one thing leaves at a time; a message reports its end
    if work.job is None or work.ending or images.last_step == work.step:
        return None
    if "save" in work.wishes:
        return 0.0
    if work.is_back_soon:
        return None
    return None if images.failed else images.left_s + SAVES_APART_S - time.monotonic()


def _save_off_the_seat(work: Work) -> None:
    work.wishes -= {"save"}
    try:
        work.images.put()
    except Ending as ending:
        work.ending = ending  # a task ends only in the slot: reported once it is back
        if work.member is not None:
            work.say("unsaved")


def _stand_still(work: Work) -> None:
    """Wait until the device's trust is renewed, or for an order."""
    with work.away("trust in its device"):
        work.say("still")
        while work.trust.left_us() <= 0 and not work.wishes & {"cancel", "pause"}:
            _listen(work, 0.25)
        work.say("moving")


def _save_if_wished(work: Work) -> None:
    if work.images.busy or work.outgoing.busy or work.job is None:
        return
    every_s = work.spec["checkpoint_every_s"]
    due = every_s > 0 and time.monotonic() - work.saved_s >= every_s
    if "save" in work.wishes or due:
        work.wishes -= {"save"}
        work.saved_s = time.monotonic()
        if work.images.last_step != work.step:
            began_s = time.perf_counter()
            work.images.put()
            work.staged_s += time.perf_counter() - began_s


def _output(
    work: Work, value: object, root: str, new: Callable[[int], torch.UntypedStorage]
) -> Image | Published:
    try:
        if root in work.spec["publish"]:
            return Published(value, f"result[{root!r}]")
        around, accelerator = work.around, work.accelerator
        # How far an executor is when an output comes to it depends on the others.
        step = 0 if isinstance(work.job, LaneJob) else work.step
        return context_switch.stage(
            value, step=step, around=around, accelerator=accelerator, root=root, new=new
        )
    except Unpublishable as error:
        raise Ending("failed", cause="exception", message=str(error), detail="") from error
    except Uncapturable as error:
        raise _uncapturable(error) from error


def _must_be_capturable(work: Work) -> None:
    """Fail after the first step, not at the first pause, if the job cannot be captured."""
    try:
        captured = capture(work.state, around=work.around, accelerator=work.accelerator)
        size = work.images.staging.must_fit(captured)
    except Uncapturable as error:
        raise _uncapturable(error) from error
    except TooLarge as error:
        raise _too_large(error) from error
    if work.spec["checkpoint_every_s"] > 0:  # an image is sure to follow: prepare its memory
        threading.Thread(target=work.slab.make_ready, args=(size,), daemon=True).start()


def _too_large(error: TooLarge) -> Ending:
    told = f"The job cannot be saved: {error} (ROUNDHOUSE_HOST_MEMORY_BYTES)."
    return Ending("failed", cause="uncapturable", message=told, detail="")


def _uncapturable(error: Uncapturable) -> Ending:
    detail = f"{error.path}: {error.what}\n{error.advice}"
    return Ending("failed", cause="uncapturable", message=str(error), detail=detail)


def _listen(work: Work, timeout_s: float | None) -> None:
    """Process the messages that have arrived, waiting up to `timeout_s` for one."""
    if work.wire.wait(timeout_s):
        for message in work.wire.receive():
            _take(work, message)
        if work.wire.closed:
            raise Abandoned


def _take(work: Work, message: JSON) -> None:
    match message["is"]:
        case "begin":
            work.spec, work.wishes = message["spec"], set()
            work.fds = _files(work, message["files"])
        case "pause" | "yield" | "go":
            _take_turn(work, message)
        case "leave":
            work.turn = message["turn"]
            work.wishes.add("leave")
        case "return":
            work.turn = message["turn"]
            work.granted_bytes += message["bytes"]
            work.wishes.add("return")
        case "block":
            (work.arrived[message["port"]],) = _files(work, 1)
        case "on":
            work.stands_at = message["step"]
            work.wishes.add("on")
        case "patience":
            work.patience_s = message["s"]
        case "call_off":
            work.images.call_off(message["round"])
        case "kept":
            _take_kept(work, message)
        case wish:
            work.wishes.add(wish)


def _take_kept(work: Work, message: JSON) -> None:
    if message["what"] == "image":
        work.images.kept(message)
    else:
        work.outgoing.kept(message, _files(work, message["files"]))


def _files(work: Work, count: int) -> list[int]:
    """Take the descriptors of one message; the rest belong to later messages."""
    files, work.wire.fds = work.wire.fds[:count], work.wire.fds[count:]
    return files


def _take_turn(work: Work, message: JSON) -> None:
    """Note an order to pause, to yield for the slices of others, or to take the slot."""
    match message["is"]:
        case "go":  # sent only after the supervisor heard that it paused
            work.wishes -= {"pause", "yield"}
            work.wishes.add("go")
        case "yield":
            work.wishes |= {"pause", "yield"}
        case _:
            work.wishes.discard("yield")
            work.wishes.add("pause")
            if message.get("leave"):
                work.turn = message["turn"]
                work.wishes.add("leave")


def _report(work: Work) -> None:
    work.reported_s = time.monotonic()
    if work.points is not None and work.points.is_over(work.reported_s):
        work.points = None
    work.say(
        "progress",
        ran=work.ran,
        metrics=work.metrics,
        points=work.points.kept if work.points is not None else [],
        memory_bytes=_memory_bytes(work),
        spilled_bytes=work.job.spilled_bytes if isinstance(work.job, GraphJob) else 0,
        staged_us=int((work.staged_s + work.images.staging.waited_s) * 1e6),
    )


def _memory_bytes(work: Work) -> int:
    away_bytes = work.images.absence.bytes if work.accelerator.kind == "cpu" else 0
    own_bytes = max(0, _anonymous_bytes() - work.base_bytes - away_bytes - work.lazy_bytes)
    return own_bytes + work.accelerator.held_bytes()


def _anonymous_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:
            _, resident, shared, *_ = file.read().split()
    except OSError:  # a sandbox without /proc: use the peak instead
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return (int(resident) - int(shared)) * resource.getpagesize()


def _read_json(fd: int) -> JSON:
    with os.fdopen(fd) as file:
        body: JSON = json.load(file)
    return body


# --- the tenant's code ----------------------------------------------------------------------------


class BadEntry(Exception):
    """Raised when the bundle has no such module, class or function."""


def load_entry(code: Path, target: str) -> Any:
    """Return the class or function that "module:name" names, from the tenant's folder `code`."""
    _make_room_for(code)
    return _entry(code, target)


def load_graph(
    code: Path, body: JSON | TaskGraph, accelerator: Accelerator, **more: Any
) -> runner.Loaded:
    """Return a loaded graph (`runner.Loaded`) with all functions from the tenant's folder
    `code`."""
    _make_room_for(code)
    return runner.Loaded(body, partial(_entry, code), accelerator, **more)


def _entry(code: Path, target: str) -> Any:
    module_name, _, name = target.partition(":")
    module = importlib.import_module(module_name)
    found = getattr(module, "__file__", None)
    if found is None or not Path(found).is_relative_to(code):
        raise BadEntry(
            f"{module_name!r} is not a module of your code, "
            "but of Python or Roundhouse; rename your module"
        )
    entry: Any = module
    for part in name.split("."):
        if not hasattr(entry, part):
            raise BadEntry(f"{target}: {getattr(entry, '__name__', entry)} has no {part!r}")
        entry = getattr(entry, part)
    if not callable(entry):
        raise BadEntry(f"{target} is a {type(entry).__name__}, not a class or function")
    return entry


def _make_room_for(code: Path) -> None:
    """Put the tenant's modules first on the import path, even modules with the names of ours."""
    ours = str(Path(__file__).resolve().parents[2])
    sys.path[:] = [str(code), *(path for path in sys.path if path not in ("", ours))]
    for name in _own_modules():
        del sys.modules[name]
    sys.path_importer_cache.pop(str(code), None)  # forget the folder's earlier content


def put_own_modules_last() -> None:
    """Move our modules to the end of `sys.modules`.

    A fork then finds them without reading all other modules, which would copy their pages.
    """
    for name in reversed(_own_modules()):
        sys.modules[name] = sys.modules.pop(name)


def _own_modules() -> list[str]:
    """Return our modules, newest first; the search stops at their packages, the oldest of them."""
    found, packages = [], {"app", "workers"}
    for name in reversed(sys.modules):
        if name.partition(".")[0] in ("app", "workers"):
            found.append(name)
            packages.discard(name)
            if not packages:
                break
    return found


def seed() -> None:
    random.seed(SEED)
    numpy.random.seed(SEED)
    if torch.backends.cuda.is_built():
        torch.manual_seed(SEED)
    else:  # `manual_seed` keeps a stack trace for each missing kind of device
        torch.default_generator.manual_seed(SEED)


def take_step(job: Any, ctx: Context, step: int) -> JSON:
    """Run step number `step` of a job; return its metrics."""
    ctx.step, ctx.logged = step, {}
    returned = job.step(ctx)
    if not isinstance(returned, dict | None):
        raise TypeError(
            f"step must return a dict of metrics or None, not a {type(returned).__name__}"
        )
    return metrics_of({**(returned or {}), **ctx.logged})


def call(function: Any, ctx: Context) -> JSON:
    """Call a function task once; return its result."""
    ctx.step = 1
    returned = function(ctx, **ctx.inputs, **ctx.params)
    if not isinstance(returned, dict | None):
        raise TypeError(f"a function must return a dict, not a {type(returned).__name__}")
    return returned or {}


def metrics_of(values: JSON) -> JSON:
    """Return numbers as they are and anything else as a short text; at most METRICS_LIMIT."""
    return {str(name)[:100]: _metric(values[name]) for name in list(values)[:METRICS_LIMIT]}


def _metric(value: Any) -> Any:
    if isinstance(value, torch.Tensor | numpy.generic | numpy.ndarray) and _is_one(value):
        value = value.item()
    if isinstance(value, bool | int) and abs(value) < 2**63:
        return value
    return value if isinstance(value, float) and math.isfinite(value) else str(value)[:200]


def plain(value: Any, path: str) -> Any:
    """Return `value` as JSON: torch and numpy numbers as Python's, other non-numbers as text.

    Raises TypeError with the path of a part that JSON cannot hold.
    """
    if isinstance(value, torch.Tensor | numpy.generic | numpy.ndarray) and _is_one(value):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, dict):
        return {str(key): plain(part, f"{path}[{key!r}]") for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part, f"{path}[{index}]") for index, part in enumerate(value)]
    raise TypeError(
        f"{path} is a {type(value).__name__}, which JSON cannot say: "
        "name it in the descriptor's `outputs`, or return a number, a text, a list or a dict"
    )


def _is_one(value: Any) -> bool:
    return not isinstance(value, torch.Tensor | numpy.ndarray) or value.ndim == 0


def _failed(error: BaseException, *, cause: str = "exception", begun: str = "") -> Ending:
    """Return an `Ending` with the error's last line, and its traceback from the tenant's code
    on.
    """
    if isinstance(error, Abandoned | Ending):
        raise error
    last = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    shown = traceback.format_exception(type(error), error, _theirs(error))
    return Ending(
        "failed", cause=cause, message=begun + last[:2000], detail="".join(shown)[-DETAIL_LIMIT:]
    )


def _theirs(error: BaseException) -> Any:
    frames = error.__traceback__
    while frames is not None and inspect.getfile(frames.tb_frame) in _HERE:
        frames = frames.tb_next
    return frames
