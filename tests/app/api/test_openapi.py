"""The OpenAPI document: it is committed, breaks no client, and says all of every operation."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema_rs
import pytest

from app.api import property_words
from app.local import openapi_contract
from tests.app.conftest import descriptor

REF = "#/components/schemas/"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(openapi_contract.current())
    return found


@pytest.fixture(scope="module")
def operations(document):
    return {
        f"{method.upper()} {path}": operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


class TestCommitted:
    def test_committed_document_breaks_no_client(self):
        assert openapi_contract.breaks() == []

    def test_committed_document_is_the_one_of_the_code(self):
        told = "docs/openapi.json is old: python -m app.local.openapi_contract"
        assert openapi_contract.PLACE.read_text(encoding="utf-8") == openapi_contract.current(), (
            told
        )

    @pytest.mark.slow
    def test_command_writes_the_document(self, tmp_path, monkeypatch):
        monkeypatch.setattr(openapi_contract, "PLACE", tmp_path / "openapi.json")
        assert openapi_contract.main([]) == 0
        assert openapi_contract.PLACE.read_text(encoding="utf-8") == openapi_contract.current()

    @pytest.mark.slow
    def test_command_refuses_to_break_clients_unless_forced(
        self, tmp_path, monkeypatch, document, capsys
    ):
        promised = {**document, "paths": {**document["paths"], "/v1/gone": {"get": {}}}}
        monkeypatch.setattr(openapi_contract, "PLACE", tmp_path / "openapi.json")
        openapi_contract.PLACE.write_text(json.dumps(promised))
        assert openapi_contract.main([]) == 1
        assert "GET /v1/gone: it is gone" in capsys.readouterr().err
        assert json.loads(openapi_contract.PLACE.read_text()) == promised
        assert openapi_contract.main(["--break"]) == 0
        assert openapi_contract.PLACE.read_text(encoding="utf-8") == openapi_contract.current()


class TestOperations:
    def test_each_operation_has_a_summary(self, operations, document):
        tags = [tag["name"] for tag in document["tags"]]
        for name, operation in operations.items():
            assert len(operation["tags"]) == 1, name
            assert operation["tags"][0] in tags, name
            assert operation["summary"], name
            assert operation["description"], name
            assert not operation["description"].startswith("Needs the scope"), name

    def test_each_operation_says_which_scope_a_key_needs(self, operations):
        for name, operation in operations.items():
            if scope := operation.get("x-scope"):
                assert f"Needs the scope `{scope}`" in operation["description"], name

    def test_each_property_is_described(self, document):
        schemas = document["components"]["schemas"]
        properties = {
            f"{schema}.{name}": value
            for schema, it in schemas.items()
            for name, value in it.get("properties", {}).items()
        }
        told = [name for name, value in properties.items() if value.get("description")]
        refers = [name for name, value in properties.items() if "$ref" in value]
        assert {*properties} == {*told, *refers}
        assert {*property_words.OF_SCHEMA} <= {*told}, "a schema or property that is there"
        given = {name.partition(".")[2] for name in properties}
        assert {*property_words.WORDS} <= given

    def test_a_description_suits_the_type_of_its_property(self, document):
        for schema, it in document["components"]["schemas"].items():
            for name, value in it.get("properties", {}).items():
                kind, told = value.get("type"), value.get("description", "")
                if told.startswith("True if"):
                    assert kind in ("boolean", None), f"{schema}.{name}"
                if kind == "boolean":
                    assert not told.startswith(("How ", "The number")), f"{schema}.{name}"

    def test_a_change_without_a_value_leaves_things_as_they_are(self, document):
        schemas = document["components"]["schemas"]
        for name in ("RotateKeyIn.expires_at", "TenantPatch.parent_id"):
            schema, _, field = name.partition(".")
            told = schemas[schema]["properties"][field]["description"]
            assert not told.endswith(("null: never.", "null: it is the root.")), name

    def test_each_success_is_described_in_words(self, operations):
        for name, operation in operations.items():
            told = {answer["description"] for answer in operation["responses"].values()}
            assert "Successful Response" not in told, name

    def test_declared_headers_are_sent(self, operations, as_, red):
        root = as_("root")
        tenant = root.post("/v1/tenants", json={"name": "violet"})
        address = tenant.headers["location"]
        calls = {
            "POST /v1/tenants": tenant,
            "GET /v1/tenants/{id}": root.get(address),
            "PATCH /v1/tenants/{id}": root.patch(
                address, json={"weight": 2}, headers={"If-Match": tenant.headers["etag"]}
            ),
            "GET /v1/users": root.get("/v1/users?limit=1"),
            "POST /v1/requests": red.post("/v1/requests", json=descriptor()),
        }
        known = {"ETag", "Location", "Link"}
        for name, answer in calls.items():
            assert answer.is_success, answer.text
            declared = operations[name]["responses"][str(answer.status_code)]["headers"]
            sent = {header for header in known if header in answer.headers}
            assert sent == known & {*declared}, name

    def test_version_is_declared_as_needed_where_a_change_without_it_is_refused(
        self, operations, as_
    ):
        needed = {
            name: parameter["required"]
            for name, operation in operations.items()
            for parameter in operation.get("parameters", ())
            if parameter["name"] == "if-match"
        }
        assert len(needed) == 4
        assert all(needed.values())
        assert as_("root").patch("/v1/tenants/ten_red", json={"weight": 2}).status_code == 428

    def test_each_operation_has_its_own_name(self, operations):
        ids = [operation["operationId"] for operation in operations.values()]
        assert len(set(ids)) == len(ids)
        assert all(re.fullmatch("[a-z][A-Za-z]+", id) for id in ids)

    def test_each_operation_declares_its_errors_as_problems(self, operations):
        for name, operation in operations.items():
            if "/v1/" not in name:
                continue
            assert {"401", "422", "503"} <= set(operation["responses"]), name
            for status, answer in operation["responses"].items():
                if int(status) >= 400:
                    assert list(answer["content"]) == ["application/problem+json"], name
                    assert answer["description"], name

    def test_operation_that_takes_json_declares_no_other_type(self, operations):
        for name, operation in operations.items():
            content = operation.get("requestBody", {}).get("content", {})
            assert ("415" in operation["responses"]) == ("application/json" in content), name

    def test_a_bundle_can_be_sent_by_a_generated_client(self, operations):
        """Generators know application/octet-stream, and none of the types of archives."""
        content = operations["PUT /v1/bundles/{sha256}"]["requestBody"]["content"]
        assert next(iter(content)) == "application/octet-stream"

    def test_schema_of_a_graph_is_written_once(self, document):
        nodes = [path for path, schema in _schemas(document) if "inout" in schema]
        assert nodes == ["/components/schemas/GraphNode/properties"]

    def test_a_default_fits_its_schema(self, document):
        given = {
            path: (schema, schema["default"])
            for path, schema in _schemas(document)
            if "default" in schema and "$ref" not in schema
        }
        assert given
        assert _faults(given, document) == []

    def test_errors_of_fastapi_are_not_in_the_document(self, document):
        assert "HTTPValidationError" not in json.dumps(document)


def _schemas(value, path=""):
    """Everything in the document that is an object, with the path to it."""
    if isinstance(value, dict):
        yield path, value
        for name, inner in value.items():
            yield from _schemas(inner, f"{path}/{name}")
    elif isinstance(value, list):
        for n, inner in enumerate(value):
            yield from _schemas(inner, f"{path}/{n}")


def _faults(given, document):
    """Return what is wrong with the values: `given` has a schema and a value, by name.

    One validator is made for all: it compiles every schema of the document.
    """
    schemas = {name: schema for name, (schema, _) in given.items()}
    whole = {"properties": schemas, "components": document["components"]}
    found = jsonschema_rs.validator_for(whole).iter_errors(
        {n: value for n, (_, value) in given.items()}
    )
    return [(fault.instance_path, fault.message) for fault in found]


class TestExamples:
    def test_every_part_of_a_path_has_an_example(self, operations):
        for name, operation in operations.items():
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "path":
                    assert parameter["example"], name

    def test_every_input_and_output_has_an_example(self, operations, document):
        for name, operation in operations.items():
            for what, kind, media in _bodies(operation):
                if media.get("schema", {}).get("format") != "binary":
                    assert _example(media, document), f"{name}: {what}, {kind}"

    def test_examples_fit_their_schemas(self, document, operations):
        given = {
            f"{name}: {what}": (media["schema"], _example(media, document))
            for name, operation in operations.items()
            for what, kind, media in _bodies(operation)
            if "json" in kind
        }
        assert len(given) > len(operations)
        assert _faults(given, document) == []


def _bodies(operation):
    taken = operation.get("requestBody", {}).get("content", {})
    yield from (("the body", kind, media) for kind, media in taken.items())
    for status, answer in operation["responses"].items():
        given = answer.get("content", {})
        yield from ((f"the {status} answer", kind, media) for kind, media in given.items())


def _example(media, document):
    schema = media.get("schema", {})
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].removeprefix(REF)]
    return media.get("example") or next(iter(schema.get("examples", ())), None)
