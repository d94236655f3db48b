"""Locks the environments of requests: has `uv` choose the version of each package, with its hash.

It runs in control.  Several may run: a locker that takes an environment has a lease on it.  `uv`
runs in a process with limits and without secrets, in a folder of its own that is removed
afterwards.  It takes wheels only, so nothing of a package is run.

A lock that lies over the platform's packages does not contain them.  While `uv` chooses, an empty
package of the same name and version takes the place of each.  So a package that needs another
version of one is a contradiction, which uv reports in its own words.
"""

from __future__ import annotations

import logging
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from app.core.model.provisions.package_lock import (
    PLATFORM,
    PackageLock,
    over_platform,
    public,
    stand_ins,
)
from app.core.model.provisions.requirements import (
    BadFile,
    PinnedPackage,
    read_hashed,
    read_pinned,
    read_requirements,
    read_uv_lock,
    text_of,
)
from app.db import transactions
from app.intake import environments
from app.intake.environments import ClaimedEnvironment
from app.settings import settings
from app.storage.store import Store
from workers.control.loop import Loop
from workers.process import uv
from workers.process.uv import NoUv, UvResult

log = logging.getLogger(__name__)

LEASE_FACTOR = 3  # most runs of uv for one environment, each within the time limit
REFRESH_S = 60.0


class CannotLock(Exception):
    """Raised when an environment cannot be locked; the message is for its owner."""


class PackageLocker(Loop):
    def __init__(self) -> None:
        super().__init__("package locker")
        self._refreshed_s = 0.0

    def look(self) -> float:
        self._refresh()
        limit_s = settings().package_lock_s
        with transactions.transaction() as session:
            environments.cancel_waiting(session)
            claimed = environments.claim(session, for_s=LEASE_FACTOR * limit_s + 30)
        if claimed is None:
            return settings().tick_s
        began_s = time.monotonic()
        try:
            lock = locked(claimed, limit_s)
            Store.at(settings().store_address).put([lock.text.encode()])
        except (CannotLock, BadFile) as error:
            with transactions.transaction() as session:
                environments.keep_failure(session, claimed.id, str(error), _us(began_s))
        else:
            with transactions.transaction() as session:
                environments.keep_lock(session, claimed.id, lock, _us(began_s))
        return 0.0

    def _refresh(self) -> None:
        """Check now and then whether locks were made for other versions of the platform's
        packages.
        """
        if time.monotonic() < self._refreshed_s:
            return
        self._refreshed_s = time.monotonic() + REFRESH_S
        with transactions.transaction() as session:
            environments.refresh(session, installed())


def _us(began_s: float) -> int:
    return int((time.monotonic() - began_s) * 1e6)


@cache
def installed() -> Mapping[str, str]:
    """Return the platform's packages that no environment replaces, with their versions."""
    found = dict[str, str]()
    for name in PLATFORM:
        try:
            found[name] = public(version(name))
        except PackageNotFoundError:
            log.warning("the platform's package %s is not installed here", name)
    return found


def locked(claimed: ClaimedEnvironment, limit_s: float) -> PackageLock:
    """Lock one environment; raises CannotLock and BadFile."""
    with tempfile.TemporaryDirectory(prefix="roundhouse-lock-") as folder:
        try:
            return _Locking(claimed, Path(folder), limit_s).lock()
        except NoUv as error:
            raise CannotLock(f"Control cannot lock environments: {error}.") from error


class _Locking:
    """Locks one environment, in a folder of its own."""

    def __init__(self, claimed: ClaimedEnvironment, folder: Path, limit_s: float) -> None:
        self.claimed, self.folder, self.limit_s = claimed, folder, limit_s
        self.text = text_of(claimed.body)
        self.options = ["--python-version", claimed.python, *uv.ONLY_WHEELS]
        self.options += uv.index_options(settings())

    def lock(self) -> PackageLock:
        if self.claimed.sort == "requirements":
            return self._chosen()
        lock = self._over_if_it_fits(self._pinned())
        self._check(lock)
        return lock

    # --- requirements ---

    def _chosen(self) -> PackageLock:
        """Choose the versions: on top of the platform's packages, or without them if they do not
        fit.
        """
        wanted = self._write("requirements.txt", "\n".join(read_requirements(self.text)) + "\n")
        over = {} if self.claimed.own_python else installed()
        if over:
            done = self._compile(wanted, *self._over_options(over))
            if not done.status:
                rest, _ = over_platform(_read(done.output), over)
                return PackageLock(python=self.claimed.python, packages=tuple(rest), over=over)
            if not self.claimed.alone:
                raise CannotLock(_uv_message(done, over))
        done = self._compile(wanted)
        if done.status:
            raise CannotLock(done.said)
        return PackageLock(python=self.claimed.python, packages=tuple(_read(done.output)))

    def _compile(self, wanted: Path, *more: str) -> UvResult:
        how = ["--generate-hashes", "--no-header", "--no-annotate", "--quiet"]
        return self._uv("pip", "compile", wanted.name, *how, *self.options, *more)

    def _over_options(self, over: Mapping[str, str]) -> list[str]:
        stands = self.folder / "platform"
        stands.mkdir()
        pins = [f"{name}=={told}" for name, told in stand_ins(over)]
        for name, told in stand_ins(over):
            _write_empty_wheel(stands, name, told)
        self._write("platform.txt", "\n".join(pins) + "\n")
        return ["--find-links", stands.name, "--constraint", "platform.txt"]

    # --- locks ---

    def _pinned(self) -> Sequence[PinnedPackage]:
        if self.claimed.path.rpartition("/")[2] != "uv.lock":
            return read_pinned(self.claimed.path, self.text)
        self._write("pyproject.toml", read_uv_lock(self.text))
        self._write("uv.lock", self.text)
        how = ["--frozen", "--no-dev", "--no-emit-project", "--no-header", "--no-annotate"]
        done = self._uv("export", "--quiet", "--format", "requirements-txt", *how)
        if done.status:
            raise CannotLock(done.said)
        return _read(done.output)

    def _over_if_it_fits(self, pinned: Sequence[PinnedPackage]) -> PackageLock:
        if not self.claimed.own_python:
            rest, unfit = over_platform(pinned, installed())
            if not unfit:
                return PackageLock(
                    python=self.claimed.python, packages=tuple(rest), over=installed()
                )
            if not self.claimed.alone:
                raise CannotLock(f"The lock has {', '.join(unfit)}. {_WHY_OVER}")
        return PackageLock(python=self.claimed.python, packages=tuple(pinned))

    def _check(self, lock: PackageLock) -> None:
        """Let uv look for a wheel of each package; nothing is installed."""
        written = self._write("lock.txt", lock.text)
        how = ["--dry-run", "--no-deps", "--require-hashes", "--target", "nowhere"]
        done = self._uv("pip", "install", *how, "--requirements", written.name, *self.options)
        if done.status:
            raise CannotLock(done.said)

    # --- helpers ---

    def _write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def _uv(self, *arguments: str) -> UvResult:
        cache = settings().home / "run" / "packages"
        cache.mkdir(parents=True, exist_ok=True)
        return uv.run(
            arguments,
            folder=self.folder,
            environment=uv.variables(cache),
            limit_s=self.limit_s,
        )


def _read(output: str) -> list[PinnedPackage]:
    """Read the lock that uv wrote; an environment without packages has an empty lock."""
    lines = (line for line in output.splitlines() if not line.startswith("#"))
    return read_hashed(output) if any(line.strip() for line in lines) else []


_WHY_OVER = (
    "Jobs, functions and graphs run with the platform's versions of these packages, on which "
    "saving their state rests; a request whose tasks are all commands may bring its own."
)


def _uv_message(done: UvResult, over: Mapping[str, str]) -> str:
    """Return uv's message.

    If it is about the platform's packages, a sentence explains that.
    """
    is_over = any(f"{name}==" in done.said for name in over)
    return f"{done.said}\n{_WHY_OVER}" if is_over else done.said


def _write_empty_wheel(folder: Path, name: str, told: str) -> None:
    """Write a wheel without content.

    A resolver sees only its name and version.
    """
    base = f"{name.replace('-', '_')}-{told}"
    with zipfile.ZipFile(folder / f"{base}-py3-none-any.whl", "w") as wheel:
        head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {told}\n"
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{base}.dist-info/METADATA", head)
        wheel.writestr(f"{base}.dist-info/WHEEL", tags)
        wheel.writestr(f"{base}.dist-info/RECORD", "")
