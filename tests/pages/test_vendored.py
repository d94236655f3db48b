from __future__ import annotations

import hashlib
import re

from app.pages.views import STATIC

VENDOR = STATIC / "vendor"


def test_every_vendored_script_and_style_is_the_one_that_is_written_down():
    told = (VENDOR / "VENDORED.md").read_text()
    written = dict(re.findall(r"^\| (\S+/\S+) \| ([0-9a-f]{64}) \|", told, re.MULTILINE))
    there = {
        str(path.relative_to(VENDOR)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in VENDOR.glob("*/*")
        if path.suffix in (".js", ".css")
    }
    assert there == written
