"""Attacks by way of a browser: forged calls, scripts in texts, links that lead away, odd paths.

Made from the OpenAPI document and from the list of pages, so what is new is tried too.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import JSON, String, text
from sqlalchemy.orm import Session

from app.api.access import auth
from app.api.http_protocol import BoundedProtocol
from app.db.models import Base
from app.main import create_app
from app.messaging.live_updates import changes
from tests.app.api.access.test_foreign import ADDRESSES, OPERATIONS, _example
from tests.app.conftest import descriptor, problem, rows
from tests.app.documented import REQUEST, documented
from tests.security.test_half_open import serving
from tests.security.test_smuggling import sent

__all__ = ["rows"]  # a fixture

pytestmark = pytest.mark.security

# --- calls that a page of another origin makes ----------------------------------------------------

CHANGING = [name for name in OPERATIONS if name.split()[0] not in ("GET", "HEAD")]
TAKING_JSON = [
    name
    for name in CHANGING
    if "application/json" in OPERATIONS[name].get("requestBody", {}).get("content", {})
]
ELSEWHERE: list[dict[str, str]] = [
    {},
    {"Origin": "https://evil.example"},
    {"Origin": "http://testserver.evil.example"},
    {"Origin": "http://testserver:8001"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "none"},
    {"Sec-Fetch-Site": "cross-site", "Origin": "http://testserver"},
    {"Referer": "http://testserver/ui/"},
]


def _browser(app: Any, session: Session, key: str) -> TestClient:
    _, cookie = auth.sign_in(session, key)
    session.commit()
    return TestClient(app, cookies={auth.COOKIE: cookie}, follow_redirects=False)


def _path(name: str) -> str:
    """Return the path of the operation with the examples of its parameters."""
    path = name.split()[1]
    for parameter in OPERATIONS[name].get("parameters", ()):
        if parameter["in"] == "path":
            path = path.replace(f"{{{parameter['name']}}}", str(parameter["example"]))
    return path


@pytest.mark.parametrize("name", CHANGING)
def test_cookie_changes_nothing_in_a_call_from_elsewhere(name, app, world, session, rows):
    browser = _browser(app, session, world.keys["root"])
    media = OPERATIONS[name].get("requestBody", {}).get("content", {}).get("application/json")
    body = {"json": _example(media)} if media else {}
    before = rows()
    for headers in ELSEWHERE:
        answer = browser.request(name.split()[0], _path(name), headers=headers, **body)
        told = problem(answer, 403, "insufficient-scope")["detail"]
        assert "page" in told, headers
    assert rows() == before
    ours = {"Sec-Fetch-Site": "same-origin"}
    own = browser.request(name.split()[0], _path(name), headers=ours, **body)
    assert told not in own.text


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "text/json"])
def test_form_of_another_origin_is_no_json(kind, as_, rows, subtests):
    before, root, headers = rows(), as_("root"), {"Content-Type": kind}
    for name in TAKING_JSON:
        media = OPERATIONS[name]["requestBody"]["content"]["application/json"]
        with subtests.test(name):
            content = json.dumps(_example(media))
            answer = root.request(name.split()[0], _path(name), content=content, headers=headers)
            problem(answer, 415, "unsupported-media-type")
            assert rows() == before


# --- scripts in what tenants write ----------------------------------------------------------------

HOSTILE = [
    "<script>alert(1)</script>",
    "\"><img src=x onerror='alert(1)'>",
    "</textarea></script><svg/onload=alert(1)>",
    "{{7*191}}<b>${7*191}</b>",
]
_MARK = "secret of vision"


def _spoil(session: Session, hostile: str) -> None:
    """Replace what the tenant vision wrote, in all columns of text and JSON."""
    for table in Base.metadata.sorted_tables:
        if table.name == "audit_events":
            continue  # these are never changed
        for column in table.columns:
            if isinstance(column.type, String):
                value, words = f'"{column.name}"', hostile
            elif isinstance(column.type, JSON):
                value, words = f'"{column.name}"::text', json.dumps(hostile)[1:-1]
            else:
                continue
            cast = f"::{column.type.compile(session.get_bind().dialect)}"
            session.execute(
                text(
                    f'update {table.name} set "{column.name}" = '
                    f"replace({value}, :mark, :words){cast} where {value} like '%' || :mark || '%'"
                ),
                {"mark": _MARK, "words": words},
            )
    session.commit()


def test_pages_show_what_a_tenant_wrote_as_text(app, world, session):
    keys = documented(session)
    _spoil(session, " ".join(HOSTILE))
    shown = set()
    for key in (keys["tenant_admin"], world.keys["root"]):
        browser = _browser(app, session, key)
        for address in (one for many in ADDRESSES.values() for one in many):
            with mock.patch.object(changes, "closing", True):
                page = browser.get(address.format(REQUEST["id"])).text
            assert [one for one in HOSTILE if one in page] == [], address
            if " ".join(HOSTILE) in html.unescape(page):
                shown.add(address)
    assert len(shown) >= 4, "what the tenant wrote is on some pages"


@pytest.mark.parametrize("hostile", HOSTILE[:3])
@pytest.mark.parametrize(
    "address", ["/ui/{}", "/ui/login?next={}", "/ui/requests/{}", "/problems/{}", "/v1/{}", "/{}",
                "/v1/requests/{}", "/v1/requests?state={}", "/v1/requests?{}=1", "/docs/{}"],
)  # fmt: skip
def test_address_is_never_part_of_a_page_as_it_stands(address, hostile, app, world, session):
    browser = _browser(app, session, world.keys["red.member"])
    answer = browser.get(address.format(hostile.replace("/", "%2F")))
    if answer.headers.get("content-type", "").startswith("text/html"):
        assert hostile not in answer.text
    else:
        assert answer.headers.get("content-type", "application/problem+json").endswith("json")
        assert answer.headers["x-content-type-options"] == "nosniff"


# --- links that lead away -------------------------------------------------------------------------

AWAY = [
    "https://evil.example/", "//evil.example/", "///evil.example", "/\\evil.example",
    "\\\\evil.example", "/ui\\..\\..\\evil", "http:evil.example", "javascript:alert(1)",
    "data:text/html,x", " //evil.example", "\t//evil.example", "/%09/evil.example",
    "/ui/\\evil.example", "/uix", "evil.example/ui/", "https://testserver@evil.example/ui/",
    "/ui/\r\nSet-Cookie: a=b", "/ui/\nLocation: https://evil.example", "",
]  # fmt: skip


@pytest.mark.parametrize("next", AWAY)
def test_signing_in_leads_to_a_page_of_ours(next, as_, world):
    form = {"key": world.keys["red.member"], "next": next}
    answer = as_("").post("/ui/login", data=form, headers={"Sec-Fetch-Site": "same-origin"})
    assert answer.status_code == 303
    assert re.fullmatch(r"/ui/[!-~]*", answer.headers["location"])
    assert "a" not in answer.cookies
    door = as_("").get("/ui/login", params={"next": next}).text
    [kept] = re.findall(r'name="next" value="([^"]*)"', door)
    assert html.unescape(kept).startswith("/ui/")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving(BoundedProtocol, create_app()) as (found, _):
        yield found


@pytest.mark.parametrize(
    "target",
    ["//evil.example/", "//evil.example/ui/", "//evil.example/v1/requests/", "/\\evil.example/",
     "/v1/requests/", "/problems/", "/docs/", "/static", "/static/", "/ui/requests/", "http://evil.example/ui/"],
)  # fmt: skip
def test_no_address_redirects_to_another_host(target, port):
    got = sent(
        port, f"GET {target} HTTP/1.1\r\nHost: here.example\r\nConnection: close\r\n\r\n".encode()
    )
    for line in got.partition(b"\r\n\r\n")[0].split(b"\r\n"):
        name, _, value = line.decode().partition(": ")
        if name.lower() == "location":
            assert urlsplit(value).netloc in ("", "here.example")
            assert not value.startswith(("//", "/\\"))


# --- paths ----------------------------------------------------------------------------------------

UP = ["..", "%2e%2e", "%2E.", "..%2f..", "%252e%252e", "....//..", "..;", "..\\..", "..%5c..",
      "%c0%ae%c0%ae", "..%00", ".%2e%2f.%2e"]  # fmt: skip
SECRET = "def mount(app: FastAPI)"  # in app/pages/site.py


@pytest.mark.parametrize("up", UP)
def test_no_path_leads_out_of_the_static_files(up, port):
    assert SECRET in Path("app/pages/site.py").read_text()
    for path in (f"/static/{up}/site.py", f"/static/vendor/{up}/{up}/site.py",
                 f"/static/{up}/{up}/{up}/{up}/{up}/{up}/etc/passwd",
                 f"/docs/{up}/app/pages/site.py", f"/docs/howto/{up}/{up}/app/pages/site.py",
                 f"/docs/{up}/{up}/{up}/{up}/{up}/{up}/etc/passwd"):  # fmt: skip
        call = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        got = sent(port, call.encode())
        assert got.startswith((b"HTTP/1.1 404 ", b"HTTP/1.1 400 ", b"HTTP/1.1 405 ")), path
        assert SECRET.encode() not in got
        assert b"root:" not in got


NAMING = ["/v1/bundles/{}", "/v1/graphs/{}", "/v1/datablocks/{}", "/v1/checkpoints/{}/tensors",
          "/v1/tasks/TASK/outputs/{}", "/v1/requests/{}", "/v1/presets/{}/cpu"]  # fmt: skip


@pytest.mark.parametrize("up", ["..%2f..", "%2e%2e", "..%5c..", "..%00", "%2fetc%2fpasswd"])
def test_no_name_in_a_path_leads_to_a_file(up, red, submitted, subtests):
    for path in NAMING:
        with subtests.test(path):
            target = path.replace("TASK", submitted["tasks"][0]["id"]).format(up)
            assert red.get(target).status_code in (404, 405, 422)


# --- versions, and calls that take effect once ----------------------------------------------------

NO_MATCH = ['"7"', 'W/"1"', "1", '"1', "'1'", '"01"', '" 1"', '"-1"', '"1.0"', '"1e0"', '"٣"',
            '"99999999999999999999999999"', '"1"x', '"*"', "W/*"]  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/tenants/ten_red", "/v1/users/usr_red.member"])
def test_version_that_is_not_the_newest_changes_nothing(path, as_, rows, subtests):
    before, root = rows(), as_("root")
    for match in NO_MATCH:
        with subtests.test(match):
            headers = [("If-Match", match.encode())]
            answer = root.patch(path, json={"weight": 3.0}, headers=headers)
            assert answer.status_code in (412, 422, 428), answer.text
            assert rows() == before


@pytest.mark.parametrize(
    ("key", "status"),
    [("a", 202), ("!", 202), ("~" * 200, 202), ("a,b", 202), ('"a"', 202), ("../x", 202),
     ("~" * 201, 422), ("a b", 422), ("é", 422), ("\x7f", 422), ("", 422)],
)  # fmt: skip
def test_key_of_a_call_that_takes_effect_once_is_plain(key, status, red):
    headers = [("Idempotency-Key", key.encode())]
    answer = red.post("/v1/requests", json=descriptor(), headers=headers)
    assert answer.status_code == status, answer.text
    if status == 202:
        again = red.post("/v1/requests", json=descriptor(), headers=headers)
        assert again.headers["idempotency-replayed"] == "true"
        assert again.json() == answer.json()
