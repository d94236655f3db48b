"""Ranks at outposts: residents with a slab each, joined by TCP, as those of several hosts are."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.workers.conftest import PRESET
from workers.device.zygote_handle import Zygote
from workers.process import slab
from workers.process.image_layout import laid_out
from workers.process.sandbox import Room
from workers.process.slab import Slab
from workers.process.wire import Trust, Wire, pair
from workers.ranks.host_bridge import Link
from workers.residents.remote_ranks import ImageParts

JSON = dict[str, Any]

RANKS, STEPS = 5, 160
BUNDLE = Path(__file__).parents[1] / "bundle"
LIMIT_BYTES = 64 * 2**20
PATIENCE_S = 120.0


class Residents:
    """A warm process, and those that it forks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
        (folder / "probe").mkdir()
        (folder / "residents").mkdir()
        probe = Room(code=BUNDLE, scratch=folder / "probe", uid=os.getuid(), kind="cpu")
        self.zygote = Zygote(lock_fd=self.lock, probe=probe, records=folder / "residents")
        self.trust = Trust()
        self.trust.extend(2**62)
        self.born = 0
        said = _next(self.zygote.wire)
        assert said["is"] == "ready"
        self.walls = said["walls"]

    def spawn(self, slab_fd: int) -> tuple[Wire, tuple[Path, Path]]:
        """Its wire, and where it sees its code and its own folder."""
        self.born += 1
        scratch = self.folder / str(self.born)
        scratch.mkdir()
        wire, control = pair()
        bulk, bulk_end = socket.socketpair()
        log = os.open(scratch / "log", os.O_CREAT | os.O_WRONLY)
        room = Room(code=BUNDLE, scratch=scratch, uid=os.getuid(), kind="cpu")
        fds = [control.fileno(), bulk_end.fileno(), self.trust.fd, log, log, slab_fd]
        self.zygote.spawn(self.born, room, self.walls, fds, "job")
        for end in (control, bulk, bulk_end):
            end.close()
        os.close(log)
        return wire, room.inside(self.walls)

    def log(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("*/log")))

    def close(self) -> None:
        self.zygote.end()
        self.trust.close()
        os.close(self.lock)


class Gang:
    """One gang on some hosts, as the supervisors of its devices would hold it."""

    def __init__(
        self,
        residents: Residents,
        hosts: list[int],
        *,
        entry: str = "ranks:Train",
        image: JSON | None = None,
        slab_fd: int = -1,
        pace: float = 0.0,
    ) -> None:
        self.params = {"steps": STEPS, "pace": pace}
        self.entry = entry
        self.are_born(residents, hosts, image, slab_fd)

    def are_born(
        self, residents: Residents, hosts: list[int], image: JSON | None, slab_fd: int
    ) -> None:
        self.residents, self.hosts = residents, hosts
        self.slab = slab.made(LIMIT_BYTES) if slab_fd < 0 else slab_fd
        self.said: list[JSON] = []
        home, folders = residents.spawn(self.slab)
        self.wires, self.folder = [home], residents.folder / str(residents.born)
        with self.outposts(hosts) as ends:
            self.begins(home, folders, ends, seats=hosts, host=0, image=image)

    def begins(self, wire: Wire, folders: Any, ends: list[int], **own: Any) -> None:
        spec = _spec(self.entry, self.params, folders, **own)
        wire.send({"is": "begin", "spec": spec, "files": len(ends)}, ends)

    @contextmanager
    def outposts(self, hosts: list[int]) -> Iterator[list[int]]:
        """Born and seated; home's ends of their lines and links."""
        ends = []
        for host in range(1, len(hosts)):
            fd = slab.made(LIMIT_BYTES)
            wire, folders = self.residents.spawn(fd)
            os.close(fd)
            ours, theirs = zip(*(_connected() for _ in ("line", "link")), strict=True)
            self.begins(wire, folders, [], seats=hosts, host=host, image=None)
            assert _next(wire)["is"] == "prepared"
            wire.send({"is": "link"}, [end.fileno() for end in theirs])
            for end in theirs:
                end.close()
            wire.send({"is": "go"})
            self.wires.append(wire)
            ends += ours
        yield [end.fileno() for end in ends]
        for end in ends:
            end.close()

    def change(self, hosts: list[int]) -> None:
        with self.outposts(hosts) as ends:
            self.home.send({"is": "resize", "seats": hosts}, ends)

    def go_to(self, hosts: list[int]) -> None:
        with self.outposts(hosts) as ends:
            self.home.send({"is": "go", "seats": hosts, "linked": bool(ends)}, ends)

    @property
    def home(self) -> Wire:
        return self.wires[0]

    def order(self, word: str, **more: Any) -> None:
        self.home.send({"is": word, **more})

    def until(self, word: str, step: int = 0) -> JSON:
        """What home said with this word, after `step` or later; images are kept as they come."""
        end_s = time.monotonic() + PATIENCE_S
        while True:
            for at, message in enumerate(self.said):
                if message["is"] == word and message["step"] >= step:
                    del self.said[: at + 1]
                    return message
            assert time.monotonic() < end_s, f"no {word}: {self.said}, {self.residents.log()}"
            self.home.wait(1.0)
            came = self.home.receive()
            for message in came:
                if message["is"] == "saving":
                    self.order("kept", what=message["what"])
            self.said += came
            last = [m for m in came if m["is"] in ("failed", "stopped") and m["is"] != word]
            assert not last, f"{last}\n{last[0].get('detail')}\n{self.residents.log()}"

    def begin(self) -> Gang:
        self.until("prepared")
        self.order("go", seats=self.hosts, linked=False)
        return self

    def must_end(self) -> None:
        """The processes of all hosts, by themselves."""
        end_s = time.monotonic() + PATIENCE_S
        for wire in self.wires:
            while not wire.closed:
                assert time.monotonic() < end_s, self.residents.log()
                wire.wait(1.0)
                wire.receive()

    def end(self) -> None:
        for wire in self.wires:
            wire.close()


def _spec(entry: str, params: JSON, folders: tuple[Path, Path], **more: Any) -> JSON:
    return {
        "task": "t1",
        "run": {"job": entry},
        "params": params,
        "inputs": {},
        "outputs": [],
        "publish": [],
        "preset": PRESET,
        "kind": "cpu",
        "rank": 0,
        "world_size": RANKS,
        "code": str(folders[0]),
        "scratch": str(folders[1]),
        "checkpoint_every_s": 0.0,
        "lease_margin_s": 1.0,
        **more,
    }


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return ours, server.accept()[0]


def _next(wire: Wire) -> JSON:
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        wire.wait(1.0)
        if messages := wire.receive():
            return messages[0]
    raise TimeoutError("nothing was said")


@pytest.fixture(scope="module")
def residents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Residents]:
    found = Residents(tmp_path_factory.mktemp("hosts"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def undisturbed(residents: Residents) -> JSON:
    """What the job gives on one device of one host."""
    gang = Gang(residents, [1]).begin()
    result: JSON = gang.until("finished")["result"]
    gang.end()
    return result


@pytest.mark.parametrize("hosts", [[2, 1], [1, 1, 1]], ids=str)
def test_ranks_of_several_hosts_give_the_bits_of_one_device(
    residents: Residents, undisturbed: JSON, hosts: list[int]
) -> None:
    gang = Gang(residents, hosts).begin()
    assert gang.until("finished")["result"] == undisturbed
    gang.must_end()
    gang.end()


def test_it_is_paused_and_goes_on_in_place(residents: Residents, undisturbed: JSON) -> None:
    gang = Gang(residents, [2, 1], pace=0.01).begin()
    step = 0
    for _ in range(3):
        gang.until("progress", step + 1)
        gang.order("pause")
        paused = gang.until("paused")
        assert paused["has_state"]
        assert paused["step"] > step
        step = paused["step"]
        off = _next(gang.wires[1])  # whoever comes next has that seat
        assert (off["is"], off["has_state"], off["step"]) == ("paused", True, step)
        gang.order("go", seats=gang.hosts, linked=False)
    assert gang.until("finished")["result"] == undisturbed
    gang.end()


def test_from_the_image_of_a_cut_it_goes_on_on_any_hosts(
    residents: Residents, undisturbed: JSON
) -> None:
    """One host, two, three, two others, one: each time all ranks begin again from one image."""
    image: JSON | None = None
    kept = slab.made(LIMIT_BYTES)
    for hosts in ([1], [2, 1], [1, 1, 1], [1, 2]):
        gang = Gang(residents, hosts, image=image, slab_fd=kept, pace=0.02).begin()
        gang.until("progress", (image or {"step": 0})["step"] + 1)
        gang.order("pause")
        paused = gang.until("paused")
        saving = gang.until("saving")
        assert saving["at_step"] == paused["step"]
        image = {"step": saving["at_step"], "index_bytes": saving["index_bytes"]}
        gang.end()
    gang = Gang(residents, [1], image=image, slab_fd=kept).begin()
    assert gang.until("finished")["result"] == undisturbed
    gang.end()


def test_its_hosts_change_while_it_runs(residents: Residents, undisturbed: JSON) -> None:
    """To other hosts, more, fewer, none; what was asked meanwhile comes after."""
    gang, step = Gang(residents, [1], pace=0.02).begin(), 0
    for hosts in ([2, 1], [1, 1, 1], [3], [1, 2], [1]):
        gang.until("progress", step + 1)
        gang.change(hosts)
        if len(hosts) == 2:
            gang.order("save")
        resized = gang.until("resized")
        assert resized["seats"] == hosts
        assert resized["step"] > step
        step = resized["step"]
        if len(hosts) == 2:
            assert gang.until("saving")["at_step"] >= step
    gang.order("pause")
    assert gang.until("paused")["step"] >= step
    gang.order("go", seats=[2], linked=False)
    assert gang.until("finished")["result"] == undisturbed
    gang.must_end()
    gang.end()


def test_off_its_seats_it_changes_hosts_too(residents: Residents, undisturbed: JSON) -> None:
    gang = Gang(residents, [1], pace=0.02)
    gang.until("prepared")
    for hosts in ([2, 1], [1, 1, 1], [1], [1, 2]):
        gang.go_to(hosts)
        step = gang.until("progress", 1)["step"]
        gang.order("pause")
        assert gang.until("paused")["step"] >= step
    gang.go_to([1, 1])
    assert gang.until("finished")["result"] == undisturbed
    gang.must_end()
    gang.end()


def test_who_is_paused_before_its_hosts_change_stays_where_it_was(
    residents: Residents, undisturbed: JSON
) -> None:
    gang = Gang(residents, [2, 1], pace=0.02).begin()
    gang.until("progress", 1)
    gang.change([1, 1, 1])
    gang.order("pause")
    paused = gang.until("paused")
    image = gang.until("saving")
    assert image["at_step"] == paused["step"]
    gang.end()
    kept = {"step": image["at_step"], "index_bytes": image["index_bytes"]}
    again = Gang(residents, [1, 2], image=kept, slab_fd=gang.slab).begin()
    assert again.until("finished")["result"] == undisturbed
    again.end()


def test_what_ranks_of_an_outpost_print_comes_home(residents: Residents) -> None:
    gang = Gang(residents, [1, 1, 1], entry="ranks:Prints").begin()
    gang.until("finished")
    gang.must_end()
    log = gang.folder.joinpath("log").read_text()
    assert sorted(log.splitlines()) == sorted(f"rank {rank}, step 3" for rank in range(RANKS))
    gang.end()


def test_equal_storages_of_an_image_cross_once() -> None:
    """Those of replicas are, and what is nowhere else equal is as it was."""
    one, other = (Slab(slab.made(LIMIT_BYTES)) for _ in range(2))
    sizes = [5, 100_000, 100_000, 100_000, 0]
    layout = laid_out(10, [(size, "cpu", False) for size in sizes])
    for number, extent in enumerate(layout.storages):
        filled = b"a" if number in (1, 3) else b"b"
        one.view(extent.offset, extent.size)[:] = filled * extent.size
    ends = socket.socketpair()
    sender, receiver = (Link(host, end) for host, end in enumerate(ends))
    ImageParts(one, sender).send(0, layout)
    came, taken = ImageParts(other, receiver), []
    while len(taken) < 1 + len(sizes):
        sender.flush()
        for said, body in receiver.receive(came.place):
            assert came.take(said, body)
            taken.append(said[0])
    assert taken == ["part", "part", "part", "part", "copy", "part"]
    for extent in (layout.graph, *layout.storages):
        place = extent.offset, extent.size
        assert bytes(other.view(*place)) == bytes(one.view(*place))
    for end in ends:
        end.close()


def test_it_is_saved_while_it_runs(residents: Residents, undisturbed: JSON) -> None:
    gang = Gang(residents, [1, 1], pace=0.02).begin()
    gang.until("progress", 1)
    gang.order("save")
    saving = gang.until("saving")
    image = {"step": saving["at_step"], "index_bytes": saving["index_bytes"]}
    gang.end()
    again = Gang(residents, [2, 1], image=image, slab_fd=gang.slab).begin()
    assert again.until("finished")["result"] == undisturbed
    again.end()


def test_a_lost_outpost_ends_the_gang_with_its_name(residents: Residents) -> None:
    gang = Gang(residents, [2, 1], pace=0.02).begin()
    gang.until("progress", 1)
    gang.wires[1].close()
    told = gang.until("failed")["message"]
    assert "host 1" in told
    assert "is lost" in told
    gang.end()


def test_before_a_host_stops_all_that_was_done_is_kept(
    residents: Residents, undisturbed: JSON
) -> None:
    gang = Gang(residents, [2, 1], pace=0.02).begin()
    gang.until("progress", 3)
    gang.wires[1].send({"is": "pause"})
    saving = gang.until("saving")
    failed = gang.until("failed", saving["at_step"])
    assert (failed["cause"], failed["step"]) == ("host", saving["at_step"])
    gang.end()
    image = {"step": saving["at_step"], "index_bytes": saving["index_bytes"]}
    again = Gang(residents, [1], image=image, slab_fd=gang.slab).begin()
    assert again.until("finished")["result"] == undisturbed
    again.end()


def test_outposts_end_with_their_home(residents: Residents) -> None:
    gang = Gang(residents, [1, 1, 1], pace=0.02).begin()
    gang.until("progress", 1)
    gang.home.close()
    gang.wires = gang.wires[1:]
    gang.must_end()
    gang.end()


def test_a_rank_of_an_outpost_that_fails_is_named(residents: Residents) -> None:
    gang = Gang(residents, [1, 1, 1], entry="ranks:LastFails").begin()
    assert gang.until("failed")["message"] == "rank 4: ValueError: the last rank has had enough"
    gang.end()


def test_all_its_ranks_are_cancelled(residents: Residents) -> None:
    gang = Gang(residents, [2, 1], pace=0.02).begin()
    gang.until("progress", 1)
    gang.order("cancel")
    gang.must_end()
    gang.end()
