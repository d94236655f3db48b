"""Squashing: keep one copy of parameters and optimizer state that the ranks of a slot have equal.

    squash = Squash(exchange)
    squash.install()             # before the tenant's code makes an optimizer

The first two steps of an optimizer are watched: it is squashed only if its step does nothing but
change tensors in place. Then the ranks of the slot compare everything, byte by byte, and move it
into one region of shared memory. From then on a step is a vote of these ranks (`Rendezvous.meet`).
Each rank shows that its copy is untouched, and that its gradients (by a digest of 128 bits) and
hyper-parameters are equal to those of the first rank. The last rank to arrive updates for all. So
the step runs once per slot, however many ranks share the slot.

A rank that breaks the rules does no harm, since it sees the region through a *private* mapping. Its
reads see the common memory. Its writes outside a common step go to pages of its own, as without
squashing, and the kernel's page table says which pages these are. Each rank checks them before
every step, and no rank writes to the common memory until all have agreed: so the validation period
is one step. If anything differs, every rank copies what it sees into memory of its own and updates
by itself: the bits are the same, only the step is slower.

Invariant: the common memory is written only by a step to which all ranks of the slot agreed.

Only memory of the host can be mapped like this: an optimizer of tensors on an accelerator is not
squashed, and the events name the device.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import mmap
import os
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import numpy
import torch
import torch._dynamo
import xxhash
from torch.optim import Optimizer

from workers.hardware.accelerator import default_generators
from workers.ranks.rendezvous import Group, Rendezvous
from workers.ranks.shared_memory import Arena, aligned, uses
from workers.ranks.turns import Spared

WATCHED_STEPS = 2  # steps of an optimizer before it may be squashed
# steps until the next try after a fallback; each further fallback doubles them
FIRST_RETRY_STEPS = 8
RETRIES = 6
# references to an unshared storage: the tensor, and the Python object made to count them
_USES_ALONE = 2

_PAGE = mmap.PAGESIZE
_ENTRY_BYTES = 8  # size of an entry of the kernel's page map; one entry per page
_IN_MEMORY, _IN_SWAP, _OF_FILE = (numpy.uint64(1 << bit) for bit in (63, 62, 61))

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

JSON = dict[str, Any]


class Unlike(Exception):
    """Raised with the reason why this rank cannot take part in a common step."""


# --- one region of common memory ------------------------------------------------------------------


@dataclass(slots=True)
class ReplicaPart:
    """Holds a tensor of the job, and the two views of its place in the region."""

    tensor: torch.Tensor
    private: torch.Tensor
    common: torch.Tensor
    offset: int  # offset from the start of the content
    size_bytes: int


class OptimizerRegion:
    """Manages the common memory of one optimizer: a first page, the content, and room for
    gradients.

    The first page has the number of ranks that use the region.
    """

    def __init__(self, arena: Arena, start: int, tensors: list[torch.Tensor]) -> None:
        self.arena, self.start = arena, start
        self.content_bytes = _pages(sum(aligned(_size(t)) for t in tensors))
        self.map = arena.private(start + _PAGE, max(self.content_bytes, _PAGE))
        self.private = torch.frombuffer(self.map, dtype=torch.uint8)
        common = arena.at(start + _PAGE, self.content_bytes)
        self.address = self.private.data_ptr()
        self.parts: list[ReplicaPart] = []
        at = 0
        for tensor in tensors:
            private, shared = _place(self.private, at, tensor), _place(common, at, tensor)
            self.parts.append(ReplicaPart(tensor, private, shared, at, _size(tensor)))
            at += aligned(_size(tensor))
        self.uses = 0

    @classmethod
    def make(cls, arena: Arena, tensors: list[torch.Tensor]) -> OptimizerRegion:
        """Make a new region.

        The tensors move in one by one, so that little memory is used twice at a time.
        """
        with arena.locked():
            start = arena.take_land(_PAGE + 2 * _pages(sum(map(_padded, tensors))))
        region = cls(arena, start, tensors)
        for part in region.parts:
            part.common.copy_(part.tensor.detach())
            part.tensor.data = part.private
        region._is_bound()
        return region

    @classmethod
    def join(
        cls, arena: Arena, start: int, tensors: list[torch.Tensor]
    ) -> OptimizerRegion | ReplicaPart:
        """Join the region at `start`.

        Returns the region; or, if one of our tensors differs from its part, that part.
        """
        region = cls(arena, start, tensors)
        for part in region.parts:
            if not same_bytes(part.tensor, part.common):
                return part
        for part in region.parts:
            part.tensor.data = part.private
        region._is_bound()
        return region

    def _is_bound(self) -> None:
        self._count(1)
        self.uses = uses(self.private)

    def is_viewed(self) -> bool:
        """True if other tensors of the job view this memory, so that it must stay valid."""
        return uses(self.private) > self.uses

    def holds(self, tensors: list[torch.Tensor]) -> bool:
        """True if exactly these tensors are bound to the region."""
        return len(tensors) == len(self.parts) and all(
            part.tensor is tensor and tensor.data_ptr() == part.private.data_ptr()
            for part, tensor in zip(self.parts, tensors, strict=True)
        )

    def update(self, run: Callable[[], Any]) -> Any:
        """Run a step on the common memory itself."""
        for part in self.parts:
            part.tensor.data = part.common
        try:
            result = run()
            torn = [p for p in self.parts if p.tensor.data_ptr() != p.common.data_ptr()]
            if torn:
                raise RuntimeError("an optimizer replaced its state instead of changing it")
        finally:
            for part in self.parts:
                part.tensor.data = part.private
        return result

    def leave(self) -> None:
        """Copy the region into this rank's own memory, and leave the region."""
        # The views must stay valid: writing to each page gives this rank its own copy of the page.
        if self.is_viewed():
            self.private.view(torch.int64)[:: _PAGE // 8].add_(0)
        else:
            for part in self.parts:
                part.tensor.data = part.private.clone(memory_format=torch.preserve_format)
        self.abandon()

    def abandon(self) -> None:
        """Stop using the region; the last rank to leave frees it."""
        self.parts = []
        if not self._count(-1):
            self.arena.give_back(self.start, _PAGE + 2 * self.content_bytes)

    def gradients(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return memory behind the content, divided like the gradients of these parameters."""
        area = self.arena.at(self.start + _PAGE + self.content_bytes, self.content_bytes)
        places, at = [], 0
        for parameter in parameters:
            places.append(_place(area, at, parameter))
            at += aligned(_size(parameter))
        return places

    def touched(self) -> ReplicaPart | None:
        """Return a tensor that this rank wrote to outside a common step; None if there is none.

        A written page with the same bytes as the common memory is given back, so that this rank
        sees the common memory there again.
        """
        common = self.arena.land.data_ptr() + self.start + _PAGE
        for page in own_pages(self.address, self.content_bytes):
            at = page - self.address
            if _libc.memcmp(page, common + at, _PAGE):
                return self._first_difference(at)
            self.map.madvise(mmap.MADV_DONTNEED, at, _PAGE)
        return None

    def _first_difference(self, at: int) -> ReplicaPart:
        near = [p for p in self.parts if p.offset < at + _PAGE and p.offset + p.size_bytes > at]
        return next((p for p in near if not same_bytes(p.private, p.common)), near[0])

    def _count(self, more: int) -> int:
        """Change the number of ranks that use the region by `more` and return it."""
        with self.arena.locked():
            return int(self.arena.at(self.start, 8).view(torch.int64).add_(more))


def own_pages(address: int, size_bytes: int) -> list[int]:
    """Return the addresses of the pages of a private file mapping that this process has written to.

    In the kernel's page table such a page is in memory or in swap, and doesn't belong to the file.
    """
    pages = size_bytes // _PAGE
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        data = os.pread(file.fileno(), pages * _ENTRY_BYTES, address // _PAGE * _ENTRY_BYTES)
    if len(data) != pages * _ENTRY_BYTES:
        raise OSError("the kernel's page map is cut short")
    flags = numpy.frombuffer(data, numpy.uint64)
    own = (flags & (_IN_MEMORY | _IN_SWAP) != 0) & (flags & _OF_FILE == 0)
    return [address + page * _PAGE for page in numpy.flatnonzero(own).tolist()]


def _pages(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE) * _PAGE


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _padded(tensor: torch.Tensor) -> int:
    return aligned(_size(tensor))


def _place(area: torch.Tensor, at: int, like: torch.Tensor) -> torch.Tensor:
    flat = area[at : at + _size(like)].view(like.dtype)
    return flat.as_strided(like.shape, like.stride(), flat.storage_offset())


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two dense tensors hold the same bytes.

    A comparison as numbers would differ: 0 equals -0, and NaN equals nothing.
    """
    if one.stride() != other.stride():
        one = torch.empty_like(other).copy_(one)
    return not _libc.memcmp(one.data_ptr(), other.data_ptr(), _size(one))


def _add(digest: xxhash.xxh3_128, tensor: torch.Tensor, like: torch.Tensor) -> None:
    """Add a tensor's bytes to the digest, in the memory order of `like`."""
    if tensor.stride() != like.stride():
        tensor = torch.empty_like(like).copy_(tensor)
    if size := _size(tensor):
        # Not through numpy: a storage that numpy has viewed can no longer be resized.
        digest.update((ctypes.c_char * size).from_address(tensor.data_ptr()))


# --- one optimizer --------------------------------------------------------------------------------


@dataclass(slots=True)
class Record:
    """Tracks the squashing of one optimizer. `refused` says why it is never squashed again."""

    ordinal: int
    steps: int = 0
    refused: str = ""
    region: OptimizerRegion | None = None
    parameters: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    generation: int = -1  # generation of the map of slots under which the region was made
    retry_at: int = WATCHED_STEPS
    falls: int = 0


class Squash:
    """Represents a rank in all common steps. `events` says what happened, for the log."""

    def __init__(self, exchange: Rendezvous) -> None:
        self.exchange, self.turns = exchange, exchange.turns
        self.records: weakref.WeakKeyDictionary[Optimizer, Record] = weakref.WeakKeyDictionary()
        self.events: list[JSON] = []
        self.updates = 0  # steps that this rank made for its slot
        self.spared = 0  # steps that another rank made for this one
        self._inside = False
        self._group: tuple[int, Group] | None = None
        # (gradient of the first rank, and the slot's equal copy of it); these gradients need not be
        # moved
        self._staged: list[Spared] = []
        self.turns.spared.append(lambda: self._staged)

    def install(self) -> None:
        """Wrap every optimizer's step below its hooks."""
        stock = Optimizer.profile_hook_step

        def profile_hook_step(step: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(step)
            def gated(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
                return self.step(optimizer, step, args, kwargs)

            return stock(torch._dynamo.disable(gated))

        Optimizer.profile_hook_step = staticmethod(profile_hook_step)  # type: ignore[method-assign, assignment]

    def common_bytes(self) -> int:
        """Return the bytes of parameters and optimizer state that this slot's ranks share."""
        regions = [record.region for record in self.records.values() if record.region]
        return sum(part.size_bytes for region in regions for part in region.parts)

    def step(self, optimizer: Optimizer, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        def run() -> Any:
            return step(optimizer, *args, **kwargs)

        if self._inside:  # a step that is part of another optimizer's step
            return run()
        record = self.records.setdefault(optimizer, Record(ordinal=len(self.records)))
        record.steps += 1
        self._inside = True
        try:
            if any(value is not None for value in (*args, *kwargs.values())):
                self._refuse(record, "its step takes a closure")
            if device := _device_off_host(_tensors(optimizer)):
                self._refuse(
                    record,
                    f"its tensors lie on {device}, and ranks can share memory of the host only",
                )
            if record.steps <= WATCHED_STEPS:
                return self._watch(record, optimizer, run)
            if not self._squashed(record, optimizer):
                return run()
            return self._common_step(record, optimizer, run)
        finally:
            self._inside = False

    # --- deciding whether an optimizer can be squashed ---

    def _watch(self, record: Record, optimizer: Optimizer, run: Callable[[], Any]) -> Any:
        before = _besides_tensors(optimizer), _state_tensors(optimizer), self._surroundings()
        result = run()
        after = _besides_tensors(optimizer), _state_tensors(optimizer), self._surroundings()
        if before[2] != after[2]:
            self._refuse(record, "its step draws random numbers or calls collectives")
        elif record.steps == WATCHED_STEPS:
            if before[0] != after[0]:
                self._refuse(record, "its step changes more than tensors")
            elif before[1] != after[1]:
                self._refuse(record, "its step replaces tensors of its state")
        return result

    def _surroundings(self) -> tuple[Any, ...]:
        numbers = numpy.random.get_state(legacy=False)["state"]
        generators = (torch.default_generator, *default_generators().values())
        return (
            *(bytes(generator.get_state().numpy()) for generator in generators),
            random.getstate(),
            str(numbers),
            self.exchange.posted,
        )

    def _refuse(self, record: Record, why: str) -> None:
        if record.refused:
            return
        record.refused = why
        self._tell(record, "not squashed", why)
        self._leave(record)

    # --- becoming common ---

    def _squashed(self, record: Record, optimizer: Optimizer) -> bool:
        """True if the optimizer's tensors now lie in a region that the ranks of this slot share.

        The map of slots may change in the very vote that makes a region, as all ranks wait there.
        """
        while record.region is None or record.generation != self.turns.generation:
            group = self._seat_group()
            if group.size == 1 or record.refused or record.steps <= record.retry_at:
                self._leave(record)
                return False
            if not self._make_common(record, optimizer, group):
                return False
        return True

    def _seat_group(self) -> Group:
        generation = self.turns.generation
        if self._group is None or self._group[0] != generation:
            if self._group is not None:
                self.exchange.close(self._group[1])
            members = self.turns.on_my_seat()
            name = f"seat {self.turns.seat} of map {generation}"
            self._group = (generation, self.exchange.open(name, members))
        return self._group[1]

    def _make_common(self, record: Record, optimizer: Optimizer, group: Group) -> bool:
        """Share the optimizer's state with the ranks of this slot, if it is equal on all. Runs no
        step.
        """
        regions: list[OptimizerRegion] = []
        generation = self.turns.generation  # read before the vote, during which it may change

        def bring(first: bytes | None) -> bytes:
            try:
                theirs = json.loads(first) if first else None
                regions.append(self._region(optimizer, theirs, record.region))
            except Unlike as unlike:
                return _vote_bytes(no=f"rank {self.turns.rank}: {unlike}")
            return _vote_bytes(start=regions[0].start, layout=_layout(_tensors(optimizer)))

        text = f"sharing optimizer {record.ordinal} at its step {record.steps}"
        outcome = self.exchange.meet(group, text, bring, _all_agree)
        if regions and record.region is not None:
            # the old region belongs to an earlier map of slots; our tensors have left it
            record.region.abandon()
            record.region = None
        if outcome != b"":
            for region in regions:
                region.leave()
            self._fall_back(record, outcome, "not shared")
            return False
        record.region, record.generation = regions[0], generation
        record.parameters = _parameters(optimizer)
        record.gradients = regions[0].gradients(record.parameters)
        self._tell(record, "squashed", f"{regions[0].content_bytes} bytes are kept once")
        return True

    def _region(
        self, optimizer: Optimizer, first: JSON | None, old: OptimizerRegion | None
    ) -> OptimizerRegion:
        """Return the slot's region with our tensors in it; the first rank makes the region.

        `old` is the region of an earlier map of slots in which the tensors lie now, if any.
        """
        tensors = _tensors(optimizer)
        if old is None:
            _must_be_common_kind(tensors)
        elif old.is_viewed() or not old.holds(tensors):
            raise Unlike("other tensors look into the memory of its optimizer")
        if first is None:
            return OptimizerRegion.make(self.exchange.arena, tensors)
        if first.get("no"):
            raise Unlike("nothing to compare with")
        if first["layout"] != _layout(tensors):
            raise Unlike("its optimizer has other tensors")
        found = OptimizerRegion.join(self.exchange.arena, first["start"], tensors)
        if isinstance(found, ReplicaPart):
            raise Unlike(f"{_name_of(optimizer, found.tensor)} differs")
        return found

    # --- a common step ---

    def _common_step(self, record: Record, optimizer: Optimizer, run: Callable[[], Any]) -> Any:
        region = record.region
        assert region is not None
        results: list[Any] = []

        def bring(first: bytes | None) -> bytes:
            theirs = json.loads(first) if first else {}
            try:
                _must_be_untouched(region, optimizer)
                if theirs.get("no"):  # the first rank has left no gradients to compare with
                    return _vote_bytes()
                given = self._gradients(record, stage=not theirs)
                settings = _digest(_besides_tensors(optimizer))
                if theirs:
                    _must_be_like(theirs, given, settings)
            except Unlike as unlike:
                return _vote_bytes(no=f"rank {self.turns.rank}: {unlike}")
            return _vote_bytes(given=given, settings=settings)

        def decide(rows: list[bytes]) -> bytes:
            reasons = _all_agree(rows)
            if not reasons:
                results.append(region.update(run))
            return reasons

        text = f"step {record.steps} of optimizer {record.ordinal}"
        outcome = self.exchange.meet(self._seat_group(), text, bring, decide)
        self._staged = []
        if outcome != b"":
            self._fall_back(record, outcome, "violation")
            return run()
        if results:
            self.updates += 1
            return results[0]
        self.spared += 1
        torch.autograd.graph.increment_version(record.parameters)
        return None

    def _gradients(self, record: Record, *, stage: bool) -> str:
        """Return which parameters have gradients, and a digest of the gradients.

        If memory is moved between turns, the first rank leaves its gradients in the region, and the
        other ranks compare theirs with them. Then no rank has to move its own gradients.
        """
        given, digest = "", xxhash.xxh3_128()
        for parameter, place in zip(record.parameters, record.gradients, strict=True):
            gradient = parameter.grad
            given += "0" if gradient is None else "1"
            if gradient is None:
                continue
            if gradient.layout is not torch.strided or gradient.dtype is not place.dtype:
                raise Unlike(f"a gradient is {gradient.layout} of {gradient.dtype}")
            if self.turns.leave is None:
                _add(digest, gradient, place)
            elif stage:
                place.copy_(gradient)
            elif not same_bytes(gradient, place):
                raise Unlike(f"a gradient of shape {tuple(gradient.shape)} differs")
            if self.turns.leave is not None:
                self._staged.append((gradient, place))
        return f"{given} {digest.hexdigest()}"

    # --- falling back ---

    def _leave(self, record: Record) -> None:
        if record.region is not None:
            record.region.leave()
            record.region, record.gradients = None, []

    def _fall_back(self, record: Record, outcome: bytes | None, kind: str) -> None:
        """Let each rank update by itself for a while.

        The while doubles with each fallback.
        """
        self._leave(record)
        record.falls += 1
        record.retry_at = record.steps + (FIRST_RETRY_STEPS << record.falls - 1)
        why = (
            outcome.decode() if outcome else "the ranks of this seat did not all come to this step"
        )
        self._tell(record, kind if outcome else "given up", why)
        if record.falls > RETRIES:
            self._refuse(record, f"fell back {record.falls} times, the last time: {why}")

    def _tell(self, record: Record, kind: str, what: str) -> None:
        self.events.append(
            {"optimizer": record.ordinal, "step": record.steps, "kind": kind, "what": what}
        )


def _vote_bytes(**said: Any) -> bytes:
    return json.dumps(said).encode()


def _all_agree(rows: list[bytes]) -> bytes:
    """Return the objections, joined; empty if no rank objects."""
    return "; ".join(no for row in rows if (no := json.loads(row).get("no"))).encode()


def _must_be_like(first: JSON, given: str, settings: str) -> None:
    if first["given"].split()[0] != given.split()[0]:
        raise Unlike("other parameters have gradients")
    if first["given"] != given:
        raise Unlike("its gradients differ")
    if first["settings"] != settings:
        raise Unlike("its optimizer has other hyper-parameters")


# --- what an optimizer holds ----------------------------------------------------------------------


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return parameters and state, in an order that all ranks agree on."""
    parameters = _parameters(optimizer)
    return parameters + [tensor for _, _, tensor in _state(optimizer)]


def _state(optimizer: Optimizer) -> Iterator[tuple[int, str, torch.Tensor]]:
    for number, parameter in enumerate(_parameters(optimizer)):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                yield number, str(key), value


def _state_tensors(optimizer: Optimizer) -> list[tuple[int, str, int, int]]:
    return [(n, key, id(t), t.data_ptr()) for n, key, t in _state(optimizer)]


def _must_be_untouched(region: OptimizerRegion, optimizer: Optimizer) -> None:
    """Raise Unlike if the rank has changed its tensors since the last common step."""
    if not region.holds(_tensors(optimizer)):
        raise Unlike("its optimizer has other tensors than before")
    if touched := region.touched():
        name = _name_of(optimizer, touched.tensor)
        raise Unlike(f"{name} was changed outside the optimizer's step")


def _must_be_common_kind(tensors: list[torch.Tensor]) -> None:
    """Raise Unlike if some of the tensors cannot move into a region."""
    for tensor in tensors:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise Unlike(f"it updates a {type(tensor).__name__}")
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise Unlike(f"a tensor lies on {tensor.device} as {tensor.layout}")
        whole = tensor.untyped_storage().nbytes() == _size(tensor)
        if not whole or uses(tensor) > _USES_ALONE:
            raise Unlike("other tensors look into the memory of its optimizer")


def _device_off_host(tensors: list[torch.Tensor]) -> str:
    """Return a device on which one of the tensors lies, if that is not the host; else ""."""
    return next((str(tensor.device) for tensor in tensors if tensor.device.type != "cpu"), "")


def _layout(tensors: list[torch.Tensor]) -> str:
    return _digest([(str(t.dtype), list(t.shape), list(t.stride())) for t in tensors])


def _besides_tensors(optimizer: Optimizer) -> Any:
    """Return as text all that an optimizer holds, except the tensors of parameters and state."""
    groups = [
        {key: _plain(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    state = [
        {str(k): _plain(v) for k, v in values.items() if not isinstance(v, torch.Tensor)}
        for values in (optimizer.state.get(p, {}) for p in _parameters(optimizer))
    ]
    own = {key: _plain(v) for key, v in vars(optimizer).items() if key not in _KNOWN}
    return groups, [s for s in state if s], own


_KNOWN = {"state", "param_groups", "_step_count", "_opt_called", "step"}


def _plain(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {value.tolist()}"
    if isinstance(value, int | float | str | bool | type(None)):
        return repr(value)
    if isinstance(value, list | tuple):
        return str([_plain(part) for part in value])
    if isinstance(value, dict):
        return str({str(key): _plain(part) for key, part in value.items()})
    return type(value).__qualname__


def _digest(value: Any) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()


def _name_of(optimizer: Optimizer, tensor: torch.Tensor) -> str:
    """Return the tensor's name in the job's modules.

    Use it only for messages, because it is slow.
    """
    for number, key, state in _state(optimizer):
        if state is tensor:
            return f"{key} of {_parameter_name(_parameters(optimizer)[number], number)}"
    number = next(n for n, p in enumerate(_parameters(optimizer)) if p is tensor)
    return f"parameter {_parameter_name(tensor, number)}"


def _parameter_name(parameter: torch.Tensor, number: int) -> str:
    found = ""
    for obj in gc.get_objects():
        if issubclass(type(obj), torch.nn.Module):
            for name, known in obj.named_parameters():
                if known is parameter and len(name) > len(found):
                    found = name
    return found.removeprefix("module.") or f"number {number}"
