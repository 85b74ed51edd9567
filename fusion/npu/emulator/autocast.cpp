// torch.autocast("npu"): PyTorch's lists of operators, as for every accelerator.
//
// One boxed kernel per policy; PyTorch's templates for this would take half of the build's time.
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

namespace npu {
namespace {

constexpr auto kDevice = c10::kPrivateUse1;

template <typename Function>
void for_each_argument(const c10::OperatorHandle& op, torch::jit::Stack* stack, Function function) {
  for (auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    function(const_cast<c10::IValue&>(value));
  }
}

void cast_argument(c10::IValue& value, c10::ScalarType dtype) {
  if (value.isTensor()) {
    value = at::autocast::cached_cast(dtype, value.toTensor(), kDevice);
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> cast;
    for (const at::Tensor& tensor : value.toTensorList()) {
      cast.push_back(at::autocast::cached_cast(dtype, tensor, kDevice));
    }
    value = std::move(cast);
  }
}

void call_cast(const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::ScalarType dtype) {
  const c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::AutocastPrivateUse1);
  for_each_argument(op, stack, [&](c10::IValue& value) { cast_argument(value, dtype); });
  op.callBoxed(stack);
}

void lower_precision(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  call_cast(op, stack, at::autocast::get_lower_precision_fp_from_device_type(kDevice));
}

void fp32(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  call_cast(op, stack, at::kFloat);
}

// Reductions that take an output dtype: float32 unless the caller chose one.
void fp32_output(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::AutocastPrivateUse1);
  const auto& arguments = op.schema().arguments();
  const size_t begin = stack->size() - arguments.size();
  const auto& first = (*stack)[begin];
  if (first.isTensor() && at::autocast::is_eligible(first.toTensor(), kDevice)) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      auto& value = (*stack)[begin + i];
      if (arguments[i].name() == "dtype" && value.isNone()) value = static_cast<int64_t>(at::kFloat);
    }
  }
  op.callBoxed(stack);
}

void widest(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto dtype = at::autocast::get_lower_precision_fp_from_device_type(kDevice);
  for_each_argument(op, stack, [&](c10::IValue& value) {
    if (value.isTensor()) {
      dtype = at::autocast::prioritize(dtype, value.toTensor(), kDevice);
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList()) {
        dtype = at::autocast::prioritize(dtype, tensor, kDevice);
      }
    }
  });
  call_cast(op, stack, dtype);
}

#define NAME_1(op) #op
#define NAME_2(op, overload) #op "." #overload
#define PICK(_1, _2, macro, ...) macro
#define IMPL(kernel, ...)                              \
  m.impl(                                              \
      PICK(__VA_ARGS__, NAME_2, NAME_1)(__VA_ARGS__),  \
      torch::CppFunction::makeFromBoxedFunction<&kernel>());
#define LOWER_PRECISION(...) IMPL(lower_precision, __VA_ARGS__)
#define FP32(...) IMPL(fp32, __VA_ARGS__)
#define FP32_OUTPUT(...) IMPL(fp32_output, __VA_ARGS__)
#define WIDEST(...) IMPL(widest, __VA_ARGS__)

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FP32_OUTPUT)
  AT_FORALL_PROMOTE(WIDEST)
}

} // namespace
} // namespace npu
