"""Run N ranks of a job on M slots of this machine, without Roundhouse around them.

    python -m examples.gang_alone MODULE:CLASS --ranks 4 --seats 1 --steps 20 --resize 5:2,9:4

`live` runs inside a rank's process: it joins the gang, builds the job, and steps it. The number of
slots may change at the boundary between two steps. `run` forks the ranks of a gang from a process
that has imported torch, as a zygote does, waits for them, and returns the outcome of each.

A job is a class with `step(ctx)`, an ordinary one that finds its default process group ready, or a
function `main(ctx)` that calls collectives itself and has no steps.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import hashlib
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
import torch.distributed as dist

from workers.commands.gang.gathering import Gathering
from workers.hardware.accelerator import Accelerator, default_generators
from workers.ranks import host_bridge, turns
from workers.ranks.native.rank import NativeRank
from workers.ranks.rank import TIMEOUT_S, Rank
from workers.ranks.shared_memory import Arena, Handles, close, make
from workers.ranks.turns import GangFailed

JSON = dict[str, Any]

SEED = 0
BRIDGE_ENDS_S = 30.0  # seconds that a bridge may take to end after the ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class GangSpec:
    """Describes a gang to run."""

    entry: str  # "module:name"
    ranks: int
    seats: int
    steps: int = 0
    # Step -> number of slots from that step on; step 0 stands for the first opportunity.
    resize: dict[int, int] = field(default_factory=dict)
    params: JSON = field(default_factory=dict)
    squash: bool = True
    swap: bool = False
    timeout_s: float = TIMEOUT_S
    slice_s: float = 1.0
    measure_from: int = 1  # step from which processor time counts
    # Number of slots on each host, if there are several. Each simulated host is a shared memory
    # arena on this machine, connected as real hosts are.
    hosts: tuple[int, ...] = ()
    kind: str = "cpu"  # kind of the devices; on an accelerator each slot is a device of this host
    path: str = ""  # a folder to add to the module search path
    # True: torch's own groups, one device for each rank (`workers.ranks.native`)
    native: bool = False
    holds: int = (
        0  # seed of random moments at which these groups are dropped and built anew; 0: none
    )
    # rendezvous file; if set, stock gloo runs over it instead of turns, for comparison
    peers: str = ""


class RankContext:
    """The `ctx` that tenant code gets."""

    def __init__(self, gang: GangSpec, rank: int) -> None:
        self.device = Accelerator(gang.kind).device
        self.rank, self.world_size = rank, gang.ranks
        self.params, self.inputs = gang.params, {}  # type: ignore[var-annotated]
        self.step = 0
        self.result: JSON | None = None
        self.logged: JSON = {}

    def finish(self, result: JSON | None = None) -> None:
        self.result = result or {}

    def log(self, **metrics: Any) -> None:
        self.logged.update(metrics)


@dataclass(frozen=True, slots=True)
class StockRank:
    """A rank of the same gang under stock gloo, without slots, for comparison."""

    gang: GangSpec
    number: int

    def begin(self) -> None:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{self.gang.peers}",
            rank=self.number,
            world_size=self.gang.ranks,
        )

    def boundary(self, step: int, seats: int | None = None) -> None:
        pass

    def end(self) -> None:
        """Wait for all ranks.

        The process must exit at once after this: gloo may hang when its peer ends first.
        """
        dist.barrier()

    def accounts(self) -> JSON:
        return {}


# --- one rank's life ------------------------------------------------------------------------------


def live(gang: GangSpec, rank: Rank | NativeRank | StockRank) -> JSON:
    """Build the job, step it to its end, and return this rank's report."""
    ctx = RankContext(gang, rank.number)
    _seed()
    rank.begin()
    if gang.path:
        sys.path.insert(0, gang.path)
    module, _, name = gang.entry.partition(":")
    entry = getattr(importlib.import_module(module), name)
    told: JSON = {"losses": []}
    if isinstance(entry, type):
        job = entry(ctx, **gang.params)
        told |= _stepped(gang, rank, job, ctx, told["losses"])
        told |= {"hash": state_hash(job), "result": ctx.result}
    else:
        told["losses"].append(_shown(entry(ctx, **gang.params)))
    rank.end()
    return told | rank.accounts()


def _stepped(
    gang: GangSpec,
    rank: Rank | NativeRank | StockRank,
    job: Any,
    ctx: RankContext,
    losses: list[Any],
) -> dict[str, float]:
    begun = time.process_time(), time.monotonic()
    while ctx.result is None and ctx.step < gang.steps:
        step = ctx.step + 1
        rank.boundary(step, gang.resize.get(step))
        if step == gang.measure_from:
            begun = time.process_time(), time.monotonic()
        ctx.step = step
        losses.append(_shown(job.step(ctx)))
    return {"cpu_s": time.process_time() - begun[0], "steps_s": time.monotonic() - begun[1]}


def _shown(returned: Any) -> Any:
    if isinstance(returned, dict):
        return {str(key): _shown(value) for key, value in returned.items()}
    if isinstance(returned, torch.Tensor):
        return returned.tolist()
    return returned if isinstance(returned, int | float | str | list | None) else str(returned)


def _seed() -> None:
    torch.manual_seed(SEED)
    numpy.random.seed(SEED)
    random.seed(SEED)


def state_hash(job: Any) -> str:
    """Return the SHA-256 of a job's modules and optimizers, and of this process's random state."""
    digest = hashlib.sha256()
    for name, value in sorted(vars(job).items()):
        state = getattr(value, "state_dict", None)
        if callable(state) and not isinstance(value, type):
            digest.update(name.encode())
            _add(digest, state())
    for generator in (torch.default_generator, *default_generators().values()):
        digest.update(bytes(generator.get_state().numpy()))
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, dict):
        for key in value:
            digest.update(str(key).encode())
            _add(digest, value[key])
    elif isinstance(value, list | tuple):
        for part in value:
            _add(digest, part)
    elif isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        digest.update(local.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy())
    else:
        digest.update(repr(value).encode())


# --- a gang on this host --------------------------------------------------------------------------


def run(gang: GangSpec) -> list[JSON]:
    """Fork the ranks from this process, which should have one thread, and wait for all.

    A rank's report has "error" if the rank failed, and "killed" if it was killed. No child process
    is left behind.
    """
    arenas = [Arena(handles) for handles in _handles(gang)]
    for arena in arenas:
        turns.seat_all(arena, sum(gang.hosts) or gang.seats)
        if 0 in gang.resize:
            turns.wish(arena, gang.resize[0])
    sys.stdout.flush()
    sys.stderr.flush()
    children: dict[int, _Child] = {}
    bridges: list[int] = []
    try:
        for rank in range(gang.ranks):
            arena = next(arena for arena in arenas if arena.is_here(rank))
            pid, read = _fork(gang, arena.handles, rank)
            children[pid] = _Child(rank, read, arena)
        bridges = _bridged(arenas) if gang.hosts else []
        holds = RandomHolds(arenas[0], gang.holds) if gang.holds else None
        stories = _told_by(children, holds)
        if holds is not None:
            stories[0]["held_s"] = holds.held_s
        _must_end(bridges)
        return stories
    finally:
        for pid in (*children, *bridges):
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        for handles in [arena.handles for arena in arenas]:
            close(handles)


def _handles(gang: GangSpec) -> list[Handles]:
    """Create the shared memory of each host and return the handles."""
    if not gang.hosts:
        return [make(gang.ranks)]
    hosts = turns.hosts_of(gang.ranks, gang.hosts)
    return [make(gang.ranks, hosts, host) for host in range(len(gang.hosts))]


@dataclass(frozen=True, slots=True)
class _Child:
    """A rank's process, as its parent knows it."""

    rank: int
    read: int  # file descriptor from which its report is read
    arena: Arena


def _fork(gang: GangSpec, handles: Handles, rank: int) -> tuple[int, int]:
    """Fork a rank; returns its process id and the file descriptor of its report."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(read)
        status = 1
        try:
            status = _child(gang, handles, rank, write)
        finally:
            os._exit(status)
    os.close(write)
    return pid, read


def _child(gang: GangSpec, handles: Handles, rank: int, write: int) -> int:
    _die_with_parent()
    torch.set_num_threads(1)
    gc.enable()
    try:
        if gang.kind != "cpu":
            _see_one_device(gang, rank)
        own = StockRank(gang, rank) if gang.peers else _ready(gang, handles, rank)
        told = live(gang, own)
    except BaseException as error:
        told = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        if not isinstance(error, GangFailed):
            turns.fail(Arena(handles), f"rank {rank} failed: {told['error']}")
    with os.fdopen(write, "w") as pipe:
        json.dump(told, pipe)
    return 1 if "error" in told else 0


def _die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, even if it is stopped."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _see_one_device(gang: GangSpec, rank: int) -> None:
    """Let this process see only the device of its slot, as a resident does."""
    if gang.resize:
        raise ValueError("a rank cannot change its device: begin the gang again from its image")
    seat = turns.seat_of(rank, gang.ranks, sum(gang.hosts) or gang.seats)
    os.environ[f"{gang.kind.upper()}_VISIBLE_DEVICES"] = str(seat)


def _ready(gang: GangSpec, handles: Handles, rank: int) -> Rank | NativeRank:
    if gang.native:
        return NativeRank(handles, rank, kind=gang.kind)
    return Rank(
        handles,
        rank,
        squash=gang.squash,
        swap=gang.swap,
        slice_s=gang.slice_s,
        timeout_s=gang.timeout_s,
        accelerator=Accelerator(gang.kind),
    )


class RandomHolds:
    """Drops the groups of a gang at random moments, and lets the ranks build them anew."""

    def __init__(self, arena: Arena, seed: int) -> None:
        self.gathering, self.chance = Gathering(arena), random.Random(seed)
        self.next_s = time.monotonic() + self.chance.uniform(0.0, 0.5)
        self.begun_s: float | None = None
        self.held_s: list[float] = []  # how long each order took until the groups were dropped

    def mind(self) -> None:
        now_s = time.monotonic()
        if now_s < self.next_s:
            return
        self.begun_s = now_s if self.begun_s is None else self.begun_s
        if self.gathering.has_come(now_s):
            if not self.gathering.is_dropped:
                raise RuntimeError(f"an order was taken back: {self.gathering.counters()}")
            self.held_s.append(now_s - self.begun_s)
            self.gathering.end()
            self.begun_s, self.next_s = None, now_s + self.chance.uniform(0.0, 0.2)


def _told_by(children: dict[int, _Child], holds: RandomHolds | None = None) -> list[JSON]:
    stories: dict[int, JSON] = {}
    for pid, text in _until_all_ended(children, holds):
        child = children[pid]
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        stories[child.rank] = json.loads(text) if text else {"killed": code}
        if not text:
            turns.fail(child.arena, f"rank {child.rank} has died (exit status {code})")
    return [stories[rank] for rank in sorted(stories)]


def _until_all_ended(
    children: dict[int, _Child], holds: RandomHolds | None
) -> Iterator[tuple[int, str]]:
    texts = {child.read: (pid, bytearray()) for pid, child in children.items()}
    while texts:
        readable, _, _ = select.select(list(texts), [], [], None if holds is None else 0.002)
        if holds is not None:
            holds.mind()
        for read in readable:
            pid, text = texts[read]
            piece = os.read(read, 1 << 16)
            text += piece
            if not piece:
                os.close(read)
                del texts[read]
                yield pid, text.decode()


def _bridged(arenas: list[Arena]) -> list[int]:
    """Fork a bridge process for each host; returns the process ids.

    The ranks are forked before the links exist, so no rank holds an end of a link.
    """
    links: list[dict[int, socket.socket]] = [{} for _ in arenas]
    with socket.create_server(("127.0.0.1", 0)) as server:
        for host in range(1, len(arenas)):
            links[host][host_bridge.HOME] = socket.create_connection(server.getsockname())
            links[host_bridge.HOME][host] = server.accept()[0]
    pids = []
    for arena, own in zip(arenas, links, strict=True):
        pid = os.fork()
        if not pid:
            status = 1
            try:
                _die_with_parent()
                for others in links:
                    for sock in others.values() if others is not own else ():
                        sock.close()
                status = host_bridge.main(arena, own)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        pids.append(pid)
    for own in links:
        for sock in own.values():
            sock.close()
    return pids


def _must_end(bridges: list[int]) -> None:
    """Require that the bridges end after the ranks.

    A bridge that never ends would keep a host's memory for ever.
    """
    for pid in bridges:
        pidfd = os.pidfd_open(pid)
        ended, _, _ = select.select([pidfd], [], [], BRIDGE_ENDS_S)
        os.close(pidfd)
        if not ended:
            raise RuntimeError(f"a bridge has not ended within {BRIDGE_ENDS_S:.0f} s")


# --- a host of gangs ------------------------------------------------------------------------------


def serve(warm: Iterable[str]) -> None:
    """Run the gangs that arrive as lines of JSON; each answer is one line.

    One process, which has imported the modules `warm`, forks all ranks.
    """
    _die_with_parent()
    for module in warm:
        importlib.import_module(module)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what jobs print must not mix with the answers
    gc.freeze()
    for line in sys.stdin:
        asked = json.loads(line)
        resize = {int(step): seats for step, seats in asked.pop("resize", {}).items()}
        asked["hosts"] = tuple(asked.get("hosts", ()))
        answers.write(json.dumps(run(GangSpec(**asked, resize=resize))) + "\n")


def parse_resize(text: str) -> dict[int, int]:
    """Parse "5:2,9:4" as {5: 2, 9: 4}."""
    return {int(step): int(seats) for step, seats in (p.split(":") for p in text.split(",") if p)}


def parse_hosts(text: str) -> tuple[int, ...]:
    """Parse "2,1": two of the slots on the first host, one on the second."""
    return tuple(int(seats) for seats in text.split(","))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.gang_alone", description=__doc__)
    parser.add_argument("entry", nargs="?", help="module:Class, or module:function")
    parser.add_argument("--serve", action="store_true", help="read gangs from stdin")
    parser.add_argument("--warm", action="append", default=[], help="a module to import first")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seats", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--resize", type=parse_resize, default={}, help="step:seats,...")
    parser.add_argument("--hosts", type=parse_hosts, default=(), help="seats of each, like 2,1")
    parser.add_argument("--params", type=json.loads, default={}, help="as JSON")
    parser.add_argument("--swap", action="store_true", help="device memory to the host at a switch")
    parser.add_argument("--kind", default="cpu", help="of the devices, as torch names it")
    parser.add_argument("--no-squash", dest="squash", action="store_false")
    arguments = vars(parser.parse_args())
    warm = arguments.pop("warm")
    if arguments.pop("serve"):
        serve(warm)
        return 0
    stories = run(GangSpec(path=os.getcwd(), **arguments))
    for rank, story in enumerate(stories):
        sys.stdout.write(json.dumps({"rank": rank, **story}) + "\n")
    return int(any("error" in story or "killed" in story for story in stories))


if __name__ == "__main__":
    sys.exit(main())
