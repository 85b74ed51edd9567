// The process-group backend `hccl`: gloo on zero-copy aliases of the card's tensors.
//
// HcclWork holds the real outputs: result() and futures must hand out tensors of the card, not their aliases.
#include "emulator.h"

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

namespace npu {
namespace {

using c10d::Backend;
using c10d::Work;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<Work>;

Tensors aliases(const Tensors& tensors) {
  Tensors out;
  out.reserve(tensors.size());
  for (const auto& tensor : tensors) out.push_back(owning_alias(tensor));
  return out;
}

TensorLists aliases(const TensorLists& lists) {
  TensorLists out;
  out.reserve(lists.size());
  for (const auto& list : lists) out.push_back(aliases(list));
  return out;
}

Tensors flat(const TensorLists& lists) {
  Tensors out;
  for (const auto& list : lists) out.insert(out.end(), list.begin(), list.end());
  return out;
}

class HcclWork final : public Work {
 public:
  HcclWork(WorkPtr gloo, Tensors outputs) : gloo_(std::move(gloo)), outputs_(std::move(outputs)) {}
  bool isCompleted() override { return gloo_->isCompleted(); }
  bool isSuccess() const override { return gloo_->isSuccess(); }
  std::exception_ptr exception() const override { return gloo_->exception(); }
  int sourceRank() const override { return gloo_->sourceRank(); }
  Tensors result() override { return outputs_; }
  void synchronize() override { gloo_->synchronize(); }
  bool wait(std::chrono::milliseconds timeout) override { return gloo_->wait(timeout); }
  void abort() override { gloo_->abort(); }
  uint64_t getSequencenumber() const override { return gloo_->getSequencenumber(); }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto type = c10::ListType::create(c10::TensorType::get());
    std::vector<c10::Device> devices;
    if (!outputs_.empty()) devices.push_back(outputs_.front().device());
    auto future = c10::make_intrusive<c10::ivalue::Future>(std::move(type), std::move(devices));
    gloo_->getFuture()->addCallback([future, outputs = outputs_](c10::ivalue::Future& done) {
      if (done.hasError()) {
        future->setError(done.exception_ptr());
      } else {
        future->markCompleted(c10::IValue(outputs));
      }
    });
    return future;
  }

 private:
  WorkPtr gloo_;
  Tensors outputs_;
};

WorkPtr wrap(WorkPtr gloo, Tensors outputs) {
  return c10::make_intrusive<HcclWork>(std::move(gloo), std::move(outputs));
}

class HcclBackend final : public Backend {
 public:
  explicit HcclBackend(c10::intrusive_ptr<Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "hccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto cpu = aliases(tensors);
    return wrap(gloo_->broadcast(cpu, options), tensors);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto cpu = aliases(tensors);
    return wrap(gloo_->allreduce(cpu, options), tensors);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto cpu = aliases(tensors);
    return wrap(gloo_->allreduce_coalesced(cpu, options), tensors);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto cpu = aliases(tensors);
    return wrap(gloo_->reduce(cpu, options), tensors);
  }
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto cpu_outputs = aliases(outputs);
    auto cpu_inputs = aliases(inputs);
    return wrap(gloo_->allgather(cpu_outputs, cpu_inputs, options), flat(outputs));
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    auto cpu_output = owning_alias(output);
    auto cpu_input = owning_alias(input);
    return wrap(gloo_->_allgather_base(cpu_output, cpu_input, options), {output});
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto cpu_outputs = aliases(outputs);
    auto cpu_inputs = aliases(inputs);
    return wrap(gloo_->allgather_into_tensor_coalesced(cpu_outputs, cpu_inputs, options), outputs);
  }
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto cpu_outputs = aliases(outputs);
    auto cpu_inputs = aliases(inputs);
    return wrap(gloo_->gather(cpu_outputs, cpu_inputs, options), flat(outputs));
  }
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override {
    auto cpu_outputs = aliases(outputs);
    auto cpu_inputs = aliases(inputs);
    return wrap(gloo_->scatter(cpu_outputs, cpu_inputs, options), outputs);
  }
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override {
    auto cpu_outputs = aliases(outputs);
    auto cpu_inputs = aliases(inputs);
    return wrap(gloo_->reduce_scatter(cpu_outputs, cpu_inputs, options), outputs);
  }
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto cpu_output = owning_alias(output);
    auto cpu_input = owning_alias(input);
    return wrap(gloo_->_reduce_scatter_base(cpu_output, cpu_input, options), {output});
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    auto cpu_outputs = aliases(outputs);
    auto cpu_inputs = aliases(inputs);
    return wrap(gloo_->reduce_scatter_tensor_coalesced(cpu_outputs, cpu_inputs, options), outputs);
  }
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& options) override {
    auto cpu_output = owning_alias(output);
    auto cpu_input = owning_alias(input);
    return wrap(gloo_->alltoall_base(cpu_output, cpu_input, output_splits, input_splits, options), {output});
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    auto cpu_outputs = aliases(outputs);
    auto cpu_inputs = aliases(inputs);
    return wrap(gloo_->alltoall(cpu_outputs, cpu_inputs, options), outputs);
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    auto cpu = aliases(tensors);
    return wrap(gloo_->send(cpu, to, tag), {});
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    auto cpu = aliases(tensors);
    return wrap(gloo_->recv(cpu, from, tag), tensors);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    auto cpu = aliases(tensors);
    return wrap(gloo_->recvAnysource(cpu, tag), tensors);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override { return gloo_->barrier(options); }

 private:
  c10::intrusive_ptr<Backend> gloo_;
};

} // namespace

void bind_hccl(pybind11::module& m) {
  m.def("hccl_over", [](const c10::intrusive_ptr<Backend>& gloo) -> c10::intrusive_ptr<Backend> {
    return c10::make_intrusive<HcclBackend>(gloo);
  });
}

} // namespace npu
