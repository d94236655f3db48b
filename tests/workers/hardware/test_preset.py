"""What changes bits travels with an image; it is made the same again where it can, else said."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.workers.conftest import ROOT
from workers.hardware import accelerator
from workers.hardware.accelerator import Accelerator
from workers.hardware.preset import differences, fingerprint

CPU = Accelerator("cpu")


def test_fingerprint_survives_json() -> None:
    found = fingerprint(CPU)
    assert json.loads(json.dumps(found)) == found
    assert differences(found, fingerprint(CPU)) == []


@pytest.mark.parametrize("kind", accelerator._LIBRARIES)
def test_versions_of_libraries_are_told_whether_or_not_they_are_there(kind: str) -> None:
    told = accelerator._LIBRARIES[kind]()
    assert {"driver", "cuda", "cudnn"} <= told.keys()


def test_differences_are_listed_one_by_one() -> None:
    before = {"threads": 2, "torch": "2.13.0", "MKL_CBWR": None, "accelerator_name": "H200"}
    now = {"threads": 1, "torch": "2.13.0", "MKL_CBWR": "COMPATIBLE", "driver": None}
    assert differences(before, now) == [
        "MKL_CBWR: not set where the image was made, COMPATIBLE here",
        "accelerator_name: H200 where the image was made, not set here",
        "threads: 2 where the image was made, 1 here",
    ]


def _fresh(code: str) -> Any:
    """What a fresh process says, since such flags stick to one."""
    lines = [
        "import json, torch",
        "from workers.hardware.accelerator import Accelerator",
        "from workers.hardware.preset import fingerprint, impose",
        "CPU = Accelerator('cpu')",
        code,
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], stdout=subprocess.PIPE, check=True, cwd=ROOT
    )
    return json.loads(done.stdout)


def test_differences_that_can_be_set_are_set() -> None:
    theirs = _fresh(
        """
torch.set_num_threads(2); torch.set_num_interop_threads(3)
torch.use_deterministic_algorithms(True, warn_only=True)
torch.set_default_dtype(torch.float64); torch.set_flush_denormal(True)
torch.set_float32_matmul_precision("medium")
torch.backends.cudnn.benchmark = True; torch.backends.cudnn.conv.fp32_precision = "ieee"
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
torch.backends.cuda.enable_flash_sdp(False)
print(json.dumps(fingerprint(CPU)))"""
    )
    here = _fresh(
        f"""
torch.set_num_threads(1)
left = impose(json.loads({json.dumps(theirs)!r}), CPU)
print(json.dumps([left, fingerprint(CPU)]))"""
    )
    assert here == [[], theirs]


def test_differences_that_cannot_be_set_are_reported() -> None:
    left = _fresh(
        """
torch.set_num_interop_threads(1)  # can be set once only
theirs = {**fingerprint(CPU), "interop_threads": 7, "torch": "1.0", "threads": 2}
print(json.dumps(impose(theirs, CPU)))"""
    )
    assert [text.partition(":")[0] for text in left] == ["interop_threads", "torch"]


def test_default_of_an_accelerator_lets_ordinary_operations_run() -> None:
    """On the CPU too some operations have no deterministic kernel; the default refuses those."""
    found = _fresh(
        """
import warnings
from app.core.model import preset as presets
from workers.hardware.preset import NotTaken, configure

def tried(kind):
    wanted = {"deterministic": presets.defaults(kind)["deterministic"]}
    assert configure(wanted) == wanted
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)
        except RuntimeError as error:
            return str(error)
    return ["deterministic" in str(one.message) for one in said]

print(json.dumps([tried("cuda"), tried("cpu")]))"""
    )
    assert found[0] == [True]
    assert "put_" in found[1]
