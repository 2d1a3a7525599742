"""Facts that code for the original system relies on, in fresh processes: names of a package, and what they do, a process for each of ``facts/*.py``.

A file of facts is a sequence of pieces, each after a line ``# fact: TITLE``; what stands before the first is put in front of each.
"""

import ast
import importlib
import inspect
import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import gin
import gymnasium as gym
import numpy as np
import pytest
import tiny
import torch

import amago
from amago.envs import AMAGOEnv
from amago.envs.exploration import EpsilonGreedy

HERE = Path(__file__).parent
NAMES = {}  # by their modules, those of one package together
for name in (HERE / "facts" / "names.txt").read_text().split():
    NAMES.setdefault(".".join(name.split(".")[:-1][:3]), []).append(name)
FACTS = {}  # by their files
for file in sorted(HERE.glob("facts/*.py")):
    before, *pieces = file.read_text().split("\n# fact: ")
    FACTS[file.stem] = {
        f"{file.stem}: {piece.partition(chr(10))[0]}": f"{before}\n{piece.partition(chr(10))[2]}" for piece in pieces
    }


@pytest.fixture(scope="module")
def outcomes():
    """{module or title: traceback, or "" where it holds}."""
    processes = {module: {module: "\n".join(["import amago", *names])} for module, names in NAMES.items()} | FACTS
    command = [sys.executable, str(HERE / "in_fresh_processes.py")]
    done = subprocess.run(command, input=json.dumps(processes), capture_output=True, text=True, env=tiny.environment())
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_names_are_attributes_after_import_amago(outcomes):
    assert {module: outcomes[module] for module in NAMES if outcomes[module]} == {}


@pytest.mark.parametrize("fact", [title for facts in FACTS.values() for title in facts])
def test_holds(fact, outcomes):
    assert not outcomes[fact], outcomes[fact]


def test_environments_may_import_the_helpers_in_processes_without_torch():
    code = "import sys; from amago.utils import AmagoWarning, amago_warning, call_async_env; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


NO_DEFAULT = inspect.Parameter.empty


def find(path):
    """The class or function of a dotted path, which may be imported like this."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def signatures():
    """{path: {argument: default, or NO_DEFAULT where clients give a value}} of ``facts/signatures.txt``, one call a line."""
    found = {}
    for line in (Path(__file__).parent / "facts" / "signatures.txt").read_text("utf-8").splitlines():
        call = ast.parse(line, mode="eval").body
        given = {k.arg: eval(ast.unparse(k.value), {"amago": amago, "gin": gin}) for k in call.keywords}
        found[ast.unparse(call.func)] = {a.id: NO_DEFAULT for a in call.args} | given
    return found


SIGNATURES = signatures()
"""Arguments that clients give by name, with the defaults that they count on, but for differences that docs/original.md lists."""


@pytest.mark.parametrize("path", SIGNATURES)
def test_arguments_and_defaults(path):
    owner, _, name = path.rpartition(".")
    try:
        found = find(path)
    except ModuleNotFoundError:  # a method
        found = getattr(find(owner), name)
    parameters = inspect.signature(found.__init__ if inspect.isclass(found) else found).parameters
    for argument, default in SIGNATURES[path].items():
        actual = parameters[argument].default
        assert default is NO_DEFAULT or actual is default or actual == default, f"{path}({argument}={actual!r})"


class Longer(AMAGOEnv):
    rested = 0

    def take_long_break(self, minutes):
        self.rested += minutes
        return self.rested


def longer():
    return Longer(gym.make("CartPole-v1", max_episode_steps=6), env_name="Longer")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_gymnasium_steps_them_in_processes(tmp_path):
    creators = [amago.envs.EnvCreator(longer, EpsilonGreedy, str(tmp_path), 2, 4, "npz") for _ in range(2)]
    with closing(gym.vector.AsyncVectorEnv(creators, context="fork")) as envs:
        obs, _ = envs.reset()
        assert obs["observation"].reshape(2, 4).dtype == np.float32
        for _ in range(6):
            obs, reward, terminated, truncated, _ = envs.step(np.zeros((2, 1), np.uint8))
        assert np.reshape(reward, 2).tolist() == [1.0, 1.0]
        assert (np.reshape(terminated, 2) | np.reshape(truncated, 2)).all()
        assert amago.utils.call_async_env(envs, "take_long_break", 3) == [3, 3]
        assert amago.utils.call_async_env(envs, "env_name") == ["Longer", "Longer"]
        assert [len(x) for x in amago.utils.call_async_env(envs, "current_timestep")] == [3, 3]


@pytest.mark.parametrize(("choices", "dtype"), [(256, torch.uint8), (257, torch.int64)])
def test_many_choices(choices, dtype):
    spaces = {
        "observation_space": gym.spaces.Dict({"a": gym.spaces.Box(-1, 1, (3,))}),
        "action_space": gym.spaces.Discrete(choices),
    }
    agent = tiny.agent(SimpleNamespace(rl2_space=gym.spaces.Box(-np.inf, np.inf, (1 + choices,)), **spaces))
    obs, rl2s, times = {"a": torch.zeros(2, 1, 3)}, torch.zeros(2, 1, 1 + choices), torch.zeros(2, 1, 1, dtype=torch.int64)
    actions, _ = agent.get_actions(obs, rl2s, times)
    assert actions.dtype == dtype
