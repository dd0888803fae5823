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

// The calling thread's scratch, and a number that no other call has for it.
Scratch& thread_scratch();
uint64_t next_call_id();

// Runs `function` on up to `threads` threads, which draw the items from their Units. `cost` is that of all items, in
// multiples of the work for which another thread is worth waking.
void run_items(int threads, int64_t items, int64_t cost, const std::function<void(const Units&, Scratch&)>& function,
               InterruptCheck check);

}  // namespace intflash
