"""A picture of one island at one instant, and what was decided from it.

`app.snapshot` draws the picture from rows, `core.decide` looks at it and returns a Plan, and
`app.journal` writes the plan down.  All values are frozen.  Times ending in `_s` are seconds of the
database's clock since 1970; charges are integer micro-device-seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The numbers of the rules F1-F10 that a deployment may set."""

    half_life_s: float = 7 * 86400.0  # 0: usage never fades
    since_s: float = 0.0  # T0 of the lazy decay (`core.fairshare`): the ledger's own
    slice_min_s: float = 1.0
    slice_max_s: float = 60.0
    switch_share: float = 0.02  # a slice is at least so long that switching costs no more
    lost_grace_s: float = 0.0  # how long after its lease a device is still waited for


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """`faded_us` is the lazily decayed usage S of `core.fairshare` (fixed point, rule F2)."""

    id: str
    name: str
    weight: int  # in thousandths: 1.0 is 1000
    faded_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    id: str
    tenant: str
    faded_us: int = 0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The start conditions of a task, as they stand now."""

    waits_for: tuple[str, ...] = ()  # tasks named by `after` or by an input, not yet done
    broken: tuple[str, ...] = ()  # of those, the ones that failed or were cancelled
    not_before_s: float | None = None
    hold: str = ""  # "" or who holds it: "user", "admin"; holding a running task pauses it


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task as the island sees it.

    `seat` is the device it holds or is about to hold; `image_on` the device in whose host memory a
    paused image lies; `saved` whether that image is durable, so that any device may take it.
    """

    id: str
    request: str
    tenant: str
    user: str
    state: str
    epoch: int
    kind: str  # device kind it needs
    memory_bytes: int = 0
    priority: int = 0
    submitted_s: float = 0.0
    conditions: Conditions = field(default_factory=Conditions)
    seat: str | None = None
    launched_s: float = 0.0  # when the order to launch was written
    started_s: float | None = None  # when the device said it runs
    accrued_us: int = 0  # held in this epoch and not yet charged to the tenant
    held_us: int = 0  # held in this epoch, in all
    image_on: str | None = None
    saved: bool = True
    switch_us: int = 0  # what seating it cost the last time
    cancel_asked: bool = False
    attempts: int = 0
    retry_max: int = 0
    retry_at_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    island: str
    policy: Policy
    tenants: Mapping[str, Tenant]
    users: Mapping[str, User]
    devices: Mapping[str, Device]
    tasks: Mapping[str, Task]


# --- what was decided ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One move of one task.

    `move` is a move of `core.lifecycle`; `device` is the seat that a Launch takes.  `rule` cites
    F1-F10 or another named rule, and `because` is one sentence for the task's owner.
    `against` is the task that gains or gives, where there is one.
    """

    task: str
    move: str
    rule: str
    because: str
    device: str | None = None
    against: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a task waits (rule F10): a stable code, a sentence, and what would unblock it."""

    code: str
    message: str
    next_action: str  # "wait", "change_request", "ask_admin"
    unblocked_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Decisions in the order in which they were made; reasons for every task that still waits.

    `places` is each waiting task's place in the island's order, from 1.  Nothing will change by
    the mere passing of time before `look_again_s`.
    """

    decisions: tuple[Decision, ...] = ()
    reasons: Mapping[str, tuple[Reason, ...]] = field(default_factory=dict)
    places: Mapping[str, int] = field(default_factory=dict)
    look_again_s: float | None = None
