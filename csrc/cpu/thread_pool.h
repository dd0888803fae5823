// The thread pool: one call at a time runs on the calling thread and its workers, which draw ranges of the call's items
// and steal from one another, so that a thread held up by another process costs its range at hand and nothing else. A
// second caller meanwhile runs alone.
#pragma once
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>

namespace intflash {

// Returns the exception with which the work shall end early, or null. Only the calling thread asks.
using InterruptCheck = std::exception_ptr (*)();

// Asks an InterruptCheck once in 100 ms.
class InterruptPoll {
 public:
  explicit InterruptPoll(InterruptCheck check) : check_(check) {
    if (check_) due_ = Clock::now() + kInterval;
  }
  std::exception_ptr operator()() {
    if (!check_ || Clock::now() < due_) return nullptr;
    std::exception_ptr found = check_();
    due_ = Clock::now() + kInterval;
    return found;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kInterval{100};
  InterruptCheck check_;
  Clock::time_point due_{};
};

class WorkStealingRanges;

// What one thread draws ranges [first, last) of items from: the range that the call gave it, from its beginning, so
// that the thread meets the same part of its inputs in every call; then the ends of the other threads' ranges.
class ThreadRanges {
 public:
  // False where there are none left, or the work has been interrupted.
  bool next(int64_t& first, int64_t& last);
  void rethrow_interrupt() const {
    if (interrupt_) std::rethrow_exception(interrupt_);
  }

 private:
  friend class WorkStealingRanges;
  ThreadRanges(WorkStealingRanges& all, int thread, int64_t longest, InterruptCheck check)
      : all_(all), thread_(thread), longest_(longest), poll_(check) {}
  WorkStealingRanges& all_;
  const int thread_;
  const int64_t longest_;
  InterruptPoll poll_;
  std::exception_ptr interrupt_;
};

using RangeFunction = void (*)(void* context, ThreadRanges& ranges);

struct Work {
  RangeFunction function;
  void* context;
  int64_t items;          // below 2^32
  bool is_short;          // takes about 80 microseconds or less: mostly done before a sleeping worker is awake
  int64_t longest_range;  // items drawn at once at most: between ranges the work can be interrupted
  InterruptCheck check;   // null: the work is too short to be interrupted
};

// Calls the function on each of up to `threads` threads, the calling one among them, until all items are drawn. Returns
// when they are done, or throws what a thread has thrown (the calling thread's exception first) or what `work.check`
// has returned. The calling thread calls `first` once before it draws, when workers may have begun already.
//
// Workers wait awake for a while and then sleep. Short work wakes sleeping workers only when it recurs within 50
// microseconds: then they are awake for the next.
void run_in_parallel(int threads, const Work& work, const std::function<void()>& first);

}  // namespace intflash
