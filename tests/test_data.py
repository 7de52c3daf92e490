"""Every form of data gives the same answer, and weights mean what they say."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
from laplax import (
    GridSearch,
    calibration,
    curvature_mv,
    data_fit,
    laplace,
    last_layer_features,
    log_marginal_likelihood,
)
from laplax._data import as_batch

pytestmark = pytest.mark.usefixtures("quick_compilation")

N, TOKENS, CLASSES = 10, 3, 2
rng = np.random.default_rng(0)
X = rng.normal(size=(N, 3))
Y = rng.normal(size=(N, CLASSES))
PARAMS = {
    "w": jnp.asarray(rng.normal(size=(3, 2))),
    "v": jnp.asarray(rng.normal(size=(2, CLASSES))),
}
SIZE = 10


def model_fn(input, params):
    return jnp.tanh(input @ params["w"]) @ params["v"]


def rows_model(input, params):
    """Tokens by classes, from one matrix of features per example."""
    return jnp.tanh(input @ params["w"]) @ params["v"]


def batches(size, order=slice(None), make=lambda x, y: (x, y)):
    """The data in batches of `size`; the last one is ragged when N does not divide."""
    starts = range(0, N, size)
    return [make(X[i : i + size], Y[i : i + size]) for i in starts][order]


class DataLoader:
    """Iterates anew every time and gives lists of foreign tensors, as PyTorch's does."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return len(batches(self.size))

    def __iter__(self):
        for x, y in batches(self.size):
            yield [Tensor(x), Tensor(y)]


class Tensor:
    """What a foreign array shows: a shape, a dtype of its own kind, and `__array__`."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, "torch.float64"

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.array, dtype)


class Unsized:
    """A re-iterable that does not know its length (a stream read from disk)."""

    def __len__(self):
        raise TypeError("no length")

    def __iter__(self):
        return iter(batches(4))


Named = collections.namedtuple("Named", ["features", "labels"])
FORMS = {
    "tuple of jax arrays": lambda: (jnp.asarray(X), jnp.asarray(Y)),
    "dict": lambda: {"input": jnp.asarray(X), "target": jnp.asarray(Y)},
    "named tuple": lambda: Named(X, Y),
    "list of one batch": lambda: batches(N),
    "list with a ragged last batch": lambda: batches(4),
    "list in another order": lambda: batches(4, slice(None, None, -1)),
    "list of lists": lambda: batches(4, make=lambda x, y: [x, y]),
    "list of dicts": lambda: batches(4, make=lambda x, y: {"input": x, "target": y}),
    "data loader": lambda: DataLoader(4),
    "stream without a length": Unsized,
}
LANCZOS = {"curv_type": "lanczos", "rank": SIZE}


def curvature(data, loss_fn="mse", model=model_fn, **options):
    return laplace(model, PARAMS, data, loss_fn=loss_fn, **options)[1]


def fit(data, loss_fn="mse", model=model_fn, **options):
    return jnp.stack(jax.tree.leaves(data_fit(model, PARAMS, data, loss_fn=loss_fn, **options)))


def answers(make, **options):
    """What passes over the data give; `make` makes the data anew for each."""
    return {
        "full": curvature(make(), **options).to_dense(),
        "diagonal": curvature(make(), curv_type="diagonal", **options).diagonal(),
        "lanczos": curvature(make(), **LANCZOS, **options).to_dense(),
    }


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, value in got.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-9, atol=1e-9, err_msg=name)


def arrays():
    return X, Y


@pytest.fixture(scope="module")
def expected():
    """By explicit Jacobians."""
    jacobian = jax.jit(jax.vmap(jax.jacrev(model_fn, argnums=1), in_axes=(0, None)))(X, PARAMS)
    rows = jnp.concatenate(
        [leaf.reshape(N * CLASSES, -1) for leaf in jax.tree.leaves(jacobian)], axis=1
    )
    dense = rows.T @ rows
    return {"full": dense, "diagonal": jnp.diagonal(dense), "lanczos": dense}


@pytest.fixture(scope="module")
def expected_fit():
    residual = np.tanh(X @ np.asarray(PARAMS["w"])) @ np.asarray(PARAMS["v"]) - Y
    return np.array([0.5 * np.sum(residual**2), 0.0, N * CLASSES])


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_gives_the_same_curvature_and_fit(form, expected, expected_fit):
    assert_same(answers(FORMS[form]), expected)
    np.testing.assert_allclose(fit(FORMS[form]()), expected_fit, rtol=1e-9)


@pytest.mark.parametrize("size", [3, 64])
@pytest.mark.parametrize("make", [arrays, lambda: batches(4)], ids=["arrays", "loader"])
def test_the_batch_size_changes_nothing(size, make, expected):
    assert_same(answers(make, batch_size=size), expected)


def test_a_small_memory_budget_changes_nothing(expected):
    assert_same(answers(arrays, memory_budget=1), expected)


@pytest.mark.parametrize("curv_type", ["full", "diagonal"])
def test_a_generator_serves_where_one_pass_suffices(curv_type, expected):
    estimate = curvature((batch for batch in batches(4)), curv_type=curv_type)
    np.testing.assert_allclose(estimate.diagonal(), expected["diagonal"], rtol=1e-9)


def test_a_generator_serves_the_fit(expected_fit):
    np.testing.assert_allclose(fit(iter(batches(4))), expected_fit, rtol=1e-9)


def test_a_loader_whose_iterator_goes_on_loses_no_batch(expected):
    class Resuming:
        """Each `__iter__` goes on where the last one stopped."""

        def __init__(self):
            self.stream = iter(batches(4))

        def __iter__(self):
            yield from self.stream

    np.testing.assert_allclose(curvature(Resuming()).to_dense(), expected["full"], rtol=1e-9)


def test_a_loader_is_read_once_for_the_full_curvature():
    class Counted(DataLoader):
        reads = 0

        def __iter__(self):
            Counted.reads += 1
            return super().__iter__()

    curvature(Counted(4))
    assert Counted.reads == 1


class Refilled:
    """Gives its batches in the same two arrays, whose memory JAX can share."""

    def __init__(self, x, y, size):
        self.given, self.size = (x, y), size
        self.kept = tuple(cases.aligned((size, *a.shape[1:]), a.dtype) for a in self.given)

    def __iter__(self):
        for start in range(0, len(self.given[0]), self.size):
            for kept, whole in zip(self.kept, self.given, strict=True):
                kept[:] = whole[start : start + self.size]
            yield self.kept


@pytest.mark.parametrize("dtype", [float, np.int32])
def test_an_array_is_read_when_it_is_handed_over(dtype):
    for make in (cases.aligned, np.empty):
        x = make((2**21, 2), dtype)
        x[:] = 1
        batch = as_batch((x, x))
        x[:] = 7
        assert int(batch.input.min()) == int(batch.target.max()) == 1


@pytest.mark.parametrize("dtype", [float, np.int32])
def test_a_loader_may_write_its_next_batch_where_the_last_one_was(dtype):
    rng = np.random.default_rng(1)
    x = (3 * rng.normal(size=(256, 16))).astype(dtype)
    y = rng.normal(size=(256, 2))
    params = {"w": jnp.asarray(rng.normal(size=(16, 8))), "v": jnp.asarray(rng.normal(size=(8, 2)))}

    def cast(input, params):
        return model_fn(input.astype(float), params)

    def forms():
        return (x, y), Refilled(x, y, 64)

    v = jnp.ones(144)
    products = [curvature_mv(cast, params, data, loss_fn="mse") for data in forms()]
    features = [last_layer_features(cast, params, data)[1]["input"] for data in forms()]
    np.testing.assert_array_equal(*features)
    for _ in range(8):
        np.testing.assert_allclose(*(mv(v) for mv in products), rtol=1e-11)


def test_the_monte_carlo_fisher_does_not_depend_on_the_batches():
    options = {"curvature": "fisher_mc", "key": jax.random.key(0)}
    whole = curvature(arrays(), **options).to_dense()
    for other in (
        curvature(arrays(), batch_size=3, **options),
        curvature(batches(4), **options),
    ):
        np.testing.assert_allclose(other.to_dense(), whole, rtol=1e-9, atol=1e-12)


def test_the_product_alone_takes_a_loader(expected):
    v = jnp.arange(float(SIZE))
    mv = curvature_mv(model_fn, PARAMS, batches(4), loss_fn="mse")
    np.testing.assert_allclose(mv(v), expected["full"] @ v, rtol=1e-9)


def test_inputs_and_targets_may_be_pytrees(expected):
    def split_model(input, params):
        return model_fn(jnp.concatenate([input["left"], input["right"][0]]), params)

    def split_loss(f, y):
        return 0.5 * (jnp.square(f[0] - y["first"]) + jnp.square(f[1] - y["second"]))

    def make(x, y):
        left_right = {"left": x[:, :1], "right": [x[:, 1:]]}
        return left_right, {"first": y[:, 0], "second": y[:, 1]}

    for data in (make(X, Y), batches(4, make=make)):
        got = curvature(data, split_loss, split_model).to_dense()
        np.testing.assert_allclose(got, expected["full"], rtol=1e-9, atol=1e-12)
    loss = data_fit(split_model, PARAMS, make(X, Y), loss_fn=split_loss).loss
    np.testing.assert_allclose(loss, fit(arrays())[0], rtol=1e-9)


@pytest.mark.parametrize("make", [arrays, lambda: batches(4)], ids=["arrays", "loader"])
def test_a_model_of_batches_equals_the_model_of_one_example(make, expected, expected_fit):
    assert_same(answers(make, vmap_over_data=False), expected)
    np.testing.assert_allclose(fit(make(), vmap_over_data=False), expected_fit, rtol=1e-9)


# -- weights --------------------------------------------------------------------------------------
REPEATS = np.array([1, 0, 3, 2, 0, 1, 1, 4, 0, 2])
KINDS = {
    "ggn": {},
    "hessian": {"curvature": "hessian", "indefinite": "clip"},
    "fisher_empirical": {"curvature": "fisher_empirical"},
}


def weighted_batches(weight, size=4):
    slices = [slice(i, i + size) for i in range(0, N, size)]
    return [cases.weighted(X[part], Y[part], weight[part]) for part in slices]


@pytest.mark.parametrize(
    ("kind", "dtype"), [("ggn", np.int32), ("hessian", np.int32), ("fisher_empirical", np.float32)]
)
def test_integer_weights_equal_repeated_examples(kind, dtype):
    weight = REPEATS.astype(dtype)
    repeated = (X.repeat(REPEATS, axis=0), Y.repeat(REPEATS, axis=0))
    expected = curvature(repeated, **KINDS[kind]).to_dense()
    for data in (cases.weighted(X, Y, weight), weighted_batches(weight)):
        got = curvature(data, **KINDS[kind]).to_dense()
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(fit(data), fit(repeated), rtol=1e-9)


@pytest.mark.parametrize("dtype", [bool, np.float64])
def test_weights_of_zero_equal_dropping_the_example(dtype):
    mask = REPEATS > 0
    dropped = answers(lambda: (X[mask], Y[mask]))
    assert_same(answers(lambda: {"input": X, "target": Y, "weight": mask.astype(dtype)}), dropped)
    assert_same(answers(lambda: weighted_batches(mask.astype(dtype))), dropped)


def tokens():
    """Inputs of shape (tokens, 3), labels and weights of shape (tokens,)."""
    input = rng.normal(size=(N, TOKENS, 3))
    label = rng.integers(0, CLASSES, size=(N, TOKENS))
    return input, label, rng.integers(0, 3, size=(N, TOKENS))


@pytest.mark.parametrize("kind", ["ggn", "hessian"])
def test_weights_per_token_equal_repeated_tokens(kind):
    input, label, weight = tokens()
    flat = weight.reshape(-1)
    repeated = (input.reshape(-1, 3).repeat(flat, axis=0), label.reshape(-1).repeat(flat))
    options = {"loss_fn": "cross_entropy", "model": rows_model}
    data = cases.weighted(input, label, weight)
    expected = curvature(repeated, "cross_entropy", **KINDS[kind]).to_dense()
    for more in ({}, LANCZOS):
        got = curvature(data, **options, **KINDS[kind], **more).to_dense()
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(fit(data, **options), fit(repeated, "cross_entropy"), rtol=1e-9)


def test_a_weight_per_example_covers_all_its_tokens():
    input, label, _ = tokens()
    options = {"loss_fn": "cross_entropy", "model": rows_model}
    per_example = rng.uniform(size=N)
    per_token = np.repeat(per_example[:, None], TOKENS, axis=1)
    np.testing.assert_allclose(
        curvature(cases.weighted(input, label, per_example), **options).to_dense(),
        curvature(cases.weighted(input, label, per_token), **options).to_dense(),
        rtol=1e-9,
    )


# -- a part of the data ---------------------------------------------------------------------------
@pytest.mark.parametrize("make", [arrays, lambda: batches(4)], ids=["arrays", "loader"])
def test_a_part_of_the_data_is_scaled_up_to_the_whole(make, expected, expected_fit):
    scaled = {name: 5 * value for name, value in expected.items()}
    assert_same(answers(make, num_total_samples=5 * N), scaled)
    np.testing.assert_allclose(fit(make(), num_total_samples=5 * N), 5 * expected_fit, rtol=1e-9)


def test_the_number_of_samples_in_the_part_can_be_stated(expected):
    got = curvature(arrays(), num_total_samples=60, num_curv_samples=20).to_dense()
    np.testing.assert_allclose(got, 3 * expected["full"], rtol=1e-9)


def test_masked_examples_do_not_count_towards_the_part():
    mask = REPEATS > 0  # 7 of 10
    dropped = (X[mask], Y[mask])
    expected = {name: 3 * value for name, value in answers(lambda: dropped).items()}
    for make in (lambda: cases.weighted(X, Y, mask), lambda: weighted_batches(mask)):
        assert_same(answers(make, num_total_samples=21), expected)
        np.testing.assert_allclose(fit(make(), num_total_samples=21), 3 * fit(dropped), rtol=1e-9)


@pytest.mark.parametrize("seen", [N, N // 2])
def test_the_evidence_stands_for_as_many_examples_as_the_curvature(seen):
    """By calibration and by itself; data that are the whole already are not scaled again."""
    options = {"loss_fn": "mse", "curv_type": "full"}
    prior = {"prior_prec": 0.7, "sigma_squared": 0.3}
    twice = (np.concatenate([X[:seen]] * 2), np.concatenate([Y[:seen]] * 2))
    whole_fn, _ = laplace(model_fn, PARAMS, twice, **options)
    expected = log_marginal_likelihood(whole_fn, prior, model_fn, PARAMS, twice)
    part_fn, _ = laplace(
        model_fn, PARAMS, (X[:seen], Y[:seen]), num_total_samples=2 * seen, **options
    )
    for data in ((X[:seen], Y[:seen]), twice):
        found = log_marginal_likelihood(part_fn, prior, model_fn, PARAMS, data)
        np.testing.assert_allclose(found, expected, rtol=1e-9)
    grids = [
        calibration(
            posterior_fn,
            model_fn,
            PARAMS,
            data,
            calibration_objective="marginal_log_likelihood",
            calibration_method=GridSearch(grid_size=5),
            prior_arguments=prior,
        )[1].trace.values
        for posterior_fn, data in ((whole_fn, twice), (part_fn, (X[:seen], Y[:seen])))
    ]
    np.testing.assert_allclose(*grids, rtol=1e-9)


def test_the_evidence_sees_the_model_as_the_fit_did():
    def batched(input, params):
        assert input.ndim == 2
        return model_fn(input, params)

    prior = {"prior_prec": 0.7, "sigma_squared": 0.3}
    expected, found = (
        log_marginal_likelihood(
            laplace(fn, PARAMS, (X, Y), loss_fn="mse", vmap_over_data=not batch)[0],
            prior,
            fn,
            PARAMS,
            (X, Y),
        )
        for fn, batch in ((model_fn, False), (batched, True))
    )
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_the_smaller_side_of_a_full_curvature_is_scaled_too():
    few = (X[:2], Y[:2])  # 4 rows, 10 parameters
    scaled = curvature(few, num_total_samples=6).to_dense()
    np.testing.assert_allclose(scaled, 3 * curvature(few).to_dense(), rtol=1e-9, atol=1e-12)


# -- progress -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "label"), [({}, "pass 1"), (LANCZOS, "lanczos")], ids=["full", "lanczos"]
)
def test_the_progress_bar_is_switchable(options, label, capsys):
    curvature(batches(4), progress=True, **options)
    assert label in capsys.readouterr().err
    for silent in (False, None):  # no terminal is attached to a test
        curvature(batches(4), progress=silent, **options)
        assert capsys.readouterr().err == ""


def test_the_progress_bar_of_the_fit_knows_the_number_of_batches(capsys):
    fit(DataLoader(4), progress=True)
    assert "/3" in capsys.readouterr().err


def test_a_terminal_switches_the_progress_bar_on(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    fit(batches(4))
    assert "pass 1" in capsys.readouterr().err
