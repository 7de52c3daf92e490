"""What is compared, and what is asked of it."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Row:
    """One piece of work. Targets: times faster than each peer, at most so many floors."""

    problem: str
    work: str
    curvature: str
    laplax: str | None = None  # the work by which laplax 0.0.2 does it; None: it cannot
    backends: tuple[str, ...] = ()  # those of laplace-torch that can do it in reasonable time
    torch: str | None = None  # the work by which laplace-torch does it, if not `work`
    floor: str | None = None
    floors: float = 1.0  # how many of them one unit is: 50 products
    least_laplax: float | None = None
    least_torch: float | None = None
    most_floors: float | None = None
    same: bool = True  # whether answers must agree
    quick: bool = False

    @property
    def name(self):
        """As in the tables."""
        work = {
            "fit": "fit",
            "variance": "variances of 1,000 points",
            "monte_carlo": "30 sampled networks",
            "grid": "50-point grid by NLL",
            "evidence": "evidence optimum",
        }[self.work]
        return f"({self.problem}) {work}, {self.curvature.replace('_', ' ')}"


def fit(problem, curvature, **given):
    """A fit, compared with both peers unless told otherwise."""
    return Row(problem, "fit", curvature, **({"laplax": "fit"} | given))


ASDL, BACKPACK, CURVLINOPS = "Asdl", "BackPack", "Curvlinops"
C = 10
FITS = [
    fit("a", "full", backends=(ASDL, BACKPACK), floor="gram", least_laplax=20, least_torch=2,
        most_floors=2, quick=True),
    fit("a", "diagonal", backends=(ASDL, BACKPACK), floor="gradient", least_laplax=100,
        least_torch=3, most_floors=3, quick=True),
    fit("a", "kfac", laplax=None, backends=(ASDL, CURVLINOPS), floor="gradient", same=False),
    fit("a", "lanczos50", floor="product", floors=50, same=False),
    fit("b", "full", backends=(ASDL,), floor="gram", least_laplax=15, least_torch=1.8,
        most_floors=2),
    fit("b", "diagonal", backends=(ASDL,), floor="gradient", least_laplax=100, least_torch=10,
        most_floors=4),
    fit("b", "kfac", laplax=None, backends=(ASDL,), floor="gradient", least_torch=10,
        most_floors=6, same=False),
    fit("b", "lanczos50", floor="product", floors=50, same=False),
    fit("b", "lobpcg50", floor="product", floors=50, same=False),
    fit("c", "diagonal", laplax="part_of_fit", backends=(BACKPACK, ASDL), floor="gradient",
        least_laplax=10_000, least_torch=3, most_floors=C + 2, quick=True),
    fit("c", "kfac", laplax=None, backends=(BACKPACK, CURVLINOPS), floor="gradient",
        least_torch=1.5, most_floors=2 * (C + 2), same=False),
    fit("c", "ekfac", laplax=None, floor="gradient"),
    fit("c", "last_layer", backends=(BACKPACK, CURVLINOPS), floor="gradient", least_laplax=4,
        least_torch=3),
    fit("c", "lanczos50", floor="product", floors=50, least_laplax=1.4, most_floors=1.5,
        same=False),
    fit("d", "diagonal", laplax="part_of_fit", backends=(ASDL,), floor="gradient",
        least_laplax=100, least_torch=1, most_floors=C + 2),
    fit("d", "kfac", laplax=None, backends=(ASDL, CURVLINOPS), floor="gradient", least_torch=1,
        most_floors=C + 2, same=False),
    fit("d", "lanczos20", laplax="part_of_fit", floor="product", floors=20, least_laplax=5,
        most_floors=1.25, same=False),
]  # fmt: skip

VARIANCES = [
    Row("a", "variance", "full", "variance", (BACKPACK, CURVLINOPS), least_laplax=5,
        least_torch=50, quick=True),
    Row("c", "variance", "diagonal", "variance", (BACKPACK,), "part_of_variance",
        least_laplax=20, least_torch=50),
    Row("c", "variance", "kfac", None, (BACKPACK,), "part_of_variance", least_torch=100,
        same=False),
    Row("c", "variance", "lanczos20", "part_of_variance", least_laplax=20, same=False),
    Row("c", "variance", "last_layer", "variance", (BACKPACK,), least_laplax=2,
        least_torch=1.5),
    Row("d", "variance", "diagonal", "part_of_variance", (BACKPACK,), "part_of_variance",
        least_laplax=10, least_torch=3),
]  # fmt: skip

SAMPLES = [
    Row("a", "monte_carlo", "full", "monte_carlo", (ASDL,), floor="forward", least_laplax=1,
        least_torch=1, most_floors=2, quick=True),
    Row("c", "monte_carlo", "diagonal", "monte_carlo", (BACKPACK,), floor="forward", least_laplax=1,
        least_torch=1, most_floors=2),
    Row("d", "monte_carlo", "diagonal", "monte_carlo", (ASDL,), floor="forward", least_laplax=1,
        least_torch=1, most_floors=2),
]  # fmt: skip

SEARCHES = [
    Row("a", "grid", "full", "grid", (BACKPACK,), "part_of_grid", least_laplax=30, least_torch=50,
        same=False),
    Row("a", "grid", "diagonal", "grid", (BACKPACK, CURVLINOPS), least_laplax=10,
        least_torch=10, same=False, quick=True),
    Row("a", "grid", "lanczos50", "grid", least_laplax=10, same=False),
    Row("c", "grid", "last_layer", "grid", (BACKPACK,), "part_of_grid", least_laplax=30,
        least_torch=10, same=False),
    Row("c", "grid", "kfac", None, (BACKPACK,), "part_of_grid", least_torch=500, same=False),
    Row("a", "evidence", "full", "evidence", (ASDL,), "part_of_evidence", least_laplax=30,
        least_torch=20, same=False),
]  # fmt: skip

MORE = [
    fit("e", curvature, laplax=None, floor="gradient") for curvature in
    ("last_layer", "diagonal", "kfac")
] + [
    fit("f", curvature, laplax=None, floor="gradient") for curvature in
    ("last_layer", "diagonal", "kfac", "ekfac")
]  # fmt: skip

ROWS = FITS + VARIANCES + SAMPLES + SEARCHES + MORE
