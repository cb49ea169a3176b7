"""Verdicts on the claims, and what a reader has to know about the runs, in sentences."""

from collections import Counter
from collections.abc import Sequence

from ghostnoise.lab.report.collect import STATUSES
from ghostnoise.lab.report.noise import NoiseRun, spread
from ghostnoise.lab.report.statistics import FEW_SEEDS, Claim, Difference, Findings, Score
from ghostnoise.lab.report.tables import counted, interval_text, mean_text, numerics_notice, p_text

MOST_REASONS = 20  # damaged folders that are described


def claim_line(findings: Findings, claim: Claim) -> str:
    """Return the claim, its verdict and the reason as one line."""
    reason = claim_reason(findings, claim)
    if claim.verdict == "inconclusive":
        return f"{claim.text}: inconclusive: {reason}"
    return f"{claim.text}: {claim.verdict}. {reason}"


def claim_reason(findings: Findings, claim: Claim) -> str:
    """Explain a verdict with the numbers behind it."""
    methods, difference = (claim.ours, claim.theirs), claim.difference
    labels = [method.label for method in findings.collected.experiment.grid.methods]
    if excluded := [label for label in methods if label not in labels]:
        return f"{' and '.join(excluded)} not included in this report."
    if difference is None:
        return f"no finished runs of {' and '.join(label for label in methods if findings.best(label) is None)}."
    if difference.paired is None:
        common = difference.ours.values.keys() & difference.theirs.values.keys()
        return "no common seeds with equal numerics." if common else "no seed finished with both methods."
    words = [f"{_named(difference.ours)} against {_named(difference.theirs)}:", _measured(difference)]
    found = difference.paired
    if 1 < found.n < FEW_SEEDS:
        words.append(f"Only {found.n} seeds: interpret with caution.")
    if left := without_result(findings, methods):
        words.append(f"Preliminary: {left}.")
    if diverged := sum(score.counts["diverged"] for score in (difference.ours, difference.theirs)):
        words.append(f"{counted(diverged, 'run')} diverged; the difference excludes diverged runs.")
    return " ".join(words)


def notes(findings: Findings, noise: Sequence[NoiseRun] = ()) -> list[str]:
    """List what a reader has to know before relying on the numbers; `noise` are the runs that have recorded it."""
    collected, experiment = findings.collected, findings.collected.experiment
    notes = [notice] if (notice := numerics_notice(findings)) else []
    if experiment.smoke:
        notes.append("Smoke runs: training was shortened to seconds, and the results are meaningless.")
    finished, total = collected.count("finished"), counted(len(collected.runs), "run")
    lacking = [f"{collected.count(status)} {status}" for status in STATUSES[1:] if collected.count(status)]
    if lacking:
        notes.append(f"{finished} of {total} finished; {', '.join(lacking)}.")
    if not finished:
        notes.append("No run has finished yet, so there are no results.")
    largest = max((row.score.n for row in findings.rows if row.score), default=0)
    if largest == 1:
        notes.append("One seed per cell: no standard deviations, no intervals, no tests.")
    elif 1 < largest < FEW_SEEDS:
        notes.append(
            f"At most {largest} seeds per cell: standard deviations are rough estimates, and intervals assume that "
            "differences are normally distributed."
        )
    if findings.claims and not experiment.select and any(row.at for row in findings.rows):
        notes.append(
            "The best cell of each method is chosen by the same runs that are compared, which favours methods with "
            "more cells."
        )
    return notes + _noise_notes(findings, noise) + _folder_notes(findings)


def _noise_notes(findings: Findings, noise: Sequence[NoiseRun]) -> list[str]:
    """Name the run whose noise the figure shows, or explain why it shows none."""
    if findings.collected.experiment.report.form != "noise":
        return []
    if not noise:
        return [
            "No run has recorded its noise, so the figure shows training curves; set `every` in the recipe's [meter] "
            "section to record noise."
        ]
    epochs = list(map(str, spread(noise[0].readings)))
    words = f"epoch {epochs[0]}" if len(epochs) == 1 else f"epochs {', '.join(epochs[:-1])} and {epochs[-1]}"
    return [f"The figure shows the noise of {noise[0].run.point.name} after {words}."]


def _folder_notes(findings: Findings) -> list[str]:
    """List the run folders that the report ignores."""
    collected = findings.collected
    notes = []
    if collected.damaged:
        names = ", ".join(path.name for path in collected.damaged)
        notes.append(f"{counted(len(collected.damaged), 'damaged run folder')} ignored: {names}.")
        notes += [f"{collected.reasons[path]}." for path in collected.damaged[:MOST_REASONS]]
    if collected.duplicates:
        notes.append(
            f"{counted(collected.duplicates, 'duplicate run folder')} ignored: the same run was also made on another "
            "device."
        )
    if collected.others:
        notes.append(f"{counted(collected.others, 'other run')} in {collected.folder} not part of this experiment.")
    return notes


def _named(score: Score) -> str:
    return f"{score.cell.name} ({mean_text(score)}, n = {score.n})"


def _measured(difference: Difference) -> str:
    found = difference.paired
    assert found
    mean = f"{found.mean:+.2f} points over {counted(found.n, 'common seed')}"
    if len(difference.ours.values.keys() & difference.theirs.values.keys()) > found.n:
        mean += " with equal numerics"
    if difference.corrected and (interval := difference.corrected_interval):
        p = p_text(difference.corrected.p)
        return f"{mean} (corrected 95 % interval {interval_text(interval)}, p {p if p[0] == '<' else f'= {p}'})."
    if found.n == 1:
        return f"{mean} (one seed: no interval and no test)."
    return f"{mean} (equal for every seed: no spread to test against)."


def without_result(findings: Findings, methods: Sequence[str]) -> str:
    """Return how many runs of these methods have no result yet, and why; empty if there are none."""
    runs = [run for run in findings.collected.runs if run.point.cell.method in methods]
    counts = Counter(run.status for run in runs)
    waiting = [status for status in STATUSES if status not in ("finished", "diverged") and counts[status]]
    return ", ".join(f"{counted(counts[status], 'run')} {status}" for status in waiting)
