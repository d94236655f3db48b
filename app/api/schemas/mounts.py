"""Models of mounts."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from app.api.schemas.base import EXAMPLE_AT, EXAMPLE_TENANT, KIND, In, Out, example
from app.core.model.protocol.wellformed import MAX_PATH, is_path

MAX_TENANTS = 1000  # that one mount may name

_TENANTS = (
    "The ids of the tenants that may use it, each with all tenants below it; null: every tenant."
)


def _path(path: str) -> str:
    if not is_path(path):
        raise ValueError(
            f"must be an absolute path of at most {MAX_PATH} characters, without '.', '..' and "
            "empty names in it"
        )
    return path


Sort = Annotated[
    Literal["folder", "image"],
    Field(
        description="`folder`: tasks see it at a target of `mounts`. `image`: a container image (an"
        " OCI layout or a root file system, each a folder or a tar file), which is the root of"
        " commands that name it as their `image`."
    ),
]
Tenants = Annotated[list[Annotated[str, Field(max_length=100)]], Field(max_length=MAX_TENANTS)]


class MountIn(In):
    model_config = example(name="imagenet", path="/data/imagenet", tenants=[EXAMPLE_TENANT])
    name: str = Field(pattern=f"^{KIND}$", description="The name by which tasks ask for it.")
    path: Annotated[str, AfterValidator(_path)] = Field(
        description="The folder or file. A host shows it only below its `ROUNDHOUSE_MOUNT_ROOTS`."
    )
    sort: Sort = "folder"
    read_only: Literal[True] = Field(
        True,
        description="Always true: a task has a user of its own each time, so files that it wrote "
        "would belong to no user.",
    )
    tenants: Tenants | None = Field(None, description=_TENANTS)


class MountPatch(In):
    model_config = example(tenants=[EXAMPLE_TENANT])
    tenants: Tenants | None = Field(description=_TENANTS)


class UnpackedOn(Out):
    """A host on which a container image lies unpacked."""

    host: str
    digest: str = Field(
        description="For an OCI layout, the digest of its manifest; for a root file system, a hash"
        " of its listing on that host."
    )
    size_bytes: int
    unpack_us: int = Field(description="How long the unpacking took, in microseconds.")


class MountOut(Out):
    model_config = example(
        name="imagenet",
        sort="folder",
        path="/data/imagenet",
        read_only=True,
        tenants=[EXAMPLE_TENANT],
        hosts=2,
        unpacked=[],
        version=1,
        created_at=EXAMPLE_AT,
    )
    name: str
    sort: Sort
    path: str | None = Field(description="null: only platform administrators see it.")
    read_only: bool
    tenants: list[str] | None = Field(
        description=f"{_TENANTS} Also null for callers who are no platform administrators."
    )
    hosts: int = Field(description="The number of hosts with a device that is up and shows it.")
    unpacked: list[UnpackedOn] = Field(
        description="Hosts that are up and have the container image unpacked, as it was launched"
        " last; none for a folder."
    )
    version: int
    created_at: datetime
