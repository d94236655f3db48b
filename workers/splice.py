"""N ranks of a job on M seats: a rank's life, and a gang on one host from first to last.

    python -m workers.splice MODULE:CLASS --ranks 4 --seats 1 --steps 20 --resize 5:2,9:4

`live` is what runs inside a rank's process: it joins the gang, builds the job, and steps it, with
the boundary between two steps as the place where the seats may change.  `run` forks the ranks of
a gang from a process that has imported torch, as a zygote does, waits for them, and tells what came
of each.  Nothing here knows the scheduler: whoever hosts a gang calls `turns.wish` to resize it.

A job is a class with `step(ctx)`, an ordinary one that finds its default process group ready, or a
function `main(ctx)` that calls collectives by hand and has no steps.
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
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy
import torch
import torch.distributed as dist

from workers import bridge, collectives, turns
from workers.exchange import Exchange
from workers.ground import Ground, Handles, close, make
from workers.squash import Squash
from workers.stow import Stow
from workers.turns import GangFailed, Turns

JSON = dict[str, Any]

SEED = 0
TIMEOUT_S = 60.0
BRIDGE_ENDS_S = 30.0  # after the ranks, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    """What to run.

    `entry` is "module:name"; `resize` maps steps to the seats from there on, 0 to those from the
    first chance on.  `hosts` says how many of the seats lie on each, if there are several: here
    they are so many grounds on this machine, joined as hosts are.
    """

    entry: str
    ranks: int
    seats: int
    steps: int = 0
    resize: dict[int, int] = field(default_factory=dict)
    params: JSON = field(default_factory=dict)
    squash: bool = True
    swap: bool = False
    timeout_s: float = TIMEOUT_S
    slice_s: float = 1.0
    measure_from: int = 1  # processor time counts from this step on
    hosts: tuple[int, ...] = ()
    path: str = ""  # a folder that the module may be in
    peers: str = ""  # a file: stock gloo over it instead of turns, to compare with


class Context:
    """What a tenant's code is given: `ctx`."""

    def __init__(self, gang: Gang, rank: int) -> None:
        self.device = torch.device("cpu")
        self.rank, self.world_size = rank, gang.ranks
        self.params, self.inputs = gang.params, {}  # type: ignore[var-annotated]
        self.step = 0
        self.result: JSON | None = None
        self.logged: JSON = {}

    def finish(self, result: JSON | None = None) -> None:
        self.result = result or {}

    def log(self, **metrics: Any) -> None:
        self.logged.update(metrics)


class Rank:
    """One rank in its process: seat, meetings, squashing, moves, put together once."""

    def __init__(
        self,
        handles: Handles,
        rank: int,
        *,
        squash: bool = True,
        swap: bool = False,
        slice_s: float = 1.0,
        timeout_s: float = TIMEOUT_S,
        device: torch.device | None = None,
        apart: bool = False,
    ) -> None:
        self.stow = Stow(device or torch.device("cpu")) if swap else None
        leave = self.stow.leave if self.stow else None
        enter = self.stow.enter if self.stow else None
        self.turns = Turns(
            Ground(handles), rank, slice_s=slice_s, leave=leave, enter=enter, apart=apart
        )
        self.exchange = Exchange(self.turns, timeout_s=timeout_s)
        self.squash = Squash(self.exchange) if squash else None
        self.timeout_s = timeout_s

    def begin(self) -> None:
        """Wait for the first turn; then the default process group is there."""
        collectives.install(self.exchange)
        if self.squash is not None:
            self.squash.install()
        self.turns.join()
        collectives.start(self.turns, self.timeout_s)

    @property
    def number(self) -> int:
        return self.turns.rank

    def boundary(self, step: int, seats: int | None = None) -> None:
        """Before step `step` begins; from there on on so many `seats`, if all ranks say so."""
        if self.stow is not None:
            self.stow.look(step)
        words = self.turns.words
        if seats not in (None, words[turns.SEATS], words[turns.WISH]):
            turns.wish(self.turns.ground, seats)
        self.turns.boundary(step, self.timeout_s)

    def end(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        self.turns.finish()

    def accounts(self) -> JSON:
        squash, stow, words = self.squash, self.stow, self.turns.words
        return {
            "turns": words[self.turns.me + turns.TURNS],
            "log": [asdict(turn) for turn in self.turns.log],
            "events": squash.events if squash else [],
            "updates": squash.updates if squash else 0,
            "spared": squash.spared if squash else 0,
            "common_bytes": squash.common_bytes() if squash else 0,
            "out_bytes": stow.out_bytes if stow else 0,
            "in_bytes": stow.in_bytes if stow else 0,
            "last_bytes": stow.last_bytes if stow else 0,
            "largest_bytes": stow.largest_bytes if stow else 0,
        }


@dataclass(frozen=True, slots=True)
class Stock:
    """A rank of the same gang under stock gloo, without seats: to compare with."""

    gang: Gang
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
        """Together; the process then ends as it is: gloo may hang when its peer goes first."""
        dist.barrier()

    def accounts(self) -> JSON:
        return {}


# --- one rank's life ------------------------------------------------------------------------------


def live(gang: Gang, rank: Rank | Stock) -> JSON:
    """Build the job and step it to its end; what is told of this rank."""
    ctx = Context(gang, rank.number)
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
    gang: Gang, rank: Rank | Stock, job: Any, ctx: Context, losses: list[Any]
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
    """SHA-256 over a job's modules and optimizers, and this process's random state."""
    digest = hashlib.sha256()
    for name, value in sorted(vars(job).items()):
        state = getattr(value, "state_dict", None)
        if callable(state) and not isinstance(value, type):
            digest.update(name.encode())
            _add(digest, state())
    digest.update(bytes(torch.get_rng_state().numpy()))
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
        digest.update(local.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    else:
        digest.update(repr(value).encode())


# --- a gang on this host --------------------------------------------------------------------------


def run(gang: Gang) -> list[JSON]:
    """Fork the ranks from this process, which should have one thread, and wait for all.

    Each rank's story has "error" if it failed; who was killed has "killed".  Nobody is left behind.
    """
    grounds = [Ground(handles) for handles in _handles(gang)]
    for ground in grounds:
        turns.seat_all(ground, sum(gang.hosts) or gang.seats)
        if 0 in gang.resize:
            turns.wish(ground, gang.resize[0])
    sys.stdout.flush()
    sys.stderr.flush()
    children: dict[int, _Child] = {}
    bridges: list[int] = []
    try:
        for rank in range(gang.ranks):
            ground = next(ground for ground in grounds if ground.is_here(rank))
            pid, read = _fork(gang, ground.handles, rank)
            children[pid] = _Child(rank, read, ground)
        bridges = _bridged(grounds) if gang.hosts else []
        stories = _told_by(children)
        _must_end(bridges)
        return stories
    finally:
        for pid in (*children, *bridges):
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        for handles in [ground.handles for ground in grounds]:
            close(handles)


def _handles(gang: Gang) -> list[Handles]:
    """Of each host's ground."""
    if not gang.hosts:
        return [make(gang.ranks)]
    hosts = turns.hosts_of(gang.ranks, gang.hosts)
    return [make(gang.ranks, hosts, host) for host in range(len(gang.hosts))]


@dataclass(frozen=True, slots=True)
class _Child:
    """A rank's process, as its parent knows it."""

    rank: int
    read: int  # where its story comes from
    ground: Ground


def _fork(gang: Gang, handles: Handles, rank: int) -> tuple[int, int]:
    """Its process id, and where its story comes from."""
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


def _child(gang: Gang, handles: Handles, rank: int, write: int) -> int:
    _die_with_parent()
    torch.set_num_threads(1)
    gc.enable()
    try:
        own = Stock(gang, rank) if gang.peers else _ready(gang, handles, rank)
        told = live(gang, own)
    except BaseException as error:
        told = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        if not isinstance(error, GangFailed):
            turns.fail(Ground(handles), f"rank {rank} failed: {told['error']}")
    with os.fdopen(write, "w") as pipe:
        json.dump(told, pipe)
    return 1 if "error" in told else 0


def _die_with_parent() -> None:
    """Also where we have been stopped, and would not see that nobody asks any more."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _ready(gang: Gang, handles: Handles, rank: int) -> Rank:
    return Rank(
        handles,
        rank,
        squash=gang.squash,
        swap=gang.swap,
        slice_s=gang.slice_s,
        timeout_s=gang.timeout_s,
    )


def _told_by(children: dict[int, _Child]) -> list[JSON]:
    stories: dict[int, JSON] = {}
    for pid, text in _until_all_ended(children):
        child = children[pid]
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        stories[child.rank] = json.loads(text) if text else {"killed": code}
        if not text:
            turns.fail(child.ground, f"rank {child.rank} has died (exit status {code})")
    return [stories[rank] for rank in sorted(stories)]


def _until_all_ended(children: dict[int, _Child]) -> Iterator[tuple[int, str]]:
    texts = {child.read: (pid, bytearray()) for pid, child in children.items()}
    while texts:
        readable, _, _ = select.select(list(texts), [], [])
        for read in readable:
            pid, text = texts[read]
            piece = os.read(read, 1 << 16)
            text += piece
            if not piece:
                os.close(read)
                del texts[read]
                yield pid, text.decode()


def _bridged(grounds: list[Ground]) -> list[int]:
    """A process for each host's bridge.  The ranks are there already, and hold no end of a link."""
    links: list[dict[int, socket.socket]] = [{} for _ in grounds]
    with socket.create_server(("127.0.0.1", 0)) as server:
        for host in range(1, len(grounds)):
            links[host][bridge.HOME] = socket.create_connection(server.getsockname())
            links[bridge.HOME][host] = server.accept()[0]
    pids = []
    for ground, own in zip(grounds, links, strict=True):
        pid = os.fork()
        if not pid:
            status = 1
            try:
                _die_with_parent()
                for others in links:
                    for sock in others.values() if others is not own else ():
                        sock.close()
                status = bridge.main(ground, own)
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
    """The ranks have; a bridge that then stays would keep a host's memory for ever."""
    for pid in bridges:
        pidfd = os.pidfd_open(pid)
        ended, _, _ = select.select([pidfd], [], [], BRIDGE_ENDS_S)
        os.close(pidfd)
        if not ended:
            raise RuntimeError(f"a bridge has not ended within {BRIDGE_ENDS_S:.0f} s")


# --- a host of gangs ------------------------------------------------------------------------------


def serve(warm: Iterable[str]) -> None:
    """Gangs come as lines of JSON; each answer is one line.  One process, which has imported the
    modules `warm`, forks them all."""
    _die_with_parent()
    for module in warm:
        importlib.import_module(module)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what jobs print is no answer
    gc.freeze()
    for line in sys.stdin:
        asked = json.loads(line)
        resize = {int(step): seats for step, seats in asked.pop("resize", {}).items()}
        asked["hosts"] = tuple(asked.get("hosts", ()))
        answers.write(json.dumps(run(Gang(**asked, resize=resize))) + "\n")


class Host:
    """The other end of `serve`: a warm process, started once, that gangs are asked of."""

    def __init__(
        self, *, before: tuple[str, ...] = (), warm: tuple[str, ...] = (), **environment: str
    ) -> None:
        """`before` is a command to start it by, like taskset; `warm` is what to import first."""
        self.process = subprocess.Popen(
            [
                *(*before, sys.executable, "-W", "ignore", "-m", "workers.splice", "--serve"),
                *(f"--warm={module}" for module in warm),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,  # so that all its processes can be stopped as one group
        )

    def run(self, entry: str, *, peers: bool = False, **gang: Any) -> list[JSON]:
        """What came of each rank; with `peers` under stock gloo, without seats."""
        ask, answers = self.process.stdin, self.process.stdout
        assert ask is not None
        assert answers is not None
        with tempfile.TemporaryDirectory() as folder:
            place = f"{folder}/peers" if peers else ""
            ask.write(json.dumps({"entry": entry, "seats": 1, **gang, "peers": place}) + "\n")
            ask.flush()
            stories: list[JSON] = json.loads(answers.readline())
        return stories

    def close(self) -> None:
        self.process.communicate(timeout=30)


def parse_resize(text: str) -> dict[int, int]:
    """ "5:2,9:4" as {5: 2, 9: 4}."""
    return {int(step): int(seats) for step, seats in (p.split(":") for p in text.split(",") if p)}


def parse_hosts(text: str) -> tuple[int, ...]:
    """ "2,1": two of the seats on the first host, one on the second."""
    return tuple(int(seats) for seats in text.split(","))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m workers.splice", description=__doc__)
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
    parser.add_argument("--no-squash", dest="squash", action="store_false")
    arguments = vars(parser.parse_args())
    warm = arguments.pop("warm")
    if arguments.pop("serve"):
        serve(warm)
        return 0
    stories = run(Gang(path=os.getcwd(), **arguments))
    for rank, story in enumerate(stories):
        sys.stdout.write(json.dumps({"rank": rank, **story}) + "\n")
    return int(any("error" in story or "killed" in story for story in stories))


if __name__ == "__main__":
    sys.exit(main())
