"""``amago report``: what the page says of runs, complete ones and damaged ones."""

from __future__ import annotations

import re
import sys

import pytest
from report_pages import cells_of, data_of, figures_of, lines, shown, text_of
from runs_on_disk import append, phases, row, write_run, write_settings

from amago.cli import main
from amago.run.report.page import write_report

RETURN_OF = "Average Total Return in "


@pytest.fixture
def report(tmp_path):
    def make(*paths, **options):
        return write_report(paths or [tmp_path], tmp_path / "out" / "page.html", **options)

    return make


# ---- learning curves -------------------------------------------------------------------------------------------------------


def test_runs_of_different_seeds_are_one_line_with_an_interval(tmp_path, report):
    for seed, scores in enumerate([(0, 2, 4), (0, 4, 8), (0, 6, 12)]):
        write_run(tmp_path / f"lake_seed{seed}", scores, seed)
    write_run(tmp_path / "fast", (0, 1, 1), learning_rate=1e-2)
    figure = figures_of(report())["Mean return, evaluation"]
    assert lines(figure) == {"fast": ([0, 100, 200], [0, 1, 1]), "lake (3 seeds)": ([0, 100, 200], [0, 4, 8])}
    (band,) = [t for t in shown(figure) if t.get("fill")]
    assert min(band["y"]) >= 0
    assert 8 < max(band["y"]) <= 12


def test_axes_and_statistics_can_be_chosen(tmp_path, report):
    for seed, final in enumerate((0, 1, 2, 100)):
        write_run(tmp_path / f"r_seed{seed}", (0, final), seed)
    page = report(statistic="IQM")
    figure = figures_of(page)["Mean return, evaluation"]
    for axis, x in (("env_steps", [0, 100]), ("grad_steps", [0, 10]), ("wall_time", [1 / 3600, 31 / 3600])):
        (line,) = lines(figure, axis=axis).values()
        assert line[0] == pytest.approx(x, rel=1e-4)
    assert lines(figure)["r (4 seeds)"][1][-1] == pytest.approx(25.75)
    assert lines(figure, statistic="IQM")["r (4 seeds)"][1][-1] == pytest.approx(1.5)
    each = [t["y"][-1] for t in shown(figure, statistic="each run")]
    assert each == [0, 1, 2, 100]
    assert data_of(page)["statistic"] == "IQM"


def test_lengths_of_rollouts_and_exploration(tmp_path, report):
    write_run(tmp_path / "old", (1, 2))
    assert "length of rollouts" in text_of(report()), "runs of earlier versions lack them, which is said"
    path = write_run(tmp_path / "new", (1, 2), learning_rate=1e-2)
    append(path, row("val", {"Average Rollout Length": 12.5}, 2, 200, 20, 61.0))
    append(path, row("rollout", {"Average Rollout Length": 7.5, "Epsilon": 0.25}, 2, 300, 20, 70.0))
    drawn = figures_of(report())
    shown_lines = [lines(drawn[f"Mean length of rollouts, {phase}"]) for phase in ("evaluation", "collection")]
    assert shown_lines == [{"new": ([200], [12.5])}, {"new": ([300], [7.5])}]
    assert lines(drawn["Epsilon of the exploration"]) == {"new": ([300], [0.25])}


def test_a_run_that_was_killed_and_resumed_is_one_curve(tmp_path, report):
    path = write_run(tmp_path / "r", (1, 2, 3, 4))
    append(path, *phases(2, 30, seconds=61.0), *phases(3, 40, seconds=92.0))  # from the state after epoch 1
    page = report()
    ((x, y),) = lines(figures_of(page)["Mean return, evaluation"]).values()
    assert (x, y) == ([0, 100, 200, 300], [1, 2, 30, 40])
    assert cells_of(page, "faults", "r")["resumed from an earlier state"] == "1"


# ---- the other sections ----------------------------------------------------------------------------------------------------


def test_adaptation_by_attempt(tmp_path, report):
    write_run(tmp_path / "r", (1, 2, 3), attempts=(0.25, 0.5, 0.75))
    figure = figures_of(report())["Average Attempt # Success in lake (evaluations)"]
    assert lines(figure) == {"r": ([0, 1, 2], [0.25, 0.5, 0.75])}
    assert figure["layout"]["xaxis"]["title"]["text"] == "attempt"


def test_final_returns_by_environment(tmp_path, report):
    for seed in range(3):
        write_run(tmp_path / f"r_{seed}", (1, 2), seed, extra={f"{RETURN_OF}a": 5.0 + seed, f"{RETURN_OF}b": -1.0})
    figure = figures_of(report())["Final return by environment"]
    (dots,) = shown(figure)
    assert dict(zip(dots["y"], dots["x"])) == {"a": 6.0, "b": -1.0}
    above, below = dots["error_x"]["array"], dots["error_x"]["arrayminus"]
    assert 0 < above[0] <= 1.0
    assert 0 < below[0] <= 1.0
    assert above[1] == below[1] == 0.0
    assert "a" in figures_of(report())


def test_values_are_drawn_with_returns(tmp_path, report):
    q = {f"{what} (gamma={g})": v for what, v in (("Q(s, a)", 3.0), ("TD Target", 4.0)) for g in (0.7, 0.99)}
    write_run(tmp_path / "r", (1, 2), train=q)
    found = lines(figures_of(report())["Values and returns"], axis="grad_steps")
    assert {name: y for name, (_, y) in found.items()} == {
        "r: Q(s, a), discount 0.99": [3, 3],
        "r: its target": [4, 4],
        "r: return of evaluations": [1, 2],
    }


def test_values_of_runs_with_other_discounts(tmp_path, report):
    for name, gamma in (("short", 0.9), ("long", 0.99)):
        write_run(tmp_path / name, (1, 2), learning_rate=gamma, train={f"Q(s, a) (gamma={gamma})": gamma})
    found = lines(figures_of(report())["Values and returns"])
    assert {name for name in found if "Q(s, a)" in name} == {"short: Q(s, a), discount 0.9", "long: Q(s, a), discount 0.99"}


def test_where_the_time_went(tmp_path, report):
    write_run(tmp_path / "r", (1, 2))
    page = report()
    bars = {t["name"]: t["x"] for t in shown(figures_of(page)["Where the time went"])}
    assert bars == {"evaluation": [pytest.approx(2 / 60)], "collection": [pytest.approx(40 / 60)], "training": [0.3]}
    assert cells_of(page, "runs", "r")["steps/s"] == "3.3"  # 200 steps in 60 s


def test_faults_are_counted_as_they_are_logged(tmp_path, report):
    path = tmp_path / "r"
    # skipped updates are counted from the start of the run on, and averaged over the rows' updates; restarts are of one phase
    for epoch, skipped in enumerate((0.0, 2.6, 3.0)):
        append(path, *phases(epoch, 1, train={"Skipped Updates": skipped, "Critic Loss": None if epoch == 1 else 1.0}))
        append(
            path,
            row("rollout", {"Restarted Environments": 2, "Dropped Rollouts": 1}, epoch, 100 * epoch + 100, 10 * epoch + 10, 99),
        )
    cells = cells_of(report(), "faults", "r")
    assert cells["skipped updates"] == "3"
    assert (cells["restarted environments"], cells["dropped rollouts"]) == ("6", "3")
    assert cells["values that were not finite"] == "1"


def test_what_differs_between_runs_and_where_they_ran(tmp_path, report):
    starts = [
        {"time": "2026-01-01", "role": "learn", "changed": {}, "versions": {"python": "3.11.7", "torch": "2.9"},
         "git": {"commit": "0123456789abcdef", "changed": True}, "machine": {"host": "box", "memory_gb": 23.4, "gpus": ["H200"]}},
        {"time": "2026-01-02", "role": "learn", "resumed": "/x/r_epoch_7", "changed": {"learning_rate": [1, 2]}},
    ]  # fmt: skip
    for i in range(2):
        write_run(tmp_path / f"r{i}", (1,), settings=False)
        write_settings(
            tmp_path / f"r{i}", starts, {"amago.x.Other.width": i}, ["amago.x.Other.width"], learning_rate=0.1 * (i + 1), seed=i
        )
    page = report()
    assert cells_of(page, "settings", "learning_rate") == {"setting": "learning_rate", "r0": "0.1", "r1": "0.2"}
    assert "Other.width" not in text_of(page)  # of a part that the run does not use
    cells = cells_of(page, "machines", "r0")
    assert (cells["host"], cells["memory"], cells["GPUs"], cells["torch"]) == ("box", "23.4 GiB", "H200", "2.9")
    assert cells["commit"] == "0123456789, and changes"
    assert "Settings changed on resume" in text_of(page)


def test_what_a_run_lacks_is_left_out_with_the_reason(tmp_path, report):
    write_run(tmp_path / "bare", (), settings=False)
    text = text_of(report())
    for reason in (
        "no evaluation has ended yet",
        "no rollout has ended during collection",
        "scores by attempt",
        "no replay buffer",
        "no update was logged",
        "no settings.json",
        "no update was skipped",
    ):
        assert reason in text, reason


def test_damage_is_named_on_the_page(tmp_path, report):
    path = write_run(tmp_path / "torn", (1, 2))
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 5, "env\n[1, 2]\n{"epoch": "x"}\n')
    append(path, *phases(2, 3))
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 6')  # being written
    (path / "settings.json").write_text("{")
    page = report()
    text = text_of(page)
    assert "settings.json cannot be read" in text
    assert "3 unreadable lines were left out" in text
    assert lines(figures_of(page)["Mean return, evaluation"])["torn"][1] == [1, 2, 3]


# ---- the page --------------------------------------------------------------------------------------------------------------


def test_the_page_needs_nothing_else_and_shows_names_as_text(tmp_path, capsys):
    evil = "<img src=x onerror=alert(1)><!--PLOTLY-->"
    path = write_run(tmp_path / "r", (1, 2), train={evil: 1.0}, extra={f"{RETURN_OF}{evil}": 1.0, f"{RETURN_OF}b": 1.0})
    write_settings(path, note=evil)
    out = tmp_path / "report.html"
    assert main(["report", str(path), "--out", str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r", "report.html"]
    page = out.read_text()
    head = page[: page.index("<script>")]
    assert "http://" not in head
    assert "https://" not in head
    assert not re.search(r"<(?:script|link|img)[^>]+(?:src|href)=", head)
    assert evil not in page
    assert "&lt;img" in text_of(out)
    assert page.count("Plotly.react(") >= 1
    assert any("&lt;img" in title for title in figures_of(out))


def test_runs_of_one_name_are_told_apart(tmp_path, report):
    for name in ("a/run", "b/run"):
        write_run(tmp_path / name, (1,), settings=False)
    assert list(lines(figures_of(report())["Mean return, evaluation"])) == ["a/run", "b/run"]


@pytest.mark.parametrize(("make", "words"), [(False, "is not a directory"), (True, "no metrics.jsonl")])
def test_a_directory_without_runs(tmp_path, capsys, make, words):
    where = tmp_path / "nothing"
    if make:
        where.mkdir()
    assert main(["report", str(where), "--out", str(tmp_path / "p.html")]) == 2
    message = capsys.readouterr().err
    assert words in message
    assert "nothing" in message
    assert not (tmp_path / "p.html").exists()


def test_an_unknown_statistic_is_refused(tmp_path, report):
    write_run(tmp_path / "r", (1,))
    with pytest.raises(ValueError, match=r"'median'.*mean, IQM"):
        report(statistic="median")


def test_without_plotly_the_extra_is_named(tmp_path, monkeypatch, report):
    write_run(tmp_path / "r", (1,))
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ImportError, match=r"amago\[report\]"):
        report()
