#include "pool.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace intflash {
namespace {

constexpr int kYield = 16;   // pauses
constexpr int kSpins = 2000;  // pauses before a waiting thread sleeps, some tens of microseconds

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

class Pool {
 public:
  void run(int threads, int64_t count, TicketFunction function, void* context) {
    std::unique_lock<std::mutex> alone(busy_, std::try_to_lock);
    if (threads <= 1 || count <= 1 || !alone.owns_lock()) {
      for (int64_t t = 0; t < count; ++t) function(context, t);
      return;
    }
    while (workers_ < threads - 1) std::thread(&Pool::work, this, workers_++).detach();
    function_ = function;
    context_ = context;
    count_ = count;
    limit_ = threads - 1;
    next_ = 0;
    const uint64_t epoch = (state_.load() >> 32) + 1;
    state_ = epoch << 32 | kOpen;
    if (sleepers_ > 0) {
      std::lock_guard<std::mutex> lock(sleep_);
      wake_.notify_all();
    }
    drain();
    state_ &= ~uint64_t(kOpen);  // a worker that has not entered yet stays out
    for (int spins = 0; state_.load() & kActive; ++spins) {
      if (spins < kSpins) {
        pause();
        continue;
      }
      // Asleep, not spinning: a worker that another process has pushed aside may then move to this core.
      std::unique_lock<std::mutex> lock(sleep_);
      waiting_ = true;
      done_.wait(lock, [&] { return (state_.load() & kActive) == 0; });
      waiting_ = false;
    }
  }

 private:
  static constexpr uint32_t kOpen = 1u << 31, kActive = kOpen - 1;
  std::mutex busy_, sleep_;
  std::condition_variable wake_, done_;
  std::atomic<bool> waiting_{false};
  std::atomic<uint64_t> state_{0};  // epoch of the call, whether it is open, workers inside
  std::atomic<int64_t> next_{0};
  std::atomic<int> sleepers_{0};
  TicketFunction function_ = nullptr;
  void* context_ = nullptr;
  int64_t count_ = 0;
  int limit_ = 0, workers_ = 0;

  void drain() {
    for (int64_t t; (t = next_.fetch_add(1)) < count_;) function_(context_, t);
  }

  bool enter(uint64_t& seen) {  // into an open call of another epoch than the one seen
    uint64_t state = state_.load();
    while (state >> 32 != seen && (state & kOpen))
      if (state_.compare_exchange_weak(state, state + 1)) {
        seen = state >> 32;
        return true;
      }
    return false;
  }

  void work(int index) {
    uint64_t seen = 0;
    for (int spins = 0;;) {
      if (enter(seen)) {
        if (index < limit_) drain();
        if ((--state_ & kActive) == 0 && waiting_) {
          std::lock_guard<std::mutex> lock(sleep_);
          done_.notify_one();
        }
        spins = 0;
      } else if (++spins < kSpins) {
        pause();
        if (spins % kYield == 0) std::this_thread::yield();  // to torch's own workers, whose turn it is between calls
      } else {
        std::unique_lock<std::mutex> lock(sleep_);
        ++sleepers_;
        wake_.wait(lock, [&] { return state_.load() >> 32 != seen && (state_.load() & kOpen); });
        --sleepers_;
        spins = 0;
      }
    }
  }
};

// Never destroyed: its workers outlive main. A forked child has none of them and starts anew.
Pool* pool = nullptr;

Pool* make_pool() {
#if defined(__unix__) || defined(__APPLE__)
  pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
#endif
  return pool = new Pool;
}

}  // namespace

void run_tickets(int threads, int64_t count, TicketFunction function, void* context) {
  static Pool* first = make_pool();
  (void)first;
  pool->run(threads, count, function, context);
}

}  // namespace intflash
