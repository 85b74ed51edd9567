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

using Finish = std::function<void()>;

// Waits once: gloo's send and receive hang on a second wait(), those of a real card do not. `finish`: computes the
// outputs from what gloo has received; may be empty.
struct Gloo {
  Gloo(WorkPtr work, const char* name, Finish finish) : work(std::move(work)), name(name), finish(std::move(finish)) {}
  bool wait(std::chrono::milliseconds timeout) {
    std::lock_guard<std::mutex> lock(mutex);
    if (is_done) return true;
    is_done = as_backend_error(name, [&] { return work->wait(timeout); });
    if (is_done && finish) std::exchange(finish, nullptr)();
    return is_done;
  }
  bool is_completed() {
    if (!work->isCompleted()) return false;
    if (work->isSuccess()) wait(kNoTimeout);
    return true;
  }
  WorkPtr work;
  const char* name;
  Finish finish;
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
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    complete();
    auto future = new_future(outputs_);
    future->markCompleted(c10::IValue(outputs_));
    return future;
  }

 protected:
  virtual void complete() = 0; // the host waits
  std::shared_ptr<Gloo> gloo_;
  Tensors outputs_;
};

class EagerWork final : public OverGloo {
 public:
  using OverGloo::OverGloo;
  bool isCompleted() override { return gloo_->is_completed(); }
  void synchronize() override { gloo_->wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout) override { return gloo_->wait(timeout); }

 private:
  void complete() override { gloo_->wait(kNoTimeout); }
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

 private:
  void complete() override { reach(moment_); }
  Moment moment_;
  std::shared_ptr<Stash> stash_;
};

bool is_late_tensor(const at::Tensor& tensor) {
  return tensor.device().type() == c10::kPrivateUse1 && is_late(tensor.device().index());
}

// Operations in its scope are computed, not recorded: by autograd or by a dispatch mode of the caller.
struct Unseen {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard below_python{c10::python_ks};
};

at::Tensor copy_of(const at::Tensor& cpu) {
  const Unseen unseen;
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
  WorkPtr run(const std::function<WorkPtr()>& start, Finish then = nullptr) {
    return done(as_backend_error(name_, start), std::move(then));
  }

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

  WorkPtr done(WorkPtr gloo_work, Finish then) {
    auto gloo = std::make_shared<Gloo>(std::move(gloo_work), name_, std::move(then));
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

// Up to how many bytes ranks send each other at once: gloo's own collectives pass all of them around a ring, where each
// hop waits for the one before.
constexpr size_t kMaxExchanged = 1 << 16;

using ReduceOp = c10d::ReduceOp;

// Whether the order of operands alone decides the bits of a reduction, so that `reduce_as_ring` has those of gloo.
bool is_reproducible(const at::Tensor& tensor, const ReduceOp& op) {
  if (tensor.scalar_type() == at::kBool || tensor.is_complex()) return false;
  return op == ReduceOp::SUM || ((op == ReduceOp::MAX || op == ReduceOp::MIN) && !tensor.is_floating_point());
}

// Writes the reduction over ranks of `shards` (ranks, n) to `out` (n), in gloo's order: its ring reduces a tensor of
// `total` elements in a chunk for each rank, from the rank before that one downwards. The shards begin at element
// `first`.
void reduce_as_ring(
    const at::Tensor& out, const at::Tensor& shards, int64_t first, int64_t total, const ReduceOp& op) {
  const Unseen unseen;
  const auto ranks = shards.size(0);
  const auto chunk = 2 * ((total + 2 * ranks - 1) / (2 * ranks)); // two segments, each rounded up
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const auto begin = std::max<int64_t>(0, rank * chunk - first);
    const auto end = std::min<int64_t>(out.numel(), (rank + 1) * chunk - first);
    if (begin >= end) continue;
    const auto of = [&](int64_t source) { return shards[(source + ranks) % ranks].slice(0, begin, end); };
    auto reduced = out.slice(0, begin, end);
    reduced.copy_(of(rank - 1));
    for (auto source = rank - 2; source >= rank - ranks; --source) {
      const auto next = of(source);
      if (op == ReduceOp::SUM) reduced.add_(next);
      if (op == ReduceOp::MAX) at::maximum_out(reduced, reduced, next);
      if (op == ReduceOp::MIN) at::minimum_out(reduced, reduced, next);
    }
  }
}

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
    const auto numel = tensors.front().numel();
    if (!exchanges(tensors.front(), getSize()) || !is_reproducible(tensors.front(), options.reduceOp)) {
      return update("all_reduce", &Backend::allreduce, tensors, options);
    }
    Launch launch(gloo_, stream_, "all_reduce");
    auto total = launch.updated(tensors).front().view(-1);
    auto shards = total.new_empty({getSize(), numel});
    auto reduce = [=, op = options.reduceOp] { reduce_as_ring(total, shards, 0, numel, op); };
    return exchange(launch, shards, total.repeat({getSize()}), options.timeout, std::move(reduce));
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
    if (!exchanges(input, getSize()) || !fits(output, input)) {
      return move(name, &Backend::_allgather_base, output, input, options);
    }
    Launch launch(gloo_, stream_, name);
    auto sent = launch.read(input).flatten().repeat({getSize()});
    return exchange(launch, launch.written(output), sent, options.timeout);
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
    const char* name = "reduce_scatter_tensor";
    if (!exchanges(input, 1) || !fits(input, output) || !is_reproducible(input, options.reduceOp)) {
      return move(name, &Backend::_reduce_scatter_base, output, input, options);
    }
    Launch launch(gloo_, stream_, name);
    auto sent = launch.read(input);
    auto total = launch.written(output).view(-1);
    auto shards = total.new_empty({getSize(), total.numel()});
    auto reduce = [=, first = getRank() * total.numel(), op = options.reduceOp] {
      reduce_as_ring(total, shards, first, shards.numel(), op);
    };
    return exchange(launch, shards, sent, options.timeout, std::move(reduce));
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
  // Whether so many copies of the tensor are sent to all ranks at once.
  static bool exchanges(const at::Tensor& tensor, int copies) {
    return tensor.is_contiguous() && tensor.numel() > 0 && tensor.nbytes() * copies <= kMaxExchanged;
  }
  bool fits(const at::Tensor& whole, const at::Tensor& shard) {
    return whole.is_contiguous() && shard.is_contiguous() && whole.scalar_type() == shard.scalar_type() &&
        whole.numel() == shard.numel() * getSize();
  }
  // Sends each rank its part of `sent`, all of one size.
  WorkPtr exchange(
      Launch& launch, const at::Tensor& received, const at::Tensor& sent, std::chrono::milliseconds timeout,
      Finish then = nullptr) {
    auto to = received.flatten().view(at::kByte), from = sent.flatten().view(at::kByte);
    std::vector<int64_t> even;
    c10d::AllToAllOptions options;
    options.timeout = timeout;
    return launch.run([&] { return gloo_->alltoall_base(to, from, even, even, options); }, std::move(then));
  }
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
