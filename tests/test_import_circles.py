"""No modules of the product import each other in a circle, not even for types alone."""

from __future__ import annotations

import grimp

#: The circles that are left, and why each is. The list only shrinks: a circle that is gone must go
#: from here, too.
LEFT: dict[frozenset[str], str] = {}


def circles(*packages: str) -> set[frozenset[str]]:
    """Return the modules that reach each other by imports, also by those under TYPE_CHECKING."""
    graph = grimp.build_graph(*packages, exclude_type_checking_imports=False, cache_dir=None)
    above = {module: graph.find_upstream_modules(module) for module in graph.modules}
    found = {
        frozenset({module, *(other for other in reached if module in above[other])})
        for module, reached in above.items()
    }
    return {circle for circle in found if len(circle) > 1}


def test_modules_import_each_other_in_no_circle():
    found = circles("app", "workers")
    assert sorted(map(sorted, found - LEFT.keys())) == [], "untie these; do not list them"
    assert sorted(map(sorted, LEFT.keys() - found)) == [], "these are gone: take them from LEFT"


def test_circle_of_imports_for_types_and_inside_functions_is_found(tmp_path, monkeypatch):
    package = tmp_path / "circled"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "apart.py").write_text("from circled import first\n")
    (package / "first.py").write_text("def run():\n    from circled.second import Second\n")
    (package / "second.py").write_text("from circled import third\n")
    (package / "third.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from circled import first\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert circles("circled") == {frozenset({"circled.first", "circled.second", "circled.third"})}
