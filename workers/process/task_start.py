"""The message with which the supervisor begins a task in its process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from app.core.model.descriptor import TaskDescriptor

JSON = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """Describes the file of an input.

    Without a `format` it is an image. `datablock` is "NAME@VERSION".
    """

    format: str = ""
    datablock: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabImage:
    """Describes the image in the slab of the process; `is_kept` is True if it is durable."""

    step: int
    index_bytes: int
    is_kept: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStart:
    """Holds the descriptor of a task, unchanged, and what a device adds to it."""

    task: str
    spec: TaskDescriptor
    inputs: Mapping[str, InputFile]
    preset: JSON
    kind: str  # kind of the device
    code: str  # folder, as the process sees it
    scratch: str  # folder, as the process sees it
    lease_margin_s: float
    patience_s: float
    device_fraction: float = 1.0  # part of the device's memory that the process may take
    image: SlabImage | None = None
    seats: tuple[int, ...] = (1,)  # as in a Launch
    host: int = 0  # as in a Launch
    # True: the gang ran in another sandbox until now, and goes on from the image as soon as it can
    goes_on: bool = False
    # let the processes of a task see several devices
    variables: Mapping[str, str] = field(default_factory=dict)
    # further environment variables, which the descriptor only names
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    # environment variables that a container image sets
    image_variables: Mapping[str, str] = field(default_factory=dict)
    rank: int = 0  # number of the rank that the process becomes, in a task with several ranks
    stores_processes: bool = False  # True: the processes of a command go into its images
    adopts: bool = False  # True: the processes of its image are restored below this process
    # True: storing has damaged its processes before. Then they go only into images for a pause or
    # an order, and not into periodic images.
    dump_damaged: bool = False
    # True: the process of a function does not exit at its end, but waits for the next function
    rests: bool = False

    def variables_of_slot(self, slot: int) -> dict[str, str]:
        """Return the variables that let a rank see its device alone; `slot` counts those of this
        host.
        """
        name = f"{self.kind.upper()}_VISIBLE_DEVICES"
        shown = self.variables.get(name, "").split(",")
        return {name: shown[slot]} if len(shown) > 1 else {}

    def as_rank(self, rank: int) -> TaskStart:
        """Return the start of one rank.

        A rank makes no images by itself; only the first rank stores outputs.
        """
        never = replace(self.spec.checkpoint, every_s=0.0)
        outputs = () if rank else self.spec.outputs
        return replace(self, rank=rank, spec=replace(self.spec, checkpoint=never, outputs=outputs))
