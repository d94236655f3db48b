"""Datablocks at the edge: uploads that break and go on, downloads, versions, who needs them.

What a file must be is in tests/core/model/checkpoints/test_tensor_file.py, what tasks make of it in
tests/workers.
"""

from __future__ import annotations

import io
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import pytest
from fastapi.testclient import TestClient
from safetensors.numpy import save
from sqlalchemy import func, select, update

from app.core.model.checkpoints.tensor_file import HEAD_BYTES
from app.data import datablocks, uploads
from app.db import transactions
from app.db.models import (
    Checkpoint,
    Datablock,
    DatablockPlace,
    DatablockUse,
    Device,
    Host,
    Task,
    Upload,
    UploadPart,
)
from app.db.transactions import transaction
from app.scheduling import housekeeping, launch_order
from app.settings import settings
from app.storage.garbage_collector import CONDEMNED
from app.storage.signing import block_key
from app.storage.store import BLOBS, UPLOADS, Store, blob
from tests.app.conftest import broken, descriptor, people, problem, sha256


def tensors(seed: int = 0, size: int = 900) -> bytes:
    """A safetensors file."""
    dice = numpy.random.default_rng(seed)
    return save({"x": dice.integers(0, 9, size, dtype=numpy.int32), "y": dice.random(3)})


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    numpy.save(out, array)
    return out.getvalue()


BODY = tensors()


def put(client: Any, body: bytes = BODY, name: str = "corpus", **how: Any) -> Any:
    return client.put(
        f"/v1/datablocks/{name}", params={"sha256": sha256(body)}, content=body, **how
    )


def put_part(
    client: Any, start: int, end: int, body: bytes = BODY, name: str = "corpus", total: int = 0
) -> Any:
    given = {"Content-Range": f"bytes {start}-{end - 1}/{total or len(body)}"}
    params = {"sha256": sha256(body)}
    path = f"/v1/datablocks/{name}"
    return client.put(path, params=params, content=body[start:end], headers=given)


def ask(client: Any, body: bytes = BODY, name: str = "corpus") -> Any:
    headers = {"Content-Range": f"bytes */{len(body)}"}
    params = {"sha256": sha256(body)}
    return client.put(f"/v1/datablocks/{name}", params=params, headers=headers)


def get(client: Any, name: str = "corpus", **headers: str) -> Any:
    given = {key.replace("_", "-"): value for key, value in headers.items()}
    return client.get(f"/v1/datablocks/{name}", headers=given)


def taking(source: str = "datablock:corpus", **more: Any) -> dict[str, Any]:
    task = {"name": "train", "run": {"job": "train:Train"}, "inputs": {"x": source}, **more}
    return descriptor(tasks=[task])


def stored(folder: str) -> list[str]:
    return sorted(one.name for one in Store.at(settings().store_address).place.listed(folder))


def later(session: Any, column: Any, **by: float) -> None:
    """As if it had happened so long ago."""
    session.execute(update(column.class_).values({column: func.now() - timedelta(**by)}))
    session.commit()


# --- up -------------------------------------------------------------------------------------------


class TestPut:
    def test_anonymous_and_viewers_are_refused(self, as_):
        problem(put(as_("")), 401, "unauthenticated")
        problem(put(as_("red.viewer")), 403, "insufficient-scope")

    def test_uploaded_file_becomes_version_1(self, as_, world):
        answer = put(as_("red.member"))
        assert answer.status_code == 201, answer.text
        body = answer.json()
        assert answer.headers["location"] == "/v1/datablocks/corpus@1"
        assert (body["name"], body["version"], body["format"]) == ("corpus", 1, "safetensors")
        assert (body["sha256"], body["size_bytes"]) == (sha256(BODY), len(BODY))
        assert {"name": "x", "dtype": "int32", "shape": [900]} in body["tensors"]
        assert body["tensor_count"] == 2
        assert (body["user_id"], body["task_id"]) == (world.users["red.member"], None)
        with Store.at(settings().store_address).open(sha256(BODY)) as kept:
            assert kept.read() == BODY
        assert stored(UPLOADS) == []

    def test_npy_file_is_one_tensor(self, as_):
        body = put(as_("red.member"), npy(numpy.zeros((2, 3), dtype="<f4"))).json()
        assert body["format"] == "npy"
        assert body["tensors"] == [{"name": "", "dtype": "float32", "shape": [2, 3]}]

    def test_other_bytes_make_a_new_version_and_equal_bytes_do_not(self, as_):
        red = as_("red.member")
        answers = [put(red, tensors(n)) for n in (1, 2, 2, 1)]
        # The bytes of the first version once more are the newest again.
        assert [(a.status_code, a.json()["version"]) for a in answers] == [
            (201, 1),
            (201, 2),
            (200, 2),
            (201, 3),
        ]

    def test_bytes_that_the_tenant_has_are_not_sent_again(self, as_):
        red = as_("red.member")
        put(red, name="one")
        again = ask(red, name="two")
        assert (again.status_code, again.json()["version"]) == (201, 1)
        assert get(red, "two").content == BODY

    def test_datablocks_of_another_tenant_are_not_revealed(self, as_):
        put(as_("red.member"))
        blue = as_("blue.member")
        asked = ask(blue)
        assert (asked.status_code, asked.json()["received_bytes"]) == (202, 0)
        assert put(blue).json()["version"] == 1

    @pytest.mark.parametrize(
        ("body", "told"),
        [
            (b"\x80\x04\x95" + b"." * 60, "neither"),
            (npy(numpy.zeros(9))[:-1], "bytes"),
            (BODY + b"more", "bytes"),
        ],
    )
    def test_file_without_tensors_is_refused_and_not_kept(self, body, told, as_):
        found = problem(put(as_("red.member"), body), 422, "validation-error", "")
        assert told in found["detail"]
        assert stored(UPLOADS) == stored(BLOBS) == []

    def test_objects_are_never_unpickled(self, as_, tmp_path):
        class Trap:
            def __reduce__(self):
                return (Path.touch, (tmp_path / "sprung",))

        out = io.BytesIO()
        numpy.save(out, numpy.array([Trap()], dtype=object), allow_pickle=True)
        problem(put(as_("red.member"), out.getvalue()), 422, "validation-error", "")
        assert not (tmp_path / "sprung").exists()

    def test_bytes_with_another_hash_are_refused_and_nothing_is_left(self, as_, session):
        params = {"sha256": sha256(b"another")}
        answer = as_("red.member").put("/v1/datablocks/corpus", params=params, content=BODY)
        problem(answer, 422, "validation-error", "?sha256")
        assert stored(UPLOADS) == stored(BLOBS) == []
        assert session.scalars(select(Upload)).all() == []

    @pytest.mark.parametrize("name", ["Corpus", "-x", "corpus@2", "x" * 64])
    def test_invalid_name_is_refused(self, name, as_):
        problem(put(as_("red.member"), name=name), 422, "validation-error", "{name}")

    @pytest.mark.parametrize(
        "said", ["bytes 0-8", "bytes 5-2/9", "bytes 0-9/9", "bytes */0", "lines 0-8/9", "bytes"]
    )
    def test_invalid_range_of_an_upload_is_refused(self, said, as_):
        path, params = "/v1/datablocks/corpus", {"sha256": sha256(BODY)}
        headers = {"Content-Range": said}
        answer = as_("red.member").put(path, params=params, headers=headers, content=b"x" * 9)
        problem(answer, 422, "validation-error", "Content-Range:")

    def test_upload_without_a_length_is_refused(self, as_):
        path, params = "/v1/datablocks/corpus", {"sha256": sha256(BODY)}
        answer = as_("red.member").put(path, params=params, content=iter([BODY]))
        problem(answer, 422, "validation-error", "Content-Length:")

    def test_datablock_that_is_too_large_is_refused_before_it_is_sent(self, as_, small):
        small(datablock_limit_bytes=len(BODY) - 1)
        problem(ask(as_("red.member")), 413, "payload-too-large")
        problem(put(as_("red.member")), 413, "payload-too-large")


def _away(*_, **__):
    raise OSError("the store is away")


@pytest.fixture
def small(monkeypatch):
    """Other settings for this test."""

    def changed(**values: Any) -> None:
        there = settings().model_copy(update=values)
        for module in (
            "app.data.upload_kinds",
            "app.data.uploads",
            "app.data.datablocks",
            "app.main",
        ):
            monkeypatch.setattr(f"{module}.settings", lambda: there)

    return changed


class TestParts:
    """`Content-Range`: what is there is durable, and sent once."""

    def test_upload_continues_where_it_stopped(self, as_):
        red, third = as_("red.member"), len(BODY) // 3
        assert ask(red).json()["received_bytes"] == 0
        first = put_part(red, 0, third)
        assert (first.status_code, first.json()["received_bytes"]) == (202, third)
        assert ask(red).json()["received_bytes"] == third
        assert put_part(red, third, 2 * third).json()["received_bytes"] == 2 * third
        last = put_part(red, 2 * third, len(BODY))
        assert (last.status_code, last.json()["version"]) == (201, 1)
        assert get(red).content == BODY
        assert stored(UPLOADS) == []

    def test_part_that_exists_is_skipped_and_a_gap_is_refused(self, as_):
        red = as_("red.member")
        put_part(red, 0, 100)
        assert put_part(red, 0, 100).json()["received_bytes"] == 100
        assert put_part(red, 50, 150).json()["received_bytes"] == 150
        told = problem(put_part(red, 151, 200), 409, "conflict-state")
        assert "150" in told["detail"]
        assert put_part(red, 120, len(BODY)).status_code == 201
        assert get(red).content == BODY

    def test_whole_file_sent_at_once_continues_too(self, as_):
        red = as_("red.member")
        put_part(red, 0, 100)
        assert put(red).status_code == 201
        assert get(red).content == BODY

    def test_a_body_longer_than_its_range_is_refused(self, as_):
        headers = {"Content-Range": f"bytes 0-9/{len(BODY)}"}
        params = {"sha256": sha256(BODY)}
        path = "/v1/datablocks/corpus"
        answer = as_("red.member").put(path, params=params, headers=headers, content=BODY)
        problem(answer, 422, "validation-error", "Content-Range:")

    def test_hash_is_checked_over_all_parts_together(self, as_):
        red, other = as_("red.member"), tensors(7)
        put_part(red, 0, 100)
        headers = {"Content-Range": f"bytes 100-{len(BODY) - 1}/{len(BODY)}"}
        params = {"sha256": sha256(BODY)}
        path = "/v1/datablocks/corpus"
        rest = red.put(path, params=params, headers=headers, content=other[100:])
        problem(rest, 422, "validation-error", "?sha256")
        assert ask(red).json()["received_bytes"] == 0

    def test_a_connection_that_breaks_loses_nothing_that_came(self, app, world, as_):
        """However the bytes were cut: part of a part, and more than one."""
        large = tensors(3, size=3 * uploads.PART_BYTES // 4 + 7)
        path = f"/v1/datablocks/corpus?sha256={sha256(large)}"
        for upto in (1000, uploads.PART_BYTES + 1000):
            red = as_("red.member")
            start = ask(red, large).json()["received_bytes"]
            broken(app, world.keys["red.member"], path, large, start, upto)
            assert ask(red, large).json()["received_bytes"] == upto
        assert put(red, large).status_code == 201
        assert get(red).content == large

    def test_file_without_tensors_is_refused_before_all_of_it_is_sent(self, as_):
        body = b"\x93NUMPY\x01\x00" + b"." * (HEAD_BYTES + 100)
        answer = put_part(as_("red.member"), 0, HEAD_BYTES, body, total=10**9)
        problem(answer, 422, "validation-error", "")

    def test_second_of_two_simultaneous_uploads_is_told_of_the_first(self, as_, monkeypatch):
        red, keep = as_("red.member"), uploads.keep

        def overtaken(begun, at, body):
            monkeypatch.setattr(uploads, "keep", keep)
            assert put_part(red, 0, 50).status_code == 202
            keep(begun, at, body)

        monkeypatch.setattr(uploads, "keep", overtaken)
        problem(put_part(red, 0, 100), 409, "conflict-state")
        assert ask(red).json()["received_bytes"] == 50

    def test_repeating_the_last_call_finishes_an_upload_after_a_store_failure(
        self, as_, monkeypatch
    ):
        red, half = as_("red.member"), len(BODY) // 2
        put_part(red, 0, half)
        with monkeypatch.context() as while_it_is_away:
            while_it_is_away.setattr(Store, "put", _away)
            problem(put_part(red, half, len(BODY)), 503, "unavailable")
        assert ask(red).status_code == 201

    def test_upload_that_was_complete_when_the_store_failed_is_sent_again(self, as_, monkeypatch):
        red = as_("red.member")
        with monkeypatch.context() as while_it_is_away:
            while_it_is_away.setattr(Store, "put", _away)
            problem(put(red), 503, "unavailable")
        assert ask(red).json()["received_bytes"] == 0
        assert put(red).status_code == 201

    def test_upload_without_progress_is_forgotten_after_a_day(self, as_, session):
        red = as_("red.member")
        put_part(red, 0, 100)
        housekeeping.free(housekeeping.tidy(session))
        assert ask(red).json()["received_bytes"] == 100
        later(session, Upload.touched_at, hours=25)
        housekeeping.free(housekeeping.tidy(session))
        assert ask(red).json()["received_bytes"] == 0
        assert stored(UPLOADS) == []

    def test_a_part_without_a_row_is_swept_and_one_with_a_row_is_not(self, as_, session):
        red = as_("red.member")
        put_part(red, 0, 100)
        [named] = stored(UPLOADS)
        place = Store.at(settings().store_address).place
        place.keep([b"lost"], lambda: f"{UPLOADS}/upl_gone/lost")
        for name in (named, f"{UPLOADS}/upl_gone/lost"):
            os.utime(place.path(name), (0, time.time() - 90_000))
        housekeeping.Sweeper().sweep()
        assert stored(UPLOADS) == [named]
        assert session.scalars(select(UploadPart.place)).all() == [named]


class TestQuota:
    def test_upload_beyond_the_quota_is_refused_with_advice(self, as_, small):
        red = as_("red.member")
        small(datablock_quota_bytes=2 * len(BODY))
        put(red, tensors(1), "one")
        put_part(red, 0, 10, tensors(2), "two")  # it counts whole, from its beginning
        told = problem(ask(red, tensors(3), "three"), 409, "quota-exceeded")
        assert f"{2 * len(BODY)} bytes" in told["detail"]
        assert "DELETE" in told["detail"]
        assert put(red, tensors(1), "same-bytes").status_code == 201
        assert put(as_("blue.member"), tensors(3)).status_code == 201
        red.delete("/v1/datablocks/one@1")
        red.delete("/v1/datablocks/same-bytes@1")
        assert put(red, tensors(3), "three").status_code == 201

    def test_deleted_version_that_is_still_needed_counts_for_the_quota(
        self, as_, red, small, session
    ):
        small(datablock_quota_bytes=len(BODY))
        put(red)
        request = red.post("/v1/requests", json=taking()).json()
        red.delete("/v1/datablocks/corpus@1")
        problem(put(red, tensors(1)), 409, "quota-exceeded")
        session.execute(update(Task).where(Task.id == request["tasks"][0]["id"]), {"state": "done"})
        session.commit()
        assert put(red, tensors(1)).status_code == 201

    def test_tenant_over_its_quota_cannot_submit_a_task_that_publishes(self, red, small):
        put(red)
        small(datablock_quota_bytes=len(BODY) - 1)
        body = taking(outputs=["y"], publish={"y": "made"})
        problem(red.post("/v1/requests", json=body), 409, "quota-exceeded")
        assert red.post("/v1/requests", json=taking()).status_code == 202


# --- down -----------------------------------------------------------------------------------------


class TestGet:
    def test_foreign_and_unknown_datablocks_are_not_found(self, as_):
        put(as_("red.member"))
        for who, name in (
            ("blue.member", "corpus"),
            ("blue.member", "corpus@1"),
            ("blue.tenant_admin", "corpus@1"),
            ("root", "corpus"),
            ("red.viewer", "corpus@2"),
            ("red.viewer", "corpse"),
        ):
            problem(get(as_(who), name), 404, "not-found")
            assert as_(who).head(f"/v1/datablocks/{name}").status_code == 404

    def test_newest_or_named_version_is_sent(self, as_):
        red = as_("red.member")
        for n in (1, 2):
            put(red, tensors(n))
        newest, first = get(red), get(red, "corpus@1")
        assert (newest.content, first.content) == (tensors(2), tensors(1))
        assert newest.headers["content-location"] == "/v1/datablocks/corpus@2"
        assert newest.headers["etag"] == f'"{sha256(tensors(2))}"'
        assert 'filename="corpus@2.safetensors"' in newest.headers["content-disposition"]

    def test_head_gives_the_same_headers_without_the_bytes(self, as_):
        red = as_("red.member")
        put(red)
        head, whole = red.head("/v1/datablocks/corpus"), get(red)
        assert head.content == b""
        for name in ("content-length", "etag", "content-location", "accept-ranges"):
            assert head.headers[name] == whole.headers[name]

    @pytest.mark.parametrize(
        ("range", "start", "end"),
        [
            ("bytes=0-9", 0, 10),
            ("bytes=100-", 100, None),
            ("bytes=-7", -7, None),
            ("bytes=10-999999", 10, None),
        ],
    )
    def test_range_of_a_datablock_is_sent(self, range, start, end, as_):
        red = as_("red.member")
        put(red)
        answer = get(red, Range=range)
        assert (answer.status_code, answer.content) == (206, BODY[start:end])
        first, _, rest = answer.headers["content-range"].removeprefix("bytes ").partition("-")
        last, _, total = rest.partition("/")
        assert BODY[int(first) : int(last) + 1] == answer.content
        assert int(total) == len(BODY)

    @pytest.mark.parametrize("range", ["bytes=5-2", "bytes=0-1,3-4", "lines=0-1", "bytes=-", "x"])
    def test_invalid_range_of_a_download_gives_the_whole_file(self, range, as_):
        red = as_("red.member")
        put(red)
        answer = get(red, Range=range)
        assert (answer.status_code, answer.content) == (200, BODY)

    @pytest.mark.parametrize("range", ["bytes=99999-", "bytes=99999-100000", "bytes=-0"])
    def test_range_after_the_end_is_refused(self, range, as_):
        red = as_("red.member")
        put(red)
        answer = get(red, Range=range)
        problem(answer, 416, "range-not-satisfiable")
        assert answer.headers["content-range"] == f"bytes */{len(BODY)}"

    def test_download_continues_only_with_the_same_version(self, as_):
        red = as_("red.member")
        put(red, tensors(1))
        etag = get(red).headers["etag"]
        assert get(red, Range="bytes=9-", If_Range=etag).status_code == 206
        put(red, tensors(2))
        other = get(red, Range="bytes=9-", If_Range=etag)
        assert (other.status_code, other.content) == (200, tensors(2))

    def test_matching_etag_is_answered_with_304(self, as_):
        red = as_("red.member")
        put(red)
        answer = get(red, If_None_Match=f'"other", "{sha256(BODY)}"')
        assert (answer.status_code, answer.content) == (304, b"")

    def test_datablock_with_lost_bytes_is_gone(self, as_):
        red = as_("red.member")
        put(red)
        Store.at(settings().store_address).place.delete(blob(sha256(BODY)))
        problem(get(red), 410, "gone")

    def test_download_of_a_damaged_datablock_is_cut_off(self, as_):
        red, large = as_("red.member"), tensors(4, size=10**6)
        put(red, large)
        path = Store.at(settings().store_address).place.path(blob(sha256(large)))
        path.chmod(0o600)
        with path.open("r+b") as file:
            file.seek(10**6)
            file.write(b"damage")
        with pytest.raises(Exception, match="damaged"):
            get(red)


# --- all of them ----------------------------------------------------------------------------------


class TestList:
    def test_page_by_page_newest_first_and_filtered(self, as_):
        red = as_("red.member")
        put(red, tensors(1), "a")
        put(red, tensors(2), "a")
        put(red, npy(numpy.zeros(3)), "b")
        put(as_("blue.member"), tensors(1), "blues")

        def listed(**params):
            found = red.get("/v1/datablocks", params=params).json()["items"]
            return [f"{item['name']}@{item['version']}" for item in found]

        assert listed() == ["b@1", "a@2", "a@1"]
        assert listed(name="a") == ["a@2", "a@1"]
        assert listed(format="npy") == ["b@1"]
        assert listed(latest=True) == ["b@1", "a@2"]
        first = red.get("/v1/datablocks?limit=2")
        second = red.get(first.links["next"]["url"])
        assert [i["version"] for i in [*first.json()["items"], *second.json()["items"]]] == [
            1,
            2,
            1,
        ]
        red.delete("/v1/datablocks/a@2")
        assert listed() == ["b@1", "a@1"]
        assert listed(latest=True) == ["b@1", "a@1"]

    def test_root_sees_all(self, as_):
        put(as_("red.member"))
        put(as_("blue.member"))
        found = as_("root").get("/v1/datablocks").json()["items"]
        assert {item["tenant_id"] for item in found} == {"ten_red", "ten_blue"}


class TestDelete:
    def test_only_its_maker_or_an_admin_deletes_a_datablock(self, as_):
        put(as_("red.member"))
        path = "/v1/datablocks/corpus@1"
        problem(as_("red.other").delete(path), 403, "insufficient-scope")
        problem(as_("blue.tenant_admin").delete(path), 404, "not-found")
        problem(as_("blue.member").delete(path), 404, "not-found")
        assert as_("red.tenant_admin").delete(path).status_code == 200

    def test_delete_must_name_a_version(self, as_):
        put(as_("red.member"))
        answer = as_("red.member").delete("/v1/datablocks/corpus")
        problem(answer, 422, "validation-error", "{name}")

    def test_deleted_version_is_gone_and_its_number_is_not_used_again(self, as_):
        red = as_("red.member")
        for n in (1, 2):
            put(red, tensors(n))
        assert red.delete("/v1/datablocks/corpus@2").json()["deleted_at"]
        problem(red.delete("/v1/datablocks/corpus@2"), 404, "not-found")
        problem(get(red, "corpus@2"), 404, "not-found")
        assert get(red).content == tensors(1)
        assert put(red, tensors(2)).json()["version"] == 3

    def test_bytes_of_a_deleted_version_go_later_and_shared_bytes_stay(self, as_, session):
        red = as_("red.member")
        put(red, tensors(1), "gone")
        put(red, tensors(2), "shared")
        put(red, tensors(2), "twin")
        for name in ("gone", "shared"):
            red.delete(f"/v1/datablocks/{name}@1")
        housekeeping.free(housekeeping.tidy(session))
        assert len(stored(BLOBS)) == 2  # somebody may be downloading it
        deleted = update(Datablock).where(Datablock.deleted_at.is_not(None))
        session.execute(deleted.values(deleted_at=func.now() - timedelta(hours=1)))
        housekeeping.free(housekeeping.tidy(session))
        assert stored(BLOBS) == [blob(sha256(tensors(2)))]
        assert stored(CONDEMNED) == [f"{CONDEMNED}/{blob(sha256(tensors(1)))}"]
        assert housekeeping.tidy(session) == []

    def test_bytes_stay_while_a_task_needs_them(self, as_, red, session):
        put(red)
        request = red.post("/v1/requests", json=taking()).json()
        [listed] = red.get("/v1/datablocks").json()["items"]
        assert listed["holders"] == 1
        assert red.delete("/v1/datablocks/corpus@1").json()["holders"] == 1
        problem(
            red.post("/v1/requests", json=taking()), 422, "validation-error", "/tasks/0/inputs/x"
        )
        later(session, Datablock.deleted_at, hours=1)
        assert housekeeping.tidy(session) == []
        task = session.get_one(Task, request["tasks"][0]["id"])
        task.state = "failed"
        datablocks.seen_on(session, "h.0", task.id)
        session.commit()
        assert housekeeping.tidy(session) == [blob(sha256(BODY))]
        assert session.scalars(select(DatablockPlace)).all() == []


class TestOutputs:
    """Bytes of an output that was published are kept as the datablock, or for who takes them."""

    @pytest.fixture
    def made(self, red, session):
        """A task that is done and has published `corpus@1`, and one that takes its output."""
        body = tensors(8)
        Store.at(settings().store_address).put([body])
        tasks = [
            {"name": "a", "run": {"job": "train:Train"}, "outputs": ["y"]},
            {"name": "b", "run": {"job": "train:Train"}, "inputs": {"x": "a.y"}},
        ]
        request = red.post("/v1/requests", json=descriptor(tasks=tasks)).json()
        first, second = (session.get_one(Task, task["id"]) for task in request["tasks"])
        summary = {"format": "safetensors", "tensors": [], "tensor_count": 2}
        whose = {"tenant_id": first.tenant_id, "user_id": first.user_id, "name": "corpus"}
        kept = {"sha256": sha256(body), "size_bytes": len(body), "summary": summary}
        row = datablocks.added(
            session, datablocks.New(**whose, **kept, task_id=first.id, output="y")
        )
        first.state, first.outputs = "done", {"y": datablocks.as_input(row)}
        session.commit()
        return red, second, blob(sha256(body))

    def test_bytes_of_a_deleted_version_go_when_its_last_reader_has_ended(self, made, session):
        red, taker, name = made
        red.delete("/v1/datablocks/corpus@1")
        assert housekeeping.named(session, [name]) == {name}
        taker.state = "cancelled"
        session.commit()
        assert housekeeping.named(session, [name]) == set()

    def test_bytes_stay_while_a_version_names_them(self, made, session):
        _, taker, name = made
        taker.state = "cancelled"
        session.commit()
        assert housekeeping.named(session, [name]) == {name}


class TestPlaces:
    def test_host_without_a_copy_for_a_week_is_forgotten(self, red, session):
        put(red)
        request = red.post("/v1/requests", json=taking()).json()
        datablocks.seen_on(session, "h.0", request["tasks"][0]["id"])
        later(session, DatablockPlace.seen_at, days=6)
        housekeeping.tidy(session)
        assert session.scalars(select(DatablockPlace.device_id)).all() == ["h.0"]
        later(session, DatablockPlace.seen_at, days=8)
        housekeeping.tidy(session)
        assert session.scalars(select(DatablockPlace.device_id)).all() == []


class TestSweep:
    def test_old_bytes_stay_while_they_are_named_or_needed(self, as_, red, session):
        """A day after they came, which is when the store is asked about what has no row."""
        for n, name in enumerate(("named", "needed", "gone")):
            put(red, tensors(n), name)
        red.post("/v1/requests", json=taking("datablock:needed"))
        for name in ("needed", "gone"):
            red.delete(f"/v1/datablocks/{name}@1")
        place = Store.at(settings().store_address).place
        for n in range(3):
            os.utime(place.path(blob(sha256(tensors(n)))), (0, time.time() - 90_000))
        housekeeping.Sweeper().sweep()
        kept = {blob(sha256(tensors(n))) for n in (0, 1)}
        assert kept <= set(stored(BLOBS))
        assert blob(sha256(tensors(2))) not in stored(BLOBS)


# --- in requests ----------------------------------------------------------------------------------


class TestInputs:
    def test_bare_name_means_the_newest_version_at_submission(self, red, session):
        put(red, tensors(1))
        put(red, tensors(2))
        request = red.post("/v1/requests", json=taking()).json()
        put(red, tensors(3))
        [task] = red.get(f"/v1/requests/{request['id']}").json()["tasks"]
        assert task["inputs"] == {"x": "datablock:corpus@2"}
        row = session.get_one(Task, task["id"])
        shelf = launch_order.look_up(session, [(row, session.get_one(Device, "h.0"))])
        assert shelf.inputs[row.id] == {
            "x": {
                "sha256": sha256(tensors(2)),
                "size_bytes": len(tensors(2)),
                "format": "safetensors",
                "datablock": "corpus@2",
                "copies": [],
            }
        }

    def test_launch_names_the_last_host_with_the_datablock_that_is_up(self, red, session):
        """Three hosts, the last seen first; that one has it still is written down each minute."""
        put(red)
        request = red.post("/v1/requests", json=taking()).json()
        row = session.get_one(Task, request["tasks"][0]["id"])
        here = session.get_one(Device, "h.0")
        until = transactions.now(session) + timedelta(minutes=1)
        session.add_all(Host(name=f"h{n}", island=here.island) for n in range(5))
        session.flush()
        for n in range(5):
            reach = {"links": ["10.0.0.1", n], "secret": f"{n:02}" * 32}
            how = {"host": f"h{n}", "island": here.island, "kind": "cpu", **reach}
            session.add(Device(id=f"h.1{n}", lease_until=None if n == 1 else until, **how))
        how |= {"host": "h0", "links": ["10.0.0.1", 9], "secret": "99" * 32}
        session.add(Device(id="h.19", lease_until=until, **how))
        session.flush()
        datablocks.seen_on(session, "h.19", row.id)
        older = update(DatablockPlace).values(seen_at=until - timedelta(seconds=200))
        session.execute(older)
        for n in range(5):
            datablocks.seen_on(session, f"h.1{n}", row.id)
            seen = update(DatablockPlace).where(DatablockPlace.device_id == f"h.1{n}")
            session.execute(seen.values(seen_at=until - timedelta(seconds=70 + n)))
        datablocks.seen_on(session, "h.13", row.id)
        seen_at = select(DatablockPlace.seen_at).where(DatablockPlace.device_id == "h.13")
        assert session.scalar(seen_at) == until - timedelta(seconds=73)
        copies = launch_order.look_up(session, [(row, here)]).inputs[row.id]["x"]["copies"]
        key = block_key("00" * 32, sha256(BODY))
        assert copies[0] == {"place": ["10.0.0.1", 0], "key": key}
        assert [copy["place"][1] for copy in copies] == [0, 2, 3]
        datablocks.seen_on(session, "h.19", row.id)  # it was seen there longer ago than a minute
        copies = launch_order.look_up(session, [(row, here)]).inputs[row.id]["x"]["copies"]
        assert [copy["place"][1] for copy in copies] == [9, 2, 3]

    def test_input_may_name_a_version(self, red):
        for n in (1, 2):
            put(red, tensors(n))
        checked = red.post("/v1/requests:validate", json=taking("datablock:corpus@1"))
        assert checked.json()["tasks"][0]["descriptor"]["inputs"] == {"x": "datablock:corpus@1"}

    @pytest.mark.parametrize(
        ("source", "told"),
        [
            ("datablock:corpus@3", "the newest versions are corpus@2, corpus@1"),
            ("datablock:corpsu", "did you mean 'corpus'?"),
            ("datablock:pictures", "PUT /v1/datablocks/pictures"),
        ],
    )
    def test_unknown_datablock_is_refused_with_the_known_ones(self, source, told, red, session):
        for n in (1, 2):
            put(red, tensors(n))
        answer = red.post("/v1/requests", json=taking(source))
        body = problem(answer, 422, "validation-error", "/tasks/0/inputs/x")
        assert told in body["errors"][0]["detail"]
        assert body["errors"][0]["code"] == "unknown-datablock"
        assert session.scalars(select(DatablockUse)).all() == []

    def test_datablock_of_another_tenant_is_unknown(self, as_, red):
        put(as_("blue.member"), name="theirs")
        unknown, foreign = (
            red.post("/v1/requests", json=taking(f"datablock:{name}")).json()["errors"]
            for name in ("nobody", "theirs")
        )
        assert json.dumps(foreign).replace("theirs", "nobody") == json.dumps(unknown)

    def test_all_unknown_datablocks_are_reported_at_once(self, red):
        body = taking("datablock:a")
        body["tasks"][0]["inputs"]["y"] = "datablock:b@2"
        answer = red.post("/v1/requests", json=body)
        problem(answer, 422, "validation-error", "/tasks/0/inputs/x")
        problem(answer, 422, "validation-error", "/tasks/0/inputs/y")

    def test_published_version_is_shown(self, red):
        put(red)
        body = taking(outputs=["y"], publish={"y": "made"})
        [task] = red.post("/v1/requests", json=body).json()["tasks"]
        assert task["publish"] == {"y": "made"}
        body = taking(publish={"y": "made"})
        answer = red.post("/v1/requests", json=body)
        problem(answer, 422, "validation-error", "/tasks/0/publish/y")


class TestForks:
    """An image refers to the datablocks that its job was given: whoever goes on has the same."""

    @pytest.fixture
    def fork(self, red, session):
        """Submits a task that goes on from a checkpoint of one that takes `corpus@1`."""
        put(red, tensors(1))
        request = red.post("/v1/requests", json=taking()).json()
        put(red, tensors(2))
        task = session.get_one(Task, request["tasks"][0]["id"])
        task.state = "done"
        of = {"task_id": task.id, "tenant_id": task.tenant_id, "epoch": 1, "step": 7}
        id = "ckp_" + "0" * 32
        session.add(Checkpoint(id=id, sha256="0" * 64, size_bytes=1, took_us=1, **of))
        session.commit()

        def fork(**more):
            run = {"name": "train", "run": {"job": "train:Train"}, "from_checkpoint": id, **more}
            return red.post("/v1/requests", json=descriptor(tasks=[run]))

        return fork

    def test_fork_takes_the_versions_of_its_checkpoint(self, fork, red):
        [task] = fork().json()["tasks"]
        assert task["inputs"] == {"x": "datablock:corpus@1"}
        [first] = red.get("/v1/datablocks", params={"name": "corpus"}).json()["items"][1:]
        assert (first["version"], first["holders"]) == (1, 1)

    def test_fork_may_name_its_versions_but_no_others(self, fork):
        assert fork(inputs={"x": "datablock:corpus@1"}).status_code == 202
        answer = fork(inputs={"x": "datablock:corpus@2"})
        problem(answer, 422, "validation-error", "/tasks/0/inputs/x")

    def test_fork_may_have_more_inputs(self, fork):
        [task] = fork(inputs={"y": "datablock:corpus"}).json()["tasks"]
        assert task["inputs"] == {"x": "datablock:corpus@1", "y": "datablock:corpus@2"}

    def test_fork_from_a_deleted_version_is_refused(self, fork, red):
        red.delete("/v1/datablocks/corpus@1")
        problem(fork(), 422, "validation-error", "/tasks/0/inputs/x")


def test_versions_of_one_name_are_made_one_at_a_time(committed, as_committed):
    """Ten at once, on connections of their own: ten numbers, and none twice."""
    with ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(lambda n: put(as_committed(), tensors(n)), range(10)))
    assert sorted(answer.json()["version"] for answer in answers) == list(range(1, 11))


def test_two_publishers_for_the_same_tenants_do_not_deadlock(committed):
    """Each names all its tenants at once: whatever the order, both come through, time and again."""

    def publish(tenants):
        for _ in range(200):
            with transaction() as session:
                datablocks.shelve(session, tenants)
                session.execute(select(func.pg_sleep(0.001)))

    orders = [["ten_a", "ten_b", "ten_c"], ["ten_c", "ten_b", "ten_a"], ["ten_b", "ten_a"]]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(publish, orders)) == [None] * 3


@pytest.fixture
def as_committed(app, committed):
    with transaction() as session:
        key = people(session).keys["red.member"]
    return lambda: TestClient(app, headers={"Authorization": f"Bearer {key}"})
