"""Helpers of scripts: arguments, parts by name, settings, trials, tables, a script as learner and collectors."""

import subprocess
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace

import gin
import pytest
import tiny
from messages import refused

from amago import cli_utils
from amago.agent import Agent
from amago.envs.exploration import BilevelEpsilonGreedy, EpsilonGreedy
from amago.nets.traj_encoders import FFTrajEncoder, GRUTrajEncoder, IdentityTrajEncoder, TformerTrajEncoder
from amago.nets.tstep_encoders import CNNTstepEncoder, FFTstepEncoder
from amago.run.console import metrics_table


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


def test_whole_numbers():
    texts = {"80000": 80_000, "80_000": 80_000, "8e4": 80_000, "-3": -3, "9007199254740993": 2**53 + 1}
    assert {text: cli_utils.whole_number(text) for text in texts} == texts
    assert isinstance(cli_utils.whole_number("8e4"), int)
    for text in ("x", "", "1.5", "1e-3", "inf", "nan"):
        with pytest.raises(ArgumentTypeError):
            cli_utils.whole_number(text)


@pytest.mark.parametrize(
    ("arch", "cls", "bound"),
    [
        ("ff", FFTrajEncoder, {"d_model": 32, "n_layers": 2}),
        ("gru", GRUTrajEncoder, {"d_hidden": 32, "d_output": 32, "n_layers": 2}),
        ("rnn", GRUTrajEncoder, {"d_hidden": 32, "d_output": 32, "n_layers": 2}),
        ("transformer", TformerTrajEncoder, {"d_model": 32, "d_ff": 128, "n_layers": 2}),
        (TformerTrajEncoder, TformerTrajEncoder, {"d_model": 32, "d_ff": 128, "n_layers": 2}),
        ("identity", IdentityTrajEncoder, {}),
    ],
)
def test_switching_the_sequence_model(arch, cls, bound):
    settings = {}
    assert cli_utils.switch_traj_encoder(settings, arch, memory_size=32, layers=2) is cls
    assert {k.rpartition(".")[2]: v for k, v in settings.items()} == bound
    cli_utils.use_config(settings)
    assert cls(tstep_dim=4, max_seq_len=3).emb_dim == (32 if bound else 4)


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


@gin.configurable
class PassesOn(Agent):
    def __init__(self, *args, bonus=0.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.bonus = bonus


def test_an_agent_of_ones_own_takes_what_it_passes_on():
    settings = {}
    assert cli_utils.switch_agent(settings, PassesOn, gamma=0.75, bonus=2.0) is PassesOn
    cli_utils.use_config(settings)
    agent = tiny.agent(tiny.tmaze(), agent_type=PassesOn)
    assert (agent.bonus, float(agent.gammas[-1])) == (2.0, 0.75)
    with refused(ValueError, "PassesOn", "'gama'", "gamma"):
        cli_utils.switch_agent({}, PassesOn, gama=0.5)


def test_switches_refuse_what_does_not_exist():
    for call, named in [
        (lambda: cli_utils.switch_traj_encoder({}, "rwkv"), ("traj_encoder", "'rwkv'", "ff", "gru")),
        (lambda: cli_utils.switch_agent({}, "agent", taux=1), ("Agent", "'taux'", "tau")),
        (lambda: cli_utils.switch_agent({}, dict), ("builtins.dict", "@gin.configurable")),
        (
            lambda: cli_utils.switch_tstep_encoder({}, "cnn", cnn_type="resnet"),
            ("cnn", "'resnet'", "drq, gridworld, impala, nature"),
        ),
    ]:
        with refused(ValueError, *named):
            call()


def parse(root, *argv):
    parser = cli_utils.add_common_cli(ArgumentParser())
    return parser.parse_args(["--run_name", "run", "--buffer_dir", str(root), *argv])


def test_the_defaults_are_the_originals_for_scripts_that_call_it_and_the_librarys_for_its_own(tmp_path):
    args = parse(tmp_path)
    own = cli_utils.parse_args(None, lambda parser: None, ["--run_name", "run", "--buffer_dir", str(tmp_path)])
    wanted = {
        "parallel_actors": (12, 24), "epochs": (1000, 500), "batches_per_epoch": (1000, 700), "grads_per_epoch": (1000, 700),
        "dset_max_size": (20_000, float("inf")), "val_interval": (20, 10), "ckpt_interval": (50, 20), "dloader_workers": (8, 6),
    }  # fmt: skip
    assert {name: (getattr(args, name), getattr(own, name)) for name in wanted} == wanted
    e = cli_utils.create_experiment_from_cli(args, tiny.tmaze, tiny.tmaze, 20, 30)
    assert (e.parallel_actors, e.epochs, e.train_batches_per_epoch, e.dloader_workers) == (12, 1000, 1000, 8)
    assert (e.dataset.dset_max_size, e.val_interval, e.ckpt_interval) == (20_000, 20, 50)


def test_a_process_that_only_collects_runs_until_it_is_stopped(tmp_path):
    e = cli_utils.switch_async_mode(tiny.experiment(tmp_path, epochs=1, callbacks=[tiny.StopAfter(3)]), "collect")
    e.start()
    e.learn()
    assert e.epoch == 3


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
    assert ({k: getattr(e, k) for k in wanted}, e.dataset.dset_max_size) == (wanted, 77)
    assert e.dataset.buffer_dir == tmp_path / "run" / "buffer"
    shorter = parse(tmp_path, "--max_seq_len", "7", "--eval_timesteps", "8", "--mode", "collect")
    e = cli_utils.create_experiment_from_cli(shorter, tiny.tmaze, tiny.tmaze, 20, 30)
    assert (e.max_seq_len, e.val_timesteps_per_epoch, e.env_mode) == (7, 8, "async")
    assert e.start_learning_at_epoch == 0  # run_trials applies the mode
    cli_utils.switch_async_mode(e, shorter.mode)
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


SCRIPT = '''
"""A script as users write them."""
from argparse import ArgumentParser

import tiny
from amago import cli_utils
from amago.nets.traj_encoders import FFTrajEncoder

parser = ArgumentParser()
cli_utils.add_common_cli(parser)
args = parser.parse_args()
cli_utils.use_config(tiny.SMALL)
experiment = cli_utils.create_experiment_from_cli(
    args, tiny.tmaze, tiny.tmaze, max_seq_len=6, val_timesteps_per_epoch=7, traj_encoder_type=FFTrajEncoder
)
experiment = cli_utils.switch_async_mode(experiment, args.mode)
experiment.start()
experiment.learn()
print("learned", experiment.grad_update_counter, "of", experiment.env_steps)
experiment.close()
'''
WORDS = (
    "--run_name run --parallel_actors 2 --timesteps_per_epoch 12 --batches_per_epoch 2 --epochs 2 --batch_size 4 --env_mode sync "
    "--no_log --quiet"
)


@pytest.mark.timeout(300)
def test_a_script_runs_itself_as_learner_and_collector(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [
        sys.executable, "script.py", *WORDS.split(), "--buffer_dir", "runs", "--collectors", "1", "--updates_per_step=:0.1",
    ]  # fmt: skip
    done = subprocess.run(words, cwd=tmp_path, env=tiny.environment(), capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "learned 4 of" in done.stdout
    assert [p.name for p in (tmp_path / "runs" / "run" / "launch").iterdir() if "-" in p.name] == ["collector-0"]


def arguments(*words):
    parser = cli_utils.add_common_cli(ArgumentParser())
    return parser.parse_args([*WORDS.split(), "--buffer_dir", "x", *words])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--collectors", "2", "--mode", "collect"], "--mode collect"),
        (["--collectors", "2", "--trials", "3"], "--trials 3"),
        (["--collectors", "2"], "not on the command line"),
        (["--ray", "auto"], "--ray auto"),
    ],
)
def test_what_contradicts_it_is_refused(words, said):
    with pytest.raises(ValueError, match=said):
        cli_utils.create_experiment_from_cli(arguments(*words), tiny.tmaze, tiny.tmaze, 6, 7)
