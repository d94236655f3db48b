"""A thin client of the Roundhouse API, for the command line, notebooks and tests.

Three rules always hold.  A call that may have arrived is repeated only if a repetition is harmless.
A POST is harmless because it carries an `Idempotency-Key`, and all other calls are anyway.  An
error response becomes a `ApiProblem` with everything that the service said.  A broken stream is
resumed where it broke, by `Last-Event-ID`, so that no event is missed or shown twice.

Answers are the service's JSON as dictionaries; nothing is renamed or cached here.

ClientError
├── Problem         the service refused, and said why
├── Unreachable     the service did not answer, after all retries
├── BadEnvironment  a variable for proxies or certificates prevents every call
└── Damaged         the bytes received are not the bytes that the service promised
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any

import httpx2

from app.cli import proxies

JSON = dict[str, Any]

TIMEOUT_S = 30.0
FIRST_PAUSE_S = 0.2  # first pause between attempts, doubled after each attempt
LONGEST_PAUSE_S = 5.0
FOLLOW_PATIENCE_S = 600.0  # for commands that follow something: a restart takes half a minute
TOLD_AFTER_S = 2.0  # a shorter outage is not told
# in seconds: the service sends a comment into a stream every 15 s, so a longer silence is an error
SILENCE_S = 45.0
PART_BYTES = 8 * 2**20  # bytes of an upload in one call
# in seconds, for one part: after the last part the service reads the whole upload again
FINISH_S = 900.0
_BUSY = frozenset({429, 502, 503, 504})


class ClientError(Exception):
    """The base of the errors that a caller of this module must expect."""


class ApiProblem(ClientError):
    """An error response.  `type` is its stable code; `errors` are {pointer, detail, code}."""

    def __init__(self, status: int, body: JSON, *, retry_after_s: float | None = None) -> None:
        self.status = status
        self.url = str(body.get("type", "about:blank"))
        self.type = self.url.rstrip("/").rsplit("/", 1)[-1]
        self.title = str(body.get("title") or f"HTTP status {status}")
        self.detail = str(body.get("detail") or "")
        self.errors: list[JSON] = list(body.get("errors") or [])
        self.retry_after_s = retry_after_s
        super().__init__(f"{self.title}: {self.detail}" if self.detail else self.title)


class Unreachable(ClientError):
    """Says that no service answers at `url`; `hint` is what a reader may check for this cause."""

    def __init__(self, url: str, cause: Exception, hint: str = "") -> None:
        self.url, self.cause, self.hint = url, cause, hint
        self.proxy = proxies.in_words(url)
        super().__init__(f"{url} does not answer: {cause or type(cause).__name__}")


class BadEnvironment(ClientError):
    pass


class DamagedDownload(ClientError):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEvent:
    """Describes an event of a stream; `id` is the position from which to continue after it."""

    type: str
    id: str
    data: JSON


class Client:
    """Calls one service with one key. Several threads must not use it at once.

    `patience_s` is how long a call is retried while the service does not answer.
    """

    def __init__(
        self,
        url: str,
        key: str,
        *,
        patience_s: float = 10.0,
        timeout_s: float | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url, self.patience_s = url.rstrip("/"), patience_s
        self._sleep, self._clock_s = sleep, clock_s
        self._told: Callable[[ClientError], None] = lambda error: None
        self._http = _opened(
            self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=timeout_s or TIMEOUT_S,
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def be_patient(self, told: Callable[[ClientError], None]) -> None:
        """Outlast a restart of the service from now on; `told` is called once in each outage."""
        self.patience_s, self._told = FOLLOW_PATIENCE_S, told

    # --- requests, bundles and datablocks ---

    def submit(self, descriptor: JSON, *, key: str | None = None) -> JSON:
        """Submit a request and return it.

        A second call with the same `key` returns the same request and makes no second one.
        """
        return self.post("/v1/requests", descriptor, key=key)

    def upload(
        self, sha256: str, body: bytes, *, sent: Callable[[int], None] = lambda size: None
    ) -> JSON | None:
        """Ensure that the service has a bundle; return what it found in it, or None if it had it
        before.

        An interrupted upload continues where it broke, as in `put_datablock`.
        """
        path = f"/v1/bundles/{sha256}"
        if self._call("HEAD", path, expect=(404,)).status_code != 404:
            return None
        return self._put(_Upload(path, {}, len(body)), io.BytesIO(body), sent)

    def put_datablock(
        self, name: str, file: Path, *, sent: Callable[[int], None] = lambda size: None
    ) -> JSON:
        """Make the file the newest version of a datablock; only what the service lacks is sent.

        An interrupted upload continues where it broke, now or at the next call.  Raises Unreachable
        after `patience_s` without an answer.  `sent` is called with the number of bytes of each
        part that arrived.
        """
        with file.open("rb") as body:
            sha256, size = hashlib.file_digest(body, "sha256").hexdigest(), body.tell()
            upload = _Upload(f"/v1/datablocks/{name}", {"sha256": sha256}, size)
            return self._put(upload, body, sent)

    def put_file(
        self, sha256: str, file: Path, *, sent: Callable[[int], None] = lambda size: None
    ) -> JSON:
        """Upload a file of a folder, resumed as in `put_datablock`."""
        with file.open("rb") as body:
            size = body.seek(0, os.SEEK_END)
            return self._put(_Upload(f"/v1/files/{sha256}", {}, size), body, sent)

    def put_files(self, files: Mapping[str, bytes]) -> JSON:
        """Upload small files of a folder together, by their hashes."""
        listed = [
            {"sha256": sha256, "content": base64.b64encode(body).decode()}
            for sha256, body in files.items()
        ]
        return self.put("/v1/files", {"files": listed})

    def name_folder(self, name: str, files: list[JSON]) -> JSON:
        """Make a folder of these files the newest version of a datablock; return the version.

        If the service lacks some of the files, it returns {"missing": their hashes} instead.
        """
        return _body(self._call("POST", f"/v1/datablocks/{name}/folder", json={"files": files}))

    def _put(
        self, upload: _Upload, body: IO[bytes], sent: Callable[[int], None] = lambda size: None
    ) -> JSON:
        answer, retries = self._call("PUT", **upload.question()), self._retries()
        while answer.status_code == 202:
            start = int(_body(answer)["received_bytes"])
            body.seek(start)
            part = body.read(PART_BYTES)
            try:
                answer = self._answered("PUT", **upload.part(start, part))
            except (Unreachable, ApiProblem) as error:
                if isinstance(error, ApiProblem) and not _goes_on(error):
                    raise
                retries.wait(error)
                answer = self._call("PUT", **upload.question())
            else:
                sent(len(part))
                retries = self._retries()
        return _body(answer)

    def get_datablock(self, name: str, file: Path) -> str:
        """Write a datablock, NAME or NAME@VERSION, into `file`, which appears whole or not at all.

        Returns NAME@VERSION.  Received bytes are kept beside `file` until the rest has arrived,
        across calls too.  Raises Damaged if the bytes do not have the promised hash.
        """
        return self.fetch(f"/v1/datablocks/{name}", file).rpartition("/")[2]

    def fetch(self, path: str, file: Path) -> str:
        """Write the content of `path`, which has an ETag, into `file`, as `get_datablock` does.

        Returns the path under which the content never changes.
        """
        first = {"Range": "bytes=0-0"}
        said = self._call("GET", path, headers=first).headers
        sha256, address = said["ETag"].strip('"'), said.get("Content-Location", path)
        size = _whole_size(said)
        draft = file.with_name(f".{file.name}.{sha256[:16]}.part")
        self._fill(draft, size, address, retries=self._retries())
        with draft.open("rb") as body:
            found = hashlib.file_digest(body, "sha256").hexdigest()
        if found != sha256:
            draft.unlink()
            raise DamagedDownload(
                f"{address}: the downloaded bytes hash to {found}; expected {sha256}"
            )
        draft.replace(file)
        return address

    def _fill(self, draft: Path, size: int, address: str, *, retries: _Retries) -> None:
        draft.touch()
        while (start := draft.stat().st_size) < size:
            try:
                self._receive(address, {}, draft, start=start)
            except (Unreachable, ApiProblem) as error:
                if isinstance(error, ApiProblem) and not _passes(error):
                    raise
                if draft.stat().st_size > start:
                    retries = self._retries()
                retries.wait(error)

    def download(self, path: str, file: Path, /, **params: Any) -> int:
        """Write the content of `path` into `file`, which appears whole or not at all; return its
        size.

        After an interruption it starts again; raises Unreachable after `patience_s` of that.
        """
        given = {name: value for name, value in params.items() if value is not None}
        draft, retries = file.with_name(f".{file.name}.{uuid.uuid4().hex}"), self._retries()
        try:
            while True:
                try:
                    size = self._receive(path, given, draft)
                except Unreachable as error:
                    retries.wait(error)
                    continue
                draft.replace(file)
                return size
        finally:
            draft.unlink(missing_ok=True)

    def _receive(self, path: str, params: JSON, draft: Path, *, start: int = 0) -> int:
        """Receive the content, or what follows its first `start` bytes, which the draft has
        already.

        Raises Problem, or Unreachable, also if the answer ends too early.
        """
        headers = {"Range": f"bytes={start}-"} if start else {}
        try:
            with self._http.stream("GET", path, params=params, headers=headers) as response:
                if response.is_error:
                    response.read()
                    raise _problem(response)
                with draft.open("ab" if response.status_code == 206 else "wb") as out:
                    for piece in response.iter_bytes():
                        out.write(piece)
                    return out.tell()
        except httpx2.TransportError as error:
            raise Unreachable(self.url, error) from error

    def size_of(self, path: str) -> int:
        """Return the size in bytes of the content of `path`."""
        return _whole_size(self._call("GET", path, headers={"Range": "bytes=0-0"}).headers)

    def read_part(self, path: str, start: int, end: int) -> bytes:
        """Return the bytes of the content of `path` from `start` to `end`."""
        return self._call("GET", path, headers={"Range": f"bytes={start}-{end - 1}"}).content

    def ready(self) -> JSON:
        """Return what /readyz says, even if some checks fail; raises Unreachable."""
        return _body(self._call("GET", "/readyz", expect=(503,)))

    # --- calls ---

    def get(self, path: str, /, **params: Any) -> JSON:
        given = {name: value for name, value in params.items() if value is not None}
        return _body(self._call("GET", path, params=given))

    def post(self, path: str, body: JSON | None = None, *, key: str | None = None) -> JSON:
        headers = {"Idempotency-Key": key or str(uuid.uuid4())}
        how: JSON = {} if body is None else {"json": body}
        return _body(self._call("POST", path, headers=headers, **how))

    def put(self, path: str, body: JSON) -> JSON:
        return _body(self._call("PUT", path, json=body))

    def patch(self, path: str, body: JSON, *, version: int | None = None) -> JSON:
        """Change a thing; `version` is the one that was read, if the thing has versions.

        Raises ApiProblem with status 412 if it has a newer version. That also happens if the answer
        to an earlier try was lost: then the change was made, and its repetition refused.
        """
        headers = {} if version is None else {"If-Match": f'"{version}"'}
        return _body(self._call("PATCH", path, json=body, headers=headers))

    def delete(self, path: str) -> JSON:
        """Delete; return the service's answer, or {} if it has no content."""
        response = self._call("DELETE", path)
        return _body(response) if response.content else {}

    def items(self, path: str, **params: Any) -> Iterator[JSON]:
        """Yield every item of a list, page after page."""
        while True:
            page = self.get(path, **params)
            yield from page["items"]
            if not page.get("next_cursor"):
                return
            params["cursor"] = page["next_cursor"]

    def stream(self, path: str, *, last_id: str = "", **params: Any) -> Iterator[StreamEvent]:
        """Yield events until one of type `end`; a broken stream continues after its last event.

        Raises Unreachable after `patience_s` without an answer.
        """
        retries = self._retries()
        while True:
            opened_s = self._clock_s()
            try:
                for event in self._connect(path, last_id, params):
                    last_id, retries = event.id or last_id, self._retries()
                    yield event
                    if event.type == "end":
                        return
                why: ClientError = Unreachable(self.url, EOFError("the stream ended early"))
            except httpx2.TransportError as error:
                why = Unreachable(self.url, error)
            except ApiProblem as problem:
                if not _passes(problem):
                    raise
                why = problem
            if self._clock_s() - opened_s > self.patience_s:  # the stream was open but silent
                retries = self._retries()
            retries.wait(why)

    def _connect(self, path: str, last_id: str, params: JSON) -> Iterator[StreamEvent]:
        headers = {"Last-Event-ID": last_id} if last_id else {}
        timeout = httpx2.Timeout(TIMEOUT_S, read=SILENCE_S)
        with self._http.sse(path, params=params, headers=headers, timeout=timeout) as source:
            if source.response.is_error:
                source.response.read()
                raise _problem(source.response)
            for event in source:
                if event.data:  # httpx2 also returns a bare `retry` field as an event
                    yield StreamEvent(type=event.event, id=event.id, data=json.loads(event.data))

    def _call(
        self, method: str, path: str, *, expect: tuple[int, ...] = (), **how: Any
    ) -> httpx2.Response:
        retries = self._retries()
        while True:
            try:
                return self._answered(method, path, expect=expect, **how)
            except Unreachable as error:
                retries.wait(error)
            except ApiProblem as problem:
                if not _passes(problem):
                    raise
                retries.wait(problem)

    def _answered(
        self, method: str, path: str, *, expect: tuple[int, ...] = (), **how: Any
    ) -> httpx2.Response:
        """Make one call; raises Unreachable or Problem."""
        try:
            response = self._http.request(method, path, **how)
        except httpx2.TransportError as error:
            raise Unreachable(self.url, error) from error
        if response.is_success or response.status_code in expect:
            return response
        raise _problem(response)

    def _retries(self) -> _Retries:
        return _Retries(self.patience_s, self._sleep, self._told)


def _whole_size(headers: httpx2.Headers) -> int:
    """Return the size in bytes of the content of which an answer has a range."""
    return int(headers["Content-Range"].rpartition("/")[2])


def _opened(url: str, **how: Any) -> httpx2.Client:
    """Return a client for the address; raises BadEnvironment."""
    try:
        if proxies.variable_of(url):
            return httpx2.Client(base_url=url, **how)
        direct = httpx2.HTTPTransport(trust_env=url.startswith("https:"))  # for certificates
        return httpx2.Client(base_url=url, transport=direct, **how)
    except OSError as error:
        name = "SSL_CERT_FILE" if os.environ.get("SSL_CERT_FILE") else "SSL_CERT_DIR"
        raise BadEnvironment(
            f"The certificates of {name}={os.environ.get(name, '')} cannot be read: {error}\n"
            f"  Name a file of PEM certificates, or unset {name}."
        ) from error
    except (ValueError, ImportError, httpx2.InvalidURL) as error:
        raise BadEnvironment(
            f"The proxy of {proxies.in_words(url) or 'this machine'} cannot be used: {error}\n"
            "  Name an http:// or https:// proxy, or put the host of the service into NO_PROXY."
        ) from error


@dataclass(frozen=True, slots=True)
class _Upload:
    """The calls of one upload, as arguments."""

    path: str
    params: JSON
    size: int

    def question(self) -> JSON:
        return self._call(f"bytes */{self.size}")

    def part(self, start: int, body: bytes) -> JSON:
        last = start + len(body) - 1
        return {**self._call(f"bytes {start}-{last}/{self.size}"), "content": body}

    def _call(self, range: str) -> JSON:
        headers = {"Content-Range": range, "Content-Type": "application/octet-stream"}
        timeout = httpx2.Timeout(TIMEOUT_S, read=FINISH_S)
        return {"path": self.path, "params": self.params, "headers": headers, "timeout": timeout}


class _Retries:
    """Pauses between attempts, ever longer, until the patience is used up."""

    def __init__(
        self,
        patience_s: float,
        sleep: Callable[[float], None],
        told: Callable[[ClientError], None],
    ) -> None:
        self.left_s, self.next_s, self.sleep = patience_s, FIRST_PAUSE_S, sleep
        self.paused_s, self.told = 0.0, told

    def wait(self, otherwise: ClientError) -> None:
        """Sleep; raise `otherwise` instead if the sleep would exceed the patience."""
        pause_s = max(self.next_s, getattr(otherwise, "retry_after_s", None) or 0.0)
        if pause_s > self.left_s:
            raise otherwise
        if self.paused_s <= TOLD_AFTER_S < self.paused_s + pause_s:
            self.told(otherwise)
        self.paused_s += pause_s
        self.left_s -= pause_s
        self.next_s = min(self.next_s * 2, LONGEST_PAUSE_S)
        self.sleep(pause_s)


def _passes(problem: ApiProblem) -> bool:
    """True if a retry may help: the service is busy, or still works on the same key."""
    return problem.status in _BUSY or problem.type == "idempotency-in-progress"


def _goes_on(problem: ApiProblem) -> bool:
    """True if a client should ask how far an upload is.

    That is so if another client sends the same file, or if the service is busy.
    """
    return problem.type == "conflict-state" or _passes(problem)


def _body(response: httpx2.Response) -> JSON:
    """Return the JSON of an answer; raises Problem if it is not from a Roundhouse service."""
    try:
        body = response.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        detail = f"{response.request.url} answered {response.text[:80]!r}"
        raise ApiProblem(502, {"title": "Not a Roundhouse service", "detail": detail})
    return body


def _problem(response: httpx2.Response) -> ApiProblem:
    try:
        body = response.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):  # the answer came from a proxy in front of the service
        proxy = proxies.in_words(str(response.url))
        via = f"from the proxy of {proxy}, or from behind it: " if proxy else ""
        body = {"title": response.reason_phrase, "detail": f"{via}{response.text[:200]}"}
        if response.status_code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            body["detail"] = (
                f"{via}a proxy before the service refuses calls of this size. It must take"
                f" {PART_BYTES // 2**20} MiB and a little more (client_max_body_size of nginx)."
            )
    return ApiProblem(response.status_code, body, retry_after_s=_seconds(response))


def _seconds(response: httpx2.Response) -> float | None:
    after = response.headers.get("Retry-After", "")
    return float(after) if after.isdigit() else None
