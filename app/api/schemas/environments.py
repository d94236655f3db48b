"""Models of environments."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from app.api.schemas.base import (
    EXAMPLE_AT,
    EXAMPLE_SHA256,
    EXAMPLE_TENANT,
    EXAMPLE_USER,
    Out,
    example,
)

_EXAMPLE = {
    "id": "env_0192f0c1b7e97d3e9a4c5b6d7e8f9a11",
    "tenant_id": EXAMPLE_TENANT,
    "user_id": EXAMPLE_USER,
    "path": "requirements.txt",
    "sort": "requirements",
    "python": "3.11",
    "state": "locked",
    "message": "",
    "packages": [{"name": "tqdm", "version": "4.70.1"}],
    "platform": {"numpy": "2.4.6", "torch": "2.13.0"},
    "lock_sha256": EXAMPLE_SHA256,
    "lock_us": 412_000,
    "hosts": [{"host": "rack1", "size_bytes": 4_096_000, "build_us": 1_200_000}],
    "installing": [{"host": "rack2", "state": "building", "message": ""}],
    "created_at": EXAMPLE_AT,
    "locked_at": EXAMPLE_AT,
    "used_at": EXAMPLE_AT,
}


class LockedPackage(Out):
    name: str
    version: str


class EnvironmentHost(Out):
    """A host on which the environment lies built."""

    host: str
    size_bytes: int = Field(description="Disk that it takes there, for all tenants that use it.")
    build_us: int = Field(description="How long the build took, in microseconds.")


class EnvironmentInstalling(Out):
    """A host that is to have the environment for tasks that wait, and has not built it."""

    host: str
    state: Literal["waiting", "building", "failed"] = Field(
        description="`failed`: the host tries again as long as a task waits."
    )
    message: str = Field(description="What `uv` said, or what it waits for; else empty.")


class EnvironmentOut(Out):
    model_config = example(**_EXAMPLE)
    id: str
    tenant_id: str
    user_id: str = Field(description="The user whose request named the file first.")
    path: str = Field(description="The file of the bundle, as the first request named it.")
    sort: Literal["requirements", "lock"]
    python: str = Field(description="The version of Python.")
    state: Literal["locking", "locked", "failed", "stale"] = Field(
        description="`stale`: the platform has other versions now, or a user asked for a refresh;"
        " it is locked again when a request names the file."
    )
    message: str = Field(description="What `uv` said when it could not be locked; else empty.")
    packages: list[LockedPackage]
    platform: dict[str, str] = Field(
        description="The versions of the platform's packages over which it lies; empty if it is"
        " alone."
    )
    lock_sha256: str | None = Field(description="SHA-256 of the lock; null before it is locked.")
    lock_us: int = Field(description="How long the locking took, in microseconds.")
    hosts: list[EnvironmentHost] = Field(description="Hosts that are up and have it built.")
    installing: list[EnvironmentInstalling] = Field(
        description="Hosts that are up and are to build it, before a task has a device there."
    )
    created_at: datetime
    locked_at: datetime | None
    used_at: datetime | None = Field(description="When a request last named it.")


class EnvironmentWithLock(EnvironmentOut):
    model_config = example(**_EXAMPLE, lock="tqdm==4.70.1 --hash=sha256:…")
    lock: str | None = Field(
        description="The whole lock: each package with the hashes of its wheels."
    )
