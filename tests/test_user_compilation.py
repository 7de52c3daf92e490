"""What users run: no test setting, their compiler flags, in a process that may end.

The other modules compile many programs with few optimisations. XLA makes other programs for a
user, and one of those once ended the process.
"""

import itertools
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import user_matrix
from conftest import QUICK_FLAG, users_environment
from laplax.likelihoods import Categorical

HERE = pathlib.Path(__file__).parent
HALF_WRITTEN = "ignore:Error reading persistent compilation cache entry:UserWarning"


def run(*command, flags=""):
    """A new process with the environment of a user: no setting of JAX but where programs are kept.

    One is found again only if the same compiler made it of the same program with the same flags.
    """
    environment = {k: v for k, v in users_environment().items() if not k.startswith("JAX_")}
    environment |= {
        "XLA_FLAGS": f"{environment['XLA_FLAGS']} {flags}".strip(),
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    return subprocess.run(
        [sys.executable, "-W", "error", "-W", HALF_WRITTEN, *command],
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
        ("classes", "float64"),
        ("three-classes", "float32"),
        ("likelihoods", "float32"),
        ("likelihoods", "float64"),
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
    outputs = [
        run("user_matrix.py", "numbers", "user"),
        run("user_matrix.py", "numbers", "quick", flags=QUICK_FLAG),
    ]
    assert [done.returncode for done in outputs] == [0, 0], outputs[0].stderr + outputs[1].stderr
    ours, quick = ([line.split("\t") for line in done.stdout.splitlines()] for done in outputs)
    assert len(ours) == len(user_matrix.STRUCTURES)
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
        (str(jnp.dtype(dtype)), case, arguments)
        for part in user_matrix.PARTS.values()
        for dtype in (jnp.float32, jnp.float64)
        for case, arguments in part(dtype)
    ]
    fits = [(dtype, *rest) for dtype, case, rest in cases if case is user_matrix.structure_case]
    sizes, structures = set(user_matrix.EXAMPLES), set(user_matrix.STRUCTURES)
    losses = {"cross_entropy", "mse", "binary_cross_entropy", "poisson", "heteroscedastic"}
    dtypes = {"float32", "float64"}

    def pairs(one, other):
        return set(itertools.product(one, other))

    counts = {(d, outputs) for d, loss, outputs, *_ in fits if loss == "cross_entropy"}
    assert counts >= pairs(dtypes, range(1, 18))
    assert {(n, structure) for _, _, _, n, structure, *_ in fits} == pairs(sizes, structures)
    assert {(loss, structure) for _, loss, _, _, structure, *_ in fits} == pairs(losses, structures)
    assert {(d, structure) for d, _, _, _, structure, *_ in fits} == pairs(dtypes, structures)
    assert {(d, kind) for d, *_, kind, _ in fits} >= pairs(dtypes, user_matrix.PREDICTIVES)
    three = {s for d, loss, c, n, s, *_ in fits if (d, c) == ("float32", 3) and n > 32}
    assert three == structures
    searches = [(dtype, *rest) for dtype, case, rest in cases if case is user_matrix.search_case]
    objectives = {"nll", "ece", "marginal_log_likelihood", "chi_squared"}
    methods = {"grid_search", "gradient_descent"}
    assert {(d, loss) for d, loss, *_ in searches} == pairs(dtypes, losses)
    assert {(d, objective) for d, *_, objective, _, _ in searches} == pairs(dtypes, objectives)
    assert {(d, method) for d, *_, method, _ in searches} == pairs(dtypes, methods)


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
