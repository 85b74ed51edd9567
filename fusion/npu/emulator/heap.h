// The caching allocator of one card, as PyTorch's CUDACachingAllocator and torch_npu's NPUCachingAllocator work.
//
//   request ──round to 512 B──► pool (small or large; one of each per stream) ──best fit──► free block, split
//                                   │ nothing fits                                         ▲ merged with its neighbours
//                                   └──► segment: bytes of the card are taken ─────────────┘ when it is freed
//
// Segments are expandable (`expandable_segments:True` of both vendors: what large jobs use): ranges of addresses whose
// pages are mapped on demand and unmapped wherever they are entirely free. The memory behind one is an unnamed file
// (memfd), which other processes can map (shared.cpp).
//
// `reserved` counts the bytes of the card that segments hold. An unmapped page no longer counts, but the host keeps its
// memory until empty_cache(), so that mapping it again causes no page fault.
#pragma once

#include "emulator.h"

#include <map>
#include <set>

namespace npu {

// Sizes in bytes. Blocks are those of a real card; segments and pages are 512 times smaller than its 2 and 20 MiB, as are
// the models on emulated cards: so granularity wastes the same share of a shard or a bucket.
namespace sizes {
constexpr int64_t kBlock = 512;
constexpr int64_t kSmallPage = 4096;
constexpr int64_t kSmallLimit = kSmallPage / 2; // larger requests go to the large pool
constexpr int64_t kLargePage = 10 * kSmallPage;
} // namespace sizes

// A range of addresses; the host provides memory when it is touched.
struct Region {
  explicit Region(int64_t bytes);
  Region(int file, int64_t bytes); // memory that another process shares; owns the descriptor
  ~Region();
  Region(const Region&) = delete;
  void drop(int64_t offset, int64_t bytes); // returns memory to the host
  int fd;
  int64_t inode;
  int64_t bytes;
  char* base;
};

struct Block;
struct BySize {
  bool operator()(const Block* a, const Block* b) const;
};
struct ByAddress {
  bool operator()(const Block* a, const Block* b) const;
};

struct Pool {
  c10::StreamId stream;
  int64_t page; // granularity by which a segment grows
  std::set<Block*, BySize> free; // mapped
  std::set<Block*, ByAddress> unmapped;
};

struct Segment {
  Segment(Pool& pool, int64_t bytes) : pool(pool), region(bytes) {}
  Pool& pool;
  Region region;
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
  Heap(CardLedger& ledger, bool poisoned) : ledger_(ledger), poisoned_(poisoned) {}
  ~Heap();
  Block* allocate(int64_t bytes, c10::StreamId stream); // nullptr: the card is full
  void free(Block* block);
  void release_cached(bool from_host); // entirely free pages; from_host: their host memory too
  int64_t releasable() const; // bytes that release_cached would release
  int64_t largest(int64_t room) const; // the largest request that `room` bytes of the card can serve

  Stat reserved, segments;

 private:
  Pool& pool_of(int64_t bytes, c10::StreamId stream);
  Block* extend(Pool& pool, int64_t bytes);
  Block* map(Block* block, int64_t bytes);
  bool take(Segment& segment, int64_t bytes);
  void give(Segment& segment, int64_t bytes);
  void unmap(Block* block);
  std::pair<int64_t, int64_t> whole_pages(const Block& block) const;
  Block* split(Block* block, int64_t bytes);
  Block* merged(Block* block);

  CardLedger& ledger_;
  bool poisoned_; // whether new memory is poisoned
  std::map<std::pair<c10::StreamId, int64_t>, Pool> pools_; // by stream and size of a page
  std::vector<std::unique_ptr<Segment>> segments_;
};

} // namespace npu
