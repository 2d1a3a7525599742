"""A duel of creatures, told in words and numbers, and the wrapper that an agent plays it through."""

import gymnasium as gym
import numpy as np

import amago
from amago.envs import AMAGO_ENV_LOG_PREFIX
from amago.utils import amago_warning

ELEMENTS = ("fire", "water", "grass")  # each beats the next one but one
WORDS = ("<none>", "<player>", "<opponent>", "<fainted>", "guarding", "tired", *ELEMENTS, "<turn>", "one", "two", "three")
TEXT_LENGTH, NUMBERS, ACTIONS = 8, 5, 5  # attack, guard, heal, send the other, charge


def tokenize(words):
    found = [WORDS.index(w) if w in WORDS else -1 for w in words.split()]
    return np.array((found + [0] * TEXT_LENGTH)[:TEXT_LENGTH], dtype=np.int32)


class Duel(gym.Env):
    """The text is a string until it is tokenized below; the state says which actions are legal."""

    metadata = {"render_modes": ["ansi"]}

    def __init__(self, battle_format="gen1", turn_limit=12, opponents=("random", "brave")):
        self.observation_space = gym.spaces.Dict(
            {
                "numbers": gym.spaces.Box(low=-10.0, high=10.0, shape=(NUMBERS,), dtype=np.float32),
                "text_tokens": gym.spaces.Box(low=-1, high=len(WORDS), shape=(TEXT_LENGTH,), dtype=np.int32),
            }
        )
        self.action_space = gym.spaces.Discrete(ACTIONS)
        self.battle_format, self.turn_limit, self.opponents = battle_format, turn_limit, opponents
        self.breaks = 0
        self.rng = np.random.default_rng(0)

    def take_long_break(self):
        self.breaks += 1
        return self.breaks

    def _observe(self):
        mine, theirs = self.team[0], self.foe
        words = f"<player> {mine[0]} <opponent> {theirs[0]} <turn> {('one', 'two', 'many')[min(self.turn, 2)]}"
        numbers = [mine[1], self.team[1][1], theirs[1], self.heals, self.turn / self.turn_limit]
        return {"text_tokens": tokenize(words), "numbers": np.array(numbers, dtype=np.float32)}

    def legal(self):
        can_send = self.team[1][1] > 0
        return [0, 1, 4] + ([2] if self.heals and self.team[0][1] < 1 else []) + ([3] if can_send else [])

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.team = [[e, 1.0] for e in self.rng.choice(ELEMENTS, 2)]
        self.foe = [str(self.rng.choice(ELEMENTS)), 1.0]
        self.opponent = str(self.rng.choice(self.opponents))
        self.turn, self.heals, self.charge = 0, 2, 1.0
        return self._observe(), {"legal_actions": self.legal()}

    def step(self, action):
        assert isinstance(action, int), f"the game takes a number, got {type(action)}"
        legal = self.legal()
        valid = action in legal
        action, self.turn = action if valid else 0, self.turn + 1
        beats = {"fire": "grass", "water": "fire", "grass": "water"}
        before = self.foe[1]
        if action == 0:
            self.foe[1] -= (0.4 if beats[self.team[0][0]] == self.foe[0] else 0.2) * self.charge
            self.charge = 1.0
        elif action == 2:
            self.team[0][1], self.heals = min(1.0, self.team[0][1] + 0.5), self.heals - 1
        elif action == 3:
            self.team.reverse()
        elif action == 4:
            self.charge = 2.0
        hit = 0.3 if self.opponent == "brave" or self.rng.random() < 0.5 else 0.0
        self.team[0][1] -= hit / 2 if action == 1 else hit
        if self.team[0][1] <= 0 < self.team[1][1]:
            self.team.reverse()
        won, lost = self.foe[1] <= 0, self.team[0][1] <= 0
        reward = before - max(self.foe[1], 0.0) + (1.0 if won else -1.0 if lost else 0.0)
        over, late = won or lost, self.turn >= self.turn_limit
        info = {"legal_actions": self.legal(), "valid": valid}
        if over or late:
            info["won"] = won
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
