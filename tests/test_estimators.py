"""Low-rank estimators on hard spectra, Hutchinson's error, and where each is exact."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matfree import decomp

import cases
import laplax
from laplax._engine import lanczos, lanczos_large
from laplax.estimators import ConvergenceWarning

pytestmark = pytest.mark.usefixtures("quick_compilation")

P = 40


def linear(input, params):
    return input @ params


def with_spectrum(values, seed=0, dtype=jnp.float64):
    """Data whose Gauss-Newton matrix has these eigenvalues and random eigenvectors."""
    vectors = cases.orthonormal(P, len(values), seed=seed)
    features = (jnp.sqrt(jnp.asarray(values))[:, None] * vectors.T).astype(dtype)
    return (features, jnp.zeros(len(values), dtype)), vectors


def fit(data, name, **options):
    params = jnp.zeros(P, data[0].dtype)
    return laplax.laplace(linear, params, data, loss_fn="mse", curv_type=name, **options)[1]


SPECTRA = {
    "distinct": jnp.linspace(10.0, 0.1, P),
    "decaying": 10.0 ** jnp.linspace(3, -6, P),
    "rank three": jnp.asarray([5.0, 2.0, 1.0]),
    "repeated": jnp.asarray([4.0] * 5 + [1.0] * 5),
    "zero": jnp.zeros(3),
}


@pytest.fixture(params=["one array", "rows", "leaves"])
def lanczos_basis(request, monkeypatch):
    """All ways to keep the basis; rows are for large networks. P is 2.5 chunks of them."""
    if request.param != "one array":
        monkeypatch.setattr(lanczos, "LARGE_BASIS", 0)
        monkeypatch.setattr(lanczos_large, "CHUNK", 16)
    if request.param == "leaves":
        monkeypatch.setattr(lanczos_large, "LARGE_LEAF", 0)
    return request.param


@pytest.mark.usefixtures("lanczos_basis")
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_lanczos_with_as_many_products_as_parameters_is_exact(spectrum, dtype):
    data, _ = with_spectrum(SPECTRA[spectrum], dtype=dtype)
    estimate = fit(data, "lanczos", rank=1000)
    exact = data[0].T @ data[0]
    tolerance = 2e3 * jnp.finfo(dtype).eps * max(float(jnp.abs(exact).max()), 1e-30)
    assert float(jnp.abs(estimate.to_dense() - exact).max()) <= tolerance
    basis = estimate.structure.basis
    np.testing.assert_allclose(basis.T @ basis, jnp.eye(P), atol=50 * float(jnp.finfo(dtype).eps))


@pytest.mark.usefixtures("lanczos_basis")
@pytest.mark.parametrize("spectrum", ["rank three", "repeated", "zero"])
def test_after_breakdown_the_basis_is_orthonormal_and_no_pair_is_spurious(spectrum):
    data, _ = with_spectrum(SPECTRA[spectrum])
    estimate = fit(data, "lanczos", rank=20, num_products=25)
    basis, values = estimate.structure.basis, estimate.structure.eigenvalues
    np.testing.assert_allclose(basis.T @ basis, jnp.eye(20), atol=1e-12)
    expected = jnp.zeros(20).at[: len(SPECTRA[spectrum])].set(SPECTRA[spectrum])
    np.testing.assert_allclose(values, expected, atol=1e-9)


@pytest.mark.usefixtures("lanczos_basis")
def test_lanczos_residuals_are_the_true_ones():
    data, _ = with_spectrum(SPECTRA["distinct"])
    with pytest.warns(ConvergenceWarning, match="of 8 eigenpairs have not converged"):
        estimate = fit(data, "lanczos", rank=8, num_products=12)
    gram, basis = data[0].T @ data[0], estimate.structure.basis
    true = jnp.linalg.norm(gram @ basis - basis * estimate.structure.eigenvalues, axis=0)
    np.testing.assert_allclose(estimate.diagnostics["residuals"], true, atol=1e-9)
    assert estimate.diagnostics["num_products"] == 12


@pytest.mark.usefixtures("lanczos_basis")
def test_a_tolerance_drops_the_pairs_that_have_not_converged():
    data, _ = with_spectrum(SPECTRA["decaying"])
    estimate = fit(data, "lanczos", rank=8, num_products=12, tol=1e-8)
    kept = estimate.diagnostics["kept"]
    assert 0 < int(kept.sum()) < 8
    np.testing.assert_array_equal(estimate.structure.eigenvalues > 0, kept)


@pytest.mark.usefixtures("lanczos_basis")
def test_lanczos_agrees_with_an_independent_implementation():
    data, _ = with_spectrum(SPECTRA["decaying"])
    gram = data[0].T @ data[0]
    start = jax.random.normal(jax.random.key(0), (P,), jnp.float64)
    tridiag = decomp.tridiag_sym(10, reortho="full", materialize=True)
    reference = jnp.linalg.eigvalsh(tridiag(lambda v: gram @ v, start).J_small)[::-1]
    with pytest.warns(ConvergenceWarning, match=r"tol=1e\+09 now"):
        estimate = fit(data, "lanczos", rank=8, num_products=10, tol=1e9)
    np.testing.assert_allclose(estimate.structure.eigenvalues, reference[:8], rtol=1e-8)


def mlp_curvature(**given):
    """The exact matrix of a network with several leaves, and what Lanczos finds of it."""
    data = (cases.random(7, 2, seed=4), cases.TARGETS["cross_entropy"])
    data = given.pop("data", lambda batch: batch)(data)
    params = given.pop("params", cases.mlp())
    given = {"loss_fn": "cross_entropy"} | given
    exact, found = (
        laplax.laplace(cases.mlp_fn, params, data, curv_type=name, **options, **given)[1]
        for name, options in (("full", {}), ("lanczos", {"rank": 1000}))
    )
    return exact.to_dense(), found.to_dense()


@pytest.mark.usefixtures("lanczos_basis")
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"subset": "last_layer"},
        {"subset": laplax.largest_magnitude(cases.mlp(), 9)},
        {"data": lambda batch: [tuple(x[i : i + 3] for x in batch) for i in (0, 3, 6)]},
        {"batch_size": 3},
        {"num_total_samples": 70},
        {"curvature": "fisher_empirical"},
        {"curvature": laplax.Hessian(indefinite="clip")},
    ],
    ids=["all", "last layer", "entries", "loader", "batches", "scaled", "fisher", "hessian"],
)
def test_lanczos_is_exact_for_leaves_parts_of_them_and_every_kind_of_data(given):
    exact, found = mlp_curvature(**given)
    assert float(jnp.abs(exact).max()) > 0.01
    np.testing.assert_allclose(found, exact, atol=1e-12 * float(jnp.abs(exact).max()))


@pytest.mark.usefixtures("lanczos_basis")
def test_lanczos_of_mixed_precision_accumulates_in_the_wider_one():
    params = cases.mlp()
    leaves, treedef = jax.tree.flatten(params)
    mixed = [leaves[0].astype(jnp.float32), *leaves[1:]]
    with jax.numpy_dtype_promotion("standard"):
        exact, found = mlp_curvature(params=jax.tree.unflatten(treedef, mixed))
    assert found.dtype == jnp.float64
    np.testing.assert_allclose(found, exact, atol=1e-5 * float(jnp.abs(exact).max()))


def total_curvature(scale):
    params = jax.tree.map(lambda x: scale * x, cases.mlp())
    data = (cases.random(7, 2, seed=4), cases.TARGETS["cross_entropy"])
    options = {"loss_fn": "cross_entropy", "curv_type": "lanczos", "rank": 4}
    return laplax.laplace(cases.mlp_fn, params, data, **options)[1].structure.eigenvalues.sum()


@pytest.mark.usefixtures("lanczos_basis")
def test_lanczos_is_transformed_with_what_it_depends_on():
    expected = jnp.stack([total_curvature(s) for s in (0.5, 1.0)])
    mapped = jax.vmap(total_curvature)(jnp.asarray([0.5, 1.0]))
    np.testing.assert_allclose(mapped, expected, rtol=1e-10)
    np.testing.assert_allclose(jax.jit(total_curvature)(1.0), expected[1], rtol=1e-10)
    slope = jax.jvp(total_curvature, (1.0,), (1.0,))[1]
    numeric = (total_curvature(1 + 1e-5) - total_curvature(1 - 1e-5)) / 2e-5
    np.testing.assert_allclose(slope, numeric, rtol=1e-6)


@pytest.mark.usefixtures("lanczos_basis")
def test_lanczos_says_that_a_curvature_is_not_finite():
    def overflows(input, params):
        return jnp.exp(1000 * input @ params)

    data = (jnp.ones((3, P)), jnp.ones(3))
    with pytest.raises(ValueError, match="the curvature is not finite"):
        laplax.laplace(overflows, jnp.ones(P), data, loss_fn="mse", curv_type="lanczos", rank=3)


@pytest.mark.parametrize("rank", [3, 1000])
def test_lobpcg_finds_the_leading_pairs(rank):
    data, _ = with_spectrum(SPECTRA["distinct"])
    estimate = fit(data, "lobpcg", rank=rank)
    expected = SPECTRA["distinct"][: min(rank, P)]
    np.testing.assert_allclose(estimate.structure.eigenvalues, expected, rtol=1e-8)
    assert float(estimate.diagnostics["residuals"].max()) < 1e-6


def test_lobpcg_iterates_where_a_dense_matrix_would_cost_more():
    data, _ = with_spectrum(SPECTRA["distinct"])
    few, many = (fit(data, "lobpcg", rank=rank) for rank in (3, 4))
    assert int(few.diagnostics["num_iterations"]) > 0  # 40 > 12 * 3
    assert int(many.diagnostics["num_iterations"]) == 0
    np.testing.assert_allclose(few.structure.eigenvalues, many.structure.eigenvalues[:3], rtol=1e-8)


def test_lobpcg_inside_jit():
    data, _ = with_spectrum(SPECTRA["distinct"])
    values = jax.jit(lambda x: fit((x, data[1]), "lobpcg", rank=3).structure.eigenvalues)(data[0])
    np.testing.assert_allclose(values, SPECTRA["distinct"][:3], rtol=1e-8)
    nothing = jax.jit(lambda x: fit((x, data[1]), "lobpcg", rank=3).structure.eigenvalues)(
        jnp.zeros_like(data[0])
    )
    assert np.all(np.isnan(nothing))  # a breakdown is seen, not answered


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_full_keeps_no_direction_that_is_round_off(dtype):
    """19 rows of rank five: eight columns stay, since ranks are rounded up."""
    features = cases.random(19, 5, seed=1) @ cases.random(5, P, seed=2)
    structure = fit((features.astype(dtype), jnp.zeros(19, dtype)), "full").structure
    assert structure.basis.shape == (P, 8)
    assert structure.basis.dtype == dtype
    exact = jnp.linalg.eigvalsh(features.T @ features)[::-1][:5]
    digits = 1e-6 if dtype == jnp.float32 else 1e-12
    np.testing.assert_allclose(structure.eigenvalues[:5], exact, rtol=10 * digits)
    assert float(structure.eigenvalues[5:].max()) < float(exact[0]) * digits**2
    gram = structure.basis.T @ structure.basis
    np.testing.assert_allclose(gram, jnp.eye(8), atol=10 * digits)


@pytest.mark.parametrize("spectrum", ["rank three", "repeated", "zero"])
def test_lobpcg_on_a_deficient_curvature_is_right(spectrum):
    data, _ = with_spectrum(SPECTRA[spectrum])
    estimate = fit(data, "lobpcg", rank=7)
    expected = jnp.zeros(10).at[: len(SPECTRA[spectrum])].set(SPECTRA[spectrum])[:7]
    np.testing.assert_allclose(estimate.structure.eigenvalues, expected, atol=1e-8)
    basis = estimate.structure.basis
    np.testing.assert_allclose(basis.T @ basis, jnp.eye(7), atol=1e-8)


def test_hutchinson_is_within_five_of_its_standard_errors():
    data, _ = with_spectrum(SPECTRA["distinct"])
    estimate = fit(data, "hutchinson", key=jax.random.key(2), num_samples=2000)
    error = jnp.abs(estimate.diagonal() - jnp.diag(data[0].T @ data[0]))
    assert bool(jnp.all(error < 5 * estimate.diagnostics["standard_error"]))
    # By hand: the variance of z_i (G z)_i is the squared norm of row i off the diagonal.
    gram = data[0].T @ data[0]
    rows = jnp.sum(gram**2, axis=1) - jnp.diag(gram) ** 2
    np.testing.assert_allclose(
        estimate.diagnostics["standard_error"], jnp.sqrt(rows / 2000), rtol=0.2
    )


def test_full_is_the_same_on_either_side():
    few, _ = with_spectrum(SPECTRA["rank three"])
    small = fit(few, "full")
    loader = fit_loader(few)
    assert type(small.structure) is not type(loader.structure)
    np.testing.assert_allclose(small.to_dense(), loader.to_dense(), atol=1e-12)


def fit_loader(data):
    return laplax.laplace(linear, jnp.zeros(P), [data], loss_fn="mse", curv_type="full")[1]


@pytest.mark.parametrize("curv_type", ["full", "diagonal", "kfac", "ekfac", "lanczos"])
def test_a_second_fit_does_not_trace_the_model(curv_type):
    calls = []

    def counted(input, params):
        calls.append(1)
        return cases.mlp_fn(input, params)

    data = (cases.random(7, 2, seed=4), cases.TARGETS["cross_entropy"])
    options = {"rank": 3} if curv_type == "lanczos" else {}

    def fit(params):
        return laplax.laplace(
            counted, params, data, loss_fn="cross_entropy", curv_type=curv_type, **options
        )

    fit(cases.mlp())
    seen = len(calls)
    fit(jax.tree.map(lambda x: 2 * x, cases.mlp()))
    assert len(calls) == seen
