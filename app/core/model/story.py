"""Keeps the last events of a machine that decides, so that it can tell what happened to a task."""

from __future__ import annotations

from collections import deque

KEPT = 1000  # events that a story remembers


class Story:
    """Remembers the last events of a machine: when they happened, to which task, and what it was.

    Words are names that our own code defines, and numbers. Nothing that a tenant wrote belongs
    here, as stories go to logs. A line becomes text only when somebody asks for it.
    """

    __slots__ = ("_events",)

    def __init__(self) -> None:
        self._events = deque[tuple[int, str, tuple[object, ...]]](maxlen=KEPT)

    def note(self, at_us: int, task: str, *words: object) -> None:
        self._events.append((at_us, task, words))

    def tasks(self) -> list[str]:
        """Return the tasks that have events, each once, the one with the latest event last."""
        return list(dict.fromkeys(task for _, task, _ in reversed([*self._events])))[::-1]

    def of(self, task: str) -> list[str]:
        """Return a line for each event of the task, the oldest first.

        Any thread may call it while the machine works, as the watchdog does.
        """
        return [
            f"{at_us / 1e6:.6f} s  {task}  {' '.join(_text(word) for word in words if word != '')}"
            for at_us, whose, words in [*self._events]
            if whose == task
        ]


def _text(word: object) -> str:
    if isinstance(word, tuple):
        return f"{_text(word[0])}({', '.join(map(_text, word[1:]))})"
    return word.__name__ if isinstance(word, type) else str(word)
