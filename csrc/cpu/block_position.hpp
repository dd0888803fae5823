// The position of a unit of work in a call: its sequence, head and query rows, and which keys are present for them.
#pragma once
#include "cpu/arithmetic.hpp"

namespace intflash {
namespace {

// A unit has at most Rows rows. With WholeTiles all units but the last have as many, else they are of even size.
template <int Rows, bool WholeTiles>
struct BlockPosition {
  const Call& call_;
  int64_t b_, h_, hk_, q0_, k0_, nq_, nk_, causal_offset_, window_start_;
  // Keys before key_begin_, a multiple of kGranule or key_end_, and from key_end_ on are absent for all of the unit's
  // rows.
  int64_t row0_, key_begin_, key_end_;
  int rows_;
  bool masked_;

  explicit BlockPosition(const Call& call) : call_(call) {}

  // Calls visit(head, block) for each of the units [first, last), in the order of sequence, key head, query head of its
  // group and block of rows.
  template <class F>
  void walk(int64_t first, int64_t last, F visit) {
    const int64_t sequences = call_.ends_q ? call_.sequences : call_.batch;
    int64_t unit = 0;  // the first unit of sequence s
    int64_t s = 0;
    if (!call_.ends_q) {
      const int64_t each = call_.heads_q * row_blocks(call_.nq);
      s = first / each;
      unit = s * each;
    }
    for (; s < sequences && unit < last; ++s) {
      enter_sequence(s);
      const int64_t blocks = row_blocks(nq_), group = call_.heads_q / call_.heads_k;
      const int64_t end = unit + call_.heads_q * blocks;
      for (int64_t u = larger(first, unit); u < smaller(last, end); ++u) {
        const int64_t within = u - unit;
        h_ = within / blocks;
        hk_ = h_ / group;
        visit(s * call_.heads_k + hk_, within % blocks);
      }
      unit = end;
    }
  }

  void enter_block(int64_t block) {
    if (WholeTiles) {
      row0_ = block * Rows;
      rows_ = int(smaller<int64_t>(Rows, nq_ - row0_));
    } else {
      row0_ = block * nq_ / row_blocks(nq_);
      rows_ = int((block + 1) * nq_ / row_blocks(nq_) - row0_);
    }
    masked_ = call_.bias.data || call_.keep.data;
    key_begin_ = 0, key_end_ = nk_;
    if (call_.causal && call_.method >= Method::kQFlash) {
      masked_ = true;  // absent keys of qflash and iflash have a score and enter l
    } else if (call_.causal) {
      key_end_ = larger<int64_t>(0, smaller(nk_, row0_ + rows_ + causal_offset_));
      masked_ = masked_ || row0_ + 1 + causal_offset_ < key_end_;
      if (call_.windowed) {
        key_begin_ = smaller(key_end_, larger<int64_t>(0, row0_ + window_start_) / kGranule * kGranule);
        masked_ = masked_ || row0_ + rows_ - 1 + window_start_ > key_begin_;
      }
    }
  }

  // Returns how many of keys [key, key + n) the causal limit leaves to row r.
  int64_t causal_keys(int r, int64_t key, int64_t n) const {
    return call_.causal ? larger<int64_t>(0, smaller(n, row0_ + r + causal_offset_ + 1 - key)) : n;
  }

  // Returns how many of keys [key, key + n) lie before the window of row r.
  int64_t keys_before_window(int r, int64_t key, int64_t n) const {
    return call_.windowed ? larger<int64_t>(0, smaller(n, row0_ + r + window_start_ - key)) : 0;
  }

  template <class T>
  const T* mask_row(const View<T>& mask, int64_t batch, int r, int64_t key) const {
    return mask.at(b_ % batch, h_, q0_ + row0_ + r, k0_ + key);
  }

  template <class T>
  void mark_absent(const View<T>& mask, int64_t batch, int r, int64_t key, int64_t n, int32_t* s, T absent) const {
    const T* m = mask_row(mask, batch, r, key);
    const int64_t step = mask.stride[3];
    if (step == 1)
      for (int64_t j = 0; j < n; ++j) s[j] = m[j] == absent ? kAbsent : s[j];
    else
      for (int64_t j = 0; j < n; ++j) s[j] = m[j * step] == absent ? kAbsent : s[j];
  }

  int64_t first_row() const { return (b_ * call_.heads_q + h_) * call_.nq + q0_ + row0_; }

 private:
  static int64_t row_blocks(int64_t n) { return (n + Rows - 1) / Rows; }

  void enter_sequence(int64_t s) {
    const bool packed = call_.ends_q != nullptr;
    b_ = packed ? 0 : s;
    q0_ = packed ? call_.ends_q[s] : 0;
    k0_ = packed ? call_.ends_k[s] : 0;
    nq_ = packed ? call_.ends_q[s + 1] - q0_ : call_.nq;
    nk_ = packed ? call_.ends_k[s + 1] - k0_ : call_.nk;
    const int64_t own = packed && call_.bottom_right ? nk_ - nq_ : 0;
    causal_offset_ = call_.causal_offset + own, window_start_ = call_.window_start + own;
  }
};

}  // namespace
}  // namespace intflash
