"""A notebook in a real browser: its kernel keeps its variables while others have the device."""

from __future__ import annotations

import re
import subprocess
import sys
import time

import pytest
from playwright.sync_api import expect, sync_playwright

from tests.acceptance.test_sessions import busy, running
from tests.acceptance.test_tunnels import terminal
from tests.pages.conftest import FLAGS, _chromium

pytestmark = [pytest.mark.acceptance, pytest.mark.browser, pytest.mark.long]

PATIENCE_MS = 60_000
IDLE_S = 10


@pytest.fixture
def page():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_chromium(), args=FLAGS)
        page = browser.new_page()
        page.set_default_timeout(PATIENCE_MS)
        yield page
        browser.close()


def run_cell(page, code):
    """Type code into the cell that has the cursor, and run it."""
    page.keyboard.insert_text(code)
    page.keyboard.press("Shift+Enter")


@pytest.fixture
def brought(wheels, tmp_path):
    """A folder with requirements; the wheels of JupyterLab are put into the system's index."""
    words = (sys.executable, "-m", "pip", "download", "-q", "--only-binary", ":all:")
    # later ones want a newer 3.11 than 3.11.0, for which environments are locked
    packages = ("jupyterlab", "soupsieve<2.8")
    if subprocess.run([*words, "-d", str(wheels), *packages], check=False).returncode:
        pytest.skip("the wheels of JupyterLab cannot be downloaded here")
    (tmp_path / "requirements.txt").write_text("jupyterlab\n")
    return tmp_path


@pytest.mark.parametrize("packages", ["of the platform", "of its own"])
def test_kernel_keeps_its_variables_while_another_tenant_has_the_devices(
    system, page, packages, request
):
    if packages == "of the platform":
        pytest.importorskip("jupyterlab")
        more = ()
    else:
        folder = request.getfixturevalue("brought")
        more = ("--folder", str(folder), "--environment", "requirements.txt")
    alpha, beta = system.client("alpha"), system.client("beta")
    devices = len(list(beta.items("/v1/devices")))
    words = ("notebook", "--no-browser", "--local", "0", "--idle", str(IDLE_S), "--name", "lab")
    began_s = time.monotonic()
    with terminal(system, *words, *more) as shown:
        shown.until("JupyterLab: ", within_s=300)
        print(f"at hand {time.monotonic() - began_s:.1f} s after the call")  # noqa: T201
        url = "".join(shown.until("Ctrl-C").split())
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/lab\?token=[\w-]+", url)
        page.goto(url)
        page.locator(".jp-LauncherCard[title*='Python 3']").first.click()
        expect(page.locator(".jp-StatusBar-Left").first).to_contain_text("| Idle", timeout=60_000)
        page.locator(".jp-Notebook .jp-Cell .cm-content").first.click()
        run_cell(page, "import sys\nprint('own', '/environment' in sys.prefix)")
        own = page.get_by_text(f"own {bool(more)}", exact=True)
        expect(own).to_be_visible(timeout=PATIENCE_MS)
        run_cell(page, "x = list(range(42))\nprint('made', len(x))")
        expect(page.get_by_text("made 42", exact=True)).to_be_visible(timeout=PATIENCE_MS)
        task_id = next(iter(alpha.items("/v1/requests", name="lab")))["id"]
        task_id = alpha.request(task_id)["tasks"][0]["id"]
        others = busy(beta, devices)

        def is_away():
            return alpha.get(f"/v1/tasks/{task_id}")["hold"] == "idle"

        began_s = time.monotonic()
        assert system.until(is_away)
        assert system.until(lambda: running(beta, others) == devices)
        away_s = time.monotonic() - began_s
        time.sleep(15)  # the open page polls, and wakes nothing
        assert is_away()
        began_s = time.monotonic()
        run_cell(page, "print('still', sum(x))")
        expect(page.get_by_text("still 861", exact=True)).to_be_visible(timeout=PATIENCE_MS)
        back_s = time.monotonic() - began_s
        print(f"away after {away_s:.1f} s; back {back_s:.2f} s after the key")  # noqa: T201
        shown.type("\x03")
        assert shown.ended() == 0
    alpha.post(f"/v1/tasks/{task_id}/cancel")
    for other in others:
        beta.post(f"/v1/requests/{other}/cancel")
