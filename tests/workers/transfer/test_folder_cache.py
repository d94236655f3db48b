"""Folders of datablocks on the disk of a host: their bytes lie there once, and none goes in use."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

import pytest

from app.core.model.provisions.folder import BadFolderManifest, FolderFile, encoded, folder_of
from app.storage.store import Damaged, Store, blob
from workers.transfer import folder_cache
from workers.transfer.folder_cache import CONTENT, BuiltFolder, FolderBeyondCache
from workers.transfer.host_cache import BODY, Cache

FILES = {"a.txt": b"alpha", "deep/er/b.txt": b"beta" * 100, "same": b"alpha", "empty": b""}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.at(tmp_path / "store")


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "run" / "cache", 10_000)


def put(store: Store, files: dict[str, bytes], run: tuple[str, ...] = ()) -> tuple[str, bytes]:
    """Store the files of a folder; return the name and the bytes of its manifest."""
    rows = []
    for path, body in files.items():
        sha256 = hashlib.sha256(body).hexdigest()
        if body:
            store.put([body])
        rows.append(
            FolderFile(path=path, size_bytes=len(body), sha256=sha256, executable=path in run)
        )
    manifest = encoded(folder_of(rows))
    return hashlib.sha256(manifest).hexdigest(), manifest


def build(
    store: Store, cache: Cache, files: dict[str, bytes], **more: tuple[str, ...]
) -> BuiltFolder:
    return folder_cache.built(*put(store, files, **more), cache, store)


def contents(folder: BuiltFolder) -> dict[str, bytes]:
    root = folder.entry / CONTENT
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def test_folder_has_its_files_and_everybody_may_read_them(store, cache):
    folder = build(store, cache, FILES, run=("same",))
    assert contents(folder) == FILES
    assert (folder.size_bytes, folder.fetched_bytes) == (410, 405)  # equal files are read once
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.entry.rglob("*")}
    assert modes["deep"] == modes["er"] == modes[CONTENT] == 0o755
    assert modes["a.txt"] == modes["b.txt"] == modes["empty"] == 0o444
    assert modes["same"] == 0o555
    assert stat.S_IMODE(cache.folder.stat().st_mode) & 0o077 == 0  # nobody else comes to it
    os.close(folder.lock)


def test_bytes_lie_on_the_disk_once_for_all_folders_that_have_them(store, cache):
    first = build(store, cache, FILES)
    name = hashlib.sha256(FILES["deep/er/b.txt"]).hexdigest()
    kept = (store.place.root / blob(name)).stat().st_ino  # the store is on the same disk
    again = build(store, cache, FILES)
    changed = build(store, cache, {**FILES, "a.txt": b"other"})
    assert again.entry == first.entry
    assert (again.fetched_bytes, changed.fetched_bytes) == (0, 5)  # only what has changed
    assert (cache.folder / name / BODY).stat().st_ino == kept
    for folder in (first, changed):
        assert (folder.entry / CONTENT / "deep/er/b.txt").stat().st_ino == kept
    for folder in (first, again, changed):
        os.close(folder.lock)


def test_folder_stays_while_it_is_in_use_and_goes_when_others_need_the_room(store, cache):
    used, unused = build(store, cache, {"a": b"1" * 4000}), build(store, cache, {"b": b"2" * 4000})
    os.close(unused.lock)
    for n in range(3):
        os.close(build(store, cache, {"c": bytes([65 + n]) * 8000}).lock)
    assert contents(used) == {"a": b"1" * 4000}
    assert not unused.entry.exists()
    os.close(used.lock)
    os.close(build(store, cache, {"d": b"4" * 8000}).lock)
    os.close(build(store, cache, {"e": b"5" * 8000}).lock)
    assert not used.entry.exists()


def test_folder_of_an_earlier_boot_is_built_again(store, cache, monkeypatch):
    first = build(store, cache, FILES)
    os.close(first.lock)
    torn = first.entry / CONTENT / "a.txt"
    torn.unlink()
    torn.write_bytes(b"torn")
    monkeypatch.setattr(folder_cache, "boot_name", lambda: "body.of-the-next-boot")
    again = build(store, cache, FILES)
    assert contents(again) == FILES
    os.close(again.lock)


def test_folder_larger_than_the_cache_is_refused(store, tmp_path):
    small = Cache(tmp_path / "small", 400)
    with pytest.raises(FolderBeyondCache, match=r"410 bytes.*takes 400.*HOST_CACHE_BYTES"):
        build(store, small, FILES)


def test_folder_whose_file_is_lost_or_whose_manifest_is_forged_is_not_built(store, cache):
    sha256, manifest = put(store, FILES)
    store.place.delete(blob(hashlib.sha256(b"alpha").hexdigest()))
    with pytest.raises(Damaged):
        folder_cache.built(sha256, manifest, cache, store)
    forged = manifest.replace(b"a.txt", b"../ab")
    with pytest.raises(BadFolderManifest):
        folder_cache.built(sha256, forged, cache, store)
    assert not [path for path in cache.folder.iterdir() if path.name.startswith((".", sha256))]
