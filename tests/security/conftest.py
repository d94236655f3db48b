"""The fixtures of the API's tests, for attacks on it."""

from __future__ import annotations

from tests.app.conftest import app, as_, red, submitted, world

__all__ = ["app", "as_", "red", "submitted", "world"]
