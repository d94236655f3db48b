"""One POST to somebody else's address, against servers that behave badly."""

from __future__ import annotations

import socket
import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_network

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from app.messaging import guarded_post
from tests.app.receiver import receiver

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
    def test_the_other_side_gets_the_very_body_and_headers(self, other):
        answer = send(f"{other.url}/ok")
        assert (answer.status, answer.error) == (204, "")
        got = other.next()
        assert (got.path, got.body) == ("/ok", '{"ü":1}')
        assert got.headers["webhook-id"] == "msg_1"
        assert got.headers["host"] == other.url.removeprefix("http://")

    @pytest.mark.parametrize(("path", "status"), [("fail", 503), ("gone", 410)])
    def test_a_status_is_told(self, other, path, status):
        assert send(f"{other.url}/{path}").status == status

    @pytest.mark.parametrize(("path", "status"), [("redirect", 307), ("see", 303)])
    def test_a_redirect_is_not_followed(self, other, path, status):
        assert send(f"{other.url}/{path}").status == status
        assert other.next().path == f"/{path}"
        assert other.got.empty()

    def test_of_an_endless_body_nothing_is_read(self, other):
        assert send(f"{other.url}/endless").status == 200


class TestNotAnswered:
    @pytest.mark.parametrize("path", ["hang", "drip"])
    def test_it_ends_by_the_deadline_however_slowly_the_other_side_talks(self, other, path):
        answer = send(f"{other.url}/{path}", timeout_s=0.5)
        assert answer.status is None
        assert answer.error == "no answer within 0.5 s"
        assert other.next().path == f"/{path}"

    @pytest.mark.parametrize("path", ["no_head", "rubbish"])
    def test_an_answer_that_is_none_is_told(self, other, path):
        answer = send(f"{other.url}/{path}")
        assert answer.status is None
        assert answer.error

    def test_nobody_listens(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # and never listens
            answer = send(f"http://127.0.0.1:{taken.getsockname()[1]}/")
        assert answer.status is None
        assert "refused" in answer.error

    def test_a_name_that_leads_nowhere(self):
        assert send("http://nobody.invalid/").error == "the name does not resolve"


class TestWhereTo:
    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0177.0.0.1", "2130706433"])
    def test_an_inner_address_is_not_called_however_it_is_written(self, other, host):
        port = other.url.rpartition(":")[2]
        answer = send(f"http://{host}:{port}/ok", allowed=())
        assert answer.status is None
        assert answer.error
        assert "127.0.0.1" not in answer.error  # who asks is not told what a name leads to
        assert other.got.empty()

    def test_a_name_is_called_at_the_addresses_that_are_allowed(self, other):
        port = other.url.rpartition(":")[2]
        assert send(f"http://localhost:{port}/ok").status == 204

    def test_a_name_that_leads_elsewhere_a_moment_later_gains_nothing(self, other, monkeypatch):
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

    def test_a_proxy_of_the_environment_is_not_used(self, other, monkeypatch):
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1/")
        assert send(f"{other.url}/ok").status == 204


class TestTls:
    @pytest.fixture
    def secure(self, tmp_path):
        certificate, key = _certificate("localhost")
        file = tmp_path / "both.pem"
        file.write_bytes(certificate + key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(file)
        with receiver(context) as found:
            yield found, certificate.decode()

    def test_who_is_not_trusted_gets_nothing(self, secure):
        other, _ = secure
        answer = send(other.url.replace("127.0.0.1", "localhost") + "/ok")
        assert "CERTIFICATE_VERIFY_FAILED" in answer.error
        assert other.got.empty()

    def test_the_certificate_is_that_of_the_name_not_of_the_address(self, secure, monkeypatch):
        other, certificate = secure
        trusted = ssl.create_default_context(cadata=certificate)
        monkeypatch.setattr(guarded_post, "_trusted", lambda: trusted)
        assert send(other.url.replace("127.0.0.1", "localhost") + "/ok").status == 204
        assert "CERTIFICATE_VERIFY_FAILED" in send(other.url + "/ok").error


def _certificate(name):
    key = ec.generate_private_key(ec.SECP256R1())
    called = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(called)
        .issuer_name(called)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    pem = serialization.Encoding.PEM
    return made.public_bytes(pem), key.private_bytes(pem, form, plain)
