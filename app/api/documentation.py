"""Serves the documentation: its pages as Markdown under /docs/, and /llms.txt as their index.

`/llms.txt` is for language models (https://llmstxt.org). It is made from the index of the pages,
docs/README.md, so that a page stands in it as soon as it stands there.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from starlette.staticfiles import StaticFiles

IN_CLONE = Path(__file__).parents[2] / "docs"
IN_PACKAGE = Path(sysconfig.get_path("data")) / "share" / "roundhouse" / "docs"
FOLDER = IN_CLONE if IN_CLONE.is_dir() else IN_PACKAGE
INDEX = "README.md"
PREFIX = "/docs"
#: A model that has little room may leave out the links below this heading.
OPTIONAL = "Optional"
_OPTIONAL_IN_INDEX = "Change"

_OF_SERVICE = """\
* [OpenAPI](/openapi.json): the operations of the API, with the scope that each needs.
* [Problems](/problems): what each type of error means, and what to do.
* [Readiness](/readyz): whether the parts of the service work."""

_SECTION = re.compile(r"^## (?:\d+\. )?(.+)$", re.MULTILINE)
# The path of a page, and the sentence behind the colon if one follows.
_LINK = re.compile(r"\[[^\[\]]+\]\(([^()#:\s]+)\.md\)(?:: ([^\[.]*)\.)?")


def mount(app: FastAPI) -> None:
    """Add /llms.txt, and the pages if this installation has them."""
    about = f"# {app.title}\n\n> {app.summary}\n\n{app.description}"
    text = "\n\n".join([about, f"## The service\n\n{_OF_SERVICE}", *_sections()]) + "\n"

    async def show_llms_txt() -> PlainTextResponse:
        return PlainTextResponse(text)

    app.add_api_route("/llms.txt", show_llms_txt, include_in_schema=False)
    if FOLDER.is_dir():
        app.mount(PREFIX, StaticFiles(directory=FOLDER), name="documentation")


def _sections() -> Iterator[str]:
    """Yield the index of the pages, section by section, without links to files of the clone."""
    if not FOLDER.is_dir():
        return
    _, *parts = _SECTION.split((FOLDER / INDEX).read_text(encoding="utf-8"))
    for title, text in zip(parts[::2], parts[1::2], strict=True):
        links = [
            f"* [{_heading(path)}]({PREFIX}/{path}.md)" + (f": {_line(says)}." if says else "")
            for path, says in _LINK.findall(text)
            if not path.startswith("../")
        ]
        if links:
            heading = OPTIONAL if title == _OPTIONAL_IN_INDEX else title
            yield f"## {heading}\n\n" + "\n".join(links)


def _heading(path: str) -> str:
    with (FOLDER / f"{path}.md").open(encoding="utf-8") as page:
        return page.readline().removeprefix("# ").strip()


def _line(text: str) -> str:
    return " ".join(text.split())
