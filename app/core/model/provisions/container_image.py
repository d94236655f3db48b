"""Reads the `image` of a command: the container image whose files are its root.

An administrator registers the container image as a mount of the sort "image"
(`provisions.mounts`); a host that can show it offers `image:NAME`.
"""

from __future__ import annotations

from app.core.model.fields import NAME, NAME_RULE, Fields

PREFIX = "image:"  # prefix of the images among what a device offers


def need_of_image(name: str) -> str:
    """Return what a device must offer so that a task can run in the container image."""
    return f"{PREFIX}{name}"


def read_image(fields: Fields, *, run_kind: str, world_size: int, is_session: bool) -> str | None:
    """Return the name of the container image; None if the task has none, or if the field is
    wrong.
    """
    name: str | None = fields.text(
        "image", None, NAME, f"the name of a container image: {NAME_RULE}"
    )
    if name is None:
        return None
    why = ""
    if run_kind != "command":
        why = f"a {run_kind} runs in the Python of the platform; only a command can have an image"
    elif world_size > 1:
        why = f"ranks begin in the Python of the platform; this task has {world_size} of them"
    elif is_session:
        why = "the end of a terminal runs in the Python of the platform; leave out session"
    if why:
        fields.fault("image", why)
    return name
