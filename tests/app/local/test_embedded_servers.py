"""Embedded Postgres keeps what it accepted, whatever happens to it."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import psycopg
import pytest

from app.local.embedded_servers import (
    CannotStart,
    embedded_postgres,
    prepare,
    socket_folder,
    temporary_home,
)
from app.storage.backend import make_private

pytestmark = pytest.mark.slow

AS_ROOT = os.geteuid() == 0


@pytest.fixture
def home():
    with temporary_home() as home:
        yield home


def connect(url: str) -> psycopg.Connection:
    return psycopg.connect(url.replace("+psycopg", ""), autocommit=True)


def postmaster(home: Path) -> int:
    return int((home / "postgres" / "postmaster.pid").read_text().split("\n")[0])


def test_committed_rows_survive_kill_9_of_the_server(home):
    with embedded_postgres(home) as url:
        with connect(url) as connection:
            connection.execute("create table kept as select 7 as number")
        os.kill(postmaster(home), signal.SIGKILL)
    with embedded_postgres(home) as url, connect(url) as connection:
        assert connection.execute("select number from kept").fetchone() == (7,)


def test_stale_pid_file_does_not_prevent_a_start(home):
    with embedded_postgres(home):
        lines = (home / "postgres" / "postmaster.pid").read_text().split("\n")
    (home / "postgres" / "postmaster.pid").write_text("\n".join([str(os.getpid()), *lines[1:]]))
    with embedded_postgres(home) as url, connect(url) as connection:
        assert connection.execute("select 1").fetchone() == (1,)


def test_nothing_listens_and_no_socket_is_left_after_the_end(home):
    with embedded_postgres(home) as url:
        assert socket_folder(home).exists()
    assert not socket_folder(home).exists()
    with pytest.raises(psycopg.OperationalError):
        connect(url)


def test_home_is_held_by_one_process_only(home):
    refused = pytest.raises(CannotStart, match=f"already runs on {home}")
    with embedded_postgres(home), refused, embedded_postgres(home):
        pass


@pytest.mark.skipif(not AS_ROOT, reason="only root starts Postgres as another user")
def test_home_that_another_program_of_ours_made_is_opened_for_postgres_only():
    with temporary_home() as around:
        around.chmod(0o755)
        home = around / "home"
        make_private(home / "islands")
        prepare(home)
        assert stat.S_IMODE(home.stat().st_mode) == 0o710
        foreign = around / "foreign"
        foreign.mkdir(mode=0o700)
        with pytest.raises(CannotStart, match="such as /var/lib"):
            prepare(foreign)
        assert stat.S_IMODE(foreign.stat().st_mode) == 0o700


@pytest.mark.skipif(not AS_ROOT, reason="only root starts Postgres as another user")
def test_home_below_a_closed_folder_is_refused_and_its_rights_stay(tmp_path):
    tmp_path.chmod(0o700)
    with pytest.raises(CannotStart, match=r"closed to user 65534.*Set ROUNDHOUSE_HOME"):
        prepare(tmp_path / "home")
    assert tmp_path.stat().st_mode & 0o777 == 0o700
