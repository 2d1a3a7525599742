import gymnasium as gym
import numpy as np
import torch

import amago
from amago.agent import Agent, MultiTaskAgent
from amago.cli_utils import use_config
from amago.nets.traj_encoders import GRUTrajEncoder
from amago.nets.tstep_encoders import FFTstepEncoder

use_config(
    {"FFTstepEncoder.d_hidden": 16, "FFTstepEncoder.d_output": 12, "GRUTrajEncoder.d_hidden": 16, "GRUTrajEncoder.d_output": 16}
    | {"Actor.d_hidden": 16, "NCritics.d_hidden": 16, "NCriticsTwoHot.d_hidden": 16, "NCriticsTwoHot.output_bins": 16}
)
OBS = gym.spaces.Dict({"observation": gym.spaces.Box(-9, 9, (4,), np.float32)})
RL2 = gym.spaces.Box(-np.inf, np.inf, (4,))
B, L, G, C = 3, 6, 7, 4


def build(cls=Agent, **options):
    return cls(
        obs_space=OBS, rl2_space=RL2, action_space=gym.spaces.Discrete(3), max_seq_len=8, tstep_encoder_type=FFTstepEncoder,
        traj_encoder_type=GRUTrajEncoder, **options,
    )  # fmt: skip


def batch():
    actions = torch.nn.functional.one_hot(torch.randint(3, (B, L)), 3).float()
    rews = torch.randn(B, L, 1)
    rl2s = torch.cat((torch.zeros(B, 1, 4), torch.cat((rews, actions), -1)), 1)
    rl2s[0, -2:] = 4.0
    return amago.loading.Batch(
        obs={"observation": torch.randn(B, L + 1, 4)}, rl2s=rl2s, rews=rews, dones=torch.zeros(B, L, 1, dtype=torch.bool), actions=actions,
        time_idxs=torch.arange(L + 1)[None, :, None].expand(B, -1, 1),
    )  # fmt: skip


# fact: agents are built in this order, heads by these keywords
calls = []


class Mine(Agent):
    def init_encoders(self):
        calls.append("encoders")
        super().init_encoders()

    def init_actor_critic(self):
        calls.append("heads")
        assert self.actor_type
        assert self.critic_type
        super().init_actor_critic()

    def init_extra_networks(self):
        calls.append("extra")
        super().init_extra_networks()

    def hard_sync_targets(self):
        calls.append("sync")
        super().hard_sync_targets()


build(Mine)
assert calls == ["encoders", "heads", "extra", "sync"]


class Actor(amago.nets.actor_critic.Actor):
    def __init__(self, state_dim, action_dim, discrete, gammas, **kwargs):
        super().__init__(state_dim=state_dim, action_dim=action_dim, discrete=discrete, gammas=gammas, **kwargs)


build(actor_type=Actor)

# fact: attributes
agent = build()
NAMES = """
tstep_encoder traj_encoder actor critics target_actor target_critics maximized_critics popart gammas pad_val discrete
multibinary action_dim state_dim obs_space rl2_space action_space num_critics num_critics_td fbc_filter_func
reward_multiplier tau online_coeff offline_coeff critic_loss_weight n_step fake_filter actor_type critic_type _nstep_fn
pass_obs_keys_to_actor update_info
"""
for name in NAMES.split():
    assert hasattr(agent, name), name
assert (agent.pad_val, agent.discrete, agent.multibinary, agent.action_dim, agent.state_dim) == (4.0, True, False, 3, 16)
assert len(agent.pass_obs_keys_to_actor) == 0
assert type(agent.gammas) is torch.Tensor

# fact: the loss is a scalar; metrics are in update_info
for cls in (Agent, MultiTaskAgent):
    agent = build(cls)
    loss = agent.forward(batch(), log_step=True)
    assert loss.ndim == 0
    loss.backward()
    names = {"Critic Loss", "Actor Loss", "Sequence Length", "Batch Size (in Timesteps)", "Unmasked Batch Size (in Timesteps)"}
    assert names <= set(agent.update_info), names - set(agent.update_info)
    first = agent.update_info
    agent(batch(), log_step=False)
    assert agent.update_info is not first
    norms = agent.get_grad_norms()
    assert {"Actor Grad Norm", "Critic Grad Norm", "TrajEncoder Grad Norm", "TstepEncoder Grad Norm"} <= set(norms)

# fact: copies of networks
agent = build()
params = list(agent.trainable_params)
assert params
online, target = agent.actor, agent.target_actor
with torch.no_grad():
    for p in online.parameters():
        p.add_(1.0)
agent._ema_copy(target, online, tau=0.5)
agent._full_copy(target, online)
for a, b in zip(online.parameters(), target.parameters()):
    assert torch.equal(a, b)
agent.hard_sync_targets()
agent.soft_sync_targets()
agent.on_checkpoint_loaded(is_resume=False)

# fact: parts for those who override forward
agent = build()
data = batch()
state, _ = agent.get_state_embedding(data.obs, data.rl2s, data.time_idxs)
dist = agent.actor(state)
assert agent._sample_k_actions(dist, 2).shape == (2, B, L + 1, G, 3)
critic_mask, r = torch.ones(B, L, C, G, 1), torch.randn(B, L, 1, G, 1)
assert agent._td_stats(
    critic_mask, torch.randn(B, L, C, G, 1), torch.randn(B, L, C, G, 1), r,
    data.dones[:, :, None, None].expand(B, L, 1, G, 1), r, r,
)  # fmt: skip
mask = torch.ones(B, L, 1)
loss = agent._compute_loss(data, torch.ones(B, L, G, 1), torch.ones(B, L, C, G, 1), mask)
assert loss.ndim == 0

# fact: discounts, and kinds of actions
from amago.agent import Multigammas, get_action_dim_and_type

gammas = Multigammas(discrete=[0.5], continuous=[0.6, 0.7])
assert (list(gammas.discrete), list(gammas.continuous)) == ([0.5], [0.6, 0.7])
assert get_action_dim_and_type(gym.spaces.Discrete(3)) == (3, True, False)
assert get_action_dim_and_type(gym.spaces.MultiBinary(3)) == (3, False, True)
assert get_action_dim_and_type(gym.spaces.Box(-1, 1, (2,))) == (2, False, False)
