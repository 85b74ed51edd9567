// Ranges of addresses and the host memory behind them: a sparse unnamed file (memfd) that other processes can map. The
// host provides no memory before it is touched.
#include "heap.h"

#include <c10/util/Exception.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace npu {

namespace {

constexpr int64_t kHostPage = 4096;

int new_file(int64_t bytes) {
  const int fd = memfd_create("rlfusion-npu", MFD_CLOEXEC);
  TORCH_CHECK(fd >= 0 && ftruncate(fd, bytes) == 0, "cannot create shared memory: ", strerror(errno));
  return fd;
}

int64_t inode_of(int fd) {
  struct stat file {};
  fstat(fd, &file);
  return static_cast<int64_t>(file.st_ino);
}

char* map(int fd, int64_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  TORCH_CHECK_WITH(
      OutOfMemoryError, memory != MAP_FAILED, "this machine has no memory left to map ", bytes, " bytes: ",
      strerror(errno));
  return static_cast<char*>(memory);
}

} // namespace

Region::Region(int64_t size) : Region(new_file(size), size) {}

Region::Region(int file, int64_t size) : fd(file), inode(inode_of(file)), bytes(size), base(map(file, size)) {}

Region::~Region() {
  munmap(base, bytes);
  close(fd);
}

void Region::drop(int64_t offset, int64_t size) {
  const int64_t begin = (offset + kHostPage - 1) / kHostPage * kHostPage, end = (offset + size) / kHostPage * kHostPage;
  if (begin < end) fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, begin, end - begin);
}

} // namespace npu
