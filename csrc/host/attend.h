// The direct way from the arguments of `intflash.attention` to the CPU kernels.
#pragma once
#include <nanobind/nanobind.h>

namespace intflash {

// Adds `attend` and `use_calls` to the module.
void bind_attend(nanobind::module_& m);

}  // namespace intflash
