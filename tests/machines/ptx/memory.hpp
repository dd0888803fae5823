// Global and shared memory, and the copies between them, of machine.hpp's threads.
#pragma once

static u8* shared_at(u32 address, u32 bytes, int line, u32 align) {
  const u64 at = u64(address) - kSharedBase;
  if (at + bytes > block->shared_bytes) fail(line, "%u bytes at %lld of %u of shared memory", bytes, (long long)at, block->shared_bytes);
  if (address % align) fail(line, "shared address %u is no multiple of %u", address, align);
  return block->shared + at;
}

// Addresses in the shared memory of a cluster's block: those of the block, and its rank in the highest bits.
constexpr u32 kRankShift = 24;
static u32 shared_of_block(u32 address, u32 rank, int line) {
  if (rank >= cluster.size()) fail(line, "no block %u in a cluster of %u", rank, u32(cluster.size()));
  return address | rank << kRankShift;
}
static u8* cluster_at(u32 address, u32 bytes, int line, u32 align) {
  Block* const own = block;
  block = cluster[address >> kRankShift].get();
  if (block->left == 0) fail(line, "shared memory of a block that has ended");
  u8* const at = shared_at(address & ((1u << kRankShift) - 1), bytes, line, align);
  block = own;
  return at;
}

static const Range& range_at(u64 address, u32 bytes, int line, u32 align) {
  if (address % align) fail(line, "address %llx is no multiple of %u", (unsigned long long)address, align);
  for (const Range& range : ranges)
    if (address >= range.first && address + bytes <= range.last) return range;
  fail(line, "%u bytes at %llx: outside of every tensor", bytes, (unsigned long long)address);
}
// Memory that no kernel writes.
static u8* constant_at(u64 address, u32 bytes, int line, u32 align) {
  range_at(address, bytes, line, align);
  return reinterpret_cast<u8*>(address);
}
// Memory that is read.
static u8* source_at(u64 address, u32 bytes, int line, u32 align) {
  if (range_at(address, bytes, line, align).early || block->previous_done) return reinterpret_cast<u8*>(address);
  fail(line, "global memory before griddepcontrol.wait");
}
static u8* global_at(u64 address, u32 bytes, int line, u32 align) {
  if (!block->previous_done) fail(line, "global memory before griddepcontrol.wait");
  return constant_at(address, bytes, line, align);
}

static u64 generic_of_shared(u64 address) { return reinterpret_cast<u64>(block->shared) + address - kSharedBase; }
static u64 shared_of_generic(u64 address) { return address - reinterpret_cast<u64>(block->shared) + kSharedBase; }

static u8* generic_at(u64 address, u32 bytes, int line, u32 align) {
  const u64 shared = shared_of_generic(address);
  return shared - kSharedBase < block->shared_bytes ? shared_at(u32(shared), bytes, line, align) : global_at(address, bytes, line, align);
}

template <class T>
static T read(const u8* from) {
  T x;
  memcpy(&x, from, sizeof x);
  return x;
}
template <class T>
static void write(u8* to, T x) { memcpy(to, &x, sizeof x); }

// Copies that take effect when they are waited for.

static u32 swizzled(u32 address, int width) {
  if (width == 128) return address ^ (address >> 3 & 0x70);
  if (width == 64) return address ^ (address >> 3 & 0x30);
  return address ^ (address >> 3 & 0x10);
}

// The words of a tensor map: address, 5 sizes, 4 strides in bytes, 5 box sizes, the swizzle's width (emulate.py).
static u32 box_bytes(const u64* map) { return u32(map[10] * map[11] * map[12] * map[13] * map[14]); }

// Starts a thread's copy, of memory that it may read now.
static void issue(const Copy& copy, int line) {
  if (copy.present) source_at(reinterpret_cast<u64>(copy.from), copy.present, line, copy.bytes);
  self->copies.open.push_back(copy);
}

static void perform(const Copy& copy, int line) {
  if (!copy.map) {
    u8* to = shared_at(copy.to, copy.bytes, line, copy.bytes);
    memset(to, 0, copy.bytes);
    if (copy.present) memcpy(to, source_at(reinterpret_cast<u64>(copy.from), copy.present, line, copy.bytes), copy.present);
    return;
  }
  const u64 *size = copy.map + 1, *stride = copy.map + 6, *box = copy.map + 10;
  if (copy.to % 128) fail(line, "TMA writes to shared address %u", copy.to);
  for (u32 i = 0; i < box_bytes(copy.map); ++i) {
    u64 rest = i, from = copy.map[0];
    bool inside = true;
    for (int d = 0; d < 5; ++d) {
      const s64 at = copy.at[d] + s64(rest % box[d]);
      rest /= box[d];
      inside = inside && at >= 0 && at < s64(size[d]);
      from += u64(at) * (d ? stride[d - 1] : 1);
    }
    *shared_at(swizzled(copy.to + i, int(copy.map[15])), 1, line, 1) = inside ? *global_at(from, 1, line, 1) : 0;
  }
}

static void copies_wait(size_t pending, int line) {
  self->copies.wait(pending, [&](const Copy& copy) { perform(copy, line); });
}
static void copies_wait_all(int line) {
  self->copies.commit();
  copies_wait(0, line);
}

static TransferBarrier& transfer(u32 address, int line) {
  const auto found = block->transfers.find(address);
  if (found == block->transfers.end()) fail(line, "no mbarrier at shared address %u", address);
  return found->second;
}
static void settle(TransferBarrier& b) {
  if (b.pending || b.bytes) return;
  b.parity ^= 1, b.pending = b.count, ++progress;
}
static void transfer_init(u32 address, u32 count, int line) {
  shared_at(address, 8, line, 8);
  TransferBarrier& b = block->transfers[address] = {};
  b.count = b.pending = int(count);
}
static void transfer_arrive(u32 address, u32 bytes, u32 arrivals, int line) {
  TransferBarrier& b = transfer(address, line);
  if (b.pending < int(arrivals)) fail(line, "one arrival too many at an mbarrier");
  b.bytes += bytes, b.pending -= int(arrivals);
  settle(b);
}
static bool transfer_done(u32 address, u32 parity, bool waits, int line) {
  TransferBarrier& b = transfer(address, line);
  if (b.parity == parity) {
    const std::vector<Copy> copies = std::move(b.copies);
    b.copies.clear();
    for (const Copy& copy : copies) perform(copy, line), b.bytes -= box_bytes(copy.map), ++progress;
    settle(b);
    if (waits && b.parity == parity) yield();
  }
  return b.parity != parity;
}
