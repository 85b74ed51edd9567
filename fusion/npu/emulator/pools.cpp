// Private pools of memory (`torch.npu.MemPool`): a thread allocates from the pool that it has made current on a card, and
// no other allocation reuses the memory of that pool. Counted like all other memory of the card.
//
//   created ──► live: its free memory is kept ──users = 0──► released: its free memory returns to the card
#include "heap.h"

#include <c10/util/Exception.h>

#include <array>

namespace npu {
namespace {

thread_local std::array<PrivatePool*, kCards> t_pools{};

struct Pools {
  std::mutex mutex;
  std::map<int64_t, PrivatePool> by_id; // never erased: blocks may outlive their pool
  int64_t next_id = 1;
};

Pools& pools() {
  static auto* all = new Pools();
  return *all;
}

PrivatePool& pool_with(int64_t id) {
  auto& all = pools();
  std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.by_id.find(id);
  TORCH_CHECK_VALUE(found != all.by_id.end(), "no memory pool (0, ", id, ")");
  return found->second;
}

} // namespace

int64_t new_pool_id() {
  auto& all = pools();
  std::lock_guard<std::mutex> lock(all.mutex);
  return all.next_id++;
}

int64_t make_pool(int64_t allocate, int64_t free, bool use_on_oom, bool no_split) {
  const auto id = new_pool_id();
  auto& all = pools();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto& pool = all.by_id[id];
  pool.id = id;
  pool.allocate = reinterpret_cast<PrivatePool::Allocate>(allocate);
  pool.free = reinterpret_cast<PrivatePool::Free>(free);
  pool.use_on_oom = use_on_oom;
  pool.no_split = no_split;
  return id;
}

int64_t pool_users(int64_t id) {
  return pool_with(id).users;
}

int64_t enter_pool(int card, int64_t id) {
  check_card(card);
  auto& pool = pool_with(id);
  ++pool.users;
  const auto* before = std::exchange(t_pools[card], &pool);
  return before == nullptr ? 0 : before->id;
}

void leave_pool(int card, int64_t id, int64_t before) {
  check_card(card);
  t_pools[card] = before == 0 ? nullptr : &pool_with(before);
  drop_pool(id);
}

void drop_pool(int64_t id) {
  if (--pool_with(id).users == 0) release_free_pages();
}

PrivatePool* current_pool(int card) {
  return t_pools[card];
}

} // namespace npu
