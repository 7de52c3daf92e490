"""Many devices and many processes give the answers of one, and no program gathers the data."""

import json
import os
import pathlib
import re
import socket
import subprocess
import sys

import jax
import pytest

from conftest import QUICK_FLAG

HERE = pathlib.Path(__file__).parent
LIMIT = {"float64": 1e-9, "float32": 1e-5}
COLLECTIVE = re.compile(r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)\(")


def start(*arguments, flags=QUICK_FLAG):
    environment = {name: x for name, x in os.environ.items() if not name.startswith("JAX_")}
    environment |= {
        "XLA_FLAGS": flags,
        "LAPLAX_TEST_PROGRAMS": jax.config.jax_compilation_cache_dir,
    }
    return subprocess.Popen(
        [sys.executable, "devices.py", *map(str, arguments)],
        cwd=HERE,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(*processes):
    ends = [process.communicate() for process in processes]
    for process, (_, errors) in zip(processes, ends, strict=True):
        assert process.returncode == 0, errors[-4000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in ends]


def free_port():
    with socket.socket() as opened:
        opened.bind(("localhost", 0))
        return opened.getsockname()[1]


def check(differences, limit):
    assert differences
    for name, difference in differences.items():
        assert difference <= limit, (name, difference)


@pytest.mark.parametrize(("devices", "dtype"), [(4, "float64"), (4, "float32"), (8, "float64")])
def test_many_devices_give_the_answers_of_one(devices, dtype):
    (results,) = finish(start(devices, dtype))
    for differences in results.values():
        check(differences, LIMIT[dtype])


@pytest.mark.parametrize("count", [2, 3])
def test_many_processes_give_the_answers_of_one(count, tmp_path, monkeypatch):
    monkeypatch.setenv("LAPLAX_TEST_FILE", str(tmp_path / "a"))
    port = free_port()
    answers = finish(*[start("processes", rank, count, port) for rank in range(count)])
    for results in answers:
        errors = results.pop("errors")
        assert "the processes have different numbers of batches" in errors["batches"]
        assert "there is no batch 2 on process 0" in errors["batches"]
        assert "of params differs between process 0 and process 1" in errors["params"]
        for differences in results.values():
            check(differences, LIMIT["float64"])


def test_a_process_that_fails_ends_the_others():
    port = free_port()
    processes = [start("fail", rank, 2, port) for rank in range(2)]
    ends = [process.communicate(timeout=120) for process in processes]
    assert processes[1].returncode == 3
    assert processes[0].returncode != 0
    assert "fit" not in ends[0][0]


def test_no_program_gathers_data_or_parameters(tmp_path):
    flags = f"{QUICK_FLAG} --xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    finish(start("programs", flags=flags))
    texts = [path.read_text() for path in tmp_path.glob("*_sum_inside*after_optimizations.txt")]
    assert len(texts) >= 3  # diagonal, kfac, a product of Lanczos
    for text in texts:
        assert COLLECTIVE.findall(text) == ["all-reduce"]
    predictions = list(tmp_path.glob("*_map_inside*after_optimizations.txt"))
    assert predictions
    for path in predictions:
        assert COLLECTIVE.findall(path.read_text()) == []


def test_divided_parameters_give_the_answers_of_one_device():
    (results,) = finish(start("square"))
    for differences in results.values():
        check(differences, LIMIT["float64"])


def test_no_program_gathers_divided_parameters(tmp_path):
    """Nothing is gathered at all, and a sum over the data has one reduction over its devices."""
    flags = f"{QUICK_FLAG} --xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    finish(start("square programs", "diagonal", "lanczos", flags=flags))
    texts = {path.name: path.read_text() for path in tmp_path.glob("*after_optimizations.txt")}
    assert any("_offsets_by_leaf" in name for name in texts)
    for name, text in texts.items():
        assert set(COLLECTIVE.findall(text)) <= {"all-reduce"}, name
    sums = [text for name, text in texts.items() if "_sum_inside" in name]
    assert len(sums) == 2  # the diagonal, and a product of Lanczos
    for text in sums:
        reductions = [line for line in text.splitlines() if " all-reduce(" in line]
        assert sum("replica_groups={{0,2},{1,3}}" in line for line in reductions) == 1


def test_placements_that_cannot_work_are_refused():
    (said,) = finish(start("refusals"))
    assert "the axis 'd' of the mesh divides the data and the leaf 'w' of params" in said["shared"]
    assert "'w' of params is divided along the explicit axis 'd'" in said["explicit"]
    assert "axis_types=(jax.sharding.AxisType.Auto,)" in said["explicit"]
    assert "data's input varies along d, inside a jax.shard_map that checks this" in said["checked"]
    assert said["unchecked"] == ""
    assert "unknown axis of the mesh 'dta'" in said["axis"]
    assert "mesh must be a jax.sharding.Mesh" in said["mesh"]
