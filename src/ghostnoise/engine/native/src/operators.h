// The operators as torch calls them, with the arguments and then the results on a stack. What they compute is written
// in engine/ops.py, and for pools of tables in tables.py.

#pragma once

#include "levels.h"
#include "tensors.h"

namespace ghostnoise::operators {

using Operator = void(StableIValue *stack, std::uint64_t arguments, std::uint64_t results);

Operator moments, transform, gradient_sums, input_gradient;
Operator ghost_batches, ghost_batches_backward, excluding_sample, excluding_sample_backward, drawn_samples;
Operator normalizing_scale, normalizing_scale_backward;
Operator normalize, normalize_backward, ghost_noise;

}  // namespace ghostnoise::operators
