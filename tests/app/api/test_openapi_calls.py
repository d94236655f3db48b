"""The whole OpenAPI document is called, by schemathesis, as each role and as nobody.

Whatever is sent, no answer is a 5xx, none differs from what the document declares (status, content
type, headers, schema), what breaks the document is refused, and no operation forgets to ask who
calls.  The world holds the very things that the document's examples name, so calls get through.

The same run says the same: seeds are fixed, nothing is timed, and the quick run learns nothing from
answers.  All of a run is one transaction, rolled back at its end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import requests
import schemathesis
from fastapi import FastAPI
from schemathesis import engine
from schemathesis.engine import events
from sqlalchemy import func, update
from sqlalchemy.orm import Session

from app.api import probes
from app.api.access import auth
from app.db.models import ApiKey, Island
from app.messaging.live_updates import changes
from app.settings import settings
from tests.app.conftest import World
from tests.app.documented import USER, documented

#: A third of all that covers the document falls to these: not in `make test`.  The first reads the
#: body of POST /v1/requests.
SLOW = ("POST /v1/requests:validate", "POST /v1/simulations")

#: Only who belongs to a tenant that owns a share, and has uploaded its code, can do these.
OWNERS = {
    "POST /v1/requests",
    "POST /v1/requests:validate",
    "GET /v1/bundles/{sha256}",
    "HEAD /v1/bundles/{sha256}",
    "GET /v1/graphs/{sha256}",
    "HEAD /v1/datablocks/{name}",
}

NOTHING_LEARNED = {"responses": False}
QUICK: dict[str, Any] = {
    "seed": 7,
    "suppress-health-check": ["all"],
    "analysis": {"constants": {"enabled": False}},
    "generation": {
        "deterministic": True,
        "database": "none",
        "max-examples": 2,
        "no-shrink": True,
        "with-security-parameters": False,
    },
    "phases": {
        "examples": {"extra-data-sources": NOTHING_LEARNED},
        "coverage": {"extra-data-sources": NOTHING_LEARNED},
        "fuzzing": {
            "extra-data-sources": NOTHING_LEARNED,
            "error-feedback": {"enabled": False},
        },
        "stateful": {"max-steps": 3},
    },
    "operations": [
        {"include-name": name, "phases": {"coverage": {"enabled": False}}} for name in SLOW
    ],
    # A cursor, or the name of something that is not there, fits the schema and is still refused.
    "checks": {
        "positive_data_acceptance": {"enabled": False},
        "negative_data_rejection": {"expected-statuses": ["4xx"]},
        "missing_required_header": {"expected-statuses": ["4xx"]},  # 428 without `If-Match`
    },
}
OFF = {"enabled": False}
#: For who owns no share: owners cover the document of what only they can do.
PLATFORM: dict[str, Any] = {
    **QUICK,
    "operations": [
        {"include-name": name, "phases": {"coverage": OFF}} for name in sorted({*SLOW, *OWNERS})
    ],
}
#: How roles differ is in tests/app/api/access/test_roles.py. Here each operation is called
#: with its examples, or once if it has none.
ONCE: dict[str, Any] = {
    **QUICK,
    "generation": {**QUICK["generation"], "max-examples": 1},
    "phases": {**QUICK["phases"], "coverage": OFF, "stateful": OFF},
}
MANY = {
    **QUICK,
    "generation": {**QUICK["generation"], "max-examples": 20},
    "phases": {},
    "operations": [],
}

schemathesis.serializer("application/zip", "application/x-tar", "application/gzip")(
    lambda ctx, value: value
)


@dataclass
class Found:
    """What a run saw: failures as text, and the statuses of each operation."""

    failures: dict[tuple[str, ...], str] = field(default_factory=dict)
    statuses: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))

    def done(self) -> set[str]:
        return {name for name, got in self.statuses.items() if any(s // 100 == 2 for s in got)}

    def told(self) -> str:
        return "\n\n".join(f"{', '.join(where)}\n{told}" for where, told in self.failures.items())


def called(app: FastAPI, key: str, config: dict[str, Any], *, only: Collection[str] = ()) -> Found:
    """Run the phases of schemathesis that `config` wants against `app`, in this process.

    `only` names the operations to call; all are called if it is empty.
    """
    if key:
        config = {**config, "headers": {"Authorization": f"Bearer {key}"}}
    read = schemathesis.Config.from_dict(config)
    schema = schemathesis.openapi.from_dict(app.openapi(), config=read)
    schema.app = _without_lifespan(app)
    if only:  # `operations` of the configuration include all, so the others must be excluded
        schema = schema.exclude(name=sorted(_operations(app) - {*only}))
    found = Found()
    with (
        mock.patch.object(changes, "closing", True),  # streams end, and nobody waits
        mock.patch.object(requests.sessions, "get_environ_proxies", return_value={}),
    ):
        for event in engine.from_schema(schema).execute():
            _note(found, event)
    return found


def _without_lifespan(app: FastAPI) -> Any:
    async def served(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            raise NotImplementedError("its tasks belong to a server, not to a test")
        await app(scope, receive, send)

    return served


def _note(found: Found, event: Any) -> None:
    assert not isinstance(event, events.FatalError), event.exception
    if isinstance(event, events.NonFatalError):
        found.failures[event.label, "error"] = str(event.value)
    if not isinstance(event, events.ScenarioFinished):
        return
    record = event.recorder
    for id, interaction in record.interactions.items():
        if interaction.response is not None:
            label = record.cases[id].value.operation.label
            found.statuses[label].add(interaction.response.status_code)
    for checks in record.checks.values():
        for check in checks:
            if check.failure_info is not None:
                told = check.failure_info.failure
                where = (told.operation, check.name, told.title)
                found.failures.setdefault(
                    where, f"{told.message}\n{check.failure_info.code_sample}"
                )


# --- the world ----------------------------------------------------------------------------------


@pytest.fixture
def keys(
    world: World, session: Session, environment: None, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    """A key of each role, and one that is none any more.

    The engine tries hundreds of wrong keys; how they are slowed is in tests/security.
    """
    monkeypatch.setenv("ROUNDHOUSE_WRONG_KEYS_PER_MIN", "0")
    settings.cache_clear()
    keys = {"platform_admin": world.keys["root"], **documented(session)}
    # The service is ready: islands are led, and control, the key of the secrets and the bytes of
    # the bundles, which exist as rows only, are there.
    lease = {"leader": "a test", "leader_until": func.now() + timedelta(hours=1)}
    session.execute(update(Island).values(**lease))
    for name in ("_secrets", "_store"):
        found = probes.Check(ok=True, detail="is played")
        monkeypatch.setattr(probes, name, lambda *_, found=found: found)
    monkeypatch.setattr(probes, "_hears", lambda: True)
    keys["revoked"] = auth.new_key(session, USER["id"], "member", "an old one")
    session.execute(update(ApiKey).where(ApiKey.name == "an old one").values(revoked_at=func.now()))
    session.commit()
    return keys


# --- as each role -------------------------------------------------------------------------------

OPEN = {"GET /livez", "GET /readyz"}  # these ask nobody
#: What succeeds for nobody here, and where it does.
ELSEWHERE = {
    "GET /v1/checkpoints/{id}/tensors",  # its bytes are lost: test_checkpoints.py has real ones
    "GET /v1/checkpoints/{id}/safetensors",
    "GET /v1/requests/{id}/best-checkpoint",  # none of its checkpoints is best: test_checkpoints.py
    "PUT /v1/bundles/{sha256}",  # the bytes of a SHA-256 cannot be made up: test_bundles.py
    "PUT /v1/graphs/{sha256}",  # nor a graph: test_graphs.py
    "PUT /v1/datablocks/{name}",  # nor those of a datablock: test_datablocks.py
    "GET /v1/datablocks/{name}",  # its bytes are lost
    "GET /v1/tasks/{id}/outputs/{name}",  # it still runs: test_tasks.py
    "DELETE /v1/requests/{id}",  # it still runs: test_requests.py
    "POST /v1/requests/{id}/retry",  # nothing of it failed: test_lots.py
    "DELETE /v1/datablocks/{name}",  # it is deleted by NAME@VERSION
    "POST /v1/reservations",  # the devices of the example are not there: test_reservations.py
    "PATCH /v1/reservations/{id}",  # nor are they for a change
    "POST /v1/mounts",  # there is one of the name of the example: test_mounts.py
    "PUT /v1/files/{sha256}",  # the bytes of a SHA-256 cannot be made up: test_folders.py
    "GET /v1/datablocks/{name}/files/{sha256}",  # it is no folder: test_folders.py
    "GET /v1/environments/{id}",  # no task of these asks for packages: test_environments.py
    "POST /v1/tasks/{id}/tunnels",  # no device hears of it: test_tunnels.py
    "GET /v1/tasks/{id}/files",  # nor of its files: test_running_files.py
    "GET /v1/tasks/{id}/files/content",
    "DELETE /v1/tenants/{id}",  # things belong to it: test_tenants.py
    "DELETE /v1/users/{id}",  # work of the user runs: test_tenants.py
    "PATCH /v1/devices/{id}",  # it was changed by a cordon before: test_devices.py
}


@pytest.mark.slow
@pytest.mark.parametrize("role", ["platform_admin", "tenant_admin", "member", "viewer"])
def test_every_answer_to_a_role_is_as_documented(role, app, keys):
    found = called(app, keys[role], PLATFORM if role == "platform_admin" else ONCE)
    assert not found.failures, found.told()
    everything = _operations(app)
    assert set(found.statuses) == everything
    due = {"platform_admin": everything - ELSEWHERE - OWNERS, "tenant_admin": OWNERS}
    assert due.get(role, set()) - found.done() == set()


@pytest.mark.slow
def test_every_answer_to_an_owner_is_as_documented(app, keys):
    """The platform's administrator owns no share, and so gets no further than a refusal here."""
    found = called(app, keys["tenant_admin"], QUICK, only=OWNERS)
    assert not found.failures, found.told()
    assert found.statuses.keys() == OWNERS
    assert OWNERS - found.done() == set()


@pytest.mark.parametrize("who", ["nobody", "revoked"])
def test_a_call_without_a_good_key_is_refused(who, app, keys):
    found = called(app, keys.get(who, ""), ONCE)
    assert not found.failures, found.told()
    for name in _operations(app) - OPEN:
        assert found.statuses[name] <= {401, 405, 415, 422}, name
        assert 401 in found.statuses[name], name


@pytest.mark.long
@pytest.mark.parametrize(
    "role", ["platform_admin", "tenant_admin", "member", "viewer", "revoked", "nobody"]
)
def test_many_calls_are_answered_as_documented(role, app, keys):
    found = called(app, keys.get(role, ""), MANY)
    assert not found.failures, found.told()


def _operations(app: FastAPI) -> set[str]:
    paths = app.openapi()["paths"].items()
    return {f"{method.upper()} {path}" for path, methods in paths for method in methods}
