// The operators as torch calls them, with the arguments and then the results on a stack. What they compute is written
// in engine/ops.py.

#pragma once

#include "levels.h"
#include "tensors.h"

namespace ghostnoise::operators {

using Operator = void(StableIValue *stack, std::uint64_t arguments, std::uint64_t results);

Operator moments, transform, gradient_sums, input_gradient;
Operator excluding_sample, excluding_sample_backward, pool_drawn;
Operator normalize, normalize_backward, ghost_noise;

}  // namespace ghostnoise::operators
