"""Fetches one container image from a registry, as a program: `skopeo` writes it, as an OCI layout.

It reads the documents first, each checked against its digest: the manifest or index that the task
names, and the manifest for this machine. So it knows all layers and their sizes before the first is
fetched. It refuses layers that lie outside the registry, and images that are too large. Then
`skopeo copy` fetches the blobs, and checks each against its digest; the unpacker does it again
(`workers.transfer.installs.image_unpacker`).

It runs in the sandbox layers that work here, except those of the network and of the user: it
reaches what the host reaches, and sees the host's programs, its certificates and its draft folder.
It has no credentials. It prints the digest of the manifest, or exits like the unpacker.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from app.core import units
from app.core.model.provisions.registry_image import RegistryImage
from workers.process.isolation.sandbox import Room
from workers.transfer.installs import image_source, image_unpacker
from workers.transfer.installs.image_source import BadContainerImage, ImageSource, LayoutPart
from workers.transfer.installs.kept_trees import disk_bytes

JSON = dict[str, Any]

LAYOUT = "layout"  # folder of the draft into which the image is written
PROGRAM = "skopeo"
DOCUMENT_S = 60.0  # limit for one document; a registry that does not answer fails by then
SLACK_BYTES = 2**24  # disk for the files that skopeo writes beside the blobs
TMP_BYTES = 2**26
_WATCH_S = 0.2  # interval of looks at the disk
_TOLD = 600  # most characters of skopeo's own message that are passed on
# What skopeo needs of the host to reach a registry: resolver, certificates, mirrors.
_NETWORK_FILES = (
    "/etc/resolv.conf",
    "/etc/nsswitch.conf",
    "/etc/gai.conf",
    "/etc/hosts",
    "/etc/pki",
    "/etc/containers",
    "/etc/docker/certs.d",
)
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")  # variables that name such files
#: Words in skopeo's messages, and what they mean; the first that is found holds.
_MEANINGS = (
    (
        re.compile(r"manifest unknown|name unknown|\b404\b|not found"),
        "has no image {name} with this digest",
    ),
    (
        re.compile(r"unauthorized|authentication required|denied|\b40[13]\b"),
        "has no image {name} that it gives without credentials, which this host does not have",
    ),
    (re.compile(r"toomanyrequests|\b429\b"), "takes no more calls of this host for now"),
    (
        re.compile(r"does not look like a tls handshake|http response to https client"),
        "does not speak TLS; to allow that, an administrator writes http:// before it in "
        "ROUNDHOUSE_IMAGE_REGISTRIES",
    ),
    (re.compile(r"\bx509: "), "has a certificate that this host does not trust"),
    (re.compile(r"no such host|server misbehaving"), "is not found: its name has no address"),
    (
        re.compile(
            r"connection refused|no route to host|network is unreachable|i/o timeout"
            r"|tls handshake timeout|deadline exceeded|connection reset|\beof\b"
        ),
        "does not answer",
    ),
)
_LOGGED = re.compile(r'level=(?:fatal|error) msg="(.*)"')


def main() -> NoReturn:
    order = image_unpacker.begin()
    making = Path(order["making"])
    nothing = making / "nothing"
    nothing.mkdir()
    room = Room(
        code=nothing,
        scratch=making,
        uid=os.geteuid(),
        folders=tuple(_needed(order)),
        tmp_bytes=TMP_BYTES,
    )
    inside = image_unpacker.enclose(room, without={"user", "network"})
    image_unpacker.end(lambda: Fetch(order, inside).fetched())


def _needed(order: JSON) -> Iterator[Path]:
    yield Path(order["program"])
    named = (os.environ[name] for name in CERTIFICATES if name in os.environ)
    for path in map(Path, (*_NETWORK_FILES, *named)):
        yield path
        if path.is_symlink():
            yield path.resolve()


class Fetch:
    """Fetches the image of an order into a folder; each step raises BadContainerImage."""

    def __init__(self, order: JSON, folder: Path) -> None:
        self.image = RegistryImage(**order["image"])
        self.program: str = order["program"]
        self.tls_verify = "false" if order["is_plain_http"] else "true"
        self.limit_bytes: int = order["limit_bytes"]
        self.until_s = time.monotonic() + order["limit_s"]
        self.folder = folder
        self.documents = dict[str, bytes]()  # by digest

    def fetched(self) -> JSON:
        """Write the OCI layout of the image; return the digest of its manifest."""
        named = {"digest": f"sha256:{self.image.sha256}", "size": 0}
        source = image_source.followed({"manifests": [named]}, self._document)
        blobs = self._parts(source)
        needed_bytes = sum(part.size_bytes for part in blobs)
        if needed_bytes > self.limit_bytes:
            most = units.size(self.limit_bytes)
            raise BadContainerImage(
                f"its layers have {units.size(needed_bytes)}, and this host takes {most} "
                "(ROUNDHOUSE_IMAGES_BYTES)"
            )
        copied = self.folder / "copied"
        self._copy(source.digest, copied, needed_bytes + SLACK_BYTES)
        self._lay_out(copied, [part.digest for part in blobs])
        return {"digest": source.digest}

    def _document(self, sha256: str) -> IO[bytes]:
        """Read a manifest or an index; the caller checks its digest."""
        limit_s = min(DOCUMENT_S, self.until_s - time.monotonic())
        how = ["inspect", "--raw", "--no-creds", f"--tls-verify={self.tls_verify}"]
        body = self._run([*how, self.image.at(sha256)], limit_s, None)
        self.documents[sha256] = body
        return io.BytesIO(body)

    def _parts(self, source: ImageSource) -> list[LayoutPart]:
        """Return the blobs of the image; each must come from the registry itself."""
        manifest = source.manifest or {}
        parts = [LayoutPart.of(manifest.get("config")), *image_unpacker.layers_of(manifest)]
        if any(part.size_bytes < 0 for part in parts):
            raise BadContainerImage("one of its layers has a negative size")
        if any("urls" in layer for layer in manifest["layers"]):
            raise BadContainerImage("one of its layers is not in the registry: it names addresses")
        return parts

    def _copy(self, sha256: str, folder: Path, most_bytes: int) -> None:
        how = ["copy", "--quiet", "--preserve-digests", "--src-no-creds"]
        how += [f"--src-tls-verify={self.tls_verify}", self.image.at(sha256), f"dir:{folder}"]
        self._run(how, self.until_s - time.monotonic(), most_bytes)

    def _lay_out(self, copied: Path, blobs: Sequence[str]) -> None:
        """Put the documents and the blobs where an OCI layout has them."""
        layout = self.folder / LAYOUT
        there = layout / "blobs" / "sha256"
        there.mkdir(parents=True)
        for sha256, body in self.documents.items():
            (there / sha256).write_bytes(body)
        for sha256 in dict.fromkeys(blobs):
            if not (copied / sha256).is_file():
                raise BadContainerImage(f"skopeo wrote no part {sha256[:12]}")
            (copied / sha256).rename(there / sha256)
        size = len(self.documents[self.image.sha256])
        named = {"digest": f"sha256:{self.image.sha256}", "size": size}
        (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [named]}))
        (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    # --- the program ---

    def _run(self, words: Sequence[str], limit_s: float, most_bytes: int | None) -> bytes:
        """Run skopeo; return its standard output. It may write `most_bytes` to the folder."""
        until_s = time.monotonic() + limit_s
        with subprocess.Popen(
            [self.program, "--insecure-policy", f"--tmpdir={self.folder}", *words],
            cwd=self.folder,
            env={**os.environ, "HOME": str(self.folder), "TMPDIR": str(self.folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            try:
                output, said = self._watched(process, until_s, most_bytes)
            finally:
                process.kill()
        if process.returncode:
            raise BadContainerImage(self.meaning_of(said.decode("utf-8", "replace")))
        return output

    def _watched(
        self, process: subprocess.Popen[bytes], until_s: float, most_bytes: int | None
    ) -> tuple[bytes, bytes]:
        while True:
            try:
                return process.communicate(timeout=_WATCH_S)
            except subprocess.TimeoutExpired:
                pass
            if most_bytes is not None and disk_bytes(self.folder) > most_bytes:
                raise BadContainerImage(
                    f"the registry {self.image.registry} sent more than its manifest says"
                )
            if time.monotonic() >= until_s:
                told = "does not answer" if most_bytes is None else "did not send all of it in time"
                raise BadContainerImage(f"the registry {self.image.registry} {told}")

    def meaning_of(self, said: str) -> str:
        """Return in plain words why skopeo failed."""
        told = " ".join((" ".join(_LOGGED.findall(said)) or said).split())
        told = told.replace('\\"', '"')
        for words, meaning in _MEANINGS:
            if words.search(told.lower()):
                name = self.image.name
                return f"the registry {self.image.registry} {meaning.format(name=name)}"
        printable = "".join(letter for letter in told[-_TOLD:] if letter.isprintable())
        return f"skopeo failed: {printable}"
