"""Reads the settings of a deployment from the environment (`ROUNDHOUSE_*`, `DATABASE_URL`,
`REDIS_URL`).

Every number has its unit in its name. Devices never read `database_url`: their processes are
started without it.
"""

from __future__ import annotations

import os
import re
import ssl
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from app.core.fairness.usage_decay import half_life
from app.core.model.protocol.wellformed import is_path
from app.core.model.provisions.network_policy import destination
from app.core.model.provisions.registry_image import allowed_registries
from app.core.security import grants
from app.core.security.addresses import addresses_by_name, networks
from app.core.security.sandbox_layers import Mode
from app.home import HOST, PORT, default_home


def _networks(listed: str) -> str:
    networks(listed)  # so that a mistake is reported when a process starts
    return listed


def _folders(listed: str) -> str:
    for folder in filter(None, listed.split(":")):
        if not is_path(folder):
            raise ValueError(f"must be absolute paths with ':' between them; got {folder!r}")
    return listed


def _place(address: str) -> str:
    """Refuse what would become a folder relative to where a process happens to start."""
    if address and not address.startswith("/") and not re.match(_BUCKET, address):
        raise ValueError(f"must be an absolute path, or s3://BUCKET/PREFIX; got {address!r}")
    return address


def _hosts(listed: str) -> str:
    addresses_by_name(listed)
    return listed


def _devices(listed: str) -> str:
    names = [name for name, _ in map(_one_device, filter(None, listed.split(",")))]
    if len({name.rpartition(".")[0] for name in names}) > 1:
        raise ValueError(f"must be devices of one host; got {listed!r}")
    if len({*names}) < len(names):
        raise ValueError(f"must name each device once; got {listed!r}")
    return listed


def _one_device(told: str) -> tuple[str, tuple[str, str]]:
    """Return the device's id, and its kind and which of this kind it is."""
    found = re.fullmatch(
        r"([A-Za-z0-9][A-Za-z0-9._-]*\.\d+)(?:=([a-z][a-z0-9_]*)(?::(\S+))?)?", told
    )
    if found is None:
        raise ValueError(f"must be devices like host-b.0=cuda:GPU-5b3f6c1e; got {told!r}")
    return found[1], (found[2] or "cpu", found[3] or "")


def _destinations(listed: str) -> str:
    for written in filter(None, listed.split(",")):
        destination(written)
    return listed


def _registries(listed: str) -> str:
    allowed_registries(listed)
    return listed


def _issuer(url: str) -> str:
    parts = urlsplit(url)
    if url and parts.scheme != "https" and parts.hostname not in ("127.0.0.1", "::1", "localhost"):
        raise ValueError("must be an https:// address, or an address of this machine")
    return url


def _web_address(url: str) -> str:
    parts = urlsplit(url)
    if url and (parts.scheme not in ("http", "https") or not parts.hostname):
        raise ValueError("must be an http or https address")
    return url


def _mail_server(url: SecretStr) -> SecretStr:
    parts = urlsplit(url.get_secret_value())
    if url.get_secret_value() and (parts.scheme not in ("smtp", "smtps") or not parts.hostname):
        raise ValueError("must be smtp://HOST:PORT or smtps://HOST:PORT")
    return url


def _grants(written: dict[str, str]) -> dict[str, str]:
    grants.read(written)
    return written


# days; no timestamp of Postgres lies much further back
KeptDays = Annotated[float, Field(ge=0, le=1_000_000, allow_inf_nan=False)]
_BUCKET = r"s3://[A-Za-z0-9][A-Za-z0-9._-]*(/|$)"
_LABEL = r"[a-z0-9][a-z0-9._-]{0,62}"
_LOCATION = r"^([A-Za-z0-9][A-Za-z0-9._:-]{0,62}(/[A-Za-z0-9][A-Za-z0-9._:-]{0,62}){0,7})?$"
_LABELS = rf"^({_LABEL}(,{_LABEL})*)?$"


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="ROUNDHOUSE_", extra="ignore", frozen=True)

    home: Path = Field(default_factory=default_home)
    database_url: SecretStr = Field(SecretStr(""), validation_alias="DATABASE_URL")
    redis_url: SecretStr = Field(SecretStr(""), validation_alias="REDIS_URL")
    redis_ca: Path | None = None  # file of the CA that signed the certificate of a rediss:// server
    redis_certificate: Path | None = None  # our client certificate, if the server asks for one
    redis_key: Path | None = None
    # address at which other hosts reach this host; default: the one that the broker sees
    address: str = ""
    # the store: a folder, or s3://bucket/prefix; default: home/store
    store: Annotated[str, AfterValidator(_place)] = ""

    # the API
    # processes that serve it, on this machine as `make up` starts them, or on all machines together
    api_processes: int = Field(1, ge=1, le=64)
    host: str = HOST
    port: int = PORT
    body_limit_bytes: int = 4 * 2**20
    bundle_limit_bytes: int = 64 * 2**20
    datablock_limit_bytes: int = Field(64 * 2**30, gt=0)  # per datablock
    # per tenant, all datablocks together, and pinned and best checkpoints; 0: no limit
    datablock_quota_bytes: int = Field(256 * 2**30, ge=0)
    # most requests of a tenant that are kept from deletion; 0: no limit
    kept_requests_max: int = Field(1000, ge=0)
    # most checkpoints of a tenant that are pinned; 0: no limit
    pinned_checkpoints_max: int = Field(100, ge=0)
    web_session_s: float = 12 * 3600.0
    # most calls a minute of a key, and of all keys of a tenant; 0: no limit
    key_reads_per_min: int = Field(120_000, ge=0)
    key_writes_per_min: int = Field(120_000, ge=0)
    tenant_reads_per_min: int = Field(240_000, ge=0)
    tenant_writes_per_min: int = Field(240_000, ge=0)
    # file with the keys that encrypt the secrets of tenants; default: home/secrets.key
    secrets_key: Path | None = None
    wrong_keys_per_min: int = Field(120, ge=0)  # wrong keys a minute from one address; 0: no limit
    # most calls of a key in progress at once in one process, streams and waits included
    key_calls_max: int = Field(200, gt=0)
    tenant_calls_max: int = Field(1000, gt=0)  # the same for all keys of a tenant together
    # most event streams open at once in one process: of a key, and in all
    key_streams_max: int = Field(64, gt=0)
    streams_max: int = Field(1000, gt=0)
    # sign-in with an OpenID Connect provider; without an issuer there is none
    oidc_issuer: Annotated[str, AfterValidator(_issuer)] = ""
    oidc_client_id: str = ""
    oidc_client_secret: SecretStr = SecretStr("")
    # the audience that tokens for the API must have; default: the client's id
    oidc_audience: str = ""
    oidc_claim: str = "groups"
    oidc_grants: Annotated[dict[str, str], AfterValidator(_grants)] = {}  # value -> TENANT:ROLE
    # webhooks: networks, separated by commas, that may be called although they are not public
    webhook_networks: Annotated[str, AfterValidator(_networks)] = ""
    webhook_timeout_s: float = Field(15.0, gt=0)  # time limit for a receiver to answer
    # time on a device without progress after which channels are told that a task has stalled
    stalled_s: float = Field(1800.0, gt=0, allow_inf_nan=False)
    # address at which people open the pages, for links in messages to channels; "": no links
    public_url: Annotated[str, AfterValidator(_web_address)] = ""
    # mail: smtp://USER:PASSWORD@HOST:PORT, or smtps:// for TLS from the start; "": no mail
    smtp_url: Annotated[SecretStr, AfterValidator(_mail_server)] = SecretStr("")
    mail_from: str = Field("", pattern=r"^([^\s@<>]+@[^\s@<>]+)?$")  # sender of mails
    # names and addresses under which the API answers, with commas; *.NAME: all below; "": any
    hosts: str = Field("", pattern=r"^[\w.*:,-]*$")
    # the index of packages for environments, an address as `uv` takes it; default: uv's own
    # configuration on this machine
    package_index: str = Field("", pattern=r"^\S*$")
    # further hosts that a build may reach, as HOST:PORT with commas: where the index has its wheels
    package_hosts: Annotated[str, AfterValidator(_destinations)] = ""
    # registries from which tasks may have container images, with commas, as in docker.io/library;
    # the API refuses all others, and a device worker fetches from no others; default: none
    image_registries: Annotated[str, AfterValidator(_registries)] = ""
    wheels: Path | None = None  # a folder of wheels, used instead of any index
    # time limit for locking one environment
    package_lock_s: float = Field(120.0, gt=0, allow_inf_nan=False)
    metrics_tenants_max: int = Field(500, ge=0)  # most tenants in /metrics

    # how long control keeps ended things; 0: for ever
    # ended requests, with all that belongs to them
    requests_kept_days: KeptDays = 0
    checkpoints_kept_days: KeptDays = 1  # checkpoints of ended tasks
    decisions_kept_days: KeptDays = 7
    deliveries_kept_days: KeptDays = 30  # sent webhooks
    # a folder, or s3://bucket/prefix, that keeps the rows of deleted requests; default: none does
    archive: Annotated[str, AfterValidator(_place)] = ""

    # the island
    island: str = "local"
    island_key: Path | None = None  # private key for orders; default: home/islands/<island>.key
    tick_s: float = Field(1.0, gt=0, allow_inf_nan=False)
    leader_s: float = Field(5.0, gt=0, allow_inf_nan=False)
    half_life_s: Annotated[float, AfterValidator(half_life)] = 7 * 86400.0  # 0: no decay
    idle_credit_s: float = Field(3 * 86400.0, ge=0, allow_inf_nan=False)
    slice_min_s: float = Field(1.0, ge=0, allow_inf_nan=False)
    slice_max_s: float = Field(600.0, ge=0, allow_inf_nan=False)
    # largest part of a kind's devices that may stand idle, kept for gangs whose turn has come
    wait_share: float = Field(0.02, ge=0, le=0.5)
    # the longest notice before a pause; a reclaimed device waits for it (`notice` of a task)
    notice_max_s: float = Field(300.0, ge=0, le=300, allow_inf_nan=False)
    sharers_max: int = Field(4, ge=0)  # most graphs that take turns on one device; 0 or 1: no turns
    grow_after_s: float = Field(
        5.0, ge=0, allow_inf_nan=False
    )  # minimum time from the start or a resize of a task until it grows
    # what a second of a new device costs that is no CPU; that of a CPU device costs 1
    accelerator_cost: float = Field(10.0, ge=0.001, le=1e6)
    order_resend_s: float = Field(2.0, gt=0, allow_inf_nan=False)
    usage_bucket_s: int = Field(10, gt=0)
    island_lost_s: float = Field(
        120.0, ge=0, allow_inf_nan=False
    )  # time without signs of life after which an island's tasks move to others; 0: never
    # assumed bytes per second between any two islands
    island_link_bytes_per_s: int = Field(1_250_000_000, gt=0)
    move_deadline_s: float = Field(
        600.0, gt=0, allow_inf_nan=False
    )  # time limit for a move: from then on it is given up if the copy is not complete

    # leases (reliability: TTL 10, margin 3, beat 2)
    lease_s: float = 10.0
    lease_margin_s: float = 3.0
    beat_s: float = 2.0
    # most heartbeats a second for which an island asks: its devices report less often if they are
    # many, and their leases are longer
    island_beats_per_s: float = Field(400.0, gt=0, allow_inf_nan=False)
    # limit of the time after a lease for which a device with long steps is left alone
    step_grace_s: float = Field(60.0, ge=0, allow_inf_nan=False)

    # a device worker
    # the devices of this host that it serves, between commas: "<host>.<n>=<kind>:<which>", where
    # kind and which are as below; one without a kind is a CPU device
    devices: Annotated[str, AfterValidator(_devices)] = ""
    device: str = ""  # "<host>.<n>", if it serves one; `device_kind` and `accelerator` belong to it
    # its island's public key, or a file with it; default: home/islands/<island>.pub
    island_public_key: str = ""
    device_kind: str = "cpu"  # the kind of device, as torch names it
    # labels of the device, separated by ",", for which tasks ask (`devices.labels`, `avoid_labels`)
    device_labels: str = Field("", pattern=_LABELS)
    # rack of this host; gangs get devices that are near each other
    rack: str = Field("", pattern=_LOCATION)
    # the device's location inside its host, such as numa0/switch1; default: what the PCI tree of
    # the host says of a GPU
    device_location: str = Field("", pattern=_LOCATION)
    accelerator: str = ""  # UUID or index of the accelerator that this worker serves
    device_nodes: str = ""  # device nodes of it, between commas, where its kind has no finder
    device_threads: int = 1
    # memory for tasks; 0: all of an accelerator's, 4 GiB on a CPU device
    device_memory_bytes: int = Field(0, ge=0)
    # host memory for images of residents; 0: as much as the device's memory
    host_memory_bytes: int = Field(0, ge=0)
    # host memory of a resident in addition to the device's memory and its images: the interpreter,
    # data loaders, pages of files, /tmp and /dev/shm
    resident_overhead_bytes: int = Field(2 * 2**30, ge=2**28)
    # disk of a resident's scratch folder, reserved while it lives; 0: a 64th of the free space
    scratch_bytes: int = Field(0, ge=0)
    host_cache_bytes: int = Field(16 * 2**30, ge=0)  # disk space for cached inputs and outputs
    # disk of the host for environments; those in use stay beyond it
    environments_bytes: int = Field(32 * 2**30, ge=0)
    # time limit for building one environment
    environment_build_s: float = Field(900.0, gt=0, allow_inf_nan=False)
    # disk of the host for unpacked container images, together and each; those in use stay beyond it
    images_bytes: int = Field(64 * 2**30, ge=0)
    block_bytes_per_s: int = Field(0, ge=0)  # rate of blocks sent to other hosts; 0: no limit
    # folders of this host, with ":" between them, below which tasks may see mounts; none: nowhere
    mount_roots: Annotated[str, AfterValidator(_folders)] = ""
    # what watches the device's health: auto, none, nvidia, or file:FOLDER with a file DEVICE.json
    device_monitor: str = Field("auto", pattern=r"^(auto|none|nvidia|file:/.+)$")
    # interval of the monitor's readings
    health_every_s: float = Field(5.0, gt=0, allow_inf_nan=False)
    # how long a device may be too hot, silent or without its monitor before it is cordoned
    health_patience_s: float = Field(30.0, gt=0, allow_inf_nan=False)
    # CRIU, which stores processes of commands: its prefix, or the program; default: the prefix that
    # `make criu` makes
    criu: str = ""
    # the network of tasks (`network.allow`): off, or through the proxy of this worker
    egress: Literal["on", "off"] = "on"
    # networks, separated by commas, that tasks may reach although they are not public
    egress_private: Annotated[str, AfterValidator(_networks)] = ""
    # names with fixed addresses for tasks, as in index.house=10.1.0.7,hub.house=10.1.0.8
    egress_hosts: Annotated[str, AfterValidator(_hosts)] = ""
    residents_max: int = 4  # most jobs kept in memory on a device: one runs, the others are paused
    stop_grace_s: float = 5.0
    # a worker that is told to stop pauses and saves its tasks within this
    drain_s: float = Field(8.0, gt=0, allow_inf_nan=False)
    sandbox: Mode = "required"

    @property
    def each_device(self) -> list[Settings]:
        """The settings of each device that this worker serves."""
        if not self.devices:
            return [self] if self.device else []
        told = [_one_device(one) for one in filter(None, self.devices.split(","))]
        return [
            self.model_copy(update={"device": id, "device_kind": kind, "accelerator": which})
            for id, (kind, which) in told
        ]

    @property
    def island_key_file(self) -> Path:
        return self.island_key or self.home / "islands" / f"{self.island}.key"

    @property
    def secrets_key_file(self) -> Path:
        return self.secrets_key or self.home / "secrets.key"

    @property
    def host_key_file(self) -> Path:
        """The file with the private key by which this host's devices sign."""
        return self.home / "run" / "signing.key"

    @property
    def host_file(self) -> Path:
        """The file in which the worker of this host writes the devices that it serves."""
        return self.home / "run" / "host.json"

    @property
    def its_island_key(self) -> str:
        """The public key of a device's island, or the file that contains it."""
        return self.island_public_key or str(self.home / "islands" / f"{self.island}.pub")

    @property
    def redis_tls(self) -> dict[str, Any]:
        """TLS options that verify a rediss:// server; empty for a server without TLS.

        The certificate must match the server's name, and be signed by our CA or by one of the
        system's.
        """
        if not self.redis_url.get_secret_value().startswith("rediss://"):
            return {}
        files = {
            "ssl_ca_certs": self.redis_ca,
            "ssl_certfile": self.redis_certificate,
            "ssl_keyfile": self.redis_key,
        }
        given = {name: str(file) for name, file in files.items() if file is not None}
        return {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_check_hostname": True, **given}

    @property
    def store_address(self) -> str:
        return self.store or str(self.home / "store")


@lru_cache
def settings() -> Settings:
    """The settings of this process, read once.

    ROUNDHOUSE_SECRETS names a folder with a file for each setting that is a secret, such as
    `redis_url`; the environment wins.
    """
    return Settings(_secrets_dir=os.environ.get("ROUNDHOUSE_SECRETS"))
