"""Looks at processes that may end at any moment: what has ended has no children and no words."""

from __future__ import annotations

import psutil


def children(of: psutil.Process | int, *, recursive: bool = False) -> list[psutil.Process]:
    """Return the children of a process or process id; none if it has ended."""
    try:
        return _process(of).children(recursive=recursive)
    except psutil.NoSuchProcess:
        return []


def words_of(process: psutil.Process) -> list[str]:
    """Return the words of its command line; none if the process has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # also of a zombie
        return []


def runs(process: psutil.Process, module: str) -> bool:
    """True if the process runs this module; False if it has ended."""
    return module in " ".join(words_of(process))


def status_of(process: psutil.Process | int) -> str:
    """Return its status as psutil names it; that of the dead if the process is gone."""
    try:
        return _process(process).status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_DEAD


def is_living(process: psutil.Process | int) -> bool:
    """True unless the process has ended, whether or not its parent has waited for it."""
    return status_of(process) not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def used_s(process: psutil.Process) -> float:
    """Return the processor time that the process has used; 0 if it has ended."""
    try:
        return float(sum(process.cpu_times()[:2]))
    except psutil.NoSuchProcess:
        return 0.0


def name_of(process: psutil.Process | int) -> str:
    """Return the name of its program; none if it has ended."""
    try:
        return _process(process).name()
    except psutil.NoSuchProcess:
        return ""


def _process(of: psutil.Process | int) -> psutil.Process:
    return psutil.Process(of) if isinstance(of, int) else of
