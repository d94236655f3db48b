"""Measure the cost of a graph's node beyond its work: OpByOp, chained and fused, beside the peers.

    python -m benchmarks.graph_dispatch [--quick]

As in Pathways (section 5.1), a chain has 128 nodes, each of which adds two tensors of four numbers.
OpByOp runs one node at a time and waits for each; chained is one call for the chain; fused is one
node that does the work of all. Ours is a graph in its resident, timed from its beginning to its
result, with everything on: safe points between bursts, the wire to the supervisor, watched inputs.
Its nodes declare that they draw no random numbers, as no peer seeds any. Seeded is the chain
without this declaration. The way of a graph to its resident is not counted here
(benchmarks.submit_to_first_step).

A hop is the same chain with successive nodes on two executors in turn. The executors are processes
with a device each, and the block passes between them in shared memory. The hop is timed inside,
once both run.

A chain of nodes that spin for a given time gives the efficiency: the time of a plain loop divided
by the time of the chain. The quickest call of each counts, because other load on the cores takes
more from a call than the cost that is measured.

Each peer is a process that is measured in turn with ours; the other figures are medians. Ray and
Dask have an environment of their own; benchmarks/peers/requirements.txt says how to make it.
Without it they are left out, and the result says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from benchmarks import Target, quick, report

NODES = 128
SPUN_US = 2000  # by a whole chain: so short that most calls have their core for themselves
SPINS_US = (10, 30, 100, 300, 1000)
FEW = {"celery": 2, "dask": 3, "ray-actors": 5}  # calls per question for slow peers
ROOT = Path(__file__).parent.parent
PEERS = ROOT / "benchmarks" / "peers" / "dispatch.py"
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"

Key = tuple[str, float]  # what, spin_us
HOPS: Key = ("hops", 0.0)
Took = tuple[float, float]  # microseconds for each node: of the median call, of the quickest


def main() -> int:
    if "--ours" in sys.argv:
        return serve()
    if "--hop" in sys.argv:
        sys.stdout.write(f"{hop_us()}\n")
        return 0
    rounds = 3 if quick() else 9
    took_us, missing = defaultdict[tuple[str, Key], list[Took]](list), {}
    with running("ours") as ours, running("direct") as direct:
        for name in ("direct", "dask-threads", "ray-compiled", "ray-actors", "dask", "celery"):
            why = absent(name)
            if why:
                missing[name] = why
                continue
            with contextlib.nullcontext(direct) if name == "direct" else running(name) as peer:
                asked = {"ours": ours, "direct": direct, name: peer}
                for who, key in turns(name):
                    for one in who * rounds:
                        took_us[one, key].append(asked[one].ask(one, key))
    figures = {
        who: (statistics.median(one for one, _ in told), min(other for _, other in told))
        for who, told in took_us.items()
    }
    figures["ours", HOPS] = hops(rounds)
    return report("graph_dispatch", targets(figures), shown(figures, missing))


def turns(name: str) -> Iterator[tuple[list[str], Key]]:
    """Yield the processes to measure in turn, and what to measure; ours is beside every peer."""
    for what in ("op_by_op", "chain", "fused"):
        yield ["ours", name], (what, 0.0)
    if name == "direct":
        yield ["ours"], ("seeded", 0.0)
    if name == "ray-compiled":
        yield [name], HOPS
    for spin_us in SPINS_US if name in ("direct", "ray-compiled") else ():
        yield list(dict.fromkeys(("direct", "ours", name))), ("chain", spin_us)


def targets(figures: dict[tuple[str, Key], Took]) -> list[Target]:
    chained_us = figures["ours", ("chain", 0.0)][0]
    found = [
        Target(name="chained, a node", value=round(chained_us, 2), unit="us", op="<=", bound=10),
        Target(
            name="efficiency with nodes of 100 us",
            value=round(efficiency("ours", 100, figures), 1),
            unit="%",
            op=">=",
            bound=95,
        ),
    ]
    found.append(
        Target(
            name="a hop between two processes",
            value=round(figures["ours", HOPS][0], 1),
            unit="us",
            op="<=",
            bound=15,
        )
    )
    if ("ray-compiled", ("chain", 0.0)) in figures:
        beside = chained_us / figures["ray-compiled", ("chain", 0.0)][0]
        found.append(
            Target(
                name="chained, to a compiled graph of Ray",
                value=round(beside, 3),
                unit="x",
                op="<=",
                bound=1,
            )
        )
    return found


def efficiency(one: str, spin_us: float, figures: dict[tuple[str, Key], Took]) -> float:
    return 100 * figures["direct", ("chain", spin_us)][1] / figures[one, ("chain", spin_us)][1]


def shown(figures: dict[tuple[str, Key], Took], missing: dict[str, str]) -> dict[str, Any]:
    told: dict[str, Any] = {
        f"{one}, {what}, us a node": round(us, 2)
        for (one, (what, spin_us)), (us, _) in sorted(figures.items())
        if not spin_us
    }
    for one in ("ours", "ray-compiled"):
        for spin_us in SPINS_US:
            if (one, ("chain", spin_us)) in figures:
                percent = round(efficiency(one, spin_us, figures), 1)
                told[f"{one}, efficiency with nodes of {spin_us} us, %"] = percent
    return {**told, **missing, "load average": round(os.getloadavg()[0], 1)}


# --- the processes that are measured ------------------------------------------------------------


class Asked:
    def __init__(self, process: subprocess.Popen[str], said: IO[str]) -> None:
        self.process, self.said = process, said

    def ask(self, name: str, key: Key) -> Took:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        what, spin_us = key
        calls = FEW.get(name, 20)
        nodes = 16 if what == "op_by_op" else NODES
        if spin_us:
            nodes = max(8, min(NODES, round(SPUN_US / spin_us)))
        wanted = {"what": what, "nodes": nodes, "spin_us": spin_us, "calls": calls}
        self.process.stdin.write(json.dumps(wanted) + "\n")
        self.process.stdin.flush()
        if answer := self.process.stdout.readline():
            median_us, best_us = json.loads(answer)
            return median_us, best_us
        self.said.seek(0)
        raise RuntimeError(f"{name} ended: {self.said.read()[-2000:]}")


def absent(name: str) -> str:
    """Return why this peer is not measured; "" if it is."""
    if name in ("direct", "celery", "procrastinate") or PEERS_PYTHON.exists():
        return ""
    return f"not installed: see {PEERS.parent.name}/requirements.txt in benchmarks"


@contextlib.contextmanager
def running(name: str) -> Iterator[Asked]:
    from workers.process.isolation.sandbox import ENVIRONMENT

    with contextlib.ExitStack() as stack:
        environment = {**os.environ, **ENVIRONMENT}
        command = [sys.executable, str(PEERS), name]
        if name == "ours":
            command = [sys.executable, "-m", "benchmarks.graph_dispatch", "--ours"]
        elif name == "celery":
            environment["REDIS_URL"] = stack.enter_context(redis())
        elif name != "direct":
            share_torch()
            command = [str(PEERS_PYTHON), str(PEERS), name]
        said = stack.enter_context(tempfile.TemporaryFile("w+"))
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env=environment,
        )
        try:
            yield Asked(process, said)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(timeout=60)


@contextlib.contextmanager
def redis() -> Iterator[str]:
    from app.local.embedded_servers import embedded_redis, temporary_home

    with temporary_home() as home, embedded_redis(home) as url:
        yield url.replace("unix://", "redis+socket://")  # Celery's form of the address


def share_torch() -> None:
    """Let the peers' environment find our torch, after its own packages."""
    import torch

    (theirs,) = PEERS_PYTHON.parent.parent.glob("lib/python*/site-packages")
    (theirs / "zz_torch.pth").write_text(f"{Path(torch.__file__).parent.parent}\n")


# --- ours, in a process of its own --------------------------------------------------------------


class Ours:
    """Runs graphs in a resident on its slot; its supervisor only reads."""

    def __init__(self) -> None:
        from benchmarks.overhead import resident

        self.work = resident(None, "graph")

    def op_by_op(self, nodes: int, spin_us: float) -> Any:
        one = self.chain(1, spin_us)

        def call(x: Any) -> Any:
            for _ in range(nodes):
                x = one(x)
            return x

        return call

    def chain(self, nodes: int, spin_us: float) -> Any:
        return self._graph("add", nodes, {"spin_us": spin_us})

    def seeded(self, nodes: int, spin_us: float) -> Any:
        return self._graph("add", nodes, {"spin_us": spin_us}, draws=True)

    def fused(self, nodes: int) -> Any:
        return self._graph("add_many", 1, {"nodes": nodes})

    def _graph(
        self, function: str, nodes: int, params: dict[str, Any], *, draws: bool = False
    ) -> Any:
        from benchmarks.peers import dispatch
        from workers.graph.runner import Loaded
        from workers.residents import stages

        chain = [
            {
                "name": f"n{n}",
                "function": f"dispatch:{function}",
                "inputs": {"x": f"n{n - 1}.y" if n else "input:x"},
                "outputs": ["y"],
                "params": params,
                "draws": draws,
            }
            for n in range(nodes)
        ]
        body = {"nodes": chain, "outputs": {"y": f"n{nodes - 1}.y"}}
        plain = getattr(dispatch, function)

        def as_node(ctx: Any, x: Any, **given: Any) -> Any:
            return {"y": plain(x, **given)}

        work = self.work
        loaded = Loaded(body, lambda name: as_node, work.accelerator)

        def call(x: Any) -> Any:
            work.ctx.result, work.job = None, loaded.begin({"x": x})
            while work.ctx.result is None:
                stages.one_step(work)
            return work.ctx.result["y"]

        return call


# --- a hop, in two processes of its own ----------------------------------------------------------

WARM, HOPPED = 200, 2000  # nodes that run until both processes are warm, and nodes that are timed


def hops(rounds: int) -> Took:
    from workers.process.isolation.sandbox import ENVIRONMENT

    command = [sys.executable, "-m", "benchmarks.graph_dispatch", "--hop"]
    environment = {**os.environ, **ENVIRONMENT}
    took_us = [
        float(subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment).stdout)
        for _ in range(rounds)
    ]
    return statistics.median(took_us), min(took_us)


def hop_us() -> float:
    """Return the microseconds of a node whose predecessor runs in the other process."""
    import torch

    from workers.ranks import turns
    from workers.ranks.shared_memory import Arena, make

    torch.set_num_threads(1)
    handles = make(2)
    turns.seat_all(Arena(handles), 2)
    pid = os.fork()
    if not pid:
        status = 1
        try:
            _run_executor(handles, 1)
            status = 0
        finally:
            os._exit(status)
    took_us = _run_executor(handles, 0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return took_us


def _run_executor(handles: Any, rank: int) -> float:
    """Run an executor with everything on, from its first node to the end of the graph."""
    import torch

    from app.core.placement.executors import ExecutorSpread
    from benchmarks.overhead import resident
    from workers.graph.executor_job import LoadedExecutor
    from workers.residents import stages
    from workers.residents.member import Member

    began_s, ran = 0.0, 0

    def ready(ctx: Any) -> dict[str, Any]:
        return {"y": torch.zeros(4)}

    def add(ctx: Any, x: Any) -> dict[str, Any]:
        nonlocal began_s, ran
        if 2 * ran == WARM:  # half of the nodes run here
            began_s = time.perf_counter()
        ran += 1
        return {"y": x + 1}

    names = ["ready", *(f"n{n}" for n in range(WARM + HOPPED))]
    nodes: list[dict[str, Any]] = [{"name": "ready", "function": "m:ready", "outputs": ["y"]}]
    for before, name in pairwise(names):
        inputs = {"x": f"{before}.y"}
        node = {"name": name, "function": "m:add", "inputs": inputs, "outputs": ["y"]}
        nodes.append({**node, "draws": False})
    functions: dict[str, Callable[..., Any]] = {"m:ready": ready, "m:add": add}
    work = resident(None, "graph", world_size=2, rank=rank)
    work.member = Member(handles, rank, collective=False)
    work.member.begin()
    loaded = LoadedExecutor(
        {"nodes": nodes, "outputs": {"y": f"{names[-1]}.y"}},
        functions.__getitem__,
        work.accelerator,
        spread=ExecutorSpread(
            executors=2,
            order=tuple(names),
            seats={name: (n + 1) % 2 for n, name in enumerate(names)},
        ),
        turns=work.member.rank.turns,
        around=work.around,
    )
    work.job, work.ctx.result = loaded.begin({}), None
    while work.ctx.result is None:
        stages.one_step(work)
    took_s = time.perf_counter() - began_s
    work.member.end()
    return 1e6 * took_s / HOPPED


def serve() -> int:
    import torch

    from benchmarks.peers import dispatch

    torch.set_num_threads(1)
    dispatch.serve(Ours())
    return 0


if __name__ == "__main__":
    sys.exit(main())
