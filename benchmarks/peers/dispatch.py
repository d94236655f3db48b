"""Run chains of tiny nodes with the peers, each in a process that is controlled over standard
input.

    python benchmarks/peers/dispatch.py NAME

A line {"what": "op_by_op" | "chain" | "fused", "nodes": n, "spin_us": s} is answered with one line:
microseconds for each node, of the median call and of the quickest. A node adds two tensors of four
numbers, then spins for `spin_us`.

* op_by_op runs one node at a time, and waits for each result.
* chain runs a chain of n nodes in one call.
* fused runs one node that does the work of n.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

ONE = torch.ones(4)


def add(x: torch.Tensor, spin_us: float = 0.0) -> torch.Tensor:
    y = torch.add(x, ONE)
    until_s = time.perf_counter() + spin_us / 1e6
    while spin_us and time.perf_counter() < until_s:
        pass
    return y


def add_many(x: torch.Tensor, nodes: int) -> torch.Tensor:
    for _ in range(nodes):
        x = torch.add(x, ONE)
    return x


Call = Callable[[torch.Tensor], Any]


class Direct:
    """Runs a plain loop in this process, which no dispatcher can beat."""

    def op_by_op(self, nodes: int, spin_us: float) -> Call:
        return self.chain(nodes, spin_us)

    def chain(self, nodes: int, spin_us: float) -> Call:
        def call(x: torch.Tensor) -> torch.Tensor:
            for _ in range(nodes):
                x = add(x, spin_us)
            return x

        return call

    def fused(self, nodes: int) -> Call:
        return lambda x: add_many(x, nodes)


class RayCompiled:
    """Runs a compiled graph on one actor."""

    def __init__(self) -> None:
        import ray

        self.ray = ray
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=100 << 20,
        )
        self.actor = ray.remote(Adder).remote()
        self.compiled: dict[Any, Any] = {}

    def _call(self, key: Any, bind: Callable[[Any], Any]) -> Call:
        from ray.dag import InputNode

        if key not in self.compiled:
            for dag in self.compiled.values():  # an actor runs one at a time
                dag.teardown()
            self.compiled.clear()
            with InputNode() as given:
                self.compiled[key] = bind(given).experimental_compile()
        dag = self.compiled[key]
        return lambda x: self.ray.get(dag.execute(x))

    def op_by_op(self, nodes: int, spin_us: float) -> Call:
        one = self._call(("one", spin_us), lambda x: self.actor.add.bind(x, spin_us))

        def call(x: torch.Tensor) -> torch.Tensor:
            for _ in range(nodes):
                x = one(x)
            return x

        return call

    def chain(self, nodes: int, spin_us: float) -> Call:
        def bind(x: Any) -> Any:
            for _ in range(nodes):
                x = self.actor.add.bind(x, spin_us)
            return x

        return self._call(("chain", nodes, spin_us), bind)

    def fused(self, nodes: int) -> Call:
        return self._call(("fused", nodes), lambda x: self.actor.add_many.bind(x, nodes))

    def hops(self, nodes: int, spin_us: float) -> Call:
        """Build the chain with successive nodes on different actors of two."""
        actors = [self.actor, self.ray.remote(Adder).remote()]

        def bind(x: Any) -> Any:
            for n in range(nodes):
                x = actors[n % 2].add.bind(x, spin_us)
            return x

        return self._call(("hops", nodes, spin_us), bind)


class RayActors(RayCompiled):
    """Calls one actor, each time with the reference of the result before."""

    def op_by_op(self, nodes: int, spin_us: float) -> Call:
        def call(x: torch.Tensor) -> torch.Tensor:
            for _ in range(nodes):
                x = self.ray.get(self.actor.add.remote(x, spin_us))
            return x

        return call

    def chain(self, nodes: int, spin_us: float) -> Call:
        def call(x: Any) -> torch.Tensor:
            for _ in range(nodes):
                x = self.actor.add.remote(x, spin_us)
            found: torch.Tensor = self.ray.get(x)
            return found

        return call

    def fused(self, nodes: int) -> Call:
        return lambda x: self.ray.get(self.actor.add_many.remote(x, nodes))


class Adder:
    def add(self, x: torch.Tensor, spin_us: float = 0.0) -> torch.Tensor:
        return add(x, spin_us)

    def add_many(self, x: torch.Tensor, nodes: int) -> torch.Tensor:
        return add_many(x, nodes)


class Dask:
    """Runs distributed, with two worker processes on this machine."""

    def __init__(self) -> None:
        from distributed import Client, LocalCluster

        cluster = LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs="ERROR"
        )
        self.client = Client(cluster)
        self.numbers = iter(range(10**9))

    def op_by_op(self, nodes: int, spin_us: float) -> Call:
        def call(x: torch.Tensor) -> torch.Tensor:
            for _ in range(nodes):
                x = self.client.submit(add, x, spin_us, pure=False).result()
            return x

        return call

    def chain(self, nodes: int, spin_us: float) -> Call:
        return lambda x: self.client.get(*self._graph(x, nodes, spin_us))

    def _graph(self, x: torch.Tensor, nodes: int, spin_us: float) -> tuple[Any, str]:
        run = next(self.numbers)  # so that known results are not reused
        graph: dict[str, Any] = {f"{run}-0": x}
        for n in range(nodes):
            graph[f"{run}-{n + 1}"] = (add, f"{run}-{n}", spin_us)
        return graph, f"{run}-{nodes}"

    def fused(self, nodes: int) -> Call:
        return lambda x: self.client.submit(add_many, x, nodes, pure=False).result()


class DaskThreads(Dask):
    """Runs dask's threaded scheduler in this process: no data leaves it."""

    def __init__(self) -> None:
        from dask.threaded import get

        self.run, self.numbers = get, iter(range(10**9))

    def op_by_op(self, nodes: int, spin_us: float) -> Call:
        def call(x: torch.Tensor) -> torch.Tensor:
            for _ in range(nodes):
                x = self.run(*self._graph(x, 1, spin_us))
            return x

        return call

    def chain(self, nodes: int, spin_us: float) -> Call:
        return lambda x: self.run(*self._graph(x, nodes, spin_us))

    def fused(self, nodes: int) -> Call:
        return lambda x: self.run({"y": (add_many, x, nodes)}, "y")


class CeleryChain:
    """Runs a worker with two processes over the Redis at REDIS_URL; tensors are number lists."""

    def __init__(self) -> None:
        import subprocess

        self.app = celery_app()
        command = [sys.executable, "-m", "celery", "-A", "dispatch:celery_worker", "worker"]
        command += ["--concurrency", "2", "--loglevel", "CRITICAL", "--without-gossip"]
        folder = os.path.dirname(os.path.abspath(__file__))
        self.worker = subprocess.Popen(
            [*command, "--without-mingle"], cwd=folder, stdout=subprocess.DEVNULL
        )
        self.add, self.add_many = self.app.tasks["add"], self.app.tasks["add_many"]
        self._wait(self.add.delay([0.0] * 4, 0.0))

    def op_by_op(self, nodes: int, spin_us: float) -> Call:
        def call(x: torch.Tensor) -> torch.Tensor:
            y = x.tolist()
            for _ in range(nodes):
                y = self._wait(self.add.delay(y, spin_us))
            return torch.tensor(y)

        return call

    def chain(self, nodes: int, spin_us: float) -> Call:
        from celery import chain

        def call(x: torch.Tensor) -> torch.Tensor:
            first, *rest = [self.add.s(x.tolist(), spin_us), *[self.add.s(spin_us)] * (nodes - 1)]
            return torch.tensor(self._wait(chain(first, *rest).apply_async()))

        return call

    def fused(self, nodes: int) -> Call:
        return lambda x: torch.tensor(self._wait(self.add_many.delay(x.tolist(), nodes)))

    def _wait(self, answer: Any) -> Any:
        return answer.get(timeout=120, interval=0.001)

    def close(self) -> None:
        self.worker.terminate()
        self.worker.wait()


def celery_app() -> Any:
    from celery import Celery

    url = os.environ["REDIS_URL"]
    app = Celery("dispatch", broker=url, backend=url)
    app.conf.update(worker_prefetch_multiplier=4, task_acks_late=False)
    app.task(add_numbers, name="add")
    app.task(add_many_numbers, name="add_many")
    app.finalize()
    return app


def add_numbers(x: list[float], spin_us: float) -> list[float]:
    return add(torch.tensor(x), spin_us).tolist()


def add_many_numbers(x: list[float], nodes: int) -> list[float]:
    return add_many(torch.tensor(x), nodes).tolist()


def __getattr__(name: str) -> Any:
    if name == "celery_worker":
        return celery_app()
    raise AttributeError(name)


PEERS: dict[str, Callable[[], Any]] = {
    "direct": Direct,
    "ray-compiled": RayCompiled,
    "ray-actors": RayActors,
    "dask": Dask,
    "dask-threads": DaskThreads,
    "celery": CeleryChain,
}


def serve(peer: Any) -> None:
    """Answer until standard input ends."""
    for line in sys.stdin:
        wanted = json.loads(line)
        nodes, what = wanted["nodes"], wanted["what"]
        if what == "fused":
            call = peer.fused(nodes)
        else:
            call = getattr(peer, what)(nodes, wanted["spin_us"])
        took_s = []
        for _ in range(wanted["calls"] + 1):
            began_s = time.perf_counter()
            found = call(torch.zeros(4))
            took_s.append(time.perf_counter() - began_s)
            assert torch.equal(found, torch.full((4,), float(nodes))), found
        del took_s[0]  # warm-up
        answer = [1e6 * some_s / nodes for some_s in (statistics.median(took_s), min(took_s))]
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    made = PEERS[sys.argv[1]]()
    try:
        serve(made)
    finally:
        getattr(made, "close", lambda: None)()
