"""Runs a command, an unmodified program, inside a resident: this stub starts and controls it.

    supervisor -> zygote -> (keeper ->) stub (this) -> the command and all that it starts

With a world size above 1 the stub starts the command once for each rank, all in the same folder.
The ranks form one process tree, and their process group is ours (`ranks`).

The stub uses the same messages as `executor`, so slot, orders, lease and checkpoints work the same
for both kinds of residents.  Only the pause differs: the whole process tree is stopped at any
moment (`freezer`) and stays in memory.

Invariants:
* No process of the command runs without the slot or past the trust deadline.  The stub reads the
  deadline by itself, even if the supervisor hangs.  A tree that does not stop in time is killed.
* The working folder is stored as an image at each pause and every `checkpoint_every_s`; it is
  copied while the tree is stopped.  If the processes are lost, the command is started again in that
  folder.
* The command cannot reach into the stub, though both run as the same user: the stub is not
  dumpable, and as process 1 it gets no signal from inside.

The **step** of a command only counts up: by one for each line of progress, and for each stop for a
pause or an image.  So no two images have the same step, and the state in memory is never older than
the newest image of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.core.model.messages import ARTIFACTS
from workers.commands import ranks, working_folder
from workers.commands.cuda_checkpoint import NotDone, TreeMemory
from workers.commands.freezer import Tree, WontStop
from workers.commands.inputs_outputs import File, Progress, artifacts_of, bring_in, output_of
from workers.commands.ranks import Gang
from workers.commands.working_folder import INTERNAL, FolderImage, FolderTooLarge, WorkingFolder
from workers.process import sandbox
from workers.process import slab as slabs
from workers.process.image_layout import BadLayout
from workers.process.slab import Slab
from workers.process.wire import TrustSeen, Wire
from workers.residents.endings import Abandoned, Ending
from workers.residents.images import SAVES_APART_S
from workers.residents.progress import REPORT_S
from workers.switching.image_file import Image

JSON = dict[str, Any]

FREEZE_WITHIN_S = 5.0  # a tree that does not stop within this is killed
END_WITHIN_S = 5.0  # limit until a killed tree is gone
MEMORY_S = 1.0  # memory is measured at most this often


# --- the stub -------------------------------------------------------------------------------------


def execute(wire: Wire, bulk: socket.socket, trust: TrustSeen, slab: Slab) -> int:
    """Run the command; return the exit status of the stub."""
    stub = Stub(wire=wire, bulk=bulk, trust=trust, slab=slab)
    try:
        stub.prepare()
        while stub.status is None:
            stub.turn()
        stub.settle()
    except Ending as ending:
        with contextlib.suppress(Abandoned):
            stub.end_tree()
            stub.say(ending.message.pop("is"), **ending.message)
    except Abandoned:
        return 1
    finally:
        stub.end_tree()
    return 0


@dataclass
class Stub:
    """Runs one command task.

    `held` has the reasons why the tree is stopped: "pause", "trust", "copy"; it runs while `held`
    is empty.

    `status` is how the command ended, as in `os.waitstatus_to_exitcode`.  It is set when the first
    process of every rank has ended, or when the first process of one rank has failed:
    `failed_rank`.
    """

    wire: Wire
    bulk: socket.socket
    trust: TrustSeen
    slab: Slab
    spec: JSON = field(default_factory=dict)
    step: int = 0
    restarts: int = 0
    is_seated: bool = False
    has_run: bool = False  # it ran since the step was last counted up
    held: set[str] = field(default_factory=lambda: {"pause"})
    wishes: set[str] = field(default_factory=set)
    asked_seats: int = 0  # 0: no resize was ordered
    # the first process of each rank
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    gang: Gang | None = None  # set if there are several ranks
    status: int | None = None
    failed_rank: int = 0
    cancelled: bool = False
    reported_s: float = 0.0
    measured_s: float = 0.0
    memory_bytes: int = 0
    stood_s: float = 0.0  # time stopped in the slot while its folder was copied
    tree: Tree = None  # type: ignore[assignment]  # filled by `prepare`
    keeping: Keeping = None  # type: ignore[assignment]
    progress: Progress = None  # type: ignore[assignment]
    devices: TreeMemory = None  # type: ignore[assignment]
    wakeups: Wakeups = None  # type: ignore[assignment]
    settled: dict[str, JSON] = field(default_factory=dict)  # answers to outputs: stored or failed

    def say(self, word: str, **said: Any) -> None:
        try:
            self.wire.send({"is": word, "step": self.step, **said})
        except OSError as error:
            raise Abandoned from error

    # --- preparation ---

    def prepare(self) -> None:
        sandbox.hide_memory()
        while not self.spec:
            self.listen(None)
        self.wakeups = Wakeups()
        folder = Path(self.spec["scratch"])
        self.tree = Tree(is_alone=os.getpid() == 1)
        self.devices = TreeMemory.found(
            self.spec["kind"], may_go_on=lambda: self.trust.left_us() > 0
        )
        self._fill(folder)
        if self.spec["world_size"] > 1:
            self.gang = Gang(self.spec["world_size"])
        try:
            self.progress = Progress(folder / INTERNAL / "metrics", _tell_owner)
            inputs = folder / INTERNAL / "inputs"
            bring_in(self.spec["inputs"], lambda: self.wire.fds.pop(0), inputs)
            self.tree.end(END_WITHIN_S)  # kill processes that unpickling started
        except OSError as error:
            raise _failed("exit", f"Its working folder cannot be created: {error}") from error
        self.keeping = Keeping(self, WorkingFolder(folder, self.slab))
        self.keeping.last_step = self.step if self.spec["image"] else None
        self.say("prepared", preset={}, capabilities=capabilities(self.devices))

    def _fill(self, folder: Path) -> None:
        """Fill the folder from its image, or from the bundle for a new command."""
        image = self.spec["image"]
        try:
            if not image:
                working_folder.begun_from(Path(self.spec["code"]), folder)
            else:
                index = slabs.read_index(self.slab.fd, image["index_bytes"])
                about = working_folder.restore(self.slab, index["layout"], folder)
                self.step, self.restarts = image["step"], int(about["restarts"]) + 1
            (folder / INTERNAL).mkdir()
        except (BadLayout, working_folder.BadFolder, slabs.BadIndex) as error:
            raise _failed("image", f"Its working folder could not be restored: {error}") from error
        except OSError as error:  # the disk is at fault, not the image
            raise _failed("exit", f"Its working folder cannot be created: {error}") from error

    # --- one round of the loop ---

    def turn(self) -> None:
        self._wait()
        self._mind_orders()
        self._mind_trust()
        self.keeping.mind()
        self._reap()
        self._mind_seats()
        self._mind_progress()

    def _wait(self) -> None:
        """Wait for a message, or until time alone changes something."""
        self.listen(max(0.0, self._quiet_s()), self.wakeups.fd, self.progress.fd)
        self.wakeups.clear()

    def _quiet_s(self) -> float:
        due_s = [self.keeping.due_in_s()]
        if self.is_seated:
            due_s += [REPORT_S if self.progress.is_new else MEMORY_S]
            due_s += [0.25 if "trust" in self.held else max(0, self.trust.left_us()) / 1e6]
            if self.gang is not None and not self.gang.is_told:
                due_s.append(ranks.LOOK_S)
        return min(due_s)

    def listen(self, timeout_s: float | None, *more: int) -> None:
        poll = select.poll()
        for fd in (self.wire.fileno(), *more):
            poll.register(fd, select.POLLIN)
        poll.poll(None if timeout_s is None else timeout_s * 1000)
        for message in self.wire.receive():
            self._take(message)
        if self.wire.closed:
            raise Abandoned

    def _take(self, message: JSON) -> None:
        match message["is"]:
            case "begin":
                self.spec = message["spec"]
            case "kept" if message["what"] == "image":
                self.keeping.kept(message)
            case "kept":
                self.settled[message["what"]] = message
            case "resize":
                (self.asked_seats,) = message["seats"]
            case wish:
                self.wishes.add(wish)

    # --- orders ---

    def _mind_orders(self) -> None:
        self.wishes -= {"look"}
        if "cancel" in self.wishes and not self.cancelled:
            self._cancel()
        if "go" in self.wishes and not self.is_seated:
            self._go()
        if self.asked_seats and self.gang is not None:  # after `go`, which may have come with it
            self.gang.want(self.asked_seats, tell=True)
            self.asked_seats = 0
        if "pause" in self.wishes and self.is_seated and not self._must_run_to_leave():
            self._pause()

    def _must_run_to_leave(self) -> bool:
        """True if a pause must wait: device memory can leave only while the tree is not stopped."""
        return self.devices.can_leave and bool(self.held)

    def _cancel(self) -> None:
        """Ask all processes to end; the supervisor kills what takes too long."""
        self.cancelled = True
        if not self.processes or self.held:
            raise Ending("stopped")  # it may not run any more, not even to clean up
        self.tree.send(signal.SIGTERM)

    def _pause(self) -> None:
        self.wishes -= {"pause"}
        self.hold("pause")
        self.count_stop()
        self.held -= {"trust"}  # off the slot nothing runs anyway
        self._report()
        self.is_seated = False
        self.say("paused", has_state=bool(self.processes))

    def _go(self) -> None:
        self.wishes -= {"go"}
        self.is_seated = True
        if self.gang is not None:  # extra slots from before are not theirs any more
            self.gang.want(1, tell=False)
        self.keeping.off_the_seat_no_more()
        self._mind_trust()
        self.let_go("pause")

    def _mind_trust(self) -> None:
        if not self.is_seated:
            return
        is_over = self.trust.left_us() <= 0
        if is_over and "trust" not in self.held:
            self.hold("trust", within_s=self.spec["lease_margin_s"] / 2)
            self.say("still")
            if self.cancelled:
                raise Ending("stopped")
        elif not is_over and "trust" in self.held:
            self.let_go("trust")
            self.say("moving")

    # --- stop and continue ---

    def hold(self, why: str, within_s: float = FREEZE_WITHIN_S) -> None:
        """Stop the tree; raises Ending if it cannot be stopped."""
        try:
            if why == "pause":
                self.devices.leave(self.tree.pids())
            self.tree.freeze(within_s)
        except (WontStop, NotDone) as error:
            told = f"It could not be paused, so it was ended: {error}"
            raise _failed("exit", told) from error
        self.held.add(why)

    def let_go(self, why: str) -> None:
        if why not in self.held:
            return
        self.held.discard(why)
        if self.held:
            return
        self.has_run = True
        if not self.processes:
            self._start()
            return
        self.tree.thaw()
        try:
            self.devices.come_back()
        except NotDone as error:
            raise _failed("exit", f"Its device memory could not be restored: {error}") from error

    def count_stop(self) -> None:
        self.step += self.progress.read()  # lines that it wrote before
        if self.has_run:
            self.step, self.has_run = self.step + 1, False

    # --- the command ---

    def _start(self) -> None:
        argv, folder = self.spec["run"]["command"], self.spec["scratch"]
        bound = None if self.tree.is_alone else sandbox.die_with_parent
        try:
            for rank in range(self.spec["world_size"]):
                begun = subprocess.Popen(
                    argv,
                    cwd=folder,
                    env=self._environment(rank),
                    stdin=subprocess.DEVNULL,
                    preexec_fn=bound,
                    pass_fds=self.gang.fds if self.gang is not None else (),
                )
                self.processes.append(begun)
        except OSError as error:
            raise _failed("bundle", _cannot_start(argv[0], error), str(error)) from error

    def _environment(self, rank: int) -> dict[str, str]:
        spec, internal = self.spec, Path(self.spec["scratch"]) / INTERNAL
        threads = str(spec["preset"].get("threads", 1))
        return {
            **os.environ,
            "PYTHONUNBUFFERED": "1",  # its output is seen at once
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "ROUNDHOUSE_TASK": spec["task"],
            "ROUNDHOUSE_DEVICE": spec["kind"],
            "ROUNDHOUSE_PARAMS": json.dumps(spec["params"]),
            "ROUNDHOUSE_INPUTS": str(internal / "inputs"),
            # One rank reports progress; reports of all ranks would be counted several times.
            "ROUNDHOUSE_METRICS": os.devnull if rank else str(internal / "metrics"),
            "ROUNDHOUSE_RESTARTS": str(self.restarts),
            **(self.gang.environment(rank, self.restarts) if self.gang is not None else {}),
        }

    def _reap(self) -> None:
        """Reap ended processes, also orphans: the stub is their parent."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                self._ended(pid, os.waitstatus_to_exitcode(status))

    def _ended(self, pid: int, status: int) -> None:
        for rank, process in enumerate(self.processes):
            if process.pid != pid:
                continue
            process.returncode = status
            # after a cancel all ranks may clean up
            if status and self.status is None and not self.cancelled:
                self.failed_rank, self.status = rank, status
        codes = [process.returncode for process in self.processes]
        if codes and None not in codes and self.status is None:
            self.status = 0

    def end_tree(self) -> None:
        """Kill what is left of the tree: the command ends with its first processes."""
        if not self.processes:
            return
        with contextlib.suppress(WontStop):  # if the stub is process 1, the tree ends with it
            self.tree.end(END_WITHIN_S)
        for process in self.processes:
            process.returncode = process.returncode or 0

    # --- progress ---

    def _mind_seats(self) -> None:
        if self.gang is not None and self.is_seated and (seats := self.gang.has_resized()):
            self.say("resized", seats=[seats])

    def _mind_progress(self) -> None:
        self.step += self.progress.read()
        if not self.is_seated or self.held:
            return
        now_s = time.monotonic()
        is_news = self.progress.is_new and now_s - self.reported_s >= REPORT_S
        if is_news or now_s - self.reported_s >= MEMORY_S:
            self._report()

    def _report(self) -> None:
        now_s = time.monotonic()
        if now_s - self.measured_s >= MEMORY_S or not self.is_seated:
            self.measured_s, self.memory_bytes = now_s, self.tree.memory_bytes()
        self.reported_s, self.progress.is_new = now_s, False
        self.say(
            "progress",
            metrics=self.progress.metrics,
            memory_bytes=self.memory_bytes,
            staged_us=int(self.stood_s * 1e6),
        )

    # --- the end ---

    def settle(self) -> None:
        """Store the outputs and send the final message, once the command has ended."""
        self.end_tree()
        if not self.is_seated:
            raise Abandoned  # killed while frozen: a task ends only in the slot
        if self.cancelled:
            raise Ending("stopped")
        self.step += self.progress.read() + self.has_run
        self._report()
        folder, publish = Path(self.spec["scratch"]), self.spec["publish"]
        if self.status:
            with contextlib.suppress(Ending):  # the failure of the command is what counts
                self._put_artifacts(folder)
            who = f"rank {self.failed_rank}: " if self.gang is not None else ""
            raise _failed("exit", who + _how_it_ended(self.status))
        for name in self.spec["outputs"]:
            body = output_of(name, folder, step=self.step, publish=name in publish)
            self._put(name, body)
        self._put_artifacts(folder)
        raise Ending("finished", result={"exit_status": 0})

    def _put_artifacts(self, folder: Path) -> None:
        try:
            artifacts = artifacts_of(folder, folder / INTERNAL / ARTIFACTS)
        except OSError as error:
            raise _failed("exit", f"Its artifacts could not be packed: {error}") from error
        if artifacts is not None:
            self._put(ARTIFACTS, artifacts)

    def _put(self, name: str, body: Image | File) -> None:
        """Store an output and wait until it is stored."""
        what = f"output:{name}"
        self.keeping.finish()
        self.say("saving", what=what, at_step=self.step, size_bytes=body.size_bytes)
        try:
            for piece in body.pieces():
                self.bulk.sendall(piece)
        except OSError as error:
            raise Abandoned from error
        while what not in self.settled:
            self.listen(None)
        if why := self.settled[what].get("error"):
            raise _failed("exit", f"the output {name!r} could not be stored: {why}")


# --- images of the working folder -----------------------------------------------------------------


class Keeping:
    """Makes images of the working folder, one at a time; a thread copies, and nothing waits for it.

    While the command runs, changed files are copied ahead, then the tree is stopped for the rest.
    While the command is paused, everything is copied at once, as nothing changes.
    """

    def __init__(self, stub: Stub, folder: WorkingFolder) -> None:
        self.stub, self.folder = stub, folder
        self.last_step: int | None = None  # step of the newest image that is stored or on its way
        self.left_s = -1e9  # when the newest image left
        self.saved_s = self.told_s = time.monotonic()
        # "", "ahead", "copy" or "told"; from "told" on the slab is the supervisor's
        self.stage = ""
        self.failed = False  # the last image was not stored; the supervisor says when to retry
        self.is_wished = False  # an order requested the current image
        self._result: FolderImage | BaseException | None = None
        self._done = False
        self._began_s = 0.0

    def due_in_s(self) -> float:
        """Return the seconds until the next image is due."""
        if self.stage or not self.stub.processes:
            return 60.0
        if "save" in self.stub.wishes:
            return 0.0
        if not self.stub.is_seated:
            waits = self.last_step == self.stub.step or self.failed
            return 60.0 if waits else self.left_s + SAVES_APART_S - time.monotonic()
        every_s = self.stub.spec["checkpoint_every_s"]
        return self.saved_s + every_s - time.monotonic() if every_s > 0 else 60.0

    def mind(self) -> None:
        if self._done:
            self._done = False
            self._copied()
        if not self.stage and self.due_in_s() <= 0:
            self.is_wished = "save" in self.stub.wishes
            self.stub.wishes -= {"save"}
            self.saved_s, self.failed = time.monotonic(), False
            if self.stub.is_seated:
                self._aside("ahead", self.folder.ahead)
            else:
                self._copy()

    def off_the_seat_no_more(self) -> None:
        """Abandon a copy that no order requested: the slot is more urgent.  Copied files stay."""
        self.saved_s = time.monotonic()
        every_s = self.stub.spec["checkpoint_every_s"]
        is_overdue = 0 < every_s < self.saved_s - self.told_s
        if self.stage == "copy" and not self.is_wished and not is_overdue:
            self.folder.is_abandoned = True

    def kept(self, message: JSON) -> None:
        self.stage = ""
        if message.get("error"):
            self.last_step, self.failed = None, True

    def finish(self) -> None:
        """Wait until no image is on its way."""
        while self.stage:
            self.stub.listen(0.05, self.stub.wakeups.fd)
            self.stub.wakeups.clear()
            if self._done:
                self._done, self.stage = False, ""

    def _copy(self) -> None:
        """Stop the tree and copy the folder; the tree stays stopped until all is copied."""
        stub = self.stub
        self._began_s = time.monotonic()
        stub.hold("copy")
        stub.count_stop()
        self.last_step = stub.step
        about = {"restarts": stub.restarts}
        mapped = stub.tree.written_maps(self.folder.path)
        self.folder.is_abandoned = False
        self._aside("copy", lambda: self.folder.copy(about, mapped))

    def _aside(self, stage: str, work: Any) -> None:
        self.stage, self._result = stage, None
        threading.Thread(target=self._work, args=(work,), daemon=True).start()

    def _work(self, work: Any) -> None:
        try:
            self._result = work()
        except BaseException as error:
            self._result = error
        self._done = True
        self.stub.wakeups.wake()

    def _copied(self) -> None:
        """Continue after a thread has done its part."""
        stage, result = self.stage, self._result
        self.stage, self._result = "", None
        if stage == "copy":
            if self.stub.is_seated:
                self.stub.stood_s += time.monotonic() - self._began_s
            self.stub.let_go("copy")
        if isinstance(result, BaseException):
            self._not_copied(result)
        elif stage == "ahead":
            self._copy()
        elif isinstance(result, FolderImage):
            self._tell(result)

    def _not_copied(self, error: BaseException) -> None:
        self.last_step, self.left_s = None, time.monotonic()
        if isinstance(error, working_folder.ImageUnwanted):
            return
        self.failed = True
        if isinstance(error, FolderTooLarge | OSError | slabs.BadIndex):
            _tell_owner(
                f"its working folder could not be saved, so a restart would lose its files: {error}"
            )
        else:
            _tell_owner("".join(traceback.format_exception(error)))

    def _tell(self, kept: FolderImage) -> None:
        index = {"layout": kept.layout.as_json(), "fingerprint": {}, "tensors": {}}
        try:
            size = slabs.write_index(self.stub.slab.fd, index)
        except (OSError, slabs.BadIndex) as error:
            self._not_copied(error)
            return
        self.stage, self.left_s = "told", time.monotonic()
        self.told_s = self.left_s
        self.stub.say("saving", what="image", at_step=self.last_step, index_bytes=size)


# --- helpers --------------------------------------------------------------------------------------


def capabilities(devices: TreeMemory) -> list[str]:
    """Return what a command supports, in the terms of a task's `capabilities`.

    "pause": at any moment.  "restart": it cannot be moved, but is started again in its working
    folder. "device_memory": its device memory is free for other tasks while it is paused.
    """
    return ["pause", "restart", *(["device_memory"] if devices.can_leave else [])]


class Wakeups:
    """Provides a descriptor that becomes readable when a child ends or a thread is done."""

    def __init__(self) -> None:
        self.fd, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full, so it wakes already
            os.write(self._write, b"w")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)


def _tell_owner(what: str) -> None:
    """Write a line into the task's log, in a thread, as the command may have filled the pipe."""

    def write() -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"Roundhouse: {what}\n".encode())

    threading.Thread(target=write, daemon=True).start()


def _failed(cause: str, message: str, detail: str = "") -> Ending:
    return Ending("failed", cause=cause, message=message, detail=detail)


def _cannot_start(program: str, error: OSError) -> str:
    match error:
        case FileNotFoundError():
            return (
                f"{program!r} was not found. A program is looked up in PATH; a name with '/' is a "
                "path in the working folder, which starts as a copy of the bundle."
            )
        case PermissionError():
            return (
                f"{program!r} may not be executed. A script of the bundle is run by naming its"
                f' interpreter: ["bash", {json.dumps(program)}].'
            )
    return f"{program!r} could not be started: {error.strerror}."


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"It ended with exit status {status}."
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    more = "; perhaps it ran out of memory" if status == -signal.SIGKILL else ""
    return f"It was ended by {name}{more}."
