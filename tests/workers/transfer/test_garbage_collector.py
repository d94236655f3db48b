"""What nothing names leaves the store, and nothing else ever does, whoever is killed meanwhile."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from app.core.model.checkpoints.manifest import About
from app.storage.backend import Folder
from app.storage.chunks import CONDEMNED
from app.storage.garbage_collector import Collector, Swept, condemned
from app.storage.signing import Signer
from app.storage.store import Damaged, Store, blob, manifest
from tests.s3 import S3, serving
from tests.workers.slabs import KB, Slab, new_slab
from workers.transfer import checkpoint
from workers.transfer.checkpoint import Known, Written

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with serving() as server:
        yield server


@pytest.fixture(params=["folder", "s3"])
def store(request, tmp_path) -> Store:
    if request.param == "folder":
        return Store(Folder(tmp_path / "store"))
    return Store(request.getfixturevalue("s3").bucket())


class World:
    """A store, a writer with a slab, and the rows that name checkpoints."""

    def __init__(self, store: Store, home: Path) -> None:
        self.store, self.signer = store, Signer.at(home / "key")
        self.slab, self.known = Slab([300 * KB, 300 * KB, 10]), Known()
        self.rows: set[str] = set()
        self.step = 0
        # Whatever there is is older than this: no test waits for an hour.
        self.collector = Collector(Store(store.place, grace_s=-10), self._rows, orphaned_s=-10)
        self.patient = Collector(store, self._rows)

    def _rows(self, names: Collection[str]) -> set[str]:
        return self.rows & set(names)

    def write(self, *, listed: bool = True, known: Known | None = None) -> Written:
        self.step += 1
        about = About(tenant="ten_a", task="tsk_a", epoch=1, step=self.step)
        written = checkpoint.write(
            self.slab.fd, self.slab.layout, about,
            tensors={}, store=self.store, signer=self.signer, known=known or self.known,
        )  # fmt: skip
        if listed:
            self.rows.add(manifest("ten_a", written.sha256))
        return written

    def forget(self, written: Written) -> None:
        """As `app.scheduling.housekeeping` does: the row first, then its manifest."""
        self.rows.remove(manifest("ten_a", written.sha256))
        assert condemned(self.store, manifest("ten_a", written.sha256))

    def read(self, written: Written) -> None:
        into = new_slab()
        try:
            checkpoint.read(
                written.sha256, into=into, tenant="ten_a", key=self.signer.public, store=self.store
            )
        finally:
            os.close(into)

    def names(self) -> list[str]:
        prefixes = ("blobs", "manifests", "chunks", CONDEMNED, "damaged")
        return sorted(f.name for prefix in prefixes for f in self.store.place.listed(prefix))


@pytest.fixture
def world(store, tmp_path) -> World:
    return World(store, tmp_path)


# --- one step after the other -------------------------------------------------------------------


def test_listed_chunks_stay(world):
    first = world.write()
    world.slab.fill(0)
    second = world.write()
    before = world.names()
    assert world.collector.sweep() == Swept()
    assert world.names() == before
    world.read(first)
    world.read(second)


def test_unlisted_chunk_is_deleted_in_two_steps_and_readable_between(world):
    first = world.write()
    world.slab.fill(0)
    second = world.write()
    world.forget(first)
    # Its manifest is condemned, and names its chunks still: they are condemned one round later.
    assert world.collector.sweep().deleted == 1
    assert world.collector.sweep() == Swept(condemned=1, deleted=0, restored=0)
    world.read(second)
    assert world.collector.sweep() == Swept(condemned=0, deleted=1, restored=0)
    world.read(second)
    with pytest.raises(Damaged, match="not there"):
        world.read(first)


def test_reader_that_began_before_a_chunk_was_condemned_can_finish(world):
    written = world.write()
    for name in world.names():
        assert condemned(world.store, name)
    world.read(written)


def test_young_files_are_left_alone(world):
    written = world.write(listed=False)
    sha256, _ = world.store.put([b"an output"])
    before = world.names()
    assert world.patient.sweep() == Swept()
    assert world.names() == before
    world.read(written)
    world.store.open(sha256).close()


def test_everything_is_deleted_when_nothing_is_listed(world):
    world.write(listed=False)
    world.store.put([b"an output that nobody came to name"])
    for _ in range(4):
        world.collector.sweep()
    assert world.names() == []


def test_blobs_that_rows_name_stay(world):
    sha256, _ = world.store.put([b"a bundle"])
    world.rows.add(blob(sha256))
    assert world.collector.sweep() == Swept()
    world.store.open(sha256).close()


def test_writer_that_meets_a_condemned_chunk_writes_it_again(world):
    first = world.write()
    world.forget(first)
    for name in [name for name in world.names() if name.startswith("chunks/")]:
        condemned(world.store, name)
    again = world.write(known=Known())
    assert again.new_bytes == first.new_bytes
    for _ in range(3):
        world.collector.sweep()
    world.read(again)
    assert not [name for name in world.names() if name.startswith(CONDEMNED)]


def test_chunk_condemned_during_a_write_is_restored(world):
    """The writer counts on chunks that it found; the collector did not see its manifest yet."""
    first = world.write()
    chunks = [name for name in world.names() if name.startswith("chunks/")]
    world.forget(first)
    second = world.write()  # found all of them there
    for name in chunks:
        condemned(world.store, name)  # of a round that had looked before
    assert world.collector.sweep().restored == len(chunks)
    assert [name for name in world.names() if name.startswith("chunks/")] == chunks
    world.read(second)


def test_manifest_with_a_late_row_is_restored(world):
    written = world.write(listed=False)
    world.collector.sweep()
    assert manifest("ten_a", written.sha256) not in world.names()
    world.rows.add(manifest("ten_a", written.sha256))
    world.collector.sweep()
    assert manifest("ten_a", written.sha256) in world.names()
    world.collector.sweep()
    world.read(written)


def test_nothing_of_a_tenant_is_deleted_while_one_manifest_is_unreadable(world, caplog):
    world.write()
    name = next(iter(world.rows))
    with world.store.place.batch() as batch:
        world.store.place.delete(name)
        batch.put(name, [b"torn"])
        batch.settle()
    before = world.names()
    assert world.collector.sweep() == Swept()
    assert world.names() == before
    assert "nothing of this tenant is collected" in caplog.text


def test_unfinished_files_of_a_killed_writer_are_deleted(tmp_path):
    store = Store(Folder(tmp_path / "store"))
    store.put([b"x"])
    left = tmp_path / "store" / "incoming" / "4711-half"
    left.write_bytes(b"half a chunk")
    world = World(store, tmp_path)
    world.patient.sweep()
    assert left.exists()
    os.utime(left, (0, time.time() - 3700))
    world.patient.sweep()
    assert not left.exists()


def test_drafts_in_a_bucket_are_deleted(tmp_path, monkeypatch):
    with serving() as s3:
        bucket = s3.bucket()
        bucket.keep([b"an image's beginning"], lambda: checkpoint.draft("tsk_a", 3))
        bucket.keep([b"x"], lambda: "blobs/x")
        assert bucket.tidy(older_than_s=3600) == 0
        now_s = bucket.now_s()
        monkeypatch.setattr(bucket, "now_s", lambda: now_s + 3700)
        assert bucket.tidy(older_than_s=3600) == 1
        assert checkpoint.draft("tsk_a", 3) not in [found.name for found in bucket.listed("")]
        assert bucket.get("blobs/x") == b"x"


# --- all at once, with real processes and kill -9 -----------------------------------------------

GRACE_S = 3.0
LISTED = 3
WRITTEN_LEAST = 8  # checkpoints of each writer, however slow the machine is


class Rows:
    """The file that stands for the rows; whole at any moment."""

    def __init__(self, path: Path) -> None:
        self.path, self.shas = path, []
        self._write()

    def add(self, sha256: str) -> str | None:
        """Returns one that is not listed any more."""
        self.shas = [*self.shas, sha256]
        gone, self.shas = self.shas[:-LISTED], self.shas[-LISTED:]
        self._write()
        return gone[0] if gone else None

    def clear(self) -> None:
        self.shas = []
        self._write()

    def _write(self) -> None:
        draft = self.path.with_suffix(".new")
        draft.write_text(json.dumps([manifest("ten_a", sha256) for sha256 in self.shas]))
        draft.rename(self.path)


@contextlib.contextmanager
def process(*words: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.workers.storing", *map(str, words)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            started.kill()


class Busy:
    """A store that others write to and collect from; `rows` stand for what is listed."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.store = Store(Folder(home / "store"), grace_s=GRACE_S)
        self.signer = Signer.at(home / "key")
        self.rows = Rows(home / "listed")
        self.chance = random.Random(7)
        self.read = 0

    def check(self, sha256: str, *, listed_s: float = math.inf) -> None:
        """Read it; it may be lost if it was listed at `listed_s` for the last time, long ago."""
        into = new_slab()
        key = self.signer.public
        try:
            checkpoint.read(sha256, into=into, tenant="ten_a", key=key, store=self.store)
        except Damaged:
            if time.monotonic() - listed_s < GRACE_S:
                raise
        else:
            self.read += 1
        finally:
            os.close(into)

    def write_and_kill(self, seed: int) -> None:
        """List what a writer says, as `app.scheduling.housekeeping` forgets older ones; then kill
        it."""
        with process("write", self.home, GRACE_S, seed) as writer:
            until_s = time.monotonic() + self.chance.uniform(1.5, 3.0)
            for count, line in enumerate(writer.stdout, 1):
                begun = self.chance.choice(self.rows.shas) if self.rows.shas else None
                listed_s = time.monotonic()
                if (gone := self.rows.add(line.strip())) is not None:
                    condemned(self.store, manifest("ten_a", gone))
                if begun is not None:
                    self.check(
                        begun, listed_s=listed_s
                    )  # listed when this reader began, and perhaps no more
                if count >= WRITTEN_LEAST and time.monotonic() > until_s:
                    break
            assert writer.poll() is None, "the writer failed"

    def check_all(self) -> None:
        for sha256 in self.rows.shas:
            self.check(sha256)

    def sweep_all(self) -> None:
        """As many rounds as it takes, and for each of them everything is old enough."""
        impatient = Store(self.store.place, grace_s=-10)
        for _ in range(4):
            Collector(impatient, self._listed, orphaned_s=-10).sweep()

    def _listed(self, names: Collection[str]) -> set[str]:
        return set(names) & {manifest("ten_a", sha256) for sha256 in self.rows.shas}

    def named_addresses(self) -> set[str]:
        found = set()
        for sha256 in self.rows.shas:
            found |= self.store.manifest("ten_a", sha256, key=self.signer.public).addresses
        return found


def test_writer_collector_and_reader_at_once_with_kills(tmp_path):
    """No listed checkpoint ever fails to restore, and in the end no orphan is left."""
    busy = Busy(tmp_path)
    for seed in range(6):
        with process("collect", tmp_path, GRACE_S, busy.rows.path) as collecting:
            busy.write_and_kill(seed)
            assert collecting.poll() is None, "the collector failed"
        busy.check_all()  # both were killed in the middle of whatever they did
    assert busy.read > 20

    busy.sweep_all()
    busy.check_all()
    chunks = {found.name.rpartition("/")[2] for found in busy.store.place.listed("chunks")}
    assert chunks == busy.named_addresses()
    busy.rows.clear()
    busy.sweep_all()
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []
