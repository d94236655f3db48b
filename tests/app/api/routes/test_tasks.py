"""/v1/tasks against real Postgres; who may is in test_roles.py."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from sqlalchemy import select, text, update

from app.db.models import Checkpoint, Metric, Placement, RequestEvent, Task
from app.insight import phases
from app.settings import settings
from app.storage.store import Store
from tests.app.conftest import descriptor, problem


@pytest.fixture
def url(submitted):
    return f"/v1/tasks/{submitted['tasks'][0]['id']}"


def set_task(session, **values):
    session.execute(update(Task).values(**values))
    session.commit()


class TestShow:
    def test_task_shows_its_request(self, red, submitted, url):
        assert red.get(url).json() == submitted["tasks"][0]

    def test_held_time_counts_all_epochs(self, red, url, session):
        set_task(session, total_held_us=5_000_000, held_us=250_000)
        assert red.get(url).json()["held_us"] == 5_250_000

    def test_failed_task_shows_its_traceback(self, red, url, session):
        set_task(session, state="failed", cause="exception", message="KeyError", detail="Trace…")
        body = red.get(url).json()
        assert (body["cause"], body["message"], body["detail"]) == (
            "exception",
            "KeyError",
            "Trace…",
        )


class TestAskedFor:
    def test_descriptor_is_shown_with_defaults(self, red, url, session):
        asked = session.scalars(select(Task)).first().descriptor
        body = red.get(f"{url}/descriptor").json()
        assert (body["descriptor"], body["task_id"]) == (asked, url.rpartition("/")[2])
        assert {"run", "params", "devices", "max_duration_s"} <= asked.keys()


class TestResize:
    def test_job_on_a_number_of_hosts_keeps_its_devices(self, red, url, session):
        task = session.scalars(select(Task)).one()
        devices = {"min": 2, "max": 2, "hosts": 2, "across_hosts": True}
        wide = {"world_size": 4, "devices": {**task.descriptor["devices"], **devices}}
        run = {"run": {"job": "train:Train"}}
        set_task(
            session,
            descriptor={**task.descriptor, **run, **wide},
            devices_min=2,
            devices_max=2,
            across_hosts=True,
            device_choice="#2",
        )
        found = problem(red.post(f"{url}/resize", json={"devices_max": 4}), 409, "conflict-state")
        assert "as many devices on each of 2 hosts" in found["detail"]
        assert red.get(url).json()["hosts"] == 2


class TestOutputs:
    BODY = b"PK not really"

    @pytest.fixture
    def kept(self, session, url):
        sha256, size = Store.at(settings().store_address).put([self.BODY])
        kept = {"sha256": sha256, "size_bytes": size}
        given = {"artifacts.zip": kept, "opaque": kept, "model": {**kept, "format": "npy"}}
        set_task(session, outputs=given)
        return kept

    def test_artifacts_and_published_outputs_are_files(self, red, url, kept):
        for name, file in (("artifacts.zip", "artifacts.zip"), ("model", "model.npy")):
            answer = red.get(f"{url}/outputs/{name}")
            assert answer.content == self.BODY
            assert answer.headers["etag"] == f'"{kept["sha256"]}"'
            assert answer.headers["content-disposition"].endswith(f'train-{file}"')
        part = red.get(f"{url}/outputs/model", headers={"Range": "bytes=3-5"})
        assert (part.status_code, part.content) == (206, b"not")
        behind = {"Range": "bytes=99-"}
        problem(red.get(f"{url}/outputs/model", headers=behind), 416, "range-not-satisfiable")

    def test_output_in_memory_is_no_file(self, red, url, kept):
        found = problem(red.get(f"{url}/outputs/opaque"), 409, "conflict-state")
        assert "publish the output" in found["detail"]
        problem(red.get(f"{url}/outputs/other"), 404, "not-found")


#: Tasks of red, of a tenant below it, and of blue, in four states.
_TASKS_OF_THREE = (
    "insert into tenants (id, name, parent_id) values ('ten_below', 'below', 'ten_red')",
    "insert into requests (id, tenant_id, user_id, name) select 'req_' || t, t, 'usr_red.member', t"
    " from unnest(array['ten_red', 'ten_blue', 'ten_below']) t",
    "insert into tasks (id, request_id, tenant_id, user_id, island, ordinal, name, type, kind,"
    " state) select 'tsk_' || to_char(n, 'fm00'), r.id, r.tenant_id, r.user_id, 'isle', n, n, 't',"
    " 'cpu', (array['done', 'waiting', 'blocked', 'failed'])[1 + n % 4]"
    " from generate_series(1, 36) n join requests r"
    " on r.tenant_id = (array['ten_red', 'ten_blue', 'ten_below'])[1 + n % 3]",
)


class TestList:
    def test_by_request_and_state_page_by_page(self, red, submitted, session):
        red.post("/v1/requests", json=descriptor())
        every = red.get("/v1/tasks").json()["items"]
        assert len(every) == 2
        mine = red.get("/v1/tasks", params={"request_id": submitted["id"]}).json()["items"]
        assert mine == submitted["tasks"]
        assert red.get("/v1/tasks?state=running").json()["items"] == []
        first = red.get("/v1/tasks?state=blocked,waiting&limit=1")
        second = red.get(first.links["next"]["url"]).json()
        assert [*first.json()["items"], *second["items"]] == every
        problem(red.get("/v1/tasks?state=sleeping"), 422, "validation-error", "?state")

    @pytest.mark.parametrize("asked", ["", "state=done,waiting", "phase=queued", "phase=failed"])
    def test_pages_of_each_reader_have_every_task_once_in_order(self, as_, session, asked):
        for statement in _TASKS_OF_THREE:
            session.execute(text(statement))
        session.commit()
        tenants = ["ten_red", "ten_blue", "ten_below"]
        sees = {
            "root": tenants,
            "red.tenant_admin": [tenants[0], tenants[2]],
            "red.member": tenants[:1],
        }
        name, _, words = asked.partition("=")
        for reader, of in sees.items():
            client, found, next_ = as_(reader), [], f"/v1/tasks?limit=3&{asked}"
            while next_:
                page = client.get(next_)
                found += page.json()["items"]
                next_ = page.links.get("next", {}).get("url")
            query = select(Task.id).where(Task.tenant_id.in_(of)).order_by(Task.id.desc())
            column = Task.state if name == "state" else phases.TASK_PHASE
            if asked:
                query = query.where(column.in_(words.split(",")))
            assert [task["id"] for task in found] == list(session.scalars(query))
            assert found

    def test_by_phase(self, red, submitted, session):
        ids = [task["id"] for task in submitted["tasks"]]
        found = red.get("/v1/tasks?phase=queued,running").json()["items"]
        assert [task["id"] for task in found] == ids
        set_task(session, hold="user")
        assert red.get("/v1/tasks?phase=queued").json()["items"] == []
        (found,) = red.get("/v1/tasks?phase=paused").json()["items"]
        assert (found["state"], found["phase"]) == ("blocked", "paused")
        problem(red.get("/v1/tasks?phase=waiting"), 422, "validation-error", "?phase")


class TestExplain:
    def test_explanation_gives_every_reason_and_the_first_as_message(self, red, url, session):
        set_task(session, island="isle", state="waiting", hold="user")
        body = red.get(f"{url}/explain").json()
        codes = [reason["code"] for reason in body["reasons"]]
        assert codes == ["NO_SCHEDULER", "HELD_BY_USER", "DEVICE_FREE"]
        assert body["message"] == body["reasons"][0]["message"]
        assert body["nearest"] == {
            "code": "HELD_BY_USER", "message": "it is resumed.",
            "action": "release", "value": None, "of": "",
        }  # fmt: skip
        assert (body["place"], body["estimate"], body["starts_at"]) == (1, None, None)
        assert body["no_estimate"]["code"] == "BLOCKED"

    def test_task_not_yet_looked_at_says_so(self, red, url):
        body = red.get(f"{url}/explain").json()
        assert [reason["code"] for reason in body["reasons"]] == ["NOT_LOOKED_AT"]
        assert body["message"] == body["reasons"][0]["message"]

    def test_running_task_has_no_reason_to_wait(self, red, url, session):
        set_task(session, state="running", seat="h.0")
        body = red.get(f"{url}/explain").json()
        assert (body["reasons"], body["nearest"], body["no_estimate"]) == ([], None, None)
        assert body["message"] == "Running on h.0."

    def test_explanation_shows_where_the_time_went(self, red, url):
        time = red.get(f"{url}/explain").json()["time"]
        assert time.keys() == {"waited_s", "switched_s", "moved_s", "computed_s", "staged_s"}
        assert time["waited_s"] == sum(time.values()) >= 0


class TestHistory:
    def test_metrics_by_step_page_by_page(self, red, url, session):
        id = url.rsplit("/", 1)[1]
        session.add_all(Metric(task_id=id, step=n, values={"loss": 1 / n}) for n in (1, 9, 100))
        session.commit()
        first = red.get(f"{url}/metrics?limit=2")
        second = red.get(first.links["next"]["url"]).json()
        items = [*first.json()["items"], *second["items"]]
        assert [(item["step"], item["values"]["loss"]) for item in items] == [
            (1, 1.0),
            (9, 1 / 9),
            (100, 0.01),
        ]

    def test_checkpoints_newest_first(self, red, url, session):
        id = url.rsplit("/", 1)[1]
        for n in (1, 2):
            values = {"epoch": 1, "sha256": f"{n}", "size_bytes": 10, "took_us": 5}
            session.add(
                Checkpoint(id=f"ckp_{n}", task_id=id, tenant_id="ten_red", step=n, **values)
            )
        session.commit()
        items = red.get(f"{url}/checkpoints").json()["items"]
        assert [(item["id"], item["step"]) for item in items] == [("ckp_2", 2), ("ckp_1", 1)]

    def test_placements_newest_first(self, red, url, session):
        id = url.rsplit("/", 1)[1]
        for epoch in (1, 2):
            ended = {"ended_at": datetime.now(UTC), "end": "paused"} if epoch == 1 else {}
            session.add(
                Placement(
                    task_id=id,
                    epoch=epoch,
                    device_id="h.0",
                    tenant_id="ten_red",
                    user_id="usr_red.member",
                    kind="cpu",
                    cost_milli=1000,
                    incarnation="i",
                    held_us=epoch * 10,
                    **ended,
                )
            )
        session.commit()
        items = red.get(f"{url}/placements").json()["items"]
        assert [(item["epoch"], item["end"], item["held_us"]) for item in items] == [
            (2, None, 20),
            (1, "paused", 10),
        ]


class TestWishes:
    def test_pause_and_resume_are_holds(self, red, url, session):
        set_task(session, state="running", seat="h.0")
        for _ in range(2):
            answer = red.post(f"{url}/pause")
            assert (answer.status_code, answer.json()["hold"]) == (202, "user")
            assert answer.json()["state"] == "running"
        for _ in range(2):
            assert red.post(f"{url}/resume").json()["hold"] == ""
        types = session.scalars(select(RequestEvent.type).order_by(RequestEvent.id)).all()
        assert types == ["request.submitted", "task.hold_asked", "task.release_asked"]

    def test_second_cancel_changes_nothing(self, red, url, session):
        for _ in range(2):
            answer = red.post(f"{url}/cancel")
            assert (answer.status_code, answer.json()["cancel_asked"]) == (202, True)
        types = session.scalars(select(RequestEvent.type).order_by(RequestEvent.id)).all()
        assert types == ["request.submitted", "task.cancel_asked"]

    def test_checkpoint_is_requested_of_a_task_on_a_device(self, red, url, session):
        problem(red.post(f"{url}/checkpoint"), 409, "conflict-state")
        set_task(session, state="running", seat="h.0")
        assert red.post(f"{url}/checkpoint").status_code == 202
        assert session.scalar(select(Task.save_asked))

    @pytest.mark.parametrize("wish", ["pause", "resume", "checkpoint"])
    def test_action_on_an_ended_task_is_refused(self, wish, red, url, session, rows):
        set_task(session, state="done")
        before = rows()
        problem(red.post(f"{url}/{wish}"), 409, "conflict-state")
        assert rows() == before
