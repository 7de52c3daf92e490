"""What to take, and why: a rule, and its result in words."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from ..evaluation import Judged
from ..standard_errors import Estimate
from ._scores import NOISE, Scores, auroc_gain, is_clear, mean_gain, nll_gain
from ._tables import Table, number

RULE = (
    "How it was chosen: of the approximations and the better baseline, those whose NLL, averaged "
    f"over the test sets, no other beats by more than {NOISE:g} standard errors; of these, those "
    "with the highest AUROC, by the same measure; of these, the baseline, or else the one that "
    "predicts fastest. Standard errors are over test points, and differences are paired. The test "
    "data chose the row, so a fresh set may judge it a little worse."
)


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """A row that could be taken."""

    name: str
    kind: str  # in a sentence: "the network as it is", "temperature scaling", ...
    scores: Scores
    seconds: float  # for one prediction
    code: str
    prior_arguments: Mapping[str, float]
    prob_predictive: Judged
    is_baseline: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Recommendation:
    """What to take, and why. `print(recommendation)` shows the verdict and the table.

    Attributes:
        sentence: What to ship, in one sentence.
        reasons: What it gains over the baseline, set by set, with standard errors.
        name: The row that was chosen.
        prior_arguments: Its hyperparameters.
        prob_predictive: Its predictive, ready to use: `prob_predictive(input)`.
        code: Python that makes the predictive again from your model and data.
        table: What was compared: NLL by test set, AUROC by set of foreign inputs, and
            milliseconds per prediction, with standard errors.
    """

    sentence: str
    reasons: tuple[str, ...]
    name: str
    prior_arguments: Mapping[str, float]
    prob_predictive: Judged
    code: str
    table: Table

    def __str__(self) -> str:
        lines = [self.sentence, *(f"- {reason}" for reason in self.reasons)]
        return "\n".join([*lines, "", str(self.table)])


def preferred(candidates: Sequence[Candidate]) -> Candidate:
    """The rule: NLL, then AUROC, each within noise; then simplicity and speed."""
    baselines = [x for x in candidates if x.is_baseline]
    left = [x for x in candidates if not x.is_baseline]
    if baselines:
        # A worse baseline whose NLL is noisier must not win because nothing beats it clearly.
        left.insert(0, _best_on_average(baselines, nll_gain))
    left = _not_beaten(left, nll_gain)
    if candidates[0].scores.outside:
        left = _not_beaten(left, auroc_gain)
    return min(left, key=lambda x: (not x.is_baseline, x.seconds))


def recommend_from(candidates: Sequence[Candidate]) -> Recommendation:
    """The verdict over all rows; baselines come first, the reference last of them."""
    chosen = preferred(candidates)
    reference = [x for x in candidates if x.is_baseline][-1]
    approximations = [x for x in candidates if not x.is_baseline]
    shown = chosen
    if chosen.is_baseline and approximations:
        shown = preferred(approximations)
    return Recommendation(
        sentence=_sentence(chosen, shown, reference),
        reasons=tuple(_reasons(shown, reference)),
        name=chosen.name,
        prior_arguments=chosen.prior_arguments,
        prob_predictive=chosen.prob_predictive,
        code=chosen.code,
        table=decision_table(candidates),
    )


def decision_table(candidates: Sequence[Candidate]) -> Table:
    """Every number that the verdict rests on; one is marked that beats all others clearly."""
    first = candidates[0].scores
    columns = {"name": ""}
    columns |= {f"nll {part}": f"NLL, {part}" for part in first.nll}
    columns |= {f"auroc {part}": f"AUROC, {part}" for part in first.outside}
    columns["milliseconds"] = "ms per prediction"
    marks = {
        (name, f"nll {part}") for part in first.nll for name in _best(candidates, nll_gain, part)
    }
    marks |= {
        (name, f"auroc {part}")
        for part in first.outside
        for name in _best(candidates, auroc_gain, part)
    }
    rows = [
        {
            "name": x.name,
            **{f"nll {part}": x.scores.mean_nll(part) for part in first.nll},
            **{f"auroc {part}": x.scores.auroc(part) for part in first.outside},
            "milliseconds": 1e3 * x.seconds,
        }
        for x in candidates
    ]
    return Table("What decides", columns, rows, frozenset(marks))


Gain = Callable[[Scores, Scores, str], Estimate]


def _not_beaten(candidates: Sequence[Candidate], gain: Gain) -> list[Candidate]:
    """Those that the best one does not beat clearly."""
    best = _best_on_average(candidates, gain)
    return [x for x in candidates if not is_clear(mean_gain(gain, best.scores, x.scores))]


def _best_on_average(candidates: Sequence[Candidate], gain: Gain) -> Candidate:
    best = candidates[0]
    for other in candidates[1:]:
        if mean_gain(gain, other.scores, best.scores).value > 0:
            best = other
    return best


def _best(candidates: Sequence[Candidate], gain: Gain, part: str) -> list[str]:
    """The name of the row that beats every other one clearly, if there is one."""
    return [
        x.name
        for x in candidates
        if len(candidates) > 1
        and all(is_clear(gain(x.scores, y.scores, part)) for y in candidates if y is not x)
    ]


def _sentence(chosen: Candidate, shown: Candidate, reference: Candidate) -> str:
    if chosen is shown and not chosen.is_baseline:
        gains = [text for text, gain in _gains(chosen, reference) if is_clear(gain)]
        why = _joined(gains) if gains else "by its mean over all test sets"
        return f"Ship {chosen.kind}: it is better than {reference.kind} {why}."
    if chosen is shown:
        return f"Ship {chosen.kind}: there was no Laplace approximation to compare it with."
    ratio = shown.seconds / chosen.seconds
    how = f"predicts {ratio:.0f} times as fast as" if ratio >= 1.5 else "is simpler than"
    return (
        f"Ship {chosen.kind}: no Laplace approximation is better beyond noise here, and it {how} "
        f"{shown.kind}."
    )


def _gains(ours: Candidate, theirs: Candidate) -> list[tuple[str, Estimate]]:
    """Each set with what is gained on it, in words and as a number."""
    first = ours.scores
    second = theirs.scores
    nll = [
        (
            f"on {part} (NLL {number(first.mean_nll(part).value)} against "
            f"{number(second.mean_nll(part).value)})",
            nll_gain(first, second, part),
        )
        for part in first.nll
    ]
    auroc = [
        (
            f"at telling {part} from the test data (AUROC {first.auroc(part).value:.3f} against "
            f"{second.auroc(part).value:.3f})",
            auroc_gain(first, second, part),
        )
        for part in first.outside
    ]
    return nll + auroc


def _reasons(shown: Candidate, reference: Candidate) -> list[str]:
    """What a Laplace approximation buys over the baseline."""
    if shown.is_baseline:
        return []
    reasons = []
    for text, gain in _gains(shown, reference):
        if is_clear(gain):
            how = f"{shown.name} is better by"
        elif is_clear(Estimate(-gain.value, gain.standard_error)):
            how = f"{shown.name} is worse by"
        else:
            how = "no difference beyond noise,"
        size = f"{number(abs(gain.value))} +- {number(gain.standard_error)}"
        reasons.append(f"{text[0].upper()}{text[1:]}: {how} {size}.")
    speed = f"{1e3 * shown.seconds:.2g} ms against {1e3 * reference.seconds:.2g} ms"
    return [*reasons, f"One prediction takes {speed}, in a batch."]


def _joined(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
