"""How time and memory grow with parameters, examples, classes and rank; and a network of 1e8.

    python benchmarks/growth.py                # the curves and their slopes, some 20 minutes
    python benchmarks/growth.py --quick        # small sizes, 3 minutes
    python benchmarks/growth.py --large        # the transformer of 100 million parameters

Every point is a process of its own: first call, warm time, peak memory. A slope is that of log time
against log size through the three largest sizes, where fixed costs no longer matter. Results go
to benchmarks/results as JSON, Markdown and a picture; exits with 1 when a slope exceeds its bound.
"""

import argparse
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from compare.timing import measure

from laplax import laplace, predictive

OUT = pathlib.Path(__file__).parent / "results"
FITS = {
    "diagonal": {"curv_type": "diagonal"},
    "KFAC": {"curv_type": "kfac"},
    "last layer": {"curv_type": "full", "subset": "last_layer"},
    "Lanczos": {"curv_type": "lanczos", "rank": 10, "num_products": 10},
    "full": {"curv_type": "full"},
}
# axis: sizes, sizes of --quick, {fit: largest size it is asked for}, bound on the slope of which
AXES = {
    "parameters": (
        (10**3, 10**4, 10**5, 10**6, 10**7, 10**8),
        (10**4, 10**5, 10**6),
        {"diagonal": 10**8, "last layer": 10**8, "Lanczos": 10**8, "KFAC": 10**7, "full": 10**4},
        ("diagonal", "last layer", "Lanczos"),
    ),
    "examples": (
        (10**3, 10**4, 10**5, 4 * 10**5),
        (10**3, 10**4, 10**5),
        {"diagonal": 10**6, "KFAC": 10**6, "last layer": 10**6, "Lanczos": 10**6, "full": 10**5},
        ("diagonal", "KFAC", "last layer", "Lanczos", "full"),
    ),
    "classes": (
        (10, 30, 100, 300),
        (10, 30, 100),
        {"diagonal": 300, "KFAC": 300, "last layer": 30, "Lanczos": 300},
        (),
    ),
    "rank": ((5, 10, 20, 40, 80), (5, 10, 20), {"Lanczos": 80}, ()),
}
MOST = 1.1


def network(input, params):
    """Two hidden layers of tanh."""
    x = input
    for w, b in params[:-1]:
        x = jnp.tanh(x @ w + b)
    return x @ params[-1][0] + params[-1][1]


def problem(axis, size):
    """Weights and data with one size changed; `full` is asked for small networks alone."""
    width, inputs, classes, count = 32, 64, size if axis == "classes" else 10, 256
    if axis == "parameters":
        inputs = 20
        # inputs w + w^2 + 10 w + 2 w + 10 parameters
        width = max(2, round((-32 + (32**2 + 4 * (size - 10)) ** 0.5) / 2))
    if axis == "examples":
        count = size
    rng = np.random.default_rng(0)
    sizes = [(inputs, width), (width, width), (width, classes)]
    params = [
        (
            jnp.asarray(rng.standard_normal(shape, np.float32) / shape[0] ** 0.5),
            jnp.zeros(shape[1], jnp.float32),
        )
        for shape in sizes
    ]
    x = jnp.asarray(rng.standard_normal((count, inputs), np.float32))
    return params, (x, jnp.asarray(rng.integers(0, classes, count)))


def point(axis, size, name):
    """One fit at one size."""
    params, data = problem(axis, size)
    options = dict(FITS[name])
    if axis == "rank":
        options |= {"rank": size, "num_products": size}

    def fit():
        given = {"loss_fn": "cross_entropy", "progress": False}
        return laplace(network, params, data, **given, **options)[1].structure

    found, _ = measure(fit, jax.block_until_ready, patience=90)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    return found | {"parameters": count}


# -- the transformer ------------------------------------------------------------------------------
VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH, CLASSES = 20_000, 768, 12, 12, 32, 10


def transformer_params(seed=0):
    """100 million weights, in the layout of GPT-2 with a head for classes."""
    rng = np.random.default_rng(seed)

    def weights(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32) / shape[0] ** 0.5)

    def dense(a, b):
        return {"w": weights(a, b), "b": jnp.zeros(b, jnp.float32)}

    def norm():
        return {"scale": jnp.ones(WIDTH, jnp.float32), "shift": jnp.zeros(WIDTH, jnp.float32)}

    block = [
        {
            "norm1": norm(),
            "qkv": dense(WIDTH, 3 * WIDTH),
            "out": dense(WIDTH, WIDTH),
            "norm2": norm(),
            "up": dense(WIDTH, 4 * WIDTH),
            "down": dense(4 * WIDTH, WIDTH),
        }
        for _ in range(LAYERS)
    ]
    return {
        "tokens": 30 * weights(VOCABULARY, WIDTH),
        "places": weights(LENGTH, WIDTH),
        "blocks": block,
        "norm": norm(),
        "head": dense(WIDTH, CLASSES),
    }


def normed(x, layer):
    """Layer normalisation."""
    x = x - x.mean(-1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)
    return x * layer["scale"] + layer["shift"]


def linear(x, layer):
    """Dense."""
    return x @ layer["w"] + layer["b"]


def attention(x, block):
    """Causal attention with several heads."""
    q, k, v = jnp.split(linear(x, block["qkv"]), 3, axis=-1)
    q, k, v = (t.reshape(LENGTH, HEADS, -1) for t in (q, k, v))
    scores = jnp.einsum("ihd,jhd->hij", q, k) / (WIDTH / HEADS) ** 0.5
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    return linear(jnp.einsum("hij,jhd->ihd", weights, v).reshape(LENGTH, WIDTH), block["out"])


def transformer(input, params):
    """Tokens to the logits of a class."""
    x = params["tokens"][input] + params["places"]
    for block in params["blocks"]:
        x = x + attention(normed(x, block["norm1"]), block)
        x = x + linear(jax.nn.gelu(linear(normed(x, block["norm2"]), block["up"])), block["down"])
    return linear(normed(x, params["norm"])[-1], params["head"])


LARGE = ("gradient pass", "diagonal", "KFAC", "last layer", "Lanczos")


def large(name, count=8):
    """A fit, samples and predictive variances of the transformer."""
    params = transformer_params()
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.integers(0, VOCABULARY, (count, LENGTH)))
    data = x, jnp.asarray(rng.integers(0, CLASSES, count))
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    if name == "gradient pass":

        @jax.jit
        def gradient(params):
            logits = jax.vmap(transformer, (0, None))(x, params)
            chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), data[1][:, None], axis=1)
            return -chosen.sum()

        run = jax.jit(jax.grad(gradient))
        return measure(lambda: run(params), jax.block_until_ready)[0] | {"parameters": size}
    given = {"loss_fn": "cross_entropy", "progress": False}
    fits = []

    def fit():
        fits.clear()  # two posteriors at once are not what is measured
        fits.append(laplace(transformer, params, data, **given, **FITS[name]))
        return fits[0][1].structure

    # Once: a second result beside the first is not what a user needs memory for.
    found, _ = measure(fit, jax.block_until_ready, patience=0)
    posterior_fn = fits.pop()[0]
    posterior = posterior_fn({"prior_prec": 1.0})
    drawn, _ = measure(
        lambda: posterior.draw(jax.random.key(0)), jax.block_until_ready, most=1, least=1
    )
    made = predictive(posterior_fn, transformer)({"prior_prec": 1.0})
    pushed, variances = measure(
        lambda: made(x[:4], ["pred_var"])["pred_var"], jax.block_until_ready, most=1, least=1
    )
    if not bool(jnp.all(variances > 0)):
        raise SystemExit("a predictive variance is not positive")
    more = {"sample": drawn["warm"], "variance": pushed["warm"], "parameters": size}
    return found | more | {"peak": pushed["peak"]}


# -- the run --------------------------------------------------------------------------------------
def in_process(*arguments):
    """A point in a process of its own."""
    command = [sys.executable, __file__, "--point", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return {"error": f"exit code {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def slope(sizes, times):
    """Of log time against log size through the three largest sizes."""
    return float(np.polyfit(np.log(sizes[-3:]), np.log(times[-3:]), 1)[0])


def curves(quick, stem):
    """All points of all axes; stored after every curve: a run that is stopped is not lost."""
    found = {}
    for axis, (sizes, quick_sizes, fits, _) in AXES.items():
        for name, largest in fits.items():
            line = []
            for size in quick_sizes if quick else sizes:
                if size > largest:
                    continue
                seen = in_process(axis, size, name)
                line.append(
                    {"size": seen.get("parameters", size) if axis == "parameters" else size} | seen
                )
                print(f"{axis} {size:,} {name}: {seen}", flush=True)
            found[f"{axis}: {name}"] = line
            (OUT / f"{stem}.json").write_text(json.dumps(found, indent=1))
            (OUT / f"{stem}.md").write_text("\n".join(summary(found)[0]) + "\n")
    return found


def summary(found):
    """Slopes, and whether they keep their bounds."""
    lines = [
        "| against | fit | slope | bound | largest | warm s | peak MB |",
        "|---|---|---|---|---|---|---|",
    ]
    exceeded = []
    for axis, (_, _, fits, bounded) in AXES.items():
        for name in fits:
            line = [p for p in found.get(f"{axis}: {name}", []) if "warm" in p]
            if len(line) < 2:
                continue
            value = slope([p["size"] for p in line], [p["warm"] for p in line])
            last = line[-1]
            bound = MOST if name in bounded else None
            if bound and value > bound:
                exceeded.append(f"{axis}, {name}: slope {value:.2f} exceeds {bound}")
            lines.append(
                f"| {axis} | {name} | {value:.2f} | {bound or '-'} | {last['size']:,} | "
                f"{last['warm']:.3g} | {last['peak']:.0f} |"
            )
    return lines, exceeded


def draw(found, path):
    """Time above, memory below, one column per axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6), layout="constrained")
    axes = figure.subplots(2, len(AXES), sharex="col", sharey="row")
    colors = dict(zip(FITS, ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000"), strict=True))
    for column, axis in enumerate(AXES):
        for name in AXES[axis][2]:
            line = [p for p in found.get(f"{axis}: {name}", []) if "warm" in p]
            for i, what in enumerate(("warm", "peak")):
                axes[i, column].loglog(
                    [p["size"] for p in line],
                    [p[what] for p in line],
                    "o-",
                    color=colors[name],
                    label=name,
                    markersize=4,
                )
        axes[1, column].set_xlabel(axis)
        sizes = AXES[axis][0]
        if sizes[-1] < 100 * sizes[0]:  # powers of ten would be too few
            axes[1, column].set_xticks(sizes, map(str, sizes))
            axes[1, column].set_xticks([], minor=True)
        for ax in axes[:, column]:
            ax.grid(alpha=0.3)
    axes[0, 0].set_ylabel("warm fit in s")
    axes[1, 0].set_ylabel("peak memory in MB")
    megabytes = (250, 500, 1000, 2000, 4000, 8000)
    axes[1, 0].set_yticks(megabytes, [f"{m:,}" for m in megabytes])
    axes[1, 0].set_yticks([], minor=True)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=5)
    figure.savefig(path, dpi=110)


def run_large(works):
    """The table of the transformer; what was measured before and is not asked for stays."""
    lines = [
        "| work | first s | warm s | one sample s | variances of 4 inputs s | peak MB |",
        "|---|---|---|---|---|---|",
    ]
    stored = OUT / "large.json"
    found = json.loads(stored.read_text()) if stored.exists() else {}
    for name in works:
        found[name] = in_process("large", 0, name)
        print(name, found[name], flush=True)
    for name, seen in found.items():
        cells = [seen.get(k) for k in ("cold", "warm", "sample", "variance", "peak")]
        words = ["-" if c is None else f"{c:.3g}" if c < 1000 else f"{c:,.0f}" for c in cells]
        lines.append(f"| {name} | " + " | ".join(words) + " |")
    stored.write_text(json.dumps(found, indent=1))
    (OUT / "large.md").write_text("\n".join(lines) + "\n")
    return int(any("error" in seen for seen in found.values()))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--large", nargs="*", metavar="WORK", help=f"of {', '.join(LARGE)}")
    parser.add_argument("--point", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.point:
        axis, size, name = args.point
        seen = large(name) if axis == "large" else point(axis, int(size), name)
        del seen["times"]
        print(json.dumps(seen))
        return 0
    OUT.mkdir(exist_ok=True)
    if args.large is not None:
        return run_large(args.large or LARGE)
    stem = "growth_quick" if args.quick else "growth"
    found = curves(args.quick, stem)
    lines, exceeded = summary(found)
    draw(found, OUT / f"{stem}.png")
    print("\n".join(lines + exceeded))
    return int(bool(exceeded))


if __name__ == "__main__":
    sys.exit(main())
