"""The functions and classes that an image calls by name while a job is restored from it.

An image outlives our file names, and a tenant may have a module `workers` too. So everything that
images call is found under one module name, `FORMAT`. The set of `known` functions may grow, but
their arguments and effects never change. Where a change is needed, the number in `FORMAT` changes.
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
    """Decorator that lets images call a function or a class by its name."""
    it: Any = thing
    it.__module__ = FORMAT
    setattr(_module, it.__name__, thing)
    return thing


class LentStorages(Protocol):
    """Storages lent to a job, which every process of the job has, so that no image holds them."""

    def name_of(self, storage: torch.UntypedStorage) -> Name | None:
        """Return the storage's name; None if it is not lent, or if it was ever written to."""

    def storage(self, name: Name) -> torch.UntypedStorage:
        """Return a lent storage by name; raises LookupError."""


Name = tuple[str, str]  # datablock and tensor


class NothingLent:
    def name_of(self, storage: torch.UntypedStorage) -> Name | None:
        return None

    def storage(self, name: Name) -> torch.UntypedStorage:
        raise LookupError(f"the image refers to {name[0]}, which is not among the inputs")


class Surroundings:
    """Lists things that a job may refer to but doesn't own: `named` objects, `lent` storages, its
    code folder.

    An image refers to them by name, and a restored job finds those of its new process. `scratch` is
    the working folder: its files belong to the job, and travel with it.
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
        # path -> bytes read before, as unchanged files are not read again
        self.files: dict[str, Any] = {}
        self.lent: LentStorages = NothingLent()
        self.named = {
            "stdin": sys.stdin,
            "stdout": sys.stdout,
            "stderr": sys.stderr,
            **named,
        }


class Loading:
    """Holds what functions called by an image may look up during a restore.

    `storages` are the image's, by number; lent storages are at the end, with negative numbers.
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


@known
def whats_named(name: str) -> object:
    return current().named[name]
