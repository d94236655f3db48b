"""Decides the steps of moving a running task: copy once more, stop the task, or give up.

A move has stages, each of which can be broken off without harm:

    wished     a user asked for it; nothing is reserved yet
    copied     a free device is reserved; in rounds the job writes a checkpoint while it runs, and
               the target device fetches what it lacks of the checkpoint
    stopped    the task is paused; only what it wrote to since the last round is left to copy
    landed     the task is launched on the target, and runs

The rounds are pre-copy (Clark et al., Live Migration of Virtual Machines, NSDI 2005): each round
copies what was written to during the round before.  The rounds end when the rest would be copied in
almost no time, when the rest no longer shrinks (a job may write to it in every step), or after
`rounds_max` rounds.

The functions are pure: `next_act` is called at every look with all it needs, and returns the same
for equal arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from app.core.model.lifecycle import State

ANYWHERE = "*"  # target of a move: any other device that is free
MOVABLE = "move"  # the capability that a job needs to be moved


@dataclass(frozen=True, slots=True, kw_only=True)
class MovePolicy:
    rounds_max: int = 5
    # in seconds; if the rest can be copied within this time, there is no further round
    brief_s: float = 0.1
    # fraction; if the last round shrank the rest by less than this, there is no further round
    shrinks_by: float = 0.1
    # seconds that a task may stand still, apart from the time for copying
    stopped_s: float = 15.0
    slower_by: float = 4.0  # factor by which copying may take longer than expected


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRound:
    """Describes a checkpoint of the running job, and what the target device had to fetch of it.

    `wrote_us` is how long the source took to make it durable. `fetched_us` is None until the target
    has it. `key` is the public key of the host that signed it.
    """

    sha256: str
    key: str
    step: int
    size_bytes: int
    wrote_us: int
    fetched_bytes: int = 0
    fetched_us: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Moving:
    """Describes a move that is under way, from `source`, where the task runs in its epoch `epoch`.

    `asked` counts the rounds that were ordered; `rounds` are those that are durable. `stopping`
    means that no further round follows.
    """

    to: str
    source: str
    epoch: int
    until_s: float
    asked: int = 0
    stopping: bool = False
    rounds: tuple[CopyRound, ...] = ()

    def saved(self, round: CopyRound) -> Moving:
        """Record a durable checkpoint.

        A checkpoint that was not ordered counts as if it had been.
        """
        if self.stopping or (self.rounds and round.step <= self.rounds[-1].step):
            return self
        rounds = (*self.rounds, round)
        return replace(self, rounds=rounds, asked=max(self.asked, len(rounds)))

    def fetched(self, sha256: str, bytes_: int, us: int) -> Moving:
        """Record that the target device has fetched the checkpoint."""
        rounds = tuple(
            replace(one, fetched_bytes=bytes_, fetched_us=us)
            if one.sha256 == sha256 and one.fetched_us is None
            else one
            for one in self.rounds
        )
        return replace(self, rounds=rounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveScene:
    """Describes the present state of the task and of the target; `open`: the target takes new work.

    `bound_because` is why the processes of a command cannot go there, as its stop has shown.
    """

    state: str
    epoch: int
    seat: str | None
    open: bool
    now_s: float
    bound_because: str = ""


class Act(StrEnum):
    wait = "wait"
    copy = "copy"  # order one more checkpoint
    stop = "stop"  # pause the task: the rest is copied while it stands still
    off = "off"  # the move has failed; the task stays where it is


@dataclass(frozen=True, slots=True)
class Next:
    """Says what to do next: `because` is for the owner, `until_s` is the limit for a task's
    stop.
    """

    act: Act
    because: str = ""
    until_s: float = 0.0


_WAIT = Next(Act.wait)


def next_act(moving: Moving, scene: MoveScene, policy: MovePolicy) -> Next:
    """Decide what to do about a move now."""
    if (because := _failed(moving, scene)) is not None:
        return Next(Act.off, because)
    copies = scene.state == State.running and scene.epoch == moving.epoch and not moving.stopping
    if not copies or moving.asked > len(moving.rounds):
        return _WAIT
    if not moving.rounds:
        return Next(Act.copy)
    if moving.rounds[-1].fetched_us is None:
        return _WAIT
    because = _enough(moving.rounds, policy)
    if because is None:
        return Next(Act.copy)
    stands_s = policy.stopped_s + policy.slower_by * expected_stop_s(moving.rounds)
    return Next(Act.stop, because, scene.now_s + stands_s)


def _failed(moving: Moving, scene: MoveScene) -> str | None:
    """Return why a move cannot go on; None if it can."""
    landed = scene.epoch > moving.epoch
    holds = scene.state not in (State.waiting, State.blocked)
    if landed and scene.seat == moving.to:
        return None  # the task starts there, or has ended there as it might anywhere
    if landed and holds:
        return "it was launched on another device meanwhile"
    if landed:
        return f"it could not begin on {moving.to}"
    if not scene.open:
        return f"{moving.to} takes no work any more"
    if scene.bound_because:
        return f"its processes cannot go there: {scene.bound_because}"
    if scene.now_s >= moving.until_s:
        return "it took too long"
    if not holds and (not moving.stopping or scene.state == State.blocked):
        return "it gave up its device meanwhile"
    return None


def _enough(rounds: tuple[CopyRound, ...], policy: MovePolicy) -> str | None:
    """Return why a further round is not worth its cost; None if it is worth it."""
    if expected_stop_s(rounds) <= policy.brief_s:
        return "hardly anything is left to copy"
    if len(rounds) >= policy.rounds_max:
        return f"it was copied {len(rounds)} times"
    if len(rounds) > 1:
        left, before = rounds[-1].fetched_bytes, rounds[-2].fetched_bytes
        if left > before * (1 - policy.shrinks_by):
            return "what it writes to all the time stays to be copied"
    return None


def bandwidth(rounds: tuple[CopyRound, ...]) -> float:
    """Return the rate in bytes per second from the job's memory to the target's; 0.0 if unknown.

    It is the rate of the round that copied most: small rounds measure the cost of a round, not of
    bytes.
    """
    most = max(rounds, key=lambda one: one.fetched_bytes, default=None)
    if most is None or most.fetched_us is None or not most.fetched_bytes:
        return 0.0
    return most.fetched_bytes * 1e6 / max(1, most.wrote_us + most.fetched_us)


def expected_stop_s(rounds: tuple[CopyRound, ...]) -> float:
    """Return how long it would take to copy the next difference, if it is as large as the
    last one.
    """
    rate = bandwidth(rounds)
    return rounds[-1].fetched_bytes / rate if rate else 0.0


def told(moving: Moving) -> str:
    """Describe the progress of the move, in a sentence without its period."""
    begun = f"moving to {moving.to}"
    if moving.stopping:
        return f"{begun}: the last difference is being copied"
    if not moving.rounds:
        return f"{begun}: its first checkpoint is being written"
    number, last = len(moving.rounds), moving.rounds[-1]
    if last.fetched_us is None:
        whole = _size(last.size_bytes)
        return f"{begun}: round {number}, {moving.to} fetches what it lacks of {whole}"
    return f"{begun}: round {number} is there, {_size(last.fetched_bytes)} were new"


def _size(bytes_: int) -> str:
    return f"{bytes_ / 1e6:.1f} MB" if bytes_ >= 50_000 else f"{bytes_ / 1e3:.1f} kB"
