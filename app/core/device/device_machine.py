"""Decides what a device does: takes events and returns instructions, but touches no device.

The machine has all stays and processes of the device, its slot, its lease, and the turns of tasks
that share it. The supervisor (`workers.device.supervisor`) gives it every event with the present
time, and carries out its instructions in their order. The machine does no I/O and reads no clock.

What holds after every event (`validate`; tests/core/device): * The processes in the slot take at
most the whole device together: one process, or fractions. Each got the slot while the device's
lease was trusted, and in a stay that the island had confirmed. * A stale or repeated order or
answer changes nothing. * A stay is over once: it reports one end, or it is dropped without a
report. * A process has one kill reason, and gets no message after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

from app.core.device.device_events import (
    AnswerCame,
    ContinueProcess,
    DeadlinesDue,
    DeviceEvent,
    DropAsked,
    DropStay,
    ExpectHosts,
    ExtendTrust,
    FetchInputs,
    ForgetHosts,
    ForgetStay,
    GiveNotice,
    GiveSlot,
    HostsJoined,
    HostsMissed,
    ImageKept,
    Instruction,
    KillAsked,
    KillProcess,
    LeaveAsked,
    OpenStay,
    OrderCame,
    PauseAsked,
    ProcessBegan,
    ProcessConcluded,
    ProcessEnding,
    ProcessEvent,
    ProcessExited,
    ProcessPaused,
    ProcessPrepared,
    ProcessProgressed,
    ProcessRenewed,
    ProcessResized,
    ProcessStood,
    ReportDue,
    ReportSoon,
    SendWord,
    SlotDue,
    StayForgotten,
    StayKey,
    TaskUnable,
    TellIsland,
    TellSaved,
    TellVerdict,
)
from app.core.device.device_records import BEHIND_US, ProcessRecord, StayRecord
from app.core.device.device_story import DeviceStory
from app.core.device.lease import Lease, grace_for
from app.core.device.slot_turns import SlotTurns
from app.core.device.stay_state import ACTIVE, StayMove, StayState, state_after
from app.core.model.protocol import messages
from app.core.model.protocol.messages import (
    Answer,
    Cancel,
    Launch,
    LeaseRenewal,
    Order,
    Pause,
    ReportWanted,
    Resize,
    Save,
)
from app.core.model.provisions.notice import NoticeReason
from app.core.scheduling.sharing.turns import Rota

PREPARE_US = 120_000_000  # time limit to import a tenant's code and restore its image
HANDOVER_US = 2_000_000  # how long a successor may prepare while its predecessor still runs
FINISH_US = 10_000_000  # time limit to end all processes of a command
ENDING_US = 120_000_000  # time limit to store what an ended command leaves, beyond its limits
REST_US = 5_000_000  # in microseconds: how long a process waits for another function to run in it
REMEMBERED = 10_000  # most tasks whose newest launch is known; the island stops older epochs

#: Kill reasons that are limits of the task. A command may still store what it has written.
LIMIT_REASONS = frozenset({"host_memory", "device_memory"})

#: Kill reasons for which no event is sent: the island notices that the resident is gone.
SILENT_REASONS = frozenset(
    {"evicted", "dropped", "replaced", "lease", "zygote", "leaving", "unfetched", "damaged"}
)


class DeviceMachine:
    """Holds the state of one device; `handle` is the only method that changes it."""

    def __init__(
        self, device: str, incarnation: str, *, lease_margin_us: int, stop_grace_us: int
    ) -> None:
        self.device, self.incarnation = device, incarnation
        self.lease_margin_us, self.stop_grace_us = lease_margin_us, stop_grace_us
        self.lease = Lease()
        self.stays: dict[StayKey, StayRecord] = {}
        self.processes: dict[int, ProcessRecord] = {}
        self.newest: dict[str, tuple[int, int]] = {}  # task -> epoch and seq of its latest Launch
        self.slot = SlotTurns(self.stays, self.processes)
        self.story = DeviceStory(self.stays, self.processes)
        self.is_leaving = False
        self._out: list[Instruction] = []
        self._handlers: dict[type[DeviceEvent], Callable[[Any, int], None]] = {
            OrderCame: self._order_came,
            AnswerCame: self._answer_came,
            StayForgotten: self._stay_forgotten,
            HostsJoined: self._hosts_joined,
            HostsMissed: self._hosts_missed,
            TaskUnable: self._task_unable,
            DropAsked: self._drop_asked,
            PauseAsked: self._pause_asked,
            KillAsked: self._kill_asked,
            LeaveAsked: self._leave_asked,
            DeadlinesDue: self._deadlines_due,
            ReportDue: self._report_due,
            SlotDue: self._slot_due,
            ProcessBegan: self._process_began,
            ProcessRenewed: self._process_renewed,
            ProcessPrepared: self._process_prepared,
            ProcessPaused: self._process_paused,
            ProcessProgressed: self._process_progressed,
            ProcessStood: self._process_stood,
            ProcessResized: self._process_resized,
            ProcessEnding: self._process_ending,
            ProcessConcluded: self._process_concluded,
            ImageKept: self._image_kept,
            ProcessExited: self._process_exited,
        }

    def handle(self, event: DeviceEvent, now_us: int) -> list[Instruction]:
        """Take one event; return what is to be done about it."""
        if isinstance(event, ProcessEvent) and event.process not in self.processes:
            return []  # the process has exited
        about = self.story.stay_of(event)
        self._handlers[type(event)](event, now_us)
        self.slot.claim(now_us)
        out, self._out = self._out, []
        self.story.tell(event, about, out, now_us)
        return out

    # --- looking ---

    def living(self, task: str) -> ProcessRecord | None:
        """Return the task's living process, if any.

        Remote ranks don't count, as they end with their coordinator host.
        """
        alive = (p for p in self.processes.values() if p.task == task and not p.kill_reason)
        return next((p for p in alive if not (p.stay.is_remote or p.is_resting)), None)

    @property
    def is_followed(self) -> bool:
        """True while functions wait behind another function of their batch."""
        stays = self.stays.values()
        return any(s.behind_until_us is not None and s.state == StayState.SEATING for s in stays)

    def accepts(self, launch: Launch) -> bool:
        """True if the launch is meant for this process of the device, and newer than all before."""
        is_ours = launch.incarnation in ("", self.incarnation)
        is_new = (launch.epoch, launch.seq) > self.newest.get(launch.task, (0, 0))
        return is_ours and is_new and not self.is_leaving

    def is_fresh(self, answer: Answer | LeaseRenewal | ReportWanted) -> bool:
        """True if the answer is meant for this process, and newer than all before.

        A newer answer contains everything that still holds, so a late or repeated answer changes
        nothing.
        """
        is_ours = (answer.device, answer.incarnation) == (self.device, self.incarnation)
        return is_ours and answer.sent_us > self.lease.answered_us

    def due_us(self, now_us: int) -> int | None:
        """Return when time alone changes something, or None."""
        alive = [process for process in self.processes.values() if not process.kill_reason]
        due = [process.kill_us for process in alive if process.kill_us is not None]
        due += [process.deadline_us for process in alive if not process.is_prepared]
        due += [p.rests_until_us for p in alive if p.rests_until_us is not None]
        due += [s.yield_by_us for s in self.stays.values() if s.yield_by_us is not None]
        due += [s.behind_until_us for s in self._behind() if s.behind_until_us is not None]
        due += [s.noticed_until_us for s in self.stays.values() if s.noticed_until_us is not None]
        holders = [holder for holder in self.slot.holders if not holder.kill_reason]
        for holder in holders:
            due.append(now_us + self._until_limit_us(holder, now_us))
            due += [] if holder.is_still else [self.lease.work_ends_us]
        if holders and (turn_us := self.slot.due_us()) is not None:
            due.append(turn_us)
        return min(due, default=None)

    # --- orders ---

    def _order_came(self, event: OrderCame, now_us: int) -> None:
        order = event.order
        if isinstance(order, Launch):
            if self.accepts(order):
                self._launch(order, now_us)
            return
        stay = self.stays.get((order.task, order.epoch))
        if stay is None or order.seq <= stay.order_seq:
            return  # not known yet (the island sends it again), or already obeyed
        if isinstance(order, Cancel):
            stay.order_seq = order.seq  # orders that the cancel overtook no longer matter
            self._cancel(stay, now_us)
            return
        stay.early[order.seq] = order
        while (following := stay.early.pop(stay.order_seq + 1, None)) is not None:
            stay.order_seq += 1
            self._obey(stay, following, now_us)

    def _launch(self, launch: Launch, now_us: int) -> None:
        self.newest.pop(launch.task, None)
        self.newest[launch.task] = launch.epoch, launch.seq
        if len(self.newest) > REMEMBERED:
            del self.newest[next(iter(self.newest))]
        stay = StayRecord.of(launch, now_us)
        # The launch is so fresh that the island could only answer "keep".
        stay.is_confirmed = (
            launch.incarnation == self.incarnation and now_us < launch.surely_until_us
        )
        before = self.living(launch.task)
        for older in self._without_process(launch.task):
            self._drop(older, "replaced")
        # A resize sends the other hosts another launch of the same epoch. If the ranks of the old
        # stay run there already, both stays exist until the ranks have moved.
        same = self.stays.get(stay.key)
        if same is not None and same.state == StayState.SEATING:
            self._drop(same, "replaced")
        self.stays[stay.key] = stay
        self._say(OpenStay(launch=launch))
        # The island sends the share of a co-located task only after a report that names the task.
        is_awaited = launch.beside and stay.behind_until_us is None
        self._say(ReportSoon(is_urgent=not stay.is_confirmed or is_awaited))
        if not stay.is_remote:
            self._say(ExpectHosts(stay=stay.key, slots=launch.seats, how=launch.links))
        if before is not None and _can_go_on(before, launch):
            self._continue(before, stay)
            return
        if before is not None and _must_save(before, launch):
            stay.waits_for_image = True
            return
        if before is not None:
            self._drop(before.stay, "replaced")
        self._say(FetchInputs(stay=stay.key))

    def _let_follow(self, process: ProcessRecord) -> None:
        """Let a launch begin that has waited for the last image of this process of its task."""
        for stay in self._without_process(process.task):
            if stay.waits_for_image:
                stay.waits_for_image = False
                if not process.stay.is_over:
                    self._drop(process.stay, "replaced")
                self._say(FetchInputs(stay=stay.key))

    def _without_process(self, task: str) -> list[StayRecord]:
        """Return the stays of the task that are being fetched."""
        seating = (s for s in self.stays.values() if s.state == StayState.SEATING)
        return [s for s in seating if s.task == task and s.process is None and not s.is_remote]

    def _continue(self, process: ProcessRecord, stay: StayRecord) -> None:
        before, stay.step = process.stay, process.stay.step
        self._move(before, StayMove.CONTINUE)
        process.stay, stay.process = stay, process
        self._say(ContinueProcess(process=process.id, stay=stay.key))

    def _obey(self, stay: StayRecord, order: Order, now_us: int) -> None:
        if _yields(order) and stay.state == StayState.RUNNING:
            stay.successor, stay.yield_by_us = order.successor, now_us + HANDOVER_US
            self._say(ReportSoon(is_urgent=False))  # its Paused event follows soon
            return
        self._say(ReportSoon(is_urgent=True))
        if isinstance(order, Pause):
            stay.is_moving = order.moves
            self._pause_after(order.notice_us, order.why, stay, now_us)
        elif isinstance(order, Save):
            self._save(stay)
        elif isinstance(order, Resize) and stay.state == StayState.RUNNING:
            stay.wanted = order
            self._say(ExpectHosts(stay=stay.key, slots=order.seats, how=order.links, resize=order))

    def _pause_after(self, notice_us: int, why: str, stay: StayRecord, now_us: int) -> None:
        """Pause the task. If it has the slot and asked for a notice, give the notice first."""
        process = stay.process
        may_hear = stay.state in ACTIVE and stay.notice_us > 0
        if notice_us <= 0 or not may_hear or process is None or not self.slot.has(process):
            self._pause(stay, now_us)
            return
        until_us = now_us + min(notice_us, stay.notice_us)
        if stay.noticed_until_us is not None:
            until_us = min(until_us, stay.noticed_until_us)
        stay.noticed_until_us = until_us
        self._notice(process, why, until_us)

    def _notice(self, process: ProcessRecord, why: str, until_us: int) -> None:
        stay = process.stay
        if stay.state == StayState.RUNNING:
            self._move(stay, StayMove.NOTICE)
        stay.noticed = why
        if not process.kill_reason:
            self._say(GiveNotice(process=process.id, why=why, until_us=until_us))

    def _pause(self, stay: StayRecord, now_us: int) -> None:
        process, stay.noticed_until_us = stay.process, None
        self._say(ForgetHosts(stay=stay.key))
        if stay.state in ACTIVE and process is not None:
            is_between_slices = stay.is_between_slices
            self._move(stay, StayMove.PAUSE)
            self._send(process, "pause")
            if stay.is_moving:
                self._send(process, "save")  # without delay, as another device waits for it
            if is_between_slices:
                self._paused(process, now_us)
        elif stay.state == StayState.SEATING and process is None:
            self._say(TellIsland(stay=stay.key, kind=messages.Paused))
            self._drop(stay, "dropped")
        elif stay.state == StayState.SEATING and process is not None:
            self._move(stay, StayMove.PAUSE)
            if process.is_prepared:
                self._paused(process, now_us)

    def _paused(self, process: ProcessRecord, now_us: int, **details: Any) -> None:
        stay = process.stay
        self._move(stay, StayMove.PAUSED)
        process.paused_us = now_us
        self._say(TellIsland(stay=stay.key, kind=messages.Paused, details=details))
        if process.saved_step == stay.step:
            self._say(TellSaved(process=process.id))
        self._let_hosts_go(process)
        self._say(ReportSoon(is_urgent=True))

    def _save(self, stay: StayRecord) -> None:
        process = stay.process
        if process is None or stay.state not in ACTIVE | {StayState.PAUSED}:
            return  # a Pause in progress also saves
        if stay.state == StayState.PAUSED and process.saved_step == stay.step:
            self._say(TellSaved(process=process.id))
        else:
            self._send(process, "save")

    def _cancel(self, stay: StayRecord, now_us: int) -> None:
        self._say(ReportSoon(is_urgent=True))
        if stay.is_over:
            return
        self._say(ForgetHosts(stay=stay.key))
        process = stay.process
        if process is None:
            self._end(stay, messages.Stopped)
            return
        if stay.state != StayState.STOPPING:
            self._move(stay, StayMove.CANCEL)
        # a command without the slot runs no more, but stores what it has written
        if self.slot.has(process) or (process.is_command and process.has_state):
            self._send(process, "cancel")
            process.kill_us = now_us + self.stop_grace_us
        else:
            self._kill(process, "cancel")

    # --- answers ---

    def _answer_came(self, event: AnswerCame, now_us: int) -> None:
        answer = event.answer
        if not self.is_fresh(answer):
            return
        for task, epoch in answer.drop:  # done first, as they may run elsewhere by now
            self._drop_stale(task, epoch)
        for task, epoch in answer.keep:
            stay = self.stays.get((task, epoch))
            if stay is not None and not stay.is_confirmed:
                stay.is_confirmed = True
                self.story.note(now_us, task, epoch, AnswerCame, "confirmed")
        self.lease = self.lease.after(answer, margin_us=self.lease_margin_us)
        self._say(ExtendTrust(until_us=self.lease.trusted_until_us))
        if answer.rota is not None:
            self.slot.rota = Rota.of(answer.rota)
        for holder in self.slot.holders:
            if holder.is_still:
                self._send(holder, "look")

    def _drop_stale(self, task: str, epoch: int) -> None:
        stay = self.stays.get((task, epoch))
        if stay is not None:
            if not stay.is_over:
                self._drop(stay, "dropped")
            self._forget((task, epoch))
        for process in self.processes.values():  # remote ranks that another device has replaced
            if process.stay.is_remote and process.stay.key == (task, epoch):
                self._kill(process, "dropped")

    def _stay_forgotten(self, event: StayForgotten, now_us: int) -> None:
        stay = self.stays.get(event.stay)
        if stay is not None and stay.is_over:
            self._forget(event.stay)

    def _forget(self, key: StayKey) -> None:
        del self.stays[key]
        self._say(ForgetStay(stay=key))

    # --- requests of the supervisor ---

    def _hosts_joined(self, event: HostsJoined, now_us: int) -> None:
        stay = self.stays.get(event.stay)
        if stay is None:
            return
        stay.is_linked = True
        process = stay.process
        if stay.wanted is not None and process is not None and process.stay is stay:
            self._send(process, "resize")

    def _hosts_missed(self, event: HostsMissed, now_us: int) -> None:
        stay = self.stays.get(event.stay)
        if stay is None:
            return
        self._say(ForgetHosts(stay=stay.key), ReportSoon(is_urgent=True))
        if stay.wanted is not None:
            stay.wanted = None
            slots = {"seats": stay.slots}
            self._say(TellIsland(stay=stay.key, kind=messages.Resized, details=slots))
        elif stay.state == StayState.SEATING:
            self._fail(stay, "host", event.told, "unlinked")

    def _task_unable(self, event: TaskUnable, now_us: int) -> None:
        stay = self.stays.get(event.stay)
        if stay is not None and not stay.is_over:
            self._fail(stay, event.cause, event.told, event.reason)

    def _drop_asked(self, event: DropAsked, now_us: int) -> None:
        stay = self.stays.get(event.stay)
        if stay is not None and not stay.is_over:
            self._drop(stay, event.reason)

    def _pause_asked(self, event: PauseAsked, now_us: int) -> None:
        stay = self.stays.get(event.stay)
        if stay is not None:
            self._pause(stay, now_us)

    def _kill_asked(self, event: KillAsked, now_us: int) -> None:
        process = self.processes[event.process]
        if event.reason not in LIMIT_REASONS or not process.is_command:
            self._kill(process, event.reason)
        elif not process.stop_reason:  # else it is ending already
            process.stop_reason = event.reason
            self._finish(process, now_us)

    def _finish(self, process: ProcessRecord, now_us: int) -> None:
        """Have the stub of a command end it and store what it has written."""
        self._send(process, "finish")
        process.ending_until_us = process.kill_us = now_us + FINISH_US

    def _leave_asked(self, event: LeaveAsked, now_us: int) -> None:
        self.is_leaving = True
        for stay in list(self.stays.values()):
            if stay.state == StayState.SEATING:
                self._drop(stay, "leaving")
            elif stay.state in ACTIVE:
                left_us = event.pause_by_us - now_us
                self._pause_after(left_us, NoticeReason.SHUTDOWN, stay, now_us)
        for process in self.processes.values():
            if process.is_resting:
                self._kill(process, "rested")

    # --- time ---

    def _deadlines_due(self, event: DeadlinesDue, now_us: int) -> None:
        for process in list(self.processes.values()):
            if process.kill_us is not None and now_us >= process.kill_us:
                self._end_slow(process, now_us)
            elif not process.is_prepared and now_us >= process.deadline_us:
                self._kill(process, "slow")
            elif process.rests_until_us is not None and now_us >= process.rests_until_us:
                self._kill(process, "rested")
        behind = [(stay, stay.behind_until_us) for stay in self._behind()]
        noticed = [(stay, stay.noticed_until_us) for stay in self.stays.values()]
        for stay, until_us in (*behind, *noticed):
            if until_us is not None and now_us >= until_us:
                self._pause(stay, now_us)
        for holder in list(self.slot.holders):
            if self._until_limit_us(holder, now_us) <= 0:
                self._reach_limit(holder, now_us)
            if self.lease.is_over(now_us) and not holder.is_still:
                self._kill(holder, "lease")

    def _behind(self) -> list[StayRecord]:
        """Return the functions that wait behind a task in the slot."""
        if not self.slot.holders:
            return []
        waiting = (s for s in self.stays.values() if s.behind_until_us is not None)
        return [stay for stay in waiting if stay.state == StayState.SEATING]

    def _end_slow(self, process: ProcessRecord, now_us: int) -> None:
        """End a process that was told to end and has not."""
        if process.is_command and not process.ending_until_us:
            self._finish(process, now_us)
        else:
            self._kill(process, process.stop_reason or "cancel")

    def _until_limit_us(self, holder: ProcessRecord, now_us: int) -> int:
        """Return the time until the task must get its notice, or must end because of
        `max_duration_s`.
        """
        stay = holder.stay
        if holder.kill_us is not None:
            return holder.kill_us - now_us
        left_us = stay.left_us(now_us)
        if stay.state == StayState.RUNNING and not holder.ending_until_us:
            return left_us - stay.notice_us
        return max(left_us, holder.ending_until_us - now_us)

    def _reach_limit(self, holder: ProcessRecord, now_us: int) -> None:
        stay = holder.stay
        left_us = stay.left_us(now_us)
        if holder.kill_us is not None:
            return  # it is killed at its own deadline
        if left_us > 0 and stay.state == StayState.RUNNING:
            self._notice(holder, NoticeReason.MAX_DURATION, now_us + left_us)
        elif holder.is_command and not holder.ending_until_us:
            holder.stop_reason, holder.kill_us = "max_duration", now_us + self.stop_grace_us
            self._send(holder, "over")
        else:
            self._kill(holder, "max_duration")

    def _report_due(self, event: ReportDue, now_us: int) -> None:
        steps_us = (holder.longest_step_us(now_us) for holder in self.slot.holders)
        self.lease = self.lease.asking(grace_for(max(steps_us, default=0)), now_us)

    def _slot_due(self, event: SlotDue, now_us: int) -> None:
        for process in self.processes.values():
            process.is_away = process.id in event.away
        self._give_way(event, now_us)
        if self.slot.holder is not None and self.slot.is_turn_over(now_us):
            self.slot.holder.yields = True
            self._send(self.slot.holder, "yield")
        while self._fill_slot(now_us):
            pass  # the next fraction may fit, too

    def _give_way(self, event: SlotDue, now_us: int) -> None:
        """Pause each task that must yield the slot, as soon as its successor is ready, or cannot
        get ready before that, or as soon as its time is over.
        """
        for stay in list(self.stays.values()):
            if stay.yield_by_us is None:
                continue
            if now_us >= stay.yield_by_us or self._is_ready_or_stuck(stay.successor, event):
                stay.yield_by_us = None
                if stay.state in ACTIVE:
                    self._pause(stay, now_us)

    def _is_ready_or_stuck(self, task: str, event: SlotDue) -> bool:
        if task in event.waiting:
            return event.is_short  # stuck until the task in the slot yields its memory
        process = self.living(task)
        if process is None or process.stay.state != StayState.SEATING:
            return False  # its Launch has not arrived yet, or it was dropped
        if process.is_away:
            return event.is_short
        return process.is_prepared and process.stay.is_confirmed

    def _fill_slot(self, now_us: int) -> bool:
        """Give the slot to the next process that fits into it; False if none does."""
        if not self.slot.free_milli or not self.lease.permits_steps(now_us):
            return False
        process = self.slot.next_process(now_us)
        if process is None:
            return False
        stay = process.stay
        is_first = not stay.is_between_slices
        waited_us = now_us - max(self.slot.free_since_us, stay.arrived_us) if is_first else 0
        if is_first:
            self._move(stay, StayMove.BEGIN)
            stay.slots, process.has_state = stay.launch_slots, True
        self.slot.take(process, now_us)
        if process.ending_until_us:  # it only stores what it left, and may take its time for that
            process.ending_until_us = now_us + ENDING_US
        self._limit_waits_behind(stay, now_us)
        self._say(GiveSlot(process=process.id, is_first=is_first, waited_us=waited_us))
        return True

    def _limit_waits_behind(self, function: StayRecord, now_us: int) -> None:
        """Give back, after a while, the head of a batch that a function of the batch has overtaken,
        as the function's inputs or process were ready earlier.
        """
        if function.behind_until_us is None:
            return
        for stay in self.stays.values():
            is_head = stay.is_function and stay.behind_until_us is None
            is_overtaken = stay.state == StayState.SEATING
            if is_head and is_overtaken and stay.arrived_us <= function.arrived_us:
                stay.behind_until_us = now_us + BEHIND_US

    # --- processes ---

    def _process_began(self, event: ProcessBegan, now_us: int) -> None:
        stay = self.stays[event.stay]
        process = ProcessRecord(event.process, stay.task, stay, now_us + PREPARE_US)
        process.is_command, process.saved_step = event.is_command, event.saved_step
        self.processes[process.id] = stay.process = process

    def _process_renewed(self, event: ProcessRenewed, now_us: int) -> None:
        process = self.processes[event.process]
        process.begin_again(self.stays[event.stay], now_us + PREPARE_US)

    def _process_prepared(self, event: ProcessPrepared, now_us: int) -> None:
        process = self.processes[event.process]
        if process.is_prepared:
            self._reject(process, "prepared twice")
            return
        process.is_prepared, process.stay.step = True, event.step
        if process.stay.state == StayState.PAUSING:
            self._paused(process, now_us)

    def _process_progressed(self, event: ProcessProgressed, now_us: int) -> None:
        process = self.processes[event.process]
        if self.slot.has(process):
            if event.step > process.stay.step:
                process.stepped(event.step - process.stay.step, now_us)
            process.stay.step = event.step
        else:
            self._reject(process, "progress without a slot")

    def _process_stood(self, event: ProcessStood, now_us: int) -> None:
        process = self.processes[event.process]
        if process.is_still and not event.is_still:
            process.step_since_us = now_us
        process.is_still = event.is_still

    def _process_paused(self, event: ProcessPaused, now_us: int) -> None:
        process = self.processes[event.process]
        stay, lacks = process.stay, event.lacks
        may = {StayState.PAUSING, StayState.STOPPING}
        may |= {StayState.RUNNING} if stay.is_remote or process.yields or lacks else set()
        may |= ACTIVE if event.unstored else set()
        if not self.slot.has(process) or (stay.state not in may and not stay.is_over):
            self._reject(process, "paused without being told to")
            return
        stay.step, process.has_state = event.step, event.has_state
        process.is_still = process.yields = False
        self.slot.free(process, now_us)
        if stay.state == StayState.STOPPING:
            self._kill(process, "cancel")
        elif event.unstored and not stay.is_over:
            self._hold_for_store(process, event, now_us)
        elif stay.state == StayState.PAUSING or stay.is_remote:
            self._paused(process, now_us, lacks=lacks if event.is_lacking else "")
        elif lacks and event.is_lacking:  # else the input has just come: as after a slice
            self._paused(process, now_us, lacks=lacks)

    def _hold_for_store(self, process: ProcessRecord, event: ProcessPaused, now_us: int) -> None:
        """Free the slot of a task that has ended, until the store takes its outputs."""
        process.kill_us = process.stay.noticed_until_us = None
        if process.stay.state == StayState.NOTICED:
            self._move(process.stay, StayMove.PAUSE)
        self._paused(process, now_us, unstored=event.unstored, wait_us=event.wait_us)

    def _process_resized(self, event: ProcessResized, now_us: int) -> None:
        process = self.processes[event.process]
        stay, slots = process.stay, event.slots
        has_slot = self.slot.has(process)
        if not has_slot or stay.wanted is None or slots != stay.wanted.seats:
            self._reject(process, f"it is on {slots} slots")
            return
        stay.step, stay.slots, stay.guests = event.step, slots, stay.wanted.guests
        stay.wanted, process.is_still = None, False
        self._say(TellIsland(stay=stay.key, kind=messages.Resized, details={"seats": slots}))
        self._say(ReportSoon(is_urgent=True))

    def _process_ending(self, event: ProcessEnding, now_us: int) -> None:
        process = self.processes[event.process]
        if process.is_ending or not (self.slot.has(process) or process.kill_us is not None):
            self._reject(process, "its command ended twice, or without a slot")
            return
        process.is_ending, process.ending_until_us = True, now_us + ENDING_US
        if process.kill_us is not None:
            process.kill_us = process.ending_until_us

    def _process_concluded(self, event: ProcessConcluded, now_us: int) -> None:
        process = self.processes[event.process]
        stay = process.stay
        if event.word == "stopped" and stay.state != StayState.STOPPING:
            self._reject(process, "stopped without being told to")
            return
        stay.step = event.step  # its end is reported when the process has exited or rests
        if not event.rests:
            return
        if stay.state != StayState.RUNNING or not self.slot.has(process) or self.is_leaving:
            self._send(process, "end")
            return
        self.slot.free(process, now_us)
        process.rests_until_us = now_us + REST_US
        self._conclude(process)

    def _image_kept(self, event: ImageKept, now_us: int) -> None:
        process = self.processes[event.process]
        process.saved_step = event.step
        self._let_hosts_go(process)
        if process.is_kept:
            self._let_follow(process)

    def _process_exited(self, event: ProcessExited, now_us: int) -> None:
        process = self.processes.pop(event.process)
        self.slot.free(process, now_us)
        self._end_stay_of(process)
        self._let_follow(process)

    def _end_stay_of(self, process: ProcessRecord) -> None:
        stay = process.stay
        if stay.is_over:
            return
        if process.is_renewed and not process.is_prepared and not process.kill_reason:
            self._begin_anew(stay)
            return
        is_silent = stay.state == StayState.PAUSED or stay.is_remote
        if is_silent or process.kill_reason in SILENT_REASONS:
            process.kill_reason = process.kill_reason or "exited"  # it needs no kill
            self._drop(stay, process.kill_reason)
        else:
            self._conclude(process)

    def _begin_anew(self, stay: StayRecord) -> None:
        """Let a function begin in a new process, because the process that it should share ended too
        early.
        """
        stay.process = None
        if stay.state == StayState.SEATING:
            self._say(FetchInputs(stay=stay.key))
        elif stay.state == StayState.PAUSING:
            self._say(TellIsland(stay=stay.key, kind=messages.Paused))
            self._drop(stay, "dropped")
        else:
            self._end(stay, messages.Stopped)

    # --- moves ---

    def _say(self, *instructions: Instruction) -> None:
        self._out += instructions

    def _send(self, process: ProcessRecord, word: str) -> None:
        if not process.kill_reason:
            self._say(SendWord(process=process.id, word=word))

    def _move(self, stay: StayRecord, move: StayMove) -> None:
        stay.state = state_after(stay.state, move)

    def _kill(self, process: ProcessRecord, reason: str, why: str = "") -> None:
        if not process.kill_reason:
            process.kill_reason = reason
            self._say(KillProcess(process=process.id, reason=reason, why=why))

    def _reject(self, process: ProcessRecord, why: str) -> None:
        """Kill a process that sent a message that no genuine resident sends."""
        self._kill(process, "nonsense", why)

    def _drop(self, stay: StayRecord, reason: str) -> None:
        """End the stay without an event; its process is killed."""
        if stay.state != StayState.DROPPED:
            self._move(stay, StayMove.DROP)
            self._say(DropStay(stay=stay.key), ReportSoon(is_urgent=True))
        if stay.process is not None and stay.process.stay is stay:
            self._kill(stay.process, reason)

    def _end(self, stay: StayRecord, kind: type[messages.Event], **details: Any) -> None:
        self._move(stay, StayMove.END)
        self._say(TellIsland(stay=stay.key, kind=kind, details=details, is_end=True))
        self._say(ReportSoon(is_urgent=True))

    def _fail(self, stay: StayRecord, cause: str, told: str, reason: str) -> None:
        self._end(stay, messages.Failed, cause=cause, message=told)
        if stay.process is not None and stay.process.stay is stay:
            self._kill(stay.process, reason)

    def _conclude(self, process: ProcessRecord) -> None:
        was_stopping = process.stay.state == StayState.STOPPING
        self._move(process.stay, StayMove.END)
        verdict = TellVerdict(process=process.id, was_stopping=was_stopping)
        # the ends of a batch in one report
        self._say(verdict, ReportSoon(is_urgent=not self.is_followed))

    def _let_hosts_go(self, process: ProcessRecord) -> None:
        """End a paused gang if its image is durable, to free memory on its other hosts and devices.

        A frozen command keeps its memory, as its image may lack its processes.
        """
        stay = process.stay
        is_spread = len(stay.slots) > 1 or (stay.guests and not process.is_command)
        if stay.state == StayState.PAUSED and is_spread and process.is_kept:
            self._drop(stay, "evicted")

    # --- what always holds ---

    def validate(self) -> None:
        """Raise AssertionError if an invariant is broken; tests call it after each event."""
        for key, stay in self.stays.items():
            assert key == stay.key, (key, stay)
            _validate_stay(stay, self.slot.holders)
        for id, process in self.processes.items():
            assert id == process.id, (id, process)
            assert process.stay.process is process, process
        for holder in self.slot.holders:
            assert self.processes.get(holder.id) is holder, holder
            assert holder.stay.slot_since_us is not None, holder
        ids = [holder.id for holder in self.slot.holders]
        assert len(ids) == len({*ids}), "a process is twice in the slot"
        assert self.slot.free_milli >= 0, self.slot.holders
        alive = [p.task for p in self.processes.values() if not (p.kill_reason or p.is_resting)]
        assert len(alive) == len(set(alive)), f"a task has two processes: {alive}"


def _yields(order: Order) -> TypeGuard[Pause]:
    """True if the task runs on until its successor is ready.

    An order with a notice does not count, since the notice takes longer.
    """
    return isinstance(order, Pause) and bool(order.successor) and not order.notice_us


def _can_go_on(process: ProcessRecord, launch: Launch) -> bool:
    """True if the process can continue with this launch: its state is as new as the newest
    checkpoint.

    A process keeps the secrets with which it began, so it cannot continue if one has changed. A
    coordinator's process cannot become the remote ranks of its gang. A process can only use the
    devices that its sandbox shows.
    """
    has_newest = process.stay.step >= _newest_step(launch)
    is_new = process.stay.state == StayState.PAUSED and has_newest
    has_same = process.stay.secrets_mark == launch.secrets.get("mark", "")
    return is_new and has_same and not launch.host and process.stay.guests == launch.guests


def _must_save(process: ProcessRecord, launch: Launch) -> bool:
    """True if the process alone has the last steps of a task that another process is to run."""
    if launch.host or process.is_kept or process.stay.state != StayState.PAUSED:
        return False  # if the launch is for remote ranks, the coordinator host has the image
    return process.stay.step > _newest_step(launch)


def _newest_step(launch: Launch) -> int:
    return launch.images[0].step if launch.images else 0


def _validate_stay(stay: StayRecord, holders: list[ProcessRecord]) -> None:
    has_slot = any(holder.stay is stay for holder in holders)
    assert (stay.slot_since_us is not None) == has_slot, stay
    if stay.state == StayState.SEATING:
        assert not stay.is_started, stay
    if stay.state in (StayState.SEATING, StayState.PAUSED):
        assert not has_slot, stay
    if stay.state == StayState.NOTICED:
        assert has_slot, stay
        assert stay.noticed, stay
    if stay.noticed_until_us is not None:
        assert stay.state in (StayState.NOTICED, StayState.STOPPING) or stay.is_over, stay
    if stay.state in (StayState.RUNNING, StayState.PAUSED, StayState.STOPPING):
        assert stay.process is not None, stay
        assert stay.process.stay is stay, stay
    if stay.is_started:
        assert stay.is_confirmed, stay
