"""Makes a process group of ours in Python: what `torch.distributed` asks of any group, and the
functions of torch that would go past it.
"""

# torch's stubs add overloads for callers; c10d calls each method in one form.
# mypy: disable-error-code="override"

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import GroupName


def untraced(cls: type) -> type:
    """Class decorator that keeps compilers out of a group's methods.

    A compiled graph ends before each call of a method.
    """
    for name, member in list(vars(cls).items()):
        if callable(member) and not name.startswith("__"):
            setattr(cls, name, torch._dynamo.disable(member))
    return cls


@untraced
class OwnGroup(dist.ProcessGroup):
    """A `torch.distributed` group whose calls are Python; answers what c10d asks about it."""

    backend = ""  # the name that C++ gets: DDP's logger looks into a group called "gloo"

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self.me = int(options.group_rank)
        self.ranks: list[int] = list(options.global_ranks_in_group)
        if not self.ranks:
            self.ranks = list(range(options.group_size))
        self.title: str = options.group_id
        self.purpose: str = self.title

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; raises RuntimeError with the names of those that are missing."""
        raise NotImplementedError

    def rank(self) -> int:
        return self.me

    def size(self) -> int:
        return len(self.ranks)

    getRank, getSize = rank, size  # names that C++ calls

    def getBackendName(self) -> str:
        return self.backend

    def name(self) -> str:
        return self.backend

    @property
    def group_name(self) -> GroupName:
        return GroupName(self.title)

    @property
    def group_desc(self) -> str:
        return self.purpose

    def _set_group_name(self, name: str) -> None:
        self.title = name

    def _set_group_desc(self, text: str) -> None:
        self.purpose = text

    def getGroupName(self) -> str:
        return self.title

    def getGroupDesc(self) -> str:
        return self.purpose


# --- functions of torch ---------------------------------------------------------------------------


def replace_functions(new_group: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace what would make a group that is not ours, or ask for one; `new_group` wraps torch's
    function of this name.
    """
    wrappers: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
        "monitored_barrier": _monitored_barrier,
        "new_group": new_group,
        "init_process_group": _init_process_group,
    }
    for name, wrapper in wrappers.items():
        stock = getattr(distributed_c10d, name)
        for module in (dist, distributed_c10d):
            setattr(module, name, wrapper(stock))


def _monitored_barrier(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `monitored_barrier`: the stock function requires gloo."""

    @wraps(stock)
    def monitored_barrier(
        group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> Any:
        own = group if group is not None else distributed_c10d._get_default_group()
        if isinstance(own, OwnGroup):
            return own.monitored_barrier(timeout, wait_all_ranks)
        return stock(group, timeout, wait_all_ranks)

    return monitored_barrier


def _init_process_group(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `init_process_group` so that the existing default group stays.

    Code for torchrun calls it again.
    """

    @wraps(stock)
    def init_process_group(*arguments: Any, **named: Any) -> None:
        if not dist.is_initialized():
            stock(*arguments, **named)

    return init_process_group
