"""Which service and which key are used, and that a key goes nowhere else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.cli import credentials
from app.cli.credentials import Login, NoLogin
from app.settings import settings

KEYS = {
    "platform": {"platform_admin": "rh_root"},
    "alpha": {"tenant_admin": "rh_alpha_admin", "member": "rh_alpha"},
    "beta": {"member": "rh_beta", "viewer": "rh_beta_viewer"},
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A data folder and a configuration folder without anything in them."""
    monkeypatch.delenv("ROUNDHOUSE_URL", raising=False)
    monkeypatch.delenv("ROUNDHOUSE_KEY", raising=False)
    monkeypatch.setenv("ROUNDHOUSE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    settings.cache_clear()
    yield tmp_path / "home"
    settings.cache_clear()


@pytest.fixture
def up(home: Path) -> Path:
    """What `make up` leaves."""
    (home / "run").mkdir(parents=True)
    (home / "run" / "up.json").write_text(json.dumps({"url": "http://127.0.0.1:4321"}))
    (home / "keys.json").write_text(json.dumps(KEYS))
    return home


def test_missing_login_is_reported_with_advice(home: Path) -> None:
    with pytest.raises(NoLogin, match="roundhouse login"):
        credentials.found()


def test_caller_is_a_member_of_the_first_tenant_after_make_up(up: Path) -> None:
    found = credentials.found()
    assert (found.url, found.key) == ("http://127.0.0.1:4321", "rh_alpha")
    assert "alpha:member" in found.source


@pytest.mark.parametrize(
    ("who", "key"),
    [
        ("beta", "rh_beta"),
        ("beta:viewer", "rh_beta_viewer"),
        ("alpha:tenant_admin", "rh_alpha_admin"),
        ("platform", "rh_root"),  # has no member, so its only one
    ],
)
def test_caller_may_choose_another_user_of_make_up(up: Path, who: str, key: str) -> None:
    assert credentials.found(who).key == key


@pytest.mark.parametrize("who", ["gamma", "beta:tenant_admin", "", ":member"])
def test_unknown_user_is_refused_with_the_known_users(up: Path, who: str) -> None:
    with pytest.raises(NoLogin, match="it has platform:platform_admin, alpha:tenant_admin"):
        credentials.found(who)


def test_stored_login_wins_over_make_up(up: Path) -> None:
    credentials.store(Login(url="https://rh.example", key="rh_mine", source=""))
    assert credentials.found().key == "rh_mine"
    assert credentials.found("beta").key == "rh_beta"


def test_environment_wins_over_everything(up: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    credentials.store(Login(url="https://rh.example", key="rh_mine", source=""))
    monkeypatch.setenv("ROUNDHOUSE_KEY", "rh_env")
    assert (credentials.found().url, credentials.found().key) == ("https://rh.example", "rh_env")
    monkeypatch.setenv("ROUNDHOUSE_URL", "https://other.example/")
    assert (credentials.found().url, credentials.found().key) == ("https://other.example", "rh_env")


def test_stored_key_is_not_sent_to_another_address(
    up: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    credentials.store(Login(url="https://rh.example", key="rh_mine", source=""))
    monkeypatch.setenv("ROUNDHOUSE_URL", "https://evil.example")
    with pytest.raises(NoLogin, match=r"no API key for https://evil\.example"):
        credentials.found()
    monkeypatch.setenv("ROUNDHOUSE_URL", "http://127.0.0.1:4321/")
    assert credentials.found().key == "rh_alpha"  # that of `make up`, whose address this is


def test_login_file_is_readable_by_its_owner_only(home: Path) -> None:
    file = credentials.store(Login(url="https://rh.example", key="rh_mine", source=""))
    assert file.stat().st_mode & 0o777 == 0o600
    assert credentials.store(Login(url="https://rh.example", key="rh_new", source="")) == file
    assert credentials.found().key == "rh_new"


def test_damaged_login_file_is_named(home: Path) -> None:
    file = credentials.store(Login(url="https://rh.example", key="rh_mine", source=""))
    file.write_text("{")
    with pytest.raises(NoLogin, match=r"login\.json is damaged"):
        credentials.found()
