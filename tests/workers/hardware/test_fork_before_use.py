"""The processes that fork residents and ranks never use a device: a fork after it could not."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.workers.conftest import ROOT

_SPY = """
import json, os, sys
import torch

called = []

def watch(module, name):
    stock = getattr(module, name)
    def spied(*arguments, **named):
        called.append(f"{module.__name__}.{name}")
        return stock(*arguments, **named)
    setattr(module, name, spied)

kinds = [torch.cuda, *([torch.sim] if hasattr(torch, "sim") else [])]
for module in kinds:
    for name in ("is_available", "device_count", "_lazy_init"):
        watch(module, name)
for name in ("is_available", "device_count"):
    watch(torch.accelerator, name)

from workers import zygote
from workers.hardware.accelerator import default_generators, device_types

zygote.import_what_jobs_need()
import workers.ranks.process_group, workers.residents.remote_ranks
types, generators = device_types(), list(default_generators())
looked = {**vars(torch.cuda)}["_initialized"], list(called)
"""
_IN_A_FORK = """
pid = os.fork()
if not pid:
    try:
        ok = torch.ones(3, device="sim").sum().item() == 3
    finally:
        os._exit(0 if ok else 1)
forked = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def _said(code: str, **environment: str) -> list[object]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, **environment},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    found: list[object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_zygote_asks_no_device_module_before_it_forks() -> None:
    said = _said(_SPY + "print(json.dumps([types, generators, *looked]))")
    assert said == [["cpu"], [], False, []]


@pytest.mark.sim
def test_zygote_on_a_host_with_accelerators_can_fork_users_of_them() -> None:
    code = _SPY + _IN_A_FORK + "print(json.dumps([types, generators, *looked, forked]))"
    assert _said(code, SIM_DEVICES="2") == [["cpu", "sim"], [], False, [], 0]
