"""Makes a prefix with CRIU, the program that stores processes: `make criu`.

    python -m app.local.criu_prefix FOLDER [MIRROR]

The packages are Debian's, of one pinned version each (`criu_packages.txt`), with all libraries, so
any distribution with apt can take them and nothing of the system changes.  They come from the
mirror in the machine's own apt settings, through apt.  Each is checked against its hash.  A mirror
drops old versions after a while: then name one that keeps them.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

PACKAGES = Path(__file__).with_name("criu_packages.txt")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_APT_HELPER = "/usr/lib/apt/apt-helper"
_DOWNLOAD_S = 120.0
#: The files taken from the packages: programs, and libraries in whatever folder a package has them.
_PROGRAM, _LIBRARIES = "usr/sbin/criu", ("lib*.so*", "ld-linux*.so*")


class CannotInstall(Exception):
    """Raised when the prefix cannot be made; says what is missing."""


@dataclass(frozen=True, slots=True)
class Package:
    """A package of the archive, by its path and the SHA-256 of its file."""

    sha256: str
    path: str

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


def read_packages(text: str, architecture: str) -> list[Package]:
    """Return the packages of one architecture."""
    lines = (line.split() for line in text.splitlines() if line and not line.startswith("#"))
    return [Package(sha256, path) for kind, sha256, path in lines if kind == architecture]


def mirrors() -> list[str]:
    """Return the addresses of the archives in this machine's apt settings."""
    try:
        done = subprocess.run(
            ["apt-get", "indextargets", "--format", "$(REPO_URI)"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise CannotInstall(f"this machine has no apt that could be asked: {error}") from error
    return sorted({line for line in done.stdout.split() if line}, key=lambda uri: (len(uri), uri))


def download(package: Package, bases: list[str], folder: Path) -> Path:
    """Fetch a package from the first archive that has it, and check its hash."""
    target = folder / package.name
    for base in bases:
        address = f"{base.rstrip('/')}/{package.path}"
        command = [_APT_HELPER, "-o", "APT::Sandbox::User=root", "download-file", address]
        done = subprocess.run(
            [*command, str(target), f"SHA256:{package.sha256}"],
            capture_output=True,
            timeout=_DOWNLOAD_S,
            check=False,
        )
        if not done.returncode and _is_as_pinned(target, package):
            return target
        target.unlink(missing_ok=True)
    raise CannotInstall(
        f"no mirror of {', '.join(bases) or 'apt'} has {package.name} with the pinned hash; "
        "Debian drops old versions, so name a mirror that keeps them: make criu MIRROR=ADDRESS"
    )


def _is_as_pinned(file: Path, package: Package) -> bool:
    return hashlib.sha256(file.read_bytes()).hexdigest() == package.sha256


def install(folder: Path, bases: list[str]) -> None:
    """Make the prefix; an old one is replaced only when the new one is complete."""
    architecture = _ARCHITECTURES.get(platform.machine(), "")
    packages = read_packages(PACKAGES.read_text(), architecture)
    if not packages:
        raise CannotInstall(f"no packages are pinned for {platform.machine()}")
    with tempfile.TemporaryDirectory(prefix="criu-", dir=folder.parent) as work:
        files, made = Path(work) / "files", Path(work) / "prefix"
        for package in packages:
            _unpack(download(package, bases, Path(work)), files)
        _lay_out(files, made)
        made.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)


def _unpack(package: Path, files: Path) -> None:
    try:
        subprocess.run(["dpkg-deb", "-x", str(package), str(files)], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CannotInstall(f"{package.name} cannot be unpacked: {error}") from error


def _lay_out(files: Path, made: Path) -> None:
    """Put the program into bin/, and all libraries, including its loader, into lib/."""
    (made / "bin").mkdir(parents=True)
    (made / "lib").mkdir()
    shutil.copy2(files / _PROGRAM, made / "bin" / "criu")
    for pattern in _LIBRARIES:
        for library in files.rglob(pattern):
            if library.resolve().is_file() and "gconv" not in library.parts:
                shutil.copy2(library, made / "lib" / library.name)


def main(argv: list[str]) -> int:
    folder = Path(argv[0]).absolute()
    try:
        install(folder, [argv[1]] if argv[1:] and argv[1] else mirrors())
    except (CannotInstall, OSError, subprocess.TimeoutExpired) as error:
        sys.stderr.write(f"CRIU was not installed: {error}\n")
        return 1
    sys.stdout.write(f"CRIU lies in {folder}; a device worker looks for it when it starts.\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
