"""Reads the environment variables and the names of secrets of a task.

A variable is refused if the platform sets it, if it decides the bits of results or the sandbox, or
if it could have no effect. The process of a job, a function or a graph already runs when the task's
variables are set. So variables that the loader or the interpreter reads at its start are for
commands only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from app.core.model.fields import Fields, escaped

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
VARIABLE_RULE = "1 to 128 letters, digits and '_', not starting with a digit"
MAX_VARIABLES = 128
MAX_SECRETS = 16  # per task
MAX_VALUE_BYTES = 16 * 1024
MAX_VARIABLES_BYTES = 64 * 1024  # bytes of all names and values of a task

_OURS = "the platform sets it"
_BITS = "it decides the bits of results, so the platform sets it"
_THREADS = "the preset of the task's type sets the number of threads"
_DEVICES = "the platform decides which devices a process sees"
_RANKS = "the platform sets it for each rank, as torchrun does"
_PATH = (
    "the platform sets it; a command names a program by its path, or sets it in a shell: "
    '["bash", "-c", "PATH=$PWD/bin:$PATH exec python train.py"]'
)
_REFUSED = {
    **dict.fromkeys(("HOME", "TMPDIR", "USER", "LOGNAME"), _OURS),
    **dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), _OURS),
    **dict.fromkeys(("PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG"), _BITS),
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), _THREADS),
    **dict.fromkeys(
        ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE"), _RANKS
    ),
    **dict.fromkeys(("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"), _RANKS),
    **dict.fromkeys(("MASTER_ADDR", "MASTER_PORT"), _RANKS),
    "PATH": _PATH,
}
_REFUSED_PREFIXES = {"ROUNDHOUSE_": _OURS, "TORCHELASTIC_": _RANKS}
_DEVICES_SUFFIX = "_VISIBLE_DEVICES"
#: The loader, the interpreter and its thread pools read these variables only when a process starts.
_AT_THE_START = ("LD_", "PYTHON", "GLIBC_TUNABLES", "MALLOC_", "OMP_", "MKL_", "KMP_", "OPENBLAS_")


def read_variables(fields: Fields) -> dict[str, str]:
    """Read `env`: names and values of environment variables."""
    read: dict[str, str] = {}
    for name, value in fields.mapping("env").items():
        where = f"env/{escaped(name)}"
        if not VARIABLE.fullmatch(name):
            fields.fault(where, f"the name of a variable must be {VARIABLE_RULE}")
        elif not isinstance(value, str):
            told = 'the value of a variable must be a text; put a number between quotes, as "1"'
            fields.fault(where, told, "type")
        elif (size := len(value.encode())) > MAX_VALUE_BYTES:
            told = f"must be at most {MAX_VALUE_BYTES} bytes; got {size} bytes"
            fields.fault(where, f"{told}. Put data into a file of the bundle", "range")
        else:
            read[name] = value
    _check_sizes(fields, read)
    return read


def _check_sizes(fields: Fields, read: Mapping[str, str]) -> None:
    if len(read) > MAX_VARIABLES:
        told = f"must have at most {MAX_VARIABLES} variables; got {len(read)}"
        fields.fault("env", told, "range")
    size = sum(len(name) + len(value.encode()) for name, value in read.items())
    if size > MAX_VARIABLES_BYTES:
        told = f"must be at most {MAX_VARIABLES_BYTES} bytes in total; got {size} bytes"
        fields.fault("env", f"{told}. Put data into a file of the bundle", "range")


def read_secrets(fields: Fields) -> tuple[str, ...]:
    """Read `secrets`: the names of secrets, which are also those of the variables."""
    names = fields.texts("secrets", VARIABLE, VARIABLE_RULE)
    if len(names) > MAX_SECRETS:
        told = f"must have at most {MAX_SECRETS} secrets; got {len(names)}"
        fields.fault("secrets", told, "range")
    return names


def check_variables(
    fields: Fields, env: Mapping[str, str], secrets: Sequence[str], *, is_command: bool
) -> None:
    """Report the variables that a task of this kind may not set, and those that it sets twice."""
    places = [(f"env/{name}", name) for name in env]
    places += [(f"secrets/{n}", name) for n, name in enumerate(secrets)]
    for where, name in places:
        if why := why_refused(name, is_command=is_command):
            fields.fault(where, f"{name} cannot be set: {why}", "reserved")
    for n, name in enumerate(secrets):
        if name in env:
            fields.fault(f"secrets/{n}", f"env sets {name} too; name it in one of both", "twice")


def why_refused(name: str, *, is_command: bool) -> str:
    """Return why a task may not set this variable; "" if it may."""
    if why := _REFUSED.get(name):
        return why
    if name.upper().endswith(_DEVICES_SUFFIX):
        return _DEVICES
    for prefix, why in _REFUSED_PREFIXES.items():
        if name.startswith(prefix):
            return why
    if not is_command and name.startswith(_AT_THE_START):
        return (
            "it is read when a process starts, and the process of a job, a function or a graph "
            "runs already; only a command can set it"
        )
    return ""
