"""Write the dataset in lerobot_v3.zip, with the package lerobot (0.4.4, datasets 5.2.0, numpy 2.2.6): python make_lerobot.py DIRECTORY."""

import sys

import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset

CAMERA = ["height", "width", "channel"]
FEATURES = {
    "observation.state": {"dtype": "float32", "shape": (3,), "names": ["x", "y", "z"]},
    "observation.images.top": {"dtype": "image", "shape": (8, 8, 3), "names": CAMERA},
    "observation.images.side": {"dtype": "video", "shape": (64, 64, 3), "names": CAMERA},
    "action": {"dtype": "float32", "shape": (2,), "names": ["a", "b"]},
    "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
    "next.done": {"dtype": "bool", "shape": (1,), "names": None},
}
EPISODES = [(5, "reach the red cube", True), (4, "open the drawer", False), (3, "reach the red cube", True)]

if __name__ == "__main__":
    dataset = LeRobotDataset.create("me/reach", fps=10, features=FEATURES, root=sys.argv[1])
    dataset.meta.info["data_files_size_in_mb"] = 0.001  # a file for each episode
    for episode, (length, task, terminates) in enumerate(EPISODES):
        for t in range(length):
            top = np.full((8, 8, 3), 40 * episode + 10 * t, np.uint8)
            top[:4] += 5
            dataset.add_frame({
                "observation.state": np.array([episode, t, 0.5], np.float32), "observation.images.top": top,
                "observation.images.side": np.full((64, 64, 3), 10 * t, np.uint8), "action": np.array([t / 10, -t / 10], np.float32),
                "next.reward": np.array([t == length - 1], np.float32), "next.done": np.array([terminates and t == length - 1]), "task": task,
            })  # fmt: skip
        dataset.save_episode()
    dataset.finalize()
