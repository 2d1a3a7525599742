"""Exact resume with each setting that keeps a state and with all at once, where the critics' scale is not 1."""

import gymnasium as gym
import numpy as np
import pytest
import tiny
import torch

import amago
from amago import config
from amago.envs import AMAGOEnv
from amago.envs.exploration import BilevelEpsilonGreedy
from amago.loading import DiskTrajDataset

KEEPERS = {
    "average": ({}, {"ema_decay": 0.6}, {}),
    "scale": ({"Agent.rescale_critics": True}, {}, {}),
    "temperature": ({"Agent.entropy_target": 0.3}, {}, {}),
    "targets": ({"Agent.tau": 0.3, "Agent.use_target_actor": False}, {}, {}),
    "several batches": ({}, {"batches_per_update": 2}, {}),
    "warmup": ({}, {"lr_cooldown": 0.5, "actor_learning_rate": 1e-2}, {}),
    "exploration": ({"BilevelEpsilonGreedy.rollout_horizon": 20}, {"exploration_wrapper_type": BilevelEpsilonGreedy}, {}),
    "priorities": ({}, {}, {"sampling": "priority"}),
    "input norm": ({"FFTstepEncoder.normalize_inputs": False}, {}, {}),
}
TOGETHER = [tuple(KEEPERS)]


class Slope(gym.Env):
    """Fourteen steps without chance; the reward is 40 on one side, so that the critics' scale is not 1."""

    observation_space, action_space = gym.spaces.Box(-10, 10, (2,)), gym.spaces.Discrete(3)

    def _seen(self):
        return np.array([self._t / 10, self._x], np.float32)

    def reset(self, *, seed=None, options=None):
        self._t, self._x = 0, 0.0
        return self._seen(), {}

    def step(self, action):
        self._t, self._x = self._t + 1, float(np.clip(self._x + 0.3 * (int(action) - 1), -3, 3))
        return self._seen(), 40.0 * (self._x > 0.5), self._x > 2.5, self._t >= 14, {}


def slope():
    return AMAGOEnv(Slope(), env_name="Slope")


def run(root, names, stop_after=None, **fields):
    """Four epochs, or those up to ``stop_after``."""
    bindings, dataset = {}, {}
    for name in names:
        bindings |= KEEPERS[name][0]
        fields |= KEEPERS[name][1]
        dataset |= KEEPERS[name][2]
    config.clear()
    config.bind(bindings)
    return tiny.learned(
        root, slope, dataset=DiskTrajDataset(root, "run", **dataset), epochs=4, train_timesteps_per_epoch=40, callbacks=[tiny.StopAfter(stop_after)],
        train_batches_per_epoch=3, ckpt_interval=1, force_reset_train_envs_every=1, learning_rate=1e-2, **fields,
    )  # fmt: skip


def state(e):
    """What acts, what is trained, the moments of the optimizer."""
    found = {f"trained/{k}": v for k, v in tiny.weights(e).items()}
    with e.acting_weights():
        found |= {f"acting/{k}": v for k, v in tiny.weights(e).items()}
    for i, moments in e.optimizer.state_dict()["state"].items():
        found |= {f"optimizer/{i}/{k}": torch.as_tensor(v).clone() for k, v in moments.items()}
    return found


@pytest.mark.parametrize("names", [*((name,) for name in KEEPERS), *TOGETHER], ids="+".join)
def test_a_resumed_run_equals_one_that_was_not_interrupted(tmp_path, names):
    e = run(tmp_path / "straight", names)
    straight = state(e)
    if "scale" in names:
        assert e.policy.critics.output_scale > 1
    e.close()
    run(tmp_path / "halved", names, 2).close()
    e = run(tmp_path / "halved", names, resume="auto")
    assert not tiny.differing(straight, state(e))


@pytest.mark.parametrize("agent_type", [amago.Agent, amago.agent.MultiTaskAgent])
def test_reading_back_what_a_run_has_published_does_not_change_what_is_trained(tmp_path, agent_type):
    """Published weights are the average; training goes on from the trained ones, also after a resume."""
    fields = {"always_save_latest": True, "ema_decay": 0.6, "agent_type": agent_type}
    straight = state(run(tmp_path / "alone", (), **fields))
    run(tmp_path / "reading", (), 2, **fields, always_load_latest=True).close()
    e = run(tmp_path / "reading", (), **fields, always_load_latest=True, resume="auto")
    assert not tiny.differing(straight, state(e))
    e.read_latest_policy()
    assert not tiny.differing(straight, state(e))


def test_weights_without_a_scale_begin_a_run_with_one(tmp_path):
    e = run(tmp_path, (), 1, always_save_latest=True)
    plain = tiny.weights(e)
    e.close()
    e = tiny.started(tmp_path, slope, name="other", init_from=tmp_path / "run")
    config.bind({"Agent.rescale_critics": True})
    e = tiny.started(tmp_path, slope, name="scaled", init_from=tmp_path / "run")
    scaled = tiny.weights(e)
    assert scaled["critics.output_scale"] == scaled["target_critics.output_scale"] == 1.0
    assert not tiny.differing(plain, {k: scaled[k] for k in plain})


def test_a_partial_state_dict_changes_nothing_else(tmp_path):
    """`load_state_dict` with strict=False, as clients call it, leaves the scale as it is."""
    e = run(tmp_path, ("scale",), 1)
    before = tiny.weights(e)
    e.policy.load_state_dict({k: v for k, v in before.items() if k.startswith("actor.")}, strict=False)
    assert not tiny.differing(before, tiny.weights(e))
