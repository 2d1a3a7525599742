"""``amago watch``: a live page about runs that begin, grow, die and move meanwhile, and who may see it."""

import http.client
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
import tiny
from report_pages import serving
from run_inside import refusal
from runs_on_disk import append, phases, write_run, write_settings

from amago.report.page import WatchServer, render, write_report
from amago.report.sections import SECTIONS

TOKEN = "a-token-that-nobody-guesses"


def runs_of(text):
    """{run: {head: cell}} of the table of runs on a page."""
    part = re.search(r'<section id="runs">.*?</section>', text, re.S)[0]
    heads = re.findall(r"<th>(.*?)</th>", part)
    lines = [re.findall(r"<td>(.*?)</td>", line) for line in re.findall(r"<tr data.*?</tr>", part)]
    return {cells[0]: dict(zip(heads, cells)) for cells in lines}


def test_runs_appear_grow_move_and_are_done(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "amago.report.page.time", SimpleNamespace(monotonic=lambda: 1.0)
    )  # a page lasts until something changes
    with serving(tmp_path) as ask:

        def page():
            return ask("/")[2]

        assert "there is no run here yet" in page()
        path = write_run(tmp_path / "deep" / "r", (), settings=False)
        write_settings(path, epochs=4)
        assert runs_of(page())["r"]["state"] == "starting"
        append(path, *phases(0, 5), *phases(1, 6))
        found = runs_of(page())["r"]
        assert (found["state"], found["epochs"], found["mean return"]) == ("running", "2 of 4 (50%)", "6 (val)")
        assert re.match(r"0:01:00 \(\w+ \d\d:\d\d\)", found["time left"])
        assert "1 of 1 runs running" in page()
        with (path / "metrics.jsonl").open("a") as file:
            file.write('{"epoch": 3, "env_st')  # killed while writing
        shutil.move(path, tmp_path / "s")
        assert list(runs_of(page())) == ["s"]
        append(tmp_path / "s", [], *phases(1, 20, seconds=40.0), *phases(2, 7), *phases(3, 8))
        os.utime(tmp_path / "s" / "metrics.jsonl", (time.time() - 3600,) * 2)
        assert runs_of(page())["s"]["state"] == "finished"
        assert "an unreadable line was left out" in page()
        shutil.rmtree(tmp_path / "s")
        assert runs_of(page()) == {}


def test_damaged_and_unreadable_runs_do_not_hide_others(tmp_path, monkeypatch):
    write_run(tmp_path / "good", (1,))
    bad = write_run(tmp_path / "bad", (1,))
    (bad / "settings.json").write_bytes(b"\xff\xfe{")
    (tmp_path / "noise").mkdir()
    (tmp_path / "noise" / "metrics.jsonl").write_bytes(bytes(range(256)) * 50)
    (tmp_path / "folder" / "metrics.jsonl").mkdir(parents=True)
    (tmp_path / "loop").symlink_to(tmp_path)
    text = render([tmp_path], live=True)
    assert set(runs_of(text)) == {"good", "bad", "noise"}
    assert "settings.json cannot be read" in text
    # as a file that another user owns; the tests may run as root, who can read everything
    real = Path.read_bytes

    def refuse(path):
        if path == bad / "metrics.jsonl":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    text = render([tmp_path], live=True)
    assert set(runs_of(text)) == {"good", "noise"}
    assert "Permission denied" in text


def test_the_page_is_that_of_the_report(tmp_path):
    for seed in range(2):
        write_run(tmp_path / f"lake_seed{seed}", (1, 3 + seed), seed, extra={"<b>": 1.0})
    with serving(tmp_path) as ask:
        status, headers, page = ask("/")
        assert status == 200
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert '<script src="plotly.js">' in page
        assert "http" not in re.sub(r"<script>.*</script>", "", page, flags=re.S)
        assert "Plotly" in ask("/plotly.js")[2]
        assert all(f'id="{key}"' in page for key in SECTIONS)
        assert "<b>" not in page
        assert "lake (2 seeds)" in page
        assert ask("/", "HEAD")[2] == ""


def test_nothing_else_is_served_or_changed_and_other_sites_cannot_ask_through_a_browser(tmp_path):
    write_run(tmp_path / "r", (1,))
    with serving(tmp_path) as ask:
        assert {ask(path)[0] for path in ("/state", "/metrics.jsonl", "/../r/metrics.jsonl", "/page")} == {404}
        assert {ask("/", method)[0] for method in ("POST", "PUT", "DELETE")} == {501}
        assert ask("/", Host="evil.example:80")[0] == 403
        assert {ask("/", Host=name)[0] for name in ("localhost:1", "127.0.0.1", "[::1]:5")} == {200}


def test_only_who_knows_the_token_sees_anything(tmp_path):
    for host in ("0.0.0.0", "", "::", "192.0.2.1", "box.example"):
        with pytest.raises(ValueError, match="needs a token"):
            WatchServer((host, 0), [tmp_path])
    write_run(tmp_path / "secret", (1,))
    with serving(tmp_path, token=TOKEN, host="0.0.0.0") as ask:
        for path in ("/", "/?token=", "/?token=wrong", "/?token=%C3%A9", f"/?token={TOKEN}x"):
            status, _, text = ask(path)
            assert status == 401, path
            assert "secret" not in text
        status, _, text = ask(f"/?token={TOKEN}")
        assert status == 200
        assert "secret" in text


def test_the_command_serves_a_real_run_until_it_is_stopped(tmp_path):
    tiny.learned(tmp_path / "runs", val_interval=1)
    words = [sys.executable, "-m", "amago.cli", "watch", str(tmp_path / "runs"), "--port", "0"]
    environment = tiny.environment() | {"AMAGO_WATCH_TOKEN": TOKEN}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        first = process.stdout.readline()
        url = urlsplit(re.search(r"http://\S+", first)[0])
        assert (url.hostname, url.query) == ("127.0.0.1", f"token={TOKEN}")
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=250)
        connection.request("GET", f"/?{url.query}")
        assert "Mean return, evaluation" in connection.getresponse().read().decode()
        connection.close()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=250)
        assert (process.returncode, err) == (0, "")
    finally:
        process.kill()
        process.communicate()


def test_mistakes_in_the_arguments(tmp_path, capsys):
    with WatchServer(("127.0.0.1", 0), [tmp_path]) as other:
        port = str(other.server_address[1])
        for words, named in [
            ([str(tmp_path / "nothing")], "not a directory"),
            ([str(tmp_path), "--port", "70000"], "--port"),
            ([str(tmp_path), "--host", "nowhere.invalid", "--port", "0"], "cannot serve at nowhere.invalid"),
            ([str(tmp_path), "--port", port], f"port {port}"),
        ]:
            assert named in refusal(capsys, "watch", *words)


def test_pages_about_runs_need_no_torch(tmp_path):
    write_run(tmp_path / "runs" / "r", (1, 2))
    program = """
import sys
sys.modules["torch"] = None  # an import of it fails
from amago.cli import main
import amago.report.page
raise SystemExit(main(["report", sys.argv[1], "--out", sys.argv[2]]))
"""
    tiny.run_program(program, tmp_path / "runs", tmp_path / "page.html")


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


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


@browser
def test_a_report_draws_its_figures(runs, tmp_path):
    page = write_report([runs], tmp_path / "page.html")
    document = opened(page.as_uri(), tmp_path / "profile")
    assert drawn(document, "learning") >= 2
    assert drawn(document, "adaptation") >= 1
    assert "lake (2 seeds)" in document
    assert '<td class="running">' in document or '<td class="stopped">' in document
    dark = r'<html[^>]*class="dark"'
    assert not re.search(dark, document)
    assert re.search(dark, opened(page.as_uri(), tmp_path / "other", "--blink-settings=preferredColorScheme=0"))


@browser
@pytest.mark.parametrize("token", [None, "secret"])
def test_a_live_page_fills_itself(runs, tmp_path, token):
    with serving(runs, token=token) as ask:
        document = opened(f"{ask.url}?token={token}", tmp_path / "profile")
        assert token is None or "lake_seed1" not in opened(ask.url, tmp_path / "other")
    assert "of 2 runs running" in document
    assert drawn(document, "learning") >= 2
    assert "lake_seed1" in document
