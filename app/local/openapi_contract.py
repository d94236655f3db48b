"""The API's contract as a file: `python -m app.local.openapi_contract` writes docs/openapi.json.

It refuses to write a change under /v1 that could break clients of the previous file.  With
`--break` it writes anyway, and the commit should say why.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

from app.local import openapi_compatible
from app.main import create_app

PLACE = Path(__file__).parents[2] / "docs" / "openapi.json"
STABLE = "/v1/"


@functools.cache
def current() -> str:
    """Return the OpenAPI document of this code, in the form of the file."""
    return json.dumps(create_app().openapi(), indent=1, ensure_ascii=False) + "\n"


def breaks() -> list[str]:
    """Return the changes that could break a client of the written document."""
    if not PLACE.exists():
        return []
    before: dict[str, Any] = json.loads(PLACE.read_text(encoding="utf-8"))
    return openapi_compatible.breaks(before, json.loads(current()), under=STABLE)


def main(arguments: list[str]) -> int:
    found = breaks()
    for told in found:
        sys.stderr.write(f"{told}\n")
    if found and "--break" not in arguments:
        sys.stderr.write(
            "Nothing was written: the change could break clients of /v1. --break writes it.\n"
        )
        return 1
    PLACE.write_text(current(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
