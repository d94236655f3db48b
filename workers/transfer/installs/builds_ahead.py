"""Builds the environments that tasks wait for, before any of these tasks has a device.

    island -> locks in its answers -> device worker -> this thread -> builder -> uv

All device workers of a host get the same locks.  A worker builds up to AT_ONCE environments at a
time, each in a thread of its own, and a host as many: a build holds one of so many lock files, and
the lock file of its environment's turn, so that no two build the same.  The kernel takes the locks
from a worker that dies, and its builders die with it, so another worker goes on.  A build has a low
priority, as tasks run beside it.  It ends when no task waits for its environment any more.

A failure is reported in uv's own words.  It is also written down for the other workers of the host,
so that they do not repeat the build.  The build is tried again after a while, as long as a task
waits.  A builder that is killed is begun again at once, up to KILLED_MOST times.  A fault of the
host, such as a full disk, is no failure of the lock: the build waits.  On a full disk, older
environments are removed only for environments that are wanted earlier than they are.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile

from app.storage.store import Damaged, Store
from workers.process.file_locks import hold
from workers.process.uv import NoUv
from workers.transfer.installs.environments import (
    AheadBuild,
    BuilderKilled,
    Environments,
    NotBuilt,
    NotWanted,
)

log = logging.getLogger(__name__)

AGAIN_S = 60.0  # shortest time from a failure until the next try
SOON_S = 2.0  # in seconds: time until the next try, if the fault is not one of the lock
TURN_S = 0.2  # in seconds: how often this worker checks for its turn, since flock has no time limit
LOOK_S = 30.0  # interval of looks for environments that were removed although they are wanted
KILLED_MOST = 3
AT_ONCE = 2  # most builds at a time on a host
FULL = "the disk for packages is full of those that other tasks wait for"


class BuildsAhead:
    """Builds the environments that tasks will need, in threads of its own.

    Other threads call only the public methods.
    """

    def __init__(self, kept: Environments, store: Store, happened: Callable[[], None]) -> None:
        """Set up; `happened` is called from a thread when there is something to report."""
        self.kept, self.store, self._happened = kept, store, happened
        self._threads = [
            threading.Thread(target=self._run, name=f"builds-{n}", daemon=True)
            for n in range(AT_ONCE)
        ]
        self._wanted: tuple[str, ...] = ()
        self._taken: set[str] = set()  # locks at which a thread works
        self._since_s: dict[str, float] = {}  # failures before this time are old
        self._again_s: dict[str, float] = {}
        self._killed: dict[str, int] = {}
        self._states: dict[str, list[str]] = {}
        self._changed = threading.Condition()
        self._ended = False

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    # --- from other threads ---

    @property
    def wanted(self) -> tuple[str, ...]:
        return self._wanted

    def want(self, locks: Sequence[str]) -> bool:
        """Set the wanted locks, the most urgent first; return True if they have changed."""
        with self._changed:
            if tuple(locks) == self._wanted:
                return False
            now_s = time.time()
            self._wanted = tuple(locks)
            self._since_s = {one: self._since_s.get(one, now_s) for one in locks}
            for known in (self._again_s, self._killed, self._states):
                for gone in known.keys() - self._since_s.keys():
                    del known[gone]
            self._changed.notify_all()
            return True

    def state(self, lock: str) -> list[str]:
        """Return the state of a wanted lock that is not built, and the text about it for people."""
        with self._changed:
            return list(self._states.get(lock, ("waiting", "")))

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    # --- its threads ---

    def _run(self) -> None:
        while (lock := self._next()) is not None:
            try:
                with self._turn(lock) as is_mine:
                    if is_mine:
                        self._build(lock)
            except OSError as error:
                log.warning("cannot build the environment %s yet: %s", lock[:12], error)
                self._put_off(lock, _words(error))
            except Exception as error:
                log.exception("cannot build the environment %s ahead", lock[:12])
                self._fail(lock, f"The host cannot build environments: {error}", 0.0)
            finally:
                with self._changed:
                    self._taken.discard(lock)
                    self._changed.notify_all()

    def _next(self) -> str | None:
        """Wait until a lock can be built, and take it; None when the thread must end."""
        with self._changed:
            while not self._ended:
                now_s, open_ = time.time(), self._open()
                for lock in open_:
                    if (again_s := self._again_s.get(lock, 0.0)) <= now_s:
                        self._since_s[lock] = max(self._since_s[lock], again_s)
                        self._taken.add(lock)
                        return lock
                again_s = min((self._again_s[one] for one in open_), default=now_s + LOOK_S)
                self._changed.wait(min(LOOK_S, again_s - now_s))
            return None

    def _open(self) -> list[str]:
        """Return the wanted locks that are not built and at which no thread works."""
        return [one for one in self._wanted if one not in self._taken and not self._has(one)]

    def _has(self, lock: str) -> bool:
        """True if the environment is built, as far as the host can tell."""
        try:
            return self.kept.has(lock)
        except OSError:
            return False  # the build reports the fault itself

    @contextmanager
    def _turn(self, lock: str) -> Iterator[bool]:
        """Wait until no other worker builds this environment and the host has a free place.

        Yields False if there is nothing left to build then.
        """
        turn = self.kept.lock_file(f"turn-{lock}")
        places = [self.kept.lock_file(f"building-{n}") for n in range(AT_ONCE)]
        try:
            while self._is_open(lock):
                if hold(turn, fcntl.LOCK_EX) and any(hold(one, fcntl.LOCK_EX) for one in places):
                    yield self._is_open(lock)  # another worker may have built it meanwhile
                    return
                with self._changed:
                    self._changed.wait(TURN_S)
            yield False
        finally:
            for fd in (turn, *places):
                os.close(fd)

    def _is_wanted(self, lock: str) -> bool:
        return not self._ended and lock in self._wanted

    def _is_open(self, lock: str) -> bool:
        """True if the lock is wanted and not built, and no other worker has failed to build it."""
        if not self._is_wanted(lock) or self.kept.has(lock):
            return False
        failure = self.kept.failure(lock)
        if failure is None or failure.at_s < self._since_s.get(lock, 0.0):
            return True
        self._note_failure(lock, failure.told, failure.took_s)
        return False

    def _build(self, lock: str) -> None:
        before = tuple(takewhile(lambda one: one != lock, self._wanted))
        if not self.kept.has_room(before):
            self._put_off(lock, FULL)
            return
        self._tell(lock, "building", "")
        began_s = time.monotonic()
        try:
            ahead = AheadBuild(before=before, is_wanted=lambda: self._is_wanted(lock))
            self.kept.opened(lock, self.store, ahead=ahead).close()
        except NotWanted:
            log.info("ended the build of %s, for which no task waits any more", lock[:12])
        except BuilderKilled as error:
            killed = self._killed[lock] = self._killed.get(lock, 0) + 1
            log.warning("the builder of %s was killed (%d times)", lock[:12], killed)
            if killed >= KILLED_MOST:
                self._fail(lock, str(error), time.monotonic() - began_s)
        except (NotBuilt, NoUv) as error:
            self._fail(lock, str(error), time.monotonic() - began_s)
        except Damaged as error:
            log.warning("cannot read the lock of the environment %s yet: %s", lock[:12], error)
            self._put_off(lock, "the host cannot read its lock yet")
        else:
            # Another thread may have filled the disk meanwhile, with what is wanted earlier.
            if self.kept.has_room(before):
                self._happened()
            else:
                self.kept.make_room(before)
                self._put_off(lock, FULL)

    def _fail(self, lock: str, told: str, took_s: float) -> None:
        try:
            self.kept.note_failure(lock, told, took_s)
        except OSError as error:
            log.warning("cannot write down a failed build for other workers: %s", error)
        self._note_failure(lock, told, took_s)

    def _note_failure(self, lock: str, told: str, took_s: float) -> None:
        with self._changed:
            self._again_s[lock] = time.time() + max(AGAIN_S, 2 * took_s)
            self._killed.pop(lock, None)
        self._tell(lock, "failed", told)

    def _put_off(self, lock: str, told: str) -> None:
        with self._changed:
            self._again_s[lock] = time.time() + SOON_S
        self._tell(lock, "waiting", told)

    def _tell(self, lock: str, state: str, told: str) -> None:
        with self._changed:
            if lock not in self._since_s or self._states.get(lock) == [state, told]:
                return
            self._states[lock] = [state, told]
        self._happened()


def _words(error: OSError) -> str:
    """Describe a fault of the host, without the path of its file."""
    return f"the host cannot build packages: {error.strerror or type(error).__name__}"
