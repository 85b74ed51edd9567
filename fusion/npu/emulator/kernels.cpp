// Registers operators for the fallback, and kernels for the few that bypass it: making a tensor, and viewing one.
#include "emulator.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace npu {

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack); // fallback.cpp

namespace {

at::Tensor empty_memory_format(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
    std::optional<c10::Device> device, std::optional<bool> pin_memory, std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK_NOT_IMPLEMENTED(c10::layout_or_default(layout) == c10::kStrided, "npu: supports only strided tensors");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "Only dense CPU tensors can be pinned");
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
      format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout, std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  TORCH_CHECK_NOT_IMPLEMENTED(c10::layout_or_default(layout) == c10::kStrided, "npu: supports only strided tensors");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "Only dense CPU tensors can be pinned");
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

// The zeros that backward passes return where nothing depends on an input (of sgn, round, …). PyTorch's tensors of zeros
// without memory are an optimisation that every kernel would have to know.
at::Tensor efficient_zeros(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
    std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  return empty_memory_format(size, dtype, layout, device, pin_memory, std::nullopt).zero_();
}

// Copies whole rows at once where the card is not late, and everything else through the path of a single copy.
void foreach_copy(at::TensorList to, at::TensorList from, bool non_blocking) {
  TORCH_CHECK(to.size() == from.size(), "_foreach_copy_: ", from.size(), " tensors into ", to.size());
  for (size_t i = 0; i < to.size(); ++i) {
    const auto card = (to[i].device().type() == c10::kPrivateUse1 ? to : from)[i].device().index();
    if (is_late(card) || !copy_rows(to[i], from[i])) to[i].copy_(from[i], non_blocking);
  }
}

// Every operator on a tensor that is not strided.
void refuse(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, op.operator_name(), ": the emulated NPU supports only strided tensors, and no quantised ones");
}

void record_stream(at::Tensor& tensor, at::Stream stream) {
  device_allocator()->recordStream(tensor.storage().data_ptr(), stream);
}

// Chooses the attention kernel before dispatch: the CPU's choice, whose fused kernel then runs through the fallback.
int64_t choose_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
    double dropout, bool causal, std::optional<double> scale, bool gqa) {
  std::optional<at::Tensor> mask_alias;
  if (mask && mask->defined()) mask_alias = owning_alias(*mask);
  return at::_fused_sdp_choice(
      owning_alias(query).set_requires_grad(query.requires_grad()),
      owning_alias(key).set_requires_grad(key.requires_grad()),
      owning_alias(value).set_requires_grad(value.requires_grad()), mask_alias, dropout, causal, scale, gqa);
}

} // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse>());
}

TORCH_LIBRARY_IMPL(_, SparseCsrPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse>());
}

TORCH_LIBRARY_IMPL(_, QuantizedPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("_efficientzerotensor", efficient_zeros);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("record_stream", record_stream);
  const auto to_cpu = [&](const std::string& name) {
    m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  };
  // An operator with a generic kernel for all devices would never reach the fallback; where the CPU has a kernel of its
  // own, that is closer to the CPU's behaviour, faster, and bitwise the same.
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.getNamespace() != std::optional<std::string_view>("aten")) continue;
    const auto op = c10::Dispatcher::singleton().findOp(name);
    if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    if (op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional)) {
      to_cpu(name.overload_name.empty() ? name.name : name.name + "." + name.overload_name);
    }
  }
  // These have only generic kernels, which do not support this device or (mish_backward) round differently.
  for (const char* name : {"copy_", "_copy_from", "set_.source_Storage", "set_.source_Storage_storage_offset",
                           "set_.source_Tensor", "set_", "_fused_sdp_choice", "_grouped_mm", "convolution",
                           "convolution_backward", "mish_backward"}) {
    to_cpu(name);
  }
  m.impl("_foreach_copy_", foreach_copy);
}

} // namespace npu

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &npu::choose_attention)
} // namespace at::native
