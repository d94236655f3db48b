"""Processes for tests/workers/transfer/test_garbage_collector.py: one writes checkpoints, one
collects.

    python -m tests.workers.storing write FOLDER GRACE_S SEED
    python -m tests.workers.storing collect FOLDER GRACE_S LISTED

The writer says each checkpoint when it is durable; the file LISTED is what stands for the rows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from pathlib import Path

from app.core.model.checkpoints.manifest import About
from app.storage.backend import Folder
from app.storage.garbage_collector import Collector
from app.storage.signing import Signer
from app.storage.store import Store
from tests.workers.slabs import KB, Slab
from workers.transfer import checkpoint
from workers.transfer.checkpoint import Known, TooSlow

STORAGES = [300 * KB] * 6 + [40] * 5


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def write(home: Path, grace_s: float, seed: int) -> None:
    """Checkpoints of one resident; every third storage changes, and old bytes come back."""
    store = Store(Folder(home / "store"), grace_s=grace_s)
    signer, known = Signer.at(home / "key"), Known()
    slab = Slab(STORAGES, seed=seed)
    for step in range(1_000_000):
        slab.fill_graph()
        number = slab.random.randrange(len(STORAGES))
        # Of few kinds, so that a chunk is dropped, condemned, and wanted again.
        slab.fill(number, bytes([slab.random.randrange(4)]) * STORAGES[number])
        about = About(tenant="ten_a", task="tsk_a", epoch=seed + 1, step=step)
        try:
            written = checkpoint.write(
                slab.fd, slab.layout, about, tensors={}, store=store, signer=signer, known=known
            )
        except TooSlow:
            continue
        say(written.sha256)


def collect(home: Path, grace_s: float, listed: Path) -> None:
    def rows(names: Collection[str]) -> set[str]:
        return set(names) & set(json.loads(listed.read_text()))

    store = Store(Folder(home / "store"), grace_s=grace_s)
    collector = Collector(store, rows, orphaned_s=grace_s)
    while True:
        swept = collector.sweep()
        say(str(swept))


if __name__ == "__main__":
    what, home, grace_s, last = sys.argv[1:]
    if what == "write":
        write(Path(home), float(grace_s), int(last))
    else:
        collect(Path(home), float(grace_s), Path(last))
