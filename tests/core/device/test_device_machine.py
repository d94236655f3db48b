"""The machine of a device against a model that was written apart from it, under random events.

The model keeps facts ("was told to pause", "has the slot"), not states, and derives from them what
must be true.  It also plays the island and the processes: messages come twice, late, never, or in
another order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from app.core.device.device_events import (
    AnswerCame,
    ContinueProcess,
    DeadlinesDue,
    DeviceEvent,
    DropAsked,
    DropStay,
    FetchInputs,
    ForgetStay,
    GiveSlot,
    Instruction,
    KillAsked,
    KillProcess,
    LeaveAsked,
    OrderCame,
    ProcessBegan,
    ProcessConcluded,
    ProcessExited,
    ProcessPaused,
    ProcessPrepared,
    ProcessProgressed,
    ProcessStood,
    SendWord,
    SlotDue,
    StayForgotten,
    TellIsland,
    TellVerdict,
)
from app.core.device.device_machine import PREPARE_US, DeviceMachine
from app.core.model import messages
from app.core.model.messages import Cancel, Launch, Order, Pause, Save
from tests.core.device.orders import (
    BUDGET_US,
    GRACE_US,
    LEASE_US,
    MARGIN_US,
    MINE,
    answer_to,
    launch_order,
)

Key = tuple[str, int]

TASKS = ("a", "b", "c")
PASSING_US = [1, *[5_000] * 4, *[100_000] * 4, 400_000, 1_100_000, 3_000_000, PREPARE_US]
SILENT = {"evicted", "dropped", "replaced", "lease", "zygote", "leaving"}


@dataclass
class StayModel:
    """The facts of one stay."""

    key: Key
    fresh: bool
    kept: bool = False
    fetching: bool = True
    obeyed: int = 1
    waiting: dict[int, Order] = field(default_factory=dict)
    pause_asked: bool = False
    cancel_asked: bool = False
    began: bool = False
    paused: bool = False
    over: bool = False
    process: ProcessModel | None = None
    ends_told: int = 0
    held_us: int = 0


@dataclass
class ProcessModel:
    """The facts of one process."""

    id: int
    stay: StayModel
    born_us: int
    prepared: bool = False
    still: bool = False
    yields: bool = False
    was_told_to_pause: bool = False
    killed: str = ""
    gone: bool = False
    cancelled_us: int | None = None


class DeviceUnderRandomEvents(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.machine = DeviceMachine("h.0", MINE, lease_margin_us=MARGIN_US, stop_grace_us=GRACE_US)
        self.now_us = 1_000_000
        self.trusted_us = self.lease_end_us = self.answered_us = 0
        self.stays: dict[Key, StayModel] = {}
        self.processes: dict[int, ProcessModel] = {}
        self.newest: dict[str, tuple[int, int]] = {}
        self.slot: ProcessModel | None = None
        self.slot_since_us = 0
        self.leaving = False
        self.away = frozenset[int]()
        self.sent: list[DeviceEvent] = []  # to be delivered again, late
        self.next_seq: dict[Key, int] = {}

    # --- events and what they cause ---

    def give(self, event: DeviceEvent) -> list[Instruction]:
        out = self.machine.handle(event, self.now_us)
        for one in out:
            self.obey(one)
        return out

    def obey(self, one: Instruction) -> None:
        match one:
            case TellIsland() | DropStay() | ForgetStay() | FetchInputs():
                self.obey_for_stay(one)
            case SendWord() | GiveSlot() | KillProcess() | TellVerdict() | ContinueProcess():
                self.obey_for_process(one)

    def obey_for_stay(self, one: TellIsland | DropStay | ForgetStay | FetchInputs) -> None:
        stay = self.stays[one.stay]
        match one:
            case TellIsland() if one.is_end:
                self.end(stay)
            case TellIsland():
                assert not stay.over
                stay.paused |= one.kind is messages.Paused
            case DropStay():
                assert not stay.over
                stay.over = True
            case ForgetStay():
                assert self.stays.pop(one.stay).over
            case FetchInputs():
                assert not stay.over

    def obey_for_process(
        self, one: SendWord | GiveSlot | KillProcess | TellVerdict | ContinueProcess
    ) -> None:
        process = self.processes[one.process]
        assert not process.gone or isinstance(one, TellVerdict), one
        match one:
            case SendWord():
                assert not process.killed, "a word to a killed process"
                process.yields |= one.word == "yield"
                process.was_told_to_pause |= one.word == "pause"
            case GiveSlot():
                self.check_slot(process, one.is_first)
            case KillProcess():
                assert one.reason
                assert not process.killed, "killed twice"
                process.killed = one.reason
            case TellVerdict():
                assert one.was_stopping == process.stay.cancel_asked
                self.end(process.stay)
            case ContinueProcess():
                self.check_continued(process, self.stays[one.stay])

    def check_continued(self, process: ProcessModel, stay: StayModel) -> None:
        assert process.stay.paused
        assert not process.stay.over
        assert not process.killed
        process.stay.over = True
        process.stay, stay.process = stay, process
        stay.fetching = False

    def end(self, stay: StayModel) -> None:
        assert not stay.over, "an end of a stay that is over"
        stay.over = True
        stay.ends_told += 1

    def check_slot(self, process: ProcessModel, is_first: bool) -> None:
        stay = process.stay
        assert self.slot is None, "two processes in the slot"
        assert self.now_us < self.trusted_us, "the slot without trust"
        assert stay.fresh or stay.kept, "the slot before the island confirmed the stay"
        assert process.prepared
        assert stay.began or process.id not in self.away, "the slot without its memory"
        assert not process.killed
        assert not process.gone
        assert not stay.over
        assert not any((stay.pause_asked, stay.cancel_asked, stay.paused))
        assert is_first == (not stay.began)
        stay.began = True
        process.still = False
        self.slot, self.slot_since_us = process, self.now_us

    def leave_slot(self, process: ProcessModel) -> None:
        if self.slot is process:
            process.stay.held_us += self.now_us - self.slot_since_us
            self.slot = None

    # --- rules: the island ---

    @rule(
        task=st.sampled_from(TASKS),
        fresh=st.booleans(),
        beside=st.booleans(),
        is_early=st.sampled_from([False, False, False, True]),
    )
    def launch(self, task: str, fresh: bool, beside: bool, is_early: bool) -> None:
        """The island launches a task when its last epoch is over or paused, or gave it up."""
        last = self.stays.get((task, self.newest.get(task, (0, 0))[0]))
        if last is not None and not (last.over or last.paused or is_early):
            return
        epoch = self.newest.get(task, (0, 0))[0] + 1
        until_us = self.now_us + 500_000 if fresh else self.now_us
        order = launch_order(task, epoch, incarnation=MINE, surely_until_us=until_us, beside=beside)
        event = OrderCame(order=order)
        if not self.leaving:
            self.newest[task] = epoch, 1
            self.stays[task, epoch] = StayModel((task, epoch), fresh)
            self.next_seq[task, epoch] = 2
        out = self.give(event)
        assert bool(out) == (not self.leaving)
        self.sent.append(event)
        if not self.leaving:
            others = [s for k, s in self.stays.items() if k[0] == task and k[1] < epoch]
            assert all(s.over or (s.process and s.process.killed) for s in others)

    @precondition(lambda self: self.stays)
    @rule(data=st.data(), what=st.sampled_from(["pause", "cancel", "save", "yield"]))
    def order(self, data: st.DataObject, what: str) -> None:
        """An order is sent; it may be lost, and the island numbers the next one after it."""
        key = data.draw(st.sampled_from(sorted(self.stays)))
        seq = self.next_seq[key]
        self.next_seq[key] += 1
        task, epoch = key
        orders: dict[str, Order] = {
            "pause": Pause(task=task, epoch=epoch, seq=seq),
            "yield": Pause(task=task, epoch=epoch, seq=seq, successor="b"),
            "cancel": Cancel(task=task, epoch=epoch, seq=seq),
            "save": Save(task=task, epoch=epoch, seq=seq),
        }
        event = OrderCame(order=orders[what])
        self.sent.append(event)
        if data.draw(st.integers(0, 3)):  # else it is late, or lost
            self.deliver(event)

    def deliver(self, event: OrderCame) -> None:
        order = event.order
        stay = self.stays.get((order.task, order.epoch))
        is_stale = stay is None or order.seq <= stay.obeyed
        if stay is not None and not is_stale:
            self.expect(stay, order)
        out = self.give(event)
        if is_stale or stay is None or order.seq > stay.obeyed:
            assert out == []  # stale, or it waits for an earlier order

    def expect(self, stay: StayModel, order: Order) -> None:
        """Note the orders that become effective with this one."""
        if isinstance(order, Cancel):
            stay.obeyed = order.seq
            self.note(stay, order)
            return
        stay.waiting[order.seq] = order
        while stay.obeyed + 1 in stay.waiting:
            stay.obeyed += 1
            self.note(stay, stay.waiting.pop(stay.obeyed))

    def note(self, stay: StayModel, order: Order) -> None:
        if stay.over:
            return
        if isinstance(order, Cancel):
            stay.cancel_asked = True
            if stay.process is not None and self.slot is stay.process:
                stay.process.cancelled_us = self.now_us
        elif isinstance(order, Pause) and not (order.successor and stay.began):
            stay.pause_asked |= not (stay.cancel_asked or stay.paused)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def deliver_again(self, data: st.DataObject) -> None:
        """A message comes late, or a second time."""
        event = data.draw(st.sampled_from(self.sent))
        match event:
            case OrderCame(order=Launch()):
                assert self.give(event) == []
            case OrderCame():
                self.deliver(event)
            case AnswerCame():
                assert self.give(event) == []

    @rule(data=st.data(), age_us=st.sampled_from([0, 100_000, 2_000_000, 7_000_000]))
    def answer(self, data: st.DataObject, age_us: int) -> None:
        """An answer to a report sent `age_us` ago, which names some stays to keep or drop."""
        fate = st.sampled_from(["keep"] * 8 + ["unnamed"] * 4 + ["drop"])
        self.give_answer(self.now_us - age_us, {key: data.draw(fate) for key in sorted(self.stays)})

    def give_answer(self, sent_us: int, fates: dict[Key, str]) -> None:
        keep = [list(key) for key, fate in fates.items() if fate == "keep"]
        drop = [list(key) for key, fate in fates.items() if fate == "drop"]
        event = AnswerCame(answer=answer_to(sent_us, keep=keep, drop=drop))
        if sent_us <= self.answered_us:
            assert self.give(event) == []
            return
        self.answered_us = sent_us
        self.lease_end_us, self.trusted_us = sent_us + LEASE_US, sent_us + LEASE_US - MARGIN_US
        for key, fate in fates.items():
            self.stays[key].kept |= fate == "keep"
        self.give(event)
        self.sent.append(event)
        for key, fate in fates.items():
            assert (key in self.stays) == (fate != "drop")

    @precondition(lambda self: self.stays)
    @rule(
        data=st.data(), times=st.integers(1, 5), is_confirmed=st.sampled_from([True, True, False])
    )
    def go_on(self, data: st.DataObject, times: int, is_confirmed: bool) -> None:
        """What usually comes next for a stay: a process, its preparation, an answer, the slot."""
        stay = self.stays[data.draw(st.sampled_from(sorted(self.stays)))]
        for _ in range(times):
            self.go_one_step_on(stay, is_confirmed)

    def go_one_step_on(self, stay: StayModel, is_confirmed: bool) -> None:
        if stay in self.fetchable():
            self.begin(stay, None)
        elif stay.process in self.alive() and not stay.process.prepared:
            stay.process.prepared = True
            self.give(ProcessPrepared(process=stay.process.id, step=0))
        elif stay.key not in self.stays:
            return
        elif self.now_us >= self.trusted_us or (is_confirmed and not stay.kept):
            self.now_us += 1
            self.give_answer(self.now_us, {stay.key: "keep" if is_confirmed else "unnamed"})
        else:
            self.look_at_slot(is_short=False, away=frozenset())

    @rule(incarnation=st.sampled_from(["life-1", "life-3"]))
    def hear_what_is_for_another_worker(self, incarnation: str) -> None:
        order = launch_order("a", 99, incarnation=incarnation, surely_until_us=1 << 60)
        assert self.give(OrderCame(order=order)) == []
        answer = answer_to(self.now_us, incarnation=incarnation, drop=[list(k) for k in self.stays])
        assert self.give(AnswerCame(answer=answer)) == []

    # --- rules: processes ---

    @precondition(lambda self: self.fetchable())
    @rule(data=st.data(), saved=st.sampled_from([None, 3]))
    def begin_process(self, data: st.DataObject, saved: int | None) -> None:
        self.begin(data.draw(st.sampled_from(self.fetchable())), saved)

    def begin(self, stay: StayModel, saved: int | None) -> None:
        stay.fetching = False
        process = ProcessModel(len(self.processes) + 1, stay, self.now_us)
        self.processes[process.id] = stay.process = process
        self.give(ProcessBegan(process=process.id, stay=stay.key, saved_step=saved))

    def fetchable(self) -> list[StayModel]:
        return [s for s in self.stays.values() if s.fetching and not s.over and not s.process]

    def alive(self) -> list[ProcessModel]:
        """The processes whose messages are read: a killed process is not heard any more."""
        return [p for p in self.processes.values() if not (p.gone or p.killed)]

    def alive_holder(self) -> list[ProcessModel]:
        return [p for p in self.alive() if self.slot is p]

    @precondition(lambda self: any(not p.prepared for p in self.alive()))
    @rule(data=st.data(), step=st.integers(0, 5))
    def say_prepared(self, data: st.DataObject, step: int) -> None:
        process = data.draw(st.sampled_from([p for p in self.alive() if not p.prepared]))
        process.prepared = True
        self.give(ProcessPrepared(process=process.id, step=step))
        assert not process.killed

    @precondition(lambda self: self.alive_holder())
    @rule(step=st.integers(0, 5), lacks=st.sampled_from(["", "x"]), is_lacking=st.booleans())
    def say_paused(self, step: int, lacks: str, is_lacking: bool) -> None:
        """The process leaves the slot, as it was told to or as it lacks an input."""
        [process] = self.alive_holder()
        stay = process.stay
        if not (stay.pause_asked or stay.cancel_asked or process.yields):
            lacks = "x"
        self.leave_slot(process)
        process.yields = False
        self.give(ProcessPaused(process=process.id, step=step, lacks=lacks, is_lacking=is_lacking))
        assert process.killed == ("cancel" if stay.cancel_asked else "")
        if not stay.cancel_asked:
            assert stay.paused == (stay.pause_asked or (lacks != "" and is_lacking))

    @precondition(lambda self: self.alive_holder())
    @rule(step=st.integers(0, 5))
    def say_progress(self, step: int) -> None:
        [process] = self.alive_holder()
        self.give(ProcessProgressed(process=process.id, step=step))
        assert not process.killed

    @precondition(lambda self: self.alive_holder())
    @rule(word=st.sampled_from(["finished", "failed"]))
    def say_last(self, word: str) -> None:
        [process] = self.alive_holder()
        word = "stopped" if process.stay.cancel_asked else word
        self.give(ProcessConcluded(process=process.id, step=5, word=word))
        assert not process.killed

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), luck=st.integers(0, 7))
    def say_what_no_resident_says(self, data: st.DataObject, luck: int) -> None:
        process = data.draw(st.sampled_from(self.alive()))
        stay = process.stay
        lies: list[DeviceEvent] = []
        if process.prepared:
            lies.append(ProcessPrepared(process=process.id, step=0))
        if self.slot is not process:
            lies.append(ProcessProgressed(process=process.id, step=0))
            lies.append(ProcessPaused(process=process.id, step=0, lacks="x"))
        elif not (stay.pause_asked or stay.cancel_asked or process.yields):
            lies.append(ProcessPaused(process=process.id, step=0))
        if not stay.cancel_asked:
            lies.append(ProcessConcluded(process=process.id, step=0, word="stopped"))
        if lies and luck == 0:
            self.give(data.draw(st.sampled_from(lies)))
            assert process.killed == "nonsense"

    @precondition(lambda self: self.slot is not None and not self.slot.killed)
    @rule(is_still=st.booleans())
    def say_still(self, is_still: bool) -> None:
        assert self.slot is not None
        self.slot.still = is_still
        self.give(ProcessStood(process=self.slot.id, is_still=is_still))

    @precondition(lambda self: any(not p.gone for p in self.processes.values()))
    @rule(data=st.data(), crashes=st.sampled_from([False, False, False, True]))
    def exit(self, data: st.DataObject, crashes: bool) -> None:
        here = [p for p in self.processes.values() if not p.gone and (crashes or p.killed)]
        if not here:
            return
        process = data.draw(st.sampled_from(here))
        stay, was_over = process.stay, process.stay.over
        self.leave_slot(process)
        process.gone = True
        is_silent = process.killed in SILENT or (stay.paused and not stay.cancel_asked)
        told = stay.ends_told
        self.give(ProcessExited(process=process.id))
        assert stay.over
        if not was_over:
            assert stay.ends_told - told == (0 if is_silent else 1)
        assert self.give(ProcessExited(process=process.id)) == []

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), reason=st.sampled_from(["", "", "", "flood", "zygote"]))
    def kill(self, data: st.DataObject, reason: str) -> None:
        process = data.draw(st.sampled_from(self.alive()))
        if not reason:
            return
        self.give(KillAsked(process=process.id, reason=reason))
        assert process.killed == reason

    @rule(data=st.data())
    def make_room(self, data: st.DataObject) -> None:
        paused = [s for s in self.stays.values() if s.paused and not s.over]
        if paused:
            stay = data.draw(st.sampled_from(paused))
            self.give(DropAsked(stay=stay.key, reason="evicted"))
            assert stay.over

    # --- rules: time ---

    @rule(passed_us=st.sampled_from(PASSING_US))
    def let_time_pass(self, passed_us: int) -> None:
        self.now_us += passed_us
        self.give(DeadlinesDue())
        for process in self.alive():
            slow = not process.prepared and self.now_us - process.born_us >= PREPARE_US
            assert not slow
            if process.cancelled_us is not None:
                assert self.now_us < process.cancelled_us + GRACE_US
        if self.slot is not None and not self.slot.killed:
            held_us = self.slot.stay.held_us + self.now_us - self.slot_since_us
            assert held_us < BUDGET_US
            assert self.now_us < self.lease_end_us or self.slot.still

    @rule(is_short=st.booleans(), data=st.data())
    def end_round(self, is_short: bool, data: st.DataObject) -> None:
        away = frozenset(p.id for p in self.alive() if not data.draw(st.integers(0, 3)))
        self.look_at_slot(is_short=is_short, away=away)

    def look_at_slot(self, *, is_short: bool, away: frozenset[int]) -> None:
        before = self.slot
        self.away = away
        if before is not None:
            before.was_told_to_pause = False
        self.give(SlotDue(is_short=is_short, away=away))
        if before is not None and before.was_told_to_pause and before.stay.began:
            before.stay.pause_asked |= not before.stay.cancel_asked  # it yields to its successor
        if before is None and self.slot is None and self.now_us < self.trusted_us:
            for process in self.alive():
                assert process.id in away or not self.could_run(process)

    def could_run(self, process: ProcessModel) -> bool:
        stay = process.stay
        told = stay.pause_asked or stay.cancel_asked or stay.paused or stay.over
        return process.prepared and (stay.fresh or stay.kept) and not told

    @precondition(lambda self: not self.leaving)
    @rule(luck=st.integers(0, 40))
    def leave(self, luck: int) -> None:
        if luck == 0:
            self.leaving = True
            for stay in self.stays.values():
                stay.pause_asked |= stay.began and not (
                    stay.cancel_asked or stay.over or stay.paused
                )
            self.give(LeaveAsked())

    @precondition(lambda self: self.stays)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.stays)))
        was_over = self.stays[key].over
        self.give(StayForgotten(stay=key))
        assert (key in self.stays) != was_over

    # --- what always holds ---

    @invariant()
    def machine_agrees_with_model(self) -> None:
        self.machine.validate()
        assert set(self.machine.stays) == set(self.stays)
        assert set(self.machine.processes) == {p.id for p in self.processes.values() if not p.gone}
        holder = self.machine.slot.holder
        assert (holder and holder.id) == (self.slot and self.slot.id)
        for key, stay in self.stays.items():
            record = self.machine.stays[key]
            assert record.is_over == stay.over, (record, stay)
            assert record.order_seq == stay.obeyed
            if not stay.over:
                assert record.state == _state_of(stay), (record, stay)
            assert stay.ends_told <= 1


def _state_of(stay: StayModel) -> str:
    """Derive the state of a stay that is not over from what happened to it."""
    if stay.cancel_asked:
        return "stopping"
    if stay.paused:
        return "paused"
    if stay.pause_asked:
        return "pausing"
    return "running" if stay.began else "seating"


TestDeviceUnderRandomEvents = DeviceUnderRandomEvents.TestCase
TestDeviceUnderRandomEvents.settings = settings(
    max_examples=100, stateful_step_count=80, deadline=None
)
