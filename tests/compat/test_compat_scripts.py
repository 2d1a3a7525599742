"""Training scripts and gin files for the original system: flags, helpers, names of bindings; and the meaning of filters."""

from argparse import ArgumentParser

import gin
import pytest
import tiny
from messages import naming

from amago import Experiment, cli_utils, config
from amago.loading import DoNothingDataset
from amago.nets.tstep_encoders import FFTstepEncoder


def parse(root, *argv, add=lambda parser: None):
    parser = ArgumentParser()
    cli_utils.add_common_cli(parser)
    add(parser)
    return parser.parse_args(["--run_name", "run", "--buffer_dir", str(root), *argv])


def test_the_flags_of_the_original(tmp_path):
    argv = {
        "trials": 2, "epochs": 3, "memory_size": 16, "memory_layers": 1, "batches_per_epoch": 7, "timesteps_per_epoch": 9,
        "val_interval": 4, "ckpt_interval": 5, "parallel_actors": 2, "dset_max_size": 99, "start_learning_at_epoch": 1,
        "dloader_workers": 0, "batch_size": 6, "ckpt": 8, "agent_type": "multitask", "env_mode": "sync", "traj_encoder": "rnn",
        "mixed_precision": "bf16", "mode": "learn",
    }  # fmt: skip
    words = [word for name, value in argv.items() for word in (f"--{name}", str(value))]
    args = parse(tmp_path, *words, "--no_log", "--configs", "a.gin", "b.gin")
    assert {name: getattr(args, name) for name in argv} == argv
    assert args.configs == ["a.gin", "b.gin"]
    assert args.no_log is True
    found = cli_utils.experiment_fields_from_cli(args)
    assert (found["start_learning_at_epoch"], found["val_interval"], found["log_to_wandb"]) == (1, 4, False)
    assert cli_utils.experiment_fields_from_cli(parse(tmp_path, "--log"))["log_to_wandb"] is True
    assert cli_utils.experiment_fields_from_cli(parse(tmp_path, "--log", "--no_log"))["log_to_wandb"] is False


@pytest.mark.parametrize("name", ["--grads_per_epoch", "--batches_per_epoch", "--grads-per-epoch", "--batches-per-epoch"])
def test_batches_of_an_epoch_have_two_names(tmp_path, name):
    args = parse(tmp_path, name, "11", add=lambda parser: parser.set_defaults(grads_per_epoch=300))
    assert (args.batches_per_epoch, args.grads_per_epoch) == (11, 11)
    assert cli_utils.experiment_fields_from_cli(args)["train_batches_per_epoch"] == 11


@pytest.mark.parametrize("name", ["grads_per_epoch", "batches_per_epoch"])
def test_either_name_takes_a_default(tmp_path, name):
    args = parse(tmp_path, add=lambda parser: parser.set_defaults(**{name: 300}))
    assert cli_utils.experiment_fields_from_cli(args)["train_batches_per_epoch"] == 300


def own_flags(parser):
    parser.add_argument("--max_seq_len", type=int, default=128, help="own")
    group = parser.add_argument_group("own")
    group.add_argument("--eval_timesteps", type=int, default=2000)
    group.add_argument("--batch_size", type=int, default=18)
    group.add_argument("--seed", "--random_seed", type=int, default=3)


def test_a_scripts_own_flags_win(tmp_path, capsys):
    args = parse(tmp_path, add=own_flags)
    assert (args.max_seq_len, args.eval_timesteps, args.batch_size, args.seed) == (128, 2000, 18, 3)
    assert parse(tmp_path, "--batch-size", "5", add=own_flags).batch_size == 5
    args = parse(tmp_path, "--max_seq_len", "64", "--eval_timesteps", "50", add=own_flags)
    e = cli_utils.create_experiment_from_cli(
        args, tiny.tmaze, tiny.tmaze, max_seq_len=args.max_seq_len // 2, group_name="g",
        val_timesteps_per_epoch=args.eval_timesteps,
    )  # fmt: skip
    assert (e.max_seq_len, e.val_timesteps_per_epoch, e.batch_size) == (32, 50, 18)
    with pytest.raises(SystemExit):
        parse(tmp_path, "--help", add=own_flags)
    text = capsys.readouterr().out
    assert text.count("--max_seq_len ") == 2  # in the usage and in the list
    assert "--max-seq-len" not in text


def test_what_a_script_hands_over(tmp_path):
    @gin.configurable
    class Own(Experiment):
        pass

    dataset = DoNothingDataset()
    e = cli_utils.create_experiment_from_cli(
        parse(tmp_path), tiny.tmaze, tiny.tmaze, max_seq_len=20, group_name="group", run_name="other", traj_save_len=40,
        experiment_type=Own, dataset=dataset, tstep_encoder_type=FFTstepEncoder, val_timesteps_per_epoch=30, sample_actions=False,
    )  # fmt: skip
    assert type(e) is Own
    assert (e.run_name, e.traj_save_len, e.wandb_group_name, e.sample_actions) == ("other", 40, "group", False)
    assert e.dataset is dataset
    with pytest.raises(ValueError, match=naming("val_timesteps_per_epoch", "--eval_timesteps")):
        cli_utils.create_experiment_from_cli(parse(tmp_path), tiny.tmaze, tiny.tmaze, max_seq_len=20)


def test_modes(tmp_path):
    make = lambda: cli_utils.create_experiment_from_cli(parse(tmp_path), tiny.tmaze, tiny.tmaze, 20, 30)  # noqa: E731
    learn, collect = cli_utils.make_experiment_learn_only(make()), cli_utils.make_experiment_collect_only(make())
    assert learn.start_collecting_at_epoch == collect.start_learning_at_epoch == float("inf")
    for mode, other in (("learn", learn), ("collect", collect)):
        switched = cli_utils.switch_async_mode(cli_utils.switch_async_mode(make(), mode), mode)
        fields = "start_learning_at_epoch start_collecting_at_epoch always_load_latest has_dset_edit_rights val_interval"
        assert [getattr(switched, f) for f in fields.split()] == [getattr(other, f) for f in fields.split()]


def test_settings_may_change_after_they_were_final():
    calls = []
    gin.config.register_finalize_hook(lambda bindings: calls.append(len(bindings)))
    try:
        cli_utils.use_config({"Agent.tau": 0.5}, finalize=True)
        assert calls == [1]
        cli_utils.use_config({"Agent.tau": 0.25}, None, finalize=False)
        assert calls == [1]
    finally:
        gin.config._FINALIZE_HOOKS.pop()
    gin.finalize()
    cli_utils.use_config({"Agent.tau": 0.125})
    assert config.bindings() == {"amago.agent.Agent.tau": 0.125}
    gin.clear_config()
    cli_utils.use_config({"Agent.tau": 0.1})
    assert config.bindings() == {"amago.agent.Agent.tau": 0.1}


def test_objects_and_subclasses_in_gin_files(tmp_path):
    @gin.configurable(module="compat_custom")
    class Filter:
        def __init__(self, strength=1.0):
            self.strength = strength

    @gin.configurable
    class CompatExperiment(Experiment):
        pass

    (tmp_path / "a.gin").write_text(
        "Agent.fbc_filter_func = @compat_custom.Filter()\ncompat_custom.Filter.strength = 3.0\nCompatExperiment.batch_size = 5\n"
    )
    cli_utils.use_config(gin_configs=[str(tmp_path / "a.gin")])
    assert gin.query_parameter("Agent.fbc_filter_func").configurable.wrapped is Filter
    assert gin.query_parameter("CompatExperiment.batch_size") == 5
