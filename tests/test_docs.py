"""What the docs say about the code, where a program can check it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from app.cli import main
from app.core.model import dependencies, descriptor, lifecycle
from app.settings import Settings

ROOT = Path(__file__).parent.parent
DOCS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
ARCHITECTURE = (ROOT / "docs" / "internals" / "architecture.md").read_text()
SETTINGS = (ROOT / "docs" / "reference" / "settings.md").read_text()
README = (ROOT / "README.md").read_text()
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
JOBS = (ROOT / "docs" / "reference" / "descriptor.md").read_text()
SESSION = re.findall(r"^roundhouse (.*?)(?: +#.*)?$", README + TUTORIAL, re.MULTILINE)


def test_the_life_of_a_task_is_the_table_of_the_code() -> None:
    assert lifecycle.table() in ARCHITECTURE


def test_the_map_names_every_room_and_nothing_else() -> None:
    rows = re.findall(r"^\| `([a-z/]+)` \|", ARCHITECTURE, re.MULTILINE)
    rooms = {
        str(path.parent.relative_to(ROOT))
        for folder in ("app", "workers")
        for path in (ROOT / folder).rglob("*.py")
        if path.stem != "__init__"
    }
    assert len(rows) == len(set(rows))
    assert set(rows) == rooms


def test_every_setting_is_explained_and_no_other() -> None:
    described = set(re.findall(r"`((?:ROUNDHOUSE_[A-Z_]+|DATABASE_URL|REDIS_URL))`", SETTINGS))
    fields = Settings.model_fields.items()
    known = {str(field.validation_alias or f"ROUNDHOUSE_{name.upper()}") for name, field in fields}
    assert described - {"ROUNDHOUSE_URL", "ROUNDHOUSE_KEY", "ROUNDHOUSE_AS"} == known


def test_the_request_of_the_docs_is_one_that_could_run() -> None:
    [text] = re.findall(r"```yaml\n(.*?)```", JOBS, re.DOTALL)
    body = yaml.safe_load(text)
    body["bundle"] = "sha256:" + "0" * 64  # what the command makes of the folder
    body["tasks"][1]["devices"]["memory_bytes"] = 1e9  # as YAML 1.2 and the command read it
    found = descriptor.parse(body)
    assert not dependencies.check(found)
    offers = {"cpu": dependencies.Offer((dependencies.Alike("local", "local", 4 * 2**30, 2),))}
    assert not dependencies.unsatisfiable(found, offers)


@pytest.mark.parametrize("line", dict.fromkeys(SESSION))
def test_the_first_session_uses_verbs_and_options_that_exist(line: str) -> None:
    words = line.partition(" -- ")[0].split()  # behind that comes a command's own
    verb = next(word for word in words if word in dict.fromkeys(_verbs()))
    helped = CliRunner().invoke(main.app, [verb, "--help"], env={"COLUMNS": "200"})
    everything = helped.stdout + CliRunner().invoke(main.app, ["--help"]).stdout
    for option in (word for word in words if word.startswith("-")):
        assert re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", everything), option


def _verbs() -> list[str]:
    verbs = [c.name or c.callback.__name__ for c in main.app.registered_commands if c.callback]
    return [*verbs, *(str(group.name) for group in main.app.registered_groups)]


PROMISED = "up submit ps show logs why cancel pause resume usage devices"


def test_the_first_session_shows_every_verb_that_is_promised() -> None:
    for verb in PROMISED.split():
        assert verb in _verbs()
        assert re.search(rf"^(roundhouse .*|make ){verb}\b", TUTORIAL, re.MULTILINE), verb


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_to_files_and_headings(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", _prose(page)):
        if target.startswith("https://"):
            continue
        found = page.parent / target if target else page
        assert found.exists(), target
        assert ROOT in found.resolve().parents, target
        if anchor:
            assert anchor in _anchors(found), f"{target}#{anchor}"


def _prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_benchmark_has_its_line() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    programs = {p.stem for p in (ROOT / "benchmarks").glob("*.py") if p.stem != "__init__"}
    assert set(re.findall(r"python -m benchmarks\.(\w+)`", text)) == programs


def test_the_rules_that_are_cited_are_described() -> None:
    cited = {
        rule
        for path in (ROOT / "app").rglob("*.py")
        for rule in re.findall(r"\b[Rr]ules? (F\d+)", path.read_text())
    }
    assert cited
    assert all(f"**{rule} " in ARCHITECTURE for rule in cited)


def test_the_command_is_installed_under_the_name_that_the_docs_use() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"roundhouse": "app.cli.main:main"}
