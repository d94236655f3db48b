"""Folders that are made once on a host: one maker at a time, none removed in use, no lock left."""

import contextlib
import os
import random
import threading
import time

import pytest

from workers.transfer.installs.kept_trees import ABOUT, KeptTrees


@pytest.fixture
def trees(tmp_path):
    return KeptTrees(folder=tmp_path, limit_bytes=2**20)


def make(trees, name):
    trees.work.mkdir(parents=True, exist_ok=True)
    trees.built(name).mkdir(parents=True)
    (trees.built(name) / ABOUT).write_text("{}")


def locks(trees):
    return {one.name for one in (trees.folder / "locks").iterdir()}


def fail():
    raise ValueError("cannot be made")


def test_folder_that_cannot_be_made_leaves_no_lock(trees):
    with pytest.raises(ValueError, match="cannot be made"):
        trees.shared("a", fail, time.monotonic() + 5)
    assert locks(trees) == set()


def test_lock_goes_with_its_folder_and_stays_while_the_folder_is_in_use(trees):
    fd, _ = trees.shared("a", lambda: make(trees, "a"), time.monotonic() + 5)
    trees.let_go("a", trees.built("a"))
    assert (trees.built("a").exists(), locks(trees)) == (True, {"a"})
    os.close(fd)
    trees.let_go("a", trees.built("a"))
    assert (trees.built("a").exists(), locks(trees)) == (False, set())


class Makers:
    """Takes the folder, fails to make it, or removes it, at random; `faults` is what went wrong."""

    def __init__(self, trees):
        self.trees, self.making = trees, threading.Lock()
        self.faults, self.taken = [], 0

    def make(self):
        if not self.making.acquire(blocking=False):
            self.faults.append("two made it at once")
        try:
            time.sleep(random.uniform(0, 0.01))
            make(self.trees, "a") if random.random() < 0.7 else fail()
        finally:
            self.making.release()

    def use(self):
        fd, _ = self.trees.shared("a", self.make, time.monotonic() + 5)
        self.taken += 1
        time.sleep(random.uniform(0, 0.002))
        if not (self.trees.built("a") / ABOUT).exists():
            self.faults.append("it was removed in use")
        os.close(fd)

    def work(self):
        for _ in range(500):
            if random.random() < 0.4:
                self.trees.let_go("a", self.trees.built("a"))
            else:
                with contextlib.suppress(ValueError):
                    self.use()


def test_makers_users_and_removers_at_once_never_meet(trees):
    makers = Makers(trees)
    threads = [threading.Thread(target=makers.work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert makers.faults == []
    assert makers.taken > 300
