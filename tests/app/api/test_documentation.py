"""The pages of the documentation under /docs/, and their index /llms.txt."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from app.api import documentation

ROOT = Path(__file__).parents[3]
LINK = re.compile(r"^\* \[([^\]]+)\]\(([^)]+)\)(?:: (\S.*))?$")


@pytest.fixture
def visitor(app):
    """A client without a key."""
    return TestClient(app)


@pytest.fixture
def lines(visitor):
    answer = visitor.get("/llms.txt")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    return answer.text.splitlines()


def test_index_has_the_form_of_llmstxt_org(lines):
    assert lines[0] == "# Roundhouse"
    assert lines[2].startswith("> Runs the torch jobs")
    first = next(at for at, line in enumerate(lines) if line.startswith("## "))
    assert not any(line.startswith("#") for line in lines[1:first])
    for line in filter(None, lines[first:]):
        assert line.startswith("## ") or LINK.match(line), line
    assert [line for line in lines if line.startswith("## ")][-1] == "## Optional"


def test_every_link_of_the_index_answers_here_without_a_key(lines, visitor):
    links = [found for line in lines if (found := LINK.match(line))]
    assert len(links) > 60
    assert len({link[2] for link in links}) == len(links)
    for link in links:
        assert link[2].startswith("/")
        answer = visitor.get(link[2])
        # /readyz also says 503 with its findings
        assert answer.status_code == 200 or link[2] == "/readyz", link[2]
        if link[2].endswith(".md"):
            assert answer.headers["content-type"] == "text/markdown; charset=utf-8"
            assert answer.text.startswith("# ")


def test_index_names_every_page_of_howto_concepts_and_reference(lines):
    named = {found[2] for line in lines if (found := LINK.match(line))}
    pages = {
        f"/docs/{path.relative_to(ROOT / 'docs')}"
        for room in ("concepts", "howto", "reference")
        for path in (ROOT / "docs" / room).glob("*.md")
    }
    assert pages <= named


def test_pages_lead_to_each_other_under_the_same_address(visitor):
    page = visitor.get("/docs/howto/install.md")
    assert "(../reference/settings.md)" in page.text
    assert visitor.get("/docs/reference/settings.md").status_code == 200
    assert visitor.get("/docs/howto/nothing.md").status_code == 404


def test_api_page_still_answers_beside_the_pages(visitor):
    assert "<title>Roundhouse API</title>" in visitor.get("/docs").text


def test_service_without_the_pages_still_has_an_index(tmp_path, monkeypatch):
    monkeypatch.setattr(documentation, "FOLDER", tmp_path / "none")
    app = FastAPI(title="Roundhouse", summary="A queue.", description="Words.")
    documentation.mount(app)
    text = TestClient(app).get("/llms.txt").text
    assert text.startswith("# Roundhouse\n\n> A queue.\n\nWords.\n\n## The service\n\n* [")
    assert "/docs/" not in text


def test_package_has_every_file_of_the_documentation():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packed = {
        (target, path)
        for target, patterns in project["tool"]["setuptools"]["data-files"].items()
        for pattern in patterns
        for path in ROOT.glob(pattern)
        if path.is_file()
    }
    files = [path for path in (ROOT / "docs").rglob("*") if path.is_file()]
    assert packed == {(f"share/roundhouse/{path.parent.relative_to(ROOT)}", path) for path in files}
