"""A device worker reports, launches and ends tasks, whatever a tenant's process sends on its
wire.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import psutil
import pytest

from app.core.model.messages import Failed, Paused
from tests.security.devices import attack, longest_silence_s, serves
from tests.workers.conftest import Ground
from workers.device import resident as residents

pytestmark = pytest.mark.security

SILENCE_S = 3.0  # at most, on a busy host; the device reports every half second


@pytest.fixture(scope="module")
def ground(tmp_path_factory) -> Iterator[Ground]:
    """A single device for all attacks, one after the other."""
    made = Ground(tmp_path_factory.mktemp("floods"))
    made.open()
    yield made
    made.close()


def _failed_by(ground: Ground, do: str, **wait: float) -> tuple[Failed, float]:
    """Return how the attack ended, and the longest time in which its device did not report."""
    since = len(ground.reports)
    attack(ground, do, do)
    failed = ground.event(Failed, do, **wait)
    silent_s = longest_silence_s(ground, since)
    serves(ground, f"after-{do}", timeout_s=20.0)
    return failed, silent_s


@pytest.mark.parametrize(
    "do",
    [
        "flood_with_lists",
        "send_huge_frame",
        "nest_deeply",
        "send_unended_strings",
        "flood_with_parts",
        "send_index_of_lists",
    ],
)
def test_frames_that_are_costly_to_parse_end_their_sender_at_once(ground, do):
    before = psutil.Process().memory_info().rss
    failed, silent_s = _failed_by(ground, do)
    assert "invalid message" in failed.message
    assert silent_s < SILENCE_S
    assert psutil.Process().memory_info().rss - before < 200 * 2**20


@pytest.mark.parametrize("do", ["flood_with_short_frames", "flood_with_short_lists"])
def test_flood_of_frames_is_slowed_then_ended(ground, do, monkeypatch):
    monkeypatch.setattr(residents, "MUTED_BURST_S", 2.0)
    cpu_s, began_s = time.process_time(), time.monotonic()
    failed, silent_s = _failed_by(ground, do, timeout_s=60.0)
    assert "faster than its device worker could read" in failed.message
    assert silent_s < SILENCE_S
    assert time.process_time() - cpu_s < 0.5 * (time.monotonic() - began_s) + 2.0


def test_printing_without_end_keeps_nobody_waiting(ground):
    since = len(ground.reports)
    attack(ground, "print", "print_without_end")
    ground.until(lambda: len(ground.printed("print")) > 1_000)
    time.sleep(1.0)
    assert longest_silence_s(ground, since) < SILENCE_S
    ground.cancel("print")
    serves(ground, "after-print")


def test_told_memory_is_no_more_than_the_kernel_counts(ground):
    attack(ground, "liar", "lie_about_memory")
    ground.until(lambda: ground.printed("liar"))
    ground.until(lambda: ground.view("liar").memory_bytes)
    assert ground.view("liar").memory_bytes < 2**30
    ground.pause("liar")
    ground.event(Paused, "liar")
    serves(ground, "victim", timeout_s=15.0)
    ground.cancel("liar")


def test_process_that_never_reads_is_ended_and_told_so(ground, monkeypatch):
    monkeypatch.setattr(residents, "UNREAD_US", 1_000_000)
    attack(ground, "deaf", "never_read")
    ground.until(lambda: ground.printed("deaf"))
    since = len(ground.reports)

    def send_much() -> None:
        (resident,) = (r for r in ground.supervisor.lives.residents.values() if r.task == "deaf")
        for _ in range(100):
            resident.send("look", much="x" * 10_000)

    ground.supervisor.receive(send_much)
    assert "did not read" in ground.event(Failed, "deaf").message
    assert longest_silence_s(ground, since) < SILENCE_S
    serves(ground, "after-deaf")


def test_descriptors_sent_by_a_process_stay_few(ground):
    before = len(os.listdir("/proc/self/fd"))
    attack(ground, "fds", "send_descriptors")
    assert "invalid message" in ground.event(Failed, "fds").message
    ground.until(lambda: len(os.listdir("/proc/self/fd")) < before + 20)
