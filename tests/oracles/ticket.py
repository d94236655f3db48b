"""Tickets: gangs in one total order per island, so that no two ever wait for each other.

A `Desk` issues the tickets of an island.  One ticket is good for all devices of a gang at once, and
memory is reserved on all of them before it is issued, or nothing happens.  It tells each device the
*turn* that it is there: turns are counted without gaps, so a device (`Line`) knows whether it still
misses an earlier message, and runs strictly by turn.

A gang over several islands takes its tickets in two phases: in the order of the islands' names each
desk reserves memory and is *held* (it issues nothing to anybody else), then each issues; if one
refuses, all are let go.  Holding is not for show: were a desk to number the gang and go on, a local
gang behind it could be waited for by one before it on the next island.  Who decides, and writes
down that it did, is not here; a desk stays held until it is told.  Live gangs that span islands
hold seats, and those for themselves alone (`core.scheduling.island_gangs`).

Why nothing gets stuck: a ticket is issued after those of all that the gang waits for, and later
than every ticket before it in any of its queues.  So the gang whose ticket was issued first among
the unfinished has nothing to wait for, and is at the head everywhere.  For memory: what finished
gangs leave behind may be put aside for the oldest run, and nothing larger than an empty device is
admitted.

`play` is a small model of controllers, messages and devices that shows it, interleaving by
interleaving, beside devices that take gangs as they come and desks that do not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    """What runs on all of its devices at once.

    `needs` are the bytes that it reserves by device, inputs, outputs and workspace; `stays` are
    those that its outputs go on holding after it ended.  `run` is the age of the graph's run: the
    lowest is the oldest.  `after` are the gangs that it waits for.
    """

    id: str
    needs: Mapping[str, int]
    stays: Mapping[str, int] = field(default_factory=dict)
    run: int = 0
    after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, order=True)
class Ticket:
    """The place in the island's order; a gang that is launched again gets a new epoch."""

    seq: int
    epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """One gang's ticket on one island, and its turn on each of its devices there."""

    gang: str
    ticket: Ticket
    turns: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Nothing was reserved.  `reason` is "held", "memory" or "never"; `where` who or what."""

    gang: str
    reason: str
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Aside:
    """Bytes of an ended gang's outputs that must leave a device before another gang fits."""

    gang: str
    device: str
    bytes: int


class Misuse(ValueError):
    """A desk or a line was told what cannot be: where, what came, and what was expected."""


# --- the desk -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """Who issues an island's tickets.

    `reserved` are bytes by gang and device, of gangs that run, wait, or left outputs behind
    (`ended`); `turns` is the next turn of each device; `holder` the gang for which it is held.
    """

    island: str
    capacity: Mapping[str, int]
    reserved: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    runs: Mapping[str, int] = field(default_factory=dict)
    ended: frozenset[str] = frozenset()
    turns: Mapping[str, int] = field(default_factory=dict)
    seq: int = 0
    holder: str = ""

    def used(self, device: str) -> int:
        return sum(bytes_.get(device, 0) for bytes_ in self.reserved.values())

    def mine(self, gang: Gang) -> dict[str, int]:
        """What the gang needs of this island's devices."""
        return {device: need for device, need in gang.needs.items() if device in self.capacity}

    def refusal(self, gang: Gang) -> Refusal | None:
        """Why the gang gets no ticket now; None if it does."""
        if self.holder and self.holder != gang.id:
            return Refusal(gang=gang.id, reason="held", where=self.holder)
        for device, need in self.mine(gang).items():
            if need > self.capacity[device]:
                return Refusal(gang=gang.id, reason="never", where=device)
            if need + self.used(device) > self.capacity[device]:
                return Refusal(gang=gang.id, reason="memory", where=device)
        return None

    def ask(self, gang: Gang, *, epoch: int = 0) -> tuple[Desk, Issued | Refusal]:
        """A ticket for a gang of this island alone, or why there is none.

        Ask only when every gang of its `after` has its tickets, here or elsewhere.
        """
        no = self.refusal(gang)
        if no is not None:
            return self, no
        return self._reserving(gang)._issuing(gang.id, epoch)

    def hold(self, gang: Gang) -> tuple[Desk, Refusal | None]:
        """First phase: memory is reserved here, and nobody else is served until `commit`."""
        no = self.refusal(gang)
        if no is not None:
            return self, no
        return replace(self._reserving(gang), holder=gang.id), None

    def commit(self, gang: Gang, *, epoch: int = 0) -> tuple[Desk, Issued]:
        """Second phase: all islands have reserved, so here is the ticket."""
        self._held_for(gang)
        return replace(self, holder="")._issuing(gang.id, epoch)

    def let_go(self, gang: Gang) -> Desk:
        """Instead of the second phase: another island refused."""
        self._held_for(gang)
        return replace(self, holder="").freed(gang.id)

    def finished(self, gang: Gang) -> Desk:
        """The gang ended: only what its outputs hold stays reserved."""
        if gang.id not in self.reserved:
            raise Misuse(f"desk of {self.island}: {gang.id} ended, and never had a ticket")
        stays = {device: gang.stays.get(device, 0) for device in self.mine(gang)}
        return replace(
            self, reserved={**self.reserved, gang.id: stays}, ended=self.ended | {gang.id}
        )

    def freed(self, gang: str) -> Desk:
        """Nobody needs the outputs of the gang any more, or it was given up."""
        return replace(
            self,
            reserved={id: bytes_ for id, bytes_ in self.reserved.items() if id != gang},
            runs={id: run for id, run in self.runs.items() if id != gang},
            ended=self.ended - {gang},
        )

    def to_put_aside(self, gang: Gang) -> tuple[Aside, ...]:
        """What must leave before the gang fits: outputs of ended gangs, the youngest run's first.

        For the oldest run only, else two runs could push each other out for ever.  Empty if that
        would not help yet: gangs with tickets still run.
        """
        chosen = list[Aside]()
        for device, need in self.mine(gang).items():
            over = need + self.used(device) - self.capacity[device]
            for id in sorted(self.ended, key=lambda id: (-self.runs[id], id)):
                held = self.reserved[id].get(device, 0)
                if over > 0 and held:
                    chosen.append(Aside(gang=id, device=device, bytes=held))
                    over -= held
            if over > 0:
                return ()
        return tuple(chosen)

    def put_aside(self, gone: Iterable[Aside]) -> Desk:
        """Those bytes have left their devices."""
        reserved = {id: dict(bytes_) for id, bytes_ in self.reserved.items()}
        for one in gone:
            reserved[one.gang][one.device] -= one.bytes
        return replace(self, reserved=reserved)

    def _reserving(self, gang: Gang) -> Desk:
        if gang.id in self.reserved:
            raise Misuse(f"desk of {self.island}: {gang.id} already has a ticket here")
        return replace(
            self,
            reserved={**self.reserved, gang.id: self.mine(gang)},
            runs={**self.runs, gang.id: gang.run},
        )

    def _issuing(self, gang: str, epoch: int) -> tuple[Desk, Issued]:
        turns = {device: self.turns.get(device, 0) for device in self.reserved[gang]}
        later = {device: turn + 1 for device, turn in turns.items()}
        issued = Issued(gang=gang, ticket=Ticket(self.seq, epoch), turns=turns)
        return replace(self, turns={**self.turns, **later}, seq=self.seq + 1), issued

    def _held_for(self, gang: Gang) -> None:
        if self.holder != gang.id:
            now = f"held for {self.holder}" if self.holder else "not held"
            raise Misuse(f"desk of {self.island} is {now}, and {gang.id} speaks of its hold")


# --- the devices --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A device that runs strictly by turn; messages may come in any order.

    `waiting` maps turns to gangs, "" for one that was given up.
    """

    device: str
    turn: int = 0
    waiting: Mapping[int, str] = field(default_factory=dict)

    @property
    def head(self) -> str | None:
        """Who runs now or next; None while an earlier message is still to come."""
        return self.waiting.get(self.turn) or None

    def told(self, issued: Issued) -> Line:
        """A ticket arrives; one that is known, or over, changes nothing."""
        turn = issued.turns[self.device]
        if turn < self.turn or turn in self.waiting:
            return self
        return replace(self, waiting={**self.waiting, turn: issued.gang})

    def finished(self) -> Line:
        """The head has ended."""
        if self.head is None:
            raise Misuse(f"device {self.device} has nobody at turn {self.turn}, and that one ended")
        return self._next(self.waiting)

    def given_up(self, issued: Issued) -> Line:
        """A gang lost a member or its run: its turn is passed over, whenever it comes."""
        turn = issued.turns[self.device]
        if turn < self.turn:
            return self
        waiting = {**self.waiting, turn: ""}
        return self._next(waiting) if turn == self.turn else replace(self, waiting=waiting)

    def _next(self, waiting: Mapping[int, str]) -> Line:
        turn = self.turn + 1
        while waiting.get(turn) == "":
            turn += 1
        return replace(
            self, turn=turn, waiting={at: gang for at, gang in waiting.items() if at >= turn}
        )


# --- the model ----------------------------------------------------------------------------------

TICKETS, UNSYNCHRONISED, UNHELD = "tickets", "unsynchronised", "unheld"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Islands with the memory of their devices, and runs: each a list of gangs, issued in order."""

    islands: Mapping[str, Mapping[str, int]]
    runs: Sequence[Sequence[Gang]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`stuck`: gangs that never ended although nothing more could happen.

    `disorders` counts devices that took a ticket behind a later one.
    """

    ended: tuple[str, ...]
    stuck: tuple[str, ...]
    disorders: int
    steps: int


def play(
    scene: Scene, choose: Callable[[int], int], *, by: str = TICKETS, put_aside: bool = True
) -> Outcome:
    """One interleaving: as long as anything can happen, `choose(n)` says which of n things does.

    A controller per run issues its gangs without waiting for them to end (asynchronous dispatch);
    each message to a device travels on its own; a device, once it entered a gang, can do nothing
    else until all members have entered, what the gang waits for has ended, and it ends.  With
    `by` UNSYNCHRONISED devices take gangs as their messages come; with UNHELD desks number a gang
    of several islands one after the other without holding.
    """
    model = _Model(scene, by, put_aside)
    steps = 0
    while actions := model.actions():
        action = actions[choose(len(actions))]
        model.do(action)
        steps += 1
    stuck = tuple(gang for gang in model.gangs if gang not in model.ended)
    return Outcome(ended=tuple(model.ended), stuck=stuck, disorders=model.disorders, steps=steps)


_Action = tuple[Callable[..., None], *tuple[object, ...]]


class _Model:
    def __init__(self, scene: Scene, by: str, put_aside: bool) -> None:
        self.by, self.may_put_aside = by, put_aside
        self.desks = {
            id: Desk(island=id, capacity=memory) for id, memory in sorted(scene.islands.items())
        }
        self.home = {device: id for id, memory in scene.islands.items() for device in memory}
        self.lines = {device: Line(device=device) for device in self.home}
        self.came: dict[str, list[str]] = {device: [] for device in self.home}
        self.runs = [list(run) for run in scene.runs]  # what is still to be issued
        self.gangs = {gang.id: gang for run in scene.runs for gang in run}
        self.islands = {
            id: sorted({self.home[device] for device in gang.needs})
            for id, gang in self.gangs.items()
        }
        self.needed_by = {
            id: {other.id for other in self.gangs.values() if id in other.after}
            for id in self.gangs
        }
        self.asking: dict[str, list[str]] = {}  # gang -> islands that were asked
        self.mail: list[tuple[str, Issued]] = []
        self.inside: dict[str, str] = {}  # device -> the gang that it entered
        self.last: dict[str, Ticket] = {}
        self.tickets: dict[tuple[str, str], Ticket] = {}
        self.ended: dict[str, None] = {}
        self.disorders = 0
        self.desks_changed = True  # then controllers look again at what they can do
        self.issuing: list[_Action] = []

    # --- what can happen ------------------------------------------------------------------------

    def actions(self) -> list[_Action]:
        if self.desks_changed:
            steps = (self._issuing(run) for run in self.runs if run)
            self.issuing = [step for step in steps if step is not None]
            self.desks_changed = False
        found = list(self.issuing)
        found += [(self._deliver, n) for n in self._deliverable()]
        found += [(self._enter, device) for device in self.lines if self._next(device)]
        inside = dict.fromkeys(self.inside.values())
        found += [(self._end, gang) for gang in inside if self._whole(gang)]
        return found

    def _deliverable(self) -> list[int]:
        """Any message; without tickets those of one controller to one device keep their order."""
        if self.by != UNSYNCHRONISED:
            return list(range(len(self.mail)))
        first: dict[tuple[str, int], int] = {}
        for n, (device, issued) in enumerate(self.mail):
            first.setdefault((device, self.gangs[issued.gang].run), n)
        return list(first.values())

    def _issuing(self, run: list[Gang]) -> _Action | None:
        """The next thing that a run's controller can do for its next gang."""
        gang = run[0]
        if self.by == UNSYNCHRONISED:
            return (self._send_all, run)
        asked = self.asking.get(gang.id, [])
        left = [id for id in self.islands[gang.id] if id not in asked]
        if not left:
            return (self._commit, run)
        alone = self.by == UNHELD or len(asked) + len(left) == 1
        if alone or not asked:
            if any(self.desks[id].refusal(gang) for id in left[: 1 if alone else None]):
                return (self._make_room, gang) if self._can_make_room(gang) else None
            return (self._ask, run, left[0]) if alone else (self._hold, gang, left[0])
        no = self.desks[left[0]].refusal(gang)
        if no is None:
            return (self._hold, gang, left[0])
        return (self._give_back, gang) if no.reason == "memory" else None

    def _next(self, device: str) -> str | None:
        """Whom the device may enter."""
        if device in self.inside:
            return None
        if self.by == UNSYNCHRONISED:
            return next((gang for gang in self.came[device] if gang not in self.ended), None)
        return self.lines[device].head

    def _whole(self, gang: str) -> bool:
        inside = all(self.inside.get(device) == gang for device in self.gangs[gang].needs)
        return inside and all(other in self.ended for other in self.gangs[gang].after)

    def _can_make_room(self, gang: Gang) -> bool:
        """Only for the oldest run that still has gangs to end."""
        if not self.may_put_aside or gang.run != self._oldest():
            return False
        return any(self.desks[id].to_put_aside(gang) for id in self.islands[gang.id])

    def _oldest(self) -> int:
        return min(gang.run for id, gang in self.gangs.items() if id not in self.ended)

    # --- and what then does ---------------------------------------------------------------------

    def do(self, action: _Action) -> None:
        action[0](*action[1:])
        self.desks_changed |= action[0] not in (self._deliver, self._enter)

    def _send_all(self, run: list[Gang]) -> None:
        gang = run.pop(0)
        turns = dict.fromkeys(gang.needs, 0)
        issued = Issued(gang=gang.id, ticket=Ticket(0), turns=turns)
        self.mail += [(device, issued) for device in gang.needs]

    def _ask(self, run: list[Gang], island: str) -> None:
        gang = run[0]
        self.desks[island], issued = self.desks[island].ask(gang)
        assert isinstance(issued, Issued)
        self._send(island, issued)
        asked = [*self.asking.get(gang.id, []), island]
        self.asking[gang.id] = asked
        if len(asked) == len(self.islands[gang.id]):
            run.pop(0)

    def _hold(self, gang: Gang, island: str) -> None:
        self.desks[island], _ = self.desks[island].hold(gang)
        self.asking.setdefault(gang.id, []).append(island)

    def _commit(self, run: list[Gang]) -> None:
        """One island after the other, each its own step: the first still asked for comes next."""
        gang = run[0]
        island = next(id for id in self.asking[gang.id] if self.desks[id].holder == gang.id)
        self.desks[island], issued = self.desks[island].commit(gang)
        self._send(island, issued)
        if all(self.desks[id].holder != gang.id for id in self.asking[gang.id]):
            run.pop(0)

    def _give_back(self, gang: Gang) -> None:
        for island in self.asking.pop(gang.id):
            self.desks[island] = self.desks[island].let_go(gang)

    def _make_room(self, gang: Gang) -> None:
        for id in self.islands[gang.id]:
            self.desks[id] = self.desks[id].put_aside(self.desks[id].to_put_aside(gang))

    def _send(self, island: str, issued: Issued) -> None:
        self.tickets[issued.gang, island] = issued.ticket
        self.mail += [(device, issued) for device in issued.turns]

    def _deliver(self, n: int) -> None:
        device, issued = self.mail.pop(n)
        self.came[device].append(issued.gang)
        if self.by != UNSYNCHRONISED:
            self.lines[device] = self.lines[device].told(issued)

    def _enter(self, device: str) -> None:
        gang = self._next(device)
        assert gang is not None
        self.inside[device] = gang
        ticket = self.tickets.get((gang, self.home[device]), Ticket(0))
        self.disorders += ticket < self.last.get(device, ticket)
        self.last[device] = ticket

    def _end(self, id: str) -> None:
        gang = self.gangs[id]
        self.ended[id] = None
        for device in gang.needs:
            del self.inside[device]
            if self.by != UNSYNCHRONISED:
                self.lines[device] = self.lines[device].finished()
        if self.by != UNSYNCHRONISED:
            for island in self.islands[gang.id]:
                self.desks[island] = self.desks[island].finished(gang)
            for other in (id, *gang.after):
                self._free(other)

    def _free(self, id: str) -> None:
        """Outputs go when all that read them have ended."""
        if self.needed_by[id] <= set(self.ended):
            for island in self.islands[id]:
                self.desks[island] = self.desks[island].freed(id)
