"""Who held each device when: its bars, its bounds, and the page that shows them."""

from __future__ import annotations

import random
import re
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from sqlalchemy import func, select, text, update

from app.db.models import Device, Host, Placement, Task
from app.insight import reports
from app.insight.reports.device_stays import STAYS, DeviceHistory, DeviceStay, TaskName
from app.pages.device_lanes import (
    MIXED,
    ROWS_MOST,
    device_lanes,
    held_bars,
    idle_share,
)
from app.pages.operator_views import LANES_SHOWN
from tests.app.pages.test_tenant_views import rows_of

PAGE = "/ui/devices"
SINCE = datetime(2026, 11, 30, 12, tzinfo=UTC)
HOUR_S = 3600
UNTIL = SINCE + timedelta(seconds=HOUR_S)


def stay(tenant, from_s, to_s, *, task="", shared=False):
    return DeviceStay(
        tenant=tenant,
        task_id=task or f"tsk_{tenant}_{from_s}",
        launched_at=SINCE + timedelta(seconds=from_s),
        ended_at=None if to_s is None else SINCE + timedelta(seconds=to_s),
        shared=shared,
    )


def history(*stays, device="h.0", since_s=0, joined=False, cut=False):
    since = SINCE + timedelta(seconds=since_s)
    ordered = tuple(sorted(stays, key=lambda each: each.launched_at))
    return DeviceHistory(device=device, since=since, joined=joined, cut=cut, stays=ordered)


def seconds(bar):
    return [(at - SINCE).total_seconds() for at in (bar.begins, bar.ends)]


def drawn(*stays, most=3000):
    return [
        (bar.tenants, *seconds(bar), bar.stays)
        for bar in held_bars([history(*stays)], SINCE, UNTIL, most=most)
    ]


class TestBars:
    def test_each_stay_is_a_bar_cut_at_the_window(self):
        bars = drawn(stay("a", -50, 600), stay("a", 600, 1200), stay("b", 1800, None))
        assert bars == [("a", 0, 600, 1), ("a", 600, 1200, 1), ("b", 1800, HOUR_S, 1)]

    def test_adjacent_short_stays_of_a_tenant_are_one_bar(self):
        bars = drawn(*(stay("a", n, n + 1) for n in range(100, 200)))
        assert bars == [("a", 100, 200, 100)]

    def test_short_stay_joins_a_long_one_of_its_tenant_only(self):
        bars = drawn(stay("a", 0, 600), stay("a", 600, 601), stay("b", 601, 602))
        assert bars == [("a", 0, 601, 2), ("b", 601, 602, 1)]

    def test_stays_with_a_gap_that_can_be_seen_are_not_joined(self):
        assert drawn(stay("a", 0, 1), stay("a", 5, 6)) == [("a", 0, 1, 1), ("a", 5, 6, 1)]
        assert drawn(stay("a", 0, 1), stay("a", 4, 5)) == [("a", 0, 5, 2)]

    def test_short_turns_of_several_tenants_are_one_bar_with_their_parts(self):
        turns = [stay("ab"[n % 4 == 0], n, n + 1) for n in range(100)]
        bars = drawn(*turns)
        assert bars[0] == ("a 75 %, b 25 %", 0, 36, 36)  # not all: it would not say who came when
        assert [bar[1:3] for bar in bars] == [(0, 36), (36, 72), (72, 100)]

    def test_task_that_waits_for_its_leaving_predecessor_is_drawn_behind_it(self):
        bars = held_bars([history(stay("a", 0, 600), stay("b", 500, 900))], SINCE, UNTIL)
        assert [(bar.row, *seconds(bar)) for bar in bars] == [(0, 0, 600), (0, 600, 900)]
        assert bars[1].launched_at == SINCE + timedelta(seconds=500)

    def test_tasks_that_share_a_device_stand_above_each_other(self):
        parts = [stay("ab"[n % 2], n, 900, shared=True) for n in range(ROWS_MOST + 2)]
        bars = held_bars([history(*parts)], SINCE, UNTIL)
        assert {bar.row for bar in bars} == set(range(ROWS_MOST))
        chart = device_lanes([history(*parts)], bars, {}, since=SINCE, until=UNTIL)
        tops = sorted({(part.y, part.height) for part in chart.line.lanes[0].parts})
        assert all(y + height <= below + 0.01 for (y, height), (below, _) in pairwise(tops))

    @pytest.mark.parametrize("seed", range(5))
    def test_bars_are_bounded_and_cover_every_stay(self, seed):
        dice = random.Random(seed)
        histories = []
        for device in range(50):
            at, stays = 0.0, []
            while at < HOUR_S:
                length = dice.choice([0.5, 5, 60])
                stays.append(stay(dice.choice("abc"), at, at + length, task=f"t{len(stays)}"))
                at += length + dice.choice([0, 0, 5])
            histories.append(history(*stays, device=f"h.{device}"))
        bars = held_bars(histories, SINCE, UNTIL, most=500)
        assert len(bars) <= 500 < sum(len(each.stays) for each in histories)
        assert sum(bar.stays for bar in bars) == sum(len(each.stays) for each in histories)
        held_s = sum(sum(bar.held_s.values()) for bar in bars)
        idle_s = sum(HOUR_S * (1 - idle_share(each, UNTIL).percent / 100) for each in histories)
        assert held_s == pytest.approx(idle_s, rel=0.01)

    def test_most_of_few_is_no_endless_loop(self):
        assert len(drawn(stay("a", 0, 600), stay("b", 3000, 3600), most=0)) == 1


class TestIdle:
    @pytest.mark.parametrize(
        ("stays", "percent"),
        [
            ([], 100),
            ([stay("a", -9, None)], 0),
            ([stay("a", 0, 900)], 75),
            ([stay("a", 0, 900), stay("b", 800, 1800)], 50),
            ([stay("a", 0, 1800, shared=True), stay("b", 0, 900, shared=True)], 50),
            ([stay("a", 0, 1)], 99),
            ([stay("a", 1, None)], 1),
        ],
    )
    def test_idle_is_the_time_that_no_task_held(self, stays, percent):
        assert idle_share(history(*stays), UNTIL).percent == percent

    def test_idle_counts_from_when_the_device_joined(self):
        share = idle_share(history(stay("a", 1800, 2700), since_s=1800, joined=True), UNTIL)
        assert (share.percent, share.note) == (50, "joined then")

    def test_line_begins_where_the_device_joined(self):
        late = [history(since_s=1800, joined=True)]
        chart = device_lanes(late, [], {}, since=SINCE, until=UNTIL)
        assert chart.line.lanes[0].begins == 50


class TestChart:
    def lanes(self, *stays, names=None):
        histories = [history(*stays)]
        bars = held_bars(histories, SINCE, UNTIL)
        return device_lanes(histories, bars, names or {}, since=SINCE, until=UNTIL)

    def test_bar_says_tenant_request_and_times(self):
        named = {"t": TaskName(request_id="req_1", request="sweep", task="train")}
        chart = self.lanes(stay("red", -60, None, task="t"), names=named)
        [lane] = chart.line.lanes
        assert (lane.name, lane.note) == ("h.0", "0 % idle")
        said = "red: sweep · train, 30 Nov 11:59:00 UTC until now"
        assert [(part.x, part.width, part.words) for part in lane.parts] == [(0, 100, said)]

    def test_bar_of_several_stays_says_how_many(self):
        chart = self.lanes(*(stay("red", n, n + 1) for n in range(12)))
        assert "red: 12 stays of 12 tasks, " in chart.line.lanes[0].parts[0].words

    def test_nine_tenants_share_eight_colours_and_the_smallest_are_the_others(self):
        stays = [stay(f"t{n}", 100 * n, 100 * n + 20 + 5 * n) for n in range(9)]
        chart = self.lanes(*stays)
        assert chart.line.key == (*(f"t{n}" for n in range(2, 9)), "all others")
        colours = [part.colour for part in chart.line.lanes[0].parts]
        assert colours == [7, 7, 0, 1, 2, 3, 4, 5, 6]

    def test_bar_of_several_tenants_has_a_look_of_its_own(self):
        chart = self.lanes(stay("a", 0, 1), stay("b", 1, 2))
        assert chart.mixed
        assert chart.line.lanes[0].parts[0].colour == MIXED


# --- with the database --------------------------------------------------------------------------


@pytest.fixture
def held(session, submitted):
    """Write placements of red's task on h.0, from and to so many seconds ago."""
    task = session.get_one(Task, submitted["tasks"][0]["id"])
    now = reports.clock(session)
    session.execute(update(Device).values(created_at=now - timedelta(days=30)))
    session.commit()

    def write(*spans, device="h.0", tenant=task.tenant_id):
        last = session.scalar(select(func.max(Placement.epoch))) or 0
        for epoch, (from_s, to_s) in enumerate(spans, start=last + 1):
            row = Placement(
                task_id=task.id,
                epoch=epoch,
                device_id=device,
                tenant_id=tenant,
                user_id=task.user_id,
                kind="cpu",
                cost_milli=1000,
                incarnation="p1",
                launched_at=now - timedelta(seconds=from_s),
                ended_at=None if to_s is None else now - timedelta(seconds=to_s),
            )
            session.add(row)
        session.commit()

    return write


def idle_of(page):
    return dict(re.findall(r"<span>(\S+) <span class=\"quiet\">(\d+) % idle</span></span>", page))


class TestPage:
    def test_lanes_and_table_say_the_same(self, browse, held, submitted):
        held((1800, None))
        held((3000, 1800), device="h.1", tenant="ten_blue")
        page = browse("root").look(PAGE).text
        assert idle_of(page) == {"h.0": "50", "h.1": "67"}
        first, second = re.findall(r"<title>(.*?)</title></rect>", page)
        assert re.fullmatch(rf"red: {submitted['name']} · train, .* UTC until now", first)
        assert second.startswith(f"blue: {submitted['name']} · train, ")
        rows = rows_of(page, "held")[1:]
        assert len(rows) == 2
        assert rows[0].startswith(f"h.0 red {submitted['name']} · train")
        assert "now" in rows[0]
        assert f'<a href="/ui/requests/{submitted["id"]}">' in page.partition('id="held"')[2]
        assert [row[:8] for row in rows_of(page, "idle")[1:]] == ["h.0 50 %", "h.1 67 %"]

    def test_windows_show_what_reaches_into_them(self, browse, held):
        held((20 * 86400, 8 * 86400), (2 * 86400, 86400 - 60), (7200, 4000), (60, 50))
        root = browse("root")
        for window, bars in (("1h", 1), ("24h", 3), ("7d", 3)):
            page = root.look(f"{PAGE}?window={window}").text
            assert len(rows_of(page, "held")) - 1 == bars
            assert f'<a href="?window={window}" aria-current="true">' in page

    @pytest.mark.parametrize("window", ["", "15m", "9y", "<b>", "1h%20"])
    def test_unknown_window_shows_the_hour(self, browse, window):
        answer = browse("root").look(f"{PAGE}?window={window}")
        assert answer.status_code == 200
        assert '<a href="?window=1h" aria-current="true">' in answer.text

    def test_word_finds_by_id_host_and_kind(self, browse, session):
        session.add(Host(name="tall", island="isle"))
        session.flush()
        session.add(Device(id="tall.0", host="tall", island="isle", kind="cuda"))
        session.commit()
        root = browse("root")
        for word, found in (("H.1", ["h.1"]), ("TAL", ["tall.0"]), ("cuda", ["tall.0"])):
            assert list(idle_of(root.look(f"{PAGE}?q={word}").text)) == found
        assert len(idle_of(root.look(f"{PAGE}?q=%20").text)) == 3
        page = root.look(f"{PAGE}?q=%22%3Cb%3E").text
        assert "No device matches" in page
        assert "&lt;b&gt;" in page
        assert "<b>" not in page

    def test_word_and_window_stay_in_the_links_and_after_a_form(self, browse):
        root = browse("root")
        assert 'href="?window=7d&amp;q=a%26b"' in root.look(f"{PAGE}?q=a%26b&window=24h").text
        sent = root.send(f"{PAGE}?window=24h&q=h.1", hx=True, do="cordon", of="h.0").text
        assert list(idle_of(sent)) == ["h.1"]
        assert 'href="?window=24h&amp;q=h.1" aria-current="true"' in sent

    def test_many_devices_are_shown_in_part_and_the_page_says_so(self, browse, session):
        for n in range(2, 70):
            session.add(Device(id=f"h.{n}", host="h", island="isle", kind="cpu"))
        session.commit()
        root = browse("root")
        page = root.look(PAGE).text
        assert len(idle_of(page)) == LANES_SHOWN
        assert f"The first {LANES_SHOWN} of 70 devices." in page
        page = root.look(f"{PAGE}?q=h.6").text
        assert len(idle_of(page)) == 11
        assert "The first" not in page

    def test_only_platform_admins_see_it(self, browse, held):
        held((1800, None))
        for who in ("red.tenant_admin", "blue.viewer"):
            answer = browse(who).look(f"{PAGE}?window=24h")
            assert answer.status_code == 403
            assert "% idle" not in answer.text


class TestHistories:
    def test_too_many_stays_are_read_from_the_newest_and_the_lane_begins_there(self, session, held):
        held(*((100 * n, 100 * n - 50) for n in range(10, 0, -1)))
        since = reports.clock(session) - timedelta(seconds=1000)
        [whole] = reports.device_histories(session, ["h.0"], since)
        assert (len(whole.stays), whole.cut, whole.since) == (10, False, since)
        [part] = reports.device_histories(session, ["h.0"], since, most=4)
        assert part.cut
        assert part.stays == whole.stays[-3:]
        assert part.since == whole.stays[-4].ended_at
        assert idle_share(part, reports.clock(session)).note == "too many stays before"

    def test_device_that_joined_in_the_window_counts_from_then(self, session, world):
        now = reports.clock(session)
        session.execute(update(Device).values(created_at=now - timedelta(minutes=5)))
        found = reports.device_histories(session, ["h.1", "gone", "h.0"], now - timedelta(hours=1))
        assert [(one.device, one.joined) for one in found] == [("h.1", True), ("h.0", True)]
        assert found[0].since == now - timedelta(minutes=5)

    def test_placements_are_read_by_their_indexes(self, session, held):
        held((1800, 900), (60, None))
        session.execute(text("set local enable_seqscan = off"))
        values = {"devices": ["h.0"], "since": SINCE, "each": 10}
        plan = session.execute(text(f"explain {STAYS}"), values).scalars().all()
        for index in ("ix_placements_open", "ix_placements_ended"):
            assert any(index in line for line in plan), plan
