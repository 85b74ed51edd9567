// Copies on a card whose streams are late (streams.h).
#include "streams.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/copy_native.h>

namespace npu {

namespace {

// Like copies on a real card, a late one holds on to memory of the host but not to blocks of the card: whoever frees a
// block too early is to see it.
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

} // namespace

bool copy_later(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const int card = (is_on_card(to) ? to : from).device().index();
  if (to.numel() == 0 || !is_late_copy(to, from, non_blocking, card)) return false;
  TORCH_CHECK(
      at::infer_size(from.sizes(), to.sizes()) == to.sizes(), "a copy of shape ", from.sizes(), " into ", to.sizes());
  enqueue(card, current_stream(card), [to = CopySide(to), from = CopySide(from)] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const c10::impl::ExcludeDispatchKeyGuard below_python(c10::python_ks);
    auto target = to.alias;
    at::native::copy_(target, from.alias, false);
  });
  return true;
}

} // namespace npu
