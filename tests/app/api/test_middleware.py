"""What every call meets: problems for everything, ids, the meta pages."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from datetime import timedelta
from unittest import mock

import httpx2
import pytest
import redis
from fastapi import APIRouter
from fastapi.testclient import TestClient
from sqlalchemy import func, text, update
from sqlalchemy.exc import OperationalError
from starlette.websockets import WebSocketDisconnect

from app.api import descriptor_schema, probes
from app.api.access.gate import GatedRoute
from app.api.metrics import Failures
from app.api.problems import MEANINGS, _all_errors
from app.core.model import descriptor as descriptors
from app.db.models import Bundle, Device, ImageKey, Island
from app.db.transactions import Db, after_commit, get_session
from app.main import create_app
from app.messaging import broker
from app.settings import settings
from tests.app.conftest import problem
from tests.refusing_redis import MISCONF, OOM, READONLY, RefusingRedis


class TestProblems:
    def test_unknown_address_is_answered_with_a_problem(self, as_):
        for path in ("/v1/nothing", "/nothing"):
            problem(as_("").get(path), 404, "not-found")

    def test_unknown_method_is_answered_with_a_problem(self, as_):
        answer = as_("").delete("/v1/me")
        problem(answer, 405, "method-not-allowed")
        assert answer.headers["allow"] == "GET"

    def test_allowed_methods_of_an_address_are_all_named(self, as_):
        """Also where a route of its own answers each."""
        answer = as_("").put("/v1/tenants/ten_red")
        assert answer.headers["allow"] == "DELETE, GET, PATCH"

    def test_internal_error_is_a_problem_that_reveals_nothing(self, world):
        app = create_app()
        app.add_api_route("/fails", lambda: 1 / 0)
        answer = TestClient(app, raise_server_exceptions=False).get("/fails")
        problem(answer, 500, "internal")
        assert "division" not in answer.text

    def test_unreachable_database_is_a_problem(self, world):
        def away():
            raise OperationalError("select 1", {}, Exception("connection refused"))

        app = create_app()
        app.dependency_overrides[get_session] = away
        answer = TestClient(app).get(
            "/v1/me", headers={"Authorization": f"Bearer {world.keys['root']}"}
        )
        problem(answer, 503, "unavailable")
        assert int(answer.headers["retry-after"]) > 0

    @pytest.mark.parametrize(
        ("state", "status"), [("25006", 503), ("53100", 503), ("57P01", 503), ("42703", 500)]
    )
    def test_refusal_of_the_database_is_a_problem_and_our_fault_is_another(
        self, world, state, status
    ):
        def refuse(session: Db):
            raising = f"raise exception 'no' using errcode = '{state}'"
            session.execute(text(f"do $$ begin {raising}; end $$"))

        answer = self._of(refuse)
        problem(answer, status, "unavailable" if status == 503 else "internal")
        assert ("retry-after" in answer.headers) == (status == 503)

    @pytest.mark.parametrize("times", [2, 3])
    def test_call_that_met_a_deadlock_is_made_again(self, world, times):
        done, tries = [], []

        def meet(session: Db) -> None:
            tries.append(None)
            after_commit(session, lambda: done.append(None))
            if len(tries) <= times:
                raising = "raise exception 'no' using errcode = '40P01'"
                session.execute(text(f"do $$ begin {raising}; end $$"))

        answer = self._of(meet)
        assert answer.status_code == (200 if times == 2 else 503)
        assert (len(tries), len(done)) == (3, int(times == 2))

    def _of(self, endpoint):
        app = create_app()
        router = APIRouter(route_class=GatedRoute)
        router.add_api_route("/refuses", endpoint)
        app.include_router(router)
        return TestClient(app, raise_server_exceptions=False).get("/refuses")

    @pytest.mark.parametrize("type_", MEANINGS)
    def test_type_of_a_problem_is_the_address_of_a_page(self, type_, as_):
        answer = as_("").get(f"/problems/{type_}")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/html")
        assert "What to do" in answer.text
        assert type_ in as_("").get("/problems").text

    def test_every_error_has_a_page(self):
        assert {kind.type for kind in _all_errors()} <= set(MEANINGS)

    def test_unknown_error_page_is_not_found(self, as_):
        problem(as_("").get("/problems/x"), 404, "not-found")


class TestRequestId:
    def test_valid_request_id_of_the_caller_is_kept(self, as_):
        answer = as_("").get("/v1/me", headers={"X-Request-ID": "abc-1.2_3"})
        assert answer.json()["request_id"] == answer.headers["x-request-id"] == "abc-1.2_3"

    @pytest.mark.parametrize("given", ["", "a b", "x" * 65, '"><script>'])
    def test_invalid_request_id_is_replaced(self, given, as_):
        answer = as_("").get("/livez", headers={"X-Request-ID": given})
        assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])


class TestHosts:
    @pytest.fixture
    def call(self, as_, monkeypatch):
        def call(listed: str, host: str, path: str = "/v1/me"):
            monkeypatch.setenv("ROUNDHOUSE_HOSTS", listed)
            settings.cache_clear()
            return as_("").get(path, headers={"Host": host})

        yield call
        monkeypatch.delenv("ROUNDHOUSE_HOSTS", raising=False)
        settings.cache_clear()

    def test_any_host_is_answered_unless_some_are_listed(self, call):
        assert call("", "evil.example").status_code == 401

    @pytest.mark.parametrize(
        "host",
        [
            *("rh.example.org", "RH.example.org:8000", "127.0.0.1:80", "[::1]:8000"),
            "a.b.team.example.org",
        ],
    )
    def test_listed_host_is_answered(self, call, host):
        listed = "rh.example.org,127.0.0.1,::1,*.team.example.org"
        assert call(listed, host).status_code == 401

    @pytest.mark.parametrize(
        "host", ["evil.example", "rh.example.org.evil.example", "team.example.org", "", "[", "a:b"]
    )
    def test_other_host_is_rejected_with_the_setting_that_lists_them(self, call, host):
        listed = "rh.example.org,*.team.example.org"
        told = problem(call(listed, host), 400, "bad-request")
        assert "ROUNDHOUSE_HOSTS" in told["detail"]
        assert call(listed, host, "/livez").status_code == 200

    def test_tunnel_of_another_host_is_rejected(self, call, app):
        call("rh.example.org", "rh.example.org")
        with (
            pytest.raises(WebSocketDisconnect),
            TestClient(app).websocket_connect("/v1/tunnels", headers={"Host": "evil.example"}),
        ):
            pass


class TestMeta:
    def test_livez_needs_no_database(self, as_):
        assert as_("").get("/livez").json() == {"status": "alive"}

    @pytest.fixture
    def control(self, servers):
        """Takes messages as control does."""
        stopping = threading.Event()

        def take():
            with redis.Redis.from_url(servers.redis_url) as client:
                while not stopping.is_set():
                    client.brpop(broker.CONTROL_QUEUE, 0.1)

        taker = threading.Thread(target=take)
        taker.start()
        yield
        stopping.set()
        taker.join()

    @pytest.fixture(autouse=True)
    def fresh(self, monkeypatch):
        monkeypatch.setattr(probes, "failures", Failures())
        monkeypatch.setattr(probes, "HOLDS_S", 0.0)  # each call of a test checks anew

    def test_readyz_answers_200_when_everything_is_up(self, as_, session, control):
        answer = as_("").get("/readyz")
        assert (answer.status_code, answer.json()["checks"]["islands"]["ok"]) == (503, False)
        lease = func.now() + timedelta(hours=1)
        session.execute(update(Island).values(leader="me", leader_until=lease))
        session.commit()
        answer = as_("").get("/readyz")
        assert answer.status_code == 200, answer.text
        assert answer.json()["ready"]
        assert set(answer.json()["checks"]) == {
            "postgres", "schema", "islands", "devices", "sandbox", "secrets", "redis", "control",
            "store", "answers",
        }  # fmt: skip

    def test_all_callers_together_cost_what_one_costs(self, app, world, monkeypatch):
        """Anybody may ask, and the checks write."""
        took = mock.Mock(wraps=probes._takes_rows)
        monkeypatch.setattr(probes, "_takes_rows", took)
        monkeypatch.setattr(probes, "HEARD_S", 0.1)
        monkeypatch.setattr(probes, "HOLDS_S", 60.0)

        async def ask():
            transport = httpx2.ASGITransport(app)
            async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
                first = await asyncio.gather(*(client.get("/readyz") for _ in range(20)))
                first.append(await client.get("/readyz"))
                monkeypatch.setattr(probes, "HOLDS_S", 0.0)
                later = await client.get("/readyz")
            return first, later

        first, later = asyncio.run(ask())
        assert {one.text for one in first} == {first[0].text}
        assert first[0].status_code == later.status_code == 503
        assert took.call_count == 2

    def _check(self, as_, name):
        return as_("").get("/readyz").json()["checks"][name]

    def test_control_that_takes_no_message_is_told(self, as_, monkeypatch):
        monkeypatch.setattr(probes, "HEARD_S", 0.1)
        for _ in range(2):
            check = self._check(as_, "control")
            assert check == {
                "ok": False, "detail": "took no message within 0.1 s: it hangs, or does not run",
            }  # fmt: skip
        with redis.Redis.from_url(settings().redis_url.get_secret_value()) as client:
            assert client.llen(broker.CONTROL_QUEUE) == 1, "asking again piles up nothing"
            client.delete(broker.CONTROL_QUEUE)

    @pytest.mark.parametrize("refusal", [READONLY, OOM, MISCONF], ids=lambda one: one.name)
    def test_redis_that_answers_and_takes_no_message_is_told(
        self, as_, monkeypatch, servers, refusal
    ):
        with RefusingRedis(servers.redis_url) as proxy, proxy.refusing(refusal):
            monkeypatch.setitem(os.environ, "REDIS_URL", proxy.url)
            settings.cache_clear()
            check = self._check(as_, "redis")
        assert check == {"ok": False, "detail": f"refuses messages: {refusal.reply}"}

    def test_database_that_answers_and_takes_no_row_is_told(self, as_, session, monkeypatch):
        session.execute(text("set transaction read only"))
        check = self._check(as_, "postgres")
        assert check == {
            "ok": False,
            "detail": "the database is read-only now, and takes no change",
        }

    def test_database_without_a_schema_is_told_with_what_makes_one(self, as_, session):
        session.execute(text("alter table alembic_version rename to elsewhere"))
        session.execute(text("alter table devices rename to old_devices"))
        check = self._check(as_, "schema")
        assert check == {
            "ok": False,
            "detail": "no schema: `python -m app.local.seed KEYS_FILE` makes it",
        }

    @pytest.mark.parametrize("fault", ["gone", "no folder", "another one"])
    def test_store_that_takes_no_object_is_told(self, as_, session, tmp_path, monkeypatch, fault):
        address = tmp_path / "store"
        if fault == "no folder":
            address.write_text("a file")
        elif fault == "another one":
            address.mkdir()
        monkeypatch.setitem(os.environ, "ROUNDHOUSE_STORE", str(address))
        settings.cache_clear()
        if fault != "no folder":
            session.add(Bundle(tenant_id="ten_red", sha256="5" * 64, size_bytes=1, entry_points={}))
            session.commit()
        check = self._check(as_, "store")
        assert not check["ok"]
        assert ("takes no object" if fault == "no folder" else "is not in") in check["detail"]

    def test_lost_key_of_secrets_is_told(self, as_, session, tmp_path, monkeypatch):
        session.add(ImageKey(tenant_id="ten_red", key_id="0" * 16, encrypted=b"x"))
        session.commit()
        check = self._check(as_, "secrets")
        assert not check["ok"]
        assert check["detail"].startswith("1 key of images cannot be opened: a key that is not in")

    def test_silent_device_is_named(self, as_, session):
        ended = {"lease_until": func.now() - timedelta(seconds=1)}
        session.execute(update(Device).where(Device.id == "h.1").values(ended))
        session.commit()
        told = "1 of 2 are up; no heartbeat of h.1"
        assert self._check(as_, "devices") == {"ok": True, "detail": told}
        session.execute(update(Device).where(Device.id == "h.1").values(facts={"leaving": True}))
        session.commit()
        assert self._check(as_, "devices") == {"ok": True, "detail": "1 of 2 are up"}

    def test_rate_of_failed_calls_is_told(self, as_, monkeypatch):
        now_s = 6000.0
        counted = Failures(lambda: now_s)
        monkeypatch.setattr(probes, "failures", counted)
        for status in (*[200] * 10, 500, 503, 404):
            counted.count(status)
        assert self._check(as_, "answers")["ok"]
        counted.count(502)
        check = self._check(as_, "answers")
        assert (check["ok"], check["detail"][:13]) == (False, "3 of 14 calls")
        now_s += 300.0
        assert self._check(as_, "answers")["ok"]

    def test_readyz_answers_503_without_a_device(self, as_, session):
        session.execute(update(Device).values(lease_until=func.now() - timedelta(seconds=1)))
        session.commit()
        answer = as_("").get("/readyz")
        assert answer.status_code == 503
        assert answer.json()["checks"]["devices"] == {
            "ok": False,
            "detail": "0 of 2 are up; no heartbeat of h.0, h.1",
        }

    def test_api_pages_load_nothing_from_other_sites(self, as_):
        page = as_("").get("/docs")
        links = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        files = [link for link in links if link.startswith("/")]
        assert len(files) == 4
        assert all(link.startswith(("/", "data:")) for link in links)
        for file in files:
            assert as_("").get(file).status_code == 200, file


class TestParameters:
    def test_unknown_parameter_is_refused(self, as_):
        found = problem(as_("root").get("/v1/me?nmae=x"), 422, "validation-error", "?nmae")
        assert "this address has no query parameters" in found["detail"]

    def test_repeated_parameter_is_refused_if_only_one_is_allowed(self, as_):
        answer = as_("root").get("/v1/requests?limit=5&limit=7")
        found = problem(answer, 422, "validation-error", "?limit")
        assert found["detail"] == "must be given once; got it 2 times"

    def test_list_parameter_may_be_repeated(self, as_):
        assert as_("root").get("/v1/requests?label=a:1&label=b:2").status_code == 200

    @pytest.mark.parametrize("given", ["2026", "0.5", "1e3", "yesterday"])
    def test_time_given_as_a_number_is_refused(self, given, as_):
        """2026 would be half an hour after the beginning of 1970."""
        for query in ("requests?submitted_after", "usage?until"):
            answer = as_("root").get(f"/v1/{query}={given}")
            problem(answer, 422, "validation-error", f"?{query.partition('?')[2]}")

    def test_a_time_without_a_zone_is_utc(self, as_):
        answer = as_("root").get("/v1/usage?until=2026-11-21T12:00:00&since=2026-11-21")
        assert answer.json()["until"] == "2026-11-21T12:00:00Z"
        assert answer.json()["since"] == "2026-11-21T00:00:00Z"


class TestDescriptorSchema:
    def test_example_in_the_schema_is_a_valid_descriptor(self):
        descriptors.parse(descriptor_schema.EXAMPLE)

    def test_schema_names_exactly_the_known_fields(self):
        """The parser lists the fields that it knows, when it sees one that it does not."""
        paths = [(), ("notify",), ("notify", 0), ("tasks",), ("tasks", "checkpoint", "best")]
        for path in (*paths, *(("tasks", key) for key in TASK_OBJECTS)):
            assert _named(path) == _known(path), path


TASK_OBJECTS = ("run", "start", "devices", "checkpoint", "retry")


def _named(path):
    schema = descriptor_schema.SCHEMA
    for key in path:
        if key == 0:  # where a list may stand in the place of an object
            [schema] = [each["items"] for each in schema["anyOf"] if "items" in each]
        else:
            schema = _object_of(schema)["properties"][key]
            schema = schema.get("items", schema)
        if "$ref" in schema:
            schema = descriptor_schema.COMPONENTS[schema["$ref"].rpartition("/")[2]]
    return set(_object_of(schema)["properties"])


def _object_of(schema):
    [found] = [each for each in schema.get("anyOf", [schema]) if "properties" in each]
    return found


def _known(path):
    there = {"\x7f": 1, **({"command": ["x"]} if path[-1:] == ("run",) else {})}
    for key in reversed(path):
        there = [there] if key == 0 else {key: [there] if key == "tasks" else there}
    with pytest.raises(descriptors.BadDescriptor) as refused:
        descriptors.parse(there)
    told = next(f.detail for f in refused.value.faults if f.code == "unknown-field")
    return set(told.partition("known: ")[2].split(", "))


def test_migrations_that_readyz_checks_exist():
    assert probes._head()
