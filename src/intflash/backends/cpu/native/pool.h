// A ticket pool: the caller and its workers draw tickets until none is left, so a thread that another
// process holds up costs its one ticket and nothing else. One call at a time; a second caller runs alone.
#pragma once
#include <cstdint>

namespace intflash {

using TicketFunction = void (*)(void* context, int64_t ticket);

// Runs tickets [0, count) on up to `threads` threads, the caller among them; returns when all are done.
void run_tickets(int threads, int64_t count, TicketFunction function, void* context);

}  // namespace intflash
