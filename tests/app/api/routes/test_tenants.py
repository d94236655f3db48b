"""/v1/tenants, /users, /keys and /me; who may is in test_roles.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import func, select

from app.api.access import auth
from app.db import tenant_tree
from app.db.models import Account, ApiKey, Lift, Request, Reservation, Secret, Tenant, User
from app.db.transactions import transaction
from app.scheduling import snapshot_reader
from tests.app.conftest import BUNDLE, descriptor, people, problem, sha256
from tests.scenery import until_somebody_waits_for


@pytest.fixture
def root(as_):
    return as_("root")


class TestTenants:
    def test_new_tenant_is_below_the_root(self, root):
        answer = root.post("/v1/tenants", json={"name": "green", "weight": 2.5})
        assert answer.status_code == 201
        body = answer.json()
        assert (body["parent_id"], body["weight"], body["version"]) == ("ten_root", 2.5, 1)
        assert answer.headers["location"] == f"/v1/tenants/{body['id']}"
        assert root.get(answer.headers["location"]).json() == body
        assert answer.headers["etag"] == '"1"'

    @pytest.mark.parametrize(
        ("body", "pointer"),
        [
            ({}, "/name"),
            ({"name": ""}, "/name"),
            ({"name": " x"}, "/name"),
            ({"name": "a\nb"}, "/name"),
            ({"name": "x", "weight": 0}, "/weight"),
            ({"name": "x", "weight": "2"}, "/weight"),
            ({"name": "x", "wieght": 2}, "/wieght"),
            ({"name": "x", "parent_id": "ten_0"}, "/parent_id"),
            ({"name": "x", "tier": "gold"}, "/tier"),
            ({"name": "x", "max_queued": -1}, "/max_queued"),
            ({"name": "x", "max_running": 1.5}, "/max_running"),
            ({"name": "x", "guarantee": {"cuda": -1}}, "/guarantee/cuda"),
            ({"name": "x", "guarantee": {"cuda": 0.5}}, "/guarantee/cuda"),
            ({"name": "x", "guarantee": {"CUDA": 1}}, "/guarantee/CUDA"),
            ({"name": "x", "guarantee": {"*": 1}}, "/guarantee/*"),
            ({"name": "x", "limit": {"a/b": 1}}, "/limit/a~1b"),
            ({"name": "x", "limit": {"": 1}}, "/limit/"),
            ({"name": "x", "guarantee": {"cuda": 3}, "limit": {"cuda": 2}}, "/guarantee/cuda"),
            ({"name": "x", "guarantee": {"cpu": 2, "cuda": 2}, "limit": {"*": 3}}, "/guarantee"),
        ],
    )
    def test_bad_tenant_or_key_is_refused(self, body, pointer, root, rows):
        before = rows()
        problem(root.post("/v1/tenants", json=body), 422, "validation-error", pointer)
        assert rows() == before

    def test_tenant_has_no_quota_by_default(self, root):
        body = root.post("/v1/tenants", json={"name": "green"}).json()
        assert (body["guarantee"], body["limit"], body["tier"]) == ({}, {}, "standard")
        assert (body["max_running"], body["max_queued"]) == (None, None)

    def test_quota_may_name_kinds_that_do_not_exist_yet(self, root):
        quota = {
            "guarantee": {"cuda": 4, "tpu-v9": 0},
            "limit": {"cuda": 4, "*": 16},
            "max_running": 0,
            "max_queued": 10_000,
            "tier": "standard",
        }
        answer = root.post("/v1/tenants", json={"name": "green", **quota})
        assert answer.status_code == 201, answer.text
        assert {name: answer.json()[name] for name in quota} == quota
        assert root.get(answer.headers["location"]).json() == answer.json()

    def test_a_name_is_taken_once(self, root, rows):
        before = rows()
        answer = root.post("/v1/tenants", json={"name": "red"})
        assert "red" in problem(answer, 409, "conflict-state")["detail"]
        assert rows() == before

    def test_name_of_a_hidden_tenant_is_not_revealed(self, root, as_):
        """Names are unique among siblings, all of which whoever makes one sees."""
        admin = as_("red.tenant_admin")
        for name in ("blue", "platform", "red"):
            assert admin.post("/v1/tenants", json={"name": name}).status_code == 201
        answer = admin.post("/v1/tenants", json={"name": "blue"})
        assert "red already has a child tenant" in problem(answer, 409, "conflict-state")["detail"]

    def test_tenant_is_not_moved_to_where_its_name_is_taken(self, root, as_):
        inner = as_("red.tenant_admin").post("/v1/tenants", json={"name": "blue"}).json()
        answer = root.patch(
            f"/v1/tenants/{inner['id']}",
            json={"parent_id": "ten_root"},
            headers={"If-Match": f'"{inner["version"]}"'},
        )
        assert "blue" in problem(answer, 409, "conflict-state")["detail"]

    def test_each_caller_sees_own_tenants(self, root, as_):
        names = [item["name"] for item in root.get("/v1/tenants").json()["items"]]
        assert sorted(names) == ["blue", "platform", "red"]
        items = as_("red.viewer").get("/v1/tenants").json()["items"]
        assert [item["name"] for item in items] == ["red"]

    def test_children_of_a_tenant_are_listed(self, root, as_):
        below = root.post("/v1/tenants", json={"name": "rose", "parent_id": "ten_red"}).json()
        for parent, names in (("ten_root", {"red", "blue"}), ("ten_red", {"rose"}), ("x", set())):
            found = root.get("/v1/tenants", params={"parent_id": parent}).json()["items"]
            assert {item["name"] for item in found} == names
        assert as_("red.viewer").get("/v1/tenants?parent_id=ten_red").json()["items"] == []
        assert as_("red.viewer").get(f"/v1/tenants/{below['id']}").status_code == 404

    def test_page_by_page(self, root):
        first = root.get("/v1/tenants?limit=2")
        second = root.get(first.links["next"]["url"])
        names = [item["name"] for item in [*first.json()["items"], *second.json()["items"]]]
        assert names == ["blue", "red", "platform"]  # by id: ten_blue, ten_red, ten_root
        assert second.json()["next_cursor"] is None
        assert "next" not in second.links


class TestChangeTenant:
    def change(self, root, id="ten_red", match='"1"', **body):
        headers = {"If-Match": match} if match else {}
        return root.patch(f"/v1/tenants/{id}", json=body, headers=headers)

    def test_weight_and_name_make_a_new_version(self, root):
        answer = self.change(root, weight=0.5, name="crimson")
        assert answer.headers["etag"] == '"2"'
        assert (answer.json()["weight"], answer.json()["name"]) == (0.5, "crimson")

    def test_new_weight_leaves_the_place_in_the_order_unless_usage_of_the_past_counts(
        self, root, session
    ):
        self.change(root, id="ten_blue", parent_id="ten_red")
        for user in session.scalars(select(User)).all():
            mine = {"ten_red": 100, "ten_blue": 1000}.get(user.tenant_id, 7)
            session.add(Account(user_id=user.id, tenant_id=user.tenant_id, faded=mine))
        session.add(Lift(island="isle", tenant_id="ten_red", kind="cpu", faded=70))
        session.commit()
        used = session.scalar(select(func.sum(Account.faded)).where(Account.faded != 7))
        assert self.change(root, weight=3.0).is_success
        red, lift = session.get_one(Tenant, "ten_red"), session.scalars(select(Lift)).one()
        assert (red.weight_milli, red.carried, lift.faded) == (3000, 2 * used, 210)
        self.change(root, match='"2"', weight=1.5, for_past_usage=True)
        session.refresh(red)
        assert (red.weight_milli, red.carried) == (1500, 0)
        [last] = root.get("/v1/audit-events", params={"limit": 1}).json()["items"]
        assert (last["before"]["carried"], last["after"]["carried"]) == (2 * used, 0)

    def test_change_must_name_the_newest_version(self, root, rows):
        before = rows()
        problem(self.change(root, match="", weight=2.0), 428, "precondition-required")
        problem(self.change(root, match='"7"', weight=2.0), 412, "precondition-failed")
        assert rows() == before

    def test_second_of_two_changes_of_one_version_is_refused(self, root):
        assert self.change(root, weight=2.0).status_code == 200
        problem(self.change(root, weight=3.0), 412, "precondition-failed")

    def test_change_that_makes_a_ring_is_refused(self, root, session):
        below = self.change(root, id="ten_blue", parent_id="ten_red")
        assert below.json()["parent_id"] == "ten_red"
        for id, parent in (
            ("ten_red", "ten_blue"),
            ("ten_red", "ten_red"),
            ("ten_root", "ten_red"),
        ):
            answer = self.change(root, id=id, parent_id=parent)
            problem(answer, 422, "validation-error", "/parent_id")
        parents = session.execute(select(Tenant.id, Tenant.parent_id).order_by(Tenant.id)).all()
        assert [tuple(row) for row in parents] == [
            ("ten_blue", "ten_red"),
            ("ten_red", "ten_root"),
            ("ten_root", None),
        ]

    def test_a_name_that_is_taken_is_refused(self, root, rows):
        before = rows()
        problem(self.change(root, name="blue"), 409, "conflict-state")
        assert rows() == before

    def test_a_name_that_is_taken_is_refused_whatever_else_is_changed(self, as_):
        admin = as_("red.tenant_admin")
        for name in ("a", "b"):
            id = admin.post("/v1/tenants", json={"name": name}).json()["id"]
        answer = self.change(admin, id=id, name="a", network=[], max_running=0)
        problem(answer, 409, "conflict-state")

    def test_absent_field_stays_and_null_removes_a_bound(self, root):
        quota = {"guarantee": {"cuda": 2}, "limit": {"*": 8}, "max_running": 3, "max_queued": 5}
        self.change(root, **quota, tier="basic")
        body = self.change(root, match='"2"', max_queued=None, limit={}).json()
        assert (body["guarantee"], body["limit"], body["tier"]) == ({"cuda": 2}, {}, "basic")
        assert (body["max_running"], body["max_queued"]) == (3, None)

    def test_a_limit_below_the_guarantee_is_refused(self, root, rows):
        self.change(root, guarantee={"cuda": 2, "cpu": 2})
        before = rows()
        for limit, pointer in (({"cuda": 1}, "/limit/cuda"), ({"*": 3}, "/limit/*")):
            answer = self.change(root, match='"2"', limit=limit)
            problem(answer, 422, "validation-error", pointer)
        assert rows() == before
        assert self.change(root, match='"2"', limit={"cuda": 2, "*": 4}).is_success


class TestGuaranteesInATree:
    """red is guaranteed 4 cuda devices, and nothing of any other kind."""

    @pytest.fixture(autouse=True)
    def _red_is_guaranteed_four(self, root):
        self.root = root
        self.patch("ten_red", guarantee={"cuda": 4})

    def make(self, name, parent, **guarantee):
        body = {"name": name, "parent_id": parent, "guarantee": guarantee}
        return self.root.post("/v1/tenants", json=body)

    def made(self, name, parent, **guarantee):
        answer = self.make(name, parent, **guarantee)
        assert answer.status_code == 201, answer.text
        return answer.json()["id"]

    def patch(self, id, **body):
        return self.root.patch(f"/v1/tenants/{id}", json=body, headers={"If-Match": "*"})

    def test_guarantees_of_children_are_within_their_parents(self):
        self.made("a", "ten_red", cuda=3)
        answer = self.make("b", "ten_red", cuda=2)
        found = problem(answer, 422, "validation-error", "/guarantee/cuda")
        assert "red has a guarantee of 4 cuda devices" in found["detail"]
        assert "its child tenants of 5 together" in found["detail"]
        self.made("b", "ten_red", cuda=1)

    def test_guarantee_is_unlimited_for_kinds_without_a_figure_of_the_parent(self):
        self.made("a", "ten_red", cpu=1000)

    def test_explicit_zero_leaves_no_guarantee_for_children(self):
        self.patch("ten_red", guarantee={"cuda": 4, "cpu": 0})
        problem(self.make("a", "ten_red", cpu=1), 422, "validation-error", "/guarantee/cpu")

    def test_guarantee_counts_through_tenants_without_a_figure(self):
        middle = self.made("middle", "ten_red")
        self.made("leaf", middle, cuda=3)
        answer = self.make("other", "ten_red", cuda=2)
        problem(answer, 422, "validation-error", "/guarantee/cuda")
        answer = self.make("leaf2", middle, cuda=2)
        problem(answer, 422, "validation-error", "/guarantee/cuda")
        self.made("leaf2", middle, cuda=1)

    def test_guarantee_of_a_tenant_stands_for_all_below_it(self):
        middle = self.made("middle", "ten_red", cuda=3)
        self.made("leaf", middle, cuda=1)
        problem(self.make("other", "ten_red", cuda=2), 422, "validation-error", "/guarantee/cuda")

    def test_parent_cannot_take_back_the_guarantees_of_its_children(self):
        self.made("a", "ten_red", cuda=3)
        answer = self.patch("ten_red", guarantee={"cuda": 2})
        problem(answer, 422, "validation-error", "/guarantee/cuda")
        assert self.patch("ten_red", guarantee={"cuda": 3}).is_success
        assert self.patch("ten_red", guarantee={}).is_success  # then theirs count upward

    def test_tenant_admin_is_told_of_no_guarantee_above_its_own(self, as_):
        self.patch("ten_root", guarantee={"cuda": 4})
        self.patch("ten_red", guarantee={})
        self.made("a", "ten_red", cuda=4)
        body = {"name": "b", "parent_id": "ten_red", "guarantee": {"cuda": 1}}
        answer = as_("red.tenant_admin").post("/v1/tenants", json=body)
        found = problem(answer, 422, "validation-error", "/guarantee/cuda")
        assert "red has a guarantee of 4 cuda devices in all" in found["detail"]
        assert "platform has" not in answer.text

    def test_moved_tenant_brings_its_guarantees_along(self):
        a = self.made("a", "ten_blue", cuda=5)
        found = problem(self.patch(a, parent_id="ten_red"), 422, "validation-error", "/parent_id")
        assert "together" in found["detail"]
        assert self.patch(a, parent_id="ten_red", guarantee={"cuda": 4}).is_success


def test_two_simultaneous_guarantees_are_within_what_exists(committed, app):
    """1. The first has promised 3 of 4 and is not committed.  2. The second wants 3 and waits.
    3. The first commits.  4. The second is refused.
    """
    with transaction() as session:
        key = people(session).keys["root"]
        session.get_one(Tenant, "ten_red").guarantee = {"cuda": 4}
    root = TestClient(app, headers={"Authorization": f"Bearer {key}"})
    body = {"name": "b", "parent_id": "ten_red", "guarantee": {"cuda": 3}}
    with ThreadPoolExecutor() as threads:
        with transaction() as first:
            tenant_tree.lock(first)
            first.add(Tenant(id="ten_a", name="a", parent_id="ten_red", guarantee={"cuda": 3}))
            first.flush()
            second = threads.submit(root.post, "/v1/tenants", json=body)
            until_somebody_waits_for(first)
        problem(second.result(timeout=90), 422, "validation-error", "/guarantee/cuda")


def test_tenant_that_is_deleted_while_its_change_waits_is_not_found(committed, app):
    with transaction() as session:
        key = people(session).keys["root"]
        session.add(Tenant(id="ten_a", name="a", parent_id="ten_root"))
    root = TestClient(app, headers={"Authorization": f"Bearer {key}", "If-Match": "*"})
    with ThreadPoolExecutor() as threads:
        with transaction() as first:
            tenant_tree.lock(first)
            second = threads.submit(root.patch, "/v1/tenants/ten_a", json={"weight": 2.0})
            until_somebody_waits_for(first)
            first.delete(first.get_one(Tenant, "ten_a"))
        problem(second.result(timeout=90), 404, "not-found")


class TestDeleteTenant:
    def test_empty_tenant_is_deleted(self, root):
        url = root.post("/v1/tenants", json={"name": "green"}).headers["location"]
        assert root.delete(url).status_code == 204
        problem(root.get(url), 404, "not-found")
        problem(root.delete(url), 404, "not-found")

    def test_tenant_with_users_or_children_is_not_deleted(self, root, rows):
        green = root.post("/v1/tenants", json={"name": "green"}).json()["id"]
        root.post("/v1/tenants", json={"name": "olive", "parent_id": green})
        before = rows()
        for id, has in ((green, "child tenants"), ("ten_blue", "users"), ("ten_root", "users")):
            found = problem(root.delete(f"/v1/tenants/{id}"), 409, "conflict-state")
            assert has in found["detail"]
        assert rows() == before

    def test_tenant_with_webhooks_is_not_deleted(self, root):
        green = root.post("/v1/tenants", json={"name": "green"}).json()["id"]
        body = {"url": "https://hooks.example.org/", "tenant_id": green}
        hook = root.post("/v1/webhooks", json=body).json()["id"]
        found = problem(root.delete(f"/v1/tenants/{green}"), 409, "conflict-state")
        assert "webhooks" in found["detail"]
        assert root.delete(f"/v1/webhooks/{hook}").status_code == 204
        assert root.delete(f"/v1/tenants/{green}").status_code == 204


class TestTenantsOfATenantAdmin:
    """red's admin rules what lies below red, and red's people see nothing of it."""

    @pytest.fixture
    def admin(self, as_):
        return as_("red.tenant_admin")

    @pytest.fixture
    def rose(self, admin):
        """A tenant below red."""
        answer = admin.post("/v1/tenants", json={"name": "rose"})
        assert answer.status_code == 201, answer.text
        return answer.json()["id"]

    @pytest.fixture
    def speaker(self, admin, rose, app):
        """One who speaks with a new key in rose."""

        def made(role):
            user = admin.post("/v1/users", json={"name": f"rose.{role}", "tenant_id": rose}).json()
            body = {"user_id": user["id"], "role": role, "name": "k"}
            key = admin.post("/v1/keys", json=body).json()["key"]
            return TestClient(app, headers={"Authorization": f"Bearer {key}"})

        return made

    def patch(self, client, id, **body):
        return client.patch(f"/v1/tenants/{id}", json=body, headers={"If-Match": "*"})

    def test_tenant_admin_creates_and_changes_tenants_below_its_own(self, admin, rose):
        assert admin.get(f"/v1/tenants/{rose}").json()["parent_id"] == "ten_red"
        names = {item["name"] for item in admin.get("/v1/tenants").json()["items"]}
        assert names == {"red", "rose"}
        assert self.patch(admin, rose, weight=3.0, max_queued=2).json()["weight"] == 3.0
        deeper = admin.post("/v1/tenants", json={"name": "pink", "parent_id": rose})
        assert deeper.json()["parent_id"] == rose
        assert admin.delete(f"/v1/tenants/{deeper.json()['id']}").status_code == 204

    def test_tenant_admin_cannot_change_its_own_tenant(self, admin, rows):
        before = rows()
        for body in ({"weight": 9.0}, {"guarantee": {"cpu": 1}}, {"limit": {}}, {"name": "x"}):
            problem(self.patch(admin, "ten_red", **body), 403, "insufficient-scope")
        problem(admin.delete("/v1/tenants/ten_red"), 403, "insufficient-scope")
        assert rows() == before

    def test_tenant_admin_creates_and_moves_nothing_elsewhere(self, admin, rose, rows):
        before = rows()
        for parent in ("ten_blue", "ten_root", "ten_0"):
            answer = admin.post("/v1/tenants", json={"name": "x", "parent_id": parent})
            problem(answer, 422, "validation-error", "/parent_id")
            answer = self.patch(admin, rose, parent_id=parent)
            problem(answer, 422, "validation-error", "/parent_id")
        problem(self.patch(admin, "ten_blue", weight=1.0), 404, "not-found")
        assert rows() == before

    def test_tenant_admin_divides_only_the_guarantee_of_its_tenant(self, admin, rose, root):
        answer = self.patch(admin, rose, guarantee={"cuda": 1})
        found = problem(answer, 422, "validation-error", "/guarantee/cuda")
        assert "red has a guarantee of 0 cuda devices in all" in found["detail"]
        self.patch(root, "ten_red", guarantee={"cuda": 2})
        assert self.patch(admin, rose, guarantee={"cuda": 2}).is_success
        assert "platform" not in str(self.patch(admin, rose, guarantee={"cuda": 3}).json())

    def test_guarantees_of_tenants_below_can_be_divided_anew(self, admin, rose, root):
        """red itself has no figure: what its tenants have from the platform is what it has."""
        self.patch(root, rose, guarantee={"cuda": 4})
        assert self.patch(admin, rose, guarantee={"cuda": 3}).is_success
        body = {"name": "pink", "guarantee": {"cuda": 1}}
        problem(admin.post("/v1/tenants", json=body), 422, "validation-error", "/guarantee/cuda")
        assert self.patch(admin, rose, weight=2.0).is_success

    def test_requests_below_are_seen_and_acted_on_from_above_only(
        self, admin, speaker, as_, submitted
    ):
        member, below = speaker("member"), speaker("tenant_admin")
        member.put(f"/v1/bundles/{sha256(BUNDLE)}", content=BUNDLE)
        made = member.post("/v1/requests", json=descriptor(name="petal")).json()
        url = f"/v1/requests/{made['id']}"
        assert {item["name"] for item in admin.get("/v1/requests").json()["items"]} == {
            "petal",
            submitted["name"],
        }
        assert [item["name"] for item in below.get("/v1/requests").json()["items"]] == ["petal"]
        for who in ("red.member", "red.viewer", "blue.tenant_admin"):
            problem(as_(who).get(url), 404, "not-found")
        for path in (f"/v1/requests/{submitted['id']}", "/v1/tenants/ten_red"):
            problem(below.get(path), 404, "not-found")
        assert admin.post(f"{url}/cancel").status_code == 202


class TestUsers:
    def test_tenant_admin_creates_and_sees_its_users(self, as_):
        admin = as_("red.tenant_admin")
        made = admin.post("/v1/users", json={"name": "ada"})
        assert made.json()["tenant_id"] == "ten_red"
        assert admin.get(made.headers["location"]).json() == made.json()
        tenants = {item["tenant_id"] for item in admin.get("/v1/users").json()["items"]}
        assert tenants == {"ten_red"}

    def test_user_name_is_unique_in_its_tenant(self, as_, rows):
        admin = as_("red.tenant_admin")
        before = rows()
        problem(admin.post("/v1/users", json={"name": "red.member"}), 409, "conflict-state")
        assert rows() == before
        assert as_("blue.tenant_admin").post("/v1/users", json={"name": "red.member"}).is_success

    def test_users_of_another_tenant_are_unknown(self, as_, rows):
        before = rows()
        for tenant_id in ("ten_blue", "ten_0"):
            body = {"name": "spy", "tenant_id": tenant_id}
            answer = as_("red.tenant_admin").post("/v1/users", json=body)
            problem(answer, 422, "validation-error", "/tenant_id")
        assert rows() == before

    def test_weight_and_name_make_a_new_version(self, as_):
        admin = as_("red.tenant_admin")
        url = admin.post("/v1/users", json={"name": "ada", "weight": 0.5}).headers["location"]
        first = admin.get(url)
        assert (first.json()["weight"], first.headers["etag"]) == (0.5, '"1"')
        headers = {"If-Match": first.headers["etag"]}
        answer = admin.patch(url, json={"weight": 4.0, "name": "Ada"}, headers=headers)
        assert (answer.json()["weight"], answer.json()["name"]) == (4.0, "Ada")
        assert (answer.json()["version"], answer.headers["etag"]) == (2, '"2"')
        assert admin.get(url).json() == answer.json()

    def test_a_change_names_the_newest_version_and_a_free_name(self, as_, rows):
        admin, url, before = as_("red.tenant_admin"), "/v1/users/usr_red.member", rows()
        problem(admin.patch(url, json={"weight": 2.0}), 428, "precondition-required")
        for body, match, status, type_ in (
            ({"weight": 2.0}, '"7"', 412, "precondition-failed"),
            ({"name": "red.other"}, '"1"', 409, "conflict-state"),
            ({"name": "red.other", "weight": 2.0}, '"1"', 409, "conflict-state"),
            ({"weight": 0}, '"1"', 422, "validation-error"),
            ({"tenant_id": "ten_blue"}, '"1"', 422, "validation-error"),
        ):
            answer = admin.patch(url, json=body, headers={"If-Match": match})
            problem(answer, status, type_)
        assert rows() == before

    LIMITS = {
        "limit": {"cuda": 2, "*": 3},
        "max_running": 4,
        "max_queued": 5,
        "max_sessions": 6,
        "max_duration_s": 7.5,
    }

    def test_limits_are_set_changed_one_by_one_and_removed_by_null(self, as_):
        admin = as_("red.tenant_admin")
        made = admin.post("/v1/users", json={"name": "ada", **self.LIMITS})
        assert {name: made.json()[name] for name in self.LIMITS} == self.LIMITS
        url, headers = made.headers["location"], {"If-Match": "*"}
        body = {"limit": None, "max_running": 9}
        changed = admin.patch(url, json=body, headers=headers).json()
        assert {name: changed[name] for name in self.LIMITS} == {**self.LIMITS, **body}
        plain = admin.post("/v1/users", json={"name": "bob"}).json()
        assert {plain[name] for name in self.LIMITS} == {None}

    @pytest.mark.parametrize(
        ("body", "pointer"),
        [
            ({"limit": {"Cuda!": 1}}, "/limit/Cuda!"),
            ({"limit": {"cuda": -1}}, "/limit/cuda"),
            ({"max_running": -1}, "/max_running"),
            ({"max_duration_s": 0}, "/max_duration_s"),
        ],
    )
    def test_bad_limit_is_refused(self, as_, root, body, pointer):
        admin = as_("red.tenant_admin")
        answer = admin.post("/v1/users", json={"name": "ada", **body})
        problem(answer, 422, "validation-error", pointer)
        answer = root.post("/v1/tenants", json={"name": "green", "user_defaults": body})
        problem(answer, 422, "validation-error", f"/user_defaults{pointer}")

    def test_defaults_of_a_tenant_reach_its_users_on_the_islands(self, root, session):
        body = {"user_defaults": {name: self.LIMITS[name] for name in ("limit", "max_running")}}
        shown = root.patch("/v1/tenants/ten_red", json=body, headers={"If-Match": "*"}).json()
        assert shown["user_defaults"] | {"max_queued": None} == {
            **body["user_defaults"],
            **dict.fromkeys(("max_queued", "max_sessions", "max_duration_s", "budget")),
        }
        users = snapshot_reader.users(session, "isle", User.tenant_id == "ten_red")
        assert {(user.limit["cuda"], user.most_running) for user in users.values()} == {(2, 4)}

    def test_page_by_page(self, as_):
        admin = as_("red.tenant_admin")
        first = admin.get("/v1/users?limit=3")
        second = admin.get(first.links["next"]["url"]).json()
        names = [item["name"] for item in [*first.json()["items"], *second["items"]]]
        assert sorted(names) == ["red.member", "red.other", "red.tenant_admin", "red.viewer"]

    def test_caller_can_read_its_own_user(self, as_):
        assert as_("red.viewer").get("/v1/me").json() | {"key_id": ""} == {
            "user_id": "usr_red.viewer",
            "user": "red.viewer",
            "tenant_id": "ten_red",
            "tenant": "red",
            "role": "viewer",
            "scopes": None,
            "key_id": "",
        }


class TestDeleteUser:
    URL = "/v1/users/usr_red.member"

    def test_deleted_user_has_no_access_and_the_history_names_it(
        self, as_, red, submitted, session
    ):
        admin = as_("red.tenant_admin")
        session.get_one(Request, submitted["id"]).state = "done"
        mine = {"key_id": "k", "encrypted": b"", "set_by": "usr_red.member"}
        whose = {"tenant_id": "ten_red", "user_id": "usr_red.member"}
        session.add(Secret(id="sct_1", name="HF_TOKEN", **whose, **mine))
        session.commit()
        assert admin.delete(self.URL).status_code == 204
        problem(red.get("/v1/me"), 401, "unauthenticated")
        for again in (admin.delete(self.URL), admin.get(self.URL), admin.get(f"{self.URL}/budget")):
            problem(again, 404, "not-found")
        listed = admin.get("/v1/users").json()["items"]
        assert "red.member" not in [item["name"] for item in listed]
        assert admin.get(f"/v1/requests/{submitted['id']}").json()["user"] == "red.member"
        assert session.scalar(select(Secret)) is None

    def test_deleted_user_gets_no_key_and_its_name_is_free(self, as_, session):
        admin = as_("red.tenant_admin")
        assert admin.delete(self.URL).status_code == 204
        body = {"user_id": "usr_red.member", "role": "member", "name": "k"}
        problem(admin.post("/v1/keys", json=body), 422, "validation-error", "/user_id")
        made = admin.post("/v1/users", json={"name": "red.member"})
        assert made.status_code == 201
        problem(admin.post("/v1/users", json={"name": "red.member"}), 409, "conflict-state")

    def test_key_that_was_made_meanwhile_gives_no_access(self, as_, app, session):
        assert as_("red.tenant_admin").delete(self.URL).status_code == 204
        key = auth.new_key(session, "usr_red.member", "member", "made meanwhile")
        session.commit()
        problem(bearer(app, key).get("/v1/me"), 401, "unauthenticated")

    def test_user_with_work_or_reservations_is_not_deleted(
        self, as_, root, submitted, session, rows
    ):
        admin, before = as_("red.tenant_admin"), rows()
        found = problem(admin.delete(self.URL), 409, "conflict-state")
        assert f"/v1/requests/{submitted['id']}/cancel" in found["detail"]
        assert rows() == before
        session.get_one(Request, submitted["id"]).state = "done"
        times = {"begins_at": func.now(), "ends_at": func.now()}
        whose = {"tenant_id": "ten_red", "user_id": "usr_red.member", "devices": {"cpu": 1}}
        session.add(Reservation(id="rsv_1", name="workshop", island="isle", **whose, **times))
        session.commit()
        assert "workshop" in problem(admin.delete(self.URL), 409, "conflict-state")["detail"]

    def test_nobody_deletes_the_own_user_or_one_with_a_greater_role(self, as_, root, rows):
        made = {"user_id": "usr_red.member", "role": "platform_admin", "name": "k"}
        assert root.post("/v1/keys", json=made).status_code == 201
        before = rows()
        admin = as_("red.tenant_admin")
        problem(admin.delete("/v1/users/usr_red.tenant_admin"), 409, "conflict-state")
        problem(root.delete("/v1/users/usr_root"), 409, "conflict-state")
        problem(admin.delete(self.URL), 403, "insufficient-scope")
        assert rows() == before


def bearer(app, token):
    return TestClient(app, headers={"Authorization": f"Bearer {token}"})


class TestKeys:
    BODY = {"user_id": "usr_red.member", "role": "member", "name": "laptop"}

    def test_key_is_shown_once_and_works(self, as_, app):
        admin = as_("red.tenant_admin")
        made = admin.post("/v1/keys", json=self.BODY).json()
        headers = {"Authorization": f"Bearer {made['key']}"}
        assert TestClient(app, headers=headers).get("/v1/me").json()["user"] == "red.member"
        listed = admin.get("/v1/keys", params={"user_id": "usr_red.member"}).json()["items"]
        assert made["id"] in [item["id"] for item in listed]
        assert all("key" not in item for item in listed)

    def test_revoked_key_gives_no_access_and_revoking_twice_is_no_error(self, as_, app, session):
        admin = as_("red.tenant_admin")
        made = admin.post("/v1/keys", json=self.BODY).json()
        first, again = (admin.delete(f"/v1/keys/{made['id']}") for _ in range(2))
        assert first.json() == again.json()
        assert first.json()["revoked_at"]
        headers = {"Authorization": f"Bearer {made['key']}"}
        problem(TestClient(app, headers=headers).get("/v1/me"), 401, "unauthenticated")

    def test_only_a_platform_admin_makes_or_revokes_keys_of_platform_admins(
        self, as_, world, rows, root
    ):
        before = rows()
        body = self.BODY | {"role": "platform_admin"}
        answer = as_("red.tenant_admin").post("/v1/keys", json=body)
        problem(answer, 403, "insufficient-scope")
        assert rows() == before
        made = root.post("/v1/keys", json=body).json()
        answer = as_("red.tenant_admin").delete(f"/v1/keys/{made['id']}")
        problem(answer, 403, "insufficient-scope")

    def test_all_keys_of_a_user_are_revoked_at_once(self, as_, app, session):
        admin = as_("red.tenant_admin")
        made = [admin.post("/v1/keys", json=self.BODY).json() for _ in range(2)]
        admin.delete(f"/v1/keys/{made[0]['id']}")
        before = session.get_one(ApiKey, made[0]["id"]).revoked_at
        assert admin.delete("/v1/users/usr_red.member/keys").json() == {"revoked": 2}
        assert admin.delete("/v1/users/usr_red.member/keys").json() == {"revoked": 0}
        session.expire_all()
        assert session.get_one(ApiKey, made[0]["id"]).revoked_at == before
        for client in (as_("red.member"), bearer(app, made[1]["key"])):
            problem(client.get("/v1/me"), 401, "unauthenticated")
        assert as_("red.other").get("/v1/me").is_success

    def test_administrator_who_revokes_own_keys_keeps_the_one_in_use(self, as_, app):
        admin = as_("red.tenant_admin")
        body = self.BODY | {"user_id": "usr_red.tenant_admin", "role": "tenant_admin"}
        stolen = admin.post("/v1/keys", json=body).json()
        assert admin.delete("/v1/users/usr_red.tenant_admin/keys").json() == {"revoked": 1}
        problem(bearer(app, stolen["key"]).get("/v1/me"), 401, "unauthenticated")
        assert admin.get("/v1/me").is_success

    def test_keys_are_revoked_all_or_none(self, as_, root, rows):
        made = root.post("/v1/keys", json=self.BODY | {"role": "platform_admin"})
        assert made.status_code == 201
        before = rows()
        answer = as_("red.tenant_admin").delete("/v1/users/usr_red.member/keys")
        problem(answer, 403, "insufficient-scope")
        assert rows() == before
        assert root.delete("/v1/users/usr_red.member/keys").json() == {"revoked": 2}

    @pytest.mark.parametrize(
        ("change", "pointer"),
        [
            ({"role": "emperor"}, "/role"),
            ({"user_id": "usr_blue.member"}, "/user_id"),
            ({"user_id": "usr_0"}, "/user_id"),
            ({"expires_at": "2020-01-01T00:00:00Z"}, "/expires_at"),
            ({"expires_at": "soon"}, "/expires_at"),
        ],
    )
    def test_bad_tenant_or_key_is_refused(self, change, pointer, as_, rows):
        before = rows()
        answer = as_("red.tenant_admin").post("/v1/keys", json=self.BODY | change)
        problem(answer, 422, "validation-error", pointer)
        assert rows() == before

    def test_key_may_expire(self, as_, session):
        ends = datetime.now(UTC) + timedelta(days=1)
        body = self.BODY | {"expires_at": ends.isoformat()}
        made = as_("red.tenant_admin").post("/v1/keys", json=body).json()
        assert session.get_one(ApiKey, made["id"]).expires_at == ends
