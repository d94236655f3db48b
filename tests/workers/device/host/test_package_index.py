"""A build of packages reaches the administrator's index, a real server, and nothing else."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from app.core.model.provisions.package_lock import PackageLock
from app.core.model.provisions.requirements import PinnedPackage
from app.settings import Settings
from app.storage.store import Store
from tests.ports import free_port
from tests.wheels import add_wheel
from workers.process import uv
from workers.process.isolation import sandbox
from workers.process.isolation.sandbox import Room
from workers.transfer.installs.environments import PLATFORM_PYTHON, Environments, NotBuilt

Server = Callable[[Path], tuple[str, Path]]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Serve a folder by HTTP; returns the destination and the log of requests."""
    running: list[subprocess.Popen[bytes]] = []

    def serve(folder: Path) -> tuple[str, Path]:
        port = free_port()
        log = tmp_path / f"{port}.log"
        command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
        with log.open("wb") as told:
            running.append(
                subprocess.Popen([*command, "--directory", str(folder)], stdout=told, stderr=told)
            )
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
            except OSError:
                time.sleep(0.05)
            else:
                return f"127.0.0.1:{port}", log
        raise AssertionError("the server does not listen")

    yield serve
    for process in running:
        process.kill()
        process.wait()


@pytest.fixture
def walled(tmp_path: Path) -> None:
    scratch, code = tmp_path / "scratch", tmp_path / "code"
    scratch.mkdir()
    code.mkdir()
    standing, _ = sandbox.try_out(Room(code=code, scratch=scratch, uid=0))
    if "network" not in standing:
        pytest.skip("this machine gives no network namespaces")


class Index:
    """An index with one package, whose page may name a file on another server."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.page = folder, folder / "simple" / "towers"
        digest = add_wheel(self.page, "towers")
        self.wheel = next(self.page.glob("*.whl"))
        pin = PinnedPackage(name="towers", version="1.0", hashes=(f"sha256:{digest}",))
        self.store = Store.at(folder / "store")
        lock = PackageLock(python=PLATFORM_PYTHON, packages=(pin,), over={})
        self.lock, _ = self.store.put([lock.text.encode()])

    def built(self, destination: str, *files: str) -> Environments:
        settings = Settings(
            package_index=f"http://{destination}/simple", package_hosts=",".join(files)
        )
        kept = Environments(
            folder=self.folder / "environments",
            limit_bytes=2**30,
            build_s=60.0,
            options=tuple(uv.index_options(settings)),
            reach=uv.reach(settings),
        )
        kept.opened(self.lock, self.store).close()
        return kept


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    tmp_path.chmod(0o755)
    return Index(tmp_path)


def test_build_takes_the_wheel_from_the_index(index: Index, server: Server, walled: None) -> None:
    destination, log = server(index.folder)
    assert index.built(destination).has(index.lock)
    assert "GET /simple/towers/towers-1.0-py3-none-any.whl" in log.read_text()


def test_build_behind_the_wall_does_not_go_by_the_proxies_of_the_host(
    index: Index, server: Server, walled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "*")
    destination, _ = server(index.folder)
    assert index.built(destination).has(index.lock)


def test_index_that_sends_uv_elsewhere_is_refused(
    index: Index, server: Server, walled: None, tmp_path: Path
) -> None:
    away = tmp_path / "away"
    away.mkdir()
    elsewhere, log = server(away)
    index.wheel.rename(away / index.wheel.name)
    link = f'<a href="http://{elsewhere}/{index.wheel.name}">{index.wheel.name}</a>'
    (index.page / "index.html").write_text(link)
    destination, _ = server(index.folder)
    before = log.read_text()
    with pytest.raises(NotBuilt) as refused:
        index.built(destination)
    why = "is not among the hosts of the index of packages"
    assert f"Roundhouse refused a connection: {elsewhere} {why}" in str(refused.value)
    assert log.read_text() == before, "the other server saw nothing"
    assert index.built(destination, elsewhere).has(index.lock), "as the administrator names it"


def test_build_from_a_folder_has_no_network_at_all(
    index: Index, server: Server, walled: None
) -> None:
    destination, log = server(index.folder)
    options = ("--default-index", f"http://{destination}/simple")
    kept = Environments(
        folder=index.folder / "environments", limit_bytes=2**30, build_s=60.0, options=options
    )
    before = log.read_text()
    with pytest.raises(NotBuilt):
        replace(kept, wheels=index.page).opened(index.lock, index.store)
    assert log.read_text() == before


@pytest.mark.parametrize(
    ("settings", "reached"),
    [
        ({}, ("pypi.org:443", "files.pythonhosted.org:443")),
        ({"package_index": "http://[::1]:8/simple"}, ("[::1]:8", "files.pythonhosted.org:443")),
        (
            {"package_index": "https://u:p@index.corp/x", "package_hosts": "*.corp:443"},
            ("index.corp:443", "*.corp:443"),
        ),
        ({"wheels": Path("/wheels")}, ()),
    ],
)
def test_hosts_are_those_of_the_settings(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, object], reached: tuple[str, ...]
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "UV_DEFAULT_INDEX", "UV_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    assert uv.reach(Settings(**settings)) == reached
    monkeypatch.setenv("HTTPS_PROXY", "")
    assert uv.reach(Settings(**settings)) == reached, "an empty variable names no proxy"
    monkeypatch.setenv("https_proxy", "http://proxy.corp:3128")
    assert uv.reach(Settings(**settings)) == (() if "wheels" in settings else None)


def test_host_that_is_no_destination_is_refused() -> None:
    with pytest.raises(ValueError, match="must end with a port"):
        Settings(package_hosts="files.example.org")
