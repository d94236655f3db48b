"""What a key of one tenant learns of another tenant's things: nothing, by any operation.

Made from the OpenAPI document, so an operation or a parameter that is new is tried, or fails here
until it is said what it names.  Of the things of the tenant vision (`documented`) everything is put
wherever something can be named, by people of blue: the answer must be the one for a thing that does
not exist, letter by letter.  Whatever lists, streams or shows must not hold anything of vision's.

Who may do what within a tenant is the table of test_roles.py.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import delete, func

from app.api.access import auth
from app.db.models import Request, RequestEvent, Reservation, Webhook
from app.local import openapi_contract
from app.messaging.live_updates import changes
from app.pages import site
from tests.app.conftest import BUNDLE, descriptor, sha256
from tests.app.documented import (
    CHANNEL,
    CHECKPOINT,
    CHILD,
    DATABLOCK,
    DECISION,
    DELIVERY,
    ENVIRONMENT,
    KEY,
    MOUNT,
    REQUEST,
    RESERVATION,
    SECRET,
    TASK,
    TENANT,
    USER,
    WAITING_REQUEST,
    WAITING_TASK,
    WEBHOOK,
    documented,
)

BUNDLE_OF_VISION = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
IDS = [
    REQUEST["id"], TASK["id"], WAITING_REQUEST, WAITING_TASK, TENANT["id"], CHILD, USER["id"],
    KEY["id"], CHECKPOINT["id"], BUNDLE_OF_VISION, str(DECISION), WEBHOOK["id"], DELIVERY["id"],
    DATABLOCK["name"], MOUNT["name"], SECRET["name"], ENVIRONMENT["id"], CHANNEL["id"],
    RESERVATION["id"],
]  # fmt: skip
#: nothing of this is ever in an answer to blue, unless blue said it first
MARKS = [
    *IDS,
    "7" * 32,
    "6" * 32,
    "vision",
    "secret of",
    "secret-of",
    "secret_of",
    "secret.invalid",
]

#: everybody sees them: devices are what tenants share
SHARED = ("/v1/devices", "/v1/enrolments", "/v1/hosts", "/v1/islands", "/v1/presets")
#: parameters that name nothing of anybody's
HARMLESS = {
    "limit", "tail", "wait", "format", "interval", "group_by", "since", "until", "submitted_after",
    "state", "phase", "kind", "island", "if-match", "operation", "action", "target_kind", "service",
    "tenant_wide", "latest", "sort", "range", "if-range", "if-none-match", "content-range", "grep",
    "keep", "for_s", "devices", "device_id",
    "path",  # within the working folder of the task before it
}  # fmt: skip
#: parts of a path that only have a meaning below the thing before them
WITHIN = {
    ("GET /v1/tasks/{id}/outputs/{name}", "name"),
    ("PUT /v1/secrets/{name}", "name"),  # each user has own names
    ("POST /v1/datablocks/{name}/folder", "name"),  # each tenant has own names
    ("GET /v1/datablocks/{name}/files/{sha256}", "sha256"),
}
#: the others, and what of vision's they could name
NAMES = {
    "tenant_id": [TENANT["id"], CHILD],
    "parent_id": [TENANT["id"]],
    "user_id": [USER["id"]],
    "request_id": [REQUEST["id"], WAITING_REQUEST],
    "id_ends": [REQUEST["id"][-8:]],
    "lot": [TASK["id"]],
    "task": [TASK["id"], "secret-of-vision"],
    "name": ["secret of vision", DATABLOCK["name"], MOUNT["name"]],
    "sha256": [DATABLOCK["sha256"]],
    "label": ["secret:of vision"],
    "names": ["secret"],
    "key_id": [KEY["id"]],
    "target_id": [TENANT["id"]],
    "known": [f"1:{'0' * 64}"],
}
#: what a reader goes on after; `CURSORS` tests them
CURSORS = {"cursor", "Last-Event-ID"}

#: The committed document, which is that of the service: tests/app/api/test_openapi.py.  Each test
#: process reads it; to make it would take each of them two seconds.
DOCUMENT = json.loads(openapi_contract.PLACE.read_text())
OPERATIONS = {
    f"{method.upper()} {path}": operation
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
    if path.startswith("/v1/")
}
SAME_ID = {"X-Request-ID": "an-id"}  # of every call, so that answers can be compared
COUNTED = {"ratelimit"}  # headers that differ from one call to the next
PEOPLE = ("blue.tenant_admin", "blue.member", "blue.viewer")


@pytest.fixture
def vision(world, session) -> dict[str, str]:
    return documented(session)


@pytest.fixture
def own(as_, vision, session) -> dict[str, str]:
    """What blue has of its own, by the collection it is in; its request has ended.

    The events are deleted: those of a transaction that is still open make a stream wait for them.
    """
    client = as_("blue.member")
    client.put(f"/v1/bundles/{sha256(BUNDLE)}", content=BUNDLE)
    submitted = client.post("/v1/requests", json=descriptor()).json()
    session.get_one(Request, submitted["id"]).state = "done"
    session.execute(delete(RequestEvent).where(RequestEvent.tenant_id == "ten_blue"))
    hook = {"tenant_id": "ten_blue", "url": "https://blue.invalid", "secret": ""}
    named = {"name": "its-own", "kind": "slack", "key_id": "k", "encrypted": b""}
    session.add_all([Webhook(id="whk_blue", **hook), Webhook(id="chn_blue", **hook, **named)])
    its = {"name": "its-own", "island": "isle", "tenant_id": "ten_blue", "devices": {"cpu": 1}}
    times = {"begins_at": func.now(), "ends_at": func.now()}
    session.add(Reservation(id="rsv_blue", **its, **times))
    session.commit()
    return {
        "requests": submitted["id"],
        "tasks": submitted["tasks"][0]["id"],
        "tenants": "ten_blue",
        "users": "usr_blue.member",
        "webhooks": "whk_blue",
        "datablocks": "its-own",
        "channels": "chn_blue",
        "reservations": "rsv_blue",
        "secrets": "ITS_OWN",
    }


# --- asking -------------------------------------------------------------------------------------


def ask(client: TestClient, name: str, path: str, **given: Any) -> tuple[int, str, str]:
    """Status, headers and text of an answer; streams end at once."""
    method = name.split()[0]
    body = OPERATIONS[name].get("requestBody", {}).get("content", {})
    if "application/json" in body and "json" not in given:
        given["json"] = _example(body["application/json"])
    answer = client.request(method, path, headers=SAME_ID | given.pop("headers", {}), **given)
    headers = sorted(f"{k}: {v}" for k, v in answer.headers.items() if k not in COUNTED)
    return answer.status_code, "\n".join(headers), answer.text


def _example(media: Any) -> Any:
    schema = media["schema"]
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        schema = DOCUMENT["components"]["schemas"][name]
    return media.get("example") or schema["examples"][0]


def missing(id: str) -> str:
    """As long and of the same make, but of nothing."""
    changed = id[:-1] + ("8" if id[-1] != "8" else "9")
    return changed if id.isdecimal() else changed[:-3] + "fff"


def same(answer: tuple[int, str, str], id: str, other: tuple[int, str, str], absent: str) -> None:
    told, untold = (
        [str(part).replace(id, "ID") for part in answer],
        [str(part).replace(absent, "ID") for part in other],
    )
    assert told == untold


def innocent(text: str, said: str = "") -> None:
    found = [mark for mark in MARKS if mark in text and mark not in said]
    assert not found, f"{found} in {text[:2000]}"


def named_in_paths() -> Iterator[tuple[str, str]]:
    """Operations at the address of one thing that belongs to somebody, and that thing of vision."""
    for name, operation in OPERATIONS.items():
        path = name.split()[1]
        for parameter in operation.get("parameters", ()):
            if parameter["in"] != "path" or (name, parameter["name"]) in WITHIN:
                continue
            if not path.startswith(SHARED):
                yield name, str(parameter["example"])


# --- the tests ----------------------------------------------------------------------------------


def test_every_parameter_is_classified_by_what_it_names():
    names = {
        (parameter["in"], parameter["name"])
        for operation in OPERATIONS.values()
        for parameter in operation.get("parameters", ())
    }
    named = {name for where, name in names if where != "path"}
    assert named == HARMLESS | NAMES.keys() | CURSORS | {"idempotency-key"}


@pytest.mark.parametrize(("name", "id"), [*named_in_paths()])
@pytest.mark.slow
def test_path_with_a_foreign_id_is_not_found(name, id, as_, vision, rows):
    assert id in IDS, "an example that is not of vision"
    path = name.split()[1]
    before = rows()
    for who in PEOPLE:
        with mock.patch.object(changes, "closing", True):
            found, absent = (ask(as_(who), name, _filled(path, one)) for one in (id, missing(id)))
        same(found, id, absent, missing(id))
        innocent(found[2], said=id)
        assert found[0] in (404, 403, 422), found
    if not name.startswith("PUT"):  # a bundle's address is that of its bytes, whoever sends them
        assert rows() == before


def _filled(path: str, id: str) -> str:
    before, _, rest = path.partition("{")
    return before + id + rest.partition("}")[2]


LISTS = [name for name in OPERATIONS if name.startswith("GET ") and "{" not in name]


def test_lists_and_sums_show_nothing_foreign(as_, vision, subtests):
    for name, who in itertools.product(LISTS, PEOPLE):
        with subtests.test(name, who=who):
            status, _, text = ask(as_(who), name, name.split()[1])
            assert status in (200, 403)
            innocent(text)


def filters() -> Iterator[tuple[str, str, str]]:
    for name, operation in OPERATIONS.items():
        for parameter in operation.get("parameters", ()):
            for value in NAMES.get(parameter["name"], ()):
                if parameter["in"] == "query" and not name.split()[1].startswith("/v1/checkpoints"):
                    yield name, parameter["name"], value


@pytest.mark.slow
def test_filter_with_a_foreign_id_finds_nothing(as_, own, subtests):
    for (name, parameter, value), who in itertools.product(filters(), PEOPLE):
        path = _of_own(name.split()[1], own)
        with subtests.test(name, parameter=parameter, value=value, who=who):
            found, absent = (
                ask(as_(who), name, path, params={parameter: one})
                for one in (value, missing(value))
            )
            same(found, value, absent, missing(value))
            innocent(found[2], said=value)


def _of_own(path: str, own: dict[str, str]) -> str:
    return _filled(path, own[path.split("/")[2]]) if "{" in path else path


def readers() -> Iterator[tuple[str, str, str]]:
    for name, operation in OPERATIONS.items():
        for parameter in operation.get("parameters", ()):
            if parameter["name"] in CURSORS and not name.split()[1].startswith(SHARED):
                yield name, parameter["in"], parameter["name"]


@pytest.mark.slow
def test_cursor_of_another_tenant_shows_nothing_foreign(app, as_, own, vision, subtests):
    """Vision got it, and blue has it in its hands."""
    of_vision = TestClient(app, headers={"Authorization": f"Bearer {vision['tenant_admin']}"})
    for name, where, parameter in readers():
        with subtests.test(name, parameter=parameter):
            path = name.split()[1]
            listed = _filled(path, _example_of_path(name)).removesuffix("/stream")
            cursor = of_vision.get(listed, params={"limit": 1}).json()["next_cursor"]
            assert cursor, f"vision has not two of what {listed} lists"
            given = {"params" if where == "query" else "headers": {parameter: cursor}}
            for who in PEOPLE:
                status, _, text = ask(as_(who), name, _of_own(path, own), **given)
                assert status in (200, 403, 422), who
                innocent(text)


def _example_of_path(name: str) -> str:
    parameters = OPERATIONS[name].get("parameters", ())
    return next((str(p["example"]) for p in parameters if p["in"] == "path"), "")


def bodies() -> Iterator[tuple[str, str]]:
    for name, operation in OPERATIONS.items():
        media = operation.get("requestBody", {}).get("content", {}).get("application/json")
        if media is not None and "{" not in name:
            text = json.dumps({**_example(media), **MORE.get(name, {})})
            yield from ((name, id) for id in IDS if id in text)


#: fields that the examples leave out
MORE: dict[str, Any] = {
    "POST /v1/tenants": {"name": "new", "parent_id": TENANT["id"]},
    "POST /v1/users": {"name": "new", "tenant_id": TENANT["id"]},
    "POST /v1/webhooks": {"tenant_id": TENANT["id"]},
    "POST /v1/channels": {"tenant_id": TENANT["id"]},
    "POST /v1/reservations": {"tenant_id": TENANT["id"]},
}


@pytest.mark.parametrize(("name", "id"), [*bodies()])
def test_body_with_a_foreign_id_is_refused(name, id, as_, own):
    media = OPERATIONS[name]["requestBody"]["content"]["application/json"]
    text = json.dumps({**_example(media), **MORE.get(name, {})})
    for who in PEOPLE:
        found, absent = (
            ask(as_(who), name, name.split()[1], json=json.loads(text.replace(id, one)))
            for one in (id, missing(id))
        )
        same(found, id, absent, missing(id))
        innocent(found[2], said=text)
        assert found[0] in (403, 422), found


def test_foreign_checkpoint_in_a_descriptor_is_refused(as_, own):
    id = CHECKPOINT["id"]
    tasks = [{"name": "t", "run": {"job": "train:Train"}, "from_checkpoint": id}]
    text = json.dumps(descriptor(tasks=tasks))
    for name in ("POST /v1/requests", "POST /v1/requests:validate"):
        found, absent = (
            ask(as_("blue.member"), name, name.split()[1], json=json.loads(text.replace(id, one)))
            for one in (id, missing(id))
        )
        assert found[0] == 422
        same(found, id, absent, missing(id))


def test_foreign_idempotency_key_has_no_effect(app, as_, own, vision):
    """The same key of another tenant's member neither replays nor collides."""
    taking = [n for n, o in OPERATIONS.items() if _has(o, "idempotency-key")]
    assert taking == ["POST /v1/requests"]
    answer = as_("blue.member").post(
        "/v1/requests", json=descriptor(), headers={"Idempotency-Key": "a-key"}
    )
    assert answer.status_code == 202, answer.text
    assert "idempotency-replayed" not in answer.headers
    innocent(answer.text)


def _has(operation: Any, parameter: str) -> bool:
    return any(each["name"] == parameter for each in operation.get("parameters", ()))


# --- the pages ----------------------------------------------------------------------------------

PAGES = {route.path for router in site.routers() for route in router.routes}
#: addresses of the pages with what could name something of vision's: {} is its request
ADDRESSES = {
    "/": ["/"],
    "/ui/": ["/ui/"],
    "/ui/login": ["/ui/login"],
    "/ui/login/oidc": [],  # it leads to the identity provider
    "/ui/login/oidc/callback": ["/ui/login/oidc/callback?state={}"],
    "/ui/logout": [],  # it only signs out
    "/ui/datablocks": ["/ui/datablocks", "/ui/datablocks?before=blk_{}"],
    "/ui/environments": ["/ui/environments"],
    "/ui/secrets": ["/ui/secrets"],
    "/ui/queue": ["/ui/queue"],
    "/ui/requests": [
        "/ui/requests",
        "/ui/requests?before={}",
        "/ui/requests?state=running",
        "/ui/requests?q={}&sort=label.team",
    ],
    "/ui/requests/{id}": ["/ui/requests/{}"],
    "/ui/requests/{id}/again": ["/ui/requests/{}/again"],
    "/ui/requests/{id}/log": ["/ui/requests/{}/log", "/ui/requests/{}/log?grep=a&after=1"],
    "/ui/compare": ["/ui/compare?run={}"],
    "/ui/tenants": ["/ui/tenants"],
    "/ui/tenants/{id}": ["/ui/tenants/{}"],
    "/ui/members": ["/ui/members", "/ui/members?cursor={}"],
    "/ui/members/{id}": ["/ui/members/{}"],
    "/ui/reservations": ["/ui/reservations", "/ui/reservations?cursor={}"],
    "/ui/channels": ["/ui/channels", "/ui/channels?cursor={}"],
    "/ui/webhooks": ["/ui/webhooks"],
    "/ui/webhooks/{id}": ["/ui/webhooks/{}"],
    "/ui/audit": ["/ui/audit", "/ui/audit?target_id={}", "/ui/audit?user_id={}"],
    "/ui/devices": ["/ui/devices"],
    "/ui/decisions": ["/ui/decisions", "/ui/decisions?cursor={}"],
    "/ui/stream": ["/ui/stream", "/ui/stream?request={}"],
    "/ui/{rest:path}": ["/ui/{}", "/ui/requests/{}/more"],
}


def test_every_page_is_classified_by_what_it_could_show():
    assert ADDRESSES.keys() == PAGES


@pytest.mark.slow
def test_page_shows_nothing_foreign(app, world, vision, session, subtests):
    id = REQUEST["id"]
    for who in PEOPLE:
        _, cookie = auth.sign_in(session, world.keys[who])
        session.commit()
        visitor = TestClient(app, headers=SAME_ID, cookies={auth.COOKIE: cookie})
        for address in itertools.chain.from_iterable(ADDRESSES.values()):
            with subtests.test(address, who=who), mock.patch.object(changes, "closing", True):
                found, absent = (visitor.get(address.format(one)) for one in (id, missing(id)))
                assert found.status_code == absent.status_code
                assert found.text.replace(id, "ID") == absent.text.replace(missing(id), "ID")
                innocent(found.text, said=address.format(id))
