"""Verdicts on the claims, and what a reader has to know about the runs, in sentences."""

from collections import Counter
from collections.abc import Sequence

from ghostnoise.lab.report.claims import Claim
from ghostnoise.lab.report.noise import NoiseRun, spread
from ghostnoise.lab.report.statistics import FEW_SEEDS, Findings, Score
from ghostnoise.lab.report.tables import counted, digits, interval_text, mean_text, numerics_notice, p_text, ratio_text
from ghostnoise.lab.run import STATUSES

MOST_REASONS = 20  # damaged folders that are described


def claim_line(findings: Findings, claim: Claim) -> str:
    """Return the claim, its verdict and the reason as one line."""
    reason = claim_reason(findings, claim)
    when = " (stated after some of the runs)" if claim.late else ""
    if claim.paired is None:
        return f"{claim.text}{when}: inconclusive: {reason}"
    return f"{claim.text}{when}: {claim.verdict}{f', {claim.side}' if claim.side else ''}. {reason}"


def claim_reason(findings: Findings, claim: Claim) -> str:
    """Explain a verdict with the numbers behind it."""
    methods, difference = claim.methods, claim.difference
    labels = [method.label for method in findings.collected.experiment.grid.methods]
    if excluded := [label for label in methods if label not in labels]:
        return f"{' and '.join(excluded)} not included in this report."
    if claim.paired is None:
        if difference is None:
            lacking = [label for label in methods if findings.best(label) is None]
            if lacking:
                return f"no finished runs of {' and '.join(lacking)}."
            return "no cell can be chosen: the first half of the seeds has no finished runs of a cell that was tested."
        if findings.collected.mixed and difference.ours.values.keys() & difference.theirs.values.keys():
            return "no common seeds with equal numerics."
        if claim.chosen:
            return f"no common seed is left for the test: {claim.chosen}."
        return "no seed finished with both methods."
    words = [f"{_named(difference.ours)} against {_named(difference.theirs)}:"] if difference else []
    words.append(_measured(claim))
    if claim.chosen:
        words.append(f"{claim.chosen[:1].upper()}{claim.chosen[1:]}.")
    if 1 < claim.paired.n < FEW_SEEDS:
        words.append(f"Only {claim.paired.n} seeds: interpret with caution.")
    if left := without_result(findings, methods):
        words.append(f"Preliminary: {left}.")
    scores = (difference.ours, difference.theirs) if difference else ()
    if diverged := sum(score.counts["diverged"] for score in scores):
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
    if largest > 1 and (shared := _shared_data(findings)):
        notes.append(
            f"All seeds share the same {shared}: intervals cover initialization, order and noise, and not other data."
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
    return [f"The figure shows the noise of {noise[0].run.name} after {words}."]


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
    return f"{score.cell} ({mean_text(score)}, n = {score.n})"


def _shared_data(findings: Findings) -> str:
    """Name the training data that all seeds share; empty if each has its own."""
    data = findings.collected.experiment.cells()[0].settings.data
    if getattr(data, "draw", None) == "run":
        return ""
    noun = "training signals" if data.name == "mnist1d" else "training images"
    return f"{data.limit:,} {noun}" if data.limit else noun


def _measured(claim: Claim) -> str:
    found = claim.paired
    assert found
    if claim.gains is not None and claim.ratio is not None and claim.corrected is not None:
        return (
            f"ratio {ratio_text(claim.ratio)} over {counted(found.n, 'common seed')} (Fieller's set at the corrected "
            f"level; p of a ratio of 2 {_p(claim.corrected.p)})."
        )
    mean = f"{found.mean:+.{digits(claim.unit)}f} {claim.unit} over {counted(found.n, 'common seed')}"
    both = claim.difference
    if both and not claim.chosen and len(both.ours.values.keys() & both.theirs.values.keys()) > found.n:
        mean += " with equal numerics"
    if claim.corrected and (interval := claim.interval):
        shown = interval_text(interval, digits(claim.unit))
        return f"{mean} (corrected 95 % interval {shown}, p {_p(claim.corrected.p)})."
    if found.n == 1:
        return f"{mean} (one seed: no interval and no test)."
    return f"{mean} (equal for every seed: no spread to test against)."


def _p(p: float) -> str:
    text = p_text(p)
    return text if text.startswith("<") else f"= {text}"


def without_result(findings: Findings, methods: Sequence[str]) -> str:
    """Return how many runs of these methods have no result yet, and why; empty if there are none."""
    runs = [run for run in findings.collected.runs if run.label in methods]
    counts = Counter(run.status for run in runs)
    waiting = [status for status in STATUSES if status not in ("finished", "diverged") and counts[status]]
    return ", ".join(f"{counted(counts[status], 'run')} {status}" for status in waiting)
