"""Errors of the API, as one tree; each class has its HTTP status and its problem type.

AppError                 500 internal
├── BadInput             422 validation-error      errors: [{pointer, detail, code}]
│   ├── Unsatisfiable    422 unsatisfiable         the request can never run here
│   └── KeyReused        422 idempotency-key-reused
├── Unauthenticated      401 unauthenticated
├── Forbidden            403 insufficient-scope
├── NotFound             404 not-found             also if another tenant owns it
├── Conflict             409 conflict-state
│   ├── QueueFull        409 queue-full
│   └── QuotaExceeded    409 quota-exceeded
├── StaleVersion         412 precondition-failed
├── VersionNeeded        428 precondition-required
├── Gone                 410 gone                  it is listed, but its bytes are lost
├── TooLarge             413 payload-too-large
├── WrongMediaType       415 unsupported-media-type
├── BadRange             416 range-not-satisfiable
├── TooManyCalls         429 rate-limited          says when to call again
└── Unavailable          503 unavailable           Postgres, or the store, does not answer
"""

from __future__ import annotations

from app.core.model.fields import Fault


class AppError(Exception):
    status = 500
    type = "internal"
    title = "Internal error"

    def __init__(self, detail: str = "", *, errors: tuple[Fault, ...] = ()) -> None:
        self.detail = detail or self.title
        self.errors = errors
        super().__init__(self.detail)


class BadInput(AppError):
    status = 422
    type = "validation-error"
    title = "Invalid request"

    @classmethod
    def at(cls, pointer: str, detail: str, code: str = "invalid") -> BadInput:
        return cls(detail, errors=(Fault(pointer, detail, code),))


class Unsatisfiable(BadInput):
    type = "unsatisfiable"
    title = "No device here can run this"


class KeyReused(BadInput):
    type = "idempotency-key-reused"
    title = "Idempotency-Key was used for another request"


class Unauthenticated(AppError):
    status = 401
    type = "unauthenticated"
    title = "A valid API key is needed"


class Forbidden(AppError):
    status = 403
    type = "insufficient-scope"
    title = "Not permitted"


class NotFound(AppError):
    status = 404
    type = "not-found"
    title = "Not found"

    def __init__(self, kind: str, id: str, *, because: str = "") -> None:
        self.kind, self.id = kind, id
        super().__init__(because or f"no {kind} with id {id}")


class Conflict(AppError):
    status = 409
    type = "conflict-state"
    title = "Not possible in this state"


class QueueFull(Conflict):
    type = "queue-full"
    title = "The queue is full"


class QuotaExceeded(Conflict):
    type = "quota-exceeded"
    title = "Quota exceeded"


class StaleVersion(AppError):
    status = 412
    type = "precondition-failed"
    title = "The resource was changed meanwhile"


class VersionNeeded(AppError):
    status = 428
    type = "precondition-required"
    title = "An If-Match header is needed"


class Gone(AppError):
    status = 410
    type = "gone"
    title = "The stored bytes are lost"


class TooLarge(AppError):
    status = 413
    type = "payload-too-large"
    title = "The body is too large"


class WrongMediaType(AppError):
    status = 415
    type = "unsupported-media-type"
    title = "The body is not JSON"


class BadRange(AppError):
    status = 416
    type = "range-not-satisfiable"
    title = "Range not satisfiable"

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        super().__init__(f"the file has {size_bytes} bytes; the range begins after them")


class TooManyCalls(AppError):
    status = 429
    type = "rate-limited"
    title = "Too many calls"

    def __init__(self, detail: str = "", *, retry_after_s: int = 1) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(detail)


class Unavailable(AppError):
    status = 503
    type = "unavailable"
    title = "Service unavailable"
