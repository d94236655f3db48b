"""Jobs of several ranks on one device: to the island a task like any other."""

from __future__ import annotations

import random
import time

import pytest

from app.core.model.messages import (
    Failed,
    Finished,
    Paused,
    Resize,
    Resized,
    Saved,
    Started,
    Stopped,
)
from tests.thoroughness import rest_long
from tests.workers.conftest import Ground
from workers.process.slab import Slab, made
from workers.process.wire import Wire, pair
from workers.ranks.shared_memory import Ground as GangGround
from workers.ranks.shared_memory import close, make
from workers.residents import coordinator, remote_ranks
from workers.residents.work import Work
from workers.transfer import peer_auth

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


@pytest.mark.parametrize("seed", rest_long(range(2)))
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


@pytest.mark.parametrize("seed", rest_long(range(2)))
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
            assert ground.all(Resized, "t1", epoch)[-1].seats == [seats]
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
    assert ground.event(Resized, "t1", 2).seats == [2]
    assert ground.event(Finished, "t1", 2).result == undisturbed


def test_it_is_put_back_from_its_checkpoint_with_the_same_bits(ground, undisturbed):
    train(ground)
    ground.steps("t1", 4)
    ground.pause("t1")
    saved = ground.event(Saved, "t1")
    for epoch in (2, 3):
        ground.drop.append(["t1", epoch - 1])
        ground.until(lambda: not ground.supervisor.lives.residents)
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
    ground.until(lambda: not ground.supervisor.lives.residents)
    train(ground, epoch=2, images=[ground.image(saved)])
    assert ground.event(Finished, "t1", 2).result == undisturbed
    assert ground.went_on_from(saved)


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
    ground.until(lambda: not ground.supervisor.lives.residents)


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
    ground.until(lambda: not ground.supervisor.lives.residents)


def test_it_stands_still_when_the_trust_ends_and_goes_on_with_it(grounds, undisturbed):
    ground = grounds(lease_s=3.0)
    train(ground, pace=0.3)
    ground.steps("t1", 2)
    ground.deaf = True
    time.sleep(2.8)
    assert ground.supervisor.lives.holder.is_still
    ground.deaf = False
    assert ground.event(Finished, "t1", timeout_s=40).result == undisturbed


SECRET = {"secret": "ab" * 32}


def test_a_host_that_does_not_connect_is_given_up_and_it_goes_on_as_it_was(
    ground, undisturbed, monkeypatch
):
    monkeypatch.setattr(peer_auth, "WITHIN_S", 0.5)
    train(ground)
    ground.steps("t1", 2)
    ground.resize("t1", RANKS)
    ground.event(Resized, "t1")
    ground.supervisor.receive(Resize(task="t1", epoch=1, seq=3, seats=[1, 1], links=SECRET))
    ground.until(lambda: len(ground.all(Resized, "t1")) == 2)
    assert ground.all(Resized, "t1")[-1].seats == [RANKS]
    assert ground.event(Finished, "t1").result == undisturbed


def test_a_gang_whose_hosts_do_not_connect_never_begins_by_no_fault_of_its_own(ground, monkeypatch):
    monkeypatch.setattr(peer_auth, "WITHIN_S", 0.5)
    train(ground, seats=[1, 1], links=SECRET)
    assert ground.event(Failed, "t1").cause == "host"


class Led:
    """A conductor of two ranks that are played here: what it tells them, and its supervisor."""

    def __init__(self):
        self.slab = Slab(made(coordinator.HEAD_BYTES + (1 << 20)))
        upwards, self.supervisor = self._line()
        ends = [self._line() for _ in range(2)]
        self.heard = [end for _, end in ends]
        regions = [coordinator.Region.of(rank, 2, self.slab.limit_bytes) for rank in range(2)]
        self.ranks = [
            coordinator.RankProcess(n, 0, -1, ends[n][0], regions[n], regions[n].slab(self.slab.fd))
            for n in range(2)
        ]
        work = Work(wire=upwards, bulk=None, trust=None, slab=self.slab, watch=None)
        work.spec = {"run": {"job": "m:J"}, "checkpoint_every_s": 0.0}
        self.handles = make(2)
        self.conductor = coordinator.Conductor(work)
        self.conductor.ranks, self.conductor.board = self.ranks, GangGround(self.handles)

    def close(self):
        for wire in (self.conductor.work.wire, self.supervisor, *self.heard):
            wire.close()
        for rank in self.ranks:
            rank.wire.close()
        close(self.handles)

    @staticmethod
    def _line():
        ours, theirs = pair()
        return ours, Wire(theirs)

    def order(self, word, **more):
        self.conductor.order({"is": word, **more})

    def says_saving(self, rank, *, step, round):
        index = {"layout": {"graph": {"offset": 0, "size": 0}, "storages": []}}
        size = self.ranks[rank].part.write_index(index | {"fingerprint": {}, "tensors": {}})
        message = {"is": "saving", "what": "image", "at_step": step, "index_bytes": size}
        self.conductor.take(self.ranks[rank], {**message, "round": round})

    def told(self, rank):
        return [message["is"] for message in self.heard[rank].receive()]

    def up(self):
        return [(message["is"], message.get("at_step")) for message in self.supervisor.receive()]


@pytest.fixture
def led():
    led = Led()
    yield led
    led.close()


def test_an_image_that_only_some_have_begun_is_called_off_when_the_gang_goes_on(led):
    led.order("go", seats=[1])
    led.says_saving(0, step=9, round=1)  # off the seat, in a pause
    led.order("go", seats=[1])
    assert led.told(0)[-2:] == led.told(1)[-2:] == ["go", "call_off"]
    led.says_saving(1, step=9, round=1)  # had begun it too, and hears only now that it is in vain
    assert led.up() == []
    led.says_saving(0, step=12, round=2)
    assert led.up() == []
    led.says_saving(1, step=12, round=2)
    assert led.up() == [("saving", 12)]
    led.order("go", seats=[1])  # that image is being kept: it is not called off
    assert led.told(0)[-1] == "go"


def test_a_save_that_is_asked_for_while_one_is_kept_comes_after_it(led):
    led.order("go", seats=[1])
    for rank in range(2):
        led.says_saving(rank, step=3, round=1)
    led.order("save")
    assert led.conductor.asked == {}
    led.order("kept", what="image")
    assert led.conductor.asked == {"save": {"is": "save"}}


def test_where_the_part_of_one_rank_was_spoiled_all_make_another(led):
    led.order("go", seats=[1])
    led.says_saving(0, step=3, round=1)
    led.conductor.take(led.ranks[1], {"is": "spoiled"})
    assert led.told(0)[-1] == "call_off"
    assert led.conductor.asked == {"save": {"is": "save"}}
    led.says_saving(1, step=3, round=2)
    assert led.up() == []


def test_who_is_to_change_hosts_right_after_it_was_saved_stands_still_until_then(led):
    home = remote_ranks.Home(led.conductor.work, lambda work: 0)
    home.ranks, home.board = led.ranks, led.conductor.board
    home.saved_step, home.is_saving = 7, True  # that image is being kept
    home.at_cut(7, {"change": {"is": "change"}}, led.ranks)
    assert led.told(0) == led.told(1) == ["pause"]
