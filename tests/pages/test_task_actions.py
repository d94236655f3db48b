"""Acting from a page, by keyboard, with script and without."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.browser


def _page(service):
    return f"/ui/requests/{service.tracked.request_id}"


class TestActing:
    def test_by_keyboard_with_script(self, visit, service):
        visit.sign_in("a admin")
        visit.go(_page(service))
        visit.live()
        visit.page.evaluate("window.untouched = true")
        visit.page.get_by_role("link", name="Requests").last.focus()
        visit.page.keyboard.press("Tab")
        expect(visit.page.get_by_role("button", name="Pause")).to_be_focused()
        outline = "getComputedStyle(document.activeElement).outlineWidth"
        assert visit.page.evaluate(outline) == "3px"
        visit.page.keyboard.press("Enter")
        told = visit.page.locator("#told")
        expect(told).to_contain_text("running tasks pause at their next safe point")
        expect(visit.page.locator("#tasks")).to_contain_text("asked to pause")
        visit.page.get_by_role("button", name="Resume").click()
        expect(told).to_contain_text("it is queued again")
        expect(visit.page.get_by_role("button", name="Pause")).to_be_visible()
        assert visit.page.evaluate("window.untouched")

    def test_a_refusal_stands_above_the_page_and_changes_nothing_on_it(self, visit, service):
        visit.sign_in("a admin")
        visit.go(_page(service))
        visit.live()
        visit.page.locator("button[value=hold]").evaluate(
            "button => { button.form.elements.token.value = 'stale'; button.click(); }"
        )
        expect(visit.page.locator("#told .alarm")).to_contain_text("load its page again")
        expect(visit.page.locator("#tasks")).to_be_visible()
        expect(visit.page.get_by_role("button", name="Pause")).to_be_visible()

    def test_without_script_a_cancel_asks_once_more(self, browser, service, visit):
        visit.sign_in("a admin")
        context = browser.new_context(
            java_script_enabled=False, storage_state=visit.page.context.storage_state()
        )
        page = context.new_page()
        page.goto(service.url + f"/ui/requests/{service.waiting[2].request_id}")
        button = page.get_by_role("button", name="Cancel request")
        expect(button).to_be_hidden()
        page.get_by_text("Cancel the request…").click()
        button.click()
        expect(page.get_by_role("status").last).to_contain_text("Cancelling")
        assert page.url.endswith(service.waiting[2].request_id)
        expect(page.get_by_text("Cancel the request…")).to_have_count(0)
        expect(page.locator("#tasks")).to_contain_text("cancelling")
        page.reload()
        expect(page.locator("#told")).to_be_empty()
        context.close()


class TestAdministering:
    def test_a_new_key_is_shown_once(self, visit, service):
        visit.sign_in("a admin")
        visit.page.get_by_role("link", name="Members").click()
        visit.page.get_by_role("link", name="a", exact=True).click()
        visit.page.get_by_label("Name").fill("laptop")
        visit.page.get_by_label("Name").press("Enter")
        expect(visit.page.locator("#told .secret")).to_contain_text("rh_")
        visit.go(f"/ui/members/{service.member}")
        expect(visit.page.locator("#keys")).to_contain_text("laptop")
        expect(visit.page.locator(".secret")).to_have_count(0)

    def test_a_message_is_sent_again_in_place(self, visit, service):
        visit.sign_in("a admin")
        visit.go(f"/ui/webhooks/{service.hook}")
        again = visit.page.get_by_role("button", name="Send again")
        expect(again).to_have_count(2)
        again.first.click()
        expect(visit.page.locator("#told")).to_contain_text("is sent again")
        expect(again).to_have_count(1)
