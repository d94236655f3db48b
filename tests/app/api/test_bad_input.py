"""Bad input gets a 4xx problem that points at the place, and nothing of it changes a row."""

from __future__ import annotations

import gzip
import io
import json
import stat
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.settings import settings
from tests.app.conftest import BUNDLE, descriptor, problem, sha256, zipped_as

UNFIT = "validation-error"


def _task(name: str = "train", **more: Any) -> dict[str, Any]:
    return {"name": name, "run": {"job": "train:Train"}, **more}


def _tasks(*tasks: dict[str, Any]) -> dict[str, Any]:
    return descriptor(tasks=list(tasks))


RING = _tasks(_task("a", start={"after": ["b"]}), _task("b", start={"after": ["a"]}))

#: what is wrong: (what is sent, problem type, pointer)
DESCRIPTORS: dict[str, tuple[Any, str, str]] = {
    "unknown field": (descriptor(nmae="x"), UNFIT, "/nmae"),
    "unknown field of a task": (_tasks(_task(prams={})), UNFIT, "/tasks/0/prams"),
    "wrong type": (descriptor(priority="high"), UNFIT, "/priority"),
    "out of range": (descriptor(priority=101), UNFIT, "/priority"),
    "no tasks": (descriptor(tasks=[]), UNFIT, "/tasks"),
    "not an object": ([1, 2], UNFIT, ""),
    "unknown module": (_tasks(_task(run={"job": "trian:Train"})), UNFIT, "/tasks/0/run/job"),
    "unknown class": (_tasks(_task(run={"job": "train:Trian"})), UNFIT, "/tasks/0/run/job"),
    "class without a step": (_tasks(_task(run={"job": "train:NoJob"})), UNFIT, "/tasks/0/run/job"),
    "function as a job": (_tasks(_task(run={"job": "train:encode"})), UNFIT, "/tasks/0/run/job"),
    "class as a function": (
        _tasks(_task(run={"function": "train:Train"})),
        UNFIT,
        "/tasks/0/run/function",
    ),
    "cycle": (RING, UNFIT, "/tasks/0"),
    "needs itself": (_tasks(_task(start={"after": ["train"]})), UNFIT, "/tasks/0/start/after/0"),
    "unknown need": (_tasks(_task(start={"after": ["x"]})), UNFIT, "/tasks/0/start/after/0"),
    "unknown input": (_tasks(_task(inputs={"x": "prep.y"})), UNFIT, "/tasks/0/inputs/x"),
    "same name twice": (_tasks(_task(), _task()), UNFIT, "/tasks/1/name"),
    "unknown bundle": (descriptor(bundle=f"sha256:{'0' * 64}"), UNFIT, "/bundle"),
    "no such kind": (
        _tasks(_task(devices={"kind": "tpu"})),
        "unsatisfiable",
        "/tasks/0/devices/kind",
    ),
    "too much memory": (
        _tasks(_task(devices={"memory_bytes": 2**40})),
        "unsatisfiable",
        "/tasks/0/devices/memory_bytes",
    ),
    "too many ranks": (_tasks(_task(world_size=65)), "unsatisfiable", "/tasks/0/world_size"),
    "command": (
        _tasks({"name": "c", "run": {"command": ["x" * 70_000]}}),
        "validation-error",
        "/tasks/0/run/command",
    ),
    "datablock": (
        _tasks(_task(inputs={"x": "datablock:corpus"})),
        "validation-error",
        "/tasks/0/inputs/x",
    ),
    "more datablocks than one query takes": (
        _tasks(_task(inputs={f"x{n}": f"datablock:d{n}@1" for n in range(40_000)})),
        "validation-error",
        "/tasks",
    ),
    "webhook": (
        descriptor(notify={"webhook": "http://169.254.169.254/latest/meta-data"}),
        "validation-error",
        "/notify/webhook",
    ),
}


@pytest.mark.parametrize("route", ["/v1/requests", "/v1/requests:validate"])
@pytest.mark.parametrize("what", DESCRIPTORS)
def test_a_bad_descriptor_is_refused_with_a_pointer(what, route, red, rows):
    body, type_, pointer = DESCRIPTORS[what]
    before = rows()
    answer = red.post(route, json=body, headers={"Idempotency-Key": "k"})
    problem(answer, 422, type_, pointer)
    assert rows() == before


def test_all_faults_of_a_descriptor_are_reported_at_once(red):
    body = descriptor(nmae="x", priority=1000, tasks=[{"name": "Bad Name"}])
    found = problem(red.post("/v1/requests", json=body), 422, UNFIT)
    pointers = {error["pointer"] for error in found["errors"]}
    assert pointers >= {"/nmae", "/priority", "/tasks/0/name", "/tasks/0/run"}


# --- JSON that is none --------------------------------------------------------------------------

JSONS = {
    "cut short": b'{"tasks": [',
    "doubled key": b'{"name": "a", "name": "b", "tasks": []}',
    "NaN": b'{"priority": NaN}',
    "infinite number": b'{"priority": 1e999}',
    "NUL": b'{"name": "a\\u0000b"}',
    "half a surrogate pair": b'{"name": "\\ud800"}',
    "not UTF-8": b'{"name": "\xff"}',
    "nested too deeply": b'{"params":' * 40 + b"1" + b"}" * 40,
    "nested far too deeply": b"[" * 100_000,
    "number with too many digits": b'{"priority": ' + b"9" * 5000 + b"}",
    "empty": b"",
}


@pytest.mark.parametrize("what", JSONS)
def test_invalid_json_is_refused(what, red, rows):
    before = rows()
    headers = {"Content-Type": "application/json"}
    answer = red.post("/v1/requests", content=JSONS[what], headers=headers)
    problem(answer, 422, UNFIT, "")
    assert rows() == before


@pytest.mark.parametrize("given", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_json_with_another_content_type_is_refused(given, red, rows):
    """Such a call could come from a form of another origin, or from a bare curl -d."""
    before = rows()
    headers = {"Content-Type": given} if given else {}
    content = json.dumps(descriptor())
    answer = red.post("/v1/requests", content=content, headers=headers)
    found = problem(answer, 415, "unsupported-media-type")
    assert "Content-Type must be application/json" in found["detail"]
    assert rows() == before


class TestTooLarge:
    SIZE = 20 * 2**20

    def test_20_mb_of_json_are_refused_by_their_announced_length(self, red, rows):
        before = rows()
        body = b'{"name": "' + b"x" * self.SIZE + b'"}'
        headers = {"Content-Type": "application/json"}
        answer = red.post("/v1/requests", content=body, headers=headers)
        found = problem(answer, 413, "payload-too-large")
        assert str(settings().body_limit_bytes) in found["detail"]
        assert rows() == before

    def test_20_mb_of_json_are_refused_by_their_real_length(self, red, rows):
        before = rows()
        pieces = (b"x" * 2**20 for _ in range(20))
        headers = {"Content-Type": "application/json"}
        answer = red.post("/v1/requests", content=pieces, headers=headers)
        problem(answer, 413, "payload-too-large")
        assert rows() == before

    def test_a_bundle_has_a_limit_of_its_own(self, red, rows):
        before = rows()
        pieces = (b"x" * 2**20 for _ in range(66))
        problem(red.put(f"/v1/bundles/{'0' * 64}", content=pieces), 413, "payload-too-large")
        assert rows() == before


# --- bundles ------------------------------------------------------------------------------------


def _zip_entry(name: str, mode: int = 0, body: bytes = b"x") -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        entry = zipfile.ZipInfo("placeholder")
        entry.filename = name  # ZipInfo itself would tidy the name up
        entry.external_attr = mode << 16
        archive.writestr(entry, body)
    return out.getvalue()


def _tar(*members: tuple[tarfile.TarInfo, bytes], mode: str = "w:gz") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:
        for member, body in members:
            member.size = len(body)
            archive.addfile(member, io.BytesIO(body))
    return out.getvalue()


def _tar_member(name: str, kind: bytes = tarfile.REGTYPE, **more: Any) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type = kind
    for field, value in more.items():
        setattr(member, field, value)
    return member


def _bomb() -> bytes:
    return zipped_as({"zeros": bytes(65 * 2**20)})


def _too_many() -> bytes:
    return zipped_as({f"f{n}": "" for n in range(65_536)})


#: what is wrong: (the archive, the pointer to its member); large ones are made by their test
BUNDLES: dict[str, tuple[bytes | Callable[[], bytes], str]] = {
    "climbs out": (zipped_as({"../evil.py": "x"}), "/..~1evil.py"),
    "climbs out from inside": (zipped_as({"a/../../evil.py": "x"}), "/a~1..~1..~1evil.py"),
    "absolute": (_zip_entry("/etc/passwd"), "/~1etc~1passwd"),
    "drive": (zipped_as({"C:/evil.py": "x"}), "/C:~1evil.py"),
    "backslash": (_zip_entry("..\\evil.py"), "/..\\evil.py"),
    "control character": (_zip_entry("a\nb.py"), "/a\nb.py"),
    "link in a zip": (_zip_entry("link", stat.S_IFLNK | 0o777, b"/etc/passwd"), "/link"),
    "device in a zip": (_zip_entry("dev", stat.S_IFCHR | 0o777), "/dev"),
    "same name but for case": (zipped_as({"A.py": "x", "a.py": "x"}), "/a.py"),
    "file and folder": (zipped_as({"a": "x", "a/b.py": "x"}), "/a~1b.py"),
    "too many files": (_too_many, "/f65535"),
    "bomb": (_bomb, "/zeros"),
    "no file": (zipped_as({}), ""),
    "no archive": (b"hello", ""),
    "cut short": (BUNDLE[:-10], ""),
    "damaged": (BUNDLE[:60] + bytes(20) + BUNDLE[80:], ""),
    "tar climbs out": (_tar((_tar_member("../evil.py"), b"x")), "/..~1evil.py"),
    "tar absolute": (_tar((_tar_member("/evil.py"), b"x")), "/~1evil.py"),
    "tar symbolic link": (_tar((_tar_member("l", tarfile.SYMTYPE, linkname="/etc"), b"")), "/l"),
    "tar hard link": (_tar((_tar_member("l", tarfile.LNKTYPE, linkname="/etc/x"), b"")), "/l"),
    "tar device": (_tar((_tar_member("d", tarfile.CHRTYPE), b"")), "/d"),
    "tar pipe": (_tar((_tar_member("p", tarfile.FIFOTYPE), b"")), "/p"),
    "tar bomb": (lambda: _tar((_tar_member("zeros"), bytes(65 * 2**20))), "/zeros"),
    "tar cut short": (_tar((_tar_member("a.py"), b"x" * 5000), mode="w")[:2000], ""),
}


@pytest.mark.parametrize("what", BUNDLES)
def test_a_bad_bundle_is_refused_and_leaves_nothing(what, as_, rows):
    made, pointer = BUNDLES[what]
    body = made() if callable(made) else made
    before = rows()
    answer = as_("red.member").put(f"/v1/bundles/{sha256(body)}", content=body)
    problem(answer, 422, UNFIT, pointer)
    assert rows() == before
    assert not list(Path(settings().store_address).rglob("*"))


def test_a_bundle_under_another_hash_is_refused_and_leaves_nothing(as_, rows):
    before = rows()
    answer = as_("red.member").put(f"/v1/bundles/{'0' * 64}", content=BUNDLE)
    problem(answer, 422, UNFIT, "{sha256}")
    assert rows() == before
    assert not list(Path(settings().store_address).rglob("*"))


# --- keys, ids, parameters ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    ["", "rh_x", "Basic cmg6eA==", "Bearer ", "Bearer rh_", f"Bearer rh_aaaaaaaa_{'a' * 49}"],
)
def test_bad_key_gives_no_access(header, as_, rows):
    before = rows()
    headers = {"Authorization": header} if header else {}
    answer = as_("").post("/v1/requests", json=descriptor(), headers=headers)
    problem(answer, 401, "unauthenticated")
    assert answer.headers["www-authenticate"] == "Bearer"
    changed = {table for table, rows_now in rows().items() if rows_now != before[table]}
    assert changed <= {"audit_events"}  # some wrong keys are recorded


@pytest.mark.parametrize(
    "path", ["/v1/requests/{req}/cancel", "/v1/requests/{req}/hold", "/v1/tasks/{tsk}/pause"]
)
def test_foreign_id_is_not_found_exactly_like_an_unknown_id(path, as_, submitted, rows):
    before = rows()
    there = path.format(req=submitted["id"], tsk=submitted["tasks"][0]["id"])
    nowhere = path.format(req="req_0", tsk="tsk_0")
    blue = as_("blue.tenant_admin")
    told = [problem(blue.post(url), 404, "not-found")["detail"] for url in (there, nowhere)]
    assert told[0].split(" id ")[0] == told[1].split(" id ")[0]
    assert rows() == before


def test_wrong_role_is_refused_and_named(as_, submitted, rows):
    before = rows()
    answer = as_("red.viewer").post(f"/v1/requests/{submitted['id']}/cancel")
    assert "viewer" in problem(answer, 403, "insufficient-scope")["detail"]
    assert rows() == before


@pytest.mark.parametrize(
    ("query", "pointer"),
    [
        ("stat=queued", "?stat"),
        ("state=qeued", "?state"),
        ("limit=0", "?limit"),
        ("limit=201", "?limit"),
        ("limit=x", "?limit"),
        ("cursor=%21", "?cursor"),
        ("cursor=" + "A" * 201, "?cursor"),
        ("label=novalue", "?label"),
        ("submitted_after=yesterday", "?submitted_after"),
        ("name=%00", "?name"),
    ],
)
def test_a_bad_query_parameter_is_refused(query, pointer, red):
    problem(red.get(f"/v1/requests?{query}"), 422, UNFIT, pointer)


def test_bad_state_is_refused_with_the_list_of_states(red):
    for path, words in (("requests", "queued, running, done"), ("tasks", "blocked, waiting")):
        found = problem(red.get(f"/v1/{path}?state=qeued"), 422, UNFIT, "?state")
        assert words in found["detail"]


def test_wait_that_is_no_number_is_refused_with_an_example(red, submitted):
    for wait in ("soon", "-1s", "1e3", "nan"):
        answer = red.get(f"/v1/requests/{submitted['id']}?wait={wait}")
        told = problem(answer, 422, UNFIT, "?wait")["detail"]
        assert "such as 30s; more than 60s counts as 60s" in told


def test_a_bad_last_event_id_is_named_as_that_header(red, submitted):
    for what in ("events", "logs"):
        url = f"/v1/requests/{submitted['id']}/{what}/stream"
        answer = red.get(url, headers={"Last-Event-ID": "!"})
        problem(answer, 422, UNFIT, "Last-Event-ID:")


def test_preset_for_an_unknown_kind_is_refused_with_the_known_kinds(as_, rows):
    before = rows()
    answer = as_("root").put("/v1/presets/train/gpu", json={"params": {}})
    assert "cpu, cuda" in problem(answer, 422, UNFIT, "{kind}")["detail"]
    assert rows() == before


def test_a_nul_in_a_path_is_refused(red):
    problem(red.get("/v1/requests/req_%00"), 422, UNFIT)


def test_a_bad_idempotency_key_is_refused(red, rows):
    before = rows()
    headers = {"Idempotency-Key": "x" * 201}
    answer = red.post("/v1/requests", json=descriptor(), headers=headers)
    problem(answer, 422, UNFIT, "idempotency-key:")
    assert rows() == before


# --- what somebody between us and the caller could read otherwise ---------------------------------


@pytest.mark.parametrize("name", ["Authorization", "Idempotency-Key", "Content-Range", "If-Match"])
def test_repeated_header_is_refused(name, red, rows):
    before = rows()
    answer = red.post("/v1/requests", json=descriptor(), headers=[(name, "a"), (name, "b")])
    problem(answer, 422, "validation-error", f"{name}:")
    assert rows() == before


@pytest.mark.parametrize("packed", ["gzip", "br", "identity, gzip"])
def test_compressed_body_is_refused(packed, red):
    body = gzip.compress(json.dumps(descriptor()).encode())
    headers = {"Content-Type": "application/json", "Content-Encoding": packed}
    answer = red.post("/v1/requests", content=body, headers=headers)
    assert "compressed bodies" in problem(answer, 415, "unsupported-media-type")["detail"]


@pytest.mark.parametrize("query", ["name=%ff", "name=a%ed%a0%80", "label=a:%c3"])
def test_query_that_is_not_utf_8_is_refused(query, red):
    name = query.partition("=")[0]
    problem(red.get(f"/v1/requests?{query}"), 422, "validation-error", f"?{name}")


def test_bad_part_of_a_path_is_named(red):
    problem(red.get("/v1/requests/a%00b"), 422, "validation-error", "{id}")


def test_number_with_very_many_digits_is_refused_in_our_words(red):
    body = '{"priority": ' + "9" * 5000 + ', "tasks": []}'
    headers = {"Content-Type": "application/json"}
    answer = red.post("/v1/requests", content=body, headers=headers)
    told = problem(answer, 422, "validation-error", "")["detail"]
    assert "must have at most 1000 digits" in told


@pytest.mark.parametrize("at", ["9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+14:00"])
@pytest.mark.parametrize("route", ["/v1/requests", "/v1/requests:validate"])
def test_time_outside_the_years_1_to_9999_in_utc_is_refused(at, route, red):
    tasks = [{"name": "a", "run": {"job": "train:Train"}, "start": {"not_before": at}}]
    answer = red.post(route, json=descriptor(tasks=tasks))
    problem(answer, 422, "validation-error", "/tasks/0/start/not_before")
