"""Decides whether a test of the sandbox may be skipped on a machine that lacks a layer of it."""

from __future__ import annotations

SETTING = "ROUNDHOUSE_MISSING_LAYERS"


def failure_of_skip(reason: str, named: str) -> str | None:
    """Return why a test may not be skipped for `reason`; None if the setting allows the skip.

    `named` is the value of the setting: words with commas between them.  A skip is allowed if its
    reason contains one of the words.
    """
    words = [word.strip().lower() for word in named.split(",")]
    if any(word and word in reason.lower() for word in words):
        return None
    return (
        f"The test was skipped ({reason}), so nothing is known of its attack. If this machine "
        f"lacks the layer for good, name a word of the reason in {SETTING}, as in "
        f"{SETTING}=files,memory."
    )
