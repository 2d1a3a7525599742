"""``amago watch``: a live page about runs that begin, grow, die and move meanwhile, and who may see it."""

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from urllib.parse import urlsplit

import pytest
import tiny
from report_pages import serving
from runs_on_disk import RETURN, append, phases, row, write_run, write_settings

from amago.cli import main
from amago.run.report.figures import Choice
from amago.run.report.follow import SMALL
from amago.run.report.sections import SECTIONS
from amago.run.report.server import WatchServer
from amago.run.report.watch import Watcher

TOKEN = "a-token-that-nobody-guesses"


@pytest.fixture
def watcher(tmp_path):
    """A watcher that looks when it is told to."""
    made = Watcher([tmp_path])
    made._first.set()
    return made


def runs_of(watcher):
    """{run: {head: cell}} of the table of runs, as it is after another look."""
    watcher.look()
    (table, *_) = [p for p in watcher.section("runs", Choice()).parts if isinstance(p, str)] or [""]
    heads = re.findall(r"<th>(.*?)</th>", table)
    lines = [re.findall(r"<td>(.*?)</td>", line) for line in re.findall(r"<tr data.*?</tr>", table)]
    return {cells[0]: dict(zip(heads, cells)) for cells in lines}


def scores_of(watcher, name):
    """The learning curve of a run."""
    for figure in watcher.section("learning", Choice()).parts:
        if isinstance(figure, dict) and figure["layout"]["title"]["text"] == "Mean return, evaluation":
            for trace in figure["variants"]["env_steps mean"]:
                if trace.get("name") == name:
                    return trace["y"]
    return None


# ---- runs that change ------------------------------------------------------------------------------------------------------


def test_runs_appear_grow_and_are_done(tmp_path, watcher):
    assert runs_of(watcher) == {}
    assert "there is no run here yet" in watcher.section("runs", Choice()).missing
    path = write_run(tmp_path / "deep" / "r", (), settings=False)
    write_settings(path, epochs=4)
    assert runs_of(watcher)["r"]["state"] == "starting"
    append(path, *phases(0, 5), *phases(1, 6))
    found = runs_of(watcher)["r"]
    assert (found["state"], found["epochs"], found["mean return"]) == ("running", "2 of 4 (50%)", "6 (val)")
    assert re.match(r"1 min 00 s \(\d\d:\d\d\)", found["time left"])
    assert found["steps/s"] != ""
    assert scores_of(watcher, "r") == [5, 6]
    append(path, *phases(2, 7), *phases(3, 8))
    os.utime(path / "metrics.jsonl", (time.time() - 3600,) * 2)
    assert runs_of(watcher)["r"]["state"] == "finished"


def test_the_version_rises_when_something_changed_and_not_otherwise(tmp_path, watcher):
    path = write_run(tmp_path / "r", (1,))
    seen = []
    for change in (
        lambda: None,
        lambda: None,
        lambda: append(path, *phases(1, 2)),
        lambda: None,
        lambda: write_settings(path, epochs=7),
        lambda: shutil.move(path, tmp_path / "s"),
        lambda: shutil.rmtree(tmp_path / "s"),
        lambda: None,
    ):
        change()
        watcher.look()
        seen.append(watcher.state()["version"])
    assert seen == [1, 1, 2, 2, 3, 4, 5, 5]


def test_a_run_that_is_killed_and_resumed(tmp_path, watcher):
    path = write_run(tmp_path / "r", (1, 2, 3))
    runs_of(watcher)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 3, "env_st')  # killed while writing
    assert scores_of(watcher, "r") == [1, 2, 3]
    with (path / "metrics.jsonl").open("a") as file:
        file.write("\n")
    append(path, *phases(1, 20, seconds=40.0))
    found = runs_of(watcher)["r"]
    assert scores_of(watcher, "r") == [1, 20]
    assert "went back" not in found["faults"]
    assert "an unreadable line was left out" in str(watcher.section("runs", Choice()).parts)
    assert ">1<" in str(watcher.section("faults", Choice()).parts)  # it went back once


def test_a_renamed_run_goes_on_without_being_read_again(tmp_path, watcher):
    path = write_run(tmp_path / "old", (1, 2))
    runs_of(watcher)
    before = next(iter(watcher._followers.values())).log
    shutil.move(path, tmp_path / "new")
    append(tmp_path / "new", *phases(2, 3))
    assert list(runs_of(watcher)) == ["new"]
    assert scores_of(watcher, "new") == [1, 2, 3]
    assert next(iter(watcher._followers.values())).log is before


def test_damaged_and_unreadable_runs_do_not_hide_others(tmp_path, watcher, monkeypatch):
    write_run(tmp_path / "good", (1,))
    bad = write_run(tmp_path / "bad", (1,))
    (bad / "settings.json").write_bytes(b"\xff\xfe{")
    (tmp_path / "noise").mkdir()
    (tmp_path / "noise" / "metrics.jsonl").write_bytes(bytes(range(256)) * 50)
    (tmp_path / "folder" / "metrics.jsonl").mkdir(parents=True)
    (tmp_path / "loop").symlink_to(tmp_path)
    found = runs_of(watcher)
    assert set(found) == {"good", "bad", "noise"}
    everything = str([SECTIONS[key] and watcher.section(key, Choice()) for key in SECTIONS])
    assert "settings.json cannot be read" in everything
    # as a file that another user owns; the tests may run as root, who can read everything
    real = os.open
    monkeypatch.setattr(os, "open", lambda p, *a, **k: refuse() if str(p).startswith(str(bad)) else real(p, *a, **k))

    def refuse():
        raise PermissionError(13, "Permission denied")

    assert set(runs_of(watcher)) == {"good", "noise"}
    assert any("Permission denied" in m for m in watcher.section("runs", Choice()).missing)


def test_a_long_log_is_shown_at_once_and_exactly_later(tmp_path):
    write_settings(tmp_path / "r", epochs=10_000)
    rows = [r for epoch in range(2_000) for r in phases(epoch, epoch / 100, train={"Skipped Updates": float(epoch)})]
    append(tmp_path / "r", *rows)
    assert (tmp_path / "r" / "metrics.jsonl").stat().st_size > 2 * SMALL
    watcher = Watcher([tmp_path], seconds=0.2)
    watcher.look()
    watcher._first.set()
    first = watcher.state()
    assert "% of the logs read, the rest sampled" in first["text"]
    assert len(scores_of(watcher, "r")) >= 30
    assert "being read" in str(watcher.section("runs", Choice()).parts)
    watcher.start()
    deadline = time.monotonic() + 60
    while "sampled" in watcher.state()["text"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    watcher.stop()
    assert watcher.state()["version"] > first["version"]
    assert "1,999 skipped updates" in str(watcher.section("runs", Choice()).parts)


def test_an_error_while_looking_is_told_and_looking_goes_on(tmp_path, monkeypatch, caplog):
    write_run(tmp_path / "r", (1,))
    with serving(tmp_path) as ask:
        assert "1 running" in json.loads(ask("/state")[2])["text"]
        monkeypatch.setattr("amago.run.report.watch.labelled", lambda runs: 1 / 0)
        assert eventually(lambda: "ZeroDivisionError" in ask("/state")[2])
        assert "r" in ask("/section/runs")[2]
        monkeypatch.undo()
        assert eventually(lambda: "ZeroDivisionError" not in ask("/state")[2])
    assert "looking for runs failed" in caplog.text


def eventually(holds, seconds=30):
    """Whether something becomes true."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


# ---- the server ------------------------------------------------------------------------------------------------------------


def test_the_page_and_its_sections(tmp_path):
    for seed in range(2):
        write_run(tmp_path / f"lake_seed{seed}", (1, 3 + seed), seed, extra={"<b>": 1.0})
    with serving(tmp_path) as ask:
        status, headers, page = ask("/")
        assert status == 200
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert '<script src="plotly.js">' in page
        assert "http" not in re.sub(r"<script>.*</script>", "", page, flags=re.S)
        assert "Plotly" in ask("/plotly.js")[2]
        for key in SECTIONS:
            assert f'id="{key}"' in page
            status, headers, text = ask(f"/section/{key}?axis=grad_steps&statistic=IQM")
            assert (status, headers["Content-Type"]) == (200, "application/json")
            section = json.loads(text, parse_constant=pytest.fail)
            assert section["title"]
            assert "<b>" not in section["html"]
        learning = json.loads(ask("/section/learning?axis=grad_steps&statistic=IQM")[2])["figures"][0]["variants"]
        ((key, traces),) = learning.items()
        assert key == "grad_steps IQM"
        assert (traces[-1]["x"], traces[-1]["y"]) == ([0, 10], [1, 3.5])
        assert ask("/", "HEAD")[2] == ""


@pytest.mark.parametrize(
    "path",
    [
        "/section/none",
        "/section/",
        "/section/runs?axis=x",
        "/section/runs?statistic=x",
        "/metrics.jsonl",
        "/../r/metrics.jsonl",
        "/page",
    ],
)
def test_nothing_else_is_served(tmp_path, path):
    write_run(tmp_path / "r", (1,))
    with serving(tmp_path) as ask:
        assert ask(path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_nothing_can_be_changed(tmp_path, method):
    with serving(tmp_path) as ask:
        assert ask("/", method)[0] == 501


def test_other_sites_cannot_ask_through_a_browser(tmp_path):
    with serving(tmp_path) as ask:
        assert ask("/state", Host="evil.example:80")[0] == 403
        for name in ("localhost:1", "127.0.0.1", "[::1]:5"):
            assert ask("/state", Host=name)[0] == 200


def test_an_address_that_others_can_reach_needs_a_token(tmp_path):
    for host in ("0.0.0.0", "", "::", "192.0.2.1", "box.example"):
        with pytest.raises(ValueError, match="needs a token"):
            WatchServer((host, 0), Watcher([tmp_path]))


def test_only_who_knows_the_token_sees_anything(tmp_path):
    write_run(tmp_path / "secret", (1,))
    with serving(tmp_path, token=TOKEN, host="0.0.0.0") as ask:
        for path in (
            "/",
            "/state",
            "/section/runs",
            "/plotly.js",
            "/?token=",
            "/?token=wrong",
            "/?token=%C3%A9",
            f"/?token={TOKEN}x",
        ):
            status, _, text = ask(path)
            assert status == 401, path
            assert "secret" not in text
        assert ask("/state", Cookie="amago-watch=wrong")[0] == 401
        assert ask("/state", Cookie="[]=;;")[0] == 401
        status, headers, _ = ask(f"/?token={TOKEN}")
        assert (status, headers["Location"]) == (303, "./")
        assert "HttpOnly" in headers["Set-Cookie"]
        cookie = headers["Set-Cookie"].partition(";")[0]
        assert ask("/", Cookie=cookie)[0] == 200
        assert "secret" in ask("/section/runs", Cookie=cookie)[2]
        assert "secret" in ask(f"/section/runs?token={TOKEN}")[2]


# ---- the command -----------------------------------------------------------------------------------------------------------


def test_the_command_serves_a_real_run_until_it_is_stopped(tmp_path):
    experiment = tiny.started(tmp_path / "runs", epochs=1, val_interval=1)
    experiment.learn()
    experiment.close()
    words = [sys.executable, "-m", "amago.cli", "watch", str(tmp_path / "runs"), "--port", "0"]
    environment = tiny.environment() | {"AMAGO_WATCH_TOKEN": TOKEN}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        first = process.stdout.readline()
        url = urlsplit(re.search(r"http://\S+", first)[0])
        assert (url.hostname, url.query) == ("127.0.0.1", f"token={TOKEN}")
        assert "1 " in process.stdout.readline()
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=60)
        connection.request("GET", f"/section/learning?{url.query}")
        answer = json.loads(connection.getresponse().read())
        connection.close()
        assert answer["figures"]
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "")
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{tmp}/nothing"], "not a directory"),
        (["{tmp}", "--port", "70000"], "--port"),
        (["{tmp}", "--host", "nowhere.invalid", "--port", "0"], "cannot serve at nowhere.invalid"),
    ],
)
def test_mistakes_in_the_arguments(tmp_path, capsys, arguments, words):
    assert main(["watch", *(a.format(tmp=tmp_path) for a in arguments)]) == 2
    assert words in capsys.readouterr().err


def test_a_port_that_is_taken_is_named(tmp_path, capsys):
    other = WatchServer(("127.0.0.1", 0), Watcher([tmp_path]))
    try:
        port = str(other.server_address[1])
        assert main(["watch", str(tmp_path), "--port", port]) == 2
        message = capsys.readouterr().err
        assert port in message
        assert "--port 0" in message
    finally:
        other.server_close()


def test_a_row_of_the_log_that_is_no_row_is_no_end(tmp_path, watcher):
    path = write_run(tmp_path / "r", (1,))
    append(path, [1, 2], row("val", {RETURN: 5}, 1, 100, 10, 60))
    runs_of(watcher)
    assert scores_of(watcher, "r") == [1, 5]


def test_pages_about_runs_need_no_torch(tmp_path):
    write_run(tmp_path / "runs" / "r", (1, 2))
    program = """
import sys
sys.modules["torch"] = None  # an import of it fails
from amago.cli import main
import amago.run.report.server
raise SystemExit(main(["report", sys.argv[1], "--out", sys.argv[2]]))
"""
    words = [sys.executable, "-c", program, str(tmp_path / "runs"), str(tmp_path / "page.html")]
    done = subprocess.run(words, env=tiny.environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
