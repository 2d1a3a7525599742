"""An environment that takes five milliseconds a step."""

import time

import tiny

from amago.envs import AMAGOEnv
from amago.envs.builtin import TMazePassive


class Slow(TMazePassive):
    def step(self, action):
        time.sleep(0.005)
        return super().step(action)


def make():
    return AMAGOEnv(Slow(tiny.CORRIDOR), env_name="TMaze")
