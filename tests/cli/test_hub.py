"""`amago push` and `amago pull`, against a stand-in for the Hub on this machine."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import tiny
from hub_server import TOKEN, serving
from messages import names
from run_inside import run_amago

from amago.policy import load_policy
from amago.policy.card import Results, write_card

pytest.importorskip("huggingface_hub", reason="needs the extra `hub`")

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of how huggingface_hub calls httpx


@pytest.fixture(scope="module")
def hub():
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    tiny.learned(root, always_save_latest=True).close()
    return write_card(load_policy(root / "run"), Results({"TMaze": [0.0, 1.0]}), root / "card", run_dir=root / "run")


@pytest.fixture
def card(made, tmp_path):
    shutil.copytree(made, tmp_path / "card")
    return tmp_path / "card"


@pytest.fixture
def amago(hub, tmp_path, monkeypatch):
    """The command in this process, with what huggingface_hub took from the environment when it was imported."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))

    def call(*words, token=TOKEN, endpoint=None):
        env = {"HF_ENDPOINT": endpoint or hub.url, "NO_PROXY": "127.0.0.1", "HF_TOKEN": token or ""}
        outcome = run_amago([str(w) for w in words], tmp_path, env)
        return outcome.code, outcome.text

    return call


def test_as_a_process_of_its_own(hub, card, tmp_path):
    hf = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}
    variables = tiny.environment() | hf | {"NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-m", "amago.cli", "push", "card", "me/alone"]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert hub.repositories["me/alone"]["policy.json"] == (card / "policy.json").read_bytes()


def test_there_and_back(amago, hub, card, tmp_path):
    code, out = amago("push", card, "me/maze", "--private")
    assert code == 0, out
    assert f"pushed: {hub.url}/me/maze" in out
    stored = hub.repositories["me/maze"]
    assert {k: v for k, v in stored.items() if k != ".gitattributes"} == {p.name: p.read_bytes() for p in card.iterdir()}
    assert "me/maze" in hub.private
    stored["../evil.py"] = stored["sub/evil.py"] = stored["evil.pkl"] = b"import os"
    code, out = amago("pull", "me/maze", "--out", "got/maze")
    assert code == 0, out
    got = tmp_path / "got" / "maze"
    assert {p.name: p.read_bytes() for p in got.iterdir()} == {p.name: p.read_bytes() for p in card.iterdir()}
    assert os.listdir(tmp_path / "got") == ["maze"]
    assert "amago eval got/maze" in out
    assert load_policy(got).description == load_policy(card).description


def test_a_new_version_replaces_the_old(amago, hub, card):
    (card / "replay.gif").write_bytes(b"GIF89a")
    assert amago("push", card, "me/twice")[0] == 0
    (card / "replay.gif").unlink()
    (card / "replay.mp4").write_bytes(b"0000ftyp")
    assert amago("push", card, "me/twice", "--message", "a film")[0] == 0
    assert {"replay.mp4", "README.md"} <= set(hub.repositories["me/twice"])
    assert "replay.gif" not in hub.repositories["me/twice"]


def test_secrets_and_other_files_are_refused_before_anything_is_sent(amago, hub, card):
    before = len(hub.requests)
    (card / "README.md").write_text((card / "README.md").read_text() + f"\ncurl -H 'Authorization: Bearer {TOKEN}'\n")
    code, text = amago("push", card, "me/secret")
    assert code == 2
    assert names(text, "README.md holds a token of the Hugging Face Hub", "README.md holds the value of the variable HF_TOKEN")
    assert TOKEN not in text
    (card / "policy.pt").write_bytes(b"pickle")
    code, text = amago("push", card, "me/secret")
    assert (code, "holds policy.pt, which are no files of a card" in text) == (2, True)
    assert len(hub.requests) == before
    assert "me/secret" not in hub.repositories


def test_links_and_what_is_no_card_are_refused(amago, hub, card, tmp_path):
    (tmp_path / "id_rsa").write_text("mine")
    (card / "LICENSE").symlink_to(tmp_path / "id_rsa")
    (tmp_path / "empty").mkdir()
    for directory, named in ((card, ("LICENSE",)), ("empty", ("is no card", "amago card RUN")), ("nowhere", ("is no card",))):
        code, text = amago("push", directory, "me/x")
        assert (code, names(text, *named)) == (2, True)


def test_damaged_weights_are_neither_sent_nor_kept(amago, hub, card, tmp_path):
    content = bytearray((card / "policy.safetensors").read_bytes())
    content[-1] ^= 1
    (card / "policy.safetensors").write_bytes(content)
    code, text = amago("push", card, "me/damaged")
    assert (code, "checksum" in text, "me/damaged" in hub.repositories) == (2, True, False)
    hub.repositories["me/bits"] = {p.name: p.read_bytes() for p in card.iterdir()}
    code, text = amago("pull", "me/bits", "--out", "bits")
    assert (code, "checksum" in text, (tmp_path / "bits").exists()) == (2, True, False)


def test_wrong_names_tokens_and_places(amago, hub, card):
    hub.repositories["me/other"] = {"README.md": b"", "pytorch_model.bin": b"pickle"}
    for words, options, code, named in [
        (("pull", "me/nothing"), {}, 1, "is the name right"),
        (("pull", "me/other"), {}, 1, "holds no agent of amago: it lacks policy.safetensors, policy.json"),
        (("pull", "a/b/c"), {}, 2, "a/b/c"),
        (("pull", "me/other", "--out", card), {}, 2, "exists already"),
        (("push", card, "me/locked"), {"token": None}, 1, "HF_TOKEN"),
        (("push", card, "me/x"), {"endpoint": "http://127.0.0.1:9"}, 1, "127.0.0.1:9"),
    ]:
        found, text = amago(*words, **options)
        assert (found, named in text) == (code, True), text
    assert "me/locked" not in hub.repositories
    assert json.loads((card / "results.json").read_text()), "an existing directory is not touched"
