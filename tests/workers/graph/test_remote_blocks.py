"""Graphs whose executors live on several hosts: processes that play these, joined by TCP."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch

from tests.thoroughness import rest_long
from tests.workers.graph.test_lane import STATES, WIDE, finished_twice
from tests.workers.graph.test_runner import SLOW, body, node, ran
from tests.workers.residents.test_remote_ranks import Gang, Residents, _connected, _spec
from workers.capture.capture import Surroundings
from workers.graph import remote_blocks
from workers.graph.remote_blocks import BlockBridge, RemoteBlockTable
from workers.hardware.accelerator import Accelerator
from workers.process.wire import Wire
from workers.ranks import shared_memory, turns
from workers.ranks.host_bridge import HOME
from workers.ranks.shared_memory import Ground
from workers.ranks.turns import Turns

JSON = dict[str, Any]

#: Shards that nap, then a chain that trains.
LONG: JSON = {**SLOW, "nodes": [dict(each) for each in SLOW["nodes"]]}
for each in LONG["nodes"]:
    each["params"] = {"naps": {"nap_s": 0.2}}.get(each["name"], each.get("params", {}))
    if each["function"] == "nodes:train":
        each["params"] = {"nap_s": 0.1}  # so long that a busy machine disturbs it in time


class Executors(Gang):
    """A gang of so many, which run a graph."""

    def __init__(
        self,
        residents: Residents,
        hosts: list[int],
        graph: JSON,
        executors: int = 3,
        *,
        image: JSON | None = None,
        slab_fd: int = -1,
    ) -> None:
        self.executors = executors
        self.graph = residents.folder / f"graph-{residents.born}.json"
        self.graph.write_text(json.dumps(graph))
        self.are_born(residents, hosts, image, slab_fd)

    def begins(self, wire: Wire, folders: Any, ends: list[int], **own: Any) -> None:
        run = {"run": {"graph": "sha256:0"}, "world_size": self.executors, "memory_bytes": 0}
        spec = _spec("", {}, folders, **own) | run
        fd = os.open(self.graph, os.O_RDONLY)
        wire.send({"is": "begin", "spec": spec, "files": 1 + len(ends)}, [fd, *ends])
        os.close(fd)


@pytest.fixture(scope="module")
def residents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Residents]:
    found = Residents(tmp_path_factory.mktemp("carried"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def undisturbed() -> JSON:
    result: JSON = ran(SLOW)  # as long as it may nap
    return result


@pytest.mark.parametrize("hosts", [[1, 1], [2, 1], [1, 1, 1]], ids=str)
@pytest.mark.parametrize("graph", [WIDE, STATES], ids=["tensors", "states"])
def test_executors_of_several_hosts_give_what_one_gives(
    residents: Residents, graph: JSON, hosts: list[int]
) -> None:
    gang = Executors(residents, hosts, graph, 5).begin()
    assert gang.until("finished")["result"] == ran(graph)
    gang.must_end()
    gang.end()


# --- whatever happens to them ---------------------------------------------------------------------


@pytest.mark.parametrize("seed", rest_long(range(3)))
def test_disturbed_they_end_with_the_same_bits(
    residents: Residents, undisturbed: JSON, seed: int
) -> None:
    """Paused and saved at any moment, and on other hosts; some of it while something is asked."""
    dice, gang = random.Random(seed), Executors(residents, [2, 1], LONG).begin()
    layouts = [[2, 1], [1, 1, 1], [3], [1, 2], [1], [1, 1]]
    for _ in range(7):
        time.sleep(dice.uniform(0, 0.1))
        match dice.choice(["pause", "save", "change", "change"]):
            case "pause":
                gang.order("pause")
                gang.until("paused")
                gang.order("go", seats=gang.hosts, linked=False)
            case "save":
                gang.order("save")
            case _:
                gang.hosts = dice.choice(layouts)
                gang.change(gang.hosts)
                assert gang.until("resized")["seats"] == gang.hosts
    assert gang.until("finished")["result"] == undisturbed
    gang.must_end()
    gang.end()


def test_of_an_image_that_was_called_off_nothing_is_in_the_next(
    residents: Residents, undisturbed: JSON
) -> None:
    """What crossed for it lies at home no more where it did, though the same is in both."""
    gang = Executors(residents, [1, 2], LONG).begin()
    for _ in range(6):
        gang.order("pause")
        gang.until("paused")
        gang.order("go", seats=gang.hosts, linked=False)
        gang.change(gang.hosts)
        gang.until("resized")
    assert gang.until("finished")["result"] == undisturbed
    gang.must_end()
    gang.end()


def test_from_the_image_of_a_pause_they_go_on_on_any_hosts(
    residents: Residents, undisturbed: JSON
) -> None:
    image, kept, step = None, -1, 0
    for hosts in ([1, 1], [1, 2], [3], [1, 1, 1]):
        gang = Executors(residents, hosts, LONG, image=image, slab_fd=kept).begin()
        kept = gang.slab
        gang.until("progress", step + 1)
        gang.order("pause")
        step = gang.until("paused")["step"]
        saving = gang.until("saving")
        assert saving["at_step"] == step
        image = {"step": step, "index_bytes": saving["index_bytes"]}
        gang.end()
    gang = Executors(residents, [2, 1], LONG, image=image, slab_fd=kept).begin()
    assert gang.until("finished")["result"] == undisturbed
    gang.end()


def test_cuts_that_follow_each_other_are_stood_at_once_each(
    residents: Residents, undisturbed: JSON
) -> None:
    """That one is over comes by the line, and by the link what comes after it."""
    gang = Executors(residents, [1, 1, 1], LONG).begin()
    for _ in range(30):
        gang.order("save")
        gang.until("saving")
    assert gang.until("finished")["result"] == undisturbed
    gang.must_end()
    gang.end()


@pytest.mark.parametrize("hosts", [[1, 1], [1, 1, 1]], ids=str)
def test_what_finishes_first_in_the_order_is_the_result(
    residents: Residents, hosts: list[int]
) -> None:
    """Also if who ends it later in the order, on another host, comes to its end first."""
    graph, result = finished_twice(executors=3)
    gang = Executors(residents, hosts, graph).begin()
    assert gang.until("finished")["result"] == result
    gang.must_end()
    gang.end()


def test_a_lost_host_ends_the_gang_by_no_fault_of_its_own(residents: Residents) -> None:
    gang = Executors(residents, [2, 1], LONG).begin()
    gang.until("progress", 1)
    gang.wires[1].close()
    failed = gang.until("failed")
    assert failed["cause"] == "host"
    assert "host 1" in failed["message"]
    gang.end()


@pytest.mark.parametrize("host", [0, 1])
@pytest.mark.parametrize("victim", ["executor", "carrier"])
def test_whoever_is_killed_on_whichever_host_all_end_and_it_is_told_who(
    residents: Residents, victim: str, host: int
) -> None:
    gang = Executors(residents, [1, 1], LONG, 2).begin()
    gang.until("progress", 1)
    executor, carrier = ranks_and_bridges(residents)[host]
    os.kill(executor if victim == "executor" else carrier, signal.SIGKILL)
    told = gang.until("failed")["message"]
    assert (f"rank {host}" if victim == "executor" else "host") in told
    gang.must_end()
    gang.end()
    assert not ranks_and_bridges(residents)


def ranks_and_bridges(residents: Residents) -> list[list[int]]:
    """By host, each with one rank: the children of its conductor, in the order of their births."""
    found = []
    for process in psutil.Process(residents.zygote.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if len(children := process.children()) > 1:
                found.append(sorted(child.pid for child in children))
    return sorted(found)


def test_a_node_that_fails_on_another_host_is_named(residents: Residents) -> None:
    graph = body(
        node("parts", "pieces", writes="parts", params={"count": 3}),
        node("all", "wrong", "x=parts.parts", map="x"),
        node("end", "total", "xs=all.y"),
    )
    gang = Executors(residents, [1, 1, 1], graph).begin()
    assert "In the node all (nodes:wrong)" in gang.until("failed")["message"]
    gang.end()


def test_before_a_host_stops_all_that_was_done_is_kept(
    residents: Residents, undisturbed: JSON
) -> None:
    gang = Executors(residents, [2, 1], LONG).begin()
    gang.until("progress", 3)
    gang.wires[1].send({"is": "pause"})
    saving = gang.until("saving")
    assert gang.until("failed", saving["at_step"])["cause"] == "host"
    gang.end()
    image = {"step": saving["at_step"], "index_bytes": saving["index_bytes"]}
    again = Executors(residents, [1], LONG, image=image, slab_fd=gang.slab).begin()
    assert again.until("finished")["result"] == undisturbed
    again.end()


# --- what crosses ---------------------------------------------------------------------------------

BLOCKS = 40
BIG = 1 << 18  # numbers, of 8 bytes


class Hosts:
    """So many of them in this process, with an executor or two each; nothing moves by itself."""

    def __init__(self, hosts: tuple[int, ...]) -> None:
        links: list[dict[int, socket.socket]] = [{} for _ in range(max(hosts) + 1)]
        for host in range(1, len(links)):
            links[HOME][host], links[host][HOME] = _connected()
        self.hosts = hosts
        made = [shared_memory.make(len(hosts), hosts, host) for host in range(len(links))]
        self.grounds = [Ground(handles) for handles in made]
        self.sent: list[tuple[int, int, int]] = []  # from, to, block
        for board in self.grounds:
            turns.seat_all(board, len(hosts))
        around, cpu = Surroundings(), Accelerator("cpu")
        self.executors = [
            RemoteBlockTable(Turns(self.grounds[host], rank, apart=True), BLOCKS, around, cpu)
            for rank, host in enumerate(hosts)
        ]
        pairs = zip(self.grounds, links, strict=True)
        self.carriers = [BlockBridge(board, own) for board, own in pairs]
        self._note_what_is_sent()
        self.settle()

    def _note_what_is_sent(self) -> None:
        for carrier in self.carriers:
            for link in carrier.links.values():

                def say(said: Any, *more: Any, at: int = carrier.host, link: Any = link) -> None:
                    if said[0] == "block":
                        self.sent.append((at, link.host, said[1]))
                    type(link).say(link, said, *more)

                link.say = say

    def settle(self) -> None:
        """Until nothing is on its way any more."""
        still = 0
        while still < 3:
            before = [(link.sent, link.heard, link._filled) for link in self._links()]
            for carrier in self.carriers:
                self.pump(carrier)
            moved = before != [(link.sent, link.heard, link._filled) for link in self._links()]
            waiting = any(link.is_waiting for link in self._links())
            still = 0 if moved or waiting else still + 1

    def pump(self, carrier: BlockBridge) -> None:
        """One round of its loop."""
        carrier._hear_ranks()
        for link in carrier.links.values():
            carrier._hear(link)
            carrier._flush(link)

    def _links(self) -> list[Any]:
        return [link for carrier in self.carriers for link in carrier.links.values()]

    def close(self) -> None:
        for link in self._links():
            link.sock.close()
        for board in self.grounds:
            shared_memory.close(board.handles)
        vars(self).clear()
        gc.collect()  # what is mapped is of the size of all addresses


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    made = Hosts(request.param)
    yield made
    made.close()


def lists_of_hosts(*them: tuple[int, ...]) -> Any:
    return pytest.mark.parametrize("hosts", them, ids=str, indirect=True)


def big(n: int) -> torch.Tensor:
    return torch.full((BIG,), n)


@lists_of_hosts((0, 0, 1, 1), (0, 1, 1, 1), (0, 1, 2, 2))
def test_a_block_crosses_each_connection_once_however_many_read_it(hosts: Hosts) -> None:
    home, *_, last = hosts.executors
    home.post(0, big(7), (1, 2, 3))
    last.post(1, {"a": [big(3)]}, (0, 1, 2))
    hosts.settle()
    assert sorted(hosts.sent) == sorted(set(hosts.sent))
    assert len(hosts.sent) == 2 * (len(hosts.grounds) - 1)
    for reader in hosts.executors[1:]:
        assert torch.equal(reader.take((0, 0)), big(7))
    for reader in hosts.executors[:-1]:
        assert torch.equal(reader.take((1, last.me))["a"][0], big(3))
    middle = hosts.executors[1]
    assert middle.passed_bytes == {(0, 0): 8 * BIG, (1, last.me): 8 * BIG}


@lists_of_hosts((0, 1, 1), (0, 1, 2))
def test_its_land_is_free_when_all_of_all_hosts_have_let_go(hosts: Hosts) -> None:
    maker, *readers = hosts.executors
    maker.post(0, big(1), (1, 2))
    maker.drop((0, 0))
    hosts.settle()
    for reader in readers:
        maker.reclaim()
        assert 0 in maker.posted  # it is in its images still
        kept = reader.take((0, 0))
        reader.drop((0, 0))
        hosts.settle()
        maker.reclaim()
        assert 0 in maker.posted
        del kept
        reader.reclaim()
        hosts.settle()
    maker.reclaim()
    assert not maker.posted
    assert not any(carrier.parcels for carrier in hosts.carriers)
    assert not any(d.lying for carrier in hosts.carriers for d in carrier.deputies.values())


@lists_of_hosts((0, 1), (1, 0), (0, 1, 2))
def test_who_is_slow_is_not_flooded_and_what_it_waits_for_comes_at_once(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From host 1 to 2 home passes on, and keeps no more than would lie there."""
    monkeypatch.setattr(remote_blocks, "WINDOW_BYTES", 3 * (64 + 8 * BIG))
    maker, slow = hosts.executors[-2:]
    for n in range(10):
        maker.post(n, big(n), (slow.me,))
    hosts.settle()
    there = {block for _, to, block in hosts.sent if to == slow.ground.host}
    assert there == {0, 1, 2}
    slow._tell("want", 8, maker.me)  # as it does before it goes to sleep
    hosts.settle()
    assert slow.is_there((8, maker.me))
    assert not slow.is_there((3, maker.me))
    for n in (8, *range(3)):
        assert slow.take((n, maker.me))[0] == n
        slow.drop((n, maker.me))
    hosts.settle()
    assert [n for n in range(10) if slow.is_there((n, maker.me))] == [0, 1, 2, 3, 4, 5, 8]


@lists_of_hosts((0, 1), (0, 1, 2))
def test_what_is_waited_for_before_it_is_made_goes_past_what_is_held_back(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_blocks, "WINDOW_BYTES", 1)
    maker, slow = hosts.executors[-2:]
    slow._tell("want", 5, maker.me)
    hosts.settle()
    for n in range(6):
        maker.post(n, big(n), (slow.me,))
    hosts.settle()
    assert [n for n in range(6) if slow.is_there((n, maker.me))] == [0, 5]


@lists_of_hosts((0, 1, 2))
def test_how_a_graph_ends_is_known_on_every_host(hosts: Hosts) -> None:
    first, second, third = hosts.executors
    third.post(BLOCKS - 1, {"x": 3}, (0,))
    third.end_early(9)
    second.end_early(7)
    third.tell_passed(12)
    second.tell_passed(8)
    hosts.settle()
    assert first.early == second.early == third.early == (7, 1)
    assert first.all_passed(7)
    assert not first.all_passed(8)
    assert first.take((BLOCKS - 1, 2)) == {"x": 3}
    first.end()
    hosts.settle()
    assert second.is_over
    assert third.is_over


@lists_of_hosts((0, 1))
def test_a_block_that_its_readers_had_done_with_when_their_image_was_made_does_not_stay(
    hosts: Hosts,
) -> None:
    maker, reader = hosts.executors
    reader.drop((0, 0))
    hosts.settle()
    maker.post(0, big(0), (1,))
    maker.drop((0, 0))
    hosts.settle()
    maker.reclaim()
    assert not maker.posted
    assert not hosts.carriers[1].deputies[0].lying


# --- any graph, in any order of events ------------------------------------------------------------


class Lane:
    """An executor that reads blocks and makes one, and again, as fast as it is let."""

    def __init__(self, passing: RemoteBlockTable, nodes: list[tuple[int, list[int]]]) -> None:
        self.passing, self.nodes = passing, nodes
        self.taken: dict[int, torch.Tensor] = {}

    def goes_on(self, makers: list[int], readers: list[set[int]], last: dict[Any, int]) -> bool:
        """One node, if all is there that it reads; else it says what it waits for."""
        block, reads = self.nodes[0]
        me = self.passing.me
        for n in reads:
            if makers[n] != me and n not in self.taken:
                if not self.passing.is_there((n, makers[n])):
                    if self.passing._wanted != (n, makers[n]):
                        self.passing._wanted = n, makers[n]
                        self.passing._tell("want", n, makers[n])
                    return False
                self.taken[n] = self.passing.take((n, makers[n]))
                assert self.taken[n].tolist() == [n] * (1 + n % 7)
        others = readers[block] - {me}
        if others:
            self.passing.post(block, torch.full((1 + block % 7,), block), others)
        for n in {block, *reads}:
            if last.get((n, me), block) == block and (makers[n] != me or readers[n] - {me}):
                self.taken.pop(n, None)
                self.passing.drop((n, makers[n]))
        self.nodes.pop(0)
        return True


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("hosts", [(0, 1, 2, 2)], ids=str, indirect=True)
def test_any_graph_comes_to_its_end_whatever_window_and_whoever_is_quick(
    hosts: Hosts, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(seed)
    window = dice.choice([1, 150, 400])
    monkeypatch.setattr(remote_blocks, "WINDOW_BYTES", window)
    makers = [dice.randrange(4) for _ in range(BLOCKS)]
    reads = [sorted(dice.sample(range(n), min(n, dice.randrange(5)))) for n in range(BLOCKS)]
    readers = [{makers[m] for m in range(BLOCKS) if n in reads[m]} for n in range(BLOCKS)]
    last = {(n, makers[m]): m for m in range(BLOCKS) for n in reads[m]}
    lanes = [
        Lane(passing, [(n, reads[n]) for n in range(BLOCKS) if makers[n] == passing.me])
        for passing in hosts.executors
    ]
    idle = 0
    while any(lane.nodes for lane in lanes):
        moved = False
        if dice.random() < 0.5:
            lane = dice.choice([lane for lane in lanes if lane.nodes])
            moved = lane.goes_on(makers, readers, last)
        else:
            hosts.pump(dice.choice(hosts.carriers))
        idle = 0 if moved else idle + 1
        assert idle < 3000, [(lane.nodes[:1], lane.passing._wanted) for lane in lanes]
    hosts.settle()
    for passing in hosts.executors:
        passing.reclaim()
    hosts.settle()
    for passing in hosts.executors:
        passing.reclaim()
        assert not passing.posted
    assert not any(carrier.parcels for carrier in hosts.carriers)
    assert not any(way.open_bytes for carrier in hosts.carriers for way in carrier.ways.values())
    assert len(hosts.sent) == len(set(hosts.sent))
