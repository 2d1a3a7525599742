"""Each script of examples/: an epoch with tiny settings in every mode, resume, help, and refusals."""

import argparse
import importlib
import pickle
import re
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import tiny
import torch
from _pytest.mark import ParameterSet
from run_inside import TINY, run_script

from amago import cli_utils
from amago.cli import demo
from amago.envs.pool import worker
from amago.run.checkpoint import CheckpointError

EXAMPLES = Path(__file__).parents[2] / "examples"
FEW = TINY.replace("--no_async", "--env_workers 1")
SMALL = {
    "00_meta_frozen_lake.py": "--lake_size 2 --k_episodes 2 --max_episode_steps 5 --hide_k_progress",
    "01_basic_gym.py": "--horizon 12 --max_seq_len 8",
    "02_gymnax.py": "--params memory_length=6 max_steps_in_episode=7",
    "03_popgym_suite.py": "--multidomain MineSweeperEasy",
    "04_tmaze.py": "--horizon 8",
    "05_dark_key_door.py": "--room_size 3 --episode_length 5 --meta_horizon 10 --light_room_observation",
    "06_alchemy.py": "--num_trials 2 --steps_per_trial 5",
    "07_metaworld.py": "--k 2 --episode_length 6 --hide_rl2s",
    "08_ale.py": "--games Pong --time_limit 10 --resolution 36",
    "09_multitask_procgen.py": "--games coinrun maze --time_limit 6",
    "10_babyai.py": "--levels GoToObjS4 --episode_length 6",
    "11_xland_minigrid.py": "--k_shots 2 --shot_length 5 --num_rulesets 20",
    "12_half_cheetah_vel.py": "--k_episodes 2 --episode_length 6 --task_min_velocity 1",
    "13_mazerunner_relabeling.py": "--maze_size 5 --time_limit 10 --goals 1 --randomized_actions --relabel some",
    "15_pokemon.py": "--max_steps 8 --record 2 --online_after 0",
    "16_crafter_instructions.py": "--time_limit 12 --max_goals 2 --start_learning_at_epoch 0",
    "17_retro_arcade.py": "--time_limit 10 --resolution 36",
    "18_point_robot.py": "--k_episodes 2 --episode_length 6",
    "19_returns_of_any_size.py": "",
    "21_in_context_from_records.py": "--method off_policy --attempts 1",
}
OFFLINE = "20_offline_lake.py"  # which never collects, and has a test of its own
FROM_FILES = "14_d4rl.py"  # which learns from a file first; see envs_extra/test_d4rl_example.py
NEEDS = {  # packages that not everyone has
    "02_gymnax.py": "gymnax", "03_popgym_suite.py": "popgym", "07_metaworld.py": "metaworld", "08_ale.py": "ale_py",
    "09_multitask_procgen.py": "envpool", "10_babyai.py": "minigrid", "11_xland_minigrid.py": "xminigrid",
    "12_half_cheetah_vel.py": "mujoco", "15_pokemon.py": "poke_env", "16_crafter_instructions.py": "crafter",
    "17_retro_arcade.py": "stable_retro",
}  # fmt: skip
BATCHES = ("02_gymnax.py", "11_xland_minigrid.py")  # whose environments are batches, which need no workers
UNPACK = """
import pickle, sys
from amago.envs.pool import worker
worker.unpack(pickle.load(open(sys.argv[1], "rb")))
print("torch" in sys.modules)
"""
ALL = sorted(p.name for p in EXAMPLES.glob("*.py"))


def where_installed(name: str, *values: object) -> ParameterSet:
    """A case of an example, skipped where its package is missing."""
    package = NEEDS.get(name)
    missing = package is not None and find_spec(package) is None
    return pytest.param(name, *values, id=name, marks=pytest.mark.skipif(missing, reason=f"needs {package}: make test-envs"))


NAMES = [where_installed(n) for n in ALL if n not in (OFFLINE, FROM_FILES)]


def run(name: str, directory: Path, *arguments: str) -> str:
    """What the example printed; it must have ended well."""
    outcome = run_script(EXAMPLES / name, [*FEW.split(), *SMALL[name].split(), *arguments], directory)
    assert outcome.code == 0, outcome.text
    return outcome.text


def refusal(name: str, directory: Path, *arguments: str) -> str:
    """What the example says to wrong arguments."""
    try:
        outcome = run_script(EXAMPLES / name, [*FEW.split(), *SMALL[name].split(), *arguments], directory)
    except ValueError as error:
        return str(error)
    assert outcome.code == 2
    return outcome.text


def metrics(directory: Path) -> list[dict]:
    return tiny.rows(directory / "tiny")


def files(directory: Path, pattern: str) -> list[str]:
    return sorted(p.name for p in (directory / "tiny").glob(pattern))


def test_every_example_is_tested_here() -> None:
    assert sorted({*SMALL, OFFLINE, FROM_FILES}) == ALL
    assert set(NEEDS) <= set(SMALL)


@pytest.mark.parametrize("name", NAMES)
def test_trains_and_resumes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First in worker processes, which do not import torch: it would take each of them two seconds and 200 MB."""
    plans, pack = [], worker.pack
    monkeypatch.setattr(worker, "pack", lambda plan: plans.append(pack(plan)) or plans[-1])
    assert "Average Total Return" in run(name, tmp_path)
    first = metrics(tmp_path)
    assert {row["section"] for row in first} == {"val", "rollout", "buffer", "train", "test"}
    assert {row["env_steps"] for row in first if row["section"] == "test"} == {2 * 24}
    assert max(row["grad_steps"] for row in first) == 2
    assert bool(plans) == (name not in BATCHES)
    if plans:
        (sent := tmp_path / "sent").write_bytes(pickle.dumps(plans[0]))
        path = f"{tiny.environment()['PYTHONPATH']}:{EXAMPLES}"
        assert tiny.run_program(UNPACK, sent, PYTHONPATH=path) == "False\n"
    run(name, tmp_path, "--no_async", "--resume", "auto", "--epochs", "2")
    new = metrics(tmp_path)[len(first) :]
    trained = [(row["epoch"], row["env_steps"], row["grad_steps"]) for row in new if row["section"] == "train"]
    assert trained == [(1, 2 * 48, 4)]
    assert files(tmp_path, "ckpts/training_states/*") == ["tiny_epoch_0", "tiny_epoch_1"]
    assert files(tmp_path, "buffer/fifo/*.safetensors")


def test_collects_then_learns_in_one_directory(tmp_path: Path) -> None:
    name = "04_tmaze.py"
    run(name, tmp_path, "--no_async", "--mode", "collect")
    before = metrics(tmp_path)
    assert {row["section"] for row in before} == {"val", "rollout", "buffer", "test"}
    assert not files(tmp_path, "ckpts/latest/*")
    collected = files(tmp_path, "buffer/fifo/*")
    run(name, tmp_path, "--no_async", "--mode", "learn")
    assert {row["section"] for row in metrics(tmp_path)[len(before) :]} == {"buffer", "train"}
    assert files(tmp_path, "ckpts/latest/*") == ["policy.pt"]
    assert files(tmp_path, "buffer/fifo/*") == collected != []


@pytest.mark.parametrize(("task", "method"), [("room", "ad"), ("bandit", "dpt")])
def test_clones_recorded_learners(tmp_path: Path, task: str, method: str) -> None:
    name, few = "21_in_context_from_records.py", "--tasks 3 --histories 4 --attempts 2 --method"
    out = run(name, tmp_path, "--no_async", "--task", task, *few.split(), method, "--timesteps_per_epoch", "30")
    assert f"Return in {task}" in out, "a table of returns by attempt"
    assert {row["section"] for row in metrics(tmp_path)} == {"val", "buffer", "train", "test"}, "nothing is collected"
    assert len(files(tmp_path, "histories/protected/*.safetensors")) > 0


def test_learns_from_a_record_alone(tmp_path: Path) -> None:
    recorder = tiny.started(tmp_path, demo.make_env, name="recorder", max_seq_len=demo.HORIZON)
    recorder.write_latest_policy()
    recorder.close()
    arguments = FEW.replace("--timesteps_per_epoch 24", "--no_async --recorder recorder --rollouts 24").split()
    outcome = run_script(EXAMPLES / OFFLINE, arguments, tmp_path)
    assert outcome.code == 0, outcome.text
    assert "recorded: recorder" in outcome.text
    assert {row["section"] for row in metrics(tmp_path)} == {"val", "buffer", "train", "test"}
    assert {row["env_steps"] for row in metrics(tmp_path)} == {0}
    recorded = files(tmp_path, "buffer/protected/*.safetensors")
    assert recorded
    assert not files(tmp_path, "buffer/fifo/*")

    again = run_script(EXAMPLES / OFFLINE, [*arguments, "--resume", "auto", "--epochs", "2"], tmp_path)
    assert again.code == 0, again.text
    assert "recorded:" not in again.text, "what there is is used"
    assert files(tmp_path, "buffer/protected/*.safetensors") == recorded


def test_trials_and_checkpoints_have_names(tmp_path: Path) -> None:
    """--trials names its runs, and --ckpt starts from a policy of before."""
    name = "04_tmaze.py"
    run(name, tmp_path, "--no_async", "--run_name", "other", "--trials", "2")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other_trial_0", "other_trial_1"]
    again = ["--no_async", "--run_name", "other_trial_0", "--ckpt"]
    run(name, tmp_path, *again, "0")
    with pytest.raises(CheckpointError, match=r"policy_epoch_7\.pt"):
        run(name, tmp_path, *again, "7")


@pytest.mark.parametrize("name", NAMES)
def test_help_explains_every_argument(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsers: list[argparse.ArgumentParser] = []
    parse_args = argparse.ArgumentParser.parse_known_args

    def remember(self: argparse.ArgumentParser, *args: object) -> tuple[argparse.Namespace, list[str]]:
        parsers.append(self)
        return parse_args(self, *args)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", remember)
    outcome = run_script(EXAMPLES / name, ["--help"], tmp_path)
    assert (outcome.code, len(parsers)) == (0, 1)
    arguments = parsers[0]._actions
    assert len(arguments) > 25
    for argument in arguments:
        assert argument.option_strings[0] in outcome.text
        assert argument.help, f"{argument.option_strings} has no help"
        words = re.sub(r"\s+", "", argument.help.split("%")[0])
        assert words in re.sub(r"\s+", "", outcome.text)


OWN_WRONG = [  # what environments refuse has tests of its own
    ("00_meta_frozen_lake.py", "--lake_size 1", "size must be at least 2, got 1"),
    ("01_basic_gym.py", "--env NoSuchEnv-v0", "NoSuchEnv"),
    ("02_gymnax.py", "--params steps=3", "MemoryChain-bsuite has no parameter 'steps'; it has "),
    ("06_alchemy.py", "--shaping", "--shaping keeps rewards and previous actions from the agent, so it needs --view colours"),
    ("12_half_cheetah_vel.py", "--test_range 3 2", "target_range must be (low, high) with low <= high, got (3.0, 2.0)"),
    ("15_pokemon.py", "--battle_format gen9doublesou", "one of single battles, but 'gen9doublesou' is doubles"),
]


@pytest.mark.parametrize(("name", "arguments", "said"), [where_installed(*wrong) for wrong in OWN_WRONG])
def test_refuses_impossible_environments(name: str, arguments: str, said: str, tmp_path: Path) -> None:
    assert said in refusal(name, tmp_path, "--no_async", *arguments.split())


FLAGS_OF_THE_ORIGINAL = [
    ("00_meta_frozen_lake.py", "--seq_model ff --max_episode_steps 5 --hide_k_progress", {"traj_encoder": "ff", "max_episode_steps": 5}),
    ("05_dark_key_door.py", "--light_room_observation", {"light": True}),
    ("07_metaworld.py", "--hide_rl2s", {"hide_rl2s": True}),
    ("08_ale.py", "--cnn NatureishCNN", {"cnn": "nature"}),
    ("09_multitask_procgen.py", "--train_seeds 10", {"num_levels": 10}),
    ("10_babyai.py", "--train_seeds 10", {"num_seeds": 10}),
    ("11_xland_minigrid.py", "--benchmark trivial-1m --rooms 4 --grid_size 13", {"rulesets": "trivial-1m", "rooms": 4, "grid_size": 13}),
    ("12_half_cheetah_vel.py", "--task_min_velocity 1 --task_max_velocity 2 --policy_seq_len 8 --eval_timesteps 9",
     {"task_min_velocity": 1.0, "task_max_velocity": 2.0, "max_seq_len": 8, "eval_timesteps": 9}),
    ("13_mazerunner_relabeling.py", "--goals 3 --randomized_actions", {"goals": 3, "randomize_actions": True}),
    ("14_d4rl.py", "--dataset x --policy_dist GMM --actor_type ResidualActor --online_after_epoch 3",
     {"policy_dist": "gmm", "actor_type": "residual", "online_after": 3}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "flags", "meant"), FLAGS_OF_THE_ORIGINAL, ids=[f[0] for f in FLAGS_OF_THE_ORIGINAL])
def test_flags_of_the_original_systems_examples(name: str, flags: str, meant: dict) -> None:
    add_cli = runpy.run_path(str(EXAMPLES / name), run_name="example")["add_cli"]
    args = vars(cli_utils.parse_args(None, add_cli, ["--run_name", "x", "--buffer_dir", ".", *flags.split()]))
    assert {key: args[key] for key in meant} == meant


@pytest.mark.parametrize("name", [where_installed("03_popgym_suite.py")])
def test_games_are_played_beside_the_one_that_is_judged(name: str, tmp_path: Path) -> None:
    assert "leave out --beside" in refusal(name, tmp_path, "--beside", "AutoencodeEasy")
    words = "--env RepeatPreviousMedium --beside RepeatPreviousEasy --no_async --timesteps_per_epoch 110 --eval_timesteps 110"
    outcome = run_script(EXAMPLES / name, [*FEW.split(), *words.split()], tmp_path)
    assert outcome.code == 0, outcome.text
    played = {
        row["section"]: {k.rpartition(" ")[2] for k in row["values"] if k.startswith("Average Total Return in ")}
        for row in metrics(tmp_path)
    }
    assert (len(played["rollout"]), len(played["val"])) == (2, 1)
    assert played["val"] < played["rollout"]


IN_CONFIG = [
    ("--horizon 50", "Discrete.clip_prob_low = 0.001", "Discrete.clip_prob_high = 0.99"),  # one wrong step in a corridor
    ("--horizon 200 --active", "Discrete.clip_prob_low = 0.0005", "Discrete.clip_prob_high = 0.995"),
    ("--horizon 50 --traj_encoder gru --long_memory", "GRUTrajEncoder.longest = 50.0"),
    ("--configs own.gin", "lr_warmup_steps = 7", "amago.agent.Agent.reward_multiplier = 3.0"),  # the script itself says 100
]


@pytest.mark.parametrize(("arguments", "lines"), [(c[0], c[1:]) for c in IN_CONFIG], ids=[c[0] for c in IN_CONFIG])
def test_settings_follow_from_arguments_and_gin_files_come_last(arguments: str, lines: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "own.gin").write_text("Experiment.lr_warmup_steps = 7\nAgent.reward_multiplier = 3.0\n")
    run("04_tmaze.py", tmp_path, "--no_async", "--epochs", "0", *arguments.split())
    text = (tmp_path / "tiny" / "config.txt").read_text()
    assert all(f"{line}\n" in text for line in lines)


def test_robots_on_a_device_are_those_of_the_host() -> None:
    """4,096 rows, of which the first are compared with `PointRobot` over two rollouts; the metrics come with the end."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        device, host = (importlib.import_module(f"support.{name}") for name in ("device_point_robot", "point_robot"))
    finally:
        sys.path.remove(str(EXAMPLES))
    for rewards in host.REWARDS:
        robots = device.DevicePointRobot(4096, 2, 3, step_size=0.5, rewards=rewards)
        rows = [host.PointRobot(2, 3, step_size=0.5, rewards=rewards) for _ in range(5)]
        obs, _ = robots.reset(seed=0)
        assert len(obs) == len(robots.goals.unique(dim=0)) == 4096
        for robot in rows:
            robot.reset()
        for _ in range(2 * robots.horizon):
            for robot, goal in zip(rows, robots.goals.tolist()):
                robot.goal = tuple(goal)
            actions = torch.rand(4096, 2) * 2 - 1
            obs, reward, terminated, truncated, info = robots.step(actions)
            for row, robot in enumerate(rows):
                now, r, over, _, logged = robot.step(actions[row].numpy())
                assert over == bool(terminated[row])
                torch.testing.assert_close(torch.tensor(r), reward[row])
                torch.testing.assert_close(torch.from_numpy(now), (info["final_obs"] if over else obs)[row])
                if over:
                    last = {k: v for k, v in logged.items() if "Attempt 1" in k}
                    assert {k: pytest.approx(float(info["final_info"][k][row]), abs=1e-5) for k in last} == last
                    torch.testing.assert_close(torch.from_numpy(robot.reset()[0]), obs[row])
            assert not truncated.any()


@pytest.mark.parametrize("name", ["18_point_robot.py", "04_tmaze.py"])
def test_environments_on_a_device_are_one_batch(name: str, tmp_path: Path) -> None:
    run(name, tmp_path, "--on_device", "--parallel_actors", "6", "--timesteps_per_epoch", "16")
    assert metrics(tmp_path)[-1]["env_steps"] % (6 * 16) == 0
    if name == "04_tmaze.py":
        assert "Average Success in tmaze_device_8" in {name for row in metrics(tmp_path) for name in row["values"]}
        assert "leave out --active" in refusal(name, tmp_path, "--on_device", "--active")
        assert "--shortest must be 4 to 8" in refusal(name, tmp_path, "--shortest", "9")
