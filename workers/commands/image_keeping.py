"""Makes images of a command's working folder while the command runs, is paused, or has ended."""

from __future__ import annotations

import time
import traceback
from typing import Any, Protocol

from app.core.model.descriptor import TaskDescriptor
from workers.commands import working_folder
from workers.commands.freezer import Tree
from workers.commands.inputs_outputs import Progress
from workers.commands.stored_processes import FirstProcess
from workers.commands.stub_thread import StubThread, tell_owner
from workers.commands.wakeups import Wakeups
from workers.commands.working_folder import FolderImage, FolderTooLarge, WorkingFolder
from workers.process import slab as slabs
from workers.process.slab import Slab
from workers.process.task_start import TaskStart
from workers.residents.images import SAVES_APART_S

JSON = dict[str, Any]

# a running command is stopped for images for at most one part in so many of its time
STANDS_ONE_IN = 50


class KeptCommand(Protocol):
    """Says what the keeping of images reads and calls of a command, which is `runner.Stub`."""

    slab: Slab
    start: TaskStart
    step: int
    is_seated: bool
    is_stopped: bool
    is_in_doubt: bool
    held: set[str]
    wishes: set[str]
    status: int | None
    stood_s: float
    processes: list[FirstProcess]
    tree: Tree
    progress: Progress
    wakeups: Wakeups

    @property
    def spec(self) -> TaskDescriptor: ...

    def say(self, word: str, **said: Any) -> None: ...
    def listen(self, timeout_s: float | None, *more: int) -> None: ...
    def stands(self) -> bool: ...
    def comes_to_point(self) -> bool: ...
    def hold(self, why: str) -> None: ...
    def let_go(self, why: str) -> None: ...
    def count_stop(self) -> None: ...
    def describe_for_image(self) -> JSON: ...
    def processes_to_store(self) -> JSON: ...
    def tell_not_stored(self, why: str) -> None: ...


class Keeping:
    """Makes images of the working folder, one at a time. A thread copies, and the stub does not
    wait for it.

    While the command runs, changed files are copied ahead, then the tree is stopped for the rest.
    While the command is paused, everything is copied at once, as nothing changes.
    """

    def __init__(self, stub: KeptCommand, folder: WorkingFolder) -> None:
        self.stub, self.folder = stub, folder
        self._thread = StubThread()
        self.last_step: int | None = None  # step of the newest image that is stored or on its way
        self.left_s = -1e9  # when the newest image left
        self.saved_s = self.told_s = time.monotonic()
        # "", "ahead", "point", "copy" or "told"; in "point" the ranks come to a common point, in
        # "told" the slab belongs to the supervisor
        self.stage = ""
        self.has_beside = False  # True if the image has the folders beside the working folder
        self.failed = False  # the last image was not stored; the supervisor says when to retry
        self.is_wished = False  # an order requested the current image
        self._result: FolderImage | BaseException | None = None
        self._done = False
        self._began_s = 0.0
        self._index_bytes = 0  # size of the index of the newest image
        self._ranked = JSON()  # the value that ranks the newest image (`Progress.ranked`)
        self.stood_s = 0.0  # how long the tree was stopped in its slot for the last image
        self.frees_early = False  # True if the tree runs on once its processes are dumped

    def may_have_processes(self) -> bool:
        """Say whether the current image is to have the processes of the command.

        A running command that could not be stored, or was damaged by storing, is tried again only
        by an order.  A command with an open terminal is tried again each time.
        """
        stub = self.stub
        if not stub.start.stores_processes or not stub.processes or stub.status is not None:
            return False
        is_in_doubt = stub.is_in_doubt or stub.start.dump_damaged
        return "pause" in stub.held or self.is_wished or not is_in_doubt

    def dumped(self, lost: str) -> None:
        """Let the tree run on, now that its processes are dumped; at a pause it stays stopped.

        `lost` is why the processes could not be dumped; then the image is announced again, without
        them. Nothing is stored yet: if the command died, an older image with its processes remains
        the newest one.
        """
        if lost:
            self.stub.tell_not_stored(lost)
            if self.stub.stands():
                self._announce({"bound_because": lost})
            else:
                self.kept({"error": lost})
        elif self.frees_early:
            self._stood()
            self.stub.let_go("image")

    def _stood(self) -> None:
        if self.stub.is_seated and self._began_s:
            self.stood_s = time.monotonic() - self._began_s
            self.stub.stood_s, self._began_s = self.stub.stood_s + self.stood_s, 0.0

    def due_in_s(self) -> float:
        """Return the seconds until the next image is due."""
        if self.stage or not self.stub.processes:
            return 60.0
        if "save" in self.stub.wishes:
            return 0.0
        if self.stub.status is not None:
            return 60.0  # it is over, and an image is made only by an order
        if not self.stub.is_seated:
            waits = self.last_step == self.stub.step or self.failed
            return 60.0 if waits else self.left_s + SAVES_APART_S - time.monotonic()
        every_s = self.stub.spec.checkpoint.every_s
        if every_s <= 0 or self.stub.is_stopped:  # the processes clean up and end
            return 60.0
        return self.saved_s + max(every_s, STANDS_ONE_IN * self.stood_s) - time.monotonic()

    def mind(self) -> None:
        if self._done:
            self._done = False
            self._copied()
        if self.stage == "point" and self.stub.comes_to_point():
            self.stage = ""
            self._copy()
        if not self.stage and self.due_in_s() <= 0:
            self.is_wished = "save" in self.stub.wishes
            self.stub.wishes -= {"save"}
            self.saved_s, self.failed = time.monotonic(), False
            if self.stub.is_seated:
                self._aside("ahead", self.folder.ahead)
            else:
                self._copy()

    def off_the_seat_no_more(self) -> None:
        """Abandon a copy that no order requested, because the command gets its slot now.

        Files that are copied already stay in the slab.
        """
        self.saved_s = time.monotonic()
        every_s = self.stub.spec.checkpoint.every_s
        is_overdue = 0 < every_s < self.saved_s - self.told_s
        if self.stage == "copy" and not self.is_wished and not is_overdue:
            self.folder.is_abandoned = True

    def kept(self, message: JSON) -> None:
        self.stage = ""
        self._stood()
        self.stub.let_go("image")
        if message.get("error"):
            self.last_step, self.failed = None, True

    def finish(self) -> None:
        """Wait until no image is on its way; give up one for which the ranks still run."""
        if self.stage == "point":
            self.stage = ""
        while self.stage:
            self.stub.listen(0.05, self.stub.wakeups.fd)
            self.stub.wakeups.clear()
            if self._done:
                self._done, self.stage = False, ""

    def store_last(self) -> bool:
        """Store the folder of the ended command; False if it could not be stored."""
        self.finish()
        self.failed = False
        self._copy()
        while self.stage:
            self.stub.listen(0.05, self.stub.wakeups.fd)
            self.stub.wakeups.clear()
            if self._done:
                self._done = False
                self._copied()
        return not self.failed

    def _copy(self) -> None:
        """Stop the tree and copy the folder; the tree stays stopped until all is copied."""
        stub = self.stub
        self._began_s = time.monotonic()
        stub.hold("copy")
        stub.count_stop()
        self.last_step, self._ranked = stub.step, stub.progress.ranked
        about = stub.describe_for_image()
        mapped = stub.tree.written_maps(self.folder.path)
        self.folder.is_abandoned = False
        self.has_beside = bool(self.folder.beside) and self.may_have_processes()
        self._aside("copy", lambda: self._copied_folder(about, mapped))

    def _copied_folder(self, about: JSON, mapped: set[str]) -> FolderImage:
        """Copy the folder, with the folders beside it if they fit. Runs in another thread."""
        if self.has_beside:
            try:
                return self.folder.copy(about, mapped, with_beside=True)
            except FolderTooLarge:
                self.has_beside = False
        return self.folder.copy(about, mapped)

    def _aside(self, stage: str, work: Any) -> None:
        self.stage, self._result = stage, None
        self._thread.give(lambda: self._work(work))

    def _work(self, work: Any) -> None:
        try:
            self._result = work()
        except BaseException as error:
            self._result = error
        self._done = True
        self.stub.wakeups.wake()

    def _copied(self) -> None:
        """Continue after a thread has done its part."""
        stage, result = self.stage, self._result
        self.stage, self._result = "", None
        tree: JSON = {}
        if stage == "copy":
            # the command may stay stopped until its processes are stored
            if isinstance(result, FolderImage):
                self.frees_early = "pause" not in self.stub.held
                tree = self.stub.processes_to_store()
            if "first_pid" not in tree:
                self._stood()
            self.stub.let_go("copy")
        if isinstance(result, BaseException):
            self._not_copied(result)
        elif stage == "ahead":
            self.stage = "point"
            self.mind()
        elif isinstance(result, FolderImage):
            self._tell(result, tree)

    def _not_copied(self, error: BaseException) -> None:
        self.last_step, self.left_s = None, time.monotonic()
        if isinstance(error, working_folder.ImageUnwanted):
            return
        self.failed = True
        if isinstance(error, FolderTooLarge | OSError | slabs.BadIndex):
            tell_owner(
                f"its working folder could not be saved, so a restart would lose its files: {error}"
            )
        else:
            tell_owner("".join(traceback.format_exception(error)))

    def _tell(self, kept: FolderImage, tree: JSON) -> None:
        index = {"layout": kept.layout.as_json(), "fingerprint": {}, "tensors": {}}
        try:
            size = slabs.write_index(self.stub.slab.fd, index)
        except (OSError, slabs.BadIndex) as error:
            self._stood()
            self.stub.let_go("image")
            self._not_copied(error)
            return
        self.left_s = self.told_s = time.monotonic()
        self._index_bytes = size
        self._announce(tree)

    def _announce(self, tree: JSON) -> None:
        """Hand the slab over to the supervisor; `tree` says what the image has of the processes."""
        self.stage, size = "told", self._index_bytes
        about: JSON = {"index_bytes": size, "ranked": self._ranked, **tree}
        self.stub.say("saving", what="image", at_step=self.last_step, **about)
