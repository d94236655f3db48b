"""Stores the keys and values of a gang in its shared memory: the content of its `torch.distributed`
store.

A change is data, (what, key, ...), so that several hosts can apply the changes in the same order
(`workers.ranks.host_bridge`). In a gang over several hosts every change comes from the bridge,
which stores the answer for the asking rank beside the content. Reading needs no lock.
"""

from __future__ import annotations

import marshal
from typing import Any

from workers.ranks.shared_memory import aligned
from workers.ranks.turns import Turns, Wait

#: ("set", key, value), ("add", key, amount), ("append", key, value), ("delete", key),
#: ("compare_set", key, expected, desired); values are bytes.
Change = tuple[Any, ...]

# Words of the shared table's head that say where the content lies.
_PLACE, _BASE, _ROOM, _VERSION = 16, 17, 18, 19


class Keys:
    """A process's view of the keys and values."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def read(self) -> dict[str, bytes]:
        """Return a consistent copy of the content."""
        content: dict[str, bytes] = self._read()[0]
        return content

    def answers(self) -> dict[int, tuple[int, Any]]:
        """Return for each rank the number of its last change through the bridge, and the result."""
        answers: dict[int, tuple[int, Any]] = self._read()[1]
        return answers

    def change(self, change: Change, asked: tuple[int, int] | None = None) -> Any:
        """Apply a change and return its result.

        `asked` is (rank, number of its change) if a rank asked through the bridge.
        """
        with self.turns.board():
            content, answers = self._read()
            answer = _changed(content, *change)
            if asked is not None:
                answers[asked[0]] = asked[1], answer
            self._write(marshal.dumps((content, answers)))
            self.turns.ready(Wait.STORE)
        return answer

    def _read(self) -> tuple[dict[str, bytes], dict[int, tuple[int, Any]]]:
        """Read without a lock. Read again if a change came in between: a change writes to the other
        half.
        """
        words, arena = self.turns.words, self.turns.arena
        while True:
            version, place = words[_VERSION], words[_PLACE]
            if not place:
                return {}, {}
            size = int.from_bytes(arena.read(place, 8), "little")
            data = arena.read(place + 8, size)
            if (version, place) == (words[_VERSION], words[_PLACE]):
                content, answers = marshal.loads(data)
                return content, answers

    def _write(self, data: bytes) -> None:
        """Write to the half that does not hold the current content."""
        words, arena, size = self.turns.words, self.turns.arena, len(data) + 8
        if size > words[_ROOM]:
            words[_ROOM] = max(4096, aligned(2 * size))
            words[_BASE] = arena.take_land(2 * words[_ROOM])
        base = words[_BASE]
        place = base + words[_ROOM] if words[_PLACE] == base else base
        arena.write(place, len(data).to_bytes(8, "little") + data)
        words[_PLACE] = place
        words[_VERSION] += 1


def _changed(content: dict[str, bytes], what: str, key: str, *with_: Any) -> Any:
    """Make one change in place and return the answer for its caller."""
    match what:
        case "set":
            content[key] = with_[0]
        case "add":
            content[key] = str(int(content.get(key, b"0")) + with_[0]).encode()
            return int(content[key])
        case "append":
            content[key] = content.get(key, b"") + with_[0]
        case "delete":
            return content.pop(key, None) is not None
        case "compare_set":
            expected, desired = with_
            if content.get(key, b"") == expected:
                content[key] = desired
            return content.get(key, expected)
    return None
