// Shares blocks with other processes of the machine, as cards of a supernode read each other's memory. Segments are
// unnamed files (memfd), which exist only as long as a process holds or maps them, so that neither a normal end nor a
// kill leaves anything behind.
//
//   owner    the handle is /proc/<pid>/fd/<fd> and an offset
//   mapper   maps the owner's whole file once and reuses the mapping for later blocks of that owner; is not charged
#include "heap.h"

#include <c10/util/Exception.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace npu {

namespace {

// Another process's file, mapped as long as this process holds a block of it or the owner is alive.
struct Mapping {
  Mapping(int fd, const SharedHandle& handle, std::string path)
      : region(fd, handle.file_bytes), path(std::move(path)) {}
  Region region;
  std::string path;
};

using MappingKey = std::pair<int64_t, int64_t>; // pid, inode

struct Mappings {
  std::mutex mutex;
  std::map<MappingKey, std::shared_ptr<Mapping>> open;
};

Mappings& mappings() {
  static auto* all = new Mappings();
  return *all;
}

bool is_file(const std::string& path, int64_t inode) {
  struct stat file {};
  return stat(path.c_str(), &file) == 0 && static_cast<int64_t>(file.st_ino) == inode;
}

bool lies_in_its_file(const SharedHandle& handle) {
  return handle.offset >= 0 && handle.bytes >= 0 && handle.offset <= handle.file_bytes &&
      handle.bytes <= handle.file_bytes - handle.offset;
}

std::shared_ptr<Mapping> mapping_of(const SharedHandle& handle, bool again) {
  auto& all = mappings();
  std::lock_guard<std::mutex> lock(all.mutex);
  const auto known = all.open.find({handle.pid, handle.inode});
  if (again && known != all.open.end()) return known->second;
  for (auto it = all.open.begin(); it != all.open.end();) {
    const bool is_idle = it->second.use_count() == 1 && !is_file(it->second->path, it->first.second);
    it = is_idle ? all.open.erase(it) : std::next(it);
  }
  const auto path = "/proc/" + std::to_string(handle.pid) + "/fd/" + std::to_string(handle.fd);
  TORCH_CHECK_VALUE(
      is_file(path, handle.inode), "a shared block cannot be mapped: process ", handle.pid, " that owned it has ended");
  auto& mapping = all.open[{handle.pid, handle.inode}];
  if (!mapping) {
    const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    TORCH_CHECK_VALUE(fd >= 0, "a shared block cannot be mapped: ", path, ": ", strerror(errno));
    struct stat file {};
    if (fstat(fd, &file) != 0 || file.st_size < handle.file_bytes) {
      close(fd);
      TORCH_CHECK_VALUE(false, "a shared block cannot be mapped: ", path, " is smaller than its handle states");
    }
    mapping = std::make_shared<Mapping>(fd, handle, path);
  }
  return mapping;
}

void release_mapping(void* context) {
  std::lock_guard<std::mutex> lock(mappings().mutex);
  delete static_cast<std::shared_ptr<Mapping>*>(context);
}

at::Tensor bytes_of(int card, c10::DataPtr data, int64_t bytes) {
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, std::move(data), device_allocator(), /*resizable=*/false));
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::scalarTypeToTypeMeta(c10::kByte));
  impl->set_sizes_contiguous({bytes});
  return at::Tensor(std::move(impl));
}

} // namespace

SharedHandle share(const at::Tensor& tensor) {
  const auto& data = tensor.storage().data_ptr();
  TORCH_CHECK_VALUE(
      data.get() != nullptr && is_device_block(data), "share(): expected tensors that lie on a card and have bytes");
  return shared_place(data.get());
}

at::Tensor map_shared(int card, const SharedHandle& handle, const std::optional<at::Tensor>& mapped) {
  TORCH_CHECK_VALUE(lies_in_its_file(handle), "a shared block cannot be mapped: its handle lies outside its file");
  auto mapping = mapping_of(handle, mapped.has_value());
  TORCH_CHECK_VALUE(
      handle.file_bytes == mapping->region.bytes, "a shared block cannot be mapped: its file has another size");
  char* memory = mapping->region.base + handle.offset;
  auto* held = new std::shared_ptr<Mapping>(std::move(mapping));
  c10::DataPtr data{memory, held, &release_mapping, device_of(card)};
  if (!mapped) return bytes_of(card, std::move(data), handle.bytes);
  auto* storage = mapped->storage().unsafeGetStorageImpl();
  TORCH_CHECK_VALUE(
      storage->data_ptr().get_deleter() == &release_mapping && static_cast<int64_t>(storage->nbytes()) == handle.bytes,
      "map(): expected a mapped tensor of as many bytes as the block");
  storage->set_data_ptr_noswap(std::move(data));
  return *mapped;
}

} // namespace npu
