"""Talks to an OpenID Connect provider: gives its sign-in address, and checks its tokens.

`Provider.claims` has all conditions that a token must meet. The provider's keys are fetched at
first use and every hour. They are also fetched when a token names an unknown key, but then at most
every ten seconds, because anybody can make such a token. At most one thread waits for the provider
while older keys are available.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import threading
import time
from typing import Any
from urllib.parse import quote, urlencode

import httpx2
from joserfc import jwt
from joserfc.errors import InvalidKeyIdError, JoseError
from joserfc.jwk import KeySet

#: Asymmetric signatures only: a shared secret, or no signature, proves nothing here.
ALGORITHMS = ("RS256", "PS256", "ES256")
LEEWAY_S = 30  # allowed difference of clocks
KEYS_KEPT_S = 3600.0
ASKED_AGAIN_S = 10.0
AWAY_AGAIN_S = 2.0  # retry interval while no keys are known
TIMEOUT_S = 5.0

JSON = dict[str, Any]

log = logging.getLogger(__name__)


class BadToken(Exception):
    """The token proves nothing; the text says why."""


class Away(Exception):
    """The provider does not answer, or not as a provider should."""


class Provider:
    """An OpenID Connect provider.  `issuer` is its address, exactly as its tokens name it."""

    def __init__(self, issuer: str, client_id: str, client_secret: str = "") -> None:
        self.issuer, self.client_id, self._secret = issuer, client_id, client_secret
        self._http = httpx2.Client(timeout=TIMEOUT_S)
        self._lock = threading.Lock()
        self._about: JSON = {}
        self._keys = KeySet([])
        self._away = ""
        self._asked_s = -KEYS_KEPT_S  # by the monotonic clock

    # --- tokens ---

    def claims(self, token: str, *, audience: str, nonce: str | None = None) -> JSON:
        """Return the token's claims if the provider signed it for us and it is valid now.

        With `nonce`, it must be the ID token of the sign-in that began with that nonce.  Raises
        BadToken or Away.
        """
        needed: JSON = {
            "iss": {"essential": True, "value": self.issuer},
            "aud": {"essential": True, "value": audience},
            "sub": {"essential": True},
            "exp": {"essential": True},
        }
        if nonce is not None:
            needed["nonce"] = {"essential": True, "value": nonce}
        try:
            claims = self._signed(token)
            jwt.JWTClaimsRegistry(leeway=LEEWAY_S, **needed).validate(claims)
        except (JoseError, ValueError, TypeError) as error:  # joserfc trusts the types of a header
            raise BadToken(str(error).strip(": ")) from error
        if nonce is not None and claims.get("azp", self.client_id) != self.client_id:
            raise BadToken("the token was issued for another client")
        return claims

    def _signed(self, token: str) -> JSON:
        self._refresh(KEYS_KEPT_S)
        try:
            return jwt.decode(token, self._keys, algorithms=ALGORITHMS).claims
        except InvalidKeyIdError:
            self._refresh(ASKED_AGAIN_S)  # the provider may have a new key
            return jwt.decode(token, self._keys, algorithms=ALGORITHMS).claims

    # --- signing in ---

    def sign_in_address(self, *, redirect_uri: str, state: str, nonce: str, verifier: str) -> str:
        """Return the address at which a browser signs in; raises Away."""
        self._refresh(KEYS_KEPT_S)
        challenge = base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest())
        asked = {
            "response_type": "code",
            "client_id": self.client_id,
            "redirect_uri": redirect_uri,
            "scope": "openid profile email",
            "state": state,
            "nonce": nonce,
            "code_challenge": challenge.decode().rstrip("="),
            "code_challenge_method": "S256",
        }
        address = str(self._about["authorization_endpoint"])
        return f"{address}{'&' if '?' in address else '?'}{urlencode(asked)}"

    def redeem(self, code: str, *, redirect_uri: str, verifier: str) -> str:
        """Exchange a code for its ID token; raises BadToken or Away."""
        self._refresh(KEYS_KEPT_S)
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": redirect_uri,
            "code_verifier": verifier,
        }
        auth = httpx2.Auth()  # adds nothing
        if self._secret:
            auth = httpx2.BasicAuth(quote(self.client_id, ""), quote(self._secret, ""))
        else:
            form["client_id"] = self.client_id
        try:
            answer = self._http.post(self._about["token_endpoint"], data=form, auth=auth)
        except httpx2.HTTPError as error:
            raise Away(str(error)) from error
        if answer.status_code >= 500:
            raise Away(f"its token endpoint answered {answer.status_code}")
        token = _object(answer).get("id_token")
        if not answer.is_success or not isinstance(token, str):
            raise BadToken("the provider does not know this sign-in; it may have expired")
        return token

    # --- metadata and keys ---

    def _refresh(self, older_than_s: float) -> None:
        """Fetch metadata and keys if they are older than this; raises Away if none are known."""
        if time.monotonic() - self._asked_s < older_than_s and self._about:
            return
        if not self._lock.acquire(blocking=not self._about):
            return  # another thread fetches now; the known keys serve until then
        try:
            since_s = time.monotonic() - self._asked_s
            if since_s >= (older_than_s if self._about else AWAY_AGAIN_S):
                self._ask()
        finally:
            self._lock.release()
        if not self._about:
            raise Away(self._away)

    def _ask(self) -> None:
        try:
            about = self._get(f"{self.issuer.rstrip('/')}/.well-known/openid-configuration")
            if about.get("issuer") != self.issuer:
                raise Away(f"{self.issuer} reports another issuer: {about.get('issuer')}")
            missing = {"authorization_endpoint", "token_endpoint", "jwks_uri"} - about.keys()
            if missing:
                raise Away(f"{self.issuer} does not report its {', '.join(sorted(missing))}")
            keys = KeySet.import_key_set(self._get(about["jwks_uri"]))  # type: ignore[arg-type]
        except (Away, JoseError, ValueError, KeyError) as error:
            self._away = str(error)
            log.warning(
                "cannot refresh the identity provider's metadata; the last known metadata is "
                "used: %s",
                error,
            )
        else:
            self._about, self._keys = about, keys
        self._asked_s = time.monotonic()

    def _get(self, url: str) -> JSON:
        try:
            answer = self._http.get(url)
        except httpx2.HTTPError as error:
            raise Away(f"{url}: {error}") from error
        if not answer.is_success:
            raise Away(f"{url} answered {answer.status_code}")
        return _object(answer)


def _object(answer: httpx2.Response) -> JSON:
    try:
        found = answer.json()
    except ValueError as error:
        raise Away(f"{answer.request.url} did not answer with JSON") from error
    if not isinstance(found, dict):
        raise Away(f"{answer.request.url} did not answer with a JSON object")
    return found
