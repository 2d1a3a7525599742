"""What `amago train` chooses for an environment, and who wins over the choice."""

from argparse import ArgumentParser

import gymnasium as gym
import numpy as np
import pytest
import tiny

import amago
from amago import config
from amago.agent import MultiTaskAgent
from amago.cli import choices, main
from amago.cli import train as train_command
from amago.cli.choices import choose_settings, library_settings
from amago.envs import AMAGOEnv
from amago.nets.traj_encoders import FFTrajEncoder, GRUTrajEncoder, TformerTrajEncoder


class Pictures(gym.Env):
    """One image and no memory of what moved."""

    observation_space = gym.spaces.Box(0, 255, (36, 36, 3), np.uint8)
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros((36, 36, 3), np.uint8), {}

    def step(self, action):
        return np.zeros((36, 36, 3), np.uint8), 0.0, False, False, {}


def chosen(env, horizon=500, *args, **kwargs):
    return choose_settings(AMAGOEnv(env, env_name="E"), horizon, *args, **kwargs)


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


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Acrobot-v1", "FrozenLake-v1", "Pendulum-v1", "MountainCarContinuous-v0"])
def test_environments_of_gymnasium_whose_observation_is_the_state_need_no_memory(tmp_path, env_id):
    assert experiment(tmp_path, env_id, "--quiet").traj_encoder_type is FFTrajEncoder


def test_other_environments_get_memory_whatever_their_spaces():
    known, unknown = chosen(gym.make("CartPole-v1")), chosen(tiny.Bits())
    assert known.arguments["traj_encoder"] == "ff"
    assert unknown.arguments["traj_encoder"] == "transformer"
    assert "--memory none" in unknown.reason, "who knows better is told how to say so"


def test_a_wrapper_that_is_registered_with_gymnasiums_environment_may_hide_its_state():
    hide = gym.wrappers.FlattenObservation.wrapper_spec()
    gym.register("Hidden-v0", "gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=20, additional_wrappers=(hide,))
    gym.register("Short-v0", "gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=20)
    try:
        assert chosen(gym.make("Hidden-v0")).arguments["traj_encoder"] == "transformer"
        assert chosen(gym.make("Short-v0")).arguments["traj_encoder"] == "ff"
    finally:
        gym.registry.pop("Hidden-v0")
        gym.registry.pop("Short-v0")


def test_an_image_asks_for_memory():
    choice = chosen(Pictures())
    assert choice.arguments["traj_encoder"] == "transformer"
    assert "image" in choice.reason


@pytest.mark.parametrize(
    ("memory", "model"), [("none", FFTrajEncoder), ("gru", GRUTrajEncoder), ("transformer", TformerTrajEncoder)]
)
def test_memory_says_which_model(tmp_path, memory, model):
    gym.register("Bits-v0", lambda: tiny.Bits())
    try:
        assert experiment(tmp_path, "Bits-v0", "--memory", memory, "--quiet").traj_encoder_type is model
        assert experiment(tmp_path, "Bits-v0", "--memory", memory, "--quiet", "--no-choices").traj_encoder_type is model
    finally:
        gym.registry.pop("Bits-v0")


def test_the_sequence_model_may_be_named_as_before(tmp_path):
    assert experiment(tmp_path, "CartPole-v1", "--traj-encoder", "gru", "--quiet").traj_encoder_type is GRUTrajEncoder
    assert (
        experiment(tmp_path, "CartPole-v1", "--traj-encoder", "gru", "--memory", "gru", "--quiet").traj_encoder_type
        is GRUTrajEncoder
    )
    assert (
        experiment(tmp_path, "CartPole-v1", "--traj-encoder", "ff", "--memory", "none", "--quiet").traj_encoder_type
        is FFTrajEncoder
    )


@pytest.mark.parametrize(("memory", "model"), [("none", "gru"), ("gru", "ff"), ("gru", "transformer")])
@pytest.mark.parametrize("more", [[], ["--no-choices"]])
def test_memory_and_a_sequence_model_that_contradict_each_other(tmp_path, capsys, memory, model, more):
    argv = [
        "train",
        "CartPole-v1",
        "--run-name",
        "a",
        "--buffer-dir",
        str(tmp_path),
        "--memory",
        memory,
        "--traj-encoder",
        model,
    ]
    assert main([*argv, *more]) == 2
    message = capsys.readouterr().err
    assert f"--memory {memory}" in message
    assert f"--traj_encoder {model}" in message
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_memory_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "CartPole-v1", "--run-name", "a", "--buffer-dir", str(tmp_path), "--memory", "big"])
    assert stop.value.code == 2
    assert "'big'" in capsys.readouterr().err


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
    assert hard.settings == easy.settings | {"EpsilonGreedy.repeat": (1.0, 16.0), "EpsilonGreedy.randomize_eps": False}
    assert "EpsilonGreedy.repeat" not in easy.settings
    assert hard.arguments == easy.arguments | {"epochs": 60}, "what is found later is learned later"
    assert "EpsilonGreedy.repeat = (1.0, 16.0)" in hard.describe("Acrobot-v1", {})


def test_random_choices_are_tried_for_a_limited_time():
    ticks = iter(range(10_000))
    slow = AMAGOEnv(gym.make("Acrobot-v1"), env_name="E")
    assert choices.chance_tells_nothing(slow, clock=lambda: 0.0)
    assert not choices.chance_tells_nothing(slow, clock=lambda: next(ticks) * 1.0)
    assert next(ticks) == choices.TRIAL_SECONDS + 2, "one reading before the steps, and one before each"


class PaysLittle(tiny.Bits):
    """`Bits` whose rewards are multiplied by ``factor`` from step ``since`` on, and 0 before."""

    def __init__(self, factor, since=0):
        self._factor, self._since, self.steps = factor, since, 0

    def step(self, action):
        obs, reward, *rest = super().step(action)
        self.steps += 1
        return obs, reward * self._factor * (self.steps > self._since), *rest


@pytest.mark.parametrize(
    ("factor", "since", "memory", "small"),
    [
        (0.05, 0, "auto", True), (-0.05, 0, "gru", True), (0.05, 990, "auto", True), (0.051, 0, "auto", False), (1.0, 990, "auto", False),
        (0.0, 0, "auto", False), (0.05, 1000, "auto", False), (0.05, 0, "none", False),
    ],
)  # fmt: skip
def test_agents_with_memory_observe_small_rewards(factor, since, memory, small):
    choice = chosen(PaysLittle(factor, since), memory=memory)
    assert (choice.settings.get("InputNorm.skip_below") == 0.001) is small
    assert ("InputNorm.skip_below = 0.001" in choice.describe("E", {})) is small


class Breaks(PaysLittle):
    """`PaysLittle` whose step ``at`` (from 1 on) is wrong: ``mistake`` is raised, or is the reward."""

    def __init__(self, mistake, at):
        super().__init__(0.01)
        self.mistake, self.at = mistake, at

    def step(self, action):
        obs, reward, *rest = super().step(action)
        if self.steps != self.at:
            return obs, reward, *rest
        if isinstance(self.mistake, Exception):
            raise self.mistake
        return obs, self.mistake, *rest


@pytest.mark.parametrize("mistake", [ZeroDivisionError("mine"), None, "1 point"])
@pytest.mark.parametrize(("at", "small"), [(1, False), (50, True)])
def test_an_error_of_the_environment_is_left_to_the_start_of_the_run(mistake, at, small):
    assert ("InputNorm.skip_below" in chosen(Breaks(mistake, at)).settings) is small


def test_an_environment_that_pays_more_is_not_tried_for_long():
    env = PaysLittle(1.0)
    chosen(env)
    assert env.steps < 20, "until the first reward that is not 0"


@pytest.mark.parametrize(("agent_type", "scales"), [(amago.Agent, True), (MultiTaskAgent, False)])
def test_scalar_critics_learn_large_returns_in_units_of_their_size(agent_type, scales):
    choice = chosen(gym.make("CartPole-v1"), agent_type=agent_type)
    assert any("rescale_critics" in name for name in choice.settings) is scales


def test_the_kind_of_actions_decides_not_the_name():
    def same(a, b):
        return (a.arguments, a.settings) == (b.arguments, b.settings)

    assert same(chosen(gym.make("Acrobot-v1")), chosen(gym.make("MountainCar-v0")))
    assert same(chosen(gym.make("Pendulum-v1")), chosen(gym.make("MountainCarContinuous-v0")))
    assert not same(chosen(gym.make("CartPole-v1")), chosen(gym.make("Pendulum-v1")))
    assert same(chosen(tiny.Bits(), memory="none"), chosen(gym.make("CartPole-v1"))), "bits are not continuous"
    assert same(chosen(gym.make("FrozenLake-v1")), chosen(gym.make("CliffWalking-v1"))), "numbered states"
    assert not same(chosen(gym.make("FrozenLake-v1")), chosen(gym.make("CartPole-v1")))


def test_choices_reach_the_agent_and_the_run(tmp_path):
    e = experiment(tmp_path, "Pendulum-v1", "--quiet")
    choice = chosen(gym.make("Pendulum-v1"), 200)
    agent = agent_of(e)
    assert agent.gammas[-1].item() == pytest.approx(choice.settings["amago.agent.Agent.gamma"])
    assert agent.tau == choice.settings["amago.agent.Agent.tau"]
    assert agent.traj_encoder.emb_dim == choice.arguments["memory_size"]
    assert (e.parallel_actors, e.batch_size) == (choice.arguments["parallel_actors"], choice.arguments["batch_size"])
    assert e.lr_cooldown > 0


def test_arguments_and_files_win_over_choices(tmp_path, capsys):
    (tmp_path / "mine.gin").write_text(
        "Agent.tau = 0.123\nEpsilonGreedy.repeat = 2.0\namago.experiment.Experiment.lr_cooldown = 0.25\n"
    )
    e = experiment(
        tmp_path, "CartPole-v1", "--configs", str(tmp_path / "mine.gin"), "--batch-size", "7", "--memory-size", "32", "--lr", "0.002",
        "--batches-per-epoch", "3", "--max-seq-len", "5",
    )  # fmt: skip
    agent = agent_of(e)
    assert agent.tau == 0.123
    assert agent.traj_encoder.emb_dim == 32
    assert (e.batch_size, e.learning_rate, e.lr_cooldown, e.train_batches_per_epoch, e.max_seq_len) == (7, 0.002, 0.25, 3, 5)
    assert amago.envs.EpsilonGreedy(tiny.cartpole()).current_eps(np.zeros(1, int)).shape == (1,)
    assert "EpsilonGreedy.repeat = 2.0" in "\n".join(f"{k} = {v}" for k, v in config.bindings().items())
    printed = capsys.readouterr().out
    assert "--parallel_actors" in printed
    assert not any(
        f"--{name} " in printed for name in ("batch_size", "memory_size", "learning_rate", "grads_per_epoch", "max_seq_len")
    )


def test_what_was_chosen_is_printed_unless_quiet(tmp_path, capsys):
    experiment(tmp_path, "CartPole-v1")
    printed = capsys.readouterr().out
    for word in ("CartPole-v1", "without memory", "--traj_encoder ff", "Agent.gamma = 0.99", "Experiment.lr_cooldown = 0.6"):
        assert word in printed
    config.clear()
    experiment(tmp_path, "CartPole-v1", "--quiet")
    assert capsys.readouterr().out == ""


def test_what_is_printed_can_be_written_to_a_file(tmp_path, capsys):
    """Each of the bindings that are printed is a line of a gin file, so that a choice can be kept and changed."""
    first = agent_of(experiment(tmp_path, "Pendulum-v1"))
    bindings = capsys.readouterr().out.splitlines()[2].strip().split("; ")
    config.clear()
    (tmp_path / "kept.gin").write_text("\n".join(bindings))
    again = experiment(tmp_path, "Pendulum-v1", "--no-choices", "--quiet", "--configs", str(tmp_path / "kept.gin"))
    second = agent_of(again)
    assert first.options == second.options
    assert first.gammas.tolist() == second.gammas.tolist()


def test_no_choices_keeps_the_settings_of_the_library(tmp_path):
    e = experiment(tmp_path, "CartPole-v1", "--no-choices", "--quiet")
    assert e.traj_encoder_type is TformerTrajEncoder
    assert agent_of(e).options == amago.agent.options.ActorCriticOptions()
    assert e.lr_cooldown == 0.0
    assert library_settings(AMAGOEnv(tiny.Bits(), env_name="B"), 10).settings == {}


def test_another_agent_receives_the_options_that_it_has():
    choice = chosen(gym.make("CartPole-v1"), agent_type=MultiTaskAgent)
    assert choice.settings["amago.agent.MultiTaskAgent.gamma"] == 0.99
    assert not any(".agent.Agent." in name for name in choice.settings)
