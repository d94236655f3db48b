"""A job that misbehaves in ways drawn at random, beside a well-behaved job of another tenant.

The neighbour loses no step, no device is silent for longer than a lease, the next job runs where
the bad job was, and the bad job is charged for all the time that it held its device.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator

import pytest

from app.core.model.protocol.messages import Failed, Started, Stopped
from tests.security.devices import attack, hostile_bundle, longest_silence_s, serves
from tests.workers.conftest import PATIENCE_S, DeviceRig
from workers.device.heartbeat import now_us

pytestmark = pytest.mark.security

LEASE_S = 10.0
WAYS = (
    "hold_descriptors",
    "send_lingering_sockets",
    "outlive_the_device",
    "flood_with_lists",
    "flood_with_short_lists",
    "flood_with_short_frames",
    "flood_with_parts",
    "send_huge_frame",
    "nest_deeply",
    "send_unended_strings",
    "print_without_end",
    "lie_about_memory",
    "never_read",
    "send_index_of_lists",
    "send_descriptors",
    "block_signals",
    "fork_children",
    "fill_disk",
    "nest_folders",
    "close_sockets",
    "send_garbage",
    "close_descriptors",
    "end_silently",
    "kill_everything",
    "hold_the_interpreter",
)


@pytest.fixture
def both(tmp_path) -> Iterator[tuple[DeviceRig, DeviceRig]]:
    """The bad job's device, and its neighbour's, on one host."""
    opened = []
    try:
        # The neighbour always has the time to end its step: it is not the one that must be killed.
        for name, more in (("bad", {}), ("good", {"stop_grace_s": PATIENCE_S})):
            opened.append(DeviceRig(tmp_path / name, lease_s=LEASE_S, **more))
            opened[-1].open()
        yield opened[0], opened[1]
    finally:
        for rig in opened:
            rig.close()


def _behave_badly(bad: DeviceRig, dice: random.Random, number: int) -> float:
    """Play one draw; returns the longest silence of its device in seconds."""
    task, do = f"bad{number}", "+".join(dice.sample(WAYS, dice.randint(1, 3)))
    since, began_us = len(bad.reports), now_us()
    attack(bad, task, do)
    bad.event(Started, task)
    time.sleep(dice.uniform(0.1, 1.5))
    if dice.random() < 0.3:
        bad.pause(task)
    bad.cancel(task)

    bad.until(lambda: bad.view(task) is None)
    views = [view for alive in bad.reports[since:] for view in alive.residents]
    held_s = max(view.held_us for view in views if view.task == task) / 1e6
    for ended in (*bad.all(Failed, task), *bad.all(Stopped, task)):  # none if it was paused
        held_s = max(held_s, ended.held_us / 1e6)
        assert held_s > 0.0, do
    assert held_s <= (now_us() - began_us) / 1e6 + 0.5, do
    serves(bad, f"good{number}")
    silent_s = longest_silence_s(bad, since)
    assert silent_s < LEASE_S, do
    return silent_s


def _attack(both: tuple[DeviceRig, DeviceRig], draws: int, seed: int) -> None:
    bad, good = both
    dice = random.Random(seed)
    good.launch("neighbour", "attacks:Steady", bundle=hostile_bundle(good), tenant="other")
    good.event(Started, "neighbour")
    since = len(good.reports)
    silent_s = [_behave_badly(bad, dice, number) for number in range(draws)]
    assert longest_silence_s(good, since) < LEASE_S
    good.cancel("neighbour")
    ended = good.event(Stopped, "neighbour")
    steps = [int(line.split()[0]) for line in good.printed("neighbour") if line[0].isdigit()]
    times_s = [float(line.split()[1]) for line in good.printed("neighbour") if line[0].isdigit()]
    assert steps == list(range(1, len(steps) + 1))
    assert ended.step == len(steps) > draws
    waits_s = sorted(after - before for before, after in itertools.pairwise(times_s))
    told = f"{draws} draws: {len(steps)} steps, median {waits_s[len(waits_s) // 2]:.3f} s"
    print(f"{told}, longest {waits_s[-1]:.3f} s; bad device silent {max(silent_s):.2f} s")  # noqa: T201


def test_neighbour_of_a_job_that_attacks_at_random_loses_no_step(both):
    _attack(both, draws=4, seed=1)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_neighbour_of_100_random_attacks_loses_no_step(both, seed):
    _attack(both, draws=25, seed=100 + seed)
