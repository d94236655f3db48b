"""Reads container images that a task names by registry, name and digest, and decides which
registries are allowed.

`ghcr.io/acme/train@sha256:…` names content: whatever a registry does later, the digest names the
same files. A tag names something else tomorrow, so a tag alone is refused. An administrator lists
the registries (ROUNDHOUSE_IMAGE_REGISTRIES), for the API and on each host.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

MAX_REFERENCE = 400  # most characters of a reference
#: The beginning of a need for a registry; the registry's host follows.
REGISTRY = "registry:"
PLAIN_HTTP = "http://"  # prefix of an allowed registry that is asked without TLS

_HOST = r"[a-z0-9][a-z0-9.-]{0,62}(?::[0-9]{1,5})?"
_PATH = r"[a-z0-9][a-z0-9._/-]{0,198}"
_TAG = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
_IMAGE = re.compile(rf"({_HOST})/({_PATH})(?::{_TAG})?@sha256:([0-9a-f]{{64}})")
_WITHOUT_DIGEST = re.compile(rf"{_HOST}(?:/{_PATH})?(?::{_TAG})?")
_ALLOWED = re.compile(rf"({_HOST})(?:/({_PATH}))?")
_FORM = "REGISTRY/NAME@sha256:DIGEST"
_INSPECT = "skopeo inspect --format '{{.Name}}@{{.Digest}}' docker://"


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryImage:
    """Names a container image of a registry; `sha256` is the digest of its manifest, or of an
    index of manifests.
    """

    registry: str
    name: str
    sha256: str

    @property
    def need(self) -> str:
        """Return what a device must offer so that a task can run in the image."""
        return need_of_registry(self.registry)

    def at(self, sha256: str) -> str:
        """Return the address of a manifest of this name, as `skopeo` takes it."""
        return f"docker://{self.registry}/{self.name}@sha256:{sha256}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedRegistry:
    """Describes a registry, or a part of it below a path, from which images may come."""

    registry: str
    below: str = ""
    is_plain_http: bool = False

    def allows(self, image: RegistryImage) -> bool:
        return image.registry == self.registry and (
            not self.below or f"{image.name}/".startswith(f"{self.below}/")
        )

    @property
    def need(self) -> str:
        """Return what a host that fetches from the registry offers."""
        return need_of_registry(self.registry)

    @property
    def address(self) -> str:
        return f"{self.registry}/{self.below}" if self.below else self.registry


def need_of_registry(registry: str) -> str:
    """Return what a device must offer so that a task can have an image of the registry."""
    return f"{REGISTRY}{registry}"


def is_reference(text: str) -> bool:
    """True if a text can only be meant as an image of a registry, not as a registered name."""
    return any(sign in text for sign in "/:@")


def image_of(text: str) -> RegistryImage | None:
    """Return the image that a well-formed reference names; None for any other text.

    A tag before the digest is left out: the digest says which image it is.
    """
    if len(text) > MAX_REFERENCE or (found := _IMAGE.fullmatch(text)) is None:
        return None
    registry, name, sha256 = found.groups()
    if not _is_host(registry) or not _is_path(name):
        return None
    return RegistryImage(registry=registry, name=name, sha256=sha256)


def trouble(text: str) -> str:
    """Return what is wrong with a reference, and what to write; "" for one that is well-formed."""
    if image_of(text) is not None:
        return ""
    named, _, digest = text.partition("@")
    if len(text) <= MAX_REFERENCE and _WITHOUT_DIGEST.fullmatch(named):
        if not digest:
            return (
                "must name its digest, as a tag can name another image tomorrow; this prints what "
                f"to write: {_INSPECT}{named}"
            )
        if not _is_host(named.partition("/")[0]):
            hub = "docker.io" if "/" in named else "docker.io/library"
            return f"must name its registry too: {_FORM}, such as {hub}/{text:.150}"
    return (
        f"must be {_FORM}, with the 64 hexadecimal digits that this prints: {_INSPECT}REGISTRY/NAME"
    )


def allowed_registries(listed: str) -> tuple[AllowedRegistry, ...]:
    """Parse registries with commas between them; raises ValueError."""
    return tuple(_allowed(one.strip()) for one in listed.split(",") if one.strip())


def allowing(image: RegistryImage, allowed: Iterable[AllowedRegistry]) -> AllowedRegistry | None:
    """Return the entry that allows an image; None if no entry does."""
    return next((each for each in allowed if each.allows(image)), None)


def refusal(image: RegistryImage, allowed: Iterable[AllowedRegistry]) -> str:
    """Return why an image may not be fetched; "" if it may."""
    if allowing(image, allowed) is not None:
        return ""
    listed = ", ".join(dict.fromkeys(each.address for each in allowed))
    here = f"allowed are {listed}" if listed else "no registry is allowed"
    return (
        f"images of {image.registry}/{image.name} are not allowed here; {here}; "
        "an administrator allows registries with ROUNDHOUSE_IMAGE_REGISTRIES"
    )


def unoffered(image: RegistryImage, kind: str) -> str:
    """Return why a task can never run if no device offers the registry of its image."""
    return (
        f"no host with a {kind} device fetches container images from {image.registry}; its "
        "administrator sets ROUNDHOUSE_IMAGE_REGISTRIES for the device worker, and installs the "
        "Debian package skopeo"
    )


def _allowed(one: str) -> AllowedRegistry:
    is_plain_http = one.startswith(PLAIN_HTTP)
    found = _ALLOWED.fullmatch(one.removeprefix(PLAIN_HTTP).removesuffix("/"))
    if found is None or not _is_host(found[1]) or not _is_path(found[2] or "a"):
        raise ValueError(
            "must be registries such as docker.io/library or http://localhost:5000, with commas "
            f"between them; got {one!r}"
        )
    return AllowedRegistry(registry=found[1], below=found[2] or "", is_plain_http=is_plain_http)


def _is_host(name: str) -> bool:
    """True for the name of a registry: it has a point or a port, so it is no part of a path."""
    return name == "localhost" or "." in name or ":" in name


def _is_path(name: str) -> bool:
    """True if each part of a path begins and ends with a letter or a digit."""
    return all(part and part[0].isalnum() and part[-1].isalnum() for part in name.split("/"))
