"""People by an OpenID Connect provider, which is a process of its own: pages and API."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest
from fastapi.testclient import TestClient
from sqlalchemy import func, select, update

from app.api.access import auth
from app.core.security import grants
from app.db.models import ApiKey, AuditEvent, Tenant, User, WebSession
from app.identity import directory, oidc
from app.settings import Settings, settings
from tests.app.conftest import problem
from tests.app.oidc_provider import CLIENT, SECRET

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parents[1] / "oidc_provider.py"
GRANTS = {"red-admins": "red:tenant_admin", "red": "red:member", "lost": "nobody:member",
          "ops": "platform:platform_admin"}  # fmt: skip
ADA = {"sub": "ada-1", "preferred_username": "ada", "groups": ["red", "chess"]}


class Remote:
    """The provider, from the outside."""

    def __init__(self, issuer):
        self.issuer, self.http = issuer, httpx2.Client(base_url=issuer, timeout=60)

    def control(self, what, **body):
        answer = self.http.post(f"/control/{what}", json=body)
        assert answer.is_success
        return answer.json()

    def token(self, **more):
        return self.control("sign", **more)["token"]


@pytest.fixture(scope="module")
def process():
    words = [sys.executable, str(PROGRAM)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        remote = Remote(process.stdout.readline().strip())
        yield remote
        remote.http.close()
        process.terminate()


@pytest.fixture
def provider(process, world):
    """Known to the service, which has asked it nothing yet; ada comes."""
    given = {
        "ROUNDHOUSE_OIDC_ISSUER": process.issuer,
        "ROUNDHOUSE_OIDC_CLIENT_ID": CLIENT,
        "ROUNDHOUSE_OIDC_CLIENT_SECRET": SECRET,
        "ROUNDHOUSE_OIDC_GRANTS": json.dumps(GRANTS),
    }
    process.control("person", **ADA)
    process.control("forge", nonce="")
    with mock.patch.dict(os.environ, given):
        settings.cache_clear()
        directory._provider.cache_clear()
        yield process
    settings.cache_clear()
    directory._provider.cache_clear()


@pytest.fixture
def calls(app):
    """`calls(token)` is a client that sends it."""
    return lambda token: TestClient(app, headers={"Authorization": f"Bearer {token}"})


class TestTokens:
    def test_person_calls_the_api_with_a_token(self, provider, calls):
        me = calls(provider.token()).get("/v1/me").json()
        assert (me["user"], me["tenant"], me["role"]) == ("ada", "red", "member")

    def test_same_person_is_the_same_user_with_every_token(self, provider, calls, session):
        first, second = (calls(provider.token()).get("/v1/me").json() for _ in range(2))
        assert first == second
        made = session.scalars(select(AuditEvent).where(AuditEvent.target_kind == "user")).all()
        assert [(row.operation, row.target_id) for row in made] == [("signIn", first["user_id"])]

    def test_tenant_of_the_same_name_elsewhere_gets_no_users(self, provider, calls, session):
        """Ada's groups lead to the tenant red right below the root; blue makes a red of its own."""
        session.add(Tenant(id="ten_inner", name="red", parent_id="ten_blue"))
        session.commit()
        assert calls(provider.token()).get("/v1/me").json()["tenant_id"] == "ten_red"

    @pytest.mark.parametrize(("named", "found"), [("team", None), ("ten_team", "ten_team")])
    def test_id_decides_between_tenants_of_one_name(self, named, found, session, world):
        for above in ("red", "blue"):
            id = "ten_team" if above == "red" else "ten_other"
            session.add(Tenant(id=id, name="team", parent_id=f"ten_{above}"))
        session.commit()
        tenant = directory._tenant(session, named)
        assert (tenant and tenant.id) == found

    def test_token_decides_what_a_person_may_do_now(self, provider, calls):
        before = calls(provider.token()).get("/v1/me").json()
        provider.control("person", **ADA | {"groups": ["chess", "red", "red-admins"]})
        after = calls(provider.token()).get("/v1/me").json()
        assert before | {"role": "tenant_admin"} == after

    def test_person_in_another_tenant_is_another_user(self, provider, calls):
        before = calls(provider.token()).get("/v1/me").json()
        provider.control("person", **ADA | {"groups": "ops"})
        after = calls(provider.token()).get("/v1/me").json()
        assert (after["tenant"], after["role"]) == ("platform", "platform_admin")
        assert after["user_id"] != before["user_id"]

    def test_deleted_person_does_not_come_back(self, provider, calls, as_):
        me = calls(provider.token()).get("/v1/me").json()
        assert as_("red.tenant_admin").delete(f"/v1/users/{me['user_id']}").status_code == 204
        found = problem(calls(provider.token()).get("/v1/me"), 403, "insufficient-scope")
        assert "deleted" in found["detail"]

    def test_user_name_that_is_taken_gets_a_suffix(self, provider, calls):
        provider.control("person", **ADA | {"preferred_username": "red.member"})
        me = calls(provider.token()).get("/v1/me").json()
        assert me["user"] == f"red.member {me['user_id'][-8:]}"
        assert me["user_id"] != "usr_red.member"

    @pytest.mark.parametrize(
        "groups", [[], ["Red"], None, {"red": True}, ["lost"], [["red"]], "red-admins,red"]
    )
    def test_token_without_a_grant_gives_no_access(self, provider, calls, groups, session):
        provider.control("person", **ADA | {"groups": groups})
        problem(calls(provider.token()).get("/v1/me"), 403, "insufficient-scope")
        assert session.scalar(select(User).where(User.name == "ada")) is None

    @pytest.mark.parametrize(
        "wrong",
        [
            {"iss": "https://elsewhere.example"},
            {"aud": "another-client"},
            {"aud": ["another-client"]},
            {"exp": 1},
            {"exp": "soon"},
            {"nbf": 9e9},
            {"iat": 9e9},
            {"sub": 7},
            *({"drop": name} for name in ("iss", "aud", "exp", "sub")),
            {"how": "none"},
            {"how": "public key as secret"},
            {"how": "another key"},
            {"header": {"kid": "unknown"}},
        ],
        ids=str,
    )
    def test_invalid_token_gives_no_access(self, provider, calls, wrong, session):
        problem(calls(provider.token(**wrong)).get("/v1/me"), 401, "unauthenticated")
        assert session.scalar(select(User).where(User.name == "ada")) is None

    @pytest.mark.parametrize("crit", [None, 1, True, [], ["b64"], {"a": 1}], ids=str)
    def test_token_header_with_wrong_types_gives_no_access(self, provider, calls, crit):
        _, claims, signature = provider.token().split(".")
        header = base64.urlsafe_b64encode(json.dumps({"alg": "RS256", "crit": crit}).encode())
        token = f"{header.decode().rstrip('=')}.{claims}.{signature}"
        problem(calls(token).get("/v1/me"), 401, "unauthenticated")

    @pytest.mark.parametrize("mangle", [lambda t: t[:-8] + "AAAAAAAA", lambda t: "x.y.z",
                                        lambda t: t.rsplit(".", 1)[0] + "."])  # fmt: skip
    def test_changed_token_gives_no_access(self, provider, calls, mangle):
        problem(calls(mangle(provider.token())).get("/v1/me"), 401, "unauthenticated")

    def test_clocks_may_differ_by_30_seconds(self, provider, calls):
        assert calls(provider.token(exp=int(time.time()) - 15)).get("/v1/me").status_code == 200

    def test_audience_can_be_configured(self, provider, calls, monkeypatch):
        monkeypatch.setenv("ROUNDHOUSE_OIDC_AUDIENCE", "the-api")
        settings.cache_clear()
        problem(calls(provider.token()).get("/v1/me"), 401, "unauthenticated")
        assert calls(provider.token(aud=["the-api", "x"])).get("/v1/me").status_code == 200

    def test_new_key_is_fetched_when_a_token_names_it(self, provider, calls, monkeypatch):
        monkeypatch.setattr(oidc, "ASKED_AGAIN_S", 3600.0)
        assert calls(provider.token()).get("/v1/me").status_code == 200
        provider.control("rotate")
        new = provider.token()
        problem(calls(new).get("/v1/me"), 401, "unauthenticated")  # it was asked a moment ago
        monkeypatch.setattr(oidc, "ASKED_AGAIN_S", 0.0)
        assert calls(new).get("/v1/me").status_code == 200

    def test_keys_are_cached_and_unknown_tokens_cause_no_flood_of_fetches(
        self, provider, calls, monkeypatch
    ):
        monkeypatch.setattr(oidc, "ASKED_AGAIN_S", 3600.0)
        before = provider.control("fetches")["keys"]
        for n in range(5):
            calls(provider.token(header={"kid": f"made up {n}"})).get("/v1/me")
            calls(provider.token()).get("/v1/me")
        assert provider.control("fetches")["keys"] == before + 1

    def test_unreachable_provider_is_reported_and_known_keys_stay_valid(
        self, provider, calls, as_, monkeypatch
    ):
        monkeypatch.setenv("ROUNDHOUSE_OIDC_ISSUER", "http://127.0.0.1:1")
        settings.cache_clear()
        answer = calls("a.b.c").get("/v1/me")
        assert "identity provider" in problem(answer, 503, "unavailable")["detail"]
        assert as_("red.member").get("/v1/me").status_code == 200

    def test_tokens_are_refused_without_a_provider(self, world, calls):
        problem(calls("a.b.c").get("/v1/me"), 401, "unauthenticated")

    def test_other_tenants_are_not_found(self, provider, calls, submitted):
        provider.control("person", **ADA | {"groups": ["red"]})
        path = f"/v1/requests/{submitted['id']}"
        assert calls(provider.token()).get(path).status_code == 200
        with mock.patch.dict(os.environ, {"ROUNDHOUSE_OIDC_GRANTS": '{"red": "blue:member"}'}):
            settings.cache_clear()
            problem(calls(provider.token()).get(path), 404, "not-found")


# --- in a browser -------------------------------------------------------------------------------


@pytest.fixture
def browser(app, provider):
    return TestClient(app, follow_redirects=False, base_url="http://here")


def through_the_provider(browser, provider, place="/ui/login/oidc"):
    """Where the provider sends the browser back to, as a path of ours."""
    answer = browser.get(place)
    assert answer.status_code == 303, answer.text
    back = provider.http.get(answer.headers["location"]).headers["location"]
    assert back.startswith("http://here/ui/login/oidc/callback?")
    return back.removeprefix("http://here")


class TestSignIn:
    def test_person_signs_in_and_returns_to_the_wanted_page(self, browser, provider, session):
        back = through_the_provider(browser, provider, "/ui/login/oidc?next=/ui/requests")
        answer = browser.get(back)
        assert (answer.status_code, answer.headers["location"]) == (303, "/ui/requests")
        assert "httponly" in answer.headers["set-cookie"].lower()
        assert "ada" in browser.get("/ui/requests").text
        assert browser.get("/v1/me").json()["user"] == "ada"
        [row] = session.scalars(select(AuditEvent).where(AuditEvent.target_kind == "session"))
        assert (row.operation, row.action, row.user) == ("signIn", "made", "ada")

    def test_sign_in_page_offers_the_provider_only_if_there_is_one(self, browser, monkeypatch):
        assert 'href="/ui/login/oidc?next=' in browser.get("/ui/login").text
        monkeypatch.setenv("ROUNDHOUSE_OIDC_ISSUER", "")
        settings.cache_clear()
        assert "/ui/login/oidc" not in browser.get("/ui/login").text
        assert browser.get("/ui/login/oidc").status_code == 404

    def test_state_and_nonce_are_new_for_each_sign_in(self, browser, provider):
        asked = [
            parse_qs(urlsplit(browser.get("/ui/login/oidc").headers["location"]).query)
            for _ in range(2)
        ]
        for name in ("state", "nonce", "code_challenge"):
            assert asked[0][name] != asked[1][name]
            assert len(asked[0][name][0]) >= 43

    def test_link_from_another_site_signs_no_one_in(self, app, browser, provider, session):
        """Somebody's own code in another browser: without a cookie, and with another sign-in's."""
        back = through_the_provider(browser, provider)
        other = TestClient(app, follow_redirects=False, base_url="http://here")
        assert other.get(back).status_code == 401
        other.get("/ui/login/oidc")
        assert other.get(back).status_code == 401
        assert session.scalar(select(func.count()).select_from(WebSession)) == 0

    def test_a_code_is_good_once(self, browser, provider):
        back = through_the_provider(browser, provider)
        cookie = browser.cookies["roundhouse_signing_in"]
        assert browser.get(back).status_code == 303
        browser.cookies.set("roundhouse_signing_in", cookie, path="/ui/login/oidc")
        assert browser.get(back).status_code == 401

    def test_a_token_of_another_sign_in_is_refused(self, browser, provider):
        provider.control("forge", nonce="of-another-one")
        answer = browser.get(through_the_provider(browser, provider))
        assert answer.status_code == 401
        assert "nonce" in answer.text

    def test_error_of_the_provider_is_shown_as_text(self, browser, provider):
        back = through_the_provider(browser, provider)
        state = parse_qs(urlsplit(back).query)["state"][0]
        answer = browser.get(
            "/ui/login/oidc/callback", params={"state": state, "error": "<b>denied</b>"}
        )
        assert answer.status_code == 401
        assert "&lt;b&gt;denied" in answer.text

    def test_sign_in_without_a_grant_is_refused(self, browser, provider, session):
        provider.control("person", **ADA | {"groups": ["chess"]})
        answer = browser.get(through_the_provider(browser, provider))
        assert answer.status_code == 401
        assert "ask an administrator" in answer.text
        assert session.scalar(select(func.count()).select_from(WebSession)) == 0

    @pytest.mark.parametrize("cookie", ["", "x", "e30", "WyJhIl0="])
    def test_foreign_cookie_is_ignored(self, browser, cookie):
        browser.cookies.set("roundhouse_signing_in", cookie, path="/ui/login/oidc")
        assert browser.get("/ui/login/oidc/callback?state=&code=x").status_code == 401

    def test_sign_in_redirects_only_to_our_pages(self, browser, provider):
        back = through_the_provider(browser, provider, "/ui/login/oidc?next=https://elsewhere/ui/")
        assert browser.get(back).headers["location"] == "/ui/"

    def test_session_is_a_key_that_can_be_revoked(self, browser, provider, as_, session):
        for _ in range(2):
            browser.get(through_the_provider(browser, provider))
        user = grants.user_id(provider.issuer, "ada-1", "ten_red")
        [key] = session.scalars(select(ApiKey).where(ApiKey.user_id == user))
        assert (key.role, key.secret_sha256) == ("member", auth.NO_SECRET)
        bare = f"rh_{key.id}_{'A' * 43}"
        headers = {"Authorization": f"Bearer {bare}{auth._check(bare)}"}
        assert TestClient(browser.app).get("/v1/me", headers=headers).status_code == 401
        admin = as_("red.tenant_admin")
        problem(admin.post(f"/v1/keys/{key.id}/rotate"), 409, "conflict-state")
        assert admin.delete(f"/v1/keys/{key.id}").status_code == 200
        assert browser.get("/v1/me").status_code == 401

    def test_session_of_a_greater_role_is_not_used_for_a_lesser_one(
        self, browser, provider, session
    ):
        provider.control("person", **ADA | {"groups": ["red-admins"]})
        browser.get(through_the_provider(browser, provider))
        provider.control("person", **ADA)
        browser.get(through_the_provider(browser, provider))
        assert browser.get("/v1/me").json()["role"] == "member"
        session.execute(update(ApiKey).where(ApiKey.role == "member").values(revoked_at=func.now()))
        session.commit()
        assert browser.get("/v1/me").status_code == 401


class TestSettings:
    @pytest.mark.parametrize(
        "given",
        [
            {"oidc_issuer": "http://id.example.org"},
            {"oidc_grants": {"red": "member"}},
            {"oidc_grants": {"red": "red:emperor"}},
            {"webhook_networks": "10.0.0.0/8, home"},
        ],
    )
    def test_bad_setting_is_reported_at_start(self, given):
        with pytest.raises(ValueError, match=next(iter(given))):
            Settings(**given)

    def test_a_tenants_name_may_hold_a_colon(self):
        assert grants.read({"x": "a:b:viewer"}) == {"x": grants.Grant("a:b", "viewer")}
