"""A reward or observation that is NaN: the update is skipped and counted, whatever the actions, and nothing of the agent changes."""

from types import SimpleNamespace

import gymnasium as gym
import pytest
import torch
from accelerate import Accelerator
from test_agent import AGENTS, SMALL

from amago import config
from amago.loading import Batch
from amago.nets.policy_dists import GMM, Beta, TanhGaussian
from amago.nets.traj_encoders import FFTrajEncoder
from amago.nets.tstep_encoders import FFTstepEncoder
from amago.run.learner import Learner
from amago.run.optimizer import adamw, lr_schedule
from amago.spaces import action_spec, rl2_space

ACTIONS = {
    "discrete": gym.spaces.Discrete(4),
    "continuous": gym.spaces.Box(-1, 1, (3,)),
    "multibinary": gym.spaces.MultiBinary(5),
    "multidiscrete": gym.spaces.MultiDiscrete([3, 2]),
    "tuple": gym.spaces.Tuple((gym.spaces.Discrete(3), gym.spaces.MultiBinary(2))),
    "dict": gym.spaces.Dict({"pick": gym.spaces.Discrete(3), "force": gym.spaces.Box(-1, 1, (2,))}),
}
OBS = gym.spaces.Dict({"observation": gym.spaces.Box(-1, 1, (6,))})


def make_batch(spec, b=3, length=5):
    actions = torch.zeros(b, length, spec.dim)
    for part in spec.parts:
        actions[..., part.vector.start] = 1.0
    return Batch(
        obs={"observation": torch.randn(b, length + 1, 6)}, rl2s=torch.randn(b, length + 1, 1 + spec.dim),
        rews=torch.randn(b, length, 1), dones=torch.zeros(b, length, 1, dtype=torch.bool), actions=actions,
        time_idxs=torch.arange(length + 1)[None, :, None].expand(b, -1, -1), mask=torch.ones(b, length + 1, 1, dtype=torch.bool),
    )  # fmt: skip


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
    online_coeff = 0.0 if dist is GMM else 1.0  # it has no policy gradient
    config.bind(SMALL | {"Actor.continuous_dist_type": dist})
    torch.manual_seed(0)
    space = ACTIONS[actions]
    spec = action_spec(space)
    agent = agent_type(
        OBS, rl2_space(spec), space, 8, FFTstepEncoder, FFTrajEncoder, online_coeff=online_coeff, offline_coeff=1.0
    )
    updater, batch = updater_of(agent), make_batch(spec)
    before = {k: v.clone() for k, v in agent.named_parameters()}
    broken = batch.obs["observation"] if where == "observation" else getattr(batch, where)
    broken[0, 1, 0] = torch.nan
    update(agent, updater, batch)
    assert (updater.skipped, updater.grad_steps) == (1, 0)
    for name, p in agent.named_parameters():
        assert p.equal(before[name]), name
    assert all(b.isfinite().all() for b in agent.buffers())
    update(agent, updater, make_batch(spec))
    assert (updater.skipped, updater.grad_steps) == (1, 1)
