"""Runs work that may block in other threads of the device worker."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from workers.transfer.tree_removal import remove_tree


class SideWork:
    """Owns the threads beside the supervisor's; `receive` queues a function for the supervisor's
    thread.
    """

    def __init__(
        self,
        receive: Callable[[Any], None],
        threads: int,
    ) -> None:
        self._receive = receive
        self._hands = ThreadPoolExecutor(threads, "hands")
        # Threads of their own, because building an environment takes long: other tasks must get
        # their inputs meanwhile.
        self._builders = ThreadPoolExecutor(threads, "builders")
        # A tenant's leftovers can be large: removing or closing them must not block other work.
        self._sweeper = ThreadPoolExecutor(1, "sweeper")
        self._closer = ThreadPoolExecutor(1, "closer")

    def aside(
        self, work: Callable[[], Any], then: Callable[[Any], None], *, is_long: bool = False
    ) -> None:
        """Run `work` in another thread. Then call `then` in the supervisor's thread, with the
        result or the error.

        Work that `is_long` has threads of its own.
        """

        def done(future: Future[Any]) -> None:
            if not future.cancelled():
                error = future.exception()
                self._receive(lambda: then(future.result() if error is None else error))

        pool = self._builders if is_long else self._hands
        pool.submit(work).add_done_callback(done)

    def remove(self, folder: Path) -> None:
        """Remove a folder and all in it."""
        self._sweeper.submit(remove_tree, folder)

    def close(self, resource: Callable[[], None]) -> None:
        """Call a function that closes something and may take long."""
        self._closer.submit(resource)

    def cancel_waiting(self) -> None:
        """Start no more work; wait for the work that runs."""
        self._builders.shutdown(wait=False, cancel_futures=True)
        self._hands.shutdown(cancel_futures=True)

    def end(self) -> None:
        self._closer.shutdown()
        self._sweeper.shutdown(wait=False)
