"""Small wheels, so that environments are locked and built without any index."""

from __future__ import annotations

import base64
import hashlib
import re
import zipfile
from collections.abc import Mapping, Sequence
from importlib.metadata import distribution
from pathlib import Path


def add_wheel(
    folder: Path,
    name: str,
    version: str = "1.0",
    files: Mapping[str, str] | None = None,
    requires: Sequence[str] = (),
) -> str:
    """Write a wheel with the files, by default one module of its name; return its SHA-256."""
    folder.mkdir(parents=True, exist_ok=True)
    base = f"{name.replace('-', '_')}-{version}"
    module = f"VERSION = {version!r}\n"
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    about += "".join(f"Requires-Dist: {one}\n" for one in requires)
    contents = {
        **(files if files is not None else {f"{name.replace('-', '_')}.py": module}),
        f"{base}.dist-info/METADATA": about,
        f"{base}.dist-info/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    record = "".join(
        f"{path},sha256={_digest(text)},{len(text.encode())}\n" for path, text in contents.items()
    )
    record_path = f"{base}.dist-info/RECORD"
    wheel = folder / f"{base}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in {**contents, record_path: f"{record}{record_path},,\n"}.items():
            # a fixed time, so that the same wheel has the same hash in every run
            archive.writestr(zipfile.ZipInfo(path), text)
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def repack(folder: Path, name: str) -> None:
    """Write the wheel of a package of plain Python that is installed here, and of what it needs."""
    found = distribution(name)
    files = [path for path in found.files or () if path.suffix in _PLAIN and ".." not in path.parts]
    files = [path for path in files if path.name != "RECORD"]  # written anew
    contents = {str(path): path.read_text(encoding="utf-8") for path in files}
    base = f"{name.replace('-', '_')}-{found.version}"
    record = "".join(
        f"{path},sha256={_digest(text)},{len(text.encode())}\n" for path, text in contents.items()
    )
    record_path = f"{base}.dist-info/RECORD"
    here = f"{found.metadata['Name'].replace('-', '_')}-{found.version}.dist-info"
    with zipfile.ZipFile(folder / f"{base}-py3-none-any.whl", "w") as archive:
        for path, text in contents.items():
            archive.writestr(zipfile.ZipInfo(path.replace(here, f"{base}.dist-info")), text)
        archive.writestr(record_path, f"{record}{record_path},,\n")
    for needed in found.requires or ():
        if "extra ==" not in needed:
            repack(folder, re.split(r"[^A-Za-z0-9_.-]", needed)[0])


_PLAIN = {".py", ".typed", ".txt", "", ".pyi"}
