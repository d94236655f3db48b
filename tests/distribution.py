"""How `make test` shares out its files: over how many processes, in which order, which together.

`--dist loadfile` gives whole files to processes, in the order of the collection.  Most tests wait
for processes that they have started, so there are more test processes than cores.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import psutil
from xdist.scheduler import LoadFileScheduling

TESTS = Path(__file__).parent

# Test processes for each core, and the memory that each needs with what it has started.
_PER_CORE = 1.5
_MEMORY_BYTES = 5 * 2**29

# The folders whose tests mostly wait for processes, and over which part of a run their files are
# spread: at its end no process is left with a long one, and systems do not all start at once.
_SPREAD = {"acceptance": 0.6, "workers": 0.85, "security": 0.85, "pages": 0.85, "examples": 0.85}
# Files that take minutes begin before the other files of their folder.
_LONGEST = (
    "test_span.py",
    "test_islands.py",
    "test_hosts.py",
    "test_graphs_sharing.py",
    "test_openapi_calls.py",
)
# Files of each part go to one process one after the other: they use one system, and it idles at no
# other time.  The parts take about as long as each other.
_TOGETHER = (
    (
        *("test_graphs_sharing.py", "test_graphs.py", "test_first_session.py", "test_jobs.py"),
        *("test_limits.py", "test_migration.py", "test_mounts.py", "test_network.py"),
        *("test_secrets.py", "test_tunnels.py"),
    ),
    (
        *("test_client_wheel.py", "test_commands.py", "test_datablocks.py"),
        *("test_environments.py", "test_notices.py", "test_repositories.py", "test_sessions.py"),
    ),
    (
        *("test_fractions.py", "test_frozen_beside_free.py", "test_graphs_executors.py"),
        *("test_kill.py", "test_reclaim.py", "test_short_functions.py", "test_splicing.py"),
        *("test_tunnel_kills.py", "test_up.py"),
    ),
)


def process_count(*, starts_processes: bool) -> int:
    """Return the number of test processes for tests that start further processes, or none."""
    cores = len(os.sched_getaffinity(0))
    if not starts_processes:
        return cores
    return max(1, min(int(_PER_CORE * cores), psutil.virtual_memory().total // _MEMORY_BYTES))


def due(paths: Iterable[Path]) -> dict[Path, float]:
    """Return when each file is given to a process: 0.0 at the begin of a run, 1.0 at its end.

    Tests that compute run beside tests that wait.
    """
    folders: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(paths, key=_place_in_line):
        folder = path.relative_to(TESTS).parts[0]
        folders[folder if folder in _SPREAD else "computing"].append(path)
    return {
        path: _SPREAD.get(folder, 1.0) * at / len(files)
        for folder, files in folders.items()
        for at, path in enumerate(files)
    }


def _place_in_line(path: Path) -> tuple[int, Path]:
    return _LONGEST.index(path.name) if path.name in _LONGEST else len(_LONGEST), path


class FilesTogether(LoadFileScheduling):
    """Gives whole files to processes, and some files together to one."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        if not file.startswith("tests/acceptance/"):
            return file
        name = file.rpartition("/")[2]
        return next((str(names) for names in _TOGETHER if name in names), file)
