"""Online Bayesian updating, against conjugate linear regression and dense algebra by NumPy."""

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import cases
import laplax
from laplax.structures import (
    BlockDiagonal,
    BlockSum,
    Dense,
    KroneckerBlock,
    LowRank,
    Structure,
    _block_diagonal,
    pytree,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

N, P = 24, 6
NOISE = 0.5
TAU = {"v": 0.3, "w": 1.4}  # one number per leaf, so that low ranks have a general prior
ARGUMENTS = {"prior_prec": TAU, "sigma_squared": NOISE}
START = {"v": jnp.zeros(2), "w": jnp.zeros(4)}
T = np.diag([0.3] * 2 + [1.4] * 4)


def model_fn(input, params):
    return input[:2] @ params["v"] + input[2:] @ params["w"]


def halves(orthogonal=False):
    """Two data sets; with orthogonal features each has a diagonal curvature."""
    rng = np.random.default_rng(1)
    parts = []
    for _ in range(2):
        x = rng.standard_normal((N, P))
        if orthogonal:
            x = np.linalg.qr(x)[0] * np.linspace(1.0, 3.0, P)
        parts.append((x, x @ np.arange(1.0, P + 1) + 0.3 * rng.standard_normal(N)))
    return parts


def as_jax(part):
    return tuple(map(jnp.asarray, part))


def conjugate(x, y, precision=T, mean=0.0):
    """Mean, precision and log evidence of Bayesian linear regression."""
    posterior = x.T @ x / NOISE + precision
    mode = np.linalg.solve(posterior, x.T @ y / NOISE + precision @ (np.zeros(P) + mean))
    cov = x @ np.linalg.inv(precision) @ x.T + NOISE * np.eye(len(y))
    residual = y - x @ (np.zeros(P) + mean)
    evidence = -0.5 * (residual @ np.linalg.solve(cov, residual))
    evidence -= 0.5 * (np.linalg.slogdet(cov)[1] + len(y) * np.log(2 * np.pi))
    return mode, posterior, evidence


def fit(params, part, curv_type, **options):
    data = as_jax(part)
    posterior_fn, _ = laplax.laplace(
        model_fn, params, data, loss_fn="mse", curv_type=curv_type, **options
    )
    return posterior_fn


def at_mode(posterior_fn, arguments, part):
    return laplax.glm_mode(posterior_fn, arguments, as_jax(part), tolerance=1e-14)


def assert_close(actual, desired, rtol=1e-9):
    scale = np.max(np.abs(np.asarray(desired)))
    np.testing.assert_allclose(actual, desired, rtol=rtol, atol=rtol * scale)


# -- online over two halves equals batch ----------------------------------------------------------
@pytest.mark.parametrize(
    ("curv_type", "options", "orthogonal"),
    [
        ("full", {}, False),
        ("lanczos", {"rank": P}, False),
        ("diagonal", {}, True),
        ("block_diagonal", {}, True),
        ("kfac", {"joint_bias": False}, True),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_two_halves_in_turn_are_one_batch(curv_type, options, orthogonal):
    first, second = halves(orthogonal)
    whole = tuple(np.concatenate(pair) for pair in zip(first, second, strict=True))
    mode, precision, evidence = conjugate(*whole)
    before = at_mode(fit(START, first, curv_type, **options), ARGUMENTS, first)
    prior = before(ARGUMENTS).as_prior()
    online = {"prior": prior, "sigma_squared": NOISE}
    after = at_mode(fit(before.mean, second, curv_type, **options), online, second)
    assert_close(after.space.flatten(after.mean), mode)
    posterior = after(online)
    assert_close(posterior.cov_mv(jnp.eye(P)[0]), np.linalg.inv(precision)[0])
    assert_close(posterior.logdet(), np.linalg.slogdet(precision)[1])
    parts = before.log_marginal_likelihood(ARGUMENTS, as_jax(first))
    parts += after.log_marginal_likelihood(online, as_jax(second))
    assert_close(parts, evidence)
    assert_close(parts, conjugate(*first)[2] + conjugate(*second, *conjugate(*first)[1::-1])[2])
    assert after.mode_distance(online, as_jax(second)) < 1e-12
    # What the new data determine: the old data are prior.
    gamma = np.trace(second[0].T @ second[0] / NOISE @ np.linalg.inv(precision))
    assert_close(after.effective_parameters(online), gamma)
    assert_close(posterior.precision.effective_parameters(), gamma)
    updated = before.update(as_jax(second), params=after.mean)
    assert_close(updated(ARGUMENTS).cov_mv(jnp.eye(P)[0]), np.linalg.inv(precision)[0])
    assert_close(updated.log_marginal_likelihood(ARGUMENTS, as_jax(whole)), evidence)
    again = after.as_prior(online)
    assert_close(again.energy(START), mode @ precision @ mode)
    assert_close(posterior.as_prior().energy(START), mode @ precision @ mode)


def test_the_penalty_trains_to_the_mode_of_all_data():
    first, second = halves()
    mode, precision, _ = conjugate(*first)
    before = at_mode(fit(START, first, "full"), ARGUMENTS, first)
    prior = before.as_prior(ARGUMENTS)
    x, y = as_jax(second)

    def objective(params):
        residual = jax.vmap(model_fn, (0, None))(x, params) - y
        return 0.5 * jnp.sum(residual**2) / NOISE + prior.neg_log_prob(params)

    slope = before.space.flatten(jax.grad(objective)(START))
    curvature = jax.hessian(lambda flat: objective(before.space.unflatten(flat)))(jnp.zeros(P))
    newton = -np.linalg.solve(curvature, slope)
    whole = tuple(np.concatenate(pair) for pair in zip(first, second, strict=True))
    assert_close(newton, conjugate(*whole)[0])
    point = np.linspace(-1.0, 1.0, P)
    expected = 0.5 * ((point - mode) @ precision @ (point - mode) + P * np.log(2 * np.pi))
    expected -= 0.5 * np.linalg.slogdet(precision)[1]
    assert_close(prior.neg_log_prob(jnp.asarray(point)), expected)


def test_a_truncated_prior_says_what_it_dropped():
    part = halves()[0]
    posterior_fn = fit(START, part, "lanczos", rank=P)
    prior = posterior_fn(ARGUMENTS).as_prior(rank=2)
    values, vectors = np.linalg.eigh(part[0].T @ part[0] / NOISE)
    assert_close(prior.precision.dropped, 1 - values[-2:].sum() / values.sum())
    kept = (vectors[:, -2:] * values[-2:]) @ vectors[:, -2:].T + T
    assert_close(prior.precision.mv(jnp.ones(P)), kept @ np.ones(P))
    assert_close(prior.precision.logdet(), np.linalg.slogdet(kept)[1])


# -- a network: every layer a Kronecker product ---------------------------------------------------
PARAMS = cases.mlp((3, 4, 2), seed=3)
DATA = [
    (cases.random(9, 3, seed=s), jnp.asarray(np.random.default_rng(s).integers(0, 2, 9)))
    for s in (5, 6)
]
TAU_0 = 0.7


def network(part, curv_type="kfac", params=PARAMS, **options):
    posterior_fn, _ = laplax.laplace(
        cases.mlp_fn, params, part, loss_fn="cross_entropy", curv_type=curv_type, **options
    )
    return posterior_fn


@pytest.mark.parametrize("curv_type", ["kfac", "ekfac"])
def test_kronecker_products_as_a_list_of_terms(curv_type):
    old, new = (network(part, curv_type) for part in DATA)
    prior = old({"prior_prec": TAU_0}).as_prior()
    posterior = new({"prior": prior})
    eye = np.eye(new.space.size)
    expected = np.asarray(old.structure.to_dense() + new.structure.to_dense()) + TAU_0 * eye
    assert_close(posterior.prec_mv(jnp.asarray(eye[1])), expected[1])
    assert_close(posterior.precision.solve(jnp.asarray(eye)), np.linalg.inv(expected))
    assert_close(posterior.logdet(), np.linalg.slogdet(expected)[1])
    assert_close(new.space.flatten(posterior.variance()), np.diag(np.linalg.inv(expected)))
    third = posterior.as_prior()  # a list of two terms
    offset = cases.random(new.space.size, seed=9)
    mean = new.space.flatten(new.mean)
    assert isinstance(third.precision.structure, BlockSum)
    assert_close(third.energy(mean + offset), offset @ expected @ offset)
    assert_close(third.precision.mv(offset), expected @ offset)
    # Predictions need J Lambda^-1 J^T.
    prediction = new.predictive()({"prior": prior})(DATA[0][0][:2], ["pred_cov"])
    J = jax.vmap(jax.jacobian(lambda p, x: cases.mlp_fn(x, p)), (None, 0))(PARAMS, DATA[0][0][:2])
    J = np.concatenate([np.reshape(leaf, (2, 2, -1)) for leaf in jax.tree.leaves(J)], axis=-1)
    cov = np.einsum("ncp,pq,ndq->ncd", J, np.linalg.inv(expected), J)
    assert_close(prediction["pred_cov"], cov)


def dense_block(block):
    """A Kronecker block by NumPy, in the order of (I, O)."""
    left = np.einsum("ij,jo,pj->iop", block.left[0], block.values[0], block.left[0])
    return np.einsum("iop,qo,ro->iqpr", left, block.right[0], block.right[0])


def by_svd(matrix):
    """The best Kronecker product: a singular vector pair of the rearranged matrix."""
    inputs, outputs = matrix.shape[:2]
    rearranged = matrix.transpose(0, 2, 1, 3).reshape(inputs**2, outputs**2)
    u, s, v = np.linalg.svd(rearranged)
    best = s[0] * np.outer(u[:, 0], v[0])
    return best.reshape(inputs, inputs, outputs, outputs).transpose(0, 2, 1, 3)


@pytest.mark.parametrize("curv_type", ["kfac", "ekfac"])
def test_the_nearest_kronecker_product_is_that_of_the_singular_values(curv_type):
    old, new = (network(part, curv_type).structure for part in DATA)
    total = old.plus(new)
    nearest = total.nearest()
    assert isinstance(nearest, BlockDiagonal)
    for terms, block in zip(total.terms, nearest.blocks, strict=True):
        exact = sum(dense_block(term) for term in terms)
        assert_close(dense_block(block), by_svd(exact), rtol=1e-8)
        # (A1 + A2) (x) (B1 + B2), at its best scale, is further away.
        factors = [np.zeros((x.shape[-1],) * 2) for x in (block.left, block.right)]
        for term in terms:
            e = np.asarray(term.values[0])
            for i, (q, axis) in enumerate(((term.left[0], 1), (term.right[0], 0))):
                share = e.mean(axis) / np.sqrt(e.mean())
                factors[i] += (np.asarray(q) * share) @ np.asarray(q).T
        added = np.einsum("ip,oq->iopq", *factors)
        added *= np.sum(added * exact) / np.sum(added**2)
        distance = np.linalg.norm(exact - dense_block(block))
        assert distance < np.linalg.norm(exact - added)


def test_nearest_products_go_on_from_prior_to_prior():
    old, new = (network(part) for part in DATA)
    prior = old.as_prior({"prior_prec": TAU_0}, merge="nearest")
    posterior = new({"prior": prior})
    expected = old.structure.plus(new.structure).nearest().to_dense() + TAU_0 * np.eye(
        old.space.size
    )
    assert_close(posterior.precision.mv(jnp.eye(old.space.size)), expected)
    following = posterior.as_prior()
    assert following.precision.merge == "nearest"
    assert_close(
        following.precision.mv(jnp.ones(old.space.size)), expected @ jnp.ones(old.space.size)
    )
    by_family = new.as_prior({"prior": prior})
    assert_close(by_family.precision.logdet(), np.linalg.slogdet(expected)[1])
    merged = old.update(DATA[1], merge="nearest")
    assert_close(merged({"prior_prec": TAU_0}).precision.mv(jnp.eye(old.space.size)), expected)


def test_a_sum_that_does_not_fit_the_memory_is_still_a_penalty(monkeypatch):
    old, new = (network(part) for part in DATA)
    prior = old.as_prior({"prior_prec": TAU_0})
    monkeypatch.setattr(_block_diagonal, "MEMORY_SHARE", 0.0)
    jax.clear_caches()
    with pytest.raises(ValueError, match=r"largest of 16 x 16.*merge='nearest'"):
        new({"prior": prior})
    following = new.as_prior({"prior": prior})
    dense = np.asarray(old.structure.to_dense() + new.structure.to_dense())
    dense = dense + TAU_0 * np.eye(len(dense))
    offset = np.linspace(-1.0, 1.0, len(dense))
    mean = new.space.flatten(new.mean)
    assert_close(following.energy(mean + offset), offset @ dense @ offset)
    with pytest.raises(ValueError, match=r"0.5 \* prior.energy\(params\)"):
        following.neg_log_prob(new.mean)
    with pytest.raises(ValueError, match="no closed form on a sum of Kronecker"):
        following.diffused(0.1)


# -- subsets, calibration, files ------------------------------------------------------------------
def test_a_subset_is_updated_alone():
    old, new = (network(part, "full", subset="1/*") for part in DATA)
    prior = old.as_prior({"prior_prec": TAU_0})
    expected = np.asarray(old.structure.to_dense() + new.structure.to_dense())
    expected = expected + TAU_0 * np.eye(len(expected))
    posterior = new({"prior": prior})
    assert_close(posterior.precision.solve(jnp.eye(len(expected))), np.linalg.inv(expected))
    assert jnp.all(jax.grad(prior.neg_log_prob)(jax.tree.map(jnp.ones_like, PARAMS))[0]["w"] == 0)
    moved = [PARAMS[0], jax.tree.map(lambda x: x + 1, PARAMS[1])]
    assert_close(old.update(DATA[1], params=moved).mean[1]["b"], moved[1]["b"])
    with pytest.raises(ValueError, match="leaf '0/w', which is outside of the subset"):
        old.update(DATA[1], params=[{**PARAMS[0], "w": PARAMS[0]["w"] + 1}, PARAMS[1]])


def test_the_noise_is_chosen_under_a_prior_that_earlier_data_left():
    first, second = halves()
    before = at_mode(fit(START, first, "full"), ARGUMENTS, first)
    prior = before.as_prior(ARGUMENTS)
    after = fit(before.mean, second, "full")
    method = laplax.GradientDescent(num_steps=150)
    chosen, _ = after.calibrate(
        as_jax(second), calibration_method=method, prior_arguments={"prior": prior}
    )
    assert set(chosen) == {"prior", "sigma_squared"}
    data = after.log_marginal_likelihood

    def evidence(log_noise):
        arguments = {"prior": prior, "sigma_squared": jnp.exp(log_noise)}
        return data(arguments, as_jax(second))

    best = jnp.log(chosen["sigma_squared"])
    assert abs(jax.grad(evidence)(best)) < 1e-3
    check_grads(evidence, (best,), 1, modes=["rev"], rtol=1e-6)
    with pytest.raises(ValueError, match="grid search chooses the prior precision"):
        after.calibrate(as_jax(second), prior_arguments={"prior": prior})


@pytest.mark.parametrize("curv_type", ["lanczos", "kfac"])
def test_gradients_in_the_temperature_are_right_where_spans_overlap(curv_type):
    options = {"rank": 4} if curv_type == "lanczos" else {}
    old, new = (network(DATA[0], curv_type, **options) for _ in range(2))
    prior = old.as_prior({"prior_prec": TAU_0})
    fit_sums = laplax.data_fit(
        cases.mlp_fn, PARAMS, DATA[0], loss_fn="cross_entropy", gradient=True
    )

    @jax.jit
    def value(temperature):
        arguments = {"prior": prior, "temperature": temperature}
        return new.log_marginal_likelihood(arguments, fit_sums, corrected=True)

    check_grads(value, (jnp.asarray(1.3),), 1, modes=["rev"], rtol=1e-6)


def test_it_jits_vmaps_pickles_and_is_saved(tmp_path):
    old, new = (network(part) for part in DATA)
    prior = old.as_prior({"prior_prec": TAU_0})
    expected = new({"prior": prior}).logdet()
    again = pickle.loads(pickle.dumps(prior))
    logdets = jax.jit(jax.vmap(lambda t: new({"prior": again, "temperature": t}).logdet()))(
        jnp.asarray([1.0, 2.0])
    )
    assert_close(logdets[0], expected)
    posterior = jax.jit(lambda prior: new({"prior": prior}).as_prior())(prior)
    assert_close(posterior.precision.logdet(), expected)
    arguments = {"prior": prior}
    set_prob_predictive = new.predictive()
    laplax.save(tmp_path / "pair.safetensors", (arguments, set_prob_predictive))
    read, _ = laplax.load(tmp_path / "pair.safetensors", cases.mlp_fn, PARAMS)
    assert_close(
        read["prior"].energy(jax.tree.map(jnp.zeros_like, PARAMS)),
        prior.energy(jax.tree.map(jnp.zeros_like, PARAMS)),
    )
    laplax.save(tmp_path / "one.safetensors", set_prob_predictive(arguments))
    loaded = laplax.load(tmp_path / "one.safetensors", cases.mlp_fn, PARAMS)
    assert_close(loaded.posterior.logdet(), expected)


def test_single_precision_stays():
    params = jax.tree.map(lambda x: x.astype(jnp.float32), PARAMS)
    data = [(x.astype(jnp.float32), y) for x, y in DATA]
    for curv_type in ("full", "diagonal", "kfac"):
        old, new = (network(part, curv_type, params) for part in data)
        prior = old.as_prior({"prior_prec": TAU_0}).decayed(0.9).diffused(0.01)
        posterior = new({"prior": prior})
        kinds = {x.dtype for x in jax.tree.leaves((prior, posterior))}
        assert kinds == {jnp.dtype(jnp.float32)}
        assert prior.neg_log_prob(params).dtype == jnp.float32


# -- forgetting -----------------------------------------------------------------------------------
PER_LEAF = {"v": 0.4, "w": 0.0}
PER_ENTRY = {"v": np.asarray([0.1, 0.5]), "w": np.asarray([0.0, 0.2, 0.3, 1.0])}


@pytest.mark.parametrize("curv_type", ["full", "lanczos", "diagonal", "kfac"])
@pytest.mark.parametrize("noise", [0.3, PER_LEAF, PER_ENTRY], ids=["one", "leaf", "entry"])
def test_forgetting_is_that_of_dense_matrices(curv_type, noise):
    options = {"lanczos": {"rank": 3, "tol": 1e9}, "kfac": {"joint_bias": False}}.get(curv_type, {})
    posterior_fn = fit(START, halves()[0], curv_type, **options)
    mixed = curv_type == "kfac" and noise is PER_ENTRY
    prior = posterior_fn.as_prior(ARGUMENTS)
    if mixed:
        with pytest.raises(ValueError, match="process_noise must be one number per layer"):
            prior.diffused(noise)
        return
    before = np.asarray(posterior_fn.structure.to_dense()) / NOISE + T
    q = np.concatenate(
        [
            np.broadcast_to(x, n)
            for x, n in zip(jax.tree.leaves(jax.tree.broadcast(noise, START)), (2, 4), strict=True)
        ]
    )
    expected = np.linalg.inv(np.linalg.inv(before) + np.diag(q))
    after = prior.diffused(noise)
    product = jax.vmap(after.precision.mv)(jnp.eye(P))
    assert_close(product, expected)
    assert_close(after.precision.logdet(), np.linalg.slogdet(expected)[1])
    assert type(after.precision) is type(prior.precision)
    if curv_type == "lanczos":
        assert isinstance(after.precision.structure, LowRank)
    assert_close(prior.decayed(0.8).precision.mv(jnp.ones(P)), 0.8 * before @ np.ones(P))
    assert_close(prior.decayed(0.8).precision.logdet(), np.linalg.slogdet(0.8 * before)[1])


# -- bad input ------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def prior():
    return fit(START, halves()[0], "full").as_prior(ARGUMENTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prior_prec": 1.0}, "leave 'prior_prec' out"),
        ({"prior_mean": 0.0}, "leave 'prior_mean' out"),
        ({"prior": 1.0}, "a number or a pytree is 'prior_prec'"),
    ],
)
def test_prior_arguments_that_contradict_each_other(prior, change, message):
    posterior_fn = fit(START, halves()[1], "full")
    with pytest.raises((TypeError, ValueError), match=message):
        posterior_fn({"prior": prior, **change})
    with pytest.raises(TypeError, match=r"call its as_prior\(\)"):
        posterior_fn({"prior": posterior_fn(ARGUMENTS)})


def test_a_prior_of_other_parameters_names_the_first_path(prior):
    posterior_fn = network(DATA[0], "full")
    with pytest.raises(ValueError, match="params have '0/b', which it does not"):
        posterior_fn({"prior": prior})
    old = network(DATA[0], "full", subset="1/*")
    with pytest.raises(ValueError, match="the subset of '0/b' that is random is another"):
        posterior_fn({"prior": old.as_prior({"prior_prec": 1.0})})
    single = jax.tree.map(lambda x: x.astype(jnp.float32), PARAMS)
    data = (DATA[0][0].astype(jnp.float32), DATA[0][1])
    narrow = network(data, "full", single).as_prior({"prior_prec": 1.0})
    with pytest.raises(ValueError, match="'0/b' is float32, and float64 in params"):
        posterior_fn({"prior": narrow})


def test_a_prior_of_another_structure_names_the_first_block():
    together, apart = (network(DATA[0], joint_bias=joint) for joint in (True, False))
    prior = together.as_prior({"prior_prec": 1.0})
    with pytest.raises(ValueError, match="first that differs is that of '0/b'"):
        apart({"prior": prior})
    with pytest.raises(ValueError, match=r"BlockDiagonal.*same curv_type"):
        network(DATA[0], "lanczos", rank=3)({"prior": prior})
    diagonal = network(DATA[0], "diagonal").as_prior({"prior_prec": 1.0})
    with pytest.raises(ValueError, match="must be one number per layer"):
        together({"prior": diagonal})


def test_what_cannot_be_a_prior():
    posterior_fn = fit(START, halves()[0], "full")
    indefinite = dataclasses.replace(posterior_fn, structure=Dense(-jnp.eye(P)))
    with pytest.raises(ValueError, match="not positive definite"):
        indefinite.as_prior(ARGUMENTS)
    diagonal = fit(START, halves()[0], "diagonal")
    with pytest.raises(ValueError, match="rank= cuts a low-rank curvature"):
        diagonal.as_prior(ARGUMENTS, rank=2)
    with pytest.raises(ValueError, match="Leave merge out"):
        diagonal.as_prior(ARGUMENTS, merge="nearest")
    with pytest.raises(ValueError, match="unknown merge 'neares'; did you mean 'nearest'"):
        diagonal.as_prior(ARGUMENTS, merge="neares")


@pytest.mark.parametrize("factor", [-0.5, 0.0, 1.5, np.ones(2)])
def test_a_decay_outside_of_its_range(prior, factor):
    with pytest.raises(ValueError, match="factor must be"):
        prior.decayed(factor)


@pytest.mark.parametrize(
    ("noise", "message"),
    [
        (-0.1, "zero or more"),
        ({"v": 0.1}, "process_noise must be a number, or a pytree that matches params"),
        ({"v": np.ones(3), "w": 0.1}, r"process_noise at 'v' has shape \(3,\)"),
        ("much", "process_noise must be a number"),
    ],
)
def test_process_noise_of_a_wrong_shape_or_sign(prior, noise, message):
    with pytest.raises((TypeError, ValueError), match=message):
        prior.diffused(noise)


def test_updates_that_cannot_be_made():
    part = halves()[0]
    whole = fit(START, part, "full")
    sampled = fit(START, part, "full", num_total_samples=100)
    with pytest.raises(ValueError, match="first fit had no num_total_samples, and this update has"):
        whole.update(as_jax(part), num_total_samples=100)
    with pytest.raises(
        ValueError, match="first fit had a num_total_samples, and this update has none"
    ):
        sampled.update(as_jax(part))
    assert sampled.update(as_jax(part), num_total_samples=50).num_total_samples == 150
    with pytest.raises(ValueError, match="does not know how its curvature was measured"):
        pickle.loads(pickle.dumps(whole)).update(as_jax(part))
    with pytest.raises(ValueError, match="it has 'x', which params have not"):
        whole.update(as_jax(part), params={**START, "x": jnp.ones(1)})


@pytree
class Own(Structure):
    """A structure of a user's own: G = s I."""

    s: jax.Array

    @property
    def size(self):
        return P

    def mv(self, v):
        return self.s * v


def test_a_structure_of_your_own_adds_up_as_a_dense_one():
    posterior_fn = dataclasses.replace(
        fit(START, halves()[0], "full"), structure=Own(jnp.asarray(3.0))
    )
    prior = posterior_fn(ARGUMENTS).as_prior()
    posterior = posterior_fn({"prior": prior, "sigma_squared": NOISE})
    assert_close(posterior.precision.mv(jnp.eye(P)), 2 * 3.0 / NOISE * np.eye(P) + T)


def test_the_structures_of_sums_refuse_what_they_cannot_add():
    low = LowRank(jnp.eye(4, 2), jnp.ones(2))
    block = KroneckerBlock(jnp.ones((1, 2, 2)), jnp.eye(2)[None], jnp.eye(2)[None], None, None)
    blocks = BlockDiagonal((block,), (((0, 4),),))
    with pytest.raises(ValueError, match="no sum of either kind"):
        low.plus(blocks)
    with pytest.raises(ValueError, match="where they have the same blocks"):
        blocks.plus(low)
    assert_close(Dense(jnp.eye(4)).plus(low).to_dense(), np.diag([2.0, 2.0, 1.0, 1.0]))
