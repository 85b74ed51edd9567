// Rounding, caching, splitting and merging (heap.h).
#include "heap.h"
#include "streams.h"

#include <algorithm>

namespace npu {

namespace {

int64_t round_up(int64_t bytes, int64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

} // namespace

bool BySize::operator()(const Block* a, const Block* b) const {
  return a->bytes != b->bytes ? a->bytes < b->bytes : a->at < b->at;
}

bool ByAddress::operator()(const Block* a, const Block* b) const {
  return a->at < b->at;
}

Heap::~Heap() {
  for (auto& [_, pool] : pools_) {
    for (auto* block : pool.free) delete block;
    for (auto* block : pool.unmapped) delete block;
  }
}

// Takes the smallest free block that is large enough, and reuses its tree node for the rest; else extends a segment.
Block* Heap::allocate(int64_t bytes, c10::StreamId stream) {
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

void Heap::free(Block* block) {
  block->in_use = false;
  block->used_by.clear();
  block = merged(block);
  block->segment->pool.free.insert(block);
}

Pool& Heap::pool_of(int64_t bytes, c10::StreamId stream) {
  const int64_t page = bytes <= sizes::kSmallLimit ? sizes::kSmallPage : sizes::kLargePage;
  return pools_.try_emplace({stream, page}, Pool{stream, page, {}, {}}).first->second;
}

// Takes new bytes of the card; returns a free block of at least `bytes` that is in no tree.
Block* Heap::extend(Pool& pool, int64_t bytes) {
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
    const int64_t addresses = std::max(bytes, ledger_.capacity() / 8 * 9);
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
Block* Heap::map(Block* block, int64_t bytes) {
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

bool Heap::take(Segment& segment, int64_t bytes) {
  if (!ledger_.take(bytes)) return false;
  if (segment.mapped == 0) segments.add(1);
  segment.mapped += bytes;
  reserved.add(bytes);
  return true;
}

void Heap::give(Segment& segment, int64_t bytes) {
  ledger_.give(bytes);
  segment.mapped -= bytes;
  if (segment.mapped == 0) segments.remove(1);
  reserved.remove(bytes);
}

void Heap::release_cached(bool from_host) {
  for (auto& [_, pool] : pools_) {
    const std::vector<Block*> cached(pool.free.begin(), pool.free.end());
    for (auto* block : cached) unmap(block);
    if (!from_host) continue;
    for (auto* hole : pool.unmapped) hole->segment->region.drop(hole->at - hole->segment->region.base, hole->bytes);
  }
}

// Returns the range of whole pages in a block, relative to its beginning.
std::pair<int64_t, int64_t> Heap::whole_pages(const Block& block) const {
  const int64_t offset = block.at - block.segment->region.base;
  const int64_t page = block.segment->pool.page;
  const int64_t begin = round_up(offset, page) - offset;
  const int64_t end = (offset + block.bytes) / page * page - offset;
  return {begin, std::max(begin, end)};
}

void Heap::unmap(Block* block) {
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

int64_t Heap::releasable() const {
  int64_t bytes = 0;
  for (const auto& [_, pool] : pools_) {
    for (const auto* block : pool.free) {
      const auto [begin, end] = whole_pages(*block);
      bytes += end - begin;
    }
  }
  return bytes;
}

int64_t Heap::largest(int64_t room) const {
  return std::max<int64_t>(0, room) / sizes::kLargePage * sizes::kLargePage;
}

// Splits the block after `bytes`; returns the remainder, which is in no tree.
Block* Heap::split(Block* block, int64_t bytes) {
  auto* rest = new Block{block->segment, block->at + bytes, block->bytes - bytes, block, block->after, block->mapped};
  if (rest->after) rest->after->before = rest;
  block->after = rest;
  block->bytes = bytes;
  return rest;
}

// Merges a block that is in no tree with its free neighbours of the same kind, which are removed from theirs.
Block* Heap::merged(Block* block) {
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

} // namespace npu
