"""The forms of limits per user and of budgets, on the pages of members and tenants."""

from __future__ import annotations

import html
import re

import pytest

TENANT, MEMBER = "/ui/tenants/ten_red", "/ui/members/usr_red.member"
BUDGET = {
    "device_hours": "cpu=10.5, *=20", "period": "14d", "timezone": "Europe/Berlin",
    "at": "80=notify, 100=hold", "carry": "0.125", "to": "",
}  # fmt: skip
SET = {
    "device_hours": {"cpu": 10.5, "*": 20.0}, "period": {"days": 14}, "timezone": "Europe/Berlin",
    "at": {"80": "notify", "100": "hold"}, "carry": 0.125, "to": [],
}  # fmt: skip


@pytest.fixture
def known(as_):
    def read(path):
        kind, id = path.split("/")[2:]
        return (
            as_("root").get(f"/v1/{ {'tenants': 'tenants', 'members': 'users'}[kind] }/{id}").json()
        )

    return read


def form_of(browser, path, do):
    """The fields of the form with this button, as a browser sends them back untouched."""
    forms = re.findall(r"<form.*?</form>", browser.look(path).text, re.DOTALL)
    [form] = (each for each in forms if f'value="{do}"' in each)
    found = re.findall(r'<input[^>]*name="(\w+)" value="([^"]*)"', form)
    return {name: html.unescape(value) for name, value in found if name != "token"}


def send(browser, path, do, **given):
    return browser.send(path, do=do, **{**form_of(browser, path, do), **given})


@pytest.mark.parametrize(("path", "do"), [(MEMBER, "limits"), (TENANT, "each-limits")])
def test_limits_are_set_and_emptied(browse, known, path, do):
    root = browse("root")
    given = {"limit": "cpu=1, *=2", "max_running": "3", "max_duration_s": "90.5"}
    assert send(root, path, do, **given).status_code == 303
    assert "is changed" in root.told(path)
    found = known(path) if path == MEMBER else known(path)["user_defaults"]
    assert (found["limit"], found["max_running"]) == ({"cpu": 1, "*": 2}, 3)
    assert (found["max_duration_s"], found["max_queued"]) == (90.5, None)
    assert form_of(root, path, do)["max_duration_s"] == "90.5"
    assert send(root, path, do, limit="", max_running="", max_duration_s="").status_code == 303
    found = known(path) if path == MEMBER else known(path)["user_defaults"]
    assert {found["limit"], found["max_running"], found["max_duration_s"]} == {None}


@pytest.mark.parametrize(
    ("path", "prefix"), [(MEMBER, ""), (TENANT, ""), (TENANT, "each-")], ids=str
)
def test_budget_is_set_shown_and_removed(browse, known, path, prefix):
    def budget():
        found = known(path)
        return found["user_defaults"]["budget"] if prefix else found["budget"]

    root = browse("root")
    assert send(root, path, f"{prefix}budget", **BUDGET).status_code == 303
    assert budget() == SET
    shown = {**form_of(root, path, f"{prefix}budget"), "version": ""}
    assert shown == {**BUDGET, "device_hours": "*=20, cpu=10.5", "at": "100=hold, 80=notify"} | {
        "version": ""
    }
    assert prefix or "left of" in root.look(path).text
    assert send(root, path, f"{prefix}no-budget").status_code == 303
    assert budget() is None


def test_setting_limits_of_each_user_keeps_their_budget(browse, known):
    root = browse("root")
    send(root, TENANT, "each-budget", **BUDGET)
    send(root, TENANT, "each-limits", max_queued="5")
    assert known(TENANT)["user_defaults"]["budget"] == SET
    assert known(TENANT)["user_defaults"]["max_queued"] == 5
    shown = root.look(MEMBER).text
    assert 'placeholder="as its tenant says: 5"' in shown
    assert "It is the budget of each user of red" in shown


@pytest.mark.parametrize("path", [MEMBER, TENANT])
def test_hours_are_added_for_this_period_with_a_reason(browse, as_, path):
    root = browse("root")
    assert "Add to this period" not in root.look(path).text
    send(root, path, "budget", **BUDGET)
    given = {"kind": "cpu", "hours": "-2.5", "why": "a late bill"}
    assert root.send(path, do="adjust", **given).status_code == 303
    assert "is changed for this period" in root.told(path)
    api = path.replace("/ui/members", "/v1/users").replace("/ui", "/v1")
    kinds = as_("root").get(f"{api}/budget").json()["kinds"]
    assert [(each["kind"], each["adjusted_hours"]) for each in kinds] == [("*", 0), ("cpu", -2.5)]
    answer = root.send(path, hx=True, do="adjust", **{**given, "kind": "cuda"})
    assert (answer.status_code, 'data-field="kind"' in answer.text) == (422, True)
    answer = root.send(path, hx=True, do="adjust", **{**given, "why": ""})
    assert (answer.status_code, 'data-field="why"' in answer.text) == (422, True)


@pytest.mark.parametrize(
    ("do", "bad", "field"),
    [
        ("limits", {"max_running": "many"}, "max_running"),
        ("limits", {"limit": "cpu"}, "limit"),
        ("limits", {"limit": "CPU=1"}, "limit/CPU"),
        ("limits", {"max_duration_s": "0"}, "max_duration_s"),
        ("budget", {"device_hours": ""}, "budget/device_hours"),
        ("budget", {"device_hours": "cpu=much"}, "device_hours"),
        ("budget", {"device_hours": "cpu=-1"}, "budget/device_hours/cpu"),
        ("budget", {"timezone": "Mars"}, "budget/timezone"),
        ("budget", {"at": "80"}, "at"),
        ("budget", {"at": "80=stop"}, "budget/at/80"),
        ("budget", {"period": "year"}, "period"),
        ("budget", {"carry": "2"}, "budget/carry"),
        ("budget", {"to": "nobody"}, "budget/to/0"),
    ],
)
@pytest.mark.parametrize("path", [MEMBER, TENANT])
def test_wrong_value_is_refused_beside_its_field(browse, known, path, do, bad, field):
    root, before, prefix = browse("root"), known(path), "each-" if path == TENANT else ""
    valid = BUDGET if do == "budget" else {}
    answer = send(root, path, prefix + do, **{**valid, **bad})
    assert answer.status_code == 422, "without script it is a page of its own"
    given = {**form_of(root, path, prefix + do), **valid, **bad}
    answer = root.send(path, hx=True, do=prefix + do, **given)
    assert answer.status_code == 422
    [shown] = set(re.findall(r'data-field="([^"]+)"', answer.text))
    assert shown.removeprefix("user_defaults/").startswith(field)
    assert known(path) == before


def test_form_of_another_version_is_refused(browse):
    root = browse("root")
    stale = form_of(root, MEMBER, "limits")
    send(root, MEMBER, "limits", max_running="3")
    answer = root.send(MEMBER, do="limits", **{**stale, "max_running": "4"})
    assert (answer.status_code, "load its page again" in answer.text) == (412, True)


def test_who_may_change_what(browse, known):
    lead, member = browse("red.tenant_admin"), browse("red.member")
    assert send(lead, MEMBER, "limits", max_running="3").status_code == 303
    assert "Save the budget" not in lead.look(TENANT).text, "nobody bounds their own tenant"
    given = {**BUDGET, "version": str(known(TENANT)["version"])}
    assert lead.send(TENANT, do="budget", **given).status_code == 403
    for path in (MEMBER, TENANT):
        for do in ("budget", "adjust", "no-budget"):
            assert member.send(path, do=do, **given).status_code == 403
    stranger = browse("blue.tenant_admin")
    assert stranger.send(MEMBER, do="limits", **given).status_code == 404
