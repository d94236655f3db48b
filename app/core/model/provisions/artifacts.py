"""Names the parts of a command's working folder that are kept as its artifacts when it ends."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from app.core.model.fields import Fields
from app.core.units import counted

#: Folders that are kept if the descriptor names none, as far as the command wrote to them.
USUAL_FOLDERS = (
    "artifacts",
    "out",
    "output",
    "outputs",
    "results",
    "runs",
    "checkpoints",
    "lightning_logs",
)
MOST_PATHS = 32

_PART = r"(?!\.\.?(?:/|$))[^/\x00-\x1f\x7f]+"
PATH = re.compile(rf"(?=.{{1,255}}$){_PART}(?:/{_PART})*")
_RULE = "a relative path in the working folder, without '.' and '..', such as out"


def read_artifacts(fields: Fields, *, run_kind: str) -> tuple[str, ...]:
    paths = fields.texts("artifacts", PATH, _RULE)
    if len(paths) > MOST_PATHS:
        fields.fault("artifacts", f"must list at most {MOST_PATHS} paths; got {len(paths)}")
    if paths and run_kind != "command":
        told = f"only a command has a working folder whose files are kept, not a {run_kind}"
        fields.fault("artifacts", f"{told}; name its `outputs`")
    return paths


def dropped_told(dropped: Mapping[str, Any]) -> str:
    """Say which files of a command were not kept (`messages.Finished.dropped`); "" if none."""
    if not dropped:
        return ""
    files, first = dropped["files"], dropped["first"]
    more = f" and {files - len(first):,} more" if files > len(first) else ""
    size = f"{dropped['bytes']:,} bytes"
    told = f"Not kept: {counted(files, 'file')} ({size}): {', '.join(first)}{more}."
    return f"{told} To keep such files, name their folders in `artifacts`."
