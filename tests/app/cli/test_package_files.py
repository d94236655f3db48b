"""How the file of a folder that names packages is found and sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.cli.bundling import UnreadablePath
from app.cli.package_files import environment_of, find_usual
from app.core.model.provisions.environment import may_hold

PROJECT = '[project]\nname = "a"\ndependencies = ["einops>=0.7", "pandas"]\n'
CONDA = "dependencies:\n  - python=3.12.4\n  - pip\n  - pip:\n    - einops\n    - pandas==2.2\n"


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"requirements.txt": "a", "pyproject.toml": PROJECT}, "requirements.txt"),
        ({"requirements/base.txt": "a"}, "requirements/base.txt"),
        ({"pyproject.toml": PROJECT}, "pyproject.toml"),
        ({"pyproject.toml": "[tool.ruff]\n"}, ""),
        ({"pyproject.toml": "[project\n", "environment.yml": CONDA}, "environment.yml"),
        ({"environment.yml": CONDA}, "environment.yml"),
        ({"train.py": ""}, ""),
    ],
)
def test_usual_file_is_found(tmp_path: Path, files: dict[str, str], found: str) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert find_usual(tmp_path) == found
    if found:
        environment, more = environment_of(tmp_path, found, "")
        assert may_hold(environment["requirements"])
        assert set(more) <= {environment["requirements"]}


def test_project_and_conda_environment_become_requirements(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "environment.yml").write_text(CONDA)
    assert environment_of(tmp_path, "pyproject.toml", "3.11") == (
        {"requirements": "pyproject.requirements.txt", "python": "3.11"},
        {"pyproject.requirements.txt": b"einops>=0.7\npandas\n"},
    )
    assert environment_of(tmp_path, "environment.yml", "") == (
        {"requirements": "environment.requirements.txt", "python": "3.12"},
        {"environment.requirements.txt": b"einops\npandas==2.2\n"},
    )
    assert environment_of(None, "uv.lock", "") == ({"lock": "uv.lock"}, {})


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("environment.yml", "dependencies: [numpy, cudatoolkit=11]", "conda .*numpy, cudatoolkit"),
        ("environment.yml", "dependencies: {", "cannot be read"),
        ("environment.yml", "- a", "for pip"),
        ("pyproject.toml", "[project", "cannot be read"),
        ("pyproject.toml", "[project]", "no \\[project\\] dependencies"),
    ],
)
def test_file_without_packages_for_pip_is_refused(
    tmp_path: Path, name: str, text: str, told: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UnreadablePath, match=told):
        environment_of(tmp_path, name, "")


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadablePath, match="no such file"):
        environment_of(tmp_path, "deep/pyproject.toml", "")
