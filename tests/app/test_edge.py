"""What every call meets: problems for everything, ids, the meta pages, the OpenAPI document."""

from __future__ import annotations

import json
import re
from datetime import timedelta

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import func, update
from sqlalchemy.exc import OperationalError

from app.api import descriptor_schema, meta
from app.api.problems import MEANINGS, _all_errors
from app.core import descriptor as descriptors
from app.db import get_session
from app.main import create_app
from app.models import Device, Island
from tests.app.conftest import problem


class TestProblems:
    def test_an_unknown_address_is_one(self, as_):
        for path in ("/v1/nothing", "/nothing"):
            problem(as_("").get(path), 404, "not-found")

    def test_an_unknown_method_is_one(self, as_):
        answer = as_("").delete("/v1/me")
        problem(answer, 405, "method-not-allowed")
        assert answer.headers["allow"] == "GET"

    def test_a_mistake_of_ours_is_one_and_tells_nothing(self, world):
        app = create_app()
        app.add_api_route("/fails", lambda: 1 / 0)
        answer = TestClient(app, raise_server_exceptions=False).get("/fails")
        problem(answer, 500, "internal")
        assert "division" not in answer.text

    def test_a_database_that_does_not_answer_is_one(self, world):
        def away():
            raise OperationalError("select 1", {}, Exception("connection refused"))

        app = create_app()
        app.dependency_overrides[get_session] = away
        answer = TestClient(app).get("/v1/me", headers={"Authorization": "Bearer rh_x"})
        problem(answer, 503, "unavailable")
        assert int(answer.headers["retry-after"]) > 0

    @pytest.mark.parametrize("type_", MEANINGS)
    def test_its_type_opens_a_page(self, type_, as_):
        answer = as_("").get(f"/problems/{type_}")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/html")
        assert "What to do" in answer.text
        assert type_ in as_("").get("/problems").text

    def test_every_error_has_a_page(self):
        assert {kind.type for kind in _all_errors()} <= set(MEANINGS)

    def test_an_unknown_page_is_not_found(self, as_):
        problem(as_("").get("/problems/x"), 404, "not-found")


class TestRequestId:
    def test_a_decent_one_is_taken_over(self, as_):
        answer = as_("").get("/v1/me", headers={"X-Request-ID": "abc-1.2_3"})
        assert answer.json()["request_id"] == answer.headers["x-request-id"] == "abc-1.2_3"

    @pytest.mark.parametrize("given", ["", "a b", "x" * 65, '"><script>'])
    def test_another_is_replaced(self, given, as_):
        answer = as_("").get("/livez", headers={"X-Request-ID": given})
        assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])


class TestMeta:
    def test_alive_asks_nothing(self, as_):
        assert as_("").get("/livez").json() == {"status": "alive"}

    def test_ready_when_all_is_there(self, as_, session):
        answer = as_("").get("/readyz")
        assert (answer.status_code, answer.json()["checks"]["islands"]["ok"]) == (503, False)
        lease = func.now() + timedelta(seconds=5)
        session.execute(update(Island).values(leader="me", leader_until=lease))
        session.commit()
        answer = as_("").get("/readyz")
        assert answer.status_code == 200, answer.text
        assert answer.json()["ready"]
        assert set(answer.json()["checks"]) == {
            "postgres", "schema", "islands", "devices", "sandbox", "redis",
        }  # fmt: skip

    def test_not_ready_without_a_device(self, as_, session):
        session.execute(update(Device).values(lease_until=func.now() - timedelta(seconds=1)))
        session.commit()
        answer = as_("").get("/readyz")
        assert answer.status_code == 503
        assert answer.json()["checks"]["devices"] == {"ok": False, "detail": "0 of 2 are up"}

    def test_docs_load_nothing_from_elsewhere(self, as_):
        page = as_("").get("/docs")
        links = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        files = [link for link in links if link.startswith("/")]
        assert len(files) == 3
        assert all(link.startswith(("/", "data:")) for link in links)
        for file in files:
            assert as_("").get(file).status_code == 200, file


@pytest.fixture(scope="module")
def document():
    return create_app().openapi()


@pytest.fixture(scope="module")
def operations(document):
    return [
        (f"{method.upper()} {path}", operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]


class TestOpenApi:
    def test_every_operation_says_what_it_is(self, operations, document):
        ids = [operation["operationId"] for _, operation in operations]
        assert len(set(ids)) == len(ids)
        assert all(re.fullmatch("[a-z][A-Za-z]+", id) for id in ids)
        tags = [tag["name"] for tag in document["tags"]]
        for name, operation in operations:
            assert len(operation["tags"]) == 1, name
            assert operation["tags"][0] in tags, name
            assert operation["summary"], name

    def test_every_operation_declares_its_problems(self, operations):
        for name, operation in operations:
            if "/v1/" in name:
                assert {"401", "422", "503"} <= set(operation["responses"]), name
            for status, answer in operation["responses"].items():
                if int(status) >= 400 and "/v1/" in name:
                    assert "application/problem+json" in answer["content"], name

    def test_what_takes_json_declares_that_it_takes_nothing_else(self, operations):
        for name, operation in operations:
            content = operation.get("requestBody", {}).get("content", {})
            assert ("415" in operation["responses"]) == ("application/json" in content), name

    def test_every_body_has_an_example(self, operations, document):
        for name, operation in operations:
            content = operation.get("requestBody", {}).get("content", {})
            if "application/json" in content:
                assert self._example(content["application/json"], document), name

    def _example(self, media, document):
        schema = media["schema"]
        if "$ref" in schema:
            schema = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
        return schema.get("examples") or media.get("examples") or media.get("example")

    def test_fastapis_own_errors_are_not_in_it(self, document):
        assert "HTTPValidationError" not in json.dumps(document)


class TestDescriptorSchema:
    def test_its_example_is_a_descriptor(self):
        descriptors.parse(descriptor_schema.EXAMPLE)

    def test_every_field_named_in_it_is_known_and_every_known_one_is_named(self):
        """The parser lists the fields that it knows, when it sees one that it does not."""
        for path in ((), ("notify",), ("tasks",), *(("tasks", key) for key in TASK_OBJECTS)):
            assert _named(path) == _known(path), path


TASK_OBJECTS = ("run", "start", "devices", "checkpoint", "retry")


def _named(path):
    schema = descriptor_schema.SCHEMA
    for key in path:
        schema = schema["properties"][key]
        schema = schema.get("items", schema)
    return set(schema["properties"])


def _known(path):
    there = {"\x7f": 1, **({"command": ["x"]} if path[-1:] == ("run",) else {})}
    for key in reversed(path):
        there = {key: [there] if key == "tasks" else there}
    with pytest.raises(descriptors.BadDescriptor) as refused:
        descriptors.parse(there)
    told = next(f.detail for f in refused.value.faults if f.code == "unknown-field")
    return set(told.partition("known: ")[2].split(", "))


def test_the_migrations_that_ready_looks_at_are_there():
    assert meta._head()
