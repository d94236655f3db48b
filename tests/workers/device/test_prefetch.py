"""Images that are fetched before their task is launched: round by round, and while it is paused."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.core.model.manifest import About
from app.core.model.messages import Launch
from app.storage.backend import Folder, Missing
from app.storage.signing import Signer
from app.storage.store import Damaged, Store
from tests.s3 import S3, serving
from tests.workers.conftest import CODE, PRESET, bundled
from tests.workers.slabs import KB, MB, Slab, new_slab, parts_of
from workers.device import prefetch
from workers.device.prefetch import Lookout
from workers.process import slab
from workers.process.image_layout import from_json
from workers.transfer import checkpoint
from workers.transfer.checkpoint import FoundImage, Known
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

    def __init__(self, store: Store, signer: Signer) -> None:
        self.store, self.signer = store, signer
        self.slab, self.known, self.step = Slab(SIZES, graph=GRAPH), Known(), 0

    def save(self, *, draft: str = "") -> dict[str, Any]:
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
        )
        return {"sha256": written.sha256, "step": self.step, "key": self.signer.public}


def read(
    image: dict[str, Any], into: int, store: Store, before: FoundImage | None = None
) -> FoundImage:
    return checkpoint.read(
        image["sha256"], into=into, tenant="ten_a", key=image["key"], store=store, before=before
    )


# --- round by round -----------------------------------------------------------------------------


def test_a_second_image_is_laid_over_the_first_and_only_what_changed_is_fetched(near, signer):
    source, into = Source(near, signer), new_slab()
    first = read(source.save(), into, near)
    assert first.fetched_bytes == GRAPH + sum(SIZES)
    source.slab.fill_graph()
    source.slab.fill(1, b"x" * (300 * KB))
    second = read(source.save(), into, near, first)
    assert second.fetched_bytes == GRAPH + 300 * KB
    assert parts_of(into, second.layout) == source.slab.parts()
    os.close(into)


def test_what_lies_there_already_is_not_asked_for(near, signer, tmp_path):
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


def follow(image, into, store, before, *, wait: Callable[[], bool]) -> FoundImage | None:
    return checkpoint.follow(
        checkpoint.draft("tsk_a", 1),
        into=into,
        tenant="ten_a",
        key=image["key"],
        store=store,
        before=before,
        wait=wait,
    )


class Slow:
    """A place where chunks take their time to be put, so that somebody can be there before."""

    def __init__(self, place: Any, put_s: float) -> None:
        self.place, self.put_s, self.is_near, self.hands = place, put_s, False, 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.place, name)

    def batch(self) -> Any:
        return _SlowBatch(self)


class _SlowBatch:
    def __init__(self, slow: Slow) -> None:
        self.slow = slow

    def __enter__(self) -> _SlowBatch:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def put(self, name: str, body: Any) -> None:
        time.sleep(self.slow.put_s)
        self.slow.place.keep(body, lambda: name)

    def settle(self) -> None:
        pass


def test_the_last_image_is_fetched_while_it_is_being_written(far, signer):
    source, into = Source(far, signer), new_slab()
    image = source.save()
    before = read(image, into, far)
    source.slab.fill_graph()
    source.slab.fill(0, os.urandom(6 * MB))
    source.store = Store(Slow(far.place, 0.3))
    found: list[Any] = []

    def wait() -> bool:
        time.sleep(0.02)
        return True

    there = threading.Thread(
        target=lambda: found.append(follow(image, into, far, before, wait=wait))
    )
    there.start()
    last = source.save(draft=checkpoint.draft("tsk_a", 1))
    written_s = time.monotonic()
    there.join(20)
    # Three chunks at 0.3 s each: all but the last were there when the last had been put.
    assert time.monotonic() - written_s < 0.3
    (now,) = found
    assert (now.sha256, now.fetched_bytes) == (last["sha256"], GRAPH + 6 * MB)
    assert parts_of(into, now.layout) == source.slab.parts()
    with pytest.raises(Missing):
        far.place.get(checkpoint.draft("tsk_a", 1))
    os.close(into)


def test_whoever_stops_waiting_before_anything_came_has_what_was_there(far, signer):
    source, into = Source(far, signer), new_slab()
    image = source.save()
    before = read(image, into, far)
    assert follow(image, into, far, before, wait=lambda: False) is None
    assert parts_of(into, before.layout) == source.slab.parts()
    os.close(into)


def test_what_another_host_signed_is_not_followed(far, signer, tmp_path):
    source, into = Source(far, signer), new_slab()
    image = source.save()
    before = read(image, into, far)
    stranger = Signer.at(tmp_path / "other.key")
    sealed = stranger.sealed(b"{}")
    far.place.keep([sealed], lambda: checkpoint.draft("tsk_a", 1))
    with pytest.raises(Damaged, match="not signed by"):
        follow(image, into, far, before, wait=lambda: True)
    os.close(into)


def test_a_store_in_a_folder_needs_no_draft(near, signer, tmp_path):
    Source(near, signer).save(draft=checkpoint.draft("tsk_a", 1))
    assert not list((tmp_path / "store").rglob("draft-*"))


# --- a device that expects tasks ----------------------------------------------------------------


class Device:
    """The lookout of a device worker, and what it told."""

    def __init__(self, store: Store, home: Path) -> None:
        self.bundle, _ = store.put([bundled(CODE)])
        self.house = House(device="h.1", island="test", store=store, run=home / "run")
        self.happened = threading.Semaphore(0)
        self.lookout = Lookout(self.house, self.happened.release)

    def expect(
        self, *images: dict[str, Any] | None, inputs: tuple[dict[str, Any], ...] = ()
    ) -> None:
        entry = {"task": "tsk_a", "epoch": 1, "tenant": "ten_a", "bundle": self.bundle}
        entry["inputs"] = list(inputs)
        self.lookout.expect([{**entry, "image": image} for image in images], here=[])

    def launch(self, *images: dict[str, Any]) -> Launch:
        return Launch(
            task="tsk_a",
            epoch=2,
            seq=1,
            tenant="ten_a",
            run={"job": "m:C"},
            bundle=self.bundle,
            params={},
            inputs={},
            outputs=[],
            world_size=1,
            preset=PRESET,
            images=list(images),
            budget_us=1,
            checkpoint_every_s=0.0,
            memory_bytes=0,
        )


@pytest.fixture
def device(near, tmp_path) -> Iterator[Device]:
    made = Device(near, tmp_path)
    yield made
    made.lookout.close()


def test_a_device_says_what_it_has_of_who_comes_and_hands_it_to_the_launch(near, signer, device):
    source = Source(near, signer)
    device.expect(None)
    assert device.lookout.view() == []
    for fetched in (GRAPH + sum(SIZES), GRAPH):
        image = source.save()
        device.expect(image)
        assert device.happened.acquire(timeout=20)
        (here,) = device.lookout.view()
        assert (here["task"], here["sha256"], here["bytes"]) == ("tsk_a", image["sha256"], fetched)
        source.slab.fill_graph()
    assert device.lookout.held_bytes > sum(SIZES)
    last = source.save()
    taken = device.lookout.launched("tsk_a")
    assert device.lookout.view() == []
    got = prefetch.fetch(device.launch(last), device.house, {}, taken)
    index = slab.read_index(got.slab, got.index_bytes)
    layout = from_json(index["layout"], limit_bytes=slab.limit_bytes(got.slab))
    assert parts_of(got.slab, layout) == source.slab.parts()
    assert (got.image.step, got.image.sha256) == (3, last["sha256"])
    got.close()


def test_inputs_are_here_before_the_image_is(near, signer, device):
    sha256, size = near.put([b"an input"])
    large = {"sha256": near.put([b"a large one"])[0], "size_bytes": 2**40}
    device.expect(
        Source(near, signer).save(), inputs=({"sha256": sha256, "size_bytes": size}, large)
    )
    assert device.happened.acquire(timeout=20)
    near.place.delete(f"blobs/{sha256[:2]}/{sha256}")
    opened = device.house.cache.opened(sha256, near)
    assert not opened.is_fetched
    os.close(opened.fd)
    assert not (device.house.cache.folder / large["sha256"]).exists()


def test_who_does_not_come_is_forgotten_and_its_memory_given_back(near, signer, device):
    source = Source(near, signer)
    device.expect(source.save())
    assert device.happened.acquire(timeout=20)
    coming = device.lookout.coming["tsk_a"]
    held = coming.ahead.slab
    device.expect()
    coming.join(10)
    assert not coming.is_alive()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(held)
    assert (device.lookout.view(), device.lookout.held_bytes) == ([], 0)


def test_a_launch_without_anything_ahead_fetches_all(near, signer, device):
    image = Source(near, signer).save()
    got = prefetch.fetch(device.launch(image), device.house, {}, device.lookout.launched("tsk_a"))
    assert got.image.sha256 == image["sha256"]
    got.close()


def test_a_lost_chunk_is_tried_again_and_does_harm_to_nobody(near, signer, device, tmp_path):
    source = Source(near, signer)
    image = source.save()
    lost = next(path for path in (tmp_path / "store" / "chunks").rglob("*") if path.is_file())
    body = lost.read_bytes()
    lost.unlink()
    device.expect(image)
    assert not device.happened.acquire(timeout=0.5)
    assert device.lookout.view() == []
    lost.write_bytes(body)
    assert device.happened.acquire(timeout=20)
    assert device.lookout.view()[0]["sha256"] == image["sha256"]
