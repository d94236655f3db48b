"""Defines what a device's state machine remembers of each stay and of each process."""

from __future__ import annotations

from dataclasses import dataclass, field

from app.core.device.stay_state import OVER, StayState
from app.core.model.device_choice import WHOLE_MILLI
from app.core.model.protocol.messages import Launch, Order, Resize

# in microseconds: how long a function may wait on the device behind others before it is returned to
# the queue
BEHIND_US = 2_000_000


@dataclass(slots=True, eq=False)
class StayRecord:
    """Records one epoch of one task on the device.

    A stay `is_confirmed` once the island answered "keep" to a report that named it, or if its order
    was so fresh that this is the only possible answer. Only a confirmed stay may take the slot, so
    a late order never runs a task.
    """

    task: str
    epoch: int
    arrived_us: int = 0
    budget_us: int = 0  # slot time that the stay may still use
    is_remote: bool = False  # remote ranks; their coordinator host reports for them
    state: StayState = StayState.SEATING
    is_confirmed: bool = False
    is_linked: bool = True  # all hosts of its gang are connected
    # a paused process of the task, which cannot go on here, must make its image durable first
    waits_for_image: bool = False
    step: int = 0
    order_seq: int = 1  # the highest order that was obeyed
    # seq -> order that arrived before an earlier one
    early: dict[int, Order] = field(default_factory=dict)
    process: ProcessRecord | None = None
    successor: str = ""  # the task that this one yields to; it may prepare first
    yield_by_us: int | None = None  # when it yields at the latest
    is_moving: bool = False  # another device waits for its image
    notice_us: int = 0  # the notice that the task asks for; 0: none
    noticed: str = ""  # why it got a notice (`provisions.notice.NoticeReason`), or empty
    noticed_until_us: int | None = None  # when it is paused after a notice
    # slots on which the task is to begin
    launch_slots: list[int] = field(default_factory=lambda: [1])
    slots: list[int] = field(default_factory=lambda: [1])  # slots of its ranks, by host
    guests: list[str] = field(default_factory=list)  # further devices that its sandbox shows
    secrets_mark: str = ""  # changes if the values of its secrets change
    milli: int = WHOLE_MILLI  # thousandths of the device that the task takes
    is_function: bool = False
    # when a function that was launched behind others is given back unless it has begun
    behind_until_us: int | None = None
    wanted: Resize | None = None  # an ordered resize that is not done yet
    slot_since_us: int | None = None
    # since when the slot is empty for this stay, which is to begin there (`SlotTurns.claim`)
    claims_since_us: int | None = None
    before_us: int = 0  # time of its earlier slices and claims
    prepared_us: int | None = None  # time of its claims; None until it has had the slot

    @classmethod
    def of(cls, launch: Launch, now_us: int) -> StayRecord:
        is_remote, notice = launch.host > 0, launch.spec.notice
        is_function = launch.spec.run.kind == "function"
        return cls(
            task=launch.task,
            epoch=launch.epoch,
            arrived_us=now_us,
            budget_us=launch.budget_us,
            is_remote=is_remote,
            is_linked=is_remote or len(launch.seats) == 1,
            order_seq=launch.seq,
            launch_slots=launch.seats,
            guests=launch.guests,
            secrets_mark=launch.secrets.get("mark", ""),
            notice_us=0 if is_remote or notice is None else round(notice.seconds * 1e6),
            milli=launch.spec.devices.choice.fraction_milli,
            is_function=is_function,
            behind_until_us=now_us + BEHIND_US if is_function and launch.beside else None,
        )

    @property
    def key(self) -> tuple[str, int]:
        return self.task, self.epoch

    @property
    def is_over(self) -> bool:
        return self.state in OVER

    @property
    def is_between_slices(self) -> bool:
        """True while another task that shares the device has its slice."""
        return self.state == StayState.RUNNING and self.slot_since_us is None

    @property
    def is_started(self) -> bool:
        """True if the stay has had the slot."""
        return self.prepared_us is not None

    def held_us(self, now_us: int) -> int:
        """Return how long the stay has held the device, its start included (rule F1)."""
        since_us = self.claims_since_us if self.slot_since_us is None else self.slot_since_us
        return self.before_us + (0 if since_us is None else now_us - since_us)

    def left_us(self, now_us: int) -> int:
        """Return the slot time that is left to the stay; its start does not count."""
        return self.budget_us - self.held_us(now_us) + (self.prepared_us or 0)

    def set_claim(self, is_claimed: bool, now_us: int) -> None:
        """Let an empty slot count as held by this stay from now on, or no longer."""
        if is_claimed and self.claims_since_us is None:
            self.claims_since_us = now_us
        elif not is_claimed and self.claims_since_us is not None:
            self.before_us, self.claims_since_us = self.held_us(now_us), None

    @property
    def may_claim(self) -> bool:
        """True if the stay is to begin here, or was and has not left yet."""
        is_here = self.is_confirmed and not (self.is_remote or self.is_over)
        return is_here and not self.is_started and self.state != StayState.PAUSED


@dataclass(slots=True, eq=False)
class ProcessRecord:
    """Records a resident process.

    `kill_reason` is why it is killed, or "". If there are several reasons, the first one counts.
    """

    id: int
    task: str
    stay: StayRecord
    deadline_us: int  # until when it must be prepared
    is_command: bool = False
    is_prepared: bool = False
    is_renewed: bool = False  # it ran another function before
    rests_until_us: int | None = None  # while it rests: when it ends unless a function comes
    is_away: bool = False  # the process's memory is off the device, or not granted yet
    yields: bool = False  # the process was told that its slice is over
    is_still: bool = False  # the device's trust has ended, and it has stopped
    has_state: bool = False  # the process has had the slot, so it has state to lose
    saved_step: int | None = None  # step of the newest durable image
    paused_us: int = 0
    step_since_us: int = 0  # earliest time at which its present step may have begun
    step_us: int = 0  # how long its steps last: the longest of the last ones
    kill_us: int | None = None  # when its grace period after a cancel ends
    # until when it may store the folder and the results of its ended command, beyond its limits
    ending_until_us: int = 0
    is_ending: bool = False  # it has said that its command ended
    # limit because of which its command was told to end: a kill reason, or ""
    stop_reason: str = ""
    kill_reason: str = ""

    @property
    def is_resting(self) -> bool:
        """True between two functions that run in the process."""
        return self.rests_until_us is not None

    @property
    def is_kept(self) -> bool:
        """True if its state is durable as far as that is possible; for a command: if its working
        folder is.
        """
        return self.is_resting or not self.has_state or self.saved_step == self.stay.step

    def begin_again(self, stay: StayRecord, deadline_us: int) -> None:
        """Take the stay of the next function, and forget everything about the last one."""
        self.task, self.stay, stay.process = stay.task, stay, self
        self.deadline_us, self.rests_until_us = deadline_us, None
        self.is_prepared, self.is_renewed, self.has_state = False, True, False
        self.step_since_us = self.step_us = 0

    def stepped(self, steps: int, now_us: int) -> None:
        """Count steps that have ended since the last call."""
        took_us = (now_us - self.step_since_us) // max(1, steps)
        self.step_us = max(took_us, self.step_us - self.step_us // 8)
        self.step_since_us = now_us

    def longest_step_us(self, now_us: int) -> int:
        """Return how long its longest step takes, as far as is known; the step that runs now
        counts, too.

        A command can be frozen at any moment, so it has no steps to wait for. Remote ranks report
        no steps.
        """
        if self.is_command or self.stay.is_remote:
            return 0
        return max(self.step_us, 0 if self.is_still else now_us - self.step_since_us)

    @property
    def may_begin(self) -> bool:
        """True if the process may take the slot for the first time in its stay."""
        stay = self.stay
        return (
            stay.state == StayState.SEATING
            and stay.is_confirmed
            and stay.is_linked
            and self.is_prepared
            and not self.is_away
            and not self.kill_reason
        )
