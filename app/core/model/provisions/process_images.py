"""Tells which commands take their processes along when they leave a device, and where these can
run.

A device whose start-up trial of CRIU succeeded offers OFFER, and OFFER with the mark of its host.
Stored processes have chosen code for their processor and driver. They can be restored only on hosts
with the same mark, where these are equal. The device worker reports for each command whether its
processes can be stored. If not, the reason follows a colon.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import lru_cache

from app.core.model.checkpoints.migration import MOVABLE
from app.core.model.device_choice import choice_in, text_of
from app.core.model.provisions.notice import NEED as NOTICE

OFFER = "command-images"  # the offer that a device makes if its trial of CRIU passes


def marked(mark: str) -> str:
    """Return the offer of devices with this mark."""
    return f"{OFFER}:{mark}"


def mark_in(offers: Iterable[str]) -> str:
    """Return the marked offer among what a device offers; "" without one."""
    return next((offer for offer in offers if offer.startswith(f"{OFFER}:")), "")


@lru_cache(maxsize=4096)
def choice_where_it_goes_on(choice: str, offer: str) -> str:
    """Return the text of a choice whose devices offer this too."""
    asked = choice_in(choice)
    return text_of(replace(asked, needs=tuple(sorted({*asked.needs, offer}))))


def cannot_move(run_kind: str, capabilities: Collection[str]) -> bool:
    """Return True if the task is known to lose its work on another device, as `movement` says."""
    is_known = run_kind == "command" and bool(capabilities)
    return run_kind == "function" or (is_known and not {MOVABLE, NOTICE} & {*capabilities})


def movement(run_kind: str, capabilities: Collection[str], bound_because: str) -> str:
    """Return a sentence on what happens to the task if it leaves its device; "" if not known yet.

    `bound_because` is why the processes of a command cannot go to another device.
    """
    if run_kind == "function":
        return "It cannot move: on another device it runs again from its beginning."
    if not capabilities:
        return ""
    if run_kind != "command":
        return f"It can move between two {_PARTS.get(run_kind, 'steps')}, with its state."
    if MOVABLE in capabilities:
        return "It can move at any moment: its processes go on elsewhere where they stood."
    if NOTICE in capabilities:
        return "It can move: it is told to save its state, and begins again in its kept folder."
    because = f": {bound_because}" if bound_because else ""
    return f"It cannot move: on another device it begins again in its kept folder{because}."


_PARTS = {"graph": "nodes"}
