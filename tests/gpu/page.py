"""Write the results of the suite, as JSON and as a page of Markdown."""

from __future__ import annotations

import json
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.gpu.step import Step

JSON = dict[str, Any]
FINE = ("right", "cannot run")


class Writer:
    """Writes both files anew after each step."""

    def __init__(self, folder: Path, kind: str, steps: list[Step]) -> None:
        self.folder, self.kind, self.steps = folder, kind, steps
        self.began = datetime.now(UTC)

    def __call__(self, results: list[JSON], running: str = "") -> None:
        about = {
            "kind": self.kind,
            "began": self.began.isoformat(timespec="seconds"),
            "seconds": round((datetime.now(UTC) - self.began).total_seconds()),
            "machine": f"{platform.node()}, {platform.system()} {platform.release()}",
            "torch": version("torch"),
        }
        whole = {**about, "results": results}
        self._write("results.json", json.dumps(whole, indent=2) + "\n")
        self._write("results.md", self._page(about, results, running))

    def _write(self, name: str, text: str) -> None:
        draft = self.folder / f"{name}.draft"
        draft.write_text(text)
        draft.replace(self.folder / name)

    def _page(self, about: JSON, results: list[JSON], running: str) -> str:
        simulated = self.kind == "sim"
        lines = [f"# Results of the accelerator's suite on {self.kind}", ""]
        if simulated:
            lines += ["**This is a simulated accelerator.** No figure here is a GPU's.", ""]
        lines += [f"* {name}: {value}" for name, value in about.items()]
        lines += ["", "| step | outcome | seconds | limit, s |", "|---|---|---|---|"]
        found = {result["step"]: result for result in results}
        for step in self.steps:
            result = found.get(step.name)
            now = "running" if step.name == running else "not run"
            outcome = result["outcome"] if result else now
            seconds = result["seconds"] if result else ""
            lines.append(f"| {step.name} | {outcome} | {seconds} | {step.limit_s} |")
        for step in self.steps:
            if result := found.get(step.name):
                lines += ["", f"## {step.name}", "", f"{step.about}", "", *_described(result)]
        return "\n".join(lines) + "\n"


def _described(result: JSON) -> list[str]:
    lines = [f"Outcome: {result['outcome']}, after {result['seconds']} s."]
    figures = result.get("figures", {})
    if figures:
        lines += ["", "| figure | value |", "|---|---|"]
        lines += [f"| {name} | {_value(value)} |" for name, value in figures.items()]
    if result.get("told"):
        lines += ["", "```", result["told"].strip(), "```"]
    return lines


def _value(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def told_of(result: JSON) -> str:
    """Return one line about a step: its outcome, and its first words about what went wrong."""
    told = (result.get("told") or "").strip().splitlines()
    return f"{result['outcome']}, {result['seconds']} s" + (f": {told[-1]}" if told else "")
