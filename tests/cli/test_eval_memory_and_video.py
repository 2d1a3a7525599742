"""``amago eval RUN --memory`` and ``--video``, as a user types them."""

import json
import re
import subprocess
import sys
import types

import gymnasium as gym
import numpy as np
import pytest
import tiny

from amago import config
from amago.cli import main
from amago.cli.gym_env import GymEnv
from amago.envs import AMAGOEnv
from amago.envs.builtin import TMazePassive

MAZE = "amago.envs.builtin:TMazePassive"
TINY = [
    "--parallel-actors", "2", "--timesteps-per-epoch", "25", "--grads-per-epoch", "2", "--batch-size", "2", "--memory-size", "16",
    "--memory-layers", "1", "--max-seq-len", "8", "--epochs", "1", "--no-async", "--quiet", "--seed", "1",
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The directory of a run in the T-Maze, and of one in CartPole that logs to TensorBoard."""
    root = tmp_path_factory.mktemp("runs")
    config.clear()
    for name, env, *more in (("maze", MAZE), ("pole", "CartPole-v1", "--horizon", "8", "--tensorboard")):
        assert main(["train", env, "--run-name", name, "--buffer-dir", str(root), *TINY, *more]) == 0
        config.clear()
    return root


def failure(capsys, *argv):
    try:
        code = main(list(argv))
    except SystemExit as stop:
        code = stop.code
    return code, capsys.readouterr().err


def test_memory(runs, capsys, tmp_path):
    run = runs / "maze"
    words = ["eval", str(run), "--memory", "--episodes", "4", "--actors", "3", "--seed", "2"]
    said = []
    for more in ([], ["--picture", str(tmp_path / "new" / "m.png"), "--contexts", "1", "2", "4", "8"]):
        assert main([*words, *more]) == 0
        said.append(capsys.readouterr().out)
    for out, picture in zip(said, (run / "memory.png", tmp_path / "new" / "m.png")):
        assert f"picture: {picture}" in out
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert re.search(r"^(Memory is|Memory does|There is no sign)", out, re.MULTILINE)
        assert "95% interval" in out
    first, second = ([line for line in out.splitlines() if line.startswith("  ")] for out in said)
    assert first[1:] == second[1:], "one seed, one result; and powers of two unless others are named"
    assert [line.split("  ")[1] for line in first] == [
        "memory in sight", "all of it", "none (the current step)", "the last 2 steps", "the last 4 steps", "the last 8 steps",
    ]  # fmt: skip


def test_video(runs, capsys, tmp_path):
    image = pytest.importorskip("PIL.Image")
    film = tmp_path / "a.gif"
    assert main(["eval", str(runs / "maze"), "--episodes", "2", "--seed", "2", "--video", str(film)]) == 0
    out = capsys.readouterr().out
    assert "Average Total Return" in out, "the evaluation takes place, too"
    assert f"video: {film} (11 steps, return" in out
    assert "TensorBoard" not in out
    with image.open(film) as shown:
        shown_for = []
        for i in range(shown.n_frames):
            shown.seek(i)
            shown_for.append(shown.info["duration"])
    assert len(shown_for) > 1
    assert sum(shown_for) == pytest.approx(12 * 1000 / TMazePassive.metadata["render_fps"], abs=60), "in centiseconds"


def test_video_of_a_run_that_logs_to_tensorboard(runs, capsys, tmp_path):
    pytest.importorskip("tensorboard")
    pytest.importorskip("pygame")
    events = runs / "pole" / "tensorboard"
    before = set(events.iterdir())
    assert main(["eval", str(runs / "pole"), "--episodes", "2", "--video", str(tmp_path / "a.gif")]) == 0
    assert f"also in TensorBoard: {events}" in capsys.readouterr().out
    (new,) = set(events.iterdir()) - before
    assert b"eval/video" in new.read_bytes()


def test_memory_and_video_together(runs, capsys, tmp_path):
    argv = [
        "--memory",
        "--episodes",
        "2",
        "--contexts",
        "1",
        "--picture",
        str(tmp_path / "m.png"),
        "--video",
        str(tmp_path / "a.gif"),
    ]
    assert main(["eval", str(runs / "maze"), *argv]) == 0
    out = capsys.readouterr().out
    assert "memory in sight" in out
    assert "video: " in out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--video", "a.avi"], r"\.mp4 or \.gif, got 'a\.avi'"),
        (["--tensorboard"], "--video"),
        (["--log"], "--video"),
        (["--contexts", "2"], "--contexts belongs to --memory"),
        (["--picture", "a.png"], "--picture belongs to --memory"),
        (["--memory", "--contexts", "0"], "at least 1"),
        (["--memory", "--episodes", "1"], "--episodes must be at least 2, got 1"),
    ],
)
def test_contradictions_are_refused(runs, capsys, argv, said):
    code, message = failure(capsys, "eval", str(runs / "maze"), *argv)
    assert code == 2
    assert re.search(said, message)


def test_an_environment_that_draws_nothing_is_named(tmp_path, capsys):
    gym.register("Plain-v1", lambda render_mode=None: tiny.Bits())
    try:
        assert main(["train", "Plain-v1", "--run-name", "a", "--buffer-dir", str(tmp_path), *TINY]) == 0
        capsys.readouterr()
        code, message = failure(capsys, "eval", str(tmp_path / "a"), "--episodes", "1", "--video", str(tmp_path / "a.gif"))
    finally:
        gym.registry.pop("Plain-v1")
    assert code == 2
    assert "Plain-v1" in message
    assert not (tmp_path / "a.gif").exists()


# ---- environments by the name of a function ------------------------------------------------------------------------------------


@pytest.fixture
def module(monkeypatch):
    """A user's module ``mine``, which counts its calls."""
    made = types.ModuleType("mine")
    made.calls = []

    def make(render_mode=None):
        made.calls.append(render_mode)
        return TMazePassive(3, render_mode=render_mode)

    made.make, made.wrapped = make, lambda: AMAGOEnv(TMazePassive(3), env_name="own name")
    made.nothing, made.number = lambda: None, 3
    monkeypatch.setitem(sys.modules, "mine", made)
    return made


def test_a_function_makes_the_environment(module):
    env = GymEnv("mine:make")(render_mode="rgb_array")
    assert module.calls == ["rgb_array"]
    assert env.render_mode == "rgb_array"
    assert GymEnv("mine:make").horizon(env) == 4
    assert GymEnv("mine:wrapped")().env_name == "own name"
    short = GymEnv("mine:make", max_steps=2)()
    short.reset(seed=0)
    ends = [np.asarray(short.step(np.array([[0]]))[3]).item() for _ in range(2)]
    assert ends == [False, True]


def test_modules_are_found_in_the_working_directory(tmp_path):
    """By the installed command, too, whose search path does not begin there."""
    (tmp_path / "my_maze.py").write_text("from amago.envs.builtin import TMazePassive\nmake = lambda: TMazePassive(3)\n")
    code = "import sys\nsys.path[:] = [p for p in sys.path if p not in ('', %r)]\nfrom amago.cli import main\nsys.exit(main())"
    argv = [sys.executable, "-c", code % str(tmp_path), "train", "my_maze:make", "--run-name", "a", "--buffer-dir", "r", *TINY]
    done = subprocess.run(argv, cwd=tmp_path, env=tiny.environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "r" / "a" / "train_args.json").read_text())["env"] == "my_maze:make"


@pytest.mark.parametrize(
    ("name", "max_steps", "said"),
    [
        ("mine:nothing", None, "returned None"),
        ("mine:wrapped", 2, "AMAGOEnv"),
        ("mine:number", None, "cannot make"),
        ("nowhere_at_all:make", None, "nowhere_at_all"),
    ],
)
def test_functions_that_make_none(module, name, max_steps, said):
    with pytest.raises(ValueError, match=said):
        GymEnv(name, max_steps)()


def test_a_file_does_not_decide_which_code_is_called(runs, module, capsys, tmp_path):
    run = tmp_path / "maze"
    run.mkdir()
    for path in (runs / "maze").rglob("*"):
        if path.is_file() and "buffer" not in path.parts:
            (run / path.relative_to(runs / "maze")).parent.mkdir(parents=True, exist_ok=True)
            (run / path.relative_to(runs / "maze")).write_bytes(path.read_bytes())
    (run / "train_args.json").write_text(json.dumps({"env": "mine:make", "horizon": None}))
    code, message = failure(capsys, "eval", str(run), "--episodes", "2")
    assert (code, module.calls) == (2, [])
    assert "--env mine:make" in message
    assert main(["eval", str(run), "--episodes", "2", "--env", "mine:make"]) == 0
    assert module.calls
