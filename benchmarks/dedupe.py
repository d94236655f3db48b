"""Measure the bytes stored for N replicas of a job, and for its next checkpoint when 5 % changed.

    python -m benchmarks.dedupe [--quick]

Each replica is captured as in a resident (`workers.capture.capture`), laid out in a slab, and
written with the code of a device worker (`workers.transfer.checkpoint`) into one store. Stored
bytes are the size of all files: chunks, manifests and all. Every image is read back and compared. A
replica has a tensor and random numbers of its own. Parameters and optimizer state are equal on all
replicas.

The peer is `torch.distributed.checkpoint` (DCP) with real gloo ranks on the same state. The result
shows its bytes and two losses of which it says nothing. If several ranks hold tensors under the
same key, DCP keeps one of them. So it loses the private tensors of the other ranks, and the fact
that a replica has diverged.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.multiprocessing.spawn import spawn

from app.core.model.checkpoints.manifest import About
from app.storage.backend import Folder
from app.storage.signing import Signer
from app.storage.store import Store
from benchmarks import Target, quick, report
from workers.capture.capture import Surroundings, capture
from workers.hardware.accelerator import Accelerator
from workers.process.image_layout import Layout, laid_out
from workers.transfer import checkpoint
from workers.transfer.checkpoint import Known, Written

REPLICAS = (2, 4, 8)
LAYERS, WIDTH = (8, 512) if quick() else (12, 768)  # 307 MB and 1.0 GB with the optimizer's state
CHANGED = 0.05  # of the bytes, as whole storages
DRAWS = 5

JSON = dict[str, Any]


class Job:
    """Holds a transformer after one step of AdamW. It is equal on all ranks, except for some
    private state.
    """

    def __init__(self, rank: int) -> None:
        torch.manual_seed(1)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, batch_first=True)
        self.model = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        for parameter in self.model.parameters():  # because layers begin as copies of one another
            torch.nn.init.normal_(parameter, std=0.02)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.rank = rank
        torch.manual_seed(100 + rank)
        self.private = torch.randn(1000)


class Slab:
    """Holds a captured job in shared memory."""

    def __init__(self, job: Job) -> None:
        found = capture(job, around=Surroundings(), accelerator=Accelerator("cpu"))
        sizes = [(storage.nbytes(), "cpu", False) for storage in found.storages]
        self.layout: Layout = laid_out(len(found.graph), sizes)
        self.tensors = found.tensors
        self.fd = new_memory(self.layout.end)
        self.memory = mmap.mmap(self.fd, self.layout.end)
        self.memory[: len(found.graph)] = found.graph
        for storage, place in zip(found.storages, self.layout.storages, strict=True):
            self.memory[place.offset : place.offset + place.size] = raw(storage)

    def write(self, store: Store, signer: Signer, step: int, known: Known) -> Written:
        about = About(tenant="ten_a", task="tsk_a", epoch=1, step=step)
        return checkpoint.write(
            self.fd, self.layout, about,
            tensors=self.tensors, store=store, signer=signer, known=known,
        )  # fmt: skip

    def must_be(self, written: Written, store: Store, signer: Signer) -> None:
        """Assert that the store returns exactly this image."""
        into = new_memory(0)
        there = checkpoint.read(
            written.sha256, into=into, tenant="ten_a", key=signer.public, store=store
        ).layout
        with mmap.mmap(into, there.end) as found:
            for mine, theirs in zip(_parts(self.layout), _parts(there), strict=True):
                assert found[theirs] == self.memory[mine], "another image came back"
        os.close(into)

    def close(self) -> None:
        self.memory.close()
        os.close(self.fd)

    def change(self, chance: random.Random) -> int:
        """Change whole storages, at most CHANGED of all bytes.

        Returns the number of bytes changed.
        """
        left = changed = int(CHANGED * self.layout.held_bytes)
        for place in chance.sample(self.layout.storages, len(self.layout.storages)):
            if place.size <= left:
                self.memory[place.offset : place.offset + place.size] = chance.randbytes(place.size)
                left -= place.size
        return changed - left


def _parts(layout: Layout) -> list[slice]:
    """Return the places of the graph and each storage.

    They differ between a slab and a read image.
    """
    return [slice(e.offset, e.offset + e.size) for e in (layout.graph, *layout.storages)]


def new_memory(size: int) -> int:
    fd = os.memfd_create("slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


def raw(storage: torch.UntypedStorage) -> bytes:
    whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
    return whole.numpy().tobytes()


# --- ours ---------------------------------------------------------------------------------------


def replicas(number: int) -> JSON:
    """Store `number` ranks, one after the other, in one store, and measure bytes and times."""
    with folder() as where:
        store, signer = Store(Folder(where / "store")), Signer.at(where / "key")
        naive, seconds, private = 0, list[float](), set[str]()
        for rank in range(number):
            with contextlib.closing(Slab(Job(rank))) as slab:
                began_s = time.perf_counter()
                written = slab.write(store, signer, 1, Known())
                seconds.append(round(time.perf_counter() - began_s, 3))
                slab.must_be(written, store, signer)
                naive += slab.layout.held_bytes
            private |= own_chunks(store, signer, written)
        stored = size_of(where / "store")
        return {
            "naive_bytes": naive,
            "stored_bytes": stored,
            "saved_times": round(naive / stored, 4),
            "first_s": seconds[0],
            "others_s": seconds[1:],
            "chunks": len(private),
        }


def own_chunks(store: Store, signer: Signer, written: Written) -> frozenset[str]:
    return store.manifest("ten_a", written.sha256, key=signer.public).addresses


def next_checkpoints() -> JSON:
    """Store checkpoints of one resident with 5 % of its bytes changed each time."""
    chance = random.Random(5)
    with folder() as where:
        store, signer, known = Store(Folder(where / "store")), Signer.at(where / "key"), Known()
        slab = Slab(Job(0))
        slab.write(store, signer, 1, known)
        size, shares, seconds = slab.layout.held_bytes, [], []
        for step in range(2, 2 + DRAWS):
            changed, before = slab.change(chance), size_of(where / "store")
            began_s = time.perf_counter()
            written = slab.write(store, signer, step, known)
            seconds.append(round(time.perf_counter() - began_s, 3))
            slab.must_be(written, store, signer)
            stored = size_of(where / "store") - before
            shares.append((round(changed / size, 5), round(stored / size, 5)))
        before = size_of(where / "store")
        slab.write(store, signer, 99, known)
        return {
            "changed_and_written": shares,
            "worst_written": max(written for _, written in shares),
            "unchanged_bytes": size_of(where / "store") - before,
            "seconds": seconds,
        }


def ours_keeps() -> JSON:
    """Run the two cases in which DCP loses data, with our code."""
    with folder() as where:
        store, signer = Store(Folder(where / "store")), Signer.at(where / "key")
        found, addresses = [], []
        for rank in (0, 1):
            job = Job(rank)
            with torch.no_grad():
                next(job.model.parameters()).view(-1)[0] += rank  # rank 1 has diverged
            slab = Slab(job)
            written = slab.write(store, signer, 1, Known())
            slab.must_be(written, store, signer)  # so everything of both ranks is there
            found.append(written.size_bytes)
            addresses.append(own_chunks(store, signer, written))
        # Only the graph, the group of the private tensor and the chunk of the diverged weight
        # differ.
        return {
            "private_tensors_kept": True,
            "diverged_replicas_kept": True,
            "divergence_is_seen": len(addresses[0] ^ addresses[1]) > 0,
        }


# --- DCP, with real ranks -----------------------------------------------------------------------


def state_of(job: Job) -> JSON:
    optimizer = {
        f"optimizer.{n}.{name}": value
        for n, state in job.optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }
    model = {f"model.{name}": value for name, value in job.model.state_dict().items()}
    return {**model, **optimizer, "private": job.private}


def dcp_rank(rank: int, number: int, where: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{where}/meet", rank=rank, world_size=number
    )
    torch.set_num_threads(1)
    state = state_of(Job(rank))
    weight = next(name for name in state if name.startswith("model."))
    state[weight].view(-1)[0] += rank  # replicas that have diverged
    mine = {name: state[name].clone() for name in ("private", weight)}
    save_state(state, checkpoint_id=f"{where}/saved")
    loaded = {name: torch.zeros_like(value) for name, value in mine.items()}
    load_state(loaded, checkpoint_id=f"{where}/saved")
    kept = {name: bool(torch.equal(loaded[name], mine[name])) for name in mine}
    Path(where, f"kept-{rank}").write_text(f"{kept['private']} {kept[weight]}")
    dist.destroy_process_group()


def dcp_with(number: int) -> JSON:
    with folder() as where:
        spawn(dcp_rank, (number, str(where)), nprocs=number)
        kept = [(where / f"kept-{rank}").read_text().split() for rank in range(number)]
        return {
            "stored_bytes": size_of(where / "saved"),
            "private_tensors_kept": all(private == "True" for private, _ in kept),
            "diverged_replicas_kept": all(diverged == "True" for _, diverged in kept),
            "divergence_is_seen": False,  # it saved and loaded without any message
        }


# --- all ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    where = Path(tempfile.mkdtemp(prefix="dedupe-", dir=os.environ.get("ROUNDHOUSE_BENCH_FOLDER")))
    try:
        yield where
    finally:
        shutil.rmtree(where)


def size_of(where: Path) -> int:
    return sum(path.stat().st_size for path in where.rglob("*") if path.is_file())


def main() -> int:
    torch.set_num_threads(1)
    ours = {number: replicas(number) for number in REPLICAS}
    after = next_checkpoints()
    keeps = ours_keeps()
    targets = [
        Target(
            name=f"{number} replicas, naive bytes over stored bytes, by the number of replicas",
            value=round(found["saved_times"] / number, 4),
            unit="N",
            op=">=",
            bound=0.99,
        )
        for number, found in ours.items()
    ]
    targets += [
        Target(
            name="next checkpoint, 5 % of the bytes changed: written",
            value=round(100 * after["worst_written"], 3),
            unit="%",
            op="<=",
            bound=6.0,
        ),
        Target(
            name="rank-private and diverged tensors lost",
            value=float(not all(keeps.values())),
            unit="cases",
            op="<=",
            bound=0.0,
        ),
    ]
    peers = {
        "roundhouse": {"replicas": ours, "next": after, **keeps},
        "torch.distributed.checkpoint": {
            number: dcp_with(number)
            for number in ((2,) if quick() else (2, 4))  # 1.3 GB each
        },
        "load": os.getloadavg()[0],
    }
    return report("dedupe", targets, peers)


if __name__ == "__main__":
    sys.exit(main())
