"""The tests that run in several processes: each compares its part with the whole batch in one process."""

import contextlib
import copy
import itertools
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ghostnoise
from ghostnoise import functional
from ghostnoise.engine import ranks as engine_ranks
from ghostnoise.laws import Law
from ghostnoise.tables import excluding_sample, mix, normalize, whole_batch
from support.closeness import assert_close
from support.models import convolutional, images
from support.ranks import BATCH, SPLITS, collectives, own_rows, values

CHANNELS, GHOST = 3, 5  # ghost batches of 5 and 7 samples, which no split of the batch agrees with
LENGTHS = torch.tensor([6, 5, 0, 3, 6, 2, 0, 0, 0, 4, 6, 3])
SHAPES = [(BATCH, CHANNELS), (BATCH, CHANNELS, 3, 2)]

# Each method as a function of x, its rows of the batch, parameters, buffers and ranks.


def norm(function, given=lambda x, rows: {}, **options):
    def call(x, rows, weight, bias, buffers, **ranks):
        mean, var, count = buffers
        more = {"num_batches_tracked": count, **options, **given(x, rows), **ranks}
        return function(x, mean, var, weight, bias, True, **more)

    return call


def noise(function, given):
    return lambda x, rows, weight, bias, buffers, **ranks: function(x, GHOST, **given(x, rows), **ranks)


def indices(x, rows):
    table = torch.randint(BATCH, (BATCH, GHOST), generator=torch.Generator().manual_seed(7))
    return {"indices": table[rows]}


def earlier(x, rows):
    history, mean = ghostnoise.History(4), values(4, CHANNELS, seed=9).float().double()
    history.add(ghostnoise.Moments(mean, torch.ones_like(mean), 5))
    return {"history": history}


def permutation(x, rows):
    return {"indices": torch.randperm(BATCH, generator=torch.Generator().manual_seed(7))}


def draws(law):
    def given(x, rows):
        made = Law(GHOST, law).draw((BATCH, CHANNELS), x.shape[2:].numel(), x.device, torch.Generator().manual_seed(7))
        return {"law": law, "draws": type(made)(*(table[rows] for table in made))}

    return given


CALLS = {
    "brn": norm(functional.batch_renorm, r_max=1.1, d_max=0.2, warmup_steps=1, transition_steps=2),
    "bn": norm(functional.batch_norm),
    "mbn": norm(functional.micro_batch_norm, earlier),
    "gbn": norm(functional.ghost_batch_norm, ghost_size=GHOST),
    "gbn, running_var_from": norm(functional.ghost_batch_norm, ghost_size=4, running_var_from="batch"),
    "sgbn": norm(functional.shuffled_ghost_batch_norm, permutation, ghost_size=GHOST),
    "xbn": norm(functional.exclusive_batch_norm),
    "xbn of ghost batches": norm(functional.exclusive_batch_norm, ghost_size=GHOST, min_std=0.9, momentum=None),
    "clamped xbn": norm(functional.exclusive_batch_norm, ghost_size=GHOST, clamp_output=1.0),
    "self-weighted xbn": norm(functional.exclusive_batch_norm, ghost_size=GHOST, self_weight=0.2),
    "en": norm(functional.eval_norm, ghost_size=GHOST),
    "gni": norm(functional.ghost_noise_batch_norm, indices, ghost_size=GHOST),
    "gni-scale": norm(functional.ghost_noise_batch_norm, indices, ghost_size=GHOST, components="scale"),
    "gni after xbn": norm(functional.ghost_noise_batch_norm, indices, ghost_size=GHOST, normalizer="exclusive"),
    "agni": norm(functional.analytical_ghost_noise_batch_norm, draws("fc"), ghost_size=GHOST),
    "agni-conv": norm(functional.analytical_ghost_noise_batch_norm, draws("conv"), ghost_size=GHOST),
    "noise": noise(functional.ghost_noise, indices),
    "analytical noise": noise(functional.analytical_ghost_noise, draws("fc")),
    "analytical noise, conv": noise(functional.analytical_ghost_noise, draws("conv")),
}


def masked(call):
    """Return a call with a mask of samples of different lengths, some of which are empty."""

    def run(x, rows, *given, **ranks):
        lengths = LENGTHS[rows]
        mask = lengths > 0 if x.ndim == 2 else torch.arange(6).view(3, 2) < lengths[:, None, None]
        return call(x, rows, *given, mask=mask, **ranks)

    return run


CALLS |= {
    f"masked {name}": masked(CALLS[name])
    for name in (
        "bn",
        "gbn",
        "mbn",
        "sgbn",
        "xbn",
        "clamped xbn",
        "gni",
        "gni after xbn",
        "agni-conv",
        "noise",
        "analytical noise",
    )
}


def masks(rank, count):
    """Without given draws, no rank draws an empty sample; a rank may be padded entirely, and not all of them."""
    x, mask = torch.full((200, 1, 2), float(rank + 1)), torch.zeros(200, 2, dtype=torch.bool)
    mask[:20] = rank == 0
    layer = ghostnoise.GhostNoise(1, components="shift", process_group="world")
    torch.testing.assert_close(layer(x, mask), x * mask.unsqueeze(1))  # the drawn samples are all those of rank 0
    norm = ghostnoise.BatchNorm1d(1, process_group="world")
    with ghostnoise.masked(mask):  # it may be that of a part that is padded entirely
        norm(x)
    torch.testing.assert_close(norm.running_mean, torch.tensor([0.1]))
    before = copy.deepcopy(norm.state_dict())
    with pytest.raises(ValueError, match="mask that is False everywhere"):
        norm(x, torch.zeros_like(mask))
    for key, value in norm.state_dict().items():
        assert torch.equal(value, before[key])


def masked_networks(rank, count):
    """A converted network in DistributedDataParallel, with the mask of its own rows, is that of the whole batch."""
    mask, data = torch.arange(6) < LENGTHS[:, None], values(BATCH, 2, 6)
    for split in SPLITS[count]:
        rows, uneven = own_rows(rank, split), len(set(split)) > 1
        networks = []
        for more in ({}, {"scope": "global", "uneven": uneven}):
            torch.manual_seed(0)
            layers = nn.Conv1d(2, CHANNELS, 1), nn.BatchNorm1d(CHANNELS), nn.ReLU(), nn.Conv1d(CHANNELS, 2, 1)
            networks.append(ghostnoise.convert(nn.Sequential(*layers).double(), "gbn", GHOST, **more))
        alone, model = networks[0], DistributedDataParallel(networks[1])
        with ghostnoise.masked(mask):
            alone(data).square().sum().backward()
        with ghostnoise.masked(mask[rows]):
            y = model(data[rows])
        (y.square().sum() * count).backward()
        for ours, theirs in zip(model.module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)
        for ours, theirs in zip(model.module.buffers(), alone.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs)


def results(call, shape, dtype, rows, exact=False, **ranks):
    """Output, gradients and buffers of a call on `rows` of a batch of values of `dtype`; in float64 if `exact`."""
    wide = torch.float64 if exact else dtype
    x = values(*shape).to(dtype)[rows].to(wide).requires_grad_()
    weight, bias = (values(CHANNELS, seed=seed).to(dtype).to(wide).requires_grad_() for seed in (1, 2))
    buffers = (torch.zeros(CHANNELS, dtype=wide), torch.ones(CHANNELS, dtype=wide), torch.tensor(2))
    y = call(x, rows, weight, bias, buffers, **ranks)
    y.backward(values(*shape, seed=3).to(dtype)[rows].to(wide))
    slopes = [torch.zeros_like(weight) if parameter.grad is None else parameter.grad for parameter in (weight, bias)]
    return y.detach(), x.grad, slopes, buffers


def methods(rank, count):
    """Every method, split, shape and dtype equals a single process with the whole batch."""
    cases = itertools.product(SPLITS[count], CALLS.items(), SHAPES, (torch.float64, torch.float32))
    for split, (name, call), shape, dtype in cases:
        try:
            compare(rank, split, call, shape, dtype)
        except Exception as error:
            raise AssertionError(f"{name}, split {split} of {shape}, {dtype}") from error


def compare(rank, split, call, shape, dtype):
    rows, uneven = own_rows(rank, split), len(set(split)) > 1
    y, dx, slopes, buffers = results(call, shape, dtype, rows, process_group="world", uneven=uneven)
    whole_y, whole_dx, whole_slopes, whole_buffers = results(call, shape, dtype, slice(None), exact=True)
    assert y.dtype == dx.dtype == dtype
    assert_close(y, whole_y[rows], magnitude=whole_y.abs().max().item())
    assert_close(dx, whole_dx[rows], "gradient", magnitude=whole_dx.abs().max().item())
    for slope, whole in zip(slopes, whole_slopes, strict=True):
        assert split[rank] or not slope.any()
        dist.all_reduce(slope)
        assert_close(slope, whole, "gradient", magnitude=values(*shape, seed=3).abs().sum(0).max().item())
    for buffer, whole in zip(buffers[:2], whole_buffers[:2], strict=True):
        assert_close(buffer, whole)
    assert buffers[2] == whole_buffers[2]


def communication(rank, count):
    """One collective forward and one backward, one more where sizes are exchanged, and none where none is needed."""
    x = values(4, CHANNELS, 2, seed=rank).requires_grad_()
    tables, gradients = ("gather", 2, 4, CHANNELS), ("reduce", 2, 4 * count, CHANNELS)
    norm = {"process_group": "world", "dtype": x.dtype}
    wanted = {
        ghostnoise.BatchNorm1d(CHANNELS, **norm): [tables, gradients],
        ghostnoise.BatchNorm1d(CHANNELS, **norm, uneven=True): [("gather", 3), tables, gradients],
        ghostnoise.GhostBatchNorm1d(CHANNELS, ghost_size=3, **norm): [tables, gradients],
        ghostnoise.GhostNoise(3, process_group="world"): [tables],
        ghostnoise.AnalyticalGhostNoise(3, process_group="world"): [tables],
        ghostnoise.GhostNoise(None, process_group="world"): [],
        ghostnoise.GhostNoiseBatchNorm1d(CHANNELS, ghost_size=3, dtype=x.dtype): [],
        ghostnoise.GhostBatchNorm1d(CHANNELS, ghost_size=3, **norm).eval(): [],
        ghostnoise.EvalNorm1d(CHANNELS, ghost_size=3, **norm).eval(): [],
    }
    for layer, expected in wanted.items():
        with collectives() as sent:
            layer(x).sum().backward()
        assert sent == expected, f"{layer}: {sent}"
    with collectives() as sent:
        next(iter(wanted))(x.detach()).sum().backward()
    assert sent == [tables], "an input that needs no gradient"


def flexible(rank, count):
    """`decide` gets the moments of all samples, and its tables may have a row for each of them, or one for all."""
    decides = {
        "whole": lambda m, weight, bias: normalize(whole_batch(m)).then(weight, bias),
        "excluding": lambda m, weight, bias: normalize(excluding_sample(m)).then(weight, bias),
        "both": lambda m, weight, bias: normalize(mix(whole_batch(m), m, 0.3)).then(weight.exp(), bias),
    }
    for decide, mask in itertools.product(decides.values(), (False, True)):

        def call(x, rows, weight, bias, buffers, process_group=None, uneven=False, decide=decide, mask=mask):
            more = {"process_group": process_group}
            if mask:
                more["mask"] = torch.arange(6).view(3, 2) < LENGTHS[rows][:, None, None]
            return ghostnoise.flex_norm(x, decide, weight, bias, **more)

        compare(rank, SPLITS[count][0], call, SHAPES[1], torch.float64)


def permutations(rank, count):
    """Ranks do not share a permutation: a layer that would have to draw one refuses."""
    layer, x = ghostnoise.ShuffledGhostBatchNorm1d(CHANNELS, ghost_size=2, process_group="world"), torch.randn(4, 3, 2)
    with pytest.raises(ValueError, match="process_group='world' without indices: ranks do not share a permutation"):
        layer(x)
    assert layer.eval()(x).isfinite().all()
    assert ghostnoise.ShuffledGhostBatchNorm1d(CHANNELS, ghost_size=2)(x).isfinite().all()


def copies(rank, count):
    """A layer with a process group can be copied and saved, and the copies have that group."""
    group, x = dist.new_group(list(range(count))), values(4, CHANNELS, seed=rank)
    for layer in (
        ghostnoise.GhostBatchNorm1d(CHANNELS, ghost_size=2, process_group=group, dtype=x.dtype),
        ghostnoise.convert(nn.Sequential(nn.SyncBatchNorm(CHANNELS, process_group=group, dtype=x.dtype)), "xbn", 4),
    ):
        y = layer(x)
        for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            torch.testing.assert_close(twin(x), y, rtol=0, atol=0)
            assert f"process_group={group.group_name!r}" in repr(twin)
    plain = ghostnoise.revert(copy.deepcopy(layer), to="nn")[0]
    assert type(plain) is nn.SyncBatchNorm
    assert plain.process_group is group
    assert ghostnoise.revert(layer)[0].process_group is group
    assert engine_ranks.resolve(group) is engine_ranks.resolve(group.group_name) is group


def subgroups(rank, count):
    """The first and the last rank share a batch; a rank between them is not in their group."""
    group = dist.new_group([0, count - 1])
    if rank not in (0, count - 1):
        with pytest.raises(ValueError, match="that contains this rank"):
            ghostnoise.BatchNorm1d(CHANNELS, process_group=group)
        return
    whole, rows = values(8, CHANNELS), slice(0, 4) if rank == 0 else slice(4, 8)
    expected = functional.ghost_batch_norm(whole, None, None, training=True, ghost_size=3)
    y = functional.ghost_batch_norm(whole[rows], None, None, training=True, ghost_size=3, process_group=group)
    torch.testing.assert_close(y, expected[rows])


def networks(rank, count):
    """A converted network in DistributedDataParallel trains as one process on the whole batch."""
    for split, synchronized in itertools.product(SPLITS[count], (False, True)):
        uneven, rows, data = len(set(split)) > 1, own_rows(rank, split), images(BATCH).double()
        for method in ({"method": "gbn", "ghost_size": GHOST}, {"method": "xbn"}, {"method": "bn"}):
            alone = ghostnoise.convert(convolutional(), **method).double()
            alone(data).square().mean().backward()
            model = convolutional()
            if synchronized:
                model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
            scope = None if synchronized else "global"
            model = DistributedDataParallel(ghostnoise.convert(model, **method, scope=scope, uneven=uneven).double())
            y = model(data[rows])
            (y.square().sum() * count / (BATCH * y.shape[1])).backward()
            for ours, theirs in zip(model.module.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)
            for ours, theirs in zip(model.module.buffers(), alone.buffers(), strict=True):
                torch.testing.assert_close(ours, theirs)


def inserted(rank, count):
    """Noise after a layer draws from all ranks: a ghost batch of one sample of this rank would have its mean."""
    torch.manual_seed(rank)
    model = ghostnoise.convert(nn.Sequential(nn.ReLU()), "gni-shift", 1, after=nn.ReLU, channel_dim=1, scope="global")
    x = torch.full((200, 1, 2), float(rank))
    shift = x - model(x)  # the drawn sample's rank, around the mean of ranks
    drawn = (shift[:, 0, 0] + (count - 1) / 2).unique()
    torch.testing.assert_close(drawn, torch.arange(count, dtype=x.dtype))


def refusals(rank, count):
    x = values(4, CHANNELS, 2).requires_grad_()
    layer = ghostnoise.BatchNorm1d(CHANNELS, process_group="world", uneven=True, dtype=x.dtype)
    for module in (layer, ghostnoise.GhostNoise(2, process_group="world")):
        with pytest.raises(RuntimeError, match=r"process_group with torch\.func"):
            torch.func.grad(lambda x, module=module: module(x).sum())(x)
    y = layer(x).square().sum()
    with pytest.raises(RuntimeError, match="process_group with a second derivative"):
        torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(ValueError, match=r"ranks with inputs of 3, 2.* positions: must be the same"):
        layer(values(4, CHANNELS, 2 if rank else 3))
    with pytest.raises(ValueError, match="a mask on rank 0 and none on rank 1: must be given on all ranks or on none"):
        layer(values(4, CHANNELS, 2), None if rank else torch.ones(4, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"empty input of shape \(0, 3, 2\)"):
        layer(values(0, CHANNELS, 2))
    with pytest.raises(ValueError, match=r"process_group='unheard of': this process has no group with this name"):
        engine_ranks.resolve("unheard of")
    with pytest.raises(ValueError, match=rf"must lie in \[0, B\) = \[0, {4 * count}\)"):
        functional.ghost_noise(x, 2, indices=torch.full((4, 2), 4 * count), process_group="world")


def compiled(rank, count):
    """A layer across ranks is a graph break, and equals eager."""
    x = values(4, CHANNELS, 2, seed=rank).requires_grad_()
    layers = [
        ghostnoise.GhostBatchNorm1d(CHANNELS, ghost_size=GHOST, process_group="world", dtype=x.dtype),
        ghostnoise.GhostNoise(2, process_group="world", generator=torch.Generator().manual_seed(rank)),
    ]
    model = nn.Sequential(nn.Tanh(), *layers, nn.Tanh())
    warnings.simplefilter("ignore")  # torch itself, of tensors that cross a graph break
    mask = torch.tensor([[True, True], [True, False], [rank == 0, False], [True, True]])
    for block in (contextlib.nullcontext(), ghostnoise.masked(mask)):
        gradients = []
        for run in (model, torch.compile(model, backend="aot_eager")):
            layers[1].generator.manual_seed(rank)
            with block:
                y = run(x)
            gradients.append(torch.autograd.grad(y.square().sum(), (x, *model.parameters())))
        for ours, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, theirs)


def everything(rank, count):
    """Run all of the above: starting the processes takes most of the time."""
    for test in (
        methods,
        flexible,
        communication,
        copies,
        subgroups,
        networks,
        inserted,
        masks,
        masked_networks,
        refusals,
    ):
        test(rank, count)
        dist.barrier()


def histories_are_shared_or_own(rank, count):
    """A shared history holds the samples of all ranks in their order; own ones differ, and DDP leaves them alone."""
    split = (3, 1) if count == 2 else (2, 1, 1)
    layers = [ghostnoise.GhostNoise(4, history=8, process_group=group, uneven=True) for group in ("world", None)]
    for step in range(3):
        x = values(4, 2, 5, seed=step)[own_rows(rank, split)]
        for layer in layers:
            layer(x)
    means = torch.cat([values(4, 2, 5, seed=step).mean(2) for step in range(3)])[-8:]
    torch.testing.assert_close(layers[0].history.state()["mean"].double(), means, rtol=1e-6, atol=1e-6)
    own = torch.cat([values(4, 2, 5, seed=step)[own_rows(rank, split)].mean(2) for step in range(3)])[-8:]
    torch.testing.assert_close(layers[1].history.state()["mean"][-len(own) :].double(), own, rtol=1e-6, atol=1e-6)
    # A recomputed pass on a shared history.
    gradients = []
    for saves in (False, True):
        torch.manual_seed(rank)
        layer = ghostnoise.GhostNoise(4, history=8, process_group="world", uneven=True)
        for step in range(3):
            x = values(4, 2, 5, seed=step)[own_rows(rank, split)].requires_grad_()
            y = checkpoint(layer, x, use_reentrant=False) if saves else layer(x)
            y.square().sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)
    # The same with masks, which also weigh the samples of other ranks.
    gradients = []
    for saves in (False, True):
        torch.manual_seed(rank)
        layer = ghostnoise.GhostNoiseBatchNorm1d(
            2, ghost_size=4, history=8, process_group="world", uneven=True, dtype=torch.float64
        )
        for step in range(3):
            x = values(4, 2, 5, seed=step)[own_rows(rank, split)].requires_grad_()
            with ghostnoise.masked((torch.arange(5) < torch.tensor([[3], [0], [5], [2]]))[own_rows(rank, split)]):
                y = checkpoint(layer, x, use_reentrant=False) if saves else layer(x)
            y.exp().sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)
    model = ghostnoise.convert(nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2)), "gni", ghost_size=4, history=6)
    wrapped = DistributedDataParallel(model)
    for step in range(2):
        wrapped(values(3, 2, 5, seed=10 * step + rank).float()).sum().backward()
    expected = torch.cat([model[0](values(3, 2, 5, seed=10 * step + rank).float()).mean(2) for step in range(2)])
    torch.testing.assert_close(model[1].history.state()["mean"], expected.detach(), rtol=1e-5, atol=1e-5)
