"""``amago report``: what the page says of runs, complete ones and damaged ones."""

from __future__ import annotations

import json
import re
import sys

import numpy as np
import pytest

from amago.cli import main
from amago.run.report import curves
from amago.run.report.page import duration, write_report
from amago.run.report.runs import base_name, differences, find_runs, group_runs, read_run

RETURN = "Average Total Return (Across All Env Names)"


def write_run(path, scores, seed=0, learning_rate=1e-3, settings=True, extra=(), attempts=()):
    """A run of one evaluation, one collection phase and one training phase for each score, 10 seconds each."""
    path.mkdir(parents=True)
    rows = []
    for i, score in enumerate(scores):
        at = {"epoch": i, "env_steps": 100 * i, "grad_steps": 10 * i}
        by_attempt = {f"Average Attempt {k} Success in lake": v for k, v in enumerate(attempts)}
        rows.append({**at, "wall_time": 30.0 * i + 1, "section": "val", "values": {RETURN: score, **by_attempt}})
        rows.append({**at, "wall_time": 30.0 * i + 21, "section": "rollout", "values": {RETURN: score - 1}})
        rows.append(
            {**at, "wall_time": 30.0 * i + 30, "section": "train", "values": {"Critic Loss": 1.0 / (i + 1), **dict(extra)}}
        )
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    if settings:
        fields = {"run_name": path.name, "seed": seed, "learning_rate": learning_rate, "ckpt_base_dir": str(path.parent)}
        record = {
            "fields": fields,
            "parameters": {"amago.agent.Agent.tau": 0.003},
            "starts": [{"time": "2026-01-01T00:00:00", "host": "h"}],
        }
        (path / "settings.json").write_text(json.dumps(record))
    return path


def figures_of(page):
    """The figures of a page, by title."""
    found = re.search(r"const figures = (.*);\n", page.read_text())
    return {f["layout"]["title"]["text"]: f for f in json.loads(found[1])}


def text_of(page):
    """What a reader sees, scripts left out."""
    return re.sub(r"<script>.*?</script>|<style>.*?</style>", "", page.read_text(), flags=re.S)


# ---- runs ------------------------------------------------------------------------------------------------------------------


def test_runs_of_different_seeds_are_one_line_with_an_interval(tmp_path):
    for seed, scores in enumerate([(0, 2, 4), (0, 4, 8), (0, 6, 12)]):
        write_run(tmp_path / f"lake_seed{seed}", scores, seed)
    write_run(tmp_path / "fast", (0, 1, 1), learning_rate=1e-2)
    page = write_report([tmp_path], tmp_path / "out" / "page.html")
    data = figures_of(page)["Mean return, evaluation"]["data"]
    first = [d for d in data if d["visible"]]
    assert [d["name"] for d in first if "name" in d] == ["fast", "lake (3 seeds)"]
    line = first[-1]
    assert line["x"] == [0, 100, 200]
    assert line["y"] == [0, 4, 8]  # the mean of the seeds
    band = first[-2]
    assert min(band["y"]) >= 0
    assert max(band["y"]) <= 12
    assert max(band["y"]) > 8


def test_runs_of_other_settings_are_other_groups_whatever_their_names(tmp_path):
    paths = [write_run(tmp_path / f"a_{i}", (1,), seed=i, learning_rate=[1e-3, 1e-3, 1e-2][i]) for i in range(3)]
    groups = group_runs([read_run(p) for p in paths])
    assert [(g.name, [r.name for r in g.runs]) for g in groups] == [("a", ["a_0", "a_1"]), ("a_2", ["a_2"])]
    named = differences([read_run(p) for p in paths])
    assert named["learning_rate"] == [1e-3, 1e-3, 1e-2]
    assert set(named) == {"learning_rate", "seed", "run_name"}


def test_runs_without_settings_are_grouped_by_name_and_config(tmp_path):
    paths = [write_run(tmp_path / n, (1,), settings=False) for n in ("b_seed0", "b_seed1", "c_seed0")]
    groups = group_runs([read_run(p) for p in paths])
    assert [(g.name, len(g.runs)) for g in groups] == [("b", 2), ("c_seed0", 1)]
    (paths[1] / "config.txt").write_text("Agent.tau = 1")
    assert len(group_runs([read_run(p) for p in paths])) == 3


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("lake_seed0", "lake"),
        ("lake_trial_12", "lake"),
        ("lake-7", "lake"),
        ("lake", "lake"),
        ("7", "7"),
        ("v2_test", "v2_test"),
    ],
)
def test_names_without_the_number_of_a_seed(name, base):
    assert base_name(name) == base


def test_damage_is_named_on_the_page(tmp_path):
    path = write_run(tmp_path / "torn", (1, 2))
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 5, "env')  # being written
    (path / "settings.json").write_text("{")
    page = write_report([path], tmp_path / "page.html")
    assert "settings.json cannot be read" in text_of(page)
    assert figures_of(page)["Mean return, evaluation"]["data"][0]["y"] == [1, 2]


def test_what_a_run_lacks_is_left_out_with_the_reason(tmp_path):
    path = write_run(tmp_path / "bare", (), settings=False)
    text = text_of(write_report([path], tmp_path / "page.html"))
    for reason in ("no rollout has ended yet", "by attempt", "no update was logged", "no run has a settings.json"):
        assert f"{reason}" in text, reason


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


def test_runs_are_found_below_directories_and_once(tmp_path):
    a, b = write_run(tmp_path / "x" / "a", (1,)), write_run(tmp_path / "x" / "deep" / "b", (1,))
    assert find_runs([tmp_path, a]) == [a, b]


# ---- the page --------------------------------------------------------------------------------------------------------------


def test_the_page_needs_nothing_else_and_shows_names_as_text(tmp_path, capsys):
    evil = "<img src=x onerror=alert(1)>"
    path = write_run(tmp_path / "r", (1, 2), extra={"Skipped Updates": 3.0, evil: 1.0}, attempts=(0.25, 0.5))
    settings = json.loads((path / "settings.json").read_text())
    settings["fields"]["note"] = evil
    (path / "settings.json").write_text(json.dumps(settings))
    out = tmp_path / "report.html"
    assert main(["report", str(path), "--out", str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    page = out.read_text()
    head = page[: page.index("<script>")]
    assert "http://" not in head
    assert "https://" not in head
    assert not re.search(r"<(?:script|link|img)[^>]+(?:src|href)=", head)
    assert evil not in page
    assert "&lt;img" in text_of(out)
    assert "skipped updates" in text_of(out)
    assert ">6<" in text_of(out)  # 3 in each of two epochs


def test_adaptation_by_attempt(tmp_path):
    path = write_run(tmp_path / "r", (1, 2, 3), attempts=(0.25, 0.5, 0.75))
    figure = figures_of(write_report([path], tmp_path / "p.html"))["Average Attempt # Success in lake (val)"]
    assert figure["data"][0]["x"] == [0, 1, 2]
    assert figure["data"][0]["y"] == [0.25, 0.5, 0.75]


def test_where_the_time_went(tmp_path):
    path = write_run(tmp_path / "r", (1, 2))
    spent = curves.seconds_by_phase(read_run(path))
    assert spent == {"evaluation": 2.0, "collection": 40.0, "training": 18.0}
    assert curves.rates(read_run(path)) == {"steps/s": 100 / 60, "updates/s": 10 / 60}


def test_axes_can_be_switched(tmp_path):
    path = write_run(tmp_path / "r", (1, 2))
    figure = figures_of(write_report([path], tmp_path / "p.html"))["Mean return, evaluation"]
    (menu,) = figure["layout"]["updatemenus"]
    assert [b["label"] for b in menu["buttons"]] == ["environment steps", "updates", "hours"]
    for i, axis in enumerate(([0, 100], [0, 10], [1 / 3600, 31 / 3600])):
        visible = menu["buttons"][i]["args"][0]["visible"]
        (shown,) = [d for d, v in zip(figure["data"], visible) if v]
        assert shown["x"] == pytest.approx(axis)


def test_without_plotly_the_extra_is_named(tmp_path, monkeypatch):
    path = write_run(tmp_path / "r", (1,))
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ImportError, match=r"amago\[report\]"):
        write_report([path], tmp_path / "p.html")


@pytest.mark.parametrize(("seconds", "text"), [(12.7, "12 s"), (200, "3 min 20 s"), (3720, "1 h 02 min")])
def test_durations(seconds, text):
    assert duration(seconds) == text


# ---- statistics ------------------------------------------------------------------------------------------------------------


def test_the_interquartile_mean_leaves_out_a_quarter_on_both_sides():
    values = np.array([[100.0], [1.0], [2.0], [3.0], [4.0], [-50.0], [2.5], [2.5]])
    assert curves.interquartile_mean(values) == pytest.approx(np.mean([2.0, 2.5, 2.5, 3.0]))


def test_a_bootstrap_interval_has_the_width_of_the_standard_error():
    values = np.random.default_rng(0).normal(5.0, 2.0, (50, 3))
    low, high = curves.interval(values)
    error = values.std(axis=0) / np.sqrt(50)
    assert np.allclose((high - low) / (2 * 1.96 * error), 1.0, atol=0.15)
    assert ((low < values.mean(0)) & (values.mean(0) < high)).all()


def test_curves_of_different_lengths_are_summed_up_where_all_have_values():
    a = curves.Curve(np.array([0.0, 10.0, 20.0]), np.array([0.0, 1.0, 2.0]))
    b = curves.Curve(np.array([5.0, 10.0, 30.0]), np.array([1.0, 2.0, 6.0]))
    both = curves.aggregate([a, b])
    assert (both.x[0], both.x[-1], both.runs) == (5.0, 20.0, 2)
    assert both.y[0] == pytest.approx((0.5 + 1.0) / 2)
    assert both.y[-1] == pytest.approx((2.0 + 4.0) / 2)


def test_long_curves_are_thinned_without_losing_their_mean():
    x = np.arange(10_000.0)
    thin = curves.thinned(curves.Curve(x, np.sin(x / 500) + 3))
    assert len(thin.x) == curves.POINTS
    assert thin.y.mean() == pytest.approx((np.sin(x / 500) + 3).mean(), abs=1e-3)
