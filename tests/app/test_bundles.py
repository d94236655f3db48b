"""Bundles that are taken in; those that are refused are in test_bad_input.py."""

from __future__ import annotations

import io
import tarfile

import pytest

from app import bundles
from app.settings import settings
from app.store import Store
from tests.app.conftest import BUNDLE, JOB, problem, sha256, zipped, zipped_as

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


class TestPut:
    def test_its_bytes_are_stored_and_its_entry_points_told(self, as_):
        answer = as_("red.member").put(PUT, content=BUNDLE)
        assert answer.status_code == 201, answer.text
        body = answer.json()
        assert body["entry_points"] == {"train:Train": "class", "train:encode": "function"}
        assert (body["files"], body["size_bytes"]) == (1, len(BUNDLE))
        with Store.at(settings().store_address).open(sha256(BUNDLE)) as stored:
            assert stored.read() == BUNDLE

    def test_twice_is_no_error(self, as_):
        first, again = (as_("red.member").put(PUT, content=BUNDLE) for _ in range(2))
        assert (first.status_code, again.status_code) == (201, 200)
        assert again.json() == first.json()

    def test_it_belongs_to_the_tenant_that_sent_it(self, as_):
        as_("red.member").put(PUT, content=BUNDLE)
        problem(as_("blue.member").get(PUT), 404, "not-found")
        assert as_("blue.member").head(PUT).status_code == 404
        assert as_("blue.member").put(PUT, content=BUNDLE).status_code == 201
        assert as_("red.viewer").get(PUT).json()["size_bytes"] == len(BUNDLE)
        assert as_("red.viewer").head(PUT).status_code == 200

    @pytest.mark.parametrize("mode", ["w", "w:gz"])
    def test_a_tar_does_as_well(self, mode, as_):
        body = tarred(mode, train=JOB, pkg__part="")
        answer = as_("red.member").put(f"/v1/bundles/{sha256(body)}", content=body)
        assert answer.json()["entry_points"] == {"train:Train": "class", "train:encode": "function"}

    def test_a_hash_that_is_none_is_refused(self, as_):
        answer = as_("red.member").put("/v1/bundles/abc", content=BUNDLE)
        problem(answer, 422, "validation-error", "{sha256}")


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
    def test_a_step_may_be_inherited_inside_the_bundle(self, inspect):
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
    def test_a_hostile_source_does_no_harm(self, source, inspect):
        assert inspect(zipped(bad=source, good=JOB)).entry_points["good:Train"] == "class"

    def test_a_ring_of_bases_is_no_job(self, inspect):
        ring = "from b import B\nclass A(B): ...\n", "from a import A\nclass B(A): ...\n"
        assert inspect(zipped(a=ring[0], b=ring[1])).entry_points == {}
