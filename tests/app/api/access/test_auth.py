"""Who calls: by key, by cookie, or nobody."""

from __future__ import annotations

import typing
from datetime import UTC, datetime, timedelta

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import func, select, update

from app.api.access import auth, credential_cache
from app.api.access.auth import COOKIE
from app.api.schemas.base import Scope
from app.core.security.scopes import AREAS, SCOPES
from app.db import transactions
from app.db.models import ApiKey, User, WebSession
from app.db.transactions import transaction
from app.errors import Unauthenticated
from tests.app.conftest import problem


@pytest.fixture
def token(world):
    return world.keys["red.member"]


class TestKey:
    def test_key_identifies_its_user(self, session, token):
        caller = auth.caller_of_key(session, token)
        assert (caller.user_name, caller.tenant_name, caller.role) == (
            "red.member",
            "red",
            "member",
        )
        assert not caller.in_root
        assert not caller.sees_all

    def test_key_is_not_stored_in_the_database(self, session, token):
        row = session.get_one(ApiKey, auth.id_of(token))
        secret = token.split("_")[2]
        assert all(secret not in str(value) for value in vars(row).values())

    def test_mistyped_key_is_noticed_without_the_database(self, token):
        for n in range(3, len(token)):
            wrong = token[:n] + ("x" if token[n] != "x" else "y") + token[n + 1 :]
            assert auth.id_of(wrong) is None or wrong[n] == "_", n

    def test_wrong_secret_with_a_valid_checksum_is_refused(self, session, token):
        id = auth.id_of(token)
        bare = f"rh_{id}_{'A' * 43}"
        with pytest.raises(Unauthenticated):
            auth.caller_of_key(session, bare + auth._check(bare))

    @pytest.mark.parametrize("column", ["expires_at", "revoked_at"])
    def test_expired_or_revoked_key_gives_no_access(self, column, session, token, as_):
        session.execute(update(ApiKey).values({column: datetime.now(UTC) - timedelta(seconds=1)}))
        session.commit()
        problem(as_("red.member").get("/v1/me"), 401, "unauthenticated")

    def test_key_that_expires_later_is_valid(self, session, as_):
        session.execute(update(ApiKey).values(expires_at=datetime.now(UTC) + timedelta(hours=1)))
        session.commit()
        assert as_("red.member").get("/v1/me").json()["user"] == "red.member"

    def test_use_of_a_key_is_written_later_and_not_by_the_call(self, session, token, as_):
        as_("red.member").get("/v1/me")
        used = select(ApiKey.last_used_at).where(ApiKey.id == auth.id_of(token))
        assert session.scalar(used) is None
        auth.write_uses()
        assert datetime.now(UTC) - session.scalar(used) < timedelta(minutes=1)

    def test_key_for_an_unknown_role_cannot_be_made(self, session, world):
        with pytest.raises(ValueError, match="emperor"):
            auth.new_key(session, world.users["root"], "emperor", "x")


class TestOneThatWasGoodAMomentAgo:
    @pytest.fixture
    def clock(self, monkeypatch):
        """The seconds that go by."""
        gone_s = [0.0]
        monkeypatch.setattr(credential_cache.time, "monotonic", lambda: gone_s[0])
        return gone_s

    def test_key_that_was_just_valid_is_not_looked_up_again(self, as_, monkeypatch, clock):
        red = as_("red.member")
        assert red.get("/v1/me").status_code == 200
        monkeypatch.setattr(auth, "caller_of_key", lambda *_: pytest.fail("it was looked up"))
        assert red.get("/v1/me").json()["user"] == "red.member"

    def test_key_revoked_by_another_process_gives_no_access_a_second_later(
        self, as_, session, token, clock
    ):
        red = as_("red.member")
        assert red.get("/v1/me").status_code == 200
        revoked = update(ApiKey).where(ApiKey.id == auth.id_of(token))
        session.connection().execute(revoked.values(revoked_at=func.now()))
        assert red.get("/v1/me").status_code == 200
        clock[0] += credential_cache.KNOWN_S
        problem(red.get("/v1/me"), 401, "unauthenticated")

    def test_change_of_its_user_counts_at_once(self, as_, session, clock):
        red = as_("red.member")
        assert red.get("/v1/me").json()["user"] == "red.member"
        session.get_one(User, "usr_red.member").name = "rosa"
        session.commit()
        assert red.get("/v1/me").json()["user"] == "rosa"

    def test_key_revoked_during_a_look_up_is_not_remembered(
        self, as_, session, token, monkeypatch, clock
    ):
        """1. A call reads that the key is good.  2. It is revoked.  3. The call goes on; the next
        one is refused.
        """
        look_up = auth.caller_of_key

        def looked_up_before(its, token):
            caller = look_up(its, token)
            session.execute(update(ApiKey).values(revoked_at=func.now()))
            session.commit()
            return caller

        monkeypatch.setattr(auth, "caller_of_key", looked_up_before)
        assert as_("red.member").get("/v1/me").status_code == 200
        monkeypatch.setattr(auth, "caller_of_key", look_up)
        problem(as_("red.member").get("/v1/me"), 401, "unauthenticated")


class TestCookie:
    @pytest.fixture
    def browser(self, app, token):
        with transaction() as session:
            _, cookie = auth.sign_in(session, token)
        return TestClient(app, cookies={COOKIE: cookie})

    def test_session_may_read(self, browser):
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
    def test_session_changes_nothing_in_a_call_from_another_site(
        self, headers, browser, submitted, rows
    ):
        before = rows()
        answer = browser.post(f"/v1/requests/{submitted['id']}/cancel", headers=headers)
        problem(answer, 403, "insufficient-scope")
        assert rows() == before

    @pytest.mark.parametrize(
        "headers", [{"Sec-Fetch-Site": "same-origin"}, {"Origin": "http://testserver"}]
    )
    def test_session_may_change_things_from_our_pages(self, headers, browser, submitted):
        answer = browser.post(f"/v1/requests/{submitted['id']}/cancel", headers=headers)
        assert answer.status_code == 202

    def test_session_ends_with_its_key(self, browser, session):
        session.execute(update(ApiKey).values(revoked_at=func.now()))
        session.commit()
        problem(browser.get("/v1/me"), 401, "unauthenticated")

    def test_session_ends_after_its_time(self, browser, session):
        session.execute(update(WebSession).values(expires_at=func.now() - timedelta(seconds=1)))
        session.commit()
        problem(browser.get("/v1/me"), 401, "unauthenticated")

    def test_signing_out_ends_the_session(self, browser, session):
        with transaction() as its:
            auth.sign_out(its, browser.cookies[COOKIE])
        problem(browser.get("/v1/me"), 401, "unauthenticated")

    def test_bad_key_beside_a_valid_session_gives_no_access(self, browser):
        answer = browser.get("/v1/me", headers={"Authorization": "Basic eDp5"})
        problem(answer, 401, "unauthenticated")


# --- what a key may be narrowed to, and what takes its place ------------------------------------


def made(client, **more):
    body = {"user_id": "usr_red.member", "role": "member", "name": "k", **more}
    return client.post("/v1/keys", json=body)


def with_key(app, token):
    return TestClient(app, headers={"Authorization": f"Bearer {token}"})


class TestScopes:
    def test_schema_has_the_same_scopes_and_every_area_has_one(self):
        assert typing.get_args(Scope) == SCOPES
        assert {scope.partition(":")[0] for scope in SCOPES} == set(AREAS.values())

    @pytest.fixture
    def admin(self, as_):
        return as_("red.tenant_admin")

    def test_scopes_narrow_what_a_role_may_do(self, app, admin):
        key = made(admin, scopes=["work:read"]).json()
        assert key["scopes"] == ["work:read"]
        client = with_key(app, key["key"])
        assert client.get("/v1/requests").status_code == 200
        assert client.get("/v1/me").json()["scopes"] == ["work:read"]
        told = problem(client.get("/v1/tenants"), 403, "insufficient-scope")["detail"]
        assert told == "this operation needs a key with the scope admin:read; got work:read"

    def test_scopes_add_nothing_to_a_role(self, app, admin):
        key = made(admin, role="viewer", scopes=["work:write"]).json()["key"]
        problem(with_key(app, key).post("/v1/requests", json={}), 403, "insufficient-scope")

    def test_write_scope_includes_reading_of_its_area_only(self, app, admin):
        client = with_key(app, made(admin, scopes=["work:write"]).json()["key"])
        assert client.get("/v1/requests").status_code == 200
        assert client.get("/v1/devices").status_code == 403

    @pytest.mark.parametrize("scopes", [None, ["work:read"], ["admin:write", "work:read"]])
    def test_narrowed_key_makes_no_key_with_more_rights(self, app, admin, session, scopes):
        narrowed = made(admin, user_id="usr_red.tenant_admin", role="tenant_admin",
                        scopes=["admin:write"]).json()["key"]  # fmt: skip
        client = with_key(app, narrowed)
        problem(made(client, scopes=scopes), 403, "insufficient-scope")
        assert made(client, scopes=["admin:read"]).status_code == 201

    @pytest.mark.parametrize("scopes", [[], ["everything"], "work:read"])
    def test_unknown_scope_is_refused(self, admin, scopes):
        problem(made(admin, scopes=scopes), 422, "validation-error")

    def test_metrics_need_a_scope_too(self, app, as_):
        for scope, status in (("usage:read", 200), ("work:read", 403)):
            body = {"user_id": "usr_root", "role": "viewer", "name": "prometheus"}
            key = as_("root").post("/v1/keys", json={**body, "scopes": [scope]}).json()["key"]
            assert with_key(app, key).get("/metrics").status_code == status


class TestServiceAccounts:
    def test_service_account_has_keys_and_cannot_sign_in(self, app, as_, session):
        admin = as_("red.tenant_admin")
        account = admin.post("/v1/users", json={"name": "ci", "service": True}).json()
        assert account["service"]
        assert [u["id"] for u in admin.get("/v1/users?service=true").json()["items"]] == [
            account["id"]
        ]
        assert account["id"] not in admin.get("/v1/users?service=false").text
        key = made(admin, user_id=account["id"]).json()["key"]
        assert with_key(app, key).get("/v1/me").json()["user"] == "ci"
        with pytest.raises(Unauthenticated, match="for programs"):
            auth.sign_in(session, key)

    def test_narrowed_key_cannot_sign_in(self, as_, session):
        key = made(as_("red.tenant_admin"), scopes=["work:read"]).json()["key"]
        with pytest.raises(Unauthenticated, match="for programs"):
            auth.sign_in(session, key)


class TestRotation:
    @pytest.fixture
    def rotate(self, as_, token):
        def rotate(who="red.member", of=token, **body):
            return as_(who).post(f"/v1/keys/{auth.id_of(of)}/rotate", json=body)

        return rotate

    def test_old_and_new_key_are_valid_for_a_while(self, app, rotate, token, session):
        answer = rotate(overlap_s=60)
        assert answer.status_code == 201, answer.text
        new = answer.json()
        assert (new["role"], new["name"], new["expires_at"]) == ("member", "a test", None)
        assert answer.headers["location"] == f"/v1/keys/{new['id']}"
        for key in (token, new["key"]):
            assert with_key(app, key).get("/v1/me").status_code == 200
        old = session.get_one(ApiKey, auth.id_of(token))
        assert old.replaced_by == new["id"]
        assert old.expires_at == transactions.now(session) + timedelta(seconds=60)
        session.execute(update(ApiKey).where(ApiKey.id == old.id).values(expires_at=func.now()))
        session.commit()
        assert with_key(app, token).get("/v1/me").status_code == 401
        assert with_key(app, new["key"]).get("/v1/me").status_code == 200

    def test_new_key_has_the_rights_and_the_lifetime_of_the_old_one(self, app, as_, rotate):
        expires = datetime.now(UTC) + timedelta(days=30)
        old = made(
            as_("red.tenant_admin"), scopes=["work:read"], expires_at=expires.isoformat()
        ).json()
        new = rotate(of=old["key"]).json()
        assert new["scopes"] == ["work:read"]
        lives = datetime.fromisoformat(new["expires_at"]) - datetime.now(UTC)
        assert timedelta(days=29) < lives <= timedelta(days=30, seconds=1)

    def test_key_that_ends_sooner_is_not_prolonged(self, as_, rotate, session):
        soon = datetime.now(UTC) + timedelta(minutes=1)
        old = made(as_("red.tenant_admin"), expires_at=soon.isoformat()).json()
        later = (datetime.now(UTC) + timedelta(days=1)).isoformat()
        assert rotate(of=old["key"], expires_at=later).status_code == 201
        assert session.get_one(ApiKey, old["id"]).expires_at == soon

    def test_key_has_one_successor(self, rotate):
        successor = rotate().json()["id"]
        told = problem(rotate(), 409, "conflict-state")["detail"]
        assert successor in told

    @pytest.mark.parametrize("column", ["expires_at", "revoked_at"])
    def test_invalid_key_cannot_be_rotated(self, rotate, session, token, column):
        which = update(ApiKey).where(ApiKey.id == auth.id_of(token))
        session.execute(which.values({column: func.now()}))
        session.commit()
        problem(rotate("red.tenant_admin"), 409, "conflict-state")

    def test_rotation_gives_no_more_rights(self, app, as_, rotate, world):
        """One user with a weak key and a strong one; a narrowed key and one that is not."""
        admin = as_("red.tenant_admin")
        strong = made(admin, role="tenant_admin").json()["key"]
        problem(rotate(of=strong), 403, "insufficient-scope")
        narrowed = made(admin, scopes=["admin:write"]).json()["key"]
        path = f"/v1/keys/{auth.id_of(world.keys['red.member'])}/rotate"
        problem(with_key(app, narrowed).post(path), 403, "insufficient-scope")

    def test_overlap_of_zero_ends_the_old_key_at_once(self, app, rotate, token):
        assert rotate(overlap_s=0).status_code == 201
        assert with_key(app, token).get("/v1/me").status_code == 401
