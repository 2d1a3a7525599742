"""The agents of the golden vectors, with their weights and batches."""

import gymnasium as gym
import numpy as np
import torch
from golden import load

from amago import config
from amago.agent import Agent, MultiTaskAgent, exp_filter
from amago.loading import Batch
from amago.nets.traj_encoders import TformerTrajEncoder
from amago.nets.tstep_encoders import FFTstepEncoder
from amago.policy.load import adapt_weights

TINY = {
    "FFTstepEncoder.n_layers": 1, "FFTstepEncoder.d_hidden": 16, "FFTstepEncoder.d_output": 12, "TformerTrajEncoder.d_model": 16,
    "TformerTrajEncoder.n_heads": 4, "TformerTrajEncoder.d_ff": 32, "TformerTrajEncoder.n_layers": 2, "TformerTrajEncoder.dropout_ff": 0.0,
    "TformerTrajEncoder.dropout_emb": 0.0, "Actor.n_layers": 2, "Actor.d_hidden": 16, "NCritics.n_layers": 2, "NCritics.d_hidden": 16,
    "NCriticsTwoHot.n_layers": 2, "NCriticsTwoHot.d_hidden": 16, "NCriticsTwoHot.min_return": -100.0, "NCriticsTwoHot.max_return": 500.0,
    "NCriticsTwoHot.output_bins": 32, "Multigammas.discrete": [0.5, 0.9],
}  # fmt: skip
CASES = {
    "agent_discrete": (Agent, {}, {}),
    "agent_discrete_nstep3": (
        Agent,
        {"n_step": 3, "offline_coeff": 1.0, "fbc_filter_func": exp_filter},
        {"exp_filter.clip_weights_high": None},
    ),
    "multitask_discrete": (
        MultiTaskAgent,
        {},
        {"Discrete.clip_prob_low": 1e-6, "Discrete.clip_prob_high": 1.0, "NCriticsTwoHot.clamp_labels": False},
    ),
}


def golden_agent(name):
    arrays, weights, _ = load(name)
    agent_type, options, bindings = CASES[name]
    config.parse_files(["zoo/original"])
    config.bind(TINY | bindings)
    agent = agent_type(
        obs_space=gym.spaces.Dict({"observation": gym.spaces.Box(-np.inf, np.inf, (5,), np.float32)}),
        rl2_space=gym.spaces.Box(-np.inf, np.inf, (5,), np.float32),
        action_space=gym.spaces.Discrete(4),
        max_seq_len=9,  # an actor remembers all observations of the vectors
        tstep_encoder_type=FFTstepEncoder,
        traj_encoder_type=TformerTrajEncoder,
        num_critics=1,
        **options,
    )
    theirs = {k: torch.as_tensor(v) for k, v in weights.items()}
    agent.load_state_dict(adapt_weights(theirs, agent), strict=True)
    a = {k: torch.as_tensor(v) for k, v in arrays.items()}
    return agent.train(), golden_batch(a), a


def golden_batch(a):
    return Batch(
        obs={"observation": a["batch/observation"]}, rl2s=a["batch/rl2s"], rews=a["batch/rews"], dones=a["batch/dones"],
        actions=a["batch/actions"], time_idxs=a["batch/time_idxs"], mask=a["mask"],
    )  # fmt: skip
