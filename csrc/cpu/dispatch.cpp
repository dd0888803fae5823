#include "cpu/dispatch.h"

#include <atomic>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <thread>

#include "cpu/features.h"
#include "cpu/thread_pool.h"

namespace intflash {
namespace {

std::vector<const Kernels*> find_kernels() {
  std::vector<const Kernels*> found;
#ifdef INTFLASH_AMX
  if (has_amx()) found.push_back(&kAmxKernels);
#endif
#ifdef INTFLASH_AVX512VNNI
  if (has_avx512vnni()) found.push_back(&kAvx512VnniKernels);
#endif
#ifdef INTFLASH_AVXVNNI
  if (has_avxvnni()) found.push_back(&kAvxVnniKernels);
#endif
#ifdef INTFLASH_AVX2
  if (has_avx2()) found.push_back(&kAvx2Kernels);
#endif
#ifdef INTFLASH_NEONI8MM
  if (has_neoni8mm()) found.push_back(&kNeonI8mmKernels);
#endif
#ifdef INTFLASH_NEON
  if (has_neon()) found.push_back(&kNeonKernels);
#endif
  found.push_back(&kGenericKernels);
  return found;
}

// Amounts of work, in scores.
constexpr int64_t kSmallHead = 75000;  // a head up to here goes to one thread whole
constexpr int64_t kManyHeads = 16;     // from so many heads for each thread they go to threads whole

// Amounts of work, in multiples of the scores for which another thread is worth waking (15 to 35 microseconds).
constexpr int64_t kShort = 8;             // shorter work may be done before sleeping workers are awake
constexpr int64_t kInterruptible = 2000;  // about 50 ms: from here on work looks for interrupts
constexpr int64_t kLongestRange = 400;    // about 10 ms: then the work that looks for them is in ranges of at most this

struct ThreadScratch : Scratch {
  ~ThreadScratch() { std::free(data); }
};

struct Job {
  const Kernels& kernels;
  const Call& call;
  uint64_t call_id;
  int64_t units, grain;
  bool whole_heads;
};

// A thread's part of a job.
struct Part {
  const Job& job;
  ThreadRanges& ranges;
};

bool next_units(void* context, int64_t& first, int64_t& last) {
  const Part& part = *static_cast<const Part*>(context);
  if (!part.ranges.next(first, last)) return false;
  const int64_t grain = part.job.grain, units = part.job.units;
  first *= grain;
  last = last * grain < units ? last * grain : units;
  return true;
}

void run_part(void* context, ThreadRanges& ranges) {
  const Job& job = *static_cast<const Job*>(context);
  Part part{job, ranges};
  job.kernels.attention(job.call, {next_units, &part, job.whole_heads}, job.call_id, thread_scratch());
}

// Lets the work end early between ranges of some 10 ms.
void make_interruptible(Work& work, int64_t cost, InterruptCheck check) {
  if (cost < kInterruptible) return;
  const int64_t range = kLongestRange * work.items / cost;
  work.longest_range = range < 1 ? 1 : range;
  work.check = check;
}

}  // namespace

char* Scratch::reserve(size_t bytes) {
  if (bytes > capacity) {
    std::free(data);
    capacity = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    data = static_cast<char*>(std::aligned_alloc(4096, capacity));
    packed_head = -1;
    if (!data) {
      capacity = 0;
      throw std::bad_alloc();
    }
  }
  return data;
}

Scratch& thread_scratch() {
  static thread_local ThreadScratch scratch;
  return scratch;
}

uint64_t next_call_id() {
  static std::atomic<uint64_t> last_call{0};
  return ++last_call;
}

void* Output::wait() const {
  for (;;) {
    if (void* data = __atomic_load_n(&data_, __ATOMIC_ACQUIRE)) return data;
    if (__atomic_load_n(&failed_, __ATOMIC_ACQUIRE)) throw std::runtime_error("the output could not be made");
    std::this_thread::yield();
  }
}

int64_t unit_count(const Call& call, int rows) {
  int64_t blocks = 0;
  if (!call.ends_q) blocks = call.batch * ((call.nq + rows - 1) / rows);
  for (int64_t s = 0; call.ends_q && s < call.sequences; ++s)
    blocks += (call.ends_q[s + 1] - call.ends_q[s] + rows - 1) / rows;
  return blocks * call.heads_q;
}

const std::vector<const Kernels*>& supported_kernels() {
  static const std::vector<const Kernels*> found = find_kernels();
  return found;
}

void run_attention(const Kernels& kernels, const Call& call, int threads, const std::function<void()>& first,
                   InterruptCheck check) {
  const int rows = kernels.unit_rows(call);
  const int64_t units = unit_count(call, rows);
  if (units == 0) return first();
  // Another thread must be worth more than its waking: beside a busy process it may wait for a core.
  const int64_t worth = call.batch * call.heads_q * call.nq * call.nk / kernels.scores_per_thread;
  if (worth < threads) threads = worth < 1 ? 1 : int(worth);
  const int64_t depth = call.head_dim + call.value_dim;
  const int64_t cost = depth > 128 ? worth * depth / 128 : worth;  // `worth` is of 64 channels
  const bool is_interruptible = cost >= kInterruptible;
  Job job{kernels, call, next_call_id(), units, 1, true};
  if (threads > 1) {
    // Threads draw whole heads where each gets many of them, or as many small ones, since a thread packs every K and V
    // that it meets. Heads that take longer than a longest range are divided.
    const int64_t heads = call.batch * call.heads_q;
    const bool are_many = heads >= kManyHeads * threads, are_small = call.nq * call.nk < kSmallHead;
    const bool are_long_rows = is_interruptible && cost / heads > kLongestRange;
    job.whole_heads = !call.ends_q && !are_long_rows && (are_many || (heads % threads == 0 && are_small));
    if (job.whole_heads) job.grain = (call.nq + rows - 1) / rows;
  } else if (!is_interruptible) {
    job.grain = units;
  }
  Work work{run_part, &job, (units + job.grain - 1) / job.grain, worth < kShort, units, nullptr};
  make_interruptible(work, cost, check);
  run_in_parallel(threads, work, first);
}

void run_items(int threads, int64_t items, int64_t cost, const std::function<void(const Units&, Scratch&)>& function,
               InterruptCheck check) {
  if (items == 0) return;
  if (cost < threads) threads = cost < 1 ? 1 : int(cost);
  const RangeFunction part = [](void* context, ThreadRanges& ranges) {
    const auto next = [](void* drawn, int64_t& first, int64_t& last) {
      return static_cast<ThreadRanges*>(drawn)->next(first, last);
    };
    (*static_cast<const std::function<void(const Units&, Scratch&)>*>(context))({next, &ranges, false},
                                                                                thread_scratch());
  };
  Work work{part, const_cast<void*>(static_cast<const void*>(&function)), items, false, items, nullptr};
  make_interruptible(work, cost, check);
  run_in_parallel(threads, work, [] {});
}

}  // namespace intflash
