"""Gives every waiting task all reasons why it waits, each with what would end it (rule F10).

`core.scheduling.blockers` finds what stands in the way; this module writes the sentences. They
contain numbers, but nothing that counts down, so that a page does not flicker. Other tenants appear
only as "others", and tenants above the task's own as "a tenant above yours": no user learns their
names.

A reason says twice what would end it: in words, and as a `Change` that a program can apply. The
change is the smallest one that ends this reason; other reasons may remain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from app.core.model.device_choice import WHOLE_MILLI, choice_in
from app.core.model.device_fraction import told_fraction
from app.core.model.lot_members import LotCounts
from app.core.model.provisions import session
from app.core.model.request_needs import RequestStanding
from app.core.model.reserved_task import NamedReservation, ReservationStanding
from app.core.model.retry_decision import HELD_BY_RULE, AvoidedDevice
from app.core.model.rungs import HELD_AT_RUNG, PROMOTED
from app.core.model.snapshot import BoardTask, Change, Reason, Terms
from app.core.units import counted

NO_NAMES: Mapping[str, str] = {}
UNNAMED = NamedReservation()

#: Every code, with the next action: "wait", "change_request" or "ask_admin".  The codes are in the
#: order in which the reasons have to end (`nearest`).
CODES = {
    "HELD_BY_ADMIN": "ask_admin",
    "HELD_BY_USER": "change_request",
    "HELD_BY_RULE": "change_request",
    "IDLE_SESSION": "change_request",
    "LOT_HELD": "change_request",
    "LOT_FAILURES": "change_request",
    "LOST_AT_RUNG": "wait",
    "LOT_ROOM": "wait",
    "REQUEST_MISSED": "change_request",
    "AFTER_REQUEST": "wait",
    "DEPENDENCY": "wait",
    "RESERVATION_OVER": "change_request",
    "OUTSIDE_RESERVATION": "wait",
    "NOT_BEFORE": "wait",
    "TICKETS": "wait",
    "GANG_WANTS_NONE": "wait",
    "RETRY_BACKOFF": "wait",
    "STORE_REFUSES": "ask_admin",
    "LOT_MEMBERS": "wait",
    "ENVIRONMENT_PENDING": "wait",
    "NOT_LOOKED_AT": "wait",
    "NO_SCHEDULER": "ask_admin",
    "PACKAGES_INSTALLING": "wait",
    "NO_DEVICE_UP": "ask_admin",
    "DEVICE_DRAINED": "ask_admin",
    "TOO_FEW_DEVICES": "ask_admin",
    "BUDGET_EXHAUSTED": "wait",
    "BUDGET_DEMOTED": "wait",
    "USER_LIMIT": "ask_admin",
    "USER_RUNNING_LIMIT": "ask_admin",
    "TENANT_LIMIT": "ask_admin",
    "TENANT_RUNNING_LIMIT": "ask_admin",
    "FROZEN_ON_DEVICE": "wait",
    "IMAGE_BEING_SAVED": "wait",
    "MOVING": "wait",
    "GANG_NEEDS_MORE_DEVICES": "wait",
    "DEVICES_KEPT_FOR_A_GANG": "wait",
    "TENANT_OVER_FAIR_SHARE": "wait",
    "USER_OVER_FAIR_SHARE": "wait",
    "HIGHER_PRIORITY_AHEAD": "wait",
    "EARLIER_TASK_AHEAD": "wait",
    "GUARANTEED_TO_OTHERS": "wait",
    "HOLDERS_PROTECTED": "wait",
    "TIER_SHED": "ask_admin",
    "WAITING_FOR_DEVICE": "wait",
    "DEVICE_STOPPING": "wait",
    "SOME_DEVICES_DRAINED": "ask_admin",
    "AVOIDS_DEVICE": "wait",
    "DEVICE_FREE": "wait",
    "DEVICE_LACKS_ROOM": "wait",
    "RANK_BEHIND": "change_request",
}

#: The actions that a `Change` may ask for.
ACTIONS = {
    "set_at_once": "the request's at_once becomes `value`",
    "set_max_failures": "the request's max_failures becomes `value`",
    "wait_for_members": "the last `value` members of the lot have ended",
    "release": "somebody who may lets it go",
    "wait_for_tasks": "the tasks in `value` are done",
    "wait_for_request": "what the task awaits of the request `of` has happened",
    "retry_request": "the request `of` is retried, or somebody resumes the task",
    "wait_for_tickets": "its gang has tickets on the islands in `value`",
    "wait_until": "it is `value`, seconds since 1970",
    "wait_for_window": "the next window of the reservation `of` begins",
    "extend_reservation": "the reservation `of` gets another window",
    "leave_reservation": "it is submitted again without the reservation `of`, which is removed",
    "wait_for_lock": "control has locked the environment of the request",
    "wait_for_packages": "the host `of` has the packages of the request installed",
    "wait_for_round": "the island's scheduler makes its next round",
    "start_scheduler": "an island scheduler leads the island `of`",
    "bring_up_device": "a device of kind `of` comes up",
    "uncordon": "a device of kind `of` takes work again",
    "open_devices": "`value` more devices of kind `of` take work",
    "set_devices_min": "the request asks for `value` devices at least",
    "raise_user_limit": "the user's limit for kind `of` becomes `value`",
    "raise_user_max_running": "the user's max_running becomes `value`",
    "raise_limit": "the tenant's limit for kind `of` becomes `value`",
    "raise_limit_above": "that of a tenant above it rises by `value`",
    "raise_max_running": "the tenant's max_running becomes `value`",
    "raise_max_running_above": "that of a tenant above it rises by `value`",
    "wait_for_its_device": "the devices `of`, where its processes are, are free",
    "wait_for_image": "its image is saved, or the device `of` is free",
    "wait_for_move": "the last of it has been copied to the device `of`",
    "free_devices": "`value` more devices of kind `of` become free",
    "wait_for_room": "the device `of` has memory, processes or disk left for it",
    "wait_for_rank": "the rank for which the others wait goes on",
    "wait_for_workers": "the workers of `value` stopping devices of kind `of` are back",
    "wait_for_gang": "the gang has started",
    "wait_for_usage": "others use `value` device-seconds per weight more, or one's own fade",
    "set_priority": "the request gets the priority `value`",
    "wait_for_own": "one's own tasks on devices end",
}

START = frozenset(
    {
        "HELD_BY_ADMIN", "HELD_BY_USER", "HELD_BY_RULE", "IDLE_SESSION", "LOST_AT_RUNG",
        "LOT_ROOM", "REQUEST_MISSED", "AFTER_REQUEST", "DEPENDENCY", "RESERVATION_OVER",
        "OUTSIDE_RESERVATION", "NOT_BEFORE", "TICKETS", "GANG_WANTS_NONE", "RETRY_BACKOFF",
        "STORE_REFUSES",
    }
)  # fmt: skip
OF_REQUESTS = ("REQUEST_MISSED", "AFTER_REQUEST")
#: Reasons that do not end when others release devices; while such a reason lasts, there is no
#: estimate.
CLOSED = (START - {"NOT_BEFORE", "RETRY_BACKOFF", "STORE_REFUSES"}) | {
    "LOT_HELD",
    "LOT_FAILURES",
    "LOT_MEMBERS",
    "ENVIRONMENT_PENDING",
    "NOT_LOOKED_AT",
    "NO_SCHEDULER",
    "PACKAGES_INSTALLING",
    "NO_DEVICE_UP",
    "DEVICE_DRAINED",
    "TOO_FEW_DEVICES",
    "BUDGET_EXHAUSTED",
    "USER_LIMIT",
    "USER_RUNNING_LIMIT",
    "TENANT_LIMIT",
    "TENANT_RUNNING_LIMIT",
    "RANK_BEHIND",
}

PRIORITY_MAX = 100
TOLD_MOST = 300  # most characters of the installer's message
OF_USER = -1  # `Shut.above` of the user's own limits
UNFIT_TOLD = 3  # most faulty devices named in a reason
AVOIDED_TOLD = 3  # most avoided devices named in a reason
STOPPING_TOLD = 3  # most stopping devices named in a reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Compares the usage of two sides, in device-seconds per weight; `mine_s` includes the next
    turn.
    """

    mine_s: float
    theirs_s: float


@dataclass(frozen=True, slots=True)
class Shut:
    """Describes a user or tenant at its limit, or with an exhausted budget.

    `action` is what the budget has put in force (`core.fairness.budget`), until `until_s` at most;
    "" for a limit.
    """

    # OF_USER for the user, 0 for the task's own tenant, 1 for the tenant above, and so on
    above: int
    kind: str  # kind of device; "*" for devices of all kinds together, "" for running tasks
    held: int  # number that the user or tenant holds
    limit: int  # number that it may hold
    action: str = ""
    until_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallingHost:
    """Names a host that has devices for a task, but where the packages of the task are not ready.

    `state` is one of `core.model.device_choice.BUILD_STATES`, or "" before the host was asked.
    `told` is the message with which the installation failed, or what it waits for.
    """

    host: str
    state: str
    told: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvenHosts:
    """Counts the hosts for a gang that needs `share` devices on each of `hosts`."""

    hosts: int
    share: int
    open: int  # hosts where that many devices take work
    free: int  # hosts where that many are free or lent
    lacks_open: int  # fewest devices that would have to take work in addition
    lacks: int  # fewest devices that would have to be free in addition


@dataclass(frozen=True, slots=True, kw_only=True)
class Blockers:
    """Lists what stands between an eligible task and its devices, as `core.scheduling.blockers`
    finds it.

    With a `host`, all counts are for that host: a one-host gang finds its devices there first. The
    free and lent devices are not enough for a gang, or are kept for another gang, or are about to
    be assigned.
    """

    devices: int  # number of known devices of the task's kind with enough memory
    up: int  # number of these that are up
    open: int  # number of these that are up and accept work
    busy: int  # number of open devices that are held or promised
    turn_s: float  # shortest length of a turn
    free: int = 0  # number of open devices that no task holds
    lent: int = 0  # number of devices lent to tasks that hold more than they need
    kept: bool = False  # True: the free devices are kept for a gang that waited longer
    offered: bool = False  # True: the free devices are about to be assigned
    # user and tenants, from the task's own upwards, that are at a limit or may start nothing
    shut: tuple[Shut, ...] = ()
    behind: tuple[Shut, ...] = ()  # those whose budget puts them behind all others
    host: str | None = None
    pinned_to: tuple[str, ...] = ()
    pin_is_free: bool = False
    tenant: Standing | None = None  # set if a holder of another tenant does not give way
    # set if a holder of another user of the same tenant does not give way
    user: Standing | None = None
    own: int = 0  # number of devices held by the same user's tasks of the same or a higher priority
    own_soon: int = 0  # own tasks on devices that give way after their minute (F8)
    minute_s: float = 0.0  # length of that minute in s, or of the holder's slice if it is longer
    guaranteed: int = 0  # number of better served holders that hold no more than their guarantee
    reserved_until_s: float = 0.0  # when the last reservation for others ends that is in force
    protected: int = 0  # number of better served holders that must not be paused now
    shed: bool = False  # True: the promise of the task's own tier cannot be kept
    # devices that are up but take no work, because their workers stop
    stopping: tuple[str, ...] = ()
    unfit: tuple[str, ...] = ()  # devices that failed, or that health rules have cordoned, and why
    goes_on_on: tuple[str, ...] = ()  # the only devices on which its processes can go on
    avoided: tuple[AvoidedDevice, ...] = ()  # open devices on which it failed
    # hosts where the task's packages are not ready; their devices are not counted
    installing: tuple[InstallingHost, ...] = ()
    even: EvenHosts | None = None  # set for a gang that needs as many devices on each of its hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """Counts the waiting tasks of the same kind that go before a task, by reason."""

    tenants: int = 0  # tasks of less served tenants
    users: int = 0  # tasks of less served users of the same tenant
    higher: int = 0  # tasks of the same user with higher priority
    earlier: int = 0  # older tasks of the same user with the same priority
    highest: int | None = None  # highest priority among these tasks

    @property
    def all(self) -> int:
        return self.tenants + self.users + self.higher + self.earlier


def nearest(reasons: Sequence[Reason]) -> Reason | None:
    """Return the reason to end first: changes for later reasons do not help before it ends."""
    order = {code: place for place, code in enumerate(CODES)}
    return min(reasons, key=lambda reason: order[reason.code], default=None)


# --- start conditions ---------------------------------------------------------------------------


def unmet_conditions(
    task: BoardTask,
    *,
    now_s: float,
    names: Mapping[str, str] = NO_NAMES,
    reservation: NamedReservation = UNNAMED,
) -> tuple[Reason, ...]:
    """Return why the task may not start yet; empty if all its start conditions hold.

    `names` are those of the tasks that it waits for, by id; `reservation` is the one that it names.
    """
    return tuple(_unmet_conditions(task, now_s, names, reservation))


def _unmet_conditions(
    task: BoardTask, now_s: float, named: Mapping[str, str], reservation: NamedReservation
) -> Iterator[Reason]:
    conditions = task.conditions
    yield from _by_hold(conditions.hold)
    if conditions.standing == RequestStanding.held:
        yield request_missed("what it awaits of another request can no longer happen")
    elif conditions.standing:
        yield after_request("another request is so far")
    if conditions.waits_for:
        needed = [named.get(id, "another task") for id in conditions.waits_for[:5]]
        names = ", ".join(dict.fromkeys(needed))
        more = len(conditions.waits_for) - 5
        told = f"Needs {names}{f' and {more} more' if more > 0 else ''} to be done first."
        first = f"{needed[0]} is done"
        change = Change(action="wait_for_tasks", value=conditions.waits_for)
        yield _reason("DEPENDENCY", told, first, change)
    yield from _by_reservation(conditions.reservation, reservation)
    if conditions.not_before_s is not None and conditions.not_before_s > now_s:
        yield _at(
            "NOT_BEFORE",
            f"Not to start before {clock(conditions.not_before_s)}.",
            conditions.not_before_s,
        )
    yield from _by_terms(conditions.terms)


def _by_hold(hold: str) -> Iterator[Reason]:
    release = Change(action="release")
    if hold == "user":
        told = "Paused by a user."
        yield _reason("HELD_BY_USER", told, "it is resumed", release)
    elif hold == session.HOLD:
        told = "Idle: its device was given back. It comes back at the next keystroke."
        yield _reason("IDLE_SESSION", told, "somebody types into it", release)
    elif hold == HELD_BY_RULE:
        told = "Held by a rule of its field retry, since an attempt failed; its events say which."
        yield _reason("HELD_BY_RULE", told, "somebody resumes it", release)
    elif hold == HELD_AT_RUNG:
        told = "Paused at a rung: it is not among the best of its lot."
        until = "other members reach the rung with worse values, or somebody resumes it"
        yield _reason("LOST_AT_RUNG", told, until, release)
    elif hold == PROMOTED:
        told = "It goes on past its rung when as few members of its lot run as at_once allows."
        change = Change(action="wait_for_members", value=1)
        yield _reason("LOT_ROOM", told, "a member ends or pauses, or at_once is raised", change)
    elif hold:
        told = "Paused by an administrator."
        yield _reason("HELD_BY_ADMIN", told, "an administrator resumes it", release)


def _by_reservation(standing: str, it: NamedReservation) -> Iterator[Reason]:
    """Yield why a task is outside the windows of the reservation that it names."""
    if standing == ReservationStanding.planned:
        told = f"Runs only in windows of its {it}."
        if it.opens_s is None:
            change, until = Change(action="wait_for_window", of=it.name), "its next window begins"
            yield _reason("OUTSIDE_RESERVATION", told, until, change)
        else:
            told += f" The next one begins at {minute(it.opens_s)}."
            yield _at("OUTSIDE_RESERVATION", told, it.opens_s)
    elif standing and it.is_removed:
        told = f"Its {it} was removed, and it runs nowhere else. Cancel it, and submit it without."
        change = Change(action="leave_reservation", of=it.name)
        yield _reason("RESERVATION_OVER", told, "it is submitted again without it", change)
    elif standing:
        told = f"The last window of its {it} is over, and it runs nowhere else. Cancel it, or ask"
        told += " an administrator for another window."
        change = Change(action="extend_reservation", of=it.name)
        yield _reason("RESERVATION_OVER", told, "the reservation gets another window", change)


def after_request(told: str, until: str = "the other request is so far", of: str = "") -> Reason:
    """Return the reason of a task that awaits what `told` says of another request."""
    change = Change(action="wait_for_request", of=of)
    return _reason("AFTER_REQUEST", f"Waits until {told}.", until, change)


def request_missed(told: str, of: str = "") -> Reason:
    """Return the reason of a task that is held, as another request went otherwise."""
    until = "that request is retried, or somebody resumes the task"
    change = Change(action="retry_request", of=of)
    return _reason("REQUEST_MISSED", f"Held: {told}.", until, change)


def of_lot(counts: LotCounts) -> tuple[Reason, ...]:
    """Return why a lot makes no member now, or that it has not ended yet."""
    live = counts.live - counts.resting
    of, left = f"{counts.count:,}", f"{counts.left:,}"
    if counts.has_failed_too_often:
        told = f"{counts.failed} of {of} members failed, more than max_failures allows"
        told = f"{told} ({counts.failures_allowed}): no other member starts."
        change = Change(action="set_max_failures", value=counts.failed)
        until = "somebody resumes it, retries the failed ones, or raises max_failures"
        return (_reason("LOT_FAILURES", told, until, change),)
    if not counts.at_once:
        told = f"Held: its at_once is 0, so that none of its {of} members starts."
        change = Change(action="set_at_once", value=1)
        return (_reason("LOT_HELD", told, "its at_once is raised", change),)
    if not counts.left:
        told = f"Its last {counted(live, 'member')} {_is(live)} queued or running{_rest(counts)}."
        change = Change(action="wait_for_members", value=live)
        return (_reason("LOT_MEMBERS", told, "they end", change),) if live else ()
    if counts.room:
        return ()
    told = f"{live:,} of {of} members are queued or running, as many as at_once allows"
    told = f"{told}{_rest(counts)}; {left} follow."
    change = Change(action="set_at_once", value=counts.at_once + 1)
    return (_reason("LOT_MEMBERS", told, "a member ends", change),)


def _rest(counts: LotCounts) -> str:
    return f", and {counts.resting:,} paused at rungs" if counts.resting else ""


def _by_terms(terms: Terms) -> Iterator[Reason]:
    if terms.tickets:
        names = " and ".join(terms.tickets)
        told = (
            "Its gang spans islands and takes devices in the order of their names: first it needs"
        )
        change = Change(action="wait_for_tickets", value=terms.tickets)
        yield _reason("TICKETS", f"{told} those on {names}.", f"{names}: its turn comes", change)
    if terms.idle:
        told = (
            "It keeps devices for its gang, which needs none now: it runs, is paused or has ended."
        )
        change = Change(action="wait_for_gang")
        yield _reason("GANG_WANTS_NONE", told, "its gang waits for devices again", change)


def start(
    task: BoardTask,
    *,
    now_s: float,
    names: Mapping[str, str] = NO_NAMES,
    reservation: NamedReservation = UNNAMED,
) -> tuple[Reason, ...]:
    """Return all conditions that are not met yet and that must be before the task may start."""
    unmet = unmet_conditions(task, now_s=now_s, names=names, reservation=reservation)
    return unmet + backoff(task, now_s=now_s)


def backoff(task: BoardTask, *, now_s: float) -> tuple[Reason, ...]:
    """Return why a failed task is not tried again yet, or an ended task does not end."""
    if task.retry_at_s <= now_s:
        return ()
    if task.unstored:
        told = (
            f"It has ended, and its outputs wait for the store, which refuses them: {task.unstored}"
        )
        told += f" It tries again at {clock(task.retry_at_s)}."
        return (_at("STORE_REFUSES", told, task.retry_at_s),)
    told = (
        f"Attempt {task.attempts} of {task.retry_max + 1} failed; the next starts "
        f"at {clock(task.retry_at_s)}."
    )
    return (_at("RETRY_BACKOFF", told, task.retry_at_s),)


def _at(code: str, told: str, at_s: float) -> Reason:
    return _reason(code, told, f"it is {clock(at_s)}", Change(action="wait_until", value=at_s))


# --- the island ---------------------------------------------------------------------------------


def not_looked_at() -> Reason:
    """Return the reason for a task that has just arrived, or has just met its conditions."""
    return _reason(
        "NOT_LOOKED_AT",
        "Not scheduled yet.",
        "the scheduler makes its next round",
        Change(action="wait_for_round"),
    )


def environment_pending() -> Reason:
    """Return the reason of a task whose packages are not locked yet."""
    return _reason(
        "ENVIRONMENT_PENDING",
        "Its environment is being locked: the versions of its packages are being chosen.",
        "control has locked its environment",
        Change(action="wait_for_lock"),
    )


def no_scheduler(island: str) -> Reason:
    return _reason(
        "NO_SCHEDULER",
        f"No scheduler runs on the island {island}, so nothing starts there.",
        f"a scheduler of {island} runs",
        Change(action="start_scheduler", of=island),
    )


def lacks_room(device: str, waits_for: str) -> Reason:
    """Return why a task that was given a device does not start there yet."""
    what, held = _ROOM[waits_for]
    return _reason(
        "DEVICE_LACKS_ROOM",
        f"It was given {device} and waits there for {what}: {held}.",
        f"{device} has room for it",
        Change(action="wait_for_room", of=device),
    )


def rank_behind(who: str) -> Reason:
    """Return why a running gang stands still."""
    return _reason(
        "RANK_BEHIND",
        f"It has its devices, and stands still. {who}",
        "that rank goes on",
        Change(action="wait_for_rank"),
    )


#: `ResidentView.waits_for` -> what a task waits for, and what holds it
_ROOM = {
    "bytes": ("device memory", "paused and frozen tasks hold it until they have left it"),
    "places": ("a process", "paused and frozen tasks hold the host memory and the processes"),
    "disk": ("disk space", "the working folders of other tasks hold it"),
}


# --- devices ------------------------------------------------------------------------------------


def waiting(task: BoardTask, blockers: Blockers, ahead: Ahead) -> tuple[Reason, ...]:
    """Return why a task that could start does not: first for lack of devices, then for tasks before
    it.
    """
    if task.stops and task.moves_to:
        return (_moving(task),)
    is_installing = blockers.installing and blockers.open < task.width
    return (
        *([_installing(blockers.installing)] if is_installing else _devices(task, blockers)),
        *_stopping(task, blockers),
        *_limits(task, blockers),
        *_fairness(blockers, ahead),
        *_own(task, blockers, ahead),
        *_promises(task, blockers),
    )


def _moving(task: BoardTask) -> Reason:
    to = task.moves_to
    told = f"Migrating: it is paused until the last of its state has been copied to {to}."
    change = Change(action="wait_for_move", of=to or "")
    return _reason("MOVING", told, f"it starts on {to}", change)


def _frozen(devices: tuple[str, ...]) -> Reason:
    named, are = " and ".join(devices), "is" if len(devices) == 1 else "are"
    told = (
        f"Its processes are frozen in the memory of {named} and go on only there. A move would be"
        " a restart from the files in its working folder; it is made only if "
        f"{'that device' if len(devices) == 1 else 'one of them'} is lost, drained, or needs its "
        "memory for others."
    )
    change = Change(action="wait_for_its_device", of=named)
    return _reason("FROZEN_ON_DEVICE", told, f"{named} {are} free", change)


def _among(devices: tuple[str, ...]) -> Reason:
    shown = ", ".join(devices[:5]) + (f" and {len(devices) - 5} more" if devices[5:] else "")
    told = (
        f"Its processes are stored, and go on only on {shown}: other devices have another"
        " processor, kernel or CRIU."
    )
    change = Change(action="wait_for_its_device", of=devices[0])
    return _reason("FROZEN_ON_DEVICE", told, "one of them is free", change)


def _where_its_state_is(task: BoardTask, seen: Blockers) -> Iterator[Reason]:
    if seen.goes_on_on and not seen.free:
        yield _among(seen.goes_on_on)
    if seen.pinned_to and task.restarts and task.saved:
        if not seen.pin_is_free:
            yield _frozen(seen.pinned_to)
    elif seen.pinned_to:
        lies_on = seen.pinned_to[0]
        told = (
            f"Its state is in the memory of {lies_on} and is not saved yet: "
            "it resumes there, or anywhere once it is saved."
        )
        until = f"its state is saved, or {lies_on} is free"
        change = Change(action="wait_for_image", of=lies_on)
        yield _reason("IMAGE_BEING_SAVED", told, until, change)


def _lacks(task: BoardTask, seen: Blockers) -> int:
    """Return how many more devices would have to be free; 0 or less if enough are."""
    return task.width - seen.free - seen.lent if seen.even is None else seen.even.lacks


def _devices(task: BoardTask, seen: Blockers) -> Iterator[Reason]:
    what = _what(task)
    if seen.up == 0 and not seen.avoided:
        told = f"No {what} is up (known: {seen.devices}).{_unfit(seen.unfit)}"
        change = Change(action="bring_up_device", value=task.memory_bytes, of=task.kind)
        yield _reason("NO_DEVICE_UP", told, f"a {what} comes up", change)
    elif seen.open == 0 and not (seen.stopping or seen.avoided):
        told = f"Every {what} that is up is drained ({seen.up} of {seen.up}).{_unfit(seen.unfit)}"
        change = Change(action="uncordon", of=task.kind)
        yield _reason("DEVICE_DRAINED", told, f"a {what} takes work again", change)
    yield from _where_its_state_is(task, seen)
    yield from _gang(task, seen)
    if seen.kept:
        told = "Devices are free, but reserved for a task of several devices that waited longer."
        change = Change(action="wait_for_gang")
        yield _reason("DEVICES_KEPT_FOR_A_GANG", told, "that task has started", change)
    if seen.offered:
        free = f"{seen.free} of {seen.open} {_plural(what, seen.open)}"
        them = "it" if seen.free + seen.lent == 1 else "them"
        told = (
            f"{free} {_is(seen.free)} free{_lent(seen)}: "
            f"the scheduler assigns {them} in its next round."
        )
        until = "the scheduler makes its next round"
        yield _reason("DEVICE_FREE", told, until, Change(action="wait_for_round"))
    elif seen.open and seen.busy:
        taken = f"{seen.busy} of {seen.open} {_plural(what, seen.open)} in use"
        until = f"a {what} becomes free"
        if (milli := choice_in(task.choice).fraction_milli) < WHOLE_MILLI:
            taken = f"No {what} has {told_fraction(milli)} of it left; {seen.busy} of {seen.open} "
            taken += f"{_is(seen.busy)} too full"
            until = f"{told_fraction(milli)} of a {what} becomes free"
        told = f"{taken}; a time slice lasts at least {rounded(seen.turn_s)} s."
        more = max(1, _lacks(task, seen))
        change = Change(action="free_devices", value=more, of=task.kind)
        yield _reason("WAITING_FOR_DEVICE", told, until, change)
    yield from _partly_drained(task, seen)
    if seen.avoided and _lacks(task, seen) > 0 and not seen.pinned_to:
        yield _avoids(seen.avoided)


def _avoids(devices: Sequence[AvoidedDevice]) -> Reason:
    at_s = min(each.until_s for each in devices)
    shown = " and ".join(each.device for each in devices[:AVOIDED_TOLD])
    shown += f" and {len(devices) - AVOIDED_TOLD} more" if len(devices) > AVOIDED_TOLD else ""
    told = f"It failed on {shown}, and avoids {'them' if devices[1:] else 'it'} for some minutes."
    until = f"another device is free, or it is {clock(at_s)}"
    return _reason("AVOIDS_DEVICE", told, until, Change(action="wait_until", value=at_s))


def _installing(hosts: Sequence[InstallingHost]) -> Reason:
    """Return the reason of a task for which too few devices have its packages ready."""
    first = min(hosts, key=lambda one: (_INSTALLING.index(one.state), one.host))
    told = {
        "building": f"Its packages are being installed on {first.host}.",
        "waiting": f"Its packages wait to be installed on {first.host}",
        "": f"{first.host} is about to be asked to install its packages.",
        "failed": f"Its packages could not be installed on {first.host}, which tries again later",
    }[first.state]
    if not told.endswith("."):
        why = " ".join(first.told.split())[:TOLD_MOST].rstrip(".")
        told += f": {why}." if why else "."
    if len(hosts) > 1:
        told += f" {counted(len(hosts) - 1, 'further host')} could have them too."
    change = Change(action="wait_for_packages", of=first.host)
    return _reason("PACKAGES_INSTALLING", told, f"they are installed on {first.host}", change)


_INSTALLING = ("building", "waiting", "", "failed")  # which state a reason names first


def _partly_drained(task: BoardTask, seen: Blockers) -> Iterator[Reason]:
    """Yield how many devices are drained, if the task lacks devices and not all are drained.

    A task that only one device suits gains nothing from the drained ones.
    """
    lacks = _lacks(task, seen)
    drained = seen.up - seen.open - len(seen.stopping)
    if lacks <= 0 or seen.pinned_to or not (drained and (seen.open or seen.stopping)):
        return
    what, more = _what(task), min(lacks, drained)
    where = f"{_plural(what, seen.up)}{f' of {seen.host}' if seen.host else ''}"
    told = f"{drained} of {seen.up} {where} {_is(drained)} drained: no new work starts there."
    told += _unfit(seen.unfit)
    until = f"{more} of the drained ones {'takes' if more == 1 else 'take'} work again"
    change = Change(action="open_devices", value=more, of=task.kind)
    yield _reason("SOME_DEVICES_DRAINED", told, until, change)


def _stopping(task: BoardTask, seen: Blockers) -> Iterator[Reason]:
    """Yield which devices take no work because their workers stop, if the task lacks devices.

    A task for which only one device is suitable is told about that device (`_where_its_state_is`).
    """
    lacks, stopping = _lacks(task, seen), len(seen.stopping)
    if lacks <= 0 or seen.pinned_to or not stopping:
        return
    shown, back = ", ".join(seen.stopping[:STOPPING_TOLD]), min(lacks, stopping)
    told = f"Device {shown} is stopping: no new work starts there."
    until = "its worker is back or another device becomes free"
    if stopping > 1:
        shown += f" and {stopping - STOPPING_TOLD} more" if stopping > STOPPING_TOLD else ""
        told = f"Devices {shown} are stopping: no new work starts there."
        until = f"{back} of their workers {_is(back)} back or another device becomes free"
    change = Change(action="wait_for_workers", value=back, of=task.kind)
    yield _reason("DEVICE_STOPPING", told, until, change)


def _unfit(devices: Sequence[str]) -> str:
    """Name devices that are faulty, after another sentence."""
    more = len(devices) - UNFIT_TOLD
    told = "".join(f" {device}" for device in devices[:UNFIT_TOLD])
    return f"{told} {more} more are faulty too." if more > 0 else told


def _even_gang(task: BoardTask, even: EvenHosts) -> Iterator[Reason]:
    """Yield how many of its hosts a gang lacks that needs as many devices on each."""
    needs, devices = f"Needs {even.hosts} hosts with {even.share}", _plural(_what(task), even.share)
    if even.open < even.hosts:
        told = f"{needs} {devices} each that take work; {even.open} {_has(even.open)} them."
        until = f"{even.hosts} hosts have them"
        change = Change(action="open_devices", value=even.lacks_open, of=task.kind)
        yield _reason("TOO_FEW_DEVICES", told, until, change)
    elif even.free < even.hosts:
        told = f"{needs} free {devices} each; {even.free} {_has(even.free)} them."
        until = f"{even.hosts} hosts have them free, or they give way"
        change = Change(action="free_devices", value=even.lacks, of=task.kind)
        yield _reason("GANG_NEEDS_MORE_DEVICES", told, until, change)


def _gang(task: BoardTask, seen: Blockers) -> Iterator[Reason]:
    if seen.even is not None:
        yield from _even_gang(task, seen.even)
        return
    what, once = _what(task), f"of {seen.host} at once" if seen.host else "at once"
    if 0 < seen.open < task.width:
        there = f"{seen.open} {_plural(what, seen.open)} take{'s' if seen.open == 1 else ''} work"
        told = f"Needs {task.width} devices {once}; {there}."
        until = f"{task.width} of them take work, or it asks for devices: min {seen.open}"
        change = Change(action="set_devices_min", value=seen.open, of=task.kind)
        yield _reason("TOO_FEW_DEVICES", told, until, change)
    elif task.width > 1 and (have := seen.free + seen.lent) < task.width and seen.open:
        free = f"{seen.free} of {seen.open} are free{_lent(seen)}"
        told = f"Needs {task.width} devices {once}; {free}."
        until = f"{task.width} are free, or give way"
        change = Change(action="free_devices", value=task.width - have, of=task.kind)
        if have:
            until += f"; or it asks for devices: min {have} instead of {task.width}"
            change = Change(action="set_devices_min", value=have, of=task.kind)
        yield _reason("GANG_NEEDS_MORE_DEVICES", told, until, change)


def _lent(seen: Blockers) -> str:
    if not seen.lent:
        return ""
    return f", and {seen.lent} more can be had from tasks that hold more than they need"


def breadth(task: BoardTask) -> str:
    """Return a sentence on what an elastic task holds and how much of it is lent; "" for other
    tasks.
    """
    if not task.elastic or not task.seats:
        return ""
    held, most = len(task.seats), task.width_max
    if held == task.width:
        return (
            f"It holds the {held} that it needs, and uses up to {most} while nobody asks for them."
        )
    lent = f"{held - task.width} of them until somebody asks for them"
    return f"It holds {held} of the {most} devices that it can use, {lent}: it needs {task.width}."


def company(task: BoardTask, others: int) -> str:
    """Return with how many other tasks a task shares its device in turns; "" if it has the device
    alone.
    """
    if not (task.shares and task.graph and task.seats and others):
        return ""
    graphs = "another graph" if others == 1 else f"{others} other graphs"
    return (
        f"It shares {task.seat} with {graphs}: they take turns of some milliseconds there, the "
        "least served first, and each is charged for its own."
    )


def _limits(task: BoardTask, seen: Blockers) -> Iterator[Reason]:
    for shut in seen.shut:
        if shut.action:
            yield _budget(shut)
        elif shut.kind:
            yield _limit(task, shut)
        else:
            yield _running(shut)


def _budget(shut: Shut) -> Reason:
    """Return what an exhausted budget does, and when the next period begins."""
    of = "" if shut.kind == "*" else f" for {shut.kind} devices"
    whose = "A tenant above yours has used its" if shut.above else "Your tenant has used its"
    if shut.above == OF_USER:
        whose = "You have used your"
    told = f"{whose} budget{of}: {_BUDGET_DOES[shut.action]}."
    until = f"the next period begins ({clock(shut.until_s)}), or an administrator adds to it"
    change = Change(action="wait_until", value=shut.until_s)
    code = "BUDGET_DEMOTED" if shut.action == "demote" else "BUDGET_EXHAUSTED"
    return _reason(code, told, until, change)


_BUDGET_DOES = {
    "demote": "it gets only devices that nobody else wants",
    "hold": "nothing new starts",
    "pause": "nothing starts, and what ran is paused",
}


def _limit(task: BoardTask, shut: Shut) -> Reason:
    of = "devices" if shut.kind == "*" else f"{shut.kind} devices"
    needed = shut.held + task.width
    if shut.above == OF_USER:
        told = f"You use {shut.held} of your limit of {shut.limit} {of}."
        if task.width > shut.limit:
            told = f"Needs {task.width} {of}; your own limit is {shut.limit}."
        change = Change(action="raise_user_limit", value=needed, of=shut.kind)
        until = f"one of your tasks ends, or your limit is raised to {needed}"
        return _reason("USER_LIMIT", told, until, change)
    if shut.above:
        told = f"A tenant above yours is at its limit of {of}."
        change = Change(action="raise_limit_above", value=needed - shut.limit, of=shut.kind)
        until = "tasks of it end, or its limit is raised"
        return _reason("TENANT_LIMIT", told, until, change)
    change = Change(action="raise_limit", value=needed, of=shut.kind)
    if task.width > shut.limit:
        told = f"Needs {task.width} {of}; your tenant's limit is {shut.limit}."
        return _reason("TENANT_LIMIT", told, f"the limit is raised to {needed}", change)
    told = f"Your tenant uses {shut.held} of its limit of {shut.limit} {of}."
    until = f"one of its tasks ends, or the limit is raised to {needed}"
    return _reason("TENANT_LIMIT", told, until, change)


def _running(shut: Shut) -> Reason:
    more = shut.held + 1
    if shut.above == OF_USER:
        told = f"You run {shut.held} of at most {counted(shut.limit, 'task')}."
        change = Change(action="raise_user_max_running", value=more)
        until = f"one of your tasks ends, or your max_running is raised to {more}"
        return _reason("USER_RUNNING_LIMIT", told, until, change)
    if shut.above:
        told = "A tenant above yours is at its limit of running tasks."
        change = Change(action="raise_max_running_above", value=more - shut.limit)
        until = "one of them ends, or the limit is raised"
        return _reason("TENANT_RUNNING_LIMIT", told, until, change)
    told = f"Your tenant runs {shut.held} of at most {counted(shut.limit, 'task')}."
    change = Change(action="raise_max_running", value=more)
    until = f"one of them ends, or max_running is raised to {more}"
    return _reason("TENANT_RUNNING_LIMIT", told, until, change)


# --- other tasks --------------------------------------------------------------------------------


def _fairness(seen: Blockers, ahead: Ahead) -> Iterator[Reason]:
    if seen.behind:  # usage no longer decides
        yield from map(_budget, seen.behind)
        return
    for code, who, standing, others in (
        ("TENANT_OVER_FAIR_SHARE", "Your tenant", seen.tenant, ahead.tenants),
        ("USER_OVER_FAIR_SHARE", "You", seen.user, ahead.users),
    ):
        told, more_s = [], 0.0
        if standing is not None:
            has = "has used more than its" if who == "Your tenant" else "have used more than your"
            told.append(f"{who} {has} share recently ({_compared(standing)}).")
            more_s = bound(max(0.0, standing.mine_s - standing.theirs_s))
        if others:
            whose = "tenants" if who == "Your tenant" else "users of your tenant"
            go = f"of {whose} with less recent usage {_go(others)} first"
            told.append(f"{counted(others, 'task')} {go}.")
        if told:
            change = Change(action="wait_for_usage", value=more_s)
            yield _reason(code, " ".join(told), "others use more, or your usage decays", change)


def _compared(standing: Standing) -> str:
    """Return a text that compares both usages; if they round to the same number, a bound on the
    difference.
    """
    mine, theirs = rounded(standing.mine_s), rounded(standing.theirs_s)
    if mine != theirs:
        return f"{mine} vs {theirs} device-seconds per weight"
    more = f"{bound(standing.mine_s - standing.theirs_s):g}"
    return f"up to {more} device-seconds per weight more than those who run"


def _own(task: BoardTask, seen: Blockers, ahead: Ahead) -> Iterator[Reason]:
    if ahead.higher:
        told = f"{ahead.higher} of your own tasks with higher priority {_go(ahead.higher)} first."
        until = "those tasks have started, or you change a priority"
        change = Change(action="set_priority", value=_above(task, ahead.highest))
        yield _reason("HIGHER_PRIORITY_AHEAD", told, until, change)
    if ahead.earlier or seen.own or seen.own_soon:
        said = []
        if seen.own:
            more = f"{seen.own} of your own tasks with equal or higher priority are running."
            one = "One of your own tasks with equal or higher priority is running."
            said.append(one if seen.own == 1 else more)
        if seen.own_soon:
            which = "One of your own tasks is running; it gives"
            if seen.own_soon > 1:
                which = f"{seen.own_soon} of your own tasks are running; they give"
            after = f"after {rounded(seen.minute_s)} s of running"
            said.append(f"{which} way to this one {after}.")
        if ahead.earlier:
            was = "was" if ahead.earlier == 1 else "were"
            said.append(f"{ahead.earlier} of your own tasks {was} submitted earlier.")
        change = Change(action="set_priority", value=_above(task, None))
        if not ahead.earlier:
            change = Change(action="wait_for_own", value=seen.own + seen.own_soon)
        yield _reason(
            "EARLIER_TASK_AHEAD",
            " ".join(said),
            "those tasks finish, or you change a priority",
            change,
        )


def _above(task: BoardTask, other: int | None) -> int:
    """Return the priority that puts the task before those ahead of it, but at most the maximum."""
    return min(PRIORITY_MAX, (task.priority if other is None else other) + 1)


def _promises(task: BoardTask, seen: Blockers) -> Iterator[Reason]:
    """Yield reasons from rules F4, F7 and F9: promises to other tasks, and broken promises to this
    one.
    """
    if seen.guaranteed:
        holds = f"{seen.guaranteed} {_plural(_what(task), seen.guaranteed)}"
        told = f"{holds} {_is(seen.guaranteed)} guaranteed to others who use them."
        until, change = "those tasks finish", Change(action="free_devices", value=1, of=task.kind)
        if seen.reserved_until_s:
            told += f" A reservation for them ends at {minute(seen.reserved_until_s)}."
            until += ", or the reservation ends"
        yield _reason("GUARANTEED_TO_OTHERS", told, until, change)
    if seen.protected:
        holds = f"{seen.protected} {_plural(_what(task), seen.protected)}"
        told = (
            f"{holds} {_is(seen.protected)} held by tasks that may not be preempted now: "
            "their tier promises it, or they waited too long before."
        )
        until, change = "those tasks finish", Change(action="free_devices", value=1, of=task.kind)
        yield _reason("HOLDERS_PROTECTED", told, until, change)
    if seen.shed:
        what = _plural(_what(task), 2)
        told = f"Too few {what} are open for what the tier {task.tier} promises."
        until, change = (
            "more devices are open",
            Change(action="open_devices", value=1, of=task.kind),
        )
        yield _reason("TIER_SHED", told, until, change)


# --- words --------------------------------------------------------------------------------------


def _reason(code: str, message: str, unblocked_by: str, change: Change) -> Reason:
    return Reason(
        code=code,
        message=message,
        next_action=CODES[code],
        unblocked_by=unblocked_by,
        change=change,
    )


def _what(task: BoardTask) -> str:
    memory = f" with {task.memory_bytes / 1e9:g} GB" if task.memory_bytes else ""
    return f"{task.kind} device{memory}{choice_in(task.choice).told}"


def _plural(what: str, n: int) -> str:
    return what if n == 1 else what.replace(" device", " devices", 1)


def _is(n: int) -> str:
    return "is" if n == 1 else "are"


def _has(n: int) -> str:
    return "has" if n == 1 else "have"


def _go(n: int) -> str:
    return "goes" if n == 1 else "go"


def rounded(seconds: float) -> str:
    """Return the number with two digits: enough to compare, and it does not change every second."""
    return f"{float(f'{seconds:.2g}'):g}"


def bound(seconds: float) -> float:
    """Return the next larger of 1, 2, 5, 10, 20, 50, ..., so that the text stays equal while a
    number shrinks.
    """
    scale = 1.0
    while seconds > 5 * scale:
        scale *= 10
    return next(step * scale for step in (1, 2, 5) if seconds <= step * scale)


def clock(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def minute(at_s: float) -> str:
    """Return the time to the minute, as of a forecast."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
