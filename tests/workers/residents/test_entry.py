"""What the process of a task does before its code runs."""

from __future__ import annotations

import sys

from workers.residents import entry


def own():
    return [name for name in sys.modules if name.partition(".")[0] in ("app", "workers")]


def test_forked_process_has_our_modules_among_the_last_loaded(monkeypatch):
    before = own()
    entry.put_own_modules_last()
    assert list(sys.modules)[-len(before) :] == before
    monkeypatch.setitem(sys.modules, "workers.imported_later", sys)
    monkeypatch.setitem(sys.modules, "worker", sys)  # is called like ours, and is not
    assert entry._own_modules() == ["workers.imported_later", *reversed(before)]
