"""Makes a process a rank whose calls go to torch's own backend: gloo on a CPU, NCCL on CUDA.

Each rank has a device of its own, so ranks take no turns here.  A thread of the rank minds its
groups and obeys the orders of the host: it waits until no call is under way, lets go of torch's own
groups, and builds them anew when the order ends.  The main thread need not come: it may compute for
minutes, or wait at the gate.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ProcessGroup, distributed_c10d

from workers.hardware.accelerator import device_types
from workers.ranks.native.call_counters import BUILT, DROP, DROPPED, HOLD, CallCounters
from workers.ranks.native.group import (
    BACKEND,
    DEADLINE_S,
    NativeGroup,
    NativeWork,
    inner_tag,
)
from workers.ranks.own_group import replace_functions
from workers.ranks.process_group import SharedStore
from workers.ranks.rendezvous import Rendezvous
from workers.ranks.shared_memory import Arena, Handles
from workers.ranks.turns import RankState, Turns, state

JSON = dict[str, Any]

SETTLES_S = 0.001  # how often the thread looks for calls that have begun meanwhile
LOOK_S = 5.0  # orders wake the thread; it looks so often in case that one was missed
STORE_S, STORE_MOST_S = 0.001, 0.02  # how often a wait for a store key looks, at first and at last
_CALLBACK_THREAD = "pt_gloo_runloop"  # name of the threads in which gloo completes calls
_ADDRESS = "127.0.0.1"


class NativeRank:
    """Holds a rank's groups, and the thread that minds them."""

    def __init__(self, handles: Handles, rank: int, *, kind: str = "cpu") -> None:
        self.turns = Turns(Arena(handles), rank)
        self.counters, self.words = CallCounters(self.turns), self.turns.words
        self.exchange = Rendezvous(self.turns, timeout_s=DEADLINE_S)
        self.kind = kind
        self.keys = PollingStore(self.turns, DEADLINE_S)
        self.groups: list[NativeGroup] = []
        self.times_built = 0  # how often torch's own groups were built anew
        self._names: Counter[str] = Counter()

    # --- a rank's life ---

    @property
    def number(self) -> int:
        return self.turns.rank

    def begin(self) -> None:
        """Install the process group, begin the thread, and make the default group."""
        install(self)
        self.turns.join()
        threading.Thread(target=self._mind_groups, name="groups", daemon=True).start()
        self.start()

    def start(self) -> None:
        """Create the default group, as `init_process_group` would."""
        number, size = self.number, self.turns.arena.ranks
        dist.init_process_group(BACKEND, store=self.keys, rank=number, world_size=size)
        _tell_own_name(self, dist.group.WORLD)

    def store(self) -> PollingStore:
        """Return a store of the gang's keys."""
        return self.keys

    def end(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        self.finish()

    def finish(self) -> None:
        """Mark this rank as done."""
        with self.counters.departure():
            self.turns.finish()

    def boundary(self, step: int, seats: int | None = None) -> None:
        """Stop before step `step` if a cut lies there; these ranks keep their devices."""
        self.turns.boundary(step, DEADLINE_S)

    def accounts(self) -> JSON:
        return {"built": self.times_built, "calls": self.counters.calls}

    # --- groups ---

    def open(self, name: str, members: list[int]) -> tuple[str, int]:
        """Return a name that no group had before, and its index in the gang's table.

        A script may use a name again; all members then use it again.
        """
        self._names[name] += 1
        key = f"{name} #{self._names[name]}"
        index = self.exchange.open(key, members).index
        self.counters.open(index, members)
        return key, index

    def build(self, group: NativeGroup, order: int) -> None:
        """Make torch's own group, after this order, of the members that have not left it; waits
        until all these have made it.

        A member that has made its own could else leave at once, and gloo fails in a member that
        still connects to it.  Two members may still send each other messages when a third has left.
        """
        prefix = f"{BACKEND}/{group.key} of {group.ranks} after {order}"
        group.there = [at for at, rank in enumerate(group.ranks) if self._is_in(group, rank)]
        store, place = PrefixStore(prefix, self.keys), group.there.index(group.me)
        group.inner = _inner(store, place, len(group.there), self.kind)
        if store.add("made", 1) == len(group.there):
            store.set("all made", "")
        store.wait(["all made"])

    def _is_in(self, group: NativeGroup, rank: int) -> bool:
        has_ended = state(self.turns.arena, rank) == RankState.DONE
        return not has_ended and self.counters.is_member(group.index, rank)

    def close(self, group: NativeGroup) -> None:
        """Close a group; may be called twice, since c10d both aborts and shuts down."""
        if group not in self.groups:
            return
        with self.counters.departure():
            group.settle()
            self.groups.remove(group)
            group.inner, group.is_closed = None, True
            for index, size in ((group.index, len(group.ranks)), *group.channels.values()):
                self.counters.leave(index)
                self.exchange.left(index, size)
            group.channels.clear()

    def receive_from_any(
        self, group: NativeGroup, tensors: list[torch.Tensor], tag: int
    ) -> NativeWork:
        """Receive from whichever rank sends first."""

        def came(place: int) -> int:
            source = group.there[place] if place >= 0 else -1
            if source >= 0:
                self.counters.received(group.message(source, group.me, tag)[1])
            self.counters.wait_for_any(-1)
            return source

        def issued(inner: Any) -> Any:
            self.counters.wait_for_any(1)
            return inner.recv_anysource(tensors, inner_tag(tag))

        text = "a receive from any rank"
        index = group.channel((-1, group.me, tag), f"{text}, tag {tag}", [self.number])
        return group.issue(text, issued, tensors, index=index, came=came)

    def is_called_back(self) -> bool:
        """True in a thread in which gloo completes calls: such a call ends only after this one.

        PowerSGD's hook calls further collectives there, and waits for them.
        """
        if not self.words[HOLD] or threading.current_thread() is threading.main_thread():
            return False
        name = Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text()
        return name.startswith(_CALLBACK_THREAD)

    # --- the thread that minds the groups ---

    def _mind_groups(self) -> None:
        try:
            while True:
                self._obey()
        except BaseException as error:
            self.counters.error = error
            raise

    def _obey(self) -> None:
        """Do the next thing that the host's orders ask for, or wait for an order."""
        arena, words = self.turns.arena, self.words
        order, dropped = words[HOLD], words[DROP]
        if dropped not in (order, self.counters.built):
            self._drop(dropped)
            self._build_all(dropped)
            words[self.counters.me + BUILT] = dropped
        elif not order:
            arena.wait_while(HOLD, 0, LOOK_S)
        elif dropped == order:
            self._drop(order)
            arena.wait_while(HOLD, order, LOOK_S)
        else:
            self._settle()
            arena.wait_while(HOLD, order, SETTLES_S)

    def _settle(self) -> None:
        """Wait for all calls that have begun."""
        calls = self.counters.calls
        for group in [*self.groups]:
            group.settle()
        self.counters.settle(calls)

    def _drop(self, order: int) -> None:
        """Let go of torch's own groups; their sockets and threads end with them."""
        for group in self.groups:
            if group.inner is not None and self.kind != "cpu":
                group.inner.abort()
            group.inner = None
        self.words[self.counters.me + DROPPED] = order

    def _build_all(self, order: int) -> None:
        """Build torch's own groups anew, in a sequence that is the same for all ranks."""
        self.times_built += 1
        for group in sorted(self.groups, key=lambda group: group.index):
            self.build(group, order)


# --- torch's own groups ---------------------------------------------------------------------------


def _inner(store: Store, rank: int, size: int, kind: str) -> ProcessGroup:
    """Make torch's own group, as `init_process_group` would."""
    group = ProcessGroup(store, rank, size)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=_ADDRESS)]
    options._timeout = timedelta(seconds=DEADLINE_S)
    backend = gloo(PrefixStore("cpu/", store), rank, size, options)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    if kind == "cuda":
        _add_nccl(group, store, rank, size)
    return group


def _add_nccl(group: ProcessGroup, store: Store, rank: int, size: int) -> None:
    """Add NCCL for tensors on the device.  This has not run on a GPU."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=DEADLINE_S)
    backend = dist.ProcessGroupNCCL(PrefixStore("cuda/", store), rank, size, options)
    backend._set_sequence_number_for_group()
    group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, backend)
    group._set_default_backend(ProcessGroup.BackendType.NCCL)


def own_name(kind: str) -> str:
    """Return the name of torch's own backend for this kind of device."""
    return "nccl" if kind == "cuda" else "gloo"


class PollingStore(SharedStore):
    """Holds the keys and values of a gang whose ranks take no turns: a wait looks now and then."""

    def _wait(self, until: Callable[[], bool], text: str, limit_s: float | None = None) -> None:
        end_s = time.monotonic() + (self.timeout_s if limit_s is None else limit_s)
        pause_s = STORE_S
        while not until():
            self.turns.check()
            if time.monotonic() >= end_s:
                raise dist.DistStoreError(f"{text} timed out")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, STORE_MOST_S)


# --- in a rank's process --------------------------------------------------------------------------


def install(rank: NativeRank) -> None:
    """Make this process a rank: register `native`, and let new groups be of it."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(
            BACKEND, partial(_make_group, rank), extended_api=True, devices=device_types()
        )
    replace_functions(partial(_new_group, rank))


def _make_group(rank: NativeRank, options: Any, _: Any) -> NativeGroup:
    return NativeGroup(rank, options)


def _tell_own_name(rank: NativeRank, group: Any) -> None:
    """Let `get_backend` return the name of torch's own backend, on which scripts depend."""
    if isinstance(group, NativeGroup):
        name, world = own_name(rank.kind), distributed_c10d._world
        world.pg_map[group] = (dist.Backend(name), world.pg_map[group][1])
        world.pg_backend_config[group] = str(
            dist.distributed_c10d.BackendConfig(dist.Backend(name))
        )


def _new_group(rank: NativeRank, stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `new_group`: a group of torch's own could not be let go of."""

    @wraps(stock)
    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, **more: Any) -> Any:
        more.pop("pg_options", None)  # these options belong to another backend
        group = stock(ranks, timeout, BACKEND, **more)
        _tell_own_name(rank, group)
        return group

    return new_group
