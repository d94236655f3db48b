"""The process of the proxy, also where its worker is not root."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.workers.egress.peers import HOUSE, HOUSE_NETWORK, ask, echo, serving
from workers.process.isolation.sandbox import WALLS
from workers.process.wire import tenant_pair

ROOT = Path(__file__).resolve().parents[3]
NOBODY = 65534
BOOT = (
    "import sys; sys.path.insert(0, {folder!r}); "
    "from workers.egress.process import main; main({fd})"
)


@pytest.fixture
def folder():
    """A copy of the code that every user can read."""
    made = Path(subprocess.check_output(["mktemp", "-d"], text=True).strip())
    for package in ("app", "workers"):
        unused = shutil.ignore_patterns("__pycache__", "pages")
        shutil.copytree(ROOT / package, made / package, ignore=unused)
    (made / "empty").mkdir()
    subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", made], check=True)
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_proxy_of_a_worker_without_root_has_the_same_layers(folder):
    python = shutil.which("python3", path="/usr/local/bin:/usr/bin")
    if python is None or not _has_user_namespaces():
        pytest.skip("no interpreter here that another user may run, or no user namespaces")
    wire, theirs = tenant_pair()
    with theirs:
        boot = BOOT.format(folder=str(folder), fd=theirs.fileno())
        process = subprocess.Popen(
            [python, "-B", "-c", boot],
            env={"LANG": "C.UTF-8"},
            pass_fds=(theirs.fileno(),),
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            cwd="/",
        )
    begin = {"walls": [name for name in WALLS if name != "user"], "uid": NOBODY}
    begin |= {"folder": str(folder / "empty"), "private": HOUSE_NETWORK}
    wire.send({"is": "begin", **begin, "hosts": {"files.test": [HOUSE]}})
    with socket.create_server(("127.0.0.1", 0)) as listener, serving(echo) as port:
        rules = {"allow": [f"files.test:{port}", "localhost:443"], "withdrawn": []}
        wire.send({"is": "open", "outlet": 1, **rules}, [listener.fileno()])
        proxy = listener.getsockname()[1]
        sock, answer = ask(proxy, f"CONNECT files.test:{port} HTTP/1.1")
        assert answer.startswith(b"HTTP/1.1 200 ")
        sock.sendall(b"ping")
        assert sock.recv(4) == b"ping"
        sock.close()
        sock, answer = ask(proxy, "CONNECT localhost:443 HTTP/1.1")
        assert b"403 localhost has no public address" in answer, "the system resolves it in there"
        sock.close()
        [inner] = psutil.Process(process.pid).children()
        status = Path(f"/proc/{inner.pid}/status").read_text()
        assert f"NSpid:\t{inner.pid}\t1\n" in status
        assert "CapEff:\t0000000000000000" in status
        assert "Seccomp:\t2" in status
    wire.close()
    assert process.wait(60) == 0, "it ends with its supervisor"


def _has_user_namespaces() -> bool:
    tried = subprocess.run(
        ["unshare", "--user", "true"], user=NOBODY, group=NOBODY, extra_groups=[], check=False
    )
    return tried.returncode == 0
