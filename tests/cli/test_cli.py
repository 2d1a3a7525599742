"""The `amago` command, and the helpers that scripts share with it."""

import json
import subprocess
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace

import gymnasium as gym
import pytest
import tiny
from messages import naming

import amago
from amago import cli_utils, config
from amago.agent import Agent
from amago.cli import main
from amago.envs.exploration import BilevelEpsilonGreedy, EpsilonGreedy
from amago.nets.cnn import DrQCNN, IMPALAishCNN
from amago.nets.traj_encoders import FFTrajEncoder, GRUTrajEncoder, TformerTrajEncoder
from amago.nets.tstep_encoders import CNNTstepEncoder, FFTstepEncoder
from amago.run.console import metrics_table

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
        assert rollouts >= 5
        assert "Average Total Return in CartPole-v1" in out

    results = []
    for _ in range(2):
        assert main(["eval", str(run), "--episodes", "4", "--actors", "2", "--seed", "7", "--greedy"]) == 0
        results.append(capsys.readouterr().out)
    assert results[0] == results[1]


def test_resume(tmp_path):
    assert train(tmp_path, "--ckpt-interval", "1") == 0
    config.clear()
    assert train(tmp_path, "--ckpt-interval", "1", "--resume", "auto", "--epochs", "3") == 0
    assert [r["env_steps"] for r in tiny.rows(tmp_path / "demo", "rollout")] == [50, 100, 150]


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
        (["--memory-size", "17"], "17"),
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
    tiny.learned(tmp_path, tiny.cartpole, max_seq_len=4, always_save_latest=True)
    code, message = failure(capsys, "eval", str(tmp_path / "run"), "--env", "CartPole-v1", *argv)
    assert code == 2
    assert argv[0] in message


def test_a_run_that_train_did_not_make_needs_an_environment(tmp_path, capsys):
    e = tiny.learned(tmp_path, tiny.cartpole, max_seq_len=4, always_save_latest=True)
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


# ---- tables --------------------------------------------------------------------------------------------------------------


def test_a_table_begins_with_the_headline_and_counts_like_people():
    metrics = {f"Attempt {i} Success": i / 10 for i in (9, 10, 1)} | {"Average Total Return (Across All Env Names)": 2.5}
    lines = metrics_table(metrics, "title").splitlines()
    assert lines[0] == "title"
    assert [line.rsplit(maxsplit=1) for line in lines[2:]] == [
        ["Average Total Return (Across All Env Names)", "2.5"],
        ["Attempt 1 Success", "0.1"],
        ["Attempt 9 Success", "0.9"],
        ["Attempt 10 Success", "1"],
    ]
    assert "no rollout ended" in metrics_table({}, "title")


# ---- helpers of scripts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"), [("80000", 80_000), ("80_000", 80_000), ("8e4", 80_000), ("-3", -3), ("9007199254740993", 2**53 + 1)]
)
def test_whole_numbers(text, number):
    value = cli_utils.whole_number(text)
    assert value == number
    assert isinstance(value, int)


@pytest.mark.parametrize("text", ["x", "", "1.5", "1e-3", "inf", "nan"])
def test_what_is_no_whole_number(text):
    with pytest.raises(ArgumentTypeError, match=r"whole number|not a number"):
        cli_utils.whole_number(text)


@pytest.mark.parametrize(
    ("arch", "cls", "bound"),
    [
        ("ff", FFTrajEncoder, {"d_model": 32, "n_layers": 2}),
        ("gru", GRUTrajEncoder, {"d_hidden": 32, "d_output": 32, "n_layers": 2}),
        ("rnn", GRUTrajEncoder, {"d_hidden": 32, "d_output": 32, "n_layers": 2}),
        ("transformer", TformerTrajEncoder, {"d_model": 32, "d_ff": 128, "n_layers": 2}),
        (TformerTrajEncoder, TformerTrajEncoder, {"d_model": 32, "d_ff": 128, "n_layers": 2}),
    ],
)
def test_switching_the_sequence_model(arch, cls, bound):
    settings = {}
    assert cli_utils.switch_traj_encoder(settings, arch, memory_size=32, layers=2) is cls
    assert {k.rpartition(".")[2]: v for k, v in settings.items()} == bound
    cli_utils.use_config(settings)
    assert cls(tstep_dim=4, max_seq_len=3).emb_dim == 32


def test_switching_other_parts():
    settings = {}
    assert cli_utils.switch_tstep_encoder(settings, "ff", d_hidden=8) is FFTstepEncoder
    assert cli_utils.switch_step_encoder(settings, "cnn") is CNNTstepEncoder
    assert cli_utils.switch_agent(settings, "agent", tau=0.5) is Agent
    assert cli_utils.switch_exploration(settings, "egreedy", eps_start=0.5) is EpsilonGreedy
    assert cli_utils.switch_exploration(settings, "bilevel", rollout_horizon=3) is BilevelEpsilonGreedy
    cli_utils.use_config(settings)
    assert EpsilonGreedy(tiny.tmaze()).eps_start == 0.5
    assert BilevelEpsilonGreedy(tiny.tmaze()).rollout_horizon == 3


def test_arguments_given_to_a_switch_win():
    settings = {}
    cli_utils.switch_traj_encoder(settings, "transformer", memory_size=32, d_ff=7)
    assert settings["amago.nets.traj_encoders.TformerTrajEncoder.d_ff"] == 7


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: cli_utils.switch_traj_encoder({}, "lstm"), ("traj_encoder", "'lstm'", "ff", "gru")),
        (lambda: cli_utils.switch_agent({}, "agent", taux=1), ("Agent", "'taux'", "tau")),
        (lambda: cli_utils.switch_agent({}, dict), ("builtins.dict", "@gin.configurable")),
        (lambda: cli_utils.use_config({"Agent.taux": 1}), ("'Agent.taux' = 1", "tau")),
        (lambda: cli_utils.use_config({"Agnt.tau": 1}), ("'Agnt.tau' = 1", "Agent")),
    ],
)
def test_switches_refuse_what_does_not_exist(call, named):
    with pytest.raises(ValueError, match=naming(*named)):
        call()


def parse(root, *argv):
    parser = cli_utils.add_common_cli(ArgumentParser())
    return parser.parse_args(["--run_name", "run", "--buffer_dir", str(root), *argv])


def test_both_spellings(tmp_path):
    assert parse(tmp_path, "--max_seq_len", "9").max_seq_len == parse(tmp_path, "--max-seq-len", "9").max_seq_len == 9


def test_an_experiment_from_the_command_line(tmp_path):
    args = parse(
        tmp_path, "--epochs", "3", "--batch_size", "5", "--no_async", "--parallel_actors", "2", "--timesteps_per_epoch", "1e2",
        "--resume", "4", "--learning_rate", "0.5", "--mixed_precision", "bf16", "--seed", "9", "--dset_max_size", "77", "--tensorboard",
    )  # fmt: skip
    e = cli_utils.create_experiment_from_cli(args, tiny.tmaze, tiny.tmaze, 20, 30, group_name="g", verbose=False)
    wanted = {
        "run_name": "run", "ckpt_base_dir": str(tmp_path), "epochs": 3, "batch_size": 5, "env_mode": "sync", "parallel_actors": 2,
        "train_timesteps_per_epoch": 100, "resume": 4, "learning_rate": 0.5, "mixed_precision": "bf16", "seed": 9, "max_seq_len": 20,
        "val_timesteps_per_epoch": 30, "log_to_tensorboard": True, "log_to_wandb": False, "wandb_group_name": "g", "verbose": False,
    }  # fmt: skip
    assert {k: getattr(e, k) for k in wanted} == wanted
    assert e.dataset.dset_max_size == 77
    assert e.dataset.buffer_dir == tmp_path / "run" / "buffer"
    shorter = parse(tmp_path, "--max_seq_len", "7", "--eval_timesteps", "8", "--mode", "collect")
    e = cli_utils.create_experiment_from_cli(shorter, tiny.tmaze, tiny.tmaze, 20, 30)
    assert (e.max_seq_len, e.val_timesteps_per_epoch, e.env_mode) == (7, 8, "async")
    assert (e.start_learning_at_epoch, e.always_load_latest, e.has_dset_edit_rights) == (float("inf"), True, False)


def tiny_script(root, name="run"):
    """What a script hands to `main`: its own arguments and how to make an experiment; and what it was asked for."""
    seen = []

    def add_cli(parser):
        parser.add_argument("--corridor", type=int, default=7, help="steps of the corridor")
        parser.set_defaults(epochs=1, parallel_actors=2)

    def make_experiment(args):
        seen.append(args)
        return tiny.experiment(root, name=args.run_name, seed=args.seed, epochs=args.epochs)

    return add_cli, make_experiment, seen


def test_a_script_has_the_common_arguments_and_its_own(tmp_path, capsys):
    add_cli, _, _ = tiny_script(tmp_path)
    common = ["--run_name", "run", "--buffer_dir", str(tmp_path)]
    args = cli_utils.parse_args("What it does.", add_cli, [*common, "--corridor", "3"])
    assert (args.corridor, args.epochs, args.parallel_actors, args.grads_per_epoch) == (3, 1, 2, 700)
    with pytest.raises(SystemExit) as stop:
        cli_utils.parse_args("What it does.", add_cli, ["--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "What it does." in text
    assert "steps of the corridor (default: 7)" in text
    assert "epochs of collection and training (default: 1)" in text


def test_a_script_trains_then_evaluates_and_prints_a_table(tmp_path, capsys):
    add_cli, make_experiment, seen = tiny_script(tmp_path)
    argv = ["--run_name", "run", "--buffer_dir", str(tmp_path), "--seed", "3", "--trials", "2"]
    cli_utils.main("What it does.", add_cli, make_experiment, argv=argv)
    out = capsys.readouterr().out
    assert [(args.run_name, args.seed, args.corridor) for args in seen] == [("run_trial_0", 3, 7), ("run_trial_1", 4, 7)]
    assert out.count("after training\n----") == 2
    assert out.count("Average Total Return (Across All Env Names)") == 2
    assert all(tiny.rows(tmp_path / args.run_name, "test") for args in seen)
    tested = []
    cli_utils.main(None, add_cli, make_experiment, lambda e: tested.append((e.run_name, e.epoch)), argv[:4])
    assert [name for name, _ in tested] == ["run"]
    assert "after training" not in capsys.readouterr().out


def test_what_an_evaluation_after_training_is_asked_for(capsys):
    class Recorded:
        """With an even number of steps, where rounding shows."""

        val_timesteps_per_epoch, make_val_env = 26, "validation"

        def __init__(self):
            self.asked = []

        def evaluate_test(self, make_env, timesteps):
            self.asked.append((make_env, timesteps))
            return {"Average Total Return (Across All Env Names)": 2.5}

    e = Recorded()
    cli_utils.evaluate_after_training(e)
    cli_utils.evaluate_after_training(e, 9)
    cli_utils.evaluate_after_training(e, 10, "other", "in other mazes")
    assert e.asked == [("validation", 66), ("validation", 9), ("other", 10)]
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if "-" not in line and "Average" not in line] == [
        "after training", "after training", "in other mazes",
    ]  # fmt: skip


def test_picture_encoders_by_name():
    parser = ArgumentParser()
    cli_utils.add_pixel_cli(parser)
    args = parser.parse_args(["--cnn", "drq", "--no_augmentation"])
    settings = {}
    cli_utils.switch_tstep_encoder(settings, "cnn", cnn_type=args.cnn, drqv2_aug=not args.no_augmentation)
    assert {k.rpartition(".")[2]: v for k, v in settings.items()} == {"cnn_type": DrQCNN, "drqv2_aug": False}
    default = parser.parse_args([])
    cli_utils.switch_tstep_encoder(settings, "cnn", cnn_type=default.cnn, drqv2_aug=not default.no_augmentation)
    assert {k.rpartition(".")[2]: v for k, v in settings.items()} == {"cnn_type": IMPALAishCNN, "drqv2_aug": True}
    with pytest.raises(ValueError, match=naming("cnn", "'resnet'", "drq, impala, nature")):
        cli_utils.switch_tstep_encoder(settings, "cnn", cnn_type="resnet")


def test_trials_are_closed_even_if_one_fails(tmp_path):
    made = []

    def make(args: Namespace):
        made.append(tiny.experiment(tmp_path, name=args.run_name, seed=args.seed))
        return made[-1]

    def test(experiment):
        if len(made) == 2:
            raise OSError("the disk is full")

    args = parse(tmp_path, "--trials", "3", "--seed", "5")
    with pytest.raises(OSError, match="disk is full"):
        cli_utils.run_trials(args, make, test)
    assert [(e.run_name, e.seed) for e in made] == [("run_trial_0", 5), ("run_trial_1", 6)]
    for e in made:
        with pytest.raises(RuntimeError):  # it is closed
            e.learn()
    assert (args.run_name, args.seed) == ("run", 5)
