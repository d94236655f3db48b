"""The API and the pages show only those facts of a device that are on an allow-list."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import update

from app.api.access import auth
from app.db.models import Device, Enrolment
from app.identity import enrolment
from tests.app.api.access.test_roles import ROWS, _settle, _url

pytestmark = pytest.mark.security

SECRET = "5ec2" * 16
ADDRESS = "10.99.98.97"
PORT = 7_305_918_264_402_917_553  # no number of an answer has these digits by chance
FACTS = {
    "host": "h", "island": "isle", "kind": "cpu", "sandbox": ["files", "network"],
    "torch": "2.13.0", "capabilities": ["overlap"], "splice": True, "host_memory_bytes": 7,
    "held_bytes": {"ten_blue": [100, 20], "ten_red": [3, 4]},
    "links": [ADDRESS, PORT], "secret": SECRET, "surprise": "nobody-knows-this-fact",
}  # fmt: skip
HIDDEN = (SECRET, ADDRESS, str(PORT), "nobody-knows-this-fact")
OTHERS = ("ten_blue", "usr_blue")
READS = [path for method, path, *_ in ROWS if method == "GET"]
ELSEWHERE = ("/metrics", "/readyz", "/livez", "/openapi.json", "/llms.txt")
PAGES = ("/ui/", "/ui/requests", "/ui/devices", "/ui/decisions", "/ui/datablocks", "/ui/members")


@pytest.fixture
def told(session, submitted):
    """Make devices report all of these facts, as devices of an older version did."""
    said = {"facts": FACTS, "links": [ADDRESS, PORT], "secret": SECRET}
    session.execute(update(Device).values(**said))
    _settle(session, submitted, ended=True)
    session.commit()


def test_no_answer_to_a_viewer_has_a_secret_or_names_another_tenant(as_, world, submitted, told):
    viewer = as_("red.viewer")
    for path in (*READS, *ELSEWHERE):
        answer = viewer.get(_url(path, submitted, world))
        assert answer.status_code in (200, 403, 404, 410, 503), path
        assert not [each for each in (*HIDDEN, *OTHERS) if each in answer.text], path


@pytest.mark.parametrize("who", ["red.tenant_admin", "root"])
def test_no_answer_to_an_administrator_has_a_secret(who, as_, world, submitted, told):
    for path in (*READS, *ELSEWHERE):
        answer = as_(who).get(_url(path, submitted, world))
        assert not [each for each in HIDDEN if each in answer.text], path


def test_no_page_has_a_secret_or_names_another_tenant(app, session, world, told):
    _, cookie = auth.sign_in(session, world.keys["red.viewer"])
    session.commit()
    visitor = TestClient(app, cookies={auth.COOKIE: cookie})
    for page in PAGES:
        answer = visitor.get(page)
        assert answer.status_code in (200, 403), page
        assert not [each for each in (*HIDDEN, *OTHERS) if each in answer.text], page


def test_only_listed_facts_of_a_device_are_shown(as_, told):
    for facts in (
        as_("red.viewer").get("/v1/devices/h.0").json()["facts"],
        as_("root").get("/v1/devices").json()["items"][1]["facts"],
    ):
        assert facts == {
            "sandbox": ["files", "network"], "torch": "2.13.0", "capabilities": ["overlap"],
            "splice": True, "host_memory_bytes": 7, "held_bytes": {"device": 103, "host": 24},
            "model": None, "uuid": None, "compute_capability": None, "rack": None, "location": [],
            "labels": [], "offers": [], "gives": {}, "protocol": None,
        }  # fmt: skip


class TestEnrolments:
    URL = "/v1/enrolments"

    def test_an_administrator_enrols_lists_and_revokes(self, as_, session):
        root = as_("root")
        body = {"device_id": "host-a.0", "key": "ab" * 32}
        for _ in range(2):
            made = root.post(self.URL, json=body)
            assert made.status_code == 201
            assert made.json()["enrolled_by"] == "root"
        assert root.get(self.URL).json()["items"] == [made.json()]
        assert root.post(self.URL, json={**body, "key": "cd" * 32}).status_code == 409
        gone = root.delete(f"{self.URL}/host-a.0").json()
        assert gone["revoked_at"] is not None
        assert root.delete(f"{self.URL}/host-a.0").json() == gone
        again = root.post(self.URL, json={**body, "key": "cd" * 32}).json()
        assert (again["key"], again["revoked_at"]) == ("cd" * 32, None)
        assert root.delete(f"{self.URL}/host-b.0").status_code == 404

    def test_a_device_with_a_new_key_begins_anew(self, as_, session):
        root = as_("root")
        session.execute(update(Device).values(incarnation="9", heard_us=7))
        session.add(Enrolment(device_id="h.0", key="ab" * 32, enrolled_by="root"))
        session.commit()
        root.delete(f"{self.URL}/h.0")
        root.post(self.URL, json={"device_id": "h.0", "key": "ab" * 32})
        session.expire_all()
        assert session.get_one(Device, "h.0").incarnation == "9", "it is the same host"
        root.delete(f"{self.URL}/h.0")
        root.post(self.URL, json={"device_id": "h.0", "key": "cd" * 32})
        session.expire_all()
        device = session.get_one(Device, "h.0")
        assert (device.incarnation, device.heard_us) == ("", -1)

    def test_a_host_is_enrolled_with_its_devices_and_begins_anew_with_a_new_key(self, as_, session):
        root, own = as_("root"), "ef" * 32
        session.execute(update(Device).values(incarnation="9", heard_us=7))
        session.add(Enrolment(device_id="h.1", key=own, enrolled_by="root"))
        session.commit()
        for key in ("ab" * 32, "cd" * 32):
            assert root.post(self.URL, json={"device_id": "h", "key": key}).status_code == 201
            assert enrolment.host_key(session, "h.0") == key
            assert enrolment.host_key(session, "h.1") == own
            root.delete(f"{self.URL}/h")
            assert enrolment.host_key(session, "h.0") == ""
        session.expire_all()
        found = {id: session.get_one(Device, id).incarnation for id in ("h.0", "h.1")}
        assert found == {"h.0": "", "h.1": "9"}

    @pytest.mark.parametrize(
        "wrong",
        [
            {"device_id": "../x.0"},
            {"device_id": "h/0"},
            {"device_id": ""},
            {"key": "AB" * 32},
            {"key": "ab" * 31},
            {"key": 7},
        ],
    )
    def test_hostile_names_and_keys_are_refused(self, wrong, as_):
        body = {"device_id": "h.0", "key": "ab" * 32, **wrong}
        answer = as_("root").post(self.URL, json=body)
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["pointer"] == f"/{next(iter(wrong))}"
