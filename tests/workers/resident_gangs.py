"""Residents as a supervisor would hold them, joined into gangs by TCP as those of hosts are."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.core.model import codec
from app.core.model.descriptor import TaskDescriptor
from tests.launches import spec_of
from tests.workers.conftest import PRESET
from workers.device.processes.zygote_handle import Zygote
from workers.process import slab
from workers.process.isolation.sandbox import Room
from workers.process.task_start import SlabImage, TaskStart
from workers.process.wire import Trust, Wire, pair

JSON = dict[str, Any]

RANKS, STEPS = 5, 160
BUNDLE = Path(__file__).parent / "bundle"
LIMIT_BYTES = 64 * 2**20
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOfResidents:
    """The device of some residents: its kind, and what their processes need to use it."""

    kind: str = "cpu"
    variables: Mapping[str, str] = field(default_factory=dict)
    nodes: tuple[Path, ...] = ()


CPU = DeviceOfResidents()


class Residents:
    """A warm process, and those that it forks."""

    def __init__(self, folder: Path, device: DeviceOfResidents = CPU) -> None:
        self.folder, self.device = folder, device
        self.lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
        (folder / "probe").mkdir()
        (folder / "residents").mkdir()
        probe = self.room(folder / "probe")
        self.zygote = Zygote(
            lock_fd=self.lock,
            probe=probe,
            records=folder / "residents",
            variables=device.variables,
        )
        self.trust = Trust()
        self.trust.extend(2**62)
        self.born = 0
        while (said := next_said(self.zygote.wire))["is"] == "forked":
            self.zygote.forked(said["pid"], self.zygote.wire.fds.pop(0))
        assert said["is"] == "ready"
        self.walls = said["walls"]

    def room(self, scratch: Path) -> Room:
        return Room(code=BUNDLE, scratch=scratch, uid=os.getuid(), nodes=self.device.nodes)

    def spawn(self, slab_fd: int) -> tuple[Wire, tuple[Path, Path]]:
        """Its wire, and where it sees its code and its own folder."""
        self.born += 1
        scratch = self.folder / str(self.born)
        scratch.mkdir()
        wire, control = pair()
        bulk, bulk_end = socket.socketpair()
        log = os.open(scratch / "log", os.O_CREAT | os.O_WRONLY)
        room = self.room(scratch)
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
        residents: Residents | Sequence[Residents],
        hosts: list[int],
        *,
        entry: str = "ranks:Train",
        ranks: int = RANKS,
        steps: int = STEPS,
        image: JSON | None = None,
        slab_fd: int = -1,
        pace: float = 0.0,
    ) -> None:
        # A job that takes its time steps on until the test lets it end, also after a restore.
        self.params = {"steps": steps, "pace": pace, "waits": pace > 0}
        self.waits = pace > 0 or image is not None
        is_job = entry.partition(":")[2][0].isupper()
        self.run, self.ranks = {"job" if is_job else "function": entry}, ranks
        self.are_born(residents, hosts, image, slab_fd)

    def are_born(
        self,
        residents: Residents | Sequence[Residents],
        hosts: list[int],
        image: JSON | None,
        slab_fd: int,
    ) -> None:
        """`residents` are those of each host's device, if the devices differ."""
        several = not isinstance(residents, Residents)
        self.devices = list(residents) if several else [residents] * len(hosts)
        self.residents, self.hosts = self.devices[0], hosts
        self.slab = slab.made(LIMIT_BYTES) if slab_fd < 0 else slab_fd
        self.said: list[JSON] = []
        self.withheld: list[str] = []  # outputs that are not stored until the test says so
        home, folders = self.residents.spawn(self.slab)
        self.wires, self.folder = [home], self.residents.folder / str(self.residents.born)
        with self.outposts(hosts) as ends:
            self.begins(home, folders, ends, seats=hosts, host=0, image=image)

    def begins(self, wire: Wire, folders: Any, ends: list[int], **own: Any) -> None:
        spec = spec_of(self.run, params=self.params, world_size=self.ranks)
        start = start_of(spec, folders, kind=self.residents.device.kind, **own)
        wire.send({"is": "begin", "start": start, "files": len(ends)}, ends)

    @contextmanager
    def outposts(self, hosts: list[int]) -> Iterator[list[int]]:
        """Born and seated; home's ends of their lines and links."""
        ends = []
        for host in range(1, len(hosts)):
            fd = slab.made(LIMIT_BYTES)
            wire, folders = self.devices[min(host, len(self.devices) - 1)].spawn(fd)
            os.close(fd)
            ours, theirs = zip(*(connected() for _ in ("line", "link")), strict=True)
            self.begins(wire, folders, [], seats=hosts, host=host, image=None)
            assert next_said(wire)["is"] == "prepared"
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

    def log(self) -> str:
        return "".join(residents.log() for residents in dict.fromkeys(self.devices))

    @property
    def home(self) -> Wire:
        return self.wires[0]

    def order(self, word: str, **more: Any) -> None:
        self.home.send({"is": word, **more})

    def answer(self, word: str, **more: Any) -> None:
        """Order what its word asks for, unless it has ended since: its last word comes next."""
        with suppress(BrokenPipeError):
            self.order(word, **more)

    def keeps(self, message: JSON) -> None:
        """Say that an image or output is stored, unless the test withholds it."""
        if message["is"] == "saving" and message["what"] not in self.withheld:
            self.answer("kept", what=message["what"], files=0)

    def until(self, word: str, step: int = 0) -> JSON:
        """What home said with this word, after `step` or later; images are kept as they come."""
        end_s = time.monotonic() + PATIENCE_S
        while True:
            for at, message in enumerate(self.said):
                if message["is"] == word and message["step"] >= step:
                    del self.said[: at + 1]
                    return message
            assert time.monotonic() < end_s, f"no {word}: {self.said}, {self.log()}"
            self.home.wait(1.0)
            came = self.home.receive()
            for message in came:
                self.keeps(message)
            self.said += came
            last = [m for m in came if m["is"] in ("failed", "stopped") and m["is"] != word]
            assert not last, f"{last}\n{last[0].get('detail')}\n{self.log()}"

    def begin(self) -> Gang:
        self.until("prepared")
        self.order("go", seats=self.hosts, linked=False)
        return self

    def paused_image(self) -> JSON:
        """Pause the gang, wait for its image, and return what a next gang begins from."""
        self.order("pause")
        paused = self.until("paused")
        saving = self.until("saving")
        assert saving["at_step"] == paused["step"]
        return {"step": saving["at_step"], "index_bytes": saving["index_bytes"]}

    def finished(self) -> JSON:
        """Let the job end, and return its result."""
        if self.waits:
            self.until("progress")  # all ranks have their folders by then
            self.let_end()
        result: JSON = self.until("finished")["result"]
        return result

    def let_end(self) -> None:
        """Make the file `end` in the folder of each process that waits for it."""
        for residents in dict.fromkeys(self.devices):
            for scratch in residents.folder.glob("[0-9]*"):
                (scratch / "end").touch()

    def must_end(self) -> None:
        """The processes of all hosts, by themselves."""
        end_s = time.monotonic() + PATIENCE_S
        for wire in self.wires:
            while not wire.closed:
                assert time.monotonic() < end_s, self.log()
                wire.wait(1.0)
                wire.receive()

    def end(self) -> None:
        for wire in self.wires:
            wire.close()


def start_of(
    spec: TaskDescriptor,
    folders: tuple[Path, Path],
    *,
    seats: list[int],
    host: int,
    image: JSON | None,
    patience_s: float = 1.0,
    kind: str = "cpu",
) -> JSON:
    start = TaskStart(
        task="t1",
        spec=spec,
        inputs={},
        preset=PRESET,
        kind=kind,
        code=str(folders[0]),
        scratch=str(folders[1]),
        lease_margin_s=1.0,
        patience_s=patience_s,
        device_fraction=1.0,
        image=image and SlabImage(step=image["step"], index_bytes=image["index_bytes"]),
        seats=tuple(seats),
        host=host,
    )
    return codec.to_json(start)


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return ours, server.accept()[0]


def next_said(wire: Wire) -> JSON:
    """Return what a process says next, after the word that its own code begins."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        wire.wait(1.0)
        if messages := [said for said in wire.receive() if said["is"] != "entered"]:
            return messages[0]
    raise TimeoutError("nothing was said")
