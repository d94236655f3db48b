"""Jobs of several ranks on one device: to the island a task like any other."""

from __future__ import annotations

import random
import time

import pytest

from app.core.messages import Failed, Finished, Paused, Resized, Saved, Started, Stopped
from tests.workers.conftest import Ground

RANKS, STEPS = 3, 60


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What the job gives when nobody disturbs it."""
    ground = Ground(tmp_path_factory.mktemp("alone"))
    ground.open()
    try:
        train(ground, "alone", pace=0.0)
        return ground.event(Finished, "alone").result
    finally:
        ground.close()


def train(ground, task="t1", epoch=1, *, pace=0.05, **more):
    params = {"steps": STEPS, "pace": pace}
    ground.launch(task, "ranks:Train", epoch, world_size=RANKS, params=params, **more)


def test_all_ranks_see_the_same_losses(undisturbed):
    assert len(set(undisturbed["seen"])) == STEPS  # the mean of all ranks, at each step another


@pytest.mark.parametrize("seed", range(2))
def test_it_is_paused_and_goes_on_in_place_with_the_same_bits(ground, undisturbed, seed):
    chance = random.Random(seed)
    for epoch in range(1, 5):
        train(ground, epoch=epoch)
        started = ground.event(Started, "t1", epoch)
        assert started.capabilities == ["pause", "save", "move", "exact"]
        ground.steps("t1", started.step + chance.randrange(1, 3), epoch=epoch)
        ground.pause("t1", epoch)
        paused = ground.event(Paused, "t1", epoch)
        assert ground.event(Saved, "t1", epoch).step == paused.step
    train(ground, epoch=5)
    assert ground.event(Finished, "t1", 5).result == undisturbed


@pytest.mark.parametrize("seed", range(2))
def test_it_is_resized_saved_and_paused_as_it_runs_with_the_same_bits(ground, undisturbed, seed):
    chance, seats = random.Random(seed), 1
    for epoch in range(1, 4):
        train(ground, epoch=epoch, checkpoint_every_s=0.2)
        seats = 1
        ground.event(Started, "t1", epoch)
        for resized in range(1, 4):
            seats = chance.choice([n for n in range(1, RANKS + 1) if n != seats])
            ground.resize("t1", seats, epoch)
            ground.until(lambda n=resized, e=epoch: len(ground.all(Resized, "t1", e)) == n)
            assert ground.all(Resized, "t1", epoch)[-1].seats == seats
        ground.pause("t1", epoch)
        ground.event(Paused, "t1", epoch)
    train(ground, epoch=4)
    assert ground.event(Finished, "t1", 4).result == undisturbed


def test_who_is_paused_while_it_is_resized_begins_again_on_one_seat(ground, undisturbed):
    train(ground)
    ground.steps("t1", 2)
    ground.resize("t1", RANKS)
    ground.pause("t1")
    ground.event(Paused, "t1")
    train(ground, epoch=2)
    ground.event(Started, "t1", 2)
    ground.resize("t1", 2, epoch=2)
    assert ground.event(Resized, "t1", 2).seats == 2
    assert ground.event(Finished, "t1", 2).result == undisturbed


def test_it_is_put_back_from_its_checkpoint_with_the_same_bits(ground, undisturbed):
    train(ground)
    ground.steps("t1", 4)
    ground.pause("t1")
    saved = ground.event(Saved, "t1")
    for epoch in (2, 3):
        ground.drop.append(["t1", epoch - 1])
        ground.until(lambda: not ground.supervisor.residents)
        train(ground, epoch=epoch, images=[ground.image(saved)])
        started = ground.event(Started, "t1", epoch)
        assert (started.resumed, started.step) == ("image", saved.step)
        if epoch == 2:
            ground.steps("t1", saved.step + 3, epoch=2)
            ground.pause("t1", 2)
            saved = ground.event(Saved, "t1", 2)
    assert ground.event(Finished, "t1", 3).result == undisturbed


def test_its_checkpoints_show_all_ranks_after_the_same_step(ground, undisturbed):
    train(ground, checkpoint_every_s=0.1)
    ground.until(lambda: len(ground.all(Saved, "t1")) >= 2)
    saved = ground.all(Saved, "t1")[-1]
    ground.drop.append(["t1", 1])
    ground.until(lambda: not ground.supervisor.residents)
    train(ground, epoch=2, images=[ground.image(saved)])
    assert ground.event(Started, "t1", 2).step == saved.step > 0
    assert ground.event(Finished, "t1", 2).result == undisturbed


def test_tensors_of_every_rank_can_be_exported(ground):
    train(ground)
    ground.steps("t1", 2)
    ground.pause("t1")
    saved = ground.event(Saved, "t1")
    manifest = ground.store.manifest("ten", saved.sha256, key=ground.house.signer.public)
    names = {tensor.name for tensor in manifest.ranks[0].tensors}
    mine = {name for name in names if not name.startswith("rank")}
    assert mine
    assert {f"rank1.{name}" for name in mine} < names


def test_cancel_ends_all_ranks(ground):
    train(ground)
    ground.steps("t1", 2)
    ground.cancel("t1")
    ground.event(Stopped, "t1")
    ground.until(lambda: not ground.supervisor.residents)


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("ranks:Fails", "rank 1: ValueError: rank one has had enough"),
        ("ranks:Dies", "rank 1: its process was killed by signal 9."),
    ],
)
def test_a_rank_that_ends_ends_the_gang_and_is_named(ground, entry, told):
    ground.launch("t1", entry, world_size=RANKS)
    failed = ground.event(Failed, "t1")
    assert failed.message == told
    ground.until(lambda: not ground.supervisor.residents)


def test_it_stands_still_when_the_trust_ends_and_goes_on_with_it(grounds, undisturbed):
    ground = grounds(lease_s=3.0)
    train(ground, pace=0.3)
    ground.steps("t1", 2)
    ground.deaf = True
    time.sleep(2.8)
    assert ground.supervisor.seat.is_still
    ground.deaf = False
    assert ground.event(Finished, "t1", timeout_s=40).result == undisturbed
