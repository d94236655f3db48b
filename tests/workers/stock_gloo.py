"""Runs a script as torchrun would, with stock gloo: what ranks of ours are compared with."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path


def output_of_ranks(words: list[str], ranks: int, folder: Path, **variables: str) -> list[str]:
    """Run `python WORDS` once for each rank in the folder; return what rank 0 has printed.

    Stock gloo may abort after its group is destroyed, when all is done, so statuses tell nothing.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    begun = [
        subprocess.Popen(
            [sys.executable, *words],
            cwd=folder,
            stdout=subprocess.DEVNULL if rank else subprocess.PIPE,
            text=True,
            env={**shared, "RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    said, _ = begun[0].communicate()
    for process in begun[1:]:
        process.wait()
    return said.splitlines()
