"""The pages as a person meets them, in a real browser against the real service."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest
from playwright.sync_api import expect
from sqlalchemy import func, select

from app.db.models import LogLine, Metric, Placement, Request, Task, Tenant
from app.errors import NotFound
from app.pages import charts
from app.scheduling import journal

pytestmark = pytest.mark.browser

PHONE = {"viewport": {"width": 320, "height": 640}}
DARK = {"color_scheme": "dark"}

TOO_FAINT, UNNAMED = (
    (Path(__file__).parent / name).read_text() for name in ("too_faint.js", "unnamed.js")
)


class TestSigningIn:
    def test_sign_in_works_by_keyboard_alone(self, visit):
        visit.go("/ui/")
        expect(visit.page).to_have_url(re.compile(r"/ui/login\?next="))
        visit.type_key("a")
        visit.page.wait_for_url("**/ui/")
        visit.page.keyboard.press("Tab")
        visit.page.keyboard.press("Enter")  # the first stop leads past the navigation
        expect(visit.page.locator("#live")).to_be_focused()

    def test_wrong_key_is_refused_and_said(self, visit):
        visit.go("/ui/login")
        visit.page.get_by_label("API key").fill("rh_nobody")
        visit.page.keyboard.press("Enter")
        expect(visit.page.get_by_role("alert")).to_contain_text("Malformed API key")
        visit.go("/ui/")
        expect(visit.page).to_have_url(re.compile("/ui/login"))

    def test_sign_in_leads_back_to_the_wanted_page(self, visit):
        visit.go("/ui/requests?state=running")
        visit.type_key("a")
        visit.page.wait_for_url("**/ui/requests?state=running")

    def test_sign_in_never_leads_to_another_site(self, visit, service):
        visit.go("/ui/login?next=https://elsewhere.invalid/ui/")
        visit.type_key("a")
        visit.page.wait_for_url(service.url + "/ui/")

    def test_cookie_is_hidden_from_scripts_and_ends_with_signing_out(self, visit, service):
        visit.sign_in("a")
        (cookie,) = visit.page.context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Lax")
        visit.page.get_by_role("button", name="Sign out").click()
        visit.page.wait_for_url("**/ui/login")
        header = {"Cookie": f"{cookie['name']}={cookie['value']}"}
        assert visit.page.request.get(service.url + "/v1/queue", headers=header).status == 401

    def test_a_form_on_another_site_cannot_sign_anyone_in(self, visit, service):
        answer = visit.page.request.post(
            service.url + "/ui/login",
            form={"key": service.keys["a"]},
            headers={"Origin": "https://elsewhere.invalid"},
        )
        assert answer.status == 403


class TestNumbers:
    def test_a_tenant_sees_the_numbers_of_the_api(self, visit):
        visit.sign_in("a")
        told = visit.api("/v1/fair-share")
        (mine,), page = told["tenants"], visit.page
        expect(page.locator("#verdict")).to_have_text(told["verdict"])
        expect(page.locator("#now")).to_contain_text("1 running, 3 queued")
        row = page.locator("#share-table tbody tr")
        kind = mine["kinds"][0]
        assert float(row.locator("[data-fair]").get_attribute("data-fair")) == kind["fair"]
        assert int(row.locator("[data-held]").get_attribute("data-held")) == kind["held"]
        assert int(row.locator("[data-waiting]").get_attribute("data-waiting")) == kind["waiting"]
        said = charts.held(mine["usage_us"])
        expect(page.locator("#share-more [data-usage-us]")).to_contain_text(said)

    def test_queue_of_a_tenant_is_that_of_the_api(self, visit):
        visit.sign_in("a")
        items = visit.api("/v1/queue")["items"]
        rows = visit.page.locator("#queue tbody tr")
        assert rows.evaluate_all("rows => rows.map(row => row.id)") == [
            f"queue-{item['id']}" for item in items
        ]
        expect(rows.first).to_contain_text("2 of 2 cpu devices in use")
        assert [item["place"] for item in items] == [1, 2, 3]
        expect(rows.nth(1).locator("[data-label=Place]")).to_have_text("2")
        expect(rows.first.locator("[data-label=Starts]")).to_have_text("unknown")

    def test_usage_of_a_tenant_is_that_of_the_api_and_of_the_csv(self, visit):
        visit.sign_in("a")
        link = visit.page.get_by_role("link", name="Download CSV").get_attribute("href")
        drawn = visit.page.locator("#usage-totals [data-charged-us]").evaluate_all(
            "cells => cells.map(cell => Number(cell.dataset.chargedUs))"
        )
        items = visit.api(link.replace("format=csv", "format=json"))["items"]
        assert sum(drawn) == sum(item["charged_us"] for item in items) > 0
        csv = visit.page.request.get(visit.service.url + link).text()
        assert len(csv.splitlines()) == len(items) + 1

    def test_a_platform_admin_sees_every_tenant(self, visit):
        visit.sign_in("admin")
        told = visit.api("/v1/fair-share")["tenants"]
        names = visit.page.locator("#tenants-table tbody th").all_text_contents()
        assert names == [tenant["tenant"] for tenant in told] == ["a", "b", "c"]
        expect(visit.page.locator("#devices")).to_contain_text("secret")

    def test_task_of_another_tenant_is_hidden(self, visit, service):
        visit.sign_in("a")
        expect(visit.page.locator("#devices")).to_contain_text("another tenant")
        assert "secret" not in visit.page.locator("main").inner_html()  # the foreign task's name
        visit.go(f"/ui/requests/{service.foreign.request_id}")
        expect(visit.page.get_by_role("heading", level=1)).to_have_text(NotFound.title)

    def test_user_without_a_share_sees_an_overview(self, visit):
        visit.sign_in("root")
        expect(visit.page.locator("#verdict")).to_contain_text("tenants have work")


class TestLive:
    def test_a_change_shows_without_a_reload(self, visit, service):
        visit.sign_in("a")
        visit.live()
        visit.page.evaluate("window.untouched = true")
        visit.page.locator("#usage-more summary").click()
        held = visit.page.locator(f"#queue-{service.waiting[0].id}")
        expect(held).to_contain_text("next1")
        with service.change() as session:
            task = session.get_one(Task, service.waiting[0].id)
            task.hold = "user"
            journal.tell(session, task, "task.test", "Something was changed.")
        visit.hear()
        expect(held.locator(".chip")).to_have_text("paused")
        expect(visit.page.locator(".events")).to_contain_text("Something was changed.")
        assert visit.page.evaluate("window.untouched")
        # what was opened stays open, and the chart is still drawn
        expect(visit.page.locator("#usage-buckets")).to_be_visible()
        expect(visit.page.locator("#usage-buckets-plot canvas")).to_have_count(1)

    def test_log_grows_while_it_is_read(self, visit, service):
        visit.sign_in("a")
        visit.go(f"/ui/requests/{service.tracked.request_id}")
        visit.live()
        with service.change() as session:
            line = {"task_id": service.tracked.id, "epoch": 1, "line": 1000, "stream": "stderr"}
            session.add(LogLine(**line, text="a late word"))
            journal.tell(session, session.get_one(Task, service.tracked.id), "task.test", "-")
        visit.hear()
        expect(visit.page.get_by_role("log")).to_contain_text("a late word")
        left = "log => log.scrollHeight - log.scrollTop - log.clientHeight"
        assert visit.page.get_by_role("log").evaluate(left) < 8

    def test_what_a_reader_does_survives_a_renewal(self, visit, service):
        """An opened confirmation, typed text, the focus, and selected text."""
        visit.sign_in("a admin")
        visit.go(f"/ui/requests/{service.tracked.request_id}")
        visit.live()
        page = visit.page
        page.get_by_text("Cancel the request…").click()
        page.get_by_role("button", name="Cancel request").focus()
        page.locator("#grep").evaluate("field => { field.value = 'step'; }")
        page.locator(".log .line").nth(3).select_text()
        selected = page.evaluate("getSelection().toString()")
        with service.change() as session:
            task = session.get_one(Task, service.tracked.id)
            task.hold = "user"  # the form for Resume appears before the confirmation
            journal.tell(session, task, "task.test", "Something happened meanwhile.")
        visit.hear()
        expect(page.locator(".events")).to_contain_text("Something happened meanwhile.")
        expect(page.get_by_role("button", name="Resume")).to_be_visible()
        expect(page.get_by_role("button", name="Cancel request")).to_be_focused()
        expect(page.locator("#grep")).to_have_value("step")
        assert page.evaluate("getSelection().toString()") == selected
        with service.change() as session:
            session.get_one(Task, service.tracked.id).hold = ""

    def test_reader_signed_out_elsewhere_is_led_to_the_sign_in(self, visit, service):
        visit.sign_in("a")
        visit.live()
        visit.page.context.clear_cookies()
        with service.change() as session:
            journal.tell(session, session.get_one(Task, service.tracked.id), "task.test", "-")
        # By the stream at once, or by the next of the fetches that come every 10 s.
        expect(visit.page).to_have_url(re.compile(r"/ui/login\?"))

    def test_stream_of_another_tenants_request_is_refused(self, visit, service):
        visit.sign_in("a")
        path = f"/ui/stream?request={service.foreign.request_id}"
        assert visit.page.request.get(service.url + path).status == 404


class TestTheApisPage:
    def test_problem_links_to_its_operation(self, visit):
        visit.go("/problems/unsatisfiable")
        visit.page.get_by_role("link", name="GET /v1/devices").click()
        visit.documented()
        operation = visit.page.locator("#operations-devices-listDevices")
        expect(operation).to_have_class(re.compile("is-open"))
        expect(operation).to_be_in_viewport()

    def test_key_is_entered_once_and_examples_run_unchanged(self, visit, service):
        page = visit.page
        visit.go("/docs")
        visit.documented()
        page.get_by_role("button", name="Authorize").first.click()
        page.get_by_role("dialog").get_by_role("textbox").first.fill(service.keys["a"])
        page.get_by_role("dialog").get_by_role("button", name="Apply credentials").first.click()
        page.get_by_role("button", name="Close").first.click()
        visit.go("/docs#/shares/getFairShare")
        page.reload()  # who one is stays in this browser
        visit.documented()
        operation = page.locator("#operations-shares-getFairShare")
        operation.get_by_role("button", name="Try it out").click()
        operation.get_by_role("button", name="Execute").click()
        answered = operation.locator(".live-responses-table .response-col_status").last
        expect(answered).to_contain_text("200")


class TestKeys:
    def test_rows_are_reached_chosen_and_opened_by_keys(self, visit, service):
        visit.sign_in("a")
        visit.go("/ui/requests")
        page = visit.page
        names = page.locator("#requests tbody a").all_inner_texts()
        for key, row in (("j", 0), ("j", 1), ("k", 0), ("k", 0)):
            page.keyboard.press(key)
            assert page.evaluate("document.activeElement.textContent") == names[row]
        page.keyboard.press("x")
        expect(page.locator("#requests tbody input").first).to_be_checked()
        page.keyboard.press("/")
        page.keyboard.type("jk/")
        expect(page.locator("#q")).to_have_value("jk/")
        page.locator("#q").fill("")
        page.locator("#q").blur()
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        expect(page.locator("h1")).to_contain_text(names[0])

    def test_keys_are_listed_and_can_be_switched_off(self, visit, service):
        visit.sign_in("a")
        visit.go("/ui/requests")
        page = visit.page
        page.keyboard.press("?")
        dialog = page.get_by_role("dialog", name="Keys")
        expect(dialog).to_be_visible()
        dialog.get_by_label("Use these keys").uncheck()
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        page.reload()
        page.keyboard.press("j")
        assert page.evaluate("document.activeElement.closest('tbody')") is None
        page.keyboard.press("?")
        expect(dialog).to_be_visible()


class TestRequestPage:
    def test_request_page_shows_task_metrics_devices_log_and_events(self, visit, service):
        visit.sign_in("a")
        visit.page.get_by_role("link", name="Requests").click()
        visit.page.locator("#requests").get_by_role("link", name="request of train").click()
        page = visit.page
        expect(page.locator("#tasks")).to_contain_text("on d0")
        expect(page.locator("#curve-1-plot canvas")).to_have_count(1)
        page.get_by_text("Show loss as table").click()
        expect(page.locator("#curve-1 tbody tr")).to_have_count(20)
        expect(
            page.locator("section", has=page.locator("#stays")).locator(".stays rect")
        ).to_have_count(1)
        expect(page.locator("#spent")).to_contain_text("Running")
        expect(page.locator("#spent [data-label=Running]")).to_contain_text("100 %")
        expect(page.get_by_role("log")).to_contain_text("step 38")

    def test_the_chart_has_every_row_of_the_api(self, visit, service):
        visit.sign_in("a")
        visit.go(f"/ui/requests/{service.tracked.request_id}")
        items = visit.api(f"/v1/tasks/{service.tracked.id}/metrics?limit=200")["items"]
        drawn = visit.page.evaluate(
            "[...plots.values()].map(({ chart }) => [...chart.data].map(each => [...each]))"
        )
        assert drawn[0][0] == [item["step"] for item in items]
        assert drawn[0][1] == [item["values"]["loss"] for item in items]
        legend = visit.page.locator("#curve-1-plot .u-legend")
        expect(legend).to_contain_text("train")
        over = visit.page.locator("#curve-1-plot .u-over")
        over.scroll_into_view_if_needed()
        box = over.bounding_box()
        visit.page.mouse.move(box["x"] + 1, box["y"] + box["height"] / 2)
        expect(legend.locator(".u-value").first).to_have_text("0")
        expect(legend.locator(".u-value").last).to_have_text("1")

    def test_curves_are_drawn_as_the_reader_chose(self, visit, service):
        visit.sign_in("a")
        visit.go(f"/ui/requests/{service.tracked.request_id}")
        page = visit.page
        losses = page.evaluate("[...plots.values()][0].shown.own[0]")
        page.get_by_label("Logarithmic").check()
        page.get_by_label("Smoothing").fill("0.5")
        page.reload()  # the choice stays
        expect(page.get_by_label("Logarithmic")).to_be_checked()
        drawn, scale = page.evaluate(
            "(({ chart }) => [[...chart.data[1]], chart.scales.y.distr])([...plots.values()][0])"
        )
        mean, known, smooth = 0.0, 0.0, []
        for loss in losses:
            mean, known = (mean + loss) / 2, (known + 1) / 2
            smooth.append(mean / known)
        assert drawn == pytest.approx(smooth)
        assert scale == 3

    def test_last_label_of_a_chart_has_room(self, visit, service):
        """Half of the label "2,000,000" stands to the right of its step."""
        last = {"task_id": service.tracked.id, "step": 2_000_000}
        with service.change() as session:
            session.add(Metric(**last, values={"loss": 0.01}))
        visit.sign_in("a")
        visit.go(f"/ui/requests/{service.tracked.request_id}")
        expect(visit.page.locator("#curve-1-plot canvas")).to_have_count(1)
        room = visit.page.evaluate(
            "[...plots.values()].map(({ chart: { width, over } }) =>"
            " width - over.offsetLeft - over.offsetWidth)"
        )
        assert min(room) >= 25
        with service.change() as session:
            session.delete(session.get_one(Metric, tuple(last.values())))

    def test_sections_are_in_the_order_of_use(self, visit, service):
        visit.sign_in("a")
        visit.go(f"/ui/requests/{service.tracked.request_id}")
        heads = visit.page.locator("main section h2").all_text_contents()
        rest = ["Look inside", "Metrics", "Log", "Timeline", "Events"]
        assert heads == ["Tasks", "Who waits for whom", *rest]
        facts = visit.page.locator(".facts").first
        expect(facts).to_contain_text("Without a device")
        expect(visit.page.locator("#log-title + p")).to_contain_text(re.compile(r"^2\d lines ·"))

    def test_peak_of_a_task_that_is_done_is_shown_with_the_next_request(self, visit, service):
        with service.change() as session:
            task = session.get_one(Task, service.tracked.id)
            before = task.state
            task.state, task.peak_device_bytes, task.peak_host_bytes = "done", 2**30, 2**20
        visit.sign_in("a")
        visit.go(f"/ui/requests/{service.tracked.request_id}")
        facts = visit.page.locator(".facts").first
        expect(facts).to_contain_text("1.0 GiB on the device, 1.0 MiB of the host for images")
        expect(facts.locator("div", has_text="Next time request")).to_contain_text("1.1 GiB")
        with service.change() as session:
            session.get_one(Task, service.tracked.id).state = before

    def test_overview_says_what_the_tenant_may_reach(self, visit, service):
        with service.change() as session:
            tenant_id = session.get_one(Task, service.tracked.id).tenant_id
            session.get_one(Tenant, tenant_id).network = ["huggingface.co:443", "*.hf.co:443"]
        visit.sign_in("a")
        visit.go("/ui/")
        told = "Your tasks may reach huggingface.co:443, *.hf.co:443."
        expect(visit.page.locator("#network")).to_have_text(told)
        with service.change() as session:
            session.get_one(Tenant, tenant_id).network = None

    def test_peaks_on_the_host_are_shown_with_the_next_limits(self, visit, service):
        with service.change() as session:
            task = session.get_one(Task, service.tracked.id)
            before = task.state
            task.state, task.peaks = "done", {"cpus": 1900, "memory": 2**30, "processes": 12}
        visit.sign_in("a")
        visit.go(f"/ui/requests/{service.tracked.request_id}")
        facts = visit.page.locator(".facts").first
        expect(facts).to_contain_text("1.9 processors, 1.0 GiB of memory, 12 processes")
        limit = facts.locator("div", has_text="Next time limit")
        expect(limit).to_contain_text("2.5 processors, 1.1 GiB of memory, 16 processes")
        with service.change() as session:
            session.get_one(Task, service.tracked.id).state = before

    def test_use_of_the_network_is_shown(self, visit, service):
        used = {"connections": 1, "refused": 2, "sent_bytes": 2**10, "received_bytes": 2**30}
        with service.change() as session:
            task = session.get_one(Task, service.tracked.id)
            before = task.descriptor
            task.descriptor = {**before, "network": {"allow": ["huggingface.co:443"]}}
            rows = session.scalars(select(Placement).where(Placement.task_id == task.id))
            rows.first().network = used
        visit.sign_in("a")
        visit.go(f"/ui/requests/{service.tracked.request_id}")
        facts = visit.page.locator(".facts").first.locator("div", has_text="Network")
        told = "1 connection, 1.0 KiB sent, 1.0 GiB received, 2 refused"
        expect(facts).to_contain_text(told)
        with service.change() as session:
            session.get_one(Task, service.tracked.id).descriptor = before

    def test_queued_time_of_all_tasks_is_summed_above_them(self, visit, service):
        first, second = service.waiting[1:]
        with service.change() as session:
            tasks = [session.get_one(Task, task.id) for task in (first, second)]
            submitted = [task.submitted_at for task in tasks]
            tasks[1].request_id = first.request_id
            tasks[0].submitted_at = func.now() - timedelta(minutes=20)
            tasks[1].submitted_at = func.now() - timedelta(minutes=10)
        visit.sign_in("a")
        visit.go(f"/ui/requests/{first.request_id}")
        queued = visit.page.locator(".facts").first.locator("div", has_text="Without a device")
        expect(queued).to_have_text(re.compile(r"Without a device, all tasks together\s*30m \d\ds"))
        expect(visit.page.locator("#spent [data-label=Queued]")).to_have_text(
            [re.compile(r"^20m \d\ds 100 %$"), re.compile(r"^10m \d\ds 100 %$")]
        )
        with service.change() as session:
            session.get_one(Task, second.id).request_id = second.request_id
            for task, at in zip((first, second), submitted, strict=True):
                session.get_one(Task, task.id).submitted_at = at

    def test_paused_request_says_paused_everywhere_and_its_line_goes_on_to_now(
        self, visit, service
    ):
        id, back = service.waiting[0].request_id, timedelta(minutes=1)
        with service.change() as session:
            task = session.get_one(Task, service.waiting[0].id)
            task.hold, task.first_started_at = "user", func.now() - 5 * back
            request = session.get_one(Request, id)
            request.state, request.submitted_at = "running", func.now() - 6 * back
            session.add(
                Placement(
                    task_id=task.id, epoch=1, device_id="d0", tenant_id=task.tenant_id,
                    user_id=task.user_id, kind="cpu", cost_milli=1000, incarnation="p",
                    launched_at=func.now() - 5 * back, started_at=func.now() - 5 * back,
                    ended_at=func.now() - 4 * back, end="paused",
                )
            )  # fmt: skip
        visit.sign_in("a")
        visit.go(f"/ui/requests/{id}")
        expect(visit.page.locator("h1 .chip")).to_have_text("paused")
        expect(visit.page.locator("#tasks .chip")).to_have_text("paused")
        assert visit.api(f"/v1/requests/{id}")["phase"] == "paused"
        part = visit.page.locator(".stays rect")
        x, width = (float(part.get_attribute(name).rstrip("%")) for name in ("x", "width"))
        assert (x, width) == (pytest.approx(100 / 6, abs=3), pytest.approx(100 / 6, abs=3))
        expect(visit.page.locator(".axis")).to_contain_text("now")
        for phase in ("paused", "running"):
            visit.go(f"/ui/requests?state={phase}")
            ids = visit.page.locator("#requests tbody tr").evaluate_all(
                "rows => rows.map(r => r.id)"
            )
            assert (id in ids) == (phase == "paused")
        with service.change() as session:
            task = session.get_one(Task, service.waiting[0].id)
            task.hold, task.first_started_at = "", None

    def test_loss_that_is_not_a_number_is_shown(self, visit, service):
        with service.change() as session:
            session.get_one(Task, service.tracked.id).metrics = {"loss": "nan"}
        visit.sign_in("a")
        visit.go(f"/ui/requests/{service.tracked.request_id}")
        expect(visit.page.locator("section .alarm")).to_have_text(
            "train: loss is nan, not a number."
        )

    def test_a_failure_shows_its_traceback(self, visit, service):
        with service.change() as session:
            task = session.get_one(Task, service.waiting[2].id)
            task.state, task.cause, task.message = "failed", "exception", "ValueError: no data"
            task.detail = 'File "train.py", line 12, in <module>'
            session.get_one(Request, task.request_id).state = "failed"
        visit.sign_in("a")
        visit.go(f"/ui/requests/{service.waiting[2].request_id}")
        expect(visit.page.locator(".wrong")).to_contain_text("ValueError: no data")
        first = visit.page.locator("main section").first
        expect(first.locator(".error")).to_have_text("ValueError: no data")
        expect(visit.page.get_by_text("line 12, in <module>")).to_be_visible()

    def test_log_can_be_searched_and_downloaded(self, visit, service):
        visit.sign_in("a")
        visit.go(f"/ui/requests/{service.tracked.request_id}")
        log = visit.page.get_by_role("log")
        visit.page.get_by_label("Filter log").fill("step 3")
        visit.page.get_by_role("button", name="Filter").click()
        expect(log.locator(".line")).to_have_count(5)  # 30, 32, 34, 36, 38
        expect(visit.page.get_by_label("Filter log")).to_have_value("step 3")
        visit.live()
        with service.change() as session:
            line = {"task_id": service.tracked.id, "epoch": 1, "line": 1001, "stream": "stdout"}
            session.add(LogLine(**line, text="step 3000"))
            journal.tell(session, session.get_one(Task, service.tracked.id), "task.test", "-")
        expect(log.locator(".line")).to_have_count(6)
        with visit.page.expect_download() as downloading:
            visit.page.get_by_role("link", name="Download full log").click()
        lines = downloading.value.path().read_text().splitlines()
        assert [line.split()[1] for line in lines] == ["30", "32", "34", "36", "38", "3000"]
        visit.page.get_by_label("Filter log").fill("nowhere")
        visit.page.keyboard.press("Enter")
        expect(visit.page.get_by_text("No line holds “nowhere”.")).to_be_visible()

    def test_ended_request_says_why_above_its_log(self, visit, service):
        with service.change() as session:
            task = session.get_one(Task, service.waiting[1].id)
            task.state, task.cause, task.message = "failed", "exception", "ValueError: no data"
            request = session.get_one(Request, task.request_id)
            request.state, request.ended_at = "failed", func.now()
        visit.sign_in("a")
        visit.go(f"/ui/requests/{service.waiting[1].request_id}")
        log = visit.page.get_by_role("region", name="Log")
        expect(log.locator(".alarm")).to_have_text("next2 failed: ValueError: no data")
        expect(log).to_contain_text("No output.")

    def test_many_turns_are_one_line_that_opens(self, visit, service):
        with service.change() as session:
            task = session.get_one(Task, service.waiting[0].id)
            for _ in range(3):
                for what in ("launched", "started", "pausing", "paused"):
                    journal.tell(session, task, f"task.{what}", f"It was {what}.")
        visit.sign_in("a")
        visit.go(f"/ui/requests/{service.waiting[0].request_id}")
        happened = visit.page.get_by_role("region", name="Events")
        expect(happened.get_by_text("It was paused.").first).to_be_hidden()
        happened.get_by_text("3 turns: paused and resumed").click()
        expect(happened.get_by_text("It was paused.")).to_have_count(3)
        expect(happened.get_by_text("It was paused.").first).to_be_visible()
        expect(happened.locator(".when time").first).to_have_attribute("title", re.compile("UTC"))


class TestDatablocksPage:
    def test_datablocks_page_lists_what_the_api_lists(self, visit):
        visit.sign_in("a")
        visit.page.get_by_role("link", name="Datablocks").click()
        rows = visit.page.locator("#datablocks tbody tr")
        items = visit.api("/v1/datablocks")["items"]
        assert rows.evaluate_all("rows => rows.map(row => row.id)") == [i["id"] for i in items]
        newest = rows.first
        expect(newest.locator("[data-label=Version]")).to_have_text("2")
        expect(newest.locator("[data-bytes]")).to_have_attribute("data-bytes", "4001")
        expect(newest.locator("[data-label=Content]")).to_contain_text("t1 float32")
        expect(newest.locator("[data-label=Content]")).to_contain_text("2 more")
        expect(newest.locator("[data-label=By]")).to_have_text("a")
        expect(newest.get_by_role("link", name="a request")).to_be_visible()
        expect(rows.nth(1)).to_contain_text("an upload")
        address = newest.get_by_role("link", name="faces").get_attribute("href")
        assert address == "/v1/datablocks/faces@2"
        assert "theirs" not in visit.page.content()

    def test_platform_admin_sees_the_datablocks_of_all(self, visit):
        visit.sign_in("admin")
        visit.go("/ui/datablocks")
        expect(visit.page.locator("#datablocks")).to_contain_text("theirs")
        expect(visit.page.locator("#datablocks tbody tr")).to_have_count(5)

    def test_folders_and_mounts_are_shown_to_their_tenant(self, visit):
        visit.sign_in("a")
        visit.go("/ui/datablocks")
        folder = visit.page.locator("#datablocks tbody tr").filter(has_text="corpus")
        expect(folder.locator("[data-label=Content]")).to_have_text("1,200 files")
        expect(folder.locator("[data-bytes]")).to_have_attribute("data-bytes", "5000")
        rows = visit.page.locator("#mounts tbody tr")
        expect(rows).to_have_count(1)
        expect(rows.first).to_contain_text("pictures")
        images = visit.page.locator("#images tbody tr")
        expect(images).to_have_count(1)
        expect(images.first).to_contain_text("debian")
        assert "hidden" not in visit.page.locator("main").inner_text()


class TestPackagesPage:
    def test_packages_page_lists_what_the_api_lists(self, visit):
        visit.sign_in("a")
        visit.page.get_by_role("link", name="Packages").click()
        rows = visit.page.locator("#environments tbody tr")
        items = visit.api("/v1/environments")["items"]
        assert rows.evaluate_all("rows => rows.map(row => row.id)") == [i["id"] for i in items]
        failed, locked = rows.first, rows.nth(1)
        expect(failed.locator("[data-label=State]")).to_have_text("failed: castles was not found")
        expect(locked.locator("[data-label=Packages]")).to_contain_text("2 more")
        expect(locked.locator("[data-label='Built on']")).to_contain_text("4.0 KiB in 1.5 s")
        assert "theirs" not in visit.page.content()


class TestOverview:
    def test_sections_of_the_overview_are_in_order_of_use_and_none_scrolls(self, visit):
        visit.page.set_viewport_size({"width": 1440, "height": 900})
        visit.sign_in("a")
        heads = visit.page.locator("main section h2").all_text_contents()
        assert heads == ["Running", "Share", "Queue", "Devices in use, by user", "Events"]
        scrolls = """[...document.querySelectorAll('main *')].filter(each => {
            const box = each.getBoundingClientRect();
            return box.height && box.top < 900 && each.scrollHeight > each.clientHeight + 1
                && /auto|scroll/.test(getComputedStyle(each).overflowY);
        }).map(each => each.outerHTML.slice(0, 80))"""
        assert visit.page.evaluate(scrolls) == []

    def test_a_row_of_the_queue_is_one_line(self, visit):
        visit.page.set_viewport_size({"width": 1440, "height": 900})
        visit.sign_in("a")
        heights = visit.page.locator("#queue tbody tr").evaluate_all(
            "rows => rows.map(row => row.getBoundingClientRect().height)"
        )
        assert max(heights) < 40

    def test_first_ten_tasks_link_to_the_whole_queue(self, visit, service):
        with service.change() as session:
            model = service.waiting[0]
            owner = {"tenant_id": model.tenant_id, "user_id": model.user_id}
            for n in range(12):
                request = Request(id=f"req_more_{n}", name=f"more{n}", **owner)
                session.add(request)
                session.flush()
                shared = {"island": "isle", "ordinal": 0, "type": "train", "kind": "cpu"}
                session.add(
                    Task(
                        id=f"tsk_more_{n}", request_id=request.id, name="train", **shared,
                        state="blocked", **owner,
                    )
                )  # fmt: skip
        visit.sign_in("a")
        expect(visit.page.locator("#queue tbody tr")).to_have_count(10)
        visit.page.get_by_role("link", name=re.compile(r"^all \d+$")).click()
        expect(visit.page).to_have_url(service.url + "/ui/queue")
        whole = visit.page.locator("#queue tbody tr")
        assert whole.count() > 10
        places = visit.page.locator("#queue [data-label=Place]").all_text_contents()
        numbers = [int(place) for place in places if place.strip().isdecimal()]
        assert numbers == sorted(numbers)
        with service.change() as session:
            for n in range(12):
                session.delete(session.get_one(Task, f"tsk_more_{n}"))
                session.flush()
                session.delete(session.get_one(Request, f"req_more_{n}"))

    @pytest.mark.parametrize("visit", [PHONE], indirect=True)
    def test_queued_task_on_a_phone_takes_two_or_three_lines_and_is_not_cut(self, visit):
        visit.sign_in("a")
        rows = visit.page.locator("#queue tbody tr")
        heights = rows.evaluate_all("rows => rows.map(row => row.getBoundingClientRect().height)")
        assert max(heights) < 110
        cut = "cells => cells.filter(cell => cell.scrollWidth > cell.clientWidth + 1).length"
        assert rows.locator("td").evaluate_all(cut) == 0


class TestEverywhere:
    @pytest.mark.parametrize("path", ["/ui/nowhere", "/ui/requests/a/b"])
    def test_an_unknown_address_is_a_page_that_says_so(self, visit, service, path):
        visit.sign_in("a")
        answer = visit.page.goto(service.url + path)
        assert (answer.status, answer.headers["content-type"]) == (404, "text/html; charset=utf-8")
        expect(visit.page.get_by_role("heading", level=1)).to_have_text(NotFound.title)
        expect(visit.page.get_by_role("navigation", name="Pages")).to_be_visible()

    def test_address_with_a_slash_too_many_leads_to_the_page(self, visit, service):
        visit.sign_in("a")
        visit.go("/ui/requests/")
        expect(visit.page).to_have_url(service.url + "/ui/requests")

    @pytest.mark.parametrize("visit", [PHONE], indirect=True)
    def test_only_the_first_reason_of_a_row_is_open(self, visit, service):
        with service.change() as session:
            session.get_one(Task, service.waiting[0].id).hold = "user"
        visit.sign_in("a")
        row = visit.page.locator(f"#queue-{service.waiting[0].id}")
        expect(row.locator("summary")).to_contain_text("Paused by a user.")
        codes = row.locator(".tag")
        expect(codes).to_have_count(3)
        expect(codes.first).to_be_hidden()
        row.get_by_text("+2 more reasons").click()
        expect(codes.last).to_be_visible()
        expect(codes.first).to_have_text("HELD_BY_USER")

    def test_pages_load_nothing_from_other_sites_and_have_no_inline_code(self, visit, service):
        visit.sign_in("admin")
        for path in ("/ui/login", *service.pages, *service.platform_pages):
            answer = visit.page.goto(service.url + path)
            assert "default-src 'self'" in answer.headers["content-security-policy"], path
            assert not re.search(r"<style|\sstyle=|\son\w+=|<script>", answer.text()), path
            if path == "/docs":
                visit.documented()
            visit.page.wait_for_timeout(300)  # let late requests happen
        elsewhere = [url for url in visit.asked if not url.startswith((service.url, "data:"))]
        assert elsewhere == []
        # the one missing request answers 404, and Chromium says so
        assert [said for said in visit.complaints if "404" not in said] == []

    @pytest.mark.parametrize("who", ["a", "admin"])
    @pytest.mark.parametrize("visit", [PHONE], indirect=True)
    def test_a_phone_never_scrolls_sideways(self, visit, service, who):
        visit.sign_in(who)
        for path in ("/ui/login", *service.pages[:-1], *service.platform_pages):
            visit.go(path)
            assert visit.page.evaluate("document.documentElement.scrollWidth") <= 320, path

    @pytest.mark.parametrize("visit", [PHONE], indirect=True)
    def test_long_names_on_a_phone_leave_room_for_bars_and_widen_no_page(self, visit, service):
        long = "a_long_name_of_a_run_with_everything_in_it_lr_0.0003_seed_1234567"
        with service.change() as session:
            task = session.get_one(Task, service.tracked.id)
            name, task.name = task.name, long
        visit.sign_in("a")
        for path in ("/ui/", "/ui/queue", f"/ui/requests/{service.tracked.request_id}"):
            visit.go(path)
            assert visit.page.evaluate("document.documentElement.scrollWidth") <= 320, path
        widths = "bars => bars.map(bar => bar.getBoundingClientRect().width)"
        assert min(visit.page.locator(".stays svg").evaluate_all(widths)) > 200
        with service.change() as session:
            session.get_one(Task, service.tracked.id).name = name

    @pytest.mark.parametrize("visit", [PHONE], indirect=True)
    def test_navigation_on_a_phone_is_one_line_with_this_page_in_sight(self, visit):
        visit.sign_in("admin")
        visit.go("/ui/audit")
        links = visit.page.locator("header nav a")
        tops = links.evaluate_all("links => links.map(link => link.getBoundingClientRect().top)")
        assert len(tops) == 13
        assert len({round(top) for top in tops}) == 1
        expect(links.and_(visit.page.locator("[aria-current]"))).to_be_in_viewport()

    @pytest.mark.parametrize("visit", [{}, DARK, PHONE], indirect=True)
    def test_text_has_enough_contrast(self, visit, service):
        visit.sign_in("a")
        for path in ("/ui/login", *service.pages[:-1]):
            visit.go(path)
            assert visit.page.evaluate(TOO_FAINT) == [], path

    @pytest.mark.parametrize("visit", [DARK], indirect=True)
    def test_theme_follows_the_system_until_the_reader_chooses(self, visit):
        visit.sign_in("a")
        colour = "getComputedStyle(document.body).backgroundColor"
        dark = visit.page.evaluate(colour)
        visit.page.get_by_role("button", name="Switch between light and dark").click()
        light = visit.page.evaluate(colour)
        assert sum(_rgb(light)) - sum(_rgb(dark)) > 400
        visit.page.reload()
        assert visit.page.evaluate(colour) == light

    def test_every_chart_has_its_table_and_every_control_a_name(self, visit, service):
        visit.sign_in("a admin")
        for path in (*service.pages[:-1], *service.admins_pages):
            visit.go(path)
            assert visit.page.evaluate(UNNAMED) == [], path

    def test_pages_are_readable_without_scripts(self, browser, service, visit):
        visit.sign_in("a")
        context = browser.new_context(
            java_script_enabled=False, storage_state=visit.page.context.storage_state()
        )
        page = context.new_page()
        page.goto(service.url + "/ui/")
        expect(page.locator("#verdict")).to_contain_text("1 of 2 devices in use by you")
        expect(page.locator("#usage-totals")).to_be_visible()
        page.goto(f"{service.url}/ui/requests/{service.tracked.request_id}")
        expect(page.locator("#curve-tools")).to_be_hidden()
        context.close()


def _rgb(colour: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", colour)[:3]]
