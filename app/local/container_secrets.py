"""Create the secrets of a deployment in containers, each readable only where it is needed.

    python -m app.local.container_secrets FOLDER --hosts NAME,...

Below FOLDER there is a folder for each volume: `redis` (certificate, users, configuration), one for
each kind of process (the URL with its user's password, and the CA certificate; for the API and the
islands the key that encrypts secrets of tenants), `island-key` (the key that signs orders),
`hosts/NAME` (the key of a host), `public` (public keys).  Existing secrets are kept.  A certificate
that expires soon is replaced, with all passwords: then restart all.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from app.storage.backend import make_private
from app.storage.sealing import Keyring
from app.storage.signing import Signer

LIVES = datetime.timedelta(days=3650)
RENEWED_BEFORE = datetime.timedelta(days=30)
REDIS_HOST = "redis"
MOUNTED = "/run/roundhouse/secrets"  # where a container sees its own folder

#: Commands that Celery's transport needs: take, put, and keep the list of queues.
_TRANSPORT = (
    "+ping +hello +auth +client|setname +select +multi +exec +discard +watch"
    " +unwatch +brpop +rpop +lpush +rpush +llen +type +del +exists"
    " +sadd +srem +smembers +hset +hget +hdel"
    " +zadd +zrem +zrange +zrangebyscore +zrevrangebyscore +time"
    " +set +get +pexpire +expire +evalsha +script|load +script|exists"
)
_OF_KOMBU = "~_kombu.* ~unacked*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """Describes a user of Redis: keys that it reads and writes, and queues that it may only
    add to.
    """

    keys: str
    adds_to: tuple[str, ...] = ()

    @property
    def rules(self) -> str:
        adds = " ".join(f"%W~{queue}" for queue in self.adds_to)
        # Celery reads the length of a queue before it adds to the queue.
        asks = " ".join(f"(+llen %R~{queue})" for queue in self.adds_to)
        return f"{_OF_KOMBU} {self.keys} {adds} -@all {_TRANSPORT} {asks}"


#: One user for each kind of process. A device takes from queues of devices and only adds to queues
#: of islands; only the API may use the counters of calls.
ROLES = {
    "api": Role(keys="~rate:*", adds_to=("control*", "island.*")),
    "control": Role(keys="~control*", adds_to=("island.*",)),
    "island": Role(keys="~island.*", adds_to=("device.*", "control*")),
    "device": Role(keys="~device.*", adds_to=("island.*",)),
}


def make(folder: Path, hosts: Iterable[str]) -> None:
    island = Signer.at(folder / "island-key" / "local.key")
    _publish(folder / "public" / "island.local.pub", island)
    for host in hosts:
        _publish(folder / "public" / f"{host}.pub", Signer.at(folder / "hosts" / host / KEY))
    if not _is_good(folder / "redis" / "server.pem"):
        _make_redis(folder)
    _share_key(folder)


def _share_key(folder: Path) -> None:
    """Give the API, control and the islands the same key for the secrets of tenants; an existing
    key is kept.

    If an administrator puts a newer key into the API's file, this copies it to the others.
    """
    first, *others = (folder / role / "secrets.key" for role in ("api", "control", "island"))
    Keyring.make(first)
    for file in others:
        _write(file, first.read_bytes())


KEY = "signing.key"  # file name that a device worker expects


def _publish(path: Path, signer: Signer) -> None:
    _write(path, f"{signer.public}\n".encode())


# --- Redis ----------------------------------------------------------------------------------------


def _make_redis(folder: Path) -> None:
    authority, certificate, key = _certificate()
    passwords = {role: secrets.token_urlsafe(32) for role in ROLES}
    for role, password in passwords.items():
        _write(folder / role / "ca.pem", authority)
        url = f"rediss://{role}:{password}@{REDIS_HOST}:6379/0"
        _write(folder / role / "redis_url", url.encode())
    own = folder / "redis"
    _write(own / "ca.pem", authority)
    _write(own / "users.acl", _users(passwords).encode())
    _write(own / "redis.conf", _configuration().encode())
    _write(own / "server.key", key)
    # written last: its presence marks the folder as complete
    _write(own / "server.pem", certificate)


def _users(passwords: dict[str, str]) -> str:
    lines = ["user default on nopass resetkeys resetchannels -@all +ping"]  # for health checks
    for name, role in ROLES.items():
        digest = hashlib.sha256(passwords[name].encode()).hexdigest()
        lines.append(f"user {name} on #{digest} resetchannels {role.rules}")
    return "\n".join(lines) + "\n"


def _configuration() -> str:
    lines = {
        "port": "0",
        "tls-port": "6379",
        "tls-cert-file": f"{MOUNTED}/server.pem",
        "tls-key-file": f"{MOUNTED}/server.key",
        "tls-ca-cert-file": f"{MOUNTED}/ca.pem",
        "tls-auth-clients": "no",
        "aclfile": f"{MOUNTED}/users.acl",
        "save": '""',
        "appendonly": "no",
        "maxmemory": "256mb",
        "dir": "/tmp",
    }
    return "".join(f"{name} {value}\n" for name, value in lines.items())


def _is_good(file: Path) -> bool:
    if not file.exists():
        return False
    ends = x509.load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc
    return ends - RENEWED_BEFORE > datetime.datetime.now(datetime.UTC)


def _certificate() -> tuple[bytes, bytes, bytes]:
    """Create (CA certificate, server certificate, server key).

    The CA's key signs once and is then discarded.
    """
    root_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    root = _named("Roundhouse")
    authority = (
        _begun(root, root, root_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(root_key, hashes.SHA256())
    )
    names = [x509.DNSName(REDIS_HOST), x509.DNSName("localhost")]
    certificate = (
        _begun(_named(REDIS_HOST), root, key.public_key())
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(root_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return authority.public_bytes(pem), certificate.public_bytes(pem), private


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + LIVES)
    )


# --- files ----------------------------------------------------------------------------------------


def _write(path: Path, body: bytes) -> None:
    make_private(path.parent)
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400), "wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m app.local.container_secrets", description=__doc__
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hosts", default="local", help="names of device hosts, between commas")
    asked = parser.parse_args()
    make(asked.folder, [name for name in asked.hosts.split(",") if name])


if __name__ == "__main__":
    main()
