#include "cpu/thread_pool.h"

#include <atomic>
#include <chrono>
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

constexpr int kPart = 4;     // of what is left of a share: a run
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
    for (int i = 0; i < threads; ++i)
      runs_[i].ends.store(uint64_t(count * i / threads) << 32 | uint64_t(count * (i + 1) / threads), std::memory_order_relaxed);
  }
  Tickets of(int thread) { return Tickets(*this, thread); }

  bool next(int own, int64_t& first, int64_t& last) {
    for (int i = 0; i < threads_; ++i) {
      const int of = own + i < threads_ ? own + i : own + i - threads_;
      std::atomic<uint64_t>& share = runs_[of].ends;
      for (uint64_t ends = share.load(); ends >> 32 < uint32_t(ends);) {
        first = int64_t(ends >> 32), last = int64_t(uint32_t(ends));
        const int64_t count = (last - first + kPart - 1) / kPart;
        if (!share.compare_exchange_weak(ends, i == 0 ? ends + (uint64_t(count) << 32) : ends - uint64_t(count))) continue;
        (i == 0 ? last : first) = i == 0 ? first + count : last - count;
        return true;
      }
    }
    return false;
  }

 private:
  struct alignas(64) Run {
    std::atomic<uint64_t> ends{0};  // first << 32 | last + 1
  };
  int capacity_, threads_ = 0;
  std::unique_ptr<Run[]> runs_;
};

bool Tickets::next(int64_t& first, int64_t& last) { return shares_.next(own_, first, last); }

namespace {

class Pool {
 public:
  void run(int threads, const Work& work, const std::function<void()>& first) {
    std::unique_lock<std::mutex> busy(busy_, std::defer_lock);
    if (threads <= 1 || work.tickets <= 1 || !busy.try_lock()) return run_alone(work, first);
    if (work.is_short && sleepers_ > 0 && Clock::now() - alone_ > kSoon) {
      run_alone(work, first);
      alone_ = Clock::now();
      return;
    }
    if (!shares_ || shares_->capacity() < threads) shares_.reset(new Shares(threads));
    hire(threads - 1);
    work_ = &work;
    limit_ = threads - 1;
    shares_->cut(threads, work.tickets);
    const uint64_t epoch = (state_.load() >> 32) + 1;
    state_ = epoch << 32 | kOpen;  // before it looks for sleepers
    if (sleepers_ > 0) {
      std::lock_guard<std::mutex> lock(sleep_);
      wake_.notify_all();
    }
    drain(0, first);
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
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::microseconds kSoon{50};
  static constexpr uint32_t kOpen = 1u << 31, kActive = kOpen - 1;
  // What a worker needs to begin, in one cache line.
  alignas(64) std::atomic<uint64_t> state_{0};  // epoch of the call, whether it is open, workers inside
  const Work* work_ = nullptr;
  std::unique_ptr<Shares> shares_;  // replaced between calls only
  int limit_ = 0;
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<bool> waiting_{false};
  std::exception_ptr failed_;  // the caller's own, or the first worker's
  std::mutex busy_, sleep_;
  std::condition_variable wake_, done_;
  int workers_ = 0;
  Clock::time_point alone_;  // the end of the last short work that the caller did alone because workers slept

  static void run_alone(const Work& work, const std::function<void()>& first) {
    static thread_local Shares all(1);
    all.cut(1, work.tickets);
    Tickets tickets = all.of(0);
    first();
    work.function(work.context, tickets);
  }

  void hire(int count) {
    try {
      for (; workers_ < count; ++workers_) std::thread(&Pool::work, this, workers_).detach();
    } catch (const std::system_error&) {  // those that there are draw all tickets
    }
  }

  void drain(int thread, const std::function<void()>& first = [] {}) {
    Tickets tickets = shares_->of(thread);
    try {
      first();
      work_->function(work_->context, tickets);
    } catch (...) {
      std::lock_guard<std::mutex> lock(sleep_);
      if (!failed_ || thread == 0) failed_ = std::current_exception();
      for (int64_t first_left, last_left; tickets.next(first_left, last_left);) {
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

void run_tickets(int threads, const Work& work, const std::function<void()>& first) {
  static Pool* made = make_pool();
  (void)made;
  pool->run(threads, work, first);
}

}  // namespace intflash
