"""The process group `splice` of `torch.distributed` over a gang's exchange, with its store and
waits.

    process_group.install(exchange)
    dist.init_process_group("splice", store=SharedStore(...), rank=..., world_size=...)

Every collective is posted when it is called and has a number in its group; its `wait()` waits for
this call only. Results are combined in rank order (`rendezvous`). The ranks are processes that take
turns (`turns`): a call that would block, such as a wait for a store key or a sleep, first gives the
slot away.

A future that is requested inside a backward pass may be incomplete: the pass goes on, and a
callback at its end completes all such futures. So a rank gives its slot away once, and not once per
bucket. Outside a backward pass no such callback would run: a future is completed when it is
requested.

DDP's reducer gets the sum as a view of the shared heap. It reads its future's value and copies it
to the gradients, so copying the sum into the bucket first would be wasted.

Unsupported calls raise at once: see `_refuse`.
"""

# torch's stubs add overloads for callers; c10d calls each method in one form.
# mypy: disable-error-code="override"

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial, wraps
from types import FrameType
from typing import Any, NoReturn

import torch
import torch._dynamo
import torch.distributed as dist
from torch._C._distributed_c10d import Store, Work
from torch.distributed import ReduceOp

from workers.hardware.accelerator import device_types
from workers.ranks.kv_store import Change, Keys
from workers.ranks.own_group import OwnGroup, replace_functions, untraced
from workers.ranks.rendezvous import EVERYBODY, FOLDS, NOBODY, CallView, Group, Rendezvous
from workers.ranks.shared_memory import uses
from workers.ranks.turns import Spared, Turns, Wait

Tensors = list[torch.Tensor]

BACKEND = "splice"

_here: Rendezvous  # the exchange of this process's rank
# kept here: C++ holds the object too, but if Python freed it, its Python methods would be lost
_store: SharedStore


# --- a call under way -----------------------------------------------------------------------------


class Pending(Work):
    """A posted call. `finish` copies the result into the caller's tensors."""

    def __init__(
        self,
        group: SpliceGroup,
        tickets: list[CallView],
        finish: Callable[[], None],
        value: Any,
        timeout_s: float,
    ) -> None:
        super().__init__()
        self.group, self.tickets, self.finish, self.value = group, tickets, finish, value
        self.timeout_s = timeout_s
        self.overwrites: Tensors = []  # tensors that the result will overwrite
        self.future: torch.futures.Future[Any] | None = None
        self.is_for_future = False  # the caller reads the future, not the tensors that it passed
        self.done = False
        self.source = -1  # for a message from any rank: its sender

    def wait(self, timeout: timedelta | None = None) -> bool:
        limit_s = timeout.total_seconds() if timeout else 0
        self.complete(limit_s if limit_s > 0 else self.timeout_s)
        return True

    def complete(self, timeout_s: float) -> None:
        for ticket in self.tickets:
            if not self.done:
                _in_words(ticket, timeout_s)
        self._finish()

    def lend(self) -> Callable[[], None]:
        """Complete the future with the sum in the shared heap; return a function that takes the sum
        back.

        If the caller has not read the future by then, it finds the sum in the tensors of its call.
        """
        [ticket] = self.tickets
        _in_words(ticket, self.timeout_s)
        assert self.future is not None
        sums = ticket.sums(apart=True)
        before = [uses(total) for total in sums]
        self.done = True
        self.future.set_result(sums)

        @torch.no_grad()
        def take_back() -> None:
            # not read yet: a later backward pass will read it
            if [uses(total) for total in sums] == before:
                self.finish()
                for total, tensor in zip(sums, self.value, strict=True):
                    total.set_(tensor.view(-1))
            ticket.take()

        return take_back

    def try_to_complete(self) -> bool:
        """Complete the call if its results have arrived.

        A call whose sum is about to be lent is left alone.
        """
        if self.is_for_future and self.future is not None:
            return self.done
        if not self.done and all(ticket.ready() for ticket in self.tickets):
            self._finish()
        return self.done

    def _finish(self) -> None:
        if self.done:
            return
        self.done = True
        with torch.no_grad():
            self.finish()
        for ticket in self.tickets:
            ticket.take()
        if self.future is not None:
            self.future.set_result(self.value)

    def get_future(self) -> torch.futures.Future[Any]:
        if self.future is None:
            self.future = torch.futures.Future()
            if self.done:
                self.future.set_result(self.value)
        if not self.done and not self.group.put_off(self):
            self.complete(self.timeout_s)
        return self.future

    def is_completed(self) -> bool:
        return self.try_to_complete()

    def is_success(self) -> bool:
        return self.done

    def exception(self) -> None:
        return None

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> Any:
        self.wait()
        return self.value

    def source_rank(self) -> int:
        if self.source < 0:
            raise RuntimeError("only a message from any rank has a source to ask for")
        return self.source

    _source_rank = source_rank


def _in_words(ticket: CallView, timeout_s: float) -> None:
    try:
        ticket.wait(timeout_s)
    except TimeoutError as error:
        raise RuntimeError(f"{ticket.described} timed out: {error}") from error


# --- the process group ----------------------------------------------------------------------------


@untraced
class SpliceGroup(OwnGroup):
    """A `torch.distributed` group. Each method is a collective as c10d calls it."""

    backend = BACKEND

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.exchange = _here
        self.group = self.exchange.open(f"c10d.{self.title}", self.ranks)
        self.timeout_s = options.timeout.total_seconds()
        self.under_way: deque[Pending] = deque()
        self.late: list[Pending] = []  # to be completed when the backward pass ends
        self.coalescing: list[Pending] | None = None
        self.channels: dict[tuple[int, int, int], Group] = {}
        self.to_myself: dict[int, deque[torch.Tensor]] = {}
        self.exchange.turns.spared.append(self._overwritten)
        self.closed = False

    # --- posting and completing ---

    def issue(
        self,
        text: str,
        parts: Sequence[torch.Tensor] | None,
        finish: Callable[[CallView], None],
        value: Any,
        *,
        opts: Any = None,
        fold: str = "",
        needs: int = EVERYBODY,
        group: Group | None = None,
    ) -> Pending:
        self._complete_what_came()
        with torch.no_grad():
            ticket = self.exchange.post(group or self.group, text, parts, fold=fold, needs=needs)
        limit_s = _seconds(opts, self.timeout_s)
        pending = Pending(self, [ticket], lambda: finish(ticket), value, limit_s)
        if needs == NOBODY:
            pending.try_to_complete()
        else:
            self.under_way.append(pending)
        if self.coalescing is not None:
            self.coalescing.append(pending)
        return pending

    def _overwritten(self) -> list[Spared]:
        """Return the tensors that calls under way will overwrite, so their contents need not be
        saved.
        """
        calls = [pending for pending in self.under_way if not pending.done]
        return [(tensor, None) for pending in calls for tensor in pending.overwrites]

    def _complete_what_came(self) -> None:
        """Complete finished calls in order, even those for which the caller never waits."""
        while self.under_way and self.under_way[0].try_to_complete():
            self.under_way.popleft()

    def put_off(self, pending: Pending) -> bool:
        """Leave the call to the end of the backward pass that is running; False if none is
        running.
        """
        if torch._C._current_autograd_node() is None:
            return False
        if not self.late:
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
        self.late.append(pending)
        return True

    def _end_of_backward(self) -> None:
        late, self.late = self.late, []
        lent = []
        for pending in late:
            if pending.is_for_future and not pending.done:
                lent.append(pending.lend())
            else:
                pending.complete(pending.timeout_s)
        # DDP's own callback, which reads the lent sums, is queued already, so it runs before these.
        for take_back in lent:
            torch.autograd.Variable._execution_engine.queue_callback(take_back)

    # --- folded ---

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Pending:
        return self._reduce("all_reduce", tensors, opts, needs=EVERYBODY)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Pending:
        return self._reduce("all_reduce", tensors, opts, needs=EVERYBODY)

    def reduce(self, tensors: Tensors, opts: Any) -> Pending:
        root = opts.rootRank
        needs = EVERYBODY if root == self.me else NOBODY
        return self._reduce(f"reduce to {root}", tensors, opts, needs=needs)

    def _reduce(self, name: str, tensors: Tensors, opts: Any, *, needs: int) -> Pending:
        op = _op(opts)
        fold, scale = _fold_of(op, self.size())

        def finish(ticket: CallView) -> None:
            if needs == EVERYBODY:
                for tensor, total in zip(tensors, ticket.sums(), strict=True):
                    tensor.copy_(scale(total.view(tensor.shape)))

        text = f"{name}({_name(op)}, {_shapes(tensors)})"
        parts = [_flat(t) for t in tensors]
        pending = self.issue(text, parts, finish, tensors, opts=opts, fold=fold, needs=needs)
        pending.overwrites = tensors if needs == EVERYBODY else []
        if name == "all_reduce" and op == ReduceOp.SUM and tensors[0].device.type == "cpu":
            pending.is_for_future = _engine_calls()
        return pending

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Pending:
        parts = [_flat(t) for row in inputs for t in row]
        return self._scatter_sums("reduce_scatter", outputs, parts, opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> Pending:
        return self._scatter_sums("reduce_scatter_tensor", [output], self._cut(input), opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Pending:
        parts = [part for tensor in inputs for part in self._cut(tensor)]
        return self._scatter_sums("reduce_scatter_tensor", outputs, parts, opts)

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def _scatter_sums(self, name: str, outputs: Tensors, parts: Tensors, opts: Any) -> Pending:
        """Reduce-scatter; `parts` has one part per member for each output."""
        op = _op(opts)
        fold, scale = _fold_of(op, self.size())

        def finish(ticket: CallView) -> None:
            sums = ticket.sums()[self.me :: self.size()]
            for output, total in zip(outputs, sums, strict=True):
                output.copy_(scale(total.view(output.shape)))

        text = f"{name}({_name(op)}, {_shapes(parts)})"
        return self.issue(text, parts, finish, outputs, opts=opts, fold=fold)

    def _cut(self, tensor: torch.Tensor) -> Tensors:
        if tensor.numel() % self.size():
            told = f"{tensor.numel()} elements cannot be scattered over {self.size()} ranks"
            raise ValueError(told)
        return list(_flat(tensor).chunk(self.size()))

    # --- kept ---

    def broadcast(self, tensors: Tensors, opts: Any) -> Pending:
        root = opts.rootRank
        mine = [_flat(t) for t in tensors] if root == self.me else None
        needs = NOBODY if root == self.me else root
        finish = partial(self._take_row, tensors, root)
        text = f"broadcast(from {root}, {_shapes(tensors)})"
        return self.issue(text, mine, finish, tensors, opts=opts, needs=needs)

    def _take_row(self, into: Tensors, member: int, ticket: CallView) -> None:
        if member != self.me:
            for tensor, row in zip(into, ticket.row(member), strict=True):
                _take(tensor, row, ticket, self.ranks[member])

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Pending:
        return self._gather_all("all_gather", outputs, inputs, outputs, opts)

    def allgather_coalesced(
        self, outputs: list[Tensors], inputs: Tensors, opts: Any = None
    ) -> Pending:
        """Gather lists: `outputs` has one list per rank, each with one tensor per input."""
        turned = [list(row) for row in zip(*outputs, strict=True)]
        if len(outputs) != self.size():  # some callers use the transposed order
            turned = outputs
        return self._gather_all("all_gather", turned, inputs, outputs, opts)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> Pending:
        return self._gather_into([output], [input], output, opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Pending:
        return self._gather_into(outputs, inputs, outputs, opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]

    def _gather_into(self, outputs: Tensors, inputs: Tensors, value: Any, opts: Any) -> Pending:
        places = []
        for output, input in zip(outputs, inputs, strict=True):
            if output.numel() != input.numel() * self.size():
                told = f"an output of {output.numel()} elements for {self.size()} x {input.numel()}"
                raise ValueError(told)
            if not output.is_contiguous():
                raise ValueError("all_gather_into_tensor needs a contiguous output")
            places.append(list(output.view(-1).chunk(self.size())))
        return self._gather_all("all_gather_into_tensor", places, inputs, value, opts)

    def _gather_all(
        self, name: str, outputs: list[Tensors], inputs: Tensors, value: Any, opts: Any
    ) -> Pending:
        """Gather from all members; `outputs` has one tensor per member for each input."""

        def finish(ticket: CallView) -> None:
            for member in range(self.size()):
                self._take_all([places[member] for places in outputs], member, ticket)

        text = f"{name}({len(inputs)} of {inputs[0].dtype})" if inputs else name
        return self.issue(text, [_flat(t) for t in inputs], finish, value, opts=opts)

    def _take_all(self, into: Tensors, member: int, ticket: CallView) -> None:
        for tensor, row in zip(into, ticket.row(member), strict=True):
            _take(tensor, row, ticket, self.ranks[member])

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Pending:
        root = opts.rootRank

        def finish(ticket: CallView) -> None:
            for member, place in enumerate(outputs[0] if root == self.me else []):
                _take(place, ticket.row(member)[0], ticket, self.ranks[member])

        needs = EVERYBODY if root == self.me else NOBODY
        text = f"gather(to {root}, {inputs[0].dtype})"
        return self.issue(text, [_flat(inputs[0])], finish, outputs, opts=opts, needs=needs)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Pending:
        root = opts.rootRank

        def finish(ticket: CallView) -> None:
            _take(outputs[0], ticket.row(root)[self.me], ticket, self.ranks[root])

        mine = [_flat(t) for t in inputs[0]] if root == self.me else None
        text = f"scatter(from {root}, {outputs[0].dtype})"
        return self.issue(text, mine, finish, outputs, opts=opts, needs=root)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Pending:
        def finish(ticket: CallView) -> None:
            for member, output in enumerate(outputs):
                _take(output, ticket.row(member)[self.me], ticket, self.ranks[member])

        text = f"all_to_all({inputs[0].dtype})"
        return self.issue(text, [_flat(t) for t in inputs], finish, outputs, opts=opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> Pending:
        inputs = _split(input, input_sizes, self.size())
        return self.alltoall(_split(output, output_sizes, self.size()), inputs, opts)

    alltoall_base = all_to_all_single  # type: ignore[assignment]

    # --- barriers ---

    def barrier(self, opts: Any = None) -> Pending:
        return self.issue("barrier()", None, lambda ticket: None, None, opts=opts)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks.

        Raises RuntimeError on every waiting rank and names the missing ranks.
        """
        limit_s = timeout.total_seconds() if timeout is not None else self.timeout_s
        ticket = self.exchange.post(self.group, "monitored_barrier()")
        try:
            ticket.wait(limit_s)
        except TimeoutError as error:
            missing = self.exchange.turns.lacking(self.group.index, ticket.number)
            told = f"monitored_barrier: ranks {missing} did not come within {limit_s:g} s"
            raise RuntimeError(told) from error
        ticket.take()

    # --- from one to one ---

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Pending:
        """Post a message.

        The call is done once the bytes are copied; the receiver takes them later.
        """
        if dst == self.me:
            self.to_myself.setdefault(tag, deque()).append(tensors[0].clone())
            return self._done(tensors)
        channel = self._channel(self.me, dst, tag)
        parts, text = [_flat(tensors[0])], _message(self.ranks[self.me], self.ranks[dst], tag)
        sent = self.issue(text, parts, lambda t: None, tensors, group=channel, needs=NOBODY)
        self.exchange.call(self.ranks[dst])
        return sent

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> Pending:
        if src == self.me:
            if not self.to_myself.get(tag):
                raise RuntimeError(f"rank {self.me} receives from itself what it has not sent")
            tensors[0].copy_(self.to_myself[tag].popleft())
            return self._done(tensors)

        def finish(ticket: CallView) -> None:
            _take(tensors[0], ticket.row(0)[0], ticket, self.ranks[src])

        channel = self._channel(src, self.me, tag)
        text = _message(self.ranks[src], self.ranks[self.me], tag)
        return self.issue(text, None, finish, tensors, group=channel, needs=0)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Pending:
        """Receive from the lowest rank that has sent.

        As with any backend, the timing decides which ranks have sent.
        """
        others = [member for member in range(self.size()) if member != self.me]
        channels = {src: self._channel(src, self.me, tag) for src in others}
        turns = self.exchange.turns

        def has_come() -> bool:
            return any(map(self.exchange.has_come, channels.values()))

        while not has_come():  # a message with another tag also wakes us
            text = f"recv(from any rank, tag {tag})"
            turns.wait(
                Wait.MESSAGE, turns.rank, until=has_come, text=text, timeout_s=self.timeout_s
            )
        src = next(s for s, channel in channels.items() if self.exchange.has_come(channel))
        received = self.recv(tensors, src, tag)
        received.wait()
        received.source = src
        return received

    def _channel(self, src: int, dst: int, tag: int) -> Group:
        key = (src, dst, tag)
        if key not in self.channels:
            name = f"c10d.{self.title} from {self.ranks[src]} to {self.ranks[dst]} tag {tag}"
            self.channels[key] = self.exchange.open(name, [self.ranks[src], self.ranks[dst]])
        return self.channels[key]

    def _done(self, value: Any) -> Pending:
        pending = Pending(self, [], lambda: None, value, self.timeout_s)
        pending.try_to_complete()
        return pending

    # --- several as one ---

    def _start_coalescing(self, device: torch.device) -> None:
        self.coalescing = []

    def _end_coalescing(self, device: torch.device) -> Pending:
        calls, self.coalescing = self.coalescing or [], None

        def finish() -> None:
            for call in calls:
                call.complete(call.timeout_s)

        return Pending(self, [t for c in calls for t in c.tickets], finish, None, self.timeout_s)

    # --- deadlines and the end ---

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        self._close()

    def abort(self) -> None:
        self._close()

    def _close(self) -> None:
        """Close the group; may be called twice, since c10d both aborts and shuts down."""
        if self.closed:
            return
        self.closed = True
        self._complete_what_came()
        self.exchange.turns.spared.remove(self._overwritten)
        for group in (self.group, *self.channels.values()):
            self.exchange.close(group)
        self.channels.clear()

    def _refuse(self, *what: Any, **named: Any) -> NoReturn:
        raise NotImplementedError(
            "the process group 'splice' splits, merges and profiles no groups: "
            "make sub-groups by torch.distributed.new_group"
        )

    split_group = merge_remote_group = splitGroup = mergeRemoteGroup = _refuse
    _register_on_completion_hook = _refuse


def _engine_calls() -> bool:
    """True if a backward pass in C++ called the group's method directly.

    Only DDP's reducer does so. A hook in Python, which may look at its tensors, would add a Python
    frame between them.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _OURS:
        frame = frame.f_back
    return frame is not None and frame.f_code is _RUN_BACKWARD


_OURS = {__file__, torch._dynamo.eval_frame.__file__}
_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__


def _seconds(opts: Any, default_s: float) -> float:
    """Return a call's own time limit in seconds, or the default."""
    timeout = getattr(opts, "timeout", None)
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else 0.0
    unset = dist.distributed_c10d.default_pg_timeout.total_seconds()
    return seconds if 0 < seconds != unset else default_s


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_sparse:
        raise NotImplementedError(
            "the process group 'splice' takes no sparse tensors: "
            "use sparse=False in the embedding, or tensor.to_dense()"
        )
    return tensor.detach().reshape(-1)


def _take(tensor: torch.Tensor, row: torch.Tensor, ticket: CallView, rank: int) -> None:
    size = tensor.numel() * tensor.element_size()
    if size != len(row):
        raise RuntimeError(
            f"{ticket.described}: rank {rank} brought {len(row)} bytes, "
            f"and the tensor that takes them has {size} (shape {tuple(tensor.shape)})"
        )
    if size:
        tensor.copy_(row.view(tensor.dtype).view(tensor.shape))


def _split(tensor: torch.Tensor, sizes: list[int], ranks: int) -> Tensors:
    """Split by rows of the first dimension; without `sizes` into equal parts."""
    if not sizes and tensor.shape[0] % ranks:
        raise ValueError(f"{tensor.shape[0]} rows cannot be dealt out to {ranks} ranks")
    return list(tensor.split(list(sizes) or tensor.shape[0] // ranks or 1)) or [tensor] * ranks


def _shapes(tensors: Sequence[torch.Tensor]) -> str:
    shown = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors[:4]]
    if len(tensors) > 4:
        more = sum(t.numel() for t in tensors[4:])
        shown.append(f"and {len(tensors) - 4} more of {more} elements")
    return ", ".join(shown)


def _message(src: int, dst: int, tag: int) -> str:
    return f"a message from rank {src} to rank {dst}, tag {tag}"


def _op(opts: Any) -> Any:
    return opts.reduceOp if opts is not None else ReduceOp.SUM


def _name(op: Any) -> str:
    """Return an op's name.

    Compare with `==`: equal ops have different hashes, so a dict does not find them.
    """
    return next(name for name, known in _NAMES.items() if op == known)


_NAMES = {
    "sum": ReduceOp.SUM,
    "mean": ReduceOp.AVG,
    "product": ReduceOp.PRODUCT,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "and": ReduceOp.BAND,
    "or": ReduceOp.BOR,
    "xor": ReduceOp.BXOR,
    "scaled sum": ReduceOp.PREMUL_SUM,
}


def _fold_of(op: Any, size: int) -> tuple[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the name of an op's fold in FOLDS, and a function to apply to the folded result."""
    name = _name(op)
    if name not in FOLDS:
        raise NotImplementedError(
            f"the process group 'splice' has no reduction by {name}: scale, then use ReduceOp.SUM"
        )
    if name == "mean":  # multiply by 1/N as DDP does; dividing by N would give other bits
        return name, lambda total: total.mul(1.0 / size).to(total.dtype)
    return name, lambda total: total


# --- the store ------------------------------------------------------------------------------------


class SharedStore(Store):
    """Keys and values of a gang in its shared memory.

    A rank that waits for a key gives its slot away.
    """

    def __init__(self, turns: Turns, timeout_s: float) -> None:
        super().__init__()
        self.turns, self.timeout_s = turns, timeout_s
        self.keys = Keys(turns)
        self.asked = 0  # number of changes made through the bridge

    def set(self, key: str, value: Any) -> None:
        self._change(("set", key, _bytes(value)))

    def add(self, key: str, amount: int) -> int:
        return int(self._change(("add", key, int(amount))))

    def append(self, key: str, value: Any) -> None:
        self._change(("append", key, _bytes(value)))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return bytes(self._change(("compare_set", key, _bytes(expected), _bytes(desired))))

    def delete_key(self, key: str) -> bool:
        return bool(self._change(("delete", key)))

    def num_keys(self) -> int:
        return len(self.keys.read())

    def list_keys(self) -> list[str]:
        return sorted(self.keys.read())

    def clone(self) -> SharedStore:
        return self  # there is no connection to duplicate

    deleteKey, getNumKeys = delete_key, num_keys  # names that C++ calls, for example in PrefixStore

    def check(self, keys: list[str]) -> bool:
        content = self.keys.read()
        return all(key in content for key in keys)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.keys.read()[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit_s = timeout.total_seconds() if timeout is not None else self.timeout_s
        text = f"store.wait({', '.join(keys)})"
        self._wait(partial(self.check, keys), text, limit_s)

    def _wait(self, until: Callable[[], bool], text: str, limit_s: float | None = None) -> None:
        limit_s = self.timeout_s if limit_s is None else limit_s
        end_s = time.monotonic() + limit_s
        try:
            while not until():  # every change wakes every rank that waits for the store
                left_s = max(0.0, end_s - time.monotonic())
                self.turns.wait(Wait.STORE, until=until, text=text, timeout_s=left_s)
        except TimeoutError as error:
            raise dist.DistStoreError(f"{text} timed out: {error}") from error

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self.timeout_s)

    def _change(self, change: Change) -> Any:
        """Make a change at once; in a gang over several hosts, in an order that all hosts share."""
        if not self.turns.arena.is_bridged:
            return self.keys.change(change)
        self.asked += 1
        me, number = self.turns.rank, self.asked
        self.turns.arena.tell_bridge(("change", me, number, change))
        self._wait(lambda: self.keys.answers().get(me, (0,))[0] == number, f"store.{change[0]}")
        return self.keys.answers()[me][1]


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


# --- in a rank's process --------------------------------------------------------------------------


def install(exchange: Rendezvous) -> None:
    """Make this process a rank: register `splice`, and let blocking calls give the slot away."""
    global _here
    _here = exchange
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(
            BACKEND, _make_group, extended_api=True, devices=device_types()
        )
    _sleep_without_a_seat(exchange.turns)
    replace_functions(_new_group)


def start(turns: Turns, timeout_s: float) -> None:
    """Create the default group, as `init_process_group` would, so that a job of a gang finds it
    ready.
    """
    global _store
    _store = SharedStore(turns, timeout_s)
    dist.init_process_group(
        BACKEND,
        store=_store,
        rank=turns.rank,
        world_size=turns.arena.ranks,
        timeout=timedelta(seconds=timeout_s),
    )


def _make_group(options: Any, _: Any) -> SpliceGroup:
    return SpliceGroup(options)


def _new_group(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `new_group` so that it uses `splice`: gloo or NCCL would block while holding the
    slot.
    """

    @wraps(stock)
    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, **more: Any) -> Any:
        more.pop("pg_options", None)  # these options belong to another backend
        return stock(ranks, timeout, BACKEND, **more)

    return new_group


def _sleep_without_a_seat(turns: Turns) -> None:
    """Let `time.sleep` give the slot away in the rank's main thread; other threads hold no slot."""
    stock, process = time.sleep, os.getpid()

    def sleep(seconds: float) -> None:
        if os.getpid() != process or threading.current_thread() is not threading.main_thread():
            stock(seconds)
            return
        with turns.away(f"sleep({seconds:g})"):
            stock(seconds)

    time.sleep = sleep  # type: ignore[assignment]
