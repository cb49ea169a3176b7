"""Where the channels of a module's output are, as far as its type tells."""

from collections.abc import Sequence

from torch import nn
from torch.nn.utils import parametrize

from ghostnoise.conversion.selection import Found, listing
from ghostnoise.layers.batch_norm import BatchNorm

LAST = {nn.LayerNorm, nn.RMSNorm, nn.Linear}
FIRST = {
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm, nn.InstanceNorm1d,
    nn.InstanceNorm2d, nn.InstanceNorm3d, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d,
    nn.ConvTranspose3d,
}  # fmt: skip
ACTIVATIONS = {
    nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.LogSigmoid,
    nn.Mish, nn.PReLU, nn.RReLU, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softshrink,
    nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.Threshold,
}  # fmt: skip


def is_activation(module: nn.Module) -> bool:
    """Its channels come first in images, and last in tokens."""
    return parametrize.type_before_parametrizations(module) in ACTIVATIONS


def channel_dims(hosts: Sequence[Found], given: int | None) -> list[int]:
    """The channel dimension of each module: the given one, or the one that is known for exactly its type."""
    known = [known_channel_dim(host.module) if given is None else given for host in hosts]
    unknown = [host for host, dim in zip(hosts, known, strict=True) if dim is None]
    if unknown:
        raise ValueError(
            f"channel_dim is not known for {listing(unknown, most=5)}: give channel_dim=1, or -1 where channels come "
            "last, as in tokens (B, T, C)"
        )
    return [dim for dim in known if dim is not None]


def known_channel_dim(module: nn.Module) -> int | None:
    """The channel dimension, if it is known for exactly the type of `module`."""
    kind = parametrize.type_before_parametrizations(module)
    if kind in LAST:
        return -1 if len(getattr(module, "normalized_shape", (1,))) == 1 else None
    return 1 if kind in FIRST or kind in ACTIVATIONS or issubclass(kind, BatchNorm) else None
