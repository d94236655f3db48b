"""Any number in a tenant's metrics, results or parameters is shown; no reader fails."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DataError
from sqlalchemy.orm import Session

from app.db.transactions import transaction
from tests.app.conftest import app, as_, red, submitted, world

__all__ = ["app", "as_", "red", "submitted", "world"]  # fixtures

pytestmark = pytest.mark.security

NUMBERS = [
    "1" + "0" * 400,
    "-1" + "0" * 400,
    "1" + "0" * 4999,
    "1e999",
    "-1e999",
    "1e-999",
    '{"a": [[[[1e999]]]]}',
]


def _hold(session: Session, given: dict[str, str]) -> None:
    """Write the values as metrics of the task, as no API and no worker would."""
    held = text("update tasks set metrics = cast(:values as jsonb) where id = :task")
    session.execute(held, given)
    for step in (1, 2):
        row = f"(:task, {step}, cast(:values as jsonb))"
        session.execute(text(f"insert into metrics (task_id, step, values) values {row}"), given)


def test_postgres_holds_no_half_of_a_character(session: Session, submitted: dict[str, Any]):
    with pytest.raises(DataError, match="surrogate"), session.begin_nested():
        _hold(session, {"task": submitted["tasks"][0]["id"], "values": r'{"loss": "\ud800"}'})


@pytest.mark.parametrize("number", NUMBERS, ids=lambda n: f"{n[:8]} of {len(n)}")
def test_number_of_a_tenant_is_shown_by_api_and_page(
    session: Session, submitted: dict[str, Any], as_: Any, world: Any, number: str
):
    id, task = submitted["id"], submitted["tasks"][0]["id"]
    given = {"task": task, "values": f'{{"loss": {number}}}'}
    with transaction() as its:
        _hold(its, given)
    client = as_("red.member")
    for path in (f"/v1/requests/{id}", f"/v1/tasks/{task}", f"/v1/tasks/{task}/metrics"):
        answer = client.get(path)
        assert answer.status_code == 200, (path, answer.text[:200])
    client.headers.pop("Authorization")
    origin = {"Sec-Fetch-Site": "same-origin"}
    key = {"key": world.keys["red.member"]}
    assert client.post("/ui/login", data=key, headers=origin).status_code == 303
    for path in (f"/ui/requests/{id}", "/ui/"):
        assert client.get(path).status_code == 200, path
