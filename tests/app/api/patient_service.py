"""The API for `uvicorn`, which waits for Redis: no call of a test goes by uncounted."""

from __future__ import annotations

from app.identity import rate_limits
from app.main import app

__all__ = ["app"]

rate_limits.TIMEOUT_S = 30.0
