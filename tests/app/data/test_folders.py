"""Datablocks that are folders: what is sent and kept, who sees it, and when it goes."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, update

from app.cli.bundling import UnreadablePath
from app.cli.client import Client
from app.cli.folders import get_folder, put_folder, read_folder
from app.core.model.provisions.folder import MAX_FILES
from app.data import folders
from app.db.models import Datablock, StoredFile, Task
from app.main import _body_limit
from app.scheduling import housekeeping, launch_order
from app.settings import settings
from app.storage.garbage_collector import CONDEMNED
from app.storage.store import BLOBS, Store, blob
from tests.app.conftest import problem, sha256

FILES = {"a.txt": b"alpha", "deep/b.bin": bytes(range(256)), "twin": b"alpha", "empty": b""}


def manifest(files: dict[str, bytes], *run: str) -> dict[str, Any]:
    return {
        "files": [
            {
                "path": path,
                "size_bytes": len(body),
                "sha256": sha256(body),
                "executable": path in run,
            }
            for path, body in files.items()
        ]
    }


def name_folder(client: Any, files: dict[str, bytes], name: str = "corpus") -> Any:
    return client.post(f"/v1/datablocks/{name}/folder", json=manifest(files))


def put(client: Any, files: dict[str, bytes] = FILES, name: str = "corpus") -> Any:
    """Make the folder a version; return the answer."""
    answer = name_folder(client, files, name)
    if answer.status_code != 202:
        return answer
    bodies = {sha256(body): body for body in files.values()}
    for missing in answer.json()["missing"]:
        assert client.put(f"/v1/files/{missing}", content=bodies[missing]).status_code == 201
    return name_folder(client, files, name)


def stored(folder: str) -> list[str]:
    return sorted(one.name for one in Store.at(settings().store_address).place.listed(folder))


def age(session: Any, column: Any, **by: float) -> None:
    session.execute(update(column.class_).values({column: func.now() - timedelta(**by)}))
    session.commit()


class TestPut:
    def test_folder_becomes_version_1_of_its_files(self, as_):
        red = as_("red.member")
        answer = name_folder(red, FILES)
        assert (answer.status_code, answer.json()) == (
            202,
            {"missing": sorted({sha256(b"alpha"), sha256(FILES["deep/b.bin"])})},
        )
        row = put(red).json()
        assert (row["name"], row["version"], row["format"]) == ("corpus", 1, "folder")
        assert (row["file_count"], row["file_bytes"]) == (4, 266)
        assert row["tensors"] == []
        assert (
            red.get("/v1/datablocks/corpus").content == red.get("/v1/datablocks/corpus@1").content
        )

    def test_changed_folder_needs_only_what_changed_and_an_equal_one_nothing(self, as_):
        red = as_("red.member")
        put(red)
        again = put(red)
        assert (again.status_code, again.json()["version"]) == (200, 1)
        changed = {**FILES, "deep/b.bin": b"other"}
        assert name_folder(red, changed).json() == {"missing": [sha256(b"other")]}
        assert put(red, changed).json()["version"] == 2
        assert put(red, FILES, "other-name").json()["version"] == 1

    def test_file_that_breaks_off_goes_on_where_it_was(self, as_):
        red, body = as_("red.member"), b"0123456789"
        path = f"/v1/files/{sha256(body)}"
        assert (
            red.put(path, content=body[:4], headers={"Content-Range": "bytes 0-3/10"}).json()[
                "received_bytes"
            ]
            == 4
        )
        rest = red.put(path, content=body[4:], headers={"Content-Range": "bytes 4-9/10"})
        assert (rest.status_code, rest.json()) == (201, {"sha256": sha256(body), "size_bytes": 10})
        assert red.put(path, content=body).status_code == 200

    def test_bytes_of_another_hash_are_refused(self, as_):
        red = as_("red.member")
        problem(red.put(f"/v1/files/{'0' * 64}", content=b"x"), 422, "validation-error")
        assert stored(BLOBS) == []

    @pytest.mark.parametrize(
        "path", ["/etc/passwd", "../x", "a/../../x", "a//b", "", ".", "a/", "a\n"]
    )
    def test_path_that_leaves_the_folder_is_refused(self, path, as_):
        answer = name_folder(as_("red.member"), {"ok": b"x", path: b"x"})
        [fault] = problem(answer, 422, "validation-error")["errors"]
        assert fault["pointer"] == "/files/1"

    def test_every_fault_of_a_folder_is_told_and_too_many_files_are_refused(self, as_):
        red = as_("red.member")
        faulty = {"../a": b"x", "/b": b"x", "c": b"x", "c/d": b"x"}
        found = problem(name_folder(red, faulty), 422, "validation-error")["errors"]
        assert [fault["pointer"] for fault in found] == ["/files/0", "/files/1", "/files/2"]
        many = {str(n): b"x" for n in range(MAX_FILES + 1)}
        problem(name_folder(red, many), 422, "validation-error")

    def test_size_that_is_not_that_of_the_file_is_refused(self, as_):
        red = as_("red.member")
        put(red)
        body = manifest({"a.txt": b"alpha"})
        body["files"][0]["size_bytes"] = 4
        problem(red.post("/v1/datablocks/x/folder", json=body), 422, "validation-error")

    def test_files_of_another_tenant_are_missing_and_not_found(self, as_):
        red, blue = as_("red.member"), as_("blue.member")
        put(red)
        assert len(name_folder(blue, FILES).json()["missing"]) == 2
        file = sha256(b"alpha")
        problem(blue.get(f"/v1/datablocks/corpus/files/{file}"), 404, "not-found")
        put(blue, {"mine": b"beta"})
        problem(blue.get(f"/v1/datablocks/corpus/files/{file}"), 404, "not-found")
        assert red.get(f"/v1/datablocks/corpus@1/files/{file}").content == b"alpha"
        problem(red.get(f"/v1/datablocks/corpus/files/{sha256(b'beta')}"), 404, "not-found")

    def test_list_of_files_sent_as_tensors_makes_no_folder(self, as_):
        """Or a folder could name files that the tenant does not have."""
        red = as_("red.member")
        put(red)
        body = red.get("/v1/datablocks/corpus").content
        params = {"sha256": sha256(body)}
        for name in ("corpus", "forged"):
            answer = red.put(f"/v1/datablocks/{name}", params=params, content=body)
            assert problem(answer, 422, "validation-error")["errors"][0]["code"] == "format"

    def test_files_count_for_the_quota_once(self, as_, monkeypatch):
        monkeypatch.setenv("ROUNDHOUSE_DATABLOCK_QUOTA_BYTES", "2000")
        settings.cache_clear()
        try:
            red = as_("red.member")
            put(red, {"a": b"1" * 700})
            put(red, {"b": b"1" * 700}, "other")
            answer = red.put(f"/v1/files/{sha256(b'2' * 1500)}", content=b"2" * 1500)
            problem(answer, 409, "quota-exceeded")
            put(red, {"a": b"3" * 700})
        finally:
            settings.cache_clear()

    def test_task_takes_the_folder_by_its_list_of_files(self, as_, session):
        red = as_("red.member")
        row = put(red).json()
        task = {"name": "a", "run": {"command": ["true"]}, "inputs": {"x": "datablock:corpus"}}
        submitted = red.post("/v1/requests", json={"tasks": [task]}).json()
        row_of_task = session.get_one(Task, submitted["tasks"][0]["id"])
        given = launch_order.inputs(session, [row_of_task])[row_of_task.id]["x"]
        assert (given["format"], given["datablock"]) == ("folder", "corpus@1")
        assert (given["sha256"], given["size_bytes"]) == (row["sha256"], row["size_bytes"])


class TestLife:
    def test_files_go_when_no_folder_has_them(self, as_, session):
        red = as_("red.member")
        put(red)
        put(red, {"a.txt": b"alpha"}, "other")
        red.delete("/v1/datablocks/corpus@1")
        age(session, StoredFile.touched_at, days=2)
        age(session, Datablock.created_at, hours=1)
        session.execute(
            update(Datablock)
            .where(Datablock.deleted_at.is_not(None))
            .values(deleted_at=func.now() - timedelta(hours=1))
        )
        session.commit()
        housekeeping.free(housekeeping.tidy(session))
        session.commit()
        gone = blob(sha256(FILES["deep/b.bin"]))
        assert f"{CONDEMNED}/{gone}" in stored(CONDEMNED)
        assert blob(sha256(b"alpha")) in stored(BLOBS)
        assert session.scalars(select(StoredFile.sha256)).all() == [sha256(b"alpha")]
        assert red.get(f"/v1/datablocks/other/files/{sha256(b'alpha')}").content == b"alpha"

    def test_file_that_no_folder_came_to_have_goes_after_a_day(self, as_, session):
        red, name = as_("red.member"), sha256(b"lonely")
        red.put(f"/v1/files/{name}", content=b"lonely")
        assert housekeeping.tidy(session) == []
        assert housekeeping.named(session, [blob(name)]) == {blob(name)}
        age(session, StoredFile.touched_at, days=2)
        assert housekeeping.tidy(session) == [blob(name)]
        assert name_folder(red, {"a": b"lonely"}).json() == {"missing": [name]}

    def test_file_that_goes_while_the_folder_is_named_is_asked_for_again(
        self, as_, session, monkeypatch
    ):
        red = as_("red.member")
        put(red)
        seen, missing = [], folders.missing

        def none_once(*given: Any) -> list[str]:
            seen.append(1)
            return [] if len(seen) == 1 else missing(*given)

        monkeypatch.setattr(folders, "missing", none_once)
        assert name_folder(red, {"a": b"new"}).json() == {"missing": [sha256(b"new")]}


class TestSmallFiles:
    def put(self, client: Any, *bodies: bytes, **other: str) -> Any:
        files = [
            {"sha256": sha256(body), "content": base64.b64encode(body).decode()} for body in bodies
        ]
        files[-1] |= other
        return client.put("/v1/files", json={"files": files})

    def test_files_are_stored_together_and_known_ones_are_not_counted(self, as_):
        red = as_("red.member")
        assert self.put(red, b"a", b"b", b"a").json() == {"new": 2}
        assert self.put(red, b"b", b"c").json() == {"new": 1}
        answer = name_folder(red, {"a": b"a", "b": b"b", "c": b"c"})
        assert answer.status_code == 201
        blue = name_folder(as_("blue.member"), {"a": b"a"})
        assert blue.json() == {"missing": [sha256(b"a")]}

    def test_other_bytes_are_refused_and_nothing_is_stored(self, as_):
        red = as_("red.member")
        answer = self.put(red, b"new", b"b", sha256="0" * 64)
        assert answer.status_code == 422
        assert [each["pointer"] for each in answer.json()["errors"]] == ["/files/1/sha256"]
        assert name_folder(red, {"a": b"new"}).status_code == 202

    def test_quota_holds(self, as_, monkeypatch):
        there = settings().model_copy(update={"datablock_quota_bytes": 10})
        monkeypatch.setattr("app.data.datablocks.settings", lambda: there)
        assert self.put(as_("red.member"), b"123456").status_code == 200
        problem(self.put(as_("red.member"), b"abcdef"), 409, "quota-exceeded")


def test_files_and_lists_of_folders_may_be_larger_than_other_bodies():
    assert _body_limit(f"/v1/files/{'0' * 64}") == settings().datablock_limit_bytes
    assert _body_limit("/v1/datablocks/corpus/folder") > settings().body_limit_bytes
    assert _body_limit("/v1/files") == settings().body_limit_bytes


class TestClient:
    @pytest.fixture
    def client(self, as_, monkeypatch):
        """The client of the CLI over the test's own service."""
        service, client = as_("red.member"), Client("http://testserver", "")
        ask = service.request  # which takes no time-outs

        def request(*given: Any, timeout: Any = None, **how: Any) -> Any:
            return ask(*given, **how)

        monkeypatch.setattr(service, "request", request)
        monkeypatch.setattr(client, "_http", service)
        return client

    @pytest.fixture
    def tree(self, tmp_path: Path) -> Path:
        for path, body in FILES.items():
            (tmp_path / "tree" / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "tree" / path).write_bytes(body)
        (tmp_path / "tree" / "twin").chmod(0o755)
        return tmp_path / "tree"

    def test_folder_comes_back_as_it_was_and_only_changes_are_sent(self, client, tree, tmp_path):
        row, sent = put_folder(client, "corpus", tree)
        assert (row["version"], sent) == (1, 261)  # twins once
        assert put_folder(client, "corpus", tree)[1] == 0
        (tree / "a.txt").write_bytes(b"gamma!")
        row, sent = put_folder(client, "corpus", tree)
        assert (row["version"], sent) == (2, 6)
        assert row["file_count"] == 4

        folder, _ = read_folder(tree)
        back = tmp_path / "back"
        assert get_folder(client, "corpus@2", back) == ("corpus@2", 267)
        assert read_folder(back)[0] == folder
        (back / "deep" / "b.bin").unlink()
        (back / "a.txt").write_bytes(b"spoilt")
        assert get_folder(client, "corpus", back) == ("corpus@2", 262)
        assert read_folder(back)[0] == folder

    def test_one_file_of_any_kind_is_a_folder_of_its_own(self, client, tree):
        row, _ = put_folder(client, "one", tree / "deep" / "b.bin")
        listed = json.loads(client._http.get("/v1/datablocks/one").content)
        name = hashlib.sha256(FILES["deep/b.bin"]).hexdigest()
        assert listed["files"] == [["b.bin", 256, name, 0]]
        assert row["file_count"] == 1

    def test_links_to_folders_and_what_is_no_file_are_refused(self, tree):
        (tree / "link").symlink_to(tree / "a.txt")
        assert len(read_folder(tree)[0].files) == 5  # a link to a file is its content
        (tree / "loop").symlink_to(tree)
        with pytest.raises(UnreadablePath, match="loop is a link to a folder"):
            read_folder(tree)
        (tree / "loop").unlink()
        (tree / "dangling").symlink_to(tree / "nothing")
        with pytest.raises(UnreadablePath, match="leads nowhere"):
            read_folder(tree)
        (tree / "dangling").unlink()
        os.mkfifo(tree / "pipe")
        with pytest.raises(UnreadablePath, match="neither a file nor a folder"):
            read_folder(tree)
