"""Jobs of several ranks on one device: to the island a task like any other."""

from __future__ import annotations

import random
import re
import socket
import time

import pytest

from app.core.model.protocol.messages import (
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
from tests.workers.conftest import DeviceRig
from tests.workers.starts import start_of
from workers.process.slab import Slab, made
from workers.process.task_start import SlabImage
from workers.process.wire import Wire, pair
from workers.ranks.shared_memory import STORED_LAND_BYTES, Arena, close, make
from workers.residents import coordinator, remote_ranks
from workers.residents.work import Work
from workers.transfer import peer_auth

RANKS, STEPS = 3, 60


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What the job gives when nobody disturbs it."""
    rig = DeviceRig(tmp_path_factory.mktemp("alone"))
    rig.open()
    try:
        train(rig, "alone", pace=0.0, waits=False)
        return rig.event(Finished, "alone").result
    finally:
        rig.close()


def train(rig, task="t1", epoch=1, *, pace=0.05, waits=True, **more):
    params = {"steps": STEPS, "pace": pace, "waits": waits}
    rig.launch(task, "ranks:Train", epoch, world_size=RANKS, params=params, **more)


def result(rig, epoch=1):
    """Let it end, which no test has to hurry for."""
    rig.event(Started, "t1", epoch)
    rig.let_end("t1", epoch)
    return rig.event(Finished, "t1", epoch).result


def test_all_ranks_see_the_same_losses(undisturbed):
    assert len(set(undisturbed["seen"])) == STEPS  # the mean of all ranks, at each step another


@pytest.mark.parametrize("seed", rest_long(range(2)))
def test_gang_is_paused_and_resumed_in_place_with_the_same_bits(rig, undisturbed, seed):
    chance = random.Random(seed)
    for epoch in range(1, 5):
        train(rig, epoch=epoch)
        started = rig.event(Started, "t1", epoch)
        assert started.capabilities == ["pause", "save", "move", "exact"]
        rig.steps("t1", started.step + chance.randrange(1, 3), epoch=epoch)
        rig.pause("t1", epoch)
        paused = rig.event(Paused, "t1", epoch)
        assert rig.event(Saved, "t1", epoch).step == paused.step
    train(rig, epoch=5)
    assert result(rig, 5) == undisturbed


@pytest.mark.parametrize("seed", rest_long(range(2)))
def test_gang_is_resized_saved_and_paused_while_it_runs_with_the_same_bits(rig, undisturbed, seed):
    chance, seats = random.Random(seed), 1
    for epoch in range(1, 4):
        train(rig, epoch=epoch, checkpoint_every_s=0.2)
        seats = 1
        rig.event(Started, "t1", epoch)
        for resized in range(1, 4):
            seats = chance.choice([n for n in range(1, RANKS + 1) if n != seats])
            rig.resize("t1", seats, epoch)
            rig.until(lambda n=resized, e=epoch: len(rig.all(Resized, "t1", e)) == n)
            assert rig.all(Resized, "t1", epoch)[-1].seats == [seats]
        rig.pause("t1", epoch)
        rig.event(Paused, "t1", epoch)
    train(rig, epoch=4)
    assert result(rig, 4) == undisturbed


def test_gang_paused_during_a_resize_resumes_on_one_slot(rig, undisturbed):
    train(rig)
    rig.steps("t1", 2)
    rig.resize("t1", RANKS)
    rig.pause("t1")
    rig.event(Paused, "t1")
    train(rig, epoch=2)
    rig.event(Started, "t1", 2)
    rig.resize("t1", 2, epoch=2)
    assert rig.event(Resized, "t1", 2).seats == [2]
    assert result(rig, 2) == undisturbed


def test_gang_is_restored_from_its_checkpoint_with_the_same_bits(rig, undisturbed):
    train(rig)
    rig.steps("t1", 4)
    rig.pause("t1")
    saved = rig.event(Saved, "t1")
    for epoch in (2, 3):
        rig.drop.append(["t1", epoch - 1])
        rig.until(lambda: not rig.supervisor.stays.residents)
        train(rig, epoch=epoch, images=[rig.image(saved)])
        started = rig.event(Started, "t1", epoch)
        assert (started.resumed, started.step) == ("image", saved.step)
        if epoch == 2:
            rig.steps("t1", saved.step + 3, epoch=2)
            rig.pause("t1", 2)
            saved = rig.event(Saved, "t1", 2)
    assert result(rig, 3) == undisturbed


def test_checkpoint_shows_all_ranks_after_the_same_step(rig, undisturbed):
    train(rig, checkpoint_every_s=0.1, best={"metric": "loss"})
    rig.until(lambda: len(rig.all(Saved, "t1")) >= 2)
    saved = rig.all(Saved, "t1")[-1]
    assert saved.ranked["step"] == saved.step
    rig.drop.append(["t1", 1])
    rig.until(lambda: not rig.supervisor.stays.residents)
    train(rig, epoch=2, images=[rig.image(saved)])
    assert result(rig, 2) == undisturbed
    assert rig.went_on_from(saved)


def test_tensors_of_every_rank_can_be_exported(rig):
    train(rig)
    rig.steps("t1", 2)
    rig.pause("t1")
    saved = rig.event(Saved, "t1")
    manifest = rig.store.manifest("ten", saved.sha256, key=rig.house.signer.public)
    names = {tensor.name for tensor in manifest.ranks[0].tensors}
    mine = {name for name in names if not name.startswith("rank")}
    assert mine
    assert {f"rank1.{name}" for name in mine} < names


def test_cancel_ends_all_ranks(rig):
    train(rig)
    rig.steps("t1", 2)
    rig.cancel("t1")
    rig.event(Stopped, "t1")
    rig.until(lambda: not rig.supervisor.stays.residents)


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("ranks:Fails", "rank 1: ValueError: rank one has had enough"),
        ("ranks:Dies", "rank 1: its process was killed by signal 9."),
    ],
)
def test_rank_that_dies_ends_the_gang_and_is_named(rig, entry, told):
    rig.launch("t1", entry, world_size=RANKS)
    failed = rig.event(Failed, "t1")
    assert failed.message == told
    rig.until(lambda: not rig.supervisor.stays.residents)


@pytest.mark.parametrize("how", ["computes", "sleeps"])
def test_rank_that_does_not_come_is_named_until_it_comes(rig, how):
    """The others wait in a collective call of the backward pass, or for the slot that it has."""
    rig.launch("t1", "ranks:Strays", world_size=RANKS, params={"how": how, "steps": 4})
    rig.event(Started, "t1")
    behind = rig.until(lambda: rig.view("t1").behind)
    called = r"in all_reduce\(sum, .*, to which rank 2 has not come:"
    does = r"(runs code of its own|is away \(it sleeps in a call that is not ours\))\."
    assert re.fullmatch(rf"Ranks 0 and 1 wait ({called}|for a slot, and) rank 2 {does}", behind)
    (rig.folder("t1") / "go on").touch()
    rig.event(Finished, "t1")
    assert rig.views("t1")[-1].behind == ""


def test_gang_that_stands_still_until_its_time_is_over_fails_with_the_rank_behind(rig):
    params = {"how": "computes", "steps": 4}
    rig.launch("t1", "ranks:Strays", world_size=RANKS, params=params, budget_us=4_000_000)
    failed = rig.event(Failed, "t1")
    assert failed.cause == "max_duration"
    assert "was ended. Ranks 0 and 1 wait " in failed.message, failed.message
    assert "rank 2 " in failed.message


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("calls_another", ["rank 2 called broadcast(", "called all_reduce("]),
        ("leaves", ["wait for each other", "which rank 2 has not called", "rank 2 has ended"]),
    ],
)
def test_rank_that_goes_another_way_fails_the_gang_and_is_named(rig, how, told):
    rig.launch("t1", "ranks:Strays", world_size=RANKS, params={"how": how, "steps": 4})
    message = rig.event(Failed, "t1").message
    assert all(words in message for words in told), message


def test_gang_stands_still_from_the_end_of_trust_until_its_renewal(rigs, undisturbed):
    rig = rigs(lease_s=10.0, lease_margin_s=8.0)
    train(rig, pace=0.1)
    rig.steps("t1", 2)
    rig.deaf = True
    until_s = time.monotonic() + 9.0
    while not rig.supervisor.stays.holder.is_still:
        assert time.monotonic() < until_s, "stepped past its trust"
        time.sleep(0.05)
    rig.deaf = False
    assert result(rig) == undisturbed


SECRET = {"secret": "ab" * 32}


def test_host_that_does_not_connect_is_given_up_and_the_gang_goes_on(rig, undisturbed, monkeypatch):
    monkeypatch.setattr(peer_auth, "WITHIN_S", 0.5)
    train(rig)
    rig.steps("t1", 2)
    rig.resize("t1", RANKS)
    rig.event(Resized, "t1")
    rig.supervisor.receive(Resize(task="t1", epoch=1, seq=3, seats=[1, 1], links=SECRET))
    rig.until(lambda: len(rig.all(Resized, "t1")) == 2)
    assert rig.all(Resized, "t1")[-1].seats == [RANKS]
    assert result(rig) == undisturbed


def test_gang_without_its_hosts_never_begins_without_fault_of_its_own(rig, monkeypatch):
    monkeypatch.setattr(peer_auth, "WITHIN_S", 0.5)
    train(rig, seats=[1, 1], links=SECRET)
    assert rig.event(Failed, "t1").cause == "host"


class Led:
    """A conductor of two ranks that are played here: what it tells them, and its supervisor."""

    def __init__(self, image=None):
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
        work.start = start_of({"job": "m:J"}, image=image)
        self.handles = make(2, land_bytes=STORED_LAND_BYTES)
        self.conductor = coordinator.Conductor(work)
        self.conductor.ranks, self.conductor.board = self.ranks, Arena(self.handles)

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

    def says_saving(self, rank, *, step, round, **more):
        index = {"layout": {"graph": {"offset": 0, "size": 0}, "storages": []}}
        size = self.ranks[rank].part.write_index(index | {"fingerprint": {}, "tensors": {}})
        message = {"is": "saving", "what": "image", "at_step": step, "index_bytes": size}
        message |= {"lacks": [], **more}
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


def test_image_begun_by_some_ranks_is_cancelled_when_the_gang_goes_on(led):
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


def test_image_of_a_gang_has_the_value_of_its_first_rank(led):
    led.order("go", seats=[1])
    for rank in range(2):
        led.says_saving(rank, step=3, round=1, ranked={"step": 3, "value": float(rank)})
    assert led.supervisor.receive()[-1]["ranked"] == {"step": 3, "value": 0.0}


def test_save_asked_for_during_another_follows_it(led):
    led.order("go", seats=[1])
    for rank in range(2):
        led.says_saving(rank, step=3, round=1)
    led.order("save")
    assert led.conductor.asked == {}
    led.order("kept", what="image")
    assert led.conductor.asked == {"save": {"is": "save"}}


def test_gang_restored_from_an_image_does_not_wait_for_it_to_be_kept_again():
    """Called to a cut before any rank has run: no rank makes the image that is stored already."""
    led = Led(image=SlabImage(step=9, index_bytes=1))
    led.conductor.at_cut(9, {"save": {"is": "save"}}, led.ranks)
    assert not led.conductor.is_saving
    led.conductor.at_cut(10, {"save": {"is": "save"}}, led.ranks)
    assert led.conductor.is_saving
    led.close()


def test_all_ranks_make_another_image_if_the_part_of_one_was_spoiled(led):
    led.order("go", seats=[1])
    led.says_saving(0, step=3, round=1)
    led.conductor.take(led.ranks[1], {"is": "spoiled"})
    assert led.told(0)[-1] == "call_off"
    assert led.conductor.asked == {"save": {"is": "save"}}
    led.says_saving(1, step=3, round=2)
    assert led.up() == []


def test_gang_that_changes_hosts_after_a_save_stands_still_until_then(led):
    home = remote_ranks.Home(led.conductor.work, lambda work: 0)
    home.ranks, home.board = led.ranks, led.conductor.board
    home.saved_step, home.is_saving = 7, True  # that image is being kept
    home.at_cut(7, {"change": {"is": "change"}}, led.ranks)
    assert led.told(0) == led.told(1) == ["pause"]


def test_gang_refuses_to_change_hosts_from_the_cut_of_a_pause_on(led):
    """Otherwise the gang would change when it goes on, and these hosts may be gone by then."""
    home = remote_ranks.Home(led.conductor.work, lambda work: 0)
    home.ranks, home.board = led.ranks, led.conductor.board
    (line, line_end), (link, link_end) = socket.socketpair(), socket.socketpair()
    home.go([1])
    home.ask({"is": "pause"})
    for rank in home.ranks:
        home.take(rank, {"is": "at_cut", "ran": 7})
    home._want(remote_ranks.Seats((1, 1), {1: line}, {1: link}))  # before all ranks have paused
    for rank in home.ranks:
        home.take(rank, {"is": "paused", "step": 7, "has_state": True})
    assert (home.asked, home.wanted) == ({}, None)
    assert (line_end.recv(1), link_end.recv(1)) == (b"", b"")
    line_end.close()
    link_end.close()
