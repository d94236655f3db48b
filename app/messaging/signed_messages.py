"""Signs and opens the messages over Redis: with write access to Redis, no one can forge or redirect
one.

A text is the signer's public key in hexadecimal digits, a line end, and the body as
`app.storage.signing` seals it. It is opened only if the reader knows the key from elsewhere; no
part of any other text is parsed.

A heartbeat names its device, the device's process and the time when it was sent. News (the messages
to a device) names its device; an answer also names the heartbeat that it answers, and orders are
numbered. So a text that is sent again, or to another device, changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable
from typing import Any

from app.core.model.fields import not_plain
from app.core.model.protocol.messages import JSON, Alive, Answer, decode, encode
from app.core.model.protocol.wellformed import BadMessage
from app.storage.signing import HEARTBEAT, NEWS, BadSignature, Signer, unsealed

_SENT_US = ',"sent_us":'  # as it stands in a message: within a JSON text its quotes are escaped


def sealed_heartbeat(signer: Signer, alive: Alive) -> str:
    return _sealed(signer, HEARTBEAT, encode(alive))


def claimed_process(text: str) -> str:
    """Return what names the device process from which a sealed heartbeat claims to come.

    Nothing is checked or parsed: it is the text before the time of sending, without the signature.
    For a text without that it is the whole text.
    """
    key, _, sealed = text.partition("\n")
    head, found, _ = sealed.partition("\n")[2].partition(_SENT_US)
    return f"{key}\n{head}" if found else text


def opened_body(text: str, *, hosts: Container[str]) -> tuple[str, JSON]:
    """Return the key that signed a heartbeat, and its content, which is not checked yet.

    `hosts` are the accepted public keys.  Raises BadSignature or BadMessage.
    """
    return _opened(text, HEARTBEAT, hosts)


def heartbeat_in(body: JSON, text: str, key: str) -> Alive:
    """Return the heartbeat that says `body`, from the text that `key` signed.

    Raises BadSignature or BadMessage.
    """
    _check_storable(body, text)
    alive = decode(body)
    if not isinstance(alive, Alive):
        raise BadMessage("not a heartbeat")
    if alive.facts.get("key") != key:
        raise BadSignature("signed by another host than the message names")
    return alive


def sealed_news(signer: Signer, device: str, bodies: Iterable[JSON]) -> str:
    """Seal an answer and orders for one device, in this order."""
    return _sealed(signer, NEWS, {"device": device, "news": list(bodies)})


class ReadyAnswers:
    """Makes the messages for answers that differ from the last one only in which heartbeat they
    answer.
    """

    def __init__(self) -> None:
        self._made: dict[str, tuple[Answer, str, str]] = {}

    def sealed(self, signer: Signer, answer: Answer, *, sent_us: int) -> str:
        """Seal an answer as the answer to the heartbeat of `sent_us`."""
        made = self._made.get(answer.device)
        if made is None or made[0] != answer:
            made = self._made[answer.device] = answer, *_around_sent_us(answer)
        body = f'{made[1]},"sent_us":{sent_us},{made[2]}'
        return _sealed_bytes(signer, NEWS, body.encode())


def _around_sent_us(answer: Answer) -> tuple[str, str]:
    said = encode(answer)
    head = {name: said.pop(name) for name in ("is", "device", "incarnation")}
    del said["sent_us"]
    news = f'{{"device":{_json(answer.device)},"news":[{_json(head)[:-1]}'
    return news, f"{_json(said)[1:]}]}}"


class Mail:
    """Opens the messages for one device, if its own island signed them, or another island that its
    own named.

    Only the own island may answer heartbeats, because it alone leases the device.
    """

    def __init__(self, device: str, island: str) -> None:
        self.device, self.island = device, island
        self.peers: tuple[str, ...] = ()

    def opened(self, text: str) -> list[Any]:
        """Return the messages; raises BadSignature or BadMessage."""
        key, body = _opened(text, NEWS, (self.island, *self.peers))
        if body.get("device") != self.device:
            raise BadMessage(f"the message is for another device: {body.get('device')!r:.100}")
        if not isinstance(news := body.get("news"), list):
            raise BadMessage("the message has no news")
        messages = [decode(one) for one in news]
        for message in messages:
            if isinstance(message, Answer):
                self._learn(message, key)
        return messages

    def _learn(self, answer: Answer, key: str) -> None:
        if key != self.island:
            raise BadSignature("only the device's own island may send answers")
        self.peers = tuple(answer.peers)


def _sealed(signer: Signer, context: bytes, body: JSON) -> str:
    return _sealed_bytes(signer, context, _json(body).encode())


def _sealed_bytes(signer: Signer, context: bytes, body: bytes) -> str:
    return f"{signer.public}\n{signer.sealed(body, context).decode()}"


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _opened(text: str, context: bytes, known: Container[str]) -> tuple[str, JSON]:
    key, _, sealed = text.partition("\n")
    if key not in known:
        raise BadSignature(f"the key {key[:16]!r} may not sign this message")
    try:
        body = json.loads(
            unsealed(sealed.encode(), key=key, context=context),
            parse_constant=_refused,
            # An island computes with integers of any size, and may send them to a device.
            parse_int=_int64 if context == HEARTBEAT else None,
        )
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


_PERHAPS_UNSTORABLE = ("\\u0000", "\\ud", "\\uD")  # NUL, and halves of a surrogate pair


def _check_storable(body: JSON, text: str) -> None:
    """Raise BadMessage for texts that Postgres cannot store.

    The body is searched only if the text shows that it may have some.
    """
    if any(sign in text for sign in _PERHAPS_UNSTORABLE):
        for fault in not_plain(body):
            raise BadMessage(f"{fault.pointer}: {fault.detail}")
