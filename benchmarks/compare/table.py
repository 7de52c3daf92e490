"""What was measured, as a table of Markdown and as a picture; and how it compares with before."""

import statistics

import rows as specification

TOLERANCE = 2e-2  # float32, and different orders of summation
MARGIN = 1.5  # these machines are noisy: a ratio that is worse by more than this is a loss


def ratios(row, found):
    """How many times faster than each peer, and how many floors."""
    ours = found["ours"]["warm"]
    out = {}
    for peer in ("laplax", "torch"):
        if peer in found and "warm" in found[peer]:
            out[peer] = found[peer]["warm"] / ours
    if "floor" in found:
        out["floor"] = ours / (row.floors * found["floor"]["warm"])
    return out


def missed(row, found):
    """The targets that this row does not reach, in words."""
    seen = ratios(row, found)
    words = []
    for peer, least in (("laplax", row.least_laplax), ("torch", row.least_torch)):
        if least is not None and peer not in seen:
            words.append(f"{peer} was not measured, target {least:g}x")
        elif least is not None and seen[peer] < least:
            words.append(f"{seen[peer]:.3g}x {peer}, target {least:g}x")
    if row.most_floors is not None and "floor" in seen and seen["floor"] > row.most_floors:
        words.append(f"{seen['floor']:.3g} floors, target {row.most_floors:g}")
    cold = found["ours"].get("cold")
    if row.work == "fit" and row.problem in "abc" and cold is not None:
        other = found.get("laplax", {}).get("cold")
        if cold > 2:
            words.append(f"first call {cold:.2g} s, target 2 s")
        if other is not None and cold > other:
            words.append(f"first call {cold:.2g} s, laplax {other:.2g} s")
    return words


def disagreement(row, found):
    """The largest relative difference of the answers that should agree, or None."""
    if not row.same or "answer" not in found["ours"]:
        return None
    ours = found["ours"]["answer"]
    worst = None
    for peer in ("laplax", "torch"):
        other = found.get(peer, {}).get("answer")
        if other is None:
            continue
        size = max(abs(v) for v in ours)
        apart = max(abs(a - b) for a, b in zip(ours, other, strict=True)) / size
        worst = max(apart, worst or 0.0)
    return worst


def seconds(value):
    """Two or three digits, whatever the size."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def markdown(results):
    """All rows; what is asked stands in brackets behind what was seen."""
    lines = [
        "| work | ours: warm (first) s | MB | laplax 0.0.2 s | faster | laplace-torch s | faster "
        "| floors | answers apart |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in specification.ROWS:
        found = results.get(row.name)
        if not found:
            continue
        seen, apart = ratios(row, found), disagreement(row, found)
        cells = [row.name]
        ours = found["ours"]
        cells += [f"{seconds(ours['warm'])} ({seconds(ours.get('cold'))})", f"{ours['peak']:.0f}"]
        for peer, least in (("laplax", row.least_laplax), ("torch", row.least_torch)):
            theirs = found.get(peer, {})
            by = f" {theirs['backend']}" if "backend" in theirs else ""
            star = "*" if "share" in theirs else ""
            cells.append(f"{seconds(theirs.get('warm'))}{star}{by}")
            cells.append(_asked(seen.get(peer), least, more=True))
        cells.append(_asked(seen.get("floor"), row.most_floors, more=False))
        cells.append("-" if apart is None else f"{apart:.0e}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _asked(value, target, *, more):
    if value is None:
        return "-"
    words = f"{value:.3g}x" if more else f"{value:.2f}"
    if target is None:
        return words
    words += f" ({'>' if more else '<'} {target:g})"
    return words if (value >= target if more else value <= target) else f"**{words}**"


def losses(results, before):
    """Ratios that are worse than the median of those of stored runs by more than the margin."""
    words = []
    for row in specification.ROWS:
        if row.name not in results:
            continue
        new = ratios(row, results[row.name])
        stored = [ratios(row, run[row.name]) for run in before if row.name in run]
        for what, is_now in new.items():
            seen = [old[what] for old in stored if what in old]
            if not seen:
                continue
            was = statistics.median(seen)
            worse = is_now / was if what == "floor" else was / is_now
            if worse > MARGIN:
                words.append(f"{row.name}: {what} was {was:.3g}, is {is_now:.3g}")
    return words


def draw(results, path):
    """How many times faster, for every row and peer, on a logarithmic axis."""
    from matplotlib.figure import Figure

    shown = [
        row
        for row in specification.ROWS
        if row.name in results and ratios(row, results[row.name]).keys() & {"laplax", "torch"}
    ]
    figure = Figure(figsize=(8, 0.32 * len(shown) + 1.2), layout="constrained")
    ax = figure.subplots()
    peers = (("laplax", "laplax 0.0.2", "#0072B2", "o"), ("torch", "laplace-torch", "#D55E00", "s"))
    for peer, label, color, marker in peers:
        at = [
            (ratios(row, results[row.name])[peer], i)
            for i, row in enumerate(shown)
            if peer in ratios(row, results[row.name])
        ]
        if at:
            ax.plot(*zip(*at, strict=True), marker, color=color, label=label)
        targets = [
            (getattr(row, f"least_{peer}"), i)
            for i, row in enumerate(shown)
            if getattr(row, f"least_{peer}") and peer in ratios(row, results[row.name])
        ]
        if targets:
            ax.plot(
                *zip(*targets, strict=True),
                "|",
                color=color,
                markersize=11,
                label=f"target, {label}",
            )
    ax.axvline(1, color="0.5", linewidth=1)
    ax.set(xscale="log", xlabel="times faster than the peer (warm medians, one run)")
    ax.set_yticks(range(len(shown)), [row.name for row in shown])
    ax.invert_yaxis()
    ax.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside upper center", ncols=2)
    figure.savefig(path, dpi=110)
