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
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.launches import spec_of
from tests.processes import children
from tests.thoroughness import rest_long
from tests.workers.device.test_late import GANG
from tests.workers.device.test_late import WIDE as WIDE_WITH_LATE
from tests.workers.graph.test_executor_job import STATES, WIDE, finished_twice
from tests.workers.graph.test_runner import body, napping, node, ran
from tests.workers.resident_gangs import PATIENCE_S, Gang, Residents, connected, start_of
from workers.capture.capture import Surroundings
from workers.graph import remote_blocks
from workers.graph.remote_blocks import BlockBridge, RemoteBlockTable
from workers.hardware.accelerator import Accelerator
from workers.process.wire import Wire
from workers.ranks import shared_memory, turns
from workers.ranks.host_bridge import HOME
from workers.ranks.shared_memory import STORED_LAND_BYTES, Arena
from workers.ranks.turns import Turns
from workers.switching import context_switch

JSON = dict[str, Any]

#: Shards that nap, then a chain that trains: so long that a busy machine disturbs it in time.
LONG = napping(trains=160, nap_s=0.2, train_s=0.3)


class Executors(Gang):
    """A gang of so many, which run a graph."""

    def __init__(
        self,
        residents: Residents | Sequence[Residents],
        hosts: list[int],
        graph: JSON,
        executors: int = 3,
        *,
        image: JSON | None = None,
        slab_fd: int = -1,
        part: JSON | None = None,
        patience_s: float = 0.2,
    ) -> None:
        self.executors = executors
        self.part, self.patience_s = part, patience_s
        home = residents if isinstance(residents, Residents) else residents[0]
        self.graph = home.folder / f"graph-{home.born}.json"
        self.graph.write_text(json.dumps(graph))
        self.are_born(residents, hosts, image, slab_fd)

    def begins(self, wire: Wire, folders: Any, ends: list[int], **own: Any) -> None:
        run: JSON = {"graph": "sha256:" + "0" * 64}
        more: JSON = {}
        if self.part is not None:
            run["part"], more["outputs"] = self.part, list(self.part["after_ms"])
            own["patience_s"] = self.patience_s
        spec = spec_of(run, world_size=self.executors, **more)
        fd = os.open(self.graph, os.O_RDONLY)
        start = start_of(spec, folders, kind=self.residents.device.kind, **own)
        wire.send({"is": "begin", "start": start, "files": 1 + len(ends)}, [fd, *ends])
        os.close(fd)

    def goes_on(self, *, for_s: float) -> JSON | None:
        """Return slots to it whenever it leaves them; return its end if that is within `for_s`."""
        end_s = time.monotonic() + for_s
        while time.monotonic() < end_s:
            for message in self._next_said(end_s):
                match message["is"]:
                    case "paused":
                        self.answer("go", seats=self.hosts, linked=False)
                    case "resized":
                        self.hosts = message["seats"]
                    case "failed" | "finished":
                        assert message["is"] == "finished", f"{message}\n{self.residents.log()}"
                        return message
        return None

    def _next_said(self, end_s: float) -> list[JSON]:
        """Return what `until` has read and answered, but not returned; or what home says next."""
        if said := self.said:
            self.said = []
            return said
        self.home.wait(max(0.0, end_s - time.monotonic()))
        said = self.home.receive()
        assert said or not self.home.closed, f"it ended without a word\n{self.log()}"
        for message in said:
            self.keeps(message)
        return said

    def result(self) -> Any:
        """Return slots to it whenever it leaves them, until its end; return its result."""
        end_s = time.monotonic() + PATIENCE_S
        while (finished := self.goes_on(for_s=1.0)) is None:
            assert time.monotonic() < end_s, self.log()
        return finished["result"]

    def give(self, port: str, value: Any) -> None:
        """Send a late input, as the supervisor of the coordinator's device does."""
        around, cpu = Surroundings(), Accelerator("cpu")
        image = context_switch.stage(value, step=0, around=around, accelerator=cpu, root="b")
        fd = os.memfd_create(port)
        with os.fdopen(os.dup(fd), "wb") as file:
            file.writelines(image.pieces())
        self.home.send({"is": "block", "port": port}, [fd])
        os.close(fd)


@pytest.fixture(scope="module")
def residents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Residents]:
    found = Residents(tmp_path_factory.mktemp("carried"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def undisturbed() -> JSON:
    result: JSON = ran(napping(trains=160, nap_s=0.0, train_s=0.0))
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
def test_disturbed_executors_end_with_the_same_bits(
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
    gang.let_end()
    assert gang.until("finished")["result"] == undisturbed
    gang.must_end()
    gang.end()


def test_cancelled_image_leaves_nothing_in_the_next(
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
    gang.let_end()
    assert gang.until("finished")["result"] == undisturbed
    gang.must_end()
    gang.end()


def test_executors_resume_on_any_hosts_from_the_image_of_a_pause(
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
    gang.let_end()
    assert gang.until("finished")["result"] == undisturbed
    gang.end()


def test_executors_stop_once_at_each_of_several_cuts(
    residents: Residents, undisturbed: JSON
) -> None:
    """That one is over comes by the line, and by the link what comes after it."""
    gang = Executors(residents, [1, 1, 1], LONG).begin()
    for _ in range(30):
        gang.order("save")
        gang.until("saving")
    gang.let_end()
    assert gang.until("finished")["result"] == undisturbed
    gang.must_end()
    gang.end()


@pytest.mark.parametrize("hosts", [[1, 1], [1, 1, 1]], ids=str)
def test_first_finished_result_in_the_order_of_nodes_counts(
    residents: Residents, hosts: list[int]
) -> None:
    """Also if who ends it later in the order, on another host, comes to its end first."""
    graph, result = finished_twice(executors=3)
    gang = Executors(residents, hosts, graph).begin()
    assert gang.until("finished")["result"] == result
    gang.must_end()
    gang.end()


def test_lost_host_ends_the_gang_without_fault_of_its_own(residents: Residents) -> None:
    gang = Executors(residents, [2, 1], LONG).begin()
    gang.until("progress", 1)
    gang.wires[1].close()
    failed = gang.until("failed")
    assert failed["cause"] == "host"
    assert "host 1" in failed["message"]
    gang.end()


@pytest.mark.parametrize("host", [0, 1])
@pytest.mark.parametrize("victim", ["executor", "carrier"])
def test_killed_executor_on_any_host_ends_all_and_is_named(
    residents: Residents, victim: str, host: int
) -> None:
    are_alone(residents)
    gang = Executors(residents, [1, 1], LONG, 2).begin()
    gang.until("progress", 1)
    executor, carrier = ranks_and_bridges(residents)[host]
    os.kill(executor if victim == "executor" else carrier, signal.SIGKILL)
    told = gang.until("failed")["message"]
    assert (f"rank {host}" if victim == "executor" else "host") in told
    gang.must_end()
    gang.end()
    are_alone(residents)


def are_alone(residents: Residents) -> None:
    """Wait until the processes of all gangs have ended."""
    end_s = time.monotonic() + 60
    while ranks_and_bridges(residents):
        assert time.monotonic() < end_s
        time.sleep(0.02)


def ranks_and_bridges(residents: Residents) -> list[list[int]]:
    """By host, each with one rank: the children of its conductor, in the order of their births."""
    found = []
    for process in children(residents.zygote.process.pid, recursive=True):
        if len(below := children(process)) > 1:
            found.append(sorted(child.pid for child in below))
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


def test_all_finished_work_is_saved_before_a_host_stops(
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
    again.let_end()
    assert again.until("finished")["result"] == undisturbed
    again.end()


# --- inputs that come late ------------------------------------------------------------------------

WAIT_S = 0.2  # patience of a gang that lacks an input
LATE: JSON = {**WIDE_WITH_LATE, "nodes": [dict(each) for each in WIDE_WITH_LATE["nodes"]]}
for each in LATE["nodes"]:
    if each["name"] == "drawn":  # on each host, for longer than the patience
        each |= {"function": "nodes:nap", "params": {"nap_s": 2 * WAIT_S}}


PIECES = body(node("parts", "pieces", writes="parts", params={"count": 7}), parts="parts.parts")


def parted(residents: Residents, hosts: list[int], **more: Any) -> Executors:
    return Executors(residents, hosts, LATE, part=GANG, patience_s=WAIT_S, **more)


@pytest.mark.parametrize("hosts", [[2, 1], [1, 1], [1, 1, 1]], ids=str)
def test_executors_on_several_hosts_leave_their_slots_without_a_late_input(
    residents: Residents, hosts: list[int]
) -> None:
    """They do not before the output that needs no late input is made and stored."""
    gang = parted(residents, hosts).begin()
    assert gang.until("saving")["what"] == "output:b1"
    for _ in range(2):
        assert gang.until("paused")["lacks"] == "b0"
        gang.order("go", seats=gang.hosts, linked=False)
    gang.give("b0", ran(PIECES)["parts"])
    assert gang.result() == ran(LATE)
    gang.must_end()
    gang.end()


def test_descriptors_of_a_change_and_of_an_input_that_come_at_once_are_told_apart(
    residents: Residents,
) -> None:
    gang = parted(residents, [2, 1]).begin()
    gang.until("awaits")
    below = children(residents.zygote.process.pid, recursive=True)
    conductor = max(below, key=lambda each: len(children(each)))
    conductor.suspend()
    gang.change([1, 1])
    gang.change([1, 1, 1])
    gang.give("b0", ran(PIECES)["parts"])
    conductor.resume()
    assert gang.result() == ran(LATE)
    gang.must_end()
    gang.end()


GIVES_TWO = GANG | {
    "gives": {**GANG["gives"], "b2": "own.parts"},
    "after_ms": {"b1": 1.0, "b2": 1.0},
}


@pytest.mark.parametrize("is_paused", [True, False])
def test_gang_changes_hosts_when_the_output_that_leaves_is_stored(
    residents: Residents, is_paused: bool
) -> None:
    """It leaves its slots at once; its second output waits behind the first."""
    are_alone(residents)
    gang = Executors(residents, [2, 1], LATE, part=GIVES_TWO, patience_s=60.0)
    gang.withheld = ["output:b1", "output:b2"]
    gang.begin()
    first = gang.until("saving")["what"]
    gang.until("awaits")  # both outputs were made about then
    (before, _) = ranks_and_bridges(residents)
    if is_paused:
        gang.order("pause")
        gang.until("paused")
        gang.go_to([1, 1, 1])
    else:
        gang.change([1, 1, 1])
    assert gang.goes_on(for_s=1.0) is None
    assert before in ranks_and_bridges(residents)
    gang.withheld = []
    gang.order("kept", what=first, files=0)
    gang.give("b0", ran(PIECES)["parts"])
    assert gang.until("finished")["result"] == ran(LATE)
    assert before not in ranks_and_bridges(residents)
    gang.must_end()
    gang.end()


TWICE = LATE | {
    "nodes": [
        *LATE["nodes"],
        node("more", "pieces", writes="parts", params={"count": 3}),
        node("sum", "total", "xs=more.parts"),
        node("three", "listed", "x=sum.y"),
    ],
    "outputs": {**LATE["outputs"], "three": "three.y"},
}
TAKES_TWICE = GANG | {
    "nodes": [*GANG["nodes"], "sum", "three"],
    "takes": {"b0": "parts.parts", "b9": "more.parts"},
    "gives": {**GANG["gives"], "three": "three.y"},
    "late": ["b0", "b9"],
}


def test_gang_holds_a_late_input_until_an_image_has_it(residents: Residents) -> None:
    gang = Executors(residents, [2, 1], TWICE, part=TAKES_TWICE, patience_s=WAIT_S).begin()
    gang.give("b0", ran(PIECES)["parts"])
    while gang.until("paused")["lacks"] != "b9":
        gang.order("go", seats=gang.hosts, linked=False)
    while gang.until("saving")["what"] != "image":
        pass
    assert not has_open(residents, "memfd:b0")
    gang.hosts = [1, 1, 1]
    gang.go_to(gang.hosts)
    gang.give("b9", more_pieces())
    assert gang.result() == ran(TWICE)
    gang.must_end()
    gang.end()


def more_pieces() -> Any:
    return ran(body(node("p", "pieces", writes="parts", params={"count": 3}), y="p.parts"))["y"]


GONE = FileNotFoundError, ProcessLookupError


def has_open(residents: Residents, name: str) -> bool:
    """True if a process of a gang has a descriptor of this file."""
    found = []
    for process in children(residents.zygote.process.pid, recursive=True):
        folder = f"/proc/{process.pid}/fd"
        with contextlib.suppress(*GONE):  # the process
            for fd in os.listdir(folder):
                with contextlib.suppress(*GONE):  # the descriptor
                    found.append(os.readlink(f"{folder}/{fd}"))
    return any(name in each for each in found)


@pytest.mark.parametrize("seed", rest_long(range(3)))
def test_executors_that_lack_an_input_change_hosts_and_end_with_the_same_bits(
    residents: Residents, seed: int
) -> None:
    """The input comes at any moment, also while they leave their slots or change hosts."""
    dice = random.Random(seed)
    gang = Executors(residents, [2, 1], TWICE, part=TAKES_TWICE, patience_s=WAIT_S).begin()
    layouts = [[2, 1], [1, 1, 1], [3], [1, 2], [1, 1]]
    comes_at = dice.randrange(5)
    for n in range(5):
        if n == comes_at:
            gang.give("b0", ran(PIECES)["parts"])
        assert gang.goes_on(for_s=dice.uniform(0, 3 * WAIT_S)) is None
        gang.change(dice.choice(layouts))
    gang.give("b9", more_pieces())
    assert gang.result() == ran(TWICE)
    gang.must_end()
    gang.end()


# --- what crosses ---------------------------------------------------------------------------------

BLOCKS = 40
BIG = 1 << 18  # numbers, of 8 bytes


class Hosts:
    """So many of them in this process, with an executor or two each; nothing moves by itself."""

    def __init__(self, hosts: tuple[int, ...]) -> None:
        links: list[dict[int, socket.socket]] = [{} for _ in range(max(hosts) + 1)]
        for host in range(1, len(links)):
            links[HOME][host], links[host][HOME] = connected()
        self.hosts = hosts
        # small: the garbage collector unmaps them late, and a process has room for 31 of full size
        made = [
            shared_memory.make(len(hosts), hosts, host, STORED_LAND_BYTES)
            for host in range(len(links))
        ]
        self.arenas = [Arena(handles) for handles in made]
        self.sent: list[tuple[int, int, int]] = []  # from, to, block
        for board in self.arenas:
            turns.seat_all(board, len(hosts))
        around, cpu = Surroundings(), Accelerator("cpu")
        self.executors = [
            RemoteBlockTable(Turns(self.arenas[host], rank, apart=True), BLOCKS, around, cpu)
            for rank, host in enumerate(hosts)
        ]
        pairs = zip(self.arenas, links, strict=True)
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
        for board in self.arenas:
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
    assert len(hosts.sent) == 2 * (len(hosts.arenas) - 1)
    for reader in hosts.executors[1:]:
        assert torch.equal(reader.take((0, 0)), big(7))
    for reader in hosts.executors[:-1]:
        assert torch.equal(reader.take((1, last.me))["a"][0], big(3))
    middle = hosts.executors[1]
    assert middle.passed_bytes == {(0, 0): 8 * BIG, (1, last.me): 8 * BIG}


@lists_of_hosts((0, 1, 1), (0, 1, 2))
def test_shared_memory_is_free_when_executors_of_all_hosts_released_it(hosts: Hosts) -> None:
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
def test_slow_host_is_not_flooded_and_gets_what_it_waits_for_at_once(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From host 1 to 2 home passes on, and keeps no more than would lie there."""
    monkeypatch.setattr(remote_blocks, "WINDOW_BYTES", 3 * (64 + 8 * BIG))
    maker, slow = hosts.executors[-2:]
    for n in range(10):
        maker.post(n, big(n), (slow.me,))
    hosts.settle()
    there = {block for _, to, block in hosts.sent if to == slow.arena.host}
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
def test_block_already_waited_for_is_sent_before_blocks_held_back(
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
def test_end_of_a_graph_is_known_on_every_host(hosts: Hosts) -> None:
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
def test_block_without_readers_left_at_an_image_does_not_stay(
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


class PlayedExecutor:
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
def test_every_graph_ends_with_any_window_and_any_order(
    hosts: Hosts, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(seed)
    window = dice.choice([1, 150, 400])
    monkeypatch.setattr(remote_blocks, "WINDOW_BYTES", window)
    makers = [dice.randrange(4) for _ in range(BLOCKS)]
    reads = [sorted(dice.sample(range(n), min(n, dice.randrange(5)))) for n in range(BLOCKS)]
    readers = [{makers[m] for m in range(BLOCKS) if n in reads[m]} for n in range(BLOCKS)]
    last = {(n, makers[m]): m for m in range(BLOCKS) for n in reads[m]}
    executors = [
        PlayedExecutor(passing, [(n, reads[n]) for n in range(BLOCKS) if makers[n] == passing.me])
        for passing in hosts.executors
    ]
    idle = 0
    while any(executor.nodes for executor in executors):
        moved = False
        if dice.random() < 0.5:
            executor = dice.choice([executor for executor in executors if executor.nodes])
            moved = executor.goes_on(makers, readers, last)
        else:
            hosts.pump(dice.choice(hosts.carriers))
        idle = 0 if moved else idle + 1
        assert idle < 3000, [
            (executor.nodes[:1], executor.passing._wanted) for executor in executors
        ]
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
