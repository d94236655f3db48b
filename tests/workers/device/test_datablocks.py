"""Datablocks in real residents: what is given, what is published, what stays on the host's disk."""

from __future__ import annotations

import io
import itertools
import os
import time

import numpy
import pytest
import torch
from safetensors.torch import load, save

from app.core.model.failure_causes import CAUSES
from app.core.model.protocol.messages import Failed, Finished, Paused, Saved, Started
from app.storage.store import Damaged, OtherBytes, Store, blob
from tests.s3 import serving
from tests.workers.bundle.blocks import digest
from tests.workers.conftest import DeviceRig
from workers.transfer.host_cache import LEFT_S, Cache

torch.manual_seed(5)
NAMED = {"a": torch.randn(700, 90), "b": torch.arange(9).to(torch.int16), "none": torch.ones(0, 3)}
ALONE = {"x": torch.randint(0, 99, (300, 40))}


def npy(array):
    out = io.BytesIO()
    numpy.save(out, array)
    return out.getvalue()


def block(rig, body, name="corpus", version=1):
    """A datablock in the store, as a Launch names it."""
    sha256, size = rig.store.put([body])
    format = "npy" if body.startswith(b"\x93NUMPY") else "safetensors"
    named = f"{name}@{version}"
    return {"sha256": sha256, "size_bytes": size, "format": format, "datablock": named}


def bytes_of(rig, kept):
    with rig.store.open(kept["sha256"]) as file:
        return file.read()


def shell(text):
    return ["bash", "-c", text]


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    """One device for all tests here: each of them has tasks of its own."""
    made = DeviceRig(tmp_path_factory.mktemp("rig"))
    made.open()
    yield made
    made.close()


numbers = itertools.count()


def launched(rig, run, **given):
    """A new task; its name."""
    task = f"t{next(numbers)}"
    rig.launch(task, run, **given)
    return task


def done(rig, run, **given):
    return rig.event(Finished, launched(rig, run, **given))


def failed(rig, run, **given):
    return rig.event(Failed, launched(rig, run, **given))


# --- what is given --------------------------------------------------------------------------------


def test_function_gets_tensors_by_name_or_the_only_one(rig):
    inputs = {
        "named": block(rig, save(NAMED), "named"),
        "alone": block(rig, save(ALONE), "alone"),
        "array": block(rig, npy(NAMED["a"].numpy()), "array"),
        "fortran": block(rig, npy(numpy.asfortranarray(NAMED["a"].numpy())), "fortran"),
        "number": block(rig, npy(numpy.float64(7)), "number"),
    }
    assert done(rig, "blocks:look", inputs=inputs).result["seen"] == {
        "named": digest(NAMED),
        "alone": digest(ALONE["x"]),
        "array": digest(NAMED["a"]),
        "fortran": digest(NAMED["a"]),
        "number": digest(torch.tensor(7.0, dtype=torch.float64)),
    }


def test_unaligned_tensors_are_given_too(rig):
    body = save(ALONE)
    end = 8 + int.from_bytes(body[:8], "little")
    shifted = (end - 8 + 3).to_bytes(8, "little") + body[8:end] + b"   " + body[end:]
    seen = done(rig, "blocks:look", inputs={"x": block(rig, shifted)}).result["seen"]
    assert seen == {"x": digest(ALONE["x"])}


def test_datablock_is_the_same_object_each_time_it_is_asked_for(rig):
    params = {"names": ["corpus", "corpus@3"]}
    x = block(rig, save(NAMED), version=3)
    finished = done(rig, "blocks:by_name", inputs={"x": x}, params=params)
    assert finished.result == {"same": [True, True]}


def test_undeclared_datablock_is_refused_with_advice(rig):
    told = failed(rig, "blocks:unnamed", inputs={"x": block(rig, save(NAMED))}).message
    assert 'inputs: {PORT: "datablock:pictures"}' in told
    assert "Declared: corpus@1." in told


@pytest.mark.parametrize("format", ["safetensors", "npy"])
@pytest.mark.parametrize("run", ["blocks:scribble", "command"])
def test_writing_to_a_tensor_does_not_reach_the_stored_bytes(run, format, rig):
    body = save(NAMED) if format == "safetensors" else npy(ALONE["x"].numpy())
    x = block(rig, body)
    if run == "command":
        run = shell("truncate -s 3 $ROUNDHOUSE_INPUTS/x.*")
    done(rig, run, inputs={"x": x})
    assert bytes_of(rig, x) == body  # the hash is checked
    seen = done(rig, "blocks:look", inputs={"x": x}).result["seen"]
    assert seen == {"x": digest(NAMED if format == "safetensors" else ALONE["x"])}


def test_job_that_keeps_a_datablock_resumes_from_its_image_with_the_same_bits(rig):
    x = block(rig, save(ALONE))
    params = {"steps": 100, "nap_s": 0.01}
    given = {"inputs": {"x": x}, "params": params, "outputs": ["made"]}
    alone = done(rig, "blocks:Sum", **given).result
    params["waits"] = True

    task = launched(rig, "blocks:Sum", **given)
    rig.steps(task, 3)
    rig.save(task)
    saved = rig.event(Saved, task)
    rig.cancel(task)
    rig.launch(task, "blocks:Sum", epoch=2, images=[rig.image(saved)], **given)
    assert rig.event(Started, task, epoch=2).step == saved.step
    rig.let_end(task, 2)
    assert rig.event(Finished, task, epoch=2).result == alone


LARGE = {"x": torch.randn(1000, 1000)}


@pytest.mark.parametrize("write_at", [0, 5])
def test_image_holds_what_a_job_wrote_and_only_refers_to_its_datablocks(write_at, rig):
    x = block(rig, save(LARGE))
    given = {"inputs": {"x": x}, "params": {"write_at": write_at, "steps": 50}}
    alone = done(rig, "blocks:Hold", **given).result
    given["params"]["waits"] = True
    assert (alone["tied"], alone["same"], alone["given"]) == (400_000, True, True)

    task = launched(rig, "blocks:Hold", **given)
    rig.steps(task, 10)
    rig.save(task)
    saved = rig.event(Saved, task)
    assert (saved.size_bytes < 100_000) == (not write_at)
    rig.cancel(task)
    rig.launch(task, "blocks:Hold", epoch=2, images=[rig.image(saved)], **given)
    assert rig.event(Started, task, epoch=2).step == saved.step
    rig.let_end(task, 2)
    again = rig.event(Finished, task, epoch=2).result
    assert {**again, "given": True} == alone
    assert again["given"] == (not write_at)  # the input itself is as it lies in the store


def test_image_without_its_datablock_is_refused_with_the_name(rig):
    given = {"inputs": {"x": block(rig, save(LARGE))}, "params": {"steps": 10**6}}
    task = launched(rig, "blocks:Hold", **given)
    rig.steps(task, 3)
    rig.save(task)
    image = rig.image(rig.event(Saved, task))
    rig.cancel(task)
    other = {**given, "inputs": {"x": block(rig, save(LARGE), version=2)}}
    rig.launch(task, "blocks:Hold", epoch=2, images=[image], **other)
    event = rig.event(Failed, task, epoch=2)
    assert event.cause == "image"
    assert "'x' of corpus@1, which is not among the inputs" in event.message


def test_datablock_of_a_paused_job_stays_where_it_was(rig):
    """Another takes its turn, and its memory is the kernel's to take back: nothing is moved."""
    given = {"inputs": {"x": block(rig, save(LARGE))}, "params": {"steps": 50}}
    alone = done(rig, "blocks:Hold", **given).result
    given["params"]["waits"] = True
    task = launched(rig, "blocks:Hold", **given)
    rig.steps(task, 5)
    rig.pause(task)
    rig.event(Paused, task)
    assert rig.event(Saved, task).size_bytes < 100_000
    done(rig, "blocks:look", inputs=given["inputs"])
    rig.launch(task, "blocks:Hold", epoch=2, **given)
    rig.event(Started, task, epoch=2)
    rig.let_end(task, 2)
    assert rig.event(Finished, task, epoch=2).result == alone


def test_command_finds_the_datablock_as_a_file(rig):
    inputs = {
        "a": block(rig, save(NAMED), "a"),
        "b": block(rig, npy(ALONE["x"].numpy()), "b"),
    }
    said = "cd $ROUNDHOUSE_INPUTS; ls; sha256sum a.safetensors b.npy"
    finished = done(rig, shell(said), inputs=inputs)
    assert rig.printed(finished.task) == [
        "a.safetensors",
        "b.npy",
        f"{inputs['a']['sha256']}  a.safetensors",
        f"{inputs['b']['sha256']}  b.npy",
    ]


def test_task_fails_if_the_bytes_of_its_datablock_are_lost(rig):
    x = block(rig, save(NAMED)) | {"sha256": "0" * 64}
    assert "is not there" in failed(rig, "blocks:look", inputs={"x": x}).message


# --- what is published ----------------------------------------------------------------------------

IDS = torch.from_numpy(numpy.random.default_rng(0).integers(0, 99, (20, 8)))


def test_published_value_of_a_function_is_a_file_of_tensors(rig):
    finished = done(rig, "blocks:tokens", outputs=["alone", "tokens"], publish=["tokens"])
    kept, image = finished.outputs["tokens"], finished.outputs["alone"]
    assert finished.result == {"count": 160}
    assert image.keys() == {"sha256", "size_bytes", "head_bytes"}
    assert 0 < image["head_bytes"] == image["size_bytes"] - IDS.numel() * 8 < 2000
    assert (kept["format"], kept["tensor_count"]) == ("safetensors", 3)
    assert {"name": "ids", "dtype": "int64", "shape": [8, 20]} in kept["tensors"]
    loaded = load(bytes_of(rig, kept))
    assert torch.equal(loaded["ids"], IDS.t())
    assert loaded["scale"].dtype is torch.bfloat16
    # Another task of the request takes it as it would take the datablock; the other one as it was.
    seen = done(rig, "blocks:look", inputs={"x": kept, "y": image}).result["seen"]
    assert seen == {"x": digest(loaded), "y": digest(IDS)}


def test_unnamed_tensor_is_read_back_as_one_tensor(rig):
    given = {"outputs": ["alone", "tokens"], "publish": ["alone"]}
    kept = done(rig, "blocks:tokens", **given).outputs["alone"]
    seen = done(rig, "blocks:look", inputs={"x": kept}).result["seen"]
    assert seen == {"x": digest(IDS)}


def test_job_publishes_the_result_it_finishes_with(rig):
    x = block(rig, save(ALONE))
    given = {"inputs": {"x": x}, "outputs": ["made"], "publish": ["made"]}
    kept = done(rig, "blocks:Sum", **given).outputs["made"]
    assert torch.equal(load(bytes_of(rig, kept))["tensor"], ALONE["x"][:2] + 1)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("a list", "result['tokens'] is a list: a datablock is a tensor"),
        ("a number in a dict", "result['tokens']['y'] is a int"),
        ("a number for a name", "the name of a tensor must be a text"),
        ("sparse", "not a plain dense tensor"),
        ("texts", "result['tokens']"),
        ("complex128", "does not support complex128"),
    ],
)
def test_value_that_cannot_be_published_fails_the_task_with_its_place(what, told, rig):
    given = {"params": {"what": what}, "outputs": ["tokens"], "publish": ["tokens"]}
    event = failed(rig, "blocks:bad", **given)
    assert told in event.message
    assert event.cause == "exception"


def test_command_publishes_a_file_that_it_wrote(rig):
    body = save(NAMED)
    script = "cp $ROUNDHOUSE_INPUTS/x.safetensors tokens.safetensors"
    given = {"inputs": {"x": block(rig, body)}, "outputs": ["tokens"], "publish": ["tokens"]}
    kept = done(rig, shell(script), **given).outputs["tokens"]
    assert bytes_of(rig, kept) == body
    assert (kept["format"], kept["tensor_count"]) == ("safetensors", 3)


def test_command_that_wrote_no_tensors_is_told_so(rig):
    event = failed(rig, shell("echo hello > t.npy"), outputs=["t"], publish=["t"])
    assert "t.npy is to be published, but is not a safetensors or npy file" in event.message


def test_resident_that_sends_no_tensors_is_ended(rig, monkeypatch):
    """Its own code would not, but a tenant's may speak for it."""
    monkeypatch.setattr("workers.device.store_io.HEAD_BYTES", 4)  # as if the rest were not there
    event = failed(rig, "blocks:tokens", outputs=["alone", "tokens"], publish=["tokens"])
    assert "invalid message" in event.message
    assert CAUSES[event.cause]


# --- what is read from the store ------------------------------------------------------------------


def test_second_task_on_a_host_does_not_read_the_store_again(rig):
    x = block(rig, save({"of": torch.ones(77)}))
    size = x["size_bytes"]
    read = []
    for _ in range(2):
        task = done(rig, "blocks:look", inputs={"x": x}).task
        started = rig.event(Started, task)
        read.append((started.input_bytes, started.fetched_bytes))
        blob = rig.store.place.path(f"blobs/{x['sha256'][:2]}/{x['sha256']}")
        blob.unlink(missing_ok=True)
    assert read == [(size, size), (size, 0)]


def test_each_task_reads_the_store_if_the_cache_has_no_room(rigs):
    rig = rigs(host_cache_bytes=0)
    x = block(rig, save(ALONE))
    for _ in range(2):
        task = done(rig, "blocks:look", inputs={"x": x}).task
        assert rig.event(Started, task).fetched_bytes == x["size_bytes"]


# --- a part of what lies in the store -------------------------------------------------------------


@pytest.fixture(scope="module")
def s3():
    with serving() as server:
        yield server


@pytest.fixture(params=["folder", "s3"])
def anywhere(request, tmp_path):
    if request.param == "folder":
        return Store.at(tmp_path / "store")
    return Store(request.getfixturevalue("s3").bucket())


def test_part_of_a_blob_is_read_alone_and_the_whole_is_verified(anywhere):
    body = bytes(range(256)) * 20_000
    sha256, size = anywhere.put([body])

    def read(start, end, *, whole):
        return b"".join(anywhere.read(sha256, start, end, whole=whole))

    assert read(0, size, whole=True) == body
    for start, end in ((0, 1), (7, 3_000_000), (size - 1, size)):
        assert read(start, end, whole=False) == body[start:end]
    with pytest.raises(Damaged, match="is not there"):
        anywhere.read("0" * 64, 0, 1, whole=False)
    other, _ = anywhere.put([b"other"])
    anywhere.place.delete(blob(other))
    anywhere.place.keep([body], lambda: blob(other))  # as if its disk had lost its mind
    pieces = []
    with pytest.raises(Damaged, match="hash to"):
        pieces.extend(anywhere.read(other, 0, size, whole=True))
    assert 0 < len(b"".join(pieces)) < size


def test_cache_keeps_no_bytes_under_a_wrong_hash(anywhere):
    with pytest.raises(OtherBytes, match="hash to"):
        anywhere.put([b"some bytes"], promised="0" * 64)
    assert not anywhere.has("0" * 64)


class Far(Store):
    """A store that is not on this file system: what it opens has no name here."""

    def open(self, sha256):
        import tempfile

        file = tempfile.TemporaryFile()  # noqa: SIM115
        with super().open(sha256) as near:
            file.write(near.read())
        file.seek(0)
        return file


@pytest.mark.parametrize("kind", [Store, Far])
class TestCache:
    @pytest.fixture
    def store(self, kind, tmp_path):
        return kind(Store.at(tmp_path / "store").place)

    def put(self, store, n, size=100):
        return store.put([bytes([n]) * size])[0]

    def taken(self, cache, sha256, store):
        opened = cache.opened(sha256, store)
        with os.fdopen(opened.fd, "rb") as file:
            assert file.tell() == 0
            return file.read(), opened.is_fetched

    def test_second_request_is_served_from_the_cache(self, store, tmp_path):
        cache = Cache(tmp_path / "cache", 1000)
        sha256 = self.put(store, 1)
        assert self.taken(cache, sha256, store) == (b"\x01" * 100, True)
        assert self.taken(cache, sha256, store) == (b"\x01" * 100, False)
        assert self.taken(Cache(tmp_path / "cache", 1000), sha256, store)[1] is False

    def test_least_recently_used_block_is_dropped_first(self, store, tmp_path):
        cache = Cache(tmp_path / "cache", 250)
        one, two, three = (self.put(store, n) for n in (1, 2, 3))
        for n, sha256 in enumerate((one, two)):
            self.taken(cache, sha256, store)
            os.utime(cache.folder / sha256, (n, n))
        self.taken(cache, one, store)  # used again
        self.taken(cache, three, store)
        assert {entry.name for entry in cache.folder.iterdir()} == {one, three}

    def test_block_larger_than_the_cache_is_not_kept(self, store, tmp_path):
        cache = Cache(tmp_path / "cache", 250)
        small, large = self.put(store, 1), self.put(store, 2, size=300)
        self.taken(cache, small, store)
        assert self.taken(cache, large, store) == (b"\x02" * 300, True)
        assert [entry.name for entry in cache.folder.iterdir()] == [small]

    def test_process_with_an_open_block_keeps_it(self, store, tmp_path):
        cache = Cache(tmp_path / "cache", 150)
        one, two = self.put(store, 1), self.put(store, 2)
        self.taken(cache, one, store)
        held = cache.opened(one, store)
        self.taken(cache, two, store)
        assert not (cache.folder / one).exists()
        with os.fdopen(held.fd, "rb") as file:
            assert file.read() == b"\x01" * 100

    def test_a_full_disk_only_costs_another_read(self, store, tmp_path, monkeypatch):
        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("workers.transfer.host_cache.link_or_copy", full)
        cache = Cache(tmp_path / "cache", 1000)
        sha256 = self.put(store, 1)
        for _ in range(2):
            assert self.taken(cache, sha256, store) == (b"\x01" * 100, True)
        assert list(cache.folder.iterdir()) == []

    def test_files_left_by_a_killed_worker_are_deleted_later(self, store, tmp_path):
        cache = Cache(tmp_path / "cache", 1000)
        for name, age_s in ((".old", LEFT_S + 60), (".new", 0)):
            (cache.folder / name).mkdir(parents=True)
            (cache.folder / name / "body").write_bytes(b"half")
            os.utime(cache.folder / name, (time.time() - age_s,) * 2)
        sha256 = self.put(store, 1)
        self.taken(cache, sha256, store)
        assert {entry.name for entry in cache.folder.iterdir()} == {".new", sha256}

    def test_many_simultaneous_readers_get_the_same_bytes(self, store, tmp_path):
        from concurrent.futures import ThreadPoolExecutor

        shas = [self.put(store, n) for n in range(4)]
        cache = Cache(tmp_path / "cache", 250)  # so they push each other out as well
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda n: self.taken(cache, shas[n % 4], store)[0], range(200)))
        assert all(body == bytes([n % 4]) * 100 for n, body in enumerate(found))
