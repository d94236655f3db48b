"""Says which functions may run one after another in one process.

Most functions are short: to fork a process and put it into a sandbox takes longer than they run. So
a process whose function has ended rests, and the next function with the same key runs there.
Functions with the same key belong to one request, have the same code, packages and preset, and get
the same from their host. They share all that a process has: modules, globals, memory, folders. So a
function could read, or change the results of, those that run after it there. That is why other
requests of the same user, whose key several people may have, do so only by choice
(`isolation: user`).
"""

from __future__ import annotations

import json

from app.core.model.descriptor import OF_USER, OWN_PROCESS
from app.core.model.device_choice import WHOLE_MILLI
from app.core.model.protocol.messages import Launch
from app.core.model.provisions.folder import FOLDER

HOST_KIND = "cpu"  # of devices; on all others a resting process would keep device memory


def shared_process_key(launch: Launch) -> str:
    """Return the key of the processes in which this launch may run; "" if it needs a process of its
    own.
    """
    spec = launch.spec
    needs_own = (
        spec.run.kind != "function",
        spec.isolation == OWN_PROCESS,
        spec.devices.kind != HOST_KIND,
        spec.devices.choice.fraction_milli < WHOLE_MILLI,
        spec.world_size > 1,
        spec.secrets,
        spec.mounts,
        spec.image,
        spec.network.allow,
        launch.guests,
        any(source.get("format") == FOLDER for source in launch.inputs.values()),
    )
    if any(needs_own):
        return ""
    module, _, _ = spec.run.entry.partition(":")
    environment = None if spec.environment is None else spec.environment.lock
    asked = [spec.devices.memory_bytes, spec.resources.as_json(), dict(spec.env)]
    request = "" if spec.isolation == OF_USER else launch.request
    parts = [
        launch.tenant,
        launch.user,
        request,
        launch.bundle,
        module,
        environment,
        launch.preset,
        asked,
    ]
    return json.dumps(parts, sort_keys=True)
