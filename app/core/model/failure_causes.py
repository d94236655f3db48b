"""Names the causes of failed attempts, and what each of them means for the next attempt."""

from __future__ import annotations

#: Cause of a failed attempt -> True if another attempt may help (and `retry.max` permits one).
CAUSES = {
    "exception": True,  # the tenant's code raised an exception
    "exit": True,  # the process ended without a message: killed, os._exit
    "memory": True,  # the task took more of its host's memory than it may
    "device_memory": True,  # the task took more memory of its device than it may, or than there is
    "max_duration": False,  # the task held its slot for max_duration_s
    "uncapturable": False,  # the state cannot be captured, so the task could never be paused
    "preset": False,  # torch did not take the preset
    "secret": False,  # a secret that the task names cannot be given to it
    "device_preset": False,  # the driver of the device refused a setting of the preset
    "bundle": False,  # the code could not be loaded
    "environment": True,  # the packages of its request could not be installed
    "mount": True,  # a mount cannot be shown on the host, or the tenant may no longer use it
    "image": True,  # the checkpoint could not be restored; an older one is tried
    # the device could not set up the task's process: the retry uses up no attempt
    "device": True,
    "host": True,  # another host of the gang was lost: the retry uses up no attempt
    "store": True,  # the store did not answer: retried without using up an attempt
    "again": True,  # a command with a notice asked to begin again (`provisions.notice`)
}
MOST_PATTERN = 200  # most characters of a pattern in a rule of `retry`
#: Causes that are no fault of the task. The task starts again, and no attempt is used up.
EXCUSED = frozenset({"device", "host", "store"})
#: Causes that the field `retry` may name in a rule.
OF_RULES = tuple(cause for cause in CAUSES if cause not in EXCUSED | {"again"})
#: Causes that a faulty device may have brought about.
SUSPECT = frozenset({"exception", "exit", "preset"})
#: Causes after which another device may do better, so the task avoids the device.
AVOIDED_AFTER = SUSPECT | {"memory", "device_memory", "device_preset", "device", "mount"}
