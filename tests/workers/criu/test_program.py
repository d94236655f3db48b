from __future__ import annotations

from pathlib import Path

import pytest

from workers.criu import program


def _that_says(folder: Path, said: str) -> Path:
    file = folder / "criu"
    file.write_text(f"#!/bin/sh\necho '{said}'\n")
    file.chmod(0o755)
    return file


def test_program_that_is_missing_is_told_with_what_to_do(tmp_path):
    with pytest.raises(program.NoProgram, match="make criu"):
        program.find(str(tmp_path / "nothing"))
    with pytest.raises(program.NoProgram, match="make criu"):
        program.find(str(tmp_path))


@pytest.mark.parametrize("version", ["3.17", "4.1.1", "4.2"])
def test_older_program_is_refused(tmp_path, version):
    with pytest.raises(program.NoProgram, match=f"is CRIU {version}; 4.2.1 or newer"):
        program.find(str(_that_says(tmp_path, f"Version: {version}")))


@pytest.mark.parametrize("version", ["4.2.1", "4.2.10", "4.3", "10.0"])
def test_newer_program_is_taken(tmp_path, version):
    file = _that_says(tmp_path, f"Version: {version}")
    found = program.find(str(file))
    assert (found.version, found.argv) == (version, [str(file)])
    assert program.CriuProgram.from_json(found.as_json()) == found


def test_other_program_is_refused(tmp_path):
    with pytest.raises(program.NoProgram, match="does not say its version"):
        program.find(str(_that_says(tmp_path, "hello")))


def test_prefix_runs_with_its_own_loader_and_libraries(criu):
    found = program.find(str(criu))
    assert found.argv[1:] == ["--library-path", str(criu / "lib"), str(criu / "bin" / "criu")]
    assert program.CriuProgram.from_json(found.as_json()) == found
