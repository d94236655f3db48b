"""The trial of a device's start: real sandboxes with all layers, and the real CRIU."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from workers.criu import enter, probe
from workers.criu.probe import CannotMove, Trial, check_rights
from workers.process.isolation.sandbox import WALLS

ALL = list(WALLS)
STATUS = "Uid:\t0\t0\t0\t0\nCapEff:\t{held:016x}\nSeccomp:\t{filter}\n"
EVERY = (1 << 41) - 1

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root may store processes")


def test_root_with_all_rights_and_no_filter_may_store_processes():
    check_rights(STATUS.format(held=EVERY, filter=0), ALL)


@pytest.mark.parametrize("name", [name for name in enter.RIGHTS if name != "SYS_RESOURCE"])
def test_missing_right_is_named(name):
    held = EVERY & ~(1 << enter.RIGHTS[name])
    with pytest.raises(CannotMove, match=f"lacks CAP_{name}$"):
        check_rights(STATUS.format(held=held, filter=0), ALL)


@pytest.mark.parametrize("name", WALLS)
def test_missing_layer_is_named(name):
    others = [wall for wall in WALLS if wall != name]
    with pytest.raises(CannotMove, match=f"no layer '{name}'"):
        check_rights(STATUS.format(held=EVERY, filter=0), others)


def test_filter_above_the_worker_is_named():
    with pytest.raises(CannotMove, match="system call filter"):
        check_rights(STATUS.format(held=EVERY, filter=2), ALL)


def test_worker_that_is_not_root_is_named():
    status = STATUS.format(held=EVERY, filter=0).replace("Uid:\t0\t0", "Uid:\t0\t1000")
    with pytest.raises(CannotMove, match="not root"):
        check_rights(status, ALL)


@root_only
def test_process_in_all_layers_is_stored_and_restored(criu, room):
    found = Trial(str(criu), room, ALL).run()
    assert found == probe.Found(version=found.version)
    assert found.version >= "4.2.1"
    assert not list(room.scratch.iterdir())


@root_only
def test_program_that_always_fails_is_told_with_what_it_said(room, tmp_path):
    found = Trial(str(_broken(tmp_path, "echo no such kernel >&2; exit 3")), room, ALL)
    assert found.run() == probe.Found(missing="dump: no such kernel")


@root_only
def test_program_that_hangs_is_ended_in_time(room, tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "TRY_S", 1.0)
    began = time.monotonic()
    found = Trial(str(_broken(tmp_path, "exec sleep 100")), room, ALL).run()
    assert found == probe.Found(missing="the trial took longer than 1 s")
    assert time.monotonic() - began < 60  # and not after its 100 s


@root_only
def test_trial_that_is_ended_before_it_begins_starts_nothing(criu, room):
    trial = Trial(str(criu), room, ALL)
    trial.end()
    assert trial.run() == probe.Found(missing="the device worker ends")


def _broken(folder: Path, does: str) -> Path:
    """Make a program that knows its version and nothing else."""
    file = folder / "code" / "criu"
    version = 'if test "$1" = --version; then echo Version: 9.9; exit; fi'
    file.write_text(f"#!/bin/sh\n{version}\n{does}\n")
    file.chmod(0o755)
    return file
