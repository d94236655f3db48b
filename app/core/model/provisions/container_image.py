"""Reads the `image` of a command: the container image whose files are its root.

It is the name of an image that an administrator registered as a mount of the sort "image"
(`provisions.mounts`); a host that can show it offers `image:NAME`. Or it names an image of a
registry by its digest (`provisions.registry_image`); a host that fetches from the registry offers
`registry:HOST`.
"""

from __future__ import annotations

import re

from app.core.model.fields import NAME, NAME_RULE, Fields
from app.core.model.provisions import registry_image

PREFIX = "image:"  # prefix of the images among what a device offers
_RULE = f"the name of a container image: {NAME_RULE}; or REGISTRY/NAME@sha256:DIGEST"
_REFERENCE = re.compile(r"[^\s\x00-\x1f]{1,400}")


def need_of_image(name: str) -> str:
    """Return what a device must offer so that a task can run in the container image."""
    image = registry_image.image_of(name)
    return f"{PREFIX}{name}" if image is None else image.need


def read_image(fields: Fields, *, run_kind: str, world_size: int, is_session: bool) -> str | None:
    """Return the name of the container image; None if the task has none, or if the field is
    wrong.
    """
    name = _name(fields)
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


def _name(fields: Fields) -> str | None:
    said = fields.body.get("image")
    pattern = _REFERENCE if isinstance(said, str) and registry_image.is_reference(said) else NAME
    name: str | None = fields.text("image", None, pattern, _RULE)
    if name is not None and pattern is _REFERENCE and (why := registry_image.trouble(name)):
        fields.fault("image", why)
        return None
    return name
