"""No two classes of the product have one name, but those that are listed here.

The list only shrinks: a name that is used once is taken off it.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent

USED_TWICE = set(
    """
    Alive Event Order
    """.split()  # noqa: SIM905
)


def classes() -> Iterator[str]:
    for package in ("app", "workers"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    yield node.name


def test_class_name_is_used_once_unless_it_is_listed():
    twice = {name for name, count in Counter(classes()).items() if count > 1}
    assert twice == USED_TWICE
