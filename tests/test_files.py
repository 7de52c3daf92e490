"""Files: the format against the safetensors package, round trips, and everything that is wrong."""

import dataclasses
import inspect
import json
import os
import pathlib
import pickle
import socket
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
import safetensors
import safetensors.numpy

import laplax
import laplax.structures
from cases import TARGETS, mlp, mlp_fn, random
from conftest import COMPILE_AS_USERS
from laplax.files import _safetensors
from laplax.files._classes import CLASSES
from laplax.files._file import _document
from laplax.files._safetensors import DTYPES, FileError, parse, read, write
from laplax.fsp import GPPrior, Matern52, context, fsp_laplace
from laplax.structures import Precision, Structure
from loaded import predictions

ROOT = pathlib.Path(__file__).parent
PARAMS = mlp()
INPUT = random(7, 2, seed=9)
LABELS = (INPUT, TARGETS["cross_entropy"])
NUMBERS = (INPUT, TARGETS["mse"])
pytestmark = pytest.mark.usefixtures("quick_compilation")


def fit(curv_type, loss_fn="cross_entropy", **options):
    return laplax.laplace(
        mlp_fn,
        PARAMS,
        (INPUT, TARGETS[loss_fn]),
        loss_fn=loss_fn,
        curv_type=curv_type,
        progress=False,
        **options,
    )[0]


def fit_fsp():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fsp_laplace(
            mlp_fn,
            PARAMS,
            NUMBERS,
            loss_fn="mse",
            prior=GPPrior(Matern52()),
            context=context.grid(3, (np.full(2, -2.0), np.full(2, 2.0))),
        )[0]


MASKS = jax.tree.map(lambda x: np.arange(x.size).reshape(x.shape) % 2 == 0, PARAMS)
FITS = {
    "full": lambda: fit("full", num_total_samples=70),
    "full of many rows": lambda: laplax.laplace(
        mlp_fn, PARAMS, (random(40, 2), random(40, 3)), loss_fn="mse", curv_type="full"
    )[0],
    "diagonal": lambda: fit("diagonal", "binary_cross_entropy"),
    "lanczos": lambda: fit("lanczos", rank=5),
    "kfac": lambda: fit("kfac"),
    "kfac without joint bias": lambda: fit("kfac", joint_bias=False, max_dense=3),
    "block_diagonal": lambda: fit("block_diagonal", "poisson"),
    "last layer": lambda: fit("diagonal", subset="last_layer"),
    "masks": lambda: fit("diagonal", "mse", subset=MASKS),
    "fsp": fit_fsp,
}


@pytest.fixture(scope="module")
def fits(quick_compilation):
    return {name: make() for name, make in FITS.items()}


def same(left, right):
    """Equal classes, configuration and bits."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert isinstance(a, jax.Array) == isinstance(b, jax.Array)
        bits = [numbers(x) for x in (a, b)]
        assert bits[0].dtype == bits[1].dtype
        assert bits[0].tobytes() == bits[1].tobytes()


def numbers(x):
    """The values of an array, of a key too."""
    is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


# -- the format --------------------------------------------------------------------------------
ARRAYS = {
    f"a/{name}": np.arange(6).reshape(2, 3).astype(dtype) for name, dtype in DTYPES.items()
} | {"scalar": np.asarray(2.5), "empty": np.zeros((0, 3), np.float32)}


def test_what_is_written_is_what_the_safetensors_package_reads(tmp_path):
    path = tmp_path / "a.safetensors"
    write(path, ARRAYS, {"note": "text"})
    with safetensors.safe_open(path, "numpy") as file:
        assert file.metadata()["note"] == "text"
    found = dict(safetensors.deserialize(path.read_bytes()))
    assert set(found) == set(ARRAYS)
    for name, x in ARRAYS.items():
        assert found[name]["shape"] == list(x.shape)
        assert found[name]["dtype"].upper() in {key for key in DTYPES if DTYPES[key] == x.dtype}
        assert bytes(found[name]["data"]) == x.tobytes()


def test_what_the_safetensors_package_writes_is_read(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    arrays = {name: x for name, x in ARRAYS.items() if name != "a/BF16"}
    safetensors.numpy.save_file(arrays, path, {"note": "text"})
    with pytest.raises(FileError, match="has no checksum"):
        read(path)
    monkeypatch.setattr(_safetensors, "_check_checksum", lambda *_: None)
    found, text = read(path)
    assert text == {"note": "text"}
    for name, x in arrays.items():
        assert found[name].dtype == x.dtype
        assert np.array_equal(found[name], x)


def test_every_array_comes_back(tmp_path):
    write(tmp_path / "a", ARRAYS, {"note": "text"})
    found, _ = read(tmp_path / "a")
    for name, x in ARRAYS.items():
        assert (found[name].dtype, found[name].shape) == (x.dtype, x.shape)
        assert found[name].tobytes() == x.tobytes()


def hostile(entries, data=b"\0" * 8, padding=""):
    """A file with a right checksum and a header of one's choice."""
    text = entries
    if not isinstance(entries, str):
        metadata = {"__metadata__": {"sha256": "0" * 64}}
        text = json.dumps({**metadata, **entries})
    header = (text + padding).encode()
    content = len(header).to_bytes(8, "little") + header
    checksum = _safetensors._checksum(content, [data])
    return content.replace(b"0" * 64, checksum.encode()) + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


METADATA = '"__metadata__":{"sha256":"' + "0" * 64 + '"}'
TWICE = f'{{{METADATA},"a":{json.dumps(entry())},"a":{json.dumps(entry())}}}'


def test_the_hostile_file_is_else_a_good_one():
    arrays, _ = parse(hostile({"a": entry()}))
    assert arrays["a"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated"),
        (b"\xff" * 20, "not a safetensors file"),
        ((1000).to_bytes(8, "little") + b"{}", "truncated"),
        (hostile({"a": entry()})[:-1], "truncated: 7 bytes of data, and arrays of 8"),
        (hostile({"a": entry()}) + b"\0", "longer than its arrays"),
        (hostile({"a": entry(offsets=(0, 4))}), "not those of float32"),
        (hostile({"a": entry(offsets=(8, 0))}), "not those of float32"),
        (hostile({"a": entry(offsets=(-8, 0))}), "not lists of sizes"),
        (hostile({"a": entry(shape=(2.0,))}), "not lists of sizes"),
        (hostile({"a": entry(shape=(True, 2))}), "not lists of sizes"),
        (hostile({"a": entry(shape=(2**62, 2**62))}), "not those of float32"),
        (hostile({"a": entry(shape=(1,) * 40, offsets=(0, 4))}), "40 axes"),
        (hostile({"a": entry(dtype="F3")}), "unknown dtype 'F3'"),
        (hostile({"a": entry(dtype=["F32"])}), "unknown dtype"),
        (hostile({"a": 3}), "needs dtype"),
        (hostile({"a": {**entry(), "b": 1}}), "needs dtype"),
        (hostile({"a": entry(), "b": entry()}), "overlaps"),
        (hostile({"a": entry(shape=(1,), offsets=(4, 8))}), "gap"),
        (hostile({"/etc/passwd": entry()}), "the name '/etc/passwd'"),
        (hostile({"../a": entry()}), "the name"),
        (hostile({"": entry()}), "the name"),
        (hostile(TWICE), "'a' is there twice"),
        (hostile("[" * 100_000), "nested too deeply"),
        (hostile("{" + METADATA + ',"a":' + "[" * 100_000), "nested too deeply"),
        (hostile("[1]"), "not a JSON object"),
        (hostile('{"a":NaN}'), "NaN is not a number"),
        (hostile('{"a":' + "9" * 5000 + "}"), "damaged"),
        (hostile("{" + METADATA + "} x"), "damaged"),
        (hostile('{"__metadata__":3}'), "no metadata"),
        (hostile('{"__metadata__":{"sha256":3}}'), "no metadata"),
        (hostile({"__metadata__": {}}, b""), "no checksum"),
        (hostile({"a": entry()}, padding=" ").replace(b"} ", b"}\n"), "checksum is another"),
        (b"\2" + b"\0" * 7 + b"\xff\xfe", "damaged"),
    ],
)
def test_a_hostile_or_damaged_header_is_refused(content, message):
    with pytest.raises(FileError, match=message):
        parse(content)


def test_a_header_beyond_the_limit_of_the_format_is_not_written(monkeypatch, tmp_path):
    monkeypatch.setattr(_safetensors, "MAX_HEADER", 100)
    with pytest.raises(FileError, match="the format allows 100"):
        write(tmp_path / "a", ARRAYS, {})
    with pytest.raises(FileError, match="does not have"):
        write(tmp_path / "a", {"a": np.zeros(2, complex)}, {})
    assert list(tmp_path.iterdir()) == []


def corrupted(content, rng):
    """Some bytes replaced, removed, or the end cut off."""
    broken = bytearray(content)
    how = rng.integers(4)
    if how == 0:
        return bytes(broken[: rng.integers(len(content))])
    if how == 1:
        del broken[rng.integers(len(content))]
        return bytes(broken)
    for place in rng.integers(len(content), size=1 if how == 2 else 8):
        broken[place] ^= int(rng.integers(1, 256))
    return bytes(broken)


def refused(content, count, seed=0):
    """How many corruptions of a file are refused as they should be."""
    rng = np.random.default_rng(seed)
    number = 0
    for _ in range(count):
        broken = corrupted(content, rng)
        if broken == content:  # two changes of one byte can undo each other
            number += 1
            continue
        try:
            _document(parse(broken)[1])
        except FileError:
            number += 1
    return number


def test_no_corruption_goes_unnoticed(fits, tmp_path):
    """`refused(content, 100_000)` takes a minute."""
    laplax.save(tmp_path / "a", fits["last layer"])
    content = (tmp_path / "a").read_bytes()
    parse(content)
    assert refused(content, 4000) == 4000


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_an_interrupted_write_leaves_the_old_file(step, monkeypatch, tmp_path):
    path = tmp_path / "a"
    write(path, {"a": np.ones(3)}, {})
    before = path.read_bytes()

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, step, interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(path, {"a": np.zeros(3)}, {})
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_where_no_file_can_be_written_says_so(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="missing"):
        write(tmp_path / "missing" / "a", ARRAYS, {})
    with pytest.raises(OSError, match="directory"):
        write(tmp_path, ARRAYS, {})

    def refuse(path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError, match="Permission denied"):
        write(tmp_path / "a", ARRAYS, {})


def test_links_and_permissions_are_kept(tmp_path):
    path = tmp_path / "a"
    write(path, {"a": np.ones(3)}, {})
    path.chmod(0o600)
    (tmp_path / "link").symlink_to(path)
    write(tmp_path / "link", {"a": np.zeros(3)}, {})
    assert read(path)[0]["a"].tolist() == [0, 0, 0]
    assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "link").is_symlink()


# -- round trips -------------------------------------------------------------------------------
def objects(posterior_fn):
    """Everything that can be saved of a fit."""
    arguments = {"prior_prec": 2.0}
    set_prob_predictive = posterior_fn.predictive()
    return {
        "posterior_fn": posterior_fn,
        "set_prob_predictive": set_prob_predictive,
        "prob_predictive": set_prob_predictive(arguments),
        "pair": (arguments, set_prob_predictive),
    }


@pytest.mark.parametrize("name", FITS)
def test_what_was_saved_comes_back(name, fits, tmp_path):
    for kind, saved in objects(fits[name]).items():
        laplax.save(tmp_path / kind, saved)
        loaded = laplax.load(tmp_path / kind, mlp_fn, PARAMS)
        assert type(loaded) is type(saved)
        same(saved, loaded)


def test_every_structure_is_in_the_closed_list(fits):
    exported = {x for x in vars(laplax.structures).values() if inspect.isclass(x)}
    kept = {
        cls
        for cls in exported
        if issubclass(cls, Structure | Precision) or cls.__name__.endswith("Block")
    }
    missing = {cls.__name__ for cls in kept if not inspect.isabstract(cls)} - set(CLASSES)
    assert missing == set()


def test_every_class_of_the_library_that_a_fit_holds_is_in_the_closed_list():
    def subclasses(cls):
        return {cls, *(x for sub in cls.__subclasses__() for x in subclasses(sub))}

    own = {
        cls
        for base in (Structure, Precision)
        for cls in subclasses(base)
        if cls.__module__.startswith("laplax.") and not inspect.isabstract(cls)
    }
    assert own <= set(CLASSES.values())


@pytest.fixture(scope="module")
def calibrated(fits):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return laplax.calibration(
            fits["kfac"],
            mlp_fn,
            PARAMS,
            LABELS,
            calibration_objective="nll",
            predictive_type="mc_bridge",
            num_samples=20,
            key=jax.random.key(3),
            progress=False,
        )


def test_a_calibrated_predictive_comes_back(calibrated, tmp_path):
    laplax.save(tmp_path / "a", calibrated)
    arguments, set_prob_predictive = laplax.load(tmp_path / "a", mlp_fn, PARAMS)
    same(calibrated[1], set_prob_predictive)
    same(calibrated[1].trace, set_prob_predictive.trace)
    assert type(arguments) is type(calibrated[0])
    assert arguments.recipe == calibrated[0].recipe
    same(dict(calibrated[0]), dict(arguments))
    results, _ = set_prob_predictive.evaluate(arguments, LABELS)
    expected, _ = calibrated[1].evaluate(calibrated[0], LABELS)
    assert results == expected


def test_a_fresh_process_predicts_the_same_bits(fits, calibrated, tmp_path):
    nonlinear = fits["lanczos"].predictive(pushforward_type="nonlinear", num_samples=4)
    linear = fits["lanczos"].predictive()
    per_leaf = {"prior_prec": [{"w": 1.0, "b": 2.0}, {"w": 3.0, "b": 4.0}]}
    saved = {
        **{name.replace(" ", "_"): posterior_fn for name, posterior_fn in fits.items()},
        "calibrated": calibrated,
        "nonlinear": nonlinear({"prior_prec": 1.0}),
        "per_leaf": (per_leaf, linear),
        "per_leaf_predictive": linear(per_leaf),
    }
    for name, thing in saved.items():
        laplax.save(tmp_path / f"{name}.safetensors", thing, include_params=True)
        np.savez(tmp_path / f"{name}.npz", **predictions(thing))
    settings = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": str(int(not COMPILE_AS_USERS)),
        "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    }
    done = subprocess.run(
        [sys.executable, str(ROOT / "loaded.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, **settings},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{len(saved)} files"


def test_many_processes_write_one_file(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, str(ROOT / "saved_by_many.py"), address, "2"]
    path = str(tmp_path / "a")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": env}
    processes = [subprocess.Popen([*command, number, path], **pipes) for number in "01"]
    results = [process.communicate(timeout=300) for process in processes]
    for process, (out, error) in zip(processes, results, strict=True):
        assert process.returncode == 0, error
        assert "/no such folder" in out  # process 0 could not write, and both say so
        assert out.split()[-1] == "saved"
    assert "process 0, which writes for all, could not" in results[1][0]
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_other_dtypes_come_back(dtype, tmp_path):
    params = mlp(dtype=dtype)
    data = (INPUT.astype(dtype), TARGETS["cross_entropy"])
    posterior_fn, _ = laplax.laplace(
        mlp_fn, params, data, loss_fn="cross_entropy", curv_type="diagonal"
    )
    laplax.save(tmp_path / "a", posterior_fn, include_params=True)
    same(posterior_fn, laplax.load(tmp_path / "a", mlp_fn))


def test_double_precision_is_refused_where_it_would_be_rounded(fits, tmp_path):
    laplax.save(tmp_path / "a", fits["diagonal"], include_params=True)
    with jax.enable_x64(False), pytest.raises(FileError, match="jax_enable_x64"):
        laplax.load(tmp_path / "a", mlp_fn)
    with jax.enable_x64(False), pytest.raises(FileError, match="dtype float32, and in the file"):
        laplax.load(tmp_path / "a", mlp_fn, mlp(dtype=jnp.float32))


def test_the_evidence_knows_the_data_of_the_fit(fits, tmp_path):
    laplax.save(tmp_path / "a", fits["kfac"])
    loaded = laplax.load(tmp_path / "a", mlp_fn, PARAMS)
    found = loaded.log_marginal_likelihood({"prior_prec": 1.0}, LABELS)
    assert found == fits["kfac"].log_marginal_likelihood({"prior_prec": 1.0}, LABELS)
    with pytest.warns(laplax.InputWarning, match="other examples"):
        loaded.log_marginal_likelihood({"prior_prec": 1.0}, (INPUT + 1, LABELS[1]))
    laplax.save(tmp_path / "b", fits["full"])
    assert laplax.load(tmp_path / "b", mlp_fn, PARAMS).num_total_samples == 70


def test_a_file_is_little_more_than_its_arrays(tmp_path):
    params = mlp((64, 128, 10), dtype=jnp.float32)
    data = (random(20, 64, dtype=jnp.float32), jnp.arange(20) % 10)
    posterior_fn, _ = laplax.laplace(
        mlp_fn, params, data, loss_fn="cross_entropy", curv_type="kfac"
    )
    laplax.save(tmp_path / "a", posterior_fn)
    arrays = sum(x.nbytes for x in jax.tree.leaves(posterior_fn.structure))
    assert arrays < (tmp_path / "a").stat().st_size < 1.05 * arrays


def test_the_file_of_version_1_is_read():
    """A stored file, made by `data/make_v1.py`: it must stay readable for ever."""
    with np.load(ROOT / "data" / "version_1.npz") as expected:
        loaded = laplax.load(ROOT / "data" / "version_1.safetensors", mlp_fn)
        found = predictions(loaded)
        for name in expected:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-10, atol=1e-12)


# -- what does not belong together -------------------------------------------------------------
@pytest.fixture(scope="module")
def file(fits, tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "posterior.safetensors"
    laplax.save(path, fits["diagonal"])
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: [p[0], {**p[1], "w": p[1]["w"] + 1}], "'1/w' has other values"),
        (lambda p: [{**p[0], "b": jnp.zeros(5)}, p[1]], r"'0/b' has the shape \[5\], and in the"),
        (lambda p: [p[0], {"b": p[1]["b"].astype(jnp.float32), "w": p[1]["w"]}], "'1/b' has the d"),
        (lambda p: [{"c": p[0]["b"], "w": p[0]["w"]}, p[1]], "'0/c' stands where the file has '0"),
        (lambda p: p[:1], "only the file has the leaf '1/b'"),
        (lambda p: [*p, {"x": jnp.zeros(1)}], "only params has the leaf '2/x'"),
    ],
)
def test_other_parameters_are_refused_by_the_first_path(change, message, file):
    with pytest.raises(FileError, match=message):
        laplax.load(file, mlp_fn, change(PARAMS))


def test_parameters_come_from_the_file_or_the_reader(file, fits, tmp_path):
    with pytest.raises(FileError, match="holds no parameters; pass them"):
        laplax.load(file, mlp_fn)
    laplax.save(tmp_path / "a", fits["diagonal"], include_params=True)
    same(laplax.load(tmp_path / "a", mlp_fn).mean, PARAMS)


def test_another_model_is_refused(file):
    with pytest.raises(TypeError, match="its parameters are"):
        laplax.load(file, lambda x, p: x, PARAMS)
    with pytest.raises(FileError, match="its outputs are others"):
        laplax.load(file, lambda input, params: 1.5 * mlp_fn(input, params), PARAMS)
    with pytest.raises(FileError, match="its outputs are others"):
        laplax.load(file, lambda input, params: mlp_fn(input[:1], params), PARAMS)
    laplax.load(file, lambda input, params: mlp_fn(input, params) + 0, PARAMS)


def test_a_likelihood_of_ones_own_is_passed_again(tmp_path, file):
    def loss(f, y):
        return 0.5 * jnp.sum((f - y) ** 2)

    posterior_fn, _ = laplax.laplace(mlp_fn, PARAMS, NUMBERS, loss_fn=loss, curv_type="diagonal")
    laplax.save(tmp_path / "a", posterior_fn)
    with pytest.raises(FileError, match="loss function of its own"):
        laplax.load(tmp_path / "a", mlp_fn, PARAMS)
    with pytest.raises(FileError, match="loss_fn is a Gaussian"):
        laplax.load(tmp_path / "a", mlp_fn, PARAMS, loss_fn="mse")
    same(posterior_fn, laplax.load(tmp_path / "a", mlp_fn, PARAMS, loss_fn=loss))
    with pytest.raises(FileError, match="loss_fn='binary_cross_entropy'; leave"):
        laplax.load(file, mlp_fn, PARAMS, loss_fn="mse")
    with pytest.raises(ValueError, match=r"^unknown loss_fn 'mes'"):
        laplax.load(file, mlp_fn, PARAMS, loss_fn="mes")
    laplax.load(file, mlp_fn, PARAMS, loss_fn="binary_cross_entropy")


@jax.tree_util.register_pytree_node_class
class Box:
    def __init__(self, value):
        self.value = value

    def tree_flatten(self):
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _, values):
        return cls(*values)


def test_parameters_in_a_class_of_ones_own(tmp_path):
    params = Box(jnp.ones((2, 3)))

    def fn(input, params):
        return input @ params.value

    posterior_fn, _ = laplax.laplace(fn, params, NUMBERS, loss_fn="mse", curv_type="diagonal")
    with pytest.raises(TypeError, match="of the class Box"):
        laplax.save(tmp_path / "a", posterior_fn, include_params=True)
    laplax.save(tmp_path / "a", posterior_fn)
    same(posterior_fn, laplax.load(tmp_path / "a", fn, params))


def test_inputs_that_are_pytrees_and_models_of_batches_come_back(tmp_path):
    def fn(input, params):
        return input["x"]["y"] @ params["w"] + input["z"][0][:, None]

    data = ({"x": {"y": INPUT}, "z": (INPUT[:, 0],)}, TARGETS["mse"])
    params = {"w": jnp.ones((2, 3))}
    posterior_fn, _ = laplax.laplace(
        fn, params, data, loss_fn="mse", curv_type="diagonal", vmap_over_data=False
    )
    laplax.save(tmp_path / "a", posterior_fn)
    same(posterior_fn, laplax.load(tmp_path / "a", fn, params))


def test_the_last_layer_alone_comes_back(tmp_path):
    head_fn, features = laplax.last_layer_features(mlp_fn, PARAMS, LABELS)
    posterior_fn, _ = laplax.laplace(
        head_fn, PARAMS, features, loss_fn="cross_entropy", subset="last_layer", curv_type="full"
    )
    laplax.save(tmp_path / "a", posterior_fn)
    same(posterior_fn, laplax.load(tmp_path / "a", head_fn, PARAMS))


def test_what_cannot_be_saved_is_refused(fits, tmp_path):
    for thing, message in [
        (fits["diagonal"]({"prior_prec": 1.0}), "pass posterior_fn"),
        (mlp_fn, "the function mlp_fn"),
        ((1, 2), "got tuple"),
    ]:
        with pytest.raises(TypeError, match=message):
            laplax.save(tmp_path / "a", thing)
    with pytest.raises(ValueError, match="unpickled"):
        laplax.save(tmp_path / "a", pickle.loads(pickle.dumps(fits["diagonal"])))

    class Own(laplax.structures.Diagonal):
        pass

    own = dataclasses.replace(fits["diagonal"], structure=Own(fits["diagonal"].structure.values))
    with pytest.raises(TypeError, match="object/structure cannot be saved: it is of the class Own"):
        laplax.save(tmp_path / "a", own)
    block = fits["kfac"].structure
    changed = dataclasses.replace(block.blocks[0], to_matrix=lambda v: v)
    blocks = dataclasses.replace(block, blocks=(changed, *block.blocks[1:]))
    with pytest.raises(TypeError, match="to_matrix cannot be saved: it is the function"):
        laplax.save(tmp_path / "a", dataclasses.replace(fits["kfac"], structure=blocks))
    assert list(tmp_path.iterdir()) == []


def edited(file, path, change):
    """A file whose description was changed, with a right checksum."""
    arrays, text = read(file)
    document = json.loads(text["laplax"])
    change(document)
    write(path, arrays, {"laplax": json.dumps(document)})
    return path


def fields(document):
    return document["object"]["class"][1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format=2, library="9.0"), "version 2 .* by laplax 9.0; .* Update"),
        (lambda d: d.update(format="1"), "does not say which version"),
        (lambda d: d.pop("object"), "lacks object"),
        (lambda d: d["object"]["class"].__setitem__(0, "os.system"), "'os.system' is not one of"),
        (lambda d: d.update(object={"eval": "1"}), "the kind 'eval' is not known"),
        (lambda d: d.update(object=[1]), "neither plain"),
        (lambda d: d.update(object=None), "got NoneType"),
        (lambda d: d.update(object={"tuple": 3}), "a list was expected"),
        (lambda d: fields(d).update(evil=1), "damaged: .*unexpected keyword"),
        (lambda d: fields(d).pop("space"), "damaged: .*missing"),
        (lambda d: fields(d).update(structure={"array": "x"}), "the array 'x' is missing"),
        (lambda d: fields(d).update(likelihood={"likelihood": "x"}), "likelihood 'x' is not"),
        (lambda d: fields(d).update(structure=3), "damaged"),
        (lambda d: d.update(params=[3, {}, None, "x"]), "damaged"),
        (lambda d: d.update(outputs=3), "damaged"),
        (lambda d: d["outputs"].update(step=0), "positive step"),
        (lambda d: d.update(data={"class": ["Form", 3]}), "damaged"),
        (lambda d: fields(d)["structure"]["class"][1].update(values={"array": "outputs"}), "space"),
    ],
)
def test_a_description_that_was_changed_is_refused(change, message, file, tmp_path):
    path = edited(file, tmp_path / "a", change)
    with pytest.raises(FileError, match=message):
        laplax.load(path, mlp_fn, PARAMS)


def test_other_files_are_refused(tmp_path):
    write(tmp_path / "a", ARRAYS, {})
    with pytest.raises(FileError, match=r"a: the file is not one of laplax\.save"):
        laplax.load(tmp_path / "a", mlp_fn, PARAMS)
    deep = '{"format":' + "[" * 100_000
    write(tmp_path / "b", {}, {"laplax": deep})
    with pytest.raises(FileError, match="nested too deeply"):
        laplax.load(tmp_path / "b", mlp_fn, PARAMS)
    with pytest.raises(FileNotFoundError):
        laplax.load(tmp_path / "c", mlp_fn, PARAMS)


# -- other ways ---------------------------------------------------------------------------------
def test_a_kfac_posterior_can_be_pickled(fits):
    posterior_fn = fits["kfac"]
    copy = pickle.loads(pickle.dumps(posterior_fn))
    same(posterior_fn.structure, copy.structure)
    found = laplax.predictive(copy, mlp_fn)({"prior_prec": 2.0})(INPUT)
    same(posterior_fn.predictive()({"prior_prec": 2.0})(INPUT), found)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["kfac", "fsp"])
def test_orbax_restores_a_posterior(name, fits, tmp_path):
    posterior = fits[name]({"prior_prec": 2.0})
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "posterior", posterior)
        checkpointer.wait_until_finished()
        same(posterior, checkpointer.restore(tmp_path / "posterior", posterior))
