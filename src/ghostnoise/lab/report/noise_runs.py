"""The runs of an experiment that have recorded their noise: what of it is drawn, and what is said."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ghostnoise.lab.report.gather import Gathered, Run
from ghostnoise.lab.report.noise import digests, rendered, spread
from ghostnoise.lab.report.noise_lines import Digest


@dataclass(frozen=True)
class Measured:
    """A run and its readings by epoch, one at least."""

    run: Run
    readings: Mapping[int, Digest]


def measured(gathered: Gathered, warn: Callable[[str], object]) -> list[Measured]:
    """The runs that have readings, in the experiment's order."""
    found = [Measured(run, digests(run.found.path, warn)) for run in gathered.runs if run.found]
    return [each for each in found if each.readings]


def pictured(gathered: Gathered, noise: Sequence[Measured]) -> bool:
    """Whether the experiment's figure is one of noise, and there is some."""
    return gathered.experiment.report.form == "noise" and bool(noise)


def draw(gathered: Gathered, noise: Sequence[Measured], kind: str) -> bytes:
    """The figure of the first run's noise, as a "png" or "pdf"."""
    shown = {f"epoch {epoch}": each for epoch, each in spread(noise[0].readings).items()}
    return rendered(shown, gathered.experiment.report.law_size, kind)


def notes(gathered: Gathered, noise: Sequence[Measured]) -> list[str]:
    """Whose noise the figure shows, or why it shows none."""
    if gathered.experiment.report.form != "noise":
        return []
    if not noise:
        return [
            "No run has recorded its noise, so the figure shows training curves; [meter] every = … in the recipe "
            "records it."
        ]
    first = noise[0]
    epochs = list(spread(first.readings))
    words = f"epoch {epochs[0]}"
    if len(epochs) > 1:
        words = f"epochs {', '.join(map(str, epochs[:-1]))} and {epochs[-1]}"
    return [f"The figure shows the noise of {first.run.point.name} after {words}."]
