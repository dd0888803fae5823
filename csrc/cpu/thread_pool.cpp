#include "cpu/thread_pool.h"

#include <atomic>
#include <condition_variable>
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

constexpr int kRangePart = 4;  // a thread draws a quarter of what its range, or the one it steals from, has left
constexpr int kSpinsPerYield = 16;
constexpr int kSpins = 2000;  // pauses before a waiting thread sleeps: some tens of microseconds

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace

// The items of a call, divided into one range for each thread.
class WorkStealingRanges {
 public:
  explicit WorkStealingRanges(int threads) : capacity_(threads), ranges_(new Range[size_t(threads)]) {}
  int capacity() const { return capacity_; }

  void divide(int threads, int64_t items) {
    threads_ = threads;
    for (int i = 0; i < threads; ++i) {
      const uint64_t first = uint64_t(items * i / threads), last = uint64_t(items * (i + 1) / threads);
      ranges_[i].ends.store(first << 32 | last, std::memory_order_relaxed);
    }
  }
  // Leaves nothing to draw.
  void close() {
    for (int i = 0; i < threads_; ++i) ranges_[i].ends.store(0);
  }
  ThreadRanges of_thread(int thread, int64_t longest, InterruptCheck check) {
    return ThreadRanges(*this, thread, longest, check);
  }

  bool next(int thread, int64_t longest, int64_t& first, int64_t& last) {
    for (int i = 0; i < threads_; ++i) {
      const int victim = thread + i < threads_ ? thread + i : thread + i - threads_;
      std::atomic<uint64_t>& range = ranges_[victim].ends;
      for (uint64_t ends = range.load(); ends >> 32 < uint32_t(ends);) {
        first = int64_t(ends >> 32), last = int64_t(uint32_t(ends));
        int64_t count = (last - first + kRangePart - 1) / kRangePart;
        if (count > longest) count = longest;
        const uint64_t left = i == 0 ? ends + (uint64_t(count) << 32) : ends - uint64_t(count);
        if (!range.compare_exchange_weak(ends, left)) continue;
        (i == 0 ? last : first) = i == 0 ? first + count : last - count;
        return true;
      }
    }
    return false;
  }

 private:
  struct alignas(64) Range {
    std::atomic<uint64_t> ends{0};  // first << 32 | last
  };
  int capacity_, threads_ = 0;
  std::unique_ptr<Range[]> ranges_;
};

bool ThreadRanges::next(int64_t& first, int64_t& last) {
  if ((interrupt_ = poll_())) {
    all_.close();
    return false;
  }
  return all_.next(thread_, longest_, first, last);
}

namespace {

class Pool {
 public:
  void run(int threads, const Work& work, const std::function<void()>& first) {
    std::unique_lock<std::mutex> busy(busy_, std::defer_lock);
    if (threads <= 1 || work.items <= 1 || !busy.try_lock()) return run_alone(work, first);
    if (work.is_short && sleepers_ > 0 && Clock::now() - alone_ > kSoon) {
      run_alone(work, first);
      alone_ = Clock::now();
      return;
    }
    if (!ranges_ || ranges_->capacity() < threads) ranges_.reset(new WorkStealingRanges(threads));
    start_workers(threads - 1);
    work_ = &work;
    limit_ = threads - 1;
    ranges_->divide(threads, work.items);
    const uint64_t epoch = (state_.load() >> 32) + 1;
    state_ = epoch << 32 | kOpen;  // ahead of the look for sleepers
    if (sleepers_ > 0) {
      std::lock_guard<std::mutex> lock(sleep_);
      wake_.notify_all();
    }
    take_part(0, first);
    state_ &= ~uint64_t(kOpen);  // a worker that has not entered yet stays out
    for (int spins = 0; state_.load() & kActive; ++spins) {
      if (spins < kSpins) {
        pause();
        continue;
      }
      // The caller sleeps and does not spin, so that a worker pushed aside by another process may move to this core.
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
  alignas(64) std::atomic<uint64_t> state_{0};  // epoch of the call, whether it is open, number of workers inside
  const Work* work_ = nullptr;
  std::unique_ptr<WorkStealingRanges> ranges_;  // replaced between calls only
  int limit_ = 0;                               // workers that may take part in the call
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<bool> waiting_{false};
  std::exception_ptr failed_;  // the calling thread's exception, or the first worker's
  std::mutex busy_, sleep_;
  std::condition_variable wake_, done_;
  int workers_ = 0;
  Clock::time_point alone_;  // end of the last short work that the caller did alone because workers slept

  static void run_alone(const Work& work, const std::function<void()>& first) {
    static thread_local WorkStealingRanges all(1);
    all.divide(1, work.items);
    ThreadRanges ranges = all.of_thread(0, work.longest_range, work.check);
    first();
    work.function(work.context, ranges);
    ranges.rethrow_interrupt();
  }

  void start_workers(int count) {
    try {
      for (; workers_ < count; ++workers_) std::thread(&Pool::wait_and_work, this, workers_).detach();
    } catch (const std::system_error&) {  // the threads that could be started draw all items
    }
  }

  void take_part(int thread, const std::function<void()>& first = [] {}) {
    ThreadRanges ranges = ranges_->of_thread(thread, work_->longest_range, thread == 0 ? work_->check : nullptr);
    try {
      first();
      work_->function(work_->context, ranges);
      ranges.rethrow_interrupt();
    } catch (...) {
      std::lock_guard<std::mutex> lock(sleep_);
      if (!failed_ || thread == 0) failed_ = std::current_exception();
      ranges_->close();
    }
  }

  // Enters an open call of another epoch than the one seen.
  bool enter(uint64_t& seen) {
    uint64_t state = state_.load();
    while (state >> 32 != seen && (state & kOpen))
      if (state_.compare_exchange_weak(state, state + 1)) {
        seen = state >> 32;
        return true;
      }
    return false;
  }

  void wait_and_work(int index) {
    uint64_t seen = 0;
    for (int spins = 0;;) {
      if (enter(seen)) {
        if (index < limit_) take_part(index + 1);
        if ((--state_ & kActive) == 0 && waiting_) {
          std::lock_guard<std::mutex> lock(sleep_);
          done_.notify_one();
        }
        spins = 0;
      } else if (++spins < kSpins) {
        pause();
        if (spins % kSpinsPerYield == 0) std::this_thread::yield();  // to torch's own workers, busy between our calls
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

// The pool is never destroyed, because its workers outlive main. A forked child has no workers and makes its own pool.
Pool* pool = nullptr;

Pool* make_pool() {
#if defined(__unix__) || defined(__APPLE__)
  pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
#endif
  return pool = new Pool;
}

}  // namespace

void run_in_parallel(int threads, const Work& work, const std::function<void()>& first) {
  static Pool* made = make_pool();
  (void)made;
  pool->run(threads, work, first);
}

}  // namespace intflash
