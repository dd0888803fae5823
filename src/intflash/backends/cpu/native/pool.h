// A ticket pool: the caller and its workers draw tickets until none is left, so a thread that another
// process holds up costs its one ticket and nothing else. One call at a time; a second caller runs alone.
#pragma once
#include <cstdint>

namespace intflash {

class Shares;

// What a thread draws from: its own share of the tickets, in order, so that it meets the same part of its inputs at every
// call; then the ends of the others'.
class Tickets {
 public:
  bool next(int64_t& ticket);

 private:
  friend class Shares;
  Tickets(Shares& shares, int own) : shares_(shares), own_(own) {}
  Shares& shares_;
  const int own_;
};

using TicketFunction = void (*)(void* context, Tickets& tickets);

// Runs tickets [0, count), count < 2^32, by a call of `function` on each of up to `threads` threads, the caller among
// them; returns when all are done, or throws what one of them has thrown.
void run_tickets(int threads, int64_t count, TicketFunction function, void* context);

}  // namespace intflash
