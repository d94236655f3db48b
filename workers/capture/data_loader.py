"""A `DataLoader` iterator that can be captured between two batches and goes on with the next one.

torch's own iterator cannot: it holds a generator of indices, and processes that prefetch. So
`follow`, called before tenant code is loaded, makes a plain `DataLoader` return iterators of the
classes below, which do the same and remember how the epoch began. A restored iterator makes the
indices again, consumes no random numbers twice, and loads no batch that was already given out. Its
loading processes go on with the random states that they had after the last batch given out.

Not supported: an iterable dataset with an iterator that cannot be captured, or that several
processes load; batches that may come out of order; changes that a dataset makes to itself inside a
loading process, other than to the random numbers of torch, numpy and Python.

torchdata's StatefulDataLoader keeps its position itself, and is asked for it.
"""

from __future__ import annotations

import gc
import random
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _DatasetKind,
    _InfiniteConstantSampler,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)
from torch.utils.data.distributed import DistributedSampler

from workers.capture.graph_pickler import Capture
from workers.capture.paths import Refused
from workers.capture.rebuild import known

JSON = dict[str, Any]

DRAWS_LIMIT = 10_000
_DRAW_ONLY_AT_FIRST = (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    _InfiniteConstantSampler,
)


def follow() -> None:
    """Make the plain loaders of this process return iterators that can be captured."""
    DataLoader._get_iterator = _get_iterator  # type: ignore[assignment,method-assign]


def _get_iterator(loader: DataLoader[Any]) -> _BaseDataLoaderIter:
    if loader.num_workers == 0:
        return InProcess(loader)
    loader.check_worker_number_rationality()
    return InProcesses(loader)


# --- the order of an epoch ------------------------------------------------------------------------


def _of_process() -> list[Any]:
    """Return the random states of torch, Python and numpy as values that `==` can compare."""
    version, numbers, gauss = random.getstate()
    kind, keys, *rest = numpy.random.get_state()
    return [
        torch.get_rng_state().numpy().tobytes(),
        (version, array("Q", numbers).tobytes(), gauss),
        (kind, numpy.asarray(keys).tobytes(), *rest),
    ]


def _return_to(states: list[Any]) -> None:
    """Set the random states of torch, Python and numpy; a state that is None is left alone."""
    of_torch, of_python, of_numpy = states
    if of_torch is not None:
        torch.set_rng_state(torch.frombuffer(bytearray(of_torch), dtype=torch.uint8))
    if of_python is not None:
        version, numbers, gauss = of_python
        random.setstate((version, tuple(array("Q", numbers)), gauss))
    if of_numpy is not None:
        kind, keys, *rest = of_numpy
        numpy.random.set_state((kind, numpy.frombuffer(keys, numpy.uint32), *rest))


def _samplers(sampler: Any) -> list[Any]:
    """Return a sampler and the samplers that it draws from."""
    found, ahead = list[Any](), [sampler]
    while ahead and len(found) < 100:
        found.append(ahead.pop())
        ahead += [
            part for part in _held(found[-1]).values() if isinstance(part, torch.utils.data.Sampler)
        ]
    return found


_PLAIN = (int, float, str, bool, type(None))


@known
class Moment:
    """Everything on which the next draw of a sampler depends."""

    def __init__(self, sampler: Any) -> None:
        self.process = _of_process()
        self.generators = [g.get_state() for g in _generators(sampler)]
        self.fields = [_fields(part) for part in _samplers(sampler)]

    def drew_until(self, after: Moment) -> bool:
        """True if random numbers were drawn between this moment and `after`.

        Also drops from this moment the process states that did not change, so that a replay leaves
        them alone.
        """
        pairs = zip(self.process, after.process, strict=True)
        self.process = [state if state != then else None for state, then in pairs]
        return any(self.process) or not _equal(self.generators, after.generators)

    def come_back(self, sampler: Any) -> None:
        _return_to(self.process)
        for generator, state in zip(_generators(sampler), self.generators, strict=True):
            generator.set_state(state)
        for part, fields in zip(_samplers(sampler), self.fields, strict=True):
            _held(part).update(fields)


def _equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def _held(sampler: Any) -> dict[str, Any]:
    """Return the attributes of a sampler, which may be a plain list."""
    return getattr(sampler, "__dict__", {})


def _generators(sampler: Any) -> list[torch.Generator]:
    parts = (part for one in _samplers(sampler) for part in _held(one).values())
    return [part for part in parts if isinstance(part, torch.Generator)]


def _fields(sampler: Any) -> dict[str, Any]:
    return {name: part for name, part in _held(sampler).items() if isinstance(part, _PLAIN)}


@known
class BatchOrder:
    """The indices of one epoch, batch by batch, at a position that can be found again.

    `draws` maps the number of a batch to the moment before it, for batches that drew random
    numbers; -1 is the beginning of the epoch. A sampler that draws at every batch, from a generator
    that other code uses too, is followed for DRAWS_LIMIT batches.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.taken = 0
        self.print = 0  # hash of the indices taken
        self.draws = {-1: Moment(sampler)}
        self.left: list[torch.Tensor] = []  # states of the sampler's generators after the last draw
        self.again = deque[Any]()  # indices that were taken but not given out before the capture
        self.is_simple = _draws_only_at_first(sampler)
        self._given: Iterator[Any] | None = iter(sampler)

    @property
    def named(self) -> str:
        """The class name of the tenant's sampler, below samplers that batch its indices."""
        return type(_samplers(self.sampler)[-1]).__name__

    def __iter__(self) -> BatchOrder:
        return self

    def __next__(self) -> Any:
        given = self._followed()
        if self.again:
            return self.again.popleft()
        watched = self.taken == 0 or not self.is_simple
        before = Moment(self.sampler) if watched else None
        indices = next(given)
        if before is not None:
            self._note(before, Moment(self.sampler))
        self._count(indices)
        return indices

    def _note(self, before: Moment, after: Moment) -> None:
        """Record the moment before a batch if a replay needs it.

        If only the sampler draws from a generator, its draws follow from earlier moments, and
        nothing is recorded.
        """
        if self.taken == 0:
            self.draws[0] = before
        elif before.drew_until(after) and (
            any(before.process) or not _equal(before.generators, self.left)
        ):
            self.draws[self.taken] = before
        self.left = after.generators

    def _count(self, indices: Any) -> None:
        self.taken += 1
        self.print = hash((self.print, _hashable(indices)))

    def captured(self, given_out: int) -> dict[str, Any]:
        """Return the state for `_followed` to get here again, after `given_out` batches."""
        state = dict(vars(self), given_out=given_out)
        del state["_given"], state["again"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _given=None, again=deque())

    def _followed(self) -> Iterator[Any]:
        """Return the sampler's own iterator.

        After a restore, first replay it to the position where it was, and leave the random states
        as they are.
        """
        if self._given is None:
            now, taken, expected = Moment(self.sampler), self.taken, self.print
            try:
                self._given = self._replayed(taken)
            finally:
                now.come_back(self.sampler)
            if (self.taken, self.print) != (taken, expected):
                raise RuntimeError(
                    f"{self.named} gave other indices than before the restore: what"
                    " they depend on lies outside of it and of the random numbers"
                )
        return self._given

    def _replayed(self, taken: int) -> Iterator[Any]:
        self.taken = self.print = 0
        self.draws[-1].come_back(self.sampler)
        given: Iterator[Any] = iter(self.sampler)
        given_out = vars(self).pop("given_out")
        for number in range(taken):
            if (moment := self.draws.get(number)) is not None:
                moment.come_back(self.sampler)
            indices = next(given, None)
            self._count(indices)
            if number >= given_out:
                self.again.append(indices)
        return given


def _hashable(indices: Any) -> Any:
    return tuple(map(_hashable, indices)) if isinstance(indices, list | tuple) else str(indices)


def _draws_only_at_first(sampler: Any) -> bool:
    return all(
        type(part) in _DRAW_ONLY_AT_FIRST
        and not (isinstance(part, RandomSampler) and part.replacement and part.generator)
        for part in _samplers(sampler)
    )


@known
class Ordered:
    """A sampler that returns an `BatchOrder` as its iterator."""

    def __init__(self, sampler: Any, resumed: BatchOrder | None = None) -> None:
        self.sampler, self.resumed = sampler, resumed

    def __iter__(self) -> BatchOrder:
        return self.resumed or BatchOrder(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


class _Following:
    """Mixin that replaces the index iterator inside torch's loader iterator by a `BatchOrder`."""

    resumed: BatchOrder | None = None

    @property
    def _index_sampler(self) -> Ordered:
        # set while the iterator is restored and not started again
        if "index_sampler" not in vars(self):
            return Ordered(vars(self)["loader"]._index_sampler)
        sampler: Ordered = vars(self)["index_sampler"]
        return sampler

    @_index_sampler.setter
    def _index_sampler(self, sampler: Any) -> None:
        vars(self)["index_sampler"] = Ordered(sampler, self.resumed)
        self.resumed = None


# --- in this process ------------------------------------------------------------------------------


@known
class InProcess(_Following, _SingleProcessDataLoaderIter):
    """Loads each batch when it is requested."""


def _reduce_in_process(capture: Capture, batches: InProcess) -> Any:
    state = dict(vars(batches))
    order = state.pop("_sampler_iter")
    _must_be_short(batches, order)
    return make_bare, (InProcess,), (state, order.captured(order.taken)), None, None, set_batches


def _must_be_short(batches: Any, order: BatchOrder) -> None:
    if len(order.draws) > DRAWS_LIMIT:
        raise Refused(
            batches,
            f"an iterator whose {order.named} draws random numbers at every batch",
            "Draw them all when the sampler's __iter__ begins, or give it a generator of its own.",
        )


@known
def make_bare(cls: Any) -> object:
    return cls.__new__(cls)


@known
def set_batches(batches: Any, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    order = BatchOrder.__new__(BatchOrder)
    order.__setstate__(state[1])
    vars(batches).update(state[0], _sampler_iter=order)


# --- in processes of their own --------------------------------------------------------------------


@known
class Telling:
    """Collates a batch in a loading process, and reports the random states that this left.

    States are reported only when they differ from those of the batch before.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate
        self.said: list[Any] | None = None

    def __call__(self, samples: Any) -> tuple[Any, Any]:
        batch, states = self.collate(samples), _of_process()
        if states == self.said:
            return batch, None
        self.said = states
        return batch, states


@known
class Beginning:
    """Initializes a loading process: the tenant's function, then the captured random states."""

    def __init__(self, own: Callable[[int], Any] | None, states: dict[int, Any]) -> None:
        self.own, self.states = own, states

    def __call__(self, number: int) -> None:
        if self.own is not None:
            self.own(number)
        if number in self.states:
            _return_to(self.states[number])


@known
class InProcesses(_Following, _MultiProcessingDataLoaderIter):
    """Prefetches in processes. A restored iterator starts them when the next batch is requested.

    `before` is the captured state of a restored iterator until it starts. `offset` is the number of
    batches of this epoch that were given out before the restore. `random_states` has, by number of
    the loading process, its states after its last batch given out.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.before: JSON | None = None
        self.offset, self.is_aligned = 0, True
        self.abandoned: int | None = None
        self.random_states: dict[int, Any] = {}
        super().__init__(loader)

    def captured(self) -> JSON:
        if self.before is not None:
            return self.before
        given_out = self.offset + self._rcvd_idx
        return {
            "order": self._sampler_iter.captured(given_out),
            "given_out": given_out,
            "yielded": self._num_yielded,
            "base_seed": self._base_seed,
            "random_states": self.random_states,
            "has_ended": self._shutdown,
        }

    # Attributes that torch's own constructor sets, wrapped so that the iterator can be followed.

    @property
    def _worker_init_fn(self) -> Any:
        return vars(self)["worker_init_fn"]

    @_worker_init_fn.setter
    def _worker_init_fn(self, own: Any) -> None:
        vars(self)["worker_init_fn"] = Beginning(own, self.random_states)

    @property
    def _collate_fn(self) -> Any:
        return vars(self)["collate_fn"]

    @_collate_fn.setter
    def _collate_fn(self, collate: Any) -> None:
        vars(self)["collate_fn"] = Telling(collate)

    @property
    def _base_seed(self) -> int:
        seed: int = vars(self)["base_seed"]
        return seed

    @_base_seed.setter
    def _base_seed(self, drawn: int) -> None:
        vars(self)["base_seed"] = drawn if self.before is None else self.before["base_seed"]

    # --- batches ---

    def __next__(self) -> Any:
        if self.before is not None:
            if self.before["has_ended"]:
                raise StopIteration
            self._begin_again()
        return super().__next__()

    def _process_data(self, data: Any, worker_idx: int) -> Any:
        batch, states = super()._process_data(data, worker_idx)  # type: ignore[no-untyped-call]
        if states is not None:
            self.random_states[worker_idx] = states
        return batch

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Start a new epoch.

        If the last epoch was left early, its prefetched batches have already advanced the random
        states of the loading processes.
        """
        if not first_iter:
            if self.before is not None:
                self._begin_again()
            self.abandoned, self.offset = self.offset, 0
        super()._reset(loader, first_iter)
        self.abandoned = None

    def _get_data(self) -> Any:
        number, data = super()._get_data()  # type: ignore[no-untyped-call]
        if (
            self.abandoned is not None
            and isinstance(number, int)
            and isinstance(data, tuple | list)
        ):
            self.random_states[(self.abandoned + number) % self._num_workers] = data[1]
        return number, data

    def _try_put_index(self) -> None:
        if not self.is_aligned:  # the process that would have loaded a batch loads it
            self.is_aligned = True
            for _ in range(self.offset % self._num_workers):
                next(self._worker_queue_idx_cycle)
        super()._try_put_index()

    def _begin_again(self) -> None:
        """Start the loading processes in their captured states, and restore the random states of
        this process.
        """
        before: JSON = self.before  # type: ignore[assignment]
        order = BatchOrder.__new__(BatchOrder)
        order.__setstate__(before["order"])
        self.random_states = dict(before["random_states"])
        self.offset, self.is_aligned, self.resumed = before["given_out"], False, order
        own = self.loader.generator
        process, drawn = _of_process(), own.get_state() if own is not None else None
        try:
            super().__init__(self.loader)
        finally:
            _return_to(process)
            if own is not None:
                own.set_state(drawn)
        self._index_sampler.resumed = None
        self._num_yielded, self.before = before["yielded"], None


def _reduce_in_processes(capture: Capture, batches: InProcesses) -> Any:
    if batches.before is None:
        if batches._dataset_kind != _DatasetKind.Map:
            what = "an iterator over an iterable dataset in loading processes"
            raise Refused(batches, what, "Use num_workers=0, or torchdata's StatefulDataLoader.")
        if not batches._in_order:
            what = "an iterator whose batches may come out of order"
            raise Refused(batches, what, "Leave the DataLoader's in_order as it is.")
        _must_be_short(batches, batches._sampler_iter)
    state = (batches.loader, batches.captured())
    return make_bare, (InProcesses,), state, None, None, set_batches_later


@known
def set_batches_later(batches: Any, state: tuple[Any, JSON]) -> None:
    loader, before = state
    vars(batches).update(
        loader=loader, before=before, abandoned=None, _shutdown=True, _num_yielded=before["yielded"]
    )


# --- torchdata's StatefulDataLoader ---------------------------------------------------------------


def _reduce_loader(capture: Capture, loader: Any) -> Any:
    if not _is_stateful(loader):
        return NotImplemented
    if loader._iterator is not None:
        capture.stateful[id(loader._iterator)] = loader
    return make_bare, (type(loader),), dict(vars(loader), _iterator=None)


def _reduce_other(capture: Capture, batches: Any) -> Any:
    if not _is_stateful(batches):
        return NotImplemented
    loader = capture.stateful.get(id(batches))
    if loader is None:  # not `or`: a loader of an iterable dataset may have no length
        loader = _loader_of(batches)
    if loader is None:
        advice = "Make it with iter(loader), and keep the loader as well."
        raise Refused(batches, "an iterator without its StatefulDataLoader", advice)
    return go_on, (loader, batches.state_dict(), batches._base_seed)


def _is_stateful(obj: Any) -> bool:
    return type(obj).__module__.startswith("torchdata.") or "_initial_iter_for_state_dict" in vars(
        obj
    )


def _loader_of(batches: Any) -> Any:
    for table in gc.get_referrers(batches):
        for loader in gc.get_referrers(table) if isinstance(table, dict) else [table]:
            if isinstance(loader, DataLoader) and getattr(loader, "_iterator", None) is batches:
                return loader
    return None


@known
def go_on(loader: Any, position: JSON, base_seed: int) -> Any:
    own = loader.generator
    process, drawn = _of_process(), own.get_state() if own is not None else None
    try:
        loader.load_state_dict(position)
        return iter(loader)
    finally:
        _return_to(process)
        if own is not None:
            own.set_state(drawn)


REDUCERS: tuple[tuple[Any, Any], ...] = (
    (InProcess, _reduce_in_process),
    (InProcesses, _reduce_in_processes),
    (_BaseDataLoaderIter, _reduce_other),
    (DataLoader, _reduce_loader),
)
