"""A controller that plays one step at a time: a service that owns the clock, and asks the policy for one action per game and tick.

    python step_controller.py DIRECTORY

Written in the way of programs for the original system: the experiment is a means to build and load a policy, and to reach its
environments. It prints what it has seen as one line of JSON.
"""

import json
import os
import sys

import gin
import gymnasium as gym
import numpy as np
import torch

import amago
from amago import cli_utils
from amago.envs import AMAGO_ENV_LOG_PREFIX, AMAGOEnv
from amago.loading import DoNothingDataset
from amago.utils import call_async_env, stack_list_array_dicts

INF = float("inf")
LADDER = ("rookie", "veteran")


class Duel(gym.Env):
    """Guess the opponent's move, which it announces one tick before; eight ticks a match."""

    observation_space = gym.spaces.Dict(
        announced=gym.spaces.Box(0.0, 1.0, (3,), np.float32), clock=gym.spaces.Box(0.0, 1.0, (1,), np.float32)
    )
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.tick, self.won = 0, 0
        self.announced = int(self.np_random.integers(3))
        return self._obs(), {}

    def _obs(self):
        return {"announced": np.eye(3, dtype=np.float32)[self.announced], "clock": np.array([self.tick / 8], np.float32)}

    def step(self, action):
        right = int(action) == self.announced
        self.won += right
        self.tick += 1
        self.announced = int(self.np_random.integers(3))
        over = self.tick == 8
        return self._obs(), float(right), over, False, {f"{AMAGO_ENV_LOG_PREFIX} Rounds Won": self.won} if over else {}


class DuelEnv(AMAGOEnv):
    """A game on a ladder. It can be paused from outside, and says what it is."""

    def __init__(self, rank):
        super().__init__(Duel(), env_name=f"duel/{LADDER[rank]}")
        self.paused_for = 0

    def take_long_break(self, seconds):
        self.paused_for += seconds
        return self.paused_for

    def rating(self):
        return 1000 + 50 * LADDER.index(self.env_name.rpartition("_")[2])


def make(rank):
    return lambda: DuelEnv(rank)


def experiment(directory, name, **fields):
    settings = {
        "run_name": name, "ckpt_base_dir": directory, "max_seq_len": 8, "dataset": DoNothingDataset(),
        "tstep_encoder_type": cli_utils.switch_tstep_encoder({}, arch="ff", d_hidden=16, d_output=8, n_layers=1),
        "traj_encoder_type": cli_utils.switch_traj_encoder({}, arch="transformer", memory_size=16, layers=1),
        "agent_type": cli_utils.switch_agent({}, agent="agent"), "make_train_env": tuple(make(i % 2) for i in range(4)),
        "make_val_env": tuple(make(i % 2) for i in range(4)), "parallel_actors": 4, "env_mode": "sync", "verbose": False,
        "val_timesteps_per_epoch": 0, "train_timesteps_per_epoch": 0, "train_batches_per_epoch": 0, "epochs": 0,
        "start_learning_at_epoch": INF, "start_collecting_at_epoch": INF, "val_interval": None, "ckpt_interval": None,
        "always_save_latest": False, "log_to_wandb": False, "sample_actions_val": False,
    }  # fmt: skip
    return amago.Experiment(**settings | fields)


class Controller:
    """Plays matches on four boards with a loop of its own.

    ``boards`` is a pool of environments; ``policy`` chooses, and keeps a memory of each board.
    """

    def __init__(self, boards, policy, device):
        self.boards, self.policy, self.device = boards, policy, device
        self.boards.reset()
        self.hidden = policy.traj_encoder.init_hidden_state(4, device)
        self.score, self.matches = np.zeros(4), np.zeros(4, int)

    def tick(self):
        seen = call_async_env(self.boards, "current_timestep")
        obs, rl2s, times = zip(*seen)
        obs = {k: torch.from_numpy(v).to(self.device) for k, v in stack_list_array_dicts(list(obs)).items()}
        rl2s, times = (torch.from_numpy(np.stack(x)).to(self.device) for x in (rl2s, times))
        with torch.no_grad():
            actions, self.hidden = self.policy.get_actions(obs, rl2s, times, hidden_state=self.hidden, sample=False)
        assert (actions.shape, actions.dtype) == ((4, 1, 1), torch.uint8)
        _, rewards, terminated, truncated, _ = self.boards.step(actions.squeeze(1).cpu().numpy())
        over = terminated | truncated
        self.score += rewards
        self.matches += over
        if over.any():
            self.hidden = self.policy.traj_encoder.reset_hidden_state(self.hidden, over)


class Copycat(torch.nn.Module):
    """A fixed strategy, in place of the policy: play what was announced."""

    class NoMemory(torch.nn.Module):
        def init_hidden_state(self, batch_size, device):
            return {"ticks": torch.zeros(batch_size, device=device)}

        def reset_hidden_state(self, hidden_state, dones):
            hidden_state["ticks"][torch.as_tensor(dones)] = 0
            return hidden_state

    def __init__(self):
        super().__init__()
        self.traj_encoder = self.NoMemory()

    def get_actions(self, obs, rl2s, time_idxs, hidden_state=None, sample=True):
        hidden_state["ticks"] += 1
        return obs["announced"].argmax(-1, keepdim=True).to(torch.uint8), hidden_state


def main(directory):
    gin.clear_config()
    cli_utils.use_config(
        {"amago.agent.Multigammas.discrete": [0.9], "TformerTrajEncoder.d_model": 16, "TformerTrajEncoder.n_heads": 2}, []
    )
    told = {}

    # weights of another run, saved as a plain state dict
    e = experiment(directory, "source")
    assert e.DEVICE.type in ("cpu", "cuda")
    e.start()
    weights = os.path.join(directory, "weights.pt")
    torch.save(e.policy.state_dict(), weights)
    e.close()

    for mode in ("sync", "async"):
        e = experiment(directory, f"controller_{mode}")
        e.env_mode, e.async_env_mp_context = mode, "forkserver"
        e.start()
        e.load_checkpoint_from_path(weights, is_accelerate_state=False)
        e.policy_aclr.eval()
        told[f"{mode} ratings"] = call_async_env(e.val_envs, "rating")
        call_async_env(e.val_envs, "take_long_break", 5)
        told[f"{mode} breaks"] = call_async_env(e.val_envs, "take_long_break", 10)

        controller = Controller(e.val_envs, e.policy, e.DEVICE)
        for _ in range(16):
            controller.tick()
        told[f"{mode} matches"] = controller.matches.tolist()
        histories = call_async_env(e.val_envs, "return_history")
        told[f"{mode} score agrees"] = [sum(map(sum, h.data.values())) for h in histories] == controller.score.tolist()
        told[f"{mode} names"] = sorted({name for h in histories for name in h.data})
        call_async_env(e.val_envs, "reset_stats")

        # the same through the library's own loop, without exploration, in two halves
        e.val_envs.reset()
        hidden, (returns, _) = e.interact(e.val_envs, 5, sample=False)
        told[f"{mode} halves"] = [sum(len(v) for v in r.data.values()) for r in returns]
        hidden, (returns, specials) = e.interact(e.val_envs, 3, hidden_state=hidden, sample=False)
        told[f"{mode} halves"] += [sum(len(v) for v in r.data.values()) for r in returns]
        metrics = e.policy_metrics(returns, specials)
        told[f"{mode} metrics"] = sorted(metrics)

        # and with a fixed strategy in place of the policy
        e.policy_aclr = Copycat()
        e.val_envs.reset()
        _, (returns, specials) = e.interact(e.val_envs, 8)
        told[f"{mode} copycat"] = e.policy_metrics(returns, specials)["Average Total Return (Across All Env Names)"]
        told[f"{mode} rounds"] = e.policy_metrics(returns, specials)["Average Rounds Won in duel_rookie"]
        e.close()
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
