"""The port of the API from the first look at it until the API listens."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from app.local.up import ROOT, WantedSystem, _usual_port, reserve_port

HOST = "127.0.0.1"


def test_reserved_port_can_be_listened_on_by_name_again_and_again():
    with reserve_port(HOST, 0) as reserved:
        place = reserved.getsockname()
        for _ in range(3):
            with socket.create_server(place) as api, socket.create_connection(place) as client:
                accepted, address = api.accept()
                accepted.close()
                assert address == client.getsockname()


def test_reserved_port_is_refused_to_a_program_that_shares_no_port():
    with (
        reserve_port(HOST, 0) as reserved,
        socket.socket() as other,
        pytest.raises(OSError, match="Address already in use"),
    ):
        other.bind(reserved.getsockname())


def test_port_on_which_another_program_listens_cannot_be_reserved():
    with socket.create_server((HOST, 0)) as other, pytest.raises(OSError, match="already in use"):
        reserve_port(*other.getsockname())


def test_port_of_the_last_run_is_reserved_again_unless_it_was_taken(tmp_path):
    wanted = WantedSystem(home=tmp_path, devices=())
    with _usual_port(wanted) as first:
        usual = first.getsockname()
    with _usual_port(wanted) as again:
        assert again.getsockname() == usual
    with socket.create_server(usual), _usual_port(wanted) as other:
        assert other.getsockname() != usual
        assert (tmp_path / "port").read_text() == f"{other.getsockname()[1]}\n"


ALL_OF_A_NETWORK = """
from contextlib import suppress
from pathlib import Path
from app.local.up import reserve_port

Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("40000 40007")
reserved, given = reserve_port("127.0.0.1", 0), []
with suppress(OSError):
    while True:
        given.append(reserve_port("127.0.0.1", 0))
print(len({one.getsockname()[1] for one in [reserved, *given]}), len(given))
"""


def test_kernel_gives_a_reserved_port_to_no_program_that_takes_any():
    """A network of its own with eight ports to give: one is reserved, and seven are given."""
    command = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c"]
    script = 'ip link set lo up && exec "$0" -c "$1"'
    done = subprocess.run(
        [*command, script, sys.executable, ALL_OF_A_NETWORK],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
    )
    if "unshare failed" in done.stderr or "ip: not found" in done.stderr:
        pytest.skip(f"no network of its own here: {done.stderr}")
    assert done.stdout.split() == ["8", "7"], done.stderr
