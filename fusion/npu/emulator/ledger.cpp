// Accounts for one card's bytes, shared between processes through a page of POSIX shared memory.
//
// The page holds a total and one slot per process. Each process locks the byte of the file that stands for its slot;
// the kernel releases that lock when the process ends for any reason, so an unlocked slot belongs to a dead process.
// (Process ids would not work: they are reused, and a killed child that has not been reaped still exists.)
#include "emulator.h"

#include <c10/util/Exception.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

namespace npu {

constexpr int kSlots = 128;
constexpr uint64_t kMagic = 0x6e70756c65646732;

struct LedgerSlot {
  std::atomic<int64_t> pid; // 0: empty
  std::atomic<int64_t> bytes;
};

struct LedgerPage {
  uint64_t magic;
  std::atomic<int64_t> capacity;
  std::atomic<int64_t> used;
  LedgerSlot slots[kSlots];
};

namespace {

// Byte 0 of the file guards joining and reaping, byte 1 + i is slot i.
bool lock_byte(int fd, short type, off_t byte, bool wait) {
  struct flock lock {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = byte;
  lock.l_len = 1;
  int result;
  do {
    result = fcntl(fd, wait ? F_SETLKW : F_SETLK, &lock);
  } while (result < 0 && errno == EINTR);
  return result == 0;
}

struct FileLock {
  explicit FileLock(int fd) : fd(fd) {
    if (fd >= 0) TORCH_CHECK(lock_byte(fd, F_WRLCK, 0, true), "cannot lock the card's ledger: ", strerror(errno));
  }
  ~FileLock() {
    if (fd >= 0) lock_byte(fd, F_UNLCK, 0, false);
  }
  int fd;
};

bool still_linked(int fd, const std::string& path) {
  struct stat mine {}, there {};
  return fstat(fd, &mine) == 0 && stat(path.c_str(), &there) == 0 && mine.st_ino == there.st_ino;
}

} // namespace

CardLedger::CardLedger(const std::string& path, std::optional<int64_t> capacity) : path_(path) {
  if (path_.empty()) {
    page_ = new LedgerPage();
    page_->capacity = capacity.value_or(kDefaultCapacity);
    return;
  }
  while (true) { // the last process to leave unlinks the file; a process that opened it just before retries
    fd_ = open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    TORCH_CHECK(fd_ >= 0, "cannot open ", path_, ": ", strerror(errno));
    FileLock guard(fd_);
    if (!still_linked(fd_, path_)) {
      guard.fd = -1;
      close(fd_);
      continue;
    }
    // Reserves the page: where shared memory is full, a write to a mapped page without memory would kill the process.
    const int full = posix_fallocate(fd_, 0, sizeof(LedgerPage));
    TORCH_CHECK(full == 0, "cannot reserve ", sizeof(LedgerPage), " bytes at ", path_, ": ", strerror(full),
                "; free space in /dev/shm, or enlarge it (docker run --shm-size)");
    void* memory = mmap(nullptr, sizeof(LedgerPage), PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    TORCH_CHECK(memory != MAP_FAILED, "cannot map ", path_, ": ", strerror(errno));
    page_ = static_cast<LedgerPage*>(memory);
    try {
      join(capacity);
    } catch (...) {
      guard.fd = -1; // closing the file drops its locks
      munmap(page_, sizeof(LedgerPage));
      close(fd_);
      throw;
    }
    return;
  }
}

void CardLedger::join(std::optional<int64_t> capacity) {
  if (page_->magic != kMagic) {
    std::memset(static_cast<void*>(page_), 0, sizeof(LedgerPage));
    page_->magic = kMagic;
  }
  slot_ = -1;
  reap_dead();
  bool alone = true;
  for (int i = kSlots - 1; i >= 0; --i) {
    if (page_->slots[i].pid == 0) {
      slot_ = i;
    } else {
      alone = false;
    }
  }
  TORCH_CHECK(slot_ >= 0, path_, ": expected at most ", kSlots, " processes on one card");
  if (alone) {
    page_->used = 0;
    page_->capacity = capacity.value_or(kDefaultCapacity);
  }
  TORCH_CHECK_VALUE(
      !capacity || *capacity == page_->capacity,
      "device.capacity_bytes=", *capacity, ": the processes already on this card have set it to ",
      page_->capacity.load(), "; use the same capacity, or another session name");
  page_->slots[slot_].bytes = 0;
  page_->slots[slot_].pid = getpid();
  TORCH_CHECK(lock_byte(fd_, F_WRLCK, 1 + slot_, false), "cannot lock a slot of ", path_);
}

CardLedger::~CardLedger() {
  if (!path_.empty()) leave();
  delete page_;
}

void CardLedger::leave() {
  auto* alone = new LedgerPage();
  alone->capacity = capacity();
  alone->used = used_here();
  alone->slots[0].bytes = used_here();
  if (!in_forked_child()) {
    FileLock guard(fd_);
    give(used_here());
    page_->slots[slot_].pid = 0;
    lock_byte(fd_, F_UNLCK, 1 + slot_, false);
    reap_dead();
    bool last = true;
    for (auto& slot : page_->slots) last = last && slot.pid == 0;
    if (last) unlink(path_.c_str());
  }
  munmap(page_, sizeof(LedgerPage));
  close(fd_);
  path_.clear();
  page_ = alone;
  slot_ = 0;
}

bool CardLedger::take(int64_t bytes) {
  auto fits = [&] {
    auto& mine = page_->slots[slot_].bytes;
    auto here = mine.fetch_add(bytes) + bytes;
    auto all = page_->used.fetch_add(bytes) + bytes;
    if (all <= page_->capacity && here <= static_cast<int64_t>(page_->capacity * fraction_)) return true;
    give(bytes);
    return false;
  };
  if (fits()) return true;
  if (path_.empty()) return false;
  {
    std::lock_guard<std::mutex> threads(mutex_);
    FileLock guard(fd_);
    reap_dead();
  }
  return fits();
}

void CardLedger::give(int64_t bytes) {
  page_->slots[slot_].bytes.fetch_sub(bytes);
  page_->used.fetch_sub(bytes);
}

bool CardLedger::slot_is_live(int slot) const {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = 1 + slot;
  lock.l_len = 1;
  return fcntl(fd_, F_GETLK, &lock) < 0 || lock.l_type != F_UNLCK;
}

void CardLedger::reap_dead() {
  for (int i = 0; i < kSlots; ++i) {
    auto& slot = page_->slots[i];
    if (i == slot_ || slot.pid == 0 || slot_is_live(i)) continue;
    page_->used.fetch_sub(slot.bytes.exchange(0));
    slot.pid = 0;
  }
}

int64_t CardLedger::capacity() const {
  return page_->capacity;
}

int64_t CardLedger::used() {
  if (!path_.empty()) {
    std::lock_guard<std::mutex> threads(mutex_);
    FileLock guard(fd_);
    reap_dead();
  }
  return page_->used;
}

int64_t CardLedger::room() {
  return std::min(page_->capacity - used(), static_cast<int64_t>(page_->capacity * fraction_) - used_here());
}

int64_t CardLedger::used_here() const {
  return page_->slots[slot_].bytes;
}

void CardLedger::limit_here(double fraction) {
  fraction_ = fraction;
}

} // namespace npu
