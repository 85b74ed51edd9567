// The cards of this process: a heap for each (heap.h), and its bytes by owner. A table of live blocks finds each by its
// address, so that any thread can free a block and is charged correctly.
#include "heap.h"

#include <c10/util/Exception.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>

#include <unistd.h>

namespace npu {
namespace {

// A freed block that other streams use (record_stream), and what they must reach before it can be reused.
struct Unused {
  Block* block;
  std::vector<Moment> when;
};

struct Card {
  CardStats stats;
  std::unique_ptr<Heap> heap;
  std::vector<Unused> unused;

  CardStats all_stats() const {
    auto all = stats;
    all.reserved = heap->reserved;
    all.segments = heap->segments;
    all.fragmented = all.reserved.current - all.allocated.current - heap->releasable();
    return all;
  }
  std::vector<Stat*> all_counts() {
    return {&stats.allocated, &stats.requested, &stats.blocks, &heap->reserved, &heap->segments};
  }
};

// All cards that this process uses, and all blocks on them, under one lock.
struct Cards {
  std::mutex mutex;
  Card all[kCards];
  ska::flat_hash_map<void*, Block*> blocks;

  Block* block_at(void* memory) const { // nullptr: not a block of a card
    const auto entry = blocks.find(memory);
    return entry == blocks.end() ? nullptr : entry->second;
  }
};

Cards& cards() {
  static auto* instance = new Cards(); // never destroyed: tensors may outlive static destructors
  return *instance;
}

Card& opened(int index) {
  check_card(index);
  auto& card = cards().all[index];
  if (!card.heap) card.heap = std::make_unique<Heap>(kDefaultCapacity, false);
  return card;
}

// Poisoning is enqueued on the stream that may reuse the block, after all that this stream must wait for.
void free_unused(Card& card) {
  for (size_t i = 0; i < card.unused.size();) {
    const auto& [block, when] = card.unused[i];
    if (!std::all_of(when.begin(), when.end(), reached)) {
      ++i;
      continue;
    }
    const auto stream = block->segment->pool.stream;
    if (reached(end_of(block->card, stream))) {
      poison(block->at, block->bytes);
    } else {
      enqueue(block->card, stream, [at = block->at, bytes = block->bytes] { poison(at, bytes); });
    }
    card.heap->free(block);
    card.unused.erase(card.unused.begin() + static_cast<int64_t>(i));
  }
}

// Finishes all work before memory is released, as a real card does: unmapped memory must not be written.
std::unique_lock<std::mutex> lock_idle(int index) {
  while (true) {
    if (is_late(index)) reach_all(index);
    std::unique_lock<std::mutex> lock(cards().mutex);
    free_unused(cards().all[index]);
    if (!is_late(index) || is_idle(index)) return lock;
  }
}

void* entered(int index, Block* block) {
  auto& stats = cards().all[index].stats;
  block->card = static_cast<int16_t>(index);
  block->owner = static_cast<int16_t>(current_owner());
  stats.allocated.add(block->bytes);
  stats.requested.add(block->requested);
  stats.blocks.add(1);
  stats.owners[block->owner] += block->bytes;
  cards().blocks[block->at] = block;
  return block->at;
}

template <typename Function>
auto with_card(int index, Function function) {
  std::lock_guard<std::mutex> lock(cards().mutex);
  return function(opened(index));
}

} // namespace

void open_card(int index, std::optional<int64_t> capacity, bool late, double host_rate, double wire_rate) {
  check_card(index);
  const auto lock = lock_idle(index);
  auto& card = cards().all[index];
  const bool same = card.heap && is_late(index) == late && rates_of(index).host == host_rate &&
      rates_of(index).wire == wire_rate && (!capacity || *capacity == card.heap->capacity);
  if (same) return;
  TORCH_CHECK_VALUE(
      !card.heap || card.stats.allocated.current == 0, "npu:", index, " is open in this process with a capacity of ",
      card.heap->capacity, " bytes and in use; free its tensors before opening it with another capacity or mode");
  card.heap = std::make_unique<Heap>(capacity.value_or(kDefaultCapacity), late);
  set_late(index, late, {host_rate, wire_rate});
}

CardStats card_stats(int card) {
  return with_card(card, [](Card& it) { return it.all_stats(); });
}

void reset_peak(int card) {
  with_card(card, [](Card& it) {
    for (auto* stat : it.all_counts()) stat->peak = stat->current;
  });
}

void reset_accumulated(int card) {
  with_card(card, [](Card& it) {
    for (auto* stat : it.all_counts()) stat->total = stat->current;
    it.stats.out_of_memory = 0;
  });
}

std::pair<int64_t, int64_t> free_and_capacity(int card) {
  return with_card(card, [](Card& it) {
    const auto capacity = it.heap->capacity;
    return std::pair<int64_t, int64_t>(capacity - it.heap->reserved.current, capacity);
  });
}

int64_t largest_request(int card) {
  return with_card(card, [](Card& it) { return it.heap->largest(); });
}

void limit_process(int card, double fraction) {
  with_card(card, [&](Card& it) { it.heap->fraction = fraction; });
}

void* take_block(int index, int64_t bytes) {
  const auto stream = current_stream(index);
  for (const bool last_try : {false, true}) {
    const auto lock = last_try ? lock_idle(index) : std::unique_lock<std::mutex>(cards().mutex);
    auto& card = opened(index);
    free_unused(card);
    if (last_try) card.heap->release_cached(false);
    if (auto* block = card.heap->allocate(bytes, stream)) return entered(index, block);
    if (!last_try) continue;
    ++card.stats.out_of_memory;
    TORCH_CHECK_WITH(OutOfMemoryError, false, complaint(index, bytes, card.all_stats(), card.heap->capacity));
  }
  return nullptr;
}

bool give_block(void* memory) {
  std::lock_guard<std::mutex> lock(cards().mutex);
  auto* block = cards().block_at(memory);
  if (block == nullptr) return false;
  cards().blocks.erase(memory);
  auto& card = cards().all[block->card];
  card.stats.allocated.remove(block->bytes);
  card.stats.requested.remove(block->requested);
  card.stats.blocks.remove(1);
  card.stats.owners[block->owner] -= block->bytes;
  if (!is_late(block->card)) {
    card.heap->free(block);
    return true;
  }
  Unused unused{block, {}};
  for (const auto stream : block->used_by) unused.when.push_back(end_of(block->card, stream));
  card.unused.push_back(std::move(unused));
  free_unused(card);
  return true;
}

void record_use(void* memory, c10::StreamId stream) {
  std::lock_guard<std::mutex> lock(cards().mutex);
  auto* block = cards().block_at(memory);
  if (block == nullptr || !is_late(block->card)) return;
  auto& users = block->used_by;
  const bool is_known = std::find(users.begin(), users.end(), stream) != users.end();
  if (!is_known && block->segment->pool.stream != stream) users.push_back(stream);
}

int owner_of_block(void* memory) {
  std::lock_guard<std::mutex> lock(cards().mutex);
  const auto* block = cards().block_at(memory);
  return block == nullptr ? -1 : block->owner;
}

void set_owner_of_block(void* memory, int owner) {
  std::lock_guard<std::mutex> lock(cards().mutex);
  auto* block = cards().block_at(memory);
  if (block == nullptr) return; // an empty storage has no owner
  auto& owners = cards().all[block->card].stats.owners;
  owners[block->owner] -= block->bytes;
  owners[owner] += block->bytes;
  block->owner = static_cast<int16_t>(owner);
}

void release_cached() {
  for (int i = 0; i < kCards; ++i) {
    const auto lock = lock_idle(i);
    if (auto& heap = cards().all[i].heap) heap->release_cached(true);
  }
}

SharedHandle shared_place(void* memory) {
  std::lock_guard<std::mutex> lock(cards().mutex);
  const auto& block = *cards().blocks.at(memory);
  const auto& region = block.segment->region;
  return {getpid(), region.fd, region.inode, region.bytes, block.at - region.base, block.requested};
}

} // namespace npu
