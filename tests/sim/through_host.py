"""Carries collectives of simulated accelerators through host memory and gloo."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

NAME = "through-host"


class ThroughHost(dist.ProcessGroup):
    """Carries out a collective on copies in host memory, by a group of gloo."""

    def __init__(self, rank: int, size: int, gloo: dist.ProcessGroup) -> None:
        super().__init__(rank, size)
        self.gloo, self.title, self.purpose = gloo, "", ""
        self.timeout_s = 60.0

    def _on_copies(self, tensors: list[torch.Tensor], collective: Callable[..., Any]) -> Any:
        copies = [tensor.cpu() for tensor in tensors]
        collective(copies).wait()
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)
        return _done(tensors)

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        return self._on_copies(tensors, lambda copies: self.gloo.allreduce(copies, options))

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        return self._on_copies(tensors, lambda copies: self.gloo.broadcast(copies, options))

    def allgather(self, outputs: Any, inputs: list[torch.Tensor], options: Any = None) -> Any:
        host = [[out.cpu() for out in row] for row in outputs]
        self.gloo.allgather(host, [tensor.cpu() for tensor in inputs]).wait()
        for row, copies in zip(outputs, host, strict=True):
            for out, copy in zip(row, copies, strict=True):
                out.copy_(copy)
        return _done(outputs)

    def _allgather_base(self, out: torch.Tensor, given: torch.Tensor, options: Any = None) -> Any:
        copy = out.cpu()
        self.gloo._allgather_base(copy, given.cpu()).wait()
        return _done(out.copy_(copy))

    def _reduce_scatter_base(self, out: torch.Tensor, given: torch.Tensor, options: Any) -> Any:
        copy = out.cpu()
        self.gloo._reduce_scatter_base(copy, given.cpu(), options).wait()
        return _done(out.copy_(copy))

    # --- names, which torch keeps in a backend of C++ ---

    @property
    def group_name(self) -> Any:
        return dist.distributed_c10d.GroupName(self.title)

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

    def getBackendName(self) -> str:
        return NAME


def _done(value: Any) -> Any:
    done = torch.futures.Future[Any]()
    done.set_result(value)
    return torch._C._distributed_c10d._create_work_from_future(done)


def register(kind: str) -> None:
    """Make it the backend that torch takes for this kind of device if none is named."""

    def made(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> Any:
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
        return gloo if kind == "cpu" else ThroughHost(rank, size, gloo)

    devices = ["cpu"] if kind == "cpu" else ["cpu", kind]
    dist.Backend.register_backend(NAME, made, devices=devices)
