// Ranges of addresses and the host memory behind them: anonymous memory, or a sparse unnamed file (memfd) that other
// processes can map. The host provides no memory before it is touched.
#include "heap.h"

#include <c10/util/Exception.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace npu {

namespace {

constexpr int64_t kHostPage = 4096;
constexpr int64_t kHugePage = int64_t{2} << 20;

char* reserve(int64_t bytes, int fd) {
  const int kind = fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, kind | MAP_NORESERVE, fd, 0);
  TORCH_CHECK_WITH(
      OutOfMemoryError, memory != MAP_FAILED, "this machine has no memory left to map ", bytes, " bytes: ",
      strerror(errno));
  return static_cast<char*>(memory);
}

int64_t inode_of(int fd) {
  struct stat file {};
  fstat(fd, &file);
  return static_cast<int64_t>(file.st_ino);
}

} // namespace

Region::Region(int64_t size, bool shared) : bytes(size) {
  if (shared) {
    fd = memfd_create("rlfusion-npu", MFD_CLOEXEC);
    TORCH_CHECK(fd >= 0 && ftruncate(fd, bytes) == 0, "cannot create shared memory: ", strerror(errno));
    inode = inode_of(fd);
    mapped_ = base = reserve(bytes, fd);
    mapped_bytes_ = bytes;
    return;
  }
  if (bytes < kHugePage) {
    mapped_ = base = reserve(bytes, -1);
    mapped_bytes_ = bytes;
    return;
  }
  mapped_bytes_ = bytes + kHugePage;
  mapped_ = reserve(mapped_bytes_, -1);
  base = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(mapped_) + kHugePage - 1) / kHugePage * kHugePage);
  madvise(base, bytes, MADV_HUGEPAGE); // with huge pages, a twentieth of the page faults
}

Region::Region(int file, int64_t size) : bytes(size), fd(file), inode(inode_of(file)) {
  mapped_ = base = reserve(bytes, fd);
  mapped_bytes_ = bytes;
}

Region::~Region() {
  if (mapped_ != nullptr) munmap(mapped_, mapped_bytes_);
  if (fd >= 0) close(fd);
}

void Region::drop(int64_t offset, int64_t size) {
  const int64_t begin = (offset + kHostPage - 1) / kHostPage * kHostPage, end = (offset + size) / kHostPage * kHostPage;
  if (begin >= end) return;
  if (fd >= 0) {
    fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, begin, end - begin);
  } else {
    madvise(base + begin, end - begin, MADV_DONTNEED);
  }
}

} // namespace npu
