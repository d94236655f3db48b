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
* The working folder is stored as an image at each pause and every `checkpoint.every_s`; it is
  copied while the tree is stopped.  Where the device stores processes, these are in the image: the
  device worker dumps them before the tree runs on.  If the processes are lost, they are restored
  from the last image, or the command is started again in that folder.
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
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from app.core.device.common_point import HOLD_WITHIN_S
from app.core.device.gang_watch import GangWatch, RankIs, who_is_behind
from app.core.model import codec
from app.core.model.descriptor import TaskDescriptor
from app.core.model.protocol.messages import ARTIFACTS
from app.core.model.provisions.notice import AGAIN, NEED, NoticeReason
from app.core.units import counted
from workers.commands import connections, notices, working_folder
from workers.commands.freezer import Tree, WontStop, reaped
from workers.commands.gang import ranks
from workers.commands.gang.rank_tree import ENDS, RankTree
from workers.commands.gang.ranks import Gang
from workers.commands.idle_clock import IdleClock
from workers.commands.image_keeping import Keeping
from workers.commands.inputs_outputs import (
    File,
    OwnSteps,
    Progress,
    bring_in,
    full_disk,
    output_of,
)
from workers.commands.notices import NoticeSignal, write_notice
from workers.commands.results import Results, Zipped
from workers.commands.shells.tunnels import InnerEnds
from workers.commands.stored_processes import (
    BESIDE,
    AdoptedProcess,
    FirstProcess,
    NotStored,
    adopt,
    announced,
    clear_beside,
)
from workers.commands.stub_thread import tell_owner, tell_the_rest, teller
from workers.commands.wakeups import Wakeups
from workers.commands.working_folder import INTERNAL, WorkingFolder
from workers.hardware.cuda_checkpoint import NotDone, StillHeld, TreeMemory
from workers.process import slab as slabs
from workers.process.exit_status import shell_status
from workers.process.image_layout import BadLayout
from workers.process.isolation import sandbox
from workers.process.slab import Slab
from workers.process.task_start import TaskStart
from workers.process.wire import TrustSeen, Wire
from workers.residents.endings import Abandoned, Ending
from workers.residents.progress import FULL_S, REPORT_S
from workers.switching.image_file import Image

JSON = dict[str, Any]

FREEZE_WITHIN_S = 5.0  # a tree that does not stop within this is killed
SETTLES_S = 2.0  # longest time until no connection of a stopped tree is under way
END_WITHIN_S = 5.0  # limit until a killed tree is gone
MEMORY_S = 1.0  # memory is measured at most this often
_STOPPED_BEFORE = "its ranks were stopped before they came to a common point"
POINT_S = 0.002  # how often the stub looks whether the ranks have come to their common point


# --- the stub -------------------------------------------------------------------------------------


def execute(wire: Wire, bulk: socket.socket, trust: TrustSeen, slab: Slab) -> int:
    """Run the command; return the exit status of the stub."""
    stub = Stub(wire=wire, bulk=bulk, trust=trust, slab=slab)
    try:
        stub.prepare()
        while stub.status is None or stub.ended_at_its_pause():
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
        tell_the_rest()
    return 0


@dataclass
class Stub:
    """Runs one command task.

    `held` has the reasons why the tree is stopped: "pause", "trust", "copy", "image"; it runs while
    `held` is empty.

    `status` is how the command ended, as in `os.waitstatus_to_exitcode`.  It is set when the first
    process of every rank has ended, or when the first process of one rank has failed:
    `failed_rank`.
    """

    wire: Wire
    bulk: socket.socket
    trust: TrustSeen
    slab: Slab
    start: TaskStart = None  # type: ignore[assignment]  # filled by `prepare`
    step: int = 0
    restarts: int = 0
    is_seated: bool = False
    has_run: bool = False  # True if the command has run since `step` last grew
    held: set[str] = field(default_factory=lambda: {"pause"})
    wishes: set[str] = field(default_factory=set)
    notice: JSON | None = None  # a stop of which the command has no notice yet
    noticed_why: str = ""  # reason of its last notice
    signal: NoticeSignal | None = None  # a signal of a notice that not all ranks have yet
    slots: int = 1  # slots of this host on which the command was told to run
    asked_seats: int = 0  # number of slots that an order asks for; 0 if no resize was ordered
    # the first process of each rank
    processes: list[FirstProcess] = field(default_factory=list)
    # outputs that are in the image, written by the command itself
    stopped_before: list[int] = field(default_factory=list)
    adopted: JSON | None = None  # the answer to our request to restore the image's processes
    # the reason last reported why the image has no processes
    not_stored: set[str] = field(default_factory=set)
    is_in_doubt: bool = False  # True if the processes can be stored at all
    settles: bool = True  # False if its network did not come to rest at the last stop
    gang: Gang | None = None  # the gang, if there are several ranks
    watch: GangWatch = field(default_factory=GangWatch)  # finds the rank that is behind
    not_at_point: str = ""  # why the ranks were stopped although they hold groups of torch's own
    rank_tree: RankTree | None = None  # the ranks' process tree, if their processes can be stored
    tree_before: JSON | None = None  # the image's ranks and their gang
    # ids of processes whose device memory has left
    away_before: list[int] = field(default_factory=list)
    device_before: str = ""  # UUID of the GPU that this memory left
    steps_before: JSON = field(default_factory=dict)  # where the rows of metrics had their places
    tunnels: InnerEnds = field(default_factory=InnerEnds)
    status: int | None = None
    failed_rank: int = 0
    failed_behind: str = ""  # for which rank it waited, if torch's own backend ended it
    # exit statuses of all ranks when the first one failed
    ends: list[int | None] = field(default_factory=list)
    cancelled: bool = False
    is_over_before: bool = False  # the image is of a command that had ended
    is_stopped: bool = False  # told to end, by a cancel or a limit
    is_ending: bool = False  # the supervisor knows that the command has ended
    reported_s: float = 0.0
    measured_s: float = 0.0
    memory_bytes: int = 0
    stood_s: float = 0.0  # time stopped in the slot while its folder was copied
    tree: Tree = None  # type: ignore[assignment]  # filled by `prepare`
    keeping: Keeping = None  # type: ignore[assignment]
    progress: Progress = None  # type: ignore[assignment]
    devices: TreeMemory = None  # type: ignore[assignment]
    wakeups: Wakeups = None  # type: ignore[assignment]
    idle: IdleClock | None = None  # clock of a session
    # answers of the supervisor about outputs: stored or failed
    settled: dict[str, JSON] = field(default_factory=dict)

    @property
    def spec(self) -> TaskDescriptor:
        return self.start.spec

    def say(self, word: str, **said: Any) -> None:
        try:
            self.wire.send({"is": word, "step": self.step, **said})
        except OSError as error:
            raise Abandoned from error

    # --- preparation ---

    def prepare(self) -> None:
        sandbox.hide_memory()
        while self.start is None:
            self.listen(None)
        os.environ.update(sandbox.image_environment(self.start.image_variables))
        self.wakeups = Wakeups()
        teller()  # the thread begins before the command
        folder = Path(self.start.scratch)
        self.tree = Tree(is_alone=os.getpid() == 1)
        self.idle = IdleClock(self.tree) if self.spec.session is not None else None
        self._fill(folder)
        # only after the folder is filled, as the driver makes a folder for its cache there
        self.devices = TreeMemory.found(self.start.kind, may_go_on=lambda: self.trust.left_us() > 0)
        if self.spec.world_size > 1:
            self._make_gang()
        try:
            best = self.spec.checkpoint.best
            self.progress = Progress(folder / INTERNAL / "metrics", tell_owner, best)
            inputs = folder / INTERNAL / "inputs"
            bring_in(self.start.inputs, lambda: self.wire.fds.pop(0), inputs)
            self.tree.end(END_WITHIN_S)  # kill processes that unpickling started
        except OSError as error:
            raise _failed("exit", f"Its working folder cannot be created: {error}") from error
        beside = BESIDE if self.start.stores_processes else {}
        self.keeping = Keeping(self, WorkingFolder(folder, self.slab, beside))
        self.keeping.last_step = self.step if self.start.image is not None else None
        if self.start.adopts:
            self._adopt()
        self.say("prepared", preset={}, capabilities=self._capabilities())

    def _make_gang(self) -> None:
        size, is_stored = self.spec.world_size, self.start.stores_processes
        slots, engine, kind = self.start.seats[0], self.spec.collectives, self.start.kind
        self.gang = Gang.made(size, slots, engine, kind, is_stored=is_stored)

    def _fill(self, folder: Path) -> None:
        """Fill the folder from its image, or from the bundle for a new command."""
        image = self.start.image
        try:
            if image is None:
                working_folder.begun_from(Path(self.start.code), folder)
            else:
                index = slabs.read_index(self.slab.fd, image.index_bytes)
                beside = BESIDE if self.start.adopts else {}
                about = working_folder.restore(self.slab, index["layout"], folder, beside)
                self.step, self.restarts = image.step, int(about["restarts"]) + 1
                self.stopped_before = about.get("stopped", [])
                self.tree_before = about.get("tree")
                self.away_before = about.get("away", [])
                self.device_before = about.get("device", "")
                self.steps_before = about.get("steps", {})
                self.status = about.get("status")
                self.is_over_before = self.status is not None
                self._tell_other_ranks(about)
            (folder / INTERNAL).mkdir()
        except (BadLayout, working_folder.BadFolder, slabs.BadIndex) as error:
            raise _failed("image", f"Its working folder could not be restored: {error}") from error
        except OSError as error:  # the disk is at fault, and not the image
            raise _failed("exit", f"Its working folder cannot be created: {error}") from error

    def _adopt(self) -> None:
        """Have the processes of the image restored below this stub; if that fails, the command
        begins again.
        """
        self.say("adopts")
        process, why = adopt(self.tree, self.stopped_before, self._answer_to_adopts)
        if process is not None and self.gang is not None:
            why = self._adopt_ranks(process)
        if process is None or why:
            self._give_up_adopted(why)
            return
        self.devices.adopt(self.away_before, self.device_before)
        self.progress.steps = OwnSteps(**self.steps_before)
        self.restarts -= 1
        if self.gang is None:
            self.processes = [process]

    def _give_up_adopted(self, why: str) -> None:
        """End the restored processes, so that the command begins again in its folder."""
        self.tree.end(END_WITHIN_S)
        clear_beside()
        self.processes, self.rank_tree, self.devices.away = [], None, []
        tell_owner(f"it begins again in its folder, as it could not go on where it was: {why}")

    def _adopt_ranks(self, root: AdoptedProcess) -> str:
        """Take over restored ranks; return why they cannot go on, or ""."""
        try:
            told: JSON = self.tree_before or {}
            ranks = RankTree.adopted(root, told)
            slots, engine, kind = self.start.seats[0], self.spec.collectives, self.start.kind
            self.gang = Gang.adopted(told["gang"], root.pid, slots, engine, kind)
        except (OSError, KeyError, TypeError, ValueError) as error:
            self._make_gang()
            return f"its ranks are not as they were: {error!r:.200}"
        self.rank_tree, self.processes = ranks, [*ranks.ranks]
        return ""

    def _answer_to_adopts(self) -> JSON:
        while self.adopted is None:
            self.listen(None)
        return self.adopted

    def describe_for_image(self) -> JSON:
        """Return what an image says about the command; `_fill` reads it."""
        about: JSON = {"restarts": self.restarts, "ranks": self.spec.world_size}
        about["stopped"] = sorted(self.tree.stopped_before)
        about["away"], about["device"] = self.devices.away, self.devices.here
        about["steps"] = asdict(self.progress.steps)
        if self.status is not None and not self._is_again(self.status):
            about["status"] = self.status
        if self.rank_tree is not None and self.gang is not None:
            self.mind_ends()
            about["tree"] = {**self.rank_tree.about, "gang": asdict(self.gang.inside)}
        return about

    def processes_to_store(self) -> JSON:
        """Return what the image must say about the processes; {} if it is to have none. The
        processes that it is to have stay stopped.
        """
        root = self.rank_tree.root if self.rank_tree is not None else self._only_process
        if root is None or not self.keeping.may_have_processes():
            return {}
        self.tunnels.end_reads()
        has_beside, has_tunnels = self.keeping.has_beside, self.tunnels.are_open
        try:
            if self._holds_groups:
                raise NotStored(self.not_at_point or _STOPPED_BEFORE, is_lasting=False)
            if lost := connections.under_way():
                raise NotStored(lost, is_lasting=False)
            told = announced(
                self.tree,
                root,
                devices=self.devices,
                has_beside=has_beside,
                has_tunnels=has_tunnels,
            )
        except NotStored as error:
            self.tell_not_stored(str(error), is_lasting=error.is_lasting)
            return {"bound_because": str(error)}
        if told:
            self.held.add("image")
        return told

    def stands(self) -> bool:
        """True if the command is stopped and has not died meanwhile."""
        left = [process.pid for process in self.processes if process.returncode is None]
        return bool(left) and all(map(self.tree.stands, left))

    @property
    def _only_process(self) -> FirstProcess | None:
        return self.processes[0] if len(self.processes) == 1 else None

    def tell_not_stored(self, why: str, *, is_lasting: bool = True) -> None:
        self.is_in_doubt |= bool(why) and is_lasting
        if why and why not in self.not_stored:
            self.not_stored.add(why)
            tell_owner(f"on another device it would begin again in its folder: {why}")

    def _tell_other_ranks(self, about: JSON) -> None:
        now, before = self.spec.world_size, about.get("ranks", self.spec.world_size)
        if now != before:
            told = (
                f"it begins again with {counted(now, 'rank')}; its files are of a run with {before}"
            )
            tell_owner(told)

    def _capabilities(self) -> list[str]:
        return capabilities(self.devices) + ([NEED] if self.spec.notice is not None else [])

    # --- one round of the loop ---

    def turn(self) -> None:
        self._wait()
        self._mind_orders()
        self._mind_trust()
        self.keeping.mind()
        self._mind_tunnels()
        self._reap()
        self._mind_seats()
        self._mind_ranks()
        self._mind_progress()

    def _wait(self) -> None:
        """Wait for a message, or until time alone changes something."""
        self.listen(max(0.0, self._quiet_s()), self.wakeups.fd, self.progress.fd)
        self.wakeups.clear()

    def _quiet_s(self) -> float:
        due_s = [self.keeping.due_in_s()]
        if self._gathers:
            due_s.append(POINT_S)
        if self.is_seated:
            due_s += [self._report_s if self.progress.is_new else MEMORY_S]
            due_s += [notices.RETRY_S] if self.signal is not None else []
            due_s += [0.25 if "trust" in self.held else max(0, self.trust.left_us()) / 1e6]
            if self.gang is not None:
                due_s.append(ranks.WATCH_S if self.gang.is_told else ranks.LOOK_S)
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
                self.start = codec.from_json(TaskStart, message["start"])
            case "kept" if message["what"] == "image":
                self.keeping.kept(message)
            case "kept":
                self.settled[message["what"]] = message
            case "dumped":
                self.keeping.dumped(message["lost"])
            case "adopted":
                self.adopted = message
            case "open":
                self.tunnels.add(message["ticket"], self.wire.fds.pop(0))
            case "notice":
                self.notice = message
            case "resize":
                (self.asked_seats,) = message["seats"]
            case "go":
                (self.slots,) = message["seats"]
                self.wishes.add("go")
            case wish:
                self.wishes.add(wish)

    # --- orders ---

    def _mind_orders(self) -> None:
        self.wishes -= {"look"}
        if self.wishes & {"cancel", "over"} and not self._stands_for_an_image():
            self._stop()
        if "finish" in self.wishes:
            self._finish()
        if "go" in self.wishes and not self.is_seated:
            self._go()
        if self.notice is not None:
            self._give_notice(self.notice)
        if self.signal is not None:
            self.signal.send()
            self.signal = self.signal if self.signal.waiting else None
        # handle it after `go`, which may have come in the same read
        if self.asked_seats and self.gang is not None:
            self.gang.want(self.asked_seats, tell=True)
            self.asked_seats = 0
        may_pause = self.is_seated and not self._must_run_to_leave()
        if "pause" in self.wishes and may_pause and self.comes_to_point():
            self.mind_ends()
            if any(self._is_again(process.returncode) for process in self.processes):
                self.status = AGAIN  # the other ranks cannot go on without the ranks that left
            else:
                self._pause()

    def _stands_for_an_image(self) -> bool:
        """True while the tree has the slot but is stopped for an image; it runs on soon."""
        return self.is_seated and bool(self.held) and self.held <= {"copy", "image"}

    def _must_run_to_leave(self) -> bool:
        """True if a pause must wait until the tree runs: device memory can only leave while it
        does.
        """
        return self.devices.can_leave and bool(self.held) and not self.devices.away

    def _stop(self) -> None:
        """Ask all processes to end; the supervisor says when to end those that do not."""
        self.cancelled |= "cancel" in self.wishes
        self.wishes -= {"cancel", "over"}
        if self.is_stopped:
            return
        self.is_stopped = True
        if not self.processes or self.held:
            self._finish()  # the command may not run any more, not even to clean up
        else:
            self.tree.send(signal.SIGTERM)

    def _finish(self) -> None:
        """End the command now, so that what it has written can be stored."""
        self.wishes -= {"finish"}
        self.is_stopped = True
        if self.status is None:
            self.end_tree()
            self.status = -signal.SIGKILL

    def _give_notice(self, notice: JSON) -> None:
        """Tell the command why and when it will be stopped.

        A frozen process gets the signal when it runs again.
        """
        self.notice, asked = None, self.spec.notice
        if asked is None or not self.is_seated:
            return
        left_s, self.noticed_why = max(0.0, notice["left_us"] / 1e6), notice["why"]
        try:
            write_notice(self._notice_file, notice["why"], left_s)
        except OSError as error:
            tell_owner(f"the file of its notice cannot be written: {error}")
        tell_owner(f"it will be stopped in {left_s:.1f} s ({notice['why']}); it gets its notice")
        self.signal = NoticeSignal(self.processes, asked.signal)

    @property
    def _notice_file(self) -> Path:
        return Path(self.start.scratch) / INTERNAL / "notice"

    def _pause(self) -> None:
        self.wishes -= {"pause"}
        self.hold("pause")
        self._reap()
        if self.status is not None:  # the command ended before it stopped, and ends here
            self.let_go("pause")
            return
        self.count_stop()
        self.held -= {"trust"}  # without the slot no process runs anyway
        self.signal = None
        self._report_all()
        self.is_seated = False
        self.say("paused", has_state=bool(self.processes))

    def _go(self) -> None:
        self.wishes -= {"go"}
        self.is_seated = True
        self._notice_file.unlink(missing_ok=True)
        if self.gang is not None:  # extra slots from before no longer belong to the task
            self.gang.want(self.slots, tell=False)
        self.keeping.off_the_seat_no_more()
        if self.idle is not None:
            self.idle.leave_out_stop()
        self._mind_trust()
        self.let_go("pause")

    def _mind_trust(self) -> None:
        if not self.is_seated:
            return
        is_over = self.trust.left_us() <= 0
        if is_over and "trust" not in self.held:
            self.hold("trust", within_s=self.start.lease_margin_s / 2)
            self.say("still")
            if self.is_stopped:
                self._finish()
        elif not is_over and "trust" in self.held:
            self.let_go("trust")
            self.say("moving")

    # --- a common point of the ranks ---

    def comes_to_point(self) -> bool:
        """True once ranks with torch's own groups have let go of them, or are not to.

        Until then the ranks run, and this is asked again.  Groups that stay would keep processes
        from being stored, and device memory from leaving.  Where neither is to happen, the ranks
        are frozen as they are: their groups have no deadlines.
        """
        gathering = self.gang.gathering if self.gang is not None else None
        if gathering is None or self.held or not self.processes or self.status is not None:
            return True
        if not (self.keeping.may_have_processes() or self.devices.can_leave):
            return True
        if not gathering.has_come(time.monotonic()):
            return False
        if not gathering.is_dropped:
            self.not_at_point = self._why_no_point()
            self.tell_not_stored(self.not_at_point, is_lasting=False)
        return True

    def _why_no_point(self) -> str:
        assert self.gang is not None
        behind = who_is_behind(self.gang.standings())
        told = f"its ranks came to no common point within {HOLD_WITHIN_S:.0f} s"
        return f"{told}: {behind}" if behind else told

    @property
    def _holds_groups(self) -> bool:
        """True if ranks have groups of torch's own, whose sockets cannot be stored."""
        gathering = self.gang.gathering if self.gang is not None else None
        return gathering is not None and not gathering.is_dropped

    @property
    def _gathers(self) -> bool:
        """True while the ranks are on their way to a common point."""
        gathering = self.gang.gathering if self.gang is not None else None
        return gathering is not None and gathering.lasts

    def _leave_point(self) -> None:
        """Let the ranks build their groups anew, now that they run."""
        self.not_at_point = ""
        if self.gang is not None and self.gang.gathering is not None:
            self.gang.gathering.end()

    # --- stop and continue ---

    def hold(self, why: str, within_s: float = FREEZE_WITHIN_S) -> None:
        """Stop the tree; raises Ending if it cannot be stopped."""
        try:
            if not self.held:
                self._leave_device(why)
            self.tree.freeze(within_s)
            if not self.held and self._may_be_stored(why):
                settles_s = SETTLES_S if self.settles else 0.0
                self.settles = connections.settle(self.tree, within_s, settles_s)
        except (WontStop, NotDone) as error:
            told = f"It could not be paused, so it was ended: {error}"
            raise _failed("exit", told) from error
        self.held.add(why)

    def _may_be_stored(self, why: str) -> bool:
        """Say whether the processes that stop now may be in an image."""
        if why == "pause":
            return self.start.stores_processes
        return why == "copy" and self.keeping.may_have_processes()

    def _leave_device(self, why: str) -> None:
        """Move memory off the device, for a pause or for an image that has the processes."""
        is_for_image = why == "copy" and self._may_be_stored(why)
        try:
            if why == "pause" or is_for_image:
                self.devices.leave(self.tree.pids())
        except StillHeld:
            if not is_for_image:  # otherwise the image has no processes, and says why
                raise

    def let_go(self, why: str) -> None:
        if why not in self.held:
            return
        self.held.discard(why)
        if self.held:
            return
        if self.status is not None:  # it ended before, and only its results are left
            self.tree.thaw()
            return
        self.has_run = True
        if not self.processes:
            self._start()
            return
        self.tree.thaw()
        try:
            self.devices.come_back()
            self._leave_point()
        except NotDone as error:
            told = f"its device memory could not be restored: {error}"
            if not self.away_before:
                raise _failed("exit", f"{told[0].upper()}{told[1:]}") from error
            self._give_up_adopted(told)
            if self.gang is not None:
                self._make_gang()
            self.restarts += 1
            self._start()
        self.away_before = []

    def count_stop(self) -> None:
        self.step += self.progress.read(self.step)  # lines that the command wrote before
        if self.has_run:
            self.step, self.has_run = self.step + 1, False

    # --- the command ---

    def _mind_tunnels(self) -> None:
        """Start the inner ends of tunnels that wait for it; they may run only while the tree
        may.
        """
        if self.processes and self.is_seated and not self.held and self.status is None:
            self.tunnels.start(self.start.scratch, self._environment(0), self._bound)

    @property
    def _bound(self) -> Callable[[], None] | None:
        return None if self.tree.is_alone else sandbox.die_with_parent

    def _start(self) -> None:
        argv, folder, bound = self.spec.run.argv, self.start.scratch, self._bound
        try:
            if self.gang is not None and self.start.stores_processes:
                self._start_ranks(self.gang)
                return
            for rank in range(self.spec.world_size):
                begun = subprocess.Popen(
                    argv,
                    cwd=folder,
                    env=self._environment(rank),
                    stdin=subprocess.DEVNULL,
                    preexec_fn=bound,
                    start_new_session=self.start.stores_processes,
                    pass_fds=self.gang.fds if self.gang is not None else (),
                )
                self.processes.append(begun)
        except OSError as error:
            raise _failed("bundle", _cannot_start(argv[0], error), str(error)) from error

    def _start_ranks(self, gang: Gang) -> None:
        """Start the ranks below one process, so that they can be stored together."""
        self.rank_tree = RankTree.begun(
            self.spec.run.argv,
            self.start.scratch,
            [self._environment(rank) for rank in range(self.spec.world_size)],
            gang.fds,
            self._ends_file,
            AGAIN if self.spec.notice is not None else None,
        )
        self.processes = [*self.rank_tree.ranks]

    @property
    def _ends_file(self) -> Path:
        return Path(self.start.scratch) / INTERNAL / ENDS

    def _environment(self, rank: int) -> dict[str, str]:
        start, internal = self.start, Path(self.start.scratch) / INTERNAL
        threads = str(start.preset.get("threads", 1))
        return {
            **os.environ,
            "PYTHONUNBUFFERED": "1",  # the command's output is seen at once
            "PYTHONDONTWRITEBYTECODE": "1",
            **self.spec.env,
            **start.secrets,
            **start.variables,
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "ROUNDHOUSE_TASK": start.task,
            "ROUNDHOUSE_DEVICE": start.kind,
            "ROUNDHOUSE_PARAMS": json.dumps({**self.spec.params}),
            "ROUNDHOUSE_INPUTS": str(internal / "inputs"),
            # One rank reports progress; reports of all ranks would be counted several times.
            "ROUNDHOUSE_METRICS": os.devnull if rank else str(internal / "metrics"),
            "ROUNDHOUSE_RESTARTS": str(self.restarts),
            "ROUNDHOUSE_NOTICE": str(self._notice_file),
            **(self._of_rank(rank) if self.gang is not None else self._of_launcher),
        }

    @property
    def _of_launcher(self) -> dict[str, str]:
        """Returns what lets a plain `torchrun SCRIPT` start a rank on each device of the task."""
        devices = sum(self.start.seats)
        return {"PET_NPROC_PER_NODE": str(devices)} if devices > 1 else {}

    def _of_rank(self, rank: int) -> dict[str, str]:
        assert self.gang is not None
        path = self.spec.env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
        return self.gang.environment(rank, self.restarts, path)

    def _reap(self) -> None:
        for pid, status in reaped():
            self._ended(pid, status)

    def _ended(self, pid: int, status: int) -> None:
        self.tunnels.ended(pid, status)
        if self.rank_tree is not None and pid == self.rank_tree.root.pid:
            self.rank_tree.root.returncode = status
            self.mind_ends()
            for rank, process in enumerate(self.processes):
                # the exit has not been reported
                if self.status is None and process.returncode is None:
                    self._rank_ended(rank, process, status)
        for rank, process in enumerate(self.processes):
            if process.pid == pid:
                self._rank_ended(rank, process, status)
        self._mind_all_ended()

    def mind_ends(self) -> None:
        """Note the ends of ranks that are not our children."""
        for rank, status in self.rank_tree.ended(self._ends_file) if self.rank_tree else ():
            if self.processes[rank].returncode is None:
                self._rank_ended(rank, self.processes[rank], status)

    def _rank_ended(self, rank: int, process: FirstProcess, status: int) -> None:
        process.returncode = status
        # after a cancel all ranks may clean up; after a notice all may save
        if status and not self._is_again(status) and not (self.status or self.is_stopped):
            self.failed_rank, self.status = rank, status
            self.failed_behind = self._behind(rank)
            self.ends = [process.returncode for process in self.processes]

    def _behind(self, failed: int) -> str:
        """Return for which rank a rank waited that has failed; "" if that is not known.

        Torch's own backend ends all ranks that wait for one that has ended.  The rank for which
        they waited is the one to name.
        """
        if self.gang is None or self.gang.gathering is None:
            return ""
        standings = self.gang.standings()
        standings[failed] = replace(standings[failed], does=RankIs.waits)
        return who_is_behind(standings)

    def _mind_all_ended(self) -> None:
        codes = [process.returncode for process in self.processes]
        if codes and None not in codes and self.status is None:
            self.status = AGAIN if any(map(self._is_again, codes)) else 0

    def _is_again(self, status: int | None) -> bool:
        return status == AGAIN and self.spec.notice is not None

    def _ends_of_ranks(self) -> list[str]:
        """Describe how each rank ended: by itself, or stopped because another rank had failed."""
        told = (
            "It was ended with the others." if status is None else _how_it_ended(status)
            for status in self.ends
        )
        return [f"rank {rank}: {how}" for rank, how in enumerate(told)]

    def end_tree(self) -> None:
        """Kill what is left of the tree: a command is over when its first processes have ended."""
        if not self.processes:
            return
        with contextlib.suppress(WontStop):  # if the stub is process 1, the tree ends with it
            self.tree.end(END_WITHIN_S)
        self.tunnels.close()
        for process in self.processes:
            process.returncode = process.returncode or 0

    # --- progress ---

    def _mind_seats(self) -> None:
        if self.gang is not None and self.is_seated and (seats := self.gang.has_resized()):
            self.say("resized", seats=[seats])

    def _mind_ranks(self) -> None:
        if self.gang is not None:
            runs = self.is_seated and not self.held
            where = self.gang.standings() if runs else None
            who = self.watch.news(where, time.monotonic())
            if who is not None:
                self.say("behind", who=who)

    def _mind_progress(self) -> None:
        self.step += self.progress.read(self.step)
        if not self.is_seated or self.held:
            return
        now_s = time.monotonic()
        is_news = self.progress.is_new and now_s - self.reported_s >= self._report_s
        if is_news or now_s - self.reported_s >= MEMORY_S:
            self._report()

    @property
    def _report_s(self) -> float:
        return FULL_S if self.progress.rows.fill_a_message else REPORT_S

    def _report_all(self) -> None:
        """Report until no row of metrics is left, and at least once."""
        self._report()
        while self.progress.rows:
            self._report()

    def _report(self) -> None:
        now_s = time.monotonic()
        if now_s - self.measured_s >= MEMORY_S or not self.is_seated:
            self.measured_s = now_s
            if self.start.kind == "cpu":  # memory of an accelerator is counted by its driver
                self.memory_bytes = self.tree.memory_bytes()
        rows = self.progress.rows.take()
        self.reported_s, self.progress.is_new = now_s, bool(self.progress.rows)
        self.say(
            "progress",
            metrics=self.progress.metrics,
            points=rows,
            thinned=self.progress.rows.thinned,
            memory_bytes=self.memory_bytes,
            staged_us=int(self.stood_s * 1e6),
            **({"idle_us": self.idle.idle_us()} if self.idle is not None else {}),
        )

    # --- the end ---

    def ended_at_its_pause(self) -> bool:
        """True if the command ended by itself while it was paused, or before its image was made.

        This is reported when it has the slot again.
        """
        if self.is_seated or self.status is None or self.cancelled:
            return False
        return self.status >= 0 or self.is_over_before

    def settle(self) -> None:
        """Store what the command leaves, then send the final message, once it has ended."""
        self.end_tree()
        if not self.is_seated and not self.cancelled:
            raise Abandoned  # killed while frozen: a task ends only in the slot
        self.step += self.progress.read_all(self.step) + self.has_run
        if self.is_seated:
            self._report_all()
        if not self.is_stopped and self._is_again(self.status):
            self._begin_again()
        folder, why = Path(self.start.scratch), self._failure()
        try:
            results = self._results()
            self._tell_ending(results.told(folder))
        except OSError as error:
            raise why or _failed("exit", f"Its files cannot be read: {error}") from error
        if why is not None:
            # the failure of the command counts, not that of its output
            with contextlib.suppress(Ending):
                self._put_artifacts(folder, results)
            raise why
        for name in self.spec.outputs:
            body = output_of(name, folder, step=self.step, publish=name in self.spec.publish)
            self._put(name, body)
        self._put_artifacts(folder, results)
        raise Ending("finished", result={"exit_status": 0})

    def _results(self) -> Results:
        folder, spec = Path(self.start.scratch), self.spec
        return Results.of(folder, Path(self.start.code), spec.artifacts, spec.outputs)

    def _failure(self) -> Ending | None:
        """Return the final message, unless the command has ended well."""
        if self.cancelled:
            return Ending("stopped")
        if not self.status and not self.is_stopped:
            return None
        full = full_disk(Path(self.start.scratch), self.spec.resources.disk_bytes)
        full += " " if full else ""
        ended = _how_it_ended(self.status or 0)
        if self.gang is None:
            first, more = f"{full}{ended}", ""
        else:
            behind = f" {self.failed_behind}" if self.failed_behind else ""
            first = f"{full}rank {self.failed_rank}: {ended}{behind}"
            more = "\n".join(self._ends_of_ranks())
        return _failed("exit", first, more, **self._exit_status())

    def _exit_status(self) -> dict[str, int]:
        return {"exit_status": shell_status(self.status)} if self.status else {}

    def _tell_ending(self, dropped: JSON) -> None:
        if not self.is_ending:
            self.is_ending = True
            self.say("ending", dropped=dropped)

    def _begin_again(self) -> None:
        """Store the folder as the command left it, then ask for another launch of the command."""
        self._tell_ending({})
        if not self.keeping.store_last():
            tell_owner("it begins again in its working folder as that was stored before")
        if self.noticed_why in ("", NoticeReason.MAX_DURATION):  # this may be its last attempt
            with contextlib.suppress(Ending, OSError):
                self._put_artifacts(Path(self.start.scratch), self._results())
        raise _failed("again", f"It asked to begin again (exit status {AGAIN}).")

    def _put_artifacts(self, folder: Path, results: Results) -> None:
        if not results.kept:
            return
        try:
            artifacts = Zipped(folder, results.kept)
        except OSError as error:
            raise _failed("exit", f"Its artifacts could not be packed: {error}") from error
        self._put(ARTIFACTS, artifacts)

    def _put(self, name: str, body: Image | File | Zipped) -> None:
        """Store an output; while the store refuses it, wait without the slot and try again."""
        while why := self._refusal(name, body):
            if self.cancelled:
                raise _failed("exit", f"the output {name!r} could not be stored: {why}")
            self._wait_for_store()

    def _refusal(self, name: str, body: Image | File | Zipped) -> str:
        """Send an output, and wait until it is stored; return why it was not, or ""."""
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
        return str(self.settled.pop(what).get("error") or "")

    def _wait_for_store(self) -> None:
        """Leave the slot with all files, until the task is launched again."""
        self.wishes -= {"pause"}
        self.is_seated = False
        self.say("paused", has_state=True, waits="store")
        while not self.is_seated and not self.cancelled:
            self.turn()


# --- helpers --------------------------------------------------------------------------------------


def capabilities(devices: TreeMemory) -> list[str]:
    """Return what a command supports, in the words of a task's `capabilities`.

    "pause": at any moment. "restart": it cannot be moved, but is started again in its working
    folder. "device_memory": its device memory is free for other tasks while it is paused.
    """
    return ["pause", "restart", *(["device_memory"] if devices.can_leave else [])]


def _failed(cause: str, message: str, detail: str = "", **more: int) -> Ending:
    return Ending("failed", cause=cause, message=message, detail=detail, **more)


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
