"""Every program of docs/extending.md runs, and its experiment really has the part that the program brought."""

import sys
import types
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gin
import gymnasium as gym
import numpy as np
import pytest
import tiny
import torch
from bad_input_cases import endless
from run_inside import program
from test_docs import SECTIONS

import amago
import amago.nets.actor_critic
import amago.nets.policy_dists
import amago.nets.transformer
from amago import cli_utils
from amago.cli_utils import parts
from amago.run.plots import read_metrics

BLOCKS = [(s.title, b) for s in SECTIONS if s.page.name == "extending.md" for b in s.blocks if b.language == "python"]
FILES = {block.file_name: block.text for _, block in BLOCKS if block.file_name}
PROGRAMS = {title: block.text for title, block in BLOCKS if not block.file_name}


@pytest.fixture(autouse=True)
def _registries_as_before() -> Iterator[None]:
    """What a program registers is gone afterwards, so that another test may run it again."""
    registry = gin.config._REGISTRY
    known, before = set(registry._selector_map), [(names, dict(names)) for names in parts.REGISTRIES.values()]
    gin.enter_interactive_mode()
    yield
    gin.exit_interactive_mode()
    for selector in set(registry._selector_map) - known:
        registry.pop(selector)
    for names, found in before:
        names.clear()
        names.update(found)


def run(title: str, cwd: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that a program leaves behind."""
    for name, text in FILES.items():
        (cwd / name).write_text(text, encoding="utf-8")
    main = types.ModuleType("__main__")
    with program(cwd, ["program.py"], tiny.SMALL):
        monkeypatch.setitem(sys.modules, "__main__", main)
        exec(compile(PROGRAMS[title], title, "exec"), vars(main))
    return vars(main)


def kernels(agent: Any) -> list[Any]:
    return [layer.attention_layer.self_attention for layer in agent.traj_encoder.tformer.layers]


def _class(name: str, *bases: type) -> type:
    return gin.configurable(type(name, bases, {}))


def test_names_are_taken_by_every_switch() -> None:
    bases = {
        "traj_encoder": amago.nets.traj_encoders.FFTrajEncoder,
        "tstep_encoder": amago.nets.tstep_encoders.FFTstepEncoder,
        "agent": amago.agent.MultiTaskAgent,
        "exploration": amago.envs.exploration.EpsilonGreedy,
        "actor": amago.nets.actor_critic.ResidualActor,
        "critic": amago.nets.actor_critic.NCriticsTwoHot,
        "distribution": amago.nets.policy_dists.Beta,
    }
    own = {kind: _class(f"Own{base.__name__}", base) for kind, base in bases.items()}
    for kind, cls in own.items():
        cli_utils.register(kind, "own", cls)
        cli_utils.register(kind, "own", cls)  # once more is no mistake
    settings: dict[str, Any] = {}
    assert cli_utils.switch_traj_encoder(settings, "own", d_model=3) is own["traj_encoder"]
    assert cli_utils.switch_tstep_encoder(settings, "own", d_output=4) is own["tstep_encoder"]
    assert cli_utils.switch_exploration(settings, "own", eps_end=0.5) is own["exploration"]
    assert cli_utils.switch_actor(settings, "own", continuous_dist_type="own") is own["actor"]
    assert cli_utils.switch_critic(settings, "own", output_bins=8) is own["critic"]
    assert cli_utils.switch_agent(settings, "own", actor_type="own", critic_type="own") is own["agent"]
    assert {k.rpartition(".")[2]: v for k, v in settings.items()} == {
        "d_model": 3, "d_output": 4, "eps_end": 0.5, "continuous_dist_type": own["distribution"], "output_bins": 8,
        "actor_type": own["actor"], "critic_type": own["critic"],
    }  # fmt: skip
    parser = cli_utils.add_common_cli(ArgumentParser())
    args = parser.parse_args(["--run_name", "r", "--buffer_dir", "b", "--traj_encoder", "own", "--agent_type", "own"])
    assert (args.traj_encoder, args.agent_type) == ("own", "own")


def test_names_that_cannot_be() -> None:
    own = _class("OwnGRU", amago.nets.traj_encoders.GRUTrajEncoder)
    with pytest.raises(ValueError, match=r"kind must be one of actor, agent, cnn, critic, .*, got kind='encoder'"):
        cli_utils.register("encoder", "own", own)
    with pytest.raises(ValueError, match="name='gru' is taken by the traj_encoder GRUTrajEncoder; give OwnGRU another"):
        cli_utils.register("traj_encoder", "gru", own)
    with pytest.raises(ValueError, match=r"Plain is not marked @gin\.configurable"):
        cli_utils.register("traj_encoder", "plain", type("Plain", (), {}))
    assert "plain" not in cli_utils.TRAJ_ENCODERS
    with pytest.raises(ValueError, match="actor must be one of ff, residual or a class, got 'wide'"):
        cli_utils.switch_agent({}, "agent", actor_type="wide")
    with pytest.raises(ValueError, match="distribution must be one of beta, gmm, tanh_gaussian or a class, got 'normal'"):
        cli_utils.switch_actor({}, "ff", continuous_dist_type="normal")


def test_gin_files_name_classes(tmp_path: Path) -> None:
    """``@TheClass``, as a page of the docs says."""
    (tmp_path / "own.gin").write_text("Agent.actor_type = @OwnActor\nTformerTrajEncoder.attention_type = @OwnAttention\n")
    actor = _class("OwnActor", amago.nets.actor_critic.ResidualActor)
    attention = _class("OwnAttention", amago.nets.transformer.SelfAttention)
    cli_utils.use_config({"TformerTrajEncoder.d_model": 8}, [str(tmp_path / "own.gin")])
    agent = amago.Agent(
        gym.spaces.Dict({"observation": gym.spaces.Box(-1, 1, (2,))}), gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(2), 4,
        amago.nets.tstep_encoders.FFTstepEncoder, amago.nets.traj_encoders.TformerTrajEncoder,
    )  # fmt: skip
    assert type(agent.actor) is actor
    assert type(kernels(agent)[0]) is attention


# section -> (class that it brings, where the agent has it)
EXPECTED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "Timestep encoder": ("MultiModalRobotTstepEncoder", lambda agent: agent.tstep_encoder),
    "Goals and instructions": ("TokenGoalEmb", lambda agent: agent.tstep_encoder.goal_emb),
    "Sequence model": ("FadingMemory", lambda agent: agent.traj_encoder),
    "Hidden states of several tensors": ("LSTMTrajEncoder", lambda agent: agent.traj_encoder),
    "Attention": ("DilatedAttention", lambda agent: kernels(agent)[-1]),
    "Agent": ("SignAgent", lambda agent: agent),
    "Actor": ("LinearActor", lambda agent: agent.target_actor),
    "Critic": ("CenteredCritics", lambda agent: agent.target_critics),
    "Distribution": ("SquashedLaplace", lambda agent: agent.actor.policy_dist),
    "By name": ("WideGRU", lambda agent: agent.traj_encoder),
}
MORE: dict[str, Callable[[dict[str, Any], Any], bool]] = {
    "Goals and instructions": lambda names, agent: agent.tstep_encoder.goal_emb.embedding.weight.shape == (6, 8),
    "Attention": lambda names, agent: (
        [k.stride for k in kernels(agent)] == [3, 3] and agent.init_hidden_state(2, "cpu").keys.shape[3] == 12
    ),
    "Agent": lambda names, agent: abs(float(agent.gammas[-1]) - 0.99) < 1e-6,
    "By name": lambda names, agent: (
        isinstance(agent.actor, names["DeepActor"])
        and len(agent.actor.base.layers) == 3
        and agent.traj_encoder.rnn.hidden_size == 48
    ),
}


def test_every_section_is_tested() -> None:
    assert set(PROGRAMS) == {*EXPECTED, "Callbacks", "Checks", "Exploration", "Extra fields"}
    assert len(BLOCKS) == len(PROGRAMS) + 1, "one program a section"
    assert set(FILES) == {"try_out.py"}


@pytest.mark.parametrize("title", EXPECTED)
def test_programs_train_with_their_part(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run(title, tmp_path, monkeypatch)
    wanted, part = EXPECTED[title]
    agent = names["experiment"].policy
    assert type(part(agent)) is names[wanted]
    assert MORE.get(title, lambda *_: True)(names, agent)
    assert all(torch.isfinite(p).all() for p in agent.parameters())
    (row,) = [r for r in read_metrics(next(tmp_path.glob("runs/*/metrics.jsonl")).parent) if r["section"] == "train"]
    assert row["grad_steps"] == 2
    assert np.isfinite([v for v in row["values"].values() if isinstance(v, float)]).all()
    amago.check_traj_encoder(agent.traj_encoder)


def test_the_extra_fields_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = run("Extra fields", tmp_path, monkeypatch)["experiment"]
    monkeypatch.chdir(tmp_path)
    batch = experiment.dataset.sample_batch(np.random.default_rng(0), 8)
    (b, length), mask = batch.rews.shape[:2], batch.mask
    assert {k: tuple(v.shape) for k, v in batch.extras.items()} == {"cue": (b, 1), "log_prob": (b, length)}
    assert torch.equal(batch.extras["cue"], batch.obs["observation"][:, 0, :1])  # whole rollouts of 8 steps
    assert (batch.extras["log_prob"][mask[:, 1:, 0]] < 0).all()
    (row,) = [r for r in read_metrics(next(tmp_path.glob("runs/*/metrics.jsonl")).parent) if r["section"] == "train"]
    assert np.isfinite(row["values"]["Cue Error"])


def test_the_program_of_callbacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run("Callbacks", tmp_path, monkeypatch)
    waiting, keep, stopping = names["experiment"].callbacks
    assert waiting.best == keep.best == stopping.best > float("-inf")
    assert waiting.waited == stopping.waited
    rows = read_metrics(tmp_path / "runs" / "callbacks")
    assert [r["values"]["Evaluations since the best"] for r in rows if r["section"] == "test"][-1] == waiting.waited
    assert names["best"].agent.state_dict().keys() == names["experiment"].policy.state_dict().keys()


def test_the_exploration_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run("Exploration", tmp_path, monkeypatch)
    assert names["experiment"].exploration_wrapper_type is names["StickyActions"]
    wrapped = names["StickyActions"](endless(), probability=0.5)
    wrapped.seed(0)
    wrapped.reset(seed=0)
    taken = []
    for t in range(200):
        wrapped.step(np.array([[t % 2]]))
        taken.append(wrapped.amago_env.last_action.item())
    repeated = sum(a == b for a, b in zip(taken, taken[1:]))
    assert taken[0] == 0
    assert 40 < repeated < 170  # the policy alternates; without noise no action would follow itself


def test_the_program_of_checks_names_its_faults(tmp_path: Path) -> None:
    with program(tmp_path, ["program.py"]) as text:
        exec(compile(PROGRAMS["Checks"], "Checks", "exec"), {"__name__": "__main__"})
    lines = text.getvalue().splitlines()
    assert len(lines) == 2
    assert "truncated" in lines[0] + lines[1]
    assert "outside of its space" in lines[0] + lines[1]
