"""The `amago` command."""

import json
import math
import os
import re
import subprocess
import sys
from argparse import ArgumentParser
from unittest import mock

import gymnasium as gym
import pytest
import tiny

import amago
from amago import config
from amago.agent import Agent
from amago.cli import main
from amago.cli import train as train_command

TINY = [
    "--horizon", "20", "--parallel-actors", "2", "--timesteps-per-epoch", "25", "--grads-per-epoch", "2", "--batch-size", "2",
    "--memory-size", "16", "--memory-layers", "1", "--max-seq-len", "8", "--epochs", "2", "--no-async", "--quiet", "--seed", "1",
]  # fmt: skip


def train(root, *more, env="CartPole-v1"):
    return main(["train", env, "--run-name", "demo", "--buffer-dir", str(root), *TINY, *more])


def failure(capsys, *argv):
    """(exit code, stderr) of a command that must not succeed."""
    try:
        code = main(list(argv))
    except SystemExit as stop:
        code = stop.code
    err = capsys.readouterr().err
    assert "Traceback" not in err
    return code, err


# ---- commands ------------------------------------------------------------------------------------------------------------


def test_help_names_the_commands():
    done = subprocess.run([sys.executable, "-m", "amago.cli", "--help"], capture_output=True, text=True, env=tiny.environment())
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("train", "eval", "demo", "--version"))


@pytest.mark.parametrize("command", ["train", "eval", "demo"])
def test_help_of_each_command_gives_defaults_and_an_example(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert f"usage: amago {command}" in out
    assert "(default: " in out


def test_help_gives_real_defaults_only(capsys):
    for argv in (["train"], ["eval"], ["demo"], ["buffer", "import"]):
        with pytest.raises(SystemExit):
            main([*argv, "--help"])
        out = " ".join(capsys.readouterr().out.split())
        assert not re.search(r"default: (None|False|inf|\(\))\)", out)
        assert "script's (default" not in out
        assert "None:" not in out
    parser = ArgumentParser()
    train_command.add_arguments(parser)
    wanted = ["CartPole-v1", "--run-name", "a", "--buffer-dir", "b", "--lr", "0.5"]
    assert (parser.parse_args(wanted).learning_rate, parser.parse_args(wanted).lr_cooldown) == (0.5, None)


@pytest.mark.parametrize(
    ("argv", "purpose"),
    [
        (["train", "CartPole-v1", "--run-name", "a", "--buffer-dir", "FILE/runs"], "checkpoints, logs and the replay buffer"),
        (["demo", "--out", "FILE/demo"], "its picture"),
    ],
)
def test_directories_that_cannot_be_made_say_what_they_are_for(tmp_path, capsys, argv, purpose):
    (tmp_path / "file").write_text("")
    code, message = failure(capsys, *(word.replace("FILE", str(tmp_path / "file")) for word in argv))
    assert code == 2
    assert purpose in message
    assert str(tmp_path / "file") in message


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert (stop.value.code, capsys.readouterr().out) == (0, f"amago {amago.__version__}\n")


def test_help_does_not_import_torch():
    code = "import sys; from amago.cli import main\ntry: main(['--help'])\nexcept SystemExit: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=tiny.environment())
    assert done.stdout.splitlines()[-1] == "False", done.stderr


@pytest.mark.parametrize("argv", [[], ["fly"], ["train"], ["train", "CartPole-v1"], ["eval"]])
def test_incomplete_commands_explain_the_usage(argv, capsys):
    code, message = failure(capsys, *argv)
    assert code == 2
    assert message.startswith("usage: amago")
    assert "error: " in message


def test_train_then_eval(tmp_path, capsys):
    assert train(tmp_path, "--ckpt-interval", "1") == 0
    out = capsys.readouterr().out
    assert "CartPole-v1 after training" in out
    assert "Average Total Return (Across All Env Names)" in out
    run = tmp_path / "demo"
    assert f"amago eval {run}" in out
    assert json.loads((run / "train_args.json").read_text()) == {"env": "CartPole-v1", "horizon": 20}
    config.clear()

    for where in (
        run,
        run / "ckpts" / "policy_weights" / "policy_epoch_0.pt",
        run / "ckpts" / "training_states" / "demo_epoch_1",
    ):
        assert main(["eval", str(where), "--episodes", "5", "--actors", "2", "--seed", "3"]) == 0
        out = capsys.readouterr().out
        rollouts = float(next(line for line in out.splitlines() if line.startswith("Number of Rollouts")).split()[-1])
        assert rollouts == 5
        assert "Average Total Return in CartPole-v1" in out

    results = []
    for _ in range(2):
        assert main(["eval", str(run), "--episodes", "4", "--actors", "2", "--seed", "7", "--greedy"]) == 0
        results.append(capsys.readouterr().out)
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("env_id", "horizon"), [("FrozenLake-v1", 100), ("Pendulum-v1", 200), ("MountainCarContinuous-v0", 999)]
)
def test_validation_is_a_small_share_of_the_interaction(tmp_path, env_id, horizon):
    parser = ArgumentParser()
    train_command.add_arguments(parser)
    args = parser.parse_args([env_id, "--run-name", "a", "--buffer-dir", str(tmp_path)])
    e = train_command.make_experiment(args)
    collected = e.parallel_actors * e.train_timesteps_per_epoch * e.val_interval
    assert e.val_episodes >= 4
    assert e.val_episodes * horizon <= 0.1 * collected
    longest = -(-e.val_episodes // e.parallel_actors) * horizon
    assert e.val_timesteps_per_epoch > longest, "there is time for every rollout"
    assert (e.dataset.dset_max_size, e.dataset.dset_max_steps) == (math.inf, 1_000_000)


def test_a_registered_environment_without_render_mode(tmp_path, capsys):
    gym.register("Plain-v0", lambda: tiny.Bits())
    try:
        assert train(tmp_path, env="Plain-v0") == 0
        assert main(["eval", str(tmp_path / "demo"), "--episodes", "2"]) == 0
        capsys.readouterr()
        with mock.patch.dict(os.environ, {"DISPLAY": ":0"}):
            assert failure(capsys, "eval", str(tmp_path / "demo"), "--render")[0] == 2
        with mock.patch.dict(os.environ, {"DISPLAY": "", "WAYLAND_DISPLAY": "", "SDL_VIDEODRIVER": ""}):
            code, message = failure(capsys, "eval", str(tmp_path / "demo"), "--render")
        assert code == 2
        if sys.platform.startswith("linux"):
            assert "no display" in message
    finally:
        gym.registry.pop("Plain-v0")


def test_resume(tmp_path):
    assert train(tmp_path, "--ckpt-interval", "1") == 0
    config.clear()
    assert train(tmp_path, "--ckpt-interval", "1", "--resume", "auto", "--epochs", "3") == 0
    assert [r["env_steps"] for r in tiny.rows(tmp_path / "demo", "rollout")] == [50, 100, 150]


@pytest.mark.parametrize(
    ("options", "lines"), [(["--progress", "plain"], 2), (["--progress", "none"], 0), ([], 2), (["--quiet"], 0)]
)
def test_progress(tmp_path, capsys, options, lines):
    argv = [
        "train",
        "CartPole-v1",
        "--run-name",
        "demo",
        "--buffer-dir",
        str(tmp_path),
        *(a for a in TINY if a != "--quiet"),
        *options,
    ]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert sum(line.startswith("epoch ") for line in out.splitlines()) == lines
    assert "\r" not in out + err


def test_several_trials(tmp_path, capsys):
    assert train(tmp_path, "--trials", "2", "--epochs", "1") == 0
    assert {p.name for p in tmp_path.iterdir()} == {"demo_trial_0", "demo_trial_1"}
    values = [tiny.rows(tmp_path / f"demo_trial_{i}", "rollout")[0]["values"] for i in range(2)]
    assert values[0] != values[1]


def test_gin_files_come_last(tmp_path):
    (tmp_path / "a.gin").write_text("Agent.reward_multiplier = 3.0\nGRUTrajEncoder.d_hidden = 9\n")
    (tmp_path / "b.gin").write_text("Agent.reward_multiplier = 5.0\n")
    assert (
        train(tmp_path, "--traj-encoder", "gru", "--epochs", "1", "--configs", str(tmp_path / "a.gin"), str(tmp_path / "b.gin"))
        == 0
    )
    text = (tmp_path / "demo" / "config.txt").read_text()
    assert "Agent.reward_multiplier = 5.0" in text
    assert "GRUTrajEncoder.d_hidden = 9" in text


def test_eval_elsewhere(tmp_path, capsys):
    assert train(tmp_path) == 0
    capsys.readouterr()
    gym.register("ShortPole-v1", "gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=15)
    try:
        assert main(["eval", str(tmp_path / "demo"), "--env", "ShortPole-v1", "--episodes", "2", "--actors", "2"]) == 0
    finally:
        gym.registry.pop("ShortPole-v1")
    assert "Average Total Return in ShortPole-v1" in capsys.readouterr().out
    code, message = failure(capsys, "eval", str(tmp_path / "demo"), "--env", "Pendulum-v1")
    assert code == 2
    assert "Pendulum-v1" in message
    assert "observation" in message


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--grads-per-epoch", "many"], "'many' is not a number"),
        (["--epochs", "2.5"], "'2.5' is not a whole number"),
        (["--epochs", "inf"], "'inf' is not a whole number"),
        (["--epochs", "nan"], "'nan' is not a whole number"),
        (["--traj-encoder", "lstm"], "'lstm'"),
        (["--mode", "fly"], "'fly'"),
        (["--batch-size", "0"], "batch_size"),
        (["--resume", "maybe"], "'maybe'"),
        (["--resume", "7"], "no training state of epoch 7"),
        (["--ckpt", "7"], "policy_epoch_7.pt"),
        (["--configs", "missing.gin"], "missing.gin"),
        (["--memory", "transformer", "--memory-size", "17"], "17"),
        (["--unknown", "1"], "--unknown"),
    ],
)
def test_wrong_arguments_of_train(tmp_path, capsys, argv, named):
    code, message = failure(capsys, "train", "CartPole-v1", "--run-name", "demo", "--buffer-dir", str(tmp_path), *TINY, *argv)
    assert code == 2
    assert named in message
    assert message.startswith(("amago train: ", "usage: amago"))


def test_an_environment_that_does_not_exist(tmp_path, capsys):
    code, message = failure(capsys, "train", "NoSuchThing-v3", "--run-name", "demo", "--buffer-dir", str(tmp_path), *TINY)
    assert code == 2
    assert "NoSuchThing-v3" in message
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_does_not_exist(tmp_path, capsys):
    code, message = failure(capsys, "eval", str(tmp_path / "nowhere"))
    assert code == 2
    assert "nowhere" in message


def test_errors_of_a_run_keep_their_traceback(tmp_path, monkeypatch):
    """Only mistakes in the arguments are reduced to a message."""

    def forward(self, batch, log_step=False):
        raise ValueError("the loss cannot be computed")

    monkeypatch.setattr(Agent, "forward", forward)
    with pytest.raises(ValueError, match="the loss cannot be computed"):
        train(tmp_path)


@pytest.mark.parametrize("argv", [["--actors", "0"], ["--episodes", "0"], ["--actors", "-1"]])
def test_wrong_numbers_of_eval(tmp_path, capsys, argv):
    tiny.learned(tmp_path, tiny.cartpole, max_seq_len=4, train_batches_per_epoch=0, always_save_latest=True)
    code, message = failure(capsys, "eval", str(tmp_path / "run"), "--env", "CartPole-v1", *argv)
    assert code == 2
    assert argv[0] in message


def test_a_run_that_train_did_not_make_needs_an_environment(tmp_path, capsys):
    e = tiny.learned(tmp_path, tiny.cartpole, max_seq_len=4, train_batches_per_epoch=0, always_save_latest=True)
    code, message = failure(capsys, "eval", str(e.run_dir))
    assert code == 2
    assert "--env" in message
    assert main(["eval", str(e.run_dir), "--env", "CartPole-v1", "--episodes", "2", "--actors", "2"]) == 0


def test_demo(tmp_path, capsys):
    argv = ["demo", "--epochs", "2", "--minutes", "0.2", "--out", str(tmp_path / "out"), "--quiet"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    table = [line for line in out.splitlines() if line.strip().startswith(("attempt", "Transformer"))]
    assert table[0].split() == ["attempt", "1", "2", "3", "4", "5", "6"]
    rates = [float(x) for x in table[1].split()[1:]]
    assert len(rates) == 6
    assert all(0.0 <= r <= 1.0 for r in rates)
    picture = tmp_path / "out" / "adaptation.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture) in out
