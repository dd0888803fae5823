#include "cpu/program.h"

#include <algorithm>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace intflash {
namespace {

constexpr int64_t kRowsAtOnce = 16;         // rows of an operation on rows that a thread draws
constexpr int64_t kProductsPerScore = 128;  // of attention at head_dim 64: Kernels::scores_per_thread counts these
constexpr int64_t kProductsPerValue = 100;  // as long as an operation on rows takes for a value

// Lets the system take back the pages of weights that have been packed: those of a mapped file are read again should
// anyone need them.
void page_out(const void* data, size_t bytes) {
#if defined(__linux__)
  constexpr int kPageOut = 21;  // MADV_PAGEOUT of Linux 5.4; others refuse it, which does no harm
  constexpr uintptr_t kPage = 4096;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(data) + kPage - 1) / kPage * kPage;
  const uintptr_t last = (reinterpret_cast<uintptr_t>(data) + bytes) / kPage * kPage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, kPageOut);
#else
  (void)data, (void)bytes;
#endif
}

View<float> scales(const float* scale, bool per_head) { return {scale, {0, per_head ? 1 : 0, 0, 0}}; }

}  // namespace

// Returns how many threads an amount of int8 products is worth waking.
int64_t Program::cost(int64_t products) const { return products / (kernels_.scores_per_thread * kProductsPerScore); }

// Calls function(first row, last row) for all rows, which have `values` values each.
void Program::run_rows(const Pass& pass, int64_t rows, int64_t values,
                       const std::function<void(int64_t, int64_t, Scratch&)>& function) const {
  const int64_t items = (rows + kRowsAtOnce - 1) / kRowsAtOnce;
  run_items(
      pass.threads, items, cost(rows * values * kProductsPerValue),
      [&](const Units& units, Scratch& scratch) {
        for (int64_t first, last; units.next(first, last);)
          function(first * kRowsAtOnce, std::min(last * kRowsAtOnce, rows), scratch);
      },
      pass.check);
}

PackedLinear* Program::pack(const int8_t* weight, const int32_t* bias, const int32_t* multiplier, int64_t out_features,
                            int64_t in_features, int shift) {
  PackedLinear& layer = layers_.emplace_back();
  layer.in_features = in_features, layer.out_features = out_features, layer.shift = shift;
  kernels_.integer->pack(weight, bias, multiplier, layer);
  page_out(weight, size_t(out_features * in_features));
  return &layer;
}

void Program::add(const LinearStep& step) {
  // Rows of the output that the map does not name keep the residual's value.
  std::vector<int64_t> kept;
  if (step.call.store_rows) {
    std::vector<bool> named(size_t(step.call.out_rows));
    for (int64_t r = 0; r < step.image_rows; ++r) named[size_t(step.call.store_rows[r])] = true;
    for (int64_t r = 0; r < step.call.out_rows; ++r)
      if (!named[size_t(r)]) kept.push_back(r);
  }
  steps_.push_back([this, step, kept](const Pass& pass) {
    LinearCall call = step.call;
    call.rows = pass.images * step.image_rows;
    call.image_rows = step.image_rows;
    call.block_rows = kernels_.integer->block_rows(*call.layer, call.rows, pass.threads);
    call.x = reinterpret_cast<const int8_t*>(pass.at(step.x));
    call.out = pass.at(step.out);
    if (step.has_residual_buffer) call.residual = pass.at(step.residual);
    if (call.residual != call.out) {
      const int64_t bytes = call.layer->out_features * bytes_of(call.width);
      for (int64_t image = 0; image < pass.images; ++image)
        for (int64_t row : kept) {
          const int64_t from = (call.residual_is_constant ? 0 : image * call.out_rows) + row;
          std::memcpy(static_cast<char*>(call.out) + (image * call.out_rows + row) * bytes,
                      static_cast<const char*>(call.residual) + from * bytes, size_t(bytes));
        }
    }
    const uint64_t call_id = next_call_id();
    run_items(
        pass.threads, kernels_.integer->linear_units(call),
        cost(call.rows * call.layer->in_features * call.layer->out_features),
        [&](const Units& units, Scratch& scratch) { kernels_.integer->linear(call, units, call_id, scratch); },
        pass.check);
  });
}

void Program::add(const AttentionStep& step) {
  steps_.push_back([this, step](const Pass& pass) {
    Call call{};
    call.method = step.method;
    call.out_type = OutType::kInt8;
    call.batch = pass.images * step.windows;
    call.heads_q = call.heads_k = step.heads;
    call.nq = call.nk = step.tokens;
    call.head_dim = call.value_dim = step.head_dim;
    const auto codes = [&](const Place& place) {
      const int8_t* data = reinterpret_cast<const int8_t*>(pass.at(place));
      return View<int8_t>{data, {step.tokens * place.step, step.head_dim, place.step, 1}};
    };
    call.q = codes(step.q), call.k = codes(step.k), call.v = codes(step.v);
    call.out.head_step = step.head_dim, call.out.row_step = step.heads * step.head_dim;
    call.out.batch_step = step.tokens * call.out.row_step;
    call.out.set(pass.at(step.out));
    call.q_scale = scales(step.q_scale, step.per_head[0]), call.k_scale = scales(step.k_scale, step.per_head[1]);
    call.v_scale = scales(step.v_scale, step.per_head[2]), call.out_scale = scales(step.out_scale, step.per_head[3]);
    call.q_block = call.k_block = 1;
    call.sm_scale = step.sm_scale;
    const int64_t n = step.tokens;
    if (step.bias) call.bias = {step.bias, {0, n * n, n, 1}}, call.bias_batch = 1;
    if (step.mask) call.keep = {step.mask, {n * n, 0, n, 1}}, call.keep_batch = step.windows;
    const void* given = step.mask_input < 0 ? nullptr : pass.inputs[size_t(step.mask_input)];
    if (given) call.keep = {static_cast<const uint8_t*>(given), {n, 0, 0, 1}}, call.keep_batch = pass.images;
    run_attention(kernels_, call, pass.threads, [] {}, pass.check);
  });
}

void Program::add(LayerNormCall given, Place x, Place out) {
  steps_.push_back([=](const Pass& pass) {
    LayerNormCall call = given;
    call.x = pass.at(x), call.out = pass.at(out);
    run_rows(pass, pass.images * call.out_rows, call.channels, [&](int64_t first, int64_t last, Scratch& scratch) {
      kernels_.integer->layer_norm(call, first, last, scratch);
    });
  });
}

void Program::add(PatchesCall given, int image, Place out) {
  steps_.push_back([=](const Pass& pass) {
    PatchesCall call = given;
    call.image = pass.inputs[size_t(image)], call.out = reinterpret_cast<int8_t*>(pass.at(out));
    run_rows(pass, pass.images * call.image_rows(), call.channels * call.patch_height * call.patch_width,
             [&](int64_t first, int64_t last, Scratch&) { kernels_.integer->patches(call, first, last); });
  });
}

void Program::add(EmbeddingCall given, std::vector<int> indices, Place out) {
  steps_.push_back([=](const Pass& pass) {
    EmbeddingCall call = given;
    for (int input : indices) call.indices.push_back(static_cast<const int64_t*>(pass.inputs[size_t(input)]));
    call.out = pass.at(out);
    run_rows(pass, pass.images * call.image_rows, call.channels,
             [&](int64_t first, int64_t last, Scratch&) { kernels_.integer->embedding(call, first, last); });
  });
}

void Program::add(PoolCall given, Place x, Place out) {
  steps_.push_back([=](const Pass& pass) {
    PoolCall call = given;
    call.x = pass.at(x), call.out = pass.at(out);
    run_rows(pass, pass.images, call.channels * call.rows,
             [&](int64_t first, int64_t last, Scratch&) { kernels_.integer->pool(call, first, last); });
  });
}

void Program::add_output(Place x, int64_t bytes, int output) {
  steps_.push_back(
      [=](const Pass& pass) { std::memcpy(pass.outputs[size_t(output)], pass.at(x), size_t(pass.images * bytes)); });
}

void Program::run(int64_t images, const std::vector<const void*>& inputs, const std::vector<void*>& outputs,
                  int threads, InterruptCheck check) {
  std::unique_ptr<Workspace> workspace;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!free_.empty()) workspace = std::move(free_.back()), free_.pop_back();
  }
  if (!workspace) workspace = std::make_unique<Workspace>();
  if (workspace->images < images) {
    workspace->bytes = AlignedBytes();  // first, so that both are never there at once
    workspace->bytes = AlignedBytes(size_t(images * image_bytes_));
    workspace->images = images;
  }
  InterruptPoll poll(check);
  const Pass pass{workspace->bytes.data(), images, threads, inputs, outputs, check};
  for (const auto& step : steps_) {
    if (const std::exception_ptr raised = poll()) std::rethrow_exception(raised);
    step(pass);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back(std::move(workspace));
}

}  // namespace intflash
