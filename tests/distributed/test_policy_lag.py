"""Policies of collectors that are behind the newest published one: said, and with a bound not acted with."""

import json
import signal
import threading
from types import SimpleNamespace

import pytest
import tiny

from amago.distributed.lag import LAG_SAID, OldPolicies
from amago.run.roles.collector import Collector
from amago.run.roles.protocol import OLD_POLICY, ORDERS, Assignment, write_soon
from amago.run.signals import GracefulStop

FOREVER = 100_000
PHASE = 1200  # steps of each of two actors, of a millisecond: seconds in which the learner publishes many versions


def phases(run):
    """Steps of each of the collector's phases."""
    path = run.run_dir / "launch" / "collector-0"
    steps = [row["env_steps"] for row in tiny.rows(path, "rollout")] if (path / "metrics.jsonl").exists() else []
    return [b - a for a, b in zip([0, *steps], steps)]


@pytest.mark.timeout(600)
def test_without_a_bound_phases_are_whole_and_the_lag_is_said_once(launch):
    run = launch(collectors=1, epochs=FOREVER, train_timesteps_per_epoch=PHASE)
    run.until(lambda: len(phases(run)) >= 4)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143
    assert set(phases(run)[:4]) == {2 * PHASE}
    assert run.output.count("collector-0 acts with policy") == 1
    lags = [row["values"]["Largest Policy Lag (Versions)"] for row in run.rows("rollout")]
    assert max(lags) > LAG_SAID


@pytest.mark.timeout(600)
def test_with_a_bound_a_phase_ends_when_the_policy_is_too_old(launch):
    run = launch("--max-policy-lag", "2", collectors=1, epochs=FOREVER, train_timesteps_per_epoch=PHASE)
    run.until(lambda: len(phases(run)) >= 6)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143
    done = phases(run)
    assert done[0] == 2 * PHASE, "the first version is the newest until there is data to learn from"
    assert max(done[2:]) < 2 * PHASE
    assert "collector-0 acts with policy" not in run.output, "there is nothing to say of what is bounded"
    assert run.rollouts == run.arrived[0], "what the ended phases have collected is kept"


class Weights:
    """What a collector can read: version 3, until somebody publishes."""

    def __init__(self, root):
        self.checkpoints = SimpleNamespace(version=3, latest=root / "policy.pt")
        self._stop, self.read = GracefulStop(), 0
        self.publish(3)

    def publish(self, version):
        self.newest = version
        tmp = self.checkpoints.latest.with_suffix(".tmp")
        tmp.write_text(str(version))
        tmp.rename(self.checkpoints.latest)

    def read_latest_policy(self):
        self.read += 1
        self.checkpoints.version = self.newest


def test_a_collector_waits_until_the_newer_policy_has_reached_it(tmp_path):
    run, assignment = Weights(tmp_path), Assignment("collector", 0, 1, str(tmp_path), max_policy_lag=2)
    write_soon(tmp_path / ORDERS, {"pause": False, "version": 9})
    role, said = Collector(assignment), []

    def publish():
        said.append(json.loads(assignment.beat_file.read_text()))
        run.publish(8)

    timer = threading.Timer(1.2, publish)
    timer.start()
    role.policy_read(run)
    timer.join()
    assert said[0]["paused"] == OLD_POLICY
    assert run.checkpoints.version == 8
    assert run.read == 2, "each file is read once"
    assert json.loads(assignment.beat_file.read_text()) | {"paused": "", "version": 8} == json.loads(
        assignment.beat_file.read_text()
    )
    assert not role.ends_phase(run._stop, collecting=True)()


def test_a_signal_ends_the_wait(tmp_path):
    run = Weights(tmp_path)
    write_soon(tmp_path / ORDERS, {"pause": False, "version": 9})
    run._stop.requested = signal.SIGTERM
    Collector(Assignment("collector", 0, 1, str(tmp_path), max_policy_lag=2)).policy_read(run)
    assert run.checkpoints.version == 3


def test_the_launcher_says_each_once():
    policies, bounded = OldPolicies(), OldPolicies(4)
    beats = {"collector-0": {"version": 5}, "collector-1": {"version": 18}, "collector-2": {}}
    (text,) = policies.news(20, beats)
    assert text.startswith("collector-0 acts with policy 5, 15 versions older than the newest, 20")
    assert policies.news(21, beats) == []
    assert [t.split()[0] for t in policies.news(40, beats)] == ["collector-1"]
    assert bounded.news(20, beats) == [], "its phase ends soon"
    beats["collector-0"] = {"version": 5, "paused": OLD_POLICY}
    (text,) = bounded.news(20, beats)
    assert text.startswith("collector-0 waits for a newer policy than 5")
    assert "allows 4" in text


@pytest.mark.parametrize("value", ["-1", "1.5", "many"])
def test_another_bound_is_refused(value, capsys):
    from amago.cli import main

    with pytest.raises(SystemExit):
        main(["launch", "--collectors", "1", f"--max-policy-lag={value}", "train.py"])
    assert f"'{value}' is not a number of versions" in capsys.readouterr().err
