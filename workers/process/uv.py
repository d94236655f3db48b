"""Runs `uv`, which locks and installs packages, in a process without our secrets and with limits.

No code of a package runs: `uv` takes wheels only (ONLY_WHEELS), so it builds nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from app.settings import Settings

DEFAULT_INDEX = "https://pypi.org/simple"  # of uv
_FILES = ("files.pythonhosted.org:443",)  # host from which the wheels of Python's index come
ONLY_WHEELS = ("--only-binary", ":all:")
SAID_LIMIT = 4000  # length of uv's messages that is kept
MEMORY_BYTES = 8 * 2**30  # limit of address space; uv maps its cache
OUTPUT_LIMIT = 16 * 2**20

# What uv needs to reach the index of this machine; nothing else of our environment is passed on.
_KEPT = ("HOME", "LANG", "XDG_CONFIG_HOME", "XDG_CONFIG_DIRS")
_KEPT_PREFIXES = ("UV_", "SSL_CERT_")
_THROUGH = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_PROXIES = (*_THROUGH, "NO_PROXY")


class NoUv(Exception):
    """Raised where `uv` is not installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UvResult:
    """Describes how a run of uv ended; `said` is its standard error, shortened."""

    status: int
    output: str
    said: str


@cache
def program() -> str:
    """Return the path of uv; raises NoUv."""
    try:
        from uv import find_uv_bin
    except ImportError as error:
        raise NoUv("the package uv is not installed") from error
    try:
        return os.fsdecode(find_uv_bin())
    except FileNotFoundError as error:
        raise NoUv(str(error)) from error


def index_options(settings: Settings) -> list[str]:
    """Return the options that name the package index; [] if uv's own configuration names it."""
    if settings.wheels is not None:
        return ["--no-index", "--find-links", str(settings.wheels.absolute())]
    return ["--default-index", settings.package_index] if settings.package_index else []


def reach(settings: Settings) -> tuple[str, ...] | None:
    """Return the destinations of the administrator's index; () if the index is a folder.

    None means that the host has a proxy of its own, which decides what can be reached.
    """
    if settings.wheels is not None:
        return ()
    if any(said and name.upper() in _THROUGH for name, said in os.environ.items()):
        return None
    named = (os.environ.get(name, "") for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL"))
    index = urlsplit(settings.package_index or next(filter(None, named), DEFAULT_INDEX))
    files = settings.package_hosts.split(",") if settings.package_hosts else _FILES
    if not index.hostname:
        return tuple(files)  # a path
    host = f"[{index.hostname}]" if ":" in index.hostname else index.hostname
    port = index.port or (80 if index.scheme == "http" else 443)
    return tuple(dict.fromkeys((f"{host}:{port}", *files)))


def variables(cache: Path, proxy: str = "") -> dict[str, str]:
    """Return the environment of a process that runs uv; `cache` is uv's folder of downloads.

    With a `proxy`, uv reaches everything through it and ignores the host's proxy settings.
    """
    ours = os.environ
    names = [name for name in ours if name in _KEPT or name.startswith(_KEPT_PREFIXES)]
    if not proxy:
        names += [name for name in ours if name.upper() in _PROXIES]
    return {
        **{name: ours[name] for name in names},
        **(dict.fromkeys(_THROUGH, proxy) if proxy else {}),
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "UV_CACHE_DIR": str(cache),
        "UV_NO_PROGRESS": "1",
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_LINK_MODE": "copy",
        "UV_CONCURRENT_BUILDS": "1",
        "NO_COLOR": "1",
    }


def run(
    arguments: Sequence[str], *, folder: Path, environment: Mapping[str, str], limit_s: float
) -> UvResult:
    """Run uv in a folder.

    A run that takes longer than `limit_s` is ended and counts as failed. Raises NoUv.
    """
    return limited([program(), *arguments], folder=folder, environment=environment, limit_s=limit_s)


def limited(
    command: Sequence[str], *, folder: Path, environment: Mapping[str, str], limit_s: float
) -> UvResult:
    """Run a command with limits of time and memory, and end all processes that it started."""
    limits = f"ulimit -c 0; ulimit -v {MEMORY_BYTES // 1024}"
    with subprocess.Popen(
        ["/bin/sh", "-c", f'{limits}; exec "$@"', "sh", *command],
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            output, said = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            _end(process.pid)
            process.communicate()
            return UvResult(status=-signal.SIGKILL, output="", said=f"took over {limit_s:g} s")
        except BaseException:
            _end(process.pid)
            raise
    return UvResult(
        status=process.returncode,
        output=output[:OUTPUT_LIMIT].decode("utf-8", "replace"),
        said=shortened(said.decode("utf-8", "replace")),
    )


def _end(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def shortened(said: str) -> str:
    """Return uv's message without empty lines; if it is too long, only its beginning and its
    end.
    """
    text = "\n".join(line.rstrip() for line in said.splitlines() if line.strip())
    if len(text) <= SAID_LIMIT:
        return text
    half = SAID_LIMIT // 2
    return f"{text[:half]}\n…\n{text[-half:]}"
