"""A device worker reports, launches and ends tasks, whatever a tenant's process sends on its
wire.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import psutil
import pytest

from app.core.model.protocol.messages import Failed, Paused
from tests.security.devices import attack, longest_silence_s, serves
from tests.workers.conftest import DeviceRig
from workers.device.processes import resident as residents

pytestmark = pytest.mark.security

SILENCE_S = 10.0  # a lease: a device that is silent for longer is lost


@pytest.fixture(scope="module")
def rig(tmp_path_factory) -> Iterator[DeviceRig]:
    """A single device for all attacks, one after the other."""
    made = DeviceRig(tmp_path_factory.mktemp("floods"))
    made.open()
    yield made
    made.close()


def _failed_by(rig: DeviceRig, do: str) -> tuple[Failed, float]:
    """Return how the attack ended, and the longest time in which its device did not report."""
    since = len(rig.reports)
    attack(rig, do, do)
    failed = rig.event(Failed, do)
    silent_s = longest_silence_s(rig, since)
    serves(rig, f"after-{do}")
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
def test_frames_that_are_costly_to_parse_end_their_sender_at_once(rig, do):
    before = psutil.Process().memory_info().rss
    failed, silent_s = _failed_by(rig, do)
    assert "invalid message" in failed.message
    assert silent_s < SILENCE_S
    assert psutil.Process().memory_info().rss - before < 200 * 2**20


@pytest.mark.parametrize("do", ["flood_with_short_frames", "flood_with_short_lists"])
def test_flood_of_frames_is_slowed_then_ended(rig, do, monkeypatch):
    monkeypatch.setattr(residents, "MUTED_BURST_S", 2.0)
    # Less than a starved supervisor reads: there it would be the machine that slows the flood.
    monkeypatch.setattr(residents, "FRAMES_PER_S", 50.0)
    monkeypatch.setattr(residents, "BYTES_PER_S", float(2**16))
    cpu_s, began_s = time.process_time(), time.monotonic()
    failed, silent_s = _failed_by(rig, do)
    assert "faster than its device worker could read" in failed.message
    assert silent_s < SILENCE_S
    assert time.process_time() - cpu_s < 0.5 * (time.monotonic() - began_s) + 2.0


def test_printing_without_end_keeps_nobody_waiting(rig):
    since = len(rig.reports)
    attack(rig, "print", "print_without_end")
    rig.until(lambda: len(rig.printed("print")) > 1_000)
    time.sleep(1.0)
    assert longest_silence_s(rig, since) < SILENCE_S
    rig.cancel("print")
    serves(rig, "after-print")


def test_told_memory_is_no_more_than_the_kernel_counts(rig):
    attack(rig, "liar", "lie_about_memory")
    rig.until(lambda: rig.printed("liar"))
    rig.until(lambda: rig.view("liar").memory_bytes)
    assert rig.view("liar").memory_bytes < 2**30
    rig.pause("liar")
    rig.event(Paused, "liar")
    serves(rig, "victim")
    rig.cancel("liar")


def test_process_that_never_reads_is_ended_and_told_so(rig, monkeypatch):
    monkeypatch.setattr(residents, "UNREAD_US", 1_000_000)
    attack(rig, "deaf", "never_read")
    rig.until(lambda: rig.printed("deaf"))
    since = len(rig.reports)

    def send_much() -> None:
        (resident,) = (r for r in rig.supervisor.stays.residents.values() if r.task == "deaf")
        for _ in range(100):
            resident.send("look", much="x" * 10_000)

    rig.supervisor.receive(send_much)
    assert "did not read" in rig.event(Failed, "deaf").message
    assert longest_silence_s(rig, since) < SILENCE_S
    serves(rig, "after-deaf")


def test_descriptors_sent_by_a_process_stay_few(rig):
    before = len(os.listdir("/proc/self/fd"))
    attack(rig, "fds", "send_descriptors")
    assert "invalid message" in rig.event(Failed, "fds").message
    rig.until(lambda: len(os.listdir("/proc/self/fd")) < before + 20)
