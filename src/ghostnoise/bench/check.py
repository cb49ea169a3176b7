"""`ghostnoise check`: whether operators and layers compute the right numbers on this machine, and how fast."""

import contextlib
import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ghostnoise
from ghostnoise import doctor
from ghostnoise.bench import contenders
from ghostnoise.bench.comparison import Comparison, compare
from ghostnoise.bench.layers import synchronizer
from ghostnoise.bench.rows import Row
from ghostnoise.bench.settings import plain
from ghostnoise.bench.timing import Length, interleave

SHAPES = ((128, 64, 32, 32), (256, 256, 8, 8))
QUICK = ((16, 8, 4, 4),)
TIMED = ("BN+GNI-32", "GBN-32", "XBN-32")
BASELINE = "nn.BatchNorm2d"
MOST_FAILURES = 20  # that the report lists; the JSON file has all

Step = Callable[[], object]


@dataclass
class Found:
    """All findings of a check."""

    environment: dict[str, str]
    comparisons: list[Comparison] = field(default_factory=list)
    times: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def failures(self) -> list[Comparison]:
        """Return the comparisons that failed."""
        return [each for each in self.comparisons if each.failure]


def check(device: torch.device, seconds: float, compiles: bool, quick: bool, log: Callable[[str], object]) -> Found:
    """Compare operators and layers with float64, and time layers and a training step; each for `seconds`."""
    found = Found(environment(device), left_out=plain(device))
    log("comparing operators and layers with float64")
    found.comparisons += compare(device)
    if device.type == "cuda":
        found.comparisons.append(replays_draw_anew(device))
    modes = ["eager", *(["compiled"] if compiles else []), *(["CUDA graph"] if device.type == "cuda" else [])]
    length = Length(seconds, 1 if quick else None, warmup=1)
    for shape in QUICK if quick else SHAPES:
        for form in ("contiguous", "channels_last"):
            for mode in modes:
                row = Row(shape, form)
                log(f"timing layers, {row.name}, {mode}")
                _time(found, row.name, mode, _layers(row, device), length, device)
    for mode in modes:
        log(f"timing a training step of ResNet-20, {mode}")
        try:
            makers = _networks(device, quick)
        except ImportError as error:
            found.left_out.append(f"the step of ResNet-20: the package {error.name} is not installed")
            break
        _time(found, "ResNet-20 step", mode, makers, length, device)
    return found


def environment(device: torch.device) -> dict[str, str]:
    """Return the versions and the names of the processors."""
    known = {
        "ghostnoise": ghostnoise.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "system": platform.platform(),
        "processor": doctor.cpu()[0],
        "threads": str(torch.get_num_threads()),
        "device": f"{device} ({doctor.device_name(device)})",
        "operators": doctor.operators(device.type),
    }
    with contextlib.suppress(ImportError):
        import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]

        known["triton"] = triton.__version__
    if torch.version.cuda or torch.version.hip:
        known["CUDA"] = str(torch.version.cuda or f"ROCm {torch.version.hip}")
    return known


def replays_draw_anew(device: torch.device) -> Comparison:
    """Capture a layer with ghost noise in a CUDA graph, and check that each replay has other noise."""
    about = "GNI in a CUDA graph", "layer", "contiguous", "float32"
    try:
        layer: Any = ghostnoise.GhostNoiseBatchNorm2d(8, ghost_size=4).to(device)
        x = torch.randn(16, 8, 4, 4, device=device)
        kept: list[Any] = []
        replay = graphed(lambda: kept.append(layer(x)))
        before = layer.num_batches_tracked.item()
        replay()
        first = kept[-1].clone()
        replay()
        counted = layer.num_batches_tracked.item() - before
        failure = "two replays have the same noise" if torch.equal(first, kept[-1]) else ""
        failure = failure or ("" if counted == 2 else f"num_batches_tracked rose by {counted} in two replays")
    except Exception as error:  # the rest of the check is still of use
        return Comparison(*about, None, f"{type(error).__name__}: {error}")
    return Comparison(*about, None, failure)


def graphed(step: Step) -> Step:
    """Capture a step in a CUDA graph, and return its replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step()

    def replay() -> object:
        graph.replay()
        return kept  # whose memory belongs to the graph

    return replay


def _time(
    found: Found, row: str, mode: str, makers: dict[str, Callable[[str], Step]], length: Length, device: torch.device
) -> None:
    """Time the steps in one mode; those that cannot run are left out, with the reason."""
    steps: dict[str, Step] = {}
    for name, make in makers.items():
        try:
            step = make(mode)
            step()  # compiles
            steps[name] = step
        except Exception as error:  # no compiler on this machine, or not enough memory
            line = (str(error).strip().splitlines() or [""])[0]
            found.left_out.append(f"{name}, {row}, {mode}: {type(error).__name__}: {line[:200]}")
    if BASELINE not in steps:
        return
    timings = interleave(steps, length, synchronize=synchronizer(device))
    for name, timing in timings.items():
        ratio = timing.p50 / timings[BASELINE].p50
        found.times.append({"row": row, "mode": mode, "name": name, "ratio": ratio, **asdict(timing)})


def _layers(row: Row, device: torch.device) -> dict[str, Callable[[str], Step]]:
    x, dy = row.draw(device)
    ours = {name: layer for name, layer in contenders.normalizers(row).items() if name in TIMED}
    layers: dict[str, nn.Module] = {BASELINE: nn.BatchNorm2d(row.channels), **ours}

    def maker(layer: nn.Module) -> Callable[[str], Step]:
        def make(mode: str) -> Step:
            run: Any = torch.compile(layer, fullgraph=True) if mode == "compiled" else layer
            wanted = [x, *layer.parameters()]
            step: Step = lambda: torch.autograd.grad(run(x), wanted, dy)  # noqa: E731
            return graphed(step) if mode == "CUDA graph" else step

        return make

    return {name: maker(layer.to(device)) for name, layer in layers.items()}


def _networks(device: torch.device, quick: bool) -> dict[str, Callable[[str], Step]]:
    from ghostnoise.bench.net import CLASSES, METHODS, training_step
    from ghostnoise.lab import models
    from ghostnoise.lab.config.methods import NormSettings
    from ghostnoise.lab.config.schema import ModelSettings

    shape = (16, 3, 8, 8) if quick else (128, 3, 32, 32)
    settings = ModelSettings(name="resnet20", width=8 if quick else None)
    images, labels = torch.randn(shape, device=device), torch.randint(CLASSES, shape[:1], device=device)

    def maker(norm: NormSettings) -> Callable[[str], Step]:
        def make(mode: str) -> Step:
            model: Any = models.build(settings, norm, shape[1:], CLASSES).to(device)
            model = torch.compile(model) if mode == "compiled" else model
            step = training_step(model, images, labels)
            return graphed(step) if mode == "CUDA graph" else step

        return make

    methods = {BASELINE: NormSettings(method="bn"), "GNI-16": METHODS["GNI-16"]}
    return {name: maker(norm) for name, norm in methods.items()}


def save(found: Found, folder: Path) -> list[Path]:
    """Write the report as Markdown and as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    text, data = folder / "check.md", folder / "check.json"
    text.write_text(markdown(found) + "\n", encoding="utf-8")
    data.write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")
    return [text, data]


def markdown(found: Found) -> str:
    """Return the report, failures first."""
    failures, total = found.failures, len(found.comparisons)
    verdict = f"{len(failures)} of {total} comparisons failed" if failures else f"all {total} comparisons passed"
    lines = [f"# ghostnoise check: {verdict}", ""]
    if failures:
        lines += _table(["compared", "level", "layout", "dtype", "failure"], [
            [each.name, each.level, each.layout, each.dtype, each.failure] for each in failures[:MOST_FAILURES]
        ])  # fmt: skip
        if len(failures) > MOST_FAILURES:
            lines.append(f"{len(failures) - MOST_FAILURES} more failures are in check.json.\n")
    lines += _table(["machine", ""], [[key, value] for key, value in found.environment.items()])
    groups: dict[tuple[str, str], list[Comparison]] = {}
    for each in found.comparisons:
        groups.setdefault((each.level, each.dtype), []).append(each)
    lines += ["Comparisons with float64; errors are in units of the bound of the dtype.", ""]
    lines += _table(["level", "dtype", "comparisons", "failed", "largest error"], [
        [*key, str(len(group)), str(sum(bool(each.failure) for each in group)),
         f"{max((each.error for each in group if each.error is not None), default=0.0):.2f}"]
        for key, group in groups.items()
    ])  # fmt: skip
    lines += [f"Medians in milliseconds, forward and backward; the ratio is to {BASELINE} in the same mode.", ""]
    lines += _table(["input", "mode", "", "ms", "ratio", "rounds"], [
        [each["row"], each["mode"], each["name"], f"{each['p50']:.3f}", f"{each['ratio']:.2f}", str(each["n"])]
        for each in found.times
    ])  # fmt: skip
    if found.left_out:
        lines += ["Left out:", "", *(f"- {line}" for line in found.left_out), ""]
    return "\n".join(lines).rstrip()


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in [head, ["---"] * len(head), *rows]]
    return [*(f"| {' | '.join(row)} |" for row in cells), ""]
