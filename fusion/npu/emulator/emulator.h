// The emulated NPU: a PyTorch device `npu` (PrivateUse1) whose HBM is host memory.
//
//   heap.h         blocks and segments of one card, and the host's memory behind them
//   cards.cpp      the heap of every card, its statistics and the owner of every block
//   owners.cpp     names of owners, and the owner of new allocations
//   allocator.cpp  PyTorch's device allocator
//   shared.cpp     blocks that other processes map
//   host.cpp       the hook on the CPU allocator; pinned memory
//   streams.cpp    queues of deferred work, one per stream (streams.h)
//   copies.cpp     deferred copies, and copies of whole rows
//   runtime.cpp    hooks, device guard, streams, events, generators
//   alias.cpp      CPU tensors over the bytes of device tensors
//   fallback.cpp   every operator: the CPU kernel on zero-copy aliases
//   kernels.cpp    registers operators for the fallback, and the few that bypass it
//   hccl.cpp       the process-group backend: collectives on gloo, with immediate or deferred results
//   bindings.cpp   Python bindings
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace npu {

constexpr int kCards = 16; // of one emulated node
constexpr int kOwners = 6;
constexpr int64_t kDefaultCapacity = int64_t{2} << 30;

inline c10::Device device_of(int card) {
  return c10::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(card));
}

// ---- cards.cpp ------------------------------------------------------------------------------------------------

struct Stat {
  int64_t current = 0, peak = 0, total = 0;
  void add(int64_t bytes) {
    current += bytes;
    total += bytes;
    if (current > peak) peak = current;
  }
  void remove(int64_t bytes) { current -= bytes; }
};

struct CardStats {
  Stat allocated, requested, reserved, blocks, segments; // allocated: rounded up to blocks
  int64_t fragmented = 0; // bytes reserved and free, but in pieces that cannot be released
  int64_t out_of_memory = 0;
  int64_t owners[kOwners] = {};
};

void open_card(int card, std::optional<int64_t> capacity, bool late, double host_rate, double wire_rate);
CardStats card_stats(int card);
void reset_peak(int card);
void reset_accumulated(int card);
std::pair<int64_t, int64_t> free_and_capacity(int card);
int64_t largest_request(int card); // the largest allocation that would succeed now, in bytes
void limit_process(int card, double fraction);
void release_cached(); // on every card, and the host memory behind it

void* take_block(int card, int64_t bytes); // of the current stream; raises OutOfMemoryError
bool give_block(void* memory); // false: not a block
void record_use(void* memory, c10::StreamId stream); // delays reuse of the block until that stream has finished with it
int owner_of_block(void* memory); // -1: not a block
void set_owner_of_block(void* memory, int owner);

// ---- owners.cpp -----------------------------------------------------------------------------------------------

extern const char* const owner_names[kOwners]; // of `fusion/npu/memory.py`; the first one's is what nobody claims
int current_owner();
std::string complaint(int card, int64_t bytes, const CardStats& stats, int64_t capacity); // out-of-memory message
int exchange_owner(int owner); // sets the owner of this thread's next allocations; returns the previous one

// ---- allocator.cpp --------------------------------------------------------------------------------------------

c10::DeviceAllocator* device_allocator();
c10::DataPtr allocate_on(int card, size_t bytes);
c10::DataPtr reallocate_on(int card, size_t bytes, const c10::DataPtr& before); // keeps the owner of `before`
bool is_device_block(const c10::DataPtr& data);
int owner_of(const c10::DataPtr& data); // -1: no owner
void set_owner_of(const c10::DataPtr& data, int owner);
bool free_raw_block(void* memory); // false: not a block
void install_device_allocator();

// ---- shared.cpp -----------------------------------------------------------------------------------------------

// Locates the bytes of a block: process, open file and offset in it.
struct SharedHandle {
  int64_t pid, fd, inode, file_bytes, offset, bytes;
};

SharedHandle shared_place(void* memory); // of a block (cards.cpp)
SharedHandle share(const at::Tensor& tensor); // handle of its storage
at::Tensor map_shared(int card, const SharedHandle& handle, const std::optional<at::Tensor>& mapped); // reuses it

// ---- host.cpp -------------------------------------------------------------------------------------------------

bool is_pinned(const void* pointer);
void install_host_allocators();

// During its lifetime, this thread's allocations through the CPU allocator are charged to the card: outputs and
// workspaces of the CPU kernels that stand in for device kernels.
class ChargeScope {
 public:
  explicit ChargeScope(int card);
  ~ChargeScope();

 private:
  int before_;
};

// ---- runtime.cpp ----------------------------------------------------------------------------------------------

int current_card();
void check_card(int card); // raises ValueError
c10::StreamId current_stream(int card);
int exchange_card(int card);
bool in_forked_child();
const at::Generator& default_generator(int card);
at::Generator host_generator(const at::Generator& generator); // the CPU generator that it wraps
void install_runtime();

// ---- copies.cpp -----------------------------------------------------------------------------------------------

bool copy_later(const at::Tensor& to, const at::Tensor& from, bool non_blocking); // false: must not be deferred
void copy_now(at::Tensor to, const at::Tensor& from); // between CPU tensors, below autograd and Python
bool copy_rows(const at::Tensor& to, const at::Tensor& from); // copies immediately; false: not a copy of whole rows

// ---- alias.cpp ------------------------------------------------------------------------------------------------

c10::Storage cpu_storage(c10::DataPtr data, size_t bytes);
at::Tensor cpu_tensor_over(const at::Tensor& like, c10::Storage storage); // of the same shape
// A CPU tensor over the same bytes that does not keep them alive.
at::Tensor unowned_alias(const at::Tensor& tensor);
// A CPU tensor over the same bytes that keeps them alive.
at::Tensor owning_alias(const at::Tensor& tensor);
void resize_storage(c10::StorageImpl* storage, size_t bytes);

} // namespace npu
