"""GET /v1/fair-share, /queue, /usage and /decisions: anonymous, stranger, invalid, valid."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from fastapi.testclient import TestClient

from app.db.models import Cycle, Decision, Usage
from app.insight import reports
from tests.scenery import Scenery

ROUTES = ("/v1/fair-share", "/v1/queue", "/v1/usage", "/v1/decisions")
NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
DAY = "since=2026-11-21T00:00:00Z&until=2026-11-22T00:00:00Z"


@pytest.fixture
def scenery(session):
    return Scenery(session)


@pytest.fixture
def get(app, session):
    client = TestClient(app)

    def get(path, key=None, **headers):
        bearer = {"Authorization": f"Bearer {key}"} if key else {}
        return client.get(path, headers={**bearer, **headers})

    return get


@pytest.fixture
def tenants(scenery):
    """a holds d0 and waits; b holds d1."""
    a, b = scenery.tenant("a"), scenery.tenant("b")
    scenery.device("d0"), scenery.device("d1")
    scenery.task(a, "running", seat="d0")
    scenery.task(b, "running", seat="d1")
    scenery.task(a)
    return a, b


@pytest.mark.parametrize("path", ROUTES)
class TestEveryRoute:
    def test_call_without_a_key_is_refused(self, get, path):
        answer = get(path)
        assert answer.status_code == 401
        assert answer.headers["content-type"] == "application/problem+json"

    def test_an_unknown_parameter_is_an_error(self, get, scenery, path):
        answer = get(path + "?tenat=a", scenery.key(scenery.tenant("a")))
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["pointer"] == "?tenat"

    def test_nothing_of_another_tenant_is_shown(self, get, scenery, tenants, path):
        _, b = tenants
        told = get(path, scenery.key(b, "viewer")).text
        assert '"a"' not in told
        assert tenants[0].id not in told

    def test_a_user_of_the_root_tenant_gets_an_answer_too(self, get, scenery, tenants, path):
        assert get(path, scenery.key(scenery.root, "member")).status_code == 200


class TestFairShare:
    def test_member_sees_own_tenant_and_the_rest_as_one(self, get, session, scenery, tenants):
        a, _ = tenants
        told = get("/v1/fair-share", scenery.key(a)).json()
        shares = reports.fair_share(session, reports.clock(session))
        mine = next(share for share in shares if share.id == a.id)
        assert [t["tenant"] for t in told["tenants"]] == ["a"]
        assert told["tenants"][0]["fair"] == mine.fair == 1.0
        assert told["tenants"][0]["kinds"][0]["waiting"] == 1
        assert told["others"]["held"] == 1
        assert told["verdict"] == reports.verdict(mine, shares)

    def test_a_platform_admin_sees_all(self, get, scenery, tenants):
        told = get("/v1/fair-share", scenery.key(scenery.root, "platform_admin")).json()
        assert [t["tenant"] for t in told["tenants"]] == ["a", "b"]
        assert told["others"] is None


class TestQueue:
    def test_queue_says_what_waits_why_and_what_would_help(self, get, scenery, tenants):
        told = get("/v1/queue", scenery.key(tenants[0])).json()
        [item] = told["items"]
        assert (item["place"], item["starts_at"]) == (1, None)
        assert item["no_estimate"]["code"] == "NO_HISTORY"
        assert [reason["code"] for reason in item["reasons"]] == [
            "WAITING_FOR_DEVICE",
            "TENANT_OVER_FAIR_SHARE",
            "EARLIER_TASK_AHEAD",
        ]
        assert item["nearest"]["code"] == "TENANT_OVER_FAIR_SHARE"
        assert told["next_cursor"] is None

    def test_queue_is_filtered_by_state_and_kind(self, get, scenery, tenants):
        key = scenery.key(tenants[0])
        held = scenery.task(tenants[0], "blocked", hold="user", kind="cuda")
        for query in ("state=blocked", "kind=cuda", "state=blocked&kind=cuda"):
            [item] = get(f"/v1/queue?{query}", key).json()["items"]
            assert item["id"] == held.id
        assert get("/v1/queue?state=running", key).status_code == 422

    def test_pages_of_the_queue_follow_each_other(self, get, scenery):
        a = scenery.tenant("a")
        ids = [scenery.task(a).id for _ in range(3)]
        key, path, seen = scenery.key(a), "/v1/queue?limit=2", []
        first = get(path, key)
        assert 'rel="next"' in first.headers["link"]
        second = get(f"{path}&cursor={first.json()['next_cursor']}", key)
        seen = [item["id"] for page in (first, second) for item in page.json()["items"]]
        assert seen == ids

    @pytest.mark.parametrize("cursor", ["x", "", "A", "%00"])
    def test_invalid_cursor_is_refused(self, get, scenery, cursor):
        answer = get(f"/v1/queue?cursor={cursor}", scenery.key(scenery.tenant("a")))
        assert answer.status_code == 422


class TestUsage:
    @pytest.fixture
    def key(self, scenery, tenants):
        for tenant in tenants:
            user = scenery.user("ann", tenant)
            scenery.add(
                Usage(
                    bucket=NOON, bucket_s=10, tenant_id=tenant.id, user_id=user.id,
                    kind="cpu", held_us=7, charged_us=14,
                )
            )  # fmt: skip
        return scenery.key(tenants[0])

    def test_usage_is_given_as_json(self, get, key):
        told = get(f"/v1/usage?{DAY}&group_by=user,bucket&interval=1h", key).json()
        assert told["items"] == [
            {
                "bucket": "2026-11-21T12:00:00Z", "tenant": None, "user": "ann", "kind": None,
                "held_us": 7, "charged_us": 14,
            }
        ]  # fmt: skip

    @pytest.mark.parametrize(("query", "accept"), [("&format=csv", "*/*"), ("", "text/csv")])
    def test_usage_is_given_as_csv(self, get, key, query, accept):
        answer = get(f"/v1/usage?{DAY}{query}", key, Accept=accept)
        assert answer.headers["content-type"].startswith("text/csv")
        assert answer.text == "tenant,user,kind,held_us,charged_us\r\na,ann,cpu,7,14\r\n"

    @pytest.mark.parametrize(
        ("query", "pointer"),
        [
            ("group_by=colour", "?group_by"),
            ("interval=2h", "?interval"),
            ("since=yesterday", "?since"),
            ("since=2026-11-22T00:00:00Z&until=2026-11-21T00:00:00Z", "?since"),
            ("since=2020-01-01T00:00:00Z&group_by=bucket&interval=10s", "?interval"),
            ("format=parquet", "?format"),
            ("until=0001-01-01T00:00:00Z", "?until"),
            ("since=9999-12-31T23:59:59-12:00", "?since"),
        ],
    )
    def test_bad_input_is_reported_with_its_pointer(self, get, key, query, pointer):
        answer = get(f"/v1/usage?{query}", key)
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["pointer"] == pointer

    def test_a_time_without_a_zone_is_utc(self, get, key):
        told = get("/v1/usage?since=2026-11-21T12:00:00&until=2026-11-21T12:00:10", key).json()
        assert told["items"][0]["held_us"] == 7


class TestDecisions:
    @pytest.fixture
    def decided(self, scenery, tenants):
        """a's task gives way to b's, in one round; then a's is launched again."""
        a, b = tenants
        mine, theirs = scenery.task(a, name="train"), scenery.task(b, name="secret")
        rounds = [scenery.add(Cycle(island="isle", now_s=s, snapshot={"at": s})) for s in (1, 2)]
        return [
            scenery.add(
                Decision(
                    cycle_id=rounds[n].id, task_id=task.id, tenant_id=task.tenant_id, move=move,
                    rule=rule, because=f"because of {move}", devices=devices, against=against,
                )
            )
            for n, task, move, rule, devices, against in [
                (0, mine, "Pause", "F5", ["d0"], theirs.id),
                (0, theirs, "Launch", "F5", ["d0"], mine.id),
                (1, mine, "Launch", "F3", ["d1"], None),
            ]
        ]  # fmt: skip

    def test_decisions_show_task_and_rule_newest_first(self, get, scenery, tenants, decided):
        key = scenery.key(tenants[0])
        told = get("/v1/decisions", key).json()
        names = ("move", "rule", "devices", "task", "because")
        assert [[d[name] for name in names] for d in told["items"]] == [
            ["Launch", "F3", ["d1"], "train", "because of Launch"],
            ["Pause", "F5", ["d0"], "train", "because of Pause"],
        ]
        first = get("/v1/decisions?limit=1", key).json()
        second = get(f"/v1/decisions?limit=1&cursor={first['next_cursor']}", key).json()
        assert [d["move"] for d in second["items"]] == ["Pause"]
        assert second["next_cursor"] is None

    def test_other_party_of_a_decision_is_shown_to_callers_who_may_see_it(
        self, get, scenery, tenants, decided
    ):
        a, _ = tenants
        for tenant, role, named in (
            (a, "member", "another tenant"),
            (a, "tenant_admin", "another tenant"),
            (scenery.root, "platform_admin", "b"),
        ):
            answer = get("/v1/decisions", scenery.key(tenant, role))
            [pause] = [d for d in answer.json()["items"] if d["move"] == "Pause"]
            assert pause["against"]["tenant"] == named
            assert ("secret" in answer.text) is (named == "b")
            assert (decided[1].task_id in answer.text) is (named == "b")

    def test_decision_is_shown_with_its_round_and_to_an_admin_with_its_snapshot(
        self, get, scenery, tenants, decided
    ):
        path = f"/v1/decisions/{decided[0].id}"
        told = get(path, scenery.key(scenery.root, "platform_admin")).json()
        assert (told["now_s"], told["snapshot"]) == (1.0, {"at": 1})
        assert [d["id"] for d in told["decisions"]] == [decided[0].id, decided[1].id]
        answer = get(path, scenery.key(tenants[0]))
        assert answer.json()["snapshot"] is None
        assert [d["id"] for d in answer.json()["decisions"]] == [decided[0].id]
        assert "secret" not in answer.text

    def test_decision_about_another_tenant_is_not_found(self, get, scenery, tenants, decided):
        key = scenery.key(tenants[0])
        assert get(f"/v1/decisions/{decided[1].id}", key).status_code == 404
        for id in (0, 2**63, -(2**63) - 1, 10**30):
            assert get(f"/v1/decisions/{id}", key).status_code == 404
        assert get("/v1/decisions/first", key).status_code == 422
