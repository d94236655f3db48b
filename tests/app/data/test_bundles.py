"""Bundles that are taken in; those that are refused are in test_bad_input.py."""

from __future__ import annotations

import io
import random
import tarfile
import zipfile

import pytest

from app.data import bundles, datablocks
from app.data.uploads import PART_BYTES
from app.errors import BadInput
from app.settings import settings
from app.storage.store import UPLOADS, Store
from tests.app.conftest import BUNDLE, JOB, broken, problem, sha256, zipped, zipped_as

PUT = f"/v1/bundles/{sha256(BUNDLE)}"


def tarred(mode="w:gz", **files):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:
        folder = tarfile.TarInfo("./pkg")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, body in files.items():
            member = tarfile.TarInfo(f"./{name.replace('__', '/')}.py")
            member.size = len(body)
            archive.addfile(member, io.BytesIO(body.encode()))
    return out.getvalue()


@pytest.fixture
def inspect(tmp_path):
    def inspect(body):
        (tmp_path / "bundle").write_bytes(body)
        return bundles.inspect(tmp_path / "bundle")

    return inspect


def test_bundle_of_many_small_files_or_of_zeros_is_taken(inspect):
    many = {f"data/{n % 100}/{n}.txt": str(n) for n in range(20_000)}
    found = inspect(zipped(**many))
    assert found.files == 20_000
    zeros = "\0" * (8 * 2**20)
    assert inspect(zipped(**{"zeros.bin": zeros})).unpacked_bytes == len(zeros)


@pytest.mark.parametrize(
    "files",
    [{"a": "\0" * 33 * 2**20, "b": "\0" * 32 * 2**20}, {f"{n}/a": "" for n in range(33_000)}],
    ids=["bytes", "number"],
)
def test_bundle_that_unpacks_to_too_much_is_refused(inspect, files):
    with pytest.raises(BadInput, match="67108864 bytes when unpacked"):
        inspect(zipped(**files))


class TestPut:
    def test_bundle_is_stored_and_its_entry_points_are_listed(self, as_):
        answer = as_("red.member").put(PUT, content=BUNDLE)
        assert answer.status_code == 201, answer.text
        body = answer.json()
        assert body["entry_points"] == {"train:Train": "class", "train:encode": "function"}
        assert (body["files"], body["size_bytes"]) == (1, len(BUNDLE))
        with Store.at(settings().store_address).open(sha256(BUNDLE)) as stored:
            assert stored.read() == BUNDLE

    def test_sending_a_bundle_twice_is_no_error(self, as_):
        first, again = (as_("red.member").put(PUT, content=BUNDLE) for _ in range(2))
        assert (first.status_code, again.status_code) == (201, 200)
        assert again.json() == first.json()

    def test_bundle_belongs_to_the_tenant_that_sent_it(self, as_):
        as_("red.member").put(PUT, content=BUNDLE)
        problem(as_("blue.member").get(PUT), 404, "not-found")
        assert as_("blue.member").head(PUT).status_code == 404
        assert as_("blue.member").put(PUT, content=BUNDLE).status_code == 201
        assert as_("red.viewer").get(PUT).json()["size_bytes"] == len(BUNDLE)
        assert as_("red.viewer").head(PUT).status_code == 200

    @pytest.mark.parametrize("mode", ["w", "w:gz"])
    def test_tar_file_is_accepted_too(self, mode, as_):
        body = tarred(mode, train=JOB, pkg__part="")
        answer = as_("red.member").put(f"/v1/bundles/{sha256(body)}", content=body)
        assert answer.json()["entry_points"] == {"train:Train": "class", "train:encode": "function"}

    def test_malformed_hash_is_refused(self, as_):
        answer = as_("red.member").put("/v1/bundles/abc", content=BUNDLE)
        problem(answer, 422, "validation-error", "{sha256}")


#: So random that its archive is as large: two parts and a bit.
LARGE = zipped(train=JOB, data=random.Random(7).randbytes(2 * PART_BYTES + 1000))
LARGE_PUT = f"/v1/bundles/{sha256(LARGE)}"


def ask(client, body=LARGE):
    headers = {"Content-Range": f"bytes */{len(body)}"}
    return client.put(f"/v1/bundles/{sha256(body)}", headers=headers)


def put_part(client, start, end, body=LARGE):
    headers = {"Content-Range": f"bytes {start}-{end - 1}/{len(body)}"}
    return client.put(f"/v1/bundles/{sha256(body)}", content=body[start:end], headers=headers)


def parts():
    return list(Store.at(settings().store_address).place.listed(UPLOADS))


class TestParts:
    def test_a_connection_that_breaks_loses_nothing_that_came(self, app, world, as_):
        """However the bytes were cut: part of a part, and more than one."""
        red, key = as_("red.member"), world.keys["red.member"]
        for upto in (1000, PART_BYTES + 1000):
            start = ask(red).json()["received_bytes"]
            broken(app, key, LARGE_PUT, LARGE, start, upto)
            assert ask(red).json()["received_bytes"] == upto
        answer = put_part(red, PART_BYTES + 1000, len(LARGE))
        assert (answer.status_code, answer.json()["files"]) == (201, 2)
        with Store.at(settings().store_address).open(sha256(LARGE)) as stored:
            assert stored.read() == LARGE
        assert parts() == []

    def test_interrupted_upload_without_a_range_goes_on_too(self, app, world, as_):
        red = as_("red.member")
        broken(app, world.keys["red.member"], LARGE_PUT, LARGE, 0, 5000)
        assert ask(red).json()["received_bytes"] == 5000
        assert red.put(LARGE_PUT, content=LARGE).status_code == 201

    def test_bytes_that_the_tenant_has_are_not_sent_again(self, as_):
        red = as_("red.member")
        first = red.put(PUT, content=BUNDLE)
        again = ask(red, BUNDLE)
        assert (again.status_code, again.json()) == (200, first.json())

    def test_uploads_of_another_tenant_are_not_revealed(self, as_):
        as_("red.member").put(PUT, content=BUNDLE)
        put_part(as_("red.member"), 0, 1000)
        for body in (BUNDLE, LARGE):
            answer = ask(as_("blue.member"), body)
            assert (answer.status_code, answer.json()["received_bytes"]) == (202, 0)

    def test_hash_is_checked_over_all_parts_together(self, as_):
        red = as_("red.member")
        put_part(red, 0, 100, BUNDLE)
        headers = {"Content-Range": f"bytes 100-{len(BUNDLE) - 1}/{len(BUNDLE)}"}
        answer = red.put(PUT, content=BUNDLE[100:-1] + b"!", headers=headers)
        problem(answer, 422, "validation-error", "{sha256}")
        assert ask(red, BUNDLE).json()["received_bytes"] == 0
        assert parts() == []

    def test_all_parts_together_are_checked_as_a_bundle(self, as_):
        body = zipped_as({"../out.py": JOB})
        put_part(as_("red.member"), 0, 50, body)
        answer = put_part(as_("red.member"), 50, len(body), body)
        assert "must not leave its folder" in problem(answer, 422, "validation-error")["detail"]

    def test_bundle_that_is_too_large_is_refused_before_it_is_sent(self, as_):
        headers = {"Content-Range": f"bytes */{settings().bundle_limit_bytes + 1}"}
        problem(as_("red.member").put(PUT, headers=headers), 413, "payload-too-large")

    def test_bundles_do_not_count_for_the_datablock_quota(self, as_, session):
        put_part(as_("red.member"), 0, 1000)
        assert datablocks.kept_bytes(session, "ten_red") == 0

    def test_body_without_a_length_is_accepted_whole(self, as_):
        pieces = (LARGE[at : at + 65_536] for at in range(0, len(LARGE), 65_536))
        assert as_("red.member").put(LARGE_PUT, content=pieces).status_code == 201


class TestList:
    def test_page_by_page(self, as_):
        client = as_("red.member")
        bodies = [zipped(**{name: JOB}) for name in ("a", "b", "c")]
        for body in bodies:
            client.put(f"/v1/bundles/{sha256(body)}", content=body)
        first = client.get("/v1/bundles?limit=2")
        second = client.get(first.links["next"]["url"])
        found = [*first.json()["items"], *second.json()["items"]]
        assert [item["sha256"] for item in found] == sorted(sha256(body) for body in bodies)


class TestEntryPoints:
    def test_step_method_may_be_inherited_inside_the_bundle(self, inspect):
        base = "class Base:\n    def step(self, ctx): ...\n"
        files = {
            "pkg/__init__": "from .base import Base as Loop\n",
            "pkg/base": base,
            "one": "from pkg.base import Base\nclass Mine(Base): ...\n",
            "two": "from pkg import Loop\nclass Mine(Loop): ...\nclass Deep(Mine): ...\n",
            "three": "from torch.nn import Module\nclass Net(Module): ...\n",
        }
        found = inspect(
            zipped_as({f"{name}.py": body for name, body in files.items()})
        ).entry_points
        assert found == {"pkg.base:Base": "class", "one:Mine": "class"} | {
            "two:Mine": "class",
            "two:Deep": "class",
        }

    def test_a_file_that_does_not_parse_is_named(self, inspect):
        contents = inspect(zipped(good=JOB, bad="def f(:\n"))
        assert list(contents.unparsed) == ["bad.py"]
        assert "SyntaxError" in contents.unparsed["bad.py"]
        assert "good:Train" in contents.entry_points

    @pytest.mark.parametrize(
        "source", ["(" * 100_000, "-" * 100_000 + "1", "a" + ".b" * 100_000, "x = " + "[" * 5000]
    )
    def test_hostile_source_does_no_harm(self, source, inspect):
        assert inspect(zipped(bad=source, good=JOB)).entry_points["good:Train"] == "class"

    def test_class_whose_bases_form_a_ring_is_no_job(self, inspect):
        ring = "from b import B\nclass A(B): ...\n", "from a import A\nclass B(A): ...\n"
        assert inspect(zipped(a=ring[0], b=ring[1])).entry_points == {}


SIGNED = """
import functools

class Plain:
    def __init__(self, ctx, *, lr=0.1, steps): ...
    def step(self, ctx): ...

class Open:
    def __init__(self, ctx, **more): ...
    def step(self, ctx): ...

class Inherits(Plain): ...

@functools.cache
class Decorated(Plain):
    def __init__(self, ctx): ...

class Rebound(Plain):
    def __init__(self, ctx): ...

Rebound = functools.partial(Rebound)
"""


def test_parameters_of_a_class_are_known_only_where_that_is_certain(tmp_path):
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("jobs/train.py", SIGNED)
    found = bundles.inspect(tmp_path / "b.zip").signatures
    assert {name: (told.takes, told.needs, told.place) for name, told in found.items()} == {
        "jobs.train:Plain": (("lr", "steps"), ("steps",), "jobs/train.py, line 5")
    }
