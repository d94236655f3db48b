"""The `roundhouse` command: a few verbs over `app.cli.client`.

The requested data goes to stdout, as a table, JSON or YAML.  Everything else (progress, errors and
what to do about them) goes to stderr.  No command ends in a traceback.  Imports that only some
verbs need are made there, so that commands start quickly.  Exit codes are stable:

    0 ok · 1 the job failed · 2 usage · 3 no access · 4 refused · 5 not found · 6 no answer
    130 interrupted
"""

from __future__ import annotations

from app.cli.root_command import app

# isort: off
# Each import registers verbs; `--help` lists them in this order.
from app.cli.verbs import service, submit, work
from app.cli.interactive import tunnels, sessions, notebooks
from app.cli.verbs import data, running_files, environments, mounts, container_images
from app.cli.verbs import actions, secrets, channels, fleet, admin, budgets, reservations

# isort: on

MODULES = (
    service,
    submit,
    work,
    tunnels,
    sessions,
    notebooks,
    data,
    running_files,
    environments,
    mounts,
    container_images,
    actions,
    secrets,
    channels,
    fleet,
    admin,
    budgets,
    reservations,
)

__all__ = ["MODULES", "app", "main"]


def main() -> None:
    app()


if __name__ == "__main__":
    main()
