"""What the docs say about the code, where a program can check it."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml

from app.api.problems import MEANINGS
from app.cli import main
from app.core.device import stay_state
from app.core.model import descriptor, lifecycle
from app.core.model.device_choice import DeviceTraits
from app.core.model.graphs import dependencies
from app.local import reference_pages
from app.settings import Settings
from tests import command_line, missing_layers

ROOT = Path(__file__).parent.parent
DOCS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
ARCHITECTURE = (ROOT / "docs" / "internals" / "architecture.md").read_text()
SETTINGS = (ROOT / "docs" / "reference" / "settings.md").read_text()
STATES = (ROOT / "docs" / "reference" / "states.md").read_text()
METRICS = (ROOT / "docs" / "reference" / "metrics.md").read_text()
INDEX = ROOT / "docs" / "README.md"
README = (ROOT / "README.md").read_text()
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
JOBS = (ROOT / "docs" / "reference" / "descriptor.md").read_text()
SESSION = re.findall(r"^roundhouse (.*?)(?: +#.*)?$", README + TUTORIAL, re.MULTILINE)


def test_table_of_task_states_is_that_of_the_code() -> None:
    assert lifecycle.table() in STATES


@pytest.mark.parametrize("name", reference_pages.PAGES)
def test_generated_page_is_up_to_date(name: str) -> None:
    written = (ROOT / "docs" / "reference" / name).read_text()
    assert written == reference_pages.PAGES[name](), "run python -m app.local.reference_pages"


def test_every_page_is_reachable_from_the_index() -> None:
    reached, open_ = {INDEX}, [INDEX]
    while open_:
        page = open_.pop()
        new = {found for found in _pages_linked_from(page) if found not in reached}
        reached |= new
        open_ += new
    assert set(DOCS) <= reached


def _pages_linked_from(page: Path) -> set[Path]:
    targets = re.findall(r"\]\(([^)#]*\.md)(?:#[^)]*)?\)", _prose(page))
    return {(page.parent / target).resolve() for target in targets if "://" not in target}


def test_table_of_stay_states_is_that_of_the_code() -> None:
    assert stay_state.stay_table() in STATES


def test_map_names_every_room_and_nothing_else() -> None:
    [table] = re.findall(r"^\| room \|.*?\n\n", ARCHITECTURE, re.DOTALL | re.MULTILINE)
    first = "\n".join(line.split("|")[1] for line in table.split("\n") if line)
    rows = re.findall(r"`([a-z/]+)`", first)
    rooms = {
        str(path.parent.relative_to(ROOT))
        for folder in ("app", "workers")
        for path in (ROOT / folder).rglob("*.py")
        if path.stem != "__init__"
    }
    assert len(rows) == len(set(rows))
    assert set(rows) == rooms


#: Variables that no setting of the service stands for: of the command, of a command's task.
OF_THE_ENVIRONMENT = {
    missing_layers.SETTING,
    *("ROUNDHOUSE_URL", "ROUNDHOUSE_KEY", "ROUNDHOUSE_AS", "ROUNDHOUSE_SECRETS"),
    *("ROUNDHOUSE_TASK", "ROUNDHOUSE_PARAMS", "ROUNDHOUSE_INPUTS", "ROUNDHOUSE_METRICS"),
    *("ROUNDHOUSE_ARRAY_INDEX", "ROUNDHOUSE_NOTICE", "ROUNDHOUSE_RESTARTS", "ROUNDHOUSE_TRACES"),
}


def test_every_setting_is_explained_and_no_other() -> None:
    described = set(re.findall(r"`((?:ROUNDHOUSE_[A-Z_]+|DATABASE_URL|REDIS_URL))`", SETTINGS))
    assert described - OF_THE_ENVIRONMENT == _settings()


def test_every_verb_that_a_page_names_exists() -> None:
    known = {tuple(each.split()) for each in _verb_names()}
    for page in DOCS:
        for line in re.findall(
            r"(?<![\w/.`-])roundhouse ((?:--as \S+ )?[a-z][a-z-]*(?: [a-z-]+)?)",
            "\n".join(_code(page)),
        ):
            words = line.split()
            words = words[2:] if words[0] == "--as" else words
            assert tuple(words) in known or tuple(words[:1]) in known, f"{page.name}: {line}"


def test_every_verb_has_its_entry_in_the_reference() -> None:
    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    assert set(
        re.findall(r"^### `roundhouse ([a-z -]+?)(?: [A-Z\[].*)?`$", page, re.MULTILINE)
    ) == set(_verb_names())


def _verb_names() -> list[str]:
    """Return every verb, those of groups with the name of their group."""
    groups = main.app.registered_groups
    inner = [
        f"{group.name} {command.name or command.callback.__name__}"
        for group in groups
        if group.typer_instance
        for command in group.typer_instance.registered_commands
        if command.callback
    ]
    outer = [c.name or c.callback.__name__ for c in main.app.registered_commands if c.callback]
    return [*outer, *inner]


def _code(page: Path) -> list[str]:
    """Return the code of a page: its blocks and what stands between backquotes."""
    text = page.read_text()
    blocks = re.findall(r"^```.*?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [*blocks, *re.findall(r"`([^`\n]+)`", _prose(page))]


def test_every_problem_type_has_its_row_and_every_named_one_exists() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    assert set(re.findall(r"^\| `([a-z-]+)` \| \d{3} ", page, re.MULTILINE)) == set(MEANINGS)
    for each in DOCS:
        for named in re.findall(r"/problems/([a-z][a-z-]*)", each.read_text()):
            assert named in MEANINGS, f"{each.name}: {named}"


def test_every_metric_that_a_page_names_is_explained() -> None:
    """`tests/app/insight/test_metrics.py` compares the explained ones with a real answer."""
    explained = {f"roundhouse_{name}" for name in re.findall(r"`([a-z_]+)`", METRICS)}
    for page in DOCS:
        found = re.findall(r"\broundhouse_[a-z_]+[a-z]\b", "\n".join(_code(page)))
        assert set(found) <= explained, page.name


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_setting_that_a_page_names_exists(page: Path) -> None:
    named = set(re.findall(r"\bROUNDHOUSE_[A-Z_]*[A-Z]\b", page.read_text()))
    assert named <= _settings() | OF_THE_ENVIRONMENT


def _settings() -> set[str]:
    fields = Settings.model_fields.items()
    return {str(field.validation_alias or f"ROUNDHOUSE_{name.upper()}") for name, field in fields}


def test_example_request_of_the_docs_could_run() -> None:
    [text] = re.findall(r"```yaml\n(.*?)```", JOBS, re.DOTALL)
    body = yaml.safe_load(text)
    body["bundle"] = "sha256:" + "0" * 64  # what the command makes of the folder
    body["tasks"][1]["devices"]["memory_bytes"] = 1e9  # as YAML 1.2 and the command read it
    found = descriptor.parse(body)
    assert not dependencies.check(found)
    needs = {need for task in found.tasks for need in task.devices.choice.needs}
    traits = DeviceTraits(offers=tuple(needs))  # what a host can do depends on the host
    alike = dependencies.Alike("local", "local", 4 * 2**30, 2, traits)
    offers = {"cpu": dependencies.Offer((alike,))}
    assert not dependencies.unsatisfiable(found, offers)


@pytest.mark.parametrize("line", dict.fromkeys(SESSION))
def test_first_session_uses_verbs_and_options_that_exist(line: str) -> None:
    words = line.partition(" -- ")[0].split()  # behind that comes a command's own
    verb = next(word for word in words if word in dict.fromkeys(_verbs()))
    everything = _help(verb) + _help()
    for option in (word for word in words if word.startswith("-")):
        assert re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", everything), option


@cache
def _help(*verb: str) -> str:
    return command_line.invoke([*verb, "--help"], env={"COLUMNS": "200"}).stdout


def _verbs() -> list[str]:
    verbs = [c.name or c.callback.__name__ for c in main.app.registered_commands if c.callback]
    return [*verbs, *(str(group.name) for group in main.app.registered_groups)]


PROMISED = "up submit ps show logs why cancel pause resume usage devices"


def test_first_session_shows_every_promised_verb() -> None:
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


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_module_or_file_that_a_page_names_exists(page: Path) -> None:
    """`core/x` stands for `app/core/x`, and a name behind a dot for something in the module."""
    for named in re.findall(r"`((?:app|core|workers|tests|examples)/[\w/.]+)`", _prose(page)):
        path = ROOT / ("app" if named.startswith("core/") else "") / named
        module = path.with_suffix(".py")
        assert path.exists() or module.exists() or module.with_suffix("").exists(), named


def _prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _modules() -> str:
    """Return the text of all modules of the service and of its workers."""
    folders = (ROOT / name for name in ("app", "workers"))
    return "\n".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))


def test_glossary_has_at_most_sixty_words_and_each_is_used_in_the_code() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text()
    words = re.findall(r"^\| ([a-zA-Z, ]+) \|", page, re.MULTILINE)[1:]
    assert words == sorted(set(words))
    assert 0 < len(words) <= 60
    code = _modules().lower()
    for each in ", ".join(words).split(", "):
        assert re.search(rf"\b{each}s?\b", code), each


def test_every_name_that_the_glossary_gives_exists() -> None:
    page, code = (ROOT / "docs" / "glossary.md").read_text(), _modules()
    for name in re.findall(r"`([A-Z][A-Za-z]+)`", page):
        assert re.search(rf"^class {name}\b", code, re.MULTILINE), name


def test_every_benchmark_has_its_line() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    programs = {p.stem for p in (ROOT / "benchmarks").glob("*.py") if p.stem != "__init__"}
    assert set(re.findall(r"python -m benchmarks\.(\w+)`", text)) == programs


def test_cited_rules_are_described() -> None:
    cited = {
        rule
        for path in (ROOT / "app").rglob("*.py")
        for rule in re.findall(r"\b[Rr]ules? (F\d+)", path.read_text())
    }
    assert cited
    assert all(f"**{rule} " in ARCHITECTURE for rule in cited)


def test_command_is_installed_under_the_name_in_the_docs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"roundhouse": "app.cli.main:main"}


def test_every_table_of_the_docs_begins_with_its_header() -> None:
    for page in DOCS:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
            assert re.match(r"\|.*\n\|[ :|-]+\n", block), f"{page.name}: {block.splitlines()[0]}"


def test_members_of_classes_that_comments_name_exist() -> None:
    """`State.NEW` in a docstring names a class, and its member in the same file."""
    files = [path for folder in ("app", "workers") for path in (ROOT / folder).rglob("*.py")]
    texts = {path: path.read_text() for path in files}
    classes = {
        name: text for text in texts.values() for name in re.findall(r"^class (\w+)", text, re.M)
    }
    for path, text in texts.items():
        for name, member in re.findall(r"`([A-Z][A-Za-z]+)\.([A-Z_]{2,})`", text):
            if name in classes:
                assert re.search(rf"\b{member}\b *[=:]", classes[name]), f"{path}: {name}.{member}"
