"""Recorded actions of several parts: by column or by name, they become what the environment takes."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import recordings as rec

from amago.loading import ArrayDataset
from amago.spaces.actions import action_spec

spaces = gym.spaces

ROBOT = spaces.Dict(
    {
        "drive": spaces.Discrete(3, start=5),
        "arm": spaces.Dict({"turn": spaces.Box(-30.0, 30.0, (2,), np.float32), "grip": spaces.MultiBinary((2, 2))}),
        "legs": spaces.Tuple([spaces.Discrete(2), spaces.MultiDiscrete([3, 4])]),
    }
)


def by_name(actions: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """The parts of the robot's actions, each with a literal path of its own."""
    return {
        "arm/grip": np.array([a["arm"]["grip"] for a in actions]),
        "arm/turn": np.array([a["arm"]["turn"] for a in actions]),
        "drive": np.array([a["drive"] for a in actions]),
        "legs/0": np.array([a["legs"][0] for a in actions]),
        "legs/1": np.array([a["legs"][1] for a in actions]),
    }


def by_column(actions: list[dict[str, Any]]) -> np.ndarray:
    return np.concatenate([part.reshape(len(actions), -1).astype(np.float64) for part in by_name(actions).values()], axis=1)


@pytest.mark.parametrize("form", [by_name, by_column])
def test_a_dataset_of_them_has_the_stored_form_of_each_action(form: Any) -> None:
    episodes = rec.record()
    rows = rec.rows(episodes, next_observations=True)
    ROBOT.seed(3)
    actions = [ROBOT.sample() for _ in rows["rewards"]]
    source = ArrayDataset(**(rows | {"actions": form(actions)}), action_space=ROBOT).source
    spec = action_spec(ROBOT)
    found = np.concatenate([source.read(i).actions for i in range(len(source))])
    np.testing.assert_allclose(found, [spec.from_env(a) for a in actions], atol=1e-6)
    assert found.dtype == spec.stored_dtype == np.float64


GRIP = spaces.Dict({"grip": spaces.MultiBinary(2), "move": spaces.Discrete(4)})
WRONG: dict[str, tuple[gym.Space[Any], Any, str]] = {
    "too few columns": (GRIP, np.zeros((5, 2)), r"shape \(5, 2\), but .* needs 3 numbers in each row: 2 of grip, 1 of move"),
    "no rows": (GRIP, np.zeros(5), r"shape \(5,\), but .* needs 3 numbers in each row"),
    "a part is missing": (GRIP, {"grip": np.zeros((5, 2))}, r"has parts \['grip'\], but the space has \['grip', 'move'\]"),
    "a part is too wide": (
        GRIP, {"grip": np.zeros((5, 3)), "move": np.zeros(5)}, r"actions\['grip'\] has shape \(5, 3\), but MultiBinary\(2\) needs",
    ),
    "a part is too long": (
        GRIP, {"grip": np.zeros((5, 2)), "move": np.zeros(6)}, r"actions\['move'\] has shape \(6,\), but there are 5 rewards",
    ),
    "half a choice": (GRIP, np.array([[0, 1, 2]] * 4 + [[0, 1, 2.5]]), r"actions\['move'\] is 2.5 in row 4, but Discrete"),
    "not a number": (GRIP, np.array([[0, 1, np.nan]] * 5), r"actions\['move'\] is nan in row 0, but Discrete"),
    "beyond all integers": (GRIP, np.array([[0, 1, 1e300]] * 5), r"actions\['move'\] is 1e\+300 in row 0"),
    "256 is no bit": (GRIP, np.array([[0, 256, 0]] * 5), r"actions\['grip'\] is 256 in row 0, but MultiBinary\(2\) takes bits"),
    "a choice too many": (GRIP, np.array([[0, 1, 4]] * 5), r"action\[0, 2\] \(move\) is 4, but the stored form holds whole"),
    "words": (GRIP, {"grip": np.zeros((5, 2)), "move": np.array(["a"] * 5)}, r"actions\['move'\] has dtype <U1, but Discrete"),
    "parts of one number": (spaces.Discrete(4), {"move": np.zeros(5)}, r"has parts \['move'\], but Discrete\(4\) has none"),
    "half a choice alone": (spaces.Discrete(4), np.full(5, 0.5), r"actions is 0.5 in row 0, but Discrete\(4\) takes whole"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_by_name(name: str) -> None:
    space, actions, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        _ = ArrayDataset(np.zeros((5, 2), np.float32), actions, np.zeros(5), np.zeros(5, bool), space).source
