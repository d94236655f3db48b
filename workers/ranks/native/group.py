"""The process group `native` of `torch.distributed`: hands each call to torch's own group, which it
holds inside, and can let go of.

A script keeps its groups and its handles of calls for ever, and DDP's reducer keeps its group in
C++.  So torch's own group, with its threads and sockets, cannot be closed where a script can reach
it.  Here the script has a group and handles of ours.  At a common point of all ranks
(`core.device.common_point`) they let go of what is inside, and later a group with new sockets takes
its place.  Calls, their order and their bits are those of torch's own group.  torchft wraps groups
in the same way, to replace them after a fault.
"""

# torch's stubs add overloads for callers; c10d calls each method in one form.
# mypy: disable-error-code="override"

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn, Protocol

import torch
from torch._C._distributed_c10d import Work

from workers.ranks.native.call_counters import CallCounters
from workers.ranks.own_group import OwnGroup, untraced

BACKEND = "native"
#: Deadlines of torch's own groups: clocks go on while the processes are frozen.  A rank that is
#: behind or dead is found without a deadline (`core.device.gang_watch`).
DEADLINE_S = 365 * 86400.0

#: Changes the tag of a message on its way to torch's own group.  Gloo's monitored_barrier sends
#: messages, too, with tags from 0 on that each new group counts anew (`monitoredBarrier` in torch's
#: ProcessGroupGloo.cpp).  A receive from any rank would take them for the script's own.
_TAG_BIT = 1 << 30

#: What c10d calls on a group -> how a call is named to people.
_COLLECTIVES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "all_gather_single": "all_gather_into_tensor",
    "all_gather_single_coalesced": "all_gather_into_tensor",
    "_allgather_base": "all_gather_into_tensor",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor",
    "gather": "gather",
    "scatter": "scatter",
    "alltoall": "all_to_all",
    "all_to_all_single": "all_to_all",
    "alltoall_base": "all_to_all",
    "barrier": "barrier",
}


class NativeWork(Work):
    """Stands for a call under way; lets go of torch's own handle once the call has ended.

    Torch's own handle is waited for once: gloo copies the result of a reduce_scatter at each wait,
    and a message may be waited for only once.
    """

    def __init__(self, inner: Any, came: Callable[[int], int] | None = None) -> None:
        """Hold torch's own handle.

        `came` gets the place inside from which a receive from any rank came, -1 if it has failed,
        and returns the sender's place in the group.
        """
        super().__init__()
        self._inner, self._came, self._source = inner, came, -1
        self._future: torch.futures.Future[Any] | None = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._end(timeout)
        if self._error is not None:
            raise self._error
        return True

    def settle(self) -> None:
        """Wait for the end of the call; an error is kept for whoever waits for the call."""
        self._end(None)

    def _end(self, timeout: timedelta | None) -> None:
        with self._lock:
            inner = self._inner
            if inner is None:
                return
            try:
                if timeout is None or not timeout:
                    inner.wait()
                else:
                    inner.wait(timeout)
                if self._came is not None:
                    self._source = inner._source_rank()
            except BaseException as error:
                self._error = error
            if self._came is not None:
                self._source = self._came(self._source)
            if self._future is None:
                self._future = _future_of(inner)
            self._inner = None

    def is_completed(self) -> bool:
        inner = self._inner
        return inner is None or bool(inner.is_completed())

    def is_success(self) -> bool:
        inner = self._inner
        return self._error is None if inner is None else bool(inner.is_success())

    def exception(self) -> Any:
        inner = self._inner
        return self._error if inner is None else inner.exception()

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> Any:
        future = self.get_future()
        self.wait()
        return future.value()

    def get_future(self) -> torch.futures.Future[Any]:
        if self._future is None and (inner := self._inner) is not None:
            self._future = inner.get_future()
        if self._future is None:
            raise RuntimeError("this call of torch's own backend has no future")
        return self._future

    def source_rank(self) -> int:
        self.wait()
        return self._source

    _source_rank = source_rank


def inner_tag(tag: int) -> int:
    """Return the tag that a message has inside; a tag below 0 is left for torch to refuse."""
    return tag ^ _TAG_BIT if tag >= 0 else tag


def _future_of(inner: Any) -> torch.futures.Future[Any] | None:
    try:
        future: torch.futures.Future[Any] = inner.get_future()
    except RuntimeError:  # messages of gloo have none
        return None
    return future


class GroupOwner(Protocol):
    """Says what a group calls of the rank that holds it and makes its inside (`native.rank`)."""

    counters: CallCounters
    groups: list[NativeGroup]

    def open(self, name: str, members: list[int]) -> tuple[str, int]:
        """Return a name that no group had before, and its index in the gang's table."""

    def build(self, group: NativeGroup, order: int) -> None:
        """Make torch's own group inside this one."""

    def close(self, group: NativeGroup) -> None: ...

    def receive_from_any(
        self, group: NativeGroup, tensors: list[torch.Tensor], tag: int
    ) -> NativeWork: ...

    def is_called_back(self) -> bool:
        """True in a thread in which gloo completes calls."""


@untraced
class NativeGroup(OwnGroup):
    """A `torch.distributed` group over one of torch's own, `inner`, which may be away."""

    backend = BACKEND
    timeout_s = DEADLINE_S

    def __init__(self, owner: GroupOwner, options: Any) -> None:
        super().__init__(options)
        self.owner = owner
        self.key, self.index = owner.open(self.title, self.ranks)
        # (source, destination, tag) of messages -> index, and number of members
        self.channels: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.under_way: deque[NativeWork] = deque()
        self._ends = threading.Lock()
        self.inner: Any = None
        self.there: list[int] = []  # the members of `inner`, by their place in this group
        self.is_closed = False
        with owner.counters.call(self.index, "new_group"):
            owner.build(self, owner.counters.built)
            owner.groups.append(self)

    # --- calls ---

    def issue(
        self,
        text: str,
        issued: Callable[[Any], Any],
        shown: Any = None,
        *,
        index: int | None = None,
        came: Callable[[int], int] | None = None,
    ) -> NativeWork:
        """Issue a call inside; returns its handle."""
        if self.is_closed:
            raise RuntimeError(f"group {self.title!r} was destroyed")
        self._forget_ended()
        at, owner = self.index if index is None else index, self.owner
        with owner.counters.call(at, text, _shown(shown), passes=owner.is_called_back()):
            work = NativeWork(issued(self.inner), came)
            self.under_way.append(work)
        return work

    def _forget_ended(self) -> None:
        """Let go of calls that have ended, also of those for which nobody waits."""
        with self._ends:
            while self.under_way and self.under_way[0].is_completed():
                self.under_way.popleft().settle()

    def settle(self) -> None:
        """Wait until no call of this group is under way."""
        for work in [*self.under_way]:
            work.settle()

    # --- from one to one ---

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> NativeWork:
        text, index = self.message(self.me, dst, tag)
        return self.issue(
            text,
            lambda inner: inner.send(tensors, self._inside(dst), inner_tag(tag)),
            tensors,
            index=index,
        )

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> NativeWork:
        text, index = self.message(src, self.me, tag)
        return self.issue(
            text,
            lambda inner: inner.recv(tensors, self._inside(src), inner_tag(tag)),
            tensors,
            index=index,
        )

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> NativeWork:
        return self.owner.receive_from_any(self, tensors, tag)

    def _inside(self, member: int) -> int:
        """Return the place of a member in `inner`; raises RuntimeError if the member has left."""
        if member not in self.there:
            raise RuntimeError(f"rank {self.ranks[member]} has left group {self.title!r}")
        return self.there.index(member)

    def _must_be_whole(self) -> None:
        if len(self.there) < len(self.ranks):
            left = [rank for at, rank in enumerate(self.ranks) if at not in self.there]
            raise RuntimeError(f"ranks {left} have left group {self.title!r}")

    def message(self, src: int, dst: int, tag: int) -> tuple[str, int]:
        """Return the name of a message, and the index of its channel, a group of two."""
        members = [self.ranks[member] for member in dict.fromkeys((src, dst))]
        text = f"a message from rank {self.ranks[src]} to rank {self.ranks[dst]}, tag {tag}"
        return text, self.channel((src, dst, tag), text, members)

    def channel(self, key: tuple[int, int, int], text: str, members: list[int]) -> int:
        """Return the index of a channel, which is opened when it is first used."""
        if key not in self.channels:
            _, index = self.owner.open(f"{self.key}: {text}", members)
            self.channels[key] = index, len(members)
        return self.channels[key][0]

    # --- several as one ---

    def _start_coalescing(self, device: torch.device) -> None:
        self.inner._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> NativeWork:
        return self.issue("coalesced", lambda inner: inner._end_coalescing(device))

    # --- at once ---

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        more = {} if timeout is None else {"timeout": timeout}
        with self.owner.counters.call(self.index, "monitored_barrier"):
            self._must_be_whole()
            self.inner.monitored_barrier(wait_all_ranks=wait_all_ranks, **more)

    # --- deadlines and the end ---

    def set_timeout(self, timeout: timedelta) -> None:
        """Ignore a deadline: clocks go on while the processes are frozen."""

    def shutdown(self) -> None:
        self.owner.close(self)

    def abort(self) -> None:
        self.owner.close(self)

    def _refuse(self, *what: Any, **named: Any) -> NoReturn:
        raise NotImplementedError(
            "a group of this gang is not split, merged or profiled: "
            "make sub-groups by torch.distributed.new_group"
        )

    split_group = merge_remote_group = splitGroup = mergeRemoteGroup = _refuse
    _register_on_completion_hook = _refuse


def _collective(name: str, text: str) -> Callable[..., NativeWork]:
    def method(self: NativeGroup, *arguments: Any, **named: Any) -> NativeWork:
        given = arguments if arguments and arguments[-1] is not None else arguments[:-1]
        shown = arguments[0] if arguments else None

        def issued(inner: Any) -> Any:
            self._must_be_whole()
            return getattr(inner, name)(*given, **named)

        return self.issue(text, issued, shown)

    method.__name__ = name
    return method


for _name, _text in _COLLECTIVES.items():
    setattr(NativeGroup, _name, torch._dynamo.disable(_collective(_name, _text)))


def _shown(value: Any) -> tuple[object, ...]:
    """Return the type and shape of the first tensor of a call."""
    while isinstance(value, list | tuple) and value:
        value = value[0]
    return (value.dtype, *value.shape) if isinstance(value, torch.Tensor) else ()
