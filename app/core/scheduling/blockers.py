"""Finds on the board what keeps a waiting task off the devices; `core.explanation.waiting_reasons`
puts it into words.

`line` yields all waiting tasks in the order in which they would be picked if one device after
another became free. It empties the board's queues, so it needs a board of its own. `find_blockers`
looks at one task and changes nothing. `place` gives the same place as `line` without picking tasks:
it needs only the number of tasks that wait below each branch (`WaitingBranch`). So it can answer
for one task in a million, in O(depth * fan-out).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cmp_to_key
from typing import Any, NamedTuple

from app.core.explanation import waiting_reasons
from app.core.explanation.waiting_reasons import (
    OF_USER,
    Ahead,
    Blockers,
    EvenHosts,
    InstallingHost,
    Shut,
    Standing,
)
from app.core.fairness.fair_tree import ALL, Branch, Lane, Path, above, lane, with_choice
from app.core.fairness.usage_decay import unscored, usage_us
from app.core.model.device_choice import DeviceChoice, choice_in
from app.core.model.retry_decision import AvoidedDevice
from app.core.model.snapshot import BoardTask, Reason
from app.core.scheduling.board import MILLI, Board, place_in_line
from app.core.scheduling.gangs.even_hosts import hosts_with
from app.core.scheduling.reclaim import elastic
from app.core.scheduling.reclaim.preemption import below, goes_before, is_reserved, sides
from app.core.scheduling.stays import BoardStay, fresh_us, slice_us


def line(board: Board) -> Iterator[tuple[BoardTask, tuple[Reason, ...]]]:
    """Yield each waiting task with the reasons why it waits, first to last; empties the queues."""
    seen: dict[tuple[Lane, Branch, int, str], Blockers] = {}
    waiting = [task for task in board.tasks.values() if task.id in board.tree]
    for task in waiting:
        if alike(board, task) not in seen:
            seen[alike(board, task)] = find_blockers(board, task)
    order = _order(board)
    for task, before in _ahead(order):
        yield task, waiting_reasons.waiting(task, seen[alike(board, task)], before)


def alike(board: Board, task: BoardTask) -> tuple[Lane, Branch, int, str]:
    """Return a key that tasks with the same blockers share; differences due to time alone are
    ignored.
    """
    shed = task.id if task.epoch else ""
    return board.lane_in_line(task), board.leaf(task), task.priority, shed


def _order(board: Board) -> list[BoardTask]:
    """Return the waiting tasks as they would be picked; tasks shut out by a limit come last."""
    order, tree = list[BoardTask](), board.tree
    while (found := tree.first(tree.lanes)) is not None:
        leaf, lane, task = found
        tree.drop(task.id)
        tree.charge(leaf, tree.faded(slice_us(board.policy, task) * board.rate(lane)))
        order.append(task)
    shut_out = [task for task in board.tasks.values() if task.id in tree]
    return order + sorted(shut_out, key=lambda task: (task.submitted_s, task.id))


def _ahead(order: list[BoardTask]) -> Iterator[tuple[BoardTask, Ahead]]:
    """Yield each waiting task with the number of tasks before it that want the same kind of
    device.
    """
    count: Counter[tuple[object, ...]] = Counter()
    for task in order:
        groups: list[tuple[object, ...]] = [
            (task.kind,),
            (task.kind, task.tenant),
            (task.kind, task.tenant, task.user),
            (task.kind, task.tenant, task.user, task.priority),
        ]
        everyone, tenant, user, equal = (count[group] for group in groups)
        ahead = Ahead(
            tenants=everyone - tenant, users=tenant - user, higher=user - equal, earlier=equal
        )
        yield task, ahead
        count.update(groups)


# --- blockers -------------------------------------------------------------------------------------


def find_blockers(board: Board, task: BoardTask, *, gangs: bool | None = None) -> Blockers:
    """Return what keeps a waiting task off the devices.

    `gangs`: does any gang wait for this kind?  Without it, the board's queues are searched.
    """
    here = board.lane(task)
    host, choice = here.host, choice_in(board.choice_of(task))
    fitting = [
        device
        for device in board.devices.values()
        if device.kind == task.kind and device.memory_bytes >= task.memory_bytes
        if choice.suits(device.traits, device.id)
        if not host or device.host == host
    ]
    open_ = [device.id for device in fitting if board.open(device)]
    holders = {id: board.on(id) for id in open_}
    for id in _with_room(board, task, open_):
        holders[id] = []
    busy = [board.stays[found[0]] for found in holders.values() if found]
    kept_for = sum(not holders[id] and id in board.kept_for for id in open_)
    free, found = len(open_) - len(busy) - kept_for, tuple(_shut(board, task))
    shut = tuple(each for each in found if each.action != "demote")
    pins = board.pins(task)
    lent = sum(offer.suits for offer in elastic.offers(board, task))
    idle = [id for id in open_ if not holders[id] and id not in board.kept_for]
    even = _even_hosts(board, task, open_, idle) if task.hosts and open_ and not pins else None
    enough = free + lent >= task.width if even is None else even.free >= even.hosts
    could = enough and not shut and not pins
    are_free = (id in holders and not holders[id] and id not in board.kept_for for id in pins)
    pin_is_free = bool(pins) and all(are_free)
    kept = could and (_gangs(board, task.kind) if gangs is None else gangs)
    return Blockers(
        devices=len(fitting),
        up=sum(board.alive(device.id) for device in fitting),
        open=len(open_),
        busy=len(busy),
        free=free,
        lent=lent,
        kept=kept,
        offered=(could and not kept) or (pin_is_free and not shut),
        shut=shut,
        behind=tuple(each for each in found if each.action == "demote"),
        turn_s=slice_us(board.policy, task) / 1e6,
        host=host,
        pinned_to=pins,
        pin_is_free=pin_is_free,
        stopping=tuple(
            sorted(d.id for d in fitting if d.stopping and not d.cordoned and board.alive(d.id))
        ),
        unfit=tuple(sorted(f"{device.id}: {device.unfit}" for device in fitting if device.unfit)),
        shed=_shed(board, task),
        goes_on_on=_goes_on_on(board, here, task, open_),
        avoided=tuple(_avoided(board, task, choice)),
        installing=tuple(_installing(board, task, choice)),
        even=even,
        **_holders(board, task, busy),
    )


def _even_hosts(
    board: Board, task: BoardTask, open_: Iterable[str], idle: Iterable[str]
) -> EvenHosts:
    """Count the hosts that have the part of a gang on even hosts that would lie on one."""
    share, host_of = task.width // task.hosts, board.pools[task.kind].hosts
    open_on = Counter(host_of[id] for id in open_)
    free_on = Counter(host_of[id] for id in {*idle, *board.lent_places().intersection(open_)})

    def lacking(on: Counter[str]) -> int:
        best = [n for _, n in on.most_common(task.hosts)]
        return task.width - sum(min(share, n) for n in best)

    return EvenHosts(
        hosts=task.hosts,
        share=share,
        open=hosts_with(open_on, hosts=task.hosts, width=task.width),
        free=hosts_with(free_on, hosts=task.hosts, width=task.width),
        lacks_open=lacking(open_on),
        lacks=lacking(free_on),
    )


def _goes_on_on(board: Board, here: Lane, task: BoardTask, open_: list[str]) -> tuple[str, ...]:
    """Return the open devices on which the task's processes can be restored; () if any device will
    do.
    """
    pool = board.pools.get(task.kind)
    if pool is None or here.choice == task.choice or here.pins:
        return ()
    is_narrower = pool.size(with_choice(here, task.choice)) > len(open_)
    return tuple(open_) if is_narrower else ()


def _avoided(board: Board, task: BoardTask, choice: DeviceChoice) -> Iterator[AvoidedDevice]:
    """Yield the devices that could run the task if it had not failed there."""
    suiting = replace(choice, avoid_devices=())
    for each in task.avoids:
        device = board.devices.get(each.device)
        if device is None or each.device not in choice.avoid_devices or not board.open(device):
            continue
        fits = device.kind == task.kind and device.memory_bytes >= task.memory_bytes
        if fits and suiting.suits(device.traits):
            yield each


def _installing(board: Board, task: BoardTask, choice: DeviceChoice) -> Iterator[InstallingHost]:
    """Yield the hosts that could run the task if its packages were ready there."""
    found: dict[str, list[InstallingHost]] = defaultdict(list)
    for device in board.devices.values() if choice.lock else ():
        fits = device.kind == task.kind and device.memory_bytes >= task.memory_bytes
        has = device.traits
        fits = fits and board.open(device) and choice.lasting.suits(has, device.id)
        if fits and not choice.suits(has, device.id):
            build = next((one for one in has.builds or () if one.lock == choice.lock), None)
            state, told = ("", "") if build is None else (build.state, build.told)
            found[device.host].append(InstallingHost(host=device.host, state=state, told=told))
    for host in sorted(found):
        yield min(
            found[host], key=lambda one: ("building", "failed", "waiting", "").index(one.state)
        )


def _with_room(board: Board, task: BoardTask, devices: Iterable[str]) -> list[str]:
    """Return the devices that other tasks have fractions of, and that have room for this
    task, too.
    """
    pool, here = board.pools.get(task.kind), board.lane(task)
    if pool is None or not here.is_fraction:
        return []
    return [id for id in devices if pool.fits_beside(id, here)]


class _Held(NamedTuple):
    """Says why a holder does not give way; if all are false, it gives way once its turn is over."""

    served: bool  # the holder is not better served
    guaranteed: bool  # the holder is better served, but holds no more than its guarantee
    protected: bool  # the holder would give way, but must not be paused yet
    # equally urgent, of the same user: the holder gives way after its minute (F8)
    soon: bool = False


def _holders(board: Board, task: BoardTask, busy: list[BoardStay]) -> dict[str, Any]:
    leaf = board.leaf(task)
    seen = [(stay, _why_held(board, stay, task)) for stay in busy]
    staying = [stay for stay, why in seen if why.served]
    theirs = [stay for stay in staying if stay.task.tenant != task.tenant]
    others = [stay for stay in staying if stay.task.tenant == task.tenant and stay.leaf is not leaf]
    soon = [stay for stay, why in seen if why.soon]
    first_us = min((stay.turn_us for stay in soon), default=0)
    return {
        "tenant": _standing(board, task, theirs),
        "user": _standing(board, task, others),
        "own": sum(stay.leaf is leaf for stay in staying),
        "own_soon": len(soon),
        "minute_s": max(fresh_us(board.policy, task), first_us) / 1e6,
        "guaranteed": sum(why.guaranteed for _, why in seen),
        "protected": sum(why.protected for _, why in seen),
    }


def _gangs(board: Board, kind: str) -> bool:
    return any(here.kind == kind and here.width > 1 for here in board.tree.lanes)


def _shut(board: Board, task: BoardTask) -> Iterator[Shut]:
    """Yield each limit above the task that it would exceed (rule F4), and each budget that is
    exhausted.
    """
    for up, branch in enumerate(above(board.leaf(task)), start=OF_USER):
        for kind in (task.kind, ALL):
            limit, held = branch.limit.get(kind), branch.held[kind]
            if (action := branch.exhausted.get(kind)) is not None:
                ends_s = _budget_ends_s(board, branch)
                yield Shut(up, kind, held, limit or 0, action=action, until_s=ends_s)
            elif limit is not None and held + task.width > limit:
                yield Shut(up, kind, held, limit)
        most = branch.most_running
        if most is not None and branch.running >= most:
            yield Shut(up, "", branch.running, most)


def _budget_ends_s(board: Board, branch: Branch) -> float:
    """Return when the period of the budget of a tenant or user ends."""
    known = board.tenants.get(branch.name) or board.users[branch.name]
    return known.budget_ends_s


def _why_held(board: Board, stay: BoardStay, task: BoardTask) -> _Held:
    """Apply rules F4 to F7 and F9 as `core.scheduling.reclaim.preemption` does when the holder's
    turn is over.
    """
    if not board.policy.turns:
        return _Held(True, False, False)
    if is_reserved(board, stay, task):
        return _Held(False, True, False)
    path, owners = board.leaf(task).path, {board.reserved.get(id, "") for id in stay.devices}
    if not owners.isdisjoint(path) and owners.isdisjoint(stay.leaf.path):
        return _Held(False, False, False)
    mine, theirs = sides(board.leaf(task), stay.leaf)
    if mine is theirs:
        soon = stay.task.priority == task.priority and goes_before(board, task, stay.task)
        return _Held(stay.task.priority >= task.priority and not soon, False, False, soon)
    lent = all(_lent(branch, task.kind) for branch in below(stay.leaf, theirs))
    owed = not mine.borrows(board.lane_in_line(task))
    score, kind = board.tree.score, task.kind
    better = score(theirs, kind=kind) > score(mine, _fee(board, stay, task), kind=kind)
    if (owed and (lent or better)) or (lent and better):
        return _Held(False, False, _protected(board, stay, task))
    return _Held(not better, better, False)


def _lent(branch: Branch, kind: str) -> bool:
    """True if the branch holds more than its guarantee."""
    return not branch.guarantee or branch.held[kind] > branch.guarantee.get(kind, 0)


def _protected(board: Board, stay: BoardStay, task: BoardTask) -> bool:
    if board.urgency.patience.protected(stay.task):
        return True
    held = stay.task
    if not board.policy.tier_share.get(held.tier) or held.tier not in board.urgency.honoured(
        held.kind
    ):
        return False
    return board.urgency.is_due_after(held, slice_us(board.policy, task) + held.switch_us)


def _shed(board: Board, task: BoardTask) -> bool:
    """True if the task is due by its tier (rule F9), but the tier's promise cannot be kept."""
    due = task.epoch > 0 and board.policy.turns and board.urgency.slack_ends_s(task) <= board.now_s
    return due and task.tier not in board.urgency.honoured(task.kind)


def _fee(board: Board, stay: BoardStay, task: BoardTask) -> int:
    turn_us, lane = slice_us(board.policy, task), board.lane_in_line(task)
    if lane.is_fraction or stay.lane.is_fraction:  # the two cost different parts of a device
        return board.tree.faded(turn_us * board.rate(lane))
    return board.tree.faded(turn_us * board.rate_of(stay.task) // len(stay.devices) * task.width)


def _standing(board: Board, task: BoardTask, staying: list[BoardStay]) -> Standing | None:
    """Compare the task's side with the best served holder among `staying`; None if there is
    none.
    """
    if not staying:
        return None
    leaf, score, kind = board.leaf(task), board.tree.score, task.kind
    best = max(staying, key=lambda stay: (score(sides(leaf, stay.leaf)[1], kind=kind), stay.id))
    mine, theirs = sides(leaf, best.leaf)
    return Standing(
        mine_s=seconds(board, score(mine, _fee(board, best, task), kind=kind)),
        theirs_s=seconds(board, score(theirs, kind=kind)),
    )


def seconds(board: Board, score: int) -> float:
    """Return a score as device-seconds for a weight of 1.0."""
    used_us = usage_us(
        unscored(score, 1000),
        now_s=board.now_s,
        since_s=board.policy.since_s,
        half_life_s=board.policy.half_life_s,
    )
    return used_us / MILLI / 1e6


# --- places ---------------------------------------------------------------------------------------


class WaitingBranch(NamedTuple):
    """Describes a branch that waits for one kind of device, for a comparison with its siblings.

    `faded` is its usage with its idle-credit floor. `fee` is what each of its tasks is charged for
    a turn (faded too, at least 1). `waiting` counts its waiting tasks. `borrows`: would one more
    task exceed the branch's guarantee?
    """

    name: str
    faded: int
    weight: int
    fee: int
    waiting: int
    borrows: bool = True


def is_wanted(board: Board, device: str) -> bool:
    """True if a task waits for such a device, or would if a limit did not stop it."""
    known, holder = board.devices.get(device), board.stays.get(board.seated.get(device, ""))
    if known is None or board.tree.root.in_line(known.kind):
        return True
    branch = None if holder is None else holder.leaf
    while branch is not None:
        if not all(branch.room(lane) for lane in branch.lines):
            return True
        branch = branch.parent
    return False


def soonest_first(board: Board, ids: Iterable[str]) -> list[str]:
    """Return the waiting tasks among the given ones, in the order in which each alone would be
    picked.

    The turns that earlier picks will be charged do not count; call again after each pick.
    """
    waiting = [board.tasks[id] for id in ids if id in board.tree and id in board.tasks]

    def compared(one: BoardTask, other: BoardTask) -> int:
        mine, theirs = sides(board.leaf(one), board.leaf(other))
        if mine is theirs:
            return -1 if place_in_line(one) < place_in_line(other) else 1
        return -1 if _of_branch(board, mine, one) < _of_branch(board, theirs, other) else 1

    return [task.id for task in sorted(waiting, key=cmp_to_key(compared))]


def _of_branch(board: Board, branch: Branch, task: BoardTask) -> tuple[bool, int, str]:
    """Return a sort key: first branches that stay within their guarantee, then the least served."""
    borrows = branch.borrows(board.lane_in_line(task))
    return borrows, board.tree.score(branch, kind=task.kind), branch.name


WaitingBefore = tuple[list[WaitingBranch], list[int]]
"""Parties and their numbers, as two lists: so many pairs would start the garbage collector."""


def before(me: WaitingBranch, k: int, others: Iterable[WaitingBranch]) -> WaitingBefore:
    """Count how many tasks of each sibling go before the k-th task of my branch (from 0).

    Siblings with none are left out. The j-th pick of a branch finds the branch at the level (faded
    + j * fee) / weight, and picks are made in the order of levels. So the function counts, in
    integers, the picks below my level. At equal levels the lower name goes first (`FairTree` takes
    the older task, which is not known here).
    """
    mine, level, weight, borrow = me.name, me.faded + k * me.fee, me.weight, me.borrows
    who, counts = list[WaitingBranch](), list[int]()
    for other in others:
        name, faded, their_weight, fee, waiting, borrows = other
        if borrows is borrow:
            lead = level * their_weight - faded * weight
            if lead < 0 or other is me:
                continue
            count, rest = divmod(lead, weight * fee)
            if rest or name < mine:
                count += 1
            if count:
                who.append(other)
                counts.append(count if count < waiting else waiting)
        elif borrow:
            who.append(other)
            counts.append(waiting)
    return who, counts


def place(board: Board, task: BoardTask) -> tuple[int, Ahead]:
    """Return the task's place, from 1, among all that wait for its kind, and what is before it.

    Guarantees and limits count as they are now.  The place is exact if a turn costs every task the
    same; otherwise the mean of a branch is used.  `app.insight.explain` does the same from counts
    in rows.
    """
    in_line = [other for other in board.tasks.values() if other.id in board.tree]
    crowd = WaitingCounts(board, [other for other in in_line if other.kind == task.kind])
    leaf = board.leaf(task)
    mine = [other for other in in_line if board.leaf(other) is leaf and other.kind == task.kind]
    higher = sum(other.priority > task.priority for other in mine)
    key = (task.submitted_s, task.id)
    earlier = sum(
        other.priority == task.priority and (other.submitted_s, other.id) < key for other in mine
    )
    counts, k = Counter[bool](), higher + earlier
    for up, branch in enumerate(above(leaf)):
        if branch.parent is not None:
            more = sum(before(crowd.party(branch), k, crowd.siblings(branch))[1])
            counts[up > 0] += more
            k += more
    return k + 1, Ahead(tenants=counts[True], users=counts[False], higher=higher, earlier=earlier)


class WaitingCounts:
    """Counts the tasks that wait below each branch of a board, for one kind of device."""

    def __init__(self, board: Board, tasks: Iterable[BoardTask]) -> None:
        self.board = board
        self.lanes: dict[Path, Counter[Lane]] = defaultdict(Counter)
        for task in tasks:
            for branch in above(board.leaf(task)):
                self.lanes[branch.path][board.lane_in_line(task)] += 1

    def siblings(self, branch: Branch) -> Iterator[WaitingBranch]:
        branches = self.board.tree.branches
        for path, lanes in self.lanes.items():
            beside = path and path[:-1] == branch.path[:-1] and path != branch.path
            if beside and any(branches[path].room(here) for here in lanes):
                yield self.party(branches[path])

    def party(self, branch: Branch) -> WaitingBranch:
        lanes, board = self.lanes[branch.path], self.board
        waiting, kind = lanes.total(), next(iter(lanes)).kind
        widths = sum(here.width * count for here, count in lanes.items())
        return WaitingBranch(
            branch.name,
            board.tree.usage(branch) + branch.lifts.get(kind, 0),
            branch.weight,
            fee(board, kind, widths, waiting),
            waiting,
            all(branch.borrows(here) for here in lanes),
        )


def fee(board: Board, kind: str, widths: int, waiting: int) -> int:
    """Return the turn's charge for one of `waiting` tasks that need `widths` devices together."""
    policy = board.policy
    turn_us = int(1e6 * min(policy.slice_min_s, policy.slice_max_s))  # as if switching cost nothing
    turn = board.tree.faded(turn_us * board.rate(lane(kind)))
    return max(1, turn * widths // max(1, waiting))
