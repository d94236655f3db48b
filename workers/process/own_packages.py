"""Puts the packages that a request brings in front of the platform's, in the process of a task.

A command gets the environment by PATH: `python` there is the environment's own, which finds its
packages without further help. Other code runs in this very process: the packages come before the
platform's on the import path. Modules that are already imported stay, and no environment may bring
those (`provisions.package_lock.PLATFORM`).
"""

from __future__ import annotations

import importlib
import os
import site
import sys
import sysconfig
from pathlib import Path


def enter(environment: Path, *, is_command: bool) -> None:
    """Use the environment in this process and its children."""
    if is_command:
        os.environ["PATH"] = f"{environment}/bin:{os.environ['PATH']}"
        os.environ["VIRTUAL_ENV"] = str(environment)
    else:
        _put_before_platform(packages_of(environment))


def packages_of(environment: Path) -> Path:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return environment / "lib" / f"python{version}" / "site-packages"


def _put_before_platform(packages: Path) -> None:
    """Insert the folder, and the folders that its .pth files name, before the platform's
    packages.
    """
    before = list(sys.path)
    site.addsitedir(str(packages))
    platform = {sysconfig.get_paths()[name] for name in ("purelib", "platlib")}
    added = [path for path in sys.path if path not in before]
    at = next((n for n, path in enumerate(before) if path in platform), len(before))
    sys.path[:] = [*before[:at], *added, *before[at:]]
    importlib.invalidate_caches()
