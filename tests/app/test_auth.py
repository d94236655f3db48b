"""Who calls: by key, by cookie, or nobody."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import func, select, update

from app.api import auth
from app.api.auth import COOKIE
from app.db import transaction
from app.errors import Unauthenticated
from app.models import ApiKey, WebSession
from tests.app.conftest import problem


@pytest.fixture
def token(world):
    return world.keys["red.member"]


class TestKey:
    def test_it_names_its_caller(self, session, token):
        caller = auth.caller_of_key(session, token)
        assert (caller.user_name, caller.tenant_name, caller.role) == (
            "red.member",
            "red",
            "member",
        )
        assert not caller.in_root
        assert not caller.sees_all

    def test_the_database_does_not_hold_it(self, session, token):
        row = session.get_one(ApiKey, auth.id_of(token))
        secret = token.split("_")[2]
        assert all(secret not in str(value) for value in vars(row).values())

    def test_every_mistyped_letter_is_noticed_without_the_database(self, token):
        for n in range(3, len(token)):
            wrong = token[:n] + ("x" if token[n] != "x" else "y") + token[n + 1 :]
            assert auth.id_of(wrong) is None or wrong[n] == "_", n

    def test_another_secret_with_a_right_check_is_refused(self, session, token):
        id = auth.id_of(token)
        bare = f"rh_{id}_{'A' * 43}"
        with pytest.raises(Unauthenticated):
            auth.caller_of_key(session, bare + auth._check(bare))

    @pytest.mark.parametrize("column", ["expires_at", "revoked_at"])
    def test_an_expired_or_revoked_one_opens_nothing(self, column, session, token, as_):
        session.execute(update(ApiKey).values({column: datetime.now(UTC) - timedelta(seconds=1)}))
        session.commit()
        problem(as_("red.member").get("/v1/me"), 401, "unauthenticated")

    def test_one_that_expires_later_is_good(self, session, as_):
        session.execute(update(ApiKey).values(expires_at=datetime.now(UTC) + timedelta(hours=1)))
        session.commit()
        assert as_("red.member").get("/v1/me").json()["user"] == "red.member"

    def test_its_use_is_written_later_and_not_by_the_call(self, session, token, as_):
        as_("red.member").get("/v1/me")
        used = select(ApiKey.last_used_at).where(ApiKey.id == auth.id_of(token))
        assert session.scalar(used) is None
        auth.write_uses()
        assert datetime.now(UTC) - session.scalar(used) < timedelta(minutes=1)

    def test_there_is_no_key_for_a_role_that_does_not_exist(self, session, world):
        with pytest.raises(ValueError, match="emperor"):
            auth.new_key(session, world.users["root"], "emperor", "x")


class TestCookie:
    @pytest.fixture
    def browser(self, app, token):
        with transaction() as session:
            _, cookie = auth.sign_in(session, token)
        return TestClient(app, cookies={COOKIE: cookie})

    def test_it_may_read(self, browser):
        assert browser.get("/v1/me").json()["user"] == "red.member"

    @pytest.mark.parametrize(
        "headers",
        [
            {},
            {"Sec-Fetch-Site": "cross-site", "Origin": "http://testserver"},
            {"Sec-Fetch-Site": "same-site"},
            {"Origin": "https://evil.example"},
            {"Origin": "null"},
        ],
    )
    def test_it_changes_nothing_from_elsewhere(self, headers, browser, submitted, rows):
        before = rows()
        answer = browser.post(f"/v1/requests/{submitted['id']}/cancel", headers=headers)
        problem(answer, 403, "insufficient-scope")
        assert rows() == before

    @pytest.mark.parametrize(
        "headers", [{"Sec-Fetch-Site": "same-origin"}, {"Origin": "http://testserver"}]
    )
    def test_it_may_change_something_from_our_pages(self, headers, browser, submitted):
        answer = browser.post(f"/v1/requests/{submitted['id']}/cancel", headers=headers)
        assert answer.status_code == 202

    def test_it_ends_with_its_key(self, browser, session):
        session.execute(update(ApiKey).values(revoked_at=func.now()))
        session.commit()
        problem(browser.get("/v1/me"), 401, "unauthenticated")

    def test_it_ends_after_its_time(self, browser, session):
        session.execute(update(WebSession).values(expires_at=func.now() - timedelta(seconds=1)))
        session.commit()
        problem(browser.get("/v1/me"), 401, "unauthenticated")

    def test_signing_out_ends_it(self, browser, session):
        with transaction() as its:
            auth.sign_out(its, browser.cookies[COOKIE])
        problem(browser.get("/v1/me"), 401, "unauthenticated")

    def test_a_bad_key_beside_a_good_cookie_opens_nothing(self, browser):
        answer = browser.get("/v1/me", headers={"Authorization": "Basic eDp5"})
        problem(answer, 401, "unauthenticated")
