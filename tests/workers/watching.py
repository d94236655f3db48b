"""The one watch of the tests' process: memory is watched by whoever came first, and nobody else."""

from __future__ import annotations

import pytest

from workers.hardware.dirty_pages import Unwatchable, Watch

try:
    WATCH: Watch | None = Watch()
except Unwatchable:
    WATCH = None

needs_watch = pytest.mark.skipif(WATCH is None, reason="this kernel cannot watch memory")
