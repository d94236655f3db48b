"""Finds lines of a log with the patterns of rules of retry, in time that no pattern can extend.

RE2 needs time linear in the text. The API refuses patterns whose programs are large; devices look
at the end of a log only, and send the lines that they found with the failure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import re2

from app.core.model.descriptor import Descriptor
from app.core.model.fields import Fault
from app.core.model.provisions.retry import RetryPolicy

#: Instructions. `CUDA error: (out of memory|illegal memory access)` has some 60.
MOST_INSTRUCTIONS = 500
MOST_CHARACTERS = 8 * 1024  # of a log's end, in which patterns are sought
LINE_MOST = 200  # most characters of a found line


class BadPattern(Exception):
    """Raised for a pattern that cannot be run; the text says why."""


@lru_cache(maxsize=256)
def compiled(pattern: str) -> Any:
    """Return the pattern, ready to `search`; raises BadPattern."""
    options = re2.Options()
    options.max_mem, options.log_errors, options.never_capture = 2**20, False, True
    try:
        found = re2.compile(pattern, options)
    except re2.error as error:
        said = error.args[0] if error.args else ""
        why = said.decode("utf-8", "replace") if isinstance(said, bytes) else str(said)
        raise BadPattern(why or "it cannot be read") from error
    if found.programsize > MOST_INSTRUCTIONS:
        size = f"{found.programsize} instructions, at most {MOST_INSTRUCTIONS}"
        raise BadPattern(f"it is too large ({size}); use fewer repetitions")
    return found


def faults(descriptor: Descriptor) -> Iterator[Fault]:
    """Yield a fault for each pattern of a request that cannot be run."""
    for n, task in enumerate(descriptor.tasks):
        for rule_n, rule in enumerate(task.retry.rules):
            try:
                if rule.log:
                    compiled(rule.log)
            except BadPattern as bad:
                told = f"must be a regular expression of RE2: {bad}"
                yield Fault(f"/tasks/{n}/retry/rules/{rule_n}/log", told)


def matched_lines(policy: RetryPolicy, log: Sequence[str]) -> Mapping[str, str]:
    """Return each pattern of the rules that matches, with the newest line that it matches."""
    patterns = {rule.log for rule in policy.rules if rule.log}
    end = list(_end(log)) if patterns else []
    found = {pattern: _newest(pattern, end) for pattern in patterns}
    return {pattern: line for pattern, line in sorted(found.items()) if line}


def _end(log: Sequence[str]) -> Iterator[str]:
    """Yield the last lines, newest first."""
    left = MOST_CHARACTERS
    for line in reversed(log):
        if left <= 0:
            return
        yield line[:left]
        left -= len(line) + 1


def _newest(pattern: str, lines: Iterable[str]) -> str:
    try:
        search = compiled(pattern).search
    except BadPattern:  # the API has refused it, or an island of a newer version allows more
        return ""
    found = next((line for line in lines if search(line)), "")
    return "".join(islice((c if c.isprintable() else " " for c in found), LINE_MOST)).strip()
