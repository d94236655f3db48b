"""A tenant whose things have the very ids that the examples of the OpenAPI document have.

So what the document shows can be called as it stands, and what is made from the document finds
something.  There is everything, and two of all that is listed: people, code, data, a running
request with its events, logs, metrics and checkpoints, one that waits, decisions, usage, an island
with its devices.  Whatever the tenant wrote itself says "secret of vision".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

from sqlalchemy import func, text
from sqlalchemy.orm import Session

from app.api import descriptor_schema
from app.api.access import auth
from app.api.routes.channels import ChannelOut
from app.api.routes.secrets import SecretOut
from app.api.routes.webhooks import DeliveryOut, WebhookOut
from app.api.schemas.base import example_of
from app.api.schemas.data import DatablockOut
from app.api.schemas.environments import EnvironmentWithLock
from app.api.schemas.fleet import DeviceOut, HostOut, IslandOut, PresetOut
from app.api.schemas.mounts import MountOut
from app.api.schemas.people import KeyOut, TenantOut, UserOut
from app.api.schemas.requests import RequestOut
from app.api.schemas.reservations import ReservationOut
from app.api.schemas.tasks import CheckpointOut, MigrateIn
from app.core.fairness.budget import HOUR_US, Budget
from app.core.model import descriptor as descriptors
from app.db.models import (
    ApiKey,
    Bundle,
    Checkpoint,
    Cycle,
    Datablock,
    Decision,
    Delivery,
    Device,
    Environment,
    Graph,
    Host,
    Idempotency,
    Island,
    LogLine,
    Metric,
    Mount,
    NewsItem,
    Placement,
    Preset,
    Request,
    RequestChannel,
    RequestEvent,
    Reservation,
    Secret,
    Task,
    Tenant,
    Usage,
    User,
    Webhook,
)
from app.identity import audit
from app.messaging import webhooks

TENANT, USER = example_of(TenantOut), example_of(UserOut)
REQUEST, CHECKPOINT, KEY = example_of(RequestOut), example_of(CheckpointOut), example_of(KeyOut)
DEVICE, HOST, ISLAND = example_of(DeviceOut), example_of(HostOut), example_of(IslandOut)
SECRET = example_of(SecretOut)
WEBHOOK, DELIVERY = example_of(WebhookOut), example_of(DeliveryOut)
CHANNEL = example_of(ChannelOut)
RESERVATION = example_of(ReservationOut)
MOUNT = example_of(MountOut)
ENVIRONMENT = example_of(EnvironmentWithLock)
TASK, DATABLOCK = REQUEST["tasks"][0], example_of(DatablockOut)
CHILD = "ten_" + "7" * 32
WAITING_REQUEST, WAITING_TASK = "req_" + "7" * 32, "tsk_" + "7" * 32
DECISION = 20_471_147  # more digits than a fraction of a second
LONG_AGO = text("'3'::xid8")  # a transaction that every reader knows to be over

_TRAIN = descriptors.parse(descriptor_schema.EXAMPLE).tasks[1]
GANG = descriptors.as_json(replace(_TRAIN, world_size=4))  # so it can be resized

#: keys by role; `member` is the owner of the requests
Keys = dict[str, str]


def documented(session: Session, root: str = "ten_root") -> Keys:
    """Add the tenant below `root`; returns keys of its people."""
    for row in _rows(root):
        session.add(row)
        session.flush()
    for _ in range(2):
        _audited(session)
    return _keys(session)


def _audited(session: Session) -> None:
    call = audit.Call(
        operation="changeTenant", user_id=USER["id"], user=USER["name"], tenant_id=TENANT["id"],
        key_id=KEY["id"], address="10.0.0.7", request_id="secret of vision",
    )  # fmt: skip
    target = ("tenant", TENANT["id"])
    audit.append(session, call, "changed", target=target, tenant_id=TENANT["id"])


def _keys(session: Session) -> Keys:
    keys = {}
    for role in ("tenant_admin", "member", "viewer"):
        user = USER["id"]
        if role != "member":
            user = f"usr_secret_of_vision_{role}"
            session.add(User(id=user, tenant_id=TENANT["id"], name=f"secret of vision {role}"))
            session.flush()
        keys[role] = auth.new_key(session, user, role, "of a test")
    return keys


def _rows(root: str) -> Iterator[Any]:
    budget = Budget(grants_us={"cuda": 1000 * HOUR_US}, at={100: "notify"}).as_json()
    yield Tenant(id=TENANT["id"], name=TENANT["name"], parent_id=root, budget=budget)
    yield Tenant(id=CHILD, name="secret of vision", parent_id=TENANT["id"])
    yield User(id=USER["id"], tenant_id=TENANT["id"], name=USER["name"])
    secret = {"secret_sha256": "0" * 64, "role": KEY["role"], "name": KEY["name"]}
    yield ApiKey(id=KEY["id"], user_id=USER["id"], **secret)
    yield Island(name=ISLAND["name"], leader="a test", leader_until=func.now() + timedelta(hours=1))
    yield Host(name=HOST["name"], island=ISLAND["name"])
    for id in (DEVICE["id"], example_of(MigrateIn)["to"]):
        yield Device(
            id=id, host=HOST["name"], island=ISLAND["name"], kind="cpu", memory_bytes=2**30,
            lease_until=func.now() + timedelta(hours=1), facts={"sandbox": "off"},
        )  # fmt: skip
    preset = example_of(PresetOut)
    yield Preset(task_type=preset["task_type"], kind=preset["kind"], params=preset["params"])
    runs = (task["run"] for task in descriptor_schema.EXAMPLE["tasks"])
    sorts = {"job": "class", "function": "function"}
    entries = {name: sorts[kind] for run in runs for kind, name in run.items()}
    sha256 = descriptor_schema.EXAMPLE["bundle"].removeprefix("sha256:")
    for one in (sha256, "7" * 64):
        yield Bundle(tenant_id=TENANT["id"], sha256=one, size_bytes=1, entry_points=entries)
        yield Graph(
            tenant_id=TENANT["id"], sha256=one, nodes=2, body=descriptor_schema.GRAPH_EXAMPLE
        )
    yield from _request(REQUEST["id"], TASK["id"], "running", seat=DEVICE["id"])
    yield from _request(WAITING_REQUEST, WAITING_TASK, "waiting")
    yield from _request("req_" + "6" * 32, "tsk_" + "6" * 32, "waiting")
    yield from _done_by_task()
    for id, version in (("blk_" + "7" * 32, 2), (DATABLOCK["id"], DATABLOCK["version"])):
        yield Datablock(
            id=id, tenant_id=TENANT["id"], user_id=USER["id"], name=DATABLOCK["name"],
            version=version, format="npy", sha256=DATABLOCK["sha256"], size_bytes=1,
            tensors=[{"name": "secret of vision", "dtype": "uint8", "shape": [1]}], tensor_count=1,
        )  # fmt: skip
    for name in (MOUNT["name"], "secret-of-vision"):
        yield Mount(name=name, path="/secret of/vision", tenants=[TENANT["id"]])
    for n, id in enumerate((ENVIRONMENT["id"], "env_" + "7" * 32)):
        yield Environment(
            id=id, tenant_id=TENANT["id"], user_id=USER["id"], path="secret of vision",
            sort="requirements", source_sha256=f"{n}", python="3.11", alone=False,
            message="secret of vision", lock_sha256="7" * 64,
        )  # fmt: skip
    yield from _told()
    yield from _secrets()


def _secrets() -> Iterator[Any]:
    """One of the member and two of the tenant."""
    told = {"key_id": "k", "encrypted": b"secret of vision", "set_by": USER["id"]}
    for n, user, name in (
        ("", USER["id"], SECRET["name"]),
        ("1", None, SECRET["name"]),
        ("2", None, "secret_of_vision"),
    ):
        id = SECRET["id"] if not n else f"sct_{n}" + "7" * 31
        yield Secret(id=id, tenant_id=TENANT["id"], user_id=user, name=name, **told)


def _told() -> Iterator[Any]:
    """An address of the tenant, and those that its requests name."""
    whose = {"tenant_id": TENANT["id"], "secret": webhooks.new_secret()}
    secret_url = "https://secret.invalid/of vision"
    yield Webhook(id=WEBHOOK["id"], url=secret_url, events=WEBHOOK["events"], **whose)
    yield Webhook(id="whk_" + "7" * 32, **whose)
    sealed = {"key_id": "k", "encrypted": b"secret of vision", "kind": "slack"}
    for n, id in enumerate((CHANNEL["id"], "chn_" + "7" * 32)):
        name = f"secret-of-vision-{n}"
        yield Webhook(id=id, url=f"channel:{name}", name=name, **sealed, **whose)
    times = {"begins_at": func.now(), "ends_at": func.now(), "tenant_id": TENANT["id"]}
    for n, id in enumerate((RESERVATION["id"], "rsv_" + "7" * 32)):
        named = {"name": f"secret-of-vision-{n}", "note": "secret of vision"}
        yield Reservation(id=id, island=ISLAND["name"], **named, **times)
    named = {"request_id": REQUEST["id"], "webhook_id": CHANNEL["id"]}
    yield RequestChannel(**named, events=[])
    yield NewsItem(**named, type="task.preempted", task="secret-of-vision")
    hooks = (WEBHOOK["id"], "whk_" + "7" * 32, CHANNEL["id"])
    for n, hook in enumerate(each for each in hooks for _ in range(2)):
        yield Delivery(
            id=DELIVERY["id"] if not n else f"msg_{n}" + "7" * 31, webhook_id=hook,
            tenant_id=TENANT["id"], request_id=REQUEST["id"], url=secret_url,
            type=DELIVERY["type"], body="secret of vision",
        )  # fmt: skip


def _request(id: str, task_id: str, state: str, **more: Any) -> Iterator[Any]:
    owner = {"tenant_id": TENANT["id"], "user_id": USER["id"]}
    shown = {"running": "running", "waiting": "queued"}[state]
    labels = {"secret": "of vision"}
    yield Request(id=id, name="secret of vision", state=shown, labels=labels, **owner)
    yield Task(
        id=task_id, request_id=id, island=ISLAND["name"], ordinal=0, name="secret-of-vision",
        type="train", kind="cpu", state=state, epoch=1, capabilities=["pause", "save", "move"],
        descriptor=GANG,
        **owner, **more,
    )  # fmt: skip


def _done_by_task() -> Iterator[Any]:
    of_task = {"task_id": TASK["id"]}
    of_tenant = {**of_task, "tenant_id": TENANT["id"]}
    for n in (0, 1):
        yield Checkpoint(
            id=CHECKPOINT["id"] if n else "ckp_" + "7" * 32, epoch=1, step=n, sha256="0" * 64,
            size_bytes=1, took_us=1, **of_tenant,
        )  # fmt: skip
        yield Placement(
            epoch=n, device_id=DEVICE["id"], user_id=USER["id"], kind="cpu", cost_milli=1000,
            incarnation="p1", started_at=func.now(), ended_at=None if n else func.now(),
            **of_tenant,
        )  # fmt: skip
        yield Metric(step=n, values={"secret of vision": 0.5}, **of_task)
        yield LogLine(epoch=1, line=n, stream="stdout", text="secret of vision", **of_task)
        yield RequestEvent(
            request_id=REQUEST["id"], type="task.started", message="secret of vision",
            txid=LONG_AGO, **of_tenant,
        )  # fmt: skip
        yield Cycle(id=DECISION + n, island=ISLAND["name"], now_s=0.0, snapshot={})
        yield Decision(
            id=DECISION + n, cycle_id=DECISION + n, move="launch", rule="F3",
            because="secret of vision", devices=[DEVICE["id"]], **of_tenant,
        )  # fmt: skip
    yield Usage(
        bucket=func.now() - timedelta(minutes=1), bucket_s=10, tenant_id=TENANT["id"],
        user_id=USER["id"], kind="cpu", held_us=1, charged_us=1,
    )  # fmt: skip
    answer = {"status": 202, "response": {"id": REQUEST["id"]}, "body_sha256": "0" * 64}
    location = f"/v1/requests/{REQUEST['id']}"
    yield Idempotency(
        user_id=USER["id"], key="a-key", route="POST /v1/requests", location=location, **answer
    )
