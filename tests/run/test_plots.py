"""Reading the metrics of a run, and plotting them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import naming

from amago.run import plots
from amago.run.plots import plot_adaptation, read_metrics

CURVES = {"memory": [(0, 0.1), (10_000, 0.5), (20_000, 0.9)], "none": [(20_000, 0.2), (0, 0.1), (10_000, 0.15)]}
BY_ATTEMPT = {"memory": [0.2, 0.6, 0.9], "none": [0.2, 0.2, 0.21]}


def row(epoch: int, **values: float) -> dict[str, Any]:
    return {
        "epoch": epoch,
        "env_steps": 100 * epoch,
        "grad_steps": 10 * epoch,
        "wall_time": 1.5 * epoch,
        "section": "val",
        "values": values,
    }


def write(run_dir: Path, rows: list[dict[str, Any]]) -> bytes:
    blob = b"".join(json.dumps(r, ensure_ascii=False).encode() + b"\n" for r in rows)
    (run_dir / "metrics.jsonl").write_bytes(blob)
    return blob


def test_rows_come_back_as_written(tmp_path: Path) -> None:
    rows = [row(i, **{"Average Total Return": i / 2, "Größe": 1.0}) for i in range(5)]
    write(tmp_path, rows)
    assert read_metrics(tmp_path) == rows
    assert read_metrics(str(tmp_path)) == rows
    write(tmp_path, [])
    assert read_metrics(tmp_path) == []


def test_cut_anywhere_the_whole_rows_before_remain(tmp_path: Path) -> None:
    rows = [row(i, Größe=float(i)) for i in range(3)]
    blob = write(tmp_path, rows)
    ends = [i for i, byte in enumerate(blob) if byte == ord("\n")]
    for cut in range(len(blob) + 1):
        (tmp_path / "metrics.jsonl").write_bytes(blob[:cut])
        whole = sum(cut >= end for end in ends)  # a row is complete with its last brace
        assert read_metrics(tmp_path) == rows[:whole], cut


def test_a_row_that_a_killed_process_left_in_the_middle_is_left_out_aloud(tmp_path: Path) -> None:
    rows = [row(i) for i in range(3)]
    lines = [json.dumps(r) for r in rows]
    (tmp_path / "metrics.jsonl").write_text("\n".join([lines[0], lines[1][:20], lines[2]]) + "\n")
    with pytest.warns(UserWarning, match=naming("metrics.jsonl:2")):
        assert read_metrics(tmp_path) == [rows[0], rows[2]]


def test_what_is_no_metrics_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=naming("metrics.jsonl", str(tmp_path / "absent"))):
        read_metrics(tmp_path / "absent")
    bad = row(1)
    del bad["section"], bad["values"]
    write(tmp_path, [row(0), bad])
    with pytest.raises(ValueError, match=naming("metrics.jsonl:2", "section, values", "epoch, env_steps")):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("[1]\n")
    with pytest.raises(ValueError, match=naming("metrics.jsonl:1", [1])):
        read_metrics(tmp_path)
    write(tmp_path, [row(0) | {"values": [1.0]}])
    with pytest.raises(ValueError, match=naming("metrics.jsonl:1", "values", [1.0])):
        read_metrics(tmp_path)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved during the test."""
    figure = pytest.importorskip("matplotlib.figure")
    kept: list[Any] = []
    save = figure.Figure.savefig

    def keep(self: Any, *args: Any, **kwargs: Any) -> None:
        kept.append(self)
        save(self, *args, **kwargs)

    monkeypatch.setattr(figure.Figure, "savefig", keep)
    return kept


def test_the_picture_shows_every_number_once(tmp_path: Path, drawn: list[Any]) -> None:
    path = plot_adaptation(CURVES, BY_ATTEMPT, tmp_path / "new" / "dir" / "a.picture", title="Lake")
    assert path == tmp_path / "new" / "dir" / "a.picture"
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    (figure,) = drawn
    left, right = figure.axes
    for axes, data in ((left, {k: sorted(v) for k, v in CURVES.items()}), (right, BY_ATTEMPT)):
        assert len(axes.lines) == 2
        for line, values in zip(axes.lines, data.values()):
            points = values if axes is left else list(enumerate(values, start=1))
            assert [tuple(p) for p in line.get_xydata().tolist()] == points
    assert [line.get_color() for line in left.lines] == [line.get_color() for line in right.lines]
    assert len({line.get_color() for line in left.lines}) == 2
    assert [t.get_text() for t in figure.legends[0].texts] == ["memory", "none"]
    assert figure.get_suptitle() == "Lake"
    assert (left.get_xlabel(), left.get_ylabel()) == ("environment steps", "mean return per rollout")
    assert (right.get_xlabel(), right.get_ylabel()) == ("attempt", "success rate")


def test_agents_of_one_panel_keep_their_own_colours(tmp_path: Path, drawn: list[Any]) -> None:
    plot_adaptation({"a": [(0, 1.0)]}, {"b": [0.5], "a": [1.0]}, tmp_path / "p.png")
    left, right = drawn[0].axes
    assert right.lines[1].get_color() == left.lines[0].get_color() != right.lines[0].get_color()
    assert [t.get_text() for t in drawn[0].legends[0].texts] == ["a", "b"]


def test_an_empty_panel_says_so_and_odd_names_stay_as_they_are(tmp_path: Path, drawn: list[Any]) -> None:
    plot_adaptation({"_x $1": [(0, 1.0), (5, float("nan")), (9, 2.0)]}, {}, tmp_path / "p.png", title="$ and $")
    assert [t.get_text() for t in drawn[0].axes[1].texts] == ["no data"]
    assert not drawn[0].axes[0].texts
    assert [t.get_text().strip() for t in drawn[0].legends[0].texts] == [r"_x \$1"]
    plot_adaptation({}, {"a": [0.0, 1.0]}, tmp_path / "p.png")
    assert [t.get_text() for t in drawn[1].axes[0].texts] == ["no data"]


def test_the_picture_has_ink_in_both_panels(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    pixels = image.imread(plot_adaptation(CURVES, BY_ATTEMPT, tmp_path / "p.png"))[..., :3]
    assert pixels.shape[1] > 1000
    for i in range(2):
        colour = np.array([int(plots.COLORS[i][j : j + 2], 16) / 255 for j in (1, 3, 5)])
        same = (np.abs(pixels - colour) < 0.02).all(axis=-1)
        assert same[:, : pixels.shape[1] // 2].sum() > 200
        assert same[:, pixels.shape[1] // 2 :].sum() > 200


@settings(max_examples=5, deadline=None)
@given(agents=st.integers(1, 9), points=st.integers(1, 200), attempts=st.integers(1, 30))
def test_any_number_of_agents_points_and_attempts(
    tmp_path_factory: pytest.TempPathFactory, agents: int, points: int, attempts: int
) -> None:
    pytest.importorskip("matplotlib")
    curves = {f"agent {i}": [(1000 * p, float(i * p)) for p in range(points)] for i in range(agents)}
    rates = {f"agent {i}": [i / agents] * attempts for i in range(agents)}
    path = plot_adaptation(curves, rates, tmp_path_factory.mktemp("plots") / "p.png")
    assert path.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("curves", "by_attempt", "named"),
    [
        ({}, {}, ("curves", "by_attempt", "empty")),
        ({"a": []}, {}, ("curves['a']", "empty")),
        ({"a": [(1, 2.0)]}, {"a": []}, ("by_attempt['a']", "empty")),
        ({"a": [(1, 2.0, 3.0)]}, {}, ("curves['a']", (1, 2.0, 3.0))),
        ({}, {"a": [0.5, 1.5]}, ("by_attempt['a'][1]", [0, 1], 1.5)),
        ({}, {"a": [-0.1]}, ("by_attempt['a'][0]", [0, 1], -0.1)),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path: Path, curves: Any, by_attempt: Any, named: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=naming(*named)):
        plot_adaptation(curves, by_attempt, tmp_path / "p.png")
    assert not (tmp_path / "p.png").exists()


def test_without_matplotlib_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.ticker"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=naming("plot_adaptation", "pip install 'amago[plots]'")):
        plot_adaptation(CURVES, BY_ATTEMPT, tmp_path / "p.png")


def test_importing_loads_no_matplotlib_and_drawing_loads_no_pyplot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code = (
        "import sys, amago.run.plots as p; assert 'matplotlib' not in sys.modules and 'torch' not in sys.modules\n"
        f"p.plot_adaptation({CURVES!r}, {BY_ATTEMPT!r}, {str(tmp_path / 'p.png')!r})\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
