"""EnvCreators in a vector environment, played by a loop that sharpens the policy and edits its memory (H, R, M)."""

import sys

import numpy as np
import torch
from small import SIZES, experiment, make_env

import amago
from amago.cli_utils import use_config
from amago.envs.amago_env import EnvCreator
from amago.envs.env_utils import DummyAsyncVectorEnv
from amago.utils import call_async_env, split_dict, stack_list_array_dicts

if __name__ == "__main__":
    use_config(SIZES)
    exp = experiment(val_interval=None)
    exp.start()
    exp.learn()
    policy = exp.policy
    policy.eval()
    policy.actor.policy_dist.clip_prob_high = 1.0
    creators = [
        EnvCreator(
            make_env=make_env, exploration_wrapper_type=None, save_trajs_to=sys.argv[1] + "/saved", save_every_low=4, save_every_high=6,
            save_trajs_as="npz",
        )
        for _ in range(3)
    ]  # fmt: skip
    envs = DummyAsyncVectorEnv(creators)
    assert creators[0].rl2_space["rl2"].shape == (4,) and creators[0].already_vectorized is False
    envs.reset()
    hidden = policy.traj_encoder.init_hidden_state(3, exp.DEVICE)
    assert isinstance(hidden, amago.nets.transformer.TformerHiddenState) and hidden.n_layers == 2
    for step in range(20):
        seen = call_async_env(envs, "current_timestep")
        obs = stack_list_array_dicts([s[0] for s in seen], axis=0, cat=True)
        rl2, time = (np.concatenate([s[i] for s in seen], 0) for i in (1, 2))
        inputs = [
            {k: torch.from_numpy(v).unsqueeze(1) for k, v in obs.items()},
            torch.from_numpy(rl2).unsqueeze(1),
            torch.from_numpy(time).unsqueeze(1),
        ]
        with torch.no_grad():
            action, hidden = policy.get_actions(
                obs=inputs[0], rl2s=inputs[1], time_idxs=inputs[2], hidden_state=hidden, sample=step % 2 == 0
            )
            assert action.shape == (3, 1, 1) and action.dtype == torch.uint8, (action.shape, action.dtype)
        _, reward, terminated, truncated, info = envs.step(action.squeeze(1).cpu().numpy())
        hidden = policy.traj_encoder.reset_hidden_state(
            hidden_state=hidden, dones=np.logical_or(terminated, truncated).reshape(-1)
        )
        assert len(split_dict(obs)) == 3
    key_cache, val_cache = hidden.key_cache, hidden.val_cache
    other = amago.nets.transformer.TformerHiddenState(
        key_cache=amago.nets.transformer.Cache(
            device=exp.DEVICE,
            dtype=torch.float32,
            layers=2,
            batch_size=3,
            max_seq_len=key_cache.max_seq_len,
            n_heads=2,
            head_dim=8,
        ),
        val_cache=amago.nets.transformer.Cache(exp.DEVICE, torch.float32, 2, 3, val_cache.max_seq_len, 2, 8),
        seq_lens=torch.zeros(3, dtype=torch.int32, device=exp.DEVICE),
    )
    other.key_cache.data[:] = key_cache.data
    other.val_cache.data[:] = val_cache.data
    other.seq_lens[:] = hidden.seq_lens
    assert torch.equal(other.seq_lens, hidden.seq_lens)
    with torch.no_grad():
        first = policy.get_state_embedding(*inputs, hidden_state=hidden)[0]
        second = policy.get_state_embedding(*inputs, hidden_state=other)[0]
    torch.testing.assert_close(first, second)
    call_async_env(envs, "save_finished_trajs")
    histories = call_async_env(envs, "return_history")
    assert sum(len(v) for h in histories for v in h.data.values()) == 6
    frames = call_async_env(envs, "total_frames")
    assert sum(frames) == 60, frames
    envs.close()
