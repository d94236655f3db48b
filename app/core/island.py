"""A picture of one island at one instant, and what was decided from it.

`app.snapshot` draws the picture from rows, `core.decide` looks at it and returns a Plan, and
`app.journal` writes the plan down.  All values are frozen.  Times ending in `_s` are seconds of the
database's clock since 1970; charges are integer micro-device-seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter

TIER_SHARE = {"premium": 0.95, "standard": 0.70, "basic": 0.0}
TIER_WINDOW_S = 3600.0
TIERS = ("basic", "standard", "premium")  # in the order in which a shortage is shed


#: Who may go before a gang that does not fit: nobody, who delays it by nothing, anybody.
BACKFILLS = ("strict", "easy", "greedy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The numbers of the rules F1-F10 that a deployment may set."""

    half_life_s: float = 7 * 86400.0  # 0: usage never fades
    since_s: float = 0.0  # T0 of the lazy decay (`core.fairshare`): the ledger's own
    idle_credit_s: float = 3 * 86400.0  # F3: who comes back is ahead by no more of its fair share
    slice_min_s: float = 1.0
    slice_max_s: float = 60.0
    fresh_s: float = 60.0  # F8: a task that held devices for less, or for no slice, is fresh
    switch_share: float = 0.02  # a slice is at least so long that switching costs no more
    lost_grace_s: float = 0.0  # how long after its lease a device is still waited for
    turns: bool = True  # rules F5, F6, F8: may anybody be paused for another?
    backfill: str = "easy"  # F7: behind a gang that does not fit; BACKFILLS
    grow_after_s: float = 60.0  # so long (and a turn) after it was seated or resized a task grows
    sharers_max: int = 0  # so many graphs at most take turns on one device (`core.sharing`)
    homebound: bool = False  # ranks are conducted by their task's home (`core.elastic`)
    patience_s: float = 36000.0  # F7: a gang that waited so long goes before all others,
    wide_share: float = 0.02  # if it needs this part of its kind; a narrower one waits longer
    aged_share: float = 0.5  # F7: no more than this part of the devices is held by such gangs
    tier_share: Mapping[str, float] = field(default_factory=lambda: dict(TIER_SHARE))
    tier_window_s: float = TIER_WINDOW_S  # F9: of every such time the share of its tier is held


def _check_above_0(id: str, word: str, number: int) -> None:
    """Usage of cost 0 never counts, and a score divides by weight: raises ValueError."""
    if number <= 0:
        raise ValueError(f"{id}: {word} {number} is not above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A node of the tree; `parent` is None at the top.  What it used, its users used.

    `guarantee` and `limit` (rule F4) are devices by kind; a limit also of all kinds together, under
    "*".  `most_running` bounds the tasks on devices of it and of all below it.
    """

    id: str
    name: str
    weight: int  # in thousandths: 1.0 is 1000
    parent: str | None = None
    guarantee: Mapping[str, int] = field(default_factory=dict)
    limit: Mapping[str, int] = field(default_factory=dict)
    most_running: int | None = None

    def __post_init__(self) -> None:
        _check_above_0(self.id, "weight", self.weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """`faded_us` is the lazily decayed usage S of `core.fairshare` (fixed point, rule F2)."""

    id: str
    tenant: str
    faded_us: int = 0
    weight: int = 1000

    def __post_init__(self) -> None:
        _check_above_0(self.id, "weight", self.weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lift:
    """What a tenant, or one of its users, is taken to have used of a kind while it was away.

    `faded_us` is like a user's, but in thousandths of cost; it counts in comparisons about devices
    of this kind on this island only, and is no part of what was used (`core.credit`).
    """

    tenant: str
    user: str = ""  # "" is the tenant itself
    kind: str
    faded_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device takes new work while it is `up` and its lease has not ended."""

    id: str
    host: str
    kind: str  # "cpu", "cuda", ...
    up: bool = True
    cordoned: bool = False
    memory_bytes: int = 0
    cost: int = 1000  # thousandths: what a second of this kind costs
    lease_until_s: float = 0.0

    def __post_init__(self) -> None:
        _check_above_0(self.id, "cost", self.cost)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a gang that spans islands and its tickets let each other do (`core.span`).

    `tickets` are the islands on which tickets must be held before it may have seats; an `idle`
    ticket's gang wants none now.  Who sits and `lets_go` must leave: a ticket because its gang is
    "over" or it is to go "back", a gang because the island of that name wants its seats back.
    """

    tickets: tuple[str, ...] = ()
    idle: bool = False
    lets_go: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The start conditions of a task, as they stand now."""

    waits_for: tuple[str, ...] = ()  # tasks named by `after` or by an input, not yet done
    broken: tuple[str, ...] = ()  # of those, the ones that failed or were cancelled
    not_before_s: float | None = None
    hold: str = ""  # "" or who holds it: "user", "admin"; holding a running task pauses it
    terms: Terms = field(default_factory=Terms)


RESTARTS = "restart"  # the capability of what cannot move: elsewhere it begins again


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task as the island sees it.

    `seats` are the devices it holds or is about to hold; `image_on` the device in whose host memory
    a paused image lies; `saved` whether that image is durable, so that any device may take it.
    `away` are the times (from, to) of the last hour in which it waited after it had started (rule
    F9); the one that lasts is not among them.  It is `movable` if its state can be
    captured; `moves_to` is the device that is kept for it while it is moved there ("": asked for,
    and not begun); it `stops` when only the last difference is left.

    An elastic task needs `width` devices and can use `width_max`, all on one host but if it may
    live `across_hosts`.  Who needs several of `one_host` waits until one has so many free.  What it
    holds beyond `width` is lent to it, and counts as free for who waits (`core.elastic`).  While it
    is made smaller it still holds what it `leaves`.  `accrued_us` and `held_us` are since it was
    resized, if it was.

    A gang that spans islands, and each of its tickets, name the `gang`; a `ticket` keeps seats for
    it and runs nothing.

    A `graph` of one executor can take turns with others on a device; if it `shares` one, or did so
    in this epoch, it is charged for what the device says that it held, and not before it says so.
    """

    id: str
    request: str
    tenant: str
    user: str
    state: str
    epoch: int
    kind: str  # device kind it needs
    memory_bytes: int = 0
    width: int = 1  # devices it needs at once
    width_max: int = 0  # and can use; 0: no more than it needs
    across_hosts: bool = False
    one_host: bool = False
    tier: str = "standard"
    priority: int = 0
    submitted_s: float = 0.0
    conditions: Conditions = field(default_factory=Conditions)
    waiting_since_s: float | None = None  # None: since it was submitted
    waited_s: float = 0.0  # in earlier waits
    expected_s: float | None = None  # how much longer it will run, if anybody knows
    away: tuple[tuple[float, float], ...] = ()
    movable: bool = False
    moves_to: str | None = None
    stops: bool = False
    seats: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    launched_s: float = 0.0  # when the order to launch was written
    started_s: float | None = None  # when the device said it runs
    resized_s: float | None = None  # since when it is charged for what it holds now; None: always
    accrued_us: int = 0  # held in this epoch and not yet charged to the tenant
    held_us: int = 0  # held in this epoch, in all
    had_us: int = 0  # held in earlier epochs, in all
    image_on: str | None = None
    saved: bool = True
    restarts: bool = False  # a command: it goes on only there, and anywhere else begins again
    switch_us: int = 0  # what seating it cost the last time
    graph: bool = False
    gang: str = ""
    ticket: bool = False
    shares: bool = False
    cost: int = 0  # of a second in this epoch, if it is charged by its memory (`core.dominant`)
    cancel_asked: bool = False
    attempts: int = 0
    retry_max: int = 0
    retry_at_s: float = 0.0

    @property
    def seat(self) -> str | None:
        """The first of its devices."""
        return self.seats[0] if self.seats else None

    @property
    def elastic(self) -> bool:
        return self.width_max > self.width or len(self.holds) > self.width

    @property
    def holds(self) -> tuple[str, ...]:
        """All devices that it is charged for."""
        return self.seats + self.leaves if self.leaves else self.seats

    @property
    def held_since_s(self) -> float | None:
        """Since when it holds just these; None if it does not run yet."""
        return self.started_s if self.resized_s is None else self.resized_s


_FIELDS = tuple(field_.name for field_ in fields(Task))
_VALUES = attrgetter(*_FIELDS)
_SETTERS = {name: getattr(Task, name).__set__ for name in _FIELDS}


def changed(task: Task, **after: object) -> Task:
    """As `dataclasses.replace`, at half its cost: every move of every task makes one."""
    new: Task = object.__new__(Task)
    for set_, value in zip(_SETTERS.values(), _VALUES(task), strict=True):
        set_(new, value)
    for name, value in after.items():
        _SETTERS[name](new, value)
    return new


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    island: str
    policy: Policy
    tenants: Mapping[str, Tenant]
    users: Mapping[str, User]
    devices: Mapping[str, Device]
    tasks: Mapping[str, Task]
    lifts: tuple[Lift, ...] = ()


# --- what was decided ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One move of one task.

    `move` is a move of `core.lifecycle`; `devices` are the seats that a Launch takes, or all that
    it has after a Splice.  `rule` cites
    F1-F10 or another named rule, and `because` is one sentence for the task's owner.
    `against` is the task that gains or gives, where there is one.  `cost` is what a second of a
    launched task costs, in thousandths, if that is not what its devices cost.  Who is launched and
    `shares` takes turns with those that are on its device.
    """

    task: str
    move: str
    rule: str
    because: str
    devices: tuple[str, ...] = ()
    against: str | None = None
    cost: int = 0
    shares: bool = False

    @property
    def device(self) -> str | None:
        """The first of its devices."""
        return self.devices[0] if self.devices else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What would end a reason, for a program: an action of `core.explain`, and how far it goes."""

    action: str
    value: int | float | str | tuple[str, ...] | None = None
    of: str = ""  # the kind of device, or the task or device that is meant


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a task waits (rule F10): a stable code, a sentence, and what would unblock it."""

    code: str
    message: str
    next_action: str  # "wait", "change_request", "ask_admin"
    unblocked_by: str = ""
    change: Change


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Decisions in the order in which they were made; reasons for every task that still waits.

    `places` is each waiting task's place in the island's order, from 1.  Nothing will change by
    the mere passing of time before `look_again_s`.  It was made at `now_s`, when the tasks that it
    moves looked as in `before`.  `lifts` are those that are new, in place of the same one's of old.
    """

    decisions: tuple[Decision, ...] = ()
    reasons: Mapping[str, tuple[Reason, ...]] = field(default_factory=dict)
    places: Mapping[str, int] = field(default_factory=dict)
    look_again_s: float | None = None
    now_s: float = 0.0
    before: Mapping[str, Task] = field(default_factory=dict, compare=False)
    lifts: tuple[Lift, ...] = ()
