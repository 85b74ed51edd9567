// The process-group backend `hccl`: gloo on zero-copy aliases of device tensors, or, where streams are late, on copies
// that become visible only after synchronisation (collective.h).
#include "collective.h"

#include <torch/csrc/utils/pybind.h>

namespace npu {
namespace {

using c10d::Backend;

class HcclBackend final : public Backend {
 public:
  explicit HcclBackend(c10::intrusive_ptr<Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), stream_(new_comm_stream()) {}

  const std::string getBackendName() const override { return "hccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Launch launch(gloo_, stream_, "broadcast");
    auto cpu = launch.updated(tensors);
    return launch.run([&] { return gloo_->broadcast(cpu, options); });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    Launch launch(gloo_, stream_, "all_reduce");
    auto cpu = launch.updated(tensors);
    return launch.run([&] { return gloo_->allreduce(cpu, options); });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    Launch launch(gloo_, stream_, "all_reduce");
    auto cpu = launch.updated(tensors);
    return launch.run([&] { return gloo_->allreduce_coalesced(cpu, options); });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    Launch launch(gloo_, stream_, "reduce");
    auto cpu = launch.updated(tensors);
    return launch.run([&] { return gloo_->reduce(cpu, options); });
  }
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    Launch launch(gloo_, stream_, "all_gather");
    auto cpu_inputs = launch.read(inputs);
    auto cpu_outputs = launch.written(outputs);
    return launch.run([&] { return gloo_->allgather(cpu_outputs, cpu_inputs, options); });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    Launch launch(gloo_, stream_, "all_gather_into_tensor");
    auto cpu_input = launch.read(input);
    auto cpu_output = launch.written(output);
    return launch.run([&] { return gloo_->_allgather_base(cpu_output, cpu_input, options); });
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    Launch launch(gloo_, stream_, "all_gather_into_tensor");
    auto cpu_inputs = launch.read(inputs);
    auto cpu_outputs = launch.written(outputs);
    return launch.run([&] { return gloo_->allgather_into_tensor_coalesced(cpu_outputs, cpu_inputs, options); });
  }
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    Launch launch(gloo_, stream_, "gather");
    auto cpu_inputs = launch.read(inputs);
    auto cpu_outputs = launch.written(outputs);
    return launch.run([&] { return gloo_->gather(cpu_outputs, cpu_inputs, options); });
  }
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override {
    Launch launch(gloo_, stream_, "scatter");
    auto cpu_inputs = launch.read(inputs);
    auto cpu_outputs = launch.written(outputs);
    return launch.run([&] { return gloo_->scatter(cpu_outputs, cpu_inputs, options); });
  }
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override {
    Launch launch(gloo_, stream_, "reduce_scatter");
    auto cpu_inputs = launch.read(inputs);
    auto cpu_outputs = launch.written(outputs);
    return launch.run([&] { return gloo_->reduce_scatter(cpu_outputs, cpu_inputs, options); });
  }
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    Launch launch(gloo_, stream_, "reduce_scatter_tensor");
    auto cpu_input = launch.read(input);
    auto cpu_output = launch.written(output);
    return launch.run([&] { return gloo_->_reduce_scatter_base(cpu_output, cpu_input, options); });
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    Launch launch(gloo_, stream_, "reduce_scatter_tensor");
    auto cpu_inputs = launch.read(inputs);
    auto cpu_outputs = launch.written(outputs);
    return launch.run([&] { return gloo_->reduce_scatter_tensor_coalesced(cpu_outputs, cpu_inputs, options); });
  }
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& options) override {
    Launch launch(gloo_, stream_, "all_to_all_single");
    auto cpu_input = launch.read(input);
    auto cpu_output = launch.written(output);
    return launch.run([&] { return gloo_->alltoall_base(cpu_output, cpu_input, output_splits, input_splits, options); });
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    Launch launch(gloo_, stream_, "all_to_all");
    auto cpu_inputs = launch.read(inputs);
    auto cpu_outputs = launch.written(outputs);
    return launch.run([&] { return gloo_->alltoall(cpu_outputs, cpu_inputs, options); });
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    Launch launch(gloo_, stream_, "send");
    auto cpu = launch.read(tensors);
    return launch.run([&] { return gloo_->send(cpu, to, tag); });
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    Launch launch(gloo_, stream_, "recv");
    auto cpu = launch.written(tensors);
    return launch.run([&] { return gloo_->recv(cpu, from, tag); });
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    Launch launch(gloo_, stream_, "recv");
    auto cpu = launch.written(tensors);
    return launch.run([&] { return gloo_->recvAnysource(cpu, tag); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    if (is_late(current_card())) reach_end_of(current_card(), current_stream(current_card())); // the host waits for it
    return gloo_->barrier(options);
  }

 private:
  c10::intrusive_ptr<Backend> gloo_;
  c10::StreamId stream_;
};

} // namespace

void bind_hccl(pybind11::module& m) {
  m.def("hccl_over", [](const c10::intrusive_ptr<Backend>& gloo) -> c10::intrusive_ptr<Backend> {
    return c10::make_intrusive<HcclBackend>(gloo);
  });
}

} // namespace npu
