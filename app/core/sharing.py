"""Graphs that share a device: who may, who joins, and who must not any more.

A graph stops within some milliseconds and keeps its memory, so several can live on one device and
take turns there that no message could order: the device gives them (`core.rota`), by usage and
weight (F3), and the island only says who takes part.  To join takes nothing from anybody but the
turns that are due to who joins: nobody is paused, and no slice need be over first.

They share where it makes no rule mean anything else: on the only device of a kind (on several,
whole turns even out who has which), none that a guarantee, a limit or a promise of a tier is about.
And only while they are nearly as well served: who is far behind has the device for itself until it
has caught up, as ever, so that nobody is said to run who gets no turn.  Who waits and cannot share
goes first: nobody better served than it joins.

Of each user one takes turns.  Where places are left its next one is launched too, its **heir**: it
has one turn to begin with, and more when those before it have ended.  So a user with many graphs
has its share without a gap between them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from app.core.board import Board, Stay, slice_us
from app.core.fairshare import Branch, Lane, unscored, usage_us
from app.core.island import Task
from app.core.lifecycle import State
from app.core.reclaim import above, sides
from app.core.rota import Level, Share

NEAR_US = 5_000_000  # of the device: who joins would catch up with the others so soon, or they
FAR_US = 20_000_000  # and who is so far from them shares no longer


def places(board: Board) -> list[str]:
    """Devices on which graphs run, and may take turns with others."""
    if board.policy.sharers_max < 2 or not board.policy.turns:
        return []
    only = (next(iter(pool.open)) for pool in board.pools.values() if pool.size() == 1)
    free = (id for id in only if id not in board.kept_for)
    return sorted(id for id in free if _may_all(board, board.group(id)))


def _may_all(board: Board, group: Sequence[Stay]) -> bool:
    return bool(group) and all(_runs(stay.task) and may(board, stay.task) for stay in group)


def _runs(task: Task) -> bool:
    """Or will at once, beside others."""
    return task.state == State.running or (task.shares and task.state == State.starting)


def may(board: Board, task: Task) -> bool:
    """May it share the only device of its kind, as far as it itself goes?"""
    if not task.graph or task.width != 1 or task.elastic or task.moves_to is not None:
        return False
    if board.policy.tier_share.get(task.tier) and task.tier in board.honoured(task.kind):
        return False
    return all(_is_plain(branch) for branch in above(board.leaf(task)))


def _is_plain(branch: Branch) -> bool:
    return not branch.guarantee and not branch.limit and branch.most_running is None


def who_joins(board: Board, device: str) -> tuple[Task, Stay | None] | None:
    """Who goes first of those that wait and may take turns with those on a device.

    And who makes place for it, after a full slice: one of the same user with a lower priority, or,
    where as many share the device as may, an heir, or the best served of them, if it has had more
    than the other will have after the next one.  Where nobody else joins, an heir may.
    """
    group = board.group(device)
    for leaf, lane, task in _who_wait(board, device):
        if not may(board, task) or task.cancel_asked:
            return None
        gone, own = None, _of(leaf, group)
        if own:
            gone = own[-1]
            if gone.task.priority >= task.priority or not _may_ask(gone):
                continue
        elif len(group) >= board.policy.sharers_max:
            gone = _an_heir(group) or _best_served(board, leaf, lane, task, group)
            if gone is None:
                return None
        others = [stay for stay in group if stay is not gone]
        if not _fits(board, device, others, lane):
            continue
        if not all(_near(board, leaf, stay.leaf, lane, NEAR_US) for stay in others):
            return None
        return task, gone
    heir = _heir(board, device, group)
    return None if heir is None else (heir, None)


def _who_wait(board: Board, device: str) -> Iterator[tuple[Branch, Lane, Task]]:
    kind, tree = board.devices[device].kind, board.tree
    lanes = [lane for lane in tree.lanes if lane.kind == kind and lane.pin in (None, device)]
    return _in_order(board, tree.root, lanes)


def _of(leaf: Branch, group: Sequence[Stay]) -> list[Stay]:
    """Those of one user, in the order of its line."""
    return sorted((stay for stay in group if stay.leaf is leaf), key=_in_line)


def _heir(board: Board, device: str, group: Sequence[Stay]) -> Task | None:
    """The next of the least served user, if everybody who is served less has one there already.

    Once: who was launched and found no room is launched again when it is its turn.
    """
    if len(group) >= board.policy.sharers_max:
        return None
    for leaf, lane, task in _who_wait(board, device):
        own = _of(leaf, group)
        if not own or not may(board, task):
            return None
        is_next = len(own) == 1 and own[0].task.priority >= task.priority
        if is_next and not task.epoch and _fits(board, device, group, lane):
            return task
    return None


def _in_line(stay: Stay) -> tuple[int, float, str]:
    """As in the line of its user."""
    return -stay.task.priority, stay.task.submitted_s, stay.id


def _an_heir(group: Sequence[Stay]) -> Stay | None:
    """One that can be asked to make place."""
    ahead = set[Branch]()
    for stay in sorted(group, key=_in_line):
        if stay.leaf in ahead and _may_ask(stay):
            return stay
        ahead.add(stay.leaf)
    return None


def _may_ask(stay: Stay) -> bool:
    return stay.ripe and stay.task.state == State.running


def _best_served(
    board: Board, leaf: Branch, lane: Lane, task: Task, group: Sequence[Stay]
) -> Stay | None:
    """None if it cannot be asked."""
    fee = board.tree.faded(slice_us(board.policy, task) * board.rate(lane))

    def ahead(stay: Stay) -> int:
        mine, theirs = sides(leaf, stay.leaf)
        score = board.tree.score
        return score(theirs, kind=lane.kind) - score(mine, fee, kind=lane.kind)

    most = max(group, key=lambda stay: (ahead(stay), stay.id))
    return most if _may_ask(most) and ahead(most) > 0 else None


def _in_order(
    board: Board, branch: Branch, lanes: Collection[Lane]
) -> Iterator[tuple[Branch, Lane, Task]]:
    """The first of each user in these lanes, in the order of rule F3."""
    if not branch.inner:
        found = board.tree.first_below(branch, lanes)
        if found is not None:
            yield found
        return
    keys: dict[Branch, tuple[bool, int]] = {}
    for lane in lanes:
        for borrows, score, child in board.tree.keys(branch, lane):
            keys[child] = min(keys.get(child, (True, score)), (borrows, score))
    for child in sorted(keys, key=lambda child: (keys[child], child.name)):
        yield from _in_order(board, child, lanes)


def _fits(board: Board, device: str, group: Sequence[Stay], lane: Lane) -> bool:
    taken = sum(stay.lane.memory_bytes for stay in group)
    return taken + lane.memory_bytes <= board.devices[device].memory_bytes


def _near(board: Board, one: Branch, other: Branch, lane: Lane, bound_us: int) -> bool:
    """Would the less served of two have caught up within this time of the device?"""
    mine, theirs = sides(one, other)
    scores = sorted(
        (board.tree.score(side, kind=lane.kind), side.weight) for side in (mine, theirs)
    )
    (least, weight), (most, _) = scores
    return unscored(most - least, weight) <= board.tree.faded(bound_us * board.rate(lane))


def who_parts(board: Board) -> list[Stay]:
    """Those who share a device and must not any more: all but the least served of them."""
    found = []
    for device in sorted(board.beside):
        group = board.group(device)
        first = min(group, key=lambda stay: (board.tree.score(stay.leaf.top), stay.id))
        if not _goes_on(board, device, group, first):
            found += [
                s for s in group if s is not first and s.ripe and s.task.state == State.running
            ]
    return found


def _goes_on(board: Board, device: str, group: Sequence[Stay], first: Stay) -> bool:
    pool = board.pools[board.devices[device].kind]
    if device not in pool.open or pool.size() != 1:
        return device not in pool.open  # a device that is drained is emptied anyway
    return all(
        may(board, stay.task) and _near(board, first.leaf, stay.leaf, stay.lane, FAR_US)
        for stay in group
    )


def shares(board: Board, device: str) -> list[Share]:
    """What the device needs to know to give turns; empty if nobody shares it."""
    if device not in board.beside:
        return []
    group = sorted(board.group(device), key=_in_line)
    return [_share(board, stay, place) for place, stay in enumerate(group)]


def _share(board: Board, stay: Stay, place: int) -> Share:
    """As the ledger has it: of its seat time so much is booked, in the usage of its branches."""
    task = stay.task
    path = reversed([branch for branch in above(stay.leaf) if branch.parent is not None])
    return Share(
        task=task.id,
        epoch=task.epoch,
        place=place,
        held_us=task.held_us - task.accrued_us,
        rate=board.rate_of(task),
        path=tuple(_level(board, branch, task.kind) for branch in path),
    )


def _level(board: Board, branch: Branch, kind: str) -> Level:
    policy, faded = board.policy, board.tree.usage(branch) + branch.lifts.get(kind, 0)
    used = usage_us(
        faded, now_s=board.now_s, since_s=policy.since_s, half_life_s=policy.half_life_s
    )
    return Level(name=branch.name, used=used, weight=branch.weight)
