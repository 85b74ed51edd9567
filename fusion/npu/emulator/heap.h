// The caching allocator of one card, as PyTorch's CUDACachingAllocator and torch_npu's NPUCachingAllocator work.
//
//   request ──round to 512 B──► pool (small or large; one of each per stream) ──best fit──► free block, split
//                                   │ nothing fits                                         ▲ merged with its neighbours
//                                   └──► segment: bytes of the card are taken ─────────────┘ when it is freed
//
// Segments are of one of two modes:
//   expandable   one range of addresses per pool, whose pages are mapped on demand and unmapped wherever they are
//                entirely free (`expandable_segments:True` of both vendors: what large jobs use). The memory behind it
//                is an unnamed file (memfd), which other processes can map (shared.cpp)
//   fixed        many ranges of a few sizes, released when entirely free (both vendors' default)
//
// A private pool (pools.cpp) has its own small and large pools per stream, which no other allocation uses.
//
// `reserved` counts the bytes of the card that segments hold. An unmapped page no longer counts, but the host keeps its
// memory until empty_cache(), so that mapping it again causes no page fault.
#pragma once

#include "emulator.h"

#include <atomic>
#include <map>
#include <set>
#include <tuple>

namespace npu {

// Sizes in bytes. Blocks are those of a real card; segments and pages are 512 times smaller than its 2 and 20 MiB, as are
// the models on emulated cards: so granularity wastes the same share of a shard or a bucket.
namespace sizes {
constexpr int64_t kBlock = 512;
constexpr int64_t kUnit = 4096; // size of small segments and pages; a dedicated fixed segment is a multiple of it
constexpr int64_t kSmallLimit = kUnit / 2; // larger requests go to the large pool
constexpr int64_t kLargeSegment = 10 * kUnit; // and large pages
constexpr int64_t kOwnSegment = 5 * kUnit; // requests of at least this size get a dedicated fixed segment
} // namespace sizes

// A range of addresses; the host provides memory when it is touched.
struct Region {
  Region(int64_t bytes, bool shared);
  Region(int file, int64_t bytes); // memory that another process shares; owns the descriptor
  Region(char* base, int64_t bytes) : base(base), bytes(bytes) {} // memory that a function of the user's provides
  ~Region();
  Region(const Region&) = delete;
  void drop(int64_t offset, int64_t bytes); // returns memory to the host
  char* base = nullptr;
  int64_t bytes;
  int fd = -1; // of a shared region
  int64_t inode = 0;

 private:
  char* mapped_ = nullptr;
  int64_t mapped_bytes_ = 0;
};

struct Block;
struct BySize {
  bool operator()(const Block* a, const Block* b) const;
};
struct ByAddress {
  bool operator()(const Block* a, const Block* b) const;
};

// A pool of its own (pools.cpp).
struct PrivatePool {
  using Allocate = void* (*)(ssize_t bytes, int card, void* stream);
  using Free = void (*)(void* memory, size_t bytes, void* stream);
  int64_t id = 0;
  Allocate allocate = nullptr;
  Free free = nullptr;
  bool use_on_oom = false;
  bool no_split = false;
  std::atomic<int64_t> users{1}; // its object, and the threads that allocate from it
  bool is_kept() const { return users > 0; } // else its free memory may be released
};

PrivatePool* current_pool(int card); // of this thread; nullptr: none

enum class PoolKind : uint8_t { kSmall, kLarge };

struct Pool {
  PoolKind kind;
  c10::StreamId stream;
  PrivatePool* owner; // nullptr: shared by all allocations
  bool expandable;
  int64_t page; // granularity by which an expandable segment grows
  std::set<Block*, BySize> free; // mapped
  std::set<Block*, ByAddress> unmapped;
  bool is_kept() const { return owner != nullptr && owner->is_kept(); }
};

struct Segment {
  Segment(Pool& pool, int64_t bytes) : pool(pool), region(bytes, pool.expandable) {}
  Segment(Pool& pool, char* memory, int64_t bytes) : pool(pool), region(memory, bytes) {}
  Pool& pool;
  Region region;
  Block* first = nullptr; // at the beginning of the region
  int64_t mapped = 0; // bytes
};

struct Block {
  Segment* segment;
  char* at;
  int64_t bytes;
  Block* before = nullptr; // neighbours in the segment
  Block* after = nullptr;
  bool mapped = false;
  bool in_use = false;
  int16_t card = 0;
  int16_t owner = 0;
  int64_t requested = 0; // of `bytes`
  std::vector<c10::StreamId> used_by = {}; // streams other than the pool's, by record_stream
};

class Heap {
 public:
  Heap(int card, CardLedger& ledger, bool expandable, bool poisoned);
  ~Heap();
  Block* allocate(int64_t bytes, c10::StreamId stream, PrivatePool* owner); // nullptr: the card is full
  Block* borrow(int64_t bytes, c10::StreamId stream); // from the free memory of private pools that allow it
  void free(Block* block);
  void release_cached(bool from_host); // entirely free pages and segments; from_host: their host memory too
  int64_t releasable() const; // bytes that release_cached would release
  std::vector<SegmentView> view(const std::set<Block*>& awaiting) const; // awaiting: freed blocks that streams still use
  int64_t largest(int64_t room) const; // the largest request that `room` bytes of the card can serve
  bool expandable() const { return expandable_; }

  Stat reserved, segments;

 private:
  Pool& pool_of(int64_t bytes, c10::StreamId stream, PrivatePool* owner);
  Block* in_use(Block* block, int64_t bytes);
  Block* fit(Pool& pool, int64_t bytes);
  Block* grow(Pool& pool, int64_t bytes);
  Block* extend(Pool& pool, int64_t bytes);
  Block* map(Block* block, int64_t bytes);
  Segment* new_segment(Pool& pool, int64_t bytes); // nullptr: the user's function has no memory
  bool take(Segment& segment, int64_t bytes);
  void give(Segment& segment, int64_t bytes);
  void unmap(Block* block);
  void remove(Segment* segment);
  std::pair<int64_t, int64_t> whole_pages(const Block& block) const;
  bool worth_splitting(const Block& block, int64_t bytes) const;
  Block* split(Block* block, int64_t bytes);
  Block* merged(Block* block);

  int card_;
  CardLedger& ledger_;
  bool expandable_;
  bool poisoned_; // whether new memory is poisoned
  std::map<std::tuple<PrivatePool*, c10::StreamId, PoolKind>, Pool> pools_;
  std::set<Segment*> all_segments_;
};

} // namespace npu
