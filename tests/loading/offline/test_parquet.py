"""Trajectories as Parquet files and back, and datasets of LeRobot."""

import io
import json

import gymnasium as gym
import numpy as np
import pytest
from hub_server import TOKEN, serving
from run_inside import run_amago
from store_helpers import assert_same

from amago import ExtraField
from amago.cli import main
from amago.data.trajectory import StoredTraj
from amago.loading import ParquetDataset
from amago.spaces import action_spec
from amago.store import TrajectoryStore, TrajectoryWriter

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
        actions = spec.from_env(np.stack([action_space.sample() for _ in range(n)])) if not isinstance(
            action_space, gym.spaces.Tuple
        ) else spec.from_env(tuple(np.stack([s.sample() for _ in range(n)]) for s in action_space.spaces))  # fmt: skip
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
    store = TrajectoryStore(root / "buffer", edit=False)
    store.refresh()
    view = store.view()
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
    assert main(["buffer", "export", str(tmp_path / "run"), str(tmp_path / "data"), "--to", "parquet"]) == 2
    assert "not empty" in capsys.readouterr().err
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    assert main(["buffer", "import", str(tmp_path / "other.parquet"), str(tmp_path / "again")]) == 2
    assert "other.parquet is no dataset" in capsys.readouterr().err


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


def write_lerobot(root, version="v3.0"):
    """Three episodes of two tasks, in two files, as LeRobot 0.4 lays a dataset out."""
    rng = np.random.default_rng(1)
    lengths, frames = [3, 4, 2], []
    for episode, n in enumerate(lengths):
        for t in range(n):
            image = np.full((2, 2, 3), 10 * episode + t, np.uint8)
            frames.append({
                "observation.state": rng.normal(size=2).astype(np.float32), "observation.images.top": png(image),
                "action": rng.normal(size=2).astype(np.float32), "next.reward": np.float32(t), "next.done": episode == 1 and t == n - 1,
                "timestamp": np.float32(t / 10), "frame_index": t, "episode_index": episode, "index": len(frames), "task_index": episode % 2,
            })  # fmt: skip
    for number, part in enumerate((frames[:7], frames[7:])):
        path = root / f"data/chunk-000/file-{number:03d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        columns = {k: [f[k].tolist() if isinstance(f[k], np.ndarray) else f[k] for f in part] for k in frames[0]}
        columns["observation.state"] = pa.array(columns["observation.state"], pa.list_(pa.float32(), 2))
        columns["action"] = pa.array(columns["action"], pa.list_(pa.float32()))
        pq.write_table(pa.table(columns), path)
    shapes = {
        "observation.state": ("float32", [2]), "observation.images.top": ("image", [2, 2, 3]), "observation.images.side": ("video", [2, 2, 3]),
        "action": ("float32", [2]), "next.reward": ("float32", [1]), "next.done": ("bool", [1]), "timestamp": ("float32", [1]),
        "frame_index": ("int64", [1]), "episode_index": ("int64", [1]), "index": ("int64", [1]), "task_index": ("int64", [1]),
    }  # fmt: skip
    (root / "meta").mkdir()
    features = {k: {"dtype": dtype, "shape": shape, "names": None} for k, (dtype, shape) in shapes.items()}
    (root / "meta/info.json").write_text(json.dumps({"codebase_version": version, "fps": 10, "features": features}))
    pq.write_table(pa.table({"task_index": [0, 1], "__index_level_0__": ["lift it", "drop it"]}), root / "meta/tasks.parquet")
    return frames


def png(image):
    Image.fromarray(image).save(out := io.BytesIO(), "PNG")
    return {"bytes": out.getvalue(), "path": None}


def test_a_lerobot_dataset(tmp_path, capsys, caplog):
    frames = write_lerobot(tmp_path / "robot")
    assert main(["buffer", "import", str(tmp_path / "robot"), str(tmp_path / "run"), "--quiet"]) == 0
    assert "observation.images.side" in caplog.text, "videos are left out, and named"
    view, trajs = read_buffer(tmp_path / "run")
    assert [(t.env_name, len(t), bool(t.dones[-1, 0])) for t in trajs] == [
        ("lift it", 2, False), ("drop it", 4, True), ("lift it", 1, False),
    ]  # fmt: skip
    assert np.array_equal(trajs[0].obs["state"], [f["observation.state"] for f in frames[:3]])
    assert [int(x[0, 0, 0]) for x in trajs[1].obs["images_top"][:4]] == [10, 11, 12, 13]
    np.testing.assert_allclose(
        view.action_spec(1).to_env(trajs[1].actions), [f["action"] for f in frames[3:7]], rtol=1e-5, atol=1e-6
    )
    assert trajs[1].rews[:, 0].tolist() == [0, 1, 2, 3]
    write_lerobot(tmp_path / "old", version="v2.1")
    assert main(["buffer", "import", str(tmp_path / "old"), str(tmp_path / "other")]) == 2
    assert "v2.1, but v3 is read" in capsys.readouterr().err


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


def test_names_that_a_file_lacks(tmp_path, capsys):
    np.savez(tmp_path / "a.npz", obs=np.zeros((2, 1)), rewards=np.zeros(2))
    assert main(["buffer", "import", str(tmp_path / "a.npz"), str(tmp_path / "run"), "--fields", "observations=pixels"]) == 2
    message = capsys.readouterr().err
    assert "observations=pixels" in message
    assert "['obs', 'rewards']" in message
