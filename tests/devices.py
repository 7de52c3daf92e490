"""What the tests of many devices run, in a process of its own: JAX counts its devices once.

`python tests/devices.py NUMBER [float32]` compares every answer on NUMBER virtual devices with the
answer on one, and prints the largest relative difference of each as JSON.
`python tests/devices.py processes RANK COUNT PORT` does so in one of COUNT processes. `fail` ends
the second process before the first one has its answer, `programs` makes those whose text is looked
at, and `refusals` prints what is said of wrong input.
"""

import json
import os
import pickle
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import laplax
import laplax.fsp

TASK = sys.argv[1]
DEVICES = int(TASK) if TASK.isdigit() else 1 if TASK in ("processes", "fail") else 4
FLOAT = "float32" if "float32" in sys.argv else "float64"
jax.config.update("jax_num_cpu_devices", DEVICES)
jax.config.update("jax_enable_x64", FLOAT == "float64")
jax.config.update("jax_numpy_dtype_promotion", "strict")
if folder := os.environ.get("LAPLAX_TEST_PROGRAMS"):
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
# The text of `programs` is that of a user; all else is compiled for one run on small arrays.
quick = not TASK.endswith("programs") and os.environ.get("LAPLAX_COMPILE_AS_USERS") != "1"
jax.config.update("jax_disable_most_optimizations", quick)

EXAMPLES = 33  # no number of devices divides it
PRIOR = {"prior_prec": 2.0}
STRUCTURES = {
    "diagonal": {"batch_size": 3},
    "kfac": {},
    "ekfac": {},
    "block_diagonal": {},
    "full": {},
    "lanczos": {"rank": 4, "num_products": 12},
    "lobpcg": {"rank": 3},
    "hutchinson": {"num_samples": 4},
}
LOSSES = {"kfac": "mse", "full": "mse", "lanczos": "binary_cross_entropy"}


def network(input, params):
    return jnp.tanh(input @ params["first"] + params["bias"]) @ params["last"]


def convolutions(input, params):
    image = input.reshape(1, 3, 2, 1)
    form = ("NHWC", "HWIO", "NHWC")
    seen = jax.lax.conv_general_dilated(
        image, params["kernel"], (1, 1), "SAME", dimension_numbers=form
    )
    return jnp.tanh(seen).reshape(-1) @ params["last"]


class Problem:
    """Data and parameters, the same in every process."""

    def __init__(self):
        draw = np.random.default_rng(0)
        self.input = draw.normal(size=(EXAMPLES, 6)).astype(FLOAT)
        self.targets = {
            "cross_entropy": draw.integers(0, 4, size=EXAMPLES),
            "mse": draw.normal(size=(EXAMPLES, 4)).astype(FLOAT),
            "binary_cross_entropy": draw.integers(0, 2, size=(EXAMPLES, 4)),
        }
        shapes = {"first": (6, 8), "bias": (8,), "last": (8, 4)}
        self.params = {name: _array(draw, shape) for name, shape in shapes.items()}
        self.kernels = {"kernel": _array(draw, (2, 2, 1, 2)), "last": _array(draw, (12, 4))}

    def data(self, loss):
        return self.input, self.targets[loss]


def _array(draw, shape):
    return jnp.asarray(draw.normal(size=shape).astype(FLOAT) / np.sqrt(shape[0]))


def mesh_of(shape, names, kind):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def whole(x):
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        return multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


def difference(given, expected):
    """The largest difference, relative to the largest expected number of the same array."""
    pairs = zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True)
    both = [(whole(x).astype(float), whole(y).astype(float)) for x, y in pairs]
    return max(float(np.max(np.abs(x - y)) / max(np.max(np.abs(y)), 1e-300)) for x, y in both)


def answers_of(posterior_fn, vector, data, inputs):
    return {
        "covariance": posterior_fn(PRIOR).cov_mv(vector),
        "evidence": posterior_fn.log_marginal_likelihood(PRIOR, data),
        "prediction": dict(posterior_fn.predictive()(PRIOR)(inputs)),
    }


answers_by_one_program = jax.jit(answers_of)


def answers(posterior_fn, data, inputs, one_program=True):
    """By one program, or by one for each operation as a user has them."""
    vector = jnp.asarray(np.linspace(0.5, 1, posterior_fn.space.size, dtype=FLOAT))
    together = answers_by_one_program if one_program else answers_of
    return together(posterior_fn, vector, data, inputs)


def judged(fit, data):
    posterior_fn, _ = fit(data)
    chosen, _ = posterior_fn.calibrate(data, calibration_objective="nll")
    return {
        "evaluation": posterior_fn.evaluate(PRIOR, data)[0],
        "calibration": dict(chosen),
        "evidence": dict(posterior_fn.calibrate(data)[0]),
    }


def divided(mesh, axis):
    """A divided array like `x`, of as many rows as there are devices along the axis."""
    spread = NamedSharding(mesh, PartitionSpec(axis))

    def place(x):
        rows = np.resize(x, (mesh.shape[axis], *x.shape[1:]))
        return rows, jax.make_array_from_callback(rows.shape, spread, lambda i: rows[i])

    return place


def compare(problem, mesh, names, params=None, spread=None, model=network, **options):
    """Every structure of `names` on a mesh against one device.

    Loaders and the first structure answer operation by operation, the others by one program.
    """
    spread = spread or (lambda data: laplax.shard(data, mesh))
    rows, placed = divided(mesh, mesh.axis_names[0])(problem.input)
    given = problem.params if model is network else problem.kernels
    found = {}
    for name in names:
        loss = LOSSES.get(name, "cross_entropy")
        data = problem.data(loss)

        given_options = STRUCTURES[name] | options
        if name == "hutchinson":
            given_options |= {"key": jax.random.key(1)}

        def fit(data, params, name=name, loss=loss, given_options=given_options):
            posterior_fn, _ = laplax.laplace(
                model, params, data, loss_fn=loss, curv_type=name, **given_options
            )
            return posterior_fn

        everywhere = given if params is None else params
        parts = spread(data)
        one_program = name != names[0] and isinstance(parts, dict)
        alone = answers(fit(data, given), data, rows)
        together = answers(fit(parts, everywhere), parts, placed, one_program)
        for what, expected in alone.items():
            found[f"{name} {what}"] = difference(together[what], expected)
    return found


def compare_function_space(problem, mesh):
    """Training and posterior under a prior on functions."""
    data = problem.data("mse")
    prior = laplax.fsp.GPPrior(laplax.fsp.RBF(length_scale=1.0))
    points = problem.input[:5]

    def numbers(data):
        objective = laplax.fsp.fsp_objective(
            network, prior, loss_fn="mse", num_total_samples=EXAMPLES, sigma_squared=0.1
        )
        params, _ = laplax.fsp.train(
            objective, problem.params, data, context=points, key=jax.random.key(0), num_steps=3
        )
        posterior_fn, _ = laplax.fsp.fsp_laplace(
            network, params, data, loss_fn="mse", prior=prior, context=points
        )
        return {"params": params, "variance": posterior_fn({"sigma_squared": 0.1}).variance()}

    alone, together = numbers(data), numbers(laplax.shard(data, mesh))
    return {what: difference(together[what], alone[what]) for what in alone}


def sizes_seen(problem, mesh):
    """How many examples a metric sees at once, beyond those of one device."""
    data = problem.data("mse")
    sizes = []

    def largest(pred_mean):
        sizes.append(len(pred_mean))
        return jnp.max(jnp.abs(pred_mean), axis=1)

    posterior_fn, _ = laplax.laplace(
        network, problem.params, data, loss_fn="mse", curv_type="diagonal"
    )
    posterior_fn.evaluate(PRIOR, laplax.shard(data, mesh), metrics=[largest])
    return {"sizes": max(sizes) - -(-EXAMPLES // DEVICES)}


def compare_judged(problem, mesh, loss, name):
    data = problem.data(loss)

    def fit(data):
        return laplax.laplace(network, problem.params, data, loss_fn=loss, curv_type=name)

    alone = judged(fit, data)
    together = judged(fit, laplax.shard(data, mesh))
    return {f"{name} {what}": difference(together[what], alone[what]) for what in alone}


def batches_of(data, size=9):
    input, target = data
    return [(input[i : i + size], target[i : i + size]) for i in range(0, len(input), size)]


def on_devices(problem):
    """The structures on meshes of all devices of this process."""
    line = mesh_of((DEVICES,), ("data",), AxisType.Auto)
    explicit = mesh_of((DEVICES,), ("data",), AxisType.Explicit)
    few = ("diagonal", "kfac")
    if FLOAT == "float32":
        return {
            "automatic": compare(problem, line, list(STRUCTURES)),
            "explicit": compare(problem, explicit, ["diagonal"]),
            "judged": compare_judged(problem, line, "mse", "kfac"),
            "judged explicit": compare_judged(problem, explicit, "cross_entropy", "diagonal"),
        }
    every = STRUCTURES if DEVICES == 4 else few
    results = {
        "automatic": compare(problem, line, list(every)),
        "explicit": compare(problem, explicit, list(reversed(every))),
    }
    if DEVICES > 4:
        return results
    results["last layer"] = compare(problem, explicit, ["full"], subset="last_layer")
    results["convolutions"] = compare(problem, line, few, model=convolutions)
    results["batches"] = compare(
        problem, explicit, few, spread=lambda data: laplax.shard(batches_of(data), explicit)
    )
    results["function space"] = compare_function_space(problem, explicit)
    results["judged"] = compare_judged(problem, line, "mse", "kfac")
    results["sizes"] = sizes_seen(problem, line)
    results["judged explicit"] = compare_judged(problem, explicit, "cross_entropy", "diagonal")
    return results


PLACES = {
    "first": PartitionSpec(None, "model"),
    "bias": PartitionSpec("model"),
    "last": PartitionSpec("model", None),
}
COMPLETE = {"rank": 88, "num_products": 88}  # all eigenpairs: they do not depend on the start


def placed(params, mesh):
    """Parameters as tensor parallelism lays them."""
    return {
        name: jax.device_put(leaf, NamedSharding(mesh, PLACES[name]))
        for name, leaf in params.items()
    }


def on_square(problem):
    """Data and parameters divided along an axis of their own."""
    square = mesh_of((2, 2), ("data", "model"), AxisType.Auto)
    explicit = mesh_of((2, 2), ("data", "model"), AxisType.Explicit)
    params = placed(problem.params, square)
    data = laplax.shard(problem.data("cross_entropy"), explicit)
    on_explicit = placed(problem.params, explicit)
    return {
        "automatic": compare(problem, square, ["diagonal", "kfac", "full"], params),
        "automatic, complete": compare(problem, square, ["lanczos"], params, **COMPLETE),
        "explicit": compare(problem, explicit, ["diagonal"], on_explicit),
        "explicit, batches": compare(
            problem,
            explicit,
            ["kfac"],
            on_explicit,
            spread=lambda data: laplax.shard(batches_of(data), explicit),
        ),
        "hyperparameters": compare_hyperparameters(problem, data, on_explicit),
        "samples": compare_samples(problem, laplax.shard(problem.data("mse"), square), params),
        "files": compare_files(problem, laplax.shard(problem.data("mse"), square), params),
        "placed": {
            f"{name} {what}": share
            for name, options in (("diagonal", {}), ("kfac", {}), ("lanczos", {"rank": 3}))
            for what, share in shares(problem, square, params, name, options).items()
        },
    }


def compare_hyperparameters(problem, data, params):
    """A prior for every parameter and its mean, searches and distances, on a diagonal."""
    leaves = problem.params

    def numbers(params, data):
        posterior_fn, estimate = laplax.laplace(
            network, params, data, loss_fn="cross_entropy", curv_type="diagonal"
        )
        each = jax.tree.map(lambda x: 1 + x**2, leaves) | {"bias": 3.0}
        arguments = {"prior_prec": each, "prior_mean": params}
        posterior = posterior_fn(arguments)
        mode = laplax.glm_mode(posterior_fn, {"prior_prec": each}, data, refit_curvature=False)
        found, _ = posterior_fn.calibrate(data, calibration_objective="leave_one_out")
        vector = jnp.linspace(0.5, 1, posterior_fn.space.size, dtype=FLOAT)
        return {
            "variance": posterior.variance(),
            "log determinant": posterior.logdet(),
            "density": posterior.log_prob(jax.tree.map(lambda x: x + 0.1, params)),
            "density of a flat vector": posterior.log_prob(vector),
            "tree": posterior.prec_mv(params),
            "evidence": posterior_fn.log_marginal_likelihood(arguments, data),
            "parameters": posterior_fn.effective_parameters(arguments),
            "distance": posterior_fn.mode_distance(PRIOR, data),
            "mode": mode.mean,
            "leave one out": dict(found),
            "kernel": posterior_fn.predictive()(PRIOR).kernel(problem.input[:2]),
            "curvature": estimate.diagonal(),
            "dense": estimate.to_dense(),
            "scale": sorted(
                np.concatenate(
                    [np.ravel(whole(x)) for x in jax.tree.leaves(posterior.state["scale"])]
                )
            ),
        }

    alone = numbers(problem.params, problem.data("cross_entropy"))
    together = numbers(params, data)
    return {what: difference(together[what], alone[what]) for what in alone}


def compare_samples(problem, data, params):
    """Samples of a diagonal posterior, from the normal numbers of every leaf."""

    def variances(params, data):
        posterior_fn, _ = laplax.laplace(network, params, data, loss_fn="mse", curv_type="diagonal")
        return posterior_fn, posterior_fn(PRIOR).variance()

    posterior_fn, _ = variances(params, data)
    _, expected = variances(problem.params, problem.data("mse"))
    key = jax.random.key(3)
    drawn = posterior_fn(PRIOR).sample(key, 2)
    keys = jax.random.split(key, 2)
    found = {}
    for i, name in enumerate(sorted(params)):
        shape = params[name].shape
        noise = [jax.random.normal(jax.random.fold_in(k, i), shape, FLOAT) for k in keys]
        mean = np.asarray(problem.params[name])
        samples = mean + np.stack(noise) * np.sqrt(np.asarray(expected[name]))
        found[name] = difference(drawn[name], samples)
    return found


def compare_files(problem, data, params):
    """A posterior of two by two devices, on four, on two and on one."""
    line = mesh_of((4,), ("model",), AxisType.Auto)
    others = {
        "four": placed(problem.params, line),
        "two": placed(problem.params, mesh_of((2, 2), ("data", "model"), AxisType.Explicit)),
        "one": problem.params,
    }
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, options in (("diagonal", {}), ("kfac", {}), ("lanczos", {"rank": 3})):
            path = f"{folder}/{name}"
            posterior_fn, _ = laplax.laplace(
                network, params, data, loss_fn="mse", curv_type=name, **options
            )
            laplax.save(path, posterior_fn)
            again = pickle.loads(pickle.dumps(posterior_fn))(PRIOR).variance()
            found[f"{name} pickled"] = difference(again, posterior_fn(PRIOR).variance())
            for where, others_params in others.items():
                loaded = laplax.load(path, network, others_params)
                variance = loaded(PRIOR).variance()
                found[f"{name} on {where}"] = difference(variance, posterior_fn(PRIOR).variance())
                found[f"{name} lies on {where}"] = misplaced(variance, others_params)
    return found


def misplaced(tree, params):
    """How many leaves are not divided as their parameters are."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(params), strict=True)
    return sum(
        not x.sharding.is_equivalent_to(y.sharding, y.ndim)
        for x, y in pairs
        if len(y.sharding.device_set) > 1
    )


def shares(problem, mesh, params, name, options):
    """Answers that are not divided as the parameters are, and arrays of G that are not at all."""
    data = laplax.shard(problem.data("mse"), mesh)
    posterior_fn, _ = laplax.laplace(
        network, params, data, loss_fn="mse", curv_type=name, **options
    )
    posterior = posterior_fn(PRIOR)
    arrays = [x for x in jax.tree.leaves(posterior_fn.structure) if x.ndim > 1 and x.size > 49]
    sample = jax.tree.map(lambda x: x[0], posterior.sample(jax.random.key(0), 2))
    return {
        "variance": misplaced(posterior.variance(), params),
        "sample": misplaced(sample, params),
        "product": misplaced(posterior.cov_mv(params), params),
        "structure": sum(x.addressable_shards[0].data.size > x.size / 2 for x in arrays),
    }


def on_processes(problem, rank, count):
    """Every process has its own examples; batches of other sizes than those of the others."""
    mesh = mesh_of((count,), ("data",), AxisType.Auto)
    edges = [0, 8, 33] if count == 2 else [0, 8, 20, 33]

    def mine(data):
        return tuple(part[edges[rank] : edges[rank + 1]] for part in data)

    def batches(data):
        input, target = mine(data)
        half = len(input) // 2
        return laplax.shard([(input[:half], target[:half]), (input[half:], target[half:])], mesh)

    two = count == 2
    arrays = compare(
        problem,
        mesh,
        ["full", "kfac", "lanczos"],
        spread=lambda data: laplax.shard(mine(data), mesh),
    )
    names = ["diagonal", "kfac"] if two else ["diagonal"]
    loaders = compare(problem, mesh, names, spread=batches, model=convolutions)
    results = {"arrays": arrays, "loaders": loaders, "errors": errors(problem, mesh, rank, mine)}
    return results | (divided_among_processes(problem) if two else {})


def divided_among_processes(problem):
    """Each process has a half of every parameter, and all of the data."""
    mesh = mesh_of((1, 2), ("data", "model"), AxisType.Auto)
    params = placed(problem.params, mesh)
    data = laplax.shard(problem.data("mse"), mesh)
    posterior_fn, _ = laplax.laplace(network, params, data, loss_fn="mse", curv_type="kfac")
    path = os.environ["LAPLAX_TEST_FILE"]
    laplax.save(path, posterior_fn)
    loaded = laplax.load(path, network, params)(PRIOR).variance()
    return {
        "parameters": compare(problem, mesh, ["diagonal", "kfac"], params),
        "file": {
            "values": difference(loaded, posterior_fn(PRIOR).variance()),
            "places": misplaced(loaded, params),
        },
    }


def errors(problem, mesh, rank, mine):
    """What every process is told of what is wrong on one."""
    data = mine(problem.data("mse"))
    parts = batches_of(data, 4)[: 1 + rank]
    other = jax.tree.map(lambda x: x + rank, problem.params)

    fit = {"loss_fn": "mse", "curv_type": "diagonal"}
    return {
        "batches": said(
            lambda: laplax.laplace(network, problem.params, laplax.shard(parts, mesh), **fit)
        ),
        "params": said(lambda: laplax.laplace(network, other, laplax.shard(data, mesh), **fit)),
    }


def failing(problem, rank, count):
    """The second process is gone when the first one waits for its part of the sum."""
    mesh = mesh_of((count,), ("data",), AxisType.Auto)
    data = laplax.shard(problem.data("mse"), mesh)
    if rank == 1:
        os._exit(3)
    laplax.laplace(network, problem.params, data, loss_fn="mse", curv_type="diagonal")
    return {"fit": "done"}


def programs(problem):
    mesh = mesh_of((DEVICES,), ("data",), AxisType.Explicit)
    data = laplax.shard(problem.data("cross_entropy"), mesh)
    for name in ("diagonal", "kfac", "lanczos"):
        options = {"batch_size": 2} | STRUCTURES[name]
        posterior_fn, _ = laplax.laplace(
            network, problem.params, data, loss_fn="cross_entropy", curv_type=name, **options
        )
    posterior_fn.predictive()(PRIOR)(data["input"])
    return {}


def square_programs(problem):
    mesh = mesh_of((2, 2), ("data", "model"), AxisType.Auto)
    data = laplax.shard(problem.data("cross_entropy"), mesh)
    params = placed(problem.params, mesh)
    for name in sys.argv[2:]:
        options = {"batch_size": 2} | STRUCTURES[name]
        posterior_fn, _ = laplax.laplace(
            network, params, data, loss_fn="cross_entropy", curv_type=name, **options
        )
        posterior_fn(PRIOR).sample(jax.random.key(0), 2)
        posterior_fn.predictive()(PRIOR)(data["input"])
    return {}


def refusals(problem):
    explicit = mesh_of((4,), ("d",), AxisType.Explicit)
    auto = mesh_of((4,), ("d",), AxisType.Auto)
    data = np.ones((8, 3), FLOAT), np.ones((8, 4), FLOAT)
    params = {"w": jnp.ones((3, 4), FLOAT)}

    def model(input, params):
        return jnp.tanh(input @ params["w"])

    def fit(mesh, data, in_a_trace=False):
        columns = NamedSharding(mesh, PartitionSpec(None, "d"))
        divided = {"w": jax.device_put(params["w"], columns)}

        def structure(divided):
            options = {"loss_fn": "mse", "curv_type": "diagonal"}
            return laplax.laplace(model, divided, data, **options)[0].structure

        (jax.jit(structure) if in_a_trace else structure)(divided)

    def inside(check_vma):
        def covariance(input, target):
            posterior_fn, _ = laplax.laplace(
                model, params, (input, target), loss_fn="mse", curv_type="diagonal"
            )
            return jax.lax.psum(posterior_fn(PRIOR).cov_mv(jnp.ones(12, FLOAT)), "d")

        rows = PartitionSpec("d")
        spread = jax.shard_map(
            covariance,
            mesh=auto,
            in_specs=(rows, rows),
            out_specs=PartitionSpec(),
            check_vma=check_vma,
        )
        return jax.jit(spread)(*data)

    return {
        "checked": said(lambda: inside(True)),
        "unchecked": said(lambda: inside(False)),
        "shared": said(lambda: fit(auto, laplax.shard(data, auto))),
        "explicit": said(lambda: fit(explicit, data, in_a_trace=True)),
        "axis": said(lambda: laplax.shard(data, auto, "dta")),
        "mesh": said(lambda: laplax.shard(data, 4)),
    }


def said(call):
    """The message of the error."""
    try:
        call()
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


def main():
    problem_of = {
        "programs": programs,
        "square": on_square,
        "square programs": square_programs,
        "refusals": refusals,
    }
    if TASK in problem_of:
        answer = problem_of[TASK](Problem())
    elif TASK.isdigit():
        answer = on_devices(Problem())
    else:
        rank, count, port = map(int, sys.argv[2:5])
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        options = {"heartbeat_timeout_seconds": 10} if TASK == "fail" else {}
        jax.distributed.initialize(f"localhost:{port}", count, rank, **options)
        answer = (failing if TASK == "fail" else on_processes)(Problem(), rank, count)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
