"""Signs and opens the messages over Redis: with write access to Redis, no one can forge or redirect
one.

A text is the sender's public key in hexadecimal digits, the proof that it is the sender's, and the
body, a line each (`app.messaging.message_keys`). It is opened only if the reader knows the public
key from elsewhere; no part of any other text is parsed.

A heartbeat names its device, the device's process and the time when it was sent. News (the messages
to a device, or to all devices of a host) names its devices; an answer also names the heartbeat that
it answers, and orders are numbered. So a text that is sent again, or to another device, changes
nothing.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from app.core.model.fields import not_plain
from app.core.model.protocol.messages import (
    JSON,
    Alive,
    Answer,
    HostPulses,
    LeaseRenewal,
    Pulse,
    ReportWanted,
    decode,
    encode,
)
from app.core.model.protocol.wellformed import BadMessage, is_id
from app.messaging.message_keys import MessageKeys
from app.storage.signing import HEARTBEAT, NEWS, BadSignature

#: So long after the beat in which an answer is due, a device signs its heartbeats: time enough for
#: one more of them within the lease. An island that has too many devices answers each third
#: heartbeat of 2 s, and signatures would cost it still more.
SIGNS_AFTER_S = 5.0
USUAL_BEAT_S = 2.0

_SENT_US = ',"sent_us":'  # as it stands in a message: within a JSON text its quotes are escaped


def sealed_heartbeat(
    keys: MessageKeys, heartbeat: Alive | Pulse | HostPulses, *, to: str = ""
) -> str:
    """Seal a heartbeat for the island with the public key `to`; "" signs it."""
    return _sealed(keys, HEARTBEAT, encode(heartbeat), to=to)


def claimed_process(text: str) -> str:
    """Return what names the device processes from which a sealed heartbeat claims to come.

    Nothing is checked or parsed: it is the text before the time of sending, without the signature
    and the kind of the heartbeat. For a text without that it is the whole text.
    """
    key, _, sealed = text.partition("\n")
    head, found, _ = sealed.partition("\n")[2].partition(_SENT_US)
    head = head.partition(",")[2]
    return f"{key}\n{head}" if found else text


def opened_body(keys: MessageKeys, text: str, *, hosts: Container[str]) -> tuple[str, JSON]:
    """Return the public key of the host that sent a heartbeat, and its content, which is not
    checked yet.

    `hosts` are the accepted public keys.  Raises BadSignature or BadMessage.
    """
    return _opened(keys, text, HEARTBEAT, hosts)


def heartbeats_in(body: JSON, text: str, key: str) -> Sequence[Alive | Pulse]:
    """Return the heartbeats that `body` says, from the text that the host with `key` sent.

    Raises BadSignature or BadMessage.
    """
    _check_storable(body, text)
    heartbeat = decode(body)
    if isinstance(heartbeat, HostPulses):
        return heartbeat.each()
    if isinstance(heartbeat, Pulse):
        return [heartbeat]
    if not isinstance(heartbeat, Alive):
        raise BadMessage("not a heartbeat")
    if heartbeat.facts.get("key") != key:
        raise BadSignature("sent by another host than the message names")
    return [heartbeat]


def sealed_news(keys: MessageKeys, device: str, bodies: Iterable[JSON], *, to: str = "") -> str:
    """Seal an answer and orders for one device, in this order.

    `to` is the public key of its host; "" signs them.
    """
    return _sealed(keys, NEWS, {"device": device, "news": list(bodies)}, to=to)


def sealed_host_news(keys: MessageKeys, news: Mapping[str, Iterable[JSON]], *, to: str = "") -> str:
    """Seal the answers and orders for several devices of one host, as `sealed_news` would."""
    return _sealed(keys, NEWS, {"news": {name: list(it) for name, it in news.items()}}, to=to)


class Mail:
    """Opens the messages for the devices of one host, if their own island sent them, or another
    island that their own named.

    Only the own island may answer heartbeats, because it alone leases the devices.
    """

    def __init__(self, keys: MessageKeys, island: str) -> None:
        self.keys, self.island = keys, island
        self.peers: tuple[str, ...] = ()
        self._answered_s, self._beat_s = -math.inf, USUAL_BEAT_S  # by the monotonic clock

    def addressee(self) -> str:
        """Return the public key of the island, for which the next heartbeat is sealed.

        It is "" if no answer has come in time: the island may not know the shared key, so the next
        heartbeat is signed.
        """
        unanswered_s = time.monotonic() - self._answered_s
        return self.island if unanswered_s < self._beat_s + SIGNS_AFTER_S else ""

    def opened(self, text: str) -> dict[str, list[Any]]:
        """Return the messages by device; raises BadSignature or BadMessage."""
        key, body = _opened(self.keys, text, NEWS, (self.island, *self.peers))
        news = body.get("news")
        by_device = news if isinstance(news, dict) else {body.get("device"): news}
        return {_device(name): self._read(bodies, key) for name, bodies in by_device.items()}

    def _read(self, bodies: Any, key: str) -> list[Any]:
        if not isinstance(bodies, list):
            raise BadMessage("the message has no news")
        messages = [decode(one) for one in bodies]
        for message in messages:
            if isinstance(message, Answer | LeaseRenewal | ReportWanted):
                self._learn(message, key)
        return messages

    def _learn(self, answer: Answer | LeaseRenewal | ReportWanted, key: str) -> None:
        if key != self.island:
            raise BadSignature("only the device's own island may send answers")
        if isinstance(answer, ReportWanted):
            return
        self._answered_s = time.monotonic()
        if isinstance(answer, Answer):
            self.peers = tuple(answer.peers)
            self._beat_s = answer.beat_us / 1e6 or USUAL_BEAT_S


def _device(name: Any) -> str:
    if not is_id(name):
        raise BadMessage(f"the message is for {name!r:.100}, which names no device")
    return str(name)


def _sealed(keys: MessageKeys, context: bytes, body: JSON, *, to: str) -> str:
    return keys.sealed(context, _json(body).encode(), to=to)


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _opened(
    keys: MessageKeys, text: str, context: bytes, known: Container[str]
) -> tuple[str, JSON]:
    key, said = keys.opened(text, context, known=known)
    try:
        body = _READERS[context].decode(said.decode())
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"not valid JSON: {error!s:.100}") from error
    if not isinstance(body, dict):
        raise BadMessage("not a JSON object")
    return key, body


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is not a valid JSON number")


def _int64(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= (value := int(digits)) < 2**63:
        raise ValueError(f"{digits:.30} is not a 64-bit integer")
    return value


_READERS: dict[bytes, json.JSONDecoder] = {
    HEARTBEAT: json.JSONDecoder(parse_constant=_refused, parse_int=_int64),
    # An island computes with integers of any size, and may send them to a device.
    NEWS: json.JSONDecoder(parse_constant=_refused),
}

_PERHAPS_UNSTORABLE = ("\\u0000", "\\ud", "\\uD")  # NUL, and halves of a surrogate pair


def _check_storable(body: JSON, text: str) -> None:
    """Raise BadMessage for texts that Postgres cannot store.

    The body is searched only if the text shows that it may have some.
    """
    if any(sign in text for sign in _PERHAPS_UNSTORABLE):
        for fault in not_plain(body):
            raise BadMessage(f"{fault.pointer}: {fault.detail}")
