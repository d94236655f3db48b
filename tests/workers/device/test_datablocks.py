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

from app.core.model.messages import CAUSES, Failed, Finished, Paused, Saved, Started
from app.storage.store import Damaged, OtherBytes, Store, blob
from tests.s3 import serving
from tests.workers.bundle.blocks import digest
from tests.workers.conftest import Ground
from workers.transfer.host_cache import LEFT_S, Cache

torch.manual_seed(5)
NAMED = {"a": torch.randn(700, 90), "b": torch.arange(9).to(torch.int16), "none": torch.ones(0, 3)}
ALONE = {"x": torch.randint(0, 99, (300, 40))}


def npy(array):
    out = io.BytesIO()
    numpy.save(out, array)
    return out.getvalue()


def block(ground, body, name="corpus", version=1):
    """A datablock in the store, as a Launch names it."""
    sha256, size = ground.store.put([body])
    format = "npy" if body.startswith(b"\x93NUMPY") else "safetensors"
    named = f"{name}@{version}"
    return {"sha256": sha256, "size_bytes": size, "format": format, "datablock": named}


def bytes_of(ground, kept):
    with ground.store.open(kept["sha256"]) as file:
        return file.read()


def shell(text):
    return ["bash", "-c", text]


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    """One device for all tests here: each of them has tasks of its own."""
    made = Ground(tmp_path_factory.mktemp("ground"))
    made.open()
    yield made
    made.close()


numbers = itertools.count()


def launched(ground, run, **given):
    """A new task; its name."""
    task = f"t{next(numbers)}"
    ground.launch(task, run, **given)
    return task


def done(ground, run, **given):
    return ground.event(Finished, launched(ground, run, **given))


def failed(ground, run, **given):
    return ground.event(Failed, launched(ground, run, **given))


# --- what is given --------------------------------------------------------------------------------


def test_a_function_is_given_tensors_by_name_or_the_one_there_is(ground):
    inputs = {
        "named": block(ground, save(NAMED), "named"),
        "alone": block(ground, save(ALONE), "alone"),
        "array": block(ground, npy(NAMED["a"].numpy()), "array"),
        "fortran": block(ground, npy(numpy.asfortranarray(NAMED["a"].numpy())), "fortran"),
        "number": block(ground, npy(numpy.float64(7)), "number"),
    }
    assert done(ground, "blocks:look", inputs=inputs).result["seen"] == {
        "named": digest(NAMED),
        "alone": digest(ALONE["x"]),
        "array": digest(NAMED["a"]),
        "fortran": digest(NAMED["a"]),
        "number": digest(torch.tensor(7.0, dtype=torch.float64)),
    }


def test_tensors_that_are_not_aligned_are_given_as_well(ground):
    body = save(ALONE)
    end = 8 + int.from_bytes(body[:8], "little")
    shifted = (end - 8 + 3).to_bytes(8, "little") + body[8:end] + b"   " + body[end:]
    seen = done(ground, "blocks:look", inputs={"x": block(ground, shifted)}).result["seen"]
    assert seen == {"x": digest(ALONE["x"])}


def test_by_its_name_it_is_the_same_object(ground):
    params = {"names": ["corpus", "corpus@3"]}
    x = block(ground, save(NAMED), version=3)
    finished = done(ground, "blocks:by_name", inputs={"x": x}, params=params)
    assert finished.result == {"same": [True, True]}


def test_one_that_is_not_declared_is_told_with_what_to_do(ground):
    told = failed(ground, "blocks:unnamed", inputs={"x": block(ground, save(NAMED))}).message
    assert 'inputs: {PORT: "datablock:pictures"}' in told
    assert "Declared: corpus@1." in told


@pytest.mark.parametrize("format", ["safetensors", "npy"])
@pytest.mark.parametrize("run", ["blocks:scribble", "command"])
def test_what_is_written_to_it_does_not_reach_the_stored_bytes(run, format, ground):
    body = save(NAMED) if format == "safetensors" else npy(ALONE["x"].numpy())
    x = block(ground, body)
    if run == "command":
        run = shell("truncate -s 3 $ROUNDHOUSE_INPUTS/x.*")
    done(ground, run, inputs={"x": x})
    assert bytes_of(ground, x) == body  # the hash is checked
    seen = done(ground, "blocks:look", inputs={"x": x}).result["seen"]
    assert seen == {"x": digest(NAMED if format == "safetensors" else ALONE["x"])}


def test_a_job_that_holds_on_to_it_goes_on_from_its_image_with_the_same_bits(ground):
    x = block(ground, save(ALONE))
    params = {"steps": 300, "nap_s": 0.01}
    given = {"inputs": {"x": x}, "params": params, "outputs": ["made"]}
    alone = done(ground, "blocks:Sum", **given).result

    task = launched(ground, "blocks:Sum", **given)
    ground.steps(task, 3)
    ground.save(task)
    saved = ground.event(Saved, task)
    ground.cancel(task)
    ground.launch(task, "blocks:Sum", epoch=2, images=[ground.image(saved)], **given)
    assert ground.event(Started, task, epoch=2).step == saved.step
    assert ground.event(Finished, task, epoch=2).result == alone


LARGE = {"x": torch.randn(1000, 1000)}


@pytest.mark.parametrize("write_at", [0, 5])
def test_an_image_holds_what_a_job_wrote_and_only_refers_to_what_it_was_given(write_at, ground):
    x = block(ground, save(LARGE))
    given = {"inputs": {"x": x}, "params": {"write_at": write_at, "steps": 150}}
    alone = done(ground, "blocks:Hold", **given).result
    assert (alone["tied"], alone["same"], alone["given"]) == (400_000, True, True)

    task = launched(ground, "blocks:Hold", **given)
    ground.steps(task, 10)
    ground.save(task)
    saved = ground.event(Saved, task)
    assert (saved.size_bytes < 100_000) == (not write_at)
    ground.cancel(task)
    ground.launch(task, "blocks:Hold", epoch=2, images=[ground.image(saved)], **given)
    assert ground.event(Started, task, epoch=2).step == saved.step
    again = ground.event(Finished, task, epoch=2).result
    assert {**again, "given": True} == alone
    assert again["given"] == (not write_at)  # the input itself is as it lies in the store


def test_an_image_whose_datablock_is_not_there_says_so(ground):
    given = {"inputs": {"x": block(ground, save(LARGE))}, "params": {"steps": 150}}
    task = launched(ground, "blocks:Hold", **given)
    ground.steps(task, 3)
    ground.save(task)
    image = ground.image(ground.event(Saved, task))
    ground.cancel(task)
    other = {**given, "inputs": {"x": block(ground, save(LARGE), version=2)}}
    ground.launch(task, "blocks:Hold", epoch=2, images=[image], **other)
    event = ground.event(Failed, task, epoch=2)
    assert event.cause == "image"
    assert "'x' of corpus@1, which is no input of this task" in event.message


def test_paused_it_lies_where_it_was(ground):
    """Another takes its turn, and its memory is the kernel's to take back: nothing is moved."""
    given = {"inputs": {"x": block(ground, save(LARGE))}, "params": {"steps": 100}}
    alone = done(ground, "blocks:Hold", **given).result
    task = launched(ground, "blocks:Hold", **given)
    ground.steps(task, 5)
    ground.pause(task)
    ground.event(Paused, task)
    assert ground.event(Saved, task).size_bytes < 100_000
    done(ground, "blocks:look", inputs=given["inputs"])
    ground.launch(task, "blocks:Hold", epoch=2, **given)
    assert ground.event(Finished, task, epoch=2).result == alone


def test_a_command_finds_the_file_itself(ground):
    inputs = {
        "a": block(ground, save(NAMED), "a"),
        "b": block(ground, npy(ALONE["x"].numpy()), "b"),
    }
    said = "cd $ROUNDHOUSE_INPUTS; ls; sha256sum a.safetensors b.npy"
    finished = done(ground, shell(said), inputs=inputs)
    assert ground.printed(finished.task) == [
        "a.safetensors",
        "b.npy",
        f"{inputs['a']['sha256']}  a.safetensors",
        f"{inputs['b']['sha256']}  b.npy",
    ]


def test_one_whose_bytes_are_lost_fails_its_task(ground):
    x = block(ground, save(NAMED)) | {"sha256": "0" * 64}
    assert "is not there" in failed(ground, "blocks:look", inputs={"x": x}).message


# --- what is published ----------------------------------------------------------------------------

IDS = torch.from_numpy(numpy.random.default_rng(0).integers(0, 99, (20, 8)))


def test_what_a_function_publishes_is_a_file_of_tensors(ground):
    finished = done(ground, "blocks:tokens", outputs=["alone", "tokens"], publish=["tokens"])
    kept, image = finished.outputs["tokens"], finished.outputs["alone"]
    assert finished.result == {"count": 160}
    assert image.keys() == {"sha256", "size_bytes", "head_bytes"}
    assert 0 < image["head_bytes"] == image["size_bytes"] - IDS.numel() * 8 < 2000
    assert (kept["format"], kept["tensor_count"]) == ("safetensors", 3)
    assert {"name": "ids", "dtype": "int64", "shape": [8, 20]} in kept["tensors"]
    loaded = load(bytes_of(ground, kept))
    assert torch.equal(loaded["ids"], IDS.t())
    assert loaded["scale"].dtype is torch.bfloat16
    # Another task of the request takes it as it would take the datablock; the other one as it was.
    seen = done(ground, "blocks:look", inputs={"x": kept, "y": image}).result["seen"]
    assert seen == {"x": digest(loaded), "y": digest(IDS)}


def test_a_tensor_without_a_name_comes_back_as_one(ground):
    given = {"outputs": ["alone", "tokens"], "publish": ["alone"]}
    kept = done(ground, "blocks:tokens", **given).outputs["alone"]
    seen = done(ground, "blocks:look", inputs={"x": kept}).result["seen"]
    assert seen == {"x": digest(IDS)}


def test_a_job_publishes_what_it_finishes_with(ground):
    x = block(ground, save(ALONE))
    given = {"inputs": {"x": x}, "outputs": ["made"], "publish": ["made"]}
    kept = done(ground, "blocks:Sum", **given).outputs["made"]
    assert torch.equal(load(bytes_of(ground, kept))["tensor"], ALONE["x"][:2] + 1)


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
def test_what_cannot_be_published_fails_the_task_with_the_place(what, told, ground):
    given = {"params": {"what": what}, "outputs": ["tokens"], "publish": ["tokens"]}
    event = failed(ground, "blocks:bad", **given)
    assert told in event.message
    assert event.cause == "exception"


def test_a_command_publishes_a_file_that_it_wrote(ground):
    body = save(NAMED)
    script = "cp $ROUNDHOUSE_INPUTS/x.safetensors tokens.safetensors"
    given = {"inputs": {"x": block(ground, body)}, "outputs": ["tokens"], "publish": ["tokens"]}
    kept = done(ground, shell(script), **given).outputs["tokens"]
    assert bytes_of(ground, kept) == body
    assert (kept["format"], kept["tensor_count"]) == ("safetensors", 3)


def test_a_command_that_wrote_something_else_is_told_so(ground):
    event = failed(ground, shell("echo hello > t.npy"), outputs=["t"], publish=["t"])
    assert "t.npy is to be published, but is not a safetensors or npy file" in event.message


def test_a_resident_that_sends_no_tensors_is_ended(ground, monkeypatch):
    """Its own code would not, but a tenant's may speak for it."""
    monkeypatch.setattr("workers.device.store_io.HEAD_BYTES", 4)  # as if the rest were not there
    event = failed(ground, "blocks:tokens", outputs=["alone", "tokens"], publish=["tokens"])
    assert "invalid message" in event.message
    assert CAUSES[event.cause]


# --- what is read from the store ------------------------------------------------------------------


def test_a_second_task_on_the_host_does_not_read_the_store_again(ground):
    x = block(ground, save({"of": torch.ones(77)}))
    size = x["size_bytes"]
    read = []
    for _ in range(2):
        task = done(ground, "blocks:look", inputs={"x": x}).task
        started = ground.event(Started, task)
        read.append((started.input_bytes, started.fetched_bytes))
        blob = ground.store.place.path(f"blobs/{x['sha256'][:2]}/{x['sha256']}")
        blob.unlink(missing_ok=True)
    assert read == [(size, size), (size, 0)]


def test_without_room_for_it_each_task_reads_the_store(grounds):
    ground = grounds(host_cache_bytes=0)
    x = block(ground, save(ALONE))
    for _ in range(2):
        task = done(ground, "blocks:look", inputs={"x": x}).task
        assert ground.event(Started, task).fetched_bytes == x["size_bytes"]


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


def test_a_part_of_a_blob_is_read_alone_and_the_whole_is_checked(anywhere):
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


def test_nothing_is_kept_under_a_hash_that_it_has_not(anywhere):
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

    def test_the_second_time_it_is_here(self, store, tmp_path):
        cache = Cache(tmp_path / "cache", 1000)
        sha256 = self.put(store, 1)
        assert self.taken(cache, sha256, store) == (b"\x01" * 100, True)
        assert self.taken(cache, sha256, store) == (b"\x01" * 100, False)
        assert self.taken(Cache(tmp_path / "cache", 1000), sha256, store)[1] is False

    def test_what_was_used_longest_ago_goes_first(self, store, tmp_path):
        cache = Cache(tmp_path / "cache", 250)
        one, two, three = (self.put(store, n) for n in (1, 2, 3))
        for n, sha256 in enumerate((one, two)):
            self.taken(cache, sha256, store)
            os.utime(cache.folder / sha256, (n, n))
        self.taken(cache, one, store)  # used again
        self.taken(cache, three, store)
        assert {entry.name for entry in cache.folder.iterdir()} == {one, three}

    def test_what_is_larger_than_all_of_it_is_not_kept(self, store, tmp_path):
        cache = Cache(tmp_path / "cache", 250)
        small, large = self.put(store, 1), self.put(store, 2, size=300)
        self.taken(cache, small, store)
        assert self.taken(cache, large, store) == (b"\x02" * 300, True)
        assert [entry.name for entry in cache.folder.iterdir()] == [small]

    def test_whoever_has_it_open_keeps_it(self, store, tmp_path):
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

        monkeypatch.setattr("workers.transfer.host_cache._lay_down", full)
        cache = Cache(tmp_path / "cache", 1000)
        sha256 = self.put(store, 1)
        for _ in range(2):
            assert self.taken(cache, sha256, store) == (b"\x01" * 100, True)
        assert list(cache.folder.iterdir()) == []

    def test_what_a_killed_worker_left_goes_after_a_while(self, store, tmp_path):
        cache = Cache(tmp_path / "cache", 1000)
        for name, age_s in ((".old", LEFT_S + 60), (".new", 0)):
            (cache.folder / name).mkdir(parents=True)
            (cache.folder / name / "body").write_bytes(b"half")
            os.utime(cache.folder / name, (time.time() - age_s,) * 2)
        sha256 = self.put(store, 1)
        self.taken(cache, sha256, store)
        assert {entry.name for entry in cache.folder.iterdir()} == {".new", sha256}

    def test_many_at_once_get_the_same(self, store, tmp_path):
        from concurrent.futures import ThreadPoolExecutor

        shas = [self.put(store, n) for n in range(4)]
        cache = Cache(tmp_path / "cache", 250)  # so they push each other out as well
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda n: self.taken(cache, shas[n % 4], store)[0], range(200)))
        assert all(body == bytes([n % 4]) * 100 for n, body in enumerate(found))
