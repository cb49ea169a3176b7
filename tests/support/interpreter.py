"""Triton's interpreter, faster: it replaces the functions of Triton's language once for each launch.

On its own it does so for every call of a function within a launch, which takes longer than all else.
"""

import types

import triton.language as tl
from triton.runtime import interpreter


class Replaced:
    """The scope of a launch, in which calls of further functions have nothing to replace."""

    active = False

    def __init__(self, replace):
        self.scope = replace(types.FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core}))
        Replaced.active = True

    def restore(self):
        Replaced.active = False
        self.scope.restore()


def replace_once_per_launch():
    replace = interpreter._patch_lang
    interpreter._patch_lang = lambda function: None if Replaced.active else Replaced(replace)
