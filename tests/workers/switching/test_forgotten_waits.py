"""Takes the waits of the device code away, one by one: each time the outcome must be wrong.

The test finds the waits in the sources of `workers` by itself.  A wait without a guard in `GUARDS`
fails it: write a case that comes out wrong without the wait, or do without the wait.  Streams run
as late as they may (mode `lazy`), so a missing wait shows every time.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.sim import orders
from workers.capture.capture import Surroundings, capture
from workers.hardware.accelerator import Accelerator
from workers.process import slab
from workers.process.slab import Slab
from workers.ranks.swap import RankOffload
from workers.residents import orders as resident_orders
from workers.residents.images import Images
from workers.switching import context_switch
from workers.switching.offload import Absence
from workers.switching.staging import Staging

pytestmark = pytest.mark.sim

MB = 2**20
SIZE = 64 * 1024  # floats: large enough to leave
ROOT = Path(__file__).parent.parent.parent.parent
#: Methods by which work of a device is ordered; `wait` and `record` count beside a stream or event.
ORDERING = ("synchronize", "record_stream", "record_event", "wait_stream", "wait_event")
HANDLES = ("torch.Stream", "torch.Event", "new_stream")


@pytest.fixture(autouse=True)
def lazy() -> Iterator[None]:
    torch.sim.set_mode("lazy")
    torch.sim.empty_cache()
    litter = [torch.full((SIZE,), -1.0, device="sim") for _ in range(32)]
    torch.sim.synchronize()  # what an earlier test left in memory would look right
    del litter
    yield
    orders.choose()


# --- finding the waits, and doing without one -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ordering:
    """A call in the sources that orders work of a device; `place` says it to people."""

    path: Path
    function: str  # its qualified name
    line: int
    column: int
    place: str

    @property
    def module(self) -> str:
        return ".".join(self.path.relative_to(ROOT).with_suffix("").parts)


def found_waits() -> dict[str, Ordering]:
    """Return every call that orders a device's work, by its place."""
    found: dict[str, Ordering] = {}
    for path in sorted((ROOT / "workers").rglob("*.py")):
        source = path.read_text()
        names = (*ORDERING, "wait", "record") if any(it in source for it in HANDLES) else ORDERING
        if not any(f".{name}(" in source for name in names):
            continue
        for function, call in _calls(ast.parse(source), names):
            told = f"{path.stem}, {function.rpartition('.')[2]}: {ast.unparse(call)}"
            place, number = told, 1
            while place in found:
                number += 1
                place = f"{told} ({number})"
            found[place] = Ordering(path, function, call.lineno, call.col_offset, place)
    return found


def _calls(tree: ast.Module, names: tuple[str, ...]) -> Iterator[tuple[str, ast.Call]]:
    def within(node: ast.AST, function: str) -> Iterator[tuple[str, ast.Call]]:
        for child in ast.iter_child_nodes(node):
            inner = function
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                inner = f"{function}.{child.name}".lstrip(".")
            if _is_ordering(child, names):
                yield function, child
            yield from within(child, inner)

    yield from within(tree, "")


def _is_ordering(node: ast.AST, names: tuple[str, ...]) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in names
    )


class _Without(ast.NodeTransformer):
    """Replaces one call by what stands for no wait: None, or an event that nothing has to reach."""

    def __init__(self, wait: Ordering) -> None:
        self.wait, self.is_done = wait, False

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if (node.lineno, node.col_offset) == (self.wait.line, self.wait.column) and _is_ordering(
            node, (*ORDERING, "wait", "record")
        ):
            self.is_done = True
            event = 'torch.Event("sim")' if node.func.attr == "record_event" else "None"
            return ast.copy_location(ast.parse(event, mode="eval").body, node)
        return self.generic_visit(node)


@contextlib.contextmanager
def without(wait: Ordering) -> Iterator[None]:
    """Let the function that holds the wait do without it."""
    change = _Without(wait)
    tree = ast.fix_missing_locations(change.visit(ast.parse(wait.path.read_text())))
    assert change.is_done
    function: Any = importlib.import_module(wait.module)
    for name in wait.function.split("."):
        function = getattr(function, name)
    code = _code_of(compile(tree, str(wait.path), "exec"), wait.function)
    whole = function.__code__
    function.__code__ = code
    try:
        yield
    finally:
        function.__code__ = whole


def _code_of(code: types.CodeType, name: str) -> types.CodeType:
    """Return the code of a function by its qualified name."""
    ahead = [code]
    while ahead:
        one = ahead.pop()
        if one.co_qualname == name:
            return one
        ahead += [part for part in one.co_consts if isinstance(part, types.CodeType)]
    raise AssertionError(f"there is no function {name}")


# --- a state whose work is late -------------------------------------------------------------------


class State:
    """Numbers that change with each step; the work of a step is not waited for."""

    def __init__(self, device: torch.device) -> None:
        self.parts = [torch.full((SIZE,), float(n), device=device) for n in range(3)]

    def step(self) -> None:
        for part in self.parts:
            part.mul_(2).add_(1)

    def step_aside(self) -> None:
        """Step on a stream that the main one does not wait for, as a tenant's code may."""
        side = torch.Stream("sim")
        side.wait_stream(torch.sim.current_stream())
        with side:
            self.step()

    def is_after(self, steps: int) -> bool:
        return [(float(part[0]), float(part[-1])) for part in self.parts] == _expected(steps)


def _expected(steps: int) -> list[tuple[float, float]]:
    numbers = [0.0, 1.0, 2.0]
    for _ in range(steps):
        numbers = [2 * number + 1 for number in numbers]
    return [(number, number) for number in numbers]


class Place:
    """A job's slab, its state on the device, and the staging between both."""

    def __init__(self) -> None:
        self.accelerator, self.slab = Accelerator("sim"), Slab(slab.made(64 * MB))
        self.state = State(self.accelerator.device)
        self.staging = Staging(self.slab, None, self.accelerator)
        self.aside: list[Callable[[], None]] = []

    def by_hand(self) -> None:
        """Let the test decide when the thread beside the next step copies."""
        self.staging._aside = lambda copy, then: self.aside.append(copy)  # type: ignore[method-assign]

    def captured(self) -> Any:
        return capture(self.state, around=Surroundings(), accelerator=self.accelerator)

    def holds(self, layout: Any, steps: int) -> bool:
        """Return whether the slab holds the state after so many steps."""
        extents = [extent for extent in layout.storages if extent.device == "sim"]
        return [self._ends(extent) for extent in extents] == _expected(steps)

    def _ends(self, extent: Any) -> tuple[float, float]:
        raw = bytearray(self.slab.view(extent.offset, extent.size))
        numbers = torch.frombuffer(raw, dtype=torch.float32)
        return float(numbers[0]), float(numbers[-1])


def _others(place: Place) -> list[torch.Tensor]:
    """Return tensors as large as the state, in memory that was free; their work is in the queue."""
    others = [torch.zeros(SIZE, device=place.accelerator.device) for _ in range(3)]
    for other in others:
        other.add_(7)
    return others


# --- what must come out right ---------------------------------------------------------------------


def goes_on(*, is_copied_last: bool = False) -> bool:
    """Stage a state that steps on at once: the thread that copies comes before or after that."""
    place = Place()
    place.by_hand()
    captured = place.captured()
    place.state.step()  # still in its queue when the image begins
    layout = place.staging.begin(captured, lambda layout: None)
    place.state.step()
    others = _others(place)  # a step makes tensors of its own
    if is_copied_last:
        place.accelerator.current_stream().synchronize()
    for copy in place.aside:
        copy()
    del others
    return place.holds(layout, 1)


def goes_on_and_copies_last() -> bool:
    return goes_on(is_copied_last=True)


def goes_on_without_room() -> bool:
    """The device has no room for copies: the job waits until its state has left."""
    place = Place()
    place.by_hand()
    captured = place.captured()
    place.state.step()
    with mock.patch.object(place.accelerator, "free_bytes", return_value=0):
        layout = place.staging.begin(captured, lambda layout: None)
    place.state.step()
    place.accelerator.current_stream().synchronize()
    for copy in place.aside:
        copy()
    return place.holds(layout, 1)


def ends_its_image() -> bool:
    """Join the thread that copies; it begins when somebody waits for it."""
    place = Place()
    copies = place.aside

    class Late(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            for copy in copies:
                copy()
            self.set()
            return True

    place.staging._done = Late()
    place.staging._done.set()

    def aside(copy: Callable[[], None], then: Callable[[], None]) -> None:
        place.staging._done.clear()
        copies.append(copy)

    place.staging._aside = aside  # type: ignore[method-assign]
    place.state.step()
    layout = place.staging.begin(place.captured(), lambda layout: None)
    place.staging.join()
    return place.holds(layout, 1)


def leaves() -> bool:
    """Let a state leave and come back to memory that others still use."""
    place = Place()
    absence = Absence(place.slab, place.accelerator, place.staging.pinned)
    captured = place.captured()
    place.state.step()
    _, lying = place.staging.bring(captured)
    absence.leave(lying, lambda: None)
    others = _others(place)
    del others  # their last work is still in the queue
    absence.come_back(lambda size: None)
    return place.state.is_after(1)


def is_staged() -> bool:
    """Make an image, of its own, of a state that a side stream still changes."""
    place = Place()
    place.state.step_aside()
    how: Any = {"around": Surroundings(), "accelerator": place.accelerator}
    image = context_switch.stage(place.state, step=1, **how)
    torch.sim.synchronize()
    back: State = context_switch.restore(image, **how)
    return back.is_after(1)


def is_imaged() -> bool:
    """Make an image in the slab of a state that a side stream still changes, as a resident does."""
    place, told = Place(), threading.Event()
    work: Any = SimpleNamespace(
        slab=place.slab,
        watch=None,
        accelerator=place.accelerator,
        state=place.state,
        around=Surroundings(),
        step=1,
        job=None,
        is_rank=False,
        ranked={},
        say=lambda *what, **more: told.set(),
    )
    images = Images(work)
    place.state.step_aside()
    images.put()
    assert told.wait(30)
    assert images.lies is not None
    return place.holds(images.lies.layout, 1)


def has_no_work_after_its_slice() -> bool:
    """Pause between slices: what the task began on the device is done when it says so."""
    place, is_idle = Place(), list[bool]()
    reached = torch.Event("sim")

    def say(what: str, **more: Any) -> None:
        is_idle.append(what != "paused" or reached.query())

    work: Any = mock.MagicMock(
        accelerator=place.accelerator, wishes={"yield"}, member=None, ending=None, say=say
    )
    work.reported_s = 0.0
    place.state.step()
    torch.sim.current_stream().record_event(reached)
    with (
        mock.patch.object(resident_orders, "wait_for_seat"),
        mock.patch.object(resident_orders.time, "monotonic", return_value=0.0),
        mock.patch.object(resident_orders.progress, "report"),
    ):
        resident_orders.pause(work)
    return is_idle == [True]


def gives_its_turn_away() -> bool:
    """Let a rank's state leave while a side stream still changes it."""
    place = Place()
    offload = RankOffload(place.accelerator)
    offload.note(place.state.parts)
    place.state.step_aside()
    offload.leave([])
    offload.enter()
    return place.state.is_after(1)


GUARDS: dict[str, Callable[[], bool]] = {
    "accelerator, synchronize: self.module.synchronize(self.device)": is_staged,
    "swap, leave: self.accelerator.synchronize()": gives_its_turn_away,
    "images, _captured: work.accelerator.synchronize()": is_imaged,
    "orders, pause: work.accelerator.synchronize()": has_no_work_after_its_slice,
    "context_switch, stage: accelerator.synchronize()": is_staged,
    # the last user of memory, before it is filled; and what comes back, before the job goes on
    "offload, __call__: self.stream.wait_stream(self.accelerator.current_stream())": leaves,
    "offload, __exit__: self.stream.synchronize()": leaves,
    "staging, join: self._done.wait()": ends_its_image,
    # copies on the device: before they leave, until they have left, until the image counts
    "staging, _leave_device: self.accelerator.current_stream().synchronize()": goes_on,
    "staging, _leave_device: source.record_stream(side)": goes_on_and_copies_last,
    "staging, _leave_device: side.record_event()": goes_on,
    "staging, _leave_device: event.synchronize()": goes_on_without_room,
    "staging, _copy_later: event.synchronize()": goes_on,
    # the job's work, before its state is brought; each storage, before it counts as brought
    "staging, _brought_from_device: side.wait_stream(self.accelerator.current_stream())": leaves,
    "staging, _brought_from_device: side.record_event()": leaves,
    "staging, _brought_from_device: event.synchronize()": leaves,
}
FOUND = found_waits()


def test_every_wait_of_the_device_code_has_a_guard() -> None:
    assert sorted(FOUND) == sorted(GUARDS)


@pytest.mark.parametrize("case", dict.fromkeys(GUARDS.values()), ids=lambda case: case.__name__)
def test_outcome_is_right_with_every_wait(case: Callable[[], bool]) -> None:
    assert case()


@pytest.mark.parametrize("place", GUARDS)
def test_outcome_is_wrong_without_a_wait(place: str) -> None:
    with without(FOUND[place]):
        assert not GUARDS[place]()
