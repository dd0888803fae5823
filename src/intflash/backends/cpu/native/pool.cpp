#include "pool.h"

#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

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

}  // namespace

// The tickets of a call, cut into one run for each thread.
class Shares {
 public:
  explicit Shares(int threads) : capacity_(threads), runs_(new Run[size_t(threads)]) {}
  int capacity() const { return capacity_; }

  void cut(int threads, int64_t count) {
    threads_ = threads;
    for (int i = 0; i < threads; ++i) runs_[i].ends = uint64_t(count * i / threads) << 32 | uint64_t(count * (i + 1) / threads);
  }
  Tickets of(int thread) { return Tickets(*this, thread); }

  bool next(int own, int64_t& ticket) {
    for (int i = 0; i < threads_; ++i) {
      const int of = (own + i) % threads_;
      std::atomic<uint64_t>& ends = runs_[of].ends;
      for (uint64_t run = ends.load(); run >> 32 < uint32_t(run);)
        if (ends.compare_exchange_weak(run, of == own ? run + kFirst : run - 1)) {
          ticket = of == own ? int64_t(run >> 32) : int64_t(uint32_t(run)) - 1;
          return true;
        }
    }
    return false;
  }

 private:
  static constexpr uint64_t kFirst = uint64_t(1) << 32;
  struct alignas(64) Run {
    std::atomic<uint64_t> ends{0};  // first << 32 | last + 1
  };
  int capacity_, threads_ = 0;
  std::unique_ptr<Run[]> runs_;
};

bool Tickets::next(int64_t& ticket) { return shares_.next(own_, ticket); }

namespace {

class Pool {
 public:
  void run(int threads, int64_t count, TicketFunction function, void* context) {
    const bool one = threads <= 1 || count <= 1;
    std::unique_lock<std::mutex> alone(busy_, std::defer_lock);
    if (one || !alone.try_lock()) {
      static thread_local Shares all(1);
      all.cut(1, count);
      Tickets tickets = all.of(0);
      return function(context, tickets);
    }
    if (!shares_ || shares_->capacity() < threads) shares_.reset(new Shares(threads));
    hire(threads - 1);
    function_ = function;
    context_ = context;
    limit_ = threads - 1;
    shares_->cut(threads, count);
    const uint64_t epoch = (state_.load() >> 32) + 1;
    state_ = epoch << 32 | kOpen;
    if (sleepers_ > 0) {
      std::lock_guard<std::mutex> lock(sleep_);
      wake_.notify_all();
    }
    drain(0);
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
    if (failed_) std::rethrow_exception(std::exchange(failed_, nullptr));
  }

 private:
  static constexpr uint32_t kOpen = 1u << 31, kActive = kOpen - 1;
  std::mutex busy_, sleep_;
  std::condition_variable wake_, done_;
  std::atomic<bool> waiting_{false};
  std::atomic<uint64_t> state_{0};  // epoch of the call, whether it is open, workers inside
  std::atomic<int> sleepers_{0};
  TicketFunction function_ = nullptr;
  void* context_ = nullptr;
  std::unique_ptr<Shares> shares_;  // replaced between calls only
  std::exception_ptr failed_;  // the first one's, for the caller
  int limit_ = 0, workers_ = 0;

  void hire(int count) {
    try {
      for (; workers_ < count; ++workers_) std::thread(&Pool::work, this, workers_).detach();
    } catch (const std::system_error&) {  // those that there are draw all tickets
    }
  }

  void drain(int thread) {
    Tickets tickets = shares_->of(thread);
    try {
      function_(context_, tickets);
    } catch (...) {
      std::lock_guard<std::mutex> lock(sleep_);
      if (!failed_) failed_ = std::current_exception();
      for (int64_t ticket; tickets.next(ticket);) {
      }
    }
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
        if (index < limit_) drain(index + 1);
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
