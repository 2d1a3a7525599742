"""An experiment in a notebook: a real kernel, whose cells are interrupted, refused and run again."""

import re

import pytest
import tiny

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

CELLS = [
    """
import os, signal, amago, tiny

class Interrupt(amago.Callback):
    def on_step(self, experiment, steps, phase):
        if (experiment.epoch, phase) == hit:
            os.kill(os.getpid(), signal.SIGINT)

def experiment(**settings):
    usual = {"epochs": 3, "ckpt_interval": 1, "verbose": True, "val_interval": 1}
    return tiny.experiment(os.getcwd(), **usual | settings)

e, hit = experiment(callbacks=[Interrupt()]), (1, "collect")
e.start()
""",
    "e.learn()\nprint('returned', e.epoch)",
    "hit = (2, 'evaluate')\ne.learn()\nprint('returned', e.epoch)",
    "hit = None\ne.learn()\nprint('returned', e.epoch, e.env_steps, e.grad_update_counter)\ne.close()",
    "refused = experiment()\nrefused.start()\nrefused.learn()",
    "again = experiment(resume='auto')\nagain.start()\nagain.learn()",
    "again",
]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """What each cell shows: (texts of streams by name, data, error)."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in CELLS])
    where = tmp_path_factory.mktemp("notebook")
    client = nbclient.NotebookClient(
        notebook, timeout=250, kernel_name="python3", allow_errors=True, resources={"metadata": {"path": str(where)}}
    )
    client.execute(env=tiny.environment())
    found = []
    for cell in notebook.cells:
        streams = {}
        for o in cell.outputs:
            if o.output_type == "stream":
                streams[o.name] = streams.get(o.name, "") + o.text
        data = [o.data for o in cell.outputs if o.output_type == "execute_result"]
        errors = [f"{o.ename}: {o.evalue}" for o in cell.outputs if o.output_type == "error"]
        found.append((streams, data, errors))
    return found


def seen(text):
    """Lines as a notebook shows them: what follows a carriage return is written over what is there."""
    shown = []
    for line in text.split("\n"):
        cells = ""
        for part in line.split("\r"):
            cells = part + cells[len(part) :]
        shown.append(cells.rstrip())
    return list(filter(None, shown))


def test_an_interrupt_saves_and_returns_and_learn_goes_on(outputs):
    (first, _, a), (second, _, b), (third, _, c) = outputs[1:4]
    assert [a, b, c] == [[], [], []], "no SystemExit"
    assert re.search(r"interrupted in epoch 1; saved; learn\(\) goes on", first["stdout"])
    assert seen(first["stdout"])[-1] == "returned 1"
    assert seen(second["stdout"])[-1] == "returned 2"
    assert seen(third["stdout"])[-1] == "returned 3 72 6", "as many steps and updates as without interrupts"


def test_the_bar_and_the_lines_are_one_stream(outputs):
    for streams, _, _ in outputs[1:4]:
        assert list(streams) == ["stdout"]
        assert "\r" in streams["stdout"]
        assert all(re.match(r"epoch \d/3 \||note: |interrupted|returned", line) for line in seen(streams["stdout"]))


def test_a_refused_experiment_keeps_no_other_from_the_run(outputs):
    _, _, errors = outputs[4]
    assert errors[0].startswith("RunExistsError")
    assert outputs[5][2] == []
    assert "3 epochs are finished, and epochs=3" in outputs[5][0]["stdout"]


def test_an_experiment_is_shown_in_short(outputs):
    (data,) = outputs[6][1]
    assert len(data["text/plain"]) < 400
    assert "epoch 3 of 3" in data["text/plain"]
