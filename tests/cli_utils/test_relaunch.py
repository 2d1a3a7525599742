"""``--collectors`` of a script."""

import subprocess
import sys
from argparse import ArgumentParser

import pytest
import tiny

from amago import cli_utils

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
def test_a_script_runs_itself_as_learner_and_collectors(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [
        sys.executable, "script.py", *WORDS.split(), "--buffer_dir", "runs", "--collectors", "2", "--updates_per_step=:0.1",
    ]  # fmt: skip
    done = subprocess.run(words, cwd=tmp_path, env=tiny.environment(), capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "learned 4 of" in done.stdout
    assert sorted(p.name for p in (tmp_path / "runs" / "run" / "launch").iterdir() if "-" in p.name) == [
        "collector-0",
        "collector-1",
    ]


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
