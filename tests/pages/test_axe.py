"""axe-core on every page, with all that can be opened open: it finds nothing to complain of."""

from __future__ import annotations

import pytest
from axe_playwright_python.sync_playwright import Axe

pytestmark = pytest.mark.browser

PHONE = {"viewport": {"width": 360, "height": 740}}
DARK = {"color_scheme": "dark"}
LOOKS = {"wide": {}, "wide, dark": DARK, "phone": PHONE, "phone, dark": {**PHONE, **DARK}}

TRIED = ("wide", "phone, dark")  # each width and each theme; all pairs in the long tests

OPEN = "document.querySelectorAll('details').forEach(each => { each.open = true; })"


@pytest.mark.parametrize(
    "visit",
    [
        pytest.param(look, id=name, marks=() if name in TRIED else pytest.mark.long)
        for name, look in LOOKS.items()
    ],
    indirect=True,
)
def test_axe_finds_no_fault_on_any_page(visit, service):
    visit.go("/ui/login")
    found = {"/ui/login": _violations(visit)}
    visit.sign_in("a admin")
    for path in (*service.pages[:-1], *service.admins_pages):
        visit.go(path)
        visit.page.evaluate(OPEN)
        found[path] = _violations(visit)
    visit.sign_in("admin")
    for path in ("/ui/", "/ui/requests", *service.platform_pages):
        visit.go(path)
        visit.page.evaluate(OPEN)
        found[f"{path} of all"] = _violations(visit)
    assert {path: said for path, said in found.items() if said} == {}


@pytest.mark.parametrize("visit", [LOOKS["wide"], LOOKS["phone, dark"]], indirect=True)
def test_axe_finds_no_fault_on_the_pages_of_the_api(visit):
    """All that can be opened there in an operation with a body, and where one says who one is."""
    found = {}
    for path in ("/problems", "/problems/gone"):
        visit.go(path)
        found[path] = _violations(visit)
    visit.go("/docs#/tenants/changeTenant")
    visit.documented()
    page = visit.page
    page.locator("#operations-tenants-changeTenant.is-open .try-out__btn").click()
    page.locator(".btn.execute").wait_for()
    found["an operation"] = _violations(visit)
    page.get_by_role("button", name="Execute").click()
    page.locator(".live-responses-table").first.wait_for()
    found["what it answered"] = _violations(visit)
    page.get_by_role("button", name="Authorize").first.click()
    page.locator(".modal-ux").wait_for()
    found["who one is"] = _violations(visit)
    assert {path: said for path, said in found.items() if said} == {}


def _violations(visit) -> list[str]:
    return [
        f"{violation['id']}: {node['html'][:120]}"
        for violation in Axe().run(visit.page).response["violations"]
        for node in violation["nodes"]
    ]
