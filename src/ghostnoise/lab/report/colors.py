"""The colours of all figures: one for each method, whatever other methods a figure shows, and a ramp for layers.

The colours of methods stay distinguishable with the three common forms of color blindness, and have a contrast of at
least 3:1 to the background, in light and in dark; tests check both.
"""

import zlib
from typing import NamedTuple

GROUNDS = ("#ffffff", "#14171b")  # background of figures on a light and on a dark page


class Color(NamedTuple):
    """A colour for light backgrounds, which files have too, and the same one for dark backgrounds."""

    light: str
    dark: str


METHODS = {
    "bn": Color("#5c6168", "#c9ced4"),
    "gbn": Color("#004a8f", "#5b72d7"),
    "xbn": Color("#5b8def", "#93c3ff"),
    "en": Color("#e363c8", "#c66fb4"),
    "gni": Color("#bf3a00", "#e9740f"),
    "agni": Color("#c28900", "#ffc41f"),
    "brn": Color("#5900af", "#944aff"),
    "dropout": Color("#0ba781", "#24eea3"),
    "eagn": Color("#531500", "#e62d38"),
    "mbn": Color("#9d04ff", "#03a960"),
    "ptbn": Color("#715a38", "#8ac364"),
    "sgbn": Color("#420152", "#2b7e30"),
    "dsu": Color("#422e50", "#fffdf8"),
    "mixstyle": Color("#140976", "#91479c"),
}
METHODS["none"] = METHODS["bn"]  # a network's own normalization is the baseline that batch norm is elsewhere
OTHERS = (Color("#00141c", "#667c74"), Color("#8d9755", "#f4e77b"))  # of methods that were added later
# The colour map viridis at equal distances, without the ends that have too little contrast to the background.
LIGHT_RAMP = ("#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89")
DARK_RAMP = ("#5d6bbd", "#31858e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725")


def of(method: str) -> Color:
    """Return the colour of a method, by its name in the registry."""
    return METHODS.get(method) or OTHERS[zlib.crc32(method.encode()) % len(OTHERS)]


def ramp(count: int) -> list[Color]:
    """Return colours in the order of layers: lightness increases from the first to the last."""
    shares = [k / max(count - 1, 1) for k in range(count)]
    return [Color(_between(LIGHT_RAMP, share), _between(DARK_RAMP, share)) for share in shares]


def _between(stops: tuple[str, ...], share: float) -> str:
    place = share * (len(stops) - 1)
    low = min(int(place), len(stops) - 2)
    ends = [[int(stops[at][k : k + 2], 16) for k in (1, 3, 5)] for at in (low, low + 1)]
    mixed = [round(a + (b - a) * (place - low)) for a, b in zip(*ends, strict=True)]
    return "#{:02x}{:02x}{:02x}".format(*mixed)
