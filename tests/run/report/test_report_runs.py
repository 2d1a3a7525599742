"""Which directories are runs, which runs belong together, and what they are called."""

import pytest
from runs_on_disk import write_run, write_settings

from amago.run.report.runs import base_name, differences, find_runs, group_runs, labelled, read_run, walk


def groups_of(paths):
    return {g.name: [r.path.name for r in g.runs] for g in group_runs([read_run(p) for p in paths])}


def test_runs_are_found_below_directories_and_once(tmp_path):
    a, b = write_run(tmp_path / "x" / "a", (1,)), write_run(tmp_path / "x" / "deep" / "b", (1,))
    write_run(a / "ckpts" / "not_a_run", (1,))
    assert find_runs([tmp_path, a]) == [a, b]
    assert list(walk(tmp_path)) == [a, b]


def test_runs_of_other_settings_are_other_groups_whatever_their_names(tmp_path):
    rates = [1e-3, 1e-3, 1e-2]
    paths = [write_run(tmp_path / f"a_{i}", (1,), seed=i, learning_rate=rate) for i, rate in enumerate(rates)]
    assert groups_of(paths) == {"a": ["a_0", "a_1"], "a_2": ["a_2"]}
    named = differences([read_run(p) for p in paths])
    assert named["learning_rate"] == rates
    assert set(named) == {"learning_rate", "seed", "run_name"}


def test_where_a_run_lies_and_its_buffer_are_no_settings(tmp_path):
    for i in range(2):
        write_run(tmp_path / f"place{i}" / f"r_{i}", (1,), settings=False)
        place = {"dset_root": f"/disk{i}", "dset_name": f"r_{i}", "max": 5}
        write_settings(tmp_path / f"place{i}" / f"r_{i}", seed=i, dataset=place)
    paths = find_runs([tmp_path])
    assert groups_of(paths) == {"r": ["r_0", "r_1"]}
    write_settings(paths[1], seed=1, dataset={**place, "max": 6})
    assert len(groups_of(paths)) == 2


def test_what_is_shown_of_a_run_is_no_setting_and_other_callbacks_are(tmp_path):
    film = {"type": "amago.policy.filming.RecordVideo", "interval": 5}
    stop = {"type": "amago.run.callbacks.EarlyStopping", "patience": 3}
    told = [
        {}, {"callbacks": []}, {"callbacks": [film], "log_to_tensorboard": True, "progress": "none"}, {"callbacks": [film, stop]},
        {"callbacks": [stop], "log_to_wandb": True, "wandb_project": "p"},
    ]  # fmt: skip
    for i, own in enumerate(told):
        write_run(tmp_path / f"a_{i}", (1,), settings=False)
        write_settings(
            tmp_path / f"a_{i}", seed=i, **{"callbacks": [], "log_to_wandb": False, "log_to_tensorboard": False, **own}
        )
    groups = [sorted(runs) for runs in groups_of(find_runs([tmp_path])).values()]
    assert groups == [["a_0", "a_1", "a_2"], ["a_3", "a_4"]]


def test_groups_of_one_name_are_named_after_what_differs(tmp_path):
    for i, rate in enumerate([1e-3, 1e-3, 1e-2, 1e-2]):
        write_run(tmp_path / f"a_{i}", (1,), seed=i, learning_rate=rate)
    assert list(groups_of(find_runs([tmp_path]))) == ["a, learning_rate=0.001", "a, learning_rate=0.01"]


def test_runs_without_settings_are_grouped_by_name_and_config(tmp_path):
    paths = [write_run(tmp_path / n, (1,), settings=False) for n in ("b_seed0", "b_seed1", "c_seed0")]
    assert groups_of(paths) == {"b": ["b_seed0", "b_seed1"], "c_seed0": ["c_seed0"]}
    (paths[1] / "config.txt").write_text("Agent.tau = 1")
    assert len(groups_of(paths)) == 3


def test_a_record_of_a_run_that_no_process_has_learned_in_yet(tmp_path):
    path = write_run(tmp_path / "r", (1,), settings=False)
    (path / "settings.json").write_text('{"schema": 1, "id": "x", "starts": []}')
    run = read_run(path)
    assert (run.settings, run.problems) == (None, [])


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("lake_seed0", "lake"),
        ("lake_trial_12", "lake"),
        ("lake-7", "lake"),
        ("lake", "lake"),
        ("7", "7"),
        ("v2_test", "v2_test"),
        ("lake3_0/run", "lake3/run"),
    ],
)
def test_names_without_the_number_of_a_seed(name, base):
    assert base_name(name) == base


def test_names_that_clash_get_as_much_of_their_path_as_they_need(tmp_path):
    paths = [write_run(tmp_path / n, ()) for n in ("a/x/run", "b/x/run", "c/other")]
    assert [r.name for r in labelled([read_run(p) for p in paths])] == ["a/x/run", "b/x/run", "other"]
