"""Scores of D4RL against published numbers; the example on a file and a Minari dataset that it, or this test, records."""

from importlib.util import find_spec
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import tiny
from recordings import write_buffers
from run_inside import run_example
from support.d4rl_scores import REFERENCE_RETURNS, NormalizedScore, normalized_score, reference_returns

from amago.envs.statistics import AMAGO_ENV_LOG_PREFIX

SCORE = f"{AMAGO_ENV_LOG_PREFIX} Normalized Score"


def run(directory: Path, *arguments: str) -> None:
    few = "--max_seq_len 8 --env Pendulum-v1 --score_range -1200 -150"
    run_example("14_d4rl.py", directory, " ".join([few, *arguments]))


def test_published_returns_get_their_published_scores() -> None:
    """The paper lists raw returns and scores (tables 2 and 4): the same affine map must lead from one to the other."""
    for low, high in REFERENCE_RETURNS.values():
        assert normalized_score(low, low, high) == 0.0
        assert normalized_score(high, low, high) == pytest.approx(100.0)
    published = [("halfcheetah", 4196.4, 36.1), ("hopper", 923.5, 29.0), ("walker2d", 304.8, 6.6)]  # behaviour cloning, medium
    for name, raw, score in published:
        assert normalized_score(raw, *REFERENCE_RETURNS[name]) == pytest.approx(score, abs=0.06)


def test_names_of_data_sets() -> None:
    assert reference_returns("runs/halfcheetah_medium_expert-v2.hdf5") == REFERENCE_RETURNS["halfcheetah"]
    assert reference_returns("walker2d-medium-replay-v2") == REFERENCE_RETURNS["walker2d"]
    assert reference_returns("D4RL/pen/human-v2") == REFERENCE_RETURNS["pen"]
    assert reference_returns("mujoco/hopper/expert-v0") == REFERENCE_RETURNS["hopper"]
    assert reference_returns("pendulum.hdf5") is None
    assert reference_returns("giant-v0") is None


def test_the_wrapper_scores_whole_episodes() -> None:
    env = NormalizedScore(gym.make("Pendulum-v1"), -1000.0, -200.0)
    twin = gym.make("Pendulum-v1")
    for seed in (0, 1):
        first, other = env.reset(seed=seed)[0], twin.reset(seed=seed)[0]
        np.testing.assert_array_equal(first, other)
        total, over = 0.0, False
        while not over:
            obs, reward, terminated, over, info = env.step(np.zeros(1))
            theirs, paid, *_ = twin.step(np.zeros(1))
            np.testing.assert_array_equal(obs, theirs)
            assert (reward, terminated) == (paid, False)
            total += float(paid)
            assert (SCORE in info) == over
        assert info[SCORE] == pytest.approx((total + 1000.0) / 8.0)


def test_wrong_references_are_refused() -> None:
    env = gym.make("Pendulum-v1")
    with pytest.raises(ValueError, match=r"low and high must differ, got 1\.0 for both"):
        NormalizedScore(env, 1.0, 1.0)
    with pytest.raises(ValueError, match="high must be finite, got inf"):
        NormalizedScore(env, 0.0, float("inf"))


needs_h5py = pytest.mark.skipif(find_spec("h5py") is None, reason="h5py is not installed: pip install 'amago[offline]'")


@needs_h5py
def test_offline_on_a_file_that_it_records(tmp_path: Path) -> None:
    import h5py

    run(tmp_path, "--dataset", "data/pendulum.hdf5", "--record", "450")
    with h5py.File(tmp_path / "data" / "pendulum.hdf5") as file:
        assert file["observations"].shape == file["next_observations"].shape == (450, 3)
        assert file["actions"].shape == (450, 1)
        assert np.flatnonzero(file["timeouts"][()]).tolist() == [199, 399]  # the time limit of Pendulum-v1
        assert not file["terminals"][()].any()
        assert np.abs(file["actions"][()]).max() > 1.5
        before = file["rewards"][()]
    assert {row["section"] for row in tiny.rows(tmp_path / "tiny")} == {"val", "buffer", "train", "test"}
    assert {row["env_steps"] for row in tiny.rows(tmp_path / "tiny")} == {0}
    assert any(
        "Normalized Score" in key for row in tiny.rows(tmp_path / "tiny") if row["section"] == "test" for key in row["values"]
    )
    assert not list((tmp_path / "tiny").glob("buffer/fifo/*.safetensors"))

    run(tmp_path, "--dataset", "data/pendulum.hdf5", "--record", "450", "--resume", "auto", "--epochs", "2")
    assert max(row["grad_steps"] for row in tiny.rows(tmp_path / "tiny")) == 4
    with h5py.File(tmp_path / "data" / "pendulum.hdf5") as file:
        np.testing.assert_array_equal(file["rewards"][()], before)  # what there is is used


@needs_h5py
def test_offline_to_online(tmp_path: Path) -> None:
    arguments = ("--dataset", "pendulum.hdf5", "--record", "450", "--online_after", "1", "--epochs", "3")
    run(tmp_path, *arguments, "--timesteps_per_epoch", "201")
    steps = {row["epoch"]: row["env_steps"] for row in tiny.rows(tmp_path / "tiny") if row["section"] == "train"}
    assert steps == {0: 0, 1: 2 * 201, 2: 4 * 201}
    weights = [
        value for row in tiny.rows(tmp_path / "tiny") if row["section"] == "buffer" for key, value in row["values"].items()
        if key.endswith("Current Sample Weight") and not key.startswith("D4RL")
    ]  # fmt: skip
    assert weights[0] == 0.0
    assert weights[-1] > 0.0
    assert list((tmp_path / "tiny").glob("buffer/fifo/*.safetensors"))


@needs_h5py
def test_what_sac_meets_is_recorded_until_it_is_good_enough(tmp_path: Path) -> None:
    pytest.importorskip("stable_baselines3", reason="records need pip install stable-baselines3")
    import h5py

    from benchmarks.suite.sac_record import record

    for until, steps in ((-2000.0, 200), (0.0, 260)):
        record("Pendulum-v1", tmp_path / "records" / "p.hdf5", until, 260)
        with h5py.File(tmp_path / "records" / "p.hdf5") as file:
            assert file["actions"].shape == (steps, 1)
            assert np.abs(file["actions"][()]).max() > 1.5
    run(tmp_path, "--dataset", "records/p.hdf5")


@needs_h5py
def test_minari(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari = pytest.importorskip("minari", reason="minari is not installed: pip install 'amago[offline]'")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    (tmp_path / "minari").mkdir()
    env, rng = gym.make("Pendulum-v1"), np.random.default_rng(0)
    rows = {"rewards": np.zeros(200), "terminations": np.zeros(200, bool), "truncations": np.arange(200) == 199}
    seen, acted = rng.uniform(-1, 1, (201, 3)).astype(np.float32), rng.uniform(-2, 2, (200, 1)).astype(np.float32)
    episodes = [minari.data_collector.EpisodeBuffer(observations=seen, actions=acted, **rows) for _ in range(3)]
    write_buffers("pendulum/random-v0", episodes, env.observation_space, env.action_space)
    run(tmp_path, "--dataset", "pendulum/random-v0")
    assert max(row["grad_steps"] for row in tiny.rows(tmp_path / "tiny")) == 2
    with pytest.raises(ValueError, match="pendulum/nothing-v0"):
        run(tmp_path, "--run_name", "other", "--dataset", "pendulum/nothing-v0")
    with pytest.raises(ValueError, match=r"there is no file nowhere\.hdf5"):
        run(tmp_path, "--run_name", "another", "--dataset", "nowhere.hdf5")
