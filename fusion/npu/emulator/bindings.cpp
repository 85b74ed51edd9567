// Python bindings; `frontend.py` builds `torch.npu` on them.
#include "streams.h"

#include <torch/csrc/utils/pybind.h>

#include <cstring>

namespace py = pybind11;

namespace npu {

void bind_hccl(py::module& m);

namespace {

const c10::DataPtr& data_of(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.device().type() == c10::kPrivateUse1, "not a tensor of the emulated NPU");
  return tensor.storage().unsafeGetStorageImpl()->data_ptr();
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  install_runtime();
  install_device_allocator();
  install_host_allocators();
  m.attr("cards") = kCards;
  m.def("open_card", &open_card);
  m.def("free_and_capacity", &free_and_capacity);
  m.def("largest_request", &largest_request);
  m.def("limit_process", &limit_process);
  m.attr("owners") = std::vector<std::string>(owner_names, owner_names + kOwners);
  m.def("exchange_owner", &exchange_owner);
  m.def("by_owner", [](int card) {
    const auto stats = card_stats(card);
    return std::vector<int64_t>(stats.owners, stats.owners + kOwners);
  });
  m.def("host_view", [](const at::Tensor& tensor) {
    TORCH_CHECK_VALUE(data_of(tensor).get() != nullptr, "host_view(): the tensor's storage is released");
    return owning_alias(tensor);
  });
  m.attr("handle_bytes") = sizeof(SharedHandle);
  m.def("share", [](const std::vector<at::Tensor>& tensors) {
    std::string handles;
    for (const auto& tensor : tensors) {
      const auto handle = share(tensor);
      handles.append(reinterpret_cast<const char*>(&handle), sizeof(handle));
    }
    return py::bytes(handles);
  });
  m.def("map_shared", [](int card, const std::string& handles, const std::vector<std::optional<at::Tensor>>& mapped) {
    TORCH_CHECK_VALUE(
        handles.size() == mapped.size() * sizeof(SharedHandle), "map(): ", handles.size(), " bytes of handles for ",
        mapped.size(), " tensors");
    std::vector<at::Tensor> tensors;
    for (size_t i = 0; i < mapped.size(); ++i) {
      SharedHandle handle;
      std::memcpy(&handle, handles.data() + i * sizeof(handle), sizeof(handle));
      tensors.push_back(map_shared(card, handle, mapped[i]));
    }
    return tensors;
  });
  m.def("current_card", &current_card);
  m.def("exchange_card", &exchange_card);
  m.def("forget_work", &forget_work);
  m.def("in_forked_child", &in_forked_child);
  m.def("default_generator", [](int card) { return default_generator(card); });
  bind_hccl(m);
}

} // namespace npu
