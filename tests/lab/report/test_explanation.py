"""The picture that explains ghost noise, and the file in the documentation."""

from pathlib import Path

import torch

from ghostnoise import functional
from ghostnoise.lab.report import explanation

PICTURE = Path(__file__).parents[3] / "docs" / "ghost-noise.svg"


def test_the_file_is_up_to_date():
    assert explanation.svg() == explanation.svg() == PICTURE.read_bytes(), (
        "run python -m ghostnoise.lab.report.explanation docs/ghost-noise.svg"
    )


def contributing(method):
    """Return which samples change the shift and scale of each sample, found by changing one sample at a time."""
    size = {} if method == "batch_norm" else {"ghost_size": explanation.GHOST_SIZE}
    x = torch.randn(explanation.SAMPLES, 1, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def coefficients(x):
        """Two positions of every sample have fixed values, whose outputs determine the shift and scale."""
        probe = torch.cat([x, x.new_tensor([0.0, 1.0]).expand(len(x), 1, 2)], 2)
        function = getattr(functional, method)
        return function(probe, None, None, training=True, **size)[:, 0, -2:]

    before = coefficients(x)
    changed = []
    for sample in range(explanation.SAMPLES):
        other = x.clone()
        other[sample] += 1
        changed.append((coefficients(other) - before).abs().amax(1) > 1e-9)
    return torch.stack(changed, 1).int().tolist()


def test_the_matrices_are_those_of_the_methods():
    for short, method in {"bn": "batch_norm", "gbn": "ghost_batch_norm", "xbn": "exclusive_batch_norm"}.items():
        assert explanation.weights(short) == contributing(method), method


def test_ghost_noise_is_drawn_with_replacement():
    rows = explanation.weights("gni")
    assert {sum(row) for row in rows} == {explanation.GHOST_SIZE}
    assert max(count for row in rows for count in row) == 2, "the legend has no more"
