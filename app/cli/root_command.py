"""Defines the command `roundhouse` itself: its errors, exit codes, shared options, and groups of
verbs.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Any, NoReturn

import typer
from rich.text import Text
from typer.core import TyperGroup

from app.cli import credentials, wording
from app.cli.bundling import UnreadablePath
from app.cli.client import (
    ApiProblem,
    BadEnvironment,
    Client,
    ClientError,
    DamagedDownload,
    Unreachable,
)
from app.cli.tables import Output, err

OK, JOB_FAILED, USAGE, NO_ACCESS, REFUSED, NOT_FOUND, NO_ANSWER = range(7)
INTERRUPTED = 130
HERE, WORK, DATA = "The service, and you", "Work", "Data"  # groups of verbs in `--help`
SHARES, ADMIN = "Shares and devices", "Administration"
SIMULATE = "simulate"

STARTED = "starting,running,paused,preempted"
LIVE = f"queued,{STARTED}"


class Verbs(TyperGroup):
    """Runs a verb, and reports its errors in words, with the matching exit code."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        return _simulate() if found is not None and cmd_name == SIMULATE else found

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ApiProblem as problem:
            fail(exit_code(problem), wording.problem(problem))
        except Unreachable as error:
            fail(NO_ANSWER, wording.unreachable(error))
        except DamagedDownload as error:
            fail(NO_ANSWER, Text(str(error)))
        except credentials.NoLogin as error:
            fail(NO_ACCESS, Text(str(error)))
        except (UnreadablePath, credentials.BadAddress, BadEnvironment) as error:
            fail(USAGE, Text(str(error)))
        except KeyboardInterrupt:
            fail(INTERRUPTED, Text("Interrupted. Submitted work continues."))


def _simulate() -> Any:
    """Return the real verb, which imports the scheduler; that is slow."""
    from app.cli import simulate

    real = typer.Typer(add_completion=False)
    real.command(SIMULATE, rich_help_panel=SHARES)(simulate.simulate)
    return typer.main.get_command(real)


def exit_code(problem: ApiProblem) -> int:
    """Return the exit code by what the user can do: correct the input, the key, the action or the
    id, or wait.
    """
    if problem.status in (401, 403):
        return NO_ACCESS
    if problem.status == 404:
        return NOT_FOUND
    if problem.status >= 500:
        return NO_ANSWER
    if problem.type in _REFUSALS or problem.status == 429:
        return REFUSED
    return USAGE


_REFUSALS = {
    "unsatisfiable",
    "payload-too-large",
    "conflict-state",
    "queue-full",
    "quota-exceeded",
    "precondition-failed",
    "gone",
}


def fail(code: int, told: Text) -> NoReturn:
    err().print(told)
    raise typer.Exit(code)


def require_service() -> None:
    """Fail if only `roundhouse-client` is installed, which has no module of the service."""
    if find_spec("app.main") is None:
        told = (
            "This verb runs a part of the service, which is not in roundhouse-client. Install the "
            "package roundhouse, in an environment of its own."
        )
        fail(USAGE, Text(told))


app = typer.Typer(
    cls=Verbs,
    help="Roundhouse: share a few accelerators between several teams.",
    epilog="Exit codes: 0 ok, 1 job failed, 2 usage, 3 no access, 4 rejected, 5 not found, 6 no "
    "answer, 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

As = Annotated[
    str | None,
    typer.Option(
        "--as", envvar="ROUNDHOUSE_AS", help="use the key of TENANT[:ROLE] that `make up` created"
    ),
]
Format = Annotated[Output, typer.Option("--output", "-o", help="output format")]
WHICH = (
    "name of a request, NAME/TASK for one of its tasks, or an id (its last 8 characters are enough)"
)
COMPLETED_S = 3.0  # longest time in s that a completion may take to ask the service


def complete_name(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return names of requests for the shell, or of tasks after `NAME/`; none without a service."""
    from app.cli.names import names_that_begin

    try:
        who = credentials.found(ctx.find_root().params.get("as_"))
        with Client(who.url, who.key, patience_s=0.0, timeout_s=COMPLETED_S) as client:
            return names_that_begin(client, incomplete)
    except (ClientError, credentials.NoLogin, credentials.BadAddress):
        return []  # a shell has no place for a message


Which = Annotated[str, typer.Argument(metavar="NAME", help=WHICH, autocompletion=complete_name)]
Several = Annotated[
    list[str], typer.Argument(metavar="NAME...", help=WHICH, autocompletion=complete_name)
]


@app.callback()
def _common(ctx: typer.Context, as_: As = None) -> None:
    ctx.obj = as_


def connect(ctx: typer.Context, who: credentials.Login | None = None) -> Client:
    who = who or credentials.found(ctx.obj)
    return Client(who.url, who.key)


def connect_once(ctx: typer.Context) -> Client:
    """Return a client without retries, for calls that create a secret: a lost answer cannot be
    repeated.
    """
    who = credentials.found(ctx.obj)
    return Client(who.url, who.key, patience_s=0.0)
