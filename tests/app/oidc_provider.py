"""An OpenID Connect provider, as a process of its own: `python tests/app/oidc_provider.py`.

It prints its address, and signs in without asking whoever /control/person named last.  It is strict
where the standards are: a code is good once, for its client, address and verifier.  Under /control
a test says who comes, rotates the keys, and has any claims signed in any way.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

from joserfc import jwt
from joserfc.jwk import ECKey, RSAKey

CLIENT, SECRET = "roundhouse", "a secret: of the client"
JSON = dict[str, Any]


class Provider(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.issuer = f"http://127.0.0.1:{self.server_port}"
        self.person: JSON = {"sub": "1", "groups": []}
        self.codes: dict[str, JSON] = {}
        self.forged_nonce = ""
        self.key_fetches = 0
        self.rotate()

    def rotate(self) -> None:
        """RS256 the first time, ES256 from then on."""
        kid = secrets.token_hex(4)
        if hasattr(self, "key"):
            self.key, self.algorithm = ECKey.generate_key("P-256", {"kid": kid}), "ES256"
        else:
            self.key, self.algorithm = RSAKey.generate_key(2048, {"kid": kid}), "RS256"

    def signed(self, claims: JSON, header: JSON | None = None, key: Any = None) -> str:
        header = {"alg": self.algorithm, "kid": self.key.kid, **(header or {})}
        return jwt.encode(header, claims, key or self.key, algorithms=[header["alg"]])

    def claims(self, **more: Any) -> JSON:
        now = int(time.time())
        standard = {"iss": self.issuer, "aud": CLIENT, "iat": now, "exp": now + 300}
        return {**standard, **self.person, **more}


class Answering(BaseHTTPRequestHandler):
    server: Provider

    def do_GET(self) -> None:
        path, query = self._asked()
        if path == "/.well-known/openid-configuration":
            issuer = self.server.issuer
            places = {f"{name}_endpoint": f"{issuer}/{name}" for name in ("authorization", "token")}
            return self._json({"issuer": issuer, "jwks_uri": f"{issuer}/keys", **places})
        if path == "/keys":
            self.server.key_fetches += 1
            return self._json({"keys": [self.server.key.as_dict(private=False)]})
        if path == "/authorization":
            return self._authorize(query)
        self.send_error(404)

    def do_POST(self) -> None:
        path, _ = self._asked()
        body = self.rfile.read(int(self.headers.get("Content-Length", "0"))).decode()
        if path == "/token":
            return self._token({name: values[0] for name, values in parse_qs(body).items()})
        self._json(getattr(self, path.removeprefix("/control/"))(**json.loads(body)))

    # --- what the standards ask for ---

    def _authorize(self, query: dict[str, str]) -> None:
        assert query["response_type"] == "code"
        assert "openid" in query["scope"].split()
        assert query["code_challenge_method"] == "S256"
        assert query["client_id"] == CLIENT
        code = secrets.token_urlsafe(16)
        self.server.codes[code] = query
        self.send_response(302)
        back = urlencode({"code": code, "state": query["state"]})
        self.send_header("Location", f"{query['redirect_uri']}?{back}")
        self.end_headers()

    def _token(self, form: dict[str, str]) -> None:
        given = self.headers.get("Authorization", "").removeprefix("Basic ")
        client = tuple(map(unquote, base64.b64decode(given).decode().split(":")))
        asked = self.server.codes.pop(form["code"], None)
        digest = hashlib.sha256(form["code_verifier"].encode()).digest()
        challenge = _coded(digest)
        good = (
            form["grant_type"] == "authorization_code"
            and client == (CLIENT, SECRET)
            and asked is not None
            and asked["redirect_uri"] == form["redirect_uri"]
            and asked["code_challenge"] == challenge
        )
        if not good or asked is None:
            return self._json({"error": "invalid_grant"}, 400)
        claims = self.server.claims(nonce=self.server.forged_nonce or asked["nonce"])
        self._json({"token_type": "Bearer", "id_token": self.server.signed(claims)})

    # --- what tests ask for ---

    def person(self, **claims: Any) -> JSON:
        self.server.person = claims
        return {}

    def rotate(self) -> JSON:
        self.server.rotate()
        return {}

    def forge(self, nonce: str) -> JSON:
        self.server.forged_nonce = nonce
        return {}

    def fetches(self) -> JSON:
        return {"keys": self.server.key_fetches}

    def sign(self, how: str = "", drop: str = "", header: JSON | None = None, **more: Any) -> JSON:
        claims = self.server.claims(**more)
        claims.pop(drop, None)
        if how == "none":
            return {"token": f"{_unsigned({'alg': 'none'}, claims)}."}
        if how == "public key as secret":
            unsigned = _unsigned({"alg": "HS256", "kid": self.server.key.kid}, claims)
            public = self.server.key.as_pem(private=False)
            digest = hmac.digest(public, unsigned.encode(), "sha256")
            return {"token": f"{unsigned}.{_coded(digest)}"}
        if how == "another key":
            key = RSAKey.generate_key(2048)
            return {"token": self.server.signed(claims, {"alg": "RS256"}, key)}
        return {"token": self.server.signed(claims, header)}

    # --- shared ---

    def _asked(self) -> tuple[str, dict[str, str]]:
        parts = urlsplit(self.path)
        return parts.path, {name: values[0] for name, values in parse_qs(parts.query).items()}

    def _json(self, body: JSON, status: int = 200) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Nobody reads it."""


def _unsigned(*parts: JSON) -> str:
    return ".".join(_coded(json.dumps(part).encode()) for part in parts)


def _coded(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


if __name__ == "__main__":
    provider = Provider()
    sys.stdout.write(f"{provider.issuer}\n")
    sys.stdout.flush()
    provider.serve_forever()
