"""`amago train`, `eval`, `card` and `demo`, as a user types them."""

import math
import re
import shlex
import sys
from argparse import ArgumentParser

import gymnasium as gym
import numpy as np
import pytest
import tiny
import yaml
from messages import names
from run_inside import SIZES, refusal

import amago
from amago import config
from amago.agent import Agent
from amago.cli import main
from amago.cli import train as train_command
from amago.cli.gym_env import GymEnv
from amago.envs import AMAGOEnv

MAZE = "amago.envs.builtin:TMazePassive"
TINY = [*SIZES.split(), "--max-seq-len", "8"]


def train(root, *more, env="CartPole-v1", name="demo"):
    horizon = ["--horizon", "20"] if env == "CartPole-v1" else []
    return main(["train", env, "--run-name", name, "--buffer-dir", str(root), *TINY, *horizon, "--quiet", *more])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The directory of a run in the T-Maze, and of one in CartPole that logs to TensorBoard, with a training state."""
    root = tmp_path_factory.mktemp("runs")
    config.clear()
    for name, env, *more in (("maze", MAZE), ("pole", "CartPole-v1", "--tensorboard", "--ckpt-interval", "1")):
        assert train(root, *more, env=env, name=name) == 0
        config.clear()
    return root


def test_help_names_the_commands_and_does_not_import_torch():
    code = "import sys; from amago.cli import main\ntry: main(['--help'])\nexcept SystemExit: print('torch' in sys.modules)"
    said = tiny.run_program(code)
    assert all(name in said for name in ("train", "eval", "demo", "--version"))
    assert said.splitlines()[-1] == "False"


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert (stop.value.code, capsys.readouterr().out) == (0, f"amago {amago.__version__}\n")


@pytest.mark.parametrize("argv", [["train"], ["eval"], ["demo"], ["buffer", "import"]], ids=" ".join)
def test_help_of_each_command_gives_real_defaults_only(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*argv, "--help"])
    assert stop.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"usage: amago {' '.join(argv)}" in out
    assert "(default: " in out
    assert not re.search(r"default: (None|False|inf|\(\))\)|script's \(default|None:", out)


def test_incomplete_commands_explain_the_usage(capsys):
    for argv in ([], ["fly"], ["train"], ["train", "CartPole-v1"], ["eval"]):
        message = refusal(capsys, *argv)
        assert message.startswith("usage: amago")
        assert "error: " in message


def test_train_then_eval_then_resume(tmp_path, capsys):
    assert train(tmp_path, "--ckpt-interval", "1", "--epochs", "2") == 0
    out = capsys.readouterr().out
    run = tmp_path / "demo"
    assert names(out, "CartPole-v1 after training", "Average Total Return (Across All Env Names)", f"amago eval {run}")
    kept = yaml.safe_load((run / "settings.yaml").read_text())
    assert (kept["env"], kept["horizon"]) == ("CartPole-v1", 20)
    config.clear()
    for where in (run, *(run / "ckpts" / p for p in ("policy_weights/policy_epoch_0.pt", "training_states/demo_epoch_1"))):
        assert main(["eval", str(where), "--episodes", "5", "--actors", "2", "--seed", "3"]) == 0
        out = capsys.readouterr().out
        assert re.search(r"^Number of Rollouts +5(\.0)?$", out, re.MULTILINE)
        assert "Average Total Return in CartPole-v1" in out
    results = []
    for _ in range(2):
        assert main(["eval", str(run), "--episodes", "4", "--actors", "2", "--seed", "7", "--greedy"]) == 0
        results.append(capsys.readouterr().out)
    assert results[0] == results[1]
    assert train(tmp_path, "--ckpt-interval", "1", "--resume", "auto", "--epochs", "3") == 0
    assert [r["env_steps"] for r in tiny.rows(run, "rollout")] == [48, 96, 144]


@pytest.mark.parametrize("env_id", ["FrozenLake-v1", "Pendulum-v1", "MountainCarContinuous-v0"])
def test_validation_is_a_small_share_of_the_interaction(tmp_path, env_id):
    horizon = gym.spec(env_id).max_episode_steps
    parser = ArgumentParser()
    train_command.add_arguments(parser)
    e = train_command.make_experiment(parser.parse_args([env_id, "--run-name", "a", "--buffer-dir", str(tmp_path)]))
    collected = e.parallel_actors * e.train_timesteps_per_epoch * e.val_interval
    assert 5 <= e.val_episodes <= 0.1 * collected / horizon
    assert e.val_timesteps_per_epoch > -(-e.val_episodes // e.parallel_actors) * horizon, "there is time for every rollout"
    assert (e.dataset.dset_max_size, e.dataset.dset_max_steps) == (math.inf, 1_000_000)


@pytest.mark.parametrize(("options", "lines"), [(["--progress=none"], 0), ([], 1), (["--quiet"], 0)])
def test_progress(tmp_path, capsys, options, lines):
    argv = ["train", "CartPole-v1", "--run-name", "demo", "--buffer-dir", str(tmp_path), "--horizon", "20", *TINY, *options]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert sum(line.startswith("epoch ") for line in out.splitlines()) == lines
    assert "\r" not in out + err


@pytest.mark.parametrize(
    "switches",
    ["--overwrite --keep-best --val-interval 50 --no-log", "--resume auto --share-buffer --ckpt-interval 50", "--overwrite --trials 2",
     "--mode collect --overwrite"],
)  # fmt: skip
def test_a_first_run_with_switches_that_concern_an_earlier_one(tmp_path, capsys, switches):
    for _ in range(2 if switches.startswith("--overwrite --keep") else 1):
        assert train(tmp_path, *switches.split()) == 0
    assert ("to evaluate it again" in capsys.readouterr().out) == ("collect" not in switches), (
        "what only collects has no weights"
    )


WRONG = [
    (["--grads-per-epoch", "many"], "'many' is not a whole number"),
    (["--traj-encoder", "rwkv"], "'rwkv'"),
    (["--mode", "fly"], "'fly'"),
    (["--batch-size", "0"], "batch_size"),
    (["--resume", "maybe"], "'maybe'"),
    (["--resume", "7"], "no training state of epoch 7"),
    (["--ckpt", "7"], "policy_epoch_7.pt"),
    (["--init-from", "nowhere"], "nowhere"),
    (["--configs", "missing.gin"], "missing.gin"),
    (["--memory", "transformer", "--memory-size", "17"], "17"),
    (["--unknown", "1"], "--unknown"),
]


@pytest.mark.parametrize(("argv", "named"), WRONG, ids=str)
def test_wrong_arguments_of_train(tmp_path, capsys, argv, named):
    run = ["--run-name", "demo", "--buffer-dir", str(tmp_path)]
    message = refusal(capsys, "train", "CartPole-v1", *run, *TINY, "--quiet", *argv)
    assert named in message
    assert message.startswith(("amago train: ", "usage: amago"))


def test_errors_of_a_run_keep_their_traceback(tmp_path, monkeypatch):
    """Only mistakes in the arguments are reduced to a message."""

    def forward(self, batch, log_step=False):
        raise ValueError("the loss cannot be computed")

    monkeypatch.setattr(Agent, "forward", forward)
    with pytest.raises(ValueError, match="the loss cannot be computed"):
        train(tmp_path)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ("train NoSuchThing-v3 --run-name demo --buffer-dir D/b", "NoSuchThing-v3"),
        ("train no_such_module:make --run-name demo --buffer-dir D/b", "no_such_module"),
        ("train CartPole-v1 --run-name a --buffer-dir D/file/runs", "D/file"),
        ("demo --out D/file/demo", "D/file"),
        ("eval D", "holds no policy"),
        ("card D", "holds no policy"),
        ("report D", "D"),
        ("buffer info D", "no replay buffer"),
        ("buffer verify D", "no replay buffer"),
        ("buffer export D demo/x-v0", "no replay buffer"),
        ("buffer import D D/run", "D"),
        ("watch D/none", "not a directory"),
    ],
)
def test_commands_about_what_does_not_exist_say_so(tmp_path, capsys, argv, named):
    (tmp_path / "file").write_text("")
    words = [re.sub(r"^D(?=/|$)", str(tmp_path), word) for word in argv.split()]
    message = refusal(capsys, *words)
    assert re.sub(r"^D(?=/|$)", str(tmp_path), named) in message
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_eval_elsewhere(runs, tmp_path, capsys, registered):
    registered("ShortPole-v1", "gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=15)
    assert main(["eval", str(runs / "pole"), "--env", "ShortPole-v1", "--episodes", "2", "--actors", "2"]) == 0
    assert "Average Total Return in ShortPole-v1" in capsys.readouterr().out
    message = refusal(capsys, "eval", str(runs / "pole"), "--env", "Pendulum-v1")
    assert names(message, "Pendulum-v1", "observation")
    e = tiny.learned(tmp_path, tiny.cartpole, max_seq_len=4, train_batches_per_epoch=0, always_save_latest=True)
    message = refusal(capsys, "eval", str(e.run_dir))
    assert "--env" in message, "no command has made this run"
    assert main(["eval", str(e.run_dir), "--env", "CartPole-v1", "--episodes", "2", "--actors", "2"]) == 0


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--actors", "0"], ["--actors", 1, 0]), (["--episodes", "0"], ["--episodes", 1, 0]), (["--video", "a.avi"], [".mp4", ".gif", "'a.avi'"]),
        (["--tensorboard"], ["--video"]), (["--log"], ["--video"]), (["--contexts", "2"], ["--contexts", "--memory"]),
        (["--picture", "a.png"], ["--picture", "--memory"]), (["--memory", "--contexts", "0"], ["--contexts", 1, 0]),
        (["--memory", "--episodes", "1"], ["--episodes", 2, 1]), (["--render"], ["--render", "display"]),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_arguments_of_eval(runs, capsys, monkeypatch, argv, named):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    message = refusal(capsys, "eval", str(runs / "maze"), *argv)
    assert names(message, *named), message


def test_an_environment_that_draws_nothing(tmp_path, capsys, registered, monkeypatch):
    registered("Plain-v0", lambda: tiny.Bits())
    assert train(tmp_path, env="Plain-v0") == 0
    assert main(["eval", str(tmp_path / "demo"), "--episodes", "2"]) == 0
    monkeypatch.setenv("DISPLAY", ":0")
    for more in (["--render"], ["--video", str(tmp_path / "a.gif")]):
        message = refusal(capsys, "eval", str(tmp_path / "demo"), "--episodes", "1", *more)
        assert "Plain-v0" in message
    assert not (tmp_path / "a.gif").exists()


def test_memory(runs, capsys, tmp_path):
    words = ["eval", str(runs / "maze"), "--memory", "--episodes", "4", "--actors", "3", "--seed", "2"]
    second = tmp_path / "new" / "m.png"
    outputs = []
    for more, picture in (
        ([], runs / "maze" / "memory.png"),
        (["--contexts", "1", "2", "4", "8", "--picture", str(second)], second),
    ):
        assert main([*words, *more]) == 0
        outputs.append(capsys.readouterr().out)
        assert f"picture: {picture}" in outputs[-1]
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert re.search(r"^(Memory is|Memory does|There is no sign)", outputs[0], re.MULTILINE)
    first, again = ([line for line in out.splitlines() if line.startswith("  ")] for out in outputs)
    assert first[1:] == again[1:], "one seed, one result; and powers of two unless others are named"
    assert first[6].split()[:3] == ["layer,", "head", "entropy"], "what each head attends to"
    assert [line.split("  ")[1] for line in first[:6]] == [
        "memory in sight", "all of it", "none (the current step)", "the last 2 steps", "the last 4 steps", "the last 8 steps",
    ]  # fmt: skip


def test_video(runs, capsys, tmp_path):
    image = pytest.importorskip("PIL.Image")
    film, picture = tmp_path / "a.gif", tmp_path / "m.png"
    assert main(["eval", str(runs / "maze"), "--episodes", "2", "--seed", "2", "--video", str(film)]) == 0
    out = capsys.readouterr().out
    assert names(out, "Average Total Return", f"video: {film} (11 steps, return"), "the evaluation takes place, too"
    assert "TensorBoard" not in out
    with image.open(film) as shown:  # frames that are alike, as where it walks into a wall, are stored as one
        durations = [(shown.seek(i), shown.info["duration"])[1] for i in range(shown.n_frames)]
    assert sum(durations) == pytest.approx(12_000 / 8, rel=0.05), "the first observation and 11 steps"
    both = ["--memory", "--episodes", "2", "--contexts", "1", "--picture", str(picture), "--video", str(film)]
    assert main(["eval", str(runs / "maze"), *both]) == 0
    assert names(capsys.readouterr().out, "memory in sight", "video: ")


def test_video_of_a_run_that_logs_to_tensorboard(runs, capsys, tmp_path):
    pytest.importorskip("tensorboard")
    pytest.importorskip("pygame")
    events = runs / "pole" / "tensorboard"
    before = set(events.iterdir())
    assert main(["eval", str(runs / "pole"), "--episodes", "2", "--video", str(tmp_path / "a.gif")]) == 0
    assert f"also in TensorBoard: {events}" in capsys.readouterr().out
    (new,) = set(events.iterdir()) - before
    assert b"eval/video" in new.read_bytes()


MODULE = """
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv
from amago.envs import AMAGOEnv
from amago.envs.builtin import TMazePassive

gym.register("Mine-v0", entry_point=CartPoleEnv, max_episode_steps=30)
number = 3


def make():
    return gym.make("Mine-v0")


def maze(render_mode=None):
    return TMazePassive(3, render_mode=render_mode)


def wrapped():
    return AMAGOEnv(TMazePassive(3), env_name="own name")


def nothing():
    return None
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module in the working directory, which is not on Python's path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    (tmp_path / "mine.py").write_text(MODULE, encoding="utf-8")
    yield
    sys.modules.pop("mine", None)
    gym.registry.pop("Mine-v0", None)


def printed(out, after):
    """The words of a command that was printed after a text, without "amago"."""
    line = next(line for line in out.splitlines() if after in line)
    words = shlex.split(line[line.index(after) + len(after) :])
    assert words[0] == "amago"
    return words[1:]


@pytest.mark.parametrize("form", ["mine:make", "mine:Mine-v0", "CartPole-v1"])
def test_every_command_takes_every_form_and_prints_commands_that_run(module, capsys, form):
    """Directories with a space in their name too. A file does not decide which module is imported."""
    assert train("runs", "--horizon", "12", "seed=None", env=form, name="a b") == 0
    again = printed(capsys.readouterr().out, "to evaluate it again: ")
    assert main([*again, "--episodes", "2"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"Number of Rollouts +2", out)
    assert float(re.search(r"Average Total Return in \S+ +(\S+)", out)[1]) <= 12, "rollouts are as long as in training"
    if ":" in form:
        sys.modules.pop("mine")
        message = refusal(capsys, "eval", "runs/a b")
        assert "mine" not in sys.modules
        gym.registry.pop("Mine-v0")
        assert main([*printed(message, "name it yourself: "), "--episodes", "2"]) == 0
    assert main(["resume", "runs/a b", form, "--epochs", "2", "--quiet"]) == 0, "with the seed that it has drawn"
    for _ in range(2):
        words = ["card", "runs/a b", "--env", form, "--episodes", "2", "--no-video", "--out", "card", "--overwrite"]
        assert main(words) == 0
    assert main(["eval", "card", "--env", form, "--episodes", "2"]) == 0
    rows = {"observations": np.zeros((6, 4), np.float32), "actions": np.arange(6) % 2, "rewards": np.ones(6)}
    np.savez("data.npz", **rows, terminations=np.arange(6) == 5)
    assert main(["buffer", "import", "data.npz", "imported", "--env", form]) == 0


def test_a_function_makes_the_environment(module, monkeypatch):
    monkeypatch.syspath_prepend(".")
    assert GymEnv("mine:maze")(render_mode="rgb_array").render_mode == "rgb_array"
    env = GymEnv("mine:wrapped")()
    assert (env.env_name, GymEnv("mine:wrapped").horizon(env), isinstance(env, AMAGOEnv)) == ("own name", 4, True)
    short = GymEnv("mine:maze", max_steps=2)()
    short.reset(seed=0)
    assert [np.asarray(short.step(np.array([[0]]))[3]).item() for _ in range(2)] == [False, True]
    wrong = {
        ("mine:nothing", None): "returned None", ("mine:wrapped", 2): "AMAGOEnv", ("mine:number", None): "cannot make",
        ("nowhere:make", None): "nowhere", ("mine:Mine-v9", None): "Mine-v9",
    }  # fmt: skip
    for (name, steps), named in wrong.items():
        with pytest.raises(ValueError) as refused:
            GymEnv(name, steps)()
        assert named in str(refused.value)


class Endless(gym.Env):
    """No rollout ends by itself."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    length = None

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(2, np.float32), 1.0, self.t == self.length, False, {}


class Mistaken(Endless):
    """Rollouts of 60 steps; the attribute that looks like a time limit is the horizon of a planner."""

    length, horizon = 60, 5


@pytest.mark.parametrize(("make", "length"), [(Endless, 1000), (Mistaken, 60)])
def test_evaluations_whose_length_a_command_chose_end_with_a_result(tmp_path, capsys, registered, make, length):
    registered("Hard-v0", make)
    assert train(tmp_path, "--val-interval", "1", "--timesteps-per-epoch", "1010", env="Hard-v0") == 0
    assert re.search(rf"Average Total Return in Hard-v0 +{length}\b", capsys.readouterr().out)
    assert tiny.rows(tmp_path / "demo", "val")[0]["values"]["Average Total Return in Hard-v0"] == length
    assert main(["eval", str(tmp_path / "demo"), "--episodes", "2", "--horizon", "40"]) == 0
    assert re.search(r"Average Total Return in Hard-v0 +40\b", capsys.readouterr().out)


def test_demo(tmp_path, capsys):
    assert main(["demo", "--epochs", "1", "--out", str(tmp_path / "out"), "--quiet"]) == 0
    out = capsys.readouterr().out
    head, row = (line.split() for line in out.splitlines() if line.strip().startswith(("attempt", "Transformer")))
    assert head == ["attempt", "1", "2", "3", "4", "5", "6"]
    assert len(row) == 7
    assert all(0.0 <= float(rate) <= 1.0 for rate in row[1:])
    picture = tmp_path / "out" / "adaptation.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture) in out
