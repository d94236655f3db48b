"""The pages as a person meets them, in a real browser against the real service."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest
from playwright.sync_api import expect
from sqlalchemy import func

from app.db.models import LogLine, Placement, Request, Task
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
    def test_by_keyboard_alone(self, visit, service):
        visit.go("/ui/")
        expect(visit.page).to_have_url(re.compile(r"/ui/login\?next="))
        visit.page.keyboard.type(service.keys["a"])
        visit.page.keyboard.press("Enter")
        visit.page.wait_for_url("**/ui/")
        visit.page.keyboard.press("Tab")
        visit.page.keyboard.press("Enter")  # the first stop leads past the navigation
        assert visit.page.evaluate("document.activeElement.id") == "live"

    def test_a_wrong_key_says_so_and_lets_nobody_in(self, visit):
        visit.go("/ui/login")
        visit.page.get_by_label("API key").fill("rh_nobody")
        visit.page.keyboard.press("Enter")
        expect(visit.page.get_by_role("alert")).to_contain_text("Malformed API key")
        visit.go("/ui/")
        expect(visit.page).to_have_url(re.compile("/ui/login"))

    def test_the_way_back_leads_where_one_wanted_to_go(self, visit, service):
        visit.go("/ui/requests?state=running")
        visit.page.keyboard.type(service.keys["a"])
        visit.page.keyboard.press("Enter")
        visit.page.wait_for_url("**/ui/requests?state=running")

    def test_but_never_to_another_site(self, visit, service):
        visit.go("/ui/login?next=https://elsewhere.invalid/ui/")
        visit.page.keyboard.type(service.keys["a"])
        visit.page.keyboard.press("Enter")
        visit.page.wait_for_url(service.url + "/ui/")

    def test_the_cookie_is_out_of_reach_and_ends_with_signing_out(self, visit, service):
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

    def test_its_queue_is_that_of_the_api(self, visit):
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

    def test_its_usage_is_that_of_the_api_and_of_the_csv_behind_the_link(self, visit):
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

    def test_a_tenant_sees_nothing_of_anothers_task(self, visit, service):
        visit.sign_in("a")
        expect(visit.page.locator("#devices")).to_contain_text("another tenant")
        assert "secret" not in visit.page.content()
        visit.go(f"/ui/requests/{service.foreign.request_id}")
        expect(visit.page.get_by_role("heading", level=1)).to_have_text(NotFound.title)

    def test_a_user_without_a_share_sees_how_things_stand(self, visit):
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
        expect(held.locator(".chip")).to_have_text("paused", timeout=5000)
        expect(visit.page.locator(".events")).to_contain_text("Something was changed.")
        assert visit.page.evaluate("window.untouched")
        # what was opened stays open, and the chart is still drawn
        expect(visit.page.locator("#usage-buckets")).to_be_visible()
        expect(visit.page.locator("#usage-buckets-plot canvas")).to_have_count(1)

    def test_the_log_grows_while_one_reads(self, visit, service):
        visit.sign_in("a")
        visit.go(f"/ui/requests/{service.tracked.request_id}")
        visit.live()
        with service.change() as session:
            line = {"task_id": service.tracked.id, "epoch": 1, "line": 1000, "stream": "stderr"}
            session.add(LogLine(**line, text="a late word"))
            journal.tell(session, session.get_one(Task, service.tracked.id), "task.test", "-")
        expect(visit.page.get_by_role("log")).to_contain_text("a late word", timeout=5000)
        left = "log => log.scrollHeight - log.scrollTop - log.clientHeight"
        assert visit.page.get_by_role("log").evaluate(left) < 8

    def test_who_was_signed_out_elsewhere_is_led_to_the_door(self, visit, service):
        visit.sign_in("a")
        visit.live()
        visit.page.context.clear_cookies()
        with service.change() as session:
            journal.tell(session, session.get_one(Task, service.tracked.id), "task.test", "-")
        # By the stream at once, or by the next of the fetches that come every 10 s.
        expect(visit.page).to_have_url(re.compile(r"/ui/login\?"), timeout=25_000)

    def test_a_stream_of_another_tenants_request_is_not_given(self, visit, service):
        visit.sign_in("a")
        path = f"/ui/stream?request={service.foreign.request_id}"
        assert visit.page.request.get(service.url + path).status == 404


class TestTheApisPage:
    def test_a_problem_leads_to_the_operation_that_it_names(self, visit):
        visit.go("/problems/unsatisfiable")
        visit.page.get_by_role("link", name="GET /v1/devices").click()
        visit.documented()
        operation = visit.page.locator("#operations-devices-listDevices")
        expect(operation).to_have_class(re.compile("is-open"))
        expect(operation).to_be_in_viewport()

    def test_one_says_once_who_one_is_and_examples_run_as_they_stand(self, visit, service):
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


class TestRequestPage:
    def test_it_shows_task_metrics_places_log_and_events(self, visit, service):
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
        box = visit.page.locator("#curve-1-plot .u-over").bounding_box()
        visit.page.mouse.move(box["x"] + 1, box["y"] + box["height"] / 2)
        expect(legend.locator(".u-value").first).to_have_text("0")
        expect(legend.locator(".u-value").last).to_have_text("1")

    def test_all_sections_stand_in_the_order_of_use(self, visit, service):
        visit.sign_in("a")
        visit.go(f"/ui/requests/{service.tracked.request_id}")
        heads = visit.page.locator("main section h2").all_text_contents()
        assert heads == ["Tasks", "Metrics", "Log", "Timeline", "Events"]
        facts = visit.page.locator(".facts").first
        expect(facts).to_contain_text("Device time")
        expect(visit.page.locator("#log-title + p")).to_contain_text(re.compile(r"^2\d lines ·"))

    def test_a_paused_request_says_paused_everywhere_and_its_line_goes_on_to_now(
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

    def test_a_loss_that_is_no_number_is_said(self, visit, service):
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

    def test_its_log_can_be_searched_and_taken_along(self, visit, service):
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

    def test_an_ended_request_says_why_above_its_log(self, visit, service):
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
    def test_it_lists_what_the_api_lists(self, visit):
        visit.sign_in("a")
        visit.page.get_by_role("link", name="Datablocks").click()
        rows = visit.page.locator("#datablocks tbody tr")
        items = visit.api("/v1/datablocks")["items"]
        assert rows.evaluate_all("rows => rows.map(row => row.id)") == [i["id"] for i in items]
        newest = rows.first
        expect(newest.locator("[data-label=Version]")).to_have_text("2")
        expect(newest.locator("[data-bytes]")).to_have_attribute("data-bytes", "4001")
        expect(newest.locator("[data-label=Tensors]")).to_contain_text("t1 float32")
        expect(newest.locator("[data-label=Tensors]")).to_contain_text("2 more")
        expect(newest.locator("[data-label=By]")).to_have_text("a")
        expect(newest.get_by_role("link", name="a request")).to_be_visible()
        expect(rows.nth(1)).to_contain_text("an upload")
        address = newest.get_by_role("link", name="faces").get_attribute("href")
        assert address == "/v1/datablocks/faces@2"
        assert "theirs" not in visit.page.content()

    def test_a_platform_admin_sees_those_of_all(self, visit):
        visit.sign_in("admin")
        visit.go("/ui/datablocks")
        expect(visit.page.locator("#datablocks")).to_contain_text("theirs")
        expect(visit.page.locator("#datablocks tbody tr")).to_have_count(4)


class TestOverview:
    def test_sections_stand_in_the_order_of_use_and_none_scrolls(self, visit):
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

    def test_the_first_ten_lead_to_the_whole_queue(self, visit, service):
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
    def test_on_a_phone_a_queued_task_takes_two_or_three_lines_and_nothing_is_cut(self, visit):
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

    def test_an_end_too_many_leads_to_the_page(self, visit, service):
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

    def test_nothing_comes_from_elsewhere_and_nothing_is_inline(self, visit, service):
        visit.sign_in("admin")
        for path in ("/ui/login", *service.pages, *service.platform_pages):
            answer = visit.page.goto(service.url + path)
            assert "default-src 'self'" in answer.headers["content-security-policy"], path
            assert not re.search(r"<style|\sstyle=|\son\w+=|<script>", answer.text()), path
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
    def test_all_pages_stand_in_one_line_on_a_phone_and_this_one_is_in_sight(self, visit):
        visit.sign_in("admin")
        visit.go("/ui/audit")
        links = visit.page.locator("header nav a")
        tops = links.evaluate_all("links => links.map(link => link.getBoundingClientRect().top)")
        assert len(tops) == 9
        assert len({round(top) for top in tops}) == 1
        expect(links.and_(visit.page.locator("[aria-current]"))).to_be_in_viewport()

    @pytest.mark.parametrize("visit", [{}, DARK, PHONE], indirect=True)
    def test_text_can_be_read(self, visit, service):
        visit.sign_in("a")
        for path in ("/ui/login", *service.pages[:-1]):
            visit.go(path)
            assert visit.page.evaluate(TOO_FAINT) == [], path

    @pytest.mark.parametrize("visit", [DARK], indirect=True)
    def test_the_theme_follows_the_system_until_one_chooses(self, visit):
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

    def test_pages_read_without_scripts(self, browser, service, visit):
        visit.sign_in("a")
        context = browser.new_context(
            java_script_enabled=False, storage_state=visit.page.context.storage_state()
        )
        page = context.new_page()
        page.goto(service.url + "/ui/")
        expect(page.locator("#verdict")).to_contain_text("1 of 2 devices in use by you")
        expect(page.locator("#usage-totals")).to_be_visible()
        context.close()


def _rgb(colour: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", colour)[:3]]
