"""Published normalizations as functions for `flex_norm`, and each as it is usually written in PyTorch.

The functions are those of docs/guides/any-normalization.md.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ghostnoise.flex import flex_norm
from ghostnoise.tables import Affine, Moments, ghost_batches, mix, normalize, over_channels, whole_batch

GROUPS, GHOST_SIZE = 8, 32


def instance_norm(m: Moments, weight: Tensor, bias: Tensor) -> Affine:
    """Normalize each channel of each sample with its own moments."""
    return normalize(m).then(weight, bias)


def layer_norm(m: Moments, weight: Tensor, bias: Tensor) -> Affine:
    """Normalize each sample with the moments of all channels and positions."""
    return normalize(over_channels(m)).then(weight, bias)


def group_norm(m: Moments, weight: Tensor, bias: Tensor) -> Affine:
    """Normalize each sample with the moments of groups of channels."""
    return normalize(over_channels(m, groups=8)).then(weight, bias)


def batch_norm(m: Moments, weight: Tensor, bias: Tensor) -> Affine:
    """Normalize with the moments of the batch; with a mask, of its valid positions."""
    return normalize(whole_batch(m)).then(weight, bias)


def ghost_batch_norm(m: Moments, weight: Tensor, bias: Tensor) -> Affine:
    """Normalize each sample with the moments of its ghost batch."""
    return normalize(ghost_batches(m, 32)).then(weight, bias)


def filter_response_norm(m: Moments, weight: Tensor, bias: Tensor) -> Affine:
    """Divide by the root mean square of each channel of each sample."""
    zero = torch.zeros_like(m.mean)
    return Affine(zero, (m.mean.square() + m.var + 1e-6).rsqrt(), zero).then(weight, bias)


def batch_instance_norm(m: Moments, weight: Tensor, bias: Tensor, gate: Tensor) -> Affine:
    """Mix the output of batch norm, with the weight `gate` of the channel, with that of instance norm."""
    batch, own = normalize(whole_batch(m)), normalize(m)
    scale = gate * batch.scale + (1 - gate) * own.scale
    shift = (1 - gate) * own.scale * (batch.center - own.center)
    return Affine(batch.center, scale, shift).then(weight, bias)


def switchable_norm(m: Moments, weight: Tensor, bias: Tensor, mean_logits: Tensor, var_logits: Tensor) -> Affine:
    """Normalize with weighted means and variances of instance, layer and batch norm."""
    pools = m, over_channels(m), whole_batch(m)
    mean = sum(share * pool.mean for share, pool in zip(mean_logits.softmax(0), pools, strict=True))
    var = sum(share * pool.var for share, pool in zip(var_logits.softmax(0), pools, strict=True))
    return normalize(Moments(mean, var)).then(weight, bias)


def weighted_batch_norm(m: Moments, weight: Tensor, bias: Tensor, sample_weights: Tensor) -> Affine:
    """Normalize with the moments of the batch, to which samples contribute by their weights."""
    shares = (sample_weights / sample_weights.sum())[:, None]
    mean = (shares * m.mean).sum(0)
    var = (shares * (m.var + (m.mean - mean).square())).sum(0)
    return normalize(Moments(mean[None], var[None])).then(weight, bias)


def batch_renorm(m: Moments, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor) -> Affine:
    """Normalize with the moments of the batch, and correct towards the running statistics."""
    stats, std = whole_batch(m), (running_var + 1e-5).sqrt()
    r = ((stats.var.detach() + 1e-5).sqrt() / std).clamp(1 / 3, 3)
    d = ((stats.mean.detach() - running_mean) / std).clamp(-5, 5)
    return normalize(stats).then(r, d).then(weight, bias)


def eval_norm(m: Moments, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor) -> Affine:
    """Normalize with the running statistics, to which each sample contributes with the weight 1/32."""
    return normalize(mix(Moments(running_mean, running_var), m, 1 / 32)).then(weight, bias)


def mix_style(partners: Tensor, shares: Tensor, m: Moments, weight: Tensor, bias: Tensor) -> Affine:
    """Mix the style of each sample with that of its partner, as constants."""
    mean, std = m.mean.detach(), (m.var.detach() * (m.n / (m.n - 1)) + 1e-6).sqrt()
    own = shares[:, None]
    mixed_mean = own * mean + (1 - own) * mean[partners]
    mixed_std = own * std + (1 - own) * std[partners]
    return Affine(mean, mixed_std / std, mixed_mean).then(weight, bias)


def adaptive_instance_norm(partners: Tensor, m: Moments, weight: Tensor, bias: Tensor) -> Affine:
    """Give each sample the mean and standard deviation of its partner."""
    std = (m.var * (m.n / (m.n - 1)) + 1e-5).sqrt()
    return Affine(m.mean, std[partners] / std, m.mean[partners]).then(weight, bias)


# The same as they are usually written.


def _affine(y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return y * weight[:, None, None] + bias[:, None, None]


def _channels(table: Tensor) -> Tensor:
    return table[:, None, None]


def plain_batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Call PyTorch's batch norm."""
    return F.batch_norm(x, None, None, weight, bias, training=True)


def plain_ghost_batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Call PyTorch's batch norm for each ghost batch."""
    return torch.cat([plain_batch_norm(ghost, weight, bias) for ghost in x.split(GHOST_SIZE)])


def plain_filter_response_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Divide by the root mean square over positions."""
    return _affine(x * torch.rsqrt(x.square().mean((2, 3), keepdim=True) + 1e-6), weight, bias)


def plain_batch_instance_norm(x: Tensor, weight: Tensor, bias: Tensor, gate: Tensor) -> Tensor:
    """Mix the outputs of PyTorch's batch norm and instance norm."""
    batch, own = F.batch_norm(x, None, None, training=True), F.instance_norm(x)
    gate = _channels(gate)
    return _affine(gate * batch + (1 - gate) * own, weight, bias)


def plain_switchable_norm(
    x: Tensor, weight: Tensor, bias: Tensor, mean_logits: Tensor, var_logits: Tensor
) -> Tensor:  # fmt: skip
    """Compute the moments of instances, and those of layers and of the batch from their first two powers."""
    var_in, mean_in = torch.var_mean(x, (2, 3), correction=0, keepdim=True)
    square = var_in + mean_in.square()
    mean_ln, mean_bn = mean_in.mean(1, keepdim=True), mean_in.mean(0, keepdim=True)
    var_ln = square.mean(1, keepdim=True) - mean_ln.square()
    var_bn = square.mean(0, keepdim=True) - mean_bn.square()
    means, variances = mean_logits.softmax(0), var_logits.softmax(0)
    mean = means[0] * mean_in + means[1] * mean_ln + means[2] * mean_bn
    var = variances[0] * var_in + variances[1] * var_ln + variances[2] * var_bn
    return _affine((x - mean) / torch.sqrt(var + 1e-5), weight, bias)


def plain_weighted_batch_norm(x: Tensor, weight: Tensor, bias: Tensor, sample_weights: Tensor) -> Tensor:
    """Weigh the values in sums over batch and positions."""
    shares = (sample_weights / sample_weights.sum())[:, None, None, None] / x[0, 0].numel()
    mean = (shares * x).sum((0, 2, 3), keepdim=True)
    var = (shares * (x - mean).square()).sum((0, 2, 3), keepdim=True)
    return _affine((x - mean) / torch.sqrt(var + 1e-5), weight, bias)


def plain_batch_renorm(
    x: Tensor, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor
) -> Tensor:  # fmt: skip
    """Correct the normalized batch."""
    var, mean = torch.var_mean(x, (0, 2, 3), correction=0)
    own, std = torch.sqrt(var + 1e-5), torch.sqrt(running_var + 1e-5)
    r = (own.detach() / std).clamp(1 / 3, 3)
    d = ((mean.detach() - running_mean) / std).clamp(-5, 5)
    y = (x - _channels(mean)) / _channels(own) * _channels(r) + _channels(d)
    return _affine(y, weight, bias)


def plain_eval_norm(
    x: Tensor, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor
) -> Tensor:  # fmt: skip
    """Mix the moments of each sample into the running statistics."""
    own_var, own_mean = torch.var_mean(x, (2, 3), correction=0, keepdim=True)
    share, known_mean, known_var = 1 / 32, _channels(running_mean), _channels(running_var)
    mean = (1 - share) * known_mean + share * own_mean
    var = (1 - share) * known_var + share * own_var + share * (1 - share) * (own_mean - known_mean).square()
    return _affine((x - mean) / torch.sqrt(var + 1e-5), weight, bias)


def plain_mix_style(x: Tensor, weight: Tensor, bias: Tensor, partners: Tensor, shares: Tensor) -> Tensor:
    """Normalize each sample, and give it the mixed style."""
    var, mean = torch.var_mean(x, (2, 3), keepdim=True)
    mean, std = mean.detach(), torch.sqrt(var + 1e-6).detach()
    own = shares[:, None, None, None]
    mixed_mean, mixed_std = (own * table + (1 - own) * table[partners] for table in (mean, std))
    return _affine((x - mean) / std * mixed_std + mixed_mean, weight, bias)


def plain_adaptive_instance_norm(x: Tensor, weight: Tensor, bias: Tensor, partners: Tensor) -> Tensor:
    """Normalize each sample, and give it the style of its partner."""
    var, mean = torch.var_mean(x, (2, 3), keepdim=True)
    std = torch.sqrt(var + 1e-5)
    return _affine((x - mean) / std * std[partners] + mean[partners], weight, bias)


def plain_masked_batch_norm(x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """Sum over valid positions, and set all others to 0."""
    valid, count = mask[:, None], mask.sum()
    mean = (x * valid).sum((0, 2, 3), keepdim=True) / count
    var = ((x - mean).square() * valid).sum((0, 2, 3), keepdim=True) / count
    return _affine((x - mean) / torch.sqrt(var + 1e-5), weight, bias) * valid


class Entry(NamedTuple):
    """A normalization: its function, how it is usually written, and a name of that.

    `parameters(x)` are the tensors that both take after weight and bias. `constants(x)` come first in the function and
    last in the usual form, and `mask(x)` is the mask of `flex_norm`.
    """

    decide: Callable[..., Affine]
    counterpart: str
    usual: Callable[..., Tensor]
    parameters: Callable[[Tensor], list[Tensor]] = lambda x: []
    constants: Callable[[Tensor], list[Tensor]] = lambda x: []
    mask: Callable[[Tensor], Tensor] | None = None


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(2)


def _gate(x: Tensor) -> list[Tensor]:
    return [torch.rand(x.shape[1], generator=_generator()).to(x.device)]


def _logits(x: Tensor) -> list[Tensor]:
    return [each.to(x.device) for each in torch.randn(2, 3, generator=_generator())]


def _sample_weights(x: Tensor) -> list[Tensor]:
    return [(0.1 + torch.rand(x.shape[0], generator=_generator())).to(x.device)]


def _running(x: Tensor) -> list[Tensor]:
    return [torch.full((x.shape[1],), value, device=x.device) for value in (0.8, 3.5)]


def _partners(x: Tensor) -> list[Tensor]:
    return [torch.randperm(x.shape[0], generator=_generator()).to(x.device)]


def _mixture(x: Tensor) -> list[Tensor]:
    return [*_partners(x), torch.rand(x.shape[0], generator=_generator()).to(x.device)]


def _valid(x: Tensor) -> Tensor:
    across = torch.arange(x.shape[3], device=x.device) < torch.arange(x.shape[0], device=x.device)[:, None] % 7 + 1
    return across[:, None].expand(-1, x.shape[2], -1)


GALLERY: dict[str, Entry] = {
    "instance norm": Entry(
        instance_norm, "F.instance_norm", lambda x, weight, bias: F.instance_norm(x, weight=weight, bias=bias)
    ),
    "layer norm": Entry(layer_norm, "F.group_norm", lambda x, weight, bias: F.group_norm(x, 1, weight, bias)),
    "group norm": Entry(group_norm, "F.group_norm", lambda x, weight, bias: F.group_norm(x, GROUPS, weight, bias)),
    "ghost batch norm": Entry(ghost_batch_norm, "F.batch_norm per ghost batch", plain_ghost_batch_norm),
    "filter response norm": Entry(filter_response_norm, "plain PyTorch", plain_filter_response_norm),
    "batch-instance norm": Entry(
        batch_instance_norm, "F.batch_norm and F.instance_norm", plain_batch_instance_norm, _gate
    ),
    "switchable norm": Entry(switchable_norm, "plain PyTorch", plain_switchable_norm, _logits),
    "weighted batch norm": Entry(weighted_batch_norm, "plain PyTorch", plain_weighted_batch_norm, _sample_weights),
    "batch renorm": Entry(batch_renorm, "plain PyTorch", plain_batch_renorm, _running),
    "EvalNorm": Entry(eval_norm, "plain PyTorch", plain_eval_norm, _running),
    "MixStyle": Entry(mix_style, "plain PyTorch", plain_mix_style, constants=_mixture),
    "AdaIN": Entry(adaptive_instance_norm, "plain PyTorch", plain_adaptive_instance_norm, constants=_partners),
    "masked batch norm": Entry(
        batch_norm, "plain PyTorch", plain_masked_batch_norm, mask=_valid
    ),
}  # fmt: skip


class Layer(nn.Module):
    """An entry with weight and bias, by `flex_norm` or as it is usually written."""

    def __init__(self, entry: Entry, x: Tensor, usual: bool) -> None:
        super().__init__()
        channels = x.shape[1]
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        given = [entry.parameters(x), entry.constants(x)]
        more, constants = ([each.to(x.dtype) if each.is_floating_point() else each for each in part] for part in given)
        mask = None if entry.mask is None else entry.mask(x)
        run: Any = entry.usual
        if usual:
            self.run = lambda x: run(x, self.weight, self.bias, *more, *constants, *([] if mask is None else [mask]))
        else:
            decide = partial(entry.decide, *constants) if constants else entry.decide
            self.run = lambda x: flex_norm(x, decide, self.weight, self.bias, *more, mask=mask)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize."""
        y: Tensor = self.run(x)
        return y
