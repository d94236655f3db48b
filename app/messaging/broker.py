"""Uses Celery over Redis, to wake workers and to host processes; its messages contain no work.

This module has the names of queues and messages, and the settings that all processes share. A bare
client made by `make_celery` can send to workers that it does not import.

A message carries one text, which `app.messaging.signed_messages` signs and opens; a nudge carries
none. Anyone with write access to Redis can put anything into a queue. So `Channel` checks the size
and the form of what it reads before it is parsed, and discards items that are not messages for this
process.
"""

from __future__ import annotations

import base64
import itertools
import json
import logging
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from celery import Celery
from celery.utils.nodenames import anon_nodename
from kombu import serialization
from kombu.exceptions import OperationalError
from kombu.transport import TRANSPORT_ALIASES
from kombu.transport import redis as over_redis
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

log = logging.getLogger(__name__)

CONTROL_QUEUE = "control"
PROBE_QUEUE = "control.probe_queue"  # of `refusal`; no process reads it

CONTROL_NUDGE = "control.nudge"  # something was submitted or asked for
CONTROL_PROBE = "control.probe"  # a check of whether control takes messages
ISLAND_NUDGE = "island.nudge"  # look again
ISLAND_ALIVE = "island.alive"  # a heartbeat
DEVICE_NEWS = "device.news"  # message to a device: the answer to its heartbeat, and orders

CONTENT_TYPE = "application/x-roundhouse"
MESSAGE_LIMIT_BYTES = 32 * 2**20
WRAPPING_LIMIT_BYTES = 8 * 2**10  # size limit of a message without its text
# most brackets in a message without its text: this limits its depth and its number of objects
BRACKETS_LIMIT = 32
COMPLAIN_EVERY_S = 10.0
READ_TOGETHER = 16  # messages in one exchange: bounds memory, as each may be large
# exchanges in a row, and bytes read in them, before the reader looks at anything else
TURNS_TOGETHER, TURNS_LIMIT_BYTES = 1024, 16 * 2**20

#: The messages that this process accepts, by name: the function that handles them. It is called
#: with the message's text. No message expires: clocks of two hosts are never compared, and an old
#: message changes nothing, because it carries an old epoch, process or time of its sender.
HEARD: dict[str, Callable[[str], None]] = {}

#: Functions that are called once all messages that waited in the queues were handed over.
HEARD_ALL: list[Callable[[], None]] = []


def island_queue(island: str) -> str:
    return f"island.{island}"


def device_queue(device: str) -> str:
    return f"device.{device}"


def make_celery(name: str, redis_url: str, tls: dict[str, Any] | None = None) -> Celery:
    """Create a Celery client; `tls` says how to verify a `rediss://` server, and our own
    certificate.
    """
    celery = Celery(name, broker=_broker_url(redis_url))
    celery.conf.update(
        accept_content=[CONTENT_TYPE],
        task_serializer="roundhouse",
        task_ignore_result=True,
        task_publish_retry=False,  # the sender of a hint that failed sends it again later
        task_default_queue="unused",
        task_create_missing_queues=True,
        worker_prefetch_multiplier=1,
        worker_send_task_events=False,
        worker_enable_remote_control=False,
        worker_hijack_root_logger=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_pool_limit=4,
        broker_transport_options=_transport(redis_url),
        broker_use_ssl=tls or False,
    )
    return celery


def send(celery: Celery, name: str, queue: str, text: str = "") -> None:
    """Publish one hint; raises kombu.exceptions.OperationalError if Redis does not take it."""
    # Do not repeat the body in the headers, where it is never read.
    shown = {"argsrepr": "", "kwargsrepr": ""}
    args = (text,) if text else ()
    celery.send_task(name, args=args, queue=queue, ignore_result=True, **shown)


def refusal(redis_url: str, tls: Mapping[str, Any], *, timeout_s: float = 2.0) -> str:
    """Put a message into a queue and delete the queue; return why Redis refuses that, or "".

    A Redis that answers PING may still take no message: a replica, a full one, one without a disk.
    The API and the islands may write to queues of control, and read none (`container_secrets`).
    """
    options = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s, **tls}
    try:
        with Redis.from_url(redis_url, retry=Retry(NoBackoff(), 0), **options) as client:
            client.lpush(PROBE_QUEUE, "")
            client.delete(PROBE_QUEUE)
    except (RedisError, OSError) as error:
        code = getattr(error, "status_code", None) or ""
        if code or isinstance(error, ResponseError):
            return f"refuses messages: {f'{code} {error}'.strip()}"
        if isinstance(error.__cause__ or error.__context__, socket.gaierror):
            return "no answer: the name of its host cannot be resolved"
        return f"no answer: {type(error).__name__}"
    return ""


def send_all(celery: Celery, name: str, texts: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Publish hints, each (queue, text), in one exchange with Redis.

    The messages have the form that Celery gives to those of `send`, but are made here: Celery would
    declare each queue and wait for Redis at each message.  Returns the queues that Redis refused,
    each with its reason: the key holds something else, or Redis has no memory left.  Raises
    kombu.exceptions.OperationalError or redis.exceptions.RedisError if Redis does not answer, and
    then some messages may have been published.
    """
    make = _maker(name)
    with celery.producer_or_acquire() as producer, producer.channel.conn_or_acquire() as client:
        pipeline = client.pipeline(transaction=False)
        for queue, text in texts:
            pipeline.lpush(queue, make(queue, text))
        replies = pipeline.execute(raise_on_error=False)
    return {
        queue: str(reply)
        for (queue, _), reply in zip(texts, replies, strict=True)
        if isinstance(reply, Exception)
    }


def _maker(name: str) -> Callable[[str, str], str]:
    """Return a function that makes a message of this name for a queue.

    Only three texts differ from one message to the next, so the rest is written as JSON once.
    """
    body, queue, id = (f"<{uuid.uuid4()}>" for _ in range(3))
    written = json.dumps(_message(name, body=body, queue=queue, id=id))
    ids, numbers = str(uuid.uuid4())[:24], itertools.count()

    def make(to: str, text: str) -> str:
        message = written.replace(id, f"{ids}{next(numbers):012x}")
        message = message.replace(queue, json.dumps(to)[1:-1])
        return message.replace(body, base64.b64encode(text.encode()).decode())

    return make


def _message(name: str, *, body: str, queue: str, id: str) -> dict[str, Any]:
    shown = {"argsrepr": "", "kwargsrepr": ""}
    unused = dict.fromkeys(
        ("shadow", "eta", "expires", "group", "group_index", "parent_id", "stamped_headers")
    )
    headers = {
        **unused,
        **shown,
        "lang": "py",
        "task": name,
        "id": id,
        "root_id": id,
        "retries": 0,
        "timelimit": [None, None],
        "origin": anon_nodename(),
        "ignore_result": True,
        "replaced_task_nesting": 0,
        "stamps": {},
    }
    return {
        "body": body,
        "content-encoding": "utf-8",
        "content-type": CONTENT_TYPE,
        "headers": headers,
        "properties": {
            **shown,
            "delivery_mode": 2,
            "priority": 0,
            "body_encoding": "base64",
            "correlation_id": id,
            "delivery_info": {"exchange": "", "routing_key": queue},
            "delivery_tag": id,
        },
    }


def _broker_url(redis_url: str) -> str:
    """Rewrite the URL's scheme to name our transport, which is Redis with checks on reading."""
    scheme, _, place = redis_url.partition("://")
    return f"roundhouse+socket://{place}" if scheme == "unix" else f"roundhouse://{place}"


def _transport(redis_url: str) -> dict[str, Any]:
    options: dict[str, Any] = {
        "visibility_timeout": 60,
        "health_check_interval": 5,
        "socket_timeout": 10,
        "socket_connect_timeout": 3,
        # A sender tries once more at once, for a connection that a restart of Redis has closed. By
        # itself kombu tries for ever, and a round of an island would wait with it.
        "max_retries": 1,
        "interval_start": 0,
        "interval_step": 0,
        "interval_max": 0,
    }
    if not redis_url.startswith("unix://"):
        options["socket_keepalive"] = True
    return options


# --- serialization --------------------------------------------------------------------------------


def _written(body: tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]) -> str:
    """Serialize a message, (args, kwargs, embed): its text is the only argument; "" without one."""
    return body[0][0] if body[0] else ""


def _read(text: str | bytes) -> tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]:
    text = text if isinstance(text, str) else text.decode()
    return (text,) if text else (), {}, {}


serialization.register("roundhouse", _written, _read, CONTENT_TYPE, "utf-8")


# --- checks on reading ----------------------------------------------------------------------------


class NotAMessage(Exception):
    """Raised for an item in a queue that is not a message of Roundhouse."""


class Complaint:
    """Logs an event that may occur very often: the first time at once, later now and then with a
    count.
    """

    def __init__(self, logger: logging.Logger, words: str) -> None:
        self._log, self._words = logger, words
        self._left_out, self._next_s = 0, 0.0

    def say(self, why: object, *, exc_info: bool = False) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s:
            self._left_out += 1
            return
        more = f"; and {self._left_out} times before" if self._left_out else ""
        self._log.warning("%s: %s%s", self._words, str(why)[:300], more, exc_info=exc_info)
        self._left_out, self._next_s = 0, now_s + COMPLAIN_EVERY_S


class Channel(over_redis.Channel):
    """Reads from Redis, and discards what is not a message, so that the worker can continue."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._complaint = Complaint(log, "dropped an invalid message from a queue")
        super().__init__(*args, **kwargs)

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        return {**super()._connparams(asynchronous), "retry": Retry(NoBackoff(), 1)}

    def _create_client(self, asynchronous: bool = False) -> Any:
        client = super()._create_client(asynchronous)
        client.set_response_callback("BRPOP", checked)
        return client

    def _brpop_read(self, **options: Any) -> Any:
        try:
            found = super()._brpop_read(**options)
            self._take_what_waits()
            return found
        except NotAMessage as error:
            self._complaint.say(error)
        except ResponseError as error:
            if not str(error).startswith("WRONGTYPE"):
                raise  # the consumer connects anew
            self._complaint.say(error)
            self._remove_what_is_no_queue()
        return True

    def _take_what_waits(self) -> None:
        """Handle the messages that wait behind the one that was read, many of them in one exchange.

        An island gets thousands of heartbeats a second. Otherwise each would cost an exchange with
        Redis, a turn of Celery's loop and three objects that are not needed.
        """
        with self.conn_or_acquire() as client:
            for queue in self.active_queues:
                read_bytes = 0
                for _ in range(TURNS_TOGETHER):
                    items = client.rpop(queue, READ_TOGETHER) or ()
                    for item in items:
                        self._take(item)
                    read_bytes += sum(map(len, items))
                    if len(items) < READ_TOGETHER or read_bytes > TURNS_LIMIT_BYTES:
                        break
        for heard_all in HEARD_ALL:
            heard_all()

    def _take(self, item: bytes) -> None:
        try:
            task, text = _opened(item)
        except NotAMessage as error:
            self._complaint.say(error)
            return
        HEARD[task](text)

    def _remove_what_is_no_queue(self) -> None:
        """Delete keys of other types that were put in a queue's place, so that the queue works
        again.
        """
        with self.conn_or_acquire() as client:
            for queue in self.active_queues:
                for step in self.priority_steps:
                    key = self._q_for_pri(queue, step)
                    if client.type(key) not in (b"list", b"none"):
                        client.delete(key)


class Transport(over_redis.Transport):
    """Counts every error of Redis as a loss of the connection: the worker waits and connects anew.

    A Redis that fails over, is full, or has lost our rights answers each command with an error. By
    itself Celery ends the process at such a reply.
    """

    Channel = Channel
    connection_errors = (*over_redis.Transport.connection_errors, RedisError, OperationalError)


TRANSPORT_ALIASES["roundhouse"] = f"{__name__}:Transport"


def checked(reply: Any, **_: Any) -> tuple[bytes, bytes] | None:
    """Return the reply of BRPOP if it is a message for us; raises NotAMessage.

    Time and memory are bounded by the bytes that are there already.
    """
    if not reply:
        return None
    queue, item = reply
    _opened(item)
    return queue, item


def _opened(item: bytes) -> tuple[str, str]:
    """Return the name and the text of a message for us; raises NotAMessage."""
    if len(item) > MESSAGE_LIMIT_BYTES:
        raise NotAMessage(f"{len(item)} bytes")
    if item.count(b"[") + item.count(b"{") > BRACKETS_LIMIT:
        raise NotAMessage(f"JSON of more than {BRACKETS_LIMIT} lists and objects")
    try:
        message = json.loads(item.decode())
        text_bytes = len(message["body"])
        text = base64.b64decode(message["body"], validate=True).decode()
        _check(message)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise NotAMessage(f"{item[:60]!r}: {error!r:.100}") from error
    if len(item) - text_bytes > WRAPPING_LIMIT_BYTES:
        raise NotAMessage(f"{len(item) - text_bytes} bytes of headers")
    return message["headers"]["task"], text


def _check(message: dict[str, Any]) -> None:
    """Raise ValueError, TypeError, KeyError or AttributeError for a message that no process of ours
    sends.
    """
    headers, properties = message["headers"], message["properties"]
    kind = message["content-type"], message["content-encoding"], properties["body_encoding"]
    if kind != (CONTENT_TYPE, "utf-8", "base64") or headers.get("compression"):
        raise ValueError(f"the message must be JSON; got {kind}")
    if headers["task"] not in HEARD:
        raise ValueError(f"no handler for {headers['task']!r}")
    if not isinstance(properties["delivery_tag"], str):
        raise ValueError("the delivery tag is not a text")
    properties["delivery_info"].items()
