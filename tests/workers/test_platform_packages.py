"""The packages that no environment replaces are those that a process of a job has imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from app.core.model.provisions.package_lock import PLATFORM


def test_platform_is_exactly_what_a_process_of_a_job_has_imported() -> None:
    """An environment that replaced one of these would have no effect, or half of it."""
    code = (
        "import sys; from importlib.metadata import packages_distributions\n"
        "from workers.zygote import import_what_jobs_need; import_what_jobs_need()\n"
        "tops = {name.partition('.')[0] for name in sys.modules} - {'_distutils_hack'}\n"
        "found = packages_distributions()\n"
        "print(*sorted({one for top in tops for one in found.get(top, ())}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    imported = {name.replace("_", "-") for name in done.stdout.split()} - {"roundhouse"}
    assert imported == {*PLATFORM}
