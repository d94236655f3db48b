"""The pages of tenants and their forms, without a browser."""

from __future__ import annotations

import html
import re
from datetime import timedelta

import pytest

from app.db import transactions
from app.db.models import Reservation, ReservationWindow, Tenant

PAGE = "/ui/tenants/ten_red"


@pytest.fixture
def tenant(as_):
    return lambda id="ten_red": as_("root").get(f"/v1/tenants/{id}").json()


def form_of(shown):
    """The fields of the form that changes a tenant, as a browser sends them back untouched."""
    part = shown.partition('id="change-title"')[2].partition('id="budget-title"')[0]
    fields = re.findall(r'<input(?![^>]*checkbox)[^>]*name="(\w+)"[^>]*?value="([^"]*)"', part)
    chosen = re.findall(r'<select name="(\w+)".*?</select>', part, re.DOTALL)
    given = {name: html.unescape(value) for name, value in fields}
    for name in chosen:
        options = part.partition(f'<select name="{name}"')[2].partition("</select>")[0]
        [picked] = re.findall(r"<option(?: value=\"(\S*)\")? selected>([^<]*)", options)
        given[name] = picked[0] or picked[1]
    return {name: value for name, value in given.items() if name != "token"}


def rows_of(page, table):
    inner = page.partition(f'<table id="{table}"')[2] or page.partition(f'id="{table}"')[2]
    return [
        " ".join(html.unescape(re.sub("<[^>]+>", " ", row)).split())
        for row in re.findall(r"<tr.*?</tr>", inner.partition("</table>")[0], re.DOTALL)
    ]


def test_an_untouched_form_changes_nothing(browse, tenant):
    root, before = browse("root"), tenant()
    given = form_of(root.look(PAGE).text)
    assert given["weight"] == "1"
    assert root.send(PAGE, do="save", **given).status_code == 303
    assert {**tenant(), "version": 0} == {**before, "version": 0}


def test_a_change_is_saved_and_told(browse, tenant):
    root = browse("root")
    given = {
        **form_of(root.look(PAGE).text),
        "weight": "2.5",
        "guarantee": "cpu=1",
        "limit": "cpu=2, *=3",
        "tier": "basic",
        "max_running": "7",
        "idle_pause_s": "1800",
    }
    assert root.send(PAGE, do="save", **given).status_code == 303
    assert root.told(PAGE) == "red is changed."
    changed = tenant()
    assert (changed["weight"], changed["guarantee"]) == (2.5, {"cpu": 1})
    assert (changed["limit"], changed["tier"]) == ({"cpu": 2, "*": 3}, "basic")
    assert (changed["max_running"], changed["idle_pause_s"]) == (7, 1800)
    assert root.send(PAGE, do="save", **given).status_code == 412, "it has changed since"
    given = form_of(root.look(PAGE).text)
    assert given["limit"] == "*=3, cpu=2"
    emptied = {**given, "max_running": "", "guarantee": ""}
    assert root.send(PAGE, do="save", **emptied).status_code == 303
    assert (tenant()["max_running"], tenant()["guarantee"]) == (None, {})


def test_the_effect_of_a_change_is_shown_and_nothing_is_saved(browse, tenant):
    root, before = browse("root"), tenant()
    given = {**form_of(root.look(PAGE).text), "weight": "3"}
    shown = root.send(PAGE, do="preview", **given)
    assert shown.status_code == 200
    effect = rows_of(shown.text, "effect")
    assert effect[1:] == ["blue cpu 1 → 0.5 0", "red cpu 1 → 1.5 0"]
    assert form_of(shown.text)["weight"] == "3"
    assert tenant() == before
    none = {**given, "weight": "1", "max_queued": "5"}
    assert "change no share" in root.send(PAGE, do="preview", **none).text


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ({"weight": "much"}, "weight"),
        ({"weight": "0"}, "weight"),
        ({"guarantee": "four"}, "like cuda=4"),
        ({"limit": "cpu=-1"}, "like cuda=4"),
        ({"idle_pause_s": "59"}, "60"),
        ({"max_running": "1.5"}, "max_running"),
        ({"name": ""}, "name"),
        ({"guarantee": "cpu=2", "limit": "cpu=1"}, "guarantee"),
    ],
)
def test_a_wrong_value_is_refused_by_preview_and_save(browse, tenant, bad, told):
    root, before = browse("root"), tenant()
    given = {**form_of(root.look(PAGE).text), **bad}
    for do in ("preview", "save"):
        answer = root.send(PAGE, do=do, hx=True, **given)
        assert answer.status_code == 422
        assert told in html.unescape(answer.text)
    assert tenant() == before


def test_a_lead_sees_the_own_quota_and_changes_only_tenants_below(browse, tenant, session):
    session.add(Tenant(id="ten_child", name="child", parent_id="ten_red"))
    session.flush()
    lead = browse("red.tenant_admin")
    own = lead.look(PAGE).text
    assert "Quota now" in own
    assert 'value="save"' not in own
    assert 'href="/ui/tenants/ten_child"' in own
    given = form_of(lead.look("/ui/tenants/ten_child").text)
    assert lead.send("/ui/tenants/ten_child", do="save", **{**given, "weight": "2"}).is_redirect
    assert tenant("ten_child")["weight"] == 2
    version = str(tenant()["version"])
    for do in ("preview", "save", "delete"):
        fields = {**given, "name": "red", "parent_id": "ten_root", "version": version}
        assert lead.send(PAGE, do=do, **fields, hx=True).status_code == 403, do
    for who, status in (("blue.tenant_admin", 404), ("red.member", 403), ("red.viewer", 403)):
        assert browse(who).look(PAGE).status_code == status, who
        assert browse(who).send(PAGE, do="hold").status_code == status, who


def test_a_tenant_is_added_and_deleted(browse, as_):
    root = browse("root")
    answer = root.send("/ui/tenants", name="speech", parent_id="ten_red", weight="2")
    page = answer.headers["location"]
    assert "speech is added" in root.told(page)
    made = as_("root").get(f"/v1/tenants/{page.rpartition('/')[2]}").json()
    assert (made["parent_id"], made["weight"]) == ("ten_red", 2)
    assert root.send(page, do="delete").headers["location"] == "/ui/tenants"
    assert root.look(page).status_code == 404
    assert root.send(PAGE, do="delete").status_code == 409, "it has users"


@pytest.mark.parametrize("version", ["", "0", "x", "9" * 5000])
def test_a_form_of_another_version_is_told_to_be_loaded_again(browse, version):
    root = browse("root")
    given = {**form_of(root.look(PAGE).text), "version": version}
    for do in ("preview", "save"):
        answer = root.send(PAGE, do=do, **given)
        assert answer.status_code == 412
        assert "Somebody has changed red meanwhile; load its page again" in answer.text


def test_a_preview_keeps_whether_the_weight_counts_for_the_past(browse):
    root = browse("root")
    given = {**form_of(root.look(PAGE).text), "weight": "3"}
    box = r'name="past" value="yes" (checked)?>'
    assert re.search(box, root.send(PAGE, do="preview", **given, past="yes").text)[1]
    assert not re.search(box, root.send(PAGE, do="preview", **given).text)[1]


def test_a_wrong_number_by_kind_names_its_field(browse):
    root = browse("root")
    for field in ("guarantee", "limit"):
        given = {**form_of(root.look(PAGE).text), field: "cpu"}
        assert f"The {field} must be like" in root.send(PAGE, do="preview", **given).text


def test_reservations_are_shown_however_many_others_have(browse, session):
    now = transactions.now(session)
    day, windows = timedelta(days=1), []
    for n in range(203):
        begins_at = now + (5 - n % 5) * day
        times = {"begins_at": begins_at, "ends_at": begins_at + day}
        owner = "ten_blue" if n < 200 else "ten_red"
        named = {"id": f"rsv_{n:03}", "name": f"window-{n}", "tenant_id": owner}
        session.add(Reservation(**named, island="isle", devices={"cpu": 1}, **times))
        windows.append(ReservationWindow(reservation_id=named["id"], **times))
    session.flush()
    session.add_all(windows)
    session.flush()
    shown = browse("root").look(PAGE).text
    assert re.findall(r"window-\d+", shown) == ["window-202", "window-201", "window-200"]


def test_all_work_of_a_tenant_is_paused_and_cancelled(browse, submitted, red):
    lead = browse("red.tenant_admin")
    told = {"hold": "1 request paused", "release": "1 request resumed", "cancel": "cancelled"}
    for do, words in told.items():
        assert lead.send(PAGE, do=do).status_code == 303
        assert words in lead.told(PAGE)
        [task] = red.get(f"/v1/requests/{submitted['id']}").json()["tasks"]
        assert task["hold"] == ("user" if do == "hold" else "")
    assert task["cancel_asked"]
