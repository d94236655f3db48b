"""The audit log: what is written down, who reads it, and that nothing of it can be changed."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import func, insert, select, text, update
from sqlalchemy.exc import IntegrityError

from app.api.access import auth
from app.core.security.hash_chain import TrustedLink
from app.db.models import AuditEvent, Base, Device, Preset, Request, Task, Tenant
from app.db.transactions import transaction
from app.identity import audit
from app.local import seed
from app.scheduling import retention
from tests.app.api.access.test_roles import BODIES, ROWS, WHO
from tests.app.api.access.test_roles import _settle as settle
from tests.app.api.access.test_roles import _url as url_of
from tests.app.conftest import BUNDLE, descriptor, people, problem, sha256
from tests.scenery import until_somebody_waits_for

APP = Path(audit.__file__).parents[1]
ANY = {"If-Match": "*"}


@pytest.fixture
def root(as_):
    return as_("root")


@pytest.fixture
def log(root):
    """What the platform admin sees, oldest first; each a dictionary."""
    return lambda **wanted: root.get("/v1/audit-events", params=wanted).json()["items"][::-1]


def changes(client, path, **body):
    answer = client.patch(path, json=body, headers=ANY)
    assert answer.is_success, answer.text


class TestWhatIsWritten:
    def test_record_says_who_did_what_from_where_and_when(self, root, log, world):
        answer = root.patch(
            "/v1/tenants/ten_red",
            json={"weight": 2.5, "limit": {"cpu": 4}, "name": "red"},
            headers={**ANY, "X-Request-ID": "call-7"},
        )
        assert answer.is_success
        [found] = log()
        assert found.pop("at")
        assert re.fullmatch(r"[0-9a-f]{64}", found.pop("hash"))
        assert found == {
            "id": 1,
            "tenant_id": "ten_red",
            "user_id": "usr_root",
            "user": "root",
            "key_id": auth.id_of(world.keys["root"]),
            "address": "testclient",
            "request_id": "call-7",
            "operation": "changeTenant",
            "action": "changed",
            "target_kind": "tenant",
            "target_id": "ten_red",
            "before": {"weight_milli": 1000, "limit": {}},
            "after": {"weight_milli": 2500, "limit": {"cpu": 4}},
        }

    # operation, who, call, target, whose affair, before, after (a part of it)
    CALLS = [
        ("createTenant", "root", ("post", "/v1/tenants", {"name": "green"}),
            ("tenant", "made"), "ten_root", {}, {"name": "green", "weight_milli": 1000}),
        ("createUser", "red.tenant_admin", ("post", "/v1/users", {"name": "ada"}),
            ("user", "made"), "ten_red", {}, {"name": "ada", "tenant_id": "ten_red"}),
        ("changeUser", "red.tenant_admin", ("patch", "/v1/users/usr_red.member", {"weight": 3.0}),
            ("user", "changed"), "ten_red", {"weight_milli": 1000}, {"weight_milli": 3000}),
        ("createKey", "red.tenant_admin",
            ("post", "/v1/keys", {"user_id": "usr_red.member", "role": "viewer", "name": "k"}),
            ("key", "made"), "ten_red", {}, {"role": "viewer", "user_id": "usr_red.member"}),
        ("revokeKey", "red.tenant_admin", ("delete", "/v1/keys/{key}", None),
            ("key", "changed"), "ten_red", {"revoked_at": None}, {}),
        ("revokeUserKeys", "red.tenant_admin", ("delete", "/v1/users/usr_red.member/keys", None),
            ("key", "changed"), "ten_red", {"revoked_at": None}, {}),
        ("changeDevice", "root", ("patch", "/v1/devices/h.0", {"cost": 2.0}),
            ("device", "changed"), None, {"cost_milli": 1000}, {"cost_milli": 2000}),
        ("cordonDevice", "root", ("post", "/v1/devices/h.0/cordon", None),
            ("device", "changed"), None, {"cordoned": False}, {"cordoned": True}),
        ("drainHost", "root", ("post", "/v1/hosts/h/drain", None),
            ("host", "changed"), None, {"cordoned": False}, {"cordoned": True}),
        ("putPreset", "root", ("put", "/v1/presets/train/cpu", {"params": {"threads": 1}}),
            ("preset", "made"), None, {}, {"params": {"threads": 1}}),
    ]  # fmt: skip

    @pytest.mark.parametrize("row", CALLS, ids=lambda row: row[0])
    def test_every_administrative_operation_is_recorded(self, row, as_, log, world):
        operation, who, (method, path, body), (kind, action), tenant, before, after = row
        path = path.format(key=auth.id_of(world.keys["red.member"]))
        answer = as_(who).request(method, path, json=body, headers=ANY)
        assert answer.is_success, answer.text
        [found] = log()
        assert (found["operation"], found["user"]) == (operation, who)
        assert (found["target_kind"], found["action"]) == (kind, action)
        assert (found["tenant_id"], found["before"]) == (tenant, before)
        assert found["after"].items() >= after.items()
        assert "secret" not in str(found)

    def test_deletion_of_a_tenant_and_change_of_a_preset_are_recorded(self, root, log):
        made = root.post("/v1/tenants", json={"name": "green"}).json()
        root.delete(f"/v1/tenants/{made['id']}")
        for threads in (1, 2):
            root.put("/v1/presets/train/cpu", json={"params": {"threads": threads}})
        _, removed, _, changed = log()
        assert (removed["operation"], removed["action"]) == ("deleteTenant", "removed")
        assert (removed["before"]["name"], removed["after"]) == ("green", {})
        assert (removed["target_id"], removed["tenant_id"]) == (made["id"], "ten_root")
        assert changed["target_id"] == "train/cpu"
        assert changed["before"] == {"params": {"threads": 1}}
        assert changed["after"] == {"params": {"threads": 2}}

    def test_deletion_of_a_user_and_of_the_keys_is_recorded(self, root, log):
        assert root.delete("/v1/users/usr_red.member").is_success
        key, user = log()
        assert {key["operation"], user["operation"]} == {"deleteUser"}
        assert (key["target_kind"], key["before"]) == ("key", {"revoked_at": None})
        assert (user["target_id"], user["tenant_id"]) == ("usr_red.member", "ten_red")
        assert (user["before"], [*user["after"]]) == ({"deleted_at": None}, ["deleted_at"])

    def test_refused_call_and_call_without_effect_are_not_recorded(self, root, as_, log):
        problem(
            root.patch("/v1/tenants/ten_red", json={"weight": 2.0}), 428, "precondition-required"
        )
        problem(root.post("/v1/tenants", json={"name": "red"}), 409, "conflict-state")
        answer = as_("red.member").post("/v1/tenants", json={"name": "x"})
        problem(answer, 403, "insufficient-scope")
        root.post("/v1/devices/h.0/uncordon")
        assert log() == []

    def test_work_of_a_user_on_own_tasks_is_not_recorded(self, red, submitted, log):
        url = f"/v1/requests/{submitted['id']}"
        for call in ("hold", "release", "cancel"):
            assert red.post(f"{url}/{call}").is_success
        assert red.get(url).is_success
        assert log() == []

    def test_action_of_an_administrator_on_a_task_is_recorded(self, submitted, as_, log):
        admin, task = as_("red.tenant_admin"), submitted["tasks"][0]["id"]
        admin.patch(f"/v1/requests/{submitted['id']}", json={"priority": 7})
        admin.post(f"/v1/tasks/{task}/pause")
        admin.post(f"/v1/requests/{submitted['id']}/cancel")
        priority, pause, cancel = log()
        assert priority["operation"] == "changeRequest"
        assert (priority["before"], priority["after"]) == ({"priority": 0}, {"priority": 7})
        assert (pause["target_kind"], pause["target_id"]) == ("task", task)
        assert (pause["before"], pause["after"]) == ({"hold": ""}, {"hold": "user"})
        assert (cancel["operation"], cancel["action"]) == ("cancelRequest", "asked")
        assert {found["tenant_id"] for found in (priority, pause, cancel)} == {"ten_red"}

    def test_deletion_of_anothers_request_is_recorded_and_the_record_outlives_it(
        self, submitted, session, as_, log
    ):
        at = func.now() - timedelta(minutes=11)
        session.execute(update(Task).values(state="done", ended_at=at))
        session.execute(update(Request).values(state="done", ended_at=at))
        session.commit()
        assert as_("red.tenant_admin").delete(f"/v1/requests/{submitted['id']}").is_success
        with transaction() as its:
            assert retention.delete_some(its)
        assert session.scalar(select(func.count()).select_from(Request)) == 0
        [deleted] = log()
        assert (deleted["operation"], deleted["action"]) == ("deleteRequest", "asked")
        assert deleted["target_id"] == submitted["id"]
        assert deleted["before"] == {"delete_asked_at": None}
        assert deleted["after"]["delete_asked_at"]

    def test_read_of_another_tenants_data_is_recorded_once_an_hour(self, submitted, root, as_, log):
        url = f"/v1/requests/{submitted['id']}"
        for _ in range(3):
            root.get(url)
        root.get(f"{url}/logs")
        root.get("/v1/requests")
        as_("red.tenant_admin").get(url)
        found = [(one["operation"], one["action"], one["target_id"]) for one in log()]
        assert found == [("getRequest", "read", submitted["id"]),
                         ("listLogs", "read", submitted["id"])]  # fmt: skip

    def test_read_and_action_in_one_call_are_recorded_as_an_action(self, submitted, root, log):
        root.post(f"/v1/requests/{submitted['id']}/hold")
        assert [(one["operation"], one["action"]) for one in log()] == [("holdRequest", "asked")]

    def test_sign_ins_and_expired_keys_are_recorded(self, app, world, root, log):
        browser = TestClient(app, follow_redirects=False, base_url="http://here")
        ours = {"Sec-Fetch-Site": "same-origin"}
        key, id = world.keys["red.member"], auth.id_of(world.keys["red.member"])
        assert browser.post("/ui/login", data={"key": key}, headers=ours).status_code == 303
        root.delete(f"/v1/keys/{id}")
        for bad in (key, "rh_nonsense", "", key):
            answer = browser.post("/ui/login", data={"key": bad}, headers=ours)
            assert answer.status_code == 401
        found = [(one["operation"], one["action"], one["user"]) for one in log()]
        assert found == [
            ("signIn", "made", "red.member"),
            ("revokeKey", "changed", "root"),
            ("signIn", "refused", "red.member"),
            ("signIn", "refused", ""),  # the two that name no key, once for their address
        ]
        assert log()[0]["target_id"] == id

    def test_read_of_another_tenants_page_is_recorded(self, app, world, submitted, log):
        browser = TestClient(app, follow_redirects=False)
        browser.post(
            "/ui/login", data={"key": world.keys["root"]}, headers={"Sec-Fetch-Site": "same-origin"}
        )
        for _ in range(2):
            assert browser.get(f"/ui/requests/{submitted['id']}").status_code == 200
        read = log(action="read")
        assert [(one["operation"], one["target_id"]) for one in read] == [("page", submitted["id"])]

    def test_first_keys_are_recorded(self, session, as_):
        with transaction() as its:
            audit.begin(its, audit.Call(operation="seed", user="app.local.seed"))
            seed.seed(its, {}, tenants=False)
        made = session.scalars(select(AuditEvent).order_by(AuditEvent.id)).all()
        assert [row.target_kind for row in made] == ["user", "key"]
        assert {row.user for row in made} == {"app.local.seed"}


# What a member may do with work of their own, and what changes nothing.
NOT_WRITTEN = {
    "POST /v1/requests", "POST /v1/requests:validate", "PUT /v1/bundles/{sha}",
    "POST /v1/simulations", "PUT /v1/graphs/{graph}", "PUT /v1/datablocks/{blk}",
    "PUT /v1/files", "PUT /v1/files/{sha}", "POST /v1/datablocks/{blk}/folder",
    "PUT /v1/me/notifications",
}  # fmt: skip
ROWS_WRITTEN = {
    **dict.fromkeys(NOT_WRITTEN, 0),
    "POST /v1/keys/{key}/rotate": 2,  # old and new
    "POST /v1/tasks/{tsk}/tunnels": 2,  # the tunnel, and that a task of another was acted on
}
ALLOWED = [row for row in ROWS if any(status < "3" for status in row[2:])]
CHANGES = [row for row in ALLOWED if row[0] not in ("GET", "HEAD")]


@pytest.mark.parametrize("row", CHANGES, ids=lambda row: f"{row[0]} {row[1]}")
@pytest.mark.slow
def test_no_operation_is_missing(row, as_, world, submitted, session, log, root):
    """Every operation that changes something, by an administrator for whom it is not their own."""
    method, path, *_ = row
    settle(session, submitted, ended=False)
    if path.endswith("/uncordon"):
        root.post(path.replace("uncordon", "drain" if "hosts" in path else "cordon"))
    if path == "/v1/tenants/ten_red/release":
        as_("red.tenant_admin").post("/v1/tenants/ten_red/hold")
    may = [who for who, status in zip(WHO, row[2:], strict=True) if status < "3"]
    who = "red.tenant_admin" if "red.tenant_admin" in may else "root"
    known = len(log())
    answer = as_(who).request(
        method, url_of(path, submitted, world), **BODIES.get(f"{method} {path}", {})
    )
    assert answer.is_success, answer.text
    written = [one for one in log()[known:] if one["user"] == who and one["action"] != "read"]
    assert len(written) == ROWS_WRITTEN.get(f"{method} {path}", 1)


def test_every_column_set_by_an_administrator_is_watched():
    """A new column of these tables is either watched or named here."""
    others = {
        "id", "created_at", "version", "txid", "updated_at", "task_type", "kind", "island", "host",
        "secret_sha256", "last_used_at", "threads", "memory_bytes", "incarnation", "heard_us",
        "lease_until", "lease_us", "grace_us", "seen_at", "facts", "secret", "old_secret",
        "old_secret_until", "links", "enrolled_at", "health", "encrypted", "key_id",
        "exhausted", "budget_ends_at", "ends_at", "granted_us", "carried_us", "spent_us", "told",
        "notify",  # a user's own
        "reserved", "reserved_by", "maintenance", "created_by",
    }  # fmt: skip
    for model, watched in audit.WATCHED.items():
        names = {column.key for column in model.__table__.columns}
        key = {column.key for column in model.__table__.primary_key}
        assert names - (others - {*watched}) - key == set(watched), model


def test_every_change_of_these_tables_passes_the_log():
    names = "|".join(model.__name__ for model in audit.WATCHED)
    bare = re.compile(rf"\b(?:insert|update|delete)\((?:{names})\)")
    files = [*(APP / "api").rglob("*.py"), *(APP / "pages").glob("*.py"), APP / "intake/actions.py"]
    found = {(file.name, hit) for file in files for hit in bare.findall(file.read_text())}
    assert found == {
        ("auth.py", "update(ApiKey)"),  # when it was last used
        ("channels.py", "update(User)"),  # what the user's own requests tell
    }


class TestWhoReadsIt:
    def test_tenant_admin_reads_records_of_its_tenant_and_those_below(self, root, as_):
        admin = as_("red.tenant_admin")
        changes(root, "/v1/tenants/ten_red", weight=2.0)
        changes(root, "/v1/tenants/ten_blue", weight=2.0)
        changes(root, "/v1/devices/h.0", cost=2.0)
        rose = admin.post("/v1/tenants", json={"name": "rose"}).json()["id"]
        changes(root, f"/v1/tenants/{rose}", weight=2.0)
        found = admin.get("/v1/audit-events").json()["items"]
        assert [(one["operation"], one["target_id"]) for one in found] == [
            ("changeTenant", rose),
            ("createTenant", rose),
            ("changeTenant", "ten_red"),
        ]
        assert as_("blue.tenant_admin").get("/v1/audit-events").json()["items"][0]["id"] == 2

    def test_reads_from_a_tenant_above_are_visible_below(self, as_, app):
        admin = as_("red.tenant_admin")
        rose = admin.post("/v1/tenants", json={"name": "rose"}).json()["id"]
        below = {}
        for role in ("member", "tenant_admin"):
            user = admin.post("/v1/users", json={"name": role, "tenant_id": rose}).json()
            body = {"user_id": user["id"], "role": role, "name": "k"}
            key = admin.post("/v1/keys", json=body).json()["key"]
            below[role] = TestClient(app, headers={"Authorization": f"Bearer {key}"})
        below["member"].put(f"/v1/bundles/{sha256(BUNDLE)}", content=BUNDLE)
        made = below["member"].post("/v1/requests", json=descriptor()).json()
        admin.get(f"/v1/requests/{made['id']}")
        [read] = below["tenant_admin"].get("/v1/audit-events?action=read").json()["items"]
        assert (read["user"], read["target_id"]) == ("red.tenant_admin", made["id"])
        assert (read["key_id"], read["address"]) == (None, None)

    def test_caller_from_elsewhere_is_shown_without_key_and_address(self, root, as_, world):
        admin = as_("red.tenant_admin")
        changes(root, "/v1/tenants/ten_red", weight=2.0)
        changes(admin, "/v1/users/usr_red.member", weight=2.0)
        mine, roots = admin.get("/v1/audit-events").json()["items"]
        assert (roots["user"], roots["key_id"], roots["address"]) == ("root", None, None)
        assert (mine["key_id"], mine["address"]) == (
            auth.id_of(world.keys["red.tenant_admin"]),
            "testclient",
        )
        asked = {"key_id": auth.id_of(world.keys["root"])}
        assert admin.get("/v1/audit-events", params=asked).json()["items"] == []

    def test_former_parent_of_a_tenant_is_hidden_from_the_new_one(self, root, as_):
        made = root.post("/v1/tenants", json={"name": "pink", "parent_id": "ten_blue"}).json()["id"]
        changes(root, f"/v1/tenants/{made}", parent_id="ten_red")
        told = as_("red.tenant_admin").get("/v1/audit-events").text
        assert "ten_red" in told
        assert "ten_blue" not in told
        moved = root.get("/v1/audit-events", params={"operation": "changeTenant"}).json()["items"]
        assert moved[0]["before"] == {"parent_id": "ten_blue"}

    def test_records_are_filtered_and_paged(self, root, log):
        for weight in (2.0, 3.0, 4.0):
            changes(root, "/v1/tenants/ten_red", weight=weight)
        changes(root, "/v1/devices/h.0", cost=2.0)
        first = root.get("/v1/audit-events?limit=3")
        second = root.get(first.links["next"]["url"]).json()
        ids = [one["id"] for one in [*first.json()["items"], *second["items"]]]
        assert ids == [4, 3, 2, 1]
        assert [one["id"] for one in log(target_kind="device")] == [4]
        assert [one["id"] for one in log(tenant_id="ten_red", action="changed")] == [1, 2, 3]
        assert [one["id"] for one in log(operation="changeDevice", user_id="usr_root")] == [4]
        assert log(since=log()[1]["at"], until=log()[3]["at"], target_id="ten_red") == log()[1:3]
        problem(root.get("/v1/audit-events?action=x"), 422, "validation-error", "?action")


# --- nothing of it can be changed ---------------------------------------------------------------


@pytest.fixture
def three(root, session):
    for weight in (2.0, 3.0, 4.0):
        changes(root, "/v1/tenants/ten_red", weight=weight)
    return session


def verification(root, known=None):
    answer = root.get("/v1/audit-events/verification", params={"known": known} if known else {})
    assert answer.status_code == 200, answer.text
    return answer.json()


class TestTheDatabaseRefuses:
    @pytest.mark.parametrize(
        "statement",
        [
            "update audit_events set address = 'x' where id = 1",
            "update audit_events set address = address where false",
            "delete from audit_events where id = 3",
            "truncate audit_events",
        ],
    )
    def test_database_refuses_every_change_of_a_record(self, three, statement):
        with pytest.raises(IntegrityError, match="audit_events is append-only"):
            three.execute(text(statement))

    def test_database_refuses_a_fork_of_the_chain(self, three):
        row = three.execute(select(AuditEvent.__table__).where(AuditEvent.id == 2)).mappings().one()
        with pytest.raises(IntegrityError, match="uq_audit_events_previous"):
            three.execute(insert(AuditEvent), [{**row, "id": 4}])


class TestVerification:
    def test_intact_chain_is_valid(self, root, three):
        found = verification(root)
        assert (found["intact"], found["checked"], found["broken"]) == (True, 3, None)
        assert found["known"] == f"3:{found['head']['hash']}"
        changes(root, "/v1/tenants/ten_red", weight=5.0)
        assert verification(root, found["known"])["checked"] == 1

    def test_empty_log_is_valid(self, root):
        none = {"intact": True, "checked": 0, "head": None, "known": None, "broken": None}
        assert verification(root) == none

    @pytest.mark.parametrize("column", [c.key for c in AuditEvent.__table__.columns])
    def test_any_change_in_a_row_is_found_and_named(self, root, three, column):
        value = {"id": "9", "at": "at + interval '1 microsecond'", "before": """'{"name": "x"}'""",
                 "after": "'{}'", "action": "'made'"}.get(column, "'tampered'")  # fmt: skip
        self.tamper(three, f"""update audit_events set "{column}" = {value} where id = 2""")
        found = verification(root)
        assert found["intact"] is False
        assert found["broken"]["id"] == (1 if column == "previous" else 2)
        assert "record 2" in found["broken"]["detail"]

    def test_removed_row_is_found_and_named(self, root, three):
        self.tamper(three, "delete from audit_events where id = 2")
        assert verification(root)["broken"]["detail"] == "record 2 is missing; record 3 follows"

    def test_cut_end_is_found_with_a_known_hash(self, root, three):
        known = verification(root)["known"]
        self.tamper(three, "delete from audit_events where id = 3")
        assert verification(root)["intact"] is True
        assert verification(root, known)["broken"]["id"] == 3

    def test_known_hash_comes_from_an_earlier_verification(self, root):
        for known in ("1", "0:" + "0" * 64, "1:xyz"):
            answer = root.get("/v1/audit-events/verification", params={"known": known})
            problem(answer, 422, "validation-error", "?known")

    @staticmethod
    def tamper(session, statement):
        """As somebody who owns the table could."""
        session.execute(text("alter table audit_events disable trigger stay"))
        session.execute(text(statement))
        session.execute(text("alter table audit_events enable trigger stay"))


@pytest.mark.parametrize("number", [0.1, 1e22, 5e-324, 2**70, -0.0])
def test_numbers_are_read_as_they_were_written(session, number):
    """A `jsonb` would make 1e22 a whole number, and the hash another."""
    with transaction() as its:
        audit.begin(its, audit.Call(operation="seed", user="app.local.seed"))
        its.add(Preset(task_type="t", kind="cpu", params={"x": number, "é": "\u2028"}))
    assert audit.verified(session, TrustedLink()).broken is None


# --- several at once ----------------------------------------------------------------------------


def test_many_simultaneous_records_make_one_chain(committed, app):
    """Eight administrators change things of their own; their calls meet at the end of the chain."""
    with transaction() as session:
        key = people(session).keys["root"]
    root = TestClient(app, headers={"Authorization": f"Bearer {key}"})

    def rename(n):
        made = root.post("/v1/tenants", json={"name": f"t{n}"}).json()["id"]
        for weight in (2.0, 3.0, 4.0):
            changes(root, f"/v1/tenants/{made}", weight=weight)
            # no two are equal: to set what stands there already is no change, and no record
            changes(root, f"/v1/devices/h.{n % 2}", cost=weight + n / 10)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(rename, range(8)))
    found = verification(root)
    assert (found["intact"], found["checked"]) == (True, 8 * 7)
    last = {}
    for one in everything(root):  # what each one found is what the one before it left
        target = (one["target_kind"], one["target_id"])
        if one["action"] == "changed":
            assert one["before"].items() <= last[target].items() if target in last else True
        last[target] = one["after"]


def everything(client):
    items, url = [], "/v1/audit-events?limit=200"
    while url:
        answer = client.get(url)
        items += answer.json()["items"]
        url = answer.links.get("next", {}).get("url")
    return items[::-1]


def test_submission_does_not_wait_for_the_log(committed, app):
    """1. Somebody has written into the log and does not commit.  2. A member submits, and is done.
    3. An administrator's change waits.  4. The first one ends, and so does the change.
    """
    with transaction() as session:
        keys = people(session).keys

    def client(name):
        return TestClient(app, headers={"Authorization": f"Bearer {keys[name]}"})

    member, root = client("red.member"), client("root")
    call = audit.Call(operation="seed", user="app.local.seed")
    with ThreadPoolExecutor() as threads:
        with transaction() as first:
            audit.append(first, call, "made", target=("key", "k"), tenant_id=None)
            member.put(f"/v1/bundles/{sha256(BUNDLE)}", content=BUNDLE)
            assert member.post("/v1/requests", json=descriptor()).status_code == 202
            change = threads.submit(changes, root, "/v1/devices/h.0", cost=3.0)
            until_somebody_waits_for(first)
            assert not change.done()
        change.result(timeout=90)
    assert [one["operation"] for one in everything(root)] == ["seed", "changeDevice"]


def test_failed_transaction_leaves_no_record(committed, app):
    with transaction() as session:
        people(session)
    with pytest.raises(IntegrityError):
        change_and_fail()
    with transaction() as session:
        assert session.scalars(select(AuditEvent)).all() == []


def change_and_fail():
    with transaction() as session:
        audit.begin(session, audit.Call(operation="seed", user="app.local.seed"))
        session.get_one(Device, "h.0").cost_milli = 5
        session.flush()
        session.get_one(Tenant, "ten_red").weight_milli = -1


def test_every_named_table_exists():
    assert {*audit.WATCHED, Request, Task} <= {mapper.class_ for mapper in Base.registry.mappers}
