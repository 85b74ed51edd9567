// Device memory. A table of live blocks remembers card, size and owner of each, so that a free takes the right bytes
// from the right account in whatever thread it happens; the memory itself is the host's.
//
// `reserved` equals `allocated` as long as nothing is rounded or cached: the place for both is Pool::allocate.
#include "emulator.h"

#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <c10/util/flat_hash_map.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <iomanip>
#include <sstream>

namespace npu {
namespace {

constexpr size_t kAlignment = 64; // bytes

struct Block {
  int64_t bytes;
  int16_t card;
  int16_t owner;
};

// The owner travels in PyTorch's thread-local state, so that the threads of a backward pass inherit it from the caller,
// who waits meanwhile. One entry a thread, made once and then changed in place: others use that state as a stack, and an
// entry that came and went would have to keep their order. (Slots of one's own exist in new versions only; this one
// every version has.)
const auto kOwnerSlot = c10::DebugInfoKind::TEST_INFO_2;
struct ThreadOwner final : c10::DebugInfoBase {
  std::atomic<int> owner{0};
};

ThreadOwner* thread_owner() {
  return static_cast<ThreadOwner*>(c10::ThreadLocalDebugInfo::get(kOwnerSlot));
}

int current_owner() {
  const auto* mine = thread_owner();
  return mine == nullptr ? 0 : mine->owner.load(std::memory_order_relaxed);
}

std::string readable(int64_t bytes) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(2);
  if (bytes < (int64_t{1} << 20)) {
    out << bytes / 1024.0 << " KiB";
  } else if (bytes < (int64_t{1} << 30)) {
    out << bytes / 1048576.0 << " MiB";
  } else {
    out << bytes / 1073741824.0 << " GiB";
  }
  return out.str();
}

struct Owners {
  std::mutex mutex;
  std::vector<std::string> names{"activations"};
};

Owners& owners() {
  static auto* all = new Owners(); // never destroyed: tensors may outlive static destructors
  return *all;
}

struct Card {
  CardStats stats;
  std::unique_ptr<CardLedger> ledger;
};

// Every card this process uses, and every block on them, under one lock.
class Pool {
 public:
  void open(int index, const std::string& path, std::optional<int64_t> capacity) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& card = at(index);
    auto& ledger = card.ledger;
    if (ledger && ledger->path() == path && (!capacity || *capacity == ledger->capacity())) return;
    TORCH_CHECK_VALUE(
        !ledger || card.stats.allocated.current == 0, "npu:", index, " is open in this process with a capacity of ",
        ledger->capacity(), " bytes and in use; it cannot be opened with another capacity or session now");
    ledger.reset();
    ledger = std::make_unique<CardLedger>(path, capacity);
  }

  void* allocate(int index, size_t requested) {
    const auto bytes = static_cast<int64_t>(requested);
    void* memory = nullptr;
    if (posix_memalign(&memory, kAlignment, requested) != 0) memory = nullptr;
    std::lock_guard<std::mutex> lock(mutex_);
    auto& card = opened(index);
    if (memory == nullptr || !card.ledger->take(bytes)) {
      std::free(memory);
      ++card.stats.out_of_memory;
      TORCH_CHECK_WITH(OutOfMemoryError, false, complaint(index, bytes, memory == nullptr));
    }
    const int owner = current_owner();
    card.stats.allocated.add(bytes);
    card.stats.reserved.add(bytes);
    card.stats.blocks.add(1);
    card.stats.owners[owner] += bytes;
    blocks_[memory] = Block{bytes, static_cast<int16_t>(index), static_cast<int16_t>(owner)};
    return memory;
  }

  bool forget(void* memory) { // false: not a block of a card
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = blocks_.find(memory);
    if (found == blocks_.end()) return false;
    const auto block = found->second;
    blocks_.erase(found);
    auto& card = cards_[block.card];
    card.ledger->give(block.bytes);
    card.stats.allocated.remove(block.bytes);
    card.stats.reserved.remove(block.bytes);
    card.stats.blocks.remove(1);
    card.stats.owners[block.owner] -= block.bytes;
    return true;
  }

  int owner_of(void* memory) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = blocks_.find(memory);
    return found == blocks_.end() ? -1 : found->second.owner;
  }

  void set_owner(void* memory, int owner) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = blocks_.find(memory);
    if (found == blocks_.end()) return; // no bytes, no owner
    auto& block = found->second;
    auto& owners = cards_[block.card].stats.owners;
    owners[block.owner] -= block.bytes;
    owners[owner] += block.bytes;
    block.owner = static_cast<int16_t>(owner);
  }

  template <typename Function>
  auto with(int index, Function function) {
    std::lock_guard<std::mutex> lock(mutex_);
    return function(opened(index));
  }

  void leave_sessions() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& card : cards_) {
      if (!card.ledger || card.ledger->path().empty()) continue;
      const auto capacity = card.ledger->capacity();
      card.ledger.reset();
      card.ledger = std::make_unique<CardLedger>("", capacity);
    }
  }

 private:
  Card& at(int index) {
    TORCH_CHECK_VALUE(index >= 0 && index < kCards, "npu:", index, ": an emulated node has ", kCards, " cards");
    return cards_[index];
  }

  Card& opened(int index) {
    auto& card = at(index);
    if (!card.ledger) card.ledger = std::make_unique<CardLedger>("", std::nullopt);
    return card;
  }

  std::string complaint(int index, int64_t bytes, bool host_is_full) {
    auto& card = cards_[index];
    std::ostringstream out;
    out << "npu:" << index << " out of memory: " << readable(bytes) << " requested, "
        << readable(card.stats.allocated.current) << " allocated here, "
        << readable(card.ledger->used() - card.ledger->used_here()) << " by other processes, capacity "
        << readable(card.ledger->capacity()) << " (device.capacity_bytes=" << card.ledger->capacity() << "). By owner:";
    const auto names = owner_names();
    for (size_t i = 0; i < names.size(); ++i) {
      out << (i ? ", " : " ") << names[i] << " " << readable(card.stats.owners[i]);
    }
    if (host_is_full) out << ". The memory of this machine is full";
    return out.str();
  }

  std::mutex mutex_;
  Card cards_[kCards];
  ska::flat_hash_map<void*, Block> blocks_;
};

Pool& pool() {
  static auto* all = new Pool(); // never destroyed: tensors may outlive static destructors
  return *all;
}

void free_block(void* memory) {
  if (!in_forked_child()) pool().forget(memory);
  std::free(memory);
}

// A storage that was emptied still knows whose it is, for when its bytes come back.
struct Vacant {
  int owner;
};

void free_vacant(void* context) {
  delete static_cast<Vacant*>(context);
}

struct NpuAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override { return allocate_on(current_card(), bytes); }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  void resetAccumulatedStats(c10::DeviceIndex index) override { reset_accumulated(index); }
  void resetPeakStats(c10::DeviceIndex index) override { reset_peak(index); }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    const auto stats = card_stats(index);
    c10::CachingDeviceAllocator::DeviceStats out;
    auto fill = [](auto& array, const Stat& stat) {
      auto& all = array[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
      all.current = stat.current;
      all.peak = stat.peak;
      all.allocated = stat.total;
      all.freed = stat.total - stat.current;
    };
    fill(out.allocated_bytes, stats.allocated);
    fill(out.requested_bytes, stats.allocated);
    fill(out.active_bytes, stats.allocated);
    fill(out.reserved_bytes, stats.reserved);
    fill(out.allocation, stats.blocks);
    fill(out.active, stats.blocks);
    fill(out.segment, stats.blocks);
    out.num_ooms = stats.out_of_memory;
    return out;
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    const auto [free, capacity] = free_and_capacity(index);
    return {static_cast<size_t>(free), static_cast<size_t>(capacity)};
  }
};

} // namespace

void open_card(int card, const std::string& path, std::optional<int64_t> capacity) {
  pool().open(card, path, capacity);
}

CardStats card_stats(int card) {
  return pool().with(card, [](Card& it) { return it.stats; });
}

void reset_peak(int card) {
  pool().with(card, [](Card& it) {
    for (auto* stat : {&it.stats.allocated, &it.stats.reserved, &it.stats.blocks}) stat->peak = stat->current;
  });
}

void reset_accumulated(int card) {
  pool().with(card, [](Card& it) {
    for (auto* stat : {&it.stats.allocated, &it.stats.reserved, &it.stats.blocks}) stat->total = stat->current;
    it.stats.out_of_memory = 0;
  });
}

std::pair<int64_t, int64_t> free_and_capacity(int card) {
  return pool().with(card, [](Card& it) {
    const auto capacity = it.ledger->capacity();
    return std::pair<int64_t, int64_t>(capacity - it.ledger->used(), capacity);
  });
}

void limit_process(int card, double fraction) {
  pool().with(card, [&](Card& it) { it.ledger->limit_here(fraction); });
}

int owner_id(const std::string& name) {
  auto& all = owners();
  std::lock_guard<std::mutex> lock(all.mutex);
  for (size_t i = 0; i < all.names.size(); ++i) {
    if (all.names[i] == name) return static_cast<int>(i);
  }
  TORCH_CHECK_VALUE(all.names.size() < kMaxOwners, "more than ", kMaxOwners, " memory owners");
  all.names.push_back(name);
  return static_cast<int>(all.names.size()) - 1;
}

std::vector<std::string> owner_names() {
  auto& all = owners();
  std::lock_guard<std::mutex> lock(all.mutex);
  return all.names;
}

int exchange_owner(int owner) {
  TORCH_CHECK_VALUE(owner >= 0 && owner < kMaxOwners, "no memory owner ", owner);
  if (thread_owner() == nullptr) c10::ThreadLocalDebugInfo::_push(kOwnerSlot, std::make_shared<ThreadOwner>());
  return thread_owner()->owner.exchange(owner);
}

bool is_device_block(const c10::DataPtr& data) {
  return data.get_deleter() == &free_block;
}

int owner_of(const c10::DataPtr& data) {
  if (data.get_deleter() == &free_vacant) return static_cast<Vacant*>(data.get_context())->owner;
  return is_device_block(data) ? pool().owner_of(data.get()) : -1;
}

void set_owner_of(const c10::DataPtr& data, int owner) {
  if (data.get_deleter() == &free_vacant) static_cast<Vacant*>(data.get_context())->owner = owner;
  if (is_device_block(data)) pool().set_owner(data.get(), owner);
}

c10::DeviceAllocator* device_allocator() {
  static auto* allocator = new NpuAllocator();
  return allocator;
}

c10::DataPtr allocate_on(int card, size_t bytes) {
  if (bytes == 0) return {nullptr, device_of(card)};
  TORCH_CHECK(!in_forked_child(), "npu: cannot be used in a forked process; start workers with 'spawn'");
  void* memory = pool().allocate(card, bytes);
  return {memory, memory, &free_block, device_of(card)};
}

bool free_raw_block(void* memory) {
  if (memory == nullptr || in_forked_child() || !pool().forget(memory)) return false;
  std::free(memory);
  return true;
}

c10::DataPtr reallocate_on(int card, size_t bytes, const c10::DataPtr& before) {
  const int owner = owner_of(before);
  if (bytes == 0 && owner >= 0) return {nullptr, new Vacant{owner}, &free_vacant, device_of(card)};
  auto data = allocate_on(card, bytes);
  if (owner >= 0) set_owner_of(data, owner);
  return data;
}

void install_device_allocator() {
  exchange_owner(0);
  c10::SetAllocator(c10::kPrivateUse1, device_allocator(), 1);
  std::atexit([] {
    if (!in_forked_child()) pool().leave_sessions();
  });
}

} // namespace npu
