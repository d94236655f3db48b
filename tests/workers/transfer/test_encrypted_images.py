"""Images that are encrypted: written, read, and not to be read without their key."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app.core.model.checkpoints.manifest import About, BadManifest, as_json, encode, from_json
from app.storage.backend import Folder
from app.storage.chunk_cipher import ChunkCipher, Ciphers, NoImageKey
from app.storage.signing import Signer
from app.storage.store import Damaged, Store
from tests.workers.slabs import KB, MB, Slab, new_slab, parts_of
from workers.transfer import checkpoint
from workers.transfer.checkpoint import BesideImage, FoundImage, Known, Written

ABOUT = About(tenant="ten_a", task="tsk_a", epoch=1, step=1)
CIPHER = ChunkCipher(b"k" * 32)
MARKER = b"a secret in a page of memory"
SIZES = [6 * MB, 300 * KB, 10, 0, 2000]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(Folder(tmp_path / "store"))


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer.at(tmp_path / "signing.key")


@pytest.fixture
def slab() -> Slab:
    made = Slab(SIZES)
    made.fill(0, made.random.randbytes(3 * MB) + MARKER + bytes(3 * MB - len(MARKER)))
    return made


def write(slab: Slab, store: Store, signer: Signer, known: Known, cipher=CIPHER) -> Written:
    beside = Slab([2 * MB], seed=3)
    beside.fill(0, MARKER * (2 * MB // len(MARKER)) + bytes(2 * MB % len(MARKER)))
    return checkpoint.write(
        *(slab.fd, slab.layout, ABOUT),
        tensors={},
        store=store,
        signer=signer,
        known=known,
        beside=[memoryview(part) for part in beside.parts()],
        cipher=cipher,
    )


def read(sha256: str, store: Store, signer: Signer, ciphers: Ciphers) -> tuple[FoundImage, int]:
    into = new_slab()
    found = checkpoint.read(
        sha256, into=into, tenant="ten_a", key=signer.public, store=store, ciphers=ciphers
    )
    return found, into


def all_bytes(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_encrypted_image_is_read_back_and_no_object_of_it_shows_its_bytes(
    store, signer, slab, tmp_path
):
    written = write(slab, store, signer, Known())
    found, into = read(written.sha256, store, signer, {CIPHER.id: CIPHER})
    assert parts_of(into, found.layout) == slab.parts()
    os.close(into)
    beside = BesideImage.of(found.manifest, store=store, ciphers={CIPHER.id: CIPHER})
    assert beside.read(1).startswith(MARKER)
    assert MARKER not in all_bytes(tmp_path / "store")
    write(slab, store, signer, Known(), cipher=None)
    assert MARKER in all_bytes(tmp_path / "store")  # so it would have been found


def test_second_image_with_the_same_key_is_shared_and_one_with_another_key_is_not(
    store, signer, slab
):
    known = Known()
    first = write(slab, store, signer, known)
    assert write(slab, store, signer, known).new_bytes == 0
    assert write(slab, store, signer, Known()).new_bytes == 0  # another process, another task
    for cipher in (ChunkCipher(b"n" * 32), None):
        other = write(slab, store, signer, known, cipher)
        assert other.new_bytes > first.new_bytes * 0.99
        found, into = read(other.sha256, store, signer, {cipher.id: cipher} if cipher else {})
        assert parts_of(into, found.layout) == slab.parts()
        os.close(into)


def test_image_whose_key_is_not_here_is_not_said_to_be_damaged(store, signer, slab):
    written = write(slab, store, signer, Known())
    other = ChunkCipher(b"n" * 32)
    for ciphers in ({}, {other.id: other}):
        with pytest.raises(NoImageKey, match="its key is not here"):
            read(written.sha256, store, signer, ciphers)


def test_chunks_of_two_images_that_change_places_are_refused_by_name(store, signer, slab):
    """Both are this tenant's and have this key; the first has 6 MiB, cut at the same places."""
    written = write(slab, store, signer, Known())
    other = Slab(SIZES, seed=9)
    write(other, store, signer, Known())
    manifest = store.manifest("ten_a", written.sha256, key=signer.public)
    chunks = store.chunks("ten_a", CIPHER)
    one, two = (chunk.address for chunk in manifest.ranks[0].chunks[1:3])
    taken = store.place.get(chunks.name(two))
    store.place.keep([taken], lambda: chunks.name(one))
    with pytest.raises(Damaged, match=rf"chunk {one[:16]}.*another chunk"):
        read(written.sha256, store, signer, {CIPHER.id: CIPHER})


def test_manifest_names_the_key_and_none_where_nothing_is_encrypted(store, signer, slab):
    encrypted = write(slab, store, signer, Known())
    plain = write(slab, store, signer, Known(), cipher=None)
    one, two = (
        store.manifest("ten_a", each.sha256, key=signer.public) for each in (encrypted, plain)
    )
    assert (one.image_key, two.image_key) == (CIPHER.id, "")
    assert b"image_key" not in encode(two)
    for bad in ("x", "AB" * 16, "a" * 31, 7, None):
        with pytest.raises(BadManifest, match="image_key"):
            from_json({**as_json(one), "image_key": bad})
