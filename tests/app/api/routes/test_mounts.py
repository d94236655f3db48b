"""/v1/mounts, and requests that use mounts; who may call what is in test_roles.py."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import cast, func, select, update
from sqlalchemy.dialects.postgresql import JSONB

from app.core.model.provisions.mounts import MAX_KNOWN
from app.db.models import AuditEvent, Device, Mount, Task, Tenant
from app.scheduling import launch_order
from app.settings import settings
from tests.app.conftest import problem


@pytest.fixture
def root(as_):
    return as_("root")


def add(root, name: str, *tenants: str) -> dict[str, Any]:
    answer = root.post(
        "/v1/mounts", json={"name": name, "path": f"/data/{name}", "tenants": [*tenants]}
    )
    assert answer.status_code == 201, answer.text
    return answer.json()


def with_mounts(**mounts: str) -> dict[str, Any]:
    """A request of one command; `data="x"` shows the mount x at /data."""
    targets = {f"/{target}": name for target, name in mounts.items()}
    return {"tasks": [{"name": "a", "run": {"command": ["true"]}, "mounts": targets}]}


def offer(session, *names: str) -> None:
    facts = {"sandbox": "off", "offers": [f"mount:{name}" for name in names]}
    session.execute(update(Device).where(Device.id == "h.0").values(facts=facts))
    session.commit()


class TestMounts:
    def test_administrator_names_a_folder_for_a_tenant(self, root, as_, session):
        made = add(root, "pictures", "ten_red")
        assert (made["path"], made["tenants"]) == ("/data/pictures", ["ten_red"])
        assert (made["read_only"], made["hosts"]) == (True, 0)
        offer(session, "pictures", "other")
        assert root.get("/v1/mounts/pictures").json()["hosts"] == 1
        seen = as_("red.viewer").get("/v1/mounts/pictures").json()
        assert seen == {**made, "path": None, "tenants": None, "hosts": 1}

    def test_tenant_sees_its_own_and_those_of_tenants_above_it(self, root, as_, session):
        session.add(Tenant(id="ten_below", name="below", parent_id="ten_red"))
        session.commit()
        for name, tenant in (
            ("a", "ten_red"),
            ("b", "ten_blue"),
            ("c", "ten_root"),
            ("d", "ten_below"),
        ):
            add(root, name, tenant)
        root.post("/v1/mounts", json={"name": "e", "path": "/e", "tenants": None})

        def listed(who: str) -> list[str]:
            return [mount["name"] for mount in as_(who).get("/v1/mounts").json()["items"]]

        assert listed("red.member") == ["a", "c", "e"]
        assert listed("blue.tenant_admin") == ["b", "c", "e"]
        assert listed("root") == ["a", "b", "c", "d", "e"]

    def test_mount_of_another_tenant_is_not_found_as_one_that_is_not_there(self, root, as_):
        add(root, "theirs", "ten_blue")
        found, absent = (
            as_("red.member").get(f"/v1/mounts/{name}") for name in ("theirs", "nobodys")
        )
        problem(found, 404, "not-found")
        assert found.json()["detail"].replace("theirs", "nobodys") == absent.json()["detail"]

    @pytest.mark.parametrize("path", ["data", "/data/../etc", "/data/", "//x", "/", "", "/a\u0000"])
    def test_path_that_is_not_plain_is_refused(self, root, path):
        body = {"name": "x", "path": path, "tenants": None}
        problem(root.post("/v1/mounts", json=body), 422, "validation-error")

    def test_writable_mount_is_refused(self, root):
        body = {"name": "x", "path": "/x", "tenants": None, "read_only": False}
        problem(root.post("/v1/mounts", json=body), 422, "validation-error")

    def test_same_name_again_and_unknown_tenants_are_refused(self, root):
        add(root, "x", "ten_red")
        body = {"name": "x", "path": "/y", "tenants": None}
        problem(root.post("/v1/mounts", json=body), 409, "conflict-state")
        answer = root.post(
            "/v1/mounts", json={**body, "name": "y", "tenants": ["ten_red", "ten_no"]}
        )
        assert problem(answer, 422, "validation-error")["errors"][0]["pointer"] == "/tenants/1"

    def test_number_of_mounts_is_bounded(self, root, session):
        session.add_all(Mount(name=f"m{n}", path="/x") for n in range(MAX_KNOWN))
        session.commit()
        body = {"name": "x", "path": "/x", "tenants": None}
        problem(root.post("/v1/mounts", json=body), 409, "conflict-state")

    def test_change_needs_the_version_and_deletion_frees_the_name(self, root, as_):
        add(root, "x", "ten_red")
        change = {"json": {"tenants": ["ten_blue"]}}
        problem(root.patch("/v1/mounts/x", **change), 428, "precondition-required")
        stale = {"headers": {"If-Match": '"7"'}}
        problem(root.patch("/v1/mounts/x", **change, **stale), 412, "precondition-failed")
        etag = root.get("/v1/mounts/x").headers["ETag"]
        assert (
            root.patch("/v1/mounts/x", **change, headers={"If-Match": etag}).json()["version"] == 2
        )
        assert as_("red.member").get("/v1/mounts/x").status_code == 404
        assert root.delete("/v1/mounts/x").status_code == 204
        problem(root.delete("/v1/mounts/x"), 404, "not-found")
        add(root, "x", "ten_red")

    def test_every_change_is_in_the_audit_log(self, root, session):
        add(root, "x", "ten_red")
        root.patch("/v1/mounts/x", json={"tenants": None}, headers={"If-Match": "*"})
        root.delete("/v1/mounts/x")
        log = session.execute(
            select(AuditEvent.action, AuditEvent.before, AuditEvent.after)
            .where(AuditEvent.target_kind == "mount", AuditEvent.target_id == "x")
            .order_by(AuditEvent.id)
        ).all()
        assert [tuple(row) for row in log] == [
            ("made", {}, {"path": "/data/x", "tenants": ["ten_red"], "sort": "folder"}),
            ("changed", {"tenants": ["ten_red"]}, {"tenants": None}),
            ("removed", {"path": "/data/x", "tenants": None, "sort": "folder"}, {}),
        ]

    def test_devices_tell_names_of_mounts_to_administrators_only(self, root, as_, session):
        offer(session, "secret-project")
        both = ["mount:secret-project", "image:secret-project"]
        facts = {"sandbox": "off", "offers": both}
        session.execute(update(Device).where(Device.id == "h.0").values(facts=facts))
        session.commit()
        assert root.get("/v1/devices/h.0").json()["facts"]["offers"] == both
        for who in ("red.member", "red.tenant_admin"):
            assert as_(who).get("/v1/devices/h.0").json()["facts"]["offers"] == []
            assert "secret-project" not in as_(who).get("/v1/devices").text


class TestRequests:
    def test_request_with_its_mount_is_accepted(self, root, as_, session):
        add(root, "pictures", "ten_red")
        offer(session, "pictures")
        answer = as_("red.member").post("/v1/requests", json=with_mounts(data="pictures"))
        assert answer.status_code == 202, answer.text
        task = session.get_one(Task, answer.json()["tasks"][0]["id"])
        assert task.device_choice == "!mount:pictures"
        assert task.spec.mounts == {"/data": "pictures"}

    def test_mount_of_another_tenant_is_refused_as_one_that_is_not_there(self, root, as_, session):
        for name, tenant in (("pictures", "ten_red"), ("theirs", "ten_blue")):
            add(root, name, tenant)
        offer(session, "pictures", "theirs")
        found, absent = (
            problem(
                as_("red.member").post("/v1/requests", json=with_mounts(data=name)),
                422,
                "validation-error",
            )["errors"]
            for name in ("theirs", "nobody")
        )
        assert found[0]["pointer"] == "/tasks/0/mounts/~1data"
        assert found[0]["code"] == "unknown-mount"
        told = "your tenant has no mount 'theirs'; it may use pictures"
        assert found[0]["detail"] == told
        assert absent[0]["detail"] == told.replace("theirs", "nobody")

    def test_mount_that_no_host_shows_is_refused_and_names_no_other(self, root, as_, session):
        add(root, "pictures", "ten_red")
        offer(session, "secret-project")
        answer = as_("red.member").post("/v1/requests", json=with_mounts(data="pictures"))
        [found] = problem(answer, 422, "unsatisfiable")["errors"]
        assert found["pointer"] == "/tasks/0/mounts/~1data"
        assert found["detail"] == "there is no cpu device that offers mount:pictures"

    def test_launch_names_the_paths_that_the_tenant_may_use_then(self, root, as_, session):
        add(root, "pictures", "ten_red")
        add(root, "words", "ten_red")
        offer(session, "pictures", "words")
        body = with_mounts(data="pictures", words="words")
        submitted = as_("red.member").post("/v1/requests", json=body).json()
        task = session.get_one(Task, submitted["tasks"][0]["id"])
        device = session.get_one(Device, "h.0")

        def named() -> dict[str, str]:
            session.expire_all()
            facts = launch_order.look_up(session, [(task, device)])
            return dict(facts.mounts[task.id])

        assert named() == {"/data": "/data/pictures", "/words": "/data/words"}
        root.patch("/v1/mounts/pictures", json={"tenants": []}, headers={"If-Match": "*"})
        assert named() == {"/words": "/data/words"}
        root.delete("/v1/mounts/words")
        assert named() == {}


IN_IMAGE = {"name": "a", "run": {"command": ["true"]}, "image": "debian"}


class TestContainerImages:
    @pytest.fixture
    def debian(self, root, session) -> None:
        for name, tenant in (("debian", "ten_red"), ("theirs", "ten_blue")):
            body = {"name": name, "path": f"/images/{name}", "tenants": [tenant]}
            answer = root.post("/v1/mounts", json={**body, "sort": "image"})
            assert (answer.status_code, answer.json()["sort"]) == (201, "image")
        add(root, "pictures", "ten_red")
        offers = ["image:debian", "image:theirs", "mount:pictures"]
        facts = {"sandbox": "off", "offers": offers}
        session.execute(update(Device).where(Device.id == "h.0").values(facts=facts))
        session.commit()

    def test_container_images_and_folders_are_listed_by_their_sort(self, debian, as_, session):
        def listed(**params: str) -> list[tuple[str, int]]:
            found = as_("red.member").get("/v1/mounts", params=params).json()["items"]
            return [(mount["name"], mount["hosts"]) for mount in found]

        assert listed(sort="image") == [("debian", 1)]
        told = {"digest": "0a" * 32, "size_bytes": 7, "took_us": 9}
        both = {"debian": told, "theirs": told, "pictures": told}
        facts = Device.facts.op("||")(func.jsonb_build_object("unpacked", cast(both, JSONB)))
        session.execute(update(Device).where(Device.id == "h.0").values(facts=facts))
        session.commit()
        items = as_("red.member").get("/v1/mounts").json()["items"]
        there = {"host": "h", "digest": "sha256:" + "0a" * 32, "size_bytes": 7, "unpack_us": 9}
        assert {one["name"]: one["unpacked"] for one in items} == {
            "debian": [there],
            "pictures": [],
        }
        assert listed(sort="folder") == [("pictures", 1)]
        assert listed() == [("debian", 1), ("pictures", 1)]

    def test_command_in_its_container_image_is_launched_with_the_path(self, debian, as_, session):
        answer = as_("red.member").post("/v1/requests", json={"tasks": [IN_IMAGE]})
        assert answer.status_code == 202, answer.text
        task = session.get_one(Task, answer.json()["tasks"][0]["id"])
        assert task.device_choice == "!image:debian"
        device = session.get_one(Device, "h.0")
        facts = launch_order.look_up(session, [(task, device)])
        assert facts.roots == {task.id: "/images/debian"}
        session.execute(update(Mount).where(Mount.name == "debian").values(tenants=[]))
        assert launch_order.look_up(session, [(task, device)]).roots == {}

    @pytest.mark.parametrize("name", ["theirs", "nobody", "pictures"])
    def test_one_of_another_tenant_or_sort_is_refused_as_one_that_is_not_there(
        self, debian, as_, name
    ):
        body = {"tasks": [{**IN_IMAGE, "image": name}]}
        answer = as_("red.member").post("/v1/requests", json=body)
        [found] = problem(answer, 422, "validation-error")["errors"]
        assert (found["pointer"], found["code"]) == ("/tasks/0/image", "unknown-mount")
        assert found["detail"] == f"your tenant has no container image {name!r}; it may use debian"

    def test_container_image_is_no_mount_at_a_target(self, debian, as_):
        answer = as_("red.member").post("/v1/requests", json=with_mounts(data="debian"))
        [found] = problem(answer, 422, "validation-error")["errors"]
        assert found["detail"] == "your tenant has no mount 'debian'; it may use pictures"

    def test_one_that_no_host_shows_is_refused(self, debian, as_, session):
        session.execute(update(Device).where(Device.id == "h.0").values(facts={"sandbox": "off"}))
        session.commit()
        answer = as_("red.member").post("/v1/requests", json={"tasks": [IN_IMAGE]})
        [found] = problem(answer, 422, "unsatisfiable")["errors"]
        assert found["pointer"] == "/tasks/0/image"
        assert found["detail"] == "there is no cpu device that offers image:debian"


class TestImagesOfRegistries:
    IMAGE = f"docker.io/library/debian@sha256:{'0a' * 32}"

    @pytest.fixture
    def submit(self, as_, session, monkeypatch):
        """Submit a command in an image, where these registries are allowed and offered."""

        def submit(image: str, *, allowed: str = "", offers: tuple[str, ...] = ()):
            allowing = settings().model_copy(update={"image_registries": allowed})
            monkeypatch.setattr("app.intake.intake.settings", lambda: allowing)
            facts = {"sandbox": "off", "offers": [*offers]}
            session.execute(update(Device).where(Device.id == "h.0").values(facts=facts))
            session.commit()
            body = {"tasks": [{**IN_IMAGE, "image": image}]}
            return as_("red.member").post("/v1/requests", json=body)

        return submit

    def test_image_of_an_allowed_registry_is_accepted_and_launched_without_a_path(
        self, submit, session
    ):
        answer = submit(self.IMAGE, allowed="docker.io/library", offers=("registry:docker.io",))
        assert answer.status_code == 202, answer.text
        task = session.get_one(Task, answer.json()["tasks"][0]["id"])
        assert task.device_choice == "!registry:docker.io"
        assert task.descriptor["image"] == self.IMAGE
        device = session.get_one(Device, "h.0")
        assert launch_order.look_up(session, [(task, device)]).roots == {}

    @pytest.mark.parametrize(
        ("allowed", "told"),
        [("", "no registry is allowed"), ("docker.io/acme,ghcr.io", "docker.io/acme, ghcr.io")],
    )
    def test_image_of_a_registry_that_is_not_allowed_is_refused(self, submit, allowed, told):
        answer = submit(self.IMAGE, allowed=allowed, offers=("registry:docker.io",))
        [found] = problem(answer, 422, "validation-error")["errors"]
        assert (found["pointer"], found["code"]) == ("/tasks/0/image", "registry")
        assert told in found["detail"]

    def test_image_by_its_tag_is_refused_with_how_to_find_the_digest(self, submit):
        answer = submit("docker.io/library/debian:12", allowed="docker.io")
        [found] = problem(answer, 422, "validation-error")["errors"]
        assert found["pointer"] == "/tasks/0/image"
        assert "skopeo inspect" in found["detail"]

    def test_image_that_no_host_fetches_is_refused_with_what_is_missing(self, submit):
        answer = submit(self.IMAGE, allowed="docker.io")
        [found] = problem(answer, 422, "unsatisfiable")["errors"]
        assert found["pointer"] == "/tasks/0/image"
        assert "no host with a cpu device fetches container images" in found["detail"]
        assert "Debian package skopeo" in found["detail"]
