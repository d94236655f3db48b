"""Images that are fetched before their task is launched: round by round, and while it is paused."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.core.model.checkpoints.manifest import About
from app.core.model.protocol.messages import CheckpointRef, ExpectedTask, Launch
from app.storage.backend import Folder, Missing
from app.storage.signing import Signer
from app.storage.store import Damaged, Store
from tests.launches import image_of, launch_of
from tests.s3 import S3, serving
from tests.workers.conftest import CODE, PATIENCE_S, PRESET, bundled
from tests.workers.slabs import KB, MB, Slab, new_slab, parts_of
from workers.device import prefetch
from workers.device.prefetch import Lookout
from workers.process import slab
from workers.process.image_layout import from_json
from workers.transfer import checkpoint
from workers.transfer.checkpoint import BesideImage, FoundImage, Known
from workers.transfer.host_context import House

SIZES = [6 * MB, 300 * KB, 10]
GRAPH = 3000


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with serving() as server:
        yield server


@pytest.fixture
def far(s3: S3) -> Store:
    return Store(s3.bucket())


@pytest.fixture
def near(tmp_path: Path) -> Store:
    return Store(Folder(tmp_path / "store"))


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer.at(tmp_path / "signing.key")


class Source:
    """The host that a task leaves: it writes images of one slab, one after the other."""

    def __init__(self, store: Store, signer: Signer, beside: tuple[bytes, ...] = ()) -> None:
        self.store, self.signer = store, signer
        self.beside = [*beside]  # the parts of the second image
        self.slab, self.known, self.step = Slab(SIZES, graph=GRAPH), Known(), 0

    def save(self, *, draft: str = "") -> CheckpointRef:
        """The image as a Launch names it."""
        self.step += 1
        about = About(tenant="ten_a", task="tsk_a", epoch=1, step=self.step)
        written = checkpoint.write(
            *(self.slab.fd, self.slab.layout, about),
            tensors={},
            store=self.store,
            signer=self.signer,
            known=self.known,
            draft=draft,
            beside=[memoryview(part) for part in self.beside],
        )
        return image_of(written.sha256, self.step, self.signer.public)


def read(
    image: CheckpointRef, into: int, store: Store, before: FoundImage | None = None
) -> FoundImage:
    return checkpoint.read(
        image.sha256, into=into, tenant="ten_a", key=image.key, store=store, before=before
    )


# --- round by round -----------------------------------------------------------------------------


def test_second_image_overwrites_the_first_and_only_changes_are_fetched(near, signer):
    source, into = Source(near, signer), new_slab()
    first = read(source.save(), into, near)
    assert first.fetched_bytes == GRAPH + sum(SIZES)
    source.slab.fill_graph()
    source.slab.fill(1, b"x" * (300 * KB))
    second = read(source.save(), into, near, first)
    assert second.fetched_bytes == GRAPH + 300 * KB
    assert parts_of(into, second.layout) == source.slab.parts()
    os.close(into)


def test_chunks_already_present_are_not_requested(near, signer, tmp_path):
    source, into = Source(near, signer), new_slab()
    image = source.save()
    first = read(image, into, near)
    for chunk in (tmp_path / "store" / "chunks").rglob("*"):
        if chunk.is_file():
            chunk.unlink()
    again = read(image, into, near, first)
    assert (again.fetched_bytes, parts_of(into, again.layout)) == (0, source.slab.parts())
    os.close(into)


# --- while it is being written ------------------------------------------------------------------


def follow(
    image, into, store, before, *, wait: Callable[[], bool], ahead_bytes: int = 0
) -> FoundImage | None:
    return checkpoint.follow(
        checkpoint.draft("tsk_a", 1),
        into=into,
        tenant="ten_a",
        key=image.key,
        store=store,
        before=before,
        wait=wait,
        ahead_bytes=ahead_bytes,
    )


class Read:
    """A place that knows which names were read from it."""

    def __init__(self, place: Any) -> None:
        self.place, self.names, self.changed = place, set[str](), threading.Condition()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.place, name)

    def get(self, name: str) -> bytes:
        body: bytes = self.place.get(name)
        with self.changed:
            self.names.add(name)
            self.changed.notify_all()
        return body

    def await_readers_of(self, names: set[str]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.names >= names, PATIENCE_S), self.names


class Stepwise:
    """A place that takes a chunk only when all that it has taken before was read."""

    def __init__(self, read: Read) -> None:
        self.read, self.taken, self.is_near, self.hands = read, set[str](), False, 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.read.place, name)

    def keep(self, pieces: Any, named: Callable[[], str]) -> None:
        self.read.place.keep(pieces, named)
        self.taken.add(named())

    def batch(self) -> Any:
        return contextlib.nullcontext(self)

    def put(self, name: str, body: Any) -> None:
        self.read.await_readers_of(self.taken)
        self.keep(body, lambda: name)

    def settle(self) -> None:
        pass


def saved_stepwise(
    source: Source, *, image: CheckpointRef, into: int, before: FoundImage, ahead_bytes: int = 0
) -> tuple[CheckpointRef, FoundImage]:
    """Save an image that is followed chunk by chunk; return it as it was saved and as it came."""
    over, read = threading.Event(), Read(source.store.place)
    more = {"wait": lambda: not over.wait(0.02), "ahead_bytes": ahead_bytes}
    with ThreadPoolExecutor(1) as pool:
        try:
            found = pool.submit(follow, image, into, Store(read), before, **more)
            source.store = Store(Stepwise(read))
            last = source.save(draft=checkpoint.draft("tsk_a", 1))
            came = found.result(PATIENCE_S)
        finally:
            over.set()
    return last, came


def test_last_image_is_fetched_while_it_is_being_written(far, signer):
    """Each chunk is fetched before the next one is there."""
    source, into = Source(far, signer), new_slab()
    image = source.save()
    before = read(image, into, far)
    source.slab.fill_graph()
    source.slab.fill(0, os.urandom(6 * MB))
    last, now = saved_stepwise(source, image=image, into=into, before=before)
    assert (now.sha256, now.fetched_bytes) == (last.sha256, GRAPH + 6 * MB)
    assert parts_of(into, now.layout) == source.slab.parts()
    with pytest.raises(Missing):
        far.place.get(checkpoint.draft("tsk_a", 1))
    os.close(into)


def test_task_that_stops_waiting_before_anything_came_keeps_what_was_there(far, signer):
    source, into = Source(far, signer), new_slab()
    image = source.save()
    before = read(image, into, far)
    assert follow(image, into, far, before, wait=lambda: False) is None
    assert parts_of(into, before.layout) == source.slab.parts()
    os.close(into)


def test_manifest_signed_by_another_host_is_not_followed(far, signer, tmp_path):
    source, into = Source(far, signer), new_slab()
    image = source.save()
    before = read(image, into, far)
    stranger = Signer.at(tmp_path / "other.key")
    sealed = stranger.sealed(b"{}")
    far.place.keep([sealed], lambda: checkpoint.draft("tsk_a", 1))
    with pytest.raises(Damaged, match="not signed by"):
        follow(image, into, far, before, wait=lambda: True)
    os.close(into)


def test_store_in_a_folder_needs_no_draft(near, signer, tmp_path):
    Source(near, signer).save(draft=checkpoint.draft("tsk_a", 1))
    assert not list((tmp_path / "store").rglob("draft-*"))


# --- the processes of a command -----------------------------------------------------------------


PARTS = (b"about them", os.urandom(MB), os.urandom(MB))


def test_second_image_of_a_moving_task_is_fetched_ahead_and_then_only_what_changed(
    near, signer, device, tmp_path
):
    source = Source(near, signer, PARTS)
    image = source.save()
    device.expect(image)
    assert device.happened.acquire(timeout=PATIENCE_S)
    (here,) = device.lookout.view()
    assert here["bytes"] == GRAPH + sum(SIZES) + sum(map(len, PARTS))
    assert device.lookout.held_bytes >= sum(SIZES) + sum(map(len, PARTS))
    source.beside[1] = os.urandom(MB)
    last = source.save()
    for chunk in (near.chunks("ten_a").address(part) for part in PARTS):
        near.place.delete(near.chunks("ten_a").name(chunk))
    taken = device.lookout.launched("tsk_a")
    got = prefetch.fetch(device.launch(last), device.house, {}, taken)
    second = BesideImage.of(got.manifest, store=near, ciphers={}, held=got.beside)
    assert [*map(second.read, range(3))] == source.beside
    got.close()


def test_second_image_that_is_too_large_for_the_device_is_left_to_the_launch(near, signer, device):
    device.house = replace(device.house, host_memory_bytes=sum(SIZES) + 4 * MB)
    device.lookout.house = device.house
    device.expect(Source(near, signer, (b"about them", bytes(32 * MB))).save())
    assert device.happened.acquire(timeout=PATIENCE_S)
    (here,) = device.lookout.view()
    assert here["bytes"] == GRAPH + sum(SIZES)


def test_second_image_is_fetched_while_it_is_being_written(far, signer):
    source, into = Source(far, signer, PARTS), new_slab()
    image = source.save()
    before = read(image, into, far)
    assert not before.beside
    source.beside[1:] = [os.urandom(MB), os.urandom(MB)]
    _, now = saved_stepwise(source, image=image, into=into, before=before, ahead_bytes=2**30)
    assert sorted(map(bytes, now.beside.values())) == sorted(source.beside)
    os.close(into)


# --- a device that expects tasks ----------------------------------------------------------------


class Device:
    """The lookout of a device worker, and what it told."""

    def __init__(self, store: Store, home: Path) -> None:
        self.bundle, _ = store.put([bundled(CODE)])
        self.house = House(device="h.1", island="test", store=store, run=home / "run")
        self.happened = threading.Semaphore(0)
        self.lookout = Lookout(self.house, self.happened.release)

    def expect(
        self, *images: CheckpointRef | None, inputs: tuple[dict[str, Any], ...] = ()
    ) -> None:
        entry = ExpectedTask(
            task="tsk_a",
            epoch=1,
            tenant="ten_a",
            bundle=self.bundle,
            inputs=list(inputs),
            image=None,
        )
        self.lookout.expect([replace(entry, image=image) for image in images], here=[])

    def launch(self, *images: CheckpointRef) -> Launch:
        more = {"tenant": "ten_a", "bundle": self.bundle, "preset": PRESET}
        return launch_of("tsk_a", 2, images=list(images), **more)


@pytest.fixture
def device(near, tmp_path) -> Iterator[Device]:
    made = Device(near, tmp_path)
    yield made
    made.lookout.close()


def test_device_reports_prefetched_data_and_gives_it_to_the_launch(near, signer, device):
    source = Source(near, signer)
    device.expect(None)
    assert device.lookout.view() == []
    for fetched in (GRAPH + sum(SIZES), GRAPH):
        image = source.save()
        device.expect(image)
        assert device.happened.acquire(timeout=PATIENCE_S)
        (here,) = device.lookout.view()
        assert (here["task"], here["sha256"], here["bytes"]) == ("tsk_a", image.sha256, fetched)
        source.slab.fill_graph()
    assert device.lookout.held_bytes > sum(SIZES)
    last = source.save()
    taken = device.lookout.launched("tsk_a")
    assert device.lookout.view() == []
    got = prefetch.fetch(device.launch(last), device.house, {}, taken)
    index = slab.read_index(got.slab, got.index_bytes)
    layout = from_json(index["layout"], limit_bytes=slab.limit_bytes(got.slab))
    assert parts_of(got.slab, layout) == source.slab.parts()
    assert (got.image.step, got.image.sha256) == (3, last.sha256)
    got.close()


def test_inputs_are_fetched_before_the_image(near, signer, device):
    sha256, size = near.put([b"an input"])
    large = {"sha256": near.put([b"a large one"])[0], "size_bytes": 2**40}
    device.expect(
        Source(near, signer).save(), inputs=({"sha256": sha256, "size_bytes": size}, large)
    )
    assert device.happened.acquire(timeout=PATIENCE_S)
    near.place.delete(f"blobs/{sha256[:2]}/{sha256}")
    opened = device.house.cache.opened(sha256, near)
    assert not opened.is_fetched
    os.close(opened.fd)
    assert not (device.house.cache.folder / large["sha256"]).exists()


def test_expected_task_that_does_not_come_is_forgotten_and_its_memory_freed(near, signer, device):
    source = Source(near, signer)
    device.expect(source.save())
    assert device.happened.acquire(timeout=PATIENCE_S)
    coming = device.lookout.coming["tsk_a"]
    held = coming.ahead.slab
    device.expect()
    coming.join(PATIENCE_S)
    assert not coming.is_alive()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(held)
    assert (device.lookout.view(), device.lookout.held_bytes) == ([], 0)


def test_launch_without_prefetched_data_fetches_all(near, signer, device):
    image = Source(near, signer).save()
    got = prefetch.fetch(device.launch(image), device.house, {}, device.lookout.launched("tsk_a"))
    assert got.image.sha256 == image.sha256
    got.close()


def test_lost_chunk_is_retried_and_harms_no_other_task(near, signer, device, tmp_path):
    source = Source(near, signer)
    image = source.save()
    lost = next(path for path in (tmp_path / "store" / "chunks").rglob("*") if path.is_file())
    body = lost.read_bytes()
    lost.unlink()
    device.expect(image)
    assert not device.happened.acquire(timeout=0.5)
    assert device.lookout.view() == []
    lost.write_bytes(body)
    assert device.happened.acquire(timeout=PATIENCE_S)
    assert device.lookout.view()[0]["sha256"] == image.sha256
