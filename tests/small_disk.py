"""A small disk in memory that a test fills; only root may mount it."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
from sqlalchemy.engine import make_url

from app.local.embedded_servers import DATABASE, NOBODY


@contextlib.contextmanager
def small_disk(at: Path, size_bytes: int, owner: tuple[int, int] = (0, 0)) -> Iterator[Path]:
    """Mount a file system of this size at a new folder."""
    at.mkdir(parents=True)
    how = f"size={size_bytes},mode=700,uid={owner[0]},gid={owner[1]}"
    mount(at, "-t", "tmpfs", "-o", how, "tmpfs")
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


def mount(at: Path, *words: str) -> None:
    subprocess.run(["mount", *words, str(at)], check=True)


@contextlib.contextmanager
def disk_of_tables(at: Path, size_bytes: int, postgres_url: str) -> Iterator[Path]:
    """Keep the tables of a database that is still empty on a small disk."""
    with small_disk(at, size_bytes, NOBODY) as tables:
        (inside := tables / "inside").mkdir(mode=0o700)
        os.chown(inside, *NOBODY)
        url = make_url(postgres_url).set(drivername="postgresql", database="postgres")
        with psycopg.connect(url.render_as_string(hide_password=False), autocommit=True) as admin:
            admin.execute(f"create tablespace small location '{inside}'")
            admin.execute(f"alter database {DATABASE} set tablespace small")
        yield tables


@contextlib.contextmanager
def filled(folder: Path) -> Iterator[None]:
    """Leave no byte free on the file system of the folder."""
    filler = folder / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(2**12))
    try:
        yield
    finally:
        filler.unlink()
