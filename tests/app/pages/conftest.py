"""A browser without script, in which somebody has signed in."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy.orm import Session

from app.api.access import auth
from app.db.transactions import transaction
from app.pages import forms

TOLD = '<div id="told" role="status">'
OURS = {"Sec-Fetch-Site": "same-origin"}


class Browser:
    """Signed in as somebody; without script unless a call says `hx`."""

    def __init__(self, client: TestClient, cookie: str) -> None:
        self.client, self.cookie = client, cookie

    def look(self, path: str) -> Any:
        return self.client.get(path)

    def send(self, path: str, *, hx: bool = False, headers: Any = OURS, **fields: Any) -> Any:
        given = {"token": forms.token(self.cookie), **fields}
        asked_by = {"HX-Request": "true"} if hx else {}
        return self.client.post(path, data=given, headers={**headers, **asked_by})

    def told(self, path: str) -> str:
        """What the next page tells above itself."""
        return words_of(self.look(path), TOLD)


def words_of(answer: Any, element: str) -> str:
    inner = answer.text.partition(element)[2].partition("</div>")[0]
    return " ".join(html.unescape(re.sub("<[^>]+>", " ", inner)).split())


@pytest.fixture
def browse(app: Any, world: Any, session: Session) -> Callable[[str], Browser]:
    def signed_in(who: str) -> Browser:
        with transaction() as its:
            _, cookie = auth.sign_in(its, world.keys[who])
        cookies = {auth.COOKIE: cookie}
        return Browser(TestClient(app, follow_redirects=False, cookies=cookies), cookie)

    return signed_in
