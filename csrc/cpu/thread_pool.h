// A ticket pool: the caller and its workers draw tickets until none is left, so a thread that another
// process holds up costs its one ticket and nothing else. One call at a time; a second caller runs alone.
#pragma once
#include <cstdint>
#include <functional>

namespace intflash {

class Shares;

// What a thread draws from: its own share of the tickets, in order, so that it meets the same part of its inputs at every
// call; then the ends of the others'.
// It draws runs [first, last), each a part of what is left of a share.
class Tickets {
 public:
  bool next(int64_t& first, int64_t& last);

 private:
  friend class Shares;
  Tickets(Shares& shares, int own) : shares_(shares), own_(own) {}
  Shares& shares_;
  const int own_;
};

using TicketFunction = void (*)(void* context, Tickets& tickets);

struct Work {
  TicketFunction function;
  void* context;
  int64_t tickets;  // < 2^32
  bool is_short;    // some 80 microseconds or less: mostly done before a worker that sleeps is awake
};

// Runs all tickets by a call of the function on each of up to `threads` threads, the caller among them; returns when they
// are done, or throws what one of them has thrown, the caller first. The caller calls `first` once before its own tickets,
// when the others may have begun with theirs. Workers wait awake for a while; to those that sleep short work is worth their
// waking where it comes again and again, so that they are awake for the next.
void run_tickets(int threads, const Work& work, const std::function<void()>& first);

}  // namespace intflash
