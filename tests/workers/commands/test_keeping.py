"""When an image of a command is due, and when it has the processes too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.workers.starts import start_of
from workers.commands import runner
from workers.commands.image_keeping import Keeping
from workers.commands.runner import Stub
from workers.commands.stored_processes import AdoptedProcess
from workers.hardware.cuda_checkpoint import TreeMemory


@pytest.fixture
def stub():
    """A stub whose command runs, with an image due each second."""
    stub = Stub(wire=None, bulk=None, trust=None, slab=None)
    of_spec = {"checkpoint_every_s": 1.0}
    stub.start = start_of({"command": ["x"]}, of_spec=of_spec, stores_processes=True)
    stub.processes, stub.is_seated, stub.held = [AdoptedProcess(1001)], True, set()
    stub.keeping = Keeping(stub, None)
    stub.keeping.saved_s = -1e9
    return stub


def test_image_is_due_by_time_until_the_command_is_told_to_end(stub):
    assert stub.keeping.due_in_s() < 0
    stub.is_stopped = True
    assert stub.keeping.due_in_s() > 0
    stub.wishes = {"save"}
    assert stub.keeping.due_in_s() == 0


@pytest.mark.parametrize("doubt", ["refused", "damaged"])
def test_processes_that_could_not_be_stored_are_tried_again_by_order_or_pause_only(
    stub, doubt, monkeypatch
):
    monkeypatch.setattr(runner, "tell_owner", lambda told: None)
    keeping = stub.keeping
    stub.tell_not_stored("a terminal is open in it", is_lasting=False)
    assert keeping.may_have_processes()
    if doubt == "refused":
        stub.tell_not_stored("process 2 has a file of another host")
    else:
        stub.start = replace(stub.start, dump_damaged=True)
    assert not keeping.may_have_processes()
    keeping.is_wished = True
    assert keeping.may_have_processes()
    keeping.is_wished, stub.held = False, {"pause"}
    assert keeping.may_have_processes()


class Stood:
    """A tree whose first process ends by itself just before it would be stopped."""

    stopped_before = frozenset()

    def __init__(self):
        self.is_frozen = False

    def stands(self, pid):
        return self.is_frozen

    def pids(self):
        return [1001]

    def freeze(self, within_s):
        self.is_frozen = True

    def thaw(self):
        self.is_frozen = False


def test_command_that_ends_as_it_is_paused_ends_in_its_slot(stub, monkeypatch):
    said = []
    monkeypatch.setattr(stub, "say", lambda what, **more: said.append(what))
    monkeypatch.setattr(runner, "reaped", lambda: [(1001, 0)])
    stub.tree, stub.devices, stub.wishes = (
        Stood(),
        TreeMemory.found("cpu", may_go_on=lambda: True),
        {"pause"},
    )
    stub._mind_orders()
    assert (stub.status, stub.is_seated, stub.held) == (0, True, set())
    assert not stub.tree.is_frozen
    assert said == []


def test_first_process_that_has_ended_is_not_stored_and_told(stub, monkeypatch):
    told = []
    monkeypatch.setattr(runner, "tell_owner", told.append)
    stub.keeping.has_beside = True
    stub.tree, stub.devices = Stood(), TreeMemory.found("cpu")
    assert stub.processes_to_store() == {"first_pid": 1001, "pids": [1001]}
    stub.processes[0].returncode = 0
    assert stub.processes_to_store() == {"bound_because": "its first process had ended"}
    assert "its first process had ended" in told[0]


@pytest.mark.parametrize("stands", [True, False])
def test_image_whose_processes_are_lost_is_stored_only_if_the_command_stands(
    stub, monkeypatch, stands
):
    said = []
    monkeypatch.setattr(runner, "tell_owner", lambda told: None)
    monkeypatch.setattr(stub, "say", lambda word, **more: said.append(more["bound_because"]))
    stub.tree, stub.devices = Stood(), TreeMemory.found("cpu")
    stub.tree.is_frozen, stub.held, stub.keeping.stage = stands, {"image"}, "told"
    stub.keeping.dumped("CRIU cannot")
    assert said == ["CRIU cannot"] * stands
    assert (stub.keeping.stage, stub.held) == (("told", {"image"}) if stands else ("", set()))
