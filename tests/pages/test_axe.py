"""axe-core on every page, with all that can be opened open: it finds nothing to complain of."""

from __future__ import annotations

from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe

pytestmark = pytest.mark.browser

PHONE = {"viewport": {"width": 360, "height": 740}}
DARK = {"color_scheme": "dark"}
LOOKS = {"wide": {}, "wide, dark": DARK, "phone": PHONE, "phone, dark": {**PHONE, **DARK}}

# Every rule in one look; in the others, the rules that read colours and widths.
ALL = {"resultTypes": ["violations"]}
SEEN = ["color-contrast", "scrollable-region-focusable"]
RULES = {name: ALL if name == "wide" else {**ALL, "runOnly": SEEN} for name in LOOKS}

TRIED = ("wide", "phone, dark")  # each width and each theme; all pairs in the long tests
IN_LOOKS = [
    pytest.param(look, RULES[name], id=name, marks=() if name in TRIED else pytest.mark.long)
    for name, look in LOOKS.items()
]

OPEN = "document.querySelectorAll('details').forEach(each => { each.open = true; })"


@pytest.mark.parametrize(("visit", "rules"), IN_LOOKS, indirect=["visit"])
def test_axe_finds_no_fault_on_any_page(visit, rules, service):
    visit.go("/ui/login")
    found = {"/ui/login": _violations(visit, rules)}
    visit.sign_in("a admin")
    for path in (*service.pages[:-1], *service.admins_pages):
        visit.go(path)
        visit.page.evaluate(OPEN)
        found[path] = _violations(visit, rules)
    visit.sign_in("admin")
    for path in ("/ui/", "/ui/requests", *service.platform_pages):
        visit.go(path)
        visit.page.evaluate(OPEN)
        found[f"{path} of all"] = _violations(visit, rules)
    assert {path: said for path, said in found.items() if said} == {}


@pytest.mark.parametrize(("visit", "rules"), IN_LOOKS, indirect=["visit"])
def test_axe_finds_no_fault_on_the_pages_of_the_api(visit, rules):
    """All that can be opened there in an operation with a body, and where one says who one is."""
    found = {}
    for path in ("/problems", "/problems/gone"):
        visit.go(path)
        found[path] = _violations(visit, rules)
    visit.go("/docs#/tenants/changeTenant")
    visit.documented()
    page = visit.page
    page.locator("#operations-tenants-changeTenant.is-open .try-out__btn").click()
    page.locator(".btn.execute").wait_for()
    found["an operation"] = _violations(visit, rules, "#operations-tenants-changeTenant")
    page.get_by_role("button", name="Execute").click()
    page.locator(".live-responses-table").first.wait_for()
    found["what it answered"] = _violations(visit, rules)  # and all beside it
    page.get_by_role("button", name="Authorize").first.click()
    page.locator(".modal-ux").wait_for()
    found["who one is"] = _violations(visit, rules, ".modal-ux")
    assert {path: said for path, said in found.items() if said} == {}


def _violations(visit, rules: dict[str, Any], within: str | None = None) -> list[str]:
    return [
        f"{violation['id']}: {node['html'][:120]}"
        for violation in Axe().run(visit.page, within, rules).response["violations"]
        for node in violation["nodes"]
    ]
