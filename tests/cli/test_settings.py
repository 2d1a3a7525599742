"""Settings from YAML files and words NAME=VALUE; runs that are repeated, continued, and swept over, from their directories."""

import json
from argparse import ArgumentParser

import pytest
import tiny
import yaml
from messages import names
from run_inside import refusal

from amago import cli_utils
from amago.cli import main
from amago.config import bindings

SMALL = [
    "--max-seq-len", "8", "--no-async", "--parallel-actors", "2", "--timesteps-per-epoch", "20", "--grads_per_epoch", "2",
    "--batch-size", "4", "--horizon", "20", "--dloader-workers", "0", "--quiet",
]  # fmt: skip
RUN = ["CartPole-v1", "--run-name", "a", "--buffer-dir", "runs"]
FILE = """
memory_size: 16
memory_layers: 1
traj_encoder: gru
learning_rate: 1e-3
mixed_precision: no
padded_sampling: left
agent: {gamma: 0.9, tau: 0.25}
"""


@pytest.fixture
def train(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text(FILE)

    def run(*words, command="train"):
        return main([command, *words])

    return run


def record(run):
    found = json.loads((run / "settings.json").read_text())
    return found["fields"] | found["parameters"]


def trained(run):
    """All metrics that a run has logged, without times."""
    return [
        {k: v for k, v in row["values"].items() if "Second" not in k and "/s" not in k and "Time" not in k}
        for section in ("train", "val", "rollout")
        for row in tiny.rows(run, section)
    ]


def test_a_run_is_repeated_and_continued_from_its_directory_alone(train, tmp_path):
    words = ["agent.gamma=0.95", "experiment.lr_warmup_steps=3", "batch_size=3", "--seed", "5"]
    assert train(*RUN, "--config", "my.yaml", *SMALL, "--epochs", "1", *words) == 0
    found = record(tmp_path / "runs" / "a")
    wanted = {
        "learning_rate": 1e-3, "mixed_precision": "no", "padded_sampling": "left", "lr_warmup_steps": 3, "batch_size": 3, "seed": 5,
        "amago.agent.Agent.gamma": 0.95, "amago.agent.Agent.tau": 0.25, "amago.nets.traj_encoders.GRUTrajEncoder.n_layers": 1,
    }  # fmt: skip
    assert {name: found[name] for name in wanted} == wanted
    assert train("runs/a", "--quiet", command="rerun") == 0
    first, second = (yaml.safe_load((tmp_path / "runs" / name / "settings.yaml").read_text()) for name in ("a", "a_2"))
    assert first == second
    assert trained(tmp_path / "runs" / "a") == trained(tmp_path / "runs" / "a_2") != []
    assert train("--from", "runs/a", "agent.tau=0.5", "--learning_rate", "0.01", "--run_name", "b", "--quiet") == 0
    changed = record(tmp_path / "runs" / "b")
    assert [changed[k] for k in ("amago.agent.Agent.tau", "learning_rate", "padded_sampling")] == [0.5, 0.01, "left"]
    assert train("runs/a", "--epochs", "2", "--quiet", command="resume") == 0
    (start,) = json.loads((tmp_path / "runs" / "a" / "settings.json").read_text())["starts"][1:]
    assert (start["epoch"], start["changed"]) == (1, {"epochs": [1, 2]})


def test_a_drawn_seed_is_kept(train, tmp_path):
    assert train(*RUN, "--memory_size", "16", *SMALL, "--horizon", "8", "--steps", "30") == 0
    assert "epochs" not in (settings := yaml.safe_load((tmp_path / "runs" / "a" / "settings.yaml").read_text()))
    assert train("runs/a", "--quiet", "--steps", "60", command="resume") == 0
    starts = json.loads((tmp_path / "runs" / "a" / "settings.json").read_text())["starts"]
    assert "seed" not in starts[1]["changed"]
    assert [row["env_steps"] for row in tiny.rows(tmp_path / "runs" / "a", "train")] == [30, 60]
    assert train("runs/a", "--quiet", command="rerun") == 0
    assert record(tmp_path / "runs" / "a_2")["seed"] == settings["seed"]


def test_a_run_that_never_began_has_nothing_to_go_on_with(train, capsys):
    """Its directory is claimed, and the process ends while the agent is built."""
    words = [*RUN, "--memory_size", "16", *SMALL, "--epochs", "1"]
    assert train(*words, "agent.popart=False", "agent.rescale_critics=True") == 2
    for command in ("resume", "rerun"):
        assert train("runs/a", command=command) == 2
        assert names(capsys.readouterr().err, f"amago {command}", "runs/a", "settings.yaml")
    assert train(*words, "agent.rescale_critics=False") == 0


def test_values_and_seeds_are_compared_in_a_table(train, tmp_path, capsys):
    words = [*RUN, "--memory_size", "16", *SMALL, "--epochs", "1", "--processes", "1"]
    assert train(*words, "agent.gamma=0.9,0.95", "--seeds", "2") == 0
    runs = [record(tmp_path / "runs" / "a" / f"trial_{i}") for i in range(4)]
    assert sorted((r["amago.agent.Agent.gamma"], r["seed"]) for r in runs) == [(0.9, 0), (0.9, 1), (0.95, 0), (0.95, 1)]
    table = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in table if line.startswith("trial_")]
    assert sorted((row[-1], row[-2]) for row in rows) == [("0.9", "2"), ("0.95", "2")]
    assert train(*words, "agent.gamma=0.9,0.95", "--seeds", "3") == 0
    assert len(list((tmp_path / "runs" / "a").glob("trial_*/metrics.jsonl"))) == 6, "those that are missing are trained"


def test_a_mistake_in_what_all_trials_share_ends_a_sweep(train, tmp_path, capsys):
    words = [*RUN, "--memory_size", "16", *SMALL, "--epochs", "1", "--processes", "1", "--seeds", "2"]
    assert names(refusal(capsys, "train", *words, "--learning_rate", "0"), "learning_rate", "0.0")
    assert train(*words, "--learning_rate", "0.1") == 0
    assert len(list((tmp_path / "runs" / "a").glob("trial_*/metrics.jsonl"))) == 2, "what failed is tried again"


MISTAKES = [
    (["agnet.gamma=1"], ("agnet", "agent")),
    (["agent.gama=1"], ("gama", "gamma")),
    (["Agent.gama=1"], ("gama", "gamma")),
    (["learning_rat=1"], ("learning_rat", "learning_rate")),
    (["memory_siz=1"], ("memory_siz", "memory_size")),
    (["agent.tau=abc"], ("tau", "float", "abc")),
    (["batch_size=abc"], ("batch_size", "abc")),
    (["padded_sampling=lft"], ("padded_sampling", "left", "lft")),
    (["batch_size=0"], ("batch_size", "at least 1")),
    (["traj_encoder=lstmm"], ("traj_encoder", "lstmm", "gru")),
    (["keep_best=3"], ("keep_best", "True or False")),
    (["batch_size=[3, 4]"], ("batch_size", "one value", "[3, 4]")),
    (["agent.tau=[1"], ("agent.tau=[1",)),
    (["--config", "none.yaml"], ("none.yaml",)),
    (["--config", "bad.yaml"], ("bad.yaml", "line 3")),
    (["--config", "list.yaml"], ("list.yaml", "NAME: VALUE")),
    (["--from", "nowhere"], ("nowhere", "settings.yaml")),
    (["word"], ("unrecognized arguments", "word")),
]


@pytest.mark.parametrize(("words", "named"), MISTAKES)
def test_mistakes_are_named(train, tmp_path, capsys, words, named):
    (tmp_path / "bad.yaml").write_text("a: 1\nb: [\n")
    (tmp_path / "list.yaml").write_text("- 1\n")
    assert names(refusal(capsys, "train", *RUN, *SMALL, *words), *named)
    assert not (tmp_path / "runs" / "a" / "metrics.jsonl").exists()


def test_a_file_does_not_decide_which_code_is_imported(train, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "settings.yaml").write_text("env: evil_module:make\n")
    (tmp_path / "evil_module.py").write_text("raise SystemExit('imported')\n")
    assert names(refusal(capsys, "rerun", "run", "--quiet"), "name the environment", "settings.yaml")


def test_scripts_take_the_same_settings(train, tmp_path):
    args = cli_utils.parse_args(
        None, lambda p: p.add_argument("--size", type=int, default=3),
        ["--run_name", "r", "--buffer_dir", "b", "agent.tau=0.5", "--config", "my.yaml", "size=4", "--learning_rate", "0.1"],
    )  # fmt: skip
    assert (args.size, args.learning_rate, args.memory_size, args.traj_encoder) == (4, 0.1, 16, "gru")
    (tmp_path / "more.yaml").write_text("memory_size: 32\nlearning_rate: 1\n")
    cli_utils.use_config({}, args.configs)
    assert (bindings()["amago.agent.Agent.tau"], bindings()["amago.agent.Agent.gamma"]) == (0.5, 0.9)
    old = cli_utils.add_common_cli(ArgumentParser())  # a script with a parser and positional arguments of its own
    args = old.parse_args(
        ["--run_name", "r", "--buffer_dir", "b", "--lr", "0.1", "--configs", "my.yaml", "more.yaml", "batch_size=7"]
    )
    assert (args.batch_size, args.memory_size, args.learning_rate) == (7, 32, 0.1), (
        "the last file counts, and the command line more"
    )


def test_lists_of_values_are_for_the_commands_that_sweep(tmp_path, capsys):
    for word in ("agent.gamma=0.9,0.99", "batch_size=3,4"):
        for words in ([word], ["--configs", word]):
            with pytest.raises(SystemExit):
                cli_utils.parse_args(None, lambda p: None, ["--run_name", "r", "--buffer_dir", "b", *words])
            assert names(
                capsys.readouterr().err, f"{word.partition('=')[0]} has 2 values", f"amago train ENV {word}", "amago tune"
            )


def test_parts_are_named_as_on_the_command_line():
    for setting in ("agent.actor_type=residual", "Agent.actor_type=@ResidualActor"):
        cli_utils.use_config({}, [setting])
        assert type(tiny.agent(tiny.tmaze()).actor).__name__ == "ResidualActor"
        cli_utils.reset_config()
