// Turns a problem on a GPU into launches over one workspace: which kernels, their programs and their parameters. Needs
// neither a GPU nor torch nor Python: tests compare what it prepares.
#pragma once
#include <cstdint>
#include <new>
#include <string>

#include "cpu/call.h"
#include "cuda/params.cuh"

namespace intflash::gpu {

// A tensor [batch, heads, tokens, channels] on the device; `data` is null where there is none.
struct Tensor {
  char* data = nullptr;
  int64_t shape[4] = {1, 1, 1, 1}, stride[4] = {0, 0, 0, 0};  // in elements
  OutType type = OutType::kFloat32;
  int64_t available = 0;  // elements from `data` to the end of its storage, of int8 tensors alone

  explicit operator bool() const { return data != nullptr; }
  int64_t bytes() const { return type == OutType::kInt8 ? 1 : type == OutType::kFloat32 ? 4 : 2; }
  bool is_codes() const { return type == OutType::kInt8; }
};

// A validated call, as problem.py describes one, without what these kernels do not know.
struct Problem {
  Method method = Method::kP16;
  Tensor q, k, v;         // all codes or all floats of one type
  Tensor scale[3];        // float32 scales of Q, K and V; all null where floats have scales of their own maxima
  bool per_head[3]{};     // floats: granularity of each, tensor or head
  bool is_constant[3]{};  // of `scale`: numbers of the recipe, which no kernel writes
  double sm_scale = 0;
  Tensor bias, keep;  // int32 and bool, [Bm, H|1, Nq|1, Nk|1]; `type` has no meaning
  bool is_causal = false;
  int64_t causal_offset = 0;
  OutType out_type = OutType::kFloat16;
  Tensor given_out_scale;             // float32, of integer output
  const char* ready_score = nullptr;  // address of the packed score constants, where they are known: one for all heads

  bool is_float() const { return !q.is_codes(); }
  bool is_dynamic() const { return is_float() && !scale[0]; }
  bool has_integer_output() const { return out_type == OutType::kInt8 || out_type == OutType::kInt16; }
  int64_t batch() const { return q.shape[0]; }
  int64_t heads() const { return q.shape[1]; }
  int64_t nq() const { return q.shape[2]; }
  int64_t nk() const { return k.shape[2]; }
  int64_t head_dim() const { return q.shape[3]; }
  int64_t group() const { return q.shape[1] / k.shape[1]; }
};

// Why a kernel does not serve a problem. Calls only ask whether there is a reason; `wanted` composes its text.
struct Refusal {
  bool wanted = false;
  std::string text;
  // Returns false, for `return why.no([&] { return text; })`.
  template <class Text>
  bool no(const Text& make) {
    if (wanted) text = make();
    return false;
  }
};

// A file of csrc/cuda: its kernel's name, and the macros with which it is compiled, with the names that stand for their
// values where they are no numbers.
constexpr int kMostMacros = 20;
struct Macro {
  const char* name;
  const char* const* values;
};
struct Source {
  const char *file, *entry;
  Macro macros[kMostMacros];
  int count() const {
    int n = 0;
    while (n < kMostMacros && macros[n].name) ++n;
    return n;
  }
};

struct Program {
  const Source* source = nullptr;
  int32_t values[kMostMacros] = {};
};

// One of the driver's tensor maps without its bytes: dimensions from the innermost one on, strides in bytes.
struct MapShape {
  uint64_t sizes[5], strides[4];
  uint32_t box[5];
  int swizzle;  // bytes per row in shared memory: 32, 64 or 128
  const char* address;
};

struct Launch {
  Program program;
  uint32_t grid[3] = {1, 1, 1}, threads = 0, shared_bytes = 0;
  alignas(64) unsigned char parameters[sizeof(::Params)];
  uint32_t parameter_bytes = 0;
  bool has_maps = false;
  MapShape k_map, v_map;
  ::TensorMaps maps;  // its first two members are filled by the driver

  template <class P>
  P& set_parameters() {
    static_assert(sizeof(P) <= sizeof parameters);
    parameter_bytes = sizeof(P);
    return *new (parameters) P{};
  }
};

// The launches of a call in their order, which share one workspace.
struct Plan {
  Launch launches[4];
  int count = 0;

  Launch& next() { return launches[count++]; }
};

// Where a call's results and its working memory lie.
struct Memory {
  Tensor out;
  int64_t* t_max = nullptr;  // [batch, heads, nq], where log-sum-exp is wanted
  int32_t* l = nullptr;
  float* out_scale = nullptr;
  char* workspace = nullptr;  // aligned to 256 bytes
};

enum class Kernel { kWindow, kShortRows, kLongRows };

// What a problem's launches are, before there is memory.
struct Choice {
  Kernel kernel;
  bool head_amax_in_kernel;  // the attention kernel finds the scale of each head
  bool fuses_keys;           // floats: the attention kernel quantizes K and V too, and not only Q
  bool finds_scales;         // absmax or head_absmax
  bool fills_constants;
  bool copies_values;   // V's codes are copied, with contiguous keys, as 8-bit tensor cores read them
  int64_t scale_count;  // scales that are found
  int64_t scales, key_codes, value_codes, score, output, bytes;  // offsets in the workspace, and its size
  int64_t zeros, zero_bytes;  // the part of the workspace that is to be cleared before
  int64_t score_shape[4], output_shape[4];
};

// Returns whether the kernels serve the problem on a GPU of so many multiprocessors, and how.
bool choose(const Problem& p, int processors, Choice& choice, Refusal& why);
int64_t numel(const int64_t (&shape)[4]);
// A tensor of four axes in contiguous memory, and V's codes of a workspace.
Tensor packed(char* data, const int64_t (&shape)[4]);
Tensor value_codes(const Problem& p, const Choice& choice, char* workspace);
void fill_plan(const Problem& p, const Choice& choice, const Memory& memory, int processors, Plan& plan);

// --- What the kernels' files share --------------------------------------------------------------------------------

constexpr const char* kTypeNames[] = {"i8", "i16", "half_t", "bfloat_t", "float"};
constexpr int64_t kGridLimit = 65535;  // CTAs along the second and third axis of a grid

// The constants that attention kernels read; null data where the kernel computes them.
struct Constants {
  Tensor score, output, v_scale;
};

// What an attention launch is made of: codes, or floats with their scales.
struct Attention {
  const Problem& p;
  const Memory& memory;
  Tensor q, k, v;
  bool is_fused;  // q is floats
  bool head_amax_in_kernel;
  Tensor scale[3];  // where is_fused; those of K and V null where they are codes
  Constants constants;
  int processors;

  bool has_row_scales() const { return !is_fused && constants.score.shape[2] > 1; }
};

inline int64_t ceil_div(int64_t x, int64_t by) { return (x + by - 1) / by; }
inline int64_t round_up(int64_t x, int64_t to) { return ceil_div(x, to) * to; }
// What `__umulhi` divides small numbers by x with; 0 for 1.
inline uint32_t reciprocal(int64_t x) { return x == 1 ? 0 : uint32_t(((1ull << 32) + uint64_t(x) - 1) / uint64_t(x)); }
// What `quotient` divides any number by x with; 0 where nothing will be divided by x = 0.
inline uint32_t quotient_reciprocal(int64_t x) { return x ? uint32_t(0xFFFFFFFFull / uint64_t(x)) : 0; }

// A tensor with stride 0 along axes of length 1, so that any index reads its one element.
::View view(const Tensor& x);
// A tensor of codes or values with its own strides, which tell alignment even along axes of length 1.
::View data_view(const Tensor& x);
std::string text_of(const int64_t (&four)[4]);
// Whether `tokens` tokens of every head lie inside the storage of codes: kernels may then read rows past N.
bool is_readable(const Tensor& x, int64_t tokens);
// Whether 16-byte copies can load `keys` keys of V's codes in their present layout.
bool is_key_major(const Tensor& v, int64_t keys);
::Params attention_parameters(const Attention& a, int32_t tiles, const ::Share& share);
// Sets a launch's maps of K and V, and whether TMA can load them. groups: of 16 keys per copy of K; width: bytes per
// row of K in shared memory. V is copied in boxes of 128 keys.
bool set_tensor_maps(Launch& launch, const Tensor& k, const Tensor& v, int64_t groups, int64_t width);

bool window_serves(const Problem& p, Refusal& why);
void window_launch(const Attention& a, Launch& launch);

bool short_rows_serve(const Problem& p, Refusal& why);
void short_rows_launch(const Attention& a, Launch& launch);
int64_t key_width(int64_t head_dim);  // bytes per row of K in shared memory: K_WIDTH of the kernels

bool long_rows_serve(const Problem& p, Refusal& why);
bool long_rows_quantize_keys(const Problem& p, int processors);
void long_rows_launch(const Attention& a, Launch& launch);

// The score constants of two scales, as constants.cu packs them.
uint64_t packed_score(const Problem& p, float q_scale, float k_scale);
// Finds the scales of floats: maxima and counters of finished CTAs, zeros at launch, then the scales.
void absmax_launch(const Problem& p, int64_t scale_count, uint32_t* amax, Launch& launch);
// The scale of Q, K or V that a call finds: one, or one for each head. Scales of the three follow one another.
Tensor found_scale(const Problem& p, int which, float* data);
void quantize_launch(const Problem& p, const Tensor (&scale)[3], const Tensor& k_codes, const Tensor& v_codes,
                     Launch& launch);
void constants_launch(const Problem& p, const Choice& choice, const Tensor (&scale)[3], char* workspace,
                      float* out_scale, Launch& launch);

}  // namespace intflash::gpu
