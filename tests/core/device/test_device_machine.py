"""The machine of a device against a model that was written apart from it, under random events.

The model keeps facts ("was told to pause", "has the slot"), not states, and derives from them what
must be true.  It also plays the island and the processes: messages come twice, late, never, or in
another order.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

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
    ProcessRenewed,
    ProcessStood,
    SendWord,
    SlotDue,
    StayForgotten,
    TellIsland,
    TellVerdict,
)
from app.core.device.device_machine import PREPARE_US, REST_US, DeviceMachine
from app.core.model.descriptor import RunSpec
from app.core.model.protocol import messages
from app.core.model.protocol.messages import Cancel, Launch, Order, Pause, Save
from app.core.model.provisions.notice import Notice
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
NOTICE_S = 2  # of the tasks b and c, which are commands
NOTICE_US = NOTICE_S * 1_000_000
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
    noticed: bool = False
    noticed_until_us: int | None = None
    cancel_asked: bool = False
    began: bool = False
    paused: bool = False
    over: bool = False
    process: ProcessModel | None = None
    ends_told: int = 0
    held_us: int = 0
    milli: int = 1000


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
    resting_since_us: int | None = None
    renewed: bool = False
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
        self.slot: dict[int, int] = {}  # process in the slot -> since when
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
        taken = sum(self.processes[id].stay.milli for id in self.slot)
        assert process.id not in self.slot
        assert taken + stay.milli <= 1000, "the slot holds more than the device"
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
        self.slot[process.id] = self.now_us

    def pause_after(self, stay: StayModel, notice_us: int) -> None:
        """Note that the task is to be paused: a command in the slot gets a notice first."""
        if stay.cancel_asked or stay.paused or stay.pause_asked:
            return
        has_slot = stay.process is not None and stay.process.id in self.slot
        if stay.key[0] == "a" or notice_us <= 0 or not has_slot:
            stay.pause_asked = True
            return
        until_us = self.now_us + min(notice_us, NOTICE_US)
        stay.noticed = True
        stay.noticed_until_us = min(until_us, stay.noticed_until_us or until_us)

    def leave_slot(self, process: ProcessModel) -> None:
        if process.id in self.slot:
            process.stay.held_us += self.now_us - self.slot.pop(process.id)

    # --- rules: the island ---

    @rule(
        task=st.sampled_from(TASKS),
        fresh=st.booleans(),
        beside=st.booleans(),
        milli=st.sampled_from([1000, 1000, 500, 600, 300]),
        is_early=st.sampled_from([False, False, False, True]),
    )
    def launch(self, task: str, fresh: bool, beside: bool, milli: int, is_early: bool) -> None:
        """The island launches a task when its last epoch is over or paused, or gave it up."""
        last = self.stays.get((task, self.newest.get(task, (0, 0))[0]))
        if last is not None and not (last.over or last.paused or is_early):
            return
        epoch = self.newest.get(task, (0, 0))[0] + 1
        until_us = self.now_us + 500_000 if fresh else self.now_us
        more = {"surely_until_us": until_us, "beside": beside, "milli": milli}
        order = launch_order(task, epoch, incarnation=MINE, **more)
        if task != "a":
            command = RunSpec(kind="command", argv=("train",))
            notice = Notice(seconds=NOTICE_S)
            order = replace(order, spec=replace(order.spec, run=command, notice=notice))
        event = OrderCame(order=order)
        if not self.leaving:
            self.newest[task] = epoch, 1
            self.stays[task, epoch] = StayModel((task, epoch), fresh, milli=milli)
            self.next_seq[task, epoch] = 2
        out = self.give(event)
        assert bool(out) == (not self.leaving)
        self.sent.append(event)
        if not self.leaving:
            others = [s for k, s in self.stays.items() if k[0] == task and k[1] < epoch]
            assert all(s.over or (s.process and s.process.killed) for s in others)

    @precondition(lambda self: self.stays)
    @rule(data=st.data(), what=st.sampled_from(["pause", "notice", "cancel", "save", "yield"]))
    def order(self, data: st.DataObject, what: str) -> None:
        """An order is sent; it may be lost, and the island numbers the next one after it."""
        key = data.draw(st.sampled_from(sorted(self.stays)))
        event = self.new_order(key, what)
        if data.draw(st.integers(0, 3)):  # else it is late, or lost
            self.deliver(event)

    def send_order(self, key: Key, what: str) -> None:
        self.deliver(self.new_order(key, what))

    def new_order(self, key: Key, what: str) -> OrderCame:
        seq = self.next_seq[key]
        self.next_seq[key] += 1
        task, epoch = key
        orders: dict[str, Order] = {
            "pause": Pause(task=task, epoch=epoch, seq=seq),
            "notice": Pause(task=task, epoch=epoch, seq=seq, notice_us=1_500_000, why="drain"),
            "yield": Pause(task=task, epoch=epoch, seq=seq, successor="b"),
            "cancel": Cancel(task=task, epoch=epoch, seq=seq),
            "save": Save(task=task, epoch=epoch, seq=seq),
        }
        event = OrderCame(order=orders[what])
        self.sent.append(event)
        return event

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
            if stay.process is not None and stay.process.id in self.slot:
                stay.process.cancelled_us = self.now_us
        elif isinstance(order, Pause):
            yields = order.successor and stay.began and not stay.noticed
            if not yields:
                self.pause_after(stay, order.notice_us)

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

    @precondition(lambda self: not self.slot and not self.leaving)
    @rule(task=st.sampled_from(["b", "c"]))
    def run_a_command(self, task: str) -> None:
        """What seldom comes by chance: a command gets the slot."""
        self.launch(task, fresh=True, beside=False, milli=1000, is_early=False)
        stay = self.stays.get((task, self.newest[task][0]))
        for _ in range(6):
            if stay is not None and not stay.began:
                self.go_one_step_on(stay, is_confirmed=True)

    @precondition(lambda self: any(p.stay.key in self.stays for p in self.in_the_slot()))
    @rule(data=st.data(), what=st.sampled_from(["notice", "notice", "pause", "cancel"]))
    def order_the_holder(self, data: st.DataObject, what: str) -> None:
        keys = [p.stay.key for p in self.in_the_slot() if p.stay.key in self.stays]
        self.send_order(data.draw(st.sampled_from(keys)), what)

    def in_the_slot(self) -> list[ProcessModel]:
        return [self.processes[id] for id in self.slot]

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
        living = (p for p in self.processes.values() if not (p.gone or p.killed))
        return [p for p in living if p.resting_since_us is None]

    def resting(self) -> list[ProcessModel]:
        living = (p for p in self.processes.values() if not (p.gone or p.killed))
        return [p for p in living if p.resting_since_us is not None]

    def alive_holder(self) -> list[ProcessModel]:
        return [p for p in self.alive() if p.id in self.slot]

    @precondition(lambda self: any(not p.prepared for p in self.alive()))
    @rule(data=st.data(), step=st.integers(0, 5))
    def say_prepared(self, data: st.DataObject, step: int) -> None:
        process = data.draw(st.sampled_from([p for p in self.alive() if not p.prepared]))
        process.prepared = True
        self.give(ProcessPrepared(process=process.id, step=step))
        assert not process.killed

    def pausable(self) -> list[ProcessModel]:
        return [p for p in self.alive_holder() if not _is_noticed(p.stay)]

    @precondition(lambda self: self.pausable())
    @rule(
        data=st.data(),
        step=st.integers(0, 5),
        lacks=st.sampled_from(["", "x"]),
        is_lacking=st.booleans(),
    )
    def say_paused(self, data: st.DataObject, step: int, lacks: str, is_lacking: bool) -> None:
        """The process leaves the slot, as it was told to or as it lacks an input."""
        process = data.draw(st.sampled_from(self.pausable()))
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
    @rule(data=st.data(), step=st.integers(0, 5))
    def say_progress(self, data: st.DataObject, step: int) -> None:
        process = data.draw(st.sampled_from(self.alive_holder()))
        self.give(ProcessProgressed(process=process.id, step=step))
        assert not process.killed

    @precondition(lambda self: self.alive_holder())
    @rule(data=st.data(), word=st.sampled_from(["finished", "failed"]))
    def say_last(self, data: st.DataObject, word: str) -> None:
        process = data.draw(st.sampled_from(self.alive_holder()))
        word = "stopped" if process.stay.cancel_asked else word
        self.give(ProcessConcluded(process=process.id, step=5, word=word))
        assert not process.killed

    @precondition(lambda self: self.alive_holder())
    @rule(data=st.data(), word=st.sampled_from(["finished", "failed"]))
    def say_last_and_rest(self, data: st.DataObject, word: str) -> None:
        process = data.draw(st.sampled_from(self.alive_holder()))
        stay = process.stay
        told = (stay.pause_asked, stay.cancel_asked, stay.noticed, self.leaving)
        self.give(ProcessConcluded(process=process.id, step=5, word=word, rests=True))
        assert stay.over != any(told)
        if stay.over:
            self.leave_slot(process)
            process.resting_since_us = self.now_us
        assert not process.killed

    @precondition(lambda self: self.resting() and self.fetchable())
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        """The next function of a key begins in a process that rests."""
        process = data.draw(st.sampled_from(self.resting()))
        stay = data.draw(st.sampled_from(self.fetchable()))
        stay.fetching, stay.process, process.stay = False, process, stay
        process.resting_since_us, process.renewed, process.prepared = None, True, False
        process.born_us, process.still, process.yields = self.now_us, False, False
        process.was_told_to_pause, process.cancelled_us = False, None
        self.give(ProcessRenewed(process=process.id, stay=stay.key))

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), luck=st.integers(0, 7))
    def say_what_no_resident_says(self, data: st.DataObject, luck: int) -> None:
        process = data.draw(st.sampled_from(self.alive()))
        stay = process.stay
        lies: list[DeviceEvent] = []
        if process.prepared:
            lies.append(ProcessPrepared(process=process.id, step=0))
        if process.id not in self.slot:
            lies.append(ProcessProgressed(process=process.id, step=0))
            lies.append(ProcessPaused(process=process.id, step=0, lacks="x"))
        elif not (stay.pause_asked or stay.cancel_asked or process.yields):
            lies.append(ProcessPaused(process=process.id, step=0))
        if not stay.cancel_asked:
            lies.append(ProcessConcluded(process=process.id, step=0, word="stopped"))
        if lies and luck == 0:
            self.give(data.draw(st.sampled_from(lies)))
            assert process.killed == "nonsense"

    @precondition(lambda self: self.alive_holder())
    @rule(data=st.data(), is_still=st.booleans())
    def say_still(self, data: st.DataObject, is_still: bool) -> None:
        process = data.draw(st.sampled_from(self.alive_holder()))
        process.still = is_still
        self.give(ProcessStood(process=process.id, is_still=is_still))

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
        begins_anew = process.renewed and not (process.prepared or process.killed or was_over)
        if begins_anew and not stay.pause_asked:
            stay.process, stay.fetching = None, True
        self.give(ProcessExited(process=process.id))
        if begins_anew:
            assert stay.over == stay.pause_asked
            assert stay.ends_told == told
            return
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
        for stay in self.stays.values():
            if stay.noticed_until_us is not None and self.now_us >= stay.noticed_until_us:
                stay.noticed_until_us = None
                stay.pause_asked |= not (stay.cancel_asked or stay.over)
        for process in self.in_the_slot():
            if process.stay.key[0] != "a":
                held_us = process.stay.held_us + self.now_us - self.slot[process.id]
                process.stay.noticed |= BUDGET_US - NOTICE_US <= held_us < BUDGET_US
        self.give(DeadlinesDue())
        for process in self.alive():
            slow = not process.prepared and self.now_us - process.born_us >= PREPARE_US
            assert not slow
            if process.cancelled_us is not None:
                assert self.now_us < process.cancelled_us + GRACE_US
        for process in self.resting():
            assert process.resting_since_us is not None
            assert self.now_us < process.resting_since_us + REST_US
        for process in self.alive_holder():
            held_us = process.stay.held_us + self.now_us - self.slot[process.id]
            assert held_us < BUDGET_US
            assert self.now_us < self.lease_end_us or process.still

    @rule(is_short=st.booleans(), data=st.data())
    def end_round(self, is_short: bool, data: st.DataObject) -> None:
        away = frozenset(p.id for p in self.alive() if not data.draw(st.integers(0, 3)))
        self.look_at_slot(is_short=is_short, away=away)

    def look_at_slot(self, *, is_short: bool, away: frozenset[int]) -> None:
        before = [self.processes[id] for id in self.slot]
        self.away = away
        for process in before:
            process.was_told_to_pause = False
        self.give(SlotDue(is_short=is_short, away=away))
        for process in before:
            if process.was_told_to_pause and process.stay.began:
                # it yields to its successor
                process.stay.pause_asked |= not process.stay.cancel_asked
        if self.now_us < self.trusted_us:
            self.check_that_no_fitting_process_waits(away)

    def check_that_no_fitting_process_waits(self, away: frozenset[int]) -> None:
        left = 1000 - sum(self.processes[id].stay.milli for id in self.slot)
        for process in self.alive():
            if process.id not in self.slot and process.stay.milli <= left:
                assert process.id in away or not self.could_run(process)

    def could_run(self, process: ProcessModel) -> bool:
        stay = process.stay
        told = stay.pause_asked or stay.cancel_asked or stay.paused or stay.over
        return process.prepared and (stay.fresh or stay.kept) and not told

    @precondition(lambda self: not self.leaving)
    @rule(luck=st.integers(0, 40), notice_us=st.sampled_from([0, 1_000_000]))
    def leave(self, luck: int, notice_us: int) -> None:
        if luck == 0:
            self.leaving = True
            for stay in self.stays.values():
                if stay.began and not stay.over:
                    self.pause_after(stay, notice_us)
            self.give(LeaveAsked(pause_by_us=self.now_us + notice_us))

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
        assert [holder.id for holder in self.machine.slot.holders] == list(self.slot)
        for key, stay in self.stays.items():
            record = self.machine.stays[key]
            assert record.is_over == stay.over, (record, stay)
            assert record.order_seq == stay.obeyed
            if not stay.over:
                assert record.state == _state_of(stay), (record, stay)
            assert stay.ends_told <= 1


def _is_noticed(stay: StayModel) -> bool:
    return stay.noticed and not (stay.pause_asked or stay.cancel_asked)


def _state_of(stay: StayModel) -> str:
    """Derive the state of a stay that is not over from what happened to it."""
    if stay.cancel_asked:
        return "stopping"
    if stay.paused:
        return "paused"
    if stay.pause_asked:
        return "pausing"
    if stay.noticed:
        return "noticed"
    return "running" if stay.began else "seating"


TestDeviceUnderRandomEvents = DeviceUnderRandomEvents.TestCase
TestDeviceUnderRandomEvents.settings = settings(
    max_examples=100, stateful_step_count=80, deadline=None
)
