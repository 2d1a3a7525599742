"""Learning is the product: short runs with a threshold that an agent without memory cannot reach."""

import pytest

from amago import config
from amago.agent import Agent
from amago.envs import AMAGOEnv
from amago.envs.builtin.tmaze import TMazeExploration, TMazePassive
from amago.experiment import Experiment
from amago.loading import DiskTrajDataset
from amago.nets.traj_encoders import FFTrajEncoder, GRUTrajEncoder, TformerTrajEncoder
from amago.nets.tstep_encoders import FFTstepEncoder

HORIZON = 8
SMALL = {
    "FFTstepEncoder.n_layers": 1, "FFTstepEncoder.d_hidden": 32, "FFTstepEncoder.d_output": 32,
    "FFTstepEncoder.normalize_inputs": False, "FFTrajEncoder.d_model": 32, "GRUTrajEncoder.d_hidden": 32,
    "GRUTrajEncoder.d_output": 32, "GRUTrajEncoder.n_layers": 1, "TformerTrajEncoder.d_model": 32, "TformerTrajEncoder.d_ff": 64,
    "TformerTrajEncoder.n_layers": 1, "TformerTrajEncoder.n_heads": 2, "Actor.d_hidden": 32, "NCritics.d_hidden": 32,
    "Agent.tau": 0.02, "Agent.reward_multiplier": 100.0, "Multigammas.discrete": [0.9], "TMazeExploration.horizon": HORIZON,
    "EpsilonGreedy.steps_anneal": 400,
}  # fmt: skip


def make_env() -> AMAGOEnv:
    return AMAGOEnv(TMazePassive(HORIZON - 1), env_name="tmaze")


def success(traj_encoder, tmp_path, epochs: int) -> float:
    """Success in the maze after ``epochs`` of 40 updates."""
    config.bind(SMALL)
    experiment = Experiment(
        run_name="recall", ckpt_base_dir=str(tmp_path), dataset=DiskTrajDataset(tmp_path, "recall", 2000), max_seq_len=HORIZON,
        tstep_encoder_type=FFTstepEncoder, traj_encoder_type=traj_encoder, agent_type=Agent, make_train_env=make_env,
        make_val_env=make_env, exploration_wrapper_type=TMazeExploration, env_mode="sync", parallel_actors=16,
        val_timesteps_per_epoch=HORIZON, train_timesteps_per_epoch=2 * HORIZON, train_batches_per_epoch=40, batch_size=24,
        learning_rate=1e-3, lr_warmup_steps=50, epochs=epochs, val_interval=None, ckpt_interval=None, always_save_latest=False,
        save_trajs_as="segments", dloader_workers=0, sample_actions=False, verbose=False, seed=0,
    )  # fmt: skip
    experiment.start()
    try:
        experiment.learn()
        metrics = experiment.evaluate_test(make_env, timesteps=20 * HORIZON)
    finally:
        experiment.close()
    return metrics["Average Success in tmaze"]


@pytest.mark.learning
@pytest.mark.parametrize("traj_encoder", [TformerTrajEncoder, GRUTrajEncoder])
def test_memory_recalls_what_was_shown_in_the_first_step(traj_encoder, tmp_path):
    assert success(traj_encoder, tmp_path, epochs=40) >= 0.95


@pytest.mark.learning
def test_without_memory_the_maze_is_a_coin_flip(tmp_path):
    assert success(FFTrajEncoder, tmp_path, epochs=40) <= 0.75
