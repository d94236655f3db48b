"""Tells whether the index of packages of this machine can be reached, for tests that need it."""

from __future__ import annotations

from pathlib import Path

from workers.process import uv


def why_unreachable(folder: Path) -> str:
    """Return why uv finds nothing in the index of this machine; "" if it does."""
    (folder / "in.txt").write_text("tqdm\nlightning\n")
    how = ["pip", "compile", "in.txt", "--no-deps", "--quiet", *uv.ONLY_WHEELS]
    environment = uv.variables(folder / "cache")
    try:
        done = uv.run(how, folder=folder, environment=environment, limit_s=60)
    except uv.NoUv as error:
        return str(error)
    return done.said if done.status else ""
