"""List the steps of the suite, in the order of what one must know first."""

from __future__ import annotations

from tests.gpu import devices, host_steps, jobs
from tests.gpu.step import Step

STEPS = (
    Step(
        "device",
        "Which device is there, and may a worker's trial use it?",
        90,
        devices.find,
        is_first=True,
    ),
    Step(
        "checkpoint",
        "Does the driver permit its checkpoint of another process, and do the bytes come back?",
        90,
        devices.checkpoint,
    ),
    Step(
        "bandwidth",
        "How fast are pinned copies, in memory of torch and in registered memory?",
        60,
        devices.bandwidth,
    ),
    Step(
        "resident",
        "A job behind the sandbox steps, pauses, leaves, moves and ends with the same bits.",
        180,
        jobs.resident,
    ),
    Step(
        "swap",
        "Two tenants' large jobs take turns on a device that holds one of them.",
        180,
        jobs.swap,
    ),
    Step(
        "zoo", "Each job of the zoo, moved and offloaded, ends with the same bits.", 240, jobs.zoo
    ),
    Step(
        "ranks",
        "Ranks take turns on one device, with and without leaving its memory.",
        120,
        host_steps.ranks,
    ),
    Step(
        "command",
        "A command is paused: by the driver its device memory leaves and comes back.",
        120,
        host_steps.command,
    ),
    Step(
        "move",
        "A command is stored with its device memory, killed, and goes on from its image.",
        120,
        host_steps.move,
    ),
    Step(
        "kill",
        "kill -9 of a job's process: the device's memory is free again, and the next job starts.",
        90,
        jobs.kill,
    ),
    Step(
        "accounts",
        "What the driver counts for a process against what torch says, contexts included.",
        60,
        devices.accounts,
    ),
    Step("tests", "The tests that are marked for this kind of device.", 150, host_steps.tests),
    Step(
        "benchmark",
        "Each direction of a switch beside a pinned copy of the same bytes.",
        120,
        host_steps.benchmark,
    ),
    Step(
        "peers",
        "The same bytes by cuda-checkpoint and by torch_memory_saver, where they are installed.",
        180,
        host_steps.peers,
    ),
)
