"""Pickles an object graph without the bytes of its storages, which it numbers.

`Capture` knows no kind of object: `capture` gives it the function that reduces each kind, and these
functions note here what they find.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
import torch

from workers.capture.paths import Refused
from workers.capture.rebuild import Name, Surroundings, whats_named

# storage number, dtype, shape, stride, offset
Row = tuple[int, Any, tuple[int, ...], tuple[int, ...], int]

Reducer = Callable[["Capture", Any], Any]


class Capture(cloudpickle.Pickler):
    """Pickles an object graph without the bytes of its storages; `storages` lists those by number.

    `named` are the objects to which an image refers by name. `reducer_of` gives the reducer of a
    class, None where pickle needs no help. If `weakly` is True, weak references are pickled; if
    False, they are only recorded in `weak`.
    """

    def __init__(
        self,
        out: io.BytesIO,
        around: Surroundings,
        *,
        named: Mapping[str, object],
        reducer_of: Callable[[type], Reducer | None],
        weakly: bool = False,
    ) -> None:
        super().__init__(out, protocol=5)
        self.around, self.weakly = around, weakly
        self.numbers: dict[tuple[str, int, int], int] = {}
        self.storages: list[torch.UntypedStorage] = []
        # lent storages have the numbers -1, -2, ...; no image holds them
        self.lent: list[Name] = []
        self.rows: dict[int, Row] = {}  # id -> location of a tensor or an array
        self.weak: list[tuple[object, object]] = []
        self.last: object = None
        self.mapped: set[str] = set()  # paths of files that are changed through a memory map
        self.stateful: dict[int, Any] = {}  # id of an iterator -> its StatefulDataLoader
        self.unhooked: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._names = {id(obj): name for name, obj in named.items()}
        self._reducer_of = reducer_of
        self._reducers: dict[type, Reducer | None] = {}

    def reducer_override(self, obj: Any) -> Any:
        self.last = obj
        if (name := self._names.get(id(obj))) is not None:
            return whats_named, (name,)
        kind = type(obj)
        try:
            reduce = self._reducers[kind]
        except KeyError:
            reduce = self._reducers[kind] = self._reducer_of(kind)
        return NotImplemented if reduce is None else reduce(self, obj)

    def as_cloudpickle_does(self, obj: Any) -> Any:
        return super().reducer_override(obj)

    def number(self, storage: torch.UntypedStorage) -> int:
        """Return a storage's number.

        Storages are equal by device, address and size, empty ones by identity.
        """
        size, where = storage.nbytes(), str(storage.device)
        key = (where, storage.data_ptr(), size) if size else (where, -storage._cdata, 0)
        number = self.numbers.get(key)
        if number is None:
            number = self.numbers[key] = self._new_number(storage)
        return number

    def _new_number(self, storage: torch.UntypedStorage) -> int:
        if (name := self.around.lent.name_of(storage)) is not None:
            self.lent.append(name)
            return -len(self.lent)
        self.storages.append(storage)
        return len(self.storages) - 1

    def must_not_overlap(self) -> None:
        """Refuse two storages over the same memory, which a restore would separate."""
        for (where, before, size), later in itertools.pairwise(sorted(self.numbers)):
            if size and where == later[0] and before + size > later[1]:
                raise Refused(
                    self.storages[self.numbers[later]],
                    "memory that a tensor and a part of a numpy array share",
                    "Create the tensor from the whole array, or copy the part.",
                )
