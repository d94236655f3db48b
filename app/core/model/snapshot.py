"""Defines a snapshot of one island at one instant, and the plan decided from it.

`app.scheduling.snapshot_reader` builds the snapshot from rows, `core.scheduling.cycle` turns it
into a Plan, and `app.scheduling.journal` writes the plan to the database. All values are frozen.
Times ending in `_s` are seconds of the database's clock since 1970; charges are integer
micro-device-seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter

from app.core.model.decision_rule import DecisionRule
from app.core.model.device_choice import NO_TRAITS, DeviceTraits, choice_in
from app.core.model.retry_decision import AvoidedDevice

TIER_SHARE = {"premium": 0.95, "standard": 0.70, "basic": 0.0}
TIER_WINDOW_S = 3600.0
TIERS = ("basic", "standard", "premium")  # a shortage sheds the first tier first


#: Which tasks may start before a gang that does not fit: none, those that do not delay it, or any.
BACKFILLS = ("strict", "easy", "greedy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The numbers of the rules F1-F10 that a deployment may set."""

    half_life_s: float = 7 * 86400.0  # s; 0: usage never fades
    since_s: float = 0.0  # T0 of the lazy decay (`core.fairness.usage_decay`), as in the ledger
    # F3: s of its fair share; the most that a returning branch is ahead
    idle_credit_s: float = 3 * 86400.0
    slice_min_s: float = 1.0
    slice_max_s: float = 600.0
    # F8: seconds; a task is fresh until it has held devices for this long and for one full slice
    fresh_s: float = 60.0
    switch_share: float = 0.02  # F8: largest part of a slice that switching may cost
    lost_grace_s: float = 0.0  # s after its lease before a device counts as lost
    turns: bool = True  # F5, F6, F8: may a task be paused for another?
    backfill: str = "easy"  # F7: one of BACKFILLS
    # s (at least a turn) after being seated or resized before a task grows
    grow_after_s: float = 60.0
    # most graphs that take turns on one device (`core.scheduling.sharing.time_sharing`)
    sharers_max: int = 0
    # do coordinator hosts lead the ranks of their tasks (`core.scheduling.reclaim.elastic`)?
    homebound: bool = False
    # F7: seconds after which a waiting gang goes before all other tasks
    patience_s: float = 36000.0
    # F7: largest part of the devices of a kind that may stand idle, kept for gangs; 0: none is kept
    wait_share: float = 0.02
    # F7: devices are kept for gangs that need at least this part of the devices that suit them
    waits_from: float = 0.3
    wide_share: float = 0.02  # F7: part of a kind; gangs that need less wait longer
    aged_share: float = 0.5  # F7: largest part of devices for gangs that lost patience
    tier_share: Mapping[str, float] = field(default_factory=lambda: dict(TIER_SHARE))
    # F9: seconds; in every window of this length a task gets the share of its tier
    tier_window_s: float = TIER_WINDOW_S


def _check_above_0(id: str, word: str, number: int) -> None:
    """Raise ValueError if a number is not above 0: a cost of 0 would never count, and a weight
    divides.
    """
    if number <= 0:
        raise ValueError(f"{id}: {word} {number} is not above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardTenant:
    """Describes a tenant. Its usage is the usage of its users."""

    id: str
    name: str
    weight: int  # in thousandths: 1.0 is 1000
    parent: str | None = None  # tenant above it; None at the top
    guarantee: Mapping[str, int] = field(default_factory=dict)  # devices by kind (rule F4)
    # devices by kind (rule F4); under "*" of all kinds together
    limit: Mapping[str, int] = field(default_factory=dict)
    # most tasks on devices, of the tenant and all tenants below it; None: no limit
    most_running: int | None = None
    # Faded usage that counts in comparisons only, because the weight has changed
    # (`core.fairness.usage_decay.carried_over`).
    carried_us: int = 0
    # what its budget has put in force, by kind of device (`core.fairness.budget`), and until when
    exhausted: Mapping[str, str] = field(default_factory=dict)
    budget_ends_s: float = 0.0

    def __post_init__(self) -> None:
        _check_above_0(self.id, "weight", self.weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardUser:
    """Describes a user, with its decayed usage `faded_us` (`core.fairness.usage_decay`, rule F2).

    The rest is as in `BoardTenant`; the limits and the budget hold for the user alone.
    """

    id: str
    tenant: str
    faded_us: int = 0
    weight: int = 1000
    carried_us: int = 0
    guarantee: Mapping[str, int] = field(default_factory=dict)  # what is reserved for it now
    limit: Mapping[str, int] = field(default_factory=dict)
    most_running: int | None = None
    exhausted: Mapping[str, str] = field(default_factory=dict)
    budget_ends_s: float = 0.0

    def __post_init__(self) -> None:
        _check_above_0(self.id, "weight", self.weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleCreditFloor:
    """Holds the idle-credit floor of a tenant or user: usage that is assumed for a time without
    work.

    `faded_us` is like a user's, but in thousandths of cost. The floor counts only in comparisons
    about devices of this kind on this island, and is no part of the usage
    (`core.scheduling.idle_credit`).
    """

    tenant: str
    user: str = ""  # "" means the tenant itself
    kind: str
    faded_us: int


BATCH_US = 1_000_000  # most device time that a batch of functions is expected to take
BATCH_MOST = 64  # most functions in a batch


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize:
    """Says how many functions of a user a device of a kind gets at once
    (`core.scheduling.sharing.function_batches`).
    """

    user: str
    kind: str
    size: int = 1

    def after(self, held_us: int) -> BatchSize:
        """Return the size after a function that held its device for `held_us`."""
        fitting = BATCH_US // max(1, held_us)
        return replace(self, size=max(1, min(BATCH_MOST, 2 * self.size, fitting)))


@dataclass(frozen=True, slots=True, kw_only=True)
class GangWait:
    """Records what gangs that wait for a kind of device cost (rule F7,
    `core.scheduling.gangs.gang_waits`).
    """

    kind: str
    # no other gang may begin to wait before this time: then the past waits are paid for
    again_s: float
    gang: str = ""  # gang for which devices are kept; "" for none
    epoch: int = 0  # epoch of the gang
    at_s: float = 0.0  # when the last device of the gang is expected
    idle: int = 0  # number of kept devices that stand free now, though other tasks could run there
    idle_since_s: float = 0.0  # since when these devices stand free
    lost_s: float = 0.0  # device-seconds that stood free earlier in this wait
    each_s: float = 0.0  # how long each device of the last gang stood free for it


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardDevice:
    """Describes a device; it gets new work while it is `up`, its lease lasts and it `takes_work`.

    Its tasks count as lost `grace_s` after its lease, as a long step may still run there. Only
    tasks whose choice suits its `traits` start on it.
    """

    id: str
    host: str
    kind: str  # "cpu", "cuda", ...
    up: bool = True
    cordoned: bool = False
    stopping: bool = False  # the device's worker is about to stop
    unfit: str = ""  # why its worker cannot serve the device, or a health rule has cordoned it
    memory_bytes: int = 0
    cost: int = 1000  # thousandths: the cost of a second of this kind
    lease_until_s: float = 0.0
    grace_s: float = 0.0
    traits: DeviceTraits = NO_TRAITS
    rack: str = ""  # rack of the host; "" if unknown
    inside: tuple[str, ...] = ()  # location inside the host, from wide to narrow
    # id of the tenant or user for which a reservation keeps this very device now; "": for nobody
    reserved_for: str = ""

    def __post_init__(self) -> None:
        _check_above_0(self.id, "cost", self.cost)

    @property
    def takes_work(self) -> bool:
        return not (self.cordoned or self.stopping)

    @property
    def location(self) -> tuple[str, ...]:
        """The device's location from wide to narrow (`core.scheduling.gangs.nearness`)."""
        return self.rack, self.host, *self.inside


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Lists what a multi-island gang and its tickets demand of each other
    (`core.scheduling.gangs.island_gangs`).

    `tickets` are the islands on which tickets must be held before the gang may be seated. The gang
    of an `idle` ticket does not want devices now. A task with `lets_go` must release its devices. A
    ticket leaves because its gang is "over" or because it must go "back"; a gang leaves because the
    island of that name wants its devices back.
    """

    tickets: tuple[str, ...] = ()
    idle: bool = False
    lets_go: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The start conditions of a task, as they are now."""

    waits_for: tuple[str, ...] = ()  # tasks named by `after` or by an input that are not done yet
    # tasks named by `after` or by an input that failed or were cancelled before they gave it
    broken: tuple[str, ...] = ()
    # how the task stands to the requests that it comes after (`core.model.request_needs.Standing`)
    standing: str = ""
    not_before_s: float | None = None
    # how it stands to the reservation that it names (`core.model.reserved_task`); a running task
    # that is outside its windows is paused
    reservation: str = ""
    # "user" or "admin" if held by one; "" if not held. A running task that is held is paused
    hold: str = ""
    terms: Terms = field(default_factory=Terms)


RESTARTS = "restart"  # capability of commands: on another device they restart unless they can move


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardTask:
    """Describes a task as the island sees it.

    An elastic task needs `width` devices and can use `width_max`. Devices beyond `width` are lent
    to the task and count as free for waiting tasks (`core.scheduling.reclaim.elastic`).

    After a resize, `accrued_us` and `held_us` count from the resize on. A multi-island gang and
    each of its tickets name the `gang`.
    """

    id: str
    request: str
    tenant: str
    user: str
    state: str
    epoch: int
    kind: str  # kind of device that the task needs
    memory_bytes: int = 0
    width: int = 1  # devices needed at once
    width_max: int = 0  # most devices that the task can use; 0: no more than `width`
    across_hosts: bool = False  # False: all devices of an elastic task are on one host
    one_host: bool = False  # True: a gang that waits until one host has enough free devices
    choice: str = ""  # which devices suit the task (`core.model.device_choice`)
    tier: str = "standard"
    priority: int = 0
    submitted_s: float = 0.0
    conditions: Conditions = field(default_factory=Conditions)
    waiting_since_s: float | None = None  # since when the task waits; None: since it was submitted
    waited_s: float = 0.0  # in s: the sum of earlier waits
    expected_s: float | None = None  # s that the task is expected to run on; None if unknown
    # Intervals (from, to) of the last hour in which the task waited after it had started (rule F9),
    # without a wait that still lasts.
    away: tuple[tuple[float, float], ...] = ()
    movable: bool = False  # True: the state of the task can be captured
    # device kept for the task while it is moved there; "": move requested, but not begun
    moves_to: str | None = None
    stops: bool = False  # True: in a move, only the last difference is left to copy
    seats: tuple[str, ...] = ()  # devices that the task holds or is about to hold
    leaves: tuple[str, ...] = ()  # devices that the task still holds while it is made smaller
    launched_s: float = 0.0  # when the Launch order was written
    started_s: float | None = None  # when the device reported that the task runs
    # since when the task is charged for its present devices; None: since its launch
    resized_s: float | None = None
    # device time of this epoch before the task started: charged, but no part of its turn
    prepared_us: int = 0
    accrued_us: int = 0  # device time of this epoch not yet charged to the tenant
    held_us: int = 0  # device time of this epoch, in total
    had_us: int = 0  # device time of earlier epochs after their starts, in total
    image_on: str | None = None  # device with the task's paused image in its host's memory
    image_with: tuple[str, ...] = ()  # further devices of a command whose processes are frozen
    saved: bool = True  # True: the image on `image_on` is durable, so that any device may take it
    restarts: bool = False  # a command: restarts elsewhere unless its processes are `movable`
    # what a device must offer so that the processes of a movable command are restored on it
    # (`provisions.process_images`)
    goes_on_with: str = ""
    switch_us: int = 0  # what the last switch to this task cost
    # True: a graph of one executor, which can take turns with other tasks on a device
    graph: bool = False
    # True: a function, which can be launched behind other functions on a device
    function: bool = False
    gang: str = ""
    ticket: bool = False  # True: keeps devices for the `gang` and runs nothing
    # True: the task takes turns on its device, or did so in this epoch, or was launched behind
    # other functions. It is charged for the use that the device reports, and only once the device
    # reports it.
    shares: bool = False
    # thousandths per second in this epoch, if charged by memory (`core.fairness.dominant_resource`)
    # or for a fraction
    cost: int = 0
    cancel_asked: bool = False
    attempts: int = 0
    retry_max: int = 0
    retry_at_s: float = 0.0
    avoids: tuple[AvoidedDevice, ...] = ()  # devices on which it failed, some for too long by now
    unstored: str = ""  # why the store refuses its newest checkpoint or output

    @property
    def hosts(self) -> int:
        """On how many hosts its devices lie, as many on each; 0: on one, or on any number if
        `across_hosts`.
        """
        return choice_in(self.choice).hosts if self.choice else 0

    @property
    def waits_since_s(self) -> float:
        """When the task began its present wait."""
        return self.submitted_s if self.waiting_since_s is None else self.waiting_since_s

    @property
    def seat(self) -> str | None:
        """The first of the task's devices."""
        return self.seats[0] if self.seats else None

    @property
    def is_bound(self) -> bool:
        """True if the task is a command that begins again when it goes to another device."""
        return self.restarts and not self.movable

    @property
    def elastic(self) -> bool:
        return self.width_max > self.width or len(self.holds) > self.width

    @property
    def holds(self) -> tuple[str, ...]:
        """All devices that the task is charged for."""
        return self.seats + self.leaves if self.leaves else self.seats

    @property
    def held_since_s(self) -> float | None:
        """The time since which the task holds exactly these devices; None if it does not run
        yet.
        """
        return self.started_s if self.resized_s is None else self.resized_s


_FIELDS = tuple(field_.name for field_ in fields(BoardTask))
_VALUES = attrgetter(*_FIELDS)
_SETTERS = {name: getattr(BoardTask, name).__set__ for name in _FIELDS}


def changed(task: BoardTask, **after: object) -> BoardTask:
    """Return a copy with changes, as `dataclasses.replace` does, at half the cost: every move of a
    task makes a copy.
    """
    new: BoardTask = object.__new__(BoardTask)
    for set_, value in zip(_SETTERS.values(), _VALUES(task), strict=True):
        set_(new, value)
    for name, value in after.items():
        _SETTERS[name](new, value)
    return new


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    island: str
    policy: Policy
    tenants: Mapping[str, BoardTenant]
    users: Mapping[str, BoardUser]
    devices: Mapping[str, BoardDevice]
    tasks: Mapping[str, BoardTask]
    lifts: tuple[IdleCreditFloor, ...] = ()
    waits: tuple[GangWait, ...] = ()
    batches: tuple[BatchSize, ...] = ()


# --- the plan -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDecision:
    """Describes a move of a task."""

    task: str
    move: str  # a move of `core.model.lifecycle`
    rule: DecisionRule
    because: str  # one sentence for the task's owner
    # the devices that a Launch takes, or all that the task has after a Splice
    devices: tuple[str, ...] = ()
    against: str | None = None  # the task that gains or gives, if there is one
    cost: int = 0  # thousandths per second of a launched task; 0: the cost of its devices
    # True: a launched task takes turns with the tasks on its device; a function runs after them
    shares: bool = False

    @property
    def device(self) -> str | None:
        """The first of the devices."""
        return self.devices[0] if self.devices else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Describes a change that would end a reason: an action of `core.explanation.waiting_reasons`,
    and how much of it.
    """

    action: str
    value: int | float | str | tuple[str, ...] | None = None
    of: str = ""  # the kind of device, or the task or device that is meant


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Says why a task waits (rule F10): a stable code, a sentence, and what would end it."""

    code: str
    message: str
    next_action: str  # "wait", "change_request", "ask_admin"
    unblocked_by: str = ""
    change: Change


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Lists decisions, and reasons for every task that still waits."""

    decisions: tuple[PlanDecision, ...] = ()  # in the order in which they were made
    reasons: Mapping[str, tuple[Reason, ...]] = field(default_factory=dict)
    # by task: its place in the island's order, from 1
    places: Mapping[str, int] = field(default_factory=dict)
    # before this time nothing changes by the mere passing of time
    look_again_s: float | None = None
    now_s: float = 0.0  # when the plan was made
    # by id: the moved tasks as they were at `now_s`
    before: Mapping[str, BoardTask] = field(default_factory=dict, compare=False)
    # new idle-credit floors; each replaces an older floor of the same tenant or user and kind
    lifts: tuple[IdleCreditFloor, ...] = ()
