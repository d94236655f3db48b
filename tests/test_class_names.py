"""No two classes of the product have one name."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent


def classes() -> Iterator[str]:
    for package in ("app", "workers"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    yield node.name


def test_class_name_is_used_once():
    assert [name for name, count in Counter(classes()).items() if count > 1] == []
