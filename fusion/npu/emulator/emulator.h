// The emulated NPU: a PyTorch device `npu` (PrivateUse1) whose HBM is host memory.
//
//   ledger.cpp     bytes of one card, shared by the processes on it
//   heap.cpp       blocks and segments of one card (heap.h)
//   region.cpp     the host's memory behind them
//   cards.cpp      the heap of every card, its statistics and who owns what
//   owners.cpp     what memory is for
//   allocator.cpp  device memory as PyTorch asks for it
//   shared.cpp     blocks that other processes map
//   host.cpp       the hook on the CPU allocator; pinned memory
//   streams.cpp    work of a stream that is done later (streams.h)
//   copies.cpp     copies among it
//   runtime.cpp    hooks, device guard, streams, events, generators
//   alias.cpp      CPU tensors over the bytes of the card's
//   fallback.cpp   every operator: the CPU kernel on zero-copy aliases
//   kernels.cpp    which operators go there, and the few that do not
//   autocast.cpp   mixed precision
//   collective.cpp one collective on gloo, seen at once or late (collective.h)
//   hccl.cpp       the process-group backend
//   bindings.cpp   what Python sees
#pragma once

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
constexpr int kMaxOwners = 64;
constexpr int64_t kDefaultCapacity = int64_t{2} << 30;

inline c10::Device device_of(int card) {
  return c10::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(card));
}

// ---- ledger.cpp -----------------------------------------------------------------------------------------------

struct LedgerPage;

// Bytes taken on one card. With a path the page lives in a file under /dev/shm and every process that opens the same
// path shares the capacity; without one it is private. A process that died gives its bytes back when somebody looks.
class CardLedger {
 public:
  CardLedger(const std::string& path, std::optional<int64_t> capacity);
  ~CardLedger();
  bool take(int64_t bytes); // false: the card is full
  void give(int64_t bytes);
  int64_t capacity() const;
  void leave(); // the session; the account goes on alone
  int64_t used(); // by every live process
  int64_t room(); // bytes that this process could still take
  int64_t used_here() const;
  void limit_here(double fraction); // of the capacity, for this process
  const std::string& path() const { return path_; }

 private:
  void join(std::optional<int64_t> capacity);
  void reap_dead();
  bool slot_is_live(int slot) const;
  std::string path_;
  int fd_ = -1;
  int slot_ = 0;
  double fraction_ = 1.0;
  LedgerPage* page_ = nullptr;
  std::mutex mutex_; // file locks belong to the process, not to a thread
};

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
  Stat allocated, requested, reserved, blocks, segments; // allocated: rounded
  int64_t fragmented = 0; // bytes reserved and free, but in pieces that cannot be given back
  int64_t out_of_memory = 0;
  int64_t owners[kMaxOwners] = {};
};

void open_card(int card, const std::string& path, std::optional<int64_t> capacity, bool expandable, bool late);
CardStats card_stats(int card);
void reset_peak(int card);
void reset_accumulated(int card);
std::pair<int64_t, int64_t> free_and_capacity(int card);
int64_t largest_request(int card); // that could be met now
void limit_process(int card, double fraction);
void release_cached(); // of every card, and the host's memory behind it

void* take_block(int card, int64_t bytes); // raises OutOfMemoryError
bool give_block(void* memory); // false: not a block
void record_use(void* memory, c10::StreamId stream); // the block comes back when that stream is done with it
int owner_of_block(void* memory); // -1: not a block
void set_owner_of_block(void* memory, int owner);
void leave_sessions(); // so that other processes have the memory before this one has ended

// ---- owners.cpp -----------------------------------------------------------------------------------------------

int owner_id(const std::string& name); // registers a new name
std::vector<std::string> owner_names();
int current_owner();
std::string complaint(int card, int64_t bytes, const CardStats& stats, CardLedger& ledger); // of a full card
int exchange_owner(int owner); // of what this thread allocates from now on; returns the one before

// ---- allocator.cpp --------------------------------------------------------------------------------------------

c10::DeviceAllocator* device_allocator();
c10::DataPtr allocate_on(int card, size_t bytes);
c10::DataPtr reallocate_on(int card, size_t bytes, const c10::DataPtr& before); // for the owner of `before`
bool is_device_block(const c10::DataPtr& data);
int owner_of(const c10::DataPtr& data); // -1: nobody's
void set_owner_of(const c10::DataPtr& data, int owner);
bool free_raw_block(void* memory); // false: not a block
void install_device_allocator();

// ---- shared.cpp -----------------------------------------------------------------------------------------------

// Where the bytes of a block are: in which open file of which process, and where in it.
struct SharedHandle {
  int64_t pid, fd, inode, file_bytes, offset, bytes;
};

SharedHandle shared_place(void* memory); // of a block (cards.cpp)
SharedHandle share(const at::Tensor& tensor); // the bytes of its storage
at::Tensor map_shared(int card, const SharedHandle& handle);

// ---- host.cpp -------------------------------------------------------------------------------------------------

bool is_pinned(const void* pointer);
void install_host_allocators();

// While it lives, what this thread allocates through the CPU allocator is charged to the card: outputs and
// workspaces of the CPU kernels that stand in for the card's own.
class ChargeScope {
 public:
  explicit ChargeScope(int card);
  ~ChargeScope();

 private:
  int before_;
};

// ---- runtime.cpp ----------------------------------------------------------------------------------------------

int current_card();
c10::StreamId current_stream(int card);
int exchange_card(int card);
bool in_forked_child();
const at::Generator& default_generator(int card);
at::Generator host_generator(const at::Generator& generator); // the CPU generator inside
void install_runtime();

// ---- copies.cpp -----------------------------------------------------------------------------------------------

bool copy_later(const at::Tensor& to, const at::Tensor& from, bool non_blocking); // false: copy now
bool copy_rows(const at::Tensor& to, const at::Tensor& from); // now; false: not of whole rows

// ---- alias.cpp ------------------------------------------------------------------------------------------------

c10::Storage cpu_storage(c10::DataPtr data, size_t bytes);
at::Tensor cpu_tensor_over(const at::Tensor& like, c10::Storage storage); // of the same shape
// A CPU tensor over the same bytes, which lives as long as they do.
at::Tensor unowned_alias(const at::Tensor& tensor);
// A CPU tensor over the same bytes that keeps them alive.
at::Tensor owning_alias(const at::Tensor& tensor);
void resize_storage(c10::StorageImpl* storage, size_t bytes);

} // namespace npu
