"""The page with the whole log of a request."""

from __future__ import annotations

import html
import re

import pytest
from sqlalchemy import insert

from app.db.models import LogLine
from app.pages import log_views


@pytest.fixture
def log(submitted, session, monkeypatch):
    """Return the page of a log with 25 lines; there are 10 on a page."""
    monkeypatch.setattr(log_views, "LINES_ON_A_PAGE", 10)
    task = submitted["tasks"][0]["id"]
    rows = [
        {
            "task_id": task,
            "epoch": 1 + n // 20,
            "line": n,
            "stream": "stdout",
            "text": f"line {n}<b>",
        }
        for n in range(25)
    ]
    session.execute(insert(LogLine), rows)
    session.commit()
    return f"/ui/requests/{submitted['id']}/log"


def numbers(page):
    return [int(n) for n in re.findall(r"line (\d+)&lt;b&gt;</span>", page)]


def link(page, words):
    found = re.search(rf'<a href="([^"]*)"[^>]*>{words}</a>', page)
    return html.unescape(found[1]) if found else None


def test_all_lines_are_reached_page_by_page_in_both_directions(browse, log):
    look = browse("red.member").look
    page = look(log).text
    assert numbers(page) == [*range(15, 25)]
    assert link(page, "Later") is None
    assert "start 1</span>" in page
    assert "start 2</span>" in page
    page = look(log + link(page, "Earlier")).text
    assert numbers(page) == [*range(5, 15)]
    page = look(log + link(page, "Earlier")).text
    assert numbers(page) == [*range(5)]
    assert link(page, "Earlier") is None
    page = look(log + link(page, "First")).text
    assert numbers(page) == [*range(10)]
    page = look(log + link(page, "Later")).text
    assert numbers(page) == [*range(10, 20)]
    page = look(log + link(page, "Later")).text
    assert numbers(page) == [*range(20, 25)]
    assert link(page, "Later") is None


def test_lines_with_a_text_are_found_and_lead_to_what_follows_them(browse, log):
    look = browse("red.member").look
    page = look(f"{log}?grep=line+2&times=yes").text
    assert numbers(page) == [2, 20, 21, 22, 23, 24]
    assert len(re.findall(r'<time class="from"', page)) == 6
    page = look(log + link(page, "→")).text
    assert numbers(page)[:3] == [2, 3, 4]
    assert "No line holds" in look(f"{log}?grep=nothing").text


def test_lines_of_one_task_are_shown(browse, log, submitted):
    look = browse("red.member").look
    name = submitted["tasks"][0]["name"]
    assert len(numbers(look(f"{log}?task={name}").text)) == 10
    assert numbers(look(f"{log}?task=another").text) == []


def test_a_stranger_and_wrong_numbers_are_refused(browse, log):
    assert browse("blue.member").look(log).status_code == 404
    for wrong in ("after=-1", f"before={2**63}", "after=x", "grep=" + "x" * 501):
        assert browse("red.member").look(f"{log}?{wrong}").status_code == 422, wrong
