// CPU tensors over the bytes of device tensors: the arguments of CPU kernels.
#include "streams.h"

#include <cstring>

namespace npu {

at::Tensor cpu_tensor_over(const at::Tensor& like, c10::Storage storage) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), like.dtype());
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) impl->_set_conj(true);
  if (like.is_neg()) impl->_set_neg(true);
  return at::Tensor(std::move(impl));
}

c10::Storage cpu_storage(c10::DataPtr data, size_t bytes) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, std::move(data), c10::GetAllocator(c10::kCPU), true));
}

at::Tensor unowned_alias(const at::Tensor& tensor) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  c10::DataPtr data(const_cast<void*>(storage->data()), c10::Device(c10::kCPU));
  return cpu_tensor_over(tensor, cpu_storage(std::move(data), storage->nbytes()));
}

at::Tensor owning_alias(const at::Tensor& tensor) {
  if (tensor.device().type() != c10::kPrivateUse1) return tensor;
  auto* keep = new c10::Storage(tensor.storage());
  auto release = [](void* context) { delete static_cast<c10::Storage*>(context); };
  c10::DataPtr data(const_cast<void*>(keep->data()), keep, release, c10::Device(c10::kCPU));
  return cpu_tensor_over(tensor, cpu_storage(std::move(data), keep->nbytes()));
}

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  if (bytes == storage->nbytes()) return;
  TORCH_CHECK(storage->resizable(), "Trying to resize storage that is not resizable");
  const int card = storage->device().index();
  const auto kept = std::min(bytes, storage->nbytes());
  if (kept > 0 && is_late(card)) reach_end_of(card, current_stream(card)); // resizing runs no kernel
  auto data = reallocate_on(card, bytes, storage->data_ptr());
  if (kept > 0) std::memcpy(data.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

} // namespace npu
