// The process-group backend `hccl`: gloo on zero-copy aliases of device tensors, or, where streams are late, on copies
// that become visible only after synchronisation.
#include "streams.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <functional>
#include <map>

namespace npu {
namespace {

using c10d::Backend;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

c10::intrusive_ptr<c10::ivalue::Future> new_future(const Tensors& outputs) {
  auto type = c10::ListType::create(c10::TensorType::get());
  std::vector<c10::Device> devices;
  if (!outputs.empty()) devices.push_back(outputs.front().device());
  return c10::make_intrusive<c10::ivalue::Future>(std::move(type), std::move(devices));
}

// gloo raises errors of many types when a peer is gone; real backends raise one type, which Python code can catch.
template <typename F>
auto as_backend_error(const char* name, F call) {
  try {
    return call();
  } catch (const c10::DistBackendError&) {
    throw;
  } catch (const std::exception& error) {
    C10_THROW_ERROR(DistBackendError, c10::str("hccl: ", name, ": ", error.what()));
  }
}

// Waits once: gloo's send and receive hang on a second wait(), those of a real card do not.
struct Gloo {
  Gloo(WorkPtr work, const char* name) : work(std::move(work)), name(name) {}
  bool wait(std::chrono::milliseconds timeout) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!is_done) is_done = as_backend_error(name, [&] { return work->wait(timeout); });
    return is_done;
  }
  WorkPtr work;
  const char* name;
  std::mutex mutex;
  bool is_done = false;
};

// A collective that gloo executes; result() and futures return device tensors, not those that gloo works on.
class OverGloo : public c10d::Work {
 public:
  OverGloo(std::shared_ptr<Gloo> gloo, Tensors outputs) : gloo_(std::move(gloo)), outputs_(std::move(outputs)) {}
  bool isSuccess() const override { return gloo_->work->isSuccess(); }
  std::exception_ptr exception() const override { return gloo_->work->exception(); }
  int sourceRank() const override { return gloo_->work->sourceRank(); }
  Tensors result() override { return outputs_; }
  void abort() override { gloo_->work->abort(); }
  uint64_t getSequencenumber() const override { return gloo_->work->getSequencenumber(); }

 protected:
  std::shared_ptr<Gloo> gloo_;
  Tensors outputs_;
};

class EagerWork final : public OverGloo {
 public:
  using OverGloo::OverGloo;
  bool isCompleted() override { return gloo_->work->isCompleted(); }
  void synchronize() override { gloo_->work->synchronize(); }
  bool wait(std::chrono::milliseconds timeout) override { return gloo_->wait(timeout); }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = new_future(outputs_);
    gloo_->work->getFuture()->addCallback([future, outputs = outputs_](c10::ivalue::Future& done) {
      if (done.hasError()) {
        future->setError(done.exception_ptr());
      } else {
        future->markCompleted(c10::IValue(outputs));
      }
    });
    return future;
  }
};

// Keeps tensors alive until wait(), as real collectives do; after that, freeing them must follow in stream order.
using Stash = std::vector<c10::Storage>;

// wait() makes the current stream wait, not the host.
class LateWork final : public OverGloo {
 public:
  LateWork(std::shared_ptr<Gloo> gloo, Tensors outputs, Moment moment, std::shared_ptr<Stash> stash)
      : OverGloo(std::move(gloo), std::move(outputs)), moment_(moment), stash_(std::move(stash)) {}
  bool isCompleted() override {
    if (reached(moment_)) return true;
    if (gloo_->work->isCompleted()) reach(moment_); // still "not completed" once: a caller that polls gets it next time
    return false;
  }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout) override {
    if (timeout != kNoTimeout) gloo_->wait(timeout);
    enqueue_wait(moment_.card, current_stream(moment_.card), moment_);
    stash_->clear();
    return true;
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    reach(moment_);
    auto future = new_future(outputs_);
    future->markCompleted(c10::IValue(outputs_));
    return future;
  }

 private:
  Moment moment_;
  std::shared_ptr<Stash> stash_;
};

bool is_late_tensor(const at::Tensor& tensor) {
  return tensor.device().type() == c10::kPrivateUse1 && is_late(tensor.device().index());
}

at::Tensor copy_of(const at::Tensor& cpu) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::impl::ExcludeDispatchKeyGuard below_python(c10::python_ks);
  auto copy = at::empty_like(cpu, c10::MemoryFormat::Contiguous);
  copy_now(copy, cpu);
  return copy;
}

// The bytes that unfinished collectives of a group will write, so that a later one that reads them waits.
struct Writes {
  std::mutex mutex;
  std::map<std::pair<int, c10::StreamId>, std::vector<std::tuple<const char*, const char*, Moment>>> of;
};

Writes& writes() {
  static auto* all = new Writes();
  return *all;
}

std::pair<const char*, const char*> bytes_of(const at::Tensor& cpu) {
  const auto* begin = static_cast<const char*>(cpu.const_data_ptr());
  return {begin, begin + cpu.nbytes()};
}

// Collects the inputs and outputs of a collective, and the tensors that gloo works on instead.
//
// Eager: aliases. Late: gloo starts immediately, on copies, so that other ranks do not wait for this rank's
// synchronisation; its results appear in the outputs when the group's stream is reached. A real card may read the
// inputs as late as that, so they are then compared with their copies: an input that was written or freed meanwhile is
// an error.
class Launch {
 public:
  Launch(c10::intrusive_ptr<Backend> gloo, c10::StreamId stream, const char* name)
      : gloo_(std::move(gloo)), stream_(stream), name_(name) {}

  at::Tensor read(const at::Tensor& tensor) { return stand_in(tensor, true); }
  at::Tensor written(const at::Tensor& tensor) {
    outputs_.push_back(tensor);
    return stand_in(tensor, false);
  }
  template <typename T>
  std::vector<T> read(const std::vector<T>& list) {
    std::vector<T> stand_ins;
    for (const auto& each : list) stand_ins.push_back(read(each));
    return stand_ins;
  }
  template <typename T>
  std::vector<T> written(const std::vector<T>& list) {
    std::vector<T> stand_ins;
    for (const auto& each : list) stand_ins.push_back(written(each));
    return stand_ins;
  }
  Tensors updated(const Tensors& tensors) { // read and written
    if (!tensors.empty() && is_late_tensor(tensors.front())) read(tensors);
    return written(tensors);
  }

  // Starts the collective on gloo. Any error of gloo, now or in wait(), is a DistBackendError, as in a real backend.
  WorkPtr run(const std::function<WorkPtr()>& start) { return done(as_backend_error(name_, start)); }

 private:
  struct Copy {
    at::Tensor alias; // of the device tensor
    at::Tensor copy;
    bool is_input;
  };

  void prepare(const at::Tensor& tensor) {
    const int card = tensor.device().index();
    TORCH_CHECK(
        card_ < 0 || card_ == card, "hccl: ", name_, ": tensors on npu:", card_, " and npu:", card,
        "; expected all of them on one card");
    if (card_ < 0) reach_end_of(card, current_stream(card)); // the group's stream starts after the caller's
    card_ = card;
    const auto [begin, end] = bytes_of(unowned_alias(tensor));
    Moment last;
    {
      std::lock_guard<std::mutex> lock(writes().mutex);
      auto& unfinished = writes().of[{card, stream_}];
      std::erase_if(unfinished, [](const auto& write) { return reached(std::get<2>(write)); });
      for (const auto& [from, to, moment] : unfinished) {
        if (from < end && begin < to) last = moment;
      }
    }
    reach(last);
  }

  at::Tensor stand_in(const at::Tensor& tensor, bool is_input) {
    if (!is_late_tensor(tensor)) return owning_alias(tensor);
    prepare(tensor);
    auto alias = unowned_alias(tensor);
    kept_.push_back(tensor.storage());
    copies_.push_back({alias, copy_of(alias), is_input});
    return copies_.back().copy;
  }

  static void finish(const std::vector<Copy>& copies, const char* name) {
    for (const auto& it : copies) {
      if (!it.is_input) continue;
      const auto now = copy_of(it.alias);
      TORCH_CHECK(
          std::memcmp(now.const_data_ptr(), it.copy.const_data_ptr(), now.nbytes()) == 0, "hccl: an input of ", name,
          " (", it.copy.dtype(), " ", it.copy.sizes(), ") changed while the collective could still read it: call wait() "
          "before the tensor is written or freed, on the stream that does so (device.streams=adversarial)");
    }
    for (const auto& it : copies) {
      if (!it.is_input) copy_now(it.alias, it.copy);
    }
  }

  WorkPtr done(WorkPtr gloo_work) {
    auto gloo = std::make_shared<Gloo>(std::move(gloo_work), name_);
    if (card_ < 0) return c10::make_intrusive<EagerWork>(std::move(gloo), std::move(outputs_));
    auto stash = std::make_shared<Stash>(std::move(kept_));
    std::vector<std::pair<const char*, const char*>> written;
    double bytes[2] = {0, 0};
    for (const auto& it : copies_) {
      if (!it.is_input) written.push_back(bytes_of(it.alias));
      bytes[it.is_input] += it.copy.nbytes();
    }
    auto complete = [gloo, backend = gloo_, copies = std::move(copies_), stash, name = name_] {
      gloo->wait(kNoTimeout);
      finish(copies, name);
      stash->clear();
    };
    // Sending and receiving at once, each at the rate.
    enqueue(card_, stream_, std::move(complete), seconds_of(std::max(bytes[0], bytes[1]), rates_of(card_).wire));
    const auto moment = end_of(card_, stream_);
    {
      std::lock_guard<std::mutex> lock(writes().mutex);
      for (const auto& [begin, end] : written) writes().of[{card_, stream_}].push_back({begin, end, moment});
    }
    return c10::make_intrusive<LateWork>(std::move(gloo), std::move(outputs_), moment, std::move(stash));
  }

  c10::intrusive_ptr<Backend> gloo_; // its threads must outlive the work
  c10::StreamId stream_;
  const char* name_;
  int card_ = -1;
  Tensors outputs_; // on the card
  std::vector<Copy> copies_; // late only
  std::vector<c10::Storage> kept_;
};

// Up to how many bytes a rank sends its tensor to every other at once: gloo's own all_gather passes all of them around a
// ring, where each hop waits for the one before.
constexpr size_t kMaxSentToEach = 1 << 16;

class HcclBackend final : public Backend {
 public:
  explicit HcclBackend(c10::intrusive_ptr<Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), stream_(next_stream++) {}

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
    const char* name = "all_gather_into_tensor";
    const bool fits = input.is_contiguous() && output.is_contiguous() && output.scalar_type() == input.scalar_type() &&
        output.numel() == input.numel() * getSize();
    if (!fits || input.numel() == 0 || output.nbytes() > kMaxSentToEach) {
      return move(name, &Backend::_allgather_base, output, input, options);
    }
    Launch launch(gloo_, stream_, name);
    auto sent = launch.read(input).flatten().view(at::kByte).repeat({getSize()});
    auto received = launch.written(output).flatten().view(at::kByte);
    std::vector<int64_t> even;
    c10d::AllToAllOptions exchange;
    exchange.timeout = options.timeout;
    return launch.run([&] { return gloo_->alltoall_base(received, sent, even, even, exchange); });
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

  static inline std::atomic<c10::StreamId> next_stream{1000}; // after the pooled ones
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
