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

Heap::Heap(int card, CardLedger& ledger, bool expandable, bool poisoned)
    : card_(card), ledger_(ledger), expandable_(expandable), poisoned_(poisoned) {}

Heap::~Heap() {
  for (auto& [_, pool] : pools_) {
    for (auto* block : pool.free) delete block;
    for (auto* block : pool.unmapped) delete block;
  }
  while (!all_segments_.empty()) remove(*all_segments_.begin());
}

Block* Heap::allocate(int64_t bytes, c10::StreamId stream, PrivatePool* owner) {
  const int64_t rounded = round_up(bytes, sizes::kBlock);
  auto& pool = pool_of(rounded, stream, owner);
  Block* block = fit(pool, rounded);
  if (block == nullptr) {
    block = grow(pool, rounded);
    if (block == nullptr) return nullptr;
    if (worth_splitting(*block, rounded)) pool.free.insert(split(block, rounded));
  }
  return in_use(block, bytes);
}

Block* Heap::borrow(int64_t bytes, c10::StreamId stream) {
  const int64_t rounded = round_up(bytes, sizes::kBlock);
  for (auto& [_, pool] : pools_) {
    if (pool.owner == nullptr || !pool.owner->use_on_oom || pool.stream != stream) continue;
    if (auto* block = fit(pool, rounded)) return in_use(block, bytes);
  }
  return nullptr;
}

Block* Heap::in_use(Block* block, int64_t bytes) {
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

Pool& Heap::pool_of(int64_t bytes, c10::StreamId stream, PrivatePool* owner) {
  const auto kind = bytes <= sizes::kSmallLimit ? PoolKind::kSmall : PoolKind::kLarge;
  const std::tuple key(owner, stream, kind);
  const auto found = pools_.find(key);
  if (found != pools_.end()) return found->second;
  const int64_t page = kind == PoolKind::kLarge ? sizes::kLargeSegment : sizes::kUnit;
  const bool expandable = expandable_ && (owner == nullptr || (owner->allocate == nullptr && !owner->no_split));
  return pools_.emplace(key, Pool{kind, stream, owner, expandable, page, {}, {}}).first->second;
}

// Takes the smallest free block that is large enough; reuses its tree node for the remainder.
Block* Heap::fit(Pool& pool, int64_t bytes) {
  Block wanted{nullptr, nullptr, bytes};
  const auto found = pool.free.lower_bound(&wanted);
  if (found == pool.free.end()) return nullptr;
  auto node = pool.free.extract(found);
  Block* block = node.value();
  if (worth_splitting(*block, bytes)) {
    node.value() = split(block, bytes);
    pool.free.insert(std::move(node));
  }
  return block;
}

bool Heap::worth_splitting(const Block& block, int64_t bytes) const {
  const auto& pool = block.segment->pool;
  if (pool.owner != nullptr && pool.owner->no_split) return false;
  const bool fine = pool.expandable || pool.kind == PoolKind::kSmall;
  const int64_t rest = block.bytes - bytes;
  return fine ? rest >= sizes::kBlock : rest > sizes::kSmallLimit;
}

// Takes new bytes of the card; returns a free block of at least `bytes` that is in no tree.
Block* Heap::grow(Pool& pool, int64_t bytes) {
  if (pool.expandable) return extend(pool, bytes);
  int64_t size = sizes::kUnit;
  if (pool.kind == PoolKind::kLarge) {
    size = bytes < sizes::kOwnSegment ? sizes::kLargeSegment : round_up(bytes, sizes::kUnit);
  }
  auto* segment = new_segment(pool, size);
  if (segment == nullptr) return nullptr;
  if (!take(*segment, size)) {
    remove(segment);
    return nullptr;
  }
  auto* block = segment->first = new Block{segment, segment->region.base, size};
  block->mapped = true;
  if (poisoned_) poison(block->at, size);
  return block;
}

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
    auto* segment = new_segment(pool, round_up(addresses, pool.page));
    block = segment->first = new Block{segment, segment->region.base, segment->region.bytes};
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

Segment* Heap::new_segment(Pool& pool, int64_t bytes) {
  if (pool.owner == nullptr || pool.owner->allocate == nullptr) {
    return *all_segments_.insert(new Segment(pool, bytes)).first;
  }
  auto* memory = static_cast<char*>(pool.owner->allocate(bytes, card_, reinterpret_cast<void*>(pool.stream)));
  return memory == nullptr ? nullptr : *all_segments_.insert(new Segment(pool, memory, bytes)).first;
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
    if (pool.is_kept()) continue;
    const std::vector<Block*> cached(pool.free.begin(), pool.free.end());
    for (auto* block : cached) {
      if (pool.expandable) {
        unmap(block);
      } else if (block->before == nullptr && block->after == nullptr) {
        pool.free.erase(block);
        give(*block->segment, block->bytes);
        remove(block->segment);
        delete block;
      }
    }
    if (pool.owner != nullptr) { // of a released pool nothing is reused, not even addresses
      const std::vector<Block*> unmapped(pool.unmapped.begin(), pool.unmapped.end());
      for (auto* hole : unmapped) {
        if (hole->before != nullptr || hole->after != nullptr) continue;
        pool.unmapped.erase(hole);
        remove(hole->segment);
        delete hole;
      }
    }
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
    if (pool.is_kept()) continue;
    for (const auto* block : pool.free) {
      if (pool.expandable) {
        const auto [begin, end] = whole_pages(*block);
        bytes += end - begin;
      } else if (block->before == nullptr && block->after == nullptr) {
        bytes += block->bytes;
      }
    }
  }
  return bytes;
}

int64_t Heap::largest(int64_t room) const {
  const int64_t step = expandable_ ? sizes::kLargeSegment : sizes::kUnit;
  return std::max<int64_t>(0, room) / step * step;
}

void Heap::remove(Segment* segment) {
  all_segments_.erase(segment);
  const auto& [pool, region] = std::tie(segment->pool, segment->region);
  if (pool.owner != nullptr && pool.owner->free != nullptr) {
    pool.owner->free(region.base, static_cast<size_t>(region.bytes), reinterpret_cast<void*>(pool.stream));
  }
  delete segment;
}

std::vector<SegmentView> Heap::view(const std::set<Block*>& awaiting) const {
  std::vector<SegmentView> views;
  for (const auto* segment : all_segments_) {
    const auto& pool = segment->pool;
    const int64_t owner = pool.owner == nullptr ? 0 : pool.owner->id;
    bool open = false;
    for (auto* block = segment->first; block != nullptr; block = block->after) {
      const auto address = reinterpret_cast<int64_t>(block->at);
      if (block->mapped && !open) {
        views.push_back({card_, address, 0, owner, pool.stream, pool.kind == PoolKind::kLarge, pool.expandable, {}});
      }
      open = block->mapped;
      if (!open) continue;
      const char* state = !block->in_use ? "inactive" : awaiting.count(block) ? "active_awaiting_free" : "active_allocated";
      views.back().bytes += block->bytes;
      views.back().blocks.push_back({address, block->bytes, block->in_use ? block->requested : 0, state});
    }
  }
  return views;
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
