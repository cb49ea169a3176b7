"""Every method with its options, as a function of the library and as a naive float64 loop, and their comparison."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ghostnoise import functional
from ghostnoise.laws import Law
from support import reference
from support.closeness import assert_close
from support.inputs import Case


@dataclass(frozen=True)
class Variant:
    """A method with some options.

    `ours(case)` returns the keywords of `function`, and `theirs(case)` those of `naive`. `population(samples, case)`
    returns the moments that the running statistics are updated towards; None for noise on its own.
    """

    function: Callable[..., Tensor]
    naive: Callable[..., Tensor]
    population: Callable | None = None
    ours: Callable[[Case], dict] = lambda case: {}
    theirs: Callable[[Case], dict] = lambda case: {}
    least: dict[str, int] | None = None
    """The arguments of `cases` for the smallest batches that the method accepts."""

    def run(self, case: Case, x, weight=None, bias=None, buffers=(None, None), **more):
        """Run the method of the library in training mode."""
        more = self.ours(case) | {"channel_dim": case.channel_dim} | more
        if self.population is None:
            return self.function(x, case.ghost_size, **more)
        return self.function(x, *buffers, weight, bias, True, **more)

    def expected(self, case: Case, x, weight=None, bias=None, mask=None):
        """Run the naive loop for the same input."""
        affine = {} if self.population is None else {"weight": weight, "bias": bias}
        samples = self.naive(reference.fold(x, case.channel_dim, mask), **affine, **self.theirs(case))
        return reference.unfold(samples, x, case.channel_dim, mask)


def running(case: Case) -> dict:
    """Running statistics that are not trivial, as keywords."""
    return {"running_mean": case.vector(3).double(), "running_var": case.vector(4).double().square() + 0.1}


def whole(samples, case):
    return reference.statistics(samples)


def unbiased(samples, case):
    (mean, var), n = reference.statistics(samples), sum(sample.shape[1] for sample in samples)
    return mean, var * n / (n - 1)


def ghosts(samples, case):
    """The average over values of the statistics of their ghost batches."""
    size, count, parts = len(samples), sum(sample.shape[1] for sample in samples), []
    for k, sample in enumerate(samples):
        if sample.shape[1]:
            members = [samples[n] for n in reference.ghost_batch_of(k, size, case.ghost_size)]
            parts.append([table * sample.shape[1] / count for table in reference.statistics(members)])
    return tuple(sum(tables) for tables in zip(*parts, strict=True))


def shuffled_average(samples, case):
    """The average over values of the statistics of their ghost batches in the shuffled batch."""
    parts = reference.shuffled_ghosts(case.permutation(), case.ghost_size)
    count = sum(sample.shape[1] for sample in samples)
    tables = [
        [table * sample.shape[1] / count for table in reference.statistics([samples[n] for n in part])]
        for sample, part in zip(samples, parts, strict=True)
        if sample.shape[1]
    ]
    return tuple(sum(each) for each in zip(*tables, strict=True))


def sized(case):
    return {"ghost_size": case.ghost_size}


def drawn(**options):
    return lambda case: {"indices": case.indices(), **options}


def shuffled(**options):
    return lambda case: {"indices": case.permutation(), "draw": "partition", **options}


def partition(**options):
    return lambda case: {"indices": reference.partition(case.permutation(), case.ghost_size), **options}


def law(**options):
    def make(case):
        of = Law(case.ghost_size, options["law"], options["dof"])
        draws = of.draw((case.batch_size, case.channels), case.spatial, torch.device("cpu"), case.generator(9))
        return sized(case) | {"draws": draws} | options

    return make


def without_size(make):
    """The ghost size of noise on its own is positional."""
    return lambda case: {name: value for name, value in make(case).items() if name != "ghost_size"}


def both(*makers):
    return lambda case: {name: value for make in makers for name, value in make(case).items()}


BOUNDS = {"r_max": 1.5, "d_max": 0.8}
OTHERS = {"least_batch": 3, "least_values": 3, "least_ghost": 3}
PAIRS = {"least_batch": 2, "least_ghost": 2}
F, R = functional, reference
XBN = F.exclusive_batch_norm, R.exclusive_batch_norm, whole
GNI = F.ghost_noise_batch_norm, R.ghost_noise_batch_norm, unbiased
XBN_GNI = F.ghost_noise_batch_norm, R.ghost_noise_batch_norm, whole
AGNI = F.analytical_ghost_noise_batch_norm, R.analytical_noise_batch_norm, unbiased
BATCH = lambda case: {"ghost_size": case.ghost_size, "running_var_from": "batch"}  # noqa: E731
FLOOR, CLAMP = both(sized, lambda case: {"min_std": 1.1}), both(sized, lambda case: {"clamp_output": 0.9})
BOTH = both(FLOOR, CLAMP)
SHARE, WHOLE_SHARE = both(sized, lambda case: {"self_weight": 0.2}), lambda case: {"self_weight": 0.3}
EXCLUSIVE = {"normalizer": "exclusive"}


def renamed(make):
    return lambda case: {"clamp" if name == "clamp_output" else name: value for name, value in make(case).items()}


VARIANTS = {
    "bn": Variant(F.batch_norm, R.batch_norm, unbiased),
    "ptbn": Variant(F.prediction_time_batch_norm, R.batch_norm, unbiased),
    "mbn": Variant(F.micro_batch_norm, R.batch_norm, unbiased),
    "gbn": Variant(F.ghost_batch_norm, R.ghost_batch_norm, ghosts, sized, sized),
    "gbn, batch variance": Variant(F.ghost_batch_norm, R.ghost_batch_norm, unbiased, BATCH, sized),
    "sgbn": Variant(
        F.shuffled_ghost_batch_norm, R.shuffled_ghost_batch_norm, shuffled_average,
        both(sized, lambda case: {"indices": case.permutation()}),
        lambda case: {"indices": reference.shuffled_ghosts(case.permutation(), case.ghost_size)},
    ),
    "en": Variant(F.eval_norm, R.ghost_batch_norm, ghosts, sized, sized),
    "xbn": Variant(*XBN, least=OTHERS),
    "xbn of ghost batches": Variant(*XBN, sized, sized, OTHERS),
    "xbn with a floor": Variant(*XBN, FLOOR, FLOOR, OTHERS),
    "xbn with a floor, clamped": Variant(*XBN, BOTH, renamed(BOTH), OTHERS),
    "xbn with a self-weight": Variant(
        F.exclusive_batch_norm, R.self_weighted_batch_norm, whole, SHARE, SHARE, PAIRS
    ),
    "xbn with a self-weight, whole batch": Variant(
        F.exclusive_batch_norm, R.self_weighted_batch_norm, whole, WHOLE_SHARE,
        both(WHOLE_SHARE, lambda case: {"ghost_size": None}), PAIRS,
    ),
    "brn": Variant(
        F.batch_renorm, R.batch_renorm, unbiased, lambda case: BOUNDS | {"warmup_steps": 0, "transition_steps": 0},
        lambda case: BOUNDS | running(case),
    ),
    "gni": Variant(*GNI, both(sized, drawn()), drawn()),
    "gni-shift": Variant(*GNI, both(sized, drawn(components="shift")), drawn(components="shift")),
    "gni-scale": Variant(*GNI, both(sized, drawn(components="scale")), drawn(components="scale")),
    "gni, partition": Variant(*GNI, both(sized, shuffled()), partition()),
    "gni after xbn": Variant(*XBN_GNI, both(sized, drawn(**EXCLUSIVE)), drawn(**EXCLUSIVE), OTHERS),
    "gni after xbn, partition": Variant(
        *XBN_GNI, both(sized, shuffled(**EXCLUSIVE)), partition(**EXCLUSIVE), OTHERS
    ),
    **{
        f"agni-{name}, {dof}, {components}": Variant(
            *AGNI, *[law(law=name, dof=dof, components=components)] * 2
        )
        for name, dof, components in (("fc", "paper", "both"), ("fc", "exact", "scale"), ("conv", "paper", "shift"),
                                      ("conv", "exact", "both"))
    },
    "ghost noise": Variant(F.ghost_noise, R.ghost_noise, None, drawn(), drawn(), {"least_values": 1}),
    "ghost noise, shift": Variant(
        F.ghost_noise, R.ghost_noise, None, drawn(components="shift"), drawn(components="shift"), {"least_values": 1}
    ),
    "ghost noise, scale": Variant(
        F.ghost_noise, R.ghost_noise, None, drawn(components="scale"), drawn(components="scale"), {"least_values": 1}
    ),
    "ghost noise, partition": Variant(F.ghost_noise, R.ghost_noise, None, shuffled(), partition(), {"least_values": 1}),
    **{
        f"analytical noise, {name}, {dof}": Variant(
            F.analytical_ghost_noise, R.analytical_noise, None, without_size(law(law=name, dof=dof)),
            law(law=name, dof=dof), {"least_values": 1},
        )
        for name, dof in (("fc", "paper"), ("conv", "exact"))
    },
}  # fmt: skip
NORMS = {name: variant for name, variant in VARIANTS.items() if variant.population is not None}
# Those whose noise, or correction, is not a constant of the input: gradcheck would move it.
DETERMINISTIC = [name for name in NORMS if name.startswith(("bn", "ptbn", "mbn", "gbn", "sgbn", "en", "xbn"))]


def assert_equals_naive(variant: Variant, case: Case, mask: Tensor | None = None) -> None:
    """Compare the output, the gradient of every input, and the running statistics with those of the naive loop."""
    x, dy = case.tensor().requires_grad_(), case.tensor(offset=5)
    inputs, buffers = [x], (None, None)
    if variant.population is not None:
        inputs += [case.vector(1).requires_grad_(), case.vector(2).requires_grad_()]
        buffers = running(case).values()
    given = {} if mask is None else {"mask": mask}
    if mask is not None:  # what is in the padding must not matter
        inputs[0] = x = x.detach().where(mask.unsqueeze(case.channel_dim) if x.ndim > 2 else mask[:, None], 99.0)
        x.requires_grad_()

    y = variant.run(case, *inputs, buffers=buffers, **given)
    assert y.dtype == x.dtype
    assert mask is not None or y.stride() == torch.empty_like(x).stride()
    gradients = torch.autograd.grad(y, inputs, dy)

    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]

    def expectation():
        output = variant.expected(case, *exact, mask=mask)
        return output, torch.autograd.grad(output, exact, dy.double())

    expected, wanted = expectation()
    with reference.constant_statistics():
        _, terms = expectation()
    assert_close(y, expected)
    for actual, gradient, term in zip(gradients, wanted, terms, strict=True):
        summed = 0.0 if gradient.ndim > 1 else dy.abs().max()  # the gradient of a parameter is a sum over the batch
        assert_close(actual, gradient, "gradient", magnitude=max(term.abs().max(), summed))
    if variant.population is not None:
        stats = variant.population(reference.fold(exact[0].detach(), case.channel_dim, mask), case)
        for buffer, before, stat in zip(buffers, running(case).values(), stats, strict=True):
            tolerance = 1e-12 if x.dtype == torch.float64 else 1e-6
            torch.testing.assert_close(buffer, 0.9 * before + 0.1 * stat, rtol=tolerance, atol=tolerance)
