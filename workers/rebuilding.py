"""What an image calls by name while it becomes a job again.

An image outlives our file names, and a tenant may have a module `workers` of its own: so all that
images call lives under one module name, `FORMAT`.  What is `known` there may grow, but what it
takes and does never changes; where it must, the number in the name does.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

FORMAT = "_roundhouse_image_2"
_module = sys.modules.setdefault(FORMAT, types.ModuleType(FORMAT, __doc__))

Thing = TypeVar("Thing")


def known(thing: Thing) -> Thing:
    """Let images call a function or a class by its name; a decorator."""
    it: Any = thing
    it.__module__ = FORMAT
    setattr(_module, it.__name__, thing)
    return thing


class Lent(Protocol):
    """Storages that a job was given and that are in every process of it, so no image holds them."""

    def name_of(self, storage: torch.UntypedStorage) -> Name | None:
        """None if it is none of them, or if it was ever written to."""

    def storage(self, name: Name) -> torch.UntypedStorage:
        """Raises LookupError."""


Name = tuple[str, str]  # datablock and tensor


class NothingLent:
    def name_of(self, storage: torch.UntypedStorage) -> Name | None:
        return None

    def storage(self, name: Name) -> torch.UntypedStorage:
        raise LookupError(f"the image refers to {name[0]}, which is no input of this task")


class Surroundings:
    """What a job may refer to that is not its own: `named` objects, `lent` storages, and its code
    folder.

    An image refers to them by name, and a restored job finds those of its new process.  `scratch`
    is the working folder: its files are the job's, and travel with it.
    """

    def __init__(
        self,
        *,
        code: Path | None = None,
        scratch: Path | None = None,
        scratch_limit_bytes: int = 256 << 20,
        **named: object,
    ) -> None:
        self.code, self.scratch = code, scratch
        self.scratch_limit_bytes = scratch_limit_bytes
        self.files: dict[str, Any] = {}  # `folder.Read`: what need not be read again
        self.lent: Lent = NothingLent()
        self.named = {
            "stdin": sys.stdin,
            "stdout": sys.stdout,
            "stderr": sys.stderr,
            **named,
        }


class Loading:
    """What the functions that an image calls may look up, while it is being rebuilt.

    `storages` are the image's, by number, and behind them those that were lent, by negative ones.
    """

    def __init__(
        self, storages: list[torch.UntypedStorage], named: dict[str, object], around: Surroundings
    ) -> None:
        self.storages, self.named, self.around = storages, named, around


_loading: list[Loading] = []


def current() -> Loading:
    return _loading[-1]


@contextmanager
def rebuilding(what: Loading) -> Iterator[None]:
    _loading.append(what)
    try:
        yield
    finally:
        _loading.pop()
