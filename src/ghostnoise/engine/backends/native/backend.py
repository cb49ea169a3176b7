"""The backend for CPUs: `Aten` with its steps replaced by calls of the C++ library.

Every tensor passes the gate before its address is given to the library. If the gate does not admit one, `Aten` serves
the call.
"""

from torch import Tensor

from ghostnoise.engine.backends.base import Affine, Capabilities, Gradients, Normalized, Prepared, Saved, State
from ghostnoise.engine.backends.native import fused, library
from ghostnoise.engine.backends.native.gate import NotAdmitted, refusal
from ghostnoise.engine.backends.native.library import DTYPES
from ghostnoise.engine.backends.native.passes import NativePasses
from ghostnoise.engine.backends.native.tables import NativeTables
from ghostnoise.engine.plan import Noise, Plan


class Native(NativePasses, NativeTables):
    """Passes, tables and fused calls of the C++ library."""

    name = "native"
    capabilities = Capabilities(devices=("cpu",), dtypes=tuple(DTYPES))

    def unavailable(self) -> str | None:
        """Return why this backend cannot run on this machine, or None if it can."""
        found = library.library()
        return found if isinstance(found, str) else None

    def refuses(self, x: Tensor) -> str | None:
        """Return why this backend cannot run on `x`, or None if it can."""
        return refusal(x)

    def fused_forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, plan: Plan) -> Normalized | None:
        """Run all steps of the forward pass in one call, if it covers the plan."""
        try:
            return fused.forward(x, weight, bias, plan)
        except NotAdmitted:
            return None

    def fused_noise(self, x: Tensor, noise: Noise) -> Affine | None:
        """Measure x and decide on noise in one call, if it covers the noise."""
        try:
            return fused.noise_alone(x, noise)
        except NotAdmitted:
            return None

    def fused_backward(
        self, dy: Tensor, x: Tensor, weight: Tensor | None, plan: Plan, saved: Saved, needs_x: bool
    ) -> Gradients | None:
        """Run all steps of the backward pass in one call, if it covers the plan."""
        try:
            return fused.backward(dy, x, weight, plan, saved, needs_x)
        except NotAdmitted:
            return None

    def prepare(self, x: Tensor, state: State, plan: Plan) -> Prepared | None:
        """Prepare the forward pass in one call, if it covers the plan and takes all tensors as they are."""
        try:
            return fused.NativePrepared(self, x, state, plan)
        except NotAdmitted:
            return None
