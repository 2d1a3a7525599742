"""Options of agents: wrong values and contradictions are refused by name and value; a signature shows them all."""

import dataclasses
import inspect
import math

import gymnasium as gym
import pytest
from messages import naming
from test_agent import AGENTS, build

from amago import config
from amago.agent import ActorCriticOptions, Agent, MultiTaskAgent, MultiTaskOptions
from amago.nets.actor_critic import NCritics, NCriticsTwoHot
from amago.nets.policy_dists import GMM

SEVERAL = gym.spaces.Tuple((gym.spaces.Discrete(3), gym.spaces.MultiBinary(2), gym.spaces.Box(-1, 1, (2,))))
OFFLINE = {"online_coeff": 0.0, "offline_coeff": 1.0}
MULTI = {"agent_type": MultiTaskAgent}
REFUSED = [
    ({"tau": 0.0}, ("tau=0.0", "(0, 1]")),
    ({"num_critics": 0}, ("num_critics=0",)),
    ({"n_step": 1.5}, ("n_step=1.5",)),
    ({"offline_coeff": -1.0}, ("offline_coeff=-1.0",)),
    ({"online_coeff": 0.0, "offline_coeff": 0.0}, ("online_coeff", "offline_coeff", "both 0")),
    ({"reward_multiplier": 0.0}, ("reward_multiplier=0.0",)),
    ({"rollout_gamma_idx": 7}, ("rollout_gamma_idx=7", "0.1", "0.999")),
    ({"gamma": 1.1}, ("gamma=1.1",)),
    ({"pass_obs_keys_to_actor": ["legal"]}, (["legal"], ["mask", "observation"])),
    ({"targets": "q_lambda"}, ("targets='q_lambda'", "'tree_backup'")),
    ({"targets": "tree_backup", "n_step": 3}, ("n_step=3", "targets='tree_backup'")),
    ({"targets": "tree_backup", "kind": "continuous"}, ("targets='tree_backup'", "Box", "'n_step'")),
    ({"trace_lambda": 1.5}, ("trace_lambda=1.5",)),
    ({"burn_in": -1}, ("burn_in=-1",)),
    ({"burn_in": 8}, ("burn_in=8", "max_seq_len=8")),
    ({"bootstrap_context": 0}, ("bootstrap_context=0",)),
    ({"bootstrap_context": 9}, ("bootstrap_context=9", "max_seq_len=8")),
    ({"rescale_critics": True, "popart": False}, ("rescale_critics=True", "popart=False")),
    ({"rescale_critics": True} | MULTI, ("rescale_critics=True", "critic_type", "NCriticsTwoHot")),
    ({"critic_type": NCriticsTwoHot}, ("critic_type=NCriticsTwoHot", "MultiTaskAgent")),
    ({"critic_type": NCritics} | MULTI, ("critic_type=NCritics", "NCriticsTwoHot")),
    ({"entropy_target": 0.5} | OFFLINE, ("entropy_target=0.5", "online_coeff=0")),
    ({"entropy_target": 1.0}, ("entropy_target=1.0", "share")),
    ({"entropy_target": 1.5, "kind": "multibinary"}, ("entropy_target=1.5", "share")),
    ({"entropy_target": 0.7, "kind": "continuous"}, ("entropy_target=0.7", "0.693")),
    ({"entropy_target": math.nan, "kind": "continuous"}, ("entropy_target=nan",)),
    ({"entropy_coeff": 0.0}, ("entropy_coeff=0.0",)),
    ({"entropy_lr": 0.0}, ("entropy_lr=0.0",)),
    ({"entropy_coeff": 0.5} | MULTI, ("entropy_coeff=0.5", "online_coeff=0")),
]


def test_wrong_options_are_refused_by_name():
    for options, words in REFUSED:
        with pytest.raises(ValueError, match=naming(*words)):
            build(options.get("kind", "discrete"), **{k: v for k, v in options.items() if k != "kind"})
    with pytest.raises(TypeError, match="gama"):
        build("discrete", gama=0.9)
    with pytest.raises(ValueError, match=naming("Agent", "gama", "gamma")):
        config.bind({"Agent.gama": 0.9})


def test_what_does_not_fit_the_actions_or_the_data_is_refused():
    for options, words in (({"entropy_target": 0.5}, ("Tuple", "entropy_coeff")), ({"targets": "tree_backup"}, ("Tuple",))):
        with pytest.raises(ValueError, match=naming(*(f"{k}={v!r}" for k, v in options.items()), *words)):
            build(SEVERAL, **options)
    assert build(SEVERAL, entropy_coeff=0.5).temperature is not None


@pytest.mark.parametrize("agent_type", AGENTS.values(), ids=AGENTS)
def test_a_policy_gradient_without_reparametrised_samples_is_refused_at_the_start(agent_type):
    config.bind({"Actor.continuous_dist_type": GMM})
    with pytest.raises(ValueError, match=naming("online_coeff=0.5", "GMM", f"{agent_type.__name__}.online_coeff = 0")):
        build("continuous", agent_type=agent_type, online_coeff=0.5)
    build("discrete", agent_type=agent_type, online_coeff=0.5)  # has no continuous distribution


@pytest.mark.parametrize("agent_type", AGENTS.values(), ids=AGENTS)
def test_the_signature_shows_every_option_with_its_default(agent_type):
    options_type = {Agent: ActorCriticOptions, MultiTaskAgent: MultiTaskOptions}[agent_type]
    parameters = list(inspect.signature(agent_type).parameters.values())
    spaces_and_parts = "obs_space rl2_space action_space max_seq_len tstep_encoder_type traj_encoder_type"
    assert [p.name for p in parameters[:6]] == spaces_and_parts.split()
    assert {p.name: p.default for p in parameters[6:]} == dataclasses.asdict(options_type())
    assert list(config.signature_of(f"amago.agent.{agent_type.__name__}")) == [p.name for p in parameters]
