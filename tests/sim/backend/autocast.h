// Lets `torch.autocast("sim")` choose the precision of operations, by torch's own lists for CUDA.
#pragma once

#include <ATen/autocast_mode.h>

#include "recurrent.h"

#define IN_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define IN_FLOAT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)

namespace at::autocast {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(IN_LOWER_PRECISION)
  AT_FORALL_FP32(IN_FLOAT)
}

}  // namespace at::autocast

#undef IN_LOWER_PRECISION
#undef IN_FLOAT
