"""Sends a message by mail, through the server that the operator set (`smtp_url`).

The server is the operator's, and tenants choose only whom it writes to, so the guard of addresses
(`guarded_post`) does not apply: the server often has a private address.
"""

from __future__ import annotations

import json
import smtplib
import ssl
import time
from contextlib import closing, suppress
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import formatdate
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from app.core.webhooks.retries import AttemptAnswer
from app.settings import settings

SMTP_PORT, SMTPS_PORT = 25, 465


class _MailRefused(Exception):
    """Raised if the server answers a step with this code."""

    def __init__(self, step: str, code: int) -> None:
        super().__init__(f"the mail server answered {step} with {code}")
        self.code = code


def is_possible() -> bool:
    """True if the operator set a server and a sender."""
    return bool(settings().smtp_url.get_secret_value() and settings().mail_from)


def send(id: str, address: str, body: str, *, timeout_s: float) -> AttemptAnswer:
    """Send the mail; a fault of the server raises nothing.

    The status is the code of the server's last answer.  Its text is not kept, as it often repeats
    the receiver's address.
    """
    began_s = time.monotonic()
    status: int | None = None
    error = ""
    try:
        status = _status(_mail(id, address, body), address, began_s + timeout_s)
    except _MailRefused as refused:
        status, error = refused.code, str(refused)
    except TimeoutError:
        error = f"no answer of the mail server within {timeout_s:g} s"
    except smtplib.SMTPResponseException as refused:
        status, error = refused.smtp_code, f"the mail server answered with {refused.smtp_code}"
    except (smtplib.SMTPException, OSError) as failed:
        error = f"the mail server cannot be used: {type(failed).__name__}"
    took_us = round((time.monotonic() - began_s) * 1e6)
    return AttemptAnswer(status=status, error=error, took_us=took_us)


def _mail(id: str, address: str, body: str) -> EmailMessage:
    said = json.loads(body)
    mail = EmailMessage()
    mail["From"], mail["To"] = settings().mail_from, address
    mail["Subject"] = said["subject"]
    mail["Date"] = formatdate()
    mail["Message-ID"] = f"<{id}@{settings().mail_from.rpartition('@')[2]}>"
    mail["Auto-Submitted"] = "auto-generated"  # so that no absent person's program answers
    mail.set_content(said["text"])
    return mail


def _status(mail: EmailMessage, address: str, deadline_s: float) -> int:
    """Go through the steps of SMTP, none of which begins after the deadline."""
    server = urlsplit(settings().smtp_url.get_secret_value())
    with closing(_connection(server, _left_s(deadline_s))) as smtp:

        def step(name: str, *words: Any, **more: Any) -> int:
            assert smtp.sock is not None
            smtp.sock.settimeout(_left_s(deadline_s))
            code: int = getattr(smtp, name)(*words, **more)[0]
            if not 200 <= code < 300:
                raise _MailRefused(name, code)
            return code

        step("ehlo")
        if server.scheme == "smtp" and smtp.has_extn("starttls"):
            step("starttls", context=ssl.create_default_context())
            step("ehlo")
        elif server.scheme == "smtp" and server.password is not None:
            raise smtplib.SMTPNotSupportedError("a password needs TLS")
        if server.username is not None:
            step("login", unquote(server.username), unquote(server.password or ""))
        step("mail", settings().mail_from)
        step("rcpt", address)
        code = step("data", mail.as_bytes(policy=SMTP))
        with suppress(OSError, smtplib.SMTPException):  # the server has the mail
            smtp.quit()
        return code


def _connection(server: SplitResult, timeout_s: float) -> smtplib.SMTP:
    host = server.hostname or ""
    if server.scheme == "smtps":
        context = ssl.create_default_context()
        return smtplib.SMTP_SSL(host, server.port or SMTPS_PORT, timeout=timeout_s, context=context)
    return smtplib.SMTP(host, server.port or SMTP_PORT, timeout=timeout_s)


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
