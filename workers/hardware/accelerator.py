"""Wraps torch's devices: the CPU always, CUDA if there is one."""

from __future__ import annotations

import mmap

import torch


class Accelerator:
    """A torch device; `kind` is the island's name for it: "cpu" or "cuda"."""

    def __init__(self, kind: str) -> None:
        if kind == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("this device worker serves cuda, but torch finds no CUDA device")
        self.kind = kind
        self.device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")

    def synchronize(self) -> None:
        """Wait until all work issued so far is done."""
        if self.kind == "cuda":
            torch.cuda.synchronize(self.device)

    def empty_cache(self) -> None:
        if self.kind == "cuda":
            torch.cuda.empty_cache()

    def held_bytes(self) -> int:
        """Return the device memory that this process holds; 0 if that is host memory."""
        return torch.cuda.memory_reserved(self.device) if self.kind == "cuda" else 0

    def random_state(self) -> list[torch.Tensor]:
        return [torch.cuda.get_rng_state(self.device)] if self.kind == "cuda" else []

    def set_random_state(self, states: list[torch.Tensor]) -> None:
        for state in states:
            torch.cuda.set_rng_state(state, self.device)


class Pinned:
    """Host memory at `address`, pinned as far as requested for access by a CUDA device."""

    def __init__(self, address: int) -> None:
        self.address, self.size = address, 0

    def reach(self, size: int) -> None:
        if size <= self.size:
            return
        runtime = torch.cuda.cudart()
        if self.size:
            runtime.cudaHostUnregister(self.address)
        self.size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        failed = runtime.cudaHostRegister(self.address, self.size, 0)
        if int(failed) != 0:
            self.size = 0  # not pinned: copies are slower and block the host
