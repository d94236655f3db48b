"""GET /metrics: the figures of the API, told to Prometheus; few, and not to strangers."""

from __future__ import annotations

import json
import re
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
import uuid_utils
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import func, update

from app.api.access import auth
from app.core.model.provisions.network_policy import FIGURES
from app.db.models import (
    Checkpoint,
    Delivery,
    Device,
    Island,
    OutboxOrder,
    Placement,
    User,
    Webhook,
)
from app.db.transactions import transaction
from app.identity import audit
from app.insight import counters, metrics, reports
from app.insight.counters import Tally
from app.main import create_app
from app.scheduling import journal
from app.settings import settings
from tests.app.conftest import problem
from tests.scenery import Scenery

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture
def scenery(session):
    return Scenery(session)


@pytest.fixture
def figures(session):
    """The newest samples: (name, labels without island) -> value."""

    def read():
        found = {}
        for family in metrics.read(session):
            for sample in family.samples:
                labels = tuple(sorted(v for k, v in sample.labels.items() if k != "island"))
                found[sample.name.removeprefix("roundhouse_"), labels] = sample.value
        return found

    return read


# --- tenants ------------------------------------------------------------------------------------


class TestTenants:
    """Two devices; a has b below it."""

    @pytest.fixture
    def a_and_b(self, scenery):
        a = scenery.tenant("a", guarantee={"cpu": 1}, limit={"*": 5})
        b = scenery.tenant("b", parent_id=a.id)
        c = scenery.tenant("c")
        scenery.device("d0"), scenery.device("d1")
        scenery.task(a, "running", seat="d0")
        scenery.charge(scenery.task(b, "running", seat="d1"), 7_000_000)
        for tenant, waited_s in ((a, 10), (b, 500), (c, 20)):
            since = func.now() - timedelta(seconds=waited_s)
            scenery.task(tenant, waiting_since=since)
        return scenery

    def test_metrics_equal_the_figures_of_the_api(self, a_and_b, session, figures):
        told, now = figures(), reports.clock(session)
        shares = {share.tenant: share for share in reports.fair_share(session, now)}
        for tenant, share in shares.items():
            [kind], level = share.kinds, str(share.depth)
            name = "a/b" if tenant == "b" else tenant
            for metric, value in (
                ("waiting_tasks", kind.waiting), ("held_devices", kind.held),
                ("fair_devices", kind.fair), ("guaranteed_devices", kind.guarantee),
                ("borrowed_devices", kind.borrowed),
            ):  # fmt: skip
                assert told[f"tenant_{metric}", tuple(sorted([name, level, "cpu"]))] == value
            of_all = tuple(sorted([name, level]))
            assert told["tenant_usage_seconds", of_all] == share.usage_us / 1e6
            assert told["tenant_charged_seconds_total", of_all] == share.total_us / 1e6
        assert shares["a"].held == 2
        assert shares["a"].borrowed == 1
        assert shares["b"].total_us >= 7_000_000

    def test_tenants_of_one_name_have_different_labels(self, scenery, session):
        """Also where one is called like the path of the other."""
        a, b = scenery.tenant("a"), scenery.tenant("a/b")
        for above, name in ((a, "c"), (b, "c"), (a, "b/c")):
            scenery.tenant(name, parent_id=above.id)
        told = [
            tuple(sample.labels.values())
            for family in metrics.read(session)
            for sample in family.samples
            if sample.name == "roundhouse_tenant_score_seconds"
        ]
        assert len(told) == len(set(told)) == 5

    def test_only_tenants_with_a_limit_have_that_metric(self, a_and_b, figures):
        limits = {labels for name, labels in figures() if name == "tenant_limit_devices"}
        assert limits == {("0", "a", "cpu")}

    def test_longest_wait_of_a_tenant_includes_tenants_below(self, a_and_b, figures):
        told = figures()
        waits = {labels: round(s, -1) for (name, labels), s in told.items() if "head_wait" in name}
        assert waits == {
            ("0", "a", "cpu"): 500, ("1", "a/b", "cpu"): 500, ("0", "c", "cpu"): 20, ("cpu",): 500,
        }  # fmt: skip
        assert told["waiting_tasks", ("cpu",)] == 3

    def test_only_the_first_task_of_a_line_counts_for_the_wait(self, scenery, figures):
        """Who has waited longest comes behind one with a higher priority, who came just now."""
        a = scenery.tenant("a")
        scenery.device("d0")
        scenery.task(a, waiting_since=func.now() - timedelta(hours=1))
        scenery.task(a, priority=5, waiting_since=func.now())
        assert figures()["tenant_head_wait_seconds", ("0", "a", "cpu")] < 60

    def test_only_the_busiest_of_many_tenants_are_shown(self, a_and_b, figures, monkeypatch):
        monkeypatch.setenv("ROUNDHOUSE_METRICS_TENANTS_MAX", "1")
        settings.cache_clear()
        told = figures()
        named = {labels for name, labels in told if name == "tenant_held_devices"}
        assert named == {("0", "a", "cpu")}
        assert told["tenants_left_out", ()] == 2
        assert told["waiting_tasks", ("cpu",)] == 3


# --- devices, islands, checkpoints --------------------------------------------------------------


def test_devices_by_state_and_the_oldest_heartbeat(scenery, session, figures):
    for name, lease_s, cordoned in (("u", 60, False), ("v", 60, False), ("c", 60, True),
                                    ("s", 60, False), ("d", -1, False)):  # fmt: skip
        scenery.device(name, lease_s=lease_s, cordoned=cordoned)
    session.get_one(Device, "s").facts = {"stopping": True}
    for device, age_s in (("u", 3), ("v", 1), ("d", 900)):
        seen = func.now() - timedelta(seconds=age_s)
        session.execute(update(Device).where(Device.id == device).values(seen_at=seen))
    told = figures()
    devices = {labels: n for (name, labels), n in told.items() if name == "devices"}
    assert devices == {
        ("cpu", "up"): 2, ("cordoned", "cpu"): 1, ("cpu", "stopping"): 1, ("cpu", "down"): 1
    }  # fmt: skip
    assert told["heartbeat_age_seconds", ()] == pytest.approx(3, abs=0.01)
    assert told["island_led", ()] == 1


def test_the_figures_of_watched_devices_are_summed_by_kind(scenery, figures):
    for n, (load, hot_c) in enumerate([(20, 50), (60, 70)]):
        read = {"utilisation_percent": load, "temperature_c": hot_c, "power_w": 100.5}
        scenery.device(f"g{n}", kind="cuda", health={"checked": 0, "reading": read})
    gone = {"checked": 0, "reading": {"temperature_c": 99}}
    scenery.device("g2", kind="cuda", health=gone, lease_s=-1)
    scenery.device("c0")
    why = {"rule": "xid", "reason": "Xid 48", "effect": "move", "at_s": 0.0, "returns": False}
    scenery.device("g3", kind="cuda", cordoned=True, fitness={"cordon": why})
    told = {name: n for (name, labels), n in figures().items() if labels == ("cuda",)}
    assert told["watched_devices"] == 2
    assert told["device_utilisation_percent"] == 40
    assert (told["device_temperature_celsius"], told["device_power_watts"]) == (70, 201)
    assert "device_ecc_uncorrected" not in told, "no device tells it"
    assert figures()["unfit_devices", ("cuda", "xid")] == 1


def test_orders_not_yet_taken_in_are_counted(scenery, session, figures):
    a = scenery.tenant("a")
    scenery.device("d0")
    task = scenery.task(a, "running", seat="d0")
    for seq, answered in ((1, func.now()), (2, None), (3, None)):
        scenery.add(
            OutboxOrder(
                task_id=task.id, epoch=1, seq=seq, device_id="d0", kind="x", answered_at=answered
            )
        )
    assert figures()["orders_unanswered", ()] == 2


def test_checkpoints_of_the_last_ten_minutes(scenery, session, figures):
    task, now = scenery.task(scenery.tenant("a")), reports.clock(session)
    for n, (age, took_s) in enumerate([(0, 1), (300, 2), (599, 3), (700, 50)]):
        ms = int((now.timestamp() - age) * 1000)
        scenery.add(
            Checkpoint(
                id=f"ckp_{ms:012x}{uuid_utils.uuid7().hex[12:]}",
                task_id=task.id, tenant_id=task.tenant_id, epoch=1, step=n, sha256=str(n),
                size_bytes=100, new_bytes=10, took_us=took_s * 1_000_000,
            )
        )  # fmt: skip
    told = figures()
    assert told["recent_checkpoints", ()] == 3
    assert told["recent_checkpoint_bytes", ("whole",)] == 300
    assert told["recent_checkpoint_bytes", ("new",)] == 30
    quantiles = [told["recent_checkpoint_seconds", (str(q),)] for q in metrics.QUANTILES]
    assert quantiles == pytest.approx([2.0, 2.9, 3.0])


def test_the_audit_log_is_counted(scenery, session, figures):
    assert figures()["audit_events_total", ()] == 0
    call = audit.Call(operation="seed", user="app.local.seed")
    for _ in range(3):
        audit.append(session, call, "made", target=("key", "k"), tenant_id=None)
    assert figures()["audit_events_total", ()] == 3


def test_messages_to_webhooks_that_wait_to_be_sent(scenery, figures):
    whose = {"tenant_id": scenery.tenant("a").id, "url": "https://hooks.example.org/"}
    scenery.add(Webhook(id="whk_1", secret="", **whose))
    now, later = func.now(), func.now() + timedelta(hours=1)
    for n, (state, due_at) in enumerate(
        [("pending", now), ("pending", now), ("pending", later), ("given_up", now)]
    ):
        of_hook = {"id": f"msg_{n}", "webhook_id": "whk_1", "type": "x", "body": "", **whose}
        scenery.add(Delivery(state=state, due_at=due_at, **of_hook))
    assert figures()["webhook_messages_due", ()] == 2


def _plan_that_fails(session, task):
    with journal.savepoint(session):
        journal.tell(session, task, "task.moved", "")
        journal.write_down(session)
        raise ZeroDivisionError


class TestTally:
    @pytest.fixture
    def isle(self, scenery, session):
        return scenery

    def told(self, a_tally, task, *types, fail=False, leads=True, **data):
        """One round in which these events are told."""
        with transaction() as session:
            for type_ in types:
                journal.tell(session, task, type_, "", **data)
            journal.settle(session)
            a_tally._due_s = 0.0
            a_tally.write(session, session.get_one(Island, "isle"), leads=leads)
            if fail:
                raise ZeroDivisionError

    def test_events_of_committed_rounds_are_counted(self, scenery, session, figures):
        task, ours = scenery.task(scenery.tenant("a")), Tally()
        session.commit()
        self.told(ours, task, "task.paused", "task.paused", "task.moved")
        with pytest.raises(ZeroDivisionError):
            self.told(ours, task, "task.lost", fail=True)
        self.told(ours, task, "task.started", switch_us=1500)
        self.told(ours, task)
        told = figures()
        events = {labels[0]: v for (name, labels), v in told.items() if name == "task_events_total"}
        assert events == {"task.paused": 2, "task.moved": 1, "task.started": 1}
        assert told["switches_total", ()] == 1
        assert told["switch_seconds_total", ()] == 0.0015

    def test_events_of_a_plan_that_failed_are_not_counted(self, scenery, session, figures):
        task, ours = scenery.task(scenery.tenant("a")), Tally()
        session.commit()
        with transaction() as round_:
            with pytest.raises(ZeroDivisionError):
                _plan_that_fails(round_, task)
            journal.tell(round_, task, "task.paused", "")
            journal.settle(round_)
            ours.write(round_, round_.get_one(Island, "isle"), leads=True)
        self.told(ours, task)
        counts = figures()
        assert counts["task_events_total", ("task.paused",)] == 1
        assert ("task_events_total", ("task.moved",)) not in counts

    def test_sources_of_inputs_are_counted(self, scenery, session, figures):
        scenery.device("h.0")
        seat = scenery.seat(scenery.task(scenery.tenant("a"), seat="h.0"))
        session.commit()
        at_first, ours = {"x": "here", "y": "host"}, Tally()
        for ways in (at_first, {**at_first, "late": "host"}, {**at_first, "late": "host"}):
            with transaction() as its:
                its.get_one(Placement, seat.id).ways = ways
                ours._due_s = 0.0
                ours.write(its, its.get_one(Island, "isle"), leads=True)
        told = figures()
        assert (told["inputs_total", ("here",)], told["inputs_total", ("host",)]) == (1, 2)

    def test_use_of_the_network_is_counted(self, scenery, session, figures):
        scenery.device("h.0")
        seat = scenery.seat(scenery.task(scenery.tenant("a"), seat="h.0"))
        session.commit()
        ours = Tally()
        for n in (1, 3, 3):
            with transaction() as its:
                its.get_one(Placement, seat.id).network = dict.fromkeys(FIGURES, n)
                ours._due_s = 0.0
                ours.write(its, its.get_one(Island, "isle"), leads=True)
        told = figures()
        assert told["network_connections_total", ()] == told["network_refusals_total", ()] == 3
        assert told["network_bytes_total", ("sent",)] == told["network_bytes_total", ("received",)]

    def test_counts_of_two_schedulers_are_added_and_the_leader_reports_health(
        self, scenery, session, figures
    ):
        task, ours, theirs = scenery.task(scenery.tenant("a")), Tally(), Tally()
        session.commit()
        for _ in range(2):
            self.told(theirs, task, "task.done", leads=False)
        assert ("island_round_age_seconds", ()) not in figures()
        for _ in range(2):
            self.told(ours, task, "task.done")
        told = figures()
        assert told["task_events_total", ("task.done",)] == 2  # the last of each is not written yet
        assert told["island_round_age_seconds", ()] == 0.0

    def test_counts_are_written_at_most_once_a_second(self, scenery, session):
        row, ours = session.get_one(Island, "isle"), Tally()
        with transaction() as its:
            ours.write(its, its.get_one(Island, "isle"), leads=True)
        ours.round(0.1)
        with transaction() as its:
            ours.write(its, its.get_one(Island, "isle"), leads=True)
        session.refresh(row)
        assert row.tally == {}

    def test_rounds_are_a_histogram(self, scenery, session, figures):
        ours, places = Tally(), Counter()
        for took_s in (0.001, 0.005, 0.006, 0.3, 7.0):
            ours.round(took_s)
            places[next((b for b in counters.ROUND_BOUNDS_S if took_s <= b), "+Inf")] += 1
        with transaction() as its:
            ours.write(its, its.get_one(Island, "isle"), leads=True)
        told = figures()
        assert places == {0.005: 2, 0.02: 1, 0.5: 1, "+Inf": 1}
        wanted = {"0.005": 2, "0.02": 3, "0.25": 3, "0.5": 4, "5.0": 4, "+Inf": 5}
        for bound, count in wanted.items():
            assert told["island_round_seconds_bucket", (bound,)] == count
        assert told["island_round_seconds_count", ()] == 5
        assert told["island_round_seconds_sum", ()] == pytest.approx(7.312)


# --- the page -----------------------------------------------------------------------------------


@pytest.fixture
def scraped(as_):
    """Families by name, as Prometheus reads them."""

    def scrape(path="/metrics"):
        metrics.figures.forget()
        answer = as_("root").get(path)
        assert answer.status_code == 200
        return {family.name: family for family in text_string_to_metric_families(answer.text)}

    return scrape


class TestThePage:
    def test_metrics_need_a_key_of_the_root_tenant(self, as_, session, app):
        problem(as_("").get("/metrics"), 401, "unauthenticated")
        for who in ("red.tenant_admin", "red.member", "red.viewer"):
            problem(as_(who).get("/metrics"), 403, "insufficient-scope")
        with transaction() as its:
            its.add(User(id="usr_watch", tenant_id="ten_root", name="prometheus"))
            its.flush()
            key = auth.new_key(its, "usr_watch", "viewer", "prometheus")
        watcher = TestClient(app, headers={"Authorization": f"Bearer {key}"})
        answer = watcher.get("/metrics")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain")
        assert watcher.get("/v1/requests").json()["items"] == []  # it sees nothing else

    def test_openmetrics_format_is_sent_on_request(self, as_):
        answer = as_("root").get("/metrics", headers={"Accept": "application/openmetrics-text"})
        assert answer.headers["content-type"].startswith("application/openmetrics-text")
        assert answer.text.endswith("# EOF\n")

    def test_calls_and_their_times_are_counted_by_operation(self, as_, scraped):
        before = self.answered(scraped())
        for who in ("red.member", "red.member", ""):
            as_(who).get("/v1/me")
        as_("red.member").post("/v1/tenants", json={"name": "x"})
        after = self.answered(scraped())
        assert after - before == {
            ("getMe", "200"): 2, ("getMe", "401"): 1, ("createTenant", "403"): 1,
            ("getMetrics", "200"): 1,
        }  # fmt: skip
        seconds = scraped()["roundhouse_api_seconds"].samples
        assert any(sample.labels.get("operation") == "getMe" for sample in seconds)

    def test_unknown_addresses_make_no_new_labels(self, as_, scraped):
        scraped()
        for n in range(20):
            as_("").get(f"/nothing/{n}")
            as_("red.member").get(f"/v1/requests/req_{n}")
            as_("").request(f"M{n}", "/v1/me")
        operations = {operation for operation, _ in self.answered(scraped())}
        assert "none" in operations
        assert not any(re.search(r"\d", operation) for operation in operations)

    def test_failed_calls_are_counted(self, as_, scraped, monkeypatch, app):
        monkeypatch.setattr(reports, "fair_share", lambda *_: 1 / 0)
        quiet = TestClient(app, headers=as_("red.member").headers, raise_server_exceptions=False)
        assert quiet.get("/v1/fair-share").status_code == 500
        monkeypatch.undo()
        assert self.answered(scraped())["getFairShare", "500"] == 1

    def test_no_label_names_a_person_a_request_a_task_or_a_device(self, submitted, scraped):
        families = scraped().values()
        labels = {name for f in families for sample in f.samples for name in sample.labels}
        assert labels <= {"tenant", "level", "kind", "island", "state", "event", "operation",
                          "status", "part", "quantile", "le", "direction"}  # fmt: skip
        values = {str(sample.labels) for f in families for sample in f.samples}
        secret = (submitted["id"], submitted["name"], "red.member", "h.0")
        assert not [value for value in values for word in secret if f"'{word}'" in value]

    def test_two_simultaneous_scrapes_read_once(self, as_, monkeypatch):
        read, times = metrics.read, []
        monkeypatch.setattr(metrics, "read", lambda session: times.append(1) or read(session))
        monkeypatch.setattr(metrics, "KEPT_S", 3600.0)
        metrics.figures.forget()
        for _ in range(3):
            as_("root").get("/metrics")
        assert len(times) == 1
        metrics.figures.forget()

    @staticmethod
    def answered(families):
        return Counter(
            {
                (sample.labels["operation"], sample.labels["status"]): sample.value
                for sample in families["roundhouse_api_answers"].samples
            }
        )


# --- what is said of it -------------------------------------------------------------------------


@pytest.fixture
def names(scraped, red):
    """Of all families, and of the series in them."""
    red.get("/v1/me")
    return {name for family in scraped().values() for name in _series(family)}


def _series(family):
    endings = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
    return [family.name + ending for ending in endings.get(family.type, [""])]


def test_table_in_the_docs_has_exactly_these_metrics(names):
    text = (DOCS / "reference" / "metrics.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    said = {f"roundhouse_{name}" for row in rows for name in re.findall(r"`(\w+)`", row)}
    histograms = {name.removesuffix("_bucket") for name in names if name.endswith("_bucket")}
    plain = {name for name in names if not name.startswith(tuple(histograms))}
    assert said == {name for name in plain | histograms if name.startswith("roundhouse_")}


def test_dashboard_shows_exactly_these_metrics(names):
    board = json.loads((DOCS / "grafana.json").read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    used = {name for expr in asked for name in re.findall(r"\b(?:roundhouse|process)_\w+", expr)}
    assert used <= names
    told = {re.sub("_(bucket|sum|count)$", "", n) for n in names if n.startswith("roundhouse")}
    assert told == {re.sub("_(bucket|sum|count)$", "", n) for n in used if "process" not in n}
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    variables = {variable["name"] for variable in board["templating"]["list"]}
    wanted = {name for expr in asked for name in re.findall(r"\$(\w+)", expr)}
    assert wanted <= variables
    assert all(panel["datasource"]["uid"] == "${source}" for panel in panels)


def test_a_new_app_shares_the_counters(app):
    """An app is made for each test process and for uvicorn: no name is registered twice."""
    assert create_app() is not app
