"""Container images of registries: which references are well-formed, which registries allowed."""

from __future__ import annotations

import pytest

from app.core.model.descriptor import BadDescriptor, from_json, parse, to_wire
from app.core.model.device_choice import choice_in, text_of
from app.core.model.provisions import registry_image
from app.core.model.provisions.registry_image import (
    MAX_REFERENCE,
    RegistryImage,
    allowed_registries,
    image_of,
    refusal,
    trouble,
)

SHA256 = "0a" * 32
AT = f"@sha256:{SHA256}"


def task_with(image: str) -> dict[str, object]:
    return {"tasks": [{"name": "a", "run": {"command": ["true"]}, "image": image}]}


@pytest.mark.parametrize(
    ("text", "registry", "name"),
    [
        (f"docker.io/library/debian{AT}", "docker.io", "library/debian"),
        (f"docker.io/library/debian:12.5{AT}", "docker.io", "library/debian"),
        (f"localhost:5000/a{AT}", "localhost:5000", "a"),
        (f"localhost/a_b/c-d.e{AT}", "localhost", "a_b/c-d.e"),
        (f"10.1.0.7:443/team/a{AT}", "10.1.0.7:443", "team/a"),
    ],
)
def test_reference_by_digest_is_read(text: str, registry: str, name: str) -> None:
    assert image_of(text) == RegistryImage(registry=registry, name=name, sha256=SHA256)
    assert trouble(text) == ""


@pytest.mark.parametrize(
    "text",
    [
        "debian",
        f"debian{AT}",
        f"library/debian{AT}",
        f"docker.io/debian@sha256:{SHA256[:-1]}",
        f"docker.io/debian@sha512:{SHA256}",
        f"docker.io/Debian{AT}",
        f"docker.io/a/../b{AT}",
        f"docker.io//b{AT}",
        f"docker.io/a/{AT}",
        f"docker.io/-a{AT}",
        f"https://docker.io/a{AT}",
        f"user@docker.io/a{AT}",
        f"docker.io/{'a' * MAX_REFERENCE}{AT}",
        f"docker.io/a{AT}\n",
    ],
)
def test_reference_of_another_form_is_not_read(text: str) -> None:
    assert image_of(text) is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("python:3.11", "skopeo inspect --format '{{.Name}}@{{.Digest}}' docker://python:3.11"),
        ("ghcr.io/acme/train", "docker://ghcr.io/acme/train"),
        (f"debian{AT}", f"such as docker.io/library/debian{AT}"),
        (f"acme/train{AT}", f"such as docker.io/acme/train{AT}"),
        (f"docker.io/debian@sha256:{SHA256[1:]}", "the 64 hexadecimal digits"),
        ("../x", "must be REGISTRY/NAME@sha256:DIGEST"),
        ("a/" * 190, "must be REGISTRY/NAME@sha256:DIGEST"),
    ],
)
def test_image_without_its_digest_is_refused_with_what_to_write(text: str, told: str) -> None:
    with pytest.raises(BadDescriptor) as refused:
        parse(task_with(text))
    [fault] = refused.value.faults
    assert fault.pointer == "/tasks/0/image"
    assert told in fault.detail


def test_task_needs_a_host_that_fetches_from_the_registry_of_its_image() -> None:
    [task] = parse(task_with(f"localhost:5000/a/b{AT}")).tasks
    needed = task.devices.choice
    assert needed.needs == ("registry:localhost:5000",)
    assert choice_in(text_of(needed)) == needed
    assert from_json(to_wire(task)) == task


@pytest.mark.parametrize(
    ("listed", "name", "is_allowed"),
    [
        ("", "docker.io/a", False),
        ("docker.io", "docker.io/a", True),
        ("docker.io", "docker.io.evil.org/a", False),
        ("docker.io/library", "docker.io/library/a", True),
        ("docker.io/library", "docker.io/library", True),
        ("docker.io/library", "docker.io/library2/a", False),
        ("ghcr.io/acme/ , http://localhost:5000", "localhost:5000/a", True),
        ("http://localhost:5000", "localhost:5001/a", False),
    ],
)
def test_registry_is_allowed_by_host_and_path(listed: str, name: str, is_allowed: bool) -> None:
    image = image_of(f"{name}{AT}")
    assert image is not None
    allowed = allowed_registries(listed)
    assert (refusal(image, allowed) == "") is is_allowed
    assert (registry_image.allowing(image, allowed) is not None) is is_allowed


def test_refusal_lists_the_allowed_registries() -> None:
    image = image_of(f"quay.io/a{AT}")
    assert image is not None
    told = refusal(image, allowed_registries("docker.io/library,http://localhost:5000"))
    assert "images of quay.io/a are not allowed here" in told
    assert "allowed are docker.io/library, localhost:5000" in told
    assert "no registry is allowed" in refusal(image, ())


@pytest.mark.parametrize(
    "listed", ["debian", "https://docker.io", "docker.io/a b", "docker.io/../a", "ftp://x.y"]
)
def test_allowed_registry_of_another_form_is_refused(listed: str) -> None:
    with pytest.raises(ValueError, match="must be registries such as"):
        allowed_registries(listed)


def test_plain_http_is_only_spoken_with_a_registry_that_says_so() -> None:
    one, other = allowed_registries("http://localhost:5000/,ghcr.io")
    assert (one.is_plain_http, other.is_plain_http) == (True, False)
    assert (one.address, other.need) == ("localhost:5000", "registry:ghcr.io")
