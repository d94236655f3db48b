"""Finds CRIU and its helper below this process, the stages of a move, and what one leaves."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from workers.criu import dump_and_restore
from workers.device import store_io
from workers.device.stays.command_images import CommandImages

#: The stages of a move, each with the owner and the name of the function that begins it.
STAGES: dict[str, tuple[Any, str]] = {
    "dump": (dump_and_restore, "dump"),
    "upload": (store_io, "keep"),
    "restore": (dump_and_restore, "restore"),
    "thaw": (CommandImages, "_adopted"),
}

#: What CRIU has among its words; its helper has them in one long word.
_WORDS = {"dump": ["--leave-running"], "restore": ["restore", "-d"]}


def criu_at(stage: str, within_s: float) -> tuple[int, int]:
    """Wait for CRIU to run; return the ids of its helper and of CRIU."""
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        for helper in helpers():
            for child in _children(helper):
                if {*_WORDS[stage]} <= {*words_of(child)}:
                    return helper, child
    raise AssertionError("CRIU was not seen")


def helpers() -> list[int]:
    return [pid for pid in _children(os.getpid()) if "enter.py" in " ".join(words_of(pid))]


def words_of(pid: int) -> list[str]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return []


def folders_in_memory() -> list[str]:
    """Return the folders without a place in the tree of files that this process has open."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [link for link in links if link == "/"]


def _children(pid: int) -> list[int]:
    """Return the ids of the children of all threads of a process, at once: CRIU is quick."""
    found: list[int] = []
    with suppress(OSError):  # the process has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found
