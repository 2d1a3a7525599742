"""Learning is the product: short runs with a threshold that an agent without memory cannot reach."""

import pytest
import tiny

from amago import EarlyStopping, config
from amago.envs import AMAGOEnv
from amago.envs.builtin.tmaze import TMazeExploration, TMazePassive

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


def success(traj_encoder: str, tmp_path, epochs: int) -> float:
    """Success in the maze after ``epochs`` of 40 updates, or when it is learned."""
    experiment = tiny.experiment(
        tmp_path, make_env, traj_encoder, max_seq_len=HORIZON, exploration_wrapper_type=TMazeExploration, parallel_actors=16,
        val_timesteps_per_epoch=HORIZON, train_timesteps_per_epoch=2 * HORIZON, train_batches_per_epoch=40, batch_size=24,
        lr_warmup_steps=50, epochs=epochs, sample_actions=False, val_interval=4,
        callbacks=[EarlyStopping("Average Success in tmaze", threshold=1.0)],
    )  # fmt: skip
    config.bind(SMALL)
    experiment.start()
    experiment.learn()
    return experiment.evaluate_test(make_env, timesteps=20 * HORIZON)["Average Success in tmaze"]


@pytest.mark.learning
@pytest.mark.parametrize("traj_encoder", ["transformer", "gru"])
def test_memory_recalls_what_was_shown_in_the_first_step(traj_encoder, tmp_path):
    assert success(traj_encoder, tmp_path, epochs=40) >= 0.95


@pytest.mark.learning
def test_without_memory_the_maze_is_a_coin_flip(tmp_path):
    assert success("ff", tmp_path, epochs=40) <= 0.75
