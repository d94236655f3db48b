"""Acting from a page, by keyboard, with script and without."""

from __future__ import annotations

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect
from sqlalchemy import func, update

from app.db.models import Request, Task
from app.scheduling import journal

pytestmark = pytest.mark.browser

COMMAND, GRAPH = {"command": ["python", "train.py"]}, {"graph": f"sha256:{'5' * 64}"}


def _page(service):
    return f"/ui/requests/{service.tracked.request_id}"


class TestActing:
    def test_task_is_acted_on_by_keyboard_with_scripts(self, visit, service):
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

    def test_refusal_is_shown_above_the_page_and_changes_nothing_on_it(self, visit, service):
        visit.sign_in("a admin")
        visit.go(_page(service))
        visit.live()
        visit.page.locator("button[value=hold]").evaluate(
            "button => { button.form.elements.token.value = 'stale'; button.click(); }"
        )
        expect(visit.page.locator("#told .alarm")).to_contain_text("load its page again")
        expect(visit.page.locator("#tasks")).to_be_visible()
        expect(visit.page.get_by_role("button", name="Pause")).to_be_visible()

    @pytest.mark.parametrize(
        ("address", "fields", "button", "named"),
        [
            ("/ui/webhooks", {"URL": "http://127.0.0.1/"}, "Register", "public address"),
            ("/ui/secrets", {"Name": "9", "Value": "a long value"}, "Set", "not starting with"),
            ("/ui/members", {"Name": " x"}, "Add", "no spaces"),
        ],
    )
    def test_refusal_stands_beside_its_field_and_keeps_what_was_typed(
        self, visit, service, address, fields, button, named
    ):
        visit.sign_in("a admin")
        visit.go(address)
        visit.live()
        page = visit.page
        page.locator("input[pattern]").evaluate_all(
            "fields => fields.forEach(field => field.removeAttribute('pattern'))"
        )
        for label, typed in fields.items():
            page.get_by_label(label, exact=True).fill(typed)
        page.get_by_role("button", name=button, exact=True).click()
        fault = page.locator("#live .fault")
        expect(fault).to_contain_text(named)
        with service.change() as session:
            journal.tell(session, session.get_one(Task, service.tracked.id), "task.test", "-")
        visit.hear()
        page.evaluate("htmx.trigger('#live', 'changed')")
        expect(fault).to_contain_text(named)
        first = page.get_by_label(next(iter(fields)), exact=True)
        expect(first).to_have_attribute("aria-invalid", "true")
        for label, typed in fields.items():
            expect(page.get_by_label(label, exact=True)).to_have_value(typed)
        first.press("Backspace")
        expect(fault).to_have_count(0)

    def test_refusal_without_scripts_is_a_page_that_stays(self, browser, service, visit):
        visit.sign_in("a admin")
        context = browser.new_context(
            java_script_enabled=False, storage_state=visit.page.context.storage_state()
        )
        page = context.new_page()
        page.goto(service.url + "/ui/webhooks")
        page.get_by_label("URL").fill("http://127.0.0.1/")
        page.get_by_role("button", name="Register").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Invalid request")
        assert page.locator("#live").get_attribute("hx-get") is None
        context.close()

    def test_cancel_without_scripts_asks_for_confirmation(self, browser, service, visit):
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

    def test_ended_request_is_deleted_from_its_page(self, visit, service):
        id = service.waiting[-1].request_id
        with service.change() as session:
            session.execute(update(Task).where(Task.request_id == id).values(state="done"))
            ended = {"state": "done", "ended_at": func.now()}
            session.execute(update(Request).where(Request.id == id).values(**ended))
        visit.sign_in("a admin")
        visit.go(f"/ui/requests/{id}")
        visit.page.get_by_text("Delete the request…").click()
        visit.page.get_by_role("button", name="Delete request").click()
        expect(visit.page.get_by_role("status").last).to_contain_text("gone in some minutes")
        expect(visit.page.locator(".facts").first).to_contain_text("in some minutes")
        expect(visit.page.get_by_text("Delete the request…")).to_have_count(0)


class TestLookingInside:
    def test_page_says_how_to_look_into_a_command_and_why_not_into_a_graph(self, visit, service):
        inside = visit.page.locator("section", has=visit.page.get_by_role("heading", name="Look"))
        id = service.tracked.id
        visit.sign_in("a admin")
        with service.change() as session:
            task = session.get_one(Task, id)
            before, task.descriptor = task.descriptor, {**task.descriptor, "run": GRAPH}
        try:
            visit.go(_page(service))
            expect(inside).to_contain_text("No shell: the task runs a graph; only a command")
            with service.change() as session:
                session.get_one(Task, id).descriptor = {**before, "run": COMMAND}
            visit.go(_page(service))
            given = service.tracked.request_id[-8:]
            expect(inside).to_contain_text(f"roundhouse shell {given}")
            expect(inside).to_contain_text(f"roundhouse forward {given} PORT")
            expect(inside).to_contain_text(f"roundhouse files {given}")
            assert Axe().run(visit.page).response["violations"] == []
        finally:
            with service.change() as session:
                session.get_one(Task, id).descriptor = before


class TestAdministering:
    def test_a_new_key_is_shown_once(self, visit, service):
        visit.sign_in("a admin")
        visit.page.get_by_role("link", name="Members").click()
        visit.page.get_by_role("link", name="a", exact=True).click()
        visit.page.get_by_role("textbox", name="Name").fill("laptop")
        visit.page.get_by_role("textbox", name="Name").press("Enter")
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
