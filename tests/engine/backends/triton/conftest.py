from ghostnoise.engine.backends.triton.kernels import INTERPRETED

from support.interpreter import replace_once_per_launch

if INTERPRETED:
    replace_once_per_launch()
