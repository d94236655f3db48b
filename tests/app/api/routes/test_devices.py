"""/v1/islands, /hosts, /devices and /presets; who may is in test_roles.py."""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy import event, func, select, update
from sqlalchemy.exc import IntegrityError

from app.api import probes
from app.core.model.protocol.protocol_version import PROTOCOL, told_version
from app.db.models import Device, Host, Island, Placement, Preset, Task
from app.db.transactions import now_s
from app.intake import tunnels
from tests.app.conftest import problem


@pytest.fixture
def root(as_):
    return as_("root")


class TestIslands:
    def test_island_has_a_leader_while_its_lease_lasts(self, as_, session):
        viewer = as_("red.viewer")
        assert not viewer.get("/v1/islands/isle").json()["led"]
        lease = func.now() + timedelta(hours=1)
        session.execute(update(Island).values(leader="me", leader_until=lease, term=3))
        session.commit()
        body = {"name": "isle", "leader": "me", "led": True, "term": 3, "devices": 2}
        body["key"] = None
        assert viewer.get("/v1/islands/isle").json() == body
        assert viewer.get("/v1/islands").json()["items"] == [body]

    def test_another_is_not_found(self, as_):
        problem(as_("red.viewer").get("/v1/islands/x"), 404, "not-found")


@pytest.mark.parametrize("column", ["cost_milli", "memory_bytes"])
def test_a_device_row_with_what_the_api_forbids_is_refused(as_, session, column):
    with pytest.raises(IntegrityError, match=f"ck_devices_{column}"):
        session.execute(update(Device).where(Device.id == "h.0").values({column: -1}))


class TestHosts:
    def test_host_counts_its_devices_that_are_up(self, as_, session):
        session.execute(update(Device).where(Device.id == "h.1").values(lease_until=None))
        session.commit()
        body = as_("red.viewer").get("/v1/hosts/h").json()
        assert body == {"name": "h", "island": "isle", "cordoned": False, "devices": 2, "up": 1}
        assert as_("red.viewer").get("/v1/hosts").json()["items"] == [body]

    def test_drain_and_uncordon(self, root, session):
        for _ in range(2):
            assert root.post("/v1/hosts/h/drain").json()["cordoned"]
        assert root.get("/v1/devices/h.0").json()["cordoned"]
        assert session.scalar(select(Host.cordoned))
        for _ in range(2):
            assert not root.post("/v1/hosts/h/uncordon").json()["cordoned"]

    def test_another_is_not_found(self, root):
        problem(root.post("/v1/hosts/x/drain"), 404, "not-found")


class TestDevices:
    @pytest.mark.parametrize(("off_s", "told"), [(90, "ahead of"), (-40, "behind")])
    def test_clock_of_its_host_that_is_off_is_told(self, as_, session, off_s, told):
        heard_us, heard_s = 5_000_000, now_s(session)
        facts = {"clock_began_s": int(heard_s) + off_s - 5}
        values = {"facts": facts, "heard_us": heard_us, "seen_at": func.now()}
        session.execute(update(Device).where(Device.id == "h.0").values(values))
        session.execute(update(Device).where(Device.id == "h.1").values(seen_at=func.now()))
        session.commit()
        shown = as_("red.viewer").get("/v1/devices").json()["items"]
        (warning,), none = (device["health"]["warnings"] for device in shown)
        assert told in warning
        assert none == []
        clock = tunnels._clock_s(session, session.get_one(Device, "h.0"))
        assert round(clock - now_s(session)) in (off_s, off_s - 1)

    def test_worker_of_another_version_is_told(self, as_, session):
        for id, protocol in (("h.0", {}), ("h.1", {"protocol": PROTOCOL})):
            facts = {"island": "isle", "host": "h", **protocol}
            session.execute(update(Device).where(Device.id == id).values(facts=facts))
        session.commit()
        old, new = as_("red.viewer").get("/v1/devices").json()["items"]
        (warning,) = old["health"]["warnings"]
        assert "is older (messages 0) than this service (messages 1)" in warning
        assert new["health"]["warnings"] == []
        assert new["facts"]["protocol"] == PROTOCOL
        assert "h.0: Its worker is older" in probes._devices(session).detail
        assert "is newer" in told_version({"island": "isle", "protocol": PROTOCOL + 1})

    def seat(self, session, submitted):
        session.add(
            Placement(
                task_id=submitted["tasks"][0]["id"],
                epoch=1,
                device_id="h.0",
                tenant_id="ten_red",
                user_id="usr_red.member",
                kind="cpu",
                cost_milli=1000,
                incarnation="i",
            )
        )
        session.commit()

    def test_task_on_a_device_is_shown_to_callers_who_may_see_it(self, as_, session, submitted):
        self.seat(session, submitted)

        def seen(who):
            body = as_(who).get("/v1/devices/h.0").json()
            return body["busy"], body["task_id"]

        task_id = submitted["tasks"][0]["id"]
        assert seen("red.viewer") == seen("root") == (True, task_id)
        assert seen("blue.tenant_admin") == (True, None)
        assert not as_("root").get("/v1/devices/h.1").json()["busy"]

    def test_model_and_uuid_of_an_accelerator_are_shown(self, as_, session):
        device = session.get_one(Device, "h.0")
        device.facts = {**device.facts, "model": "NVIDIA H100", "uuid": "GPU-5b3f"}
        session.commit()
        shown = [
            as_("red.viewer").get(f"/v1/devices/{id}").json()["facts"] for id in ("h.0", "h.1")
        ]
        assert [facts.get("model") for facts in shown] == ["NVIDIA H100", None]
        assert [facts.get("uuid") for facts in shown] == ["GPU-5b3f", None]

    def test_list_by_kind_and_island_page_by_page(self, as_):
        viewer = as_("red.viewer")
        first = viewer.get("/v1/devices?limit=1")
        second = viewer.get(first.links["next"]["url"]).json()
        ids = [item["id"] for item in [*first.json()["items"], *second["items"]]]
        assert ids == ["h.0", "h.1"]
        assert viewer.get("/v1/devices?kind=cuda").json()["items"] == []
        assert len(viewer.get("/v1/devices?island=isle").json()["items"]) == 2

    def test_cost_is_changed_only_for_the_version_that_was_read(self, root, session, rows):
        etag = root.get("/v1/devices/h.0").headers["etag"]
        before = rows()
        problem(root.patch("/v1/devices/h.0", json={"cost": 2}), 428, "precondition-required")
        for cost in (0, "2", None):
            answer = root.patch("/v1/devices/h.0", json={"cost": cost}, headers={"If-Match": etag})
            problem(answer, 422, "validation-error", "/cost")
        assert rows() == before
        answer = root.patch("/v1/devices/h.0", json={"cost": 2}, headers={"If-Match": etag})
        assert (answer.json()["cost"], answer.headers["etag"]) == (2.0, '"2"')
        again = root.patch("/v1/devices/h.0", json={"cost": 3}, headers={"If-Match": etag})
        problem(again, 412, "precondition-failed")
        assert session.get_one(Device, "h.0").cost_milli == 2000

    @pytest.mark.parametrize("path", ["devices/h.0/cordon", "hosts/h/drain"])
    def test_cordon_waits_for_no_row_that_new_orders_refer_to(self, root, session, submitted, path):
        """An island that holds the tasks writes orders of the device, which looks at its row."""
        self.seat(session, submitted)
        session.execute(update(Task).values(seat="h.0", state="running"))
        session.commit()
        said: list[str] = []
        note = lambda *given: said.append(given[2])  # noqa: E731
        event.listen(session.get_bind(), "before_cursor_execute", note)
        try:
            assert root.post(f"/v1/{path}").status_code == 200
        finally:
            event.remove(session.get_bind(), "before_cursor_execute", note)
        locks = [each for each in said if " FOR " in each]
        assert any("FROM tasks" in each for each in locks)
        assert not [each for each in locks if "FOR UPDATE" in each]

    def test_cordon_and_uncordon(self, root):
        for _ in range(2):
            assert root.post("/v1/devices/h.0/cordon").json()["cordoned"]
        assert not root.get("/v1/devices/h.1").json()["cordoned"]
        for _ in range(2):
            body = root.post("/v1/devices/h.0/uncordon").json()
        assert (body["cordoned"], body["version"]) == (False, 3)

    @pytest.mark.parametrize("path", ["x", "x/cordon", "x/uncordon"])
    def test_another_is_not_found(self, path, root):
        method = "GET" if path == "x" else "POST"
        problem(root.request(method, f"/v1/devices/{path}"), 404, "not-found")


class TestPresets:
    URL = "/v1/presets/train/cpu"

    def test_preset_of_a_kind_needs_a_device_of_the_kind_or_a_usual_kind(self, root, session):
        body = {"json": {"params": {"deterministic": "warn"}}}
        assert root.put("/v1/presets/train/cuda", **body).is_success
        problem(root.put("/v1/presets/train/sim", **body), 422, "validation-error", "{kind}")
        session.get_one(Device, "h.1").kind = "sim"
        session.commit()
        assert root.put("/v1/presets/train/sim", **body).is_success

    def test_preset_is_written_read_and_written_again(self, root, as_):
        for version in (1, 2):
            body = root.put(self.URL, json={"params": {"threads": version}}).json()
            assert (body["params"], body["version"]) == ({"threads": version}, version)
        assert as_("red.viewer").get(self.URL).json() == body
        assert as_("red.viewer").get("/v1/presets").json()["items"] == [body]

    def test_deleted_preset_is_gone(self, root):
        assert root.put(self.URL, json={"params": {"threads": 2}}).is_success
        assert root.delete(self.URL).status_code == 204
        told = root.get("/v1/audit-events").json()["items"][0]
        assert (told["operation"], told["before"]["params"]) == ("deletePreset", {"threads": 2})
        problem(root.get(self.URL), 404, "not-found")
        problem(root.delete(self.URL), 404, "not-found")
        assert root.put(self.URL, json={"params": {"threads": 3}}).json()["version"] == 1

    def test_preset_may_apply_to_all_types(self, root):
        assert root.put("/v1/presets/*/cpu", json={"params": {}}).json()["task_type"] == "*"

    @pytest.mark.parametrize(
        ("params", "pointer"),
        [
            ({"therads": 1}, "/params/therads"),
            ({"threads": "1"}, "/params/threads"),
            ({"threads": 0}, "/params/threads"),
            ({"cudnn_benchmark": True}, "/params/cudnn_benchmark"),
            ("x", "/params"),
        ],
    )
    def test_only_listed_parameters_can_be_set(self, params, pointer, root, session, rows):
        before = rows()
        answer = root.put(self.URL, json={"params": params})
        problem(answer, 422, "validation-error", pointer)
        assert rows() == before

    def test_another_is_not_found(self, root, session):
        problem(root.get(self.URL), 404, "not-found")
        assert session.get(Preset, ("train", "cpu")) is None
