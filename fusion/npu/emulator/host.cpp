// Host memory: the hook that charges allocations of CPU kernels to the card, and pinned memory.
#include "emulator.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CPUAllocator.h>

#include <map>

namespace npu {
namespace {

thread_local int t_charged_card = -1;

// Wraps PyTorch's CPU allocator: plain CPU work passes through, device kernels are charged to the card.
struct ChargingCpuAllocator final : c10::Allocator {
  explicit ChargingCpuAllocator(c10::Allocator* plain) : plain(plain) {}
  c10::DataPtr allocate(size_t bytes) override {
    if (t_charged_card < 0) return plain->allocate(bytes);
    auto data = allocate_on(t_charged_card, bytes);
    data.unsafe_set_device(c10::Device(c10::kCPU));
    return data;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  // Kernels also allocate raw pointers; these may be freed outside the call that allocated them, and vice versa.
  c10::DeleterFnPtr raw_deleter() const override { return &release_raw; }
  static void release_raw(void* memory) {
    if (!free_raw_block(memory)) c10::GetDefaultCPUAllocator()->raw_deleter()(memory);
  }
  c10::Allocator* plain;
};

// Pinned host memory: ordinary memory, recorded so that is_pinned() can answer.
struct PinnedAllocator final : at::HostAllocator {
  struct Range {
    PinnedAllocator* self;
    c10::DataPtr data;
  };

  c10::DataPtr allocate(size_t bytes) override {
    auto* range = new Range{this, c10::GetDefaultCPUAllocator()->allocate(bytes)};
    void* pointer = range->data.get();
    std::lock_guard<std::mutex> lock(mutex);
    ranges[pointer] = bytes;
    return {pointer, range, &release, c10::Device(c10::kCPU)};
  }

  static void release(void* context) {
    std::unique_ptr<Range> range(static_cast<Range*>(context));
    auto& self = *range->self;
    std::lock_guard<std::mutex> lock(self.mutex);
    self.ranges.erase(range->data.get());
  }

  bool holds(const void* pointer) {
    std::lock_guard<std::mutex> lock(mutex);
    auto after = ranges.upper_bound(const_cast<void*>(pointer));
    if (after == ranges.begin()) return false;
    --after;
    return static_cast<const char*>(pointer) < static_cast<char*>(after->first) + after->second;
  }

  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; } // not counted: torch.npu refuses them by name
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  std::mutex mutex;
  std::map<void*, size_t> ranges;
};

PinnedAllocator& pinned_allocator() {
  static auto* allocator = new PinnedAllocator();
  return *allocator;
}

} // namespace

bool is_pinned(const void* pointer) {
  return pinned_allocator().holds(pointer);
}

ChargeScope::ChargeScope(int card) : before_(std::exchange(t_charged_card, card)) {}
ChargeScope::~ChargeScope() {
  t_charged_card = before_;
}

void install_host_allocators() {
  c10::SetAllocator(c10::kCPU, new ChargingCpuAllocator(c10::GetAllocator(c10::kCPU)), 1);
  at::setHostAllocator(c10::kPrivateUse1, &pinned_allocator(), 1);
}

} // namespace npu
