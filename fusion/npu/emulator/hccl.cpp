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
    return update("broadcast", &Backend::broadcast, tensors, options);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return update("all_reduce", &Backend::allreduce, tensors, options);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return update("all_reduce", &Backend::allreduce_coalesced, tensors, options);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return update("reduce", &Backend::reduce, tensors, options);
  }
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return move("all_gather", &Backend::allgather, outputs, inputs, options);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return move("all_gather_into_tensor", &Backend::_allgather_base, output, input, options);
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return move("all_gather_into_tensor", &Backend::allgather_into_tensor_coalesced, outputs, inputs, options);
  }
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return move("gather", &Backend::gather, outputs, inputs, options);
  }
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override {
    return move("scatter", &Backend::scatter, outputs, inputs, options);
  }
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override {
    return move("reduce_scatter", &Backend::reduce_scatter, outputs, inputs, options);
  }
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return move("reduce_scatter_tensor", &Backend::_reduce_scatter_base, output, input, options);
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return move("reduce_scatter_tensor", &Backend::reduce_scatter_tensor_coalesced, outputs, inputs, options);
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return move("all_to_all", &Backend::alltoall, outputs, inputs, options);
  }
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& options) override {
    Launch launch(gloo_, stream_, "all_to_all_single");
    auto cpu_input = launch.read(input);
    auto cpu_output = launch.written(output);
    return launch.run([&] { return gloo_->alltoall_base(cpu_output, cpu_input, output_splits, input_splits, options); });
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
  template <typename Collective, typename Options>
  WorkPtr update(const char* name, Collective collective, const Tensors& tensors, const Options& options) {
    Launch launch(gloo_, stream_, name);
    auto cpu = launch.updated(tensors);
    return launch.run([&] { return (gloo_.get()->*collective)(cpu, options); });
  }
  template <typename Collective, typename Outputs, typename Inputs, typename Options>
  WorkPtr move(
      const char* name, Collective collective, const Outputs& outputs, const Inputs& inputs, const Options& options) {
    Launch launch(gloo_, stream_, name);
    auto cpu_inputs = launch.read(inputs);
    auto cpu_outputs = launch.written(outputs);
    return launch.run([&] { return (gloo_.get()->*collective)(cpu_outputs, cpu_inputs, options); });
  }

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
