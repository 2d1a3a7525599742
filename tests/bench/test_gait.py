"""Velocities of collected cheetahs: hidden targets are found from rewards, and rollouts are cut apart where they end."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from benchmarks.suite import gait

STEPS = 200


def _file(path, targets, follow):
    """Rollouts that run at `follow` times their target, with noise; (velocities, actions, rewards) as HalfCheetahVel has them."""
    rng = np.random.default_rng(0)
    observations, actions, rewards = [], [], []
    for target in targets:
        velocities = follow * target + 0.1 * rng.standard_normal(STEPS + 1)
        obs = rng.standard_normal((STEPS + 1, 19))
        obs[:, gait.VELOCITY] = velocities
        action = rng.uniform(-0.9, 0.9, (STEPS, 6))
        action[:, 0] = 1.0
        error = np.abs(velocities[1:] + 0.02 * rng.standard_normal(STEPS) - target)  # the mean over the step is not its end
        observations.append(obs)
        actions.append(action)
        rewards.append(-error - 0.05 * (action**2).sum(-1))
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(
        {
            "obs/observation": np.concatenate(observations).astype(np.float32),
            "actions": np.concatenate(actions).astype(np.float32),
            "rews": np.concatenate(rewards)[:, None].astype(np.float32),
            "ep_offsets": np.arange(len(targets) + 1) * STEPS,
        },
        path,
    )


@pytest.mark.parametrize(("follow", "velocity"), [(0.0, 0.0), (0.8, 1.2)])
def test_rows_tell_followers_from_those_that_stand(tmp_path, capsys, follow, velocity):
    for i in range(3):
        _file(tmp_path / f"run/buffer/fifo/{i}.safetensors", [0.0, 1.0, 2.0, 3.0], follow)
    assert gait.main([str(tmp_path / "run"), "--files", "2"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(r["rollouts"], r["steps"]) for r in rows] == [(8, 1600), (4, 2400)]
    for row in rows:
        assert row["standing"] == pytest.approx(1.5, abs=0.03)
        assert row["velocity"] == pytest.approx(velocity, abs=0.05)
        assert row["slope"] == pytest.approx(follow, abs=0.05)
        assert row["error"] == pytest.approx(1.5 * (1 - follow), abs=0.1)
        assert row["stuck"] == pytest.approx(1 / 6, abs=0.001)
