"""The command: exit codes, one line per mistake, and what it prints and writes."""

import pathlib
import re
import subprocess
import sys
import types

import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import pytest
from sklearn import datasets

import laplax
from laplax.cli import _demo, _info, _problems, _report, _reproduce, main

mpl.use("Agg")
MODULE = """
import jax.numpy as jnp
def model_fn(input, params):
    return input @ params
x = jnp.asarray([[0.0], [1.0], [2.0], [3.0]])
problem = {"model_fn": model_fn, "params": jnp.ones((1, 1)), "train": (x, 1.1 * x),
           "test": (x, x), "loss_fn": "mse", "curvatures": ["diagonal"]}
class Problem: pass
as_object = Problem()
vars(as_object).update(problem)
def load(): return problem
def from_file(data): return {**problem, "test": (data["x"], data["x"])}
def two(a, b): return problem
def fails(): raise RuntimeError("no luck")
def odd(): return 3
number = 3
incomplete = {"model_fn": model_fn}
typo = {**problem, "tset": 1}
"""
RNG = np.random.default_rng(7)


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "my_cli_project.py").write_text(MODULE)
    (tmp_path / "broken_project.py").write_text("import no_such_thing_at_all")
    (tmp_path / "raising_project.py").write_text("raise RuntimeError('at import')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("my_cli_project", "broken_project", "raising_project"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "command",
    [[], ["demo"], ["report"], ["info"], ["reproduce"]],
    ids=lambda c: " ".join(c) or "laplax",
)
def test_help_has_examples(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "examples:" in out
    assert f"laplax {' '.join(command)}".strip() in out


@pytest.mark.parametrize(
    "arguments", [[], ["no-such-command"], ["demo", "--no-such"], ["reproduce", "table9"]]
)
def test_usage_mistakes_exit_with_two(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: laplax" in capsys.readouterr().err


def test_info_names_versions_devices_and_precision(capsys):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    for word in ("laplax", "jax", "jaxlib", "numpy", "optax", "python", "devices", "cores"):
        assert f"\n{word} " in f"\n{out}"
    assert f"{'laplax':12}{laplax.__version__}" in out
    assert f"{'precision':12}float64" in out


def test_rows_are_printed_and_flushed_as_they_come(project, monkeypatch):
    printed = []
    monkeypatch.setattr("builtins.print", lambda *text, **how: printed.append((*text, how)))
    assert main(["report", "my_cli_project:problem", "--no-progress", "--max-gib", "1e-9"]) == 0
    (first, how), (second, how_then), *rest = printed
    assert first.startswith("diagonal: note does not fit: it needs about")
    assert second.startswith("MAP: rmse ")
    assert how == how_then == {"flush": True}
    assert "max_bytes=1 B" in first
    assert "Test metrics" in rest[-1][0]


def test_report_writes_a_page_and_figures_from_arrays_of_a_file(project, capsys):
    np.savez(project / "data.npz", x=np.ones((4, 1)))
    given = ["my_cli_project:from_file", "--data", "data.npz", "--out", "made"]
    assert main(["report", *given]) == 0
    out = capsys.readouterr().out
    assert "MAP" in out
    assert "diagonal" in out
    assert (project / "made/report.html").is_file()
    assert (project / "made/bands.svg").is_file()


@pytest.mark.usefixtures("project")
def test_a_dict_an_object_and_a_function_are_the_same_problem():
    expected = _report.find_problem("my_cli_project:problem", None)
    assert set(expected) == {"model_fn", "params", "train", "test", "loss_fn", "curvatures"}
    for name in ("as_object", "load"):
        found = _report.find_problem(f"my_cli_project:{name}", None)
        assert found.keys() == expected.keys()
        assert all(found[key] is expected[key] for key in expected)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["my_cli_project"], 2, "is not MODULE:ATTRIBUTE"),
        (["no_such_project:x"], 2, "there is no module 'no_such_project'"),
        (["broken_project:x"], 1, "needs the module 'no_such_thing_at_all'"),
        (["raising_project:x"], 1, "fails when imported: RuntimeError: at import"),
        (["my_cli_project:nothing"], 2, "has no attribute 'nothing'; it has: "),
        (["my_cli_project:number"], 2, "number is a int; expected a dict"),
        (["my_cli_project:odd"], 2, "what my_cli_project:odd returns is a int"),
        (["my_cli_project:incomplete"], 2, "has no 'params'; it needs: model_fn"),
        (["my_cli_project:typo"], 2, "'tset'; did you mean 'test'?"),
        (["my_cli_project:two"], 2, "takes 2 arguments"),
        (["my_cli_project:from_file"], 2, "add --data FILE.npz"),
        (["my_cli_project:fails"], 1, "my_cli_project:fails raised RuntimeError: no luck"),
        (["my_cli_project:problem", "--data", "gone.npz"], 2, "there is no file 'gone.npz'"),
        (["my_cli_project:load", "--data", "my_cli_project.py"], 2, "is not an .npz file"),
        (["my_cli_project:problem", "--out", "my_cli_project.py"], 1, "my_cli_project.py"),
        (["my_cli_project:problem", "--curvature", "fulll"], 1, "did you mean 'full'?"),
    ],
)
@pytest.mark.usefixtures("project")
def test_mistakes_are_one_line_and_an_exit_code(arguments, code, text, capsys):
    assert main(["report", *arguments]) == code
    err = capsys.readouterr().err
    assert text in err
    assert err.startswith("laplax report: error: ")
    assert err.count("\n") == 1


@pytest.mark.usefixtures("project")
def test_data_for_what_is_no_function_is_refused(capsys):
    np.savez("data.npz", x=np.ones(3))
    assert main(["report", "my_cli_project:problem", "--data", "data.npz"]) == 2
    assert "nothing would read the file" in capsys.readouterr().err


def test_a_directory_without_permission_is_one_line(monkeypatch, tmp_path, capsys):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied", str(tmp_path / "locked"))

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    assert main(["demo", "--out", str(tmp_path / "locked")]) == 1
    err = capsys.readouterr().err
    assert "Permission denied" in err
    assert "locked" in err
    assert err.count("\n") == 1


def test_without_matplotlib_one_line_says_how_to_get_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["demo", "--out", str(tmp_path / "x")]) == 1
    assert "pip install 'laplax[plot]'" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.usefixtures("project")
def test_a_traceback_comes_when_it_is_asked_for(capsys):
    assert main(["report", "my_cli_project:fails", "--traceback"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "no luck" in err


def test_an_interrupt_exits_with_130(monkeypatch, tmp_path, capsys):
    def interrupted(seed):
        raise KeyboardInterrupt

    monkeypatch.setattr(_problems, "sinusoid", interrupted)
    assert main(["demo", "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "laplax: interrupted\n"


def test_demo_prints_tables_and_writes_one_page_with_both_problems(monkeypatch, tmp_path, capsys):
    seeds = []

    def small(title):
        def make(seed):
            seeds.append(seed)
            x = jnp.linspace(-1.0, 1.0, 8)[:, None]
            return {
                "model_fn": lambda input, params: input * params,
                "params": jnp.asarray(1.0),
                "train": (x, x + 0.1 * jnp.cos(9 * x)),
                "test": (x, x),
                "loss_fn": "mse",
                "curvatures": ["diagonal"],
                "title": title,
            }

        make.__name__ = title
        return make

    monkeypatch.setattr(_problems, "sinusoid", small("first"))
    monkeypatch.setattr(_problems, "digits", small("second"))
    assert main(["demo", "--out", str(tmp_path), "--seed", "3", "--no-progress"]) == 0
    out, page = capsys.readouterr().out, (tmp_path / "report.html").read_text()
    assert seeds == [3, 3]
    for title in ("first", "second"):
        assert title in out
        assert f"<h2>{title}</h2>" in page
        assert (tmp_path / title / "bands.png").is_file()


@pytest.mark.parametrize("module", [laplax.cli, _demo, _info, _report, _reproduce])
def test_what_a_module_says_of_itself_is_its_help_with_examples(module):
    assert "\n\nexamples:\n  laplax" in module.__doc__


def test_the_help_of_a_report_names_every_key():
    for name in (*_report.NEEDED, *_report.OPTIONAL):
        assert re.search(rf"\b{name}\b", _report.__doc__)


@pytest.mark.parametrize("make", [_problems.sinusoid, _problems.digits])
def test_the_demonstrations_problems_depend_on_the_seed_alone(make, monkeypatch):
    monkeypatch.setattr(_problems, "STEPS", 2)
    first, again, other = make(0), make(0), make(1)
    np.testing.assert_array_equal(first["train"]["input"], again["train"]["input"])
    assert not np.array_equal(first["train"]["input"], other["train"]["input"])
    np.testing.assert_array_equal(first["params"][0]["w"], again["params"][0]["w"])
    parts = [first[part] for part in ("train", "calibration", "test") if part in first]
    for part in [*parts, *first.get("shifted", {}).values()]:
        assert len(part["input"]) == len(part["target"])


@pytest.fixture
def experiment(monkeypatch):
    """A stand-in for `experiments.table1`, which notes what it is given."""
    seen = {}
    module = types.ModuleType("experiments.table1")
    module.__doc__ = "A table."
    module.add_arguments = lambda parser: parser.add_argument("--seeds", type=int, default=1)
    module.run = lambda args: seen.update(vars(args)) or 0
    monkeypatch.setitem(sys.modules, "experiments.table1", module)
    return seen


def test_reproduce_hands_over_out_seed_and_progress(experiment, tmp_path):
    assert main(["reproduce", "table1", "--seeds", "4", "--out", str(tmp_path), "--seed", "2"]) == 0
    assert experiment["out"] == tmp_path
    assert (experiment["seed"], experiment["seeds"], experiment["progress"]) == (2, 4, None)


@pytest.mark.usefixtures("experiment")
def test_reproduce_shows_the_options_of_the_experiment(capsys):
    with pytest.raises(SystemExit):
        main(["reproduce", "table1", "--help"])
    out = capsys.readouterr().out
    assert "--seeds" in out
    assert "A table." in out


@pytest.mark.parametrize("arguments", [["figure2"], ["--help"]])
def test_experiments_that_are_not_installed_are_one_line(arguments, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(_reproduce, "SOURCE", tmp_path)
    assert main(["reproduce", *arguments]) == 1
    err = capsys.readouterr().err
    assert "the paper's experiments are not part of the installed package" in err
    assert "the folder experiments/ of the source code" in err
    assert err.count("\n") == 1


def test_the_other_commands_need_no_experiments(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(_reproduce, "SOURCE", tmp_path)
    assert main(["info"]) == 0
    assert "laplax" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["figure1", "figure2", "table1", "table2"])
def test_every_experiment_of_the_paper_says_what_it_does(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["reproduce", name, "--help"])
    assert stop.value.code == 0
    assert f"{name[:-1].capitalize()} {name[-1]} of the paper" in capsys.readouterr().out


def test_the_folder_of_experiments_is_a_command_of_its_own():
    root = pathlib.Path(__file__).parents[1]
    command = [sys.executable, "-m", "experiments", "table1", "--help"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert "usage: laplax reproduce table1" in done.stdout


def test_the_digits_that_come_with_the_package_are_those_of_scikit_learn():
    known = datasets.load_digits()
    with np.load(_problems.DIGITS) as file:
        np.testing.assert_array_equal(file["images"], known.images)
        np.testing.assert_array_equal(file["labels"], known.target)
    assert "CC BY 4.0" in (_problems.DIGITS.parent / "README.md").read_text()
