"""Several ranks of one learner: a signal to any of them, or to their launcher, and a rank that is killed."""

import os
import signal
import time

import pytest
from fault_helpers import count, report, rng, say
from rank_launch import Launched
from tiny import rows

from amago.run import checkpoint

FAULTS = [
    ("launcher", signal.SIGINT), ("rank 1", signal.SIGKILL), ("rank 0", signal.SIGTERM), ("rank 1", signal.SIGINT),
    ("rank 0", signal.SIGKILL), ("launcher", signal.SIGTERM), ("rank 1", signal.SIGTERM), ("rank 0", signal.SIGINT),
    ("both ranks", signal.SIGTERM),
]  # fmt: skip


def rows_of(directory):
    return rows(directory / "endless", "train") if (directory / "endless" / "metrics.jsonl").is_file() else []


@pytest.mark.timeout(1800)
def test_all_ranks_end_together_and_the_same_command_goes_on(tmp_path):
    """A life begins where the last one ended; one that a kill ended, at its newest training state."""
    generator, wanted, slowest, expected = rng("ranks"), count(2, 45), 0.0, 0
    for number in range(wanted):
        target, signum = FAULTS[number % len(FAULTS)]
        before, launched = len(rows_of(tmp_path)), Launched("endless", tmp_path)
        try:
            launched.wait_for(lambda: len(rows_of(tmp_path)) > before)  # noqa: B023
            time.sleep(generator.uniform(0.0, 2.0))
            first = rows_of(tmp_path)[before]["grad_steps"]
            pids = {"launcher": [launched.process.pid], "both ranks": launched.pids}.get(target) or [
                launched.pids[int(target[-1])]
            ]
            for pid in pids:
                os.kill(pid, signum)
            slowest = max(slowest, launched.ended())
        finally:
            launched.close()
        assert expected < first <= expected + 2, f"it went on from update {expected}, and its first row is of update {first}"
        state = checkpoint.load_training_state(checkpoint.newest_complete(tmp_path / "endless" / "ckpts" / "training_states"))[
            2
        ]
        assert len(state["ranks"]) == 2
        expected = state["updater"]["grad_steps"]
        if signum != signal.SIGKILL:
            assert launched.codes == [str(128 + signum)] * 2, launched.output.read_text()
            assert expected == rows_of(tmp_path)[-1]["grad_steps"], "nothing is lost"
    say(f"all processes had ended after {slowest:.1f} s at most")
    report("signals to ranks and launchers, after each of which the same command went on", wanted)
