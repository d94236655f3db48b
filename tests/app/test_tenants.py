"""/v1/tenants, /users, /keys and /me; who may is in test_roles.py."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import select

from app.models import ApiKey, Tenant
from tests.app.conftest import problem


@pytest.fixture
def root(as_):
    return as_("root")


class TestTenants:
    def test_a_new_one_lies_below_the_root(self, root):
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
        ],
    )
    def test_a_bad_one_is_refused(self, body, pointer, root, rows):
        before = rows()
        problem(root.post("/v1/tenants", json=body), 422, "validation-error", pointer)
        assert rows() == before

    def test_a_name_is_taken_once(self, root, rows):
        before = rows()
        answer = root.post("/v1/tenants", json={"name": "red"})
        assert "red" in problem(answer, 409, "conflict-state")["detail"]
        assert rows() == before

    def test_each_sees_its_own(self, root, as_):
        names = [item["name"] for item in root.get("/v1/tenants").json()["items"]]
        assert sorted(names) == ["blue", "platform", "red"]
        items = as_("red.viewer").get("/v1/tenants").json()["items"]
        assert [item["name"] for item in items] == ["red"]


class TestChangeTenant:
    def change(self, root, id="ten_red", match='"1"', **body):
        headers = {"If-Match": match} if match else {}
        return root.patch(f"/v1/tenants/{id}", json=body, headers=headers)

    def test_weight_and_name_make_a_new_version(self, root):
        answer = self.change(root, weight=0.5, name="crimson")
        assert answer.headers["etag"] == '"2"'
        assert (answer.json()["weight"], answer.json()["name"]) == (0.5, "crimson")

    def test_the_version_must_be_named_and_be_the_newest(self, root, rows):
        before = rows()
        problem(self.change(root, match="", weight=2.0), 428, "precondition-required")
        problem(self.change(root, match='"7"', weight=2.0), 412, "precondition-failed")
        assert rows() == before

    def test_of_two_changes_of_one_version_the_second_is_told(self, root):
        assert self.change(root, weight=2.0).status_code == 200
        problem(self.change(root, weight=3.0), 412, "precondition-failed")

    def test_the_tree_stays_a_tree(self, root, session):
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


class TestUsers:
    def test_a_tenant_admin_makes_and_sees_its_own(self, as_):
        admin = as_("red.tenant_admin")
        made = admin.post("/v1/users", json={"name": "ada"})
        assert made.json()["tenant_id"] == "ten_red"
        assert admin.get(made.headers["location"]).json() == made.json()
        tenants = {item["tenant_id"] for item in admin.get("/v1/users").json()["items"]}
        assert tenants == {"ten_red"}

    def test_a_name_is_taken_once_in_a_tenant(self, as_, rows):
        admin = as_("red.tenant_admin")
        before = rows()
        problem(admin.post("/v1/users", json={"name": "red.member"}), 409, "conflict-state")
        assert rows() == before
        assert as_("blue.tenant_admin").post("/v1/users", json={"name": "red.member"}).is_success

    def test_another_tenant_is_unknown(self, as_, rows):
        before = rows()
        for tenant_id in ("ten_blue", "ten_0"):
            body = {"name": "spy", "tenant_id": tenant_id}
            answer = as_("red.tenant_admin").post("/v1/users", json=body)
            problem(answer, 422, "validation-error", "/tenant_id")
        assert rows() == before

    def test_page_by_page(self, as_):
        admin = as_("red.tenant_admin")
        first = admin.get("/v1/users?limit=3")
        second = admin.get(first.links["next"]["url"]).json()
        names = [item["name"] for item in [*first.json()["items"], *second["items"]]]
        assert sorted(names) == ["red.member", "red.other", "red.tenant_admin", "red.viewer"]

    def test_me(self, as_):
        assert as_("red.viewer").get("/v1/me").json() | {"key_id": ""} == {
            "user_id": "usr_red.viewer",
            "user": "red.viewer",
            "tenant_id": "ten_red",
            "tenant": "red",
            "role": "viewer",
            "key_id": "",
        }


class TestKeys:
    BODY = {"user_id": "usr_red.member", "role": "member", "name": "laptop"}

    def test_it_is_shown_once_and_works(self, as_, app):
        admin = as_("red.tenant_admin")
        made = admin.post("/v1/keys", json=self.BODY).json()
        headers = {"Authorization": f"Bearer {made['key']}"}
        assert TestClient(app, headers=headers).get("/v1/me").json()["user"] == "red.member"
        listed = admin.get("/v1/keys", params={"user_id": "usr_red.member"}).json()["items"]
        assert made["id"] in [item["id"] for item in listed]
        assert all("key" not in item for item in listed)

    def test_a_revoked_one_opens_nothing_and_revoking_twice_is_no_error(self, as_, app, session):
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
    def test_a_bad_one_is_refused(self, change, pointer, as_, rows):
        before = rows()
        answer = as_("red.tenant_admin").post("/v1/keys", json=self.BODY | change)
        problem(answer, 422, "validation-error", pointer)
        assert rows() == before

    def test_it_may_end_by_itself(self, as_, session):
        ends = datetime.now(UTC) + timedelta(days=1)
        body = self.BODY | {"expires_at": ends.isoformat()}
        made = as_("red.tenant_admin").post("/v1/keys", json=body).json()
        assert session.get_one(ApiKey, made["id"]).expires_at == ends
