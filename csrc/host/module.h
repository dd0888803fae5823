// The parts of the Python module intflash._native.
#pragma once
#include <nanobind/nanobind.h>

#include "cpu/call.h"

namespace intflash {

// Thrown where Python must serve a call, or say what is wrong with it.
struct Declined {};

inline void require(bool served) {
  if (!served) throw Declined{};
}

// Returns the kernels of a name, those of an empty name being the best.
const Kernels& kernels_named(const char* name);

void bind_attend(nanobind::module_& m);    // the direct way from the arguments of `intflash.attention`, attend.cpp
void bind_plans(nanobind::module_& m);     // plans of problems for GPUs, cuda/problems.cpp
void bind_launches(nanobind::module_& m);  // GPU kernels that Python launches, cuda/launches.cpp
void bind_programs(nanobind::module_& m);  // integer models, programs.cpp

}  // namespace intflash
