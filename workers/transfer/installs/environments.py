"""Keeps the built environments of a host, each under the hash of its lock.

A process of its own (`workers.device.environment_builder`) builds an environment, once for all
devices of the host. It builds in a draft folder, which is renamed when it is complete. From then on
nothing changes the environment. Residents see it read-only.

A builder has control groups of its own and a limit of disk. It ends when no task needs its
environment any more.

Each environment has a lock file (`workers.transfer.installs.kept_trees`). If there is more on disk
than the limit, the environments that were used longest ago are removed.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import sysconfig
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from app.core import units
from app.core.model.provisions.package_lock import PackageLock, public, read_lock
from app.core.model.provisions.requirements import BadFile
from app.storage.backend import make_private
from app.storage.store import Store
from workers.process import uv
from workers.process.isolation.helper_groups import HelperGroups
from workers.transfer.installs.kept_trees import ABOUT, KeptTrees, disk_bytes, make_read_only

JSON = dict[str, Any]

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[3]
PLATFORM_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
BUILDER = "workers.device.environment_builder"  # a program
REPORTED = 50  # at most so many environments are reported, the last used first
_LEFT_S = 3600.0  # an older draft was left by a dead builder
_SLACK_S = 30.0
_WATCH_S = 0.5  # interval of looks at a builder
_WATCH_DISK = 10  # the disk of a draft is looked at each so many intervals, as it takes long
# the builder's status, if a signal killed it inside the sandbox, has this bit
_SIGNALLED = 0x80


class NotBuilt(Exception):
    """Raised when an environment cannot be built here; the message is for the task's owner."""


class NotWanted(NotBuilt):
    """Raised when no task needs the environment any more that is being built."""


class BuilderKilled(NotBuilt):
    """Raised when the builder was killed, which does not mean that the lock is at fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadBuild:
    """Describes a build that no task on a device waits for.

    `before` has the locks that are wanted before this one, whose environments are not removed.
    """

    before: Collection[str]
    is_wanted: Callable[[], bool] = lambda: True


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildFailure:
    """Describes the last failed build of a lock on this host."""

    told: str
    took_s: float
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldEnvironment:
    """A built environment that is in use, until `close`.

    `folder` has its own interpreter in `bin`; `base` is the installation of Python that the
    interpreter belongs to.
    """

    folder: Path
    base: Path
    fd: int

    def close(self) -> None:
        os.close(self.fd)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environments(KeptTrees):
    """Manages the environments of a host, of up to `limit_bytes` on disk; one is built within
    `build_s`.

    `options` name the index (`workers.process.uv.index_options`); `wheels` is the folder of wheels
    in these options, if any. A build reaches the destinations in `reach`; None stands for all that
    the host reaches. If `is_walled`, a build runs in the sandbox layers that work here.
    """

    build_s: float
    options: tuple[str, ...] = ()
    wheels: Path | None = None
    reach: Sequence[str] | None = ()
    is_walled: bool = True
    build_bytes: int = 32 * 2**30  # disk of one build, with its downloads
    helpers: HelperGroups = field(default_factory=HelperGroups, compare=False)

    # --- use ---

    def opened(
        self, sha256: str, store: Store, *, ahead: AheadBuild | None = None
    ) -> HeldEnvironment:
        """Return the environment of a lock; build it if it is not there, or wait if another worker
        builds it.

        A build that is `ahead` leaves most of the host to the tasks that run.

        Raises NotBuilt, and app.storage.store.Damaged or OSError if the store does not have the
        lock.
        """

        def make() -> None:
            self._build(sha256, store, ahead)
            self.make_room({sha256, *(ahead.before if ahead is not None else ())})

        until_s = time.monotonic() + 2 * self.build_s + _SLACK_S
        if (held := self.shared(sha256, make, until_s)) is None:
            raise NotBuilt("Another task has been building its environment for too long.")
        fd, noted = held
        return HeldEnvironment(folder=self.built(sha256), base=Path(noted["base"]), fd=fd)

    def has(self, sha256: str) -> bool:
        """True if the environment is built for this host."""
        return self.about(sha256) is not None

    def has_room(self, before: Collection[str]) -> bool:
        """False if the environments that are wanted before the next one already fill the disk."""
        found = [about["size_bytes"] for one in before if (about := self.about(one)) is not None]
        return not found or sum(found) < self.limit_bytes

    def shown(self, wanted: Collection[str] = ()) -> dict[str, list[int]]:
        """Return the size in bytes and the build time in microseconds of some environments, by
        lock: the last used ones, and those that are `wanted`.
        """
        try:
            entries = [(one.stat().st_mtime, one.name) for one in os.scandir(self.folder / "built")]
        except FileNotFoundError:
            return {}
        last = {name for _, name in sorted(entries, reverse=True)[:REPORTED]}
        found = {name: self.about(name) for name in sorted(last.union(wanted))}
        return {
            name: [about["size_bytes"], about["took_us"]]
            for name, about in found.items()
            if about is not None
        }

    def failure(self, sha256: str) -> BuildFailure | None:
        """Return what was written down of a lock's last failed build."""
        path = self.folder / "failed" / sha256
        try:
            told = json.loads(path.read_text())
            return BuildFailure(**told, at_s=path.stat().st_mtime)
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def note_failure(self, sha256: str, told: str, took_s: float) -> None:
        """Record that a build has failed, for the other device workers of the host."""
        folder = self.folder / "failed"
        make_private(folder)
        for old in folder.iterdir():
            if time.time() - old.stat().st_mtime > max(_LEFT_S, 4 * self.build_s):
                old.unlink(missing_ok=True)
        draft = folder / f"{sha256}.{uuid.uuid4().hex[:12]}"
        draft.write_text(json.dumps({"told": told, "took_s": took_s}))
        draft.replace(folder / sha256)

    # --- files ---

    def about(self, sha256: str) -> JSON | None:
        """Return the notes of the build; None if the environment must be built for this host.

        That is so for one built by another installation: it finds packages of the platform by the
        installation's path.
        """
        noted = KeptTrees.about(self, sha256)  # super() knows no class that has slots
        return noted if noted is not None and noted.get("prefix") == sys.prefix else None

    # --- building ---

    def _build(self, sha256: str, store: Store, ahead: AheadBuild | None) -> None:
        """Build the environment; this process holds its lock alone."""
        with store.open(sha256) as file:
            try:
                lock = read_lock(file.read().decode())
            except (BadFile, UnicodeDecodeError) as error:
                raise NotBuilt(f"Its lock cannot be read: {error}") from error
        _must_fit(lock)
        python = self._interpreter(lock)
        work = self.folder / "work"
        making = work / f"making-{uuid.uuid4().hex[:12]}"
        make_private(work)
        making.mkdir()
        began_s = time.monotonic()
        try:
            self._install(lock, python, making, ahead)
            took_us = int((time.monotonic() - began_s) * 1e6)
            self._finish(sha256, lock, python, making / "environment", took_us)
        finally:
            self.remove(making)
        log.info("built environment %s in %.1f s", sha256[:12], took_us / 1e6)

    def _install(
        self, lock: PackageLock, python: Path, making: Path, ahead: AheadBuild | None
    ) -> None:
        (making / "lock.txt").write_text(lock.text)
        boot = f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
        boot += f"from {BUILDER} import main; main()"
        with self.helpers.of_helper() as groups:
            order = {
                "making": str(making.absolute()),
                "python": str(python),
                "uv": uv.program(),
                "options": list(self.options),
                "wheels": str(self.wheels.absolute()) if self.wheels else "",
                "reach": self.reach,
                "is_walled": self.is_walled,
                "has_packages": bool(lock.packages),
                "limit_s": self.build_s,
                "is_ahead": ahead is not None,
                "groups": groups,
            }
            with subprocess.Popen(
                [sys.executable, "-B", "-c", boot, json.dumps(order)],
                env=uv.variables(making / "downloads"),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd="/",
            ) as builder:
                try:
                    said = self._watched(builder, making, ahead)
                finally:
                    builder.kill()
        status = builder.returncode
        if status < 0 or status > _SIGNALLED:
            number = -status if status < 0 else 0x100 - status
            raise BuilderKilled(
                f"Its environment was not built: the builder was ended by signal {number}."
            )
        if status:
            told = uv.shortened(said.decode("utf-8", "replace"))
            raise NotBuilt(f"Its environment could not be built: {told}")

    def _watched(
        self, builder: subprocess.Popen[bytes], making: Path, ahead: AheadBuild | None
    ) -> bytes:
        """Wait for a builder, and return its messages; raises NotBuilt if it must end before."""
        until_s, looks = time.monotonic() + 2 * self.build_s + _SLACK_S, 0
        while True:
            try:
                return builder.communicate(timeout=_WATCH_S)[1]
            except subprocess.TimeoutExpired:
                looks += 1
            if ahead is not None and not ahead.is_wanted():
                raise NotWanted("No task waits for its environment any more.")
            if time.monotonic() >= until_s:
                raise NotBuilt(f"Its environment was not built within {self.build_s:g} s.")
            if looks % _WATCH_DISK == 0 and disk_bytes(making) > self.build_bytes:
                most = units.size(self.build_bytes)
                raise NotBuilt(f"Its packages need more than {most} of disk (limit of this host).")

    def _finish(
        self, sha256: str, lock: PackageLock, python: Path, made: Path, took_us: int
    ) -> None:
        """Add what links the environment to this host, make it read-only, and give it its name."""
        site = site_packages(made, lock.python)
        if not lock.alone:
            (site / "_platform.pth").unlink(missing_ok=True)  # a package may bring such a file
            (site / "_platform.pth").write_text(_platform_paths())
        size_bytes = make_read_only(made)
        about = {
            "size_bytes": size_bytes,
            "took_us": took_us,
            "python": lock.python,
            "base": str(python.resolve().parents[1]),
            "prefix": sys.prefix,
        }
        made.chmod(0o755)
        (made / ABOUT).unlink(missing_ok=True)
        (made / ABOUT).write_text(json.dumps(about))
        (made / ABOUT).chmod(0o444)
        built = self.built(sha256)
        make_private(built.parent)
        if built.exists():  # left by another installation
            self.remove(built)
        made.rename(built)
        built.chmod(0o555)

    def _interpreter(self, lock: PackageLock) -> Path:
        if lock.python == PLATFORM_PYTHON:
            return Path(sys.base_prefix) / "bin" / f"python{PLATFORM_PYTHON}"
        found = interpreters().get(lock.python)
        if found is None:
            raise NotBuilt(f"This host has no Python {lock.python}.")
        return found

    # --- room ---

    def make_room(self, kept: Collection[str]) -> None:
        """Remove what exceeds the limit: the environments that were used longest ago."""
        over = sum(size for size, _ in self._all().values()) - self.limit_bytes
        self.remove_left_drafts(max(_LEFT_S, 2 * self.build_s))
        if (old := self.work / "downloads").exists():  # which an earlier version kept
            self.remove(old)
        self.let_go_unused(over, kept)

    def _all(self) -> Mapping[str, tuple[int, int]]:
        found = {name: self.about(name) for name in self.by_use()}
        return {n: (a["size_bytes"], a["took_us"]) for n, a in found.items() if a is not None}


def site_packages(environment: Path, python: str) -> Path:
    """Return the folder with the packages of an environment."""
    return environment / "lib" / f"python{python}" / "site-packages"


def _must_fit(lock: PackageLock) -> None:
    """Raise NotBuilt if the lock was made for other versions of the platform's packages."""
    here = {name: _installed(name) for name in lock.over}
    other = [f"{name} {lock.over[name]}" for name in sorted(here) if here[name] != lock.over[name]]
    if other:
        raise NotBuilt(
            f"Its environment was locked for {', '.join(other)}, and this host has other versions: "
            "submit the request again, to have it locked for them."
        )


def _installed(name: str) -> str:
    try:
        return public(version(name))
    except PackageNotFoundError:
        return ""


def _platform_paths() -> str:
    paths = dict.fromkeys(sysconfig.get_paths()[name] for name in ("purelib", "platlib"))
    return "".join(f"{path}\n" for path in paths)


def interpreters() -> Mapping[str, Path]:
    """Return the interpreters of this host by version, the platform's among them.

    All devices of a worker ask for them when they start; the search, which may start dozens of
    programs, is made once. Raises workers.process.uv.NoUv.
    """
    with _search:
        return _interpreters()


_search = threading.Lock()


@cache
def _interpreters() -> Mapping[str, Path]:
    found = {PLATFORM_PYTHON: Path(sys.base_prefix) / "bin" / f"python{PLATFORM_PYTHON}"}
    how = ["--only-installed", "--offline", "--no-python-downloads", "--output-format", "json"]
    asked = subprocess.run(
        [uv.program(), "python", "list", *how],
        env={**uv.variables(Path("/nonexistent")), "PATH": os.environ.get("PATH", "")},
        capture_output=True,
        timeout=60,
        check=False,
        cwd="/",
    )
    for one in json.loads(asked.stdout or b"[]"):
        is_plain = one["implementation"] == "cpython" and one.get("variant") == "default"
        parts = one["version_parts"]
        name = f"{parts['major']}.{parts['minor']}"
        if is_plain and parts["major"] == 3 and one.get("path"):
            found.setdefault(name, Path(one["path"]).resolve())
    return found
