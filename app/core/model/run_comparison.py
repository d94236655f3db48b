"""Sets runs side by side: what was asked for, and what came of it, a row for each field.

The command and the pages show the same rows.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from app.core.model.fields import JSON
from app.core.model.provisions.lots import INDEX_VARIABLE

RUNS_MOST = 20

#: Fields of a task's descriptor that name it, or stand for other tasks.
_NAMES = ("name", "needs")


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """Describes one task: its heading, its descriptor, and what came of it.

    `values` are those that the matrix or search of a lot has for it, `metrics` the newest ones.
    """

    id: str
    heading: str
    descriptor: JSON
    values: JSON
    phase: str
    step: int
    held_us: int
    metrics: JSON

    def fields(self) -> JSON:
        """Return what the run was asked to do and what came of it, by dotted field: `params.lr`,
        `values.seed`, `metrics.loss`.

        A value of a lot that is also a parameter of the same name is left out.
        """
        asked = {key: value for key, value in self.descriptor.items() if key not in _NAMES}
        params, env = asked.get("params") or {}, asked.get("env") or {}
        asked["env"] = {key: env[key] for key in env if key != INDEX_VARIABLE}
        values = {key: it for key, it in self.values.items() if params.get(key) != it}
        came = {
            "phase": self.phase,
            "step": self.step,
            "held_s": self.held_us / 1e6,
            "metrics": self.metrics,
        }
        return dict(_flat("", {**asked, "values": values, **came}))


def _flat(at: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key in value:
            yield from _flat(f"{at}.{key}" if at else str(key), value[key])
    else:
        yield at, value


def compared(runs: Sequence[ComparedRun], *, alike: bool = False) -> list[JSON]:
    """Return a row {"field", "values"} for each field that differs, with a value for each run and
    null where a run lacks the field; with `alike` for all fields.
    """
    found = [run.fields() for run in runs]
    rows = []
    for name in dict.fromkeys(name for fields in found for name in fields):
        values = [fields.get(name) for fields in found]
        if alike or any(value != values[0] for value in values):
            rows.append({"field": name, "values": values})
    return rows


def as_csv(runs: Sequence[ComparedRun], rows: Sequence[JSON]) -> str:
    """Return the rows as CSV, the first line with the headings."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["field", *(run.heading for run in runs)])
    writer.writerows([row["field"], *map(as_text, row["values"])] for row in rows)
    return text.getvalue()


def as_text(value: Any) -> str:
    """Return a text as it is, nothing for null, and any other value as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
