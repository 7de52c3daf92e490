"""What users run: no test setting, their compiler flags, in a process that may end.

The other modules compile many programs with few optimisations. XLA makes other programs for a
user, and one of those once ended the process.
"""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import user_matrix
from laplax.likelihoods import Categorical

HERE = pathlib.Path(__file__).parent


def run(*command):
    """A new process with the environment of a user: no setting of JAX but the machine's."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    return subprocess.run(
        [sys.executable, "-W", "error", *command],
        cwd=HERE,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("part", "dtype"),
    [
        ("classes", "float32"),
        ("three-classes", "float32"),
        ("likelihoods", "float32"),
        ("classes", "float64"),
        ("searches", "float32"),
        ("searches", "float64"),
    ],
)
def test_the_matrix_of_fits_passes_as_users_compile(part, dtype):
    done = run("user_matrix.py", part, dtype)
    lines = done.stdout.splitlines()
    last = lines[-1] if lines else "nothing printed"
    assert done.returncode == 0, f"exit {done.returncode} at: {last}\n{done.stderr[-2000:]}"
    assert last.endswith("cases passed"), last


def test_quick_compilation_gives_the_numbers_that_users_get():
    outputs = [run("user_matrix.py", "numbers", mode) for mode in ("user", "quick")]
    assert [done.returncode for done in outputs] == [0, 0], outputs[0].stderr + outputs[1].stderr
    ours, quick = ([line.split("\t") for line in done.stdout.splitlines()] for done in outputs)
    assert len(ours) == 2 * len(user_matrix.STRUCTURES)
    for mine, other in zip(ours, quick, strict=True):
        assert mine[0] == other[0]
        np.testing.assert_allclose(
            np.array(mine[1:], float), np.array(other[1:], float), rtol=1e-9, err_msg=mine[0]
        )


@pytest.mark.parametrize("how", ["comparisons", "gathers"])
def test_three_classes_do_not_end_the_process(how):
    done = run("three_classes.py", how)
    if how == "gathers" and done.returncode < 0:
        pytest.skip("this jaxlib ends the process on this CPU where entries are gathered")
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) < 1e-5


def test_the_matrix_covers_what_it_should():
    cases = [
        arguments
        for part in user_matrix.PARTS.values()
        for dtype in (jnp.float32, jnp.float64)
        for case, arguments in part(dtype)
        if case is user_matrix.structure_case
    ]
    assert {outputs for loss, outputs, *_ in cases if loss == "cross_entropy"} >= set(range(1, 18))
    assert {examples for _, _, examples, *_ in cases} == set(user_matrix.EXAMPLES)
    assert {structure for *_, structure, _, _ in cases} == set(user_matrix.STRUCTURES)
    assert {kind for *_, kind, _ in cases} >= set(user_matrix.PREDICTIVES)
    pairs = {(examples, structure) for _, _, examples, structure, _, _ in cases}
    assert len(pairs) >= 0.8 * len(user_matrix.EXAMPLES) * len(user_matrix.STRUCTURES)


def primitives(jaxpr):
    """The names of all operations in a jaxpr and in those inside it."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from primitives(inner)


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_softmax_gathers_nothing(classes):
    # Bare JAX that ends the process for 3 classes on AVX-512 (jaxlib 0.10): a gather and the
    # selection that reads it in one fusion.
    likelihood = Categorical()
    f = jnp.zeros((200, classes))
    y = jnp.zeros(200, int)
    for fn in (likelihood.hessian_factor, likelihood.loss, jax.grad(likelihood.loss)):
        names = set(primitives(jax.make_jaxpr(jax.vmap(fn))(f, y).jaxpr))
        assert not names & {"gather", "scatter", "scatter-add"}, fn


@pytest.mark.parametrize("structure", ["full", "diagonal", "kfac", "block_diagonal"])
def test_a_prediction_gathers_nothing(structure):
    problem = user_matrix.Problem("cross_entropy", 3, 33)
    posterior_fn, _ = user_matrix.fit(problem, structure, jnp.float32)
    _, (x, _) = problem.arrays(jnp.float32)

    def probabilities(posterior_fn, x):
        made = user_matrix.laplax.predictive(
            posterior_fn, user_matrix.network, predictive_type="laplace_bridge"
        )
        return made({"prior_prec": jnp.float32(1)})(x)["pred_act"]

    names = set(primitives(jax.make_jaxpr(probabilities)(posterior_fn, x).jaxpr))
    assert not names & {"gather", "scatter", "scatter-add"}
