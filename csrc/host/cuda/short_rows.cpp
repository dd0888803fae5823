// Launches of csrc/cuda/sm90/short_rows.cu, for at most 336 keys: whole rows of scores stay in registers.
#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <map>

#include "host/cuda/plan.h"

namespace intflash::gpu {
namespace {

constexpr int64_t kMostQueries = 64 * kGridLimit;
constexpr int64_t kMostBiasKeys = 224;  // of a row beside a bias, which takes registers

const Source kSource = {"sm90/short_rows.cu",
                        "attention",
                        {{"KEYS", nullptr},
                         {"FIRST", nullptr},
                         {"HEAD_DIM", nullptr},
                         {"BITS", nullptr},
                         {"IN", kTypeNames},
                         {"OUT", kTypeNames},
                         {"KEY_MAJOR", nullptr},
                         {"EXP_32BIT", nullptr},
                         {"ROW_SCALES", nullptr},
                         {"HEAD_AMAX_IN_KERNEL", nullptr},
                         {"VALUES_IN_RANGE", nullptr},
                         {"TMA", nullptr},
                         {"REMAINDER_ROWS", nullptr},
                         {"STATISTICS", nullptr},
                         {"HEADS_FIRST", nullptr},
                         {"REVERSE_HEADS", nullptr},
                         {"DIVIDED", nullptr},
                         {"WARPGROUPS", nullptr},
                         {"CTAS_PER_SM", nullptr},
                         {"BIAS", nullptr},
                         {"CLUSTER", nullptr},
                         {"TWO_GROUPS", nullptr},
                         {"BIAS_FRACTION_BITS", nullptr}}};

// How the work is split.
struct Split {
  int64_t warpgroups;   // of a CTA
  int64_t tiles;        // of 64 rows, of a CTA; the last CTA of a head takes all rows that remain
  int64_t ctas_per_sm;  // of a multiprocessor
  int64_t parts;        // CTAs that a head is divided among
  int64_t whole;        // heads that are not divided, and have one CTA each
};

// The most keys of a row: so many that few words spill.
int64_t most_keys(int64_t d) { return d <= 64 ? 336 : d <= 80 ? 304 : 224; }

// The number of warpgroups per multiprocessor whose scores, accumulators and Q fit the registers; 0 if none fits.
// Three warpgroups leave 168 registers per thread. For odd widths ptxas needs more than the sum; of two warpgroups with
// a head_dim to 80 it needs less.
int64_t ctas_per_sm(int64_t keys, int64_t d, int64_t bits, int64_t itemsize) {
  const int64_t query = d / 8 * (itemsize < 4 ? itemsize : 1);
  const int64_t registers = keys / 2 + d / 2 * (bits / 8) + query + (bits == 8 ? 16 : 40) + (d > 80 ? 8 : 0);
  if (registers <= 88) return 4;
  const int64_t most = (bits == 8 ? 168 : 160) - (d > 96 && itemsize == 2 ? 8 : 0);
  if (registers <= most && (keys <= 128 || (bits == 8 && 192 <= keys && keys <= 208))) return 3;
  return keys <= most_keys(d) && (d <= 80 || registers <= 232) ? 2 : 0;
}

// How many keys of a row are its first part (short_rows_mainloop.cuh): about half of them. With 32 fewer ptxas spills
// few words of these two.
int64_t keys_of_first_part(int64_t keys, int64_t d) {
  if (keys < 64) return 0;
  const bool fewer = (48 < d && d <= 64 && keys == 304) || (64 < d && d <= 80 && keys == 288);
  return (keys + 32) / 64 * 32 - 32 * fewer;
}

// How much slower CTAs are where a third one on a multiprocessor makes registers spill a few words; 0 where it spills
// many. It is worth that where all heads run at once then.
double time_of_third_cta(int64_t keys, int64_t d, int64_t bits) {
  if (bits == 8 || d != 64) return 0;
  return keys <= 144 ? 1.03 : 192 <= keys && keys <= 208 ? 1.16 : 0;
}

// The row tiles of a head. Remainder rows, of which short_rows_remainder.cuh is, are none of the whole ones.
struct RowTiles {
  int64_t all, whole;
};
RowTiles row_tiles_of(int64_t nq, bool has_remainder) {
  const int64_t all = ceil_div(nq, 64);
  return {all, std::max<int64_t>(all - has_remainder, 1)};
}

// What the choice of a split depends on. most_ctas: of a multiprocessor; third: see `time_of_third_cta`.
struct SplitProblem {
  int64_t heads, processors;
  RowTiles rows;
  int64_t most_ctas;
  double third;
  bool codes, has_bias, finds_scales;
};

// The time that a multiprocessor takes for one to four CTAs of a warpgroup, which it runs at once, and the times of
// remainder rows and of a CTA before its tiles over that of a tile, the latter by [has a bias][finds scales]: measured
// on an H200 with N = 196 and 197.
constexpr double kTimes[] = {0, 0.8, 1, 1.37, 1.8}, kRemainderTime = 0.3;
constexpr double kStartTimes[2][2] = {{0.82, 3.3}, {0.41, 0.82}};

// Into how many parts heads are divided where they occupy all multiprocessors, and how many CTAs each multiprocessor
// takes where they do not, or where some heads are divided only: more were not measured.
constexpr int64_t kMostParts = 4, kMostCtas = 8;

// CTAs that take a time each.
struct Ctas {
  int64_t count;
  double time;
};

// Returns when the last CTA ends if `places` of them run at once, and each of the others begins where the next one
// ends.
double end_of(std::initializer_list<Ctas> all, int64_t places) {
  std::map<double, int64_t> free{{0.0, places}};  // how many CTAs can begin when
  for (auto [count, time] : all)
    while (count > 0) {
      const auto [begin, free_places] = *free.begin();
      const int64_t some = std::min(count, free_places);
      free.erase(free.begin());
      if (free_places > some) free[begin] = free_places - some;
      free[begin + time] += some;
      count -= some;
    }
  return free.rbegin()->first;
}

// Searches the split that ends first, by measured times. A split has to be 5 % faster to replace one that was tried
// before.
class SplitSearch {
 public:
  explicit SplitSearch(const SplitProblem& p) : p_(p), start_(kStartTimes[p.has_bias][p.finds_scales]) {}

  // Of CTAs of one warpgroup. Few heads may have one CTA of two warpgroups on each multiprocessor instead, and have it
  // where they are of few tiles.
  Split fastest() {
    const bool few_heads = p_.heads <= p_.processors;
    if (few_heads) {
      const int64_t tiles = ceil_div(p_.rows.whole, p_.processors / p_.heads);
      take({2, tiles, 1, ceil_div(p_.rows.whole, tiles), 0}, start_ + double(ceil_div(tiles, 2)) + remainder_time());
      if (p_.rows.all <= kMostParts) return best_;
    }
    const int64_t last = p_.third && p_.most_ctas == 2 ? 3 : p_.most_ctas;
    for (int64_t at_once = p_.most_ctas; at_once <= last; ++at_once)
      for (int64_t i = 1; i <= (few_heads ? kMostCtas : kMostParts); ++i) {
        const int64_t wanted = std::min(p_.rows.whole, few_heads ? i * p_.processors / p_.heads : i);
        const int64_t tiles = ceil_div(p_.rows.whole, wanted), parts = ceil_div(p_.rows.whole, tiles);
        divide_all(at_once, tiles, parts);
        // of fewer tiles, or where registers spill, dividing some heads was slower
        const bool may_divide_some = 1 < parts && 2 < p_.rows.whole && at_once == p_.most_ctas;
        if (may_divide_some && !few_heads) divide_some(at_once, tiles, parts);
      }
    return best_;
  }

 private:
  void take(const Split& split, double time) {
    if (time < 0.95 * least_) best_ = split, least_ = time;
  }
  double remainder_time() const { return p_.rows.all > p_.rows.whole ? kRemainderTime : 0; }
  // The times of a CTA of all rows, of one of the first parts of a head, and of its last part.
  double of_head() const { return start_ + double(p_.rows.whole) + remainder_time(); }
  double of_part(int64_t tiles) const { return start_ + double(tiles); }
  double of_last(int64_t tiles, int64_t parts) const { return of_head() - double((parts - 1) * tiles); }
  double of_longest(int64_t tiles, int64_t parts) const {
    return parts == 1 ? of_head() : std::max(of_part(tiles), of_last(tiles, parts));
  }

  void divide_all(int64_t at_once, int64_t tiles, int64_t parts) {
    const int64_t ctas = ceil_div(p_.heads * parts, p_.processors);
    const double rounds = double(ctas / at_once) * kTimes[at_once] + kTimes[ctas % at_once];
    take({1, tiles, std::min(at_once, ctas), parts, 0},
         rounds * of_longest(tiles, parts) * (at_once > p_.most_ctas ? p_.third : 1));
  }

  // Divides the heads that would run last, and perhaps some more, so that all multiprocessors end at about the same
  // time.
  void divide_some(int64_t at_once, int64_t tiles, int64_t parts) {
    const int64_t places = p_.processors * at_once;
    if (p_.heads <= places || p_.heads > kMostCtas * places) return;
    for (int64_t more = 0; more <= places; more += places / 8) {
      const int64_t divided = p_.heads % places + more, whole = p_.heads - divided, ctas = divided * parts;
      if (divided == 0 || whole <= 0) continue;
      // where the parts of all of them run at once they find their scales sooner
      const double saved = ctas <= places ? start_ - kStartTimes[p_.has_bias][0] : 0;
      double end = end_of(
          {{whole, of_head()}, {ctas - divided, of_part(tiles) - saved}, {divided, of_last(tiles, parts) - saved}},
          places);
      if (ctas <= places && more == 0 && !p_.has_bias)  // alone they take less time; with a bias they wait for memory
        end = double(whole / places) * of_head() +
              (of_longest(tiles, parts) - saved) * kTimes[ceil_div(ctas, p_.processors)] / kTimes[at_once];
      take({1, tiles, at_once, parts, whole}, end * kTimes[at_once]);
    }
  }

  const SplitProblem& p_;
  const double start_;
  Split best_{};
  double least_ = INFINITY;
};

// Whether there are so few tiles of 64 rows that each multiprocessor takes one or two.
bool are_few_tiles(int64_t tiles, int64_t processors) { return tiles <= 2 * processors; }

// By measurements on an H200 with N = 197. While there are few tiles, each CTA has one, and for floats it has
// warpgroups that only help to quantize. With more tiles, K and V are loaded once for several.
Split choose_split(const SplitProblem& p) {
  const int64_t tiles = p.heads * p.rows.all, some = std::min<int64_t>(p.most_ctas, 3);
  if (tiles <= p.processors) return {p.codes ? 1 : some, 1, p.codes ? p.most_ctas : 1, p.rows.all, 0};
  if (are_few_tiles(tiles, p.processors)) return {p.codes ? 2 : some, 2, 1, ceil_div(p.rows.all, 2), 0};
  return SplitSearch(p).fastest();
}

int64_t bits_of(Method method) { return method == Method::kP8 ? 8 : 16; }

// The number of keys of the bias that one load may read.
int32_t keys_at_once(const Tensor& bias) {
  bool whole = bias.shape[3] % 4 == 0 && uintptr_t(bias.data) % 16 == 0;
  for (int i = 0; i < 3; ++i) whole &= bias.shape[i] == 1 || bias.stride[i] % 4 == 0;
  return whole ? 4 : 1;
}

}  // namespace

int64_t short_rows_cluster(const Problem& p) {
  if (p.fixed.cluster > 0) return p.fixed.cluster;
  constexpr int64_t kMostOfCluster = 8, kLeastOfAll = 100;  // CTAs, by measurements on an H200
  constexpr int64_t kLeastBytes = 8'000'000;                // of Q; a pass searches fewer in less time
  // A cluster runs within a group of multiprocessors (GPC). An H200 has at least seven with 16, others with fewer.
  constexpr int64_t kGroups = 7, kProcessorsOfGroup = 16;
  const int64_t heads = p.batch() * p.heads();
  if (p.nq() <= kMostSearchedQueries || heads * p.nq() * p.head_dim() * p.q.bytes() < kLeastBytes) return 1;
  int64_t ctas = kMostOfCluster;
  while (ctas > 1 && heads > kGroups * (kProcessorsOfGroup / ctas)) --ctas;
  return heads * ctas >= kLeastOfAll ? ctas : 1;
}

int64_t key_width(int64_t d) { return d <= 32 ? 32 : d <= 64 ? 64 : 128; }

bool short_rows_serve(const Problem& p, const Gpu& gpu, Refusal& why) {
  const auto number = [](int64_t x) { return std::to_string(x); };
  for (const auto& [is_there, name] : {std::pair(bool(p.keep), "keep"), std::pair(bool(p.key_counts), "counts of keys"),
                                       std::pair(p.is_causal, "causal")})
    if (is_there) return why.no([name = name] { return std::string("short rows do not support ") + name; });
  if (!gpu.is_hopper()) return why.no([] { return kHopperOnly; });
  const int64_t nk = p.nk(), d = p.head_dim(), dv = p.v.shape[3], keys = round_up(nk, 16), bits = bits_of(p.method);
  if (nk > most_keys(d))
    return why.no([&] {
      return "short rows hold at most " + number(most_keys(d)) + " keys with head_dim " + number(d) + ", got " +
             number(nk);
    });
  if (p.nq() > kMostQueries)
    return why.no([&] { return "takes at most " + number(kMostQueries) + " queries, got " + number(p.nq()); });
  const std::pair<const Tensor*, const char*> tensors[] = {{&p.q, "q"}, {&p.k, "k"}, {&p.v, "v"}};
  for (const auto& [x, name] : tensors)
    if (x->shape[2] * x->stride[2] * x->bytes() >= int64_t(1) << 31)
      return why.no([&, x = x, name = name] {
        return std::string("tokens of ") + name + " must lie within 2 GiB, got strides " + text_of(x->stride);
      });
  if (ctas_per_sm(keys, d, bits, p.q.bytes()) == 0)
    return why.no([&] {
      return "the registers do not hold rows of " + number(nk) + " keys with " + number(bits) + "-bit p and head_dim " +
             number(d);
    });
  if (p.v.stride[3] != 1 && !is_key_major(p.v, keys))
    return why.no([&] {
      return "V needs contiguous channels, or keys at multiples of 16 bytes, got strides " + text_of(p.v.stride);
    });
  if (d != dv || d % 16 || d > 128)
    return why.no(
        [&] { return "needs one head_dim, a multiple of 16 up to 128, got " + number(d) + " and " + number(dv); });
  if (p.bias && nk > kMostBiasKeys)
    return why.no(
        [&] { return "short rows with a bias hold at most " + number(kMostBiasKeys) + " keys, got " + number(nk); });
  if (p.bias && (p.bias.shape[3] != nk || p.bias.stride[3] != 1 || nk < 4))
    return why.no([&] {
      return "short rows need a bias of at least 4 keys in contiguous memory, got " + text_of(p.bias.shape) + ", " +
             text_of(p.bias.stride);
    });
  return true;
}

void short_rows_launch(const Attention& a, Launch& launch) {
  const Problem& p = a.p;
  const int64_t batch = p.batch(), heads = p.heads(), nq = p.nq(), nk = p.nk(), d = p.head_dim();
  const int64_t keys = round_up(nk, 16), bits = bits_of(p.method);
  const int64_t most_ctas = std::min<int64_t>(ctas_per_sm(keys, d, bits, a.q.bytes()), p.bias ? 2 : 4);
  const int64_t cluster = a.head_amax_in_kernel ? short_rows_cluster(p) : 1;
  // the last rows of a head are few enough for short_rows_remainder.cuh, and head_dim is one that it supports
  const bool remainder = 1 <= nq % 64 && nq % 64 <= 8 && (d == 64 || d == 128);
  const RowTiles rows = row_tiles_of(nq, remainder);
  const int64_t* const fixed = p.fixed.row_split;
  const int64_t of_cluster = ceil_div(rows.all, cluster);
  Split split{std::min<int64_t>(most_ctas, 3), of_cluster, 1, ceil_div(rows.all, of_cluster), 0};
  if (fixed[0] > 0)
    split = {fixed[0], fixed[1], fixed[2], ceil_div(rows.whole, fixed[1]), std::min(fixed[3], batch * heads - 1)};
  else if (cluster == 1)
    split =
        choose_split({batch * heads, a.gpu.processors, rows, most_ctas, p.bias ? 0 : time_of_third_cta(keys, d, bits),
                      a.q.is_codes(), bool(p.bias), a.head_amax_in_kernel});
  // 32-bit exponentials pay for the fetch of their additional instructions, which takes 0.5 us, in larger batches only,
  // and not where they make registers spill
  const bool spills = p.has_two_groups() && split.warpgroups == 3;
  const bool exp_32bit =
      p.bias || (p.fixed.exp_32bit < 0 ? !are_few_tiles(batch * heads * rows.all, a.gpu.processors) && !spills
                                       : p.fixed.exp_32bit);
  const bool heads_first = batch <= kGridLimit;
  const bool key_major = !a.is_fused && is_key_major(a.v, keys);
  // the maps are of K without its last 16 keys, and of V
  launch.has_maps = exp_32bit && !a.is_fused && nk > 16 && key_width(d) == d && key_major &&
                    set_tensor_maps(launch, a.k, a.v, (nk - 1) / 16, d, d / 4);
  const bool dynamic = a.is_fused && p.is_dynamic();  // scales of the values' own maxima
  launch.program = {&kSource,
                    {int32_t(keys),
                     int32_t(keys_of_first_part(keys, d)),
                     int32_t(d),
                     int32_t(bits),
                     int32_t(a.q.type),
                     int32_t(p.out_type),
                     key_major,
                     exp_32bit,
                     a.has_row_scales(),
                     a.head_amax_in_kernel,
                     dynamic,
                     launch.has_maps,
                     remainder,
                     a.memory.l != nullptr,
                     heads_first,
                     dynamic && !a.head_amax_in_kernel,
                     split.parts == 1  ? 0
                     : split.whole > 0 ? 2
                                       : 1,
                     int32_t(split.warpgroups),
                     int32_t(split.ctas_per_sm),
                     p.bias ? keys_at_once(p.bias) : kLeftOut,
                     cluster > 1 ? int32_t(split.parts) : kLeftOut,
                     p.has_two_groups() ? 1 : kLeftOut,
                     p.bias_macro()}};
  launch.grid[0] = uint32_t(heads_first ? heads : batch);
  launch.grid[1] = uint32_t(heads_first ? batch : heads);
  launch.grid[2] = uint32_t(split.parts);
  ::Share share{};
  if (split.parts > 1 && split.whole > 0) {
    const int64_t divided = batch * heads - split.whole;
    launch.grid[0] = uint32_t(split.whole + divided * split.parts), launch.grid[1] = launch.grid[2] = 1;
    share.whole = i32(split.whole), share.rest = i32(divided), share.pieces = u32(split.parts);
    share.rest_reciprocal = quotient_reciprocal(divided);
    share.heads_reciprocal = quotient_reciprocal(heads);
  }
  launch.threads = uint32_t(128 * split.warpgroups);
  // K and V^T; their barriers; of intflash_bfp a byte for each key and a word for each warp; RemainderRows::Shared, the
  // maxima and p of 8 rows; the biases of a tile, and of 8 rows
  launch.shared_bytes = uint32_t(round_up(keys * key_width(d), 1024) + ceil_div(keys, 128) * d * 128 +
                                 16 * launch.has_maps + p.has_two_groups() * (keys + 16 * split.warpgroups) +
                                 (remainder ? 128 + 8 * (ceil_div(keys, 32) | 1) * 64 * bits / 8 : 0) +
                                 (p.bias ? split.warpgroups * 64 * keys * 4 + remainder * 128 : 0));
  ::Params& params = launch.set_parameters<::Params>() = attention_parameters(a, int32_t(split.tiles), share);
  params.heads_at_once = u32(split.ctas_per_sm * a.gpu.processors);
}

}  // namespace intflash::gpu
