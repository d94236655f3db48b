"""Follow the events of a request, and say why it waits."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial

import typer

from app.cli import names, root_command, wording
from app.cli.client import JSON, ApiProblem, Client, Unreachable
from app.cli.root_command import JOB_FAILED
from app.cli.tables import Output, err, show_line

log = logging.getLogger(__name__)


SILENT_S = 5.0  # after so long without an event, `--watch` prints why nothing happens


def explain(client: Client, task: JSON) -> JSON:
    return {"task": task["name"], **client.get(f"/v1/tasks/{task['id']}/explain")}


class _WaitReasons:
    """Prints why a request waits, if no event came for SILENT_S and the reason has changed.

    It uses a client of its own, in a thread, because the stream of events occupies the first
    client.
    """

    def __init__(self, client: Callable[[], Client], request_id: str) -> None:
        self._client, self._request_id = client, request_id
        self._news, self._over, self._told = threading.Event(), False, ""
        self._thread = threading.Thread(target=self._run, name="waits", daemon=True)

    def __enter__(self) -> _WaitReasons:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._news.set()
        self._thread.join(timeout=SILENT_S)

    def heard(self) -> None:
        self._news.set()

    def _run(self) -> None:
        with self._client() as client:
            while not self._over:
                if self._news.wait(SILENT_S):
                    self._news.clear()
                    continue
                try:
                    self._tell(client)
                except (ApiProblem, Unreachable) as error:
                    log.debug(
                        "cannot explain why the task waits: %s", error
                    )  # the stream reports it, too

    def _tell(self, client: Client) -> None:
        states = ("blocked", "waiting")
        tasks = [
            task for task in names.open_tasks(client, self._request_id) if task["state"] in states
        ]
        if not tasks:
            return
        told = explain(client, min(tasks, key=lambda task: task["state"] == "blocked"))
        line = wording.waits(told)
        if told["state"] in states and not self._over and line.plain != self._told:
            self._told = line.plain
            err().print(line)


def follow(ctx: typer.Context, client: Client, request_id: str, output: Output) -> None:
    """Print events until the request has ended; exits with JOB_FAILED if it did not end well."""
    with _WaitReasons(partial(root_command.connect, ctx), request_id) as waits:
        for event in client.stream(f"/v1/requests/{request_id}/events"):
            waits.heard()
            if event.type != "end":
                show_line(event.data, output, partial(wording.event, event.data))
    request = client.get(f"/v1/requests/{request_id}")
    err().print(wording.ended(request))
    if request["state"] != "done":
        raise typer.Exit(JOB_FAILED)
