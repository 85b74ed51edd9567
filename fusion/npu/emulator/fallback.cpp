// Runs every device operator as the CPU's kernel on aliases of its tensors.
//
//   alias     a CPU tensor over the same bytes, with a separate storage, that lives as long as the call
//   call      the CPU kernel; its allocations are charged to the card (ChargeScope)
//   return    an alias is returned as the tensor it stands for, a view of an alias as a view of that tensor;
//             a new result becomes a device tensor without a copy
//
// Tensors on different devices are rejected as on a real card.
#include "streams.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstring>
#include <unordered_map>
#include <unordered_set>

namespace npu {
namespace {

bool on_card(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::kPrivateUse1;
}

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl();
}

// Properties of an operator, read once from its schema.
struct Traits {
  std::vector<bool> writes; // by argument
  int generator = -1;
  bool is_copy = false;
  bool hidden_randomness = false; // draws without taking a generator (native_dropout)
  bool mixes_devices = false;
};

const Traits& traits_of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const c10::FunctionSchema*, Traits> known;
  const auto& schema = op.schema();
  auto [entry, is_new] = known.try_emplace(&schema);
  if (!is_new) return entry->second;
  auto& traits = entry->second;
  for (const auto& argument : schema.arguments()) {
    traits.writes.push_back(argument.alias_info() && argument.alias_info()->isWrite());
    if (argument.type()->str().find("Generator") != std::string::npos) {
      traits.generator = static_cast<int>(traits.writes.size()) - 1;
    }
  }
  traits.hidden_randomness = traits.generator < 0 && op.hasTag(at::Tag::nondeterministic_seeded);
  traits.is_copy = schema.name() == "aten::copy_" && schema.overload_name().empty();
  static const std::unordered_set<std::string> mixed{
      "aten::copy_", "aten::_copy_from", "aten::index", "aten::index_put_", "aten::_index_put_impl_",
      "aten::_unsafe_index", "aten::index_put", "aten::_unsafe_index_put"};
  traits.mixes_devices = mixed.count(schema.name()) > 0;
  return traits;
}

// Gives the CPU's default generator the card's random state during its lifetime.
class RandomScope {
 public:
  explicit RandomScope(int card)
      : inside_(host_generator(default_generator(card))), lent_(at::detail::getDefaultCPUGenerator()) {
    saved_ = lent_.get_state();
    lent_.set_state(inside_.get_state());
  }
  ~RandomScope() {
    inside_.set_state(lent_.get_state());
    lent_.set_state(saved_);
  }

 private:
  at::Generator inside_;
  at::Generator lent_;
  at::Tensor saved_;
};

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), traits_(traits_of(op)), stack_(stack), count_(op.schema().arguments().size()) {}

  void run() {
    const size_t begin = stack_->size() - count_;
    if (traits_.is_copy && copies(begin)) return;
    for (size_t i = 0; i < count_; ++i) take((*stack_)[begin + i], traits_.writes[i]);
    if (card_ < 0) card_ = current_card();
    if (is_late(card_)) reach_end_of(card_, current_stream(card_));
    if (traits_.generator >= 0) take_generator((*stack_)[begin + traits_.generator]);
    {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      ChargeScope charge(card_);
      std::optional<RandomScope> random;
      if (traits_.hidden_randomness) random.emplace(card_);
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    }
    for (const auto& tensor : tensors_) {
      if (tensor.writes) write_back(tensor);
    }
    const size_t results = op_.schema().returns().size();
    for (size_t i = stack_->size() - results; i < stack_->size(); ++i) give((*stack_)[i]);
  }

 private:
  struct TensorPair {
    at::Tensor real;
    at::Tensor alias;
    bool writes;
  };
  struct StoragePair {
    c10::Storage real;
    c10::Storage alias;
  };

  // Handles a copy; false: run it as an ordinary kernel.
  bool copies(size_t begin) {
    const auto to = (*stack_)[begin].toTensor(), from = (*stack_)[begin + 1].toTensor();
    const auto card = (on_card(to) ? to : from).device().index();
    const bool later = is_late(card) && copy_later(to, from, (*stack_)[begin + 2].toBool());
    if (!later && is_late(card)) reach_end_of(card, current_stream(card));
    if (!later && !copy_rows(to, from)) return false;
    torch::jit::drop(*stack_, count_);
    stack_->push_back(to);
    return true;
  }

  void note_card(c10::Device device) {
    const int card = device.has_index() ? device.index() : current_card();
    if (card_ < 0) card_ = card;
    TORCH_CHECK(
        card_ == card || traits_.mixes_devices, "Expected all tensors to be on the same device, but found at least two "
        "devices, npu:", card_, " and npu:", card, "! (", op_.operator_name(), ")");
  }

  const c10::Storage& alias_of(const c10::Storage& real) {
    for (auto& pair : storages_) {
      if (pair.real.unsafeGetStorageImpl() == real.unsafeGetStorageImpl()) return pair.alias;
    }
    void* bytes = const_cast<void*>(real.unsafeGetStorageImpl()->data());
    storages_.push_back({real, cpu_storage({bytes, c10::Device(c10::kCPU)}, real.nbytes())});
    return storages_.back().alias;
  }

  at::Tensor take_tensor(const at::Tensor& tensor, bool writes) {
    if (!tensor.defined()) return tensor;
    if (!on_card(tensor)) {
      // A zero-dimensional CPU tensor may be used as a number, as on a real card.
      TORCH_CHECK(
          tensor.dim() == 0 || traits_.mixes_devices, "Expected all tensors to be on the same device, but found at "
          "least two devices, npu and ", tensor.device(), "! (", op_.operator_name(), ")");
      foreign_.push_back(tensor.unsafeGetTensorImpl());
      return tensor;
    }
    note_card(tensor.device());
    TORCH_CHECK_NOT_IMPLEMENTED(
        tensor.layout() == c10::kStrided, op_.operator_name(), ": the emulated NPU supports only strided tensors");
    tensors_.push_back({tensor, cpu_tensor_over(tensor, alias_of(tensor.storage())), writes});
    return tensors_.back().alias;
  }

  void take(c10::IValue& value, bool writes) {
    if (value.isTensor()) {
      value = take_tensor(value.toTensor(), writes);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> aliases;
      const auto list = value.toTensorList();
      aliases.reserve(list.size());
      for (const at::Tensor& tensor : list) aliases.push_back(take_tensor(tensor, writes));
      value = std::move(aliases);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> aliases;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
        aliases.push_back(tensor ? std::optional<at::Tensor>(take_tensor(*tensor, writes)) : std::nullopt);
      }
      value = std::move(aliases);
    } else if (value.isDevice() && value.toDevice().type() == c10::kPrivateUse1) {
      note_card(value.toDevice());
      value = c10::Device(c10::kCPU);
    } else if (value.isStorage() && value.toStorage().device_type() == c10::kPrivateUse1) {
      note_card(value.toStorage().device());
      value = alias_of(value.toStorage());
    }
  }

  void take_generator(c10::IValue& value) {
    value = host_generator(value.isNone() ? default_generator(card_) : value.toGenerator());
  }

  // Returns the device storage that this CPU storage stands for, or turns it into one.
  c10::Storage real_of(const c10::Storage& cpu) {
    for (auto& pair : storages_) {
      if (pair.alias.unsafeGetStorageImpl() == cpu.unsafeGetStorageImpl()) return pair.real;
    }
    auto* storage = cpu.unsafeGetStorageImpl();
    if (storage->nbytes() > 0 && !is_device_block(storage->data_ptr())) {
      // Not allocated through the hook (a kernel wrapped foreign memory): copy it into device memory.
      auto data = allocate_on(card_, storage->nbytes());
      if (storage->data() == nullptr) {
        std::memset(data.get(), 0, storage->nbytes()); // the storage of a tensor of zeros that was never written
      } else {
        std::memcpy(data.get(), storage->data(), storage->nbytes());
      }
      return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), storage->nbytes(), std::move(data), device_allocator(), true));
    }
    storage->_mutable_data_ptr_no_checks().unsafe_set_device(device_of(card_));
    storage->set_allocator(device_allocator());
    return cpu;
  }

  at::Tensor give_tensor(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
    auto* impl = tensor.unsafeGetTensorImpl();
    for (const auto& pair : tensors_) {
      if (pair.alias.unsafeGetTensorImpl() == impl) return pair.real;
    }
    for (const auto* foreign : foreign_) {
      if (foreign == impl) return tensor;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        tensor.layout() == c10::kStrided && !tensor.is_quantized(), op_.operator_name(),
        ": the emulated NPU supports only strided tensors, and no quantised ones");
    if (!impl->has_storage()) return tensor;
    impl->set_storage_keep_dtype(real_of(tensor.storage())); // takes over the storage's device too
    impl->_change_backend_component_keys(device_of(card_));
    return tensor;
  }

  void give(c10::IValue& value) {
    if (value.isTensor()) {
      value = give_tensor(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> real;
      for (const at::Tensor& tensor : value.toTensorList()) real.push_back(give_tensor(tensor));
      value = std::move(real);
    }
  }

  // resize_, set_ and out= change a tensor's storage and shape, not only its bytes.
  void write_back(const TensorPair& pair) {
    auto* real = pair.real.unsafeGetTensorImpl();
    auto* alias = pair.alias.unsafeGetTensorImpl();
    for (auto& storage : storages_) {
      auto* from = storage.alias.unsafeGetStorageImpl();
      auto* to = storage.real.unsafeGetStorageImpl();
      if (from != storage_of(pair.alias) || from->data() == to->data()) continue;
      const int owner = owner_of(to->data_ptr()); // the owner does not change
      if (owner >= 0) set_owner_of(from->data_ptr(), owner);
      const auto bytes = from->nbytes();
      auto data = from->set_data_ptr(c10::DataPtr(const_cast<void*>(from->data()), c10::Device(c10::kCPU)));
      data.unsafe_set_device(device_of(card_));
      to->set_data_ptr_noswap(std::move(data));
      to->set_nbytes(bytes);
    }
    auto storage = real_of(alias->storage());
    if (storage.unsafeGetStorageImpl() != storage_of(pair.real)) real->set_storage_keep_dtype(std::move(storage));
    if (real->sizes() != alias->sizes() || real->strides() != alias->strides() ||
        real->storage_offset() != alias->storage_offset()) {
      real->set_sizes_and_strides(alias->sizes(), alias->strides(), alias->storage_offset());
    }
  }

  const c10::OperatorHandle& op_;
  const Traits& traits_;
  torch::jit::Stack* stack_;
  size_t count_;
  int card_ = -1;
  c10::SmallVector<TensorPair, 6> tensors_;
  c10::SmallVector<StoragePair, 6> storages_;
  c10::SmallVector<const c10::TensorImpl*, 2> foreign_;
};

} // namespace

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op, stack).run();
}

} // namespace npu
