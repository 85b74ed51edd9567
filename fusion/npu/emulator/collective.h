// One collective, from its launch on gloo until its results become visible.
#pragma once

#include "streams.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>

namespace npu {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

c10::StreamId new_comm_stream();

// Collects the inputs and outputs of a collective, and the tensors that gloo works on instead.
//
// Eager: aliases. Late: gloo starts immediately, on copies, so that other ranks do not wait for this rank's
// synchronisation; its results appear in the outputs when the group's stream is reached. A real card may read the
// inputs as late as that, so they are then compared with their copies: an input that was written or freed meanwhile is
// an error.
class Launch {
 public:
  Launch(c10::intrusive_ptr<c10d::Backend> gloo, c10::StreamId stream, const char* name)
      : gloo_(std::move(gloo)), stream_(stream), name_(name) {}

  at::Tensor read(const at::Tensor& tensor);
  at::Tensor written(const at::Tensor& tensor);
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
  Tensors updated(const Tensors& tensors); // read and written

  // Starts the collective on gloo. Any error of gloo, now or in wait(), is a DistBackendError, as in a real backend.
  WorkPtr run(const std::function<WorkPtr()>& start);

 private:
  WorkPtr done(WorkPtr gloo_work);
  struct Copy {
    at::Tensor alias; // of the device tensor
    at::Tensor copy;
    bool is_input;
  };
  at::Tensor stand_in(const at::Tensor& tensor, bool is_input);
  void prepare(const at::Tensor& tensor);
  static void finish(const std::vector<Copy>& copies, const char* name);

  c10::intrusive_ptr<c10d::Backend> gloo_; // its threads must outlive the work
  c10::StreamId stream_;
  const char* name_;
  int card_ = -1;
  Tensors outputs_; // on the card
  std::vector<Copy> copies_; // late only
  std::vector<c10::Storage> kept_;
};

} // namespace npu
