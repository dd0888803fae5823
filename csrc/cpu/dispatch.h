// Which kernels this machine can run.
#pragma once
#include <functional>
#include <vector>

#include "cpu/call.h"

namespace intflash {

const std::vector<const Kernels*>& supported_kernels();  // best first; asked of the processor once

// Runs the whole call on up to `threads` threads; `first` as in thread_pool.h: it gives the call its output.
void run_attention(const Kernels& kernels, const Call& call, int threads, const std::function<void()>& first);

}  // namespace intflash
