"""Indexes an island's snapshot for scheduling decisions, and is updated change by change.

`core.scheduling.cycle` works on a Board. `Board.of(snapshot)` builds one from a whole snapshot.
`set_task` and the other setters apply one change in O(log n), so a scheduling round costs what
changed and not what waits. Both ways lead to the same board and to the same decisions (tested).

The board holds the tenant tree with its waiting tasks by `lane` (`core.fairness.fair_tree`), the
free devices (`pool`), the stays of tasks on devices (`stays`), the waiting tasks that must go first
(`urgency`), what it remembers of earlier rounds (`round_memory`), and the instants at which time
alone changes something. Usage is counted in micro-device-seconds times thousandths of cost.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from heapq import heappop, heappush
from itertools import chain, islice
from operator import itemgetter

from app.core.fairness import budget
from app.core.fairness.dominant_resource import dominant_cost
from app.core.fairness.fair_tree import (
    Branch,
    FairTree,
    Lane,
    Path,
    above,
    both_of,
    lane,
    on_host,
    on_places,
    with_choice,
)
from app.core.fairness.usage_decay import carried_over
from app.core.model.device_choice import WHOLE_MILLI, choice_in, choice_without, with_packages
from app.core.model.lifecycle import ENDED, ON_A_DEVICE, State
from app.core.model.provisions.process_images import choice_where_it_goes_on
from app.core.model.retry_decision import avoided_now
from app.core.model.snapshot import (
    BATCH_US,
    BatchSize,
    BoardDevice,
    BoardTask,
    BoardTenant,
    BoardUser,
    GangWait,
    IdleCreditFloor,
    Policy,
    Snapshot,
    changed,
)
from app.core.model.story import Story
from app.core.scheduling.gangs.even_hosts import DeviceOffer, hosts_with
from app.core.scheduling.pool import FreePart, Pool, part_bytes
from app.core.scheduling.rounds.round_memory import RoundMemory
from app.core.scheduling.stays import (
    HOLDS_A_SEAT,
    LEAVES_A_SEAT,
    NEVER,
    BoardStay,
    fresh_us,
    is_lent,
    is_same_epoch,
    is_same_stay,
    ripe_s,
    settled_s,
    slice_us,
)
from app.core.scheduling.urgency import Urgency

MILLI = 1000  # thousandths in a cost of 1
#: What a gang on even hosts costs others with a device that is free, but frozen on or kept for one
#: of them; that a task is leaving; that a task can return; that a task needs.
OTHERS_COST, LEAVING_COST, LENT_COST, HELD_COST = 1, 2, 3, 4


class Board:
    """Holds the state of an island now. `devices` are all known ones; `tasks` are those that have
    not ended.
    """

    def __init__(self, policy: Policy, *, now_s: float) -> None:
        self.policy, self.now_s = policy, now_s
        self.tree: FairTree[BoardTask] = FairTree(
            half_life_s=policy.half_life_s,
            since_s=policy.since_s,
            fresh_first=lambda fresh, older: waited_longer(fresh, older, self.now_s),
        )
        self.tree.at(now_s)
        self.tenants: dict[str, BoardTenant] = {}
        self.users: dict[str, BoardUser] = {}
        self.devices: dict[str, BoardDevice] = {}
        self.tasks: dict[str, BoardTask] = {}
        self.stays: dict[str, BoardStay] = {}
        self.pools: dict[str, Pool] = {}
        self.urgency = Urgency(policy, self.tree, self.pools, self.tasks)
        self.seated: dict[str, str] = {}  # device -> the task that holds it or was assigned to it
        self.leaving: dict[str, str] = {}  # device -> the task that is leaving it
        self.leaving_too: dict[str, dict[str, None]] = {}  # device -> further tasks that leave it
        self.beside: dict[str, dict[str, None]] = {}  # device -> tasks co-located with the holder
        self.fractions: dict[str, dict[str, None]] = {}  # device -> the fractions on it, if any
        self.graphs: dict[str, BoardStay] = {}  # stays of graphs; some may share their devices
        self.gangs: dict[str, BoardStay] = {}  # stays of tasks that need several devices
        self.ripe: dict[Branch, dict[str, BoardStay]] = {}
        # preemptible stays that held their devices for longer than `fresh_s`
        self.settled: dict[Branch, dict[str, BoardStay]] = {}
        # kind -> its preemptible stays that patience does not protect (`unprotected`)
        self._unprotected: dict[str, dict[Branch, dict[str, BoardStay]]] = {}
        self._unprotected_of: dict[str, int] = {}  # kind -> open devices when they were sorted
        self.memory = RoundMemory()
        self.story = Story()
        self.news: set[str] = set()  # tasks to look at in the next cycle
        self.leases_due_s = NEVER
        self.guarantees = False  # does any branch have a guarantee?
        self.heaviest = 1  # the largest weight that any tenant has had
        self.over: dict[Branch, None] = {}  # branches that may hold more than their limits
        # branch with a limit -> devices that none of its tasks but one that leaves it holds
        self.left: dict[Branch, dict[str, BoardStay]] = {}
        # (parent branch, kind) -> devices guaranteed to its children, in total
        self.promised: Counter[tuple[Path, str]] = Counter()
        # Queues of which only the beginning is loaded -> the key of the last loaded task.
        self.longer: dict[tuple[Branch, Lane], tuple[int, float, str]] = {}
        # queues of `longer` without loaded tasks left
        self.short: set[tuple[Branch, Lane]] = set()
        self.elastic: dict[str, BoardStay] = {}  # elastic stays that are not leaving
        self.grown = 0  # devices that elastic stays hold beyond their need
        self.astray = False  # True if a task may be on a device that is lost or unknown
        # (tenant, user, kind) -> idle-credit floor
        self.lifts: dict[tuple[str, str, str], IdleCreditFloor] = {}
        self.waits: dict[str, GangWait] = {}  # kind -> waits of gangs (`gang_waits`)
        # (user, kind) -> how many functions a device gets at once (`function_batches`)
        self.batches: dict[tuple[str, str], BatchSize] = {}
        self._paths: dict[str, Path] = {}
        self._ripening: list[tuple[float, str, int]] = []
        self._settling: list[tuple[float, str, int]] = []
        self._siblings: dict[str, dict[str, None]] = {}  # request -> its tasks that have not ended
        # request -> its tasks that are on devices, or were paused to go on later
        self._begun: dict[str, dict[str, None]] = {}
        self._wake: list[tuple[float, str]] = []
        # kind -> top branch -> devices of the stays in `_unprotected`
        self._unprotected_tops: dict[str, Counter[Branch]] = {}
        # kind -> (tree version, result of `preemptible_tops`)
        self._tops: dict[str, tuple[int, list[tuple[int, Branch]]]] = {}
        self.priorities: Counter[int] = Counter()  # priority -> number of tasks that have not ended
        # the tasks of `_pinned` and `_movable`, as they were entered there; some are in no queue
        self._looked_up: dict[str, BoardTask] = {}
        self._pinned: dict[str, set[str]] = {}  # device -> waiting tasks that may be pinned to it
        # offer of devices (`process_images`) -> waiting commands whose processes need it to go on
        self._movable: dict[str, set[str]] = {}
        # kind -> tasks that avoid devices on which they failed, as entered in their queues
        self._avoiding: dict[str, dict[str, None]] = {}
        self.sought: dict[str, str] = {}  # task -> the host on which a place for it is being tried
        # gang on several even hosts -> the devices that this round empties or keeps for it
        self.places: dict[str, tuple[str, ...]] = {}
        self.kept_for: dict[str, str] = {}  # device -> the task that is being moved to it
        # device -> the tenant or user for which it is reserved by name now (`reserved_places`)
        self.reserved: dict[str, str] = {}
        # tasks of `kept_for` that wait to be launched on their new device
        self.landing: dict[str, None] = {}

    @classmethod
    def of(cls, snapshot: Snapshot, *, now_s: float) -> Board:
        board = cls(snapshot.policy, now_s=now_s)
        for tenant in snapshot.tenants.values():
            board.tenants[tenant.id] = tenant
        for tenant in snapshot.tenants.values():
            board._plant(tenant)
        for id in sorted(snapshot.users):
            board.set_user(snapshot.users[id])
        for lift in snapshot.lifts:
            board.set_lift(lift)
        board.waits = {wait.kind: wait for wait in snapshot.waits}
        board.batches = {(each.user, each.kind): each for each in snapshot.batches}
        for id in sorted(snapshot.devices):
            board.set_device(snapshot.devices[id])
        for id in sorted(snapshot.tasks):
            board.set_task(snapshot.tasks[id])
        board.tree.came.clear()  # these branches did not arrive: they were in the snapshot
        board.over = {branch: None for branch in board.tree.branches.values() if branch.exceeds}
        return board

    # --- time ---

    def at(self, now_s: float) -> None:
        """Advance the board to `now_s`: turns end and time conditions become true."""
        self.now_s = now_s
        self.tree.at(now_s)
        while self._ripening and self._ripening[0][0] <= now_s:
            _, id, epoch = heappop(self._ripening)
            if self._goes_on(id, epoch):
                self._ripen(self.stays[id], late=True)
        while self._settling and self._settling[0][0] <= now_s:
            _, id, epoch = heappop(self._settling)
            if self._goes_on(id, epoch) and self.stays[id].ripe:
                self._set_settled(self.stays[id])
        while self._wake and self._wake[0][0] <= now_s:
            _, id = heappop(self._wake)
            if id in self.tasks:
                self.set_task(self.tasks[id])

    def next_s(self) -> float:
        """Return when time alone next changes the board; NEVER if nothing will.

        The result is later than now, except before a round (`cycle`) has looked at the board.
        """
        at_s = min(self.leases_due_s, self.urgency.next_s())
        for timers in (self._ripening, self._settling):
            while timers and not self._goes_on(*timers[0][1:]):
                heappop(timers)
            if timers:
                at_s = min(at_s, timers[0][0])
        return min(at_s, self._wake[0][0]) if self._wake else at_s

    def _goes_on(self, id: str, epoch: int) -> bool:
        """True if the task has kept its devices since a timer was set, and is not leaving them."""
        stay = self.stays.get(id)
        return stay is not None and stay.task.epoch == epoch and not stay.leaving

    # --- tenants and users ---

    def path_of(self, tenant: str) -> Path:
        """Return the tenant's path from the top of the tree."""
        if tenant not in self._paths:
            parent = self.tenants[tenant].parent
            above = self.path_of(parent) if parent is not None else ()
            self._paths[tenant] = (*above, tenant)
        return self._paths[tenant]

    def set_tenant(self, tenant: BoardTenant) -> None:
        """Add a tenant, or change the values of a tenant that keeps its place in the tree."""
        self.tenants[tenant.id] = tenant
        branch = self._plant(tenant)
        self._guarantee(branch, tenant)
        _bound(branch, tenant)
        if branch.exceeds:
            self.over[branch] = None
        self._weigh(branch, tenant, (tenant.id, ""))

    def _weigh(self, branch: Branch, it: BoardTenant | BoardUser, whose: tuple[str, str]) -> None:
        """Take over a weight, and what the branch carries since the weight changed (rule F3).

        An idle-credit floor is rescaled, so that it stands for the same score.
        """
        old, branch.weight = branch.weight, it.weight
        for kind, lift in branch.lifts.items() if old != it.weight else ():
            rescaled = IdleCreditFloor(
                tenant=whose[0],
                user=whose[1],
                kind=kind,
                faded_us=carried_over(0, lift, weight=old, new_weight=it.weight),
            )
            self.set_lift(rescaled)
            self.memory.lifted[*whose, kind] = rescaled
        self.tree.carry(branch, _carried(it))

    def _guarantee(self, branch: Branch, it: BoardTenant | BoardUser) -> bool:
        """Take over what is guaranteed to a tenant or user; True if that has changed."""
        guarantee = budget.promises(it.guarantee, it.exhausted)
        if guarantee == branch.guarantee:
            return False
        self.guarantees |= bool(guarantee)
        self._promise(branch, branch.guarantee, -1)
        self._promise(branch, guarantee, 1)
        branch.guarantee = guarantee
        return True

    def _plant(self, tenant: BoardTenant) -> Branch:
        path = self.path_of(tenant.id)
        self.heaviest = max(self.heaviest, tenant.weight)
        if path in self.tree.branches:
            return self.tree.branches[path]
        if tenant.parent is not None:
            self._plant(self.tenants[tenant.parent])
        branch = self.tree.add(path, weight=tenant.weight)
        self._guarantee(branch, tenant)
        _bound(branch, tenant)
        self.tree.carry(branch, _carried(tenant))
        return branch

    def _promise(self, branch: Branch, guarantee: Mapping[str, int], sign: int) -> None:
        for kind, devices in guarantee.items():
            self.promised[branch.path[:-1], kind] += sign * devices

    def set_user(self, user: BoardUser) -> None:
        """Set a user's usage to what the ledger has booked plus what the user's stays still owe."""
        old = self.users.get(user.id)
        self.users[user.id] = user
        path = (*self.path_of(user.tenant), user.id)
        leaf = self.tree.branches.get(path) or self.tree.add(path, weight=user.weight)
        is_promised = self._guarantee(leaf, user)
        if _bound(leaf, user) or is_promised:
            self.tree.refresh(leaf)
            if leaf.exceeds:
                self.over[leaf] = None
        if (leaf.weight, leaf.carried) != (user.weight, _carried(user)):
            self._weigh(leaf, user, (user.tenant, user.id))
        if old is None or old.faded_us != user.faded_us:
            self._settle(leaf, user)

    def set_lift(self, lift: IdleCreditFloor) -> None:
        """Set the idle-credit floor of a tenant or user; it becomes lower only with the weight."""
        path = self.path_of(lift.tenant)
        branch = self.tree.branches.get((*path, lift.user) if lift.user else path)
        if branch is not None:
            self.lifts[lift.tenant, lift.user, lift.kind] = lift
            self.tree.lift(branch, lift.kind, lift.faded_us)

    def _settle(self, leaf: Branch, user: BoardUser) -> None:
        owed = sum(self._owes(stay) for stay in self.stays.values() if stay.leaf is leaf)
        right = user.faded_us * MILLI + self.tree.faded(owed) + leaf.carried
        self.tree.charge(leaf, right - self.tree.usage(leaf))

    def leaf(self, task: BoardTask) -> Branch:
        return self.tree.branches[(*self.path_of(task.tenant), task.user)]

    def branch_of(self, id: str) -> Branch | None:
        """Return the branch of a tenant or user; None if it is not known."""
        user = self.users.get(id)
        if user is None and id not in self.tenants:
            return None
        path = (*self.path_of(user.tenant), id) if user else self.path_of(id)
        return self.tree.branches.get(path)

    # --- devices ---

    def alive(self, id: str | None) -> bool:
        """True if the device is known and up, and its lease has not ended."""
        device = self.devices.get(id or "")
        return device is not None and device.up and device.lease_until_s > self.now_s

    def open(self, device: BoardDevice) -> bool:
        """True if the device may be given new work."""
        return device.takes_work and self.alive(device.id)

    def set_device(self, device: BoardDevice) -> None:
        old = self.devices.get(device.id)
        self.devices[device.id] = device
        lasts_s = device.lease_until_s
        lost_s = self._lost_at_s(device)
        if lost_s > self.now_s:
            due_s = lasts_s if lasts_s > self.now_s else lost_s
            self.leases_due_s = min(self.leases_due_s, due_s)
        elif self.on(device.id):
            self.astray = True  # the next round looks for tasks lost with this device
        if old is not None and self._is_only_renewed(device, old):
            return
        if old is not None and old.takes_work != device.takes_work:
            self.news.update(self.on(device.id))
        if device.reserved_for:
            self.reserved[device.id] = device.reserved_for
        else:
            self.reserved.pop(device.id, None)
        self.tree.version += 1  # a waiting task may find a device now
        self._offer(device, old)

    def _is_only_renewed(self, device: BoardDevice, old: BoardDevice) -> bool:
        """True if only the end of the lease has changed, so that no task needs a new decision."""
        pool = self.pools.get(device.kind)
        if pool is None or (device.id in pool.open) != self.open(device):
            return False
        return replace(old, lease_until_s=device.lease_until_s) == device

    def _offer(self, device: BoardDevice, old: BoardDevice | None) -> None:
        """Make the device assignable if it accepts work, otherwise not."""
        pool = self.pools.setdefault(device.kind, Pool(device.kind))
        pool.known += old is None
        pool.hosts[device.id] = device.host
        pool.traits[device.id] = device.traits
        pool.lies_at(device.id, device.location)
        pool.suited.clear()
        was_open, is_open = device.id in pool.open, self.open(device)
        pool.remove(device.id)
        if was_open and old is not None:
            pool.sizes[pool.open.pop(device.id)] -= 1
            pool.costs -= Counter([old.cost])
        if is_open:
            pool.open[device.id] = device.memory_bytes
            pool.sizes[device.memory_bytes] += 1
            pool.costs[device.cost] += 1
            self._give(pool, device.id)
        traits = device.traits if old is None else old.traits
        if was_open != is_open or traits != device.traits:
            self._requeue_movable(device.traits.offers, traits.offers)
            self._requeue(self._avoiding.get(device.kind, ()))
        if was_open != is_open:
            for id in sorted(self._pinned.get(device.id, ())):
                self.set_task(self.tasks[id])
            if device.id in self.kept_for:
                self.set_task(self.tasks[self.kept_for[device.id]])

    def _requeue_movable(self, *offers: Iterable[str]) -> None:
        """Queue again the commands whose processes can be restored on devices with one of these
        offers.
        """
        if self._movable:
            for offer in {*chain(*offers)} & self._movable.keys():
                for id in sorted(id for id in self._movable[offer] if id in self.tree):
                    self._line_up(self.tasks[id], returns=True)

    def withhold(self, id: str) -> None:
        """Make a free device not assignable until `offer_again`."""
        self.pools[self.devices[id].kind].remove(id)

    def offer_again(self, id: str) -> None:
        self._give(self.pools[self.devices[id].kind], id)

    def _give(self, pool: Pool, id: str) -> None:
        """Make a device assignable if it is open, not held, and not kept for a moving task."""
        if id in pool.open and id not in self.seated and id not in self.kept_for:
            pool.add(id, leaving=id in self.leaving)
        elif id in self.fractions:
            self._set_part(pool, id)

    def _set_part(self, pool: Pool, id: str) -> None:
        """Record what the fractions on a device leave free.

        The rest can be assigned if the device is open.
        """
        lanes = [self.stays[task].lane for task in self.fractions.get(id, ())]
        memory_bytes = pool.open.get(id)
        if not lanes or memory_bytes is None or id in self.kept_for:
            pool.parts.pop(id, None)
            return
        pool.parts[id] = FreePart(
            milli=WHOLE_MILLI - sum(lane.milli for lane in lanes),
            memory_bytes=memory_bytes - sum(part_bytes(lane, memory_bytes) for lane in lanes),
            leaving=id in self.leaving,
        )

    def _keep_for(self, task: BoardTask) -> None:
        """Keep for a moving task the device to which it moves, so that no other task gets the
        device.
        """
        to = task.moves_to if task.state != State.blocked and task.state not in ENDED else None
        before = next((id for id, who in self.kept_for.items() if who == task.id), None)
        if before is not None and before != to:
            del self.kept_for[before]
            self._give(self.pools[self.devices[before].kind], before)
            self.tree.version += 1
        if to and to in self.devices and to not in self.kept_for:
            self.kept_for[to] = task.id
            self.pools[self.devices[to].kind].remove(to)
            self.pools[self.devices[to].kind].parts.pop(to, None)

    def _lands(self, task: BoardTask) -> bool:
        """True if the task waits for exactly the device that it is being moved to."""
        to = task.moves_to
        if not task.stops or to is None or self.kept_for.get(to) != task.id:
            return False
        return self.open(self.devices[to])

    def on(self, device: str) -> list[str]:
        """Return the tasks on a device: its holder, co-located tasks, and a task that is leaving
        it.
        """
        found = (self.seated.get(device), *self.beside.get(device, ()), self.leaving.get(device))
        if device in self.fractions:
            found = (*self.fractions[device], self.leaving.get(device))
        return [id for id in (*found, *self.leaving_too.get(device, ())) if id is not None]

    def group(self, device: str) -> list[BoardStay]:
        """Return the stays that hold a device together: they take turns, or each has a fraction of
        it.
        """
        holder = self.seated.get(device)
        if holder is None:
            return []
        here = sorted(self.fractions.get(device, ())) or (holder, *self.beside.get(device, ()))
        return [self.stays[id] for id in here if id in self.stays]

    def look_at_leases(self) -> list[str]:
        """Return the tasks on lost devices; close free devices if their lease has ended."""
        lost = [
            stay.id
            for stay in self.stays.values()
            if any(self.is_lost(device) for device in stay.task.holds)
        ]
        self.astray = False
        if self.now_s >= self.leases_due_s:
            self.leases_due_s = NEVER
            for device in list(self.devices.values()):
                self.set_device(device)
        return sorted(lost)

    def is_lost(self, id: str) -> bool:
        """True if the device is unknown, or its lease and grace time have ended."""
        device = self.devices.get(id)
        return device is None or self._lost_at_s(device) <= self.now_s

    def _lost_at_s(self, device: BoardDevice) -> float:
        """Return when the tasks on the device are lost, if it is not heard before.

        A task on several devices is lost with any of them, but not while one of its steps may still
        run on another one, whose lease ends as late and whose grace may be longer.
        """
        held = {id for task in self.on(device.id) for id in self.tasks[task].holds}
        others = (self.devices[id].grace_s for id in held if id in self.devices)
        grace_s = max((device.grace_s, *others))
        return device.lease_until_s + self.policy.lost_grace_s + grace_s

    # --- tasks ---

    def set_task(self, task: BoardTask) -> None:
        """Add or update a task."""
        id = task.id
        if task.function and id in self.stays:
            self._size_batch(task)
        if task.state in ENDED:
            self.drop_task(id)
            return
        self._count(self.tasks.get(id), -1)
        self._count(task, 1)
        self.tasks[id] = task
        self._siblings.setdefault(task.request, {})[id] = None
        self._note_begun(task, _has_begun(task))
        self.landing.pop(id, None)
        if task.moves_to is not None or self.kept_for:
            self._keep_for(task)
        stay, returns = self.stays.get(id), False
        if stay is not None and not is_same_stay(stay, task):
            if task.elastic and is_same_epoch(stay, task):
                self._resize(stay, task)
            else:
                self._let_go(stay)
                stay, returns = None, True
        if task.state in ON_A_DEVICE:
            self._stay(task, stay)
        else:
            self._line_up(task, returns=returns)
        if task.state != State.waiting or task.cancel_asked or _conditional(task):
            self.news.add(id)
        if task.state == State.waiting and self._lands(task):
            self.landing[id] = None

    def drop_task(self, id: str) -> None:
        """Remove a task that ended or belongs to another island now."""
        gone = self.tasks.pop(id, None)
        self._count(gone, -1)
        self.landing.pop(id, None)
        if gone is not None and self.kept_for:
            self._keep_for(changed(gone, moves_to=None))
        self.news.discard(id)
        self.unline(id)
        if id in self.stays:
            stay = self.stays[id]
            self._let_go(stay)
            self.memory.ended[stay.leaf, stay.lane.kind] = None
        if gone is not None:
            siblings = self._siblings[gone.request]
            siblings.pop(id, None)
            if not siblings:
                del self._siblings[gone.request]
            self._note_begun(gone, False)

    def _size_batch(self, task: BoardTask) -> None:
        """Learn from a function that has left its device how large its user's next batch can be."""
        if task.state in ON_A_DEVICE:
            return
        before = self.batch_of(task)
        took_us = task.had_us if task.state in ENDED else BATCH_US  # else the batch took too long
        after = before.after(took_us)
        key = task.user, task.kind
        self.memory.batches.setdefault(key, before)
        if after.size > 1:
            self.batches[key] = after
        else:
            self.batches.pop(key, None)

    def batch_of(self, task: BoardTask) -> BatchSize:
        """Return the size of the next batch of the task's user."""
        usual = BatchSize(user=task.user, kind=task.kind)
        return self.batches.get((task.user, task.kind), usual)

    def _count(self, task: BoardTask | None, change: int) -> None:
        if task is None:
            return
        self.priorities[task.priority] += change
        if not self.priorities[task.priority]:
            del self.priorities[task.priority]
        if task.epoch:
            self.urgency.started[task.kind, task.tier] += change * task.width

    def pin(self, task: BoardTask) -> str | None:
        """Return the only device on which the task can resume; None if any device will do.

        If that device is lost, the task resumes from its last checkpoint on any device. A command
        whose processes are not in the checkpoint would begin again on another device: it stays
        pinned even with a checkpoint, unless one of its devices is drained or lost.
        """
        on = task.image_on
        if on is None or not self.alive(on):
            return None
        lies_on = self._lies_on(task)
        is_whole = all(self.alive(id) and self.devices[id].takes_work for id in lies_on)
        return on if not task.saved or (task.is_bound and is_whole) else None

    def _lies_on(self, task: BoardTask) -> tuple[str, ...]:
        """Return the devices on which a paused task's processes or image lie."""
        return () if task.image_on is None else (task.image_on, *task.image_with)

    def pins(self, task: BoardTask) -> tuple[str, ...]:
        """Return the only devices on which the task can resume; () if any devices will do."""
        return () if self.pin(task) is None else self._lies_on(task)

    def lane_in_line(self, task: BoardTask) -> Lane:
        """Return the lane in which the task waits, before a host is chosen for it."""
        host, fresh = "" if task.one_host else None, self.is_fresh(task)
        choice = self.choice_of(task)
        return lane(task.kind, task.width, task.memory_bytes, self.pins(task), host, fresh, choice)

    def choice_of(self, task: BoardTask) -> str:
        """Return the task's choice; for a movable command, only devices where its processes can be
        restored. A task that failed on a device avoids it.

        If too few of these take work, the command begins again on any device, and the task starts
        where it failed. Packages that they lack do not count: they are installed there.
        """
        choice = where_it_goes_on(task)
        if choice != task.choice and not self._has_enough(task, choice):
            choice = task.choice
        avoided = task.avoids and avoided_now(task.avoids, now_s=self.now_s)
        if not avoided:
            return choice
        others = choice_without(choice, tuple(each.device for each in avoided))
        if self._has_enough(task, others):
            return others
        return choice_without(choice, tuple(each.device for each in avoided if each.is_strict))

    def let_in_s(self, task: BoardTask) -> float:
        """Return when enough devices take work that the task does not avoid by then; 0.0 if they
        do now, or will not by time alone.
        """
        avoided = avoided_now(task.avoids, now_s=self.now_s)
        strict = sorted((one for one in avoided if one.is_strict), key=lambda one: one.until_s)
        for n, until_s in enumerate([0.0, *(one.until_s for one in strict)]):
            later = choice_without(task.choice, tuple(one.device for one in strict[n:]))
            if self._has_enough(task, later):
                return until_s
        return 0.0

    def _has_enough(self, task: BoardTask, choice: str) -> bool:
        """True if enough devices that suit the choice take work, whether or not they are free."""
        if (pool := self.pools.get(task.kind)) is None:
            return False
        need = task.kind, task.width, task.memory_bytes
        here = lane(*need, choice=with_packages(choice, ""))
        if task.hosts:
            size = pool.by_host(pool.open, here)
            return hosts_with(size, hosts=task.hosts, width=task.width) >= task.hosts
        sizes = pool.by_host(pool.open, here).values() if task.one_host else [pool.suiting(here)]
        return max(sizes, default=0) >= task.width

    def lane_elsewhere(self, stay: BoardStay) -> Lane:
        """Return what a running task would need of another device to continue there."""
        return with_choice(stay.lane, where_it_goes_on(stay.task))

    def is_fresh(self, task: BoardTask) -> bool:
        """True if the task has held devices for less than a minute (and a slice); rule F8.

        A task is not fresh while another task of its request is on a device or was paused to
        continue later, so that many equal tasks finish one after the other. A task of a
        multi-island gang is never fresh: its tickets decide.
        """
        if not self.policy.turns or task.gang:
            return False
        if task.had_us and task.had_us >= fresh_us(self.policy, task):
            return False
        begun = self.begun(task.request)
        return not begun or (len(begun) == 1 and task.id in begun)

    def begun(self, request: str) -> Collection[str]:
        """Return the request's tasks that are on devices or were paused to continue later."""
        return self._begun.get(request, ())

    def _note_begun(self, task: BoardTask, has_begun: bool) -> None:
        """Record whether a task has begun; queue again the tasks that this makes fresh, or no
        longer fresh (F8).
        """
        begun = self._begun.setdefault(task.request, {})
        if has_begun != (task.id in begun):
            if has_begun:
                begun[task.id] = None
            else:
                del begun[task.id]
            others = list(islice((id for id in begun if id != task.id), 2))
            if not others:
                self._requeue(self._siblings.get(task.request, ()), but=task.id)
            elif len(others) == 1:  # only the freshness of this other task changes
                self._requeue(others, but=task.id)
        if not begun:
            del self._begun[task.request]

    def _requeue(self, ids: Iterable[str], *, but: str = "") -> None:
        for id in list(ids):
            if id != but and id in self.tree:
                self._line_up(self.tasks[id], returns=True)

    def lane(self, task: BoardTask) -> Lane:
        """Return the task's lane, with the host or the places that are the best now."""
        here = self.lane_in_line(task)
        if task.id in self.places:
            return on_places(here, self.places[task.id])
        if task.id in self.sought:
            return on_host(here, self.sought[task.id])
        return self.bound(here)

    def others(self, task: BoardTask) -> list[str]:
        """Return the hosts with enough devices for a one-host task, except the one that `lane`
        returned.
        """
        pool = self.pools.get(task.kind)
        if pool is None or not task.one_host:
            return []
        here = self.lane(task)
        if here.pins:
            return []
        size = pool.by_host(pool.open, here)
        return sorted(host for host, n in size.items() if n >= task.width and host != here.host)

    def bound(self, here: Lane) -> Lane:
        """Add to a one-host lane the host where enough devices are likely to be free first, and to
        a lane of several even hosts the devices there.
        """
        pool = self.pools.get(here.kind)
        if pool is not None and here.hosts and not here.pins:
            return on_places(here, self._even_places(pool, here))
        if here.host is None or pool is None:
            return here
        return on_host(
            here, pool.hosts[here.pins[0]] if here.pins else pool.home(here, self._lent())
        )

    def _even_places(self, pool: Pool, here: Lane) -> tuple[str, ...]:
        """Choose devices on even hosts: free ones if they are enough, or else also those that can
        be returned, then those that their tasks can leave for others, and then any.
        """
        idle = list(self.idle_offers(pool, here))
        if places := pool.evenly(here, idle):
            return places
        lent, held = self.lent_places(), list[DeviceOffer]()
        for id, memory_bytes in pool.open.items():
            if id not in pool.free and pool.fits(id, here):
                at_s, cost = (self.now_s, LENT_COST) if id in lent else (NEVER, HELD_COST)
                order = (not self._could_be_left(id), memory_bytes)
                held.append(DeviceOffer(at_s, cost, order, id, is_idle=False))
        return pool.evenly(here, [*idle, *held])

    def _could_be_left(self, id: str) -> bool:
        """True if all tasks on the device can be moved off it."""
        return all(len(stay.devices) == 1 and stay.task.movable for stay in self.group(id))

    def idle_offers(self, pool: Pool, here: Lane) -> Iterator[DeviceOffer]:
        """Yield the free devices that suit a lane of even hosts.

        Those cost nothing on which no other task is frozen, and that are not kept for others.
        """
        others = {*self.pinned(), *self.reserved, *chain.from_iterable(self.places.values())}
        for id, leaving in pool.free.items():
            if pool.fits(id, here):
                cost = LEAVING_COST if leaving else OTHERS_COST if id in others else 0
                yield DeviceOffer(self.now_s, cost, (pool.open[id],), id, is_idle=True)

    def lent_places(self) -> frozenset[str]:
        """Return devices that tasks can return at once, as many as each holds beyond its need."""
        return frozenset(id for most, devices in self._lent() for id in devices[-most:])

    def _lent(self) -> list[tuple[int, tuple[str, ...]]]:
        """Return the surplus of each task that holds more than it needs, and the devices it can
        return.

        Only running tasks count, and only if all their branches hold more than their guarantees.
        """
        stays = [
            stay
            for stay in (self.elastic.values() if self.grown else ())
            if stay.grown and stay.task.state == State.running and is_lent(stay)
        ]
        return [(stay.grown, stay.devices[self.policy.homebound :]) for stay in stays]

    def _line_up(self, task: BoardTask, *, returns: bool) -> None:
        self.unline(task.id)
        self._looked_up[task.id] = task
        if task.restarts or not task.saved:
            for id in self._lies_on(task):
                self._pinned.setdefault(id, set()).add(task.id)
        if task.movable and task.goes_on_with:
            self._movable.setdefault(task.goes_on_with, set()).add(task.id)
        if task.avoids and (avoided := avoided_now(task.avoids, now_s=self.now_s)):
            self._avoiding.setdefault(task.kind, {})[task.id] = None
            heappush(self._wake, (min(each.until_s for each in avoided), task.id))
        if task.retry_at_s > self.now_s:
            heappush(self._wake, (task.retry_at_s, task.id))
        elif task.state == State.waiting and not self._is_away(task):
            self.tree.push(
                (*self.path_of(task.tenant), task.user),
                task,
                lane=self.lane_in_line(task),
                id=task.id,
                priority=task.priority,
                submitted_s=task.submitted_s,
                returns=returns,
            )
            self.urgency.watch(task)
        not_before_s = task.conditions.not_before_s
        if not_before_s is not None and not_before_s > self.now_s:
            heappush(self._wake, (not_before_s, task.id))

    def _is_away(self, task: BoardTask) -> bool:
        """True if the task is not queued now: it is being moved, is not loaded, or has no durable
        image.

        Only a gang has to wait for a durable image, and not if its processes are frozen.
        """
        is_kept = task.width == 1 or task.restarts or self.pin(task) is None
        return not is_kept or self.beyond(task) or self._lands(task)

    def beyond(self, task: BoardTask) -> bool:
        """True if the task comes after the loaded part of its queue."""
        if not self.longer:
            return False
        end = self.longer.get((self.leaf(task), alike(task)))
        return end is not None and place_in_line(task) > end

    def unline(self, id: str) -> None:
        known = self._looked_up.pop(id, None)
        if known is not None:
            for device in self._lies_on(known):
                self._pinned.get(device, set()).discard(id)
            self._movable.get(known.goes_on_with, set()).discard(id)
            self._avoiding.get(known.kind, {}).pop(id, None)
        task = self.tree.drop(id)
        if task is None:
            return
        self.urgency.forget(task)
        if self.longer:
            line = self.leaf(task), alike(task)
            if line in self.longer and not _loaded(*line):
                self.short.add(line)

    def ending(self, most: int) -> list[tuple[Branch, Lane]]:
        """Return up to `most` queues to read on: those of `short`, and then others with one loaded
        task left.

        Tenants are served in turn, so the queues of many tenants run out together.
        """
        others = (line for line in self.longer if line not in self.short and _loaded(*line) == 1)
        found = sorted(self.short, key=lambda line: line[0].path)
        return [*found, *islice(others, max(0, most - len(found)))]

    def pinned(self) -> frozenset[str]:
        """Return the devices to which a waiting task is pinned."""
        return frozenset(id for lane in self.tree.lanes for id in lane.pins)

    def pinned_to(self, device: str) -> list[str]:
        """Return the waiting tasks that can resume only on this device."""
        ids = sorted(id for id in self._pinned.get(device, ()) if id in self.tree)
        return [id for id in ids if device in self.pins(self.tasks[id])]

    def rate(self, lane: Lane) -> int:
        """Return the highest cost of one second on a lane's devices, in thousandths."""
        pool = self.pools.get(lane.kind)
        cost = max(pool.costs, default=MILLI) if pool is not None else MILLI
        if lane.is_fraction:
            cost = _part_of(cost, lane.milli, WHOLE_MILLI)
        return self._dominant(lane, cost * lane.width)

    def rate_of(self, task: BoardTask) -> int:
        """Return the cost of one second of the task on its devices, in thousandths."""
        return task.cost or self._cost_of(task.holds)

    def cost(self, task: BoardTask, devices: Iterable[str]) -> int:
        """Return the task's cost of one second on these devices; 0 if it is the cost of the
        devices.

        It differs if the task is charged by memory, or holds a fraction of a device.
        """
        if task.choice and (milli := choice_in(task.choice).fraction_milli) < WHOLE_MILLI:
            return max(
                (self._cost_of_part(self.devices[id], milli, task.memory_bytes) for id in devices),
                default=0,
            )
        if not task.memory_bytes:
            return 0
        held = tuple(devices)
        of_devices = self._cost_of(held)
        cost = self._dominant(lane(task.kind, len(held), task.memory_bytes), of_devices)
        return cost if cost > of_devices else 0

    def _cost_of_part(self, device: BoardDevice, milli: int, memory_bytes: int) -> int:
        """Return the cost of a fraction of the device.

        If the task has a larger part of the memory than the fraction, that part counts.
        """
        cost = _part_of(device.cost, milli, WHOLE_MILLI)
        if not device.memory_bytes:
            return cost
        return max(cost, _part_of(device.cost, memory_bytes, device.memory_bytes))

    def _cost_of(self, devices: Iterable[str]) -> int:
        return sum(self.devices[id].cost for id in devices if id in self.devices)

    def _dominant(self, lane: Lane, cost: int) -> int:
        pool = self.pools.get(lane.kind)
        if not lane.memory_bytes or pool is None:
            return cost
        return dominant_cost(
            cost,
            lane.memory_bytes * lane.width,
            all_cost=pool.all_cost,
            all_memory_bytes=pool.all_memory_bytes,
        )[0]

    # --- stays ---

    def _stay(self, task: BoardTask, stay: BoardStay | None) -> None:
        self.unline(task.id)
        known = stay is not None
        if stay is None:
            stay = self._seat(task)
        self._measure_turn(stay, task)
        if task.graph:
            self.tree.version += 1  # other graphs may now join this one
        if task.width_max:
            self.tree.version += 1  # the task may have become resizable
            if task.elastic and stay.id not in self.elastic and not stay.leaving:
                self._count_grown(stay)  # the task was told that it may hold more
            if stay.expected is not None:
                self._expect(stay)
        if task.state in LEAVES_A_SEAT and not stay.leaving:
            self._leave(stay)
        elif stay.ripe and not stay.leaving:
            self._note_protection(stay)
        elif task.started_s is not None and not stay.leaving:
            if ripe_s(stay) <= self.now_s:
                self._ripen(stay, late=known)
            else:
                heappush(self._ripening, (ripe_s(stay), task.id, task.epoch))

    def _measure_turn(self, stay: BoardStay, task: BoardTask) -> None:
        """Adjust the turn's length and its charge once it is known what switch and start cost."""
        if task.cost != stay.task.cost and stay.rate:
            self._change_rate(stay, task.cost)
        turn_us, is_prepared = slice_us(self.policy, task), task.prepared_us != 0
        is_known = turn_us == stay.turn_us and is_prepared == (stay.task.prepared_us != 0)
        if stay.ripe or stay.leaving or is_known:
            stay.task = task
            return
        owed = self._owes(stay)
        stay.task, stay.turn_us = task, turn_us
        self.tree.charge(stay.leaf, self.tree.faded(self._owes(stay) - owed))

    def _change_rate(self, stay: BoardStay, rate: int) -> None:
        """Charge another cost from now on, also for the rest of a turn that is charged already."""
        more, stay.rate = rate - stay.rate, rate
        if stay.ripe or stay.leaving:
            self.tree.accrue(stay.leaf, more)
        else:
            left_us = max(0, self._owed_us(stay) - self.unbooked_us(stay.task))
            self.tree.charge(stay.leaf, self.tree.faded(left_us * more))
        self.tree.refresh(stay.leaf)

    def _seat(self, task: BoardTask) -> BoardStay:
        """Let a task hold its devices, and charge it a full turn at once (rule F1)."""
        leaf, here = self.leaf(task), both_of(self.lane_in_line(task))[1]
        # a shared device reports what the task used
        rate = 0 if task.shares else self.rate_of(task)
        stay = BoardStay(task, leaf, here, task.seats, rate, slice_us(self.policy, task))
        self.stays[task.id] = stay
        if task.graph:
            self.graphs[task.id] = stay
        if task.width > 1:
            self.gangs[task.id] = stay
            self.urgency.patience.hold(task)
        if task.width_max and task.elastic:
            self._count_grown(stay)
            self._give_back(stay, task.leaves)
        pool = self.pools.setdefault(task.kind, Pool(task.kind))
        for id in task.seats:
            self.astray |= self.is_lost(id)
            if here.is_fraction:
                self._seat_fraction(id, stay)
            elif task.shares and self.seated.get(id) is not None:
                self.beside.setdefault(id, {})[task.id] = None
            elif task.state in HOLDS_A_SEAT or id not in self.seated:
                before = self.stays.get(self.seated.get(id, ""))
                if before is not None and before.task.shares:  # a function behind this one
                    self.beside.setdefault(id, {})[before.id] = None
                self.seated[id] = task.id  # until the task is seen to leave
                self._is_left_no_more(id, leaf)
                pool.remove(id)
        self.tree.hold(leaf, here)
        self.tree.charge(leaf, self.tree.faded(self._owes(stay)))
        self._expect(stay)
        return stay

    def _seat_fraction(self, id: str, stay: BoardStay) -> None:
        """Let a task hold a fraction of a device.

        A task that is leaving is left out if others already have its place.
        """
        if id in self.seated and stay.task.state not in HOLDS_A_SEAT:
            return
        here = self.fractions.setdefault(id, {})
        here[stay.id] = None
        self.seated[id] = min(here)
        pool = self.pools[stay.task.kind]
        pool.remove(id)
        self._set_part(pool, id)

    def _resize(self, stay: BoardStay, task: BoardTask) -> None:
        """Apply a change of the task's devices and charge for the new set from now on."""
        had, rate, was_ripe, pool = {*stay.task.holds}, stay.rate, stay.ripe, self.pools[task.kind]
        self._unripe(stay)
        self._count_grown(stay, -1)
        stay.task, stay.devices = task, task.seats
        stay.rate = task.cost or self._cost_of(task.holds)
        for id in task.seats:
            if id not in had:
                self.astray |= self.is_lost(id)
                self.seated[id] = task.id
                self._is_left_no_more(id, stay.leaf)
                pool.remove(id)
        for id in had.difference(task.holds):
            if self.seated.get(id) == stay.id:
                del self.seated[id]
            self._has_left(id, stay)
            self._give(pool, id)
        if not stay.leaving:
            self._count_grown(stay)
        self._give_back(stay, task.leaves)
        if was_ripe:
            self._set_ripe(stay)
            self.tree.accrue(stay.leaf, stay.rate - rate)

    def _give_back(self, stay: BoardStay, devices: tuple[str, ...]) -> None:
        """Offer the devices that the task will release, so that other tasks can be launched on
        them.
        """
        stay.leaves = devices
        for id in devices:
            if self.seated.get(id) == stay.id:
                del self.seated[id]
            self._will_leave(id, stay)
            self._give(self.pools[stay.lane.kind], id)

    def _will_leave(self, device: str, stay: BoardStay) -> None:
        before = self.leaving.get(device)
        if before is not None and before != stay.id:
            self.leaving_too.setdefault(device, {})[before] = None
        self.leaving[device] = stay.id
        heir = self.stays.get(self.seated.get(device, ""))
        for branch in above(stay.leaf):
            if heir is not None and heir.leaf.path[: branch.depth] == branch.path:
                break  # another task of this branch has the device already
            if branch.limit or branch.most_running is not None:
                self.left.setdefault(branch, {})[device] = stay

    def _has_left(self, device: str, stay: BoardStay) -> None:
        too = self.leaving_too.get(device)
        if self.leaving.get(device) == stay.id:
            del self.leaving[device]
            if too:
                self.leaving[device] = too.popitem()[0]
        elif too:
            too.pop(stay.id, None)
        if too is not None and not too:
            del self.leaving_too[device]
        self._is_left_no_more(device, stay.leaf)

    def _is_left_no_more(self, device: str, leaf: Branch) -> None:
        """Note that a device is gone from the branches above a leaf, or that they have it again."""
        for branch in above(leaf) if self.left else ():
            devices = self.left.get(branch)
            if devices is not None and devices.pop(device, None) is not None and not devices:
                del self.left[branch]

    def _count_grown(self, stay: BoardStay, sign: int = 1) -> None:
        if sign > 0:
            self.elastic[stay.id] = stay
        elif self.elastic.pop(stay.id, None) is None:
            return  # the task is leaving: its extra devices no longer count
        if stay.grown:
            self.grown += sign * stay.grown
            self.pools[stay.lane.kind].grown += sign * stay.grown
            self.tree.grow(stay.leaf, stay.lane.kind, sign * stay.grown)
        self.tree.version += 1

    def _leave(self, stay: BoardStay) -> None:
        """Mark a stay as leaving, so that other tasks can be launched on its devices."""
        if not stay.ripe:
            self._true_up(stay)
            self.tree.accrue(stay.leaf, stay.rate)
        self._unripe(stay)
        if self.elastic:
            self._count_grown(stay, -1)
        stay.leaving = True
        self.tree.hold(stay.leaf, stay.lane, -1)
        pool = self.pools[stay.task.kind]
        self._unexpect(pool, stay)
        for id in stay.devices:
            self._leave_seat(id, stay)
            self._will_leave(id, stay)
            self._give(pool, id)

    def _leave_seat(self, device: str, stay: BoardStay) -> None:
        """Release a device; the next of the co-located tasks becomes its holder."""
        if stay.lane.is_fraction:
            self._leave_fraction(device, stay)
            return
        others = self.beside.get(device)
        if others is not None:
            others.pop(stay.id, None)
        if self.seated.get(device) == stay.id:
            del self.seated[device]
            if others:
                self.seated[device] = next(iter(others))
                del others[self.seated[device]]
        if others is not None and not others:
            del self.beside[device]

    def _leave_fraction(self, device: str, stay: BoardStay) -> None:
        here = self.fractions.get(device, {})
        if stay.id not in here:
            return
        del here[stay.id]
        if here:
            self.seated[device] = min(here)
        else:
            del self.fractions[device], self.seated[device]
        self._set_part(self.pools[stay.task.kind], device)

    def _let_go(self, stay: BoardStay) -> None:
        """Remove a stay: the task has left its devices."""
        del self.stays[stay.id]
        self.graphs.pop(stay.id, None)
        if self.gangs.pop(stay.id, None) is not None:
            self.urgency.patience.let_go(stay.task)
        if stay.leaving or stay.ripe:
            self.tree.accrue(stay.leaf, -stay.rate)
        else:
            self._true_up(stay)
        self._unripe(stay)
        pool = self.pools[stay.task.kind]
        if not stay.leaving:
            if self.elastic:
                self._count_grown(stay, -1)
            self.tree.hold(stay.leaf, stay.lane, -1)
            self._unexpect(pool, stay)
        self.tree.refresh(stay.leaf)
        for id in stay.devices + stay.leaves:
            self._leave_seat(id, stay)
            self._has_left(id, stay)
            self._give(pool, id)

    def _ripen(self, stay: BoardStay, *, late: bool) -> None:
        """End a stay's turn: the stay is preemptible now and charged continuously."""
        if stay.ripe or stay.leaving:
            return
        self._set_ripe(stay)
        self.tree.accrue(stay.leaf, stay.rate, from_s=ripe_s(stay) if late else None)

    def _set_ripe(self, stay: BoardStay) -> None:
        stay.ripe = True
        self.ripe.setdefault(stay.leaf, {})[stay.id] = stay
        self._note_protection(stay)
        at_s = settled_s(self.policy, stay)
        if at_s <= self.now_s:
            self._set_settled(stay)
        else:
            heappush(self._settling, (at_s, stay.id, stay.task.epoch))

    def _set_settled(self, stay: BoardStay) -> None:
        self.settled.setdefault(stay.leaf, {})[stay.id] = stay
        self.tree.version += 1  # a task of the same user may now replace it

    def unprotected(self, kind: str) -> Mapping[Branch, Mapping[str, BoardStay]]:
        """Return the preemptible stays of a kind by leaf, except those that patience protects.

        Patience depends on the number of open devices (rule F7).
        """
        pool = self.pools.get(kind)
        devices = 0 if pool is None else len(pool.open)
        if self._unprotected_of.get(kind) != devices:
            self._unprotected[kind], self._unprotected_of[kind] = {}, devices
            self._unprotected_tops[kind] = Counter()
            for stay in chain.from_iterable(stays.values() for stays in self.ripe.values()):
                if stay.lane.kind == kind:
                    self._note_protection(stay)
        return self._unprotected[kind]

    def _note_protection(self, stay: BoardStay) -> None:
        if self.urgency.patience.protected(stay.task):
            self._drop_unprotected(stay)
            return
        mine = self._unprotected.setdefault(stay.lane.kind, {}).setdefault(stay.leaf, {})
        if stay.id not in mine:
            mine[stay.id] = stay
            tops = self._unprotected_tops.setdefault(stay.lane.kind, Counter())
            tops[stay.leaf.top] += len(stay.devices)

    def _drop_unprotected(self, stay: BoardStay) -> None:
        leaves = self._unprotected.get(stay.lane.kind, {})
        mine = leaves.get(stay.leaf)
        if mine is None or mine.pop(stay.id, None) is None:
            return
        if not mine:
            del leaves[stay.leaf]
        tops = self._unprotected_tops[stay.lane.kind]
        tops[stay.leaf.top] -= len(stay.devices)
        if not tops[stay.leaf.top]:
            del tops[stay.leaf.top]

    def preemptible_tops(self, kind: str) -> list[tuple[int, Branch]]:
        """Return (score, branch) of top branches with `unprotected` stays, best served first."""
        tree = self.tree
        known = self._tops.get(kind)
        if known is None or known[0] != tree.version:
            self.unprotected(kind)
            tops = [(tree.score(top, kind=kind), top) for top in self._unprotected_tops[kind]]
            tops.sort(key=itemgetter(0), reverse=True)
            known = self._tops[kind] = (tree.version, tops)
        return known[1]

    def better_served(self, kind: str, score: int, top: Branch) -> int:
        """Count the devices of `unprotected` stays in other top branches that score above
        `score`.
        """
        counts = self._unprotected_tops[kind]
        return sum(
            counts[other]
            for theirs, other in self.preemptible_tops(kind)
            if theirs > score and other is not top
        )

    def best_served(self, kind: str, top: Branch) -> int | None:
        """Return the highest score of another top branch with `unprotected` stays, or None."""
        for score, other in self.preemptible_tops(kind):
            if other is not top:
                return score
        return None

    def _unripe(self, stay: BoardStay) -> None:
        mine = self.ripe.get(stay.leaf)
        if mine is None or stay.id not in mine:
            return
        del mine[stay.id]
        if not mine:
            del self.ripe[stay.leaf]
        self._drop_unprotected(stay)
        settled = self.settled.get(stay.leaf)
        if settled is not None and settled.pop(stay.id, None) is not None and not settled:
            del self.settled[stay.leaf]

    def _true_up(self, stay: BoardStay) -> None:
        """Refund the part of a turn that a stay does not use because it ends early."""
        unused_us = self._owes(stay) - stay.rate * self.unbooked_us(stay.task)
        self.tree.charge(stay.leaf, -self.tree.faded(max(0, unused_us)))

    def unbooked_us(self, task: BoardTask) -> int:
        """Return the time that the task has held devices in this epoch and that the ledger has not
        booked, in µs.
        """
        if task.started_s is None or task.shares:
            return 0
        held_us = task.prepared_us + round((self.now_s - task.started_s) * 1e6)
        if task.resized_s is not None:
            held_us = round((self.now_s - task.resized_s) * 1e6)
        return max(0, held_us - (task.held_us - task.accrued_us))

    def _owes(self, stay: BoardStay) -> int:
        """Return what a stay owes, at least a full turn, in device-µs times thousandths of cost."""
        return self._owed_us(stay) * stay.rate

    def _owed_us(self, stay: BoardStay) -> int:
        unbooked_us = self.unbooked_us(stay.task)
        # a resized task had its turn before it was resized
        if not stay.leaving and stay.task.resized_s is None:
            booked_us = stay.task.held_us - stay.task.accrued_us
            unbooked_us = max(unbooked_us, stay.task.prepared_us + stay.turn_us - booked_us)
        return unbooked_us

    def _end(self, stay: BoardStay) -> tuple[float, str, int]:
        return self.end_s(stay), stay.id, len(stay.devices) - stay.grown

    def end_s(self, stay: BoardStay) -> float:
        """Return when the stay is expected to end; NEVER if unknown."""
        task = stay.task
        since_s = task.launched_s if task.started_s is None else task.started_s
        return since_s + (NEVER if task.expected_s is None else task.expected_s)

    def _expect(self, stay: BoardStay) -> None:
        pool = self.pools[stay.lane.kind]
        self._unexpect(pool, stay)
        if stay.task.expected_s is not None:
            stay.expected = self._end(stay)
            insort(pool.ends, stay.expected)

    def _unexpect(self, pool: Pool, stay: BoardStay) -> None:
        if stay.expected is not None:
            del pool.ends[bisect_left(pool.ends, stay.expected)]
            stay.expected = None


def _part_of(cost: int, part: int, whole: int) -> int:
    """Return the cost of a part, rounded up: no part is free of charge."""
    return -(-cost * part // whole)


def alike(task: BoardTask) -> Lane:
    """Return the task's lane without pin, host and freshness."""
    return lane(task.kind, task.width, task.memory_bytes, choice=task.choice)


def place_in_line(task: BoardTask) -> tuple[int, float, str]:
    """Sort key of one user's tasks (rule F3); lower goes first."""
    return -task.priority, task.submitted_s, task.id


def _loaded(leaf: Branch, here: Lane) -> int:
    """Return how many tasks of this queue are loaded."""
    lanes = (*both_of(here), *both_of(on_host(here, "")))
    return sum(line.below for lane in lanes if (line := leaf.lines.get(lane)) is not None)


def waited_longer(fresh: BoardTask, older: BoardTask, now_s: float) -> bool:
    """True if a fresh task gets a device before an older task of its user (rule F8).

    It does if its wait at the moment of the older task's pause was longer than the older task has
    waited since. So a fresh task need not wait until the older task ends; and the longer the older
    task waits, the fewer tasks pass it.
    """
    return older.waits_since_s - fresh.waits_since_s > now_s - older.waits_since_s


def _has_begun(task: BoardTask) -> bool:
    """True if the task is on devices, or was paused and continues when its turn comes."""
    return task.state in ON_A_DEVICE or (task.state == State.waiting and task.had_us > 0)


def where_it_goes_on(task: BoardTask) -> str:
    """Return the choice of devices on which the task can continue without beginning again, as a
    text.
    """
    if not (task.movable and task.goes_on_with):
        return task.choice
    return choice_where_it_goes_on(task.choice, task.goes_on_with)


def _conditional(task: BoardTask) -> bool:
    conditions = task.conditions
    return bool(
        conditions.waits_for
        or conditions.broken
        or conditions.standing
        or conditions.hold
        or conditions.reservation
        or conditions.not_before_s is not None
        or task.gang
    )


def _bound(branch: Branch, it: BoardTenant | BoardUser) -> bool:
    """Take over the limits of a branch and what its budget has put in force; True if that changes
    anything.
    """
    before = (branch.limit, branch.most_running, branch.exhausted)
    branch.limit = budget.bounds(it.limit, it.exhausted)
    branch.most_running, branch.exhausted = it.most_running, it.exhausted
    return before != (branch.limit, branch.most_running, branch.exhausted)


def _carried(it: BoardTenant | BoardUser) -> int:
    """Return what counts in comparisons only: a change of the weight, and a budget that demotes."""
    demoted = budget.DEMOTED if "demote" in it.exhausted.values() else 0
    return it.carried_us * MILLI + demoted
