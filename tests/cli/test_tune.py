"""``amago tune``."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time

import optuna
import pytest
import tiny
from messages import names
from run_inside import refusal

from amago.cli import main
from amago.run.locks import RunLock

SMALL = [
    "--memory-size", "16", "--memory-layers", "1", "--max-seq-len", "8", "--epochs", "3", "--no-async", "--seed", "1", "--val-interval", "1",
    "--parallel-actors", "2", "--timesteps-per-epoch", "20", "--batches-per-epoch", "2", "--batch-size", "4", "--horizon", "20", "--dloader-workers", "0",
]  # fmt: skip
SPACE = ["--space", "learning_rate=loguniform(1e-5,1e-2)", "Agent.gamma=choice(0.9,0.99)", "l2_coeff=uniform(0,0.1)"]


def arguments(tmp_path, *more):
    return ["tune", "CartPole-v1", "--run-name", "s", "--buffer-dir", str(tmp_path), *SMALL, *more]


def tune(tmp_path, *more):
    return main(arguments(tmp_path, *more))


def study(tmp_path):
    return optuna.load_study(study_name="s", storage=f"sqlite:///{tmp_path / 's' / 'study.db'}")


def record(run):
    return json.loads((run / "settings.json").read_text())


def test_a_study_and_the_command_that_it_prints(tmp_path, capsys):
    (tmp_path / "own.gin").write_text("Agent.tau = 0.125\n")
    more = [
        "batch_size=int(2,5)",
        "train_batches_per_epoch=int(3,5)",
        "Agent.fake_filter=choice(True,False)",
        "memory_layers=choice(1,2)",
    ]
    words = ["--trials", "2", "--no-prune", "--mixed-precision", "bf16", "--configs", str(tmp_path / "own.gin")]
    assert tune(tmp_path, *SPACE, *more, *words) == 0
    out = capsys.readouterr().out
    trials = study(tmp_path).trials
    assert len(trials) == 2
    for trial in trials:
        found = record(tmp_path / "s" / f"trial_{trial.number}")
        fields, params = found["fields"], trial.params
        of_fields = ("learning_rate", "l2_coeff", "batch_size", "train_batches_per_epoch")
        assert {name: fields[name] for name in of_fields} == {name: params[name] for name in of_fields}
        of_gin = ("Agent.gamma", "Agent.fake_filter")
        assert {name: found["parameters"][f"amago.agent.{name}"] for name in of_gin} == {name: params[name] for name in of_gin}
        assert found["parameters"]["amago.agent.Agent.tau"] == 0.125
        assert sorted(trial.intermediate_values) == [0, 1, 2, 3]
        assert trial.value == trial.intermediate_values[3]
    best = max(trials, key=lambda t: t.value)
    table = out[out.index("the best of") :]
    assert names(table, "2 trials finished", f"trial_{best.number}", "learning_rate", "Agent.gamma", "l2_coeff")
    assert table.index(f"trial_{best.number} ") == min(table.index(f"trial_{i} ") for i in range(2))
    lines = out.splitlines()
    command = shlex.split(lines[lines.index("to train with these settings:") + 1])
    assert command[:2] == ["amago", "train"]
    assert main([*command[1:], "--quiet"]) == 0
    (evaluation,) = (line for line in lines if line.startswith("amago eval "))
    assert main([*shlex.split(evaluation)[1:], "--episodes", "2"]) == 0
    first, again = record(tmp_path / "s" / f"trial_{best.number}"), record(tmp_path / "s_best")
    differ = {k for part in ("fields", "parameters") for k, v in first[part].items() if again[part][k] != v}
    assert differ <= {"run_name", "ckpt_base_dir", "dataset", "callbacks", "resume", "ckpt_interval", "verbose", "progress"}


def test_the_same_command_goes_on(tmp_path, capsys):
    assert tune(tmp_path, *SPACE, "--trials", "1", "--quiet") == 0
    before = study(tmp_path).trials[0]
    capsys.readouterr()
    assert tune(tmp_path, *SPACE, "--trials", "2") == 0
    assert "trial_0:" not in capsys.readouterr().out, "it is not trained again"
    assert tune(tmp_path, *SPACE, "--trials", "3") == 0
    after = study(tmp_path).trials
    assert len(after) == len({t.params["learning_rate"] for t in after}) == 3
    assert after[0].params == before.params
    for more in (
        ["--space", "learning_rate=uniform(0.1,0.2)"],
        [*SPACE, "--direction", "minimize"],
        [*SPACE, "--metric", "Number of Rollouts"],
    ):
        assert names(refusal(capsys, *arguments(tmp_path, *more, "--trials", "4")), "another --run_name")
    assert len(study(tmp_path).trials) == 3


def test_a_space_that_is_exhausted_is_not_trained_again(tmp_path):
    assert tune(tmp_path, "agent.gamma=0.9,0.95", "--trials", "5", "--epochs", "1", "--no-prune", "--quiet") == 0
    trained = [p.name for p in (tmp_path / "s").glob("trial_*") if p.is_dir()]
    assert len(trained) == 2
    assert {record(tmp_path / "s" / name)["parameters"]["amago.agent.Agent.gamma"] for name in trained} == {0.9, 0.95}


def test_several_processes(tmp_path):
    assert tune(tmp_path, *SPACE, "--trials", "4", "--processes", "2") == 0
    found = study(tmp_path).trials
    assert [t.state.is_finished() for t in found] == [True] * 4
    runs = [tmp_path / "s" / f"trial_{i}" for i in range(4)]
    assert {p for p in (tmp_path / "s").glob("trial_*") if p.is_dir()} == set(runs)


def test_a_trial_that_another_process_has_just_ended_is_left_alone(tmp_path, monkeypatch):
    assert tune(tmp_path, *SPACE, "--trials", "1", "--quiet") == 0
    study(tmp_path).enqueue_trial(study(tmp_path).trials[0].params)
    study(tmp_path).ask()  # trial_1 of another process
    acquire = RunLock.acquire

    def after_the_other_ended(lock):
        if lock.path.name == "trial_1" and study(tmp_path).trials[1].state.name == "RUNNING":
            study(tmp_path).tell(1, 1.0)
        acquire(lock)

    monkeypatch.setattr(RunLock, "acquire", after_the_other_ended)
    assert tune(tmp_path, *SPACE, "--trials", "3", "--quiet") == 0
    assert [(t.number, t.state.name) for t in study(tmp_path).trials] == [(i, "COMPLETE") for i in range(3)]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_stopped_trial_goes_on(tmp_path, how):
    argv = arguments(tmp_path, *SPACE, "--trials", "2", "--epochs", "40")
    process = subprocess.Popen([sys.executable, "-m", "amago.cli", *argv], env=tiny.environment(), stdout=subprocess.DEVNULL)
    states = tmp_path / "s" / "trial_0" / "ckpts" / "training_states"
    deadline = time.monotonic() + 100
    while not (states.is_dir() and len(list(states.glob("trial_0_epoch_*"))) > 2) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(process.pid, how)
    assert process.wait(60) == (-how if how == signal.SIGKILL else 128 + how)
    epoch = max(int(p.name.rpartition("_")[2]) for p in states.glob("trial_0_epoch_*"))
    assert tune(tmp_path, *SPACE, "--trials", "1", "--epochs", str(epoch + 3)) == 0
    (found,) = study(tmp_path).trials
    assert found.state.name == "COMPLETE"
    assert sorted(found.intermediate_values) == list(range(epoch + 4)), "with what it had reported before"
    assert [s["resumed"] is None for s in record(tmp_path / "s" / "trial_0")["starts"]] == [True, False]


def test_a_trial_whose_losses_explode_fails_alone(tmp_path, capsys, monkeypatch):
    from amago.experiment import Experiment
    from amago.run.learner import NonFiniteTraining

    real = Experiment.train_epoch

    def train_epoch(self):
        if self.run_name == "trial_0":
            raise NonFiniteTraining("not finite")
        real(self)

    monkeypatch.setattr(Experiment, "train_epoch", train_epoch)
    assert tune(tmp_path, *SPACE, "--trials", "2") == 0
    assert [t.state.name for t in study(tmp_path).trials] == ["FAIL", "COMPLETE"]
    assert names(capsys.readouterr().out, "trial_0: failed", "NonFiniteTraining")


def test_settings_that_do_not_fit_together_fail_alone(tmp_path, capsys):
    """The other combinations of a grid are trained, in this process and in others; the exit code says that some are missing."""
    space = [
        "--space",
        "Agent.popart=choice(True,False)",
        "Agent.rescale_critics=choice(True,False)",
        "--grid",
        "--processes",
        "2",
    ]
    assert tune(tmp_path, *space) == 1
    trials = {(t.params["Agent.popart"], t.params["Agent.rescale_critics"]): t.state.name for t in study(tmp_path).trials}
    assert {k for k, state in trials.items() if state == "FAIL"} == {(False, True)}
    assert "3 trials finished, 0 stopped early, 1 failed" in (said := capsys.readouterr()).out
    assert "Traceback" not in said.out + said.err
    assert tune(tmp_path, *space) == 1
    assert [t.state.name for t in study(tmp_path).trials[4:]] == ["FAIL"], "it alone is tried again"


MISTAKES = [
    ([], ("--space",)),
    (["--space", "learning_rat=uniform(0,1)"], ("learning_rat", "learning_rate")),
    (["--space", "Agent.gama=uniform(0,1)"], ("Agent.gama", "gamma")),
    (["--space", "Agent.tau=choice(a,b)"], ("Agent.tau",)),
    (["--space", "traj_encoder=choice(gru,lstmm)"], ("traj_encoder", "lstmm")),
    (["--space", "memory_layers=uniform(1,2.5)"], ("memory_layers", "2.5")),
    (["--space", "run_name=choice(a,b)"], ("run_name",)),
    (["--space", "padded_sampling=choice(none,lft)"], ("padded_sampling", "lft")),
    (["--space", "no_async=choice(1,2)"], ("no_async", "True or False")),
    (["--space", "learning_rate=uniform(0.1,0.2)", "--grid"], ("learning_rate", "choice")),
    (["agent.gama=0.9,0.95"], ("gama", "gamma")),
    ([*SPACE, "--resume", "auto"], ("--resume", "--run_name")),
]


def test_mistakes_are_told_in_one_line(tmp_path, capsys, monkeypatch):
    for more, named in MISTAKES:
        said = refusal(capsys, *arguments(tmp_path, *more))
        assert names(said, *named), said
        assert not (tmp_path / "s").exists(), "nothing is left behind"
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert names(refusal(capsys, *arguments(tmp_path, *SPACE)), "pip install 'amago[tune]'")
