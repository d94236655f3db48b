"""The client against a real server on a real socket that misbehaves on purpose."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from app.cli import wording
from app.cli.client import ApiProblem, Client, DamagedDownload, Unreachable
from app.cli.interactive.tunnel_client import UserEnd

Reply = Callable[[BaseHTTPRequestHandler], None]


@dataclass
class Scripted:
    """Answers with its replies in turn; `seen` are the requests: (method, path, headers, body)."""

    url: str = ""
    replies: list[Reply] = field(default_factory=list)
    seen: list[tuple[str, str, Any, bytes]] = field(default_factory=list)
    slept_s: list[float] = field(default_factory=list)

    def client(self, **how: Any) -> Client:
        """Return a client for which time passes only while it sleeps."""
        clock = {"sleep": self.slept_s.append, "clock_s": lambda: sum(self.slept_s)}
        return Client(self.url, "rh_key", **clock, **how)


@pytest.fixture
def server() -> Iterator[Scripted]:
    script = Scripted()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            script.seen.append((self.command, self.path, self.headers, body))
            script.replies.pop(0)(self)

        do_GET = do_POST = do_PUT = do_PATCH = do_HEAD = answer

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        script.url = f"http://127.0.0.1:{http.server_port}"
        yield script
        http.shutdown()
        thread.join()


def says(status: int, body: Any = None, **headers: str) -> Reply:
    def reply(handler: BaseHTTPRequestHandler) -> None:
        sent = b"" if body is None else json.dumps(body).encode()
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(sent)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(sent)

    return reply


def hangs_up(handler: BaseHTTPRequestHandler) -> None:
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True


def streams(*events: tuple[str, str, Any], then: str = "") -> Reply:
    """Events (type, id, data), then perhaps the beginning of one more; then it ends."""

    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.end_headers()
        for type, id, data in events:
            handler.wfile.write(f"event: {type}\nid: {id}\ndata: {json.dumps(data)}\n\n".encode())
        handler.wfile.write(then.encode())

    return reply


# --- calls ---


def test_key_is_sent_and_calls_without_one_send_none(server: Scripted) -> None:
    server.replies = [says(200, {"items": []})]
    with server.client() as client:
        assert client.get("/v1/tasks", state="running", cursor=None) == {"items": []}
    [(method, path, headers, _)] = server.seen
    assert (method, path) == ("GET", "/v1/tasks?state=running")
    assert headers["Authorization"] == "Bearer rh_key"


@pytest.mark.parametrize("trouble", [says(503), says(502), hangs_up])
def test_post_without_an_answer_is_repeated_with_the_same_idempotency_key(
    server: Scripted, trouble: Reply
) -> None:
    server.replies = [trouble, trouble, says(202, {"id": "req_1"})]
    with server.client() as client:
        assert client.submit({"name": "x"}) == {"id": "req_1"}
    keys = {headers["Idempotency-Key"] for _, _, headers, _ in server.seen}
    bodies = {body for *_, body in server.seen}
    assert (len(server.seen), len(keys), len(bodies)) == (3, 1, 1)


def test_two_submissions_have_two_keys_unless_the_caller_gives_one(server: Scripted) -> None:
    server.replies = [says(202, {})] * 4
    with server.client() as client:
        for key in (None, None, "mine", "mine"):
            client.submit({}, key=key)
    first, second, *mine = [headers["Idempotency-Key"] for _, _, headers, _ in server.seen]
    assert first != second
    assert mine == ["mine", "mine"]


def test_retries_end_after_the_given_time(server: Scripted) -> None:
    server.replies = [says(503, {"title": "The database does not answer"})] * 20
    with server.client(patience_s=2.9) as client, pytest.raises(ApiProblem, match="database"):
        client.get("/v1/me")
    assert server.slept_s == [0.2, 0.4, 0.8]  # 1.4 s, and 1.6 s more is too long
    assert len(server.seen) == 4


def test_client_waits_as_long_as_the_service_says(server: Scripted) -> None:
    server.replies = [says(429, {}, Retry_After="2"), says(200, {})]
    with server.client() as client:
        client.get("/v1/me")
    assert server.slept_s == [2.0]


def test_client_waits_for_a_submission_still_in_progress(server: Scripted) -> None:
    busy = says(409, {"type": "https://x/problems/idempotency-in-progress"})
    server.replies = [busy, says(202, {"id": "req_1"})]
    with server.client() as client:
        assert client.submit({})["id"] == "req_1"


def test_unreachable_service_is_reported_with_its_address() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and never listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with (
            Client(url, "k", patience_s=0.5, sleep=lambda _: None) as client,
            pytest.raises(Unreachable, match=url),
        ):
            client.get("/v1/me")


def test_problem_is_shown_in_full_and_not_retried(server: Scripted) -> None:
    errors = [{"pointer": "/tasks/0/run", "detail": "unknown entry point", "code": "unknown"}]
    body = {
        "type": "/problems/validation-error",
        "title": "The input does not fit",
        "detail": "1 thing is wrong",
        "errors": errors,
    }
    server.replies = [says(422, body)]
    with server.client() as client, pytest.raises(ApiProblem) as caught:
        client.submit({})
    problem = caught.value
    assert (problem.status, problem.type) == (422, "validation-error")
    assert (problem.title, problem.detail) == ("The input does not fit", "1 thing is wrong")
    assert problem.errors == errors
    assert len(server.seen) == 1


def test_answer_of_another_server_is_a_problem_too(server: Scripted) -> None:
    server.replies = [page(200)]
    with server.client() as client, pytest.raises(ApiProblem, match="Not a Roundhouse service"):
        client.get("/v1/me")


def page(status: int) -> Reply:
    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.end_headers()
        handler.wfile.write(b"<html>nginx</html>")

    return reply


def test_proxy_that_refuses_large_calls_is_named_as_the_cause(server: Scripted) -> None:
    server.replies = [page(413)]
    with server.client() as client, pytest.raises(ApiProblem, match="client_max_body_size"):
        client.submit({})


def test_proxy_that_passes_no_websockets_is_named_as_the_cause(server: Scripted) -> None:
    server.replies = [says(201, {"path": "/v1/tunnels", "ticket": "t"}), page(404)]

    async def open_tunnel(client: Client) -> None:
        async with UserEnd.opened(client, "tsk_1", {}, lambda news: None):
            pass

    with server.client() as client, pytest.raises(Unreachable) as raised:
        asyncio.run(open_tunnel(client))
    assert "must pass WebSockets on" in str(wording.unreachable(raised.value))


def test_change_names_the_version_that_was_read(server: Scripted) -> None:
    server.replies = [hangs_up, says(200, {"version": 4})]
    assert server.client().patch("/v1/tenants/t", {"weight": 2.0}, version=3) == {"version": 4}
    for method, path, headers, body in server.seen:
        assert (method, path, headers["If-Match"]) == ("PATCH", "/v1/tenants/t", '"3"')
        assert json.loads(body) == {"weight": 2.0}
    assert len(server.seen) == 2


def test_list_is_read_page_after_page(server: Scripted) -> None:
    server.replies = [
        says(200, {"items": [{"id": 1}, {"id": 2}], "next_cursor": "abc"}),
        says(200, {"items": [{"id": 3}], "next_cursor": None}),
    ]
    with server.client() as client:
        assert [item["id"] for item in client.items("/v1/requests", limit=2)] == [1, 2, 3]
    assert [path for _, path, *_ in server.seen] == [
        "/v1/requests?limit=2",
        "/v1/requests?limit=2&cursor=abc",
    ]


def test_bundle_is_sent_only_if_the_service_lacks_it(server: Scripted) -> None:
    server.replies = [says(404), received(0), says(201, {"files": 2}), says(200)]
    with server.client() as client:
        assert client.upload("ab12", b"PK") == {"files": 2}
        assert client.upload("ab12", b"PK") is None
    assert [(method, body) for method, _, _, body in server.seen] == [
        ("HEAD", b""),
        ("PUT", b""),
        ("PUT", b"PK"),
        ("HEAD", b""),
    ]


def breaks_off(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b"the beginning")
    hangs_up(handler)


def test_interrupted_download_begins_again(server: Scripted, tmp_path: Path) -> None:
    server.replies = [breaks_off, says(200, {"whole": True})]
    file = tmp_path / "file"
    with server.client() as client:
        assert client.download("/v1/x", file, names=["a", "b"]) == len('{"whole": true}')
    assert file.read_text() == '{"whole": true}'
    assert [path for _, path, _, _ in server.seen] == ["/v1/x?names=a&names=b"] * 2


@pytest.mark.parametrize("reply", [breaks_off, says(410, {"title": "Its bytes are lost"})])
def test_failed_download_leaves_the_existing_file(
    server: Scripted, tmp_path: Path, reply: Reply
) -> None:
    server.replies = [reply] * 2
    file = tmp_path / "file"
    file.write_text("of before")
    with server.client(patience_s=0) as client, pytest.raises((ApiProblem, Unreachable)):
        client.download("/v1/x", file)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert file.read_text() == "of before"


# --- streams ---


def test_interrupted_stream_goes_on_after_its_last_event(server: Scripted) -> None:
    server.replies = [
        streams(
            ("event", "1", {"n": 1}),
            ("event", "2", {"n": 2}),
            then=": still here\nretry: 1000\n\nevent: event\nid: 3\nda",
        ),
        says(503),
        hangs_up,
        streams(("event", "3", {"n": 3}), ("end", "", {"state": "done"})),
    ]
    with server.client() as client:
        events = list(client.stream("/v1/requests/r/events"))
    assert [(event.type, event.data) for event in events] == [
        ("event", {"n": 1}),
        ("event", {"n": 2}),
        ("event", {"n": 3}),
        ("end", {"state": "done"}),
    ]
    assert [headers["Last-Event-ID"] for _, _, headers, _ in server.seen] == [None, "2", "2", "2"]


def test_event_restarts_the_retry_time(server: Scripted) -> None:
    server.replies = [streams(("log", str(n), {})) for n in range(30)]
    server.replies += [streams(("end", "", {}))]
    with server.client(patience_s=1.0) as client:
        assert len(list(client.stream("/logs"))) == 31


def test_silent_stream_ends_as_unreachable(server: Scripted) -> None:
    server.replies = [streams()] * 20
    with server.client(patience_s=1.0) as client, pytest.raises(Unreachable, match="ended early"):
        list(client.stream("/logs"))
    assert len(server.seen) == 3  # at once, after 0.2 s, after 0.4 s; 0.8 s more is too long


def test_follower_outlasts_a_restart_and_is_told_of_it_once(server: Scripted) -> None:
    server.replies = [streams(("log", "1", {})), *[hangs_up] * 20, says(503)]
    server.replies += [streams(("log", "2", {}), ("end", "", {}))]
    told: list[Exception] = []
    with server.client() as client:
        client.be_patient(told.append)
        events = list(client.stream("/logs"))
    assert [event.id for event in events[:2]] == ["1", "2"]
    assert len(told) == 1


def test_a_stream_of_another_tenants_request_is_a_problem(server: Scripted) -> None:
    server.replies = [says(404, {"type": "/problems/not-found", "title": "Not found"})]
    with server.client() as client, pytest.raises(ApiProblem, match="Not found"):
        list(client.stream("/v1/requests/r/events"))
    assert len(server.seen) == 1


# --- datablocks ---


def received(count: int) -> Reply:
    return says(202, {"received_bytes": count})


@pytest.fixture
def ten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of ten bytes, which goes in parts of four."""
    monkeypatch.setattr("app.cli.client.PART_BYTES", 4)
    (tmp_path / "ten").write_bytes(b"0123456789")
    return tmp_path / "ten"


def ranges(server: Scripted) -> list[tuple[str, bytes]]:
    return [(headers["Content-Range"], body) for _, _, headers, body in server.seen]


def test_datablock_is_uploaded_in_the_parts_that_the_service_lacks(
    server: Scripted, ten: Path
) -> None:
    server.replies = [received(3), received(7), says(201, {"version": 1})]
    sent: list[int] = []
    with server.client() as client:
        assert client.put_datablock("c", ten, sent=sent.append) == {"version": 1}
    assert ranges(server) == [
        ("bytes */10", b""),
        ("bytes 3-6/10", b"3456"),
        ("bytes 7-9/10", b"789"),
    ]
    assert sent == [4, 3]


@pytest.mark.parametrize(
    "trouble", [hangs_up, says(503), says(409, {"type": "/problems/conflict-state"})]
)
def test_client_asks_how_far_an_interrupted_upload_came(
    server: Scripted, ten: Path, trouble: Reply
) -> None:
    server.replies = [received(0), trouble, received(2), received(6), says(200, {"version": 1})]
    with server.client() as client:
        client.put_datablock("c", ten)
    assert [said for said, _ in ranges(server)] == [
        "bytes */10",
        "bytes 0-3/10",
        "bytes */10",
        "bytes 2-5/10",
        "bytes 6-9/10",
    ]


def test_interrupted_bundle_upload_continues(server: Scripted, ten: Path) -> None:
    server.replies = [says(404), received(0), hangs_up, received(2), says(201, {"files": 1})]
    with server.client() as client:
        assert client.upload("ab12", ten.read_bytes()[:6]) == {"files": 1}
    assert [said for said, _ in ranges(server)[1:]] == [
        "bytes */6",
        "bytes 0-3/6",
        "bytes */6",
        "bytes 2-5/6",
    ]


def test_refused_part_is_not_sent_again(server: Scripted, ten: Path) -> None:
    server.replies = [received(0), says(422, {"title": "no tensors"})]
    with server.client() as client, pytest.raises(ApiProblem, match="no tensors"):
        client.put_datablock("c", ten)


def a_part(body: bytes, start: int, end: int, *, promised: int = 0) -> Reply:
    """The bytes from start to end of body; fewer than promised, if any are."""

    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(206)
        handler.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        handler.send_header("Content-Location", "/v1/datablocks/c@7")
        handler.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(body)}")
        handler.send_header("Content-Length", str(promised or end - start))
        handler.end_headers()
        handler.wfile.write(body[start:end])
        handler.close_connection = True

    return reply


def test_interrupted_datablock_download_continues(server: Scripted, tmp_path: Path) -> None:
    body = b"0123456789"
    first, broken = a_part(body, 0, 1), a_part(body, 0, 4, promised=10)
    server.replies = [first, broken, hangs_up, a_part(body, 4, 10)]
    with server.client() as client:
        assert client.get_datablock("c", tmp_path / "c") == "c@7"
    assert (tmp_path / "c").read_bytes() == body
    assert [headers["Range"] for _, _, headers, _ in server.seen] == [
        "bytes=0-0",
        None,
        "bytes=4-",
        "bytes=4-",
    ]
    assert {path for _, path, *_ in server.seen[1:]} == {"/v1/datablocks/c@7"}
    assert [one.name for one in tmp_path.iterdir()] == ["c"]


def test_download_with_a_wrong_hash_is_reported_and_deleted(
    server: Scripted, tmp_path: Path
) -> None:
    body = b"0123456789"

    def lies(handler: BaseHTTPRequestHandler) -> None:
        a_part(b"012345678x", 0, 10)(handler)

    server.replies = [a_part(body, 0, 1), lies]
    with server.client() as client, pytest.raises(DamagedDownload, match="hash to"):
        client.get_datablock("c", tmp_path / "c")
    assert list(tmp_path.iterdir()) == []
