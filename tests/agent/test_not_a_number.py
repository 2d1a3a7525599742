"""A reward or observation that is NaN: the update is skipped and counted, whatever the actions, and nothing of the agent changes."""

from types import SimpleNamespace

import gymnasium as gym
import pytest
import torch
from accelerate import Accelerator
from test_agent import AGENTS, SPACES, build, make_batch

from amago import config
from amago.nets.policy_dists import GMM, Beta, TanhGaussian
from amago.run.learner import Learner
from amago.run.optimizer import adamw, lr_schedule

ACTIONS = SPACES | {
    "multidiscrete": gym.spaces.MultiDiscrete([3, 2]),
    "tuple": gym.spaces.Tuple((gym.spaces.Discrete(3), gym.spaces.MultiBinary(2))),
    "dict": gym.spaces.Dict({"pick": gym.spaces.Discrete(3), "force": gym.spaces.Box(-1, 1, (2,))}),
}


def updater_of(agent):
    optimizer = adamw(agent.trainable_params, 1e-3, 0.0)
    learner = Learner(SimpleNamespace(grad_clip=1.0, ema_decay=0.0))
    learner.accelerator, learner.optimizer = Accelerator(cpu=True), optimizer
    learner.lr_schedule = lr_schedule(optimizer, 1, 10, 0.0)
    learner.use(agent)
    return learner


def update(agent, updater, batch):
    loss = agent.losses(batch, log_step=True)
    total = loss["actor"].mean() + loss["critic"].mean()
    total.backward()
    updater.update(log_step=False, loss=total)


@pytest.mark.parametrize("where", ["rews", "rl2s", "observation"])
@pytest.mark.parametrize("agent_type", AGENTS.values(), ids=AGENTS)
@pytest.mark.parametrize(
    ("actions", "dist"),
    [*((a, TanhGaussian) for a in ACTIONS), ("continuous", Beta), ("dict", Beta), ("continuous", GMM), ("dict", GMM)],
)
def test_the_update_is_skipped_and_counted(actions, dist, agent_type, where):
    config.bind({"Actor.continuous_dist_type": dist})
    torch.manual_seed(0)
    online_coeff = 0.0 if dist is GMM else 1.0  # it has no policy gradient
    agent = build(ACTIONS[actions], agent_type=agent_type, online_coeff=online_coeff, offline_coeff=1.0)
    updater, batch = updater_of(agent), make_batch(ACTIONS[actions])
    before = {k: v.clone() for k, v in agent.named_parameters()}
    broken = batch.obs["observation"] if where == "observation" else getattr(batch, where)
    broken[0, 1, 0] = torch.nan
    update(agent, updater, batch)
    assert (updater.skipped, updater.grad_steps) == (1, 0)
    for name, p in agent.named_parameters():
        assert p.equal(before[name]), name
    assert all(b.isfinite().all() for b in agent.buffers())
    update(agent, updater, make_batch(ACTIONS[actions]))
    assert (updater.skipped, updater.grad_steps) == (1, 1)
