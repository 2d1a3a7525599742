"""``amago report``: what the page says of runs, complete ones and damaged ones."""

from __future__ import annotations

import json
import re
import sys

import pytest
import tiny
from report_pages import cells_of, data_of, figures_of, lines, shown, text_of
from run_inside import refusal
from runs_on_disk import RETURN, append, phases, row, write_run, write_settings

from amago.cli import main
from amago.report.page import write_report

RETURN_OF = "Average Total Return in "
EVALUATION = "Mean return, evaluation"


@pytest.fixture
def report(tmp_path):
    def make(*paths, **options):
        return write_report(paths or [tmp_path], tmp_path / "out" / "page.html", **options)

    return make


def test_runs_of_different_seeds_are_one_line_with_an_interval(tmp_path, report):
    for seed, scores in enumerate([(0, 2, 4), (0, 4, 8), (0, 6, 12)]):
        write_run(tmp_path / f"lake_seed{seed}", scores, seed)
    write_run(tmp_path / "fast", (0, 1, 1), learning_rate=1e-2)
    figure = figures_of(report())[EVALUATION]
    assert lines(figure) == {"fast": ([0, 100, 200], [0, 1, 1]), "lake (3 seeds)": ([0, 100, 200], [0, 4, 8])}
    (band,) = [t for t in shown(figure) if t.get("fill")]
    assert min(band["y"]) >= 0
    assert 8 < max(band["y"]) <= 12


def test_axes_and_statistics_can_be_chosen(tmp_path, report):
    for seed, final in enumerate((0, 1, 2, 100)):
        write_run(tmp_path / f"r_seed{seed}", (0, final), seed)
    page = report(statistic="IQM")
    figure = figures_of(page)[EVALUATION]
    for axis, x in (("env_steps", [0, 100]), ("grad_steps", [0, 10]), ("wall_time", [1 / 3600, 31 / 3600])):
        (line,) = lines(figure, axis=axis).values()
        assert line[0] == pytest.approx(x, rel=1e-4)
    for statistic, last in (("mean", 25.75), ("IQM", 1.5)):
        assert lines(figure, statistic=statistic)["r (4 seeds)"][1][-1] == pytest.approx(last)
    assert [t["y"][-1] for t in shown(figure, statistic="each run")] == [0, 1, 2, 100]
    assert data_of(page)["statistic"] == "IQM"


def test_lengths_exploration_and_metrics_of_a_users_own_are_drawn(tmp_path, report):
    path = write_run(tmp_path / "r", (1, 2), train={"My Loss": 3.0})
    assert re.search("not in the logs: .*length of rollouts", text_of(report())), (
        "runs of earlier versions lack them, which is said"
    )
    append(path, row("val", {"Average Rollout Length": 12.5}, 2, 200, 20, 61.0))
    append(path, row("rollout", {"Average Rollout Length": 7.5, "Epsilon": 0.25}, 2, 300, 20, 70.0))
    append(path, row("mine", {"speed": 5.0}, 2, 200, 20, 99.0))
    found = {title: lines(figure)["r"] for title, figure in figures_of(report()).items()}
    wanted = {
        "Mean length of rollouts, evaluation": ([200], [12.5]), "Mean length of rollouts, collection": ([300], [7.5]),
        "Epsilon of the exploration": ([300], [0.25]), "My Loss (training)": ([100, 200], [3, 3]), "speed (mine)": ([200], [5]),
    }  # fmt: skip
    assert {title: found[title] for title in wanted} == wanted


def test_a_run_that_was_killed_and_resumed_is_one_curve(tmp_path, report):
    path = write_run(tmp_path / "r", (1, 2, 3, 4))
    append(path, *phases(2, 30, seconds=61.0), *phases(3, 40, seconds=92.0))  # from the state after epoch 1
    page = report()
    assert lines(figures_of(page)[EVALUATION])["r"] == ([0, 100, 200, 300], [1, 2, 30, 40])
    assert cells_of(page, "faults", "r")["resumed from an earlier state"] == "1"


def test_adaptation_by_attempt_in_evaluations_and_tests(tmp_path, report):
    path = write_run(tmp_path / "r", (1, 2, 3), attempts=(0.25, 0.5))
    tested = {f"Average Attempt {i} Success in lake": 0.1 for i in range(2)}
    append(path, row("test", tested, 3, 300, 30, 99.0))
    figures = figures_of(report())
    figure = figures["Average Attempt # Success in lake (evaluations)"]
    assert lines(figure) == {"r": ([1, 2], [0.25, 0.5])}
    assert figure["layout"]["xaxis"]["title"]["text"] == "attempt"
    assert figure["layout"]["yaxis"]["rangemode"] == "tozero"
    assert lines(figures["Average Attempt # Success in lake (tests)"]) == {"r": ([1, 2], [0.1, 0.1])}


def test_a_line_says_how_many_of_its_runs_reach_its_end(tmp_path, report):
    for seed, scores in enumerate([(0, 2), (0, 4, 8), (0, 6, 12)]):
        write_run(tmp_path / f"lake_seed{seed}", scores, seed)
    figure = figures_of(report())[EVALUATION]
    assert lines(figure) == {"lake (3 seeds, 2 to the end)": ([0, 100, 200], [0, 4, 10])}


def test_the_collectors_of_a_launch_are_no_runs(tmp_path, report):
    run = write_run(tmp_path / "r", (1, 2))
    append(run / "launch" / "collectors" / "a0", row("rollout", {RETURN: 5.0}, 0, 10))
    page = report()
    assert list(lines(figures_of(page)[EVALUATION])) == ["r"]
    assert ">1 runs<" not in text_of(page)
    assert "a0" not in text_of(page)


def test_final_returns_by_environment(tmp_path, report):
    for seed in range(3):
        write_run(tmp_path / f"r_{seed}", (1, 2), seed, extra={f"{RETURN_OF}a": 5.0 + seed, f"{RETURN_OF}b": -1.0})
    page = report()
    cells = cells_of(page, "environments", "r")
    assert (cells["environment"], cells["final return"], cells["95% interval"][0]) == ("a", "6", "5")
    assert {"a", "b"} <= set(figures_of(page))


def test_values_are_drawn_with_returns(tmp_path, report):
    """The values of the longest discount that each run has."""
    for name, gammas in (("short", (0.9,)), ("long", (0.7, 0.99))):
        q = {f"{what} (gamma={g})": v for what, v in (("Q(s, a)", 3.0), ("TD Target", 4.0)) for g in gammas}
        write_run(tmp_path / name, (1, 2), learning_rate=gammas[-1], train=q)
    found = lines(figures_of(report())["Values and returns"], axis="grad_steps")
    values = {"its target": [4, 4], "return of evaluations": [1, 2]}
    assert {name: y for name, (_, y) in found.items()} == {
        **{f"short: {what}": y for what, y in (values | {"Q(s, a), discount 0.9": [3, 3]}).items()},
        **{f"long: {what}": y for what, y in (values | {"Q(s, a), discount 0.99": [3, 3]}).items()},
    }


def test_a_report_of_a_real_run(tmp_path):
    run = tiny.learned(tmp_path, epochs=2, val_interval=1).run_dir
    before = sorted((p, p.stat().st_mtime_ns) for p in run.rglob("*") if p.is_file())
    page = write_report([run], tmp_path / "page.html")
    found = figures_of(page)
    for title in (EVALUATION, "Values and returns", "Critic Loss", "Gradient Norm"):
        assert shown(found[title]), title
    assert cells_of(page, "runs", run.name)["updates"] != "0"
    assert "cannot be read" not in text_of(page)
    json.loads(json.dumps(found), parse_constant=pytest.fail)  # no NaN, which browsers refuse
    assert sorted((p, p.stat().st_mtime_ns) for p in run.rglob("*") if p.is_file()) == before, "only read"


def test_where_the_time_went(tmp_path, report):
    write_run(tmp_path / "r", (1, 2))
    page = report()
    cells = cells_of(page, "throughput", "r")
    assert (cells["evaluation"], cells["collection"], cells["training"]) == ("0:00:02", "0:00:40", "0:00:18")
    assert cells_of(page, "runs", "r")["steps/s"] == "3.33"  # 200 steps in 60 s


def test_faults_are_counted_as_they_are_logged(tmp_path, report):
    """Skipped updates are counted from the start of the run on, and averaged over the rows' updates; restarts are of one phase."""
    for epoch, skipped in enumerate((0.0, 2.6, 3.0)):
        rows = phases(epoch, 1, train={"Skipped Updates": skipped, "Critic Loss": None if epoch == 1 else 1.0})
        rows.append(
            row("rollout", {"Restarted Environments": 2, "Dropped Rollouts": 1}, epoch, 100 * epoch + 100, 10 * epoch + 10, 99)
        )
        append(tmp_path / "r", *rows)
    cells = cells_of(report(), "faults", "r")
    wanted = {
        "skipped updates": "3",
        "restarted environments": "6",
        "dropped rollouts": "3",
        "values that were not finite": "1",
    }
    assert {name: cells[name] for name in wanted} == wanted


def test_what_differs_between_runs_and_where_they_ran(tmp_path, report):
    starts = [
        {"time": "2026-01-01", "role": "learn", "changed": {}, "versions": {"python": "3.11.7", "torch": "2.9"},
         "git": {"commit": "0123456789abcdef", "changed": True}, "machine": {"host": "box", "memory_gb": 23.4, "gpus": ["H200"]}},
        {"time": "2026-01-02", "role": "learn", "resumed": "/x/r_epoch_7", "changed": {"learning_rate": [1, 2]}},
    ]  # fmt: skip
    for i in range(2):
        path = write_run(tmp_path / f"r{i}", (1,), settings=False)
        write_settings(path, starts, {"amago.x.Other.width": i}, ["amago.x.Other.width"], learning_rate=0.1 * (i + 1), seed=i)
    page = report()
    assert cells_of(page, "settings", "learning_rate") == {"setting": "learning_rate", "r0": "0.1", "r1": "0.2"}
    assert "Other.width" not in text_of(page)  # of a part that the run does not use
    cells = cells_of(page, "machines", "r0")
    assert [cells[k] for k in ("host", "memory (GiB)", "GPUs", "torch")] == ["box", "23.4", "[&#x27;H200&#x27;]", "2.9"]
    assert (cells["commit"], cells["changed files"]) == ("0123456789abcdef", "True")
    assert "changed on resume" in text_of(page)


def test_what_a_run_lacks_is_left_out_with_the_reason_and_damage_is_named(tmp_path, report):
    write_run(tmp_path / "bare", (), settings=False)
    text = text_of(report())
    for reason in (
        "no evaluation has ended yet", "not in the logs: Mean return, evaluation, Mean return, collection (with exploration)",
        "scores by attempt", "not in the logs: Values and returns, Critic Loss", "no settings.json",
        "no update was skipped",
    ):  # fmt: skip
        assert reason in text, reason
    path = write_run(tmp_path / "torn", (1, 2))
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 5, "env\n[1, 2]\n{"epoch": "x"}\n')
    append(path, *phases(2, 3))
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 6')  # being written
    (path / "settings.json").write_text("{")
    page = report()
    assert "settings.json cannot be read" in text_of(page)
    assert "3 unreadable lines were left out" in text_of(page)
    assert lines(figures_of(page)[EVALUATION])["torn"][1] == [1, 2, 3]


def test_the_page_needs_nothing_else_and_shows_names_as_text(tmp_path, capsys):
    evil = "<img src=x onerror=alert(1)>$PLOTLY"
    path = write_run(tmp_path / "r", (1, 2), train={evil: 1.0}, extra={f"{RETURN_OF}{evil}": 1.0, f"{RETURN_OF}b": 1.0})
    write_settings(path, note=evil)
    out = tmp_path / "report.html"
    assert main(["report", str(path), "--out", str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r", "report.html"]
    page = out.read_text()
    head = page[: page.index("<script>")]
    assert not re.search(r"https?://|<(?:script|link|img)[^>]+(?:src|href)=", head)
    assert evil not in page
    assert "&lt;img" in text_of(out)
    assert page.count("Plotly.react(") >= 1
    assert any("&lt;img" in title for title in figures_of(out))


def test_a_directory_without_runs(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for where in (tmp_path / "empty", tmp_path / "nothing"):
        message = refusal(capsys, "report", str(where), "--out", str(tmp_path / "p.html"))
        assert "no metrics.jsonl" in message
        assert where.name in message
    assert not (tmp_path / "p.html").exists()


def test_without_plotly_the_extra_is_named(tmp_path, monkeypatch, report):
    write_run(tmp_path / "r", (1,))
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ImportError, match=r"amago\[report\]"):
        report()
