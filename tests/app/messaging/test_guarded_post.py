"""One POST to somebody else's address, against servers that behave badly."""

from __future__ import annotations

import socket
import ssl
import time
from ipaddress import ip_network
from types import SimpleNamespace

import pytest

from app.messaging import guarded_post
from tests.app.receiver import receiver
from tests.certificates import certificate_of

LOOPBACK = (ip_network("127.0.0.0/8"),)
PATIENT_S = 60.0  # nothing here waits for it


@pytest.fixture
def other():
    with receiver() as found:
        yield found


def send(url, *, timeout_s=PATIENT_S, allowed=LOOPBACK):
    headers = {"webhook-id": "msg_1", "Content-Type": "application/json"}
    return guarded_post.post(url, '{"ü":1}', headers, timeout_s=timeout_s, allowed=allowed)


class TestAnswered:
    def test_receiver_gets_the_exact_body_and_headers(self, other):
        answer = send(f"{other.url}/ok")
        assert (answer.status, answer.error) == (204, "")
        got = other.next()
        assert (got.path, got.body) == ("/ok", '{"ü":1}')
        assert got.headers["webhook-id"] == "msg_1"
        assert got.headers["host"] == other.url.removeprefix("http://")

    @pytest.mark.parametrize(("path", "status"), [("fail", 503), ("gone", 410)])
    def test_status_is_reported(self, other, path, status):
        assert send(f"{other.url}/{path}").status == status

    @pytest.mark.parametrize(("path", "status"), [("redirect", 307), ("see", 303)])
    def test_a_redirect_is_not_followed(self, other, path, status):
        assert send(f"{other.url}/{path}").status == status
        assert other.next().path == f"/{path}"
        assert other.got.empty()

    def test_endless_body_is_not_read(self, other):
        assert send(f"{other.url}/endless").status == 200


class TestNotAnswered:
    @pytest.mark.parametrize("path", ["hang", "drip"])
    def test_post_ends_at_its_deadline_however_slow_the_receiver_is(self, other, path, monkeypatch):
        began_s = time.monotonic()  # it stays so late until the receiver has the call
        clock = SimpleNamespace(
            monotonic=lambda: began_s if other.got.empty() else time.monotonic()
        )
        monkeypatch.setattr(guarded_post, "time", clock)
        answer = send(f"{other.url}/{path}", timeout_s=2.0)
        assert answer.status is None
        assert answer.error == "no answer within 2 s"
        assert other.next().path == f"/{path}"

    @pytest.mark.parametrize("path", ["no_head", "rubbish"])
    def test_invalid_answer_is_reported(self, other, path):
        answer = send(f"{other.url}/{path}")
        assert answer.status is None
        assert answer.error

    def test_refused_connection_is_reported(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # and never listens
            answer = send(f"http://127.0.0.1:{taken.getsockname()[1]}/")
        assert answer.status is None
        assert "refused" in answer.error

    def test_unknown_host_name_is_reported(self):
        assert send("http://nobody.invalid/").error == "the name does not resolve"


class TestWhereTo:
    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0177.0.0.1", "2130706433"])
    def test_internal_address_is_not_called_in_any_notation(self, other, host):
        port = other.url.rpartition(":")[2]
        answer = send(f"http://{host}:{port}/ok", allowed=())
        assert answer.status is None
        assert answer.error
        assert "127.0.0.1" not in answer.error  # who asks is not told what a name leads to
        assert other.got.empty()

    def test_host_name_is_called_only_at_allowed_addresses(self, other):
        port = other.url.rpartition(":")[2]
        assert send(f"http://localhost:{port}/ok").status == 204

    def test_host_name_that_changes_its_address_gains_nothing(self, other, monkeypatch):
        """The name is asked for once; after that only the address that was checked."""
        port, real, asked = int(other.url.rpartition(":")[2]), socket.getaddrinfo, []

        def resolve(host, *args, **more):
            asked.append(host)
            if host == "rebinding.example":
                to = "127.0.0.1" if asked.count(host) == 1 else "127.0.0.2"
                return real(to, *args, **more)
            return real(host, *args, **more)

        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        only = (ip_network("127.0.0.1/32"),)
        assert send(f"http://rebinding.example:{port}/ok", allowed=only).status == 204
        assert asked.count("rebinding.example") == 1
        assert send(f"http://rebinding.example:{port}/ok", allowed=only).status is None

    def test_proxy_of_the_environment_is_not_used(self, other, monkeypatch):
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1/")
        assert send(f"{other.url}/ok").status == 204


class TestTls:
    @pytest.fixture
    def secure(self, tmp_path):
        certificate, key = certificate_of("localhost")
        file = tmp_path / "both.pem"
        file.write_bytes(certificate + key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(file)
        with receiver(context) as found:
            yield found, certificate.decode()

    def test_untrusted_receiver_gets_nothing(self, secure):
        other, _ = secure
        answer = send(other.url.replace("127.0.0.1", "localhost") + "/ok")
        assert "CERTIFICATE_VERIFY_FAILED" in answer.error
        assert other.got.empty()

    def test_certificate_must_be_that_of_the_name(self, secure, monkeypatch):
        other, certificate = secure
        trusted = ssl.create_default_context(cadata=certificate)
        monkeypatch.setattr(guarded_post, "_trusted", lambda: trusted)
        assert send(other.url.replace("127.0.0.1", "localhost") + "/ok").status == 204
        assert "CERTIFICATE_VERIFY_FAILED" in send(other.url + "/ok").error
