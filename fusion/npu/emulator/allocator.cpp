// PyTorch's device allocator: tensors' data, statistics, resizing. Its blocks come from cards.cpp.
#include "emulator.h"

#include <c10/util/Exception.h>

namespace npu {
namespace {

void free_block(void* memory) {
  if (!in_forked_child()) give_block(memory);
}

// An emptied storage keeps its owner, for when it is allocated again.
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
  void emptyCache(c10::MempoolId_t) override { release_cached(); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (is_device_block(data)) record_use(data.get(), stream.id());
  }
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
    fill(out.requested_bytes, stats.requested);
    fill(out.active_bytes, stats.allocated);
    fill(out.reserved_bytes, stats.reserved);
    fill(out.allocation, stats.blocks);
    fill(out.active, stats.blocks);
    fill(out.segment, stats.segments);
    fill(out.inactive_split_bytes, Stat{stats.fragmented});
    out.num_ooms = stats.out_of_memory;
    return out;
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    const auto [free, capacity] = free_and_capacity(index);
    return {static_cast<size_t>(free), static_cast<size_t>(capacity)};
  }
};

} // namespace

bool is_device_block(const c10::DataPtr& data) {
  return data.get_deleter() == &free_block;
}

int owner_of(const c10::DataPtr& data) {
  if (data.get_deleter() == &free_vacant) return static_cast<Vacant*>(data.get_context())->owner;
  return is_device_block(data) ? owner_of_block(data.get()) : -1;
}

void set_owner_of(const c10::DataPtr& data, int owner) {
  if (data.get_deleter() == &free_vacant) static_cast<Vacant*>(data.get_context())->owner = owner;
  if (is_device_block(data)) set_owner_of_block(data.get(), owner);
}

c10::DeviceAllocator* device_allocator() {
  static auto* allocator = new NpuAllocator();
  return allocator;
}

c10::DataPtr allocate_on(int card, size_t bytes) {
  if (bytes == 0) return {nullptr, device_of(card)};
  TORCH_CHECK(!in_forked_child(), "npu: cannot be used in a forked process; start workers with 'spawn'");
  void* memory = take_block(card, static_cast<int64_t>(bytes));
  return {memory, memory, &free_block, device_of(card)};
}

bool free_raw_block(void* memory) {
  return memory != nullptr && !in_forked_child() && give_block(memory);
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
}

} // namespace npu
