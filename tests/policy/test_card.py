"""`amago card`: what is handed on opens elsewhere, says what was measured, and holds no secrets."""

import json
import os
import shutil
import sys

import gymnasium as gym
import huggingface_hub
import numpy as np
import pytest
import tiny
from run_inside import SIZES, run_amago

from amago import config
from amago.envs.builtin import TMazePassive
from amago.policy import load_policy
from amago.policy.card import Results, find_secrets, measure, write_card

SEED = 3
TOKEN = "hf_" + "Zz9" * 10


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of `amago train`, whose command line holds a token."""
    root = tmp_path_factory.mktemp("runs")
    words = ["train", "amago.envs.builtin:TMazePassive", "--run-name", "maze", "--buffer-dir", str(root), "--max-seq-len", "8"]
    with config.temporary({}):
        assert run_amago([*words, *SIZES.split()], root).code == 0
    record = json.loads((root / "maze" / "settings.json").read_text())
    record["starts"][0]["command"] += ["--token", TOKEN]
    record["fields"]["wandb_entity"] = "somebody"
    record["fields"]["make_train_env"]["password"] = "open sesame"
    record["fields"]["make_train_env"]["note"] = f"log in with {TOKEN}"
    record["starts"][0]["machine"]["host"] = "my-secret-host"
    (root / "maze" / "settings.json").write_text(json.dumps(record))
    return root / "maze"


@pytest.fixture(scope="module")
def card(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("cards") / "maze_card"
    outcome = run_amago(
        ["card", str(run), "--out", str(out), "--episodes", "6", "--actors", "4", "--seed", str(SEED), "--license", "mit"],
        run.parent,
    )
    assert outcome.code == 0, outcome.text
    assert f"card: {out}" in outcome.text
    return out


def test_it_opens_elsewhere_and_acts_as_the_run_does(run, card, tmp_path):
    moved = tmp_path / "elsewhere"
    shutil.copytree(card, moved)
    here, there = load_policy(run, sample=False), load_policy(moved, sample=False)
    obs = np.zeros(2, np.float32)
    assert [here.act(obs, 0.0) for _ in range(5)] == [there.act(obs, 0.0) for _ in range(5)]
    assert there.observation_space == here.observation_space
    assert there.raw_observation_space == here.raw_observation_space
    assert load_policy(moved / "policy.safetensors").gamma == here.gamma, "the file of weights is enough, too"
    outcome = run_amago(["eval", str(moved), "--episodes", "2"], tmp_path)
    assert outcome.code == 0, outcome.text
    assert "TMazePassive" in outcome.text, "it knows its environment"


def test_returns_are_those_of_the_rollouts(run, card):
    found = json.loads((card / "results.json").read_text())
    envs = [tiny.AMAGOEnv(TMazePassive()) for _ in range(3)]
    again = measure(load_policy(run), envs, 6, 20, seed=SEED)
    assert len(found["returns"]["TMazePassive"]["of_each"]) == 6
    assert found["seed"] == SEED
    assert found["actions"] == "sampled"
    assert found["rollouts_broken_off"] == 0
    assert set(found["metrics"]) == {"Success"}
    assert again.steps == found["steps"] == 6 * 11
    score = found["returns"]["TMazePassive"]
    assert score["mean"] == pytest.approx(np.mean(score["of_each"]))
    assert min(score["of_each"]) <= score["interval_95"][0] <= score["mean"] <= score["interval_95"][1] <= max(score["of_each"])


def test_the_page_is_a_model_card_of_the_hub(card):
    data = huggingface_hub.ModelCard.load(card / "README.md").data
    (result,) = data.eval_results
    score = json.loads((card / "results.json").read_text())["returns"]["TMazePassive"]
    assert (data.library_name, data.license, data.pipeline_tag) == ("amago", "mit", "reinforcement-learning")
    assert data.model_name == "maze"
    assert (result.task_type, result.dataset_name, result.metric_type) == (
        "reinforcement-learning",
        "TMazePassive",
        "mean_reward",
    )
    assert result.metric_value == f"{score['mean']:.2f} +/- {score['std']:.2f}"
    assert result.metric_args["interval_95"] == pytest.approx(score["interval_95"], abs=1e-4)
    text = (card / "README.md").read_text()
    assert f"| return in `TMazePassive` | {score['mean']:.4g} |" in text
    assert "(2,), float32)`" in text
    assert "| environment steps | 48 |" in text
    assert "| updates | 2 |" in text


def test_names_cannot_break_the_page(tmp_path, run):
    odd = Results({'Ant: "v5"\n---\n| <script>': [1.0, 2.0], "b": [float("nan")] * 2}, {"a | <b>": [1.0, 1.0]})
    write_card(load_policy(run), odd, tmp_path / "card", name='x: [1]\n# "y"', environment=None)
    data = huggingface_hub.ModelCard.load(tmp_path / "card" / "README.md").data
    (first, second) = data.eval_results
    assert first.dataset_name == 'Ant: "v5"\n---\n| <script>'
    assert not second.metric_args["interval_95"], "the Hub leaves out what is not known"
    assert data.model_name == 'x: [1]\n# "y"'
    body = (tmp_path / "card" / "README.md").read_text().split("\n---\n")[-1]
    assert "\n# x: [1] # " in body
    assert "a / &lt;b>" in body


def test_nothing_private_is_handed_on(run, card):
    everything = b"".join(p.read_bytes() for p in card.iterdir())
    for private in (TOKEN, "somebody", "open sesame", "my-secret-host", str(run.parent), sys.executable):
        assert private.encode() not in everything, private
    settings = json.loads((card / "settings.json").read_text())
    assert settings["fields"]["make_train_env"]["password"] == "(left out)"
    assert settings["fields"]["make_train_env"]["note"] == "(left out)"
    assert settings["fields"]["learning_rate"] == 1e-3
    assert settings["parameters"]["amago.agent.Agent.tau"] == 0.02
    assert settings["versions"]["torch"]
    assert "command" not in json.dumps(settings)
    bindings = json.loads((card / "policy.json").read_text())["bindings"]
    assert bindings["amago.agent.Agent.tau"] == 0.02
    assert not any(name.startswith("amago.experiment") for name in bindings), "those belong to the run"
    assert not [p for p in card.iterdir() if p.suffix in (".pt", ".pkl", ".pickle", ".npz", ".bin")]


def test_a_film_if_the_environment_draws_and_a_reason_if_not(card, tmp_path, run):
    image = pytest.importorskip("PIL.Image")
    (film,) = card.glob("replay.*")
    assert f"({film.name})" in (card / "README.md").read_text() or f'src="{film.name}"' in (card / "README.md").read_text()
    if film.suffix == ".gif":
        with image.open(film) as shown:
            assert shown.n_frames > 1
    outcome = run_amago(["card", str(run), "--out", str(tmp_path / "a"), "--episodes", "2", "--no-video"], tmp_path)
    assert outcome.code == 0
    assert not list((tmp_path / "a").glob("replay.*"))
    assert "There is no video: none was asked for." in (tmp_path / "a" / "README.md").read_text()


class Undrawn(gym.Wrapper):
    def __init__(self, render_mode=None):
        super().__init__(TMazePassive())

    def render(self):
        return None


def test_an_environment_that_draws_nothing_is_no_error(tmp_path, run, monkeypatch):
    monkeypatch.setitem(sys.modules, "my_envs", sys.modules[__name__])
    words = ["card", str(run), "--env", "my_envs:Undrawn", "--out", str(tmp_path / "a"), "--episodes", "2"]
    outcome = run_amago(words, tmp_path)
    assert outcome.code == 0, outcome.text
    assert "no video: TMazePassive does not draw itself" in outcome.text
    assert "There is no video: TMazePassive does not draw itself" in (tmp_path / "a" / "README.md").read_text()


def test_an_earlier_card_stays_unless_it_is_asked_to_go(tmp_path, run, card):
    copy = tmp_path / "copy"
    shutil.copytree(card, copy)
    before = (copy / "README.md").read_text()
    results = Results({"TMazePassive": [1.0, 2.0]})
    with pytest.raises(ValueError, match="exists already"):
        write_card(load_policy(run), results, copy)
    assert (copy / "README.md").read_text() == before
    write_card(load_policy(run), results, copy, overwrite=True)
    assert json.loads((copy / "results.json").read_text())["returns"]["TMazePassive"]["of_each"] == [1.0, 2.0]
    assert sorted(os.listdir(tmp_path)) == ["copy"]
    mine = tmp_path / "thesis"
    mine.mkdir()
    (mine / "chapter.tex").write_text("years of work")
    with pytest.raises(ValueError, match="is no card"):
        write_card(load_policy(run), results, mine, overwrite=True)
    assert (mine / "chapter.tex").read_text() == "years of work"


def test_nothing_is_left_where_it_fails(tmp_path, run):
    def film(directory):
        raise OSError("the camera is broken")

    with pytest.raises(OSError, match="camera"):
        write_card(load_policy(run), Results({"a": [1.0, 2.0]}), tmp_path / "card", film=film)
    assert not os.listdir(tmp_path)


def test_a_binding_that_is_a_secret_is_refused(tmp_path, run):
    policy = load_policy(run)
    policy.description["bindings"]["my.Encoder.api_key"] = "xyz"
    with pytest.raises(
        ValueError, match=r"policy\.json holds a value of 'my\.Encoder\.api_key'.*policy\.safetensors"
    ) as raised:
        write_card(policy, Results({"a": [1.0, 2.0]}), tmp_path / "card")
    assert "xyz" not in str(raised.value)
    assert not os.listdir(tmp_path)


def test_parts_of_ones_own_are_named(tmp_path, run):
    policy = load_policy(run)
    policy.description["agent"] = "__main__:Agent"
    with pytest.raises(ValueError, match="move them to a module"):
        write_card(policy, Results({"a": [1.0, 2.0]}), tmp_path / "card")
    (tmp_path / "my_agents.py").write_text("import gin, amago\n\n@gin.configurable\nclass Mine(amago.Agent):\n    pass\n")
    program = (
        "import tiny, my_agents; from amago.policy.card import Results, write_card; from amago.policy import load_policy\n"
        "e = tiny.learned('.', agent_type=my_agents.Mine, always_save_latest=True); e.close()\n"
        "write_card(load_policy('run'), Results({'a': [1.0, 2.0]}), 'card')"
    )
    tiny.run_program(program, cwd=tmp_path)
    page = (tmp_path / "card" / "README.md").read_text()
    assert "amago.load_policy(\"DIRECTORY\", modules=['my_agents'])" in page
    assert "the Python package `my_agents` must be installed" in page
    with pytest.raises(ValueError, match="my_agents"):
        load_policy(tmp_path / "card")


SAMPLES = [
    "hf_" + "a1B2" * 6, "ghp_" + "a1B2" * 9, "github_pat_" + "a1B2" * 9, "glpat-" + "a1B2" * 5, "sk-proj-" + "a1B2" * 8, "AKIA" + "A1B2" * 4,
    "AIza" + "a1B2c" * 7, "xoxb-1234567890-abc", "eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.x", "-----BEGIN RSA PRIVATE KEY-----",
    "https://me:pa55word@example.org/x", "postgres://user:secret@db",
]  # fmt: skip


@pytest.mark.parametrize("sample", SAMPLES)
def test_secrets_are_found_by_their_form(tmp_path, sample):
    (tmp_path / "README.md").write_text(f"Some words, then {sample} and more.")
    (found,) = find_secrets(tmp_path)
    assert found[0] == "README.md"
    assert sample not in repr(found)


def test_secrets_are_found_by_name_and_by_value(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_TOKEN", "correct horse battery")
    (tmp_path / "a.json").write_text(json.dumps({"x": [{"hub.password": "p"}], "header": json.dumps({"api_key": "k"})}))
    (tmp_path / "b.txt").write_text("the correct horse battery staples")
    assert find_secrets(tmp_path) == [
        ("a.json", "a value of 'api_key'"), ("a.json", "a value of 'hub.password'"), ("b.txt", "the value of the variable MY_API_TOKEN"),
    ]  # fmt: skip


def test_ordinary_names_are_no_secrets(card, tmp_path):
    assert not find_secrets(card)
    names = [
        "token",
        "wandb_api_key",
        "my.Env.password",
        "API-KEY",
        "amago.ActionMask.key",
        "specify_obs_keys",
        "n_tokens",
        "Agent.tau",
    ]
    (tmp_path / "a.json").write_text(json.dumps(dict.fromkeys(names, "x")))
    assert {what for _, what in find_secrets(tmp_path)} == {f"a value of {name!r}" for name in names[:4]}


def test_one_rollout_is_too_few():
    with pytest.raises(ValueError, match="episodes=1"):
        measure(None, [], 1, 5)
