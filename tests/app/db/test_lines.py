"""The key of a line is named once: table and index agree with it."""

from __future__ import annotations

from app.db import lines
from app.db.models import Line, Task


def test_key_of_a_line_is_the_key_of_its_table() -> None:
    assert [column.name for column in Line.__table__.primary_key] == list(lines.KEY)


def test_index_of_a_line_begins_with_its_key() -> None:
    (index,) = (one for one in Task.__table__.indexes if one.name == "ix_tasks_line")
    named = [getattr(part, "name", str(part)) for part in index.expressions]
    assert named == [*lines.KEY.values(), "priority desc", "submitted_at", "id"]


def test_condition_of_a_line_names_each_part_of_its_key() -> None:
    for of_line, of_task in lines.KEY.items():
        assert f"t.{of_task} = l.{of_line}" in lines.IN_LINE.split(" and ")
