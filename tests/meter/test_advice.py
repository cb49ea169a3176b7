"""Advice on data whose noise is known."""

import math
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import ghostnoise
from ghostnoise.meter import Reading, advise
from support.metering import measure, measure_model


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 32), nn.BatchNorm1d(32))


def updated(model):
    """Return a model whose running statistics have been updated once."""
    model.train()(normal(256, 64, seed=99))
    return model


def batches(batch_size=256, count=8):
    return [normal(batch_size, 64, seed=seed) for seed in range(count)]


def renamed(layer, name):
    return replace(layer, name=name, names=(name,))


def percents(text):
    return [float(number) for number in re.findall(r"([\d.]+) %", text)]


def test_a_plain_network_of_gaussian_activations():
    """A linear network on normal data: the shift is 1/sqrt(256) now, and 1/sqrt(32) at the proposed size."""
    advice = advise(measure_model(updated(mlp()), batches(), 32, gap=False))
    assert (advice.ghost_size, advice.measured_size) == (32, 32)
    assert not advice.strong
    assert not advice.weak
    assert [each.ghost_size for each in advice.current] == [256, 256]
    error = 5 * (0.5 / (8 * 256 * 32)) ** 0.5  # relative error of a standard deviation, from the draws in all channels
    for now, then in zip(advice.current, advice.expected, strict=True):
        assert now.shift == pytest.approx(1 / 16, rel=error)
        assert then.shift == pytest.approx(32**-0.5, rel=error)
        assert then.scale == pytest.approx((2 * 31) ** 0.5 / 32, rel=0.05)
        assert then.effective_size == pytest.approx(32, rel=3 * error)
    about, now, asked, first, imports, call, then = str(advice).splitlines()
    assert about == "2 layers, 64 channels, measured on 8 batches of 256 samples."
    assert re.match(
        r"Now \(batch norm over batches of 256 samples\): no layer has strong noise; the shift is .* % to .* % of a "
        r"standard deviation \(largest in",
        now,
    )
    assert percents(now) == pytest.approx([6.25, 6.25], abs=0.1)
    assert asked == "Ghost size 32: every layer would have noticeable noise."
    assert first.startswith("First ghost size to try: 32. The shift would be ")
    assert percents(first) == [18.0, 18.0]
    assert re.search(r"fully connected layer with N = 3[12]\. To convert your model:$", first)
    assert [imports, call] == ["import ghostnoise", 'ghostnoise.convert(model, "gni", ghost_size=32)']
    assert then.startswith("Then try 16 and 64, and choose by the results on validation data.")


def test_a_network_that_already_has_strong_noise():
    model = ghostnoise.convert(mlp(), "gni", ghost_size=4)
    advice = advise(measure_model(model, batches(), 32, gap=False))
    assert [each.layer for each in advice.strong] == ["1", "3"]
    assert [each.ghost_size for each in advice.current] == [4, 4]
    now = str(advice).splitlines()[1]
    assert now.startswith("Now (layers with a ghost size of 4): the noise is ")
    assert "already strong in '1' (shift 50 %, squared scale 69 %), '3' (shift 5" in now
    assert "a ghost size below 16" in now
    assert advice.ghost_size == 32


def test_batch_norm_of_small_batches_has_strong_noise():
    advice = advise(measure_model(mlp(), batches(8, 64), 8, gap=False))
    assert [each.ghost_size for each in advice.strong] == [8, 8]


def test_weak_noise():
    """Large images without variance between samples: the variance of a ghost batch's mean is 1/(N·S)."""
    wide = renamed(measure([normal(64, 4, 400)], 32, gap=False), "wide")
    plain = renamed(measure([normal(256, 4)], 32, gap=False), "plain")
    advice = advise(Reading([wide, plain]))
    assert [each.layer for each in advice.weak] == ["wide"]
    assert advice.weak[0].shift == pytest.approx((32 * 400) ** -0.5, rel=0.3)  # from one batch of 64 samples
    asked = str(advice).splitlines()[2]
    assert asked.startswith(
        "Ghost size 32: 1 of 2 layers would have hardly any noise, a shift of 3 % of a standard deviation"
    )
    assert "'wide' (shift 0." in asked
    assert "these layers have no ghost noise" in str(advice)
    assert (
        advise(Reading([wide])).ghost_size == 2
    )  # the smallest size, at which the noise is still weaker than in the paper's ResNet


@pytest.mark.parametrize("positions", [1, 2, 3, 5, 12, 30, 100])
@pytest.mark.parametrize("tails", [1.0, 3.0])
def test_the_proposed_size_meets_both_conditions(positions, tails):
    """A power of two: no layer has an effective size below 16, and if possible the median is at most 256."""
    x = normal(128, 4, positions).sinh() if tails > 1 else normal(128, 4, positions)
    advice = advise(Reading([measure([x * tails], 32, gap=False)]))
    size = advice.ghost_size
    assert size == 2 ** round(math.log2(size))
    assert 2 <= size <= 4096
    (strength,) = advice.expected
    assert strength.effective_size >= 16
    if size > 2 and strength.effective_size > 32:
        assert strength.effective_size <= 256


def test_an_outlier_needs_larger_ghost_batches():
    x = torch.zeros(256, 1)
    x[0] = 1
    advice = advise(Reading([measure([x], 4, draws=2000, gap=False)]))
    assert advice.ghost_size > 32
    assert advice.expected[0].effective_size >= 16


def test_plurals_and_long_lists_of_layers():
    layer = measure([normal(64, 1)], 4, gap=False)
    text = str(advise(Reading([layer])))
    assert text.startswith("1 layer, 1 channel, measured on 1 batch of 64 samples.")
    model = ghostnoise.convert(nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(9))), "gni", ghost_size=2)
    found = str(advise(measure_model(model, [normal(64, 3)], gap=False)))
    assert "and 3 more" in found


def test_the_layers_with_the_smallest_and_the_largest_shift_are_named():
    """By the shift alone: the layer with the strongest noise may be another one."""
    tails = measure([normal(512, 2).pow(5)], 32, draws=1000, gap=False)  # the scale is the stronger component
    plain = measure([normal(512, 2)], 32, draws=1000, gap=False)
    wide = measure([normal(512, 2, 9)], 32, draws=1000, gap=False)
    advice = advise(Reading([renamed(tails, "tails"), renamed(plain, "plain"), renamed(wide, "wide")]))
    first = str(advice).splitlines()[3]
    shifts = {each.layer: each.shift for each in advice.expected}
    least, most = min(shifts, key=shifts.get), max(shifts, key=shifts.get)
    assert least == "wide"
    assert f"({least!r}) to" in first
    assert f"({most!r}) of a standard deviation. The layer with the strongest noise ('tails') would" in first


def test_constant_channels_are_ignored():
    x = normal(64, 3, 2)
    x[:, 1] = 4.0
    with_constant, without = (advise(Reading([measure([y], 8, gap=False)])) for y in (x, x[:, [0, 2]]))
    assert with_constant.expected[0].shift == pytest.approx(without.expected[0].shift, rel=0.2)
    still = renamed(measure([torch.ones(64, 3)], 8, gap=False), "still")
    both = advise(Reading([still, renamed(measure([x], 8, gap=False), "live")]))
    assert [each.layer for each in both.expected] == ["live"]


def test_constant_channels_only_are_refused():
    with pytest.raises(ValueError, match=r"every channel that was measured is constant: .*; measure other data"):
        advise(Reading([measure([torch.ones(64, 3)], 8)]))


@pytest.mark.parametrize("size", [2, 32, 512])
def test_advice_makes_no_claim_about_accuracy(size):
    text = str(advise(measure_model(mlp(), batches(64, 1), size, gap=False))).lower()
    assert text.count("accuracy") == 1
    assert "its effect on accuracy was not measured" in text
    assert not re.search(r"gain|improv|better", text)


def test_repr_is_a_short_summary():
    advice = advise(measure_model(mlp(), batches(64, 1), 32, gap=False))
    assert repr(advice) == (
        "Advice(ghost_size=32, measured_size=32, 2 layers: 0 with strong noise already, 0 with weak noise at 32)"
    )


def test_what_now_means_in_a_network_with_both_kinds_of_noise():
    model = mlp()
    ghostnoise.convert(model, "gni", ghost_size=8, where=lambda name, module: name == "1")
    now = str(advise(measure_model(model, batches(64, 2), 32, gap=False))).splitlines()[1]
    assert now.startswith("Now (batch norm over batches of 64 samples; layers with a ghost size of 8): ")


@pytest.mark.parametrize("tokens", [False, True])
def test_padded_sequences_without_a_mask_are_noted(tokens):
    """A quarter of the samples is padded; the layer sees their padding unless it is masked."""
    mask = torch.ones(64, 10, dtype=torch.bool)
    mask[:16, 7:] = False
    x = normal(64, 4, 10) * mask[:, None]
    layer = nn.BatchNorm1d(4)
    model = nn.Sequential(ghostnoise.convert(layer, "bn"))
    if tokens:
        x, model = x.mT, nn.Sequential(nn.LayerNorm(4))
    with torch.no_grad(), ghostnoise.Meter(model, 8, gap=False) as meter:
        model(x)
    assert meter.result()["0"].padded == 0.25
    advice = advise(meter.result())
    assert advice.padded == ("0",)
    assert "Padding: many sequences end in repeated positions ('0'). " in str(advice)
    with torch.no_grad(), ghostnoise.Meter(model, 8, gap=False) as meter, ghostnoise.masked(mask):
        model(x)
    assert advise(meter.result()).padded == ()


@pytest.mark.parametrize("shape", [(64, 4, 10), (64, 4, 5, 5), (64, 4), (64, 4, 1)])
def test_data_without_padding_are_not_taken_for_padded(shape):
    model = nn.Sequential({2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)](4))
    with torch.no_grad(), ghostnoise.Meter(model, 8, gap=False) as meter:
        model(normal(*shape))
    assert "Padding" not in str(advise(meter.result()))


def test_running_statistics_that_were_never_updated_are_noted():
    model = mlp()
    reading = measure_model(model, batches(64, 2), 32)  # measured in training mode, which updates them
    assert [layer.never_updated for layer in reading.layers] == [True, True]
    advice = advise(reading)
    assert advice.never_updated == ("1", "3")
    (line,) = [line for line in str(advice).splitlines() if line.startswith("Running statistics: ")]
    assert "in 2 of 2 layers they had never been updated before the measurement ('1', '3')" in line
    again = advise(measure_model(model, batches(64, 2), 32))
    assert again.never_updated == ()
    assert "Running statistics" not in str(again)
    without = nn.Sequential(nn.BatchNorm1d(64, track_running_stats=False))
    assert not advise(measure_model(without, batches(64, 1), 32)).never_updated
