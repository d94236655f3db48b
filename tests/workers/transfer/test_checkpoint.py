"""An image that was made durable comes back byte for byte, or it is said what is wrong with it."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.model.checkpoints.manifest import About
from app.storage.backend import Folder
from app.storage.chunks import PLAIN, ZSTD, Chunks, packed_up, unpacked
from app.storage.signing import Signer
from app.storage.store import Damaged, Store
from tests.s3 import S3, serving
from tests.workers.slabs import KB, MB, Slab, new_slab, parts_of
from workers.transfer import checkpoint
from workers.transfer.checkpoint import BadSlab, Known, TooSlow, Written

SIZES = [6 * MB, 4 * MB, 9 * MB + 5, 300 * KB, 10, 0, 2000, 4]
W = {"model.w": [0, "float32", [10, 3], [1, 10], 2]}


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with serving() as server:
        yield server


@pytest.fixture(params=["folder", "s3"])
def store(request, tmp_path) -> Store:
    if request.param == "folder":
        return Store(Folder(tmp_path / "store"))
    return Store(request.getfixturevalue("s3").bucket())


@pytest.fixture
def folder(tmp_path) -> Store:
    return Store(Folder(tmp_path / "store"))


@pytest.fixture
def signer(tmp_path) -> Signer:
    return Signer.at(tmp_path / "signing.key")


def write(
    slab: Slab, store: Store, signer: Signer, known: Known | None = None, *, step: int = 1, **more
) -> Written:
    about = About(tenant="ten_a", task="tsk_a", epoch=1, step=step, fingerprint={"torch": "2.13"})
    about, tensors = more.pop("about", about), more.pop("tensors", {})
    known = Known() if known is None else known
    return checkpoint.write(
        slab.fd, slab.layout, about, tensors=tensors, store=store, signer=signer, known=known
    )


def read(sha256: str, store: Store, signer: Signer, *, tenant: str = "ten_a") -> list[bytes]:
    into = new_slab()
    try:
        found = checkpoint.read(sha256, into=into, tenant=tenant, key=signer.public, store=store)
        return parts_of(into, found.layout)
    finally:
        os.close(into)


def names(store: Store, prefix: str) -> list[str]:
    return sorted(found.name for found in store.place.listed(prefix))


# --- there and back -----------------------------------------------------------------------------


def test_written_image_is_read_back(store, signer):
    slab = Slab(SIZES)
    written = write(slab, store, signer, tensors=W)
    assert written.size_bytes == 3000 + sum(SIZES)
    # The graph; in MiB 4 + 2, 4, 4 + 4 + 1 and 5 bytes; 300 KiB; 10 + 2000 + 4 bytes together.
    assert written.chunks == 1 + 2 + 1 + 3 + 1 + 1
    assert read(written.sha256, store, signer) == slab.parts()
    into = new_slab()
    found = checkpoint.read(
        written.sha256, into=into, tenant="ten_a", key=signer.public, store=store
    )
    extents = (found.layout.graph, *found.layout.storages)
    assert [extent.size for extent in extents] == [3000, *SIZES]
    assert found.manifest.about.step == 1
    assert found.manifest.ranks[0].tensors[0].name == "model.w"


def test_image_without_bytes_is_valid(store, signer):
    slab = Slab([], graph=0)
    assert read(write(slab, store, signer).sha256, store, signer) == [b""]


@given(st.lists(st.integers(0, 700_000), max_size=12), st.integers(0, 5000))
def test_any_image_is_read_back(tmp_path_factory, sizes, graph):
    home = tmp_path_factory.mktemp("home")
    store, signer = Store(Folder(home / "store")), Signer.at(home / "key")
    slab = Slab(sizes, graph=graph)
    assert read(write(slab, store, signer).sha256, store, signer) == slab.parts()
    shutil.rmtree(home)


def test_unchanged_image_adds_only_its_manifest(store, signer):
    slab, known = Slab(SIZES), Known()
    first = write(slab, store, signer, known)
    chunks = names(store, "chunks")
    again = write(slab, store, signer, known, step=2)
    assert first.new_bytes == first.size_bytes + first.chunks  # random bytes: each with its codec
    assert again.new_bytes == 0
    assert names(store, "chunks") == chunks
    assert again.sha256 != first.sha256
    assert read(again.sha256, store, signer) == read(first.sha256, store, signer) == slab.parts()


def test_only_changed_chunks_are_written(store, signer):
    slab, known = Slab(SIZES), Known()
    first = write(slab, store, signer, known)
    before = slab.parts()
    slab.fill(1)
    second = write(slab, store, signer, known, step=2)
    assert second.new_bytes == 4 * MB + 1
    assert read(second.sha256, store, signer) == slab.parts()
    assert read(first.sha256, store, signer) == before


def test_equal_ranks_share_chunks_in_any_order_of_writing(store, signer):
    here, there = Slab(SIZES), Slab(SIZES)
    there.fill_graph()
    write(here, store, signer)
    assert write(there, store, signer).new_bytes == 3001  # its graph alone, and the codec
    diverged = Slab(SIZES)
    diverged.fill(0)
    written = write(diverged, store, signer)
    assert written.new_bytes == 6 * MB + 2
    assert read(written.sha256, store, signer) == diverged.parts()


def test_tenants_share_no_chunks(store, signer):
    slab = Slab([MB])
    mine = write(slab, store, signer)
    about = About(tenant="ten_b", task="tsk_b", epoch=1, step=1)
    theirs = write(slab, store, signer, about=about)
    assert theirs.new_bytes == mine.new_bytes
    with pytest.raises(Damaged, match="not there"):
        read(mine.sha256, store, signer, tenant="ten_b")


def test_compressible_chunks_are_stored_compressed(store, signer):
    slab = Slab([8 * MB])
    slab.fill(0, bytes(8 * MB))
    written = write(slab, store, signer)
    # The two halves are equal, and zeros: one chunk of some hundred bytes, beside the graph.
    assert written.new_bytes < 3001 + 1000
    assert read(written.sha256, store, signer) == slab.parts()


# --- a resident is not believed -----------------------------------------------------------------


def test_slab_that_could_be_truncated_is_not_read(folder, signer):
    slab = Slab([10])
    slab.fd = os.memfd_create("slab")
    os.ftruncate(slab.fd, slab.layout.end)
    with pytest.raises(BadSlab, match="sealed"):
        write(slab, folder, signer)


def test_image_that_exceeds_its_slab_is_invalid(folder, signer):
    slab = Slab([10])
    slab.fd = new_slab(4)
    with pytest.raises(BadSlab, match="4 bytes"):
        write(slab, folder, signer)


def test_nonsensical_rows_of_the_tensor_table_are_left_out(folder, signer):
    """A checkpoint is worth more than its table, and nobody's table may point past its bytes."""
    nonsense = {
        "outside": [0, "float32", [4], [1], 0],
        "numpy's": [0, "datetime64[ns]", [1], [1], 0],
        "backwards": [0, "uint8", [2], [-1], 1],
        "of nothing": [1, "uint8", [2], [1], 0],
        "no row": None,
        "a" * 2000: [0, "uint8", [2], [1], 0],
    }
    good = {"good": [0, "uint8", [2], [1], 0]}
    written = write(Slab([10]), folder, signer, tensors={**nonsense, **good})
    found = folder.manifest("ten_a", written.sha256, key=signer.public)
    assert [tensor.name for tensor in found.ranks[0].tensors] == ["good"]


def test_bytes_that_change_during_writing_spoil_no_chunk(folder, signer):
    slab, ended = Slab([24 * MB]), threading.Event()
    part = slab.layout.storages[0]

    def scribble() -> None:
        while not ended.is_set():
            slab.memory[part.offset : part.offset + part.size] = os.urandom(1) * part.size

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        written = [write(slab, folder, signer, step=step) for step in range(5)]
    finally:
        ended.set()
        thread.join()
    for one in written:
        read(one.sha256, folder, signer)  # raises Damaged if any chunk is not what its name says


# --- faults: each is named, and the one before still restores -----------------------------------


@pytest.fixture
def two(folder, signer) -> tuple[Slab, Written, Written]:
    """Two checkpoints; the second one changed its first storage (and the graph)."""
    slab, known = Slab([2 * MB, MB]), Known()
    first = write(slab, folder, signer, known)
    slab.fill(0)
    slab.fill_graph()
    return slab, first, write(slab, folder, signer, known, step=2)


def only_in(store: Store, second: Written, first: Written, signer: Signer) -> list[Path]:
    """The files of the chunks that only the second one names, the graph's last."""
    found = [store.manifest("ten_a", one.sha256, key=signer.public) for one in (second, first)]
    mine = [c for c in found[0].ranks[0].chunks if c.address not in found[1].addresses]
    chunks = store.chunks("ten_a")
    paths = [store.place.path(chunks.name(c.address)) for c in sorted(mine, key=lambda c: -c.size)]
    assert len(paths) == 2
    return paths


def change(path: Path, body: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(body)


def manifest_file(store: Store, written: Written) -> Path:
    return store.place.path(f"manifests/ten_a/{written.sha256[:2]}/{written.sha256}")


def flip(path: Path, at: int) -> None:
    body = bytearray(path.read_bytes())
    body[at] ^= 4
    change(path, bytes(body))


FAULTS: dict[str, tuple[str, Callable[[Path, Path], None]]] = {
    "a lost chunk": ("chunk .* is not there", lambda chunk, _: chunk.unlink()),
    "a flipped bit": ("chunk .* hash to", lambda chunk, _: flip(chunk, 1000)),
    "a torn write": (
        "chunk .* the last of its 1000 bytes, .* names no known codec",
        lambda chunk, _: change(chunk, chunk.read_bytes()[:1000]),
    ),
    "an unknown codec": ("names no known codec", lambda chunk, _: flip(chunk, -1)),
    "an empty chunk": ("chunk .* its 0 bytes", lambda chunk, _: change(chunk, b"")),
    "a lost manifest": ("manifest .* is not there", lambda _, manifest: manifest.unlink()),
    "a manifest cut short": (
        "manifest .* hash to",
        lambda _, manifest: change(manifest, manifest.read_bytes()[:-10]),
    ),
    "a changed manifest": ("manifest .* hash to", lambda _, manifest: flip(manifest, 300)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_checkpoint_is_reported_and_the_one_before_still_restores(
    fault, two, folder, signer
):
    _, first, second = two
    told, spoil = FAULTS[fault]
    before = read(first.sha256, folder, signer)
    chunk, _ = only_in(folder, second, first, signer)
    spoil(chunk, manifest_file(folder, second))
    with pytest.raises(Damaged, match=told):
        read(second.sha256, folder, signer)
    assert read(first.sha256, folder, signer) == before


def test_damaged_chunk_is_written_again(two, folder, signer):
    slab, first, second = two
    chunk, _ = only_in(folder, second, first, signer)
    flip(chunk, 1000)
    with pytest.raises(Damaged):
        read(second.sha256, folder, signer)
    assert write(slab, folder, signer, step=2).sha256 == second.sha256
    assert read(second.sha256, folder, signer) == slab.parts()


def test_signature_of_another_host_is_invalid(two, folder, signer, tmp_path):
    _, first, _ = two
    other = Signer.at(tmp_path / "other.key")
    with pytest.raises(Damaged, match="not signed by"):
        read(first.sha256, folder, other)


def test_forged_manifest_with_a_valid_address_is_refused(two, folder, signer, tmp_path):
    """Somebody who can write to the store, but has no key of a host."""
    _, first, _ = two
    sealed = folder.sealed("ten_a", first.sha256)
    forged = folder.put_manifest("ten_a", sealed.replace(b'"step":1', b'"step":9'))
    with pytest.raises(Damaged, match="not signed by"):
        read(forged, folder, signer)


def test_manifest_of_another_tenant_is_refused(two, folder, signer):
    _, first, _ = two
    moved = folder.put_manifest("ten_b", folder.sealed("ten_a", first.sha256))
    with pytest.raises(Damaged, match="belongs to tenant ten_a"):
        read(moved, folder, signer, tenant="ten_b")


def test_checkpoint_that_took_too_long_is_not_reported(tmp_path, signer):
    """What it saw at its beginning may have been collected before its manifest was there."""
    store = Store(Folder(tmp_path / "store"), grace_s=0.0)
    with pytest.raises(TooSlow):
        write(Slab([10]), store, signer)


def test_every_name_and_its_folders_are_flushed_once(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(
        "app.storage.backend._sync", lambda path: flushed.append(path.relative_to(tmp_path))
    )
    place = Folder(tmp_path)
    place.keep([b"one"], lambda: "manifests/ten_a/ab/one")
    above = [Path("manifests/ten_a/ab"), Path("manifests/ten_a"), Path("manifests"), Path()]
    assert flushed == above
    place.keep([b"two"], lambda: "manifests/ten_a/ab/two")
    assert flushed == [*above, above[0]]
    shutil.rmtree(tmp_path / "manifests")
    place.keep([b"two"], lambda: "manifests/ten_a/ab/two")
    assert flushed == [*above, above[0], *above]


@contextlib.contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_file_that_is_too_large_is_an_error_that_leaves_nothing(two, folder, signer):
    slab, _, second = two
    before = names(folder, "chunks")
    slab.fill(0)
    with no_file_larger_than(MB), pytest.raises(OSError, match="could not take it in: File too"):
        write(slab, folder, signer, step=3)
    assert names(folder, "chunks") == before
    assert names(folder, "incoming") == []
    assert len(names(folder, "manifests")) == 2
    read(second.sha256, folder, signer)
    after = write(slab, folder, signer, step=3)  # there is room again
    assert read(after.sha256, folder, signer) == slab.parts()


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """8 MiB of disk."""
    where = tmp_path / "disk"
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(where)]
    made = subprocess.run(mount, capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"a small disk cannot be mounted here: {made.stderr.strip()}")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


def test_full_disk_is_reported_and_the_checkpoint_before_still_restores(small_disk, signer):
    store, slab, known = Store(Folder(small_disk / "store")), Slab([5 * MB]), Known()
    first = write(slab, store, signer, known)
    before = slab.parts()
    slab.fill(0)
    with pytest.raises(OSError, match="No space left on device"):
        write(slab, store, signer, known, step=2)
    assert names(store, "incoming") == []
    assert read(first.sha256, store, signer) == before


# --- S3 that does not do it ---------------------------------------------------------------------


def test_unreachable_store_says_nothing_about_a_checkpoint(signer):
    with serving() as s3:
        url = s3.new_bucket()
        store = Store(s3.bucket(url, patience_s=1.0))
        slab = Slab([MB])
        written = write(slab, store, signer)
    with pytest.raises(OSError, match=r"the store s3://"):
        read(written.sha256, store, signer)
    with pytest.raises(OSError, match=r"the store s3://"):
        write(slab, store, signer, step=2)


def test_missing_bucket_is_no_lost_checkpoint(s3, signer):
    store = Store(s3.bucket("s3://nowhere/at-all", patience_s=1.0))
    with pytest.raises(OSError, match="the bucket does not exist"):
        read("0" * 64, store, signer)


class Broken(threading.Thread):
    """Takes connections, and answers each request with 500, or with nothing at all."""

    def __init__(self, answer: bytes) -> None:
        super().__init__(daemon=True)
        import socket

        self.answer = answer
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = self.server.getsockname()[1]
        self.held: list[object] = []

    def run(self) -> None:
        while True:
            try:
                connection, _ = self.server.accept()
            except OSError:
                return
            self.held.append(connection)
            connection.recv(65536)
            if self.answer:
                connection.sendall(self.answer)
                connection.close()


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", b""],
    ids=["500", "silence"],
)
def test_store_that_fails_or_hangs_has_a_deadline(answer, signer):
    server = Broken(answer)
    server.start()
    store = Store(S3(port=server.port).bucket("s3://b/p", patience_s=1.0))
    with pytest.raises(OSError, match=r"the store s3://"):
        read("0" * 64, store, signer)
    with pytest.raises(OSError, match=r"the store s3://"):
        write(Slab([10]), store, signer)
    server.server.close()


# --- chunks -------------------------------------------------------------------------------------


@given(st.binary(max_size=5000), st.integers(0, 50))
def test_chunk_is_decompressed_to_its_bytes(body, times):
    body = body * times
    packed = b"".join(packed_up(body))
    assert unpacked(packed, len(body)) == body
    for wrong in (len(body) + 1, max(0, len(body) - 1)):
        if wrong != len(body):
            with pytest.raises(ValueError, match="its manifest says"):
                unpacked(packed, wrong)


def test_chunk_is_decompressed_to_no_more_than_promised():
    bomb = b"".join(packed_up(bytes(64 * MB)))
    assert bomb[-1:] == ZSTD
    assert len(bomb) < 10 * KB
    with pytest.raises(ValueError, match="its header says 67108864 bytes"):
        unpacked(bomb, 1000)
    assert packed_up(os.urandom(100 * KB))[-1] == PLAIN


def test_tenant_id_cannot_lead_out_of_the_store(tmp_path):
    for bad in ("", "..", "a/b", "a\n"):
        with pytest.raises(ValueError, match="not the id of a tenant"):
            Chunks(Folder(tmp_path), bad)


# --- keys ---------------------------------------------------------------------------------------


def test_key_is_made_once_and_readable_by_its_owner_only(tmp_path):
    path = tmp_path / "run" / "signing.key"
    first = Signer.at(path)
    assert Signer.at(path).public == first.public
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_devices_that_start_together_have_one_key(tmp_path):
    found: list[str] = []
    start = threading.Barrier(8)

    def begin() -> None:
        start.wait()
        found.append(Signer.at(tmp_path / "signing.key").public)

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
