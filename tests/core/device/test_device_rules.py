"""What a device decides, one rule at a time, without a process and without waiting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from app.core.device import device_machine
from app.core.device.device_events import (
    AnswerCame,
    ContinueProcess,
    DeadlinesDue,
    DeviceEvent,
    DropAsked,
    DropStay,
    ExtendTrust,
    FetchInputs,
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
    ProcessBegan,
    ProcessConcluded,
    ProcessEnding,
    ProcessExited,
    ProcessPaused,
    ProcessPrepared,
    ProcessProgressed,
    ProcessRenewed,
    ProcessResized,
    ProcessStood,
    ReportSoon,
    SendWord,
    SlotDue,
    StayForgotten,
    TaskUnable,
    TellIsland,
    TellSaved,
    TellVerdict,
)
from app.core.device.device_machine import ENDING_US, FINISH_US, REST_US, DeviceMachine
from app.core.device.device_records import BEHIND_US
from app.core.model.protocol.messages import (
    Cancel,
    Failed,
    Pause,
    Paused,
    Resize,
    Resized,
    Save,
    Stopped,
)
from app.core.scheduling.sharing.turns import TURN_US, Level, Share, as_json
from tests.core.device.orders import (
    BUDGET_US,
    GRACE_US,
    LEASE_US,
    MARGIN_US,
    MINE,
    answer_to,
    launch_order,
)
from tests.launches import image_of

One = TypeVar("One", bound=Instruction)


@dataclass
class Device:
    """A machine with a clock that the test sets, and the last instructions."""

    machine: DeviceMachine = field(
        default_factory=lambda: DeviceMachine(
            "h.0", MINE, lease_margin_us=MARGIN_US, stop_grace_us=GRACE_US
        )
    )
    now_us: int = 1_000_000
    out: list[Instruction] = field(default_factory=list)
    seqs: dict[tuple[str, int], int] = field(default_factory=dict)
    processes: int = 0

    def give(self, event: DeviceEvent) -> list[Instruction]:
        self.out = self.machine.handle(event, self.now_us)
        self.machine.validate()
        return self.out

    def said(self, kind: type[One]) -> list[One]:
        return [one for one in self.out if isinstance(one, kind)]

    def words(self) -> list[str]:
        return [one.word for one in self.said(SendWord)]

    def told(self) -> list[str]:
        return [one.kind.__name__ for one in self.said(TellIsland)]

    # --- the island ---

    def launch(self, task: str, epoch: int = 1, **more: Any) -> None:
        fresh = {"incarnation": MINE, "surely_until_us": self.now_us + 1}
        self.seqs[task, epoch] = 1
        self.give(OrderCame(order=launch_order(task, epoch, **{**fresh, **more})))

    def next_seq(self, task: str, epoch: int) -> int:
        self.seqs[task, epoch] += 1
        return self.seqs[task, epoch]

    def pause(self, task: str, epoch: int = 1, **more: Any) -> None:
        seq = self.next_seq(task, epoch)
        self.give(OrderCame(order=Pause(task=task, epoch=epoch, seq=seq, **more)))

    def save(self, task: str, epoch: int = 1) -> None:
        seq = self.next_seq(task, epoch)
        self.give(OrderCame(order=Save(task=task, epoch=epoch, seq=seq)))

    def cancel(self, task: str, epoch: int = 1) -> None:
        seq = self.next_seq(task, epoch)
        self.give(OrderCame(order=Cancel(task=task, epoch=epoch, seq=seq)))

    def answer(self, **more: Any) -> None:
        """Answer a report of this moment."""
        self.now_us += 1
        self.give(AnswerCame(answer=answer_to(self.now_us, **more)))

    def share(self, **places: int) -> None:
        """Let tasks take turns: tenants of equal weight, `t+` belongs to the tenant of `t`."""
        shares = [
            Share(
                task=task,
                epoch=1,
                place=place,
                held_us=0,
                rate=1000,
                path=(Level(name=task.rstrip("+"), used=0, weight=1000),),
            )
            for task, place in places.items()
        ]
        self.answer(rota=[as_json(share) for share in shares])

    # --- processes ---

    def begin(self, task: str, epoch: int = 1, **more: Any) -> int:
        """Launch the task, and prepare a process for it."""
        self.launch(task, epoch, **more)
        return self.prepare(task, epoch)

    def prepare(self, task: str, epoch: int = 1, *, is_command: bool = False) -> int:
        self.processes += 1
        began = ProcessBegan(process=self.processes, stay=(task, epoch), is_command=is_command)
        self.give(began)
        self.give(ProcessPrepared(process=self.processes, step=0))
        return self.processes

    def run(self, task: str, **more: Any) -> int:
        """Launch the task, and give it the slot."""
        process = self.begin(task, **more)
        self.answer()
        self.round()
        assert [one.process for one in self.said(GiveSlot)] == [process]
        return process

    def round(self, **more: Any) -> list[int]:
        """End a round; return the process that gets the slot, if one does."""
        self.give(SlotDue(**more))
        return [one.process for one in self.said(GiveSlot)]

    def paused(self, process: int, step: int = 3, **more: Any) -> None:
        self.give(ProcessPaused(process=process, step=step, **more))

    def later(self, us: int) -> None:
        self.now_us += us
        self.give(DeadlinesDue())

    def killed(self) -> list[tuple[int, str]]:
        return [(one.process, one.reason) for one in self.said(KillProcess)]

    def state(self, task: str, epoch: int = 1) -> str:
        return str(self.machine.stays[task, epoch].state)


@pytest.fixture
def device() -> Device:
    return Device()


# --- orders ---------------------------------------------------------------------------------------


def test_launch_opens_a_stay_and_fetches_its_inputs(device: Device) -> None:
    device.launch("t1")
    assert device.said(OpenStay)
    assert device.said(FetchInputs) == [FetchInputs(stay=("t1", 1))]
    assert device.state("t1") == "seating"


def test_order_that_comes_again_or_too_late_changes_nothing(device: Device) -> None:
    process = device.run("t1")
    first = OrderCame(order=launch_order("t1", 1, incarnation=MINE))
    pause = OrderCame(order=Pause(task="t1", epoch=1, seq=2))
    assert device.give(first) == []
    assert device.give(pause)
    device.paused(process)
    assert device.give(pause) == []
    device.launch("t1", 2)
    assert device.give(first) == []
    assert device.give(OrderCame(order=Pause(task="t1", epoch=1, seq=2))) == []
    device.answer()
    assert device.round() == [process]
    assert device.state("t1", 2) == "running"


def test_order_that_overtakes_another_waits_for_it(device: Device) -> None:
    device.run("t1")
    assert device.give(OrderCame(order=Pause(task="t1", epoch=1, seq=3))) == []
    assert device.machine.stays["t1", 1].order_seq == 1
    device.give(OrderCame(order=Save(task="t1", epoch=1, seq=2)))
    assert device.words() == ["save", "pause"]
    assert device.machine.stays["t1", 1].order_seq == 3


def test_cancel_overtakes_all_orders_before_it(device: Device) -> None:
    device.run("t1")
    device.give(OrderCame(order=Cancel(task="t1", epoch=1, seq=4)))
    assert device.words() == ["cancel"]
    assert device.give(OrderCame(order=Pause(task="t1", epoch=1, seq=2))) == []


def test_launch_for_another_process_of_the_device_is_ignored(device: Device) -> None:
    assert device.give(OrderCame(order=launch_order("t1", 1, incarnation="life-1"))) == []


def test_newer_launch_replaces_a_stay_that_is_being_fetched(device: Device) -> None:
    device.launch("t1")
    device.launch("t1", 2)
    assert device.said(DropStay) == [DropStay(stay=("t1", 1))]
    assert device.state("t1", 1) == "dropped"


def test_launch_of_a_paused_task_goes_on_in_its_process(device: Device) -> None:
    process = device.run("t1")
    device.pause("t1")
    device.paused(process)
    device.launch("t1", 2)
    assert device.said(ContinueProcess) == [ContinueProcess(process=process, stay=("t1", 2))]
    assert not device.said(FetchInputs)
    assert (device.state("t1", 1), device.state("t1", 2)) == ("ended", "seating")


def test_newer_checkpoint_beats_an_older_process(device: Device) -> None:
    process = device.run("t1")
    device.pause("t1")
    device.paused(process, step=3)
    device.launch("t1", 2, images=[image_of("1" * 64, 4)])
    assert device.killed() == [(process, "replaced")]
    assert device.said(FetchInputs)
    device.give(ProcessExited(process=process))
    assert not device.said(TellVerdict)


# --- pausing and saving ---------------------------------------------------------------------------


def test_launch_that_is_paused_before_its_slot_is_free_keeps_its_process(device: Device) -> None:
    device.run("t1")
    process = device.begin("t2")
    device.pause("t2")
    assert device.told() == ["Paused"]
    device.launch("t2", 2)
    assert device.said(ContinueProcess)[0].process == process


def test_launch_that_is_paused_before_it_has_a_process_is_dropped(device: Device) -> None:
    device.launch("t1")
    device.pause("t1")
    assert device.told() == ["Paused"]
    assert device.state("t1") == "dropped"


def test_task_that_is_paused_while_it_prepares_pauses_then(device: Device) -> None:
    device.launch("t1")
    device.give(ProcessBegan(process=1, stay=("t1", 1)))
    device.pause("t1")
    assert device.told() == []
    device.give(ProcessPrepared(process=1, step=0))
    assert device.told() == ["Paused"]


def test_pause_for_a_move_saves_at_once(device: Device) -> None:
    device.run("t1")
    device.pause("t1", moves=True)
    assert device.words() == ["pause", "save"]


def test_save_of_a_paused_task_tells_of_its_image_again(device: Device) -> None:
    process = device.run("t1")
    device.pause("t1")
    device.paused(process, step=3)
    device.save("t1")
    assert device.words() == ["save"]
    device.give(ImageKept(process=process, step=3))
    device.save("t1")
    assert device.said(TellSaved) == [TellSaved(process=process)]


def test_paused_gang_of_several_hosts_is_dropped_once_its_image_is_durable(device: Device) -> None:
    device.launch("t1", seats=[1, 1], links={"secret": "x"})
    device.give(HostsJoined(stay=("t1", 1)))
    process = device.prepare("t1")
    device.answer()
    assert device.round() == [process]
    device.pause("t1")
    device.paused(process, step=3)
    assert device.state("t1") == "paused"
    device.give(ImageKept(process=process, step=3))
    assert device.killed() == [(process, "evicted")]


# --- ends -----------------------------------------------------------------------------------------


def test_cancel_of_a_running_task_waits_for_its_grace_and_kills_it(device: Device) -> None:
    process = device.run("t1")
    device.cancel("t1")
    assert device.words() == ["cancel"]
    device.later(GRACE_US - 1)
    assert not device.killed()
    device.later(1)
    assert device.killed() == [(process, "cancel")]
    device.give(ProcessExited(process=process))
    assert device.said(TellVerdict) == [TellVerdict(process=process, was_stopping=True)]


def test_cancel_of_a_paused_task_kills_it_at_once(device: Device) -> None:
    process = device.run("t1")
    device.pause("t1")
    device.paused(process)
    device.cancel("t1")
    assert device.killed() == [(process, "cancel")]
    device.give(ProcessExited(process=process))
    assert device.said(TellVerdict)[0].was_stopping


def test_cancel_before_there_is_a_process_ends_the_task(device: Device) -> None:
    device.launch("t1")
    device.cancel("t1")
    assert [(one.kind, one.is_end) for one in device.said(TellIsland)] == [(Stopped, True)]


def test_task_is_killed_when_its_slot_time_is_over(device: Device) -> None:
    process = device.run("t1")
    device.answer()
    device.now_us += BUDGET_US
    device.answer()
    device.later(0)
    assert device.killed() == [(process, "max_duration")]


def test_process_that_does_not_get_ready_is_killed(device: Device) -> None:
    device.launch("t1")
    device.give(ProcessBegan(process=1, stay=("t1", 1)))
    device.later(device_machine.PREPARE_US)
    assert device.killed() == [(1, "slow")]
    device.give(ProcessExited(process=1))
    assert device.said(TellVerdict)


def test_death_of_a_paused_process_reports_nothing(device: Device) -> None:
    process = device.run("t1")
    device.pause("t1")
    device.paused(process)
    device.give(ProcessExited(process=process))
    assert device.said(DropStay)
    assert not device.said(TellVerdict)
    assert not device.said(KillProcess)


@pytest.mark.parametrize("reason", sorted(device_machine.SILENT_REASONS))
def test_silent_kill_reason_reports_nothing(device: Device, reason: str) -> None:
    process = device.run("t1")
    device.give(KillAsked(process=process, reason=reason))
    device.give(ProcessExited(process=process))
    assert not device.said(TellVerdict)
    assert device.state("t1") == "dropped"


@pytest.mark.parametrize("reason", ["nonsense", "flood", "deaf", "unsaved"])
def test_other_kill_reason_reports_how_the_task_ended(device: Device, reason: str) -> None:
    process = device.run("t1")
    device.give(KillAsked(process=process, reason=reason))
    device.give(KillAsked(process=process, reason="zygote"))
    assert device.out == []  # the first reason counts
    device.give(ProcessExited(process=process))
    assert device.said(TellVerdict)


def test_task_whose_input_cannot_be_had_fails_once(device: Device) -> None:
    process = device.run("t1")
    unable = TaskUnable(stay=("t1", 1), cause="store", told="no", reason="unfetched")
    device.give(unable)
    assert [one.kind for one in device.said(TellIsland)] == [Failed]
    assert device.killed() == [(process, "unfetched")]
    assert device.give(unable) == []
    device.give(ProcessExited(process=process))
    assert device.out == []


LIES: dict[str, Callable[[int], DeviceEvent]] = {
    "prepared twice": lambda id: ProcessPrepared(process=id, step=0),
    "progress without a slot": lambda id: ProcessProgressed(process=id, step=1),
    "paused without being told to": lambda id: ProcessPaused(process=id, step=1),
    "stopped without being told to": lambda id: ProcessConcluded(
        process=id, step=1, word="stopped"
    ),
    "it is on [2] slots": lambda id: ProcessResized(process=id, step=1, slots=[2]),
}


@pytest.mark.parametrize("why", LIES)
def test_message_that_no_resident_sends_kills_the_process(device: Device, why: str) -> None:
    process = device.begin("t1")
    device.give(LIES[why](process))
    assert device.said(KillProcess) == [KillProcess(process=process, reason="nonsense", why=why)]


def test_stopping_worker_drops_what_waits_and_pauses_what_runs(device: Device) -> None:
    process = device.run("t1")
    device.launch("t2")
    device.give(LeaveAsked())
    assert device.words() == ["pause"]
    assert (device.state("t1"), device.state("t2")) == ("pausing", "dropped")
    device.paused(process)
    device.launch("t3")
    assert device.out == []


# --- the lease and the slot -----------------------------------------------------------------------


def test_only_the_end_of_a_stay_is_told_as_its_end(device: Device) -> None:
    process = device.run("a")
    device.pause("a")
    device.paused(process)
    assert [(one.kind, one.is_end) for one in device.said(TellIsland)] == [(Paused, False)]
    device.launch("b")
    device.cancel("b")
    assert [(one.kind, one.is_end) for one in device.said(TellIsland)] == [(Stopped, True)]


def test_task_gets_no_slot_before_the_island_has_confirmed_it(device: Device) -> None:
    process = device.begin("t1", surely_until_us=0)
    device.answer()
    assert device.round() == []
    device.answer(keep=[["t1", 1]])
    assert device.round() == [process]


def test_launch_is_confirmed_by_itself_only_before_its_time_is_over(device: Device) -> None:
    device.answer()
    device.begin("t1", surely_until_us=device.now_us)
    assert device.round() == []
    process = device.begin("t2", surely_until_us=device.now_us + 1)
    assert device.round() == [process]


def test_dropped_task_never_gets_the_slot(device: Device) -> None:
    process = device.begin("t1")
    device.answer(drop=[["t1", 1]])
    assert device.killed() == [(process, "dropped")]
    assert device.round() == []
    assert device.machine.stays == {}


def test_dropped_task_that_is_not_there_or_over_changes_nothing(device: Device) -> None:
    assert device.give(DropAsked(stay=("t1", 1), reason="dropped")) == []
    device.run("t1")
    device.give(DropAsked(stay=("t1", 1), reason="dropped"))
    assert device.out != []
    assert device.give(DropAsked(stay=("t1", 1), reason="dropped")) == []


def test_no_task_gets_the_slot_when_trust_has_ended(device: Device) -> None:
    process = device.begin("t1")
    device.answer()
    device.now_us += LEASE_US - MARGIN_US
    assert device.round() == []
    device.answer()
    assert device.round() == [process]


def test_step_that_outlasts_the_lease_is_killed_without_an_event(device: Device) -> None:
    process = device.run("t1")
    device.later(device.machine.lease.ends_us - device.now_us - 1)
    assert not device.killed()
    assert device.machine.due_us(device.now_us) == device.machine.lease.ends_us
    device.later(1)
    assert device.killed() == [(process, "lease")]
    device.give(ProcessExited(process=process))
    assert not device.said(TellVerdict)


def test_process_that_stopped_in_time_keeps_the_slot_past_the_lease(device: Device) -> None:
    process = device.run("t1")
    device.give(ProcessStood(process=process, is_still=True))
    device.later(LEASE_US)
    assert not device.killed()
    device.answer()
    trusted, look = device.out
    assert trusted == ExtendTrust(until_us=device.machine.lease.trusted_until_us)
    assert look == SendWord(process=process, word="look")


def test_late_or_repeated_answer_extends_nothing(device: Device) -> None:
    device.answer()
    before = device.machine.lease
    assert device.give(AnswerCame(answer=answer_to(device.now_us))) == []
    assert device.give(AnswerCame(answer=answer_to(device.now_us - 1, drop=[["t1", 1]]))) == []
    assert device.machine.lease == before


def test_successor_prepares_and_gets_the_slot_when_the_other_has_left(device: Device) -> None:
    first = device.run("t1")
    device.pause("t1", successor="t2")
    assert device.words() == []
    device.launch("t2")
    device.round()
    assert device.words() == []
    second = device.prepare("t2")
    assert device.round() == []
    assert device.words() == ["pause"]
    device.paused(first)
    assert device.round() == [second]


def test_task_waits_no_longer_than_the_handover_for_its_successor(device: Device) -> None:
    device.run("t1")
    device.pause("t1", successor="t2")
    device.now_us += device_machine.HANDOVER_US
    device.round()
    assert device.words() == ["pause"]


@pytest.mark.parametrize("is_short", [True, False])
def test_task_yields_to_a_successor_that_lacks_its_memory(device: Device, is_short: bool) -> None:
    device.run("t1")
    device.pause("t1", successor="t2")
    device.launch("t2")
    device.round(is_short=is_short, waiting=frozenset({"t2"}))
    assert device.words() == (["pause"] if is_short else [])


def test_process_with_memory_off_the_device_gets_no_slot(device: Device) -> None:
    process = device.begin("t1")
    device.answer()
    assert device.round(away=frozenset({process})) == []
    assert device.round() == [process]


def test_task_that_lacks_an_input_leaves_the_slot_unless_it_has_just_come(device: Device) -> None:
    process = device.run("t1")
    device.paused(process, lacks="b0", is_lacking=False)
    assert device.told() == []
    assert device.round() == [process]
    device.paused(process, lacks="b0", is_lacking=True)
    assert [one.details for one in device.said(TellIsland)] == [{"lacks": "b0"}]
    assert device.round() == []


# --- turns ----------------------------------------------------------------------------------------


def turns(device: Device, number: int, step_us: int = TURN_US) -> list[int]:
    """Let processes step for some turns; return which process had each of them."""
    had = []
    for _ in range(number):
        holder = device.machine.slot.holder
        assert holder is not None
        had.append(holder.id)
        device.now_us += step_us
        device.round()
        if device.words() == ["yield"]:
            device.paused(holder.id)
            device.round()
    return had


def test_tasks_that_share_the_device_take_turns(device: Device) -> None:
    first = device.run("a")
    second = device.begin("b", beside=True)
    device.share(a=1, b=2)
    assert set(turns(device, 6)) == {first, second}
    held_us = device.machine.slot.shared_us(device.now_us)
    assert abs(held_us["a"] - held_us["b"]) <= TURN_US


def test_slot_time_of_tasks_that_share_is_the_time_of_the_device(device: Device) -> None:
    device.run("a")
    device.begin("b", beside=True)
    began_us = device.machine.stays["a", 1].arrived_us
    device.share(a=1, b=2)
    turns(device, 20)
    assert sum(device.machine.slot.shared_us(device.now_us).values()) == device.now_us - began_us


# --- what a start costs (rule F1) -----------------------------------------------------------------


def held_us(device: Device, task: str) -> int:
    return device.machine.stays[task, 1].held_us(device.now_us)


def test_start_on_an_empty_device_counts_as_held_and_uses_up_no_budget(device: Device) -> None:
    device.launch("a")
    device.later(3_000_000)
    assert held_us(device, "a") == 3_000_000
    process = device.prepare("a")
    device.answer()
    assert device.round() == [process]
    assert device.machine.stays["a", 1].prepared_us == 3_000_001
    device.later(500_000)
    assert held_us(device, "a") == 3_500_001
    assert device.machine.stays["a", 1].left_us(device.now_us) == BUDGET_US - 500_000


def test_start_behind_another_task_counts_from_when_the_device_is_free(device: Device) -> None:
    first = device.run("a")
    device.launch("b")
    device.later(1_000_000)
    assert held_us(device, "b") == 0, "the island had it wait"
    device.pause("a")
    device.paused(first)
    device.later(700_000)
    assert held_us(device, "b") == 700_000
    device.cancel("b")
    assert device.told() == ["Stopped"]
    assert held_us(device, "b") == 700_000


def test_only_the_first_of_several_starts_counts_and_only_where_it_is_confirmed(
    device: Device,
) -> None:
    device.launch("late", surely_until_us=0)
    device.launch("a")
    device.launch("b")
    device.later(1_000_000)
    assert [held_us(device, task) for task in ("late", "a", "b")] == [0, 1_000_000, 0]


def test_fractions_that_fit_together_start_together(device: Device) -> None:
    for task in ("a", "b", "c"):
        device.launch(task, milli=400)
    device.later(1_000_000)
    assert [held_us(device, task) for task in ("a", "b", "c")] == [1_000_000, 1_000_000, 0]


def test_standby_task_has_one_turn_until_the_task_before_it_has_ended(device: Device) -> None:
    first = device.run("a")
    before = device.begin("b", beside=True)
    standby = device.begin("b+", beside=True)
    device.share(**{"a": 1, "b": 1, "b+": 2})
    had = turns(device, 40)
    assert had.count(standby) == 1
    assert abs(had.count(first) - had.count(before) - 1) <= 2
    device.cancel("b")
    device.give(ProcessExited(process=before))
    device.round()
    device.share(**{"a": 1, "b+": 2})
    device.answer()
    assert set(turns(device, 20)) == {first, standby}


def test_task_that_does_not_share_waits_until_the_others_have_left(device: Device) -> None:
    first = device.run("a")
    second = device.begin("b", beside=True)
    alone = device.begin("c")
    device.share(a=1, b=2)
    assert alone not in turns(device, 20)
    for task in ("a", "b"):
        device.pause(task)
        if device.machine.slot.holder is not None and device.machine.slot.holder.task == task:
            device.paused(device.machine.slot.holder.id)
    assert {first, second}.isdisjoint(device.round())
    assert device.machine.slot.holder is not None
    assert device.machine.slot.holder.id == alone


def test_task_that_shares_and_is_paused_between_its_slices_pauses_at_once(device: Device) -> None:
    device.run("a")
    device.begin("b", beside=True)
    device.share(a=1, b=2)
    turns(device, 3)
    holder = device.machine.slot.holder
    assert holder is not None
    other = "a" if holder.task == "b" else "b"
    device.pause(other)
    assert device.told() == ["Paused"]


# --- gangs and parts of graphs --------------------------------------------------------------------


def test_gang_gets_no_slot_before_its_hosts_are_connected(device: Device) -> None:
    device.launch("t1", seats=[1, 1], links={"secret": "x"})
    process = device.prepare("t1")
    device.answer()
    assert device.round() == []
    device.give(HostsJoined(stay=("t1", 1)))
    assert device.round() == [process]


def test_gang_whose_host_does_not_come_fails(device: Device) -> None:
    device.launch("t1", seats=[1, 1], links={"secret": "x"})
    device.give(HostsMissed(stay=("t1", 1), told="not there"))
    [failed] = device.said(TellIsland)
    assert (failed.kind, failed.details["cause"], failed.is_end) == (Failed, "host", True)


def test_resize_to_a_host_that_does_not_come_leaves_the_ranks_where_they_were(
    device: Device,
) -> None:
    device.run("t1")
    order = Resize(task="t1", epoch=1, seq=2, seats=[1, 1], links={"secret": "x"})
    device.give(OrderCame(order=order))
    device.give(HostsMissed(stay=("t1", 1), told="not there"))
    [resized] = device.said(TellIsland)
    assert (resized.kind, resized.details) == (Resized, {"seats": [1]})


def test_resized_ranks_say_on_which_slots_they_are(device: Device) -> None:
    process = device.run("t1")
    device.give(OrderCame(order=Resize(task="t1", epoch=1, seq=2, seats=[2])))
    device.give(HostsJoined(stay=("t1", 1)))
    assert device.words() == ["resize"]
    device.give(ProcessResized(process=process, step=5, slots=[2]))
    assert device.said(TellIsland)[0].details == {"seats": [2]}
    assert device.machine.stays["t1", 1].slots == [2]


def test_remote_ranks_end_without_an_event(device: Device) -> None:
    links = {"secret": "x", "home": ["127.0.0.1", 1]}
    process = device.run("t1", seats=[1, 1], host=1, links=links)
    device.give(ProcessExited(process=process))
    assert not device.said(TellVerdict)


REMOTE = {"seats": [1, 1], "host": 1, "links": {"secret": "x", "home": ["127.0.0.1", 1]}}


def test_second_launch_of_an_epoch_replaces_remote_ranks_that_are_being_fetched(
    device: Device,
) -> None:
    """A resize sends the other hosts a launch of the same epoch."""
    device.launch("t1", **REMOTE)
    first = device.machine.stays["t1", 1]
    device.launch("t1", seq=5, **REMOTE)
    assert device.said(DropStay)
    assert first.is_over
    assert device.machine.stays["t1", 1] is not first
    process = device.prepare("t1")
    device.answer()
    device.round()
    assert [one.process for one in device.said(GiveSlot)] == [process]


def test_second_launch_of_an_epoch_leaves_remote_ranks_that_run(device: Device) -> None:
    process = device.run("t1", **REMOTE)
    device.launch("t1", seq=5, **REMOTE)
    assert not device.said(DropStay)
    assert not device.said(KillProcess)
    assert device.machine.slot.holder is device.machine.processes[process]


def test_process_of_a_coordinator_does_not_go_on_as_remote_ranks(device: Device) -> None:
    process = device.run("t1")
    device.pause("t1")
    device.give(ProcessPaused(process=process, step=3, has_state=True))
    device.launch("t1", 2, **REMOTE)
    assert not device.said(ContinueProcess)
    assert [one.reason for one in device.said(KillProcess)] == ["replaced"]


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "lost"])
def test_launch_on_other_devices_waits_for_the_image_of_the_paused_process(
    device: Device, is_kept: bool
) -> None:
    """The process cannot go on there, and it alone has the last steps."""
    process = device.run("t1", guests=["d1"])
    device.pause("t1")
    device.give(ProcessPaused(process=process, step=3, has_state=True))
    device.launch("t1", 2, guests=["d2"])
    assert not device.said(KillProcess)
    assert not device.said(FetchInputs)
    if is_kept:
        device.give(ImageKept(process=process, step=3))
        assert [one.process for one in device.said(KillProcess)] == [process]
    else:
        device.give(ProcessExited(process=process))
    assert [one.stay for one in device.said(FetchInputs)] == [("t1", 2)]


def test_launch_that_waits_for_an_image_can_be_paused_and_the_process_stays(
    device: Device,
) -> None:
    process = device.run("t1", guests=["d1"])
    device.pause("t1")
    device.give(ProcessPaused(process=process, step=3, has_state=True))
    device.launch("t1", 2, guests=["d2"])
    device.pause("t1", 2)
    device.launch("t1", 3, guests=["d1"])
    assert [one.process for one in device.said(ContinueProcess)] == [process]


def test_pause_that_crosses_a_missing_input_names_the_input(device: Device) -> None:
    process = device.run("t1")
    device.pause("t1")
    lacking = ProcessPaused(process=process, step=3, has_state=True, lacks="x", is_lacking=True)
    device.give(lacking)
    assert device.said(TellIsland)[0].details["lacks"] == "x"


def test_stay_is_forgotten_only_when_it_is_over(device: Device) -> None:
    process = device.run("t1")
    assert device.give(StayForgotten(stay=("t1", 1))) == []
    device.give(ProcessExited(process=process))
    device.give(StayForgotten(stay=("t1", 1)))
    assert device.machine.stays == {}


def test_message_of_a_process_that_has_exited_changes_nothing(device: Device) -> None:
    process = device.run("t1")
    device.give(ProcessExited(process=process))
    for event in (
        ProcessPaused(process=process, step=1),
        ProcessExited(process=process),
        ImageKept(process=process, step=1),
    ):
        assert device.give(event) == []


def test_pause_reports_the_task_as_paused_once(device: Device) -> None:
    process = device.run("t1")
    device.pause("t1")
    device.paused(process)
    assert [one.kind for one in device.said(TellIsland)] == [Paused]
    device.pause("t1")
    assert device.told() == []


# --- notices --------------------------------------------------------------------------------------

COMMAND = {"run": {"command": ["train"]}, "notice": {"seconds": 2}}


def told(device: Device) -> list[tuple[str, int]]:
    """Return (why, time left in microseconds) of the notices that were just given."""
    return [(one.why, one.until_us - device.now_us) for one in device.said(GiveNotice)]


def test_pause_with_a_notice_tells_the_command_and_pauses_it_when_the_time_is_up(
    device: Device,
) -> None:
    process = device.run("a", **COMMAND)
    device.pause("a", notice_us=1_500_000, why="drain", moves=True)
    assert (told(device), device.words()) == ([("drain", 1_500_000)], [])
    assert device.machine.due_us(device.now_us) == device.now_us + 1_500_000
    device.later(1_499_999)
    assert (device.state("a"), device.words()) == ("noticed", [])
    device.later(1)
    assert (device.state("a"), device.words()) == ("pausing", ["pause", "save"])
    device.paused(process)
    assert (device.state("a"), device.told()) == ("paused", ["Paused"])


def test_no_notice_is_longer_than_the_task_asked_for_nor_than_the_one_before(
    device: Device,
) -> None:
    device.run("a", **COMMAND)
    device.pause("a", notice_us=60_000_000, why="reclaim")
    assert told(device) == [("reclaim", 2_000_000)]
    device.later(1_000_000)
    device.pause("a", notice_us=60_000_000, why="drain")
    assert told(device) == [("drain", 1_000_000)]


@pytest.mark.parametrize(
    ("task", "notice_us"), [(COMMAND, 0), ({}, 1_000_000)], ids=["no time", "no field"]
)
def test_pause_is_at_once_without_a_notice(
    device: Device, task: dict[str, Any], notice_us: int
) -> None:
    device.run("a", **task)
    device.pause("a", notice_us=notice_us, why="drain")
    assert (device.state("a"), device.words(), told(device)) == ("pausing", ["pause"], [])


def test_pause_without_a_notice_cuts_a_notice_short(device: Device) -> None:
    device.run("a", **COMMAND)
    device.pause("a", notice_us=1_500_000, why="drain")
    device.pause("a")
    assert (device.state("a"), device.words()) == ("pausing", ["pause"])
    device.later(2_000_000)
    assert device.words() == []


def test_cancel_waits_for_no_notice(device: Device) -> None:
    device.run("a", **COMMAND)
    device.pause("a", notice_us=1_500_000, why="drain")
    device.cancel("a")
    assert (device.state("a"), device.words()) == ("stopping", ["cancel"])
    device.later(GRACE_US)
    assert device.killed() == [(1, "cancel")]


def test_command_is_told_before_its_slot_time_is_over_then_ended(device: Device) -> None:
    process = device.run("a", **COMMAND)
    heard = []
    for second in range(1, 9):
        device.later(1_000_000)
        heard += [(second, *notice) for notice in told(device)]
        device.answer()
    assert heard == [(7, "max_duration", 2_000_000 - 6)]  # each answer before took 1 µs
    assert (device.state("a"), device.killed()) == ("noticed", [])
    device.later(1_000_000)
    assert device.killed() == [(process, "max_duration")]


def test_folder_of_an_ended_command_may_be_stored_beyond_its_slot_time(device: Device) -> None:
    process = device.run("a", **COMMAND)
    for _ in range(8):
        device.later(1_000_000)
        device.answer()
    device.give(ProcessEnding(process=process))
    _let_pass(device, ENDING_US - 1)
    assert device.killed() == []
    device.later(1)
    assert device.killed() == [(process, "max_duration")]
    device.give(ProcessExited(process=process))


def _let_pass(device: Device, us: int) -> None:
    """Let time pass while the island answers."""
    until_us = device.now_us + us
    while device.now_us < until_us:
        device.answer()
        device.later(min(until_us - device.now_us, 1_000_000))


def _run_command(device: Device, task: str, **more: Any) -> int:
    device.launch(task, **{**COMMAND, **more})
    process = device.prepare(task, is_command=True)
    device.answer()
    assert device.round() == [process]
    return process


def test_command_beyond_its_slot_time_may_store_what_it_wrote(device: Device) -> None:
    process = _run_command(device, "a")
    _let_pass(device, 9_000_000)
    assert (device.words(), device.killed()) == (["over"], [])
    _let_pass(device, GRACE_US)
    assert (device.words(), device.killed()) == (["finish"], [])
    device.give(ProcessEnding(process=process))
    _let_pass(device, ENDING_US - 1)
    assert device.killed() == []
    device.later(1)
    assert device.killed() == [(process, "max_duration")]


def test_command_beyond_its_memory_may_store_what_it_wrote(device: Device) -> None:
    process = _run_command(device, "a")
    device.give(KillAsked(process=process, reason="host_memory"))
    assert device.words() == ["finish"]
    device.give(KillAsked(process=process, reason="host_memory"))  # the next look finds the same
    assert (device.words(), device.killed()) == ([], [])
    _let_pass(device, FINISH_US)
    assert device.killed() == [(process, "host_memory")]


def test_cancelled_command_without_the_slot_may_store_what_it_wrote(device: Device) -> None:
    process = _run_command(device, "a")
    device.pause("a")
    device.paused(process)
    device.cancel("a")
    assert (device.words()[-1], device.killed()) == ("cancel", [])
    device.give(ProcessEnding(process=process))
    device.give(ProcessConcluded(process=process, step=3, word="stopped", rests=False))
    device.give(ProcessExited(process=process))
    assert [one.was_stopping for one in device.said(TellVerdict)] == [True]


@pytest.mark.parametrize("seconds", [0, 7])
def test_ended_task_leaves_the_slot_while_the_store_refuses(device: Device, seconds: int) -> None:
    process = _run_command(device, "a")
    _let_pass(device, seconds * 1_000_000)
    device.give(ProcessEnding(process=process))
    device.paused(process, unstored="No space left on device.", wait_us=5)
    (told_now,) = [one for one in device.said(TellIsland) if one.kind is Paused]
    assert told_now.details == {"unstored": "No space left on device.", "wait_us": 5}
    assert (device.state("a"), device.machine.slot.holders) == ("paused", [])
    device.launch("a", 2, **COMMAND)
    device.answer()
    assert device.round() == [process]
    device.give(ProcessConcluded(process=process, step=3, word="finished", rests=False))
    device.give(ProcessExited(process=process))
    assert device.state("a", 2) == "ended"


def test_command_ends_once(device: Device) -> None:
    process = device.run("a", **COMMAND)
    device.give(ProcessEnding(process=process))
    assert device.killed() == []
    device.give(ProcessEnding(process=process))
    assert device.killed() == [(process, "nonsense")]


def test_stopping_worker_tells_a_command_if_there_is_time(device: Device) -> None:
    device.run("a", **COMMAND)
    device.give(LeaveAsked(pause_by_us=device.now_us + 500_000))
    assert told(device) == [("shutdown", 500_000)]
    device.later(500_000)
    assert device.words() == ["pause"]


def test_stopping_worker_pauses_at_once_without_time(device: Device) -> None:
    device.run("a", **COMMAND)
    device.give(LeaveAsked(pause_by_us=device.now_us - 1))
    assert (told(device), device.words()) == ([], ["pause"])


def test_two_halves_have_the_slot_together_and_a_whole_task_waits_for_both() -> None:
    device = Device()
    device.answer()
    first, second = device.begin("a", milli=500), device.begin("b", milli=500)
    device.begin("c")

    def in_the_slot() -> list[str]:
        device.give(SlotDue(is_short=False, away=frozenset()))
        return [holder.task for holder in device.machine.slot.holders]

    assert in_the_slot() == ["a", "b"]
    device.give(ProcessExited(process=first))
    assert in_the_slot() == ["b"]
    device.give(ProcessExited(process=second))
    assert in_the_slot() == ["c"]


# --- functions one after another ------------------------------------------------------------------

FUNCTION = {"run": {"function": "ops:f"}}


def _conclude(device: Device, process: int) -> None:
    device.give(ProcessConcluded(process=process, step=1, word="finished", rests=True))


def test_process_that_rests_frees_the_slot_and_takes_the_next_function(device: Device) -> None:
    process = device.run("t1", **FUNCTION)
    _conclude(device, process)
    assert [one.process for one in device.said(TellVerdict)] == [process]
    assert device.state("t1") == "ended"
    device.launch("t2", **FUNCTION)
    device.give(ProcessRenewed(process=process, stay=("t2", 1)))
    device.give(ProcessPrepared(process=process, step=0))
    assert device.round() == [process]


def test_process_that_rests_too_long_is_ended_and_nobody_is_told(device: Device) -> None:
    process = device.run("t1", **FUNCTION)
    _conclude(device, process)
    assert device.machine.due_us(device.now_us) == device.now_us + REST_US
    device.later(REST_US)
    assert device.killed() == [(process, "rested")]
    device.give(ProcessExited(process=process))
    assert not device.said(TellIsland)
    assert not device.said(DropStay)


def test_cancelled_function_does_not_rest(device: Device) -> None:
    process = device.run("t1", **FUNCTION)
    device.cancel("t1")
    _conclude(device, process)
    assert device.words() == ["end"]
    device.give(ProcessExited(process=process))
    assert device.said(TellVerdict)


def test_function_whose_shared_process_ends_before_it_begins_anew(device: Device) -> None:
    process = device.run("t1", **FUNCTION)
    _conclude(device, process)
    device.launch("t2", **FUNCTION)
    device.give(ProcessRenewed(process=process, stay=("t2", 1)))
    device.give(ProcessExited(process=process))
    assert device.said(FetchInputs) == [FetchInputs(stay=("t2", 1))]
    assert not device.said(TellVerdict)


def test_function_that_waits_long_behind_another_is_given_back(device: Device) -> None:
    process = device.run("t1", **FUNCTION)
    device.launch("t2", beside=True, **FUNCTION)
    assert device.machine.due_us(device.now_us) == device.now_us + BEHIND_US
    device.later(BEHIND_US - 1)
    assert not device.said(TellIsland)
    device.later(1)
    assert device.told() == ["Paused"]
    assert device.state("t2") == "dropped"
    assert device.state("t1") == "running"
    _conclude(device, process)


def test_head_of_a_batch_that_another_function_overtook_is_given_back(device: Device) -> None:
    process = device.run("t0", **FUNCTION)
    device.launch("t1", **FUNCTION)
    device.launch("t2", beside=True, **FUNCTION)
    _conclude(device, process)
    device.give(ProcessRenewed(process=process, stay=("t2", 1)))
    device.give(ProcessPrepared(process=process, step=0))
    assert device.round() == [process]
    device.later(BEHIND_US - 1)
    assert "Paused" not in device.told()
    device.later(1)
    assert device.told()[-1] == "Paused"
    assert device.state("t1") == "dropped"
    assert device.state("t2") == "running"
    _conclude(device, process)


def test_job_that_a_function_overtook_is_not_given_back(device: Device) -> None:
    process = device.run("t0", **FUNCTION)
    device.launch("t1", beside=True)
    device.launch("t2", beside=True, **FUNCTION)
    _conclude(device, process)
    device.give(ProcessRenewed(process=process, stay=("t2", 1)))
    device.give(ProcessPrepared(process=process, step=0))
    assert device.round() == [process]
    device.later(10 * BEHIND_US)
    assert device.state("t1") == "seating"
    _conclude(device, process)


def test_function_at_the_head_of_a_batch_is_never_given_back(device: Device) -> None:
    device.launch("t1", beside=True, **FUNCTION)
    device.later(10 * BEHIND_US)
    assert not device.said(TellIsland)


def test_ends_of_a_batch_are_reported_at_once_after_the_last_one(device: Device) -> None:
    process = device.run("t1", **FUNCTION)
    device.launch("t2", beside=True, **FUNCTION)
    _conclude(device, process)
    assert [one.is_urgent for one in device.said(ReportSoon)] == [False]
    device.give(ProcessRenewed(process=process, stay=("t2", 1)))
    device.give(ProcessPrepared(process=process, step=0))
    assert device.round() == [process]
    _conclude(device, process)
    assert [one.is_urgent for one in device.said(ReportSoon)] == [True]
