"""Follow the events of a request, and say why it waits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

import typer

from app.cli import names, root_command, wording
from app.cli.client import JSON, ApiProblem, Client, ClientError, Unreachable
from app.cli.root_command import JOB_FAILED
from app.cli.tables import Output, err, show_line

log = logging.getLogger(__name__)


SILENT_S = 5.0  # after so long without an event or a line, a watcher prints why nothing happens
BUILD_TOLD_S = 20.0  # a build of packages that goes on is told again after so long
SLIPPED_S = 60.0  # least change of an expected start that is told; half of the wait counts, too


def explain(client: Client, task: JSON) -> JSON:
    return {"task": task["name"], **client.get(f"/v1/tasks/{task['id']}/explain")}


class WaitReasons:
    """Prints why a request waits and when it is expected to start, if nothing came for SILENT_S.

    A line is printed when its state, place, reason or expected start has changed; figures within
    a reason change all the time. It uses a client of its own, in a thread, because the stream
    occupies the first client. `task` is the name of the only task of interest; "" for all.
    """

    def __init__(self, client: Callable[[], Client], request_id: str, task: str = "") -> None:
        self._client, self._request_id, self._task = client, request_id, task
        self._news, self._over = threading.Event(), False
        self._told: tuple[object, ...] = ()
        self._told_s = self._since_s = self._start_s = 0.0  # by time.monotonic
        self._thread = threading.Thread(target=self._run, name="waits", daemon=True)

    def __enter__(self) -> WaitReasons:
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
            task
            for task in names.open_tasks(client, self._request_id)
            if task["state"] in states and self._task in ("", task["name"])
        ]
        if not tasks:
            return
        told = explain(client, min(tasks, key=lambda task: task["state"] == "blocked"))
        now_s = time.monotonic()
        if told["state"] in states and not self._over and self._is_news(told, now_s):
            build_s = now_s - self._since_s if wording.is_build(told) else 0.0
            err().print(wording.waits(told, build_s))

    def _is_news(self, told: JSON, now_s: float) -> bool:
        """Return True if the explanation says what was not printed before; remember it."""
        left_s = told["estimate"]["p50_s"] if told["estimate"] else 0.0
        seen = (told["task"], told["phase"], told["place"], wording.first_code(told), left_s > 0.0)
        if seen != self._told:
            self._told, self._since_s = seen, now_s
        else:
            slipped_s = abs(now_s + left_s - self._start_s)
            is_late = bool(left_s) and slipped_s > max(SLIPPED_S, left_s / 2)
            if not is_late and not (wording.is_build(told) and now_s - self._told_s > BUILD_TOLD_S):
                return False
        self._told_s, self._start_s = now_s, now_s + left_s
        return True


def tell_outage(error: ClientError) -> None:
    err().print(f"{error}; trying again", style="dim")


def follow(ctx: typer.Context, client: Client, request_id: str, output: Output) -> None:
    """Print events until the request has ended; exits with JOB_FAILED if it did not end well."""
    client.be_patient(tell_outage)
    with WaitReasons(partial(root_command.connect, ctx), request_id) as waits:
        for event in client.stream(f"/v1/requests/{request_id}/events"):
            waits.heard()
            if event.type != "end":
                show_line(event.data, output, partial(wording.event, event.data))
    request = client.get(f"/v1/requests/{request_id}")
    err().print(wording.ended(request))
    if request["state"] != "done":
        raise typer.Exit(JOB_FAILED)
