// One attention call as the kernels see it. It is plain data, filled in by backends/cpu.py and host/module.cpp.
#pragma once
#include <cstddef>
#include <cstdint>

namespace intflash {

enum class Method : int32_t { kP16, kP8, kOnline, kTwoGroups, kQFlash, kIFlash };
enum class OutType : int32_t { kInt8, kInt16, kFloat16, kBFloat16, kFloat32 };

constexpr int32_t kAbsent = INT32_MIN;  // in a row of scores or a bias: the key takes no part
constexpr int kBiasFractionBits = 20;   // of the codes that `quantize_bias` makes
constexpr int kGranule = 128;           // keys per granule of intflash_online: semantics
constexpr int64_t kRoundedKeys = 768;   // intflash_bfp: p16 of a sequence of more keys is dithered
constexpr int kShortRowKeys = 256;      // keys of short rows at most
constexpr int kQFlashTile = 32;         // keys per tile of qflash and iflash: semantics, not tuning

// A tensor of four axes; a broadcast axis has stride 0. Strides count elements.
template <class T>
struct View {
  const T* data = nullptr;
  int64_t stride[4] = {0, 0, 0, 0};
  __attribute__((always_inline)) const T* at(int64_t a, int64_t b, int64_t c = 0, int64_t d = 0) const {
    return data + a * stride[0] + b * stride[1] + c * stride[2] + d * stride[3];
  }
};

// The output [batch, heads_q, nq, value_dim] with contiguous channels. Workers may begin before the calling thread has
// allocated it, so that the strides are valid once `get` has returned.
class Output {
 public:
  int64_t batch_step = 0, head_step = 0, row_step = 0;
  int64_t offset(int64_t b, int64_t h, int64_t row) const { return b * batch_step + h * head_step + row * row_step; }

  void set(void* data) { __atomic_store_n(&data_, data, __ATOMIC_RELEASE); }
  void fail() { __atomic_store_n(&failed_, true, __ATOMIC_RELEASE); }
  // Returns the output's memory; waits until the calling thread has set it, and throws where it has failed to.
  __attribute__((always_inline)) void* get() const {
    void* data = __atomic_load_n(&data_, __ATOMIC_ACQUIRE);
    return data ? data : wait();
  }

 private:
  void* wait() const;
  void* data_ = nullptr;
  bool failed_ = false;
};

// Whether P has 16 bits.
inline bool has_p16(Method m) { return m == Method::kP16 || m == Method::kTwoGroups; }

struct Call {
  Method method;
  OutType out_type;
  int64_t batch, heads_q, heads_k, nq, nk, head_dim, value_dim;
  View<int8_t> q, k, v;
  Output out;
  View<int32_t> bias;  // octaves of bias_fraction_bits; qflash, iflash: score units; batch index modulo bias_batch
  int bias_fraction_bits = kBiasFractionBits;
  View<uint8_t> keep;
  int64_t bias_batch, keep_batch;
  // With `causal` key j is present for query i iff j <= i + causal_offset, with `windowed`, which comes with it, iff
  // also j >= i + window_start. bottom_right: each packed sequence adds its number of keys less its number of queries.
  bool causal, windowed, bottom_right;
  int64_t causal_offset, window_start;
  const int32_t *ends_q, *ends_k;  // packed sequences: prefix sums, `sequences` + 1 of them; or null
  int64_t sequences;
  View<float> q_scale, k_scale, v_scale, out_scale;  // axes batch, head, block of tokens, channel
  int64_t q_block, k_block;                          // tokens per scale along axis 2
  double sm_scale;
  bool all_have_values = false;  // whether it is known that no key's V codes are all 0
  int64_t* t_max;                // for log-sum-exp, contiguous [batch, heads_q, nq], or null
  int64_t* l_sum;
};

// Where a thread draws ranges of units of work from until none are left.
struct Units {
  bool (*next_range)(void* context, int64_t& first, int64_t& last);
  void* context;
  bool whole_heads;  // a range never ends within a head that another range continues
  bool next(int64_t& first, int64_t& last) const { return next_range(context, first, last); }
};

// A thread's working memory, which grows on demand. It records whose K and V it holds packed.
struct Scratch {
  char* data = nullptr;
  size_t capacity = 0;
  uint64_t call_id = 0;
  int64_t packed_head = -1;
  int slot = 0;  // which of several places holds them
  char* reserve(size_t bytes);
};

// Rows of a strided tensor. Each has `runs` times `columns` contiguous values; the codes of its runs lie run_step
// apart.
struct Rows {
  int64_t rows, columns, row_step, runs = 1, run_step = 0;
};

enum class FloatType : int32_t { kFloat32, kFloat16, kBFloat16 };

struct IntegerKernels;  // of integer models, integer.h

// The kernels of one instruction set.
struct Kernels {
  const char* name;
  // The work for which another thread is worth waking: 15 to 35 microseconds of intflash_p8 at head_dim 64.
  int64_t scores_per_thread;
  int (*unit_rows)(const Call&);  // query rows of a unit of work
  void (*attention)(const Call&, const Units&, uint64_t call_id, Scratch&);
  float (*absolute_maximum)(const void* x, FloatType, const Rows&);
  void (*quantize)(const void* x, FloatType, const Rows&, float inverse, int qmax, int8_t* codes);
  const IntegerKernels* integer;
};

extern const Kernels kGenericKernels, kAvx2Kernels, kAvxVnniKernels, kAvx512VnniKernels, kAmxKernels, kNeonKernels,
    kNeonI8mmKernels;

// The number of units of a call: blocks of at most `rows` query rows of every head and sequence.
int64_t unit_count(const Call& call, int rows);

}  // namespace intflash
