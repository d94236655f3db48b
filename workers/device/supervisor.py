"""Supervises one device: owns its slot and all residents that live there.

At most one resident steps at a time: the resident in the slot.  The other residents stay in
memory: paused, prepared, or between their slices.  Tasks that share the device
(`core.scheduling.turns`) hold the slot in turn, some milliseconds each.  Orders and answers only
put a message into the supervisor's inbox.  One long-lived thread does everything.  All processes
that it spawned die with it.

Invariants:
* The process speaks for the device only while it holds the device's lock, which no resident can
  reach, and after every recorded resident (`workers.device.births`) has ended.
* A stale or repeated order changes nothing.  An order alone gives no task the slot unless the order
  is fresh: otherwise the island must first have answered a report that names the resident.
* No job steps past the trust deadline that the island's answers set.  A job that cannot stop is
  killed when the lease ends.
* Every event is reported until the island acknowledges it.

This module imports no torch, opens no database and interprets no bytes of a tenant.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import selectors
import socket
import stat
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from app.core.model import messages
from app.core.model.messages import (
    Alive,
    Answer,
    Cancel,
    Given,
    Launch,
    Order,
    Pause,
    Resize,
    Save,
)
from app.core.scheduling.turns import TURN_US, Rota
from app.core.security import sandbox_layers
from app.storage.backend import make_private
from workers.device import births, hung, prefetch, store_io
from workers.device import resident as residents
from workers.device.heartbeat import LOGS_LIMIT_BYTES, Lease, Pulse, Rhythm, Transport, now_us
from workers.device.memory_tiers import Residency
from workers.device.prefetch import Lookout
from workers.device.resident import (
    Leaving,
    Nonsense,
    Resident,
    Saving,
    Stay,
    Zygote,
    log_lines,
)
from workers.device.store_io import Fetched, NotFetched, OutOfStep
from workers.device.watchdog import Watchdog
from workers.process import cgroups, uids, volumes
from workers.process.sandbox import CANNOT_START, PASSAGE, Room
from workers.process.uids import NoUids, UidRange
from workers.process.wire import Garbled, Trust, tenant_pair
from workers.transfer import peer_auth
from workers.transfer.checkpoint import Written
from workers.transfer.host_context import CannotServe, House, locked, remove_tree, set_aside
from workers.transfer.peer_auth import Links, Sockets
from workers.transfer.peer_blocks import Giver

log = logging.getLogger(__name__)

JSON = dict[str, Any]

LOCK_WAIT_S = 30.0
DRAIN_S = 8.0  # seconds to pause and save all jobs when the worker stops
HANDOVER_US = 2_000_000  # how long a successor may prepare while its predecessor still runs
PREPARE_US = 120_000_000  # limit to import a tenant's code and restore its image
SAVE_AGAIN_US = 5_000_000
SQUEEZE_US = 1_000_000  # how long a co-located task waits for memory before another one yields
ROOM_WITHIN_US = 10_000_000  # how long a task waits for memory that frozen commands hold
REMEMBERED = 10_000  # tasks with known newest epoch or image; the island stops older epochs
MUTED_US = 50_000  # how long the output of a resident with a full log is not read
SEND_AGAIN_US = 20_000  # until the next attempt to send to a process that did not read
READS_AT_THE_END = 32  # reads of each stream of an ended process
BULK_TIMEOUT_S = 60.0
SAVES_AT_ONCE = 2  # per process: one output being read, one becoming durable
LIES_BYTES = 1 << 20  # outputs of at least this size go back to their producer as a file
ZYGOTE_AGAIN_S = 1.0

#: Kill reasons after which no further messages of the process are read.
_MAY_SAY_NO_MORE = frozenset({"nonsense", "flood", "deaf"})
#: Kill reasons without an event: the island sees that the resident is gone.
_SILENT = frozenset({"evicted", "dropped", "replaced", "lease", "zygote", "leaving", "unfetched"})


class Supervisor(threading.Thread):
    """Runs one device.

    Other threads may call only `receive`, `stop` and the methods that say so.
    """

    def __init__(
        self, house: House, transport: Transport, *, on_fatal: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(name=f"device {house.device}", daemon=True)
        self.house, self.on_fatal = house, on_fatal
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.pulse = Pulse(transport)
        self.rhythm = Rhythm(int(house.beat_s * 1e6))
        self.lease = Lease()
        self.trust = Trust()
        self.facts: JSON = {}
        self.walls: list[str] = []
        self.residents: dict[int, Resident] = {}
        self.read_from: list[Resident] = []  # ended, but a thread still stores their data
        self.stays: dict[tuple[str, int], Stay] = {}
        self.newest: dict[str, tuple[int, int]] = {}  # task -> epoch and seq of its latest Launch
        self.kept: dict[str, tuple[int, JSON]] = {}  # task -> epoch and its newest image
        self.fetched: list[tuple[Stay, Fetched]] = []  # fetched, waiting for memory
        self.residency = Residency(
            house,
            self.residents,
            lambda resident: self._vanish(resident.stay, "evicted"),
            lambda: self.lookout.held_bytes,
        )
        self.lookout = Lookout(house, self._look_around)
        self.seat: Resident | None = None
        self.seat_free_us = 0
        self.rota = Rota({})
        self.turn_over_us = 0
        self.muted: list[tuple[int, Resident, int]] = []
        self.zygote: Zygote | None = None
        self.zygote_due_us: int | None = None
        self.stop_by_us: int | None = None
        self.giver = Giver(house.cache, house.block_bytes_per_s)
        self.links = Links(house.address, self.receive, {peer_auth.BLOCK: self.giver})
        self.last_id = 0
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._hands = ThreadPoolExecutor(house.residents_max + 4, "hands")
        # A tenant's leftovers can be large: removing or closing them must not block other work.
        self._sweeper = ThreadPoolExecutor(1, "sweeper")
        self._closer = ThreadPoolExecutor(1, "closer")
        self.unheard: list[Resident] = []  # with messages left to read in the next round
        self.watchdog = Watchdog(self._end_at_once)
        self.hearing: Resident | None = None  # the sender of the messages being processed now
        self.hung: list[Any] = []  # tasks that made the previous worker hang, until reported
        self._lock_fd = -1
        self.uids: UidRange | None = None  # None unless run by root, which can assign other uids
        self.groups = cgroups.ControlGroups("", house.bounds)
        # file system image of scratch folders, if their size is limited
        self.template: Path | None = None
        self.unlimited: dict[str, str] = {}  # limit not enforced on this device -> reason
        self.facts = house.facts

    # --- called from other threads ---

    def receive(self, message: Any) -> None:
        """Queue an order, an answer, or a function to be called in the supervisor's thread."""
        self.inbox.put(message)
        os.eventfd_write(self._woken, 1)

    def stop(self, timeout_s: float = DRAIN_S + 2.0) -> None:
        """Pause and durably save all jobs, report that, and end everything."""
        self.receive(self._begin_to_leave)
        self.join(timeout_s)

    # --- the supervisor's thread ---

    def run(self) -> None:
        try:
            self._move_in()
            self.watchdog.start()
            while not self._may_leave():
                self._round()
            self._say_goodbye()
        except CannotServe as error:
            log.critical("%s: %s", self.house.device, error)
            self.on_fatal()
        except Exception:
            log.exception("%s: the supervisor failed; all its processes end", self.house.device)
            self.on_fatal()
        finally:
            self.watchdog.end()
            self._move_out()

    def _end_at_once(self) -> None:
        """Kill all residents and the zygote; the watchdog calls this when the supervisor hangs."""
        try:
            self._write_down_why()
        except OSError:
            log.exception("%s: cannot record what made it hang", self.house.device)
        for resident in list(self.residents.values()):
            resident.kill()
        if self.zygote is not None:
            self.zygote.process.kill()
        self.on_fatal()

    def _write_down_why(self) -> None:
        hearing = self.hearing
        there = {resident.stay.key for resident in list(self.residents.values())}
        tasks = hung.blamed(hearing.stay.key if hearing is not None else None, there)
        if tasks:
            log.critical("%s hung while it was busy with %s", self.house.device, tasks)
            hung.write_down(self._hung_file, tasks)

    def _forget_why(self) -> None:
        """Forget the tasks that made the previous worker hang, as the island has heard of them."""
        if self.hung:
            self.hung = []
            self._hung_file.unlink()

    def _round(self) -> None:
        # 1. Read messages of residents, the zygote and the inbox.
        timeout_s = self._timeout_s()
        self.watchdog.rests()
        ready = self._selector.select(timeout_s)
        self.watchdog.works()
        unheard, self.unheard = self.unheard, []
        for key, _ in ready:
            key.data()
        for resident in unheard:
            self._resident_says(resident)
        while not self.inbox.empty():
            self._hear(self.inbox.get())
        # 2. Apply deadlines.
        self._keep_time(now_us())
        # 3. Start processes, let tasks yield, and fill the slot.
        self._make_room()
        self._give_way()
        self._end_turn()
        self._seat_next()
        # 4. Report changes.
        self._report_if_due()

    def _hear(self, message: Any) -> None:
        match message:
            case Order():
                self._order(message)
            case Answer():
                self._answered(message)
            case Given():
                self._given(message)
            case _:
                message()

    # --- start and stop ---

    def _move_in(self) -> None:
        make_private(self.house.folder)
        self._lock_fd = locked(self.house.run / f"{self.house.device}.lock", LOCK_WAIT_S)
        self.hung = hung.written_down(self._hung_file)
        make_private(self._records)
        if left := births.end_recorded(self._records, LOCK_WAIT_S):
            raise CannotServe(f"processes {left} of the worker before do not end; end them first")
        for name in ("code", "scratch"):
            self._sweeper.submit(remove_tree, set_aside(self.house.folder / name))
            make_private(self.house.folder / name)
        for folder in self._passages[1:]:  # an earlier version made them readable for all users
            folder.chmod(stat.S_IMODE(folder.stat().st_mode) & PASSAGE)
        self._selector.register(self._woken, selectors.EVENT_READ, self._awake)
        self.links.listen()
        self.pulse.start()
        device, run = self.house.device, self.house.run
        self.groups = cgroups.ControlGroups.made(device, run, self.house.bounds)
        if os.geteuid() == 0:
            self._reserve_uids()
        self.unlimited |= self.groups.missing
        self._make_template()
        self._start_zygote()

    def _reserve_uids(self) -> None:
        """Reserve uids: on the whole host, or among the devices of this home if a container forbids
        that.
        """
        run = self.house.run.absolute()
        folders = (uids.HOST_FOLDER, run / "uids")
        try:
            self.uids = uids.reserve(f"{run}/{self.house.device}", folders)
        except NoUids as error:
            raise CannotServe(str(error)) from error

    def _make_template(self) -> None:
        """Make the file system image that scratch folders start from, where one can be mounted."""
        if self.house.sandbox == "off":
            self.unlimited["disk"] = "the sandbox is off"
            return
        template = (self.house.folder / "scratch" / "template").absolute()
        size_bytes = self.house.scratch_bytes or volumes.usual_bytes(template.parent)
        why = volumes.make_template(template, size_bytes)
        if why:
            self.unlimited["disk"] = why
        else:
            self.template = template

    def _awake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._woken)

    @property
    def _hung_file(self) -> Path:
        return self.house.folder / "hung.json"

    @property
    def _records(self) -> Path:
        return self.house.folder / "residents"

    def _begin_to_leave(self) -> None:
        if self.stop_by_us is not None:
            return
        self.stop_by_us = now_us() + int(DRAIN_S * 1e6)
        for stay in list(self.stays.values()):
            if stay.state == "seating":
                self._vanish(stay, "leaving")
            elif stay.state == "running":
                self._pause(stay)

    def _may_leave(self) -> bool:
        if self.stop_by_us is None:
            return False
        kept = [r for r in self.residents.values() if not r.doom]
        done = self.seat is None and all(r.is_kept and not r.is_saving for r in kept)
        return done or now_us() >= self.stop_by_us

    def _say_goodbye(self) -> None:
        """Send the last report: all events, no residents, and the lease given back."""
        self.pulse.flush(1.0)
        for _ in range(2):  # twice, as no later report repeats it
            self.pulse.say(self._alive(leaving=True))
            self.pulse.flush(1.0)

    def _move_out(self) -> None:
        if self.zygote is not None:
            self.zygote.end()
        self.pulse.end()
        self._hands.shutdown(cancel_futures=True)  # their peers are dead
        for resident in self.residents.values():
            resident.close()
            self._closer.submit(resident.wire.close)
        for resident in (*self.residents.values(), *self.read_from):
            self._closer.submit(resident.close_stores)
        self._closer.shutdown()
        self._sweeper.shutdown(wait=False)
        for _, fetched in self.fetched:
            fetched.close()
        self.lookout.close()
        self.links.close()
        self.giver.close()
        self._selector.close()
        self.trust.close()
        self.groups.close()
        if self.uids is not None:
            self.uids.close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)

    # --- the zygote ---

    def _start_zygote(self) -> None:
        self.zygote_due_us = None
        probe = (
            None
            if self.house.sandbox == "off"
            else self._room("probe", store_io.unpack("", self.house))
        )
        self.zygote = Zygote(lock_fd=self._lock_fd, probe=probe, records=self._records)
        self._selector.register(self.zygote.wire, selectors.EVENT_READ, lambda: self._zygote_says())

    def _zygote_says(self) -> None:
        assert self.zygote is not None
        wire = self.zygote.wire
        for message in wire.receive():
            match message["is"]:
                case "ready":
                    self._zygote_ready(message)
                case "spawned":
                    self._spawned(message, wire.fds.pop(0))
                case "exited":
                    self._exited(self.residents[message["id"]], message["status"])
        if wire.closed:
            self._zygote_gone()

    def _zygote_ready(self, message: JSON) -> None:
        assert self.zygote is not None
        self.zygote.is_ready = True
        self.walls, missing = message["walls"], message["missing"]
        for name, why in missing.items():
            log.warning("sandbox: no layer %r (%s): %s", name, sandbox_layers.LAYERS[name], why)
        self._judge_sandbox()
        self._judge_limits(message["unbounded"])
        if message["unwatched"]:
            log.warning("states are saved while jobs wait: %s", message["unwatched"])
        self.facts = {
            **self.facts,
            "torch": message["torch"],
            "capabilities": [] if message["unwatched"] else ["overlap"],
        }
        self.rhythm.happened = True

    def _judge_sandbox(self) -> None:
        """Raise CannotServe if a required sandbox layer is missing, after the island was told."""
        self.facts |= {"sandbox": self.walls, "sandbox_mode": self.house.sandbox}
        lacking = sandbox_layers.missing(self.walls)
        if self.house.sandbox == "required" and lacking:
            self.facts["refuses"] = sandbox_layers.refusal(lacking)
            self._say_goodbye()
            raise CannotServe(f"{self.facts['refuses']} (see above, why); {sandbox_layers.MENDS}")
        if lacking:
            log.warning(
                "%s", "\n".join(sandbox_layers.warning([(self.house.device, self._sandbox)]))
            )

    def _judge_limits(self, unbounded: str) -> None:
        """Report the limits on residents; `unbounded` says why scratch folders have none."""
        if unbounded:
            self.template = None
            self.unlimited.setdefault("disk", unbounded)
        for name, why in self.unlimited.items():
            log.warning("processes have no limit of %s here: %s", name, why)
        standing = [*self.groups.standing, *([] if self.template is None else ["disk"])]
        self.facts |= {"limits": standing, "unlimited": sorted(self.unlimited)}

    @property
    def _sandbox(self) -> sandbox_layers.Sandbox:
        return sandbox_layers.Sandbox.of(self.facts)

    def _zygote_gone(self) -> None:
        """Replace a zygote that died.  Its residents died with it; no task counts as failed."""
        assert self.zygote is not None
        log.error("the zygote of %s died and is replaced", self.house.device)
        self._selector.unregister(self.zygote.wire)
        self.zygote.end()
        self.zygote = None
        for resident in list(self.residents.values()):
            self._doom(resident, "zygote")
            if resident.pidfd is None:
                self._exited(resident, -9)  # its process never began
            else:
                self._await_end(resident, resident.pidfd)
        self.zygote_due_us = now_us() + int(ZYGOTE_AGAIN_S * 1e6)

    def _await_end(self, resident: Resident, pidfd: int) -> None:
        """Handle the end of a killed process when its pidfd reports it, which takes a moment."""

        def ended() -> None:
            self._selector.unregister(pidfd)
            if not resident.is_gone:
                self._exited(resident, -9)

        self._selector.register(pidfd, selectors.EVENT_READ, ended)

    # --- orders ---

    def _order(self, order: Order) -> None:
        if isinstance(order, Launch):
            self._launch(order)
            return
        stay = self.stays.get((order.task, order.epoch))
        if stay is None or order.seq <= stay.order_seq:
            return  # unknown as yet (the island resends it), or already obeyed
        if isinstance(order, Cancel):
            stay.order_seq = order.seq  # orders that it overtook no longer matter
            self._cancel(stay)
            return
        stay.early[order.seq] = order
        while (following := stay.early.pop(stay.order_seq + 1, None)) is not None:
            stay.order_seq += 1
            self._obey(stay, following)

    def _obey(self, stay: Stay, order: Order) -> None:
        if isinstance(order, Pause) and order.successor and stay.state == "running":
            self.rhythm.chatter = True  # its Paused event follows soon
            stay.successor, stay.yield_by_us = order.successor, now_us() + HANDOVER_US
            return
        self.rhythm.happened = True
        if isinstance(order, Pause):
            stay.moves = order.moves
            self._pause(stay)
        elif isinstance(order, Save):
            self._save(stay)
        elif isinstance(order, Resize) and stay.state == "running":
            stay.wanted = order
            self._expect(stay, order.seats, order.links)

    def _launch(self, launch: Launch) -> None:
        if launch.incarnation not in ("", self.house.incarnation):
            return  # for an earlier process of this device
        number = launch.epoch, launch.seq
        if number <= self.newest.get(launch.task, (0, 0)) or self.stop_by_us is not None:
            return
        _remember(self.newest, launch.task, number)
        launch = self._with_newest_image(launch)
        stay = Stay.of(launch, now_us())
        stay.is_confirmed = self._is_sure(launch)
        self.rhythm.chatter = True  # its Started event follows soon
        # The island sends a co-located task its share only after a report that names the task.
        self.rhythm.happened |= not stay.is_confirmed or launch.beside
        self.stays[stay.key] = stay
        if not stay.is_outpost:
            self._expect(stay, launch.seats, launch.links)
        resident = self._living(launch.task)
        if resident is not None and _can_go_on(resident, launch):
            _begin_again(resident, stay)
            self._bring(stay)
            return
        if resident is not None:
            self._vanish(resident.stay, "replaced")
        house, came, taken = self.house, self.lookout.came, self.lookout.launched(launch.task)
        self._aside(
            lambda: prefetch.fetch(launch, house, came, taken),
            lambda fetched: self._take_fetched(stay, fetched),
        )

    def _with_newest_image(self, launch: Launch) -> Launch:
        """Return the launch with the image that its previous epoch stored here, if that image is
        newer.

        The island may have sent the launch before it heard of that image.  The process that made
        the image is gone by now.
        """
        if launch.host or launch.task not in self.kept:
            return launch
        epoch, image = self.kept[launch.task]
        is_next = launch.epoch == epoch + 1 and image["step"] > _newest_step(launch)
        return replace(launch, images=[image, *launch.images]) if is_next else launch

    def _is_sure(self, launch: Launch) -> bool:
        """True if the launch is so fresh that the island could only answer "keep"."""
        mine = launch.incarnation == self.house.incarnation
        return mine and now_us() < launch.surely_until_us

    def _living(self, task: str) -> Resident | None:
        """Return the task's living resident, if any.

        Remote ranks don't count, as they end with their coordinator host.
        """
        living = (r for r in self.residents.values() if r.task == task and not r.doom)
        return next((r for r in living if not r.stay.is_outpost), None)

    def _take_fetched(self, stay: Stay, fetched: Fetched | BaseException) -> None:
        if stay.state != "seating":
            if isinstance(fetched, Fetched):
                fetched.close()
        elif isinstance(fetched, Fetched):
            self.fetched.append((stay, fetched))
        else:
            assert isinstance(fetched, NotFetched), fetched
            self._end(stay, messages.Failed, cause=fetched.cause, message=fetched.message)

    # --- hosts of a gang ---

    def _expect(self, stay: Stay, seats: list[int], how: JSON) -> None:
        """Wait for all hosts of the task's gang to connect; then the task starts or is resized."""
        self._expect_no_more(stay)
        if len(seats) == 1:
            self._linked(stay, [])
            return
        stay.links = None
        stay.expects, stay.give_up_us = how["secret"], now_us() + int(peer_auth.WITHIN_S * 1e6)
        self.links.expect(stay.expects, len(seats) - 1, lambda joined: self._linked(stay, joined))

    def _expect_no_more(self, stay: Stay) -> None:
        if stay.expects:
            self.links.forget(stay.expects)
        stay.expects, stay.give_up_us = "", None
        store_io.close_all(stay.hand_over())

    def _linked(self, stay: Stay, joined: Sockets) -> None:
        stay.expects, stay.give_up_us, stay.links = "", None, joined
        if stay.wanted is not None and stay.resident is not None:
            fds = stay.hand_over()
            stay.resident.send("resize", fds, seats=stay.wanted.seats)
            store_io.close_all(fds)

    def _give_up(self, stay: Stay) -> None:
        """Stop waiting for a host of the task's gang that did not connect in time."""
        self._expect_no_more(stay)
        if stay.wanted is not None:
            stay.wanted = None
            stay.tell(messages.Resized, now_us(), seats=stay.seats)
        elif stay.state == "seating":
            told = f"A host of its gang did not connect within {peer_auth.WITHIN_S:.0f} s."
            self._vanish(stay, "unlinked")
            self._end(stay, messages.Failed, cause="host", message=told)
        self.rhythm.happened = True

    def _join_home(self, resident: Resident) -> None:
        """Connect to the coordinator host, now that the process of the remote ranks exists."""
        stay, launch = resident.stay, resident.stay.launch
        home, secret = launch.links["home"], launch.links["secret"]
        self._aside(
            lambda: peer_auth.connect(home, secret, launch.host, lambda: not resident.doom),
            lambda joined: self._joined_home(stay, joined),
        )

    def _joined_home(self, stay: Stay, joined: Sockets | BaseException) -> None:
        if isinstance(joined, BaseException):
            log.warning("cannot join the coordinator host of task %s: %s", stay.launch.task, joined)
            self._vanish(stay, "unlinked")
            return
        stay.links = joined
        fds = stay.hand_over()
        if stay.resident is not None:
            stay.resident.send("link", fds)
        store_io.close_all(fds)

    # --- pausing, saving, ending ---

    def _pause(self, stay: Stay) -> None:
        resident = stay.resident
        self._expect_no_more(stay)
        if stay.state == "running" and resident is not None:
            off_the_seat, stay.state = stay.is_off_the_seat, "pausing"
            resident.send("pause", **self.residency.with_pause(resident, now_us()))
            if stay.moves:
                resident.send("save")  # without delay, as another device waits for the image
            if off_the_seat:
                self._paused(resident)
        elif stay.state == "seating" and resident is None:
            stay.tell(messages.Paused, now_us())
            self._vanish(stay, "dropped")
        elif stay.state == "seating" and resident is not None:
            stay.state = "pausing"
            if resident.is_prepared:
                self._paused(resident)

    def _save(self, stay: Stay) -> None:
        resident = stay.resident
        if resident is None or stay.state not in ("running", "paused"):
            return  # a Pause in progress also saves
        if stay.state == "paused" and resident.saved and resident.saved.step == stay.step:
            self._tell_saved(stay, resident.saved)
        else:
            resident.send("save")

    def _cancel(self, stay: Stay) -> None:
        self.rhythm.happened = True
        self._expect_no_more(stay)
        resident = stay.resident
        if resident is None:
            if stay.state == "seating":
                self._end(stay, messages.Stopped)
            return
        if stay.state in ("ended", "vanished"):
            return
        on_the_seat = self.seat is resident
        stay.state = "stopping"
        if on_the_seat:
            resident.send("cancel")
            resident.kill_us = now_us() + int(self.house.stop_grace_s * 1e6)
        else:
            self._doom(resident, "cancel")

    # --- answers ---

    def _answered(self, answer: Answer) -> None:
        if not self._is_new(answer):
            return
        # Drop tasks first: they may run elsewhere by now.
        for task, epoch in answer.drop:
            self._drop(task, epoch)
        for task, epoch in answer.keep:
            if (task, epoch) in self.stays:
                self.stays[task, epoch].is_confirmed = True
        self.lease = self.lease.after(answer, margin_us=int(self.house.lease_margin_s * 1e6))
        self.watchdog.limit_s = answer.lease_us / 1e6
        self._forget_why()
        self.trust.extend(self.lease.trusted_until_us)
        if self.seat is not None and self.seat.is_still:
            self.seat.send("look")
        for stay in list(self.stays.values()):
            name = messages.key(*stay.key)
            stay.heard(answer.heard.get(name, 0))
            stay.log.acknowledged(answer.logged.get(name, 0))
            if stay.is_over():
                del self.stays[stay.key]
        self.residency.expected = answer.next
        if answer.rota is not None:
            self.rota = Rota.of(answer.rota)
        for given in answer.given:
            self._given(given)
        self._may_stay(is_wanted=answer.wanted)
        self.lookout.expect(answer.expect, here=[task for task, _ in self.stays])
        self.rhythm.chatter |= bool(answer.expect)  # more of it will soon be prefetched

    def _is_new(self, answer: Answer) -> bool:
        """True if the answer is for this process and newer than any before.

        A newer answer has said all that still holds, so a late or repeated answer changes nothing.
        """
        ours = (self.house.device, self.house.incarnation)
        is_late = answer.sent_us <= self.lease.answered_us
        return (answer.device, answer.incarnation) == ours and not is_late

    def _may_stay(self, *, is_wanted: bool) -> None:
        """Tell a task that waits for an input how long it may hold the slot."""
        if self.seat is None or not self.seat.stay.stands_still:
            return
        on_it = self.seat.stay
        is_wanted |= any(
            stay.state in ("seating", "running")
            for stay in self.stays.values()
            if stay is not on_it
        )
        self.seat.send("patience", s=self.house.patience_s if is_wanted else self.house.at_rest_s)
        self.rhythm.chatter = True  # another task may be launched here

    def _drop(self, task: str, epoch: int) -> None:
        stay = self.stays.pop((task, epoch), None)
        if stay is not None and stay.state != "ended":
            self._vanish(stay, "dropped")
        for resident in self.residents.values():  # remote ranks that another device has replaced
            if resident.stay.is_outpost and resident.stay.key == (task, epoch):
                self._doom(resident, "dropped")

    # --- deadlines ---

    def _keep_time(self, now: int) -> None:
        for resident in list(self.residents.values()):
            self._flush(resident, now)
            if resident.kill_us is not None and now >= resident.kill_us:
                self._doom(resident, "cancel")
            elif self.residency.lacks and resident.owes_image(now):
                log.warning("task %s was paused but sent no saved state", resident.task)
                self._doom(resident, "unsaved")
            elif not resident.is_prepared and now >= resident.deadline_us:
                self._doom(resident, "slow")
            elif resident.save_again_us is not None and now >= resident.save_again_us:
                resident.save_again_us = None
                resident.send("save")
        self._give_up_waiting(now)
        self._watch_the_seat(now)
        for due_us, resident, fd in list(self.muted):
            if now >= due_us:
                self.muted.remove((due_us, resident, fd))
                self._listen_to(resident, fd)
        if self.zygote_due_us is not None and now >= self.zygote_due_us:
            self._start_zygote()

    def _flush(self, resident: Resident, now: int) -> None:
        """Send again what the process did not read; kill a process that never reads."""
        if resident.doom or resident.wire.unread_since_us is None:
            return
        with contextlib.suppress(OSError):  # it is dying; its exit will be reported
            resident.wire.flush()
        if resident.is_deaf(now):
            log.warning("task %s does not read its messages", resident.task)
            self._doom(resident, "deaf")

    def _give_up_waiting(self, now: int) -> None:
        for stay in list(self.stays.values()):
            if stay.give_up_us is not None and now >= stay.give_up_us:
                self._give_up(stay)

    def _watch_the_seat(self, now: int) -> None:
        resident = self.seat
        if resident is None or resident.doom:
            return
        if resident.stay.held_us(now) >= resident.stay.launch.budget_us:
            self._doom(resident, "max_duration")
        elif now >= self.lease.ends_us and not resident.is_still:
            log.warning(
                "%s lost its island during a step of %s, which was ended",
                self.house.device,
                resident.task,
            )
            self._doom(resident, "lease")

    def _timeout_s(self) -> float:
        due = [self.rhythm.due_us(self.lease.answered_us)] if self._may_report() else []
        due += [us for us in (self.zygote_due_us, self.stop_by_us) if us is not None]
        due += [due_us for due_us, _, _ in self.muted]
        due += [0] if self.unheard else []
        waits = any(r.wire.unread_since_us is not None for r in self.residents.values())
        due += [now_us() + SEND_AGAIN_US] if waits else []
        due += [s.give_up_us for s in self.stays.values() if s.give_up_us is not None]
        due += [s.yield_by_us for s in self.stays.values() if s.yield_by_us is not None]
        if self.residency.lacks and self.seat is None:
            due.append(max(self._lacking_until_us(), now_us() + 500_000))
        for resident in self.residents.values():
            due += [us for us in (resident.kill_us, resident.save_again_us) if us is not None]
            due += [resident.leave_by_us] if resident.level == "leaving" else []
            due += [] if resident.is_prepared else [resident.deadline_us]
        if self.seat is not None and not self.seat.doom:
            stay = self.seat.stay
            due.append(now_us() + stay.launch.budget_us - stay.held_us(now_us()))
            asks = not self.seat.yields and self._who_wants_a_turn()
            due += [self.turn_over_us] if asks else []
            due += [] if self.seat.is_still else [self.lease.ends_us]
        if not due:
            return 10.0
        return min(10.0, max(0.0, (min(due) - now_us()) / 1e6))

    # --- memory and slot ---

    def _make_room(self) -> None:
        """Find memory for residents that are off the device, then for tasks without a process."""
        now = now_us()
        if not self.residency.look(now):
            self._end_a_frozen(now)
            self._squeeze(now)
            return
        for here in list(self.fetched):
            stay, fetched = here
            if stay.state != "seating":
                self.fetched.remove(here)
                fetched.close()
            elif not stay.is_linked or self.zygote is None or not self.zygote.is_ready:
                continue
            elif self.residency.has_room(stay.launch.memory_bytes, now):
                self.fetched.remove(here)
                self._spawn(stay, fetched)
            elif self.rota.is_heir(stay.launch.task):
                # no task yields to a standby task: it is launched again when its turn comes
                self._pause(stay)
            else:
                self._end_a_frozen(now)
                self._squeeze(now)
                return

    def _squeeze(self, now: int) -> None:
        """Pause the best served task if not all that share the device fit in its memory."""
        beside = [s for s in self.stays.values() if s.state == "seating" and s.launch.beside]
        waits = [stay for stay in beside if not self.rota.is_heir(stay.launch.task)]
        if not self.residency.lacks or not waits:
            return
        if any(r.stay.state == "pausing" or r.level == "leaving" for r in self.residency.living):
            return  # one is letting go of memory already
        here = {r.task: r.stay for r in self._sharers() if r.stay.state == "running"}
        newest_us = max(stay.arrived_us for stay in (*waits, *here.values()))
        if here and now >= newest_us + SQUEEZE_US:
            among = [task for task in here if self.rota.is_heir(task)] or here
            self._pause(here[self.rota.most_of(among, self._held_us(now))])

    def _end_a_frozen(self, now: int) -> None:
        """End a frozen command to make room, as the last resort where the slot would stay empty for
        ever.

        The chosen command is the one paused longest among those with a durable working folder, once
        a task has waited for ROOM_WITHIN_US.  The command starts again in its folder.
        """
        if self.seat is not None or not self.residency.lacks or now < self._lacking_until_us():
            return
        frozen = [r for r in self.residency.living if r.is_command and r.stay.state == "paused"]
        kept = [r for r in frozen if r.is_kept and not r.is_saving]
        if kept:
            longest = min(kept, key=lambda r: r.paused_us)
            log.warning("%s ends to make room; it begins again in its folder", longest.task)
            self._vanish(longest.stay, "evicted")

    def _lacking_until_us(self) -> int:
        waits_us = [s.arrived_us for s in self.stays.values() if s.state == "seating"]
        return min(waits_us, default=now_us()) + ROOM_WITHIN_US

    def _give_way(self) -> None:
        """Pause the task in the slot once its successor is ready, is stuck, or is out of time."""
        for stay in list(self.stays.values()):
            if stay.yield_by_us is None:
                continue
            if now_us() >= stay.yield_by_us or self._is_ready_or_stuck(stay.successor):
                stay.yield_by_us = None
                if stay.state == "running":
                    self._pause(stay)

    def _is_ready_or_stuck(self, task: str) -> bool:
        if any(stay.launch.task == task for stay, _ in self.fetched):
            return bool(self.residency.lacks)  # stuck until the task in the slot yields its memory
        living = self._living(task)
        if living is None or living.stay.state != "seating":
            return False  # its Launch has not arrived yet, or it was dropped
        if living.level != "device":
            return bool(self.residency.lacks)
        return living.is_prepared and living.stay.is_confirmed

    # --- slices ---

    def _sharers(self) -> list[Resident]:
        """Residents that share the device by the newest answer, and can run."""
        return [
            r
            for r in self.residents.values()
            if self.rota.has(*r.stay.key)
            and not r.doom
            and (r.stay.state == "running" or self._may_sit(r))
        ]

    def _held_us(self, now: int) -> dict[str, int]:
        """The slot time of each task that shares the device, even if the task cannot run now."""
        return {
            task: stay.held_us(now)
            if (stay := self.stays.get((task, share.epoch)))
            else share.held_us
            for task, share in self.rota.shares.items()
        }

    def _who_wants_a_turn(self) -> dict[str, Stay]:
        """The tasks that share the device with the task in the slot, itself included; else
        empty.
        """
        sharers = {r.task: r.stay for r in self._sharers()}
        seat = self.seat
        return sharers if seat is not None and seat.task in sharers and len(sharers) > 1 else {}

    def _end_turn(self) -> None:
        now, resident = now_us(), self.seat
        if resident is None or resident.yields or now < self.turn_over_us:
            return
        if resident.stay.state != "running" or not (wanted := self._who_wants_a_turn()):
            return
        if self.rota.next_of(wanted, self._held_us(now)) == resident.task:
            self.turn_over_us = now + TURN_US
        else:
            resident.yields = True
            resident.send("yield")

    def _may_sit(self, resident: Resident) -> bool:
        """True if the resident may take the slot for the first time in its stay."""
        stay = resident.stay
        return (
            stay.state == "seating"
            and stay.is_confirmed
            and stay.is_linked
            and resident.is_prepared
            and resident.level == "device"
            and not resident.doom
        )

    def _next(self, now: int) -> Resident | None:
        """Return the next resident for the slot; tasks that share the device go before all
        others.
        """
        off = [r for r in self.residents.values() if r.stay.is_off_the_seat and not r.doom]
        if not off:
            ready = [r for r in self.residents.values() if self._may_sit(r)]
            return min(ready, key=lambda r: r.stay.arrived_us, default=None)
        sharers = {r.task: r for r in self._sharers()}
        if not sharers:
            return off[0]  # an answer on its way may name one task less, but never none
        return sharers[self.rota.next_of(sharers, self._held_us(now))]

    def _seat_next(self) -> None:
        now = now_us()
        if self.seat is not None or now >= self.lease.trusted_until_us:
            return
        resident = self._next(now)
        if resident is None:
            return
        self.turn_over_us = now + TURN_US
        if resident.stay.is_off_the_seat:
            self._go_on(resident, now)
        else:
            self._begin(resident, now)

    def _go_on(self, resident: Resident, now: int) -> None:
        """Give the slot back to a resident for its next slice."""
        self.seat, resident.is_still = resident, False
        resident.send("go", seats=resident.stay.seats, linked=False)
        resident.stay.take_seat(now)

    def _begin(self, resident: Resident, now: int) -> None:
        stay, self.seat = resident.stay, resident
        resident.has_state, resident.is_still = True, False
        resident.was_absent(now)
        stay.seats, fds = stay.launch.seats, stay.hand_over()
        resident.send("go", fds, seats=stay.seats, linked=bool(fds))
        store_io.close_all(fds)
        stay.take_seat(now)
        stay.state = "running"
        stay.tell(
            messages.Started,
            now,
            preset=resident.preset,
            capabilities=resident.capabilities,
            resumed=stay.resumed,
            switch_us=now - max(self.seat_free_us, stay.arrived_us),
            input_bytes=stay.input_bytes,
            fetched_bytes=stay.fetched_bytes,
            ways=stay.ways,
        )
        if "function" in stay.launch.run:  # cannot pause, and may end in a moment
            self.rhythm.soon(now)
        else:
            self.rhythm.happened = True

    def _free_the_seat(self, resident: Resident) -> None:
        if self.seat is resident:
            now = now_us()
            resident.stay.leave_seat(now)
            self.seat, self.seat_free_us = None, now

    # --- residents: start ---

    def _spawn(self, stay: Stay, fetched: Fetched) -> None:
        assert self.zygote is not None
        self.last_id += 1
        room = self._room(str(self.last_id), fetched.code)
        wire, control = tenant_pair()
        bulk, bulk_end = socket.socketpair()
        peer_auth.wait_for(bulk, BULK_TIMEOUT_S)
        pipes = {"stdout": os.pipe(), "stderr": os.pipe()}
        writes = [write for _, write in pipes.values()]
        sockets = [control.fileno(), bulk_end.fileno()]
        given = [*sockets, self.trust.fd, *writes, fetched.slab]
        sort = "command" if "command" in stay.launch.run else "job"
        room = replace(room, groups=tuple(self.groups.make(str(self.last_id))))
        self.zygote.spawn(self.last_id, room, self.walls, given, sort)
        resident = Resident(
            id=self.last_id,
            task=stay.launch.task,
            wire=wire,
            bulk=bulk,
            slab=fetched.slab,
            pipes={read: name for name, (read, _) in pipes.items()},
            room=room,
            stay=stay,
            deadline_us=now_us() + PREPARE_US,
            saved=fetched.image,
        )
        resident.measure()
        store_io.close_all([control.detach(), bulk_end.detach(), *writes])
        self.residents[resident.id] = resident
        stay.resident = resident
        # Commands and remote ranks manage their own memory.
        resident.may_leave = not (resident.is_command or stay.is_outpost)
        stay.resumed = "fresh"
        if fetched.image:
            stay.resumed = "folder" if resident.is_command else "image"
        fds = [*fetched.fds, *stay.hand_over()]
        stay.input_bytes, stay.fetched_bytes = fetched.input_bytes, fetched.fetched_bytes
        stay.ways = fetched.ways
        resident.send("begin", fds, spec=self._spec(stay, room, fetched), files=len(fds))
        self._bring(stay)
        store_io.close_all(fds)
        self._selector.register(wire, selectors.EVENT_READ, lambda: self._resident_says(resident))
        for fd in resident.pipes:
            os.set_blocking(fd, False)
            self._listen_to(resident, fd)

    def _spec(self, stay: Stay, room: Room, fetched: Fetched) -> JSON:
        """Return the spec for the process."""
        launch = stay.launch
        code, scratch = room.inside(self.walls)
        return {
            "task": launch.task,
            "run": launch.run,
            "params": launch.params,
            "inputs": {
                port: {
                    "format": source.get("format", ""),
                    "datablock": source.get("datablock", ""),
                }
                for port, source in sorted(launch.inputs.items())
            },
            "outputs": launch.outputs,
            "publish": launch.publish,
            "preset": launch.preset,
            "kind": self.house.kind,
            "rank": 0,
            "world_size": launch.world_size,
            "seats": launch.seats,
            "host": launch.host,
            "code": str(code),
            "scratch": str(scratch),
            "image": fetched.image
            and {"step": fetched.image.step, "index_bytes": fetched.index_bytes},
            "checkpoint_every_s": launch.checkpoint_every_s,
            "memory_bytes": launch.memory_bytes,
            "lease_margin_s": self.house.lease_margin_s,
            "patience_s": self.house.patience_s,
        }

    @property
    def _passages(self) -> tuple[Path, ...]:
        """Our folders on the path to a resident's code and scratch folder."""
        run, folder = self.house.run, self.house.folder
        return run.parent, run, folder, folder / "code", folder / "scratch"

    def _room(self, name: str, code: Path | None = None) -> Room:
        """Make a sandbox directory for one resident, with its own user if we are root."""
        scratch = self.house.folder / "scratch" / name
        scratch.mkdir(mode=0o700, exist_ok=True)
        room = Room(
            code=code or self.house.folder / "code",
            scratch=scratch,
            uid=os.geteuid() if self.uids is None else self.uids.uid(self.last_id),
            kind=self.house.kind,
            passages=self._passages,
            tmp_bytes=self.house.tmp_bytes,
            template=self.template,
        )
        if self.uids is not None and (name == "probe" or "user" in self.walls):
            os.chown(scratch, room.uid, room.uid)
        return room

    def _spawned(self, message: JSON, pidfd: int) -> None:
        resident = self.residents[message["id"]]
        resident.pid, resident.pidfd = message["pid"], pidfd
        if resident.doom:
            resident.kill()

    def _listen_to(self, resident: Resident, fd: int) -> None:
        if resident.is_gone:
            return
        if fd == resident.wire.fileno():
            resident.is_muted = False
            says = partial(self._resident_says, resident)
            self._selector.register(fd, selectors.EVENT_READ, says)
        elif fd in resident.pipes:
            self._selector.register(fd, selectors.EVENT_READ, lambda: self._read(resident, fd))

    def _read(self, resident: Resident, fd: int) -> None:
        if fd not in resident.pipes:
            return  # its exit was handled in this round; the descriptor may be reused by now
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return
        stay_log = resident.stay.log
        if data:
            stay_log.write(resident.pipes[fd], data)
            self.rhythm.chatter = True
        if not data or stay_log.is_full:
            self._selector.unregister(fd)
        if not data:
            del resident.pipes[fd]
            os.close(fd)
        elif stay_log.is_full:
            self.muted.append((now_us() + MUTED_US, resident, fd))

    # --- residents: late inputs ---

    def _given(self, given: Given) -> None:
        stay = self.stays.get((given.task, given.epoch))
        if stay is not None:
            stay.is_given(given.port, given.source)
            self._bring(stay)

    def _bring(self, stay: Stay) -> None:
        """Fetch late inputs with a known location, once there is a process that can take them."""
        if (resident := stay.process) is None:
            return
        for port in (stay.lacks & stay.given.keys()) - stay.coming:
            stay.coming.add(port)
            self._fetch_late(resident, port, stay.given[port])

    def _fetch_late(self, resident: Resident, port: str, source: JSON) -> None:
        self._aside(
            lambda: store_io.opened_in_time(source, self.house, self.lookout.came),
            lambda opened: self._brought(resident, port, opened),
        )

    def _brought(
        self, resident: Resident, port: str, opened: tuple[int, str] | BaseException
    ) -> None:
        stay = resident.stay  # still of the same task
        if isinstance(opened, BaseException):
            self._lacks_for_good(stay, port, opened)
            return
        fd, way = opened
        if port in stay.lacks and not resident.is_gone:
            stay.lacks.discard(port)
            resident.send("block", [fd], port=port)
            self._tell_came(stay, port, way, os.fstat(fd).st_size)
        os.close(fd)

    def _tell_came(self, stay: Stay, port: str, way: str, size_bytes: int) -> None:
        if stay.is_started:
            stay.tell(messages.Came, now_us(), port=port, way=way, size_bytes=size_bytes)
        else:  # reported in its Started event, with its other inputs
            stay.ways = {**stay.ways, port: way}
            stay.input_bytes += size_bytes
            stay.fetched_bytes += size_bytes if way == "store" else 0

    def _lacks_for_good(self, stay: Stay, port: str, error: BaseException) -> None:
        """Fail a task with a late input that cannot be fetched, as if the input had been missing at
        launch.

        A task off its slot may still get the input later.
        """
        if stay.state not in ("seating", "running"):
            stay.given.pop(port, None)
            stay.coming.discard(port)
            return
        told = f"Its input {port} could not be fetched: {type(error).__name__}: {error}"
        self._vanish(stay, "unfetched")
        self._end(stay, messages.Failed, cause="store", message=told)

    def _says_awaits(self, resident: Resident, message: JSON) -> None:
        port = residents.late_input(resident, message, "port")
        if port in resident.stay.lacks:
            resident.stay.awaits = port
            self.rhythm.happened = True  # perhaps it was sent and the message was lost

    # --- residents: messages ---

    def _resident_says(self, resident: Resident) -> None:
        if resident.is_gone or resident.is_parsed or resident.is_muted:
            return  # its exit was handled in this round, or the rest is read later
        wire = resident.wire
        before = wire.read_bytes
        frames = self._hear_some(resident)
        muted_us = resident.heard(frames, wire.read_bytes - before, now_us())
        if wire.closed or resident.is_parsed:
            self._listen_no_more(resident)  # if closed, its exit will be reported
            return
        if resident.calm.left < 0:
            log.warning("task %s sends too many messages", resident.task)
            self._doom(resident, "flood")
        if muted_us or resident.doom:
            self._listen_no_more(resident)
        if muted_us and not resident.doom:
            resident.is_muted = True
            self.muted.append((now_us() + muted_us, resident, wire.fileno()))
        elif wire.has_more:
            self.unheard.append(resident)

    def _hear_some(self, resident: Resident) -> int:
        """Process a few of the resident's messages; return how many."""
        self.hearing = resident
        try:
            said = resident.wire.receive()
            if resident.wire.fds:
                raise Nonsense("it sent a file descriptor")
            resident.said += said
            self._take_said(resident)
        except (Garbled, Nonsense) as error:
            self._speaks_nonsense(resident, error)
            return 1
        finally:
            self.hearing = None
        return len(said)

    def _take_said(self, resident: Resident) -> None:
        while resident.said and not resident.doom and not resident.is_parsed:
            self._take(resident, resident.said.popleft())

    def _speaks_nonsense(self, resident: Resident, error: BaseException) -> None:
        if not resident.doom:
            log.warning("task %s sent a malformed message: %s", resident.task, error)
        self._doom(resident, "nonsense")

    def _listen_no_more(self, resident: Resident) -> None:
        if resident.wire in self._selector.get_map():
            self._selector.unregister(resident.wire)

    def _says_part(self, resident: Resident, message: JSON) -> None:
        """Add a part of a long message.  Another thread parses and checks the whole message."""
        body = resident.parts.add(message)
        if body is not None:
            resident.is_parsed = True
            self._aside(lambda: residents.whole(body), lambda told: self._parsed(resident, told))

    def _parsed(self, resident: Resident, told: tuple[JSON, JSON | None] | BaseException) -> None:
        """Process a parsed long message with its verdict, then the messages behind it."""
        resident.is_parsed = False
        try:
            if isinstance(told, BaseException):
                raise told
            message, resident.checked = told
            if not resident.doom:
                self._take(resident, message)
            self._take_said(resident)
        except (Garbled, Nonsense) as error:
            self._speaks_nonsense(resident, error)
        if resident.exit_status is not None:
            self._exited(resident, resident.exit_status)
        elif not (resident.wire.closed or resident.doom or resident.is_parsed):
            self._listen_to(resident, resident.wire.fileno())
            self.unheard.append(resident)

    def _take(self, resident: Resident, message: JSON) -> None:
        heard = _HEARD.get(message["is"])
        if heard is None:
            raise Nonsense(f"it says {message['is']!r:.100}")
        heard(self, resident, message)

    def _says_prepared(self, resident: Resident, message: JSON) -> None:
        if resident.is_prepared:
            raise Nonsense("prepared twice")
        resident.is_prepared = True
        resident.preset = residents.table(message, "preset")
        resident.capabilities = residents.words(message, "capabilities")
        resident.stay.step = residents.number(message, "step")
        if resident.stay.state == "pausing":
            self._paused(resident)
        elif resident.stay.is_outpost:
            self._join_home(resident)

    def _says_progress(self, resident: Resident, message: JSON) -> None:
        if self.seat is not resident:
            raise Nonsense("progress without a seat")
        resident.stay.step = residents.number(message, "step")
        resident.stay.metrics = residents.metrics(message)
        resident.stay.points = residents.points(message)
        resident.staged_us = residents.number(message, "staged_us")
        told = residents.number(message, "memory_bytes")
        spilled = residents.number({"spilled_bytes": 0, **message}, "spilled_bytes")
        house, now = self.house, now_us()
        resident.memory_bytes = resident.bounded_memory(told, house.memory_bytes, house.kind, now)
        resident.spilled_bytes = resident.bounded_spill(
            spilled, house.host_memory_bytes, house.kind, now
        )
        resident.measure()
        self.rhythm.chatter = True

    def _says_away(self, resident: Resident, message: JSON) -> None:
        self.residency.heard(resident, message)
        self.rhythm.chatter = True

    def _says_still(self, resident: Resident, message: JSON) -> None:
        resident.is_still = True

    def _says_moving(self, resident: Resident, message: JSON) -> None:
        resident.is_still = False

    def _says_paused(self, resident: Resident, message: JSON) -> None:
        may = {"pausing", "stopping"}
        lacks = residents.late_input(resident, message, "lacks") if "lacks" in message else ""
        may |= {"running"} if resident.stay.is_outpost or resident.yields or lacks else set()
        if self.seat is not resident or resident.stay.state not in may:
            raise Nonsense("paused without being told to")
        resident.stay.step = residents.number(message, "step")
        resident.has_state = message.get("has_state") is not False
        resident.is_still = resident.yields = False
        self._free_the_seat(resident)
        if resident.stay.state == "running" and not (resident.stay.is_outpost or lacks):
            return  # only its slice is over
        if resident.stay.state == "stopping":
            self._doom(resident, "cancel")
            return
        if resident.stay.state == "running" and lacks and lacks not in resident.stay.lacks:
            return  # the input has just arrived: it gets the slot again like after a slice
        self._paused(resident, lacks=lacks)

    def _says_resized(self, resident: Resident, message: JSON) -> None:
        seats, stay = residents.numbers(message, "seats"), resident.stay
        if self.seat is not resident or stay.wanted is None or seats != stay.wanted.seats:
            raise Nonsense(f"it sits on {seats} seats")
        stay.step = residents.number(message, "step")
        stay.seats, stay.wanted = seats, None
        stay.tell(messages.Resized, now_us(), seats=seats)
        self.rhythm.happened = True

    def _paused(self, resident: Resident, *, lacks: str = "") -> None:
        stay = resident.stay
        stay.state, resident.paused_us = "paused", now_us()
        stay.tell(messages.Paused, now_us(), lacks=lacks)
        if resident.saved is not None and resident.saved.step == stay.step:
            self._tell_saved(stay, resident.saved)
        self._let_hosts_go(resident)
        self.rhythm.happened = True

    def _let_hosts_go(self, resident: Resident) -> None:
        """End a paused multi-host gang with a durable image, to free memory on the other hosts."""
        stay = resident.stay
        if stay.state == "paused" and len(stay.seats) > 1 and resident.is_kept:
            self._vanish(stay, "evicted")

    def _says_saving(self, resident: Resident, message: JSON) -> None:
        what, step = residents.text(message, "what"), residents.number(message, "at_step")
        launch = resident.stay.launch
        if what.startswith("output:") and resident.may_give(what[7:]):
            self._says_output(resident, what[7:], message)
            return
        if resident.is_saving or what != "image":
            raise Nonsense(f"it saves {what!r:.100}")
        began_us = now_us()
        resident.saves += 1
        resident.measure()
        size = residents.number(message, "index_bytes")
        held, known, house = resident.slab, resident.known, self.house
        awaited = resident.stay.moves
        self._aside(
            lambda: store_io.keep(
                *(held, size, launch, step), known=known, house=house, awaited=awaited
            ),
            lambda written: self._image_stored(resident, step, began_us, written),
        )

    def _says_output(self, resident: Resident, name: str, message: JSON) -> None:
        size = residents.number(message, "size_bytes")
        head = residents.number({"head_bytes": 0, **message}, "head_bytes")
        if head > size:
            raise Nonsense(f"an output of {size} bytes with a head of {head}")
        if size > 2 * self.house.memory_bytes + 2**30:
            raise Nonsense(f"an output of {size} bytes")
        if any(one.name == name for one in resident.leaving):
            raise Nonsense(f"it gives {name!r:.100} twice")
        leaving = Leaving(
            name=name,
            size_bytes=size,
            head_bytes=head,
            early=message.get("early") is True and resident.is_awaited(name),
        )
        resident.leaving.append(leaving)
        self._store_next(resident)

    def _store_next(self, resident: Resident) -> None:
        """Store the resident's next output; it is read while the previous one becomes durable."""
        if resident.is_gone or resident.doom:
            return
        if resident.is_read or not resident.leaving or resident.saves >= SAVES_AT_ONCE:
            return
        resident.saves += 1
        resident.is_read = True
        resident.measure()
        bulk, house = resident.bulk, self.house
        one = resident.leaving.popleft()
        published = one.name in resident.stay.launch.publish
        keep = store_io.publish if published else store_io.store

        def read() -> None:
            self.receive(lambda: self._output_read(resident))

        pieces = store_io.received(bulk, one.size_bytes, read)
        self._aside(
            lambda: {**keep(pieces, one.size_bytes, house), "head_bytes": one.head_bytes},
            lambda stored: self._output_stored(resident, one, stored),
        )

    def _output_read(self, resident: Resident) -> None:
        resident.is_read = False
        self._store_next(resident)

    def _image_stored(
        self, resident: Resident, step: int, began_us: int, written: Written | BaseException
    ) -> None:
        resident.saves -= 1
        if isinstance(written, BaseException):
            self._not_stored(resident, "image", written)
        else:
            resident.send("kept", what="image")
            resident.saved = Saving(
                step=step,
                sha256=written.sha256,
                size_bytes=written.size_bytes,
                took_us=now_us() - began_us,
                new_bytes=written.new_bytes,
            )
            image = {"sha256": written.sha256, "step": step, "key": self.house.signer.public}
            _remember(self.kept, resident.task, (resident.stay.launch.epoch, image))
            self._tell_saved(resident.stay, resident.saved)
            self._let_hosts_go(resident)
        self._close_if_gone(resident)

    def _close_if_gone(self, resident: Resident) -> None:
        if resident.is_gone and not resident.is_saving:
            self.read_from.remove(resident)
            self._closer.submit(resident.close_stores)

    def _output_stored(
        self, resident: Resident, one: Leaving, stored: JSON | BaseException
    ) -> None:
        resident.saves -= 1
        if isinstance(stored, BaseException):
            self._not_stored(resident, f"output:{one.name}", stored)
        else:
            files = self._lies(resident, one, stored["sha256"])
            resident.send("kept", files, what=f"output:{one.name}", files=len(files))
            store_io.close_all(files)
            resident.outputs[one.name] = stored
            if one.early and not resident.is_gone:
                resident.stay.tell(messages.Stored, now_us(), output=one.name, kept=stored)
                self.rhythm.happened = True
        self._store_next(resident)
        self._close_if_gone(resident)

    def _lies(self, resident: Resident, one: Leaving, sha256: str) -> list[int]:
        """The descriptor of the cache file of a large output, for a part of a graph that still
        holds it in memory; empty if there is none.
        """
        if not one.early or one.size_bytes < LIES_BYTES or resident.stay.launch.world_size > 1:
            return []
        if one.name in resident.stay.launch.publish:
            return []  # published outputs are stored in another format
        fd = self.house.cache.held(sha256)
        return [] if fd is None else [fd]

    def _not_stored(self, resident: Resident, what: str, error: BaseException) -> None:
        if resident.is_gone or resident.doom:
            return
        log.error("task %s: cannot store its %s: %s", resident.task, what, error)
        if isinstance(error, OutOfStep):
            self._doom(resident, "nonsense")
            return
        resident.send("kept", what=what, error=str(error), files=0)
        if what == "image":
            resident.save_again_us = now_us() + SAVE_AGAIN_US

    def _tell_saved(self, stay: Stay, saved: Saving) -> None:
        stay.tell(
            messages.Saved,
            now_us(),
            step=saved.step,
            sha256=saved.sha256,
            size_bytes=saved.size_bytes,
            took_us=saved.took_us,
            new_bytes=saved.new_bytes,
        )
        # While co-located tasks take turns, the next report comes soon and includes this event.
        self.rhythm.chatter = True
        self.rhythm.happened |= self.seat is None

    def _says_last(self, resident: Resident, message: JSON) -> None:
        """Keep the final message until the process has ended, and all its output was read."""
        if message["is"] == "stopped" and resident.stay.state != "stopping":
            raise Nonsense("stopped without being told to")
        resident.stay.step = residents.number(message, "step")
        resident.verdict = resident.checked or residents.verdict(message)
        resident.checked = None

    # --- residents: end ---

    def _doom(self, resident: Resident, why: str) -> None:
        if not resident.doom:
            resident.doom = why
            resident.kill()

    def _vanish(self, stay: Stay, why: str) -> None:
        """Drop the stay silently: no event is sent."""
        stay.state = "vanished"
        self._expect_no_more(stay)
        if stay.resident is not None and stay.resident.stay is stay:
            self._doom(stay.resident, why)
        self.rhythm.happened = True

    def _end(self, stay: Stay, kind: type[messages.Event], **said: Any) -> None:
        stay.tell(kind, now_us(), **said)
        stay.state = "ended"
        self._expect_no_more(stay)
        self.rhythm.happened = True

    def _exited(self, resident: Resident, status: int) -> None:
        self._hear_the_rest(resident)
        if resident.is_parsed:  # another thread parses its final message
            resident.exit_status = status
            return
        self._free_the_seat(resident)
        stay = resident.stay
        stay.log.end()
        resident.is_gone = True
        del self.residents[resident.id]
        resident.refused = self.groups.refused(str(resident.id))
        self.groups.remove(str(resident.id))
        resident.close()
        self._closer.submit(resident.wire.close)
        if resident.is_saving:
            self.read_from.append(resident)
        else:
            self._closer.submit(resident.close_stores)
        self._sweeper.submit(remove_tree, resident.room.scratch)
        gone = stay.state in ("vanished", "paused")
        if resident.doom in _SILENT or gone or stay.is_outpost:
            self._vanish(stay, resident.doom)
        else:
            last = _last_word(resident, status)
            self._end(stay, last.pop("is"), **last)

    def _hear_the_rest(self, resident: Resident) -> None:
        self._listen_no_more(resident)
        for _ in range(READS_AT_THE_END):
            if resident.wire.closed or resident.is_parsed or resident.doom in _MAY_SAY_NO_MORE:
                break
            self._hear_some(resident)
        registered = self._selector.get_map()
        self.muted = [item for item in self.muted if item[1] is not resident]
        for fd in (*resident.pipes, resident.pidfd):
            if fd is not None and fd in registered:
                self._selector.unregister(fd)
        _read_printed(resident)

    # --- reports ---

    def _may_report(self) -> bool:
        """True once the device can work: a device that reports is given work."""
        return "torch" in self.facts

    def _report_if_due(self) -> None:
        now = now_us()
        if self._may_report() and now >= self.rhythm.due_us(self.lease.answered_us):
            self.rhythm.reported(now)
            self.pulse.say(self._alive())

    def _alive(self, *, leaving: bool = False) -> Alive:
        now = now_us()
        for resident in self.residents.values():
            resident.measure()
        stays = list(self.stays.values())
        held = [] if leaving else [s.view(now) for s in stays if s.state != "vanished"]
        return Alive(
            device=self.house.device,
            incarnation=self.house.incarnation,
            sent_us=now,
            facts={**self.facts, **self._facts_now(leaving)},
            residents=held,
            events=[event for stay in stays for event in stay.events],
            logs=log_lines(stays, LOGS_LIMIT_BYTES),
            ahead=self.lookout.view(),
            links=self.links.place,
            secret=self.giver.secret,
            hung=self.hung,
        )

    def _facts_now(self, leaving: bool) -> JSON:
        held = {"held_bytes": self.residency.by_tenant()}
        return {**held, "leaving": True} if leaving else held

    # --- work in other threads ---

    def _look_around(self) -> None:
        """Make the next report due now.  Called from another thread."""
        self.receive(self._something_happened)

    def _something_happened(self) -> None:
        self.rhythm.happened = True

    def _aside(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Run `work` in another thread, then `then` in this one, with its result or its error."""

        def done(future: Future[Any]) -> None:
            if not future.cancelled():
                error = future.exception()
                self.receive(lambda: then(future.result() if error is None else error))

        self._hands.submit(work).add_done_callback(done)


_HEARD: dict[str, Callable[[Supervisor, Resident, JSON], None]] = {
    "part": Supervisor._says_part,
    "prepared": Supervisor._says_prepared,
    "progress": Supervisor._says_progress,
    "away": Supervisor._says_away,
    "still": Supervisor._says_still,
    "moving": Supervisor._says_moving,
    "resized": Supervisor._says_resized,
    "paused": Supervisor._says_paused,
    "awaits": Supervisor._says_awaits,
    "saving": Supervisor._says_saving,
    "failed": Supervisor._says_last,
    "finished": Supervisor._says_last,
    "stopped": Supervisor._says_last,
}


# --- helpers --------------------------------------------------------------------------------------


def _can_go_on(resident: Resident, launch: Launch) -> bool:
    """True if the resident's state in memory is at least as new as the newest checkpoint."""
    stay = resident.stay
    return stay.state == "paused" and resident.step >= _newest_step(launch)


def _newest_step(launch: Launch) -> int:
    """Return the step of the newest checkpoint that the launch names; 0 without one."""
    return launch.images[0]["step"] if launch.images else 0


def _remember(table: dict[str, Any], task: str, value: Any) -> None:
    """Set the task's value; keep only the REMEMBERED tasks that were set last."""
    table.pop(task, None)
    table[task] = value
    if len(table) > REMEMBERED:
        del table[next(iter(table))]


def _begin_again(resident: Resident, stay: Stay) -> None:
    before = resident.stay
    before.log.end()
    before.state = "ended"
    stay.goes_on_from(before)
    stay.resumed, stay.resident, resident.stay = "resident", resident, stay
    stay.unstaged_us = resident.staged_us


def _last_word(resident: Resident, status: int) -> JSON:
    """Return the final event of a stay from the process's final message and the way it ended."""
    said, doom = resident.verdict, resident.doom
    if said is not None and said["is"] is messages.Finished:
        return {**said, "outputs": resident.outputs}
    if doom == "cancel" or resident.stay.state == "stopping":
        return {"is": messages.Stopped}
    if said is not None and not doom:
        if resident.refused and said["is"] is messages.Failed:
            said = {**said, "message": f"{resident.refused} {said['message']}"}
        if resident.is_command and said["is"] is messages.Failed:
            detail = said["detail"] or "\n".join(resident.stay.log.last)
            return {**said, "detail": detail, "outputs": resident.artifacts}
        return said
    cause = {"max_duration": "max_duration", "slow": "bundle"}.get(doom, "exit")
    told = _how_it_ended(doom, status, resident.refused)
    return {"is": messages.Failed, "cause": cause, "message": told}


def _how_it_ended(doom: str, status: int, refused: str) -> str:
    match doom:
        case "max_duration":
            return "It held its device for max_duration_s and was ended."
        case "slow":
            return f"Importing its code took more than {PREPARE_US // 1000000} s."
        case "nonsense":
            return "Its process sent an invalid message."
        case "flood":
            return (
                "Its process sent messages faster than its device worker could read them, for too "
                "long."
            )
        case "deaf":
            seconds = residents.UNREAD_US // 1_000_000
            return f"Its process did not read messages of its device worker for {seconds} s."
    if status == CANNOT_START:
        return "This device could not start its process; see the log of the device."
    number = -status if status < 0 else status - 128 if status > 128 else 0
    if number == 9:
        return refused or "Its process was killed (SIGKILL); perhaps it ran out of memory."
    told = f"Its process died from signal {number}."
    if not number:
        told = f"Its process exited by itself, with status {status}."
    return f"{refused} {told}" if refused else told


def _read_printed(resident: Resident) -> None:
    """Log all that the process has printed until now."""
    for fd, name in resident.pipes.items():
        for _ in range(READS_AT_THE_END):  # a living process may print without end
            if not (data := _read_now(fd)):
                break
            resident.stay.log.write(name, data)


def _read_now(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 16)
    except BlockingIOError:
        return b""
