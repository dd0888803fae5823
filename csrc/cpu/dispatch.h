// The choice of kernels for this machine, and the division of a call into units of work for the threads.
#pragma once
#include <functional>
#include <vector>

#include "cpu/call.h"
#include "cpu/thread_pool.h"

namespace intflash {

// The kernels that this machine can run, best first. The processor is asked once.
const std::vector<const Kernels*>& supported_kernels();

// Runs the whole call on up to `threads` threads. `first` is as in thread_pool.h: it gives the call its output. Calls
// of some 50 ms and more ask `check` and end early with its exception.
void run_attention(const Kernels& kernels, const Call& call, int threads, const std::function<void()>& first,
                   InterruptCheck check);

}  // namespace intflash
