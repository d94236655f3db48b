"""Jobs of the zoo, taken off and put back at any step, each time in a fresh process.

A `Station` is a warm process: it has imported torch and no tenant's code, and forks a process for
each *leg* of a job's journey, as a zygote does.  A leg builds the job or restores it, steps, pauses
where it is told to (the job is captured, and goes on as the same objects), and is captured at its
end.  `undisturbed` is the same job in a process where nothing of this happens.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JSON = dict[str, Any]

ROOT = Path(__file__).parent.parent.parent
ZOO = Path(__file__).parent / "zoo"
PRESET = {
    "threads": 1,
    "interop_threads": 1,
    "deterministic": True,
    "float32_matmul_precision": "highest",
    "flush_denormal": False,
}


@dataclass(frozen=True, slots=True)
class Animal:
    """A job of the zoo: the module that holds it, and its parameters."""

    module: str
    params: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        return " ".join([self.module, *(str(value) for _, value in self.params)])


ANIMALS = (
    *map(Animal, ("mlp", "transformer", "convnet", "rnn", "gan", "rl", "loading", "lora")),
    Animal("compiled", (("backend", "aot_eager"),)),
    Animal("ddp"),
    Animal("ddp", (("sharded", True),)),
)
#: Those that an accelerator of another vendor runs as well: torch has sparse gradients for few.
CLEAN = tuple(
    Animal("rnn", (("sparse", False),)) if animal.module == "rnn" else animal for animal in ANIMALS
)
SLOW = (Animal("compiled", (("backend", "inductor"),)),)  # its compiler takes seconds


class Station:
    """Forks legs, which compute on one kind of device; use it in a `with`."""

    def __init__(self, kind: str = "cpu") -> None:
        self.kind = kind
        self.folder = tempfile.TemporaryDirectory(prefix="journeys-")
        self.number = itertools.count()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.workers.journeys"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONHASHSEED": "0",
                "TORCHINDUCTOR_COMPILE_THREADS": "1",
                "SIM_DEVICES": "1" if kind == "sim" else "",
            },
        )

    def __enter__(self) -> Station:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()  # type: ignore[union-attr]
        self.process.stdout.close()  # type: ignore[union-attr]
        self.process.wait(timeout=120)
        self.folder.cleanup()

    def leg(self, animal: Animal, until: int, **how: Any) -> JSON:
        """`how`: see `_leg`.  Raises AssertionError with what the leg's process said last."""
        scratch = Path(self.folder.name) / f"scratch-{next(self.number)}"
        scratch.mkdir()
        wanted = {"module": animal.module, "params": dict(animal.params), "until": until, **how}
        wanted["kind"] = self.kind
        self.process.stdin.write(json.dumps({**wanted, "scratch": str(scratch)}) + "\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]
        said: JSON = json.loads(self.process.stdout.readline())  # type: ignore[union-attr]
        assert "error" not in said, f"{animal.name}, {how}: {said['error']}"
        return said

    def image(self) -> str:
        return str(Path(self.folder.name) / f"image-{next(self.number)}")


def undisturbed(station: Station, animal: Animal, steps: int) -> JSON:
    """{"trace", "digest"}: the metrics of each step, and a hash of what the job is at the end."""
    return station.leg(animal, steps, follow=False)


def travelled(
    station: Station, animal: Animal, steps: int, moves: Iterable[int], pauses: Iterable[int] = ()
) -> JSON:
    """The same, put back in a fresh process after the steps `moves`; "times_ms" are of a core."""
    trace, times, before = list[JSON](), list[JSON](), None
    for until in [*sorted(moves), steps]:
        after = station.image() if until < steps else None
        how = {"pauses": list(pauses), "before": before, "after": after}
        said = station.leg(animal, until, **how)
        trace += said["trace"]
        times.append(said["times_ms"])
        if before:
            os.unlink(before)
        before = after
    return {"trace": trace, "digest": said["digest"], "times_ms": times}


def evicted(station: Station, animal: Animal, steps: int, leaves: Iterable[int]) -> JSON:
    """The same in one process, off the device and back after the steps `leaves`; "away_bytes"."""
    return station.leg(animal, steps, leaves=list(leaves))


def points(seed: int, steps: int, count: int) -> list[int]:
    """Steps after which a job is moved, none twice."""
    return sorted(random.Random(seed).sample(range(1, steps), count))


# --- the warm process -----------------------------------------------------------------------------


def main() -> None:
    import torch._dynamo  # noqa: F401  # as in a zygote: it takes a second

    import workers.residents.pipeline  # noqa: F401

    for line in sys.stdin:
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(read)
            _live(json.loads(line), write)
        os.close(write)
        with os.fdopen(read) as file:
            said = file.read()
        _, status = os.waitpid(pid, 0)
        sys.stdout.write((said or json.dumps({"error": f"the leg ended with {status}"})) + "\n")
        sys.stdout.flush()


def _live(wanted: JSON, write: int) -> None:
    """In the fork: one leg, what came of it, and the end of the process."""
    os.dup2(2, 1)
    try:
        said = _leg(**wanted)
    except BaseException:
        said = {"error": traceback.format_exc()[-4000:]}
    with os.fdopen(write, "w") as file:
        file.write(json.dumps(said))
    os._exit(0)


def _leg(
    *,
    kind: str,
    module: str,
    params: JSON,
    scratch: str,
    until: int,
    before: str | None = None,
    after: str | None = None,
    pauses: Iterable[int] = (),
    leaves: Iterable[int] = (),
    follow: bool = True,
) -> JSON:
    """From the image `before`, or the first step, to step `until`, and into the image `after`."""
    import torch

    from tests.sim import through_host
    from workers.capture import data_loader
    from workers.capture.capture import Surroundings, capture
    from workers.capture.restore import rebuilt, return_to
    from workers.hardware import preset
    from workers.hardware.accelerator import Accelerator
    from workers.hardware.storages import follow_lending
    from workers.residents.context import Context
    from workers.residents.entry import load_entry, seed, take_step

    def captured() -> Any:
        accelerator.synchronize()  # as a resident does: a job may compute on streams of its own
        began_s = time.process_time()
        found = capture(job, around=around, accelerator=accelerator)
        times["capture"].append((time.process_time() - began_s) * 1e3)
        return found

    os.chdir(scratch)
    accelerator, times = Accelerator(kind), {"capture": list[float](), "restore": list[float]()}
    away, away_bytes = Away(accelerator) if leaves else None, list[int]()
    if kind == "sim":
        through_host.register(kind)
    # Few kernels of other kinds of devices are deterministic; the others would raise.
    preset.configure(PRESET if kind == "cpu" else {**PRESET, "deterministic": "warn"})
    ctx = Context(device=accelerator.device, rank=0, world_size=1, params=params)
    around = Surroundings(code=ZOO, scratch=Path(scratch), ctx=ctx)
    seed(accelerator)
    follow_lending()
    if follow:
        data_loader.follow()
    entry = load_entry(ZOO, f"{module}:Train")
    done, trace = 0, list[JSON]()
    if before is None:
        job = entry(ctx, **params)
    else:
        done, graph, blocks = pickle.loads(Path(before).read_bytes())
        began_s = time.process_time()
        storages = [block_of(block).to(device=device) for device, block in blocks]
        world = rebuilt(memoryview(graph), storages, around=around)
        return_to(world, accelerator)
        times["restore"].append((time.process_time() - began_s) * 1e3)
        job = world["job"]
    while done < until:
        done += 1
        trace.append(take_step(job, ctx, done))
        if done in pauses:
            captured()
        if away is not None and done in leaves:
            away_bytes.append(away.leave_and_return(captured()))
    if not follow:  # torch's own loaders cannot be captured, and hold no tensor
        vars(job).pop("batches", None)
    found = captured()
    if after is not None:
        blocks = [(storage.device.type, bytes_of(storage)) for storage in found.storages]
        Path(after).write_bytes(pickle.dumps((done, bytes(found.graph), blocks)))
    drawn = [torch.rand(1, device=place).item() for place in {"cpu", kind}]
    digest = [_digest(found), *sorted(drawn), random.random()]
    return {"trace": trace, "digest": digest, "times_ms": times, "away_bytes": away_bytes}


class Away:
    """Off the device and back, as a paused resident goes: sometimes an image lies there already."""

    def __init__(self, accelerator: Any) -> None:
        from tests.workers.watching import WATCH
        from workers.hardware.dirty_pages import PAGE
        from workers.process import slab
        from workers.switching import offload, staging
        from workers.switching.offload import Absence
        from workers.switching.staging import Staging

        # These jobs are small.
        offload.LEAVES_BYTES, staging.WATCHED_BYTES = 64, 2 * PAGE
        held = slab.Slab(slab.made(1 << 28))
        self.staging = Staging(held, WATCH, accelerator)
        self.absence = Absence(held, accelerator, self.staging.pinned)
        self.dice = random.Random(0)

    def leave_and_return(self, captured: Any) -> int:
        """How many bytes were away."""
        if self.dice.random() < 0.5:
            layout = self.staging.begin(captured, lambda layout: None)
            self.staging.join()
            lying = zip(captured.storages, layout.storages, strict=True)
        else:
            layout, lying = self.staging.bring(captured)
        self.absence.leave(lying, lambda: None)
        away = [storage for storage, _ in self.absence.away]
        assert all(storage.nbytes() == 0 for storage in away)
        size = self.absence.bytes
        self.staging.lies(self.absence.come_back(lambda size: None))
        assert not self.absence.away
        assert size == sum(storage.nbytes() for storage in away)
        return size


def bytes_of(storage: Any) -> bytes:
    storage = storage.cpu()
    return bytes((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr()))


def block_of(data: bytes) -> Any:
    import torch

    storage = torch.UntypedStorage(len(data))
    ctypes.memmove(storage.data_ptr(), data, len(data))
    return storage


def _digest(found: Any) -> str:
    """Of the tensors by name, and of all storages (files too), whatever their order."""
    blocks = [hashlib.sha256(bytes_of(storage)).hexdigest() for storage in found.storages]
    named = {name: [blocks[row[0]], *row[1:]] for name, row in found.tensors.items()}
    whole = json.dumps([named, sorted(blocks)], sort_keys=True)
    return hashlib.sha256(whole.encode()).hexdigest()


if __name__ == "__main__":
    main()
