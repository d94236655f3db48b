"""/v1/requests against real Postgres: anonymous, stranger, wrong role, invalid, valid, twice."""

from __future__ import annotations

from tests.app.conftest import descriptor, problem


class TestSubmit:
    def test_nobody_submits_without_a_key(self, as_, rows):
        before = rows()
        problem(as_("").post("/v1/requests", json=descriptor()), 401, "unauthenticated")
        assert rows() == before

    def test_a_request_is_accepted_with_all_its_tasks(self, red):
        answer = red.post("/v1/requests", json=descriptor(name="first", priority=3))
        assert answer.status_code == 202, answer.text
        body = answer.json()
        assert answer.headers["location"] == f"/v1/requests/{body['id']}"
        assert (body["name"], body["state"], body["priority"]) == ("first", "queued", 3)
        assert [(task["name"], task["state"], task["island"]) for task in body["tasks"]] == [
            ("train", "blocked", None)
        ]
        assert red.get(answer.headers["location"]).json() == body
