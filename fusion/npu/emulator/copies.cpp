// Copies: deferred ones on a card whose streams are late (streams.h), and those of whole rows.
#include "streams.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/copy_native.h>

#include <cstring>

namespace npu {

namespace {

// Like a copy on a real card, a deferred copy keeps host memory alive but not device blocks, so that freeing a block
// too early is a visible error.
struct CopySide {
  explicit CopySide(const at::Tensor& tensor) : alias(unowned_alias(tensor)) {
    if (!is_device_block(tensor.storage().data_ptr())) kept = tensor.storage();
  }
  at::Tensor alias;
  c10::Storage kept;
};

bool is_on_card(const at::Tensor& tensor) {
  return tensor.device().type() == c10::kPrivateUse1;
}

bool is_late_copy(const at::Tensor& to, const at::Tensor& from, bool non_blocking, int card) {
  if (is_on_card(to) && is_on_card(from)) return to.device() == from.device() && current_stream(card) != 0;
  return non_blocking && is_pinned((is_on_card(to) ? from : to).const_data_ptr());
}

struct Axis {
  int64_t size, to, from; // strides in elements
};

// The axes of a copy from the outermost; adjacent axes that are contiguous at both ends are merged.
c10::SmallVector<Axis, 5> axes_of(const at::Tensor& to, const at::Tensor& from) {
  c10::SmallVector<Axis, 5> axes;
  for (int64_t i = 0; i < to.dim(); ++i) {
    if (to.size(i) == 1) continue;
    const Axis axis{to.size(i), to.stride(i), from.stride(i)};
    if (!axes.empty() && axes.back().to == axis.size * axis.to && axes.back().from == axis.size * axis.from) {
      axes.back() = {axes.back().size * axis.size, axis.to, axis.from};
    } else {
      axes.push_back(axis);
    }
  }
  return axes;
}

} // namespace

void copy_now(at::Tensor to, const at::Tensor& from) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::impl::ExcludeDispatchKeyGuard below_python(c10::python_ks);
  at::native::copy_(to, from, false);
}

bool copy_rows(const at::Tensor& to, const at::Tensor& from) {
  const bool alike = to.scalar_type() == from.scalar_type() && to.sizes() == from.sizes() && to.numel() > 0 &&
      to.layout() == c10::kStrided && from.layout() == c10::kStrided && to.is_conj() == from.is_conj() &&
      to.is_neg() == from.is_neg() && !to.storage().is_alias_of(from.storage());
  if (!alike) return false;
  const auto axes = axes_of(to, from);
  if (axes.empty() || axes.size() > 2 || axes.back().to != 1 || axes.back().from != 1) return false;
  const int64_t item = static_cast<int64_t>(to.element_size());
  auto* into = static_cast<char*>(to.mutable_data_ptr());
  const auto* out_of = static_cast<const char*>(from.const_data_ptr());
  const Axis rows = axes.size() == 2 ? axes.front() : Axis{1, 0, 0};
  for (int64_t i = 0; i < rows.size; ++i) {
    std::memcpy(into + i * rows.to * item, out_of + i * rows.from * item, axes.back().size * item);
  }
  return true;
}

bool copy_later(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const int card = (is_on_card(to) ? to : from).device().index();
  if (to.numel() == 0 || !is_late_copy(to, from, non_blocking, card)) return false;
  TORCH_CHECK(
      at::infer_size(from.sizes(), to.sizes()) == to.sizes(), "a copy of shape ", from.sizes(), " into ", to.sizes());
  const double seconds = is_on_card(to) && is_on_card(from) ? 0 : seconds_of(to.nbytes(), rates_of(card).host);
  auto copy = [to = CopySide(to), from = CopySide(from)] { copy_now(to.alias, from.alias); };
  enqueue(card, current_stream(card), std::move(copy), seconds);
  return true;
}

} // namespace npu
