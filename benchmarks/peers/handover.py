"""Hand a block from one process to another on a host with the peers, controlled over standard
input.

    python benchmarks/peers/handover.py NAME

A line {"way": WAY, "calls": n} is answered with one line: microseconds of each call. A block is 64
MiB of integers. The maker writes its number to both ends of the block. The last thing it writes is
the host's clock, into the place behind the first. The reader reads both ends, then the clock. All
time in between counts. The ways:

* placed: the block is where both can see it, as far as the peer has such a place.
* written: the same, and all of the block was just written, so that no cache holds anything else.
* copied: the block was made in ordinary memory.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from itertools import count
from typing import Any

import torch

COUNT = 8 << 20  # of 8 bytes each
OTHER_WORK_S = 0.001
WAYS = ("placed", "written", "copied")


def stamp(block: Any, number: int) -> None:
    """Write the number and the time, last of all; by then a waiting reader is asleep."""
    cells = block.numpy() if isinstance(block, torch.Tensor) else block
    until_s = time.perf_counter() + OTHER_WORK_S
    while time.perf_counter() < until_s:
        cells[0] = cells[-1] = number
    cells[1] = time.perf_counter_ns()


def took_us(block: Any, number: int) -> float:
    """Return the microseconds since the maker's stamp; the reader calls this before all else."""
    ends = int(block[0]), int(block[-1])
    now_ns = time.perf_counter_ns()
    assert ends == (number, number), (ends, number)
    return (now_ns - int(block[1])) / 1e3


def ordinary() -> torch.Tensor:
    return torch.ones(COUNT, dtype=torch.int64)


class TorchQueue:
    """Hands the block over by torch.multiprocessing: a queue to another process, and one back."""

    ways = WAYS

    def __init__(self) -> None:
        from torch import multiprocessing

        spawn = multiprocessing.get_context("spawn")
        self.there, self.back = spawn.Queue(), spawn.Queue()
        self.reader = spawn.Process(target=read_queue, args=(self.there, self.back), daemon=True)
        self.reader.start()
        self.shared = ordinary().share_memory_()

    def call(self, way: str, number: int) -> float:
        block = ordinary() if way == "copied" else self.shared
        if way == "written":
            block.fill_(1)
        stamp(block, number)
        self.there.put((block, number))
        return float(self.back.get())

    def close(self) -> None:
        self.there.put(None)
        self.reader.join()


def read_queue(there: Any, back: Any) -> None:
    torch.set_num_threads(1)
    while (taken := there.get()) is not None:
        back.put(took_us(*taken))
        del taken


class Gloo:
    """Hands the block over by torch.distributed: `send` and `recv` of two processes."""

    ways = ("copied",)

    def __init__(self) -> None:
        from torch import multiprocessing

        spawn = multiprocessing.get_context("spawn")
        self.back = spawn.Queue()
        self.folder = tempfile.TemporaryDirectory()
        store = f"file://{self.folder.name}/store"
        self.reader = spawn.Process(target=read_gloo, args=(store, self.back), daemon=True)
        self.reader.start()
        self.dist = joined(store, 0)
        self.block = ordinary()

    def call(self, way: str, number: int) -> float:
        stamp(self.block.fill_(1), number)
        self.dist.send(self.block, 1)
        return float(self.back.get())

    def close(self) -> None:
        self.block[0] = -1
        self.dist.send(self.block, 1)
        self.reader.join()
        self.folder.cleanup()


def joined(store: str, rank: int) -> Any:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    return dist


def read_gloo(store: str, back: Any) -> None:
    torch.set_num_threads(1)
    dist, block = joined(store, 1), ordinary()
    for number in count():
        dist.recv(block, 0)
        if block[0] == -1:
            return
        back.put(took_us(block, number))


class Ray:
    """Hands the block over between two actors. A block that was put into the object store counts as
    placed.

    It is an array, which comes out of the store without a copy, and is read-only there.
    """

    ways = ("placed", "copied")

    def __init__(self) -> None:
        import ray

        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=1 << 30,
        )
        self.ray = ray
        self.maker, self.reader = ray.remote(Maker).remote(), ray.remote(Reader).remote()

    def call(self, way: str, number: int) -> float:
        if way == "placed":
            return float(self.ray.get(self.maker.place.remote(self.reader, number)))
        made = self.maker.make.remote(number)
        return float(self.ray.get(self.reader.read.remote(made, number)))

    def close(self) -> None:
        self.ray.shutdown()


class Maker:
    def make(self, number: int) -> Any:
        block = ordinary().numpy()
        stamp(block, number)
        return block

    def place(self, reader: Any, number: int) -> float:
        import ray

        block = ordinary().numpy()
        block[0] = block[-1] = number
        placed = ray.put(block)
        del block
        time.sleep(OTHER_WORK_S)
        return float(ray.get(reader.read.remote(placed, number, time.perf_counter_ns())))


class Reader:
    def read(self, block: Any, number: int, since_ns: int = 0) -> float:
        ends = int(block[0]), int(block[-1])
        now_ns = time.perf_counter_ns()
        assert ends == (number, number), (ends, number)
        return (now_ns - (since_ns or int(block[1]))) / 1e3


class Dask:
    """Hands the block over by distributed: a task in one worker's process, and its reader in
    another's.
    """

    ways = ("copied",)

    def __init__(self) -> None:
        from distributed import Client, LocalCluster

        cluster = LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs="ERROR"
        )
        self.client = Client(cluster)
        self.first, self.second = self.client.scheduler_info(n_workers=-1)["workers"]

    def call(self, way: str, number: int) -> float:
        made = self.client.submit(made_with, number, workers=[self.first], pure=False)
        read = self.client.submit(took_us, made, number, workers=[self.second], pure=False)
        return float(read.result())

    def close(self) -> None:
        self.client.shutdown()


def made_with(number: int) -> torch.Tensor:
    block = ordinary()
    stamp(block, number)
    return block


PEERS: dict[str, Any] = {
    "torch.multiprocessing": TorchQueue,
    "gloo": Gloo,
    "ray": Ray,
    "dask": Dask,
}


def serve(peer: Any) -> None:
    """Answer until standard input ends; the first two calls of each line are a warm-up."""
    numbers = count()
    for line in sys.stdin:
        wanted = json.loads(line)
        took = [peer.call(wanted["way"], next(numbers)) for _ in range(wanted["calls"] + 2)][2:]
        sys.stdout.write(json.dumps(took) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    torch.set_num_threads(1)
    made = PEERS[sys.argv[1]]()
    try:
        serve(made)
    finally:
        made.close()
