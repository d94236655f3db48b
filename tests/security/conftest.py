"""The fixtures of the API's tests, for attacks on it, and the workers' warm zygotes."""

from __future__ import annotations

from tests.app.conftest import app, as_, red, submitted, world
from tests.workers.conftest import warm_zygotes

__all__ = ["app", "as_", "red", "submitted", "warm_zygotes", "world"]
