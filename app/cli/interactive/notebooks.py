"""Defines the verb notebook: JupyterLab in a session, shown in the browser of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import webbrowser
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from app.cli import names, root_command, wording
from app.cli.client import JSON, Client, Unreachable
from app.cli.interactive import sessions, tunnels
from app.cli.interactive.browser_input import BrowserInput
from app.cli.interactive.sessions import BeginsWith, DeviceKind, IdleS
from app.cli.root_command import JOB_FAILED, NO_ANSWER, REFUSED, WORK, app
from app.cli.tables import err
from app.core.model.provisions.session import USUAL_IDLE_S
from app.core.model.provisions.tunnel import FrameKind

if TYPE_CHECKING:
    from app.cli.interactive.tunnel_client import UserEnd

PORT = 8888  # port inside the task, which has a loopback address of its own
LOOK_AGAIN_S = 0.5
_PROBE = b"GET /api HTTP/1.0\r\n\r\n"
_NEVER = "jupyterlab.NeverCheckForUpdate"
#: The server sends no pings, so that a page that was away keeps its connection. Kernels talk over
#: socket files, because to find free ports Jupyter would use SO_LINGER, which the sandbox refuses.
_JUPYTER = [
    *("python", "-m", "jupyterlab", "--no-browser", "--allow-root"),
    *("--ServerApp.ip=127.0.0.1", f"--ServerApp.port={PORT}", "--ServerApp.port_retries=0"),
    *("--KernelManager.transport=ipc", "--ServerApp.root_dir=."),
    "--ServerApp.websocket_ping_interval=0",
    *("--LabApp.news_url=None", f"--LabApp.check_for_updates_class={_NEVER}"),
]


@app.command(rich_help_panel=WORK)
def notebook(
    ctx: typer.Context,
    folder: BeginsWith = None,
    environment: Annotated[
        str, typer.Option(help="requirements or lock in the folder, with jupyterlab in it")
    ] = "",
    kind: DeviceKind = "cpu",
    name: Annotated[str, typer.Option(help="name of the request")] = "notebook",
    idle: IdleS = USUAL_IDLE_S,
    local: Annotated[
        int, typer.Option("--local", "-l", min=0, max=65535, help="port here; 0: any")
    ] = PORT,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="open it in the browser")
    ] = True,
) -> None:
    """Run JupyterLab on a device, and open it here.  It gives the device to others while idle.

    It comes back when a cell is run, with the variables of its kernels.  What the page asks by
    itself wakes nothing.  Ctrl-C leaves it running.
    """
    if environment and folder is None:
        raise typer.BadParameter("--environment names a file of --folder")
    token = secrets.token_urlsafe(24)
    more: JSON = {"env": {"JUPYTER_TOKEN": token}}
    with root_command.connect(ctx) as client:
        task = sessions.submit_session(
            client,
            name,
            _JUPYTER,
            kind=kind,
            idle_s=idle,
            folder=folder,
            more=more,
            environment=environment,
        )
        try:
            why = asyncio.run(_serve(client, task["id"], local, token, opens=browser))
        except KeyboardInterrupt:
            err().print(wording.left_notebook(task["request_id"], PORT))
            raise typer.Exit(0) from None
        _tell_end(client, task, why)


def _tell_end(client: Client, task: JSON, why: str) -> None:
    try:
        # wait until the tunnel reports how it ended
        client.get(f"/v1/requests/{task['request_id']}", wait="5s")
        now = client.get(f"/v1/tasks/{task['id']}")
    except Unreachable:  # the service and the tunnel were lost; the notebook still runs
        now = task
    if names.is_unfinished(now):
        err().print(wording.left_notebook(task["request_id"], PORT))
        root_command.fail(NO_ANSWER, Text(f"The tunnel has ended: {why}."))
    err().print(wording.ended_notebook(now))
    raise typer.Exit(JOB_FAILED if now["state"] == "failed" else 0)


async def _serve(client: Client, task_id: str, at: int, token: str, *, opens: bool) -> str:
    """Forward JupyterLab until its tunnel ends; return why it ended."""
    from app.cli.interactive.tunnel_client import UserEnd

    body = {"kind": "forward", "port": PORT}
    line = tunnels.StatusLine()
    async with UserEnd.opened(client, task_id, body, line.tell) as end:
        running = asyncio.create_task(end.run())
        listens = asyncio.create_task(_listens(end))
        await asyncio.wait({running, listens}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            listens.cancel()
            await asyncio.gather(listens, return_exceptions=True)
            return end.why
        forwarder = tunnels.Forwarder(end, follow=BrowserInput)
        try:
            server = await asyncio.start_server(forwarder.meet, "127.0.0.1", at)
        except OSError as error:
            told = f"Port {at} of this machine cannot be used: {error.strerror}; see --local."
            root_command.fail(REFUSED, Text(told))
        async with server:
            _, number = server.sockets[0].getsockname()
            url = f"http://127.0.0.1:{number}/lab?token={token}"
            err().print(wording.notebook_at(url))
            if opens:
                webbrowser.open(url)
            await running
    return end.why


async def _listens(end: UserEnd) -> None:
    """Wait until JupyterLab answers on its port."""
    number = 0

    async def ignore(body: bytes) -> None:
        pass

    while True:
        number = 1 + number % 8
        channel = end.channel(number, ignore)
        await end.send(FrameKind.OPEN, number)
        await end.send(FrameKind.QUIET, number, _PROBE)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(60.0 * LOOK_AGAIN_S):
                await channel.closed.wait()
        end.channels.pop(number, None)
        await end.send(FrameKind.END, number)
        if channel.closed.is_set() and not channel.failed:
            return
        await asyncio.sleep(LOOK_AGAIN_S)
