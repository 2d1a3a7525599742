"""Files that others may have written: nothing in them is run, nothing that they declare is believed, nothing leaves its place."""

import contextlib
import hashlib
import io
import json
import os
import pickle
import random
import re
import shutil
import struct
import zipfile
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import tiny
import torch
from messages import refused
from run_inside import run_amago

import amago
from amago.loading import DatasetSettings, DiskTrajDataset
from amago.run import checkpoint
from amago.run.checkpoint import CheckpointError, check_archive, load_into, load_weight_file
from amago.run.plots import read_metrics
from amago.spaces import describe, from_description
from amago.store import TrajectoryStore

ROOT = Path(amago.__file__).parent


class Trap:
    """Unpickled, it makes a directory."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def plain(trap):
    return pickle.dumps(trap)


def oldest(trap):
    return pickle.dumps({"observation": trap}, protocol=0)


def of_torch(trap, **how):
    out = io.BytesIO()
    torch.save({"w": trap}, out, **how)
    return out.getvalue()


def of_old_torch(trap):
    return of_torch(trap, _use_new_zipfile_serialization=False)


def as_array(trap):
    out = io.BytesIO()
    np.save(out, np.array([trap], object), allow_pickle=True)
    return out.getvalue()


def as_arrays(trap):
    out = io.BytesIO()
    np.savez(out, metadata=np.array([trap], object), rews=np.array([trap], object))
    return out.getvalue()


FORMS = {f.__name__: f for f in (plain, oldest, of_torch, of_old_torch, as_array, as_arrays)}
STATE = "ckpts/training_states/run_epoch_0"
SLOTS = [
    "policy.json", "policy.pt", "config.txt", "metrics.jsonl", "train_args.json", "settings.yaml", "settings.json", "buffer/owner.json",
    "ckpts/latest/policy.pt", "ckpts/policy_weights/policy_epoch_0.pt", f"{STATE}/model.safetensors", f"{STATE}/optimizer.pt",
    f"{STATE}/state.json", f"{STATE}/manifest.json", "buffer/order.journal", "buffer/fifo/x.traj", "buffer/protected/x.traj",
]  # fmt: skip
TRAJECTORIES = [  # a store reads each by itself
    *(f"buffer/{part}/x.{end}" for part in ("fifo", "protected") for end in ("pt", "pkl", "npy", "npz", "safetensors")),
    "buffer/fifo/w-000000000000-n1.safetensors", "buffer/protected/CartPole_w-000000000007_1.npz",
]  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with every kind of file that a run leaves."""
    root = tmp_path_factory.mktemp("security")
    fields = {"train_timesteps_per_epoch": 40, "ckpt_interval": 1, "always_save_latest": True, "save_trajs_as": "npz"}
    e = tiny.learned(root, tiny.cartpole, val_interval=1, val_timesteps_per_epoch=31, **fields)
    e.close()
    (e.run_dir / "train_args.json").write_text(json.dumps({"env": "CartPole-v1", "horizon": 30}))
    (e.run_dir / "settings.yaml").write_text("env: CartPole-v1\nhorizon: 30\n")
    (e.run_dir / "buffer" / "protected").mkdir(exist_ok=True)
    return e.run_dir


def resume(root):
    e = tiny.started(root, tiny.cartpole, resume="auto", epochs=2, train_timesteps_per_epoch=40)
    e.read_latest_policy()
    e.learn()
    e.close()


def load_weights_of_an_epoch(root):
    weights = root / "run" / "ckpts" / "policy_weights" / "policy_epoch_0.pt"
    e = tiny.started(root, tiny.cartpole, init_from=weights)
    e.load_checkpoint(0, resume_training_state=False)
    e.close()


def load(root):
    run = root / "run"
    for path in (run, run / "ckpts" / "policy_weights" / "policy_epoch_0.pt", run / STATE):
        with contextlib.suppress(CheckpointError, ValueError):
            amago.load_policy(path).act(np.zeros(4, np.float32))


def sample(root):
    dataset = DiskTrajDataset(root, "run")
    dataset.configure(DatasetSettings(6))
    rng = np.random.default_rng(0)
    for _ in range(5):
        dataset.sample_random_trajectory(rng)
    dataset.store.close()


def evaluate(root):
    run_amago(["eval", "run", "--episodes", "1", "--actors", "1"], root)


def look_at_the_buffer(root):
    for action in ("info", "verify", "head"):
        run_amago(["buffer", action, "run"], root)


def draw(root):
    read_metrics(root / "run")


READERS = (load, evaluate, look_at_the_buffer, draw, sample, load_weights_of_an_epoch, resume)


def read_by_all(root):
    """Everything that reads a run; what it refuses is not of interest here."""
    for read in READERS:
        with contextlib.suppress(Exception, SystemExit):
            read(root)
        tiny.close_all()


def checksum(saved, files):
    """The checksum that a manifest holds of itself."""
    return hashlib.sha256(json.dumps([saved, files], sort_keys=True).encode()).hexdigest()


def sealed(directory):
    """Put right a training state's checksums, as its attacker would."""
    files = sorted(p for p in directory.iterdir() if p.name != checkpoint.MANIFEST)
    sums = {p.name: {"sha256": hashlib.sha256(p.read_bytes()).hexdigest(), "bytes": p.stat().st_size} for p in files}
    content = {"schema": checkpoint.SCHEMA, "saved": 9, "check": checksum(9, sums), "files": sums}
    (directory / checkpoint.MANIFEST).write_text(json.dumps(content))
    checkpoint.verify(directory)  # it passes, else what is inside would never be read


def test_each_trap_is_one(tmp_path):
    """Else the tests below would prove nothing."""
    for form, make in FORMS.items():
        path, sprung = tmp_path / "file.npz", tmp_path / form
        path.write_bytes(make(Trap(sprung)))
        if form.startswith("as_array"):
            content = np.load(path, allow_pickle=True)
            _ = content["metadata"] if form == "as_arrays" else content
        else:
            (torch.load(path, weights_only=False) if "torch" in form else pickle.loads(path.read_bytes()))
        assert sprung.exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("slots", [*([slot] for slot in SLOTS), TRAJECTORIES], ids=lambda slots: slots[0])
def test_a_pickle_in_any_place_is_never_run(tmp_path, finished, slots):
    shutil.copytree(finished, tmp_path / "run", symlinks=True)
    for n, slot in enumerate(slots):
        path = tmp_path / "run" / slot
        path.unlink(missing_ok=True)  # policy.pt is a link
        form = {".pt": "of_torch", ".npz": "as_arrays"}.get(path.suffix) or random.Random(slot).choice(sorted(FORMS))
        path.write_bytes(FORMS[form](Trap(tmp_path / f"sprung-{n}")))
    if slots[0].startswith(STATE) and not slots[0].endswith(checkpoint.MANIFEST):
        sealed(tmp_path / "run" / STATE)
    read_by_all(tmp_path)
    assert not list(tmp_path.glob("sprung-*"))


@pytest.mark.filterwarnings("ignore")
def test_all_of_them_read_a_sound_run(tmp_path, finished):
    """Or nothing would have been read above."""
    shutil.copytree(finished, tmp_path / "run", symlinks=True)
    for read in (load, draw, sample, load_weights_of_an_epoch, resume):
        read(tmp_path)
    for arguments in (
        ["eval", "run", "--episodes", "1", "--actors", "1"],
        ["buffer", "info", "run"],
        ["buffer", "verify", "run"],
    ):
        outcome = run_amago(arguments, tmp_path)
        assert outcome.code == 0, outcome.text
    assert amago.load_policy(tmp_path / "run" / STATE).act(np.zeros(4, np.float32)) in (0, 1)


LIMIT = 100 << 20


class Memory:
    """The most that this process needed within the block, in bytes, over what it had before."""

    def __enter__(self):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self.before = self._peak()
        return self

    def __exit__(self, *exc):
        self.used = self._peak() - self.before

    def _peak(self):
        [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM")]
        return int(line.split()[1]) << 10


def safetensors(declared, shape, data=b""):
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, declared]}}).encode()
    return struct.pack("<Q", len(header)) + header + data


def stored_zip(path, source, change=lambda name, data: data, method=zipfile.ZIP_STORED):
    with zipfile.ZipFile(source) as a, zipfile.ZipFile(path, "w", method) as b:
        for name in a.namelist():
            b.writestr(name, change(name, a.read(name)))


def bomb(path):
    """300 MB of zeros, deflated to 300 kB."""
    small = path.with_suffix(".small")
    torch.save({"w": torch.zeros(2)}, small)
    stored_zip(path, small, lambda name, data: bytes(300 << 20) if "/data/" in name else data, zipfile.ZIP_DEFLATED)
    small.unlink()


def lying_zip(path):
    """A member whose directory entry declares four gigabytes."""
    torch.save({"w": torch.zeros(2)}, path)
    raw = bytearray(path.read_bytes())
    at = raw.index(b"PK\1\2")
    raw[at + 20 : at + 28] = struct.pack("<LL", 0xFFFFFFF0, 0xFFFFFFF0)
    path.write_bytes(raw)


def old_torch(path):
    """The format before archives, whose header says how much to allocate."""
    torch.save({"w": torch.zeros(2)}, path, _use_new_zipfile_serialization=False)


WEIGHTS = {
    "header of exabytes": ("w.safetensors", lambda p: p.write_bytes(struct.pack("<Q", 1 << 60) + b"{}")),
    "header of a terabyte in a sparse file": ("w.safetensors", lambda p: sparse(p, struct.pack("<Q", 1 << 40))),
    "tensor of terabytes": ("w.safetensors", lambda p: p.write_bytes(safetensors(1 << 42, [1 << 40]))),
    "shape of terabytes": ("w.safetensors", lambda p: p.write_bytes(safetensors(4, [1 << 40], bytes(4)))),
    "shape that overflows": ("w.safetensors", lambda p: p.write_bytes(safetensors(4, [1 << 33, 1 << 33], bytes(4)))),
    "compressed archive": ("w.pt", bomb),
    "archive that lies": ("w.pt", lying_zip),
    "old format": ("w.pt", old_torch),
}


def sparse(path, head):
    path.write_bytes(head)
    os.truncate(path, 1 << 41)


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_that_declare_too_much_are_refused_in_little_memory(tmp_path, case):
    name, make = WEIGHTS[case]
    make(tmp_path / name)
    with Memory() as memory, refused(CheckpointError, str(tmp_path / name)):
        load_weight_file(tmp_path / name)
    assert memory.used < LIMIT


def test_a_tensor_that_repeats_itself_is_not_spelt_out(tmp_path):
    """A few bytes that stand for terabytes: its shape is compared before anything is copied."""
    torch.save({"weight": torch.zeros(1).expand(1 << 20, 1 << 20), "bias": torch.zeros(2)}, tmp_path / "w.pt")
    with Memory() as memory, refused(CheckpointError, "weight", (1048576, 1048576), (2, 3)):
        load_into(torch.nn.Linear(3, 2), load_weight_file(tmp_path / "w.pt").weights, "w.pt")
    assert memory.used < LIMIT


def test_what_torch_writes_is_taken(tmp_path):
    with Memory() as memory:
        block = np.ones(150 << 20, np.uint8)
    assert memory.used > LIMIT, "memory is measured"
    del block
    path = tmp_path / "w.pt"
    torch.save({"w": torch.arange(3.0)}, path)
    with open(path, "rb") as f:
        f.seek(7)
        check_archive(f)
        assert f.tell() == 7
    assert load_weight_file(path).weights["w"].tolist() == [0.0, 1.0, 2.0]


def test_spaces_of_terabytes_are_refused():
    box = {"kind": "Box", "shape": [1 << 40], "dtype": "float32", "low": 0.0, "high": 1.0}
    overflow, bits = box | {"shape": [1 << 20, 1 << 20, 1 << 30]}, {"kind": "MultiBinary", "shape": [1 << 40]}
    for description in (box, overflow, bits, {"kind": "Dict", "spaces": {"a": box}}):
        for given in (description, {"kind": "Dict", "spaces": {"x": description}}):
            with Memory() as memory, refused(ValueError, 268435456):
                from_description(given)
            assert memory.used < LIMIT
    image = gym.spaces.Box(0, 255, (480, 640, 3), np.uint8)
    assert from_description(describe(image)).shape == image.shape


@pytest.mark.filterwarnings("ignore")
def test_a_policy_that_declares_terabytes_is_refused_in_little_memory(tmp_path, finished):
    shutil.copytree(finished, tmp_path / "run", symlinks=True)
    path = tmp_path / "run" / "policy.json"
    spec = json.loads(path.read_text())
    spec["observation_space"]["spaces"]["observation"]["shape"] = [1 << 40]
    path.write_text(json.dumps(spec))
    with Memory() as memory, refused(ValueError, (1 << 40,), 268435456):
        amago.load_policy(tmp_path / "run")
    assert memory.used < LIMIT


def everything_under(root):
    return {p: (p.lstat().st_size, p.read_bytes() if p.is_file() else b"") for p in sorted(root.rglob("*"))}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["../../outside.txt", "/etc/hostname", "..", "model.safetensors/../../../../../outside.txt"])
def test_a_manifest_never_names_a_file_elsewhere(tmp_path, finished, name):
    shutil.copytree(finished, tmp_path / "run", symlinks=True)
    (tmp_path / "outside.txt").write_text("mine")
    path = tmp_path / "run" / STATE / checkpoint.MANIFEST
    manifest = json.loads(path.read_text())
    assert manifest["check"] == checksum(manifest["saved"], manifest["files"])
    content = b"mine"
    manifest["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    manifest["check"] = checksum(manifest["saved"], manifest["files"])
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError):
        checkpoint.verify(path.parent)
    assert (tmp_path / "outside.txt").read_text() == "mine"


@pytest.mark.parametrize("kind", ["file", "directory", "dangling"])
def test_links_in_a_buffer_are_neither_followed_nor_written_through(tmp_path, finished, kind):
    outside = tmp_path / "outside"
    outside.mkdir()
    source = next((finished / "buffer" / "fifo").glob("*.npz"))
    (outside / source.name).write_bytes(source.read_bytes())
    fifo = tmp_path / "buffer" / "fifo"
    fifo.mkdir(parents=True)
    target = {"file": outside / source.name, "directory": outside, "dangling": outside / "nothing"}[kind]
    (fifo / "CartPole_w-000000000000_1.npz").symlink_to(target)
    before = everything_under(outside)
    store = TrajectoryStore(tmp_path / "buffer", 1)
    report = store.refresh()
    assert (len(store), report.quarantined_files) == (0, 1)
    store.delete()
    store.close()
    assert everything_under(outside) == before


def test_a_link_in_the_place_of_the_quarantine_is_not_cleared(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("mine")
    store = TrajectoryStore(tmp_path / "buffer")
    (tmp_path / "buffer" / "quarantine").symlink_to(outside)
    store.delete()
    store.close()
    assert (outside / "precious").read_text() == "mine"


UNSAFE_LOADER = re.compile(
    r"\b(?:import|from) (?:dill|joblib|shelve|marshal|jsonpickle|yaml|_pickle|hickle|klepto)\b|\bfrom pickle import|\bimport pickle as"
    r"|\b(?:\w*pickle|yaml|torch\.jit|torch\.hub|pd|pandas)\.(?:loads?|Unpickler|read_pickle|unsafe_load|full_load)\b"
    r"|\bPackageImporter\b|\brunpy\.|\bos\.(?:system|popen)\(|(?<![.\w`])(?<!def )(?:eval|exec|compile|__import__)\("
    r"|\bfrom (?:torch|numpy) import .*\bload\b|\b(?:torch|np|numpy)\.load\((?!.*(?:weights_only=True|allow_pickle=False))"
    r"|\bread_array\((?!.*allow_pickle=False)|\bweights_only=(?!True)|\ballow_pickle=(?!False)"
)
ALLOWED = {
    ("cli/lists.py", "import yaml"): "safe_load alone, of a file of the library",
    ("cli_utils/settings.py", "import yaml"): "for the next line",
    ("cli_utils/settings.py", "yaml.load"): "with a subclass of SafeLoader, which makes plain values only",
    ("config.py", "cloudpickle.loads"): "bindings that our own parent process has sent",
    ("envs/pool/worker.py", "cloudpickle.loads"): "the plan that our own parent process has sent",
    ("loading/offline/original.py", "pickle.Unpickler"): "refuses every name but arrays, and only where the caller asks for it",
}


def test_the_source_holds_no_unsafe_loader():
    files = [(str(path.relative_to(ROOT)), path.read_text()) for path in ROOT.rglob("*.py")]
    assert {(name, found) for name, text in files for found in UNSAFE_LOADER.findall(text)} == ALLOWED.keys()


UNSAFE = [
    "import pickle\npickle.loads(b'')", "from pickle import loads\nloads(b'')", "import pickle as p\np.load(f)",
    "import torch\ntorch.load(p)", "import torch\ntorch.load(p, weights_only=False)", "import torch\ntorch.load(p, weights_only=x)",
    "from torch import load\nload(p)", "import numpy as np\nnp.load(p)", "import numpy as np\nnp.load(p, allow_pickle=True)",
    "import numpy\nnumpy.load(p)", "import joblib", "from joblib import load", "import yaml", "import shelve", "eval('1')", "exec('1')",
    "import pickle\nclass U(pickle.Unpickler): ...", "import pickle\nf = pickle.loads", "import pandas as pd\npd.read_pickle(p)",
]  # fmt: skip
SAFE = [
    "import torch\ntorch.load(p, map_location='cpu', weights_only=True)", "import numpy as np\nnp.load(p, allow_pickle=False)",
    "agent.eval()", "import json\njson.loads(x)", "import pickle\npickle.dumps(x)", "import re\nre.compile('x')",
]  # fmt: skip


def test_the_check_sees_what_is_unsafe_and_nothing_else():
    assert [code for code in UNSAFE if not UNSAFE_LOADER.search(code)] == []
    assert [code for code in SAFE if UNSAFE_LOADER.search(code)] == []
