// Owners of memory: their names, the current one of this thread, and the table in out-of-memory messages.
#include "emulator.h"

#include <c10/util/ThreadLocalDebugInfo.h>

#include <atomic>
#include <iomanip>
#include <sstream>

namespace npu {
namespace {

// The owner is part of PyTorch's thread-local state, so that the threads of a backward pass inherit it from the caller,
// which waits meanwhile. One entry per thread, made once and then changed in place: others use that state as a stack,
// and an entry that is pushed and popped would have to keep their order. (Dedicated slots exist only in newer versions
// of torch; TEST_INFO_2 exists in all.)
const auto kOwnerSlot = c10::DebugInfoKind::TEST_INFO_2;
struct ThreadOwner final : c10::DebugInfoBase {
  std::atomic<int> owner{0};
};

ThreadOwner* thread_owner() {
  return static_cast<ThreadOwner*>(c10::ThreadLocalDebugInfo::get(kOwnerSlot));
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

} // namespace

const char* const owner_names[kOwners] = {"activations", "weights", "gradients", "optimizer", "kv", "buckets"};

int current_owner() {
  const auto* mine = thread_owner();
  return mine == nullptr ? 0 : mine->owner.load(std::memory_order_relaxed);
}

int exchange_owner(int owner) {
  TORCH_CHECK_VALUE(owner >= 0 && owner < kOwners, "memory owner ", owner, ": expected 0 to ", kOwners - 1);
  if (thread_owner() == nullptr) c10::ThreadLocalDebugInfo::_push(kOwnerSlot, std::make_shared<ThreadOwner>());
  return thread_owner()->owner.exchange(owner);
}

std::string complaint(int card, int64_t bytes, const CardStats& stats, int64_t capacity) {
  std::ostringstream out;
  out << "npu:" << card << " out of memory: " << readable(bytes) << " requested, " << readable(stats.allocated.current)
      << " allocated here, " << readable(stats.reserved.current - stats.allocated.current)
      << " reserved but unused (fragments that are too small), capacity " << readable(capacity)
      << " (device.capacity_bytes=" << capacity << "). By owner:";
  for (int i = 0; i < kOwners; ++i) {
    out << (i ? ", " : " ") << owner_names[i] << " " << readable(stats.owners[i]);
  }
  return out.str();
}

} // namespace npu
