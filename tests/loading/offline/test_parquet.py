"""Trajectories as Parquet files and back, and datasets of LeRobot."""

import shutil
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from hub_server import TOKEN, serving
from messages import names
from run_inside import refusal, run_amago
from store_helpers import assert_same, opened

from amago import ExtraField
from amago.cli import main
from amago.data.trajectory import StoredTraj
from amago.loading import ParquetDataset
from amago.spaces import action_spec
from amago.store import TrajectoryWriter

pa = pytest.importorskip("pyarrow", reason="needs the extra `parquet`")
Image = pytest.importorskip("PIL.Image")
pq = pytest.importorskip("pyarrow.parquet")
OBS = {
    "camera": gym.spaces.Box(0, 255, (4, 5, 3), np.uint8), "depth": gym.spaces.Box(0, 255, (4, 5, 1), np.uint8),
    "pose": gym.spaces.Box(-np.inf, np.inf, (2, 3)), "observation": gym.spaces.Box(-np.inf, np.inf, (2,), np.float64),
}  # fmt: skip
ACTIONS = {
    "discrete": gym.spaces.Discrete(5, start=2), "continuous": gym.spaces.Box(-3.0, 7.0, (2,)), "bits": gym.spaces.MultiBinary(3),
    "several": gym.spaces.Tuple((gym.spaces.Discrete(3), gym.spaces.Box(-1.0, 1.0, (2,)))),
}  # fmt: skip
EXTRAS = (ExtraField("state", "T+1", (2,)), ExtraField("label", "T", (), "int64"), ExtraField("task", "1", (3,)))


def write_buffer(root, action_space, count=7):
    rng = np.random.default_rng(0)
    out = TrajectoryWriter(
        root / "buffer" / "protected", writer="w", action_space=action_space, obs_space=gym.spaces.Dict(OBS),
        extra_fields=EXTRAS,
    )  # fmt: skip
    spec = action_spec(action_space)
    for i in range(count):
        n = i + 2
        obs = {k: np.stack([s.sample() for _ in range(n + 1)]) for k, s in OBS.items()}
        actions = spec.from_env(gym.vector.utils.batch_space(action_space, n).sample())
        dones = np.zeros((n, 1), bool)
        dones[-1] = i % 2
        later = {"start_time": 9, "prev_reward": 0.25, "prev_action": actions[0]} if i == 3 else {}
        extras = {
            "state": rng.normal(size=(n + 1, 2)).astype(np.float32),
            "label": rng.integers(0, 9, n),
            "task": rng.normal(size=(1, 3)).astype(np.float32),
        }
        rewards = rng.normal(size=(n, 1)).astype(np.float32)
        out.write(StoredTraj(obs, actions, rewards, dones, env_name=f"task {i % 2}", extras=extras, **later))
    out.close()


def read_buffer(root):
    view = opened(root / "buffer", edit=False).view()
    return view, [view.read(i) for i in range(len(view))]


@pytest.mark.parametrize("kind", ACTIONS)
def test_there_and_back_to_the_last_bit(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("amago.loading.offline.parquet.FILE_BYTES", 5_000)  # several files
    write_buffer(tmp_path / "run", ACTIONS[kind])
    assert main(["buffer", "export", str(tmp_path / "run"), str(tmp_path / "data"), "--to", "parquet", "--quiet"]) == 0
    assert main(["buffer", "import", str(tmp_path / "data"), str(tmp_path / "again"), "--quiet"]) == 0
    (before, trajs), (after, found) = read_buffer(tmp_path / "run"), read_buffer(tmp_path / "again")
    assert after.obs_space(0) == before.obs_space(0)
    assert after.action_spec(0).space == before.action_spec(0).space
    assert len(found) == len(trajs) == 7
    for a, b in zip(trajs, found, strict=True):
        assert_same(a, b)
        assert {k: v.tobytes() for k, v in a.extras.items()} == {k: v.tobytes() for k, v in b.extras.items()}
    dataset = ParquetDataset(tmp_path / "data", env_name="one")
    assert [len(t) for t in dataset.source] == [len(t) for t in trajs]
    assert {t.env_name for t in dataset.source} == {"one"}


def test_the_datasets_library_reads_it(tmp_path):
    datasets = pytest.importorskip("datasets", reason="needs the package datasets")
    write_buffer(tmp_path / "run", ACTIONS["continuous"])
    main(["buffer", "export", str(tmp_path / "run"), str(tmp_path / "data"), "--to", "parquet", "--quiet"])
    found = datasets.load_dataset(str(tmp_path / "data"), split="train", cache_dir=str(tmp_path / "cache"))
    _, trajs = read_buffer(tmp_path / "run")
    assert len(found) == sum(len(t) + 1 for t in trajs)
    row = found[1]
    assert np.array_equal(np.asarray(row["observation.camera"]), trajs[0].obs["camera"][1]), "an image"
    assert row["reward"] == trajs[0].rews[1, 0]
    assert found[2]["reward"] is None, "the last row of an episode"


def test_what_is_refused(tmp_path, capsys):
    write_buffer(tmp_path / "run", ACTIONS["bits"])
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine").touch()
    assert "not empty" in refusal(capsys, "buffer", "export", str(tmp_path / "run"), str(tmp_path / "data"), "--to", "parquet")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    said = refusal(capsys, "buffer", "import", str(tmp_path / "other.parquet"), str(tmp_path / "again"))
    assert "other.parquet is no dataset" in said
    np.savez(tmp_path / "a.npz", obs=np.zeros((2, 1)), rewards=np.zeros(2))
    words = ["buffer", "import", str(tmp_path / "a.npz"), str(tmp_path / "again"), "--fields", "observations=pixels"]
    assert names(refusal(capsys, *words), "observations=pixels", ["obs", "rewards"])


def test_a_dataset_is_pushed_with_its_card(tmp_path, monkeypatch):
    pytest.importorskip("huggingface_hub", reason="needs the extra `hub`")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    write_buffer(tmp_path / "run", ACTIONS["bits"])
    main(["buffer", "export", str(tmp_path / "run"), str(tmp_path / "data"), "--to", "parquet", "--quiet"])
    (tmp_path / "data" / "mine.txt").write_text("stays here")
    with serving() as hub:
        variables = {"HF_ENDPOINT": hub.url, "NO_PROXY": "127.0.0.1", "HF_TOKEN": TOKEN}
        outcome = run_amago(["push", str(tmp_path / "data"), "me/lake"], tmp_path, variables)
        assert outcome.code == 0, outcome.text
        assert f"{hub.url}/datasets/me/lake" in outcome.text
        files = hub.repositories["me/lake"]
    sent = tmp_path / "data" / "data" / "train-00000.parquet"
    assert files["data/train-00000.parquet"] == sent.read_bytes()
    assert "mine.txt" not in files
    assert "| task 1 | 3 |" in files["README.md"].decode()


def test_a_dataset_that_lerobot_wrote(tmp_path, capsys, caplog):
    robot = tmp_path / "robot"
    shutil.unpack_archive(Path(__file__).with_name("lerobot_v3.zip"), robot)  # of make_lerobot.py
    assert main(["buffer", "import", str(robot), str(tmp_path / "run"), "--quiet"]) == 0
    assert "observation.images.side" in caplog.text, "videos are left out, and named"
    view, trajs = read_buffer(tmp_path / "run")
    assert [(t.env_name, len(t), bool(t.dones[-1, 0])) for t in trajs] == [
        ("reach the red cube", 5, True), ("open the drawer", 3, False), ("reach the red cube", 3, True),
    ]  # fmt: skip
    for episode, traj in enumerate(trajs):
        steps = np.arange(len(traj))
        assert np.array_equal(traj.obs["state"][:-1], [[episode, t, 0.5] for t in steps])
        top = traj.obs["images_top"][:-1]
        assert top.shape[1:] == (8, 8, 3)
        assert top[:, -1, 0, 2].tolist() == (40 * episode + 10 * steps).tolist()
        assert top[:, 0, 0, 0].tolist() == (40 * episode + 10 * steps + 5).tolist()
        np.testing.assert_allclose(
            view.action_spec(episode).to_env(traj.actions), [[t / 10, -t / 10] for t in steps], atol=1e-6
        )
        assert traj.rews[:, 0].tolist() == [float(bool(traj.dones[-1, 0]) and t == steps[-1]) for t in steps]
    info = robot / "meta/info.json"
    info.write_text(info.read_text().replace('"v3.0"', '"v2.1"'))
    assert "v2.1, but v3 is read" in refusal(capsys, "buffer", "import", str(robot), str(tmp_path / "other"))


def test_a_directory_of_npz_with_names_of_ones_own(tmp_path):
    (tmp_path / "mine").mkdir()
    for i, n in enumerate((3, 4)):
        rows = {"pixels": np.full((n, 2, 2, 3), i, np.uint8), "acts": np.arange(n) % 3, "r": np.arange(n, dtype=np.float32)}
        np.savez(tmp_path / "mine" / f"{i}.npz", **rows, env_names=np.array([f"task {i}"] * n))
    fields = ["observations/camera=pixels", "actions=acts", "rewards=r"]
    source, run = str(tmp_path / "mine"), str(tmp_path / "run")
    assert main(["buffer", "import", source, run, "--quiet", "--action-space", "discrete:3", "--fields", *fields]) == 0
    _, trajs = read_buffer(tmp_path / "run")
    assert [(t.env_name, t.rews[:, 0].tolist(), bool(t.dones.any())) for t in trajs] == [
        ("task 0", [0, 1], False), ("task 1", [0, 1, 2], False),
    ]  # fmt: skip
    assert trajs[1].obs["camera"].shape == (4, 2, 2, 3)
