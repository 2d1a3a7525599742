"""What `amago train` chooses for an environment, and who wins over the choice."""

from argparse import ArgumentParser

import gymnasium as gym
import numpy as np
import pytest
import tiny
from run_inside import refusal

from amago import config
from amago.agent.options import ActorCriticOptions
from amago.cli import train as train_command
from amago.cli.train import choose_settings
from amago.envs import AMAGOEnv
from amago.nets.traj_encoders import FFTrajEncoder, GRUTrajEncoder, IdentityTrajEncoder, TformerTrajEncoder


def chosen(env, horizon=500, **kwargs):
    return choose_settings(AMAGOEnv(env, env_name="E"), horizon, **kwargs)


def experiment(tmp_path, env_id, *argv):
    """The experiment that the command makes, and what it prints is left to capsys."""
    parser = ArgumentParser()
    train_command.add_arguments(parser)
    args = parser.parse_args([env_id, "--run-name", "a", "--buffer-dir", str(tmp_path), *argv])
    return train_command.make_experiment(args)


def agent_of(e):
    env = e.make_train_env()
    return e.agent_type(
        env.observation_space, env.rl2_space, env.action_space, e.max_seq_len, e.tstep_encoder_type, e.traj_encoder_type
    )


def options_of(agent):
    names = "num_critics num_critics_td online_coeff offline_coeff critic_loss_weight reward_multiplier tau n_step targets fbc_filter_func rescale_critics"
    return {name: getattr(agent, name) for name in names.split()}


@pytest.fixture
def of_a_user(registered):
    hide = gym.wrappers.FlattenObservation.wrapper_spec()
    pole = "gymnasium.envs.classic_control:CartPoleEnv"
    registered("Hidden-v0", pole, max_episode_steps=20, additional_wrappers=(hide,))
    registered("Short-v0", pole, max_episode_steps=20)
    registered("Bits-v0", lambda: tiny.Bits())


@pytest.mark.parametrize(
    ("env_id", "model"),
    [
        *((name, "ff") for name in ("CartPole-v1", "Acrobot-v1", "FrozenLake-v1", "Pendulum-v1", "MountainCarContinuous-v0")),
        ("Short-v0", "ff"), ("Hidden-v0", "gru"), ("Bits-v0", "transformer"),
    ],
)  # fmt: skip
def test_environments_of_gymnasium_whose_observation_is_the_state_need_no_memory(of_a_user, env_id, model):
    """A wrapper may hide the state, and of other environments nothing is known."""
    choice = chosen(gym.make(env_id))
    assert choice.arguments["traj_encoder"] == model
    assert env_id != "Bits-v0" or "--memory none" in choice.reason, "who knows better is told how to say so"


class Shown(gym.Env):
    """Observations that are drawn anew in each step, or move by a little; rollouts of ``steps``, or of 5 to so many (``varies``)."""

    observation_space, action_space = gym.spaces.Box(-9.0, 9.0, (2,), np.float32), gym.spaces.Discrete(3)

    def __init__(self, moves=False, steps=40, varies=False, actions=None):
        self.moves, self.steps, self.varies = moves, steps, varies
        self.action_space = actions or self.action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.end = 0, int(self.np_random.integers(5, self.steps)) if self.varies else self.steps
        self.seen = self.np_random.normal(size=2).astype(np.float32)
        return self.seen, {}

    def step(self, action):
        self.t += 1
        new = self.np_random.normal(size=2).astype(np.float32)
        self.seen = (self.seen + 0.05 * new).clip(-9, 9) if self.moves else new
        return self.seen, float(self.np_random.normal()), self.t == self.end, False, {}


def test_a_gru_for_what_moves_and_attention_for_what_is_shown_once():
    cards, positions = chosen(Shown()), chosen(Shown(moves=True))
    assert cards.arguments["traj_encoder"] == "transformer"
    assert positions.arguments["traj_encoder"] == "gru"
    assert "attention" in cards.reason
    assert "velocities" in positions.reason
    assert any("qk_norm" in name for name in cards.settings)
    assert not any("Tformer" in name for name in positions.settings)


@pytest.mark.parametrize(
    ("env", "horizon", "window"),
    [
        (Shown(steps=40), 1000, 40),  # as random actions show
        (Shown(steps=200), 1000, 128),  # not longer
        (Shown(steps=60, varies=True), 60, 60),  # as the limit says
    ],
)  # fmt: skip
def test_training_sequences_are_as_long_as_rollouts_and_targets_reach_over_all_of_them(env, horizon, window):
    choice = chosen(env, horizon)
    assert choice.arguments["max_seq_len"] == window
    assert choice.settings["amago.agent.Agent.targets"] == "tree_backup"


def test_long_rollouts_that_vary_get_a_part_in_a_sequence():
    choice = chosen(Shown(steps=300, varies=True, moves=True), 1000)
    assert choice.arguments["max_seq_len"] == 64
    assert choice.settings["amago.agent.Agent.n_step"] == 10


def test_few_steps_are_trained_on_less_often_where_choices_rest_on_memory(tmp_path, capsys):
    pole = "benchmarks.suite.envs:cartpole_positions"
    e = experiment(tmp_path, pole, "--steps", "50000")
    collected = e.train_timesteps_per_epoch * e.parallel_actors
    assert e.train_batches_per_epoch == collected // 40 < 125
    assert f"--grads_per_epoch {e.train_batches_per_epoch}" in capsys.readouterr().out
    assert experiment(tmp_path, pole, "--steps", "50000", "--grads_per_epoch", "125").train_batches_per_epoch == 125
    assert experiment(tmp_path, pole, "--steps", "500000").train_batches_per_epoch == 125


def test_continuous_actions_with_memory():
    choice = chosen(Shown(moves=True, actions=gym.spaces.Box(-1.0, 1.0, (2,))), 200)
    assert (choice.arguments["traj_encoder"], choice.arguments["max_seq_len"]) == ("gru", 32)
    assert "amago.agent.Agent.targets" not in choice.settings


def test_random_choices_fall_over_thirty_rollouts_or_half_of_the_run(tmp_path, registered):
    registered("Shown-v0", Shown)
    experiment(tmp_path, "Shown-v0", "--quiet")
    assert config.bindings()["amago.envs.exploration.EpsilonGreedy.steps_anneal"] == 30 * 40
    config.clear()
    experiment(tmp_path, "Shown-v0", "--quiet", "--epochs", "2", "--timesteps_per_epoch", "100")
    assert config.bindings()["amago.envs.exploration.EpsilonGreedy.steps_anneal"] == 100


@pytest.mark.parametrize(
    ("argv", "model"),
    [
        (["--memory", "none"], FFTrajEncoder),
        (["--memory", "gru"], GRUTrajEncoder),
        (["--memory", "gru", "--no-choices"], GRUTrajEncoder),
        (["--memory", "none", "--no-choices"], FFTrajEncoder),
        (["--traj-encoder", "gru"], GRUTrajEncoder),
        (["--traj-encoder", "gru", "--memory", "gru"], GRUTrajEncoder),
        (["--traj-encoder", "ff", "--memory", "none"], FFTrajEncoder),
        (["--traj-encoder", "identity", "--memory", "none"], IdentityTrajEncoder),
        (["--no-choices"], TformerTrajEncoder),
    ],
    ids=str,
)
def test_the_user_says_which_model(of_a_user, tmp_path, argv, model):
    assert experiment(tmp_path, "Bits-v0", "--quiet", *argv).traj_encoder_type is model


@pytest.mark.parametrize(("memory", "model"), [("none", "gru"), ("gru", "ff"), ("gru", "identity"), ("gru", "transformer")])
@pytest.mark.parametrize("more", [[], ["--no-choices"]])
def test_memory_and_a_sequence_model_that_contradict_each_other(tmp_path, capsys, memory, model, more):
    argv = ["train", "CartPole-v1", "--run-name", "a", "--buffer-dir", str(tmp_path), "--memory", memory, *more]
    message = refusal(capsys, *argv, "--traj-encoder", model)
    assert f"--memory {memory}" in message
    assert f"--traj_encoder {model}" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("horizon", "gamma"), [(10, 0.95), (200, 0.95), (500, 0.98), (1_000, 0.99), (5_000, 0.99)])
def test_the_discount_of_continuous_control_follows_the_horizon(horizon, gamma):
    assert chosen(gym.make("Pendulum-v1"), horizon).settings["amago.agent.Agent.gamma"] == pytest.approx(gamma)


def test_the_horizon_is_the_environments_limit_unless_one_is_given(tmp_path, capsys):
    for argv, gamma in (([], 0.95), (["--horizon", "500"], 0.98)):
        config.clear()
        experiment(tmp_path, "Pendulum-v1", *argv)
        assert f"Agent.gamma = {gamma};" in capsys.readouterr().out


def test_choices_are_held_where_random_ones_tell_nothing():
    """Random single steps end a rollout of CartPole after some twenty; they do not reach the goal of Acrobot."""
    easy, hard = chosen(gym.make("CartPole-v1")), chosen(gym.make("Acrobot-v1"))
    assert "amago.envs.exploration.EpsilonGreedy.repeat" not in easy.settings
    assert hard.settings == easy.settings | {
        "amago.envs.exploration.EpsilonGreedy.repeat": (1.0, 16.0),
        "amago.envs.exploration.EpsilonGreedy.randomize_eps": False,
    }
    assert hard.arguments == easy.arguments | {"epochs": 60}, "what is found later is learned later"
    assert "; EpsilonGreedy.repeat = (1.0, 16.0)" in hard.describe("Acrobot-v1", {})


@pytest.mark.parametrize("mistake", [ZeroDivisionError("mine"), None, "1 point"])
def test_an_error_of_the_environment_is_left_to_the_start_of_the_run(mistake):
    class Breaks(tiny.Bits):
        def step(self, action):
            obs, _, *rest = super().step(action)
            if isinstance(mistake, Exception):
                raise mistake
            return obs, mistake, *rest

    assert "amago.envs.exploration.EpsilonGreedy.repeat" not in chosen(Breaks(), memory="none").settings


@pytest.mark.parametrize(("values", "little"), [([1, 2, 5, 8], True), ([0, 85, 170, 255], False), ([7], False)])
def test_an_image_asks_for_memory_and_codes_in_a_space_of_colours_are_normalised(values, little):
    class Picture(tiny.Bits):
        observation_space = gym.spaces.Box(0, 255, (7, 7, 3), np.uint8)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return self.np_random.choice(values, size=(7, 7, 3)).astype(np.uint8), {}

    choice = chosen(Picture())
    assert choice.settings.get("amago.nets.tstep_encoders.DictTstepEncoder.normalize_images", False) is little
    assert choice.arguments["traj_encoder"] == "transformer"
    assert "image" in choice.reason


def test_choices_reach_the_agent_and_the_run_and_are_printed(tmp_path, capsys):
    """Each of the bindings that are printed is a line of a gin file, so that a choice can be kept and changed."""
    e, choice = experiment(tmp_path, "Pendulum-v1"), chosen(gym.make("Pendulum-v1"), 200)
    printed = capsys.readouterr().out
    for words in ("Pendulum-v1", "without memory", "--traj_encoder ff", "Agent.gamma = 0.95", "Experiment.lr_cooldown = 0.5"):
        assert words in printed
    agent = agent_of(e)
    assert agent.gammas[-1].item() == pytest.approx(choice.settings["amago.agent.Agent.gamma"])
    assert (agent.tau, agent.traj_encoder.emb_dim) == (
        choice.settings["amago.agent.Agent.tau"],
        choice.arguments["memory_size"],
    )
    assert (e.parallel_actors, e.batch_size) == (choice.arguments["parallel_actors"], choice.arguments["batch_size"])
    config.clear()
    (tmp_path / "kept.gin").write_text("\n".join(printed.splitlines()[2].strip().split("; ")))
    again = experiment(tmp_path, "Pendulum-v1", "--no-choices", "--quiet", "--configs", str(tmp_path / "kept.gin"))
    assert capsys.readouterr().out == ""
    second = agent_of(again)
    assert options_of(agent) == options_of(second)
    assert agent.gammas.tolist() == second.gammas.tolist()


def test_arguments_and_files_win_over_choices(tmp_path, capsys):
    settings = "Agent.tau = 0.123\nEpsilonGreedy.repeat = 2.0\namago.experiment.Experiment.lr_cooldown = 0.25\n"
    (tmp_path / "mine.gin").write_text(settings)
    given = {"batch_size": 7, "memory_size": 32, "learning_rate": 0.002, "grads_per_epoch": 3, "max_seq_len": 5}
    words = [f"--{name}={value}" for name, value in given.items()]
    e = experiment(tmp_path, "CartPole-v1", "--configs", str(tmp_path / "mine.gin"), *words)
    agent = agent_of(e)
    assert (agent.tau, agent.traj_encoder.emb_dim) == (0.123, 32)
    assert (e.batch_size, e.learning_rate, e.lr_cooldown, e.train_batches_per_epoch, e.max_seq_len) == (7, 0.002, 0.25, 3, 5)
    assert config.bindings()["amago.envs.exploration.EpsilonGreedy.repeat"] == 2.0
    printed = capsys.readouterr().out
    assert "--parallel_actors" in printed
    assert not any(f"--{name} " in printed for name in given)


def test_no_choices_keeps_the_settings_of_the_library(tmp_path):
    e = experiment(tmp_path, "CartPole-v1", "--no-choices", "--quiet")
    assert options_of(agent_of(e)) == options_of(ActorCriticOptions())
    assert e.lr_cooldown == 0.0
    assert chosen(tiny.Bits(), plain=True).settings == {}
