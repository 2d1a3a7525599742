"""A duel of creatures, told in words and numbers, and the wrapper that an agent plays it through."""

import gymnasium as gym
import numpy as np

import amago
from amago.envs import AMAGO_ENV_LOG_PREFIX
from amago.utils import amago_warning

BEATS = {"fire": "grass", "water": "fire", "grass": "water"}
WORDS = ("<none>", "<player>", "<opponent>", "<fainted>", "guarding", "tired", *BEATS, "<turn>", "one", "two", "three")
TEXT_LENGTH, NUMBERS, ACTIONS = 8, 4, 3  # attack, guard, heal


def tokenize(words):
    found = [WORDS.index(w) if w in WORDS else -1 for w in words.split()]
    return np.array((found + [0] * TEXT_LENGTH)[:TEXT_LENGTH], dtype=np.int32)


class Duel(gym.Env):
    """The text is a string until it is tokenized below; the state says which actions are legal."""

    def __init__(self, battle_format="gen1", turn_limit=12, opponents=("random", "brave")):
        self.observation_space = gym.spaces.Dict(
            {
                "numbers": gym.spaces.Box(low=-10.0, high=10.0, shape=(NUMBERS,), dtype=np.float32),
                "text_tokens": gym.spaces.Box(low=-1, high=len(WORDS), shape=(TEXT_LENGTH,), dtype=np.int32),
            }
        )
        self.action_space = gym.spaces.Discrete(ACTIONS)
        self.battle_format, self.turn_limit, self.opponents = battle_format, turn_limit, opponents
        self.rng = np.random.default_rng(0)

    def _observe(self):
        words = f"<player> {self.mine} <opponent> {self.theirs} <turn> {('one', 'two', 'many')[min(self.turn, 2)]}"
        numbers = [*self.health, self.heals, self.turn / self.turn_limit]
        return {"text_tokens": tokenize(words), "numbers": np.array(numbers, dtype=np.float32)}

    def legal(self):
        return [0, 1] + [2] * (self.heals > 0 and self.health[0] < 1)

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.mine, self.theirs = (str(element) for element in self.rng.choice(list(BEATS), 2))
        self.opponent = str(self.rng.choice(self.opponents))
        self.health, self.turn, self.heals = [1.0, 1.0], 0, 2
        return self._observe(), {"legal_actions": self.legal()}

    def step(self, action):
        assert isinstance(action, int), f"the game takes a number, got {type(action)}"
        valid = action in self.legal()
        action, self.turn, before = action if valid else 0, self.turn + 1, self.health[1]
        if action == 0:
            self.health[1] -= 0.4 if BEATS[self.mine] == self.theirs else 0.2
        elif action == 2:
            self.health[0], self.heals = min(1.0, self.health[0] + 0.5), self.heals - 1
        hit = 0.3 if self.opponent == "brave" or self.rng.random() < 0.5 else 0.0
        self.health[0] -= hit / 2 if action == 1 else hit
        lost, won = (health <= 0 for health in self.health)
        reward = before - max(self.health[1], 0.0) + (1.0 if won else -1.0 if lost else 0.0)
        over, late = won or lost, self.turn >= self.turn_limit
        info = {"legal_actions": self.legal(), "valid": valid} | ({"won": won} if over or late else {})
        return self._observe(), reward, over, late and not over, info


class DuelAMAGOEnv(amago.envs.AMAGOEnv):
    """Adds the mask of illegal actions, names itself after format and opponent, and logs what happened."""

    def __init__(self, battle_format="gen1", **kwargs):
        super().__init__(env=Duel(battle_format, **kwargs), env_name=None, batched_envs=1)
        self.observation_space["illegal_actions"] = gym.spaces.Box(low=0, high=1, shape=(ACTIONS,), dtype=bool)
        if self.env.unwrapped.turn_limit < 3:
            amago_warning(f"a duel of {self.env.unwrapped.turn_limit} turns is short")
        self.valid = []

    @property
    def env_name(self):
        return f"{self.env.get_wrapper_attr('battle_format')}_vs_{self.env.get_wrapper_attr('opponent')}"

    def _add_illegal_actions(self, obs, info):
        illegal = np.ones((ACTIONS,), dtype=bool)
        illegal[info["legal_actions"]] = False
        obs["illegal_actions"] = illegal

    def inner_reset(self, *args, **kwargs):
        obs, info = self.env.reset(*args, **kwargs)
        self._add_illegal_actions(obs, info)
        self.valid = []
        return obs, info

    def inner_step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._add_illegal_actions(obs, info)
        return obs, reward, terminated, truncated, info

    def step(self, action):
        timestep, reward, terminated, truncated, info = super().step(action)
        self.valid.append(float(info["valid"]))
        if terminated[0] or truncated[0]:
            info[f"{AMAGO_ENV_LOG_PREFIX} Valid Actions"] = np.array(self.valid)
            info[f"{AMAGO_ENV_LOG_PREFIX} Win Rate"] = float(info["won"])
        return timestep, reward, terminated, truncated, info
