"""Gangs for the tests of splicing: one warm process that forks them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.splice import WarmProcess

JSON = dict[str, Any]

FOLDER = str(Path(__file__).parent / "ddp")


class Gangs(WarmProcess):
    """A host of gangs whose code lies in tests/workers/ddp."""

    def tell(self, entry: str, **gang: Any) -> list[JSON]:
        """What came of each rank, whatever it was."""
        return self.run(entry, **{"path": FOLDER, "timeout_s": 60.0, **gang})

    def right(self, entry: str, **gang: Any) -> list[JSON]:
        """The same, of a gang that must not fail."""
        stories = self.tell(entry, **gang)
        for story in stories:
            assert "losses" in story, story.get("trace", story)
        return stories

    def errors(self, entry: str, **gang: Any) -> list[str]:
        """How each rank ended, of a gang that fails."""
        return [story.get("error", "") for story in self.tell(entry, **gang)]


def bits(stories: list[JSON]) -> list[tuple[str, Any]]:
    """What must not depend on the seats: per rank its tensors and its losses."""
    return [(story.get("hash", ""), story["losses"]) for story in stories]
