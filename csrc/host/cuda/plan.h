// Turns a problem on a GPU into launches over one workspace: which kernels, their programs and their parameters. Needs
// neither a GPU nor torch nor Python.
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

// The methods that have plans, in the order of Method.
constexpr const char* kMethods[] = {"intflash", "intflash_p8", "intflash_online", "intflash_bfp"};
inline bool has_kernels(Method m) { return size_t(m) < std::size(kMethods); }
// What the macro METHOD of kernels says for each of them.
constexpr const char* kMethodNames[] = {"ExactP16", "ExactP8", "Online", "TwoGroups"};

// A GPU as far as plans depend on it.
struct Gpu {
  int processors = 132, major = 9, minor = 0;  // multiprocessors; compute capability
  int64_t shared_bytes = 227 * 1024;           // of shared memory that a CTA can have

  bool is_hopper() const { return major == 9 && minor == 0; }
};

enum class Kernel { kWindow, kShortRows, kLongRows, kWholeRows, kFewRows, kAnyRows };
constexpr const char* kKernelNames[] = {"window", "short_rows", "long_rows", "whole_rows", "few_rows", "any_rows"};
// Few and any rows serve any shape, the others particular ones.
inline bool is_for_any_shape(Kernel kernel) { return kernel == Kernel::kFewRows || kernel == Kernel::kAnyRows; }

// Choices that tests fix, because results must not depend on them. The plan makes those that are negative.
struct Fixed {
  int kernel = -1;                          // a `Kernel`; any_rows: few_rows too, where it takes the problem
  int64_t window_split[3] = {-1, -1, -1};   // warps per window, rows per tile, windows per CTA
  int64_t row_split[4] = {-1, -1, -1, -1};  // of short rows: warpgroups, tiles, CTAs, whole heads: see `Split`
  int exp_32bit = -1, cluster = -1;         // of short rows
  int consumers = -1, resident = -1, fuses_keys = -1, remainder = -1;  // of long rows
  int head_amax_in_kernel = -1;                                        // of long, short and whole rows
  int64_t range_split[3] = {-1, -1, -1};       // of long rows: whole ranges, tiles of a smaller one, its first CTA
  int64_t tile[6] = {-1, -1, -1, -1, -1, -1};  // of any rows: see `Tile`
  int key_splits = -1, large_tiles = -1;       // of few rows
};

constexpr int64_t kMostSums = 65536;      // keys whose sums 32 bits hold
constexpr int64_t kReservedBytes = 1024;  // of shared memory, by the GPU for each CTA

constexpr int32_t kLeftOut = INT32_MIN;  // as a macro's value: the kernel is compiled without it

// A validated call, as problem.py describes one, without what these kernels do not know.
struct Problem {
  Method method = Method::kP16;
  Tensor q, k, v;      // all codes, all floats of one type, or float Q beside codes of K and V
  Tensor scale[3];     // float32 scales of Q, K and V; null where floats have scales of their own maxima
  bool per_head[3]{};  // floats: granularity of each, tensor or head
  double sm_scale = 0;
  Tensor bias, keep;  // int32 and bool, [Bm, H|1, Nq|1, Nk|1]; `type` has no meaning
  int bias_fraction_bits = kBiasFractionBits;
  Tensor key_counts;         // int32 [B]: batch b has only its first keys, so many
  bool is_causal = false;    // key j is present for row i iff j <= i + causal_offset
  bool is_windowed = false;  // and iff also j >= i + window_start; only with is_causal
  int64_t causal_offset = 0, window_start = 0;
  // Of packed sequences: the first row and key of each, and the ends of the last. With bottom_right each adds its
  // number of keys less its number of queries to the offsets above.
  const int32_t *cu_seqlens_q = nullptr, *cu_seqlens_k = nullptr;
  int64_t sequences = 0;
  bool is_bottom_right = false;
  OutType out_type = OutType::kFloat16;
  Tensor given_out_scale;            // float32, of integer output
  bool has_copies = false;           // tensors that `needs_copy` names are such copies
  Tensor ready_score, ready_output;  // packed constants that are in memory already; the second of integer output
  bool only_constants = false;       // nothing is launched but what fills the packed constants
  Fixed fixed;

  bool has_float_query() const { return !q.is_codes(); }
  bool is_float() const { return !k.is_codes(); }  // all of Q, K and V
  bool is_dynamic() const { return has_float_query() && !scale[0]; }
  // The macro BIAS_FRACTION_BITS of kernels.
  int32_t bias_macro() const { return bias ? bias_fraction_bits : kLeftOut; }
  bool has_two_groups() const { return method == Method::kTwoGroups; }
  bool dithers() const { return has_two_groups() && nk() > kRoundedKeys; }
  // Whether 32 bits do not hold the sums of a row, which other methods refuse.
  bool has_many_keys() const { return has_two_groups() && nk() > kMostSums; }
  bool has_integer_output() const { return out_type == OutType::kInt8 || out_type == OutType::kInt16; }
  int64_t batch() const { return q.shape[0]; }
  int64_t heads() const { return q.shape[1]; }
  int64_t nq() const { return q.shape[2]; }
  int64_t nk() const { return k.shape[2]; }
  int64_t head_dim() const { return q.shape[3]; }
  int64_t group() const { return q.shape[1] / k.shape[1]; }
};

// Whether Q, K and V are of the types that a problem can have.
inline bool has_served_types(const Problem& p) {
  return p.k.type == p.v.type && (p.q.type == p.k.type || p.k.is_codes()) && p.q.type != OutType::kInt16;
}

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

constexpr int kMostLaunches = 6;  // of a call: scales, constants, codes, keys without a value, up to three of attention
constexpr int kMostMacros = 23;
struct Macro {
  const char* name;
  const char* const* values;  // texts by the macro's number; null where it is that number itself
};
// A file of csrc/cuda: its kernel's name, and the macros with which it is compiled.
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
  Launch launches[kMostLaunches];
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

// A part of the workspace, in bytes.
struct Part {
  int64_t offset = 0, bytes = 0;
};

constexpr int kMostParts = 10;

// What a problem's launches are, before there is memory.
struct Choice {
  Kernel kernel;
  bool head_amax_in_kernel;     // the attention kernel finds the scale of each head, of Q alone beside codes
  bool scores_in_kernel;        // few and long rows compute the score constants of float Q themselves
  bool fuses_keys;              // floats: the attention kernel quantizes K and V too, and not only Q
  bool finds_scales;            // absmax or head_absmax
  bool scales_in_quantization;  // quantize_inputs finds them
  bool fills_constants;
  bool copies_values;    // V's codes are copied, with contiguous keys, as 8-bit tensor cores read them
  bool finds_valueless;  // keys without a value, for intflash_bfp, where the attention kernel does not find them
  int64_t scale_count;   // scales that are found and kept in memory; short rows and windows keep none
  int64_t scales, key_codes, value_codes, score, output, valueless;  // offsets in the workspace
  int64_t key_scores, maxima, sums;                                  // of few rows
  int64_t bytes;                                                     // of the workspace
  Part parts[kMostParts];                                            // its parts, in order
  int part_count;
  Part zeros;  // what is to be cleared before
  int64_t score_shape[4], output_shape[4];
};

// Returns which kernel serves a problem on a GPU, or false. Those for any shape may need copies of tensors: see below.
bool find_kernel(const Problem& p, const Gpu& gpu, Kernel& kernel, Refusal& why);
// Whether the kernels for any shape need a copy of a tensor of the problem: rows of Q, K or V that 16-byte accesses
// cannot read, or a mask without contiguous keys. A copy's rows are padded with zeros to whole 16 bytes of codes.
bool needs_copy(const Problem& p, const Tensor& x);
// Returns whether the kernels serve the problem, whose tensors need no copies, and how.
bool choose(const Problem& p, const Gpu& gpu, Choice& choice, Refusal& why);
int64_t numel(const int64_t (&shape)[4]);
// A tensor of four axes in contiguous memory, and V's codes of a workspace.
Tensor packed(char* data, const int64_t (&shape)[4]);
Tensor value_codes(const Problem& p, const Choice& choice, char* workspace);
void fill_plan(const Problem& p, const Choice& choice, const Memory& memory, const Gpu& gpu, Plan& plan);

// --- What the kernels' files share --------------------------------------------------------------------------------

constexpr const char* kTypeNames[] = {"i8", "i16", "half_t", "bfloat_t", "float"};
constexpr const char* kHopperOnly = "the kernels of short and long rows need compute capability 9.0";
constexpr int64_t kGridLimit = 65535;  // CTAs along the second and third axis of a grid
constexpr int64_t kChannels = 8;       // of floats that kernels quantize at once
constexpr int64_t kWordKeys = 128;     // keys of the four words that tell which have no value

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
  Tensor scale[3];  // where is_fused; those of K and V null where nothing is computed from them
  Constants constants;
  Tensor valueless;  // int32 words
  const Gpu& gpu;

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
// row of K in shared memory; lane: adjacent channels of V that a lane holds (`value_row`). V is copied in boxes of 128
// keys.
bool set_tensor_maps(Launch& launch, const Tensor& k, const Tensor& v, int64_t groups, int64_t width, int64_t lane);

// Whether channels are contiguous and tokens at multiples of 16 bytes; codes of V may have contiguous keys instead.
bool is_aligned(const Tensor& x, const char* name, Refusal& why, bool may_have_contiguous_keys = false);
bool has_short_rows(Method method);  // windows too
bool window_serves(const Problem& p, Refusal& why);
void window_launch(const Attention& a, Launch& launch);

constexpr int64_t kMostSearchedQueries = 1024;  // of a head, which each of its CTAs searches for their scale
bool short_rows_serve(const Problem& p, const Gpu& gpu, Refusal& why);
// How many CTAs take a head and share the search for its scales, as a cluster; 1 where each CTA searches alone.
int64_t short_rows_cluster(const Problem& p);
void short_rows_launch(const Attention& a, Launch& launch);
int64_t key_width(int64_t head_dim);  // bytes per row of K in shared memory: K_WIDTH of the kernels

bool long_rows_serve(const Problem& p, const Gpu& gpu, Refusal& why);
bool long_rows_quantize_keys(const Problem& p, const Gpu& gpu);
bool long_rows_find_scales(const Problem& p, const Gpu& gpu);
void long_rows_launch(const Attention& a, Launch& launch);

// What the kernels of long_rows.cu and long_rows_float.cu share.
constexpr int64_t kTile = 128;  // keys per tile
constexpr int64_t kStages = 4;  // of the ring buffer
// Whether the main loop serves head_dim, a multiple of `multiple`.
bool is_long_rows_shape(const Problem& p, int64_t multiple, Refusal& why);
// Bytes of `SharedLayout` of long_rows_load.cuh: the stages with K's tile, V's, K's scales and barriers; Q's rows; and
// `extra`.
int64_t long_rows_shared_bytes(int64_t d, int64_t consumers, int64_t value_bytes, int64_t scale_bytes, int64_t stages,
                               int64_t extra);
struct Schedule {
  int64_t ctas;
  ::Share share;
};
// The ranges of rows that the tile scheduler hands out.
Schedule schedule_ranges(const Problem& p, int64_t consumers, const Gpu& gpu);

// Long rows with a float softmax. p.q and p.k are codes, p.v 16-bit floats, scale[0] and scale[1] their scales, K's of
// one per `key_scales`: 0 head, 1 tile of keys, 2 key. t_max and l of `memory` are float32.
bool float_rows_serve(const Problem& p, const Gpu& gpu, Refusal& why);
void float_rows_launch(const Problem& p, int key_scales, const Memory& memory, const Gpu& gpu, Launch& launch);

// Bytes of a tile of K and of V in shared memory, as sm80/tiles.cuh lays them out: K_BYTES, and V_BYTES in its larger
// layout.
int64_t key_tile_bytes(int64_t keys, int64_t head_dim);
int64_t value_tile_bytes(int64_t keys, int64_t channels);

bool whole_rows_serve(const Problem& p, const Gpu& gpu, Refusal& why);
bool whole_rows_beat_long_rows(const Problem& p);
void whole_rows_launch(const Attention& a, Launch& launch);

// How kernels for every GPU read a mask of the problem, its bias or `keep`: 0 none, 1 by keys, 2 one value for all
// keys, 4 four keys at once (sm80/masks.cuh).
int32_t mask_kind(const Problem& p, const Tensor& mask);
bool any_rows_serve(const Problem& p, const Gpu& gpu, Refusal& why);
bool takes_few_rows(const Problem& p, const Gpu& gpu);
void any_rows_launch(const Attention& a, Launch& launch);
// How the keys of few rows are split, and the sizes of the memory that their launches share.
struct FewRows {
  int64_t splits, keys, score_bytes, maximum_bytes, sum_bytes;
};
FewRows few_rows(const Problem& p, const Gpu& gpu);
void few_rows_launches(const Attention& a, const Choice& choice, Plan& plan);

// The score constants of two scales, as constants.cu packs them.
uint64_t packed_score(const Problem& p, float q_scale, float k_scale);
// Finds the scales of floats, by clusters of `absmax_cluster` CTAs or, where that is 0, through `zeros`: of each scale
// its maximum and a counter of finished CTAs, both 0 at launch.
void absmax_launch(const Problem& p, float* scales, uint32_t* zeros, int64_t scale_count, const Gpu& gpu,
                   Launch& launch);
int64_t absmax_cluster(const Problem& p, const Gpu& gpu);
// The scale of Q, K or V that a call finds: one, or one for each head. Scales that are found follow one another.
Tensor found_scale(const Problem& p, int which, float* data);
// Makes codes of float K and V, or copies codes of V. Its tiles of V are blocks of keys, so that it fills the words of
// `valueless` too, unless that is null; packed sequences, whose blocks differ, have a launch for these.
void quantize_launch(const Problem& p, const Tensor (&scale)[3], bool finds_scales, const Tensor& k_codes,
                     const Tensor& v_codes, const Tensor& valueless, Launch& launch);
// Whether that launch finds the scales of floats itself.
bool quantization_finds_scales(const Problem& p, const Gpu& gpu);
void constants_launch(const Problem& p, const Choice& choice, const Tensor (&scale)[3], char* workspace,
                      float* out_scale, Launch& launch);
// The words of `Params::valueless`: [B, Hk, 1, words]. The launch reads V's codes, whose channels or keys are
// contiguous.
Tensor valueless_words(const Problem& p, char* data);
void valueless_launch(const Problem& p, const Tensor& v, const Tensor& words, Launch& launch);

}  // namespace intflash::gpu
