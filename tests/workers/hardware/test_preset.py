"""What changes bits travels with an image; it is made the same again where it can, else said."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.workers.conftest import ROOT
from workers.hardware.preset import differences, fingerprint


def test_a_fingerprint_is_json_and_like_itself() -> None:
    found = fingerprint()
    assert json.loads(json.dumps(found)) == found
    assert differences(found, fingerprint()) == []


def test_differences_are_said_one_by_one() -> None:
    before = {"threads": 2, "torch": "2.13.0", "MKL_CBWR": None, "gpu": "H200"}
    now = {"threads": 1, "torch": "2.13.0", "MKL_CBWR": "COMPATIBLE", "driver": None}
    assert differences(before, now) == [
        "MKL_CBWR: not set where the image was made, COMPATIBLE here",
        "gpu: H200 where the image was made, not set here",
        "threads: 2 where the image was made, 1 here",
    ]


def _fresh(code: str) -> Any:
    """What a fresh process says, since such flags stick to one."""
    lines = ["import json, torch", "from workers.hardware.preset import fingerprint, impose", code]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], stdout=subprocess.PIPE, check=True, cwd=ROOT
    )
    return json.loads(done.stdout)


def test_what_can_be_made_the_same_is_made_the_same() -> None:
    theirs = _fresh(
        """
torch.set_num_threads(2); torch.set_num_interop_threads(3)
torch.use_deterministic_algorithms(True, warn_only=True)
torch.set_default_dtype(torch.float64); torch.set_flush_denormal(True)
torch.set_float32_matmul_precision("medium")
torch.backends.cudnn.benchmark = True; torch.backends.cudnn.conv.fp32_precision = "ieee"
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
torch.backends.cuda.enable_flash_sdp(False)
print(json.dumps(fingerprint()))"""
    )
    here = _fresh(
        f"""
torch.set_num_threads(1)
left = impose(json.loads({json.dumps(theirs)!r}))
print(json.dumps([left, fingerprint()]))"""
    )
    assert here == [[], theirs]


def test_what_cannot_be_made_the_same_is_left_over() -> None:
    left = _fresh(
        """
torch.set_num_interop_threads(1)  # can be set once only
print(json.dumps(impose({**fingerprint(), "interop_threads": 7, "torch": "1.0", "threads": 2})))"""
    )
    assert [text.partition(":")[0] for text in left] == ["interop_threads", "torch"]
