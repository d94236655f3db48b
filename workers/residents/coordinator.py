"""A gang: N ranks behind one resident, as a conductor process and a process for each rank.

    supervisor  <- wire ->  conductor (the resident)  <- wires ->  rank 0 ... rank N-1

For its supervisor a gang is a resident like any other. The conductor forwards orders to the ranks,
and reports once when all ranks have reported; it runs no tenant code. A rank is an `executor` with
the same stages. Its default process group exists before its code is loaded. The ranks take turns
(`workers.ranks.turns`) on the resident's slot and on the further slots of this host that the gang
holds.  The scheduler decides which devices these are.

*The cut.* Before ranks that step get an order, all are stopped before the same step: the first rank
to see the call picks a step that none has begun, and each rank stops there. So an image shows all
ranks after the same step, and no collective is in flight. The job's log names ranks that are late.

*The image.* Each rank stages into its own part of the slab. For the supervisor the parts are one
image: its graph says how many storages belong to which rank, and each rank's graph is a storage.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from app.core.device.gang_watch import GangWatch
from app.core.model.graphs.task_graph import worth_telling
from app.core.model.provisions.collectives import NATIVE
from workers.process.exit_status import shell_status
from workers.process.image_layout import Extent, Layout
from workers.process.isolation import sandbox
from workers.process.slab import INDEX_LIMIT_BYTES, Slab
from workers.process.wire import Wire, pair
from workers.ranks import turns
from workers.ranks.native.standings import native_standings
from workers.ranks.shared_memory import Arena, Handles
from workers.ranks.standings import standings
from workers.residents.member import Member
from workers.residents.work import Work

JSON = dict[str, Any]

HEAD_BYTES = 2**20  # bytes at the start of the slab: the table of how many storages each rank has
LATE_S = 30.0  # seconds from a call to a cut until the log names the late ranks
LOOK_S = 0.05
WATCH_S = 0.5  # how often the gang is looked at for a rank that is behind
#: The gang makes these reports only when all ranks have made them; for images, in the same attempt.
TOGETHER = ("prepared", "paused", "saving")


# --- where a rank's image lies --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Region:
    """Describes the part of the slab into which a rank stages its image. The image's index lies
    behind it.
    """

    start: int
    limit_bytes: int
    index_bytes: int

    @staticmethod
    def of(rank: int, ranks: int, limit_bytes: int) -> Region:
        whole = (limit_bytes - HEAD_BYTES) // ranks // mmap.PAGESIZE * mmap.PAGESIZE
        index = min(INDEX_LIMIT_BYTES, whole // 8) // mmap.PAGESIZE * mmap.PAGESIZE
        return Region(HEAD_BYTES + rank * whole, whole - index, index)

    def slab(self, fd: int) -> Slab:
        return Slab(fd, self.start, self.limit_bytes, self.index_bytes)


def joined(slab: Slab, indices: list[JSON], regions: list[Region]) -> JSON:
    """Join the images of all ranks under one index.

    Writes each rank's number of storages into the slab.
    """
    extents: list[JSON] = []
    tensors: JSON = {}
    counts = []
    for rank, (index, region) in enumerate(zip(indices, regions, strict=True)):
        layout = index["layout"]
        for name, (storage, *rest) in index["tensors"].items():
            shown = name if rank == 0 else f"rank{rank}.{name}"
            tensors[shown] = [len(extents) + 1 + storage, *rest]
        parts = [layout["graph"], *layout["storages"]]
        extents += [{**part, "offset": part["offset"] + region.start} for part in parts]
        counts.append(len(parts))
    graph = json.dumps({"extents": counts}).encode()
    slab.view(0, len(graph))[:] = graph
    layout = {"graph": asdict(Extent(offset=0, size=len(graph))), "storages": extents}
    return {"layout": layout, "fingerprint": indices[0]["fingerprint"], "tensors": tensors}


def parted(slab: Slab, layout: Layout, rank: int) -> Layout:
    """Return the layout of one rank's image within a gang's image."""
    graph = slab.view(layout.graph.offset, layout.graph.size)
    counts = json.loads(bytes(graph))["extents"]
    begin = sum(counts[:rank])
    own, *storages = layout.storages[begin : begin + counts[rank]]
    return replace(layout, graph=own, storages=tuple(storages))


# --- the conductor --------------------------------------------------------------------------------


@dataclass
class RankProcess:
    """Describes a rank to its conductor. A rank of another host has no process here."""

    number: int
    pid: int
    pidfd: int
    wire: Wire
    region: Region
    part: Slab  # the rank's part of the slab
    # reports of TOGETHER that the gang has not made yet
    said: dict[str, JSON] = field(default_factory=dict)
    progress: JSON = field(default_factory=dict)
    last: JSON | None = None  # how the rank ended: its finished, failed or stopped message
    is_still: bool = False
    is_gone: bool = False


def fork(
    work: Work,
    live: Callable[[Work], int],
    handles: Handles,
    rank: int,
    slot: int,
    region: Region,
    not_theirs: tuple[int, ...] = (),
) -> RankProcess:
    """Fork a rank, which sees the device of its slot alone. `not_theirs`: descriptors of ours that
    no rank may hold.
    """
    wire, theirs = pair()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            sandbox.die_with_parent()
            wire.close()
            work.wire.close()
            for fd in not_theirs:
                os.close(fd)
            _become(work, theirs, handles, rank, region)
            os.environ.update(work.start.variables_of_slot(slot))
            status = live(work)
        except BaseException:
            traceback.print_exc()  # what the rank prints goes to the job's log
        finally:
            os._exit(status)
    theirs.close()
    return RankProcess(rank, pid, os.pidfd_open(pid), wire, region, region.slab(work.slab.fd))


def _become(work: Work, sock: socket.socket, handles: Handles, rank: int, region: Region) -> None:
    """Turn this process into a rank, with its own wire and its own part of the slab."""
    work.wire, work.watch = Wire(sock), None
    # Map the slab again: a fork does not inherit the conductor's mapping. The old Slab object is
    # never dropped (`execute` holds it), because its destructor would unmap whatever lies at the
    # old addresses now.
    work.whole, work.slab = Slab(work.slab.fd), region.slab(work.slab.fd)
    work.start = work.start.as_rank(rank)
    native_on = work.start.kind if work.spec.collectives == NATIVE else ""
    work.member = Member(handles, rank, collective=not work.is_graph, native_on=native_on)


class Conductor:
    """Forwards orders to the ranks of a gang and reports for them."""

    board: Arena

    def __init__(self, work: Work) -> None:
        self.work = work
        self.ranks: list[RankProcess] = []
        self.here: list[RankProcess] = []  # the ranks of this host
        # orders for ranks that step, by name; forwarded when all stand at a cut
        self.asked: dict[str, JSON] = {}
        self.asked_s = 0.0
        # requested number of slots; 0 if there is no request, or if the gang has reported it as
        # reached
        self.wished = 0
        self.is_seated = False
        self.is_saving = False  # from the order until the image is kept
        image = work.start.image
        # step of the image in the slab, which is kept or being kept; -1 if there is none
        self.saved_step = image.step if image is not None and image.is_kept else -1
        # bytes of the index of the image of `saved_step`
        self.index_bytes = 0 if image is None else image.index_bytes
        self.save_again = False  # True if another image was ordered while one was being kept
        # number of image attempts; reports of a cancelled attempt have another number
        self.round = 0
        self.is_still = False
        self.saved_s = time.monotonic()
        # late inputs that arrived and are in no image yet: port -> descriptor
        self.came: dict[str, int] = {}
        self.leaving: set[str] = set()  # outputs that are on their way to the store
        self.lacks = ""  # the input without which the gang leaves its slots
        self.watch = GangWatch()
        is_native = work.spec.collectives == NATIVE
        self.standings = native_standings if is_native else standings
        self.poll = select.poll()
        self.poll.register(work.wire.fileno(), select.POLLIN)

    def take_up(self, board: Arena, ranks: list[RankProcess]) -> None:
        """Adopt these ranks as the gang."""
        self.board, self.ranks, self.round = board, ranks, 0
        self.here = [rank for rank in ranks if rank.pid]
        for rank in self.here:
            for fd in (rank.wire.fileno(), rank.pidfd):
                self.poll.register(fd, select.POLLIN)
        for port in self.came:
            self._bring(port)

    def run(self) -> int:
        while True:
            self.poll.poll(self.look_in_ms())
            for message in self.work.wire.receive():
                self.order(message)
            if self.work.wire.closed:
                return 1
            self.hear_all()
            if (last := self.last_word()) is not None:
                self.work.say(last.pop("is"), **last)
                return 0
            self.keep_time()

    def hear_all(self) -> None:
        for rank in self.here:
            self._hear(rank)

    def end_all(self) -> None:
        for rank in self.here:
            if not rank.is_gone:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(rank.pidfd, signal.SIGKILL)

    # --- orders ---

    def order(self, message: JSON) -> None:
        match message["is"]:
            case "kept" | "patience" if message.get("what") != "image":
                self.leaving.discard(message.get("what"))
                self._tell_first(message)
            case "block":
                self.came[message["port"]] = self.work.wire.fds.pop(0)
                self._bring(message["port"])
            case "leave" | "return":
                self._stay(message)
            case "save" if self.is_seated and self.is_saving:
                self.save_again = True
            case "pause" | "save" | "cancel" if self.is_seated:
                self.ask(message)
            case "resize":
                (self.wished,) = message["seats"]
                turns.wish(self.board, self.wished)
            case "go":
                self.go(message["seats"])
            case "kept":
                self.tell(message, self.ranks)
                self.is_saving = False
                if self.save_again and self.is_seated:
                    self.save_again = False
                    self.ask({"is": "save"})
            case _:
                self.tell(message, self.ranks)

    def go(self, seats: list[int]) -> None:
        """Let the ranks run on these slots, which replace all slots that the gang held before."""
        self.is_seated, self.wished = True, 0
        if not self.board.is_bridged:
            turns.reseat(self.board, seats[0])
        self.tell({"is": "go"}, self.ranks)
        # some ranks have begun the image of the pause, and the other ranks never will
        if not self.is_saving:
            self._call_off_image()

    def ask(self, message: JSON) -> None:
        """Keep an order for ranks that step until they stand at a cut, and call them to a cut."""
        if message.get("leave"):
            self._stay(message)
            message = {"is": "pause"}
        if not self.asked:
            turns.call_to_cut(self.board)
            self.asked_s = time.monotonic()
        self.asked[message["is"]] = message

    def _stay(self, message: JSON) -> None:
        """Answer an offload order: the memory of a gang is not offloaded."""
        said = {"bytes": 0, "settled": True, "memory_bytes": self._memory_bytes()}
        self.work.say("away", turn=message["turn"], **said)

    def _bring(self, port: str) -> None:
        """Hand a late input to the first rank.

        This may be needed again, if the rank was forked anew since then.
        """
        self._tell_first({"is": "block", "port": port}, [self.came[port]])

    def _tell_first(self, message: JSON, fds: list[int] | None = None) -> None:
        """Tell the first rank, which speaks for the gang, and wake it if it waits for other
        ranks.
        """
        with suppress(OSError):  # the rank is ending; its exit is noticed elsewhere
            self.ranks[0].wire.send(message, fds)
        self.board.ring(0)

    def tell(self, message: JSON, ranks: list[RankProcess]) -> None:
        for rank in ranks:
            with suppress(OSError):  # the rank is ending; its exit is noticed elsewhere
                rank.wire.send(message)

    # --- what ranks say ---

    def _hear(self, rank: RankProcess) -> None:
        for message in rank.wire.receive():
            self.take(rank, message)
        if not rank.is_gone and select.select([rank.pidfd], [], [], 0)[0]:
            for message in rank.wire.receive():
                self.take(rank, message)
            self.poll.unregister(rank.pidfd)
            _, status = os.waitpid(rank.pid, 0)
            rank.is_gone = True
            rank.last = rank.last or unsaid(rank.number, os.waitstatus_to_exitcode(status))
        if rank.wire.closed and rank.wire.fileno() >= 0:
            self.poll.unregister(rank.wire.fileno())
            rank.wire.close()

    def take(self, rank: RankProcess, message: JSON) -> None:
        word = message["is"]
        if word in ("failed", "finished", "stopped"):
            rank.last = message
            self._look_at_cut()
            self._look_whether_together("paused")
        elif word == "at_cut":
            rank.said[word] = message
            self._look_at_cut()
        elif word == "progress":
            rank.progress = message
            if rank.number == 0 or self.work.is_graph:
                self._say_progress()
        elif word == "saving" and message["what"] != "image":
            self.leaving.add(message["what"])
            self.work.say("saving", **_without_head(message))
        elif word in ("spoiled", "awaits", "lacks"):
            self._take_wish(message)
        elif word in ("still", "moving"):
            rank.is_still = word == "still"
            self._look_whether_still()
        elif word in TOGETHER and message.get("round") in (None, self.round):
            rank.said[word] = message
            self._look_whether_together(word)

    def _take_wish(self, message: JSON) -> None:
        match message["is"]:
            case "spoiled":
                self.is_saving, self.saved_step = False, -1
                self._call_off_image()
                if self.is_seated:
                    self.ask({"is": "save"})
            case "awaits":
                self.work.say("awaits", port=message["port"])
            case "lacks" if self.is_seated:
                self.lacks = message["port"]
                self.ask({"is": "pause"})

    def _look_whether_together(self, word: str) -> None:
        if self._have_all(word):
            self.together(word, [rank.said.pop(word) for rank in self.ranks])
        elif word == "paused" and self._waits_for_store():
            self._pause_ended()

    def together(self, word: str, said: list[JSON]) -> None:
        """Send one report for the gang, made from the reports of all its ranks."""
        match word:
            case "prepared":
                capabilities = max((each["capabilities"] for each in said), key=_inexact)
                first = {**said[0], "capabilities": capabilities}
                self.work.say("prepared", **_without_head(first), step=_same_step(said))
            case "paused":
                self.is_seated = False
                has_state = all(each["has_state"] for each in said)
                told = {"lacks": self.lacks} if self.lacks else {}
                self.lacks = ""
                self.work.say("paused", has_state=has_state, step=_same_step(said), **told)
            case "saving":
                self.write_index(said)
                about = {"at_step": self.saved_step, "index_bytes": self.index_bytes}
                ranked = said[0].get("ranked", {})  # as the first rank's metrics are the gang's
                self.work.say("saving", what="image", **about, ranked=ranked)

    def _have_all(self, word: str) -> bool:
        return all(word in rank.said for rank in self.ranks)

    def _waits_for_store(self) -> bool:
        """True if all ranks have ended, and those that have not finished wait for the store."""
        left = [rank for rank in self.ranks if (rank.last or {}).get("is") != "finished"]
        return bool(left) and all("waits" in rank.said.get("paused", ()) for rank in left)

    def _pause_ended(self) -> None:
        """Report that the gang has ended and leaves its slots until the store takes its outputs."""
        for rank in self.ranks:
            rank.said.pop("paused", None)
        if self.asked:  # no rank will stand at that cut
            self.asked = {}
            turns.end_cut(self.board)
        self.is_seated = False
        self.work.say("paused", has_state=True, step=self.step(), waits="store")

    def _call_off_image(self) -> None:
        """Discard the parts of an unfinished image.

        An image is useful only if all parts exist.
        """
        self.round += 1
        for rank in self.ranks:
            rank.said.pop("saving", None)
        self.tell({"is": "call_off", "round": self.round}, self.ranks)

    def _look_at_cut(self) -> None:
        """Forward the kept orders once all ranks stand before the same step, and let the ranks go
        on.

        Once a rank has finished there is no step after which all ranks stand: it is too late to
        pause or save them.
        """
        here = [rank for rank in self.ranks if rank.last is None]
        if not here or any("at_cut" not in rank.said for rank in here):
            return
        turns.end_cut(self.board)
        stand = [rank.said.pop("at_cut")["ran"] for rank in here]
        step = sum(stand) if self.work.is_graph else stand[0]
        asked, self.asked = self.asked, {}
        if len(here) < len(self.ranks):
            asked = {word: message for word, message in asked.items() if word == "cancel"}
        self.at_cut(step, asked, here)
        self.tell({"is": "on", "step": step}, here)

    def at_cut(self, step: int, asked: dict[str, JSON], here: list[RankProcess]) -> None:
        """Forward these orders to ranks that stand after step `step`.

        Ranks that are to pause obey further orders without a cut, as they do during the pause.
        A change of slots that was ordered takes effect here, too, unless the ranks are to pause.
        """
        # Ranks of a graph stop at a cut before they stop for a change, so cuts that follow each
        # other without a break would put the change off until the graph ends.
        if self.wished and "pause" not in asked:
            turns.reseat(self.board, self.wished)
        for message in asked.values():
            self.tell(message, here)
        self.is_seated = self.is_seated and "pause" not in asked
        self.is_saving |= "save" in asked and step != self.saved_step

    def write_index(self, said: list[JSON]) -> None:
        """Write the image's index, from the indices in the ranks' parts of the slab."""
        slab, regions = self.work.slab, [rank.region for rank in self.ranks]
        sizes = [each["index_bytes"] for each in said]
        parts = zip(self.ranks, sizes, strict=True)
        indices = [rank.part.read_index(size) for rank, size in parts]
        self.index_bytes = slab.write_index(joined(slab, indices, regions))
        # ranks that are forked anew have the input, too
        for port in self.came.keys() - said[0]["lacks"]:
            os.close(self.came.pop(port))
        self.saved_step, self.is_saving = _same_step(said, "at_step"), True
        self.saved_s = time.monotonic()

    def _say_progress(self) -> None:
        said = self.ranks[0].progress
        if self.work.is_graph:  # each executor has metrics of its own
            said = {
                "metrics": {
                    k: v for r in self.ranks for k, v in r.progress.get("metrics", {}).items()
                }
            }
        staged_us = max(rank.progress.get("staged_us", 0) for rank in self.ranks)
        own = {
            "memory_bytes": self._memory_bytes(),
            "spilled_bytes": sum(rank.progress.get("spilled_bytes", 0) for rank in self.ranks),
            "staged_us": staged_us,
            "step": self.step(),
        }
        self.work.say("progress", **{**_without_head(said), **own})

    def _look_whether_still(self) -> None:
        """Report when no rank steps on this device any more: each rank is still, done, or waits for
        others.
        """
        waits = (turns.RankState.WAITING, turns.RankState.DONE)
        still = all(
            rank.is_still or turns.state(self.board, rank.number) in waits for rank in self.here
        )
        if still != self.is_still:
            self.is_still = still
            self.work.say("still" if still else "moving")

    # --- time ---

    def keep_time(self) -> None:
        now_s, every_s = time.monotonic(), self.work.spec.checkpoint.every_s
        if self.wished and turns.seats(self.board) == self.wished:
            self.work.say("resized", seats=[self.wished], step=self.step())
            self.wished = 0
        if any(rank.is_still for rank in self.ranks):
            self._look_whether_still()
        due = every_s > 0 and now_s - self.saved_s >= every_s
        if due and self.is_seated and not (self.is_saving or self.asked):
            self.saved_s = now_s  # until the ranks report that they save
            self.ask({"is": "save"})
        if self.asked and now_s - self.asked_s >= LATE_S:
            self.asked_s = now_s
            late = [str(rank.number) for rank in self.ranks if "at_cut" not in rank.said]
            told = f"rank {', '.join(late)} did not come to a safe point for {LATE_S:.0f} s: "
            sys.stderr.write(told + turns.Turns(self.board, 0).standing() + "\n")
            sys.stderr.flush()

        if not self.work.is_graph:  # its executors wait for blocks, which may take hours
            steps = self.is_seated and not self.asked
            who = self.watch.news(self.standings(self.board) if steps else None, now_s)
            if who is not None:
                self.work.say("behind", who=who)

    def look_in_ms(self) -> float:
        if self.wished or any(rank.is_still for rank in self.ranks):
            return LOOK_S * 1000
        every_s = self.work.spec.checkpoint.every_s
        return 1000 * min(every_s or WATCH_S, WATCH_S)

    # --- all of them ---

    def last_word(self) -> JSON | None:
        """Return how the gang ended: the first real failure, or rank 0's end once all ranks have
        ended.
        """
        words = [rank.last for rank in self.ranks]
        failed = [(n, word) for n, word in enumerate(words) if word and word["is"] == "failed"]
        if failed:
            number, word = min(failed, key=lambda each: "GangFailed" in each[1]["message"])
            return {**word, "message": f"rank {number}: {word['message']}"}
        if any(word is None for word in words):
            return None
        said = [word for word in words if word is not None]
        return {**said[0], **_together(said)} if self.work.is_graph else dict(said[0])

    def step(self) -> int:
        ran = [rank.progress.get("ran", 0) for rank in self.ranks]
        return sum(ran) if self.work.is_graph else min(ran)

    def _memory_bytes(self) -> int:
        """Return the memory that the ranks of this host hold, on a CPU or on that accelerator where
        they hold most.

        On an accelerator each rank reports what it holds in its turn, and has left before the next.
        """
        held: dict[int, list[int]] = {}
        for rank in self.here:
            slot = 0 if self.work.start.kind == "cpu" else turns.slot_of(self.board, rank.number)
            held.setdefault(slot, []).append(rank.progress.get("memory_bytes", 0))
        takes_turns = self.work.start.kind != "cpu" and not self.work.is_graph
        return max(map(max if takes_turns else sum, held.values()), default=0)


def _together(said: list[JSON]) -> JSON:
    """Combine the final reports of a graph's executors, each of which has run a part."""
    return {
        "step": sum(word["step"] for word in said),
        "passed": [
            [block, source, target, size]
            for target, word in enumerate(said)
            for block, source, size in word.get("passed", ())
        ],
        "took_ms": {name: ms for word in said for name, ms in word["took_ms"].items()},
        "made_bytes": worth_telling(
            {block: size for word in said for block, size in word["made_bytes"].items()}
        ),
    }


def _same_step(said: list[JSON], word: str = "step") -> int:
    steps = {each[word] for each in said}
    assert len(steps) == 1, f"the ranks stand after steps {sorted(steps)}"
    return int(steps.pop())


def _inexact(capabilities: list[str]) -> bool:
    return "equivalent" in capabilities


def _without_head(message: JSON) -> JSON:
    return {name: value for name, value in message.items() if name not in ("is", "step")}


def unsaid(rank: int, code: int) -> JSON:
    how = f"was killed by signal {-code}" if code < 0 else f"ended by itself with status {code}"
    said = {"is": "failed", "cause": "exit", "message": f"its process {how}.", "detail": ""}
    return {**said, "exit_status": shell_status(code)}
