"""axe-core on every page, with all that can be opened open: it finds nothing to complain of."""

from __future__ import annotations

from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe

pytestmark = pytest.mark.browser

WIDE, PHONE = {"width": 1280, "height": 720}, {"width": 360, "height": 740}
#: Each width and each theme, as (name, size of the window, theme).
LOOKS = (
    ("wide", WIDE, "light"),
    ("wide, dark", WIDE, "dark"),
    ("phone", PHONE, "light"),
    ("phone, dark", PHONE, "dark"),
)

# Every rule in one look; in the others, the rules that read colours and widths.
ALL = {"resultTypes": ["violations"]}
SEEN = {**ALL, "runOnly": ["color-contrast", "scrollable-region-focusable"]}

TRIED = ("wide", "phone, dark")  # each width and each theme; all pairs in the long tests
IN_LOOKS = [
    pytest.param([look for look in LOOKS if look[0] in TRIED], id="tried"),
    pytest.param(
        [look for look in LOOKS if look[0] not in TRIED], id="rest", marks=pytest.mark.long
    ),
]

# The page hears of a theme in the next frame, and its colours come in by transitions, of which axe
# would read the middle.
SETTLED = """async () => {
  for (let frame = 0; frame < 2; frame++) await new Promise(requestAnimationFrame);
  const moving = () => document.getAnimations().filter(each => each instanceof CSSTransition);
  while (moving().length) await Promise.allSettled(moving().map(each => each.finished));
}"""
OPEN = "document.querySelectorAll('details').forEach(each => { each.open = true; })"


@pytest.mark.parametrize("looks", IN_LOOKS)
def test_axe_finds_no_fault_on_any_page(visit, looks, service):
    _look(visit, looks[0])
    visit.go("/ui/login")
    found = {"/ui/login": _violations(visit, looks)}
    visit.sign_in("a admin")
    for path in (*service.pages[:-1], *service.admins_pages):
        visit.go(path)
        visit.page.evaluate(OPEN)
        found[path] = _violations(visit, looks)
    visit.sign_in("admin")
    for path in ("/ui/", "/ui/requests", *service.platform_pages):
        visit.go(path)
        visit.page.evaluate(OPEN)
        found[f"{path} of all"] = _violations(visit, looks)
    assert {path: said for path, said in found.items() if said} == {}


@pytest.mark.parametrize("looks", IN_LOOKS)
def test_axe_finds_no_fault_on_the_pages_of_the_api(visit, looks):
    """All that can be opened there in an operation with a body, and where one says who one is."""
    found = {}
    _look(visit, looks[0])
    for path in ("/problems", "/problems/gone"):
        visit.go(path)
        found[path] = _violations(visit, looks)
    visit.go("/docs#/tenants/changeTenant")
    visit.documented()
    page = visit.page
    page.locator("#operations-tenants-changeTenant.is-open .try-out__btn").click()
    page.locator(".btn.execute").wait_for()
    found["an operation"] = _violations(visit, looks, "#operations-tenants-changeTenant")
    page.get_by_role("button", name="Execute").click()
    page.locator(".live-responses-table").first.wait_for()
    found["what it answered"] = _violations(visit, looks)  # and all beside it
    page.get_by_role("button", name="Authorize").first.click()
    page.locator(".modal-ux").wait_for()
    found["who one is"] = _violations(visit, looks, ".modal-ux")
    assert {path: said for path, said in found.items() if said} == {}


def _violations(visit, looks: Any, within: str | None = None) -> list[str]:
    """Return what axe finds in the page in each look; the page was loaded in the first one."""
    found = []
    for look in (*looks[1:], looks[0]):  # so that it is left in the first one
        _look(visit, look)
        rules = ALL if look[0] == "wide" else SEEN
        found += [
            f"{look[0]}: {violation['id']}: {node['html'][:120]}"
            for violation in Axe().run(visit.page, within, rules).response["violations"]
            for node in violation["nodes"]
        ]
    return found


def _look(visit, look: tuple[str, dict[str, int], str]) -> None:
    _, size, theme = look
    visit.page.set_viewport_size(size)
    visit.page.emulate_media(color_scheme=theme)
    visit.page.evaluate(SETTLED)
