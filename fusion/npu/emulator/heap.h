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

#include "streams.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <set>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace npu {

// Sizes in bytes. Blocks are those of a real card; segments and pages are 512 times smaller than its 2 and 20 MiB, as are
// the models on emulated cards: so granularity wastes the same share of a shard or a bucket.
namespace sizes {
constexpr int64_t kBlock = 512;
constexpr int64_t kSmallPage = 4096;
constexpr int64_t kSmallLimit = kSmallPage / 2; // larger requests go to the large pool
constexpr int64_t kLargePage = 10 * kSmallPage;
constexpr int64_t kHostPage = 4096;
} // namespace sizes

inline int64_t round_up(int64_t bytes, int64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// A range of addresses and the host memory behind it: a sparse file, of which the host provides what is touched.
struct Region {
  explicit Region(int64_t size) : Region(memfd_create("rlfusion-npu", MFD_CLOEXEC), size, true) {}
  // Memory that another process shares, or of a new file; owns the descriptor.
  Region(int file, int64_t size, bool is_new = false) : fd(file), bytes(size) {
    struct stat about {};
    TORCH_CHECK(
        fd >= 0 && (!is_new || ftruncate(fd, bytes) == 0) && fstat(fd, &about) == 0, "cannot create shared memory: ",
        strerror(errno));
    inode = static_cast<int64_t>(about.st_ino);
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    TORCH_CHECK_WITH(
        OutOfMemoryError, memory != MAP_FAILED, "this machine has no memory left to map ", bytes, " bytes: ",
        strerror(errno));
    base = static_cast<char*>(memory);
  }
  ~Region() {
    munmap(base, bytes);
    close(fd);
  }
  Region(const Region&) = delete;
  void drop(int64_t offset, int64_t size) { // returns memory to the host
    const int64_t begin = round_up(offset, sizes::kHostPage);
    const int64_t end = (offset + size) / sizes::kHostPage * sizes::kHostPage;
    if (begin < end) fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, begin, end - begin);
  }
  int fd;
  int64_t inode;
  int64_t bytes;
  char* base;
};

struct Segment;

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

struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    return a->bytes != b->bytes ? a->bytes < b->bytes : a->at < b->at;
  }
};
struct ByAddress {
  bool operator()(const Block* a, const Block* b) const { return a->at < b->at; }
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

class Heap {
 public:
  Heap(int64_t capacity, bool poisoned) : capacity(capacity), poisoned_(poisoned) {}
  ~Heap() {
    for (auto& [_, pool] : pools_) {
      for (auto* block : pool.free) delete block;
      for (auto* block : pool.unmapped) delete block;
    }
  }

  // Takes the smallest free block that is large enough, and reuses its tree node for the rest; else extends a segment.
  // nullptr: the card is full.
  Block* allocate(int64_t bytes, c10::StreamId stream) {
    const int64_t rounded = round_up(bytes, sizes::kBlock);
    auto& pool = pool_of(rounded, stream);
    Block wanted{nullptr, nullptr, rounded};
    const auto smallest = pool.free.lower_bound(&wanted);
    Block* block = nullptr;
    if (smallest != pool.free.end()) {
      auto node = pool.free.extract(smallest);
      block = node.value();
      if (block->bytes > rounded) {
        node.value() = split(block, rounded);
        pool.free.insert(std::move(node));
      }
    } else {
      block = extend(pool, rounded);
      if (block == nullptr) return nullptr;
      if (block->bytes > rounded) pool.free.insert(split(block, rounded));
    }
    block->in_use = true;
    block->requested = bytes;
    return block;
  }

  void free(Block* block) {
    block->in_use = false;
    block->used_by.clear();
    block = merged(block);
    block->segment->pool.free.insert(block);
  }

  // Releases entirely free pages; from_host: their host memory too.
  void release_cached(bool from_host) {
    for (auto& [_, pool] : pools_) {
      const std::vector<Block*> cached(pool.free.begin(), pool.free.end());
      for (auto* block : cached) unmap(block);
      if (!from_host) continue;
      for (auto* hole : pool.unmapped) hole->segment->region.drop(hole->at - hole->segment->region.base, hole->bytes);
    }
  }

  // Returns the bytes that release_cached would release.
  int64_t releasable() const {
    int64_t bytes = 0;
    for (const auto& [_, pool] : pools_) {
      for (const auto* block : pool.free) {
        const auto [begin, end] = whole_pages(*block);
        bytes += end - begin;
      }
    }
    return bytes;
  }

  // Returns the largest request that the card can serve.
  int64_t largest() const {
    return std::max<int64_t>(0, room() + releasable()) / sizes::kLargePage * sizes::kLargePage;
  }

  const int64_t capacity;
  double fraction = 1.0; // of the capacity: a limit of this process
  Stat reserved, segments;

 private:
  int64_t room() const {
    return static_cast<int64_t>(capacity * fraction) - reserved.current;
  }

  Pool& pool_of(int64_t bytes, c10::StreamId stream) {
    const int64_t page = bytes <= sizes::kSmallLimit ? sizes::kSmallPage : sizes::kLargePage;
    return pools_.try_emplace({stream, page}, Pool{stream, page, {}, {}}).first->second;
  }

  // Takes new bytes of the card; returns a free block of at least `bytes` that is in no tree.
  Block* extend(Pool& pool, int64_t bytes) {
    const auto has_room = [&](Block* block) {
      int64_t room = 0;
      for (; block && !block->in_use && room < bytes; block = block->after) room += block->bytes;
      return room >= bytes;
    };
    Block* block = nullptr;
    for (auto* hole : pool.unmapped) {
      auto* begin = hole->before && !hole->before->in_use ? hole->before : hole;
      if (has_room(begin)) {
        block = begin;
        break;
      }
    }
    if (block == nullptr) {
      const int64_t addresses = std::max(bytes, capacity / 8 * 9);
      auto& segment = *segments_.emplace_back(std::make_unique<Segment>(pool, round_up(addresses, pool.page)));
      block = new Block{&segment, segment.region.base, segment.region.bytes};
      pool.unmapped.insert(block);
    }
    if (!block->mapped) block = map(block, std::min(bytes, block->bytes));
    while (block && block->bytes < bytes) {
      block = map(block->after, std::min(bytes - block->bytes, block->after->bytes));
    }
    if (block != nullptr) pool.free.erase(block);
    return block;
  }

  // Maps pages at the front of an unmapped block; returns the free block that contains them.
  Block* map(Block* block, int64_t bytes) {
    auto& pool = block->segment->pool;
    bytes = std::min(round_up(bytes, pool.page), block->bytes);
    if (!take(*block->segment, bytes)) return nullptr;
    pool.unmapped.erase(block);
    if (bytes < block->bytes) pool.unmapped.insert(split(block, bytes));
    block->mapped = true;
    if (poisoned_) poison(block->at, bytes);
    block = merged(block);
    pool.free.insert(block);
    return block;
  }

  bool take(Segment& segment, int64_t bytes) {
    if (bytes > room()) return false;
    if (segment.mapped == 0) segments.add(1);
    segment.mapped += bytes;
    reserved.add(bytes);
    return true;
  }

  void give(Segment& segment, int64_t bytes) {
    segment.mapped -= bytes;
    if (segment.mapped == 0) segments.remove(1);
    reserved.remove(bytes);
  }

  // Returns the range of whole pages in a block, relative to its beginning.
  std::pair<int64_t, int64_t> whole_pages(const Block& block) const {
    const int64_t offset = block.at - block.segment->region.base;
    const int64_t page = block.segment->pool.page;
    const int64_t begin = round_up(offset, page) - offset;
    const int64_t end = (offset + block.bytes) / page * page - offset;
    return {begin, std::max(begin, end)};
  }

  void unmap(Block* block) {
    auto& pool = block->segment->pool;
    const auto [begin, end] = whole_pages(*block);
    if (begin == end) return;
    pool.free.erase(block);
    if (end < block->bytes) pool.free.insert(split(block, end));
    if (begin > 0) {
      auto* front = block;
      block = split(block, begin);
      pool.free.insert(front);
    }
    give(*block->segment, block->bytes);
    block->mapped = false;
    pool.unmapped.insert(merged(block));
  }

  // Splits the block after `bytes`; returns the remainder, which is in no tree.
  Block* split(Block* block, int64_t bytes) {
    auto* rest = new Block{block->segment, block->at + bytes, block->bytes - bytes, block, block->after, block->mapped};
    if (rest->after) rest->after->before = rest;
    block->after = rest;
    block->bytes = bytes;
    return rest;
  }

  // Merges a block that is in no tree with its free neighbours of the same kind, which are removed from theirs.
  Block* merged(Block* block) {
    auto& pool = block->segment->pool;
    const auto absorb = [&](Block* other) {
      if (other == nullptr || other->in_use || other->mapped != block->mapped) return;
      if (other->mapped) {
        pool.free.erase(other);
      } else {
        pool.unmapped.erase(other);
      }
      auto* left = std::min(block, other, ByAddress());
      auto* right = std::max(block, other, ByAddress());
      left->bytes += right->bytes;
      left->after = right->after;
      if (left->after) left->after->before = left;
      delete right;
      block = left;
    };
    absorb(block->before);
    absorb(block->after);
    return block;
  }

  bool poisoned_; // whether new memory is poisoned
  std::map<std::pair<c10::StreamId, int64_t>, Pool> pools_; // by stream and size of a page
  std::vector<std::unique_ptr<Segment>> segments_;
};

} // namespace npu
