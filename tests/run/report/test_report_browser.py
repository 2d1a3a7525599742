"""Pages about runs in a real browser: scripts run, and figures are drawn. Left out where there is no Chromium."""

import re
import shutil
import subprocess

import pytest
from report_pages import serving
from runs_on_disk import write_run

from amago.run.report.page import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


def opened(url, profile, *options):
    """The document as it is after its scripts have run."""
    words = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--window-size=1000,3000", *options,
        "--virtual-time-budget=10000", "--dump-dom", url,
    ]  # fmt: skip
    return subprocess.run(words, capture_output=True, text=True, timeout=200, check=True).stdout


def drawn(document, section):
    """How many figures of a section have been drawn."""
    part = document[document.index(f'<section id="{section}">') :]
    return part[: part.index("</section>")].count('class="main-svg"')


@pytest.fixture
def runs(tmp_path):
    for seed in range(2):
        write_run(tmp_path / "runs" / f"lake_seed{seed}", (1, 2, 3), seed, attempts=(0.1, 0.4, 0.9))
    return tmp_path / "runs"


def test_a_report_draws_its_figures(runs, tmp_path):
    page = write_report([runs], tmp_path / "page.html")
    document = opened(page.as_uri(), tmp_path / "profile")
    assert drawn(document, "learning") >= 2
    assert drawn(document, "adaptation") >= 1
    assert "lake (2 seeds)" in document
    assert '<td class="running">' in document or '<td class="stopped">' in document
    assert not re.search(r'<html[^>]*class="dark"', document)


def test_a_dark_browser_gets_a_dark_page(runs, tmp_path):
    page = write_report([runs], tmp_path / "page.html")
    document = opened(page.as_uri(), tmp_path / "profile", "--blink-settings=preferredColorScheme=0")
    assert re.search(r'<html[^>]*class="dark"', document)


def test_a_live_page_fills_itself(runs, tmp_path):
    with serving(runs) as ask:
        document = opened(ask.url, tmp_path / "profile")
    assert "2 running" in document
    assert drawn(document, "learning") >= 2
    assert "lake_seed1" in document


def test_a_live_page_opens_with_its_token(runs, tmp_path):
    with serving(runs, token="secret") as ask:
        assert "lake_seed1" in opened(f"{ask.url}?token=secret", tmp_path / "profile")
        assert "lake_seed1" not in opened(ask.url, tmp_path / "other")
