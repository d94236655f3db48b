"""Container images fetched by skopeo from a registry on this machine: once for each digest, and
what each kind of failure says.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from app.core.model.provisions.registry_image import image_of
from tests.certificates import certificate_of
from tests.registry import Registry
from tests.workers.image_files import MANIFEST, entry, oci_layout, tar_of
from workers.process.isolation.host_mounts import HostMount
from workers.transfer.installs import image_fetcher
from workers.transfer.installs.container_images import (
    ContainerImages,
    HeldContainerImage,
    NotFromRegistry,
    NotUnpacked,
)

MIB = 2**20
SKOPEO = shutil.which(image_fetcher.PROGRAM) or ""
pytestmark = pytest.mark.skipif(
    not SKOPEO, reason="skopeo is missing; on Debian: apt-get install skopeo"
)


@pytest.fixture
def images(tmp_path: Path) -> ContainerImages:
    return ContainerImages(folder=tmp_path / "images", limit_bytes=8 * MIB)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    """A registry with an image of two layers, acme/small."""
    layers = tar_of(entry("a", b"1"), entry("b", b"2")), tar_of(entry(".wh.a"), entry("c", b"3"))
    layout = oci_layout(tmp_path / "layout", *layers, variables={"SMALL": "yes"})
    with Registry(layout, "acme/small") as registry:
        yield registry


def fetched(
    images: ContainerImages, registry: Registry, digest: str = "", *, is_plain_http: bool = True
) -> HeldContainerImage:
    image = image_of(registry.reference(digest))
    assert image is not None
    held = images.fetched(image, SKOPEO, is_plain_http=is_plain_http)
    os.close(held.fd)
    return held


def refusal(images: ContainerImages, registry: Registry, digest: str = "") -> str:
    with pytest.raises(NotFromRegistry) as raised:
        fetched(images, registry, digest)
    assert not [*(images.folder / "work").iterdir()]  # nothing is left of it
    assert not (images.folder / "built").exists()
    return str(raised.value)


def changed(registry: Registry, **fields: Any) -> str:
    """Add a manifest like the registry's, with other fields; return its digest."""
    return registry.add({**registry.document(), **fields})


# --- what is fetched ------------------------------------------------------------------------------


def test_image_is_fetched_once_for_all_tasks_that_name_its_digest(
    images: ContainerImages, registry: Registry
) -> None:
    with ThreadPoolExecutor(3) as pool:
        held = [*pool.map(lambda _: fetched(images, registry), range(3))]
    assert sorted(each.is_new for each in held) == [False, False, True]
    assert len({each.root for each in held}) == 1
    root = held[0].root
    assert sorted(path.name for path in root.iterdir()) == ["b", "c", "etc"]
    assert held[0].variables == {"SMALL": "yes"}
    assert held[0].digest == registry.digest
    blobs = [digest for kind, digest in registry.asked if kind == "blobs"]
    assert len(blobs) == len({*blobs}) == 3  # the configuration and two layers
    asked = len(registry.asked)
    assert fetched(images, registry).is_new is False
    assert len(registry.asked) == asked
    assert not [*(images.folder / "work").iterdir()]


def test_index_gives_the_manifest_for_this_machine(
    images: ContainerImages, registry: Registry
) -> None:
    size = len((registry.blobs / registry.digest).read_bytes())
    configured = registry.document(registry.document()["config"]["digest"].removeprefix("sha256:"))
    here = {"os": "linux", "architecture": configured["architecture"]}
    named = {"mediaType": MANIFEST, "size": size}
    index = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [
            {**named, "digest": f"sha256:{'0b' * 32}", "platform": {**here, "os": "windows"}},
            {**named, "digest": f"sha256:{registry.digest}", "platform": here},
        ],
    }
    digest = registry.add(index)
    held = fetched(images, registry, digest)
    assert (held.digest, held.is_new) == (digest, True)
    assert (held.root / "c").read_bytes() == b"3"
    assert ("manifests", "0b" * 32) not in registry.asked


def test_image_of_docker_is_fetched_as_it_is(images: ContainerImages, registry: Registry) -> None:
    manifest = registry.document()
    docker = "application/vnd.docker."
    manifest["mediaType"] = f"{docker}distribution.manifest.v2+json"
    manifest["config"]["mediaType"] = f"{docker}container.image.v1+json"
    manifest["layers"] = manifest["layers"][:1]
    manifest["layers"][0]["mediaType"] = f"{docker}image.rootfs.diff.tar.gzip"
    assert (fetched(images, registry, registry.add(manifest)).root / "a").read_bytes() == b"1"


def test_registered_image_is_not_given_to_a_task_that_knows_its_digest(
    images: ContainerImages, registry: Registry, tmp_path: Path
) -> None:
    theirs = oci_layout(tmp_path / "theirs", tar_of(entry("secret", b"x")))
    held = images.opened("theirs", HostMount(str(tmp_path), "theirs"))
    os.close(held.fd)
    with pytest.raises(NotFromRegistry, match="has no image acme/small"):
        fetched(images, registry, Registry.digest_in(theirs))


def test_registry_with_tls_must_have_a_certificate_that_the_host_trusts(
    images: ContainerImages, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, file = certificate_of("localhost"), tmp_path / "certificate.pem"
    file.write_bytes(b"".join(certificate))
    with Registry(registry.blobs.parents[1], "acme/small", certificate=file) as secure:
        with pytest.raises(NotFromRegistry, match="has a certificate that this host does not"):
            fetched(images, secure, is_plain_http=False)
        monkeypatch.setenv("SSL_CERT_FILE", str(file))
        assert fetched(images, secure, is_plain_http=False).is_new


def test_registry_without_tls_is_not_asked_unless_that_is_allowed(
    images: ContainerImages, registry: Registry
) -> None:
    with pytest.raises(NotFromRegistry, match="does not speak TLS; to allow that"):
        fetched(images, registry, is_plain_http=False)
    assert not registry.asked


# --- what is refused ------------------------------------------------------------------------------


def test_digest_that_the_registry_does_not_have_is_told(
    images: ContainerImages, registry: Registry
) -> None:
    told = refusal(images, registry, "0c" * 32)
    assert told == f"the registry {registry.host} has no image acme/small with this digest"


def test_registry_that_does_not_answer_is_told(images: ContainerImages, registry: Registry) -> None:
    with Registry(registry.blobs.parents[1], "acme/small") as gone:
        pass
    assert refusal(images, gone) == f"the registry {gone.host} does not answer"


def test_other_manifest_than_the_named_one_is_refused(
    images: ContainerImages, registry: Registry
) -> None:
    other = changed(registry, annotations={"other": "yes"})
    registry.altered[registry.digest] = (registry.blobs / other).read_bytes()
    assert "has another digest" in refusal(images, registry)
    assert {kind for kind, _ in registry.asked} == {"manifests"}


def test_other_layer_than_the_named_one_is_refused(
    images: ContainerImages, registry: Registry
) -> None:
    layer = registry.document()["layers"][1]["digest"].removeprefix("sha256:")
    registry.altered[layer] = (registry.blobs / layer).read_bytes()[::-1]
    assert layer in refusal(images, registry)


def test_image_that_is_too_large_is_refused_before_a_layer_is_fetched(
    images: ContainerImages, registry: Registry
) -> None:
    layers = registry.document()["layers"]
    layers[0]["size"] = 9 * MIB
    told = refusal(images, registry, changed(registry, layers=layers))
    assert told.startswith("its layers have 9.0 MiB, and this host takes 8.0 MiB")
    assert {kind for kind, _ in registry.asked} == {"manifests"}


def test_layer_that_does_not_end_is_refused_before_it_fills_the_disk(
    images: ContainerImages, registry: Registry
) -> None:
    registry.endless = registry.document()["layers"][0]["digest"].removeprefix("sha256:")
    assert "more than its manifest says" in refusal(images, registry)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"urls": ["http://127.0.0.1:1/x"]}, "is not in the registry: it names addresses"),
        ({"size": -1}, "negative size"),
        ({"mediaType": "application/vnd.oci.image.layer.v1.tar+zstd"}, "unpacks tar and gzip"),
        ({"digest": "sha256:../../x"}, "names a part without a SHA-256"),
    ],
)
def test_layer_that_cannot_be_used_is_refused_before_it_is_fetched(
    images: ContainerImages, registry: Registry, change: Any, told: str
) -> None:
    first, second = registry.document()["layers"]
    digest = changed(registry, layers=[{**first, **change}, second])
    assert told in refusal(images, registry, digest)
    assert {kind for kind, _ in registry.asked} == {"manifests"}


@pytest.mark.parametrize(
    ("member", "told"),
    [
        (entry("../out", b"x"), "leaves the root"),
        (entry("a", kind=tarfile.LNKTYPE, to="/etc/passwd"), "cannot be made"),
        (entry("zeros", bytes(9 * MIB)), "larger than this host allows"),
    ],
)
def test_hostile_layer_of_a_registry_meets_the_guards_of_the_unpacker(
    images: ContainerImages, tmp_path: Path, member: Any, told: str
) -> None:
    layout = oci_layout(tmp_path / "layout", tar_of(member))
    with Registry(layout, "acme/hostile") as registry:
        with pytest.raises(NotUnpacked, match=told) as raised:
            fetched(images, registry)
        assert raised.value.step == "unpacked"
    assert not [*(images.folder / "work").iterdir()]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            'time="2026-11-30" level=fatal msg="pinging: dial tcp: lookup x: no such host"',
            "the registry r.example is not found: its name has no address",
        ),
        (
            'level=fatal msg="reading manifest: requested access to the resource is denied"',
            "the registry r.example has no image a/b that it gives without credentials, which this "
            "host does not have",
        ),
        ("net/http: TLS handshake timeout", "the registry r.example does not answer"),
        ("\x1b[31mno space\nleft\x00 on device", "skopeo failed: [31mno space left on device"),
    ],
)
def test_message_of_skopeo_is_told_in_plain_words(tmp_path: Path, said: str, told: str) -> None:
    image = {"registry": "r.example", "name": "a/b", "sha256": "0a" * 32}
    order = {"image": image, "program": "", "is_plain_http": False, "limit_bytes": 1, "limit_s": 1}
    assert image_fetcher.Fetch(order, tmp_path).meaning_of(said) == told
