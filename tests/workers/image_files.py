"""Container images made of this machine's own files: root file systems and OCI layouts."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

JSON = dict[str, Any]

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
PROGRAMS = ("sh", "cat", "ls", "id", "env", "readlink", "touch", "sleep")
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


def root_file_system(folder: Path, programs: Iterable[str] = PROGRAMS) -> Path:
    """Make a small root file system of programs of this machine and their libraries."""
    for name in programs:
        found = shutil.which(name)
        assert found is not None, name
        _copied(Path(found), folder / "bin" / name)
        said = subprocess.run(["ldd", found], capture_output=True, text=True, check=True).stdout
        for line in said.splitlines():
            path = next((word for word in line.split() if word.startswith("/")), None)
            if path is not None:
                _copied(Path(path), folder / path[1:])
    (folder / "etc").mkdir(exist_ok=True)
    (folder / "etc" / "os-release").write_text("NAME=small\n")
    return folder


def _copied(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        shutil.copyfile(source.resolve(), target)
        target.chmod(0o755)


def tar_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w") as tar:
        for member, content in members:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return body.getvalue()


def entry(
    name: str,
    content: bytes = b"",
    *,
    kind: bytes = tarfile.REGTYPE,
    to: str = "",
    mode: int = 0o644,
) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.mode = kind, to, mode
    return member, content


def tar_of_folder(folder: Path) -> bytes:
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w") as tar:
        tar.add(folder, arcname=".")
    return body.getvalue()


def oci_layout(
    folder: Path, *layers: bytes, variables: Mapping[str, str] | None = None, **change: Any
) -> Path:
    """Write an OCI layout of these tar files; every second layer is compressed.

    `change` has other values for fields of the manifest.
    """
    folder.mkdir(parents=True)
    described = []
    for n, layer in enumerate(layers):
        is_gzip = n % 2 == 0
        body = gzip.compress(layer) if is_gzip else layer
        described.append(_blob(folder, body, LAYER + "+gzip" * is_gzip))
    env = [f"{name}={value}" for name, value in (variables or {}).items()]
    config = {"architecture": _MACHINES[platform.machine()], "os": "linux", "config": {"Env": env}}
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": _json_blob(folder, config, CONFIG),
        "layers": described,
        **change,
    }
    index = {"schemaVersion": 2, "manifests": [_json_blob(folder, manifest, MANIFEST)]}
    (folder / "index.json").write_text(json.dumps(index))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return folder


def _json_blob(folder: Path, said: JSON, media_type: str) -> JSON:
    return _blob(folder, json.dumps(said).encode(), media_type)


def _blob(folder: Path, body: bytes, media_type: str) -> JSON:
    sha256 = hashlib.sha256(body).hexdigest()
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)
    (blobs / sha256).write_bytes(body)
    return {"mediaType": media_type, "digest": f"sha256:{sha256}", "size": len(body)}
