"""Reports: numbers equal those of the library's own calls, and the page holds every one."""

import html
import html.parser
import re

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import pytest

import laplax
from laplax._report import Table
from laplax._report._budget import estimated_cost
from laplax._report._html import write_page
from laplax._report._scores import Scores, auroc_gain
from laplax._report._verdict import Candidate, recommend_from

pytestmark = pytest.mark.usefixtures("quick_compilation")

mpl.use("Agg")
RNG = np.random.default_rng(1)


def network(input, params):
    return jnp.tanh(input @ params["w"] + params["b"]) @ params["v"]


def weights(inputs, outputs, hidden=4):
    shapes = {"w": (inputs, hidden), "b": (hidden,), "v": (hidden, outputs)}
    return {name: jnp.asarray(RNG.normal(size=s)) for name, s in shapes.items()}


def points(n, inputs, outputs=None):
    x = jnp.asarray(RNG.normal(size=(n, inputs)))
    if outputs is None:
        return x, jnp.asarray(RNG.normal(size=(n, 1)))
    return x, jnp.asarray(RNG.integers(0, outputs, n))


def labelled(n, params, shift=0.0):
    """Labels that the network tells, most of them."""
    x = jnp.asarray(shift + RNG.normal(size=(n, 2)))
    logits = jax.vmap(network, (0, None))(x, params)
    return x, jnp.asarray(np.argmax(logits + RNG.gumbel(size=logits.shape), axis=-1))


@pytest.fixture(scope="module")
def classified(tmp_path_factory):
    params, train, test = weights(2, 3), points(24, 2, 3), points(30, 2, 3)
    out = tmp_path_factory.mktemp("classified")
    made = laplax.report(
        network,
        params,
        train=train,
        test=test,
        calibration=points(20, 2, 3),
        ood=5 + points(12, 2)[0],
        loss_fn="cross_entropy",
        calibration_objective="marginal_log_likelihood",
        curvatures={
            "diagonal": {},
            "kfac": {},
            "too large": {"curv_type": "full", "memory_share": 1e-12},
        },
        title="A <b>title</b> & more",
        out=out,
        progress=False,
    )
    return made, params, train, test


def test_metrics_are_those_of_evaluation(classified):
    made, params, train, test = classified
    rows = {row["name"]: row for row in made.metrics.rows}
    posterior_fn, _ = laplax.laplace(
        network, params, train, loss_fn="cross_entropy", curv_type="kfac"
    )
    arguments = made.prior_arguments["kfac"]
    expected, _ = laplax.evaluation(posterior_fn, network, params, arguments, test)
    assert {k: rows["kfac"][k] for k in expected} == pytest.approx(expected, rel=1e-6)
    expected, _ = laplax.evaluation(
        posterior_fn, network, params, arguments, test, predictive_type="map"
    )
    assert {k: rows["MAP"][k] for k in expected} == pytest.approx(expected, rel=1e-6)
    assert 0 <= rows["kfac"]["auroc"] <= 1


def test_hyperparameters_are_those_of_calibration_and_fits_say_what_they_cost(classified):
    made, params, train, _ = classified
    row = next(row for row in made.fits.rows if row["name"] == "diagonal")
    posterior_fn, estimate = laplax.laplace(
        network, params, train, loss_fn="cross_entropy", curv_type="diagonal"
    )
    chosen, _ = laplax.calibration(posterior_fn, network, params, train)
    assert row["prior_prec"] == pytest.approx(float(chosen["prior_prec"]))
    evidence = laplax.log_marginal_likelihood(posterior_fn, chosen, network, params, train)
    assert row["log_evidence"] == pytest.approx(float(evidence))
    assert row["structure_bytes"] == estimate.structure.values.nbytes
    assert row["parameters"] == 24
    assert row["fit_seconds"] > 0
    gamma = laplax.effective_parameters(posterior_fn, chosen)
    assert row["effective_parameters"] == pytest.approx(float(gamma))


def test_a_curvature_that_does_not_fit_is_a_row_that_says_why(classified):
    made = classified[0]
    row = made.fits.rows[-1]
    assert row["name"] == "too large"
    assert "does not fit: ValueError: curv_type='full' for 24 parameters needs" in row["note"]
    assert made.metrics.rows[-1] == {"name": "too large", "note": "no fit"}
    assert "too large" not in made.prior_arguments


def small_report(**change):
    given = {
        "train": points(20, 2),
        "test": points(5, 2),
        "loss_fn": "mse",
        "curvatures": ["full", "diagonal", "kfac"],
    }
    return laplax.report(network, weights(2, 1), **{**given, **change})


@pytest.mark.parametrize("limit", [{"max_bytes": 4000}, {"max_seconds": 2e-6}])
def test_what_would_not_fit_is_left_out_before_work_starts(limit, monkeypatch):
    tried = []
    fit = laplax._report._fit.laplace

    def watched(*args, **options):
        tried.append(options["curv_type"])
        return fit(*args, **options)

    monkeypatch.setattr(laplax._report._fit, "laplace", watched)
    made = small_report(**limit)
    rows = {row["name"]: row for row in made.fits.rows}
    name = next(iter(limit))
    assert "does not fit: it needs about" in rows["full"]["note"]
    assert f"{name}=" in rows["full"]["note"]
    assert rows["full"].keys() == {"name", "note"}
    assert "full" not in tried
    assert "diagonal" in tried
    assert "full" in str(made)


def test_estimates_follow_the_sizes_of_parameters_and_data():
    def cost(curv_type, n, hidden, **options):
        params = weights(2, 3, hidden)
        data = points(n, 2, 3)
        problem = {"model_fn": network, "params": params, "data": data, "loss_fn": "cross_entropy"}
        return estimated_cost(problem, {"curv_type": curv_type, **options}, 10)

    # 4,000 rows of 36,000 parameters
    many = cost("full", 2_000, 6_000)
    assert many.bytes > 2 * 2**30
    assert many.seconds > 60
    assert cost("diagonal", 2_000, 6_000).seconds < 60
    assert cost("full", 2_000, 8).seconds < 60
    assert cost("lanczos", 2_000, 6_000, rank=40).bytes == pytest.approx(
        2 * cost("lanczos", 2_000, 6_000, rank=20).bytes
    )
    assert cost("kfac", 100, 4_000).flops > 8 * cost("kfac", 100, 1_000).flops
    assert cost("full", 50, 100, subset="v").bytes < cost("full", 50, 100).bytes


def test_rows_come_one_by_one_as_soon_as_they_are_there(monkeypatch):
    events = []
    fit = laplax._report._report.fit_curvature

    def watched(setting, name):
        events.append(("starts", name))
        return fit(setting, name)

    monkeypatch.setattr(laplax._report._report, "fit_curvature", watched)
    rows = []

    def on_row(row):
        events.append(("row", row["name"]))
        rows.append(row)

    made = small_report(on_row=on_row, curvatures=["diagonal", "kfac"])
    assert events == [
        ("row", "MAP"),
        ("starts", "diagonal"),
        ("row", "diagonal"),
        ("starts", "kfac"),
        ("row", "kfac"),
    ]
    for row, fits, metrics in zip(rows[1:], made.fits.rows, made.metrics.rows[1:], strict=True):
        assert row == {**fits, **metrics}


def test_only_figures_that_fit_are_drawn_as_png_and_svg(classified):
    made = classified[0]
    names = {picture.name for picture in made.pictures}
    assert names == {
        "decision",
        "confidence_maps",
        "reliability",
        "confidences",
        "foreign_inputs",
        "calibration_curves",
        "spectrum",
        "layer_std",
    }
    for picture in made.pictures:
        assert picture.png.read_bytes().startswith(b"\x89PNG")
        assert "<svg" in picture.svg.read_text()[:2000]
    assert made.shown in ("diagonal", "kfac")


class Page(html.parser.HTMLParser):
    """Text of all cells, sources of all images, and a check that tags close."""

    def __init__(self, text):
        super().__init__()
        self.cells, self.images, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag in ("td", "th"):
            self.cells.append("")
        if tag == "img":
            self.images.append(dict(attrs))
        if tag not in ("img", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


def test_the_page_holds_every_cell_and_every_figure_and_fetches_nothing(classified):
    made = classified[0]
    text = made.html.read_text()
    page = Page(text)
    assert page.open == []
    for table in (made.fits, made.metrics, made.coverage):
        for row in [list(table.columns.values()), *table.cells()]:
            assert set(row) <= set(page.cells)
    assert len(page.images) == len(made.pictures)
    assert all(i["src"].startswith("data:image/png;base64,") and i["alt"] for i in page.images)
    assert not re.search(r"""(href|src)=["'](?!data:)|url\(|@import|<script""", text)
    assert "A &lt;b&gt;title&lt;/b&gt; &amp; more" in text
    assert "prefers-color-scheme: dark" in text


def test_coverage_says_how_each_leaf_was_computed(classified):
    rows = [r for r in classified[0].coverage.rows if r["name"] == "kfac"]
    assert {r["leaf"] for r in rows} == {"b", "v", "w"}


def test_regression_finds_its_noise_and_draws_bands(tmp_path):
    params, train, held_out = weights(1, 1), points(30, 1), points(25, 1)
    made = laplax.report(
        network,
        params,
        train=train,
        test=points(20, 1),
        calibration=held_out,
        loss_fn="mse",
        curvatures=["last_layer"],
        out=tmp_path,
        progress=False,
    )
    assert {p.name for p in made.pictures} == {
        "decision",
        "bands",
        "calibration_curves",
        "spectrum",
        "layer_std",
    }
    row, best = made.fits.rows[0], made.metrics.rows[0]
    assert row["parameters"] == 4
    assert row["sigma_squared"] > 0
    f = jax.vmap(network, (0, None))(held_out[0], params)
    residual = float(jnp.mean((f - held_out[1]) ** 2))
    width = 2 * 1.959963984540054 * residual**0.5  # the MAP has the noise of held-out data alone
    assert best["interval_width"] == pytest.approx(width)
    assert "bands" in made.html.read_text() or "Predictive bands" in made.html.read_text()


def one_output(input, params):
    return network(input, params)[0]


TARGETS = {
    "truth values": (one_output, 1, "binary_cross_entropy", lambda n: RNG.uniform(size=n) < 0.5),
    "shares": (one_output, 1, "binary_cross_entropy", lambda n: RNG.uniform(size=n)),
    "class shares": (network, 3, "cross_entropy", lambda n: RNG.dirichlet([1.0, 1.0, 1.0], n)),
    "variance head": (network, 2, "heteroscedastic", lambda n: RNG.normal(size=n)),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_targets_of_every_kind_are_judged_as_evaluation_does(kind):
    model_fn, outputs, loss_fn, draw = TARGETS[kind]
    params = weights(2, outputs)
    train, test, held_out = ((points(n, 2)[0], jnp.asarray(draw(n))) for n in (16, 12, 10))
    report = laplax.report(
        model_fn,
        params,
        train=train,
        test=test,
        calibration=held_out,
        loss_fn=loss_fn,
        curvatures=["diagonal"],
        calibration_objective="marginal_log_likelihood",
    )
    posterior_fn, _ = laplax.laplace(model_fn, params, train, loss_fn=loss_fn, curv_type="diagonal")
    arguments = report.prior_arguments["diagonal"]
    expected, _ = laplax.evaluation(posterior_fn, model_fn, params, arguments, test)
    row = {key: value for key, value in report.metrics.rows[-1].items() if key != "name"}
    assert row == pytest.approx(expected, rel=1e-6)


def test_loaders_and_several_outputs_get_a_report_without_bands(tmp_path):
    def batches(n):
        x = jnp.asarray(RNG.normal(size=(n, 5, 1)))
        return [(part, jnp.concatenate([part, -part], -1)) for part in x]

    params, test = weights(1, 2), batches(3)
    made = laplax.report(
        network,
        params,
        train=batches(4),
        test=test,
        calibration=batches(2),
        loss_fn="mse",
        curvatures=["diagonal"],
        out=tmp_path,
    )
    assert "bands" not in {picture.name for picture in made.pictures}
    whole = tuple(jnp.concatenate(x) for x in zip(*test, strict=True))
    error = jax.vmap(network, (0, None))(whole[0], params) - whole[1]
    assert made.metrics.rows[0]["rmse"] == pytest.approx(float(jnp.sqrt(jnp.mean(error**2))))
    assert made.summary["examples"] == "20 training, 10 calibration, 15 test"


def test_two_parameters_have_their_energy_drawn(tmp_path):
    x = jnp.linspace(-1.0, 1.0, 10)
    made = laplax.report(
        lambda input, params: params["a"] * input + params["b"],
        {"a": jnp.asarray(1.0), "b": jnp.asarray(0.1)},
        train=(x, x + 0.1 * jnp.sin(20 * x)),
        test=(x, x),
        loss_fn="mse",
        curvatures=["full"],
        out=tmp_path,
        progress=False,
    )
    assert "energy" in {picture.name for picture in made.pictures}


def test_without_a_directory_nothing_is_drawn(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    made = laplax.report(
        network,
        weights(2, 1),
        train=points(10, 2),
        test=points(5, 2),
        loss_fn="mse",
        curvatures=["diagonal"],
    )
    assert made.pictures == ()
    assert made.html is None
    assert "diagonal" in str(made)
    assert "log evidence" in str(made)


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"curvatures": ["fulll"]}, ValueError, "did you mean 'full'"),
        ({"curvatures": "full"}, TypeError, "list or a mapping"),
        ({"curvatures": []}, ValueError, "empty"),
        ({"curvatures": {"full": {"rank": 3}}}, ValueError, "rank"),
        ({"test": (jnp.ones((3, 2)), jnp.ones((3, 1)))}, ValueError, "pass calibration="),
        ({"shifted": {"test": (jnp.ones((4, 2)), jnp.ones((4, 1)))}}, ValueError, "two sets"),
        ({"calibration_objective": "nlll"}, ValueError, "did you mean 'nll'"),
        ({"loss_fn": "poisson"}, ValueError, "a report is for loss_fn"),
        ({"max_bytes": 0}, ValueError, "max_bytes must be positive"),
        ({"max_seconds": -1.0}, ValueError, "max_seconds must be positive"),
        ({"ood": jnp.ones((4, 3))}, ValueError, "ood must hold inputs like"),
        ({"ood": (jnp.ones((4, 2)),) * 2}, ValueError, "inputs alone"),
        ({"test": (jnp.ones((4, 2)), jnp.ones(4))}, ValueError, "target"),
    ],
)
def test_mistakes_are_found_before_work_starts(change, kind, text):
    given = {
        "train": (jnp.ones((6, 2)), jnp.ones((6, 1))),
        "test": (jnp.ones((4, 2)), jnp.ones((4, 1))),
        "loss_fn": "mse",
    }
    with pytest.raises(kind, match=text):
        laplax.report(network, weights(2, 1), **{**given, **change})


def test_a_directory_that_cannot_be_made_is_an_error_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        laplax.report(network, {}, train=None, test=None, loss_fn="mse", out=tmp_path / "file/x")


def test_tables_mark_the_best_and_show_what_is_missing(tmp_path):
    rows = [{"name": "a", "nll": 0.25, "size_bytes": 2048}, {"name": "<b>", "nll": None}]
    columns = {"name": "", "nll": "nll", "size_bytes": "size"}
    table = Table("T", columns, rows)
    assert table.cells() == [["a", "0.2500", "2.0 KiB"], ["<b>", "–", "–"]]  # noqa: RUF001
    assert not table.is_marked(rows[0], "nll")
    full = Table("T", columns, [*rows, {"name": "c", "nll": 0.5}], frozenset({("a", "nll")}))
    assert full.is_marked(rows[0], "nll")
    assert not full.is_marked(rows[0], "size_bytes")
    made = laplax.Report("t", {}, full, full, Table("", {}, []), None, {})
    write_page(tmp_path / "page.html", "t", [made, made])
    text = (tmp_path / "page.html").read_text()
    assert "&lt;b&gt;" in text
    assert text.count('<td class="best">0.2500</td>') == 4


# -- the verdict ----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["MAP", "temperature scaling", "kfac", "lanczos"])
@pytest.mark.parametrize("split", [True, False])
def test_the_code_of_a_row_makes_its_number_again(name, split, capsys):
    params = weights(2, 3)
    train, test, calibration = (labelled(n, params) for n in (24, 60, 40))
    given = {} if split else {"calibration": calibration}
    setting_of = laplax._report._report
    seen = []

    def keep(candidates):
        seen[:] = candidates
        return recommend_from(candidates)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setting_of, "recommend_from", keep)
        made = laplax.report(
            network,
            params,
            train=train,
            test=test,
            loss_fn="cross_entropy",
            curvatures={"kfac": {}, "lanczos": {"rank": 3}},
            **given,
        )
    row = next(x for x in made.metrics.rows if x["name"] == name)
    code = next(x.code for x in seen if x.name == name)
    names = {"model_fn": network, "params": params, "train": train, "test": test}
    exec(code, {**names, "calibration": calibration})
    printed = float(re.search(r"'nll': ([-0-9.e]+)", capsys.readouterr().out)[1])
    assert printed == pytest.approx(row["nll"], rel=1e-6)
    assert f"# {row['nll']:.4f}" in code


def test_a_recommendation_is_the_verdict_of_the_report():
    train, test = points(24, 2), points(30, 2)
    params = weights(2, 1)
    problem = {"train": train, "test": test, "loss_fn": "mse", "curvatures": ["diagonal"]}
    made = laplax.recommend(network, params, **problem)
    report = laplax.report(network, params, **problem)
    assert (made.name, made.code) == (report.verdict.name, report.verdict.code)
    what, _, _ = made.sentence.partition(":")  # the rest may hold measured times
    assert report.verdict.sentence.startswith(what)
    assert report.verdict.sentence in str(report)
    row = next(x for x in report.metrics.rows if x["name"] == made.name)
    judging = jax.tree.map(lambda x: x[::2], test)
    assert laplax.judge(made.prob_predictive, judging)["nll"] == pytest.approx(row["nll"])
    kept = next(x for x in made.table.rows if x["name"] == made.name)
    assert kept["nll the test data"].value == pytest.approx(row["nll"])


def scores(nll, inside=None, outside=None):
    outside = {} if outside is None else {"foreign": np.asarray(outside)}
    inside = np.zeros(len(nll)) if inside is None else np.asarray(inside)
    return Scores({"the test data": np.asarray(nll)}, inside, outside)


def test_the_error_of_an_auroc_and_of_a_gain_is_that_of_resampled_points():
    rng = np.random.default_rng(3)
    inside, outside = rng.normal(size=(2, 150)), 0.7 + rng.normal(size=(2, 120))
    inside[1] = 0.8 * inside[0] + 0.6 * inside[1]  # both methods see the same points
    outside[1] = 0.8 * outside[0] + 0.6 * outside[1]
    first, second = (scores(np.zeros(150), inside[i], outside[i]) for i in (0, 1))

    def resampled(_):
        i, j = rng.integers(0, 150, 150), rng.integers(0, 120, 120)
        return [float((outside[k][j][:, None] > inside[k][i]).mean()) for k in (0, 1)]

    draws = np.array([resampled(k) for k in range(4000)])
    # The bootstrap's own relative error is 1 / sqrt(2 * 4000) = 1.1%; five of them.
    estimate = first.auroc("foreign")
    assert estimate.value == pytest.approx(float((outside[0][:, None] > inside[0]).mean()))
    assert estimate.standard_error == pytest.approx(draws[:, 0].std(), rel=0.056)
    gain = auroc_gain(first, second, "foreign")
    assert gain.standard_error == pytest.approx((draws[:, 0] - draws[:, 1]).std(), rel=0.056)
    assert gain.value == pytest.approx(first.auroc("foreign").value - second.auroc("foreign").value)


def candidate(name, row, seconds, is_baseline=False):
    return Candidate(name, name, row, seconds, f"code of {name}", {}, None, is_baseline)


def test_the_rule_asks_for_nll_then_auroc_then_speed():
    rng = np.random.default_rng(4)
    nll, noise = rng.normal(size=400), rng.normal(size=400)
    inside, outside = rng.normal(size=400), rng.normal(size=300)
    network = candidate("MAP", scores(nll + 1 + noise, inside, outside), 1.0, is_baseline=True)
    scaled = candidate("T", scores(nll, inside, outside), 1.0, is_baseline=True)
    same = scores(nll + 0.1 * (noise - noise.mean()), inside, outside + 2)
    slow, fast = candidate("slow", same, 9.0), candidate("fast", same, 8.0)
    assert recommend_from([network, scaled]).name == "T"
    verdict = recommend_from([network, scaled, slow, fast])
    assert verdict.name == "fast"
    assert verdict.code == "code of fast"
    assert "no difference beyond noise" in verdict.reasons[0]
    assert "fast is better by" in verdict.reasons[1]
    assert verdict.table.marks == frozenset()  # nothing beats every other row
    # An approximation that gains nothing is not taken.
    verdict = recommend_from([network, scaled, candidate("a", scores(nll, inside, outside), 4.0)])
    assert verdict.name == "T"
    assert "no Laplace approximation is better beyond noise" in verdict.sentence
    assert "4 times as fast" in verdict.sentence
    # Nothing beats a noisy baseline clearly; the better baseline is what counts.
    noisy = candidate("N", scores(nll + 0.5 + 9 * noise, inside, outside), 1.0, is_baseline=True)
    ahead = candidate("ahead", scores(nll - 0.01, inside, outside), 4.0)
    assert recommend_from([noisy, scaled, ahead]).name == "ahead"
    clear = candidate("best", scores(nll - 1 + noise / 9, inside, outside), 4.0)
    assert recommend_from([network, scaled, clear]).table.marks == {("best", "nll the test data")}


def test_shifted_and_foreign_sets_are_columns_of_the_verdict(tmp_path):
    params = weights(2, 3)
    turned = labelled(11, params, shift=0.5)
    made = laplax.report(
        network,
        params,
        train=labelled(24, params),
        test=labelled(30, params),
        calibration=labelled(40, params),
        shifted={"turned": turned},
        ood={"far": 9 + points(12, 2)[0], "near": 1 + points(9, 2)[0]},
        loss_fn="cross_entropy",
        curvatures=["diagonal"],
        out=tmp_path,
        progress=False,
    )
    table = made.verdict.table
    keys = ["nll the test data", "nll turned", "auroc far", "auroc near"]
    assert list(table.columns) == ["name", *keys, "milliseconds"]
    network_row = table.rows[0]
    judged = laplax.baselines.map_predictive(network, params, loss_fn="cross_entropy")
    assert network_row["nll turned"].value == pytest.approx(judged.evaluate(turned)["nll"])
    text = made.html.read_text()
    assert html.escape(made.verdict.sentence) in text
    assert f"<pre>{html.escape(made.verdict.code)}</pre>" in text
    assert '<tr class="chosen">' in text
    assert made.summary["examples"].endswith("30 test, 11 turned, 12 far, 9 near")


def test_a_baseline_that_warns_has_a_note():
    params = weights(2, 3)
    x, y = labelled(40, params)
    wrong = (x, jnp.argmin(jax.vmap(network, (0, None))(x, params), axis=-1))
    problem = {"train": (x, y), "test": (x, y), "calibration": wrong, "loss_fn": "cross_entropy"}
    made = laplax.report(network, params, **problem, curvatures=["diagonal"])
    row = next(x for x in made.metrics.rows if x["name"] == "temperature scaling")
    assert "The temperature is infinite" in row["note"]
    assert row["nll"] == pytest.approx(np.log(3))
