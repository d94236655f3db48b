"""The wheel `roundhouse-client`, installed with only its own dependencies, and a live system."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from workers.process import uv

pytestmark = pytest.mark.acceptance

ROOT = Path(__file__).parents[2]
WHEEL_BYTES_MOST = 10 * 2**20
#: Packages of the service, and large or slow ones that a verb imports when it needs them.
NOT_AT_START = {"torch", "numpy", "sqlalchemy", "celery", "redis", "alembic", "fastapi", "pydantic",
                "yaml", "websockets", "mcp"}  # fmt: skip
MODULE_OF = {"pyyaml": "yaml"}  # where a package is not named as its module
ONLY_DATA = {"tzdata"}  # zoneinfo reads it
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel beside a link to `app`, so that nothing is written into the working tree."""
    folder = tmp_path_factory.mktemp("client")
    shutil.copytree(ROOT / "client", folder / "client", ignore=lambda *_: ["build", "dist"])
    (folder / "app").symlink_to(ROOT / "app")
    how = ["--wheel", "--no-build-isolation", "--python", sys.executable, "--out-dir", "dist"]
    _uv(folder, "build", *how, "client")
    [wheel] = (folder / "dist").glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel and the packages that it requires, no more."""
    folder = tmp_path_factory.mktemp("installed")
    _uv(folder, "venv", "--python", sys.executable, "venv")
    python = folder / "venv" / "bin" / "python"
    _uv(folder, "pip", "install", "--no-deps", "--python", str(python), str(wheel))
    [site] = (folder / "venv").glob("lib/python*/site-packages")
    for package in _closure(project()["dependencies"]):
        for name in {path.parts[0] for path in package.files or () if path.parts[0] != ".."}:
            here = Path(str(package.locate_file(name)))
            if name.endswith(".dist-info"):  # uv passes over those that are links
                shutil.copytree(here, site / name)
            elif not (site / name).exists():
                (site / name).symlink_to(here)
    _uv(folder, "pip", "check", "--python", str(python))
    return python.parent


@pytest.fixture
def run(programs: Path, system: Any, tmp_path: Path) -> Run:
    """Runs a program of the environment as a member of alpha, outside the working tree."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"ROUNDHOUSE_URL": system.url, "ROUNDHOUSE_KEY": system.keys["alpha"]["member"]}
    env |= {"XDG_CONFIG_HOME": str(tmp_path), "ROUNDHOUSE_HOME": str(tmp_path)}

    def run(program: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [str(programs / program), *words]
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)

    return run


def project() -> dict[str, Any]:
    return dict(tomllib.loads((ROOT / "client" / "pyproject.toml").read_text())["project"])


def _uv(folder: Path, *words: str) -> None:
    environment = uv.variables(folder / "cache") | {"UV_OFFLINE": "1"}
    done = uv.run([*words], folder=folder, environment=environment, limit_s=300)
    assert not done.status, done.said


def _closure(requirements: list[str]) -> list[Distribution]:
    """Return the packages that these require, directly or not, as they are installed here."""
    found: dict[str, Distribution] = {}
    open_ = [Requirement(text) for text in requirements]
    while open_:
        one = open_.pop()
        name = canonicalize_name(one.name)
        if name in found or (one.marker and not one.marker.evaluate({"extra": ""})):
            continue
        found[name] = distribution(name)
        open_ += [Requirement(text) for text in found[name].requires or ()]
    return list(found.values())


def test_wheel_is_small_and_has_no_module_of_the_service(wheel):
    assert wheel.stat().st_size < WHEEL_BYTES_MOST
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("app/")}
    rooms = {name.split("/")[1] for name in names}
    assert rooms == {"__init__.py", "home.py", "cli", "core"}
    files = {f"{path.relative_to(ROOT)}" for room in ("cli", "core") for path in
             (ROOT / "app" / room).rglob("*.py")}  # fmt: skip
    assert names == files | {"app/__init__.py", "app/home.py", "app/cli/py.typed"}


def test_dependencies_are_what_the_modules_import_with_the_bounds_of_the_service(wheel):
    archive = zipfile.ZipFile(wheel)
    texts = [archive.read(name) for name in archive.namelist() if name.endswith(".py")]
    imported = {name for text in texts for name in _imported(ast.parse(text))}
    others = imported - sys.stdlib_module_names - {"app"}
    about = project()
    wanted = [*about["dependencies"], *about["optional-dependencies"]["mcp"]]
    modules = {MODULE_OF.get(name, name) for name in map(_name, wanted)}
    assert others == modules - ONLY_DATA
    service = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(wanted) <= {*service["dependencies"], *service["optional-dependencies"]["mcp"]}
    assert about["version"] == service["version"]
    assert about["scripts"] == service["scripts"]


def _name(requirement: str) -> str:
    return re.split(r"[^\w-]", requirement)[0]


def _imported(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module).partition(".")[0]


def test_command_starts_without_the_service_and_without_slow_packages(run):
    said = run("roundhouse", "--help")
    assert said.returncode == 0, said.stderr
    assert "submit" in said.stdout
    code = (
        "import sys, app.cli.main; print(app.__file__, *{m.partition('.')[0] for m in sys.modules})"
    )
    where, *loaded = run("python", "-c", code).stdout.split()
    assert "site-packages" in where
    assert "httpx2" in loaded
    assert not NOT_AT_START & set(loaded)


def test_lists_are_replayed_by_the_scheduler_in_the_wheel(run, tmp_path):
    jobs = tmp_path / "jobs.csv"
    jobs.write_text("timestamp,duration,num_gpus,cluster\n0,60,1,red\n0,60,1,blue\n")
    said = run("roundhouse", "simulate", str(jobs), "--devices", "1", "-o", "json")
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout)


def test_command_is_submitted_and_its_log_is_read(run, tmp_path):
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "words.txt").write_text("from afar\n")
    said = run("roundhouse", "submit", "code", "-o", "json", "--", "cat", "words.txt")
    assert said.returncode == 0, said.stderr
    id = json.loads(said.stdout)["id"]
    logs = run("roundhouse", "logs", "-f", id)
    assert logs.returncode == 0, logs.stderr
    assert "from afar" in logs.stdout


@pytest.mark.parametrize(("words", "package"), [
    (("up",), "Install the package roundhouse"),
    (("worker",), "Install the package roundhouse"),
    (("device", "key"), "Install the package roundhouse"),
    (("mcp",), "roundhouse-client[mcp]"),
])  # fmt: skip
def test_verb_that_needs_more_says_what_to_install(run, words, package):
    said = run("roundhouse", *words)
    assert said.returncode == 2
    assert package in re.sub(r"[│\s]+", " ", said.stderr)
    assert "Traceback" not in said.stderr
