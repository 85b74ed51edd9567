// The cards of this process: a heap for each (heap.h), and its bytes by owner. A table of live blocks finds each by its
// address, so that any thread can free a block and is charged correctly.
#include "heap.h"
#include "streams.h"

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
  std::unique_ptr<CardLedger> ledger;
  std::unique_ptr<Heap> heap;
  std::vector<Unused> unused;

  CardStats all_stats() const {
    auto all = stats;
    all.reserved = heap->reserved;
    all.segments = heap->segments;
    all.fragmented = all.reserved.current - all.allocated.current - heap->releasable();
    return all;
  }
};

// All cards that this process uses, and all blocks on them, under one lock.
class Cards {
 public:
  void open(int index, const std::string& path, std::optional<int64_t> capacity, bool late) {
    check_card(index);
    const auto lock = lock_idle(index);
    auto& card = cards_[index];
    const bool same = card.ledger && card.ledger->path() == path && is_late(index) == late &&
        (!capacity || *capacity == card.ledger->capacity());
    if (same) return;
    TORCH_CHECK_VALUE(
        !card.ledger || card.stats.allocated.current == 0, "npu:", index, " is open in this process with a capacity of ",
        card.ledger->capacity(), " bytes and in use; free its tensors before opening it with another capacity, session "
        "or mode");
    start(card, path, capacity, late);
    set_late(index, late);
  }

  void* allocate(int index, int64_t bytes, c10::StreamId stream) {
    for (const bool last_try : {false, true}) {
      const auto lock = last_try ? lock_idle(index) : std::unique_lock<std::mutex>(mutex_);
      auto& card = opened(index);
      free_unused(card);
      if (last_try) card.heap->release_cached(false);
      if (auto* block = card.heap->allocate(bytes, stream)) return entered(index, block);
      if (!last_try) continue;
      ++card.stats.out_of_memory;
      TORCH_CHECK_WITH(OutOfMemoryError, false, complaint(index, bytes, card.all_stats(), *card.ledger));
    }
    return nullptr;
  }

  bool free(void* memory) { // false: not a block of a card
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = blocks_.find(memory);
    if (found == blocks_.end()) return false;
    auto* block = found->second;
    blocks_.erase(found);
    auto& card = cards_[block->card];
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
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = blocks_.find(memory);
    if (found == blocks_.end() || !is_late(found->second->card)) return;
    auto& users = found->second->used_by;
    const bool is_known = std::find(users.begin(), users.end(), stream) != users.end();
    if (!is_known && found->second->segment->pool.stream != stream) users.push_back(stream);
  }

  int owner_of(void* memory) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = blocks_.find(memory);
    return found == blocks_.end() ? -1 : found->second->owner;
  }

  void set_owner(void* memory, int owner) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = blocks_.find(memory);
    if (found == blocks_.end()) return; // an empty storage has no owner
    auto* block = found->second;
    auto& owners = cards_[block->card].stats.owners;
    owners[block->owner] -= block->bytes;
    owners[owner] += block->bytes;
    block->owner = static_cast<int16_t>(owner);
  }

  SharedHandle shared_place(void* memory) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto& block = *blocks_.at(memory);
    const auto& region = block.segment->region;
    return {getpid(), region.fd, region.inode, region.bytes, block.at - region.base, block.requested};
  }

  template <typename Function>
  auto with(int index, Function function) {
    std::lock_guard<std::mutex> lock(mutex_);
    return function(opened(index));
  }

  void release_cached() {
    for (int i = 0; i < kCards; ++i) {
      const auto lock = lock_idle(i);
      if (cards_[i].heap) cards_[i].heap->release_cached(true);
    }
  }

  void leave_sessions() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& card : cards_) {
      if (card.ledger && !card.ledger->path().empty()) card.ledger->leave();
    }
  }

 private:
  Card& at(int index) {
    check_card(index);
    return cards_[index];
  }

  Card& opened(int index) {
    auto& card = at(index);
    if (!card.ledger) start(card, "", std::nullopt, false);
    return card;
  }

  void start(Card& card, const std::string& path, std::optional<int64_t> capacity, bool late) {
    card.heap.reset();
    card.ledger.reset();
    card.ledger = std::make_unique<CardLedger>(path, capacity);
    card.heap = std::make_unique<Heap>(*card.ledger, late);
  }

  void* entered(int index, Block* block) {
    auto& stats = cards_[index].stats;
    block->card = static_cast<int16_t>(index);
    block->owner = static_cast<int16_t>(current_owner());
    stats.allocated.add(block->bytes);
    stats.requested.add(block->requested);
    stats.blocks.add(1);
    stats.owners[block->owner] += block->bytes;
    blocks_[block->at] = block;
    return block->at;
  }

  // Finishes all work before memory is released, as a real card does: unmapped memory must not be written.
  std::unique_lock<std::mutex> lock_idle(int index) {
    while (true) {
      if (is_late(index)) reach_all(index);
      std::unique_lock<std::mutex> lock(mutex_);
      free_unused(cards_[index]);
      if (!is_late(index) || is_idle(index)) return lock;
    }
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

  std::mutex mutex_;
  Card cards_[kCards];
  ska::flat_hash_map<void*, Block*> blocks_;
};

Cards& cards() {
  static auto* all = new Cards(); // never destroyed: tensors may outlive static destructors
  return *all;
}

} // namespace

void open_card(int card, const std::string& path, std::optional<int64_t> capacity, bool late) {
  cards().open(card, path, capacity, late);
}

CardStats card_stats(int card) {
  return cards().with(card, [](Card& it) { return it.all_stats(); });
}

void reset_peak(int card) {
  cards().with(card, [](Card& it) {
    auto& stats = it.stats;
    for (auto* stat : {&stats.allocated, &stats.requested, &stats.blocks, &it.heap->reserved, &it.heap->segments}) {
      stat->peak = stat->current;
    }
  });
}

void reset_accumulated(int card) {
  cards().with(card, [](Card& it) {
    auto& stats = it.stats;
    for (auto* stat : {&stats.allocated, &stats.requested, &stats.blocks, &it.heap->reserved, &it.heap->segments}) {
      stat->total = stat->current;
    }
    stats.out_of_memory = 0;
  });
}

std::pair<int64_t, int64_t> free_and_capacity(int card) {
  return cards().with(card, [](Card& it) {
    const auto capacity = it.ledger->capacity();
    return std::pair<int64_t, int64_t>(capacity - it.ledger->used(), capacity);
  });
}

int64_t largest_request(int card) {
  return cards().with(card, [](Card& it) { return it.heap->largest(it.ledger->room() + it.heap->releasable()); });
}

void limit_process(int card, double fraction) {
  cards().with(card, [&](Card& it) { it.ledger->limit_here(fraction); });
}

void* take_block(int card, int64_t bytes) {
  return cards().allocate(card, bytes, current_stream(card));
}

bool give_block(void* memory) {
  return cards().free(memory);
}

void record_use(void* memory, c10::StreamId stream) {
  cards().record_use(memory, stream);
}

int owner_of_block(void* memory) {
  return cards().owner_of(memory);
}

void set_owner_of_block(void* memory, int owner) {
  cards().set_owner(memory, owner);
}

void release_cached() {
  cards().release_cached();
}

SharedHandle shared_place(void* memory) {
  return cards().shared_place(memory);
}

void leave_sessions() {
  cards().leave_sessions();
}

} // namespace npu
