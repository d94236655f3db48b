"""Who may do what: every operation under /v1 by every role and every scope, as one table.

`stranger` columns are people of another tenant.  They never get a 403 about a thing of red's: that
it exists is not told; tests/app/api/access/test_foreign.py tries to learn it in every way there is.
"""

from __future__ import annotations

import contextlib
import hashlib

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import delete, func, update

from app.api.access import auth
from app.api.descriptor_schema import GRAPH_EXAMPLE
from app.core.fairness.budget import Budget
from app.core.security.scopes import SCOPES
from app.data import graphs
from app.db.models import (
    ApiKey,
    Checkpoint,
    Datablock,
    Delivery,
    Enrolment,
    Environment,
    Graph,
    Mount,
    Preset,
    Request,
    RequestEvent,
    Reservation,
    Secret,
    Task,
    Tenant,
    User,
    Webhook,
)
from app.main import app
from app.messaging import webhooks
from app.scheduling import budgets
from tests.app.conftest import BUNDLE, descriptor, sha256

WHO = (
    "", "red.viewer", "red.other", "red.member", "red.tenant_admin",
    "blue.member", "blue.tenant_admin", "root",
)  # fmt: skip

# {req}, {tsk}: a running request of red.member and its task; {key}: a key of red.member; {ckp}: a
# checkpoint of that task, whose bytes are lost, as are those of its output y; {whk}, {msg}: a
# webhook of red and a message to it; {chn}: a channel of red; {rsv}: a reservation for red;
# {mnt}: a mount for red; {env}: an
# environment of red; {graph}: one that red has sent; {blk}: a datablock of red.member, its bytes
# lost likewise
TABLE = """
#                                       the answers to WHO, in its order         scope
POST   /v1/requests                     401  403  202  202  202  422  422  403  work:write
POST   /v1/requests:validate            401  403  200  200  200  422  422  403  work:read
GET    /v1/requests                     401  200  200  200  200  200  200  200  work:read
GET    /v1/requests/{req}               401  200  200  200  200  404  404  200  work:read
PATCH  /v1/requests/{req}               401  403  403  200  200  404  404  200  work:write
POST   /v1/requests/{req}/hold          401  403  403  202  202  404  404  202  work:write
POST   /v1/requests/{req}/release       401  403  403  202  202  404  404  202  work:write
POST   /v1/requests/{req}/retry         401  403  403  409  409  404  404  409  work:write
POST   /v1/requests/{req}/cancel        401  403  403  202  202  404  404  202  work:write
DELETE /v1/requests/{req}               401  403  403  409  409  404  404  409  work:write
GET    /v1/requests/{req}/descriptor    401  200  200  200  200  404  404  200  work:read
GET    /v1/requests/{req}/plan          401  200  200  200  200  404  404  200  work:read
GET    /v1/requests/{req}/events        401  200  200  200  200  404  404  200  work:read
GET    /v1/requests/{req}/events/stream 401  200  200  200  200  404  404  200  work:read
GET    /v1/requests/{req}/logs          401  200  200  200  200  404  404  200  work:read
GET    /v1/requests/{req}/logs/text     401  200  200  200  200  404  404  200  work:read
GET    /v1/requests/{req}/logs/stream   401  200  200  200  200  404  404  200  work:read
GET    /v1/tasks                        401  200  200  200  200  200  200  200  work:read
GET    /v1/tasks/{tsk}                  401  200  200  200  200  404  404  200  work:read
GET    /v1/tasks/{tsk}/descriptor       401  200  200  200  200  404  404  200  work:read
GET    /v1/tasks/{tsk}/outputs/y        401  410  410  410  410  404  404  410  work:read
GET    /v1/tasks/{tsk}/explain          401  200  200  200  200  404  404  200  work:read
GET    /v1/tasks/{tsk}/metrics          401  200  200  200  200  404  404  200  work:read
GET    /v1/tasks/{tsk}/checkpoints      401  200  200  200  200  404  404  200  work:read
GET    /v1/tasks/{tsk}/placements       401  200  200  200  200  404  404  200  work:read
POST   /v1/tasks/{tsk}/pause            401  403  403  202  202  404  404  202  work:write
POST   /v1/tasks/{tsk}/resume           401  403  403  202  202  404  404  202  work:write
POST   /v1/tasks/{tsk}/checkpoint       401  403  403  202  202  404  404  202  work:write
POST   /v1/tasks/{tsk}/migrate          401  403  403  202  202  404  404  202  work:write
POST   /v1/tasks/{tsk}/resize           401  403  403  202  202  404  404  202  work:write
POST   /v1/tasks/{tsk}/cancel           401  403  403  202  202  404  404  202  work:write
POST   /v1/tasks/{tsk}/tunnels          401  403  403  201  201  404  404  201  work:write
GET    /v1/tasks/{tsk}/files            401  403  403  409  409  404  404  409  work:read
GET    /v1/tasks/{tsk}/files/content    401  403  403  409  409  404  404  409  work:read
GET    /v1/checkpoints/{ckp}            401  200  200  200  200  404  404  200  work:read
GET    /v1/checkpoints/{ckp}/tensors    401  410  410  410  410  404  404  410  work:read
GET    /v1/checkpoints/{ckp}/safetensors 401  410  410  410  410  404  404  410  work:read
GET    /v1/requests/{req}/best-checkpoint 401  404  404  404  404  404  404  404  work:read
POST   /v1/checkpoints/{ckp}/pin        401  403  403  200  200  404  404  200  work:write
POST   /v1/checkpoints/{ckp}/unpin      401  403  403  200  200  404  404  200  work:write
PUT    /v1/bundles/{sha}                401  403  200  200  200  201  201  201  work:write
GET    /v1/bundles/{sha}                401  200  200  200  200  404  404  404  work:read
HEAD   /v1/bundles/{sha}                401  200  200  200  200  404  404  404  work:read
GET    /v1/bundles                      401  200  200  200  200  200  200  200  work:read
PUT    /v1/graphs/{graph}               401  403  200  200  200  201  201  201  work:write
GET    /v1/graphs/{graph}               401  200  200  200  200  404  404  404  work:read
GET    /v1/graphs                       401  200  200  200  200  200  200  200  work:read
PUT    /v1/datablocks/{blk}             401  403  200  200  200  202  202  202  work:write
GET    /v1/datablocks/{blk}             401  410  410  410  410  404  404  404  work:read
HEAD   /v1/datablocks/{blk}             401  200  200  200  200  404  404  404  work:read
DELETE /v1/datablocks/{blk}@1           401  403  403  200  200  404  404  404  work:write
PUT    /v1/files                        401  403  200  200  200  200  200  200  work:write
PUT    /v1/files/{sha}                  401  403  202  202  202  202  202  202  work:write
POST   /v1/datablocks/{blk}/folder      401  403  202  202  202  202  202  202  work:write
GET    /v1/datablocks/{blk}/files/{sha} 401  404  404  404  404  404  404  404  work:read
GET    /v1/datablocks                   401  200  200  200  200  200  200  200  work:read
GET    /v1/fair-share                   401  200  200  200  200  200  200  200  usage:read
GET    /v1/queue                        401  200  200  200  200  200  200  200  usage:read
GET    /v1/usage                        401  200  200  200  200  200  200  200  usage:read
GET    /v1/decisions                    401  200  200  200  200  200  200  200  usage:read
GET    /v1/decisions/0                  401  404  404  404  404  404  404  404  usage:read
POST   /v1/tenants                      401  403  403  403  201  403  201  201  admin:write
GET    /v1/tenants                      401  200  200  200  200  200  200  200  admin:read
GET    /v1/tenants/ten_red              401  200  200  200  200  404  404  200  admin:read
PATCH  /v1/tenants/ten_red              401  403  403  403  403  404  404  200  admin:write
DELETE /v1/tenants/ten_red              401  403  403  403  403  404  404  409  admin:write
POST   /v1/tenants/ten_red/cancel       401  403  403  403  202  404  404  202  admin:write
POST   /v1/tenants/ten_red/hold         401  403  403  403  202  404  404  202  admin:write
POST   /v1/tenants/ten_red/release      401  403  403  403  202  404  404  202  admin:write
GET    /v1/tenants/ten_red/budget       401  200  200  200  200  404  404  200  admin:read
POST   /v1/tenants/ten_red/budget/adjustments 401 403  403  403  403  404  404  201  admin:write
POST   /v1/users                        401  403  403  403  201  403  422  201  admin:write
GET    /v1/users                        401  403  403  403  200  403  200  200  admin:read
GET    /v1/users/usr_red.member         401  403  403  200  200  404  404  200  admin:read
PATCH  /v1/users/usr_red.member         401  403  403  403  200  404  404  200  admin:write
DELETE /v1/users/usr_red.member         401  403  403  403  409  403  404  409  admin:write
DELETE /v1/users/usr_red.member/keys    401  403  403  403  200  403  404  200  admin:write
GET    /v1/users/usr_red.member/budget  401  403  403  200  200  404  404  200  admin:read
POST   /v1/users/usr_red.member/budget/adjustments 401 403 403 403  201  404  404  201  admin:write
GET    /v1/me                           401  200  200  200  200  200  200  200  -
POST   /v1/keys                         401  403  403  403  201  403  422  201  admin:write
GET    /v1/keys                         401  403  403  403  200  403  200  200  admin:read
POST   /v1/keys/{key}/rotate            401  403  403  201  201  404  404  201  admin:write
DELETE /v1/keys/{key}                   401  403  403  200  200  404  404  200  admin:write
POST   /v1/webhooks                     401  403  403  403  201  403  422  201  admin:write
GET    /v1/webhooks                     401  403  403  403  200  403  200  200  admin:read
GET    /v1/webhooks/{whk}               401  403  403  403  200  404  404  200  admin:read
GET    /v1/secrets                      401  200  200  200  200  200  200  200  work:read
PUT    /v1/secrets/WIDE                 401  403  403  403  200  403  422  200  work:write
DELETE /v1/secrets/WIDE                 401  403  403  403  204  403  404  204  work:write
POST   /v1/reservations                 401  403  403  403  403  403  403  201  devices:write
GET    /v1/reservations                 401  200  200  200  200  200  200  200  devices:read
GET    /v1/reservations:free            401  200  200  200  200  200  200  200  devices:read
GET    /v1/reservations/{rsv}           401  200  200  200  200  404  404  200  devices:read
PATCH  /v1/reservations/{rsv}           401  403  403  403  403  403  403  200  devices:write
DELETE /v1/reservations/{rsv}           401  403  403  403  403  403  403  204  devices:write
POST   /v1/channels                     401  403  403  403  201  403  422  201  work:write
GET    /v1/channels                     401  200  200  200  200  200  200  200  work:read
POST   /v1/channels/{chn}/test          401  403  403  403  202  404  404  202  work:write
GET    /v1/channels/{chn}/deliveries    401  403  403  403  200  404  404  200  work:read
DELETE /v1/channels/{chn}               401  403  403  403  204  404  404  204  work:write
GET    /v1/me/notifications             401  200  200  200  200  200  200  200  work:read
PUT    /v1/me/notifications             401  403  200  200  200  200  200  200  work:write
DELETE /v1/webhooks/{whk}               401  403  403  403  204  404  404  204  admin:write
POST   /v1/webhooks/{whk}/rotate        401  403  403  403  200  404  404  200  admin:write
POST   /v1/webhooks/{whk}/test          401  403  403  403  202  404  404  202  admin:write
GET    /v1/webhooks/{whk}/deliveries    401  403  403  403  200  404  404  200  admin:read
GET    /v1/requests/{req}/deliveries    401  200  200  200  200  404  404  200  admin:read
GET    /v1/deliveries/{msg}             401  403  403  403  200  404  404  200  admin:read
POST   /v1/deliveries/{msg}/redeliver   401  403  403  403  202  404  404  202  admin:write
GET    /v1/islands                      401  200  200  200  200  200  200  200  devices:read
GET    /v1/islands/isle                 401  200  200  200  200  200  200  200  devices:read
GET    /v1/hosts                        401  200  200  200  200  200  200  200  devices:read
GET    /v1/hosts/h                      401  200  200  200  200  200  200  200  devices:read
POST   /v1/hosts/h/drain                401  403  403  403  403  403  403  200  devices:write
POST   /v1/hosts/h/uncordon             401  403  403  403  403  403  403  200  devices:write
GET    /v1/devices                      401  200  200  200  200  200  200  200  devices:read
GET    /v1/devices/h.0                  401  200  200  200  200  200  200  200  devices:read
PATCH  /v1/devices/h.0                  401  403  403  403  403  403  403  200  devices:write
POST   /v1/devices/h.0/cordon           401  403  403  403  403  403  403  200  devices:write
POST   /v1/devices/h.0/uncordon         401  403  403  403  403  403  403  200  devices:write
GET    /v1/enrolments                   401  403  403  403  403  403  403  200  devices:read
POST   /v1/enrolments                   401  403  403  403  403  403  403  201  devices:write
DELETE /v1/enrolments/h.0               401  403  403  403  403  403  403  200  devices:write
POST   /v1/simulations                  401  403  403  403  403  403  403  200  usage:read
GET    /v1/audit-events                 401  403  403  403  200  403  200  200  admin:read
GET    /v1/audit-events/verification    401  403  403  403  403  403  403  200  admin:read
GET    /v1/presets                      401  200  200  200  200  200  200  200  devices:read
GET    /v1/presets/train/cpu            401  200  200  200  200  200  200  200  devices:read
PUT    /v1/presets/train/cpu            401  403  403  403  403  403  403  200  devices:write
DELETE /v1/presets/train/cpu            401  403  403  403  403  403  403  204  devices:write
GET    /v1/mounts                       401  200  200  200  200  200  200  200  devices:read
GET    /v1/environments                 401  200  200  200  200  200  200  200  work:read
GET    /v1/environments/{env}           401  200  200  200  200  404  404  200  work:read
POST   /v1/environments/{env}/refresh   401  403  200  200  200  404  404  200  work:write
POST   /v1/mounts                       401  403  403  403  403  403  403  201  devices:write
GET    /v1/mounts/{mnt}                 401  200  200  200  200  404  404  200  devices:read
PATCH  /v1/mounts/{mnt}                 401  403  403  403  403  403  403  200  devices:write
DELETE /v1/mounts/{mnt}                 401  403  403  403  403  403  403  204  devices:write
"""

GRAPH = graphs.read(GRAPH_EXAMPLE)
WIDE = {"tenant_wide": True, "tenant_id": "ten_red"}
MORE = {"kind": "cuda", "device_hours": 1.0, "why": "a test"}
BODIES = {
    "POST /v1/requests": {"json": descriptor()},
    "POST /v1/requests:validate": {"json": descriptor()},
    "POST /v1/enrolments": {"json": {"device_id": "h.1", "key": "ab" * 32}},
    "PATCH /v1/requests/{req}": {"json": {"priority": 5}},
    "POST /v1/tasks/{tsk}/resize": {"json": {"devices_max": 2}},
    "POST /v1/tasks/{tsk}/tunnels": {"json": {"kind": "shell"}},
    "PUT /v1/bundles/{sha}": {"content": BUNDLE},
    "PUT /v1/graphs/{graph}": {"json": GRAPH_EXAMPLE},
    "PUT /v1/files": {
        "json": {"files": [{"sha256": hashlib.sha256(b"a").hexdigest(), "content": "YQ=="}]}
    },
    "PUT /v1/files/{sha}": {"headers": {"Content-Range": "bytes */9"}},
    "POST /v1/datablocks/{blk}/folder": {
        "json": {"files": [{"path": "a", "size_bytes": 1, "sha256": "0" * 64}]}
    },
    "PUT /v1/datablocks/{blk}": {
        "params": {"sha256": "0" * 64},
        "headers": {"Content-Range": "bytes */9"},
    },
    "POST /v1/tenants": {"json": {"name": "green"}},
    "PATCH /v1/tenants/ten_red": {"json": {"weight": 2.0}, "headers": {"If-Match": '"1"'}},
    "PATCH /v1/users/usr_red.member": {"json": {"weight": 2.0}, "headers": {"If-Match": '"1"'}},
    "POST /v1/tenants/ten_red/budget/adjustments": {"json": MORE},
    "POST /v1/users/usr_red.member/budget/adjustments": {"json": MORE},
    "POST /v1/users": {"json": {"name": "new", "tenant_id": "ten_red"}},
    "POST /v1/keys": {"json": {"user_id": "usr_red.member", "role": "viewer", "name": "k"}},
    "POST /v1/webhooks": {"json": {"url": "https://example.org/", "tenant_id": "ten_red"}},
    "POST /v1/reservations": {
        "json": {
            "name": "repair",
            "maintenance": True,
            "device_ids": ["h.0"],
            "begins_at": "2027-01-01T00:00:00Z",
            "ends_at": "2027-01-02T00:00:00Z",
        }
    },
    "PATCH /v1/reservations/{rsv}": {"json": {"note": "for guests"}},
    "POST /v1/channels": {
        "json": {
            "name": "new",
            "kind": "slack",
            "address": "https://example.org/",
            "tenant_id": "ten_red",
        }
    },
    "PUT /v1/me/notifications": {"json": {"notify": []}},
    "PUT /v1/secrets/WIDE": {"json": {"value": "a value"}, "params": WIDE},
    "DELETE /v1/secrets/WIDE": {"params": WIDE},
    "PATCH /v1/devices/h.0": {"json": {"cost": 2.0}, "headers": {"If-Match": '"1"'}},
    "POST /v1/simulations": {"json": {"island": "isle"}},
    "PUT /v1/presets/train/cpu": {"json": {"params": {"threads": 1}}},
    "POST /v1/mounts": {"json": {"name": "coco", "path": "/data/coco"}},
    "PATCH /v1/mounts/{mnt}": {"json": {"tenants": None}, "headers": {"If-Match": '"1"'}},
}

#: so that only the scope decides: a narrowed key makes no key that may do more than it
_KEY = {"user_id": "usr_red.member", "role": "viewer", "name": "k", "scopes": ["admin:read"]}
NARROWED = {"POST /v1/keys": {"json": _KEY}}

_LINES = [line.split() for line in TABLE.strip().splitlines()[1:]]
ROWS = [line[:-1] for line in _LINES]
SCOPE_OF = {(method, path): scope for method, path, *_, scope in _LINES}


def _shape(path: str) -> str:
    """The path with whatever names one thing as {}."""
    things = {"WIDE", "ten_red", "usr_red.member", "isle", "h", "h.0", "train", "cpu", "0", "y"}
    parts = path.split("/")
    return "/".join("{}" if part in things or part.startswith("{") else part for part in parts)


def test_the_table_has_every_operation_under_v1():
    served = {
        (method.upper(), _shape(path))
        for path, operations in app.openapi()["paths"].items()
        for method in operations
        if path.startswith("/v1/")
    }
    assert {(method, _shape(path)) for method, path, *_ in ROWS} == served


def _rows(*, ended):
    """Yield the rows of streams, whose request has ended here, or all other rows."""
    yield from (row for row in ROWS if row[1].endswith("/stream") == ended)


@contextlib.contextmanager
def _undone(session):
    """Each call finds the same world."""
    undo = session.connection().begin_nested()
    yield
    undo.rollback()
    session.expire_all()


@pytest.mark.parametrize("ended", [False, True], ids=["calls", "streams"])
@pytest.mark.slow
def test_each_role_gets_what_the_table_says(ended, as_, world, red, submitted, session):
    _settle(session, submitted, ended=ended)
    people, wrong = {who: as_(who) for who in WHO}, {}
    for method, path, *expected in _rows(ended=ended):
        url, got = _url(path, submitted, world), []
        for client in people.values():
            with _undone(session):
                answer = client.request(method, url, **BODIES.get(f"{method} {path}", {}))
            got.append(str(answer.status_code))
        if got != expected:
            wrong[method, path] = dict(zip(WHO, zip(got, expected, strict=True), strict=True))
    assert wrong == {}, "by operation and person: what it is, and what it should be"


def _url(path, submitted, world):
    return path.format(
        req=submitted["id"],
        tsk=submitted["tasks"][0]["id"],
        sha=sha256(BUNDLE),
        key=world.keys["red.member"].split("_")[1],
        ckp="ckp_1",
        graph=GRAPH.sha256,
        blk="corpus",
        whk="whk_1",
        chn="chn_1",
        rsv="rsv_1",
        msg="msg_1",
        mnt="pictures",
        env="env_1",
    )


@pytest.mark.parametrize("ended", [False, True], ids=["calls", "streams"])
@pytest.mark.slow
def test_a_key_that_is_narrowed_does_what_its_scopes_allow(ended, app, world, submitted, session):
    """Keys of an administrator, one for each scope; what that is allowed is in the table above."""
    _settle(session, submitted, ended=ended)
    session.execute(update(ApiKey).values(scopes=["admin:read"]))  # {key}: see NARROWED
    keys = {
        (who, scope): auth.new_key(session, world.users[who], role, "narrowed", scopes=[scope])
        for who, role in (("root", "platform_admin"), ("red.tenant_admin", "tenant_admin"))
        for scope in SCOPES
    }
    session.commit()
    client, wrong = TestClient(app), []
    for method, path, *statuses in _rows(ended=ended):
        needed = SCOPE_OF[method, path]
        open_to = {needed, needed.replace(":read", ":write")} if needed != "-" else {*SCOPES}
        who = "root" if statuses[WHO.index("red.tenant_admin")] == "403" else "red.tenant_admin"
        url, body = _url(path, submitted, world), (BODIES | NARROWED).get(f"{method} {path}", {})
        for scope in SCOPES:
            headers = {"Authorization": f"Bearer {keys[who, scope]}", **body.get("headers", {})}
            with _undone(session):
                answer = client.request(method, url, **{**body, "headers": headers})
            if (answer.status_code == 403) != (scope not in open_to):
                wrong.append((method, path, scope, answer.text))
    assert wrong == []


def _settle(session, submitted, *, ended):
    """The task runs and has a checkpoint, and the preset and red's graph are there.

    A stream is closed if the request has ended: events of a transaction that is still open are not
    told, so it would wait for them.
    """
    task = session.get_one(Task, submitted["tasks"][0]["id"])
    task.state, task.capabilities = "running", ["move"]
    task.descriptor = {**task.descriptor, "world_size": 2}
    task.outputs = {"y": {"sha256": "0" * 64, "size_bytes": 9, "format": "npy"}}
    whose = {"task_id": task.id, "tenant_id": task.tenant_id, "sha256": "0" * 64}
    session.add(
        Environment(
            id="env_1",
            tenant_id="ten_red",
            user_id=task.user_id,
            path="requirements.txt",
            sort="requirements",
            source_sha256="0",
            python="3.11",
            alone=False,
        )
    )
    session.add(Mount(name="pictures", path="/data/pictures", tenants=["ten_red"]))
    session.add(
        Datablock(
            id="blk_1",
            name="corpus",
            version=1,
            format="npy",
            size_bytes=9,
            tensor_count=1,
            user_id=task.user_id,
            tenant_id=task.tenant_id,
            sha256="0" * 64,
        )
    )
    session.add(Checkpoint(id="ckp_1", epoch=1, step=1, size_bytes=1, took_us=1, **whose))
    hook = {"tenant_id": task.tenant_id, "url": "https://example.org/"}
    session.add(Webhook(id="whk_1", secret=webhooks.new_secret(), **hook))
    named = {"name": "ml-alerts", "kind": "slack", "key_id": "k", "encrypted": b""}
    session.add(Webhook(id="chn_1", secret=webhooks.new_secret(), **hook, **named))
    whose = {"tenant_id": task.tenant_id, "key_id": "k", "encrypted": b"", "set_by": task.user_id}
    session.add(Secret(id="sct_1", name="WIDE", **whose))
    session.flush()
    session.add(Delivery(id="msg_1", webhook_id="whk_1", type="t", body="", **hook))
    if ended:
        session.get_one(Request, submitted["id"]).state = "done"
        session.execute(delete(RequestEvent))
    session.add(Graph(tenant_id="ten_red", sha256=GRAPH.sha256, nodes=2, body=GRAPH.body))
    for owner in (session.get_one(Tenant, "ten_red"), session.get_one(User, task.user_id)):
        budgets.set_budget(session, owner, Budget(grants_us={"cuda": 1}))
    session.add(
        Reservation(
            id="rsv_1",
            name="workshop",
            island="isle",
            tenant_id="ten_red",
            devices={"cpu": 1},
            begins_at=func.now(),
            ends_at=func.now(),
        )
    )
    session.add(Preset(task_type="train", kind="cpu", params={}))
    session.add(Enrolment(device_id="h.0", key="ab" * 32, enrolled_by="root"))
    session.commit()
