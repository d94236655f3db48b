"""A resident reaches the network only through the outlet of its task; everything is counted."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import ssl
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.core.model.protocol.messages import Failed, Finished, Paused, Started, Stopped
from app.core.model.provisions.network_policy import NetworkWish
from tests.certificates import certificate_of
from tests.launches import spec_of
from tests.processes import children
from tests.workers.conftest import DeviceRig
from tests.workers.egress.peers import HOUSE, HOUSE_NETWORK, answer_of, echo, serving
from workers.device.host import egress

HOSTS = {
    "files.test": [HOUSE],
    "local.test": ["127.0.0.1"],
    "meta.test": ["169.254.169.254"],
    "mapped.test": ["::ffff:127.0.0.1"],
    "nat64.test": ["64:ff9b::7f00:1"],
}

#: What a program does with its proxy: ask for a tunnel, send a line, print the answer.
CLIENT = """
import os, socket, sys, time
def tunnel(target):
    proxy = os.environ["HTTPS_PROXY"].removeprefix("http://").split(":")
    sock = socket.create_connection((proxy[0], int(proxy[1])), 60)
    sock.sendall(f"CONNECT {target} HTTP/1.1\\r\\n\\r\\n".encode())
    head = b""
    while not head.endswith(b"\\r\\n\\r\\n"):
        head += sock.recv(1)
    return sock, head.decode().splitlines()[0]
def ask(target):
    sock, first = tunnel(target)
    print(first, flush=True)
    if " 200 " in first:
        sock.sendall(b"ping"); sock.shutdown(1)
        print("answer", sock.recv(4), flush=True)
    sock.close()
"""


@pytest.fixture
def networked(rigs) -> DeviceRig:
    rig = rigs(egress_private=HOUSE_NETWORK, egress_hosts=HOSTS)
    rig.until(lambda: "egress" in rig.reports[-1].facts["offers"])
    return rig


def launch(rig: DeviceRig, run: Any, *allow: str, epoch: int = 1, **more: Any) -> None:
    run = {"command": ["python", "-c", CLIENT + run]} if isinstance(run, str) else run
    spec = replace(spec_of(run), network=NetworkWish(allow=allow))
    rig.launch("t1", run, epoch, spec=spec, **more)


def used(rig: DeviceRig, epoch: int = 1) -> dict[str, int]:
    views = [v for report in rig.reports for v in report.residents]
    found = [v.network for v in views if (v.task, v.epoch) == ("t1", epoch) and v.network]
    return found[-1] if found else {}


def proxies(rig: DeviceRig) -> list[psutil.Process]:
    """The processes of the device's proxy, the outer one first."""
    started = rig.supervisor.egress.process
    if started is None:
        return []
    return [psutil.Process(started.pid), *children(started.pid)]


def test_command_reaches_what_is_allowed_and_nothing_else(networked):
    with serving(echo) as port:
        launch(networked, f"ask('files.test:{port}'); ask('other.test:443')", f"files.test:{port}")
        networked.event(Finished, "t1")
    networked.until(lambda: len(networked.printed("t1")) == 4)
    refused = "other.test:443 is not in network.allow of this task"
    printed = networked.lines["t1/1"]
    assert [text for stream, text in printed if stream == "stdout"] == [
        "HTTP/1.1 200 Connection established",
        "answer b'ping'",
        f"HTTP/1.1 403 {refused}",
    ]
    told = f"Roundhouse refused a connection: {refused}"
    assert [text for stream, text in printed if stream == "stderr"] == [told]
    expected = {"connections": 1, "refused": 1, "sent_bytes": 4, "received_bytes": 4}
    assert used(networked) == expected, "the last figures come before the end"


def test_task_without_a_network_has_no_proxy(networked):
    run = """
import os, socket
print(sorted(name for name in os.environ if "proxy" in name.lower()), flush=True)
socket.create_connection(("127.0.0.1", 3128), 5)
"""
    networked.launch("t1", ["python", "-c", run])
    networked.event(Failed, "t1")
    networked.until(lambda: any("Connection refused" in x for x in networked.printed("t1")))
    assert networked.printed("t1")[0] == "[]"
    assert not proxies(networked)


@pytest.mark.parametrize(
    "name", ["localhost", "local.test", "meta.test", "mapped.test", "nat64.test"]
)
def test_inner_address_behind_an_allowed_name_is_refused(networked, name):
    with socket.create_server(("127.0.0.1", 0)) as secret:
        port = secret.getsockname()[1]
        launch(networked, f"ask('{name}:{port}')", f"{name}:{port}")
        networked.event(Finished, "t1")
        secret.setblocking(False)
        with pytest.raises(BlockingIOError):
            secret.accept()
    networked.until(lambda: networked.printed("t1"))
    told = f"HTTP/1.1 403 {name} has no public address, and this host allows no other ones"
    assert told in networked.printed("t1")


def test_program_reaches_a_server_by_tls_that_ends_in_the_program(networked, tmp_path):
    certificate, key = certificate_of("files.test")
    file = tmp_path / "both.pem"
    file.write_bytes(certificate + key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)

    def serve(sock: socket.socket) -> None:
        with context.wrap_socket(sock, server_side=True) as secure:
            answer_of(secure)
            secure.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nweight")

    run = """
import ssl, urllib.request
trusted = ssl.create_default_context(cadata=certificate)
with urllib.request.urlopen(url, timeout=60, context=trusted) as answer:
    print(answer.read(), flush=True)
"""
    with serving(serve) as port:
        said = f"certificate, url = {certificate.decode()!r}, 'https://files.test:{port}/model'"
        launch(networked, said + run, f"files.test:{port}")
        networked.event(Finished, "t1")
    networked.until(lambda: networked.printed("t1") == ["b'weight'"])


def test_each_task_has_its_own_way_to_the_network(networked):
    with serving(echo) as port, serving(echo) as other:
        targets = [f"files.test:{port}", f"files.test:{other}"]
        run = "; ".join(f"ask({target!r})" for target in targets)
        first = ["HTTP/1.1 200 Connection established", "answer b'ping'"]
        for epoch, mine, theirs in ((1, *targets), (2, *reversed(targets))):
            launch(networked, run, mine, epoch=epoch)
            networked.event(Finished, "t1", epoch)
            refused = f"HTTP/1.1 403 {theirs} is not in network.allow of this task"
            expected = [*first, refused] if mine == targets[0] else [refused, *first]
            found = networked.lines[f"t1/{epoch}"]
            assert [text for stream, text in found if stream == "stdout"] == expected


def test_device_whose_proxy_does_not_start_offers_no_network(networked, monkeypatch, caplog):
    monkeypatch.setattr(egress, "_BOOT", "raise SystemExit({fd} and {root!r} and 3)")
    monkeypatch.setattr(egress, "AGAIN_US", 50_000)
    launch(networked, "time.sleep(60)", "files.test:1")
    networked.until(lambda: "egress" not in networked.reports[-1].facts["offers"])
    assert "the proxy of h.0 does not start: tasks get no network here" in caplog.text
    assert not proxies(networked)
    networked.cancel("t1")
    networked.event(Stopped, "t1")


def test_withdrawn_destination_is_refused_with_that_reason(networked):
    allow = ("files.test:443", "old.test:443")
    launch(networked, "ask('old.test:443')", *allow, withdrawn=["old.test:443"])
    networked.event(Finished, "t1")
    told = "the policy of the tenant does not allow old.test:443 any more"
    networked.until(lambda: f"HTTP/1.1 403 {told}" in networked.printed("t1"))


@pytest.mark.usefixtures("fresh_zygotes")
def test_proxy_has_least_rights_and_no_secret(networked, monkeypatch):
    launch(networked, "tunnel('files.test:1'); time.sleep(60)", "files.test:1")
    networked.until(lambda: used(networked).get("refused"))
    *_, inner = proxies(networked)
    status = Path(f"/proc/{inner.pid}/status").read_text()
    assert "CapEff:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status
    assert "Seccomp:\t2" in status
    if os.geteuid() == 0:
        assert inner.uids().real >= 200_000
        resident = networked.supervisor.stays.residents[1]
        assert inner.uids().real != resident.room.uid
    assert set(inner.environ()) <= {"LANG", "LC_CTYPE"}
    root = Path(f"/proc/{inner.pid}/root")
    assert not (root / networked.house.run.relative_to("/")).exists()
    networked.cancel("t1")
    networked.event(Stopped, "t1")


def test_killed_proxy_is_replaced_and_the_next_connection_works(networked):
    run = """
sock, first = tunnel(target)
print(first, flush=True)
print("ended", sock.recv(1), flush=True)
ask(target)
"""
    with serving(echo) as port:
        target = f"files.test:{port}"
        launch(networked, f"target = {target!r}{run}", target)
        networked.until(lambda: "HTTP/1.1 200 Connection established" in networked.printed("t1"))
        proxies(networked)[0].send_signal(signal.SIGKILL)
        networked.event(Finished, "t1")
    networked.until(lambda: "answer b'ping'" in networked.printed("t1"))
    assert "ended b''" in networked.printed("t1")
    assert used(networked)["connections"] >= 1


def test_stopped_proxy_does_not_hold_the_end_of_a_task(networked, caplog):
    run = """
tunnel('files.test:1')
while not os.path.exists("end"): time.sleep(0.02)
sys.exit(3)
"""
    launch(networked, run, "files.test:1")
    networked.until(lambda: used(networked).get("refused"))
    for each in proxies(networked):
        each.suspend()
    began_s = time.monotonic()
    networked.let_end("t1")
    networked.event(Failed, "t1")
    assert 3 < time.monotonic() - began_s < 50  # it may take 3 s, and no proxy ends within 60 s
    assert "the proxy of h.0 does not answer, and is replaced" in caplog.text


def test_paused_command_keeps_its_connections_and_another_epoch_counts_anew(networked):
    run = """
sock, first = tunnel(target)
print(first, flush=True)
for n in range(100_000):
    sock.sendall(b"x"); assert sock.recv(1) == b"x"
    if n == 3: print("before", flush=True)
    if os.path.exists("/tmp/go"): break
    time.sleep(0.02)
print("after", n, flush=True)
time.sleep(60)
"""
    with serving(echo) as port:
        target = f"files.test:{port}"
        launch(networked, f"target = {target!r}{run}", target)
        networked.until(lambda: "before" in networked.printed("t1"))
        networked.pause("t1")
        networked.event(Paused, "t1")
        networked.until(lambda: used(networked).get("sent_bytes"))
        launch(networked, f"target = {target!r}{run}", target, epoch=2)
        networked.event(Started, "t1", 2)
        networked.until(lambda: used(networked, 2).get("sent_bytes"))
        assert used(networked, 2).get("connections", 0) == 0, "it is the connection from before"
        networked.cancel("t1", 2)
        networked.event(Stopped, "t1", 2)


def test_device_without_the_network_layer_offers_none_and_runs_no_such_task(rigs):
    rig = rigs(sandbox="off")
    assert "egress" not in rig.reports[-1].facts["offers"]
    launch(rig, "print(1)", "files.test:443")
    told = rig.event(Failed, "t1").message
    assert told == "It needs the network, which this device gives to no task."


def test_device_offers_no_network_where_it_is_switched_off(rigs):
    rig = rigs(egress=False)
    assert "egress" not in rig.reports[-1].facts["offers"]


def test_job_with_a_network_is_captured_and_downloads(rigs):
    body = os.urandom(3_000_000)

    def serve(sock: socket.socket) -> None:
        answer_of(sock)
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        sock.sendall(head.encode() + body)

    rig = rigs(egress_private=HOUSE_NETWORK, egress_hosts=HOSTS)
    with serving(serve) as port:
        run = {"job": "network:Download"}
        spec = replace(
            spec_of(run, params={"url": f"http://files.test:{port}/x", "waits": True}),
            network=NetworkWish(allow=(f"files.test:{port}",)),
        )
        rig.launch("t1", run, spec=spec)
        rig.steps("t1", 2)
        images = rig.paused_and_saved("t1", 1)
        rig.launch("t1", run, 2, spec=spec, images=images)
        rig.event(Started, "t1", 2)
        rig.let_end("t1", 2)
        result = rig.event(Finished, "t1", 2).result
    assert result["sha256"] == hashlib.sha256(body).hexdigest()
    received = sum(used(rig, epoch).get("received_bytes", 0) for epoch in (1, 2))
    assert received >= 40 * len(body)
