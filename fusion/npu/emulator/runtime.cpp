// Device index, streams, events, generators.
#include "streams.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <pthread.h>

#include <array>
#include <atomic>
#include <chrono>

namespace npu {
namespace {

thread_local int t_card = 0;
thread_local std::array<c10::StreamId, kCards> t_streams{};
std::atomic<c10::StreamId> next_stream{0};
constexpr int kPooledStreams = 32; // reused round-robin, as on a real card
std::atomic<bool> forked_child{false};

// A device generator: wraps a CPU generator and reports the card as its device. Kernels use the wrapped one.
struct NpuGenerator final : c10::GeneratorImpl {
  explicit NpuGenerator(int card, at::Generator inside = at::detail::createCPUGenerator())
      : GeneratorImpl(device_of(card), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inside(std::move(inside)) {}
  void set_current_seed(uint64_t seed) override { inside.set_current_seed(seed); }
  uint64_t current_seed() const override { return inside.current_seed(); }
  uint64_t seed() override { return inside.unsafeGetGeneratorImpl()->seed(); }
  void set_offset(uint64_t offset) override { inside.set_offset(offset); }
  uint64_t get_offset() const override { return inside.get_offset(); }
  void set_state(const c10::TensorImpl& state) override { inside.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inside.unsafeGetGeneratorImpl()->get_state();
  }
  NpuGenerator* clone_impl() const override { return new NpuGenerator(device().index(), inside.clone()); }
  at::Generator inside;
};


struct Event {
  Moment moment; // the event is complete when this is reached
  std::shared_ptr<Clock::time_point> done_at = std::make_shared<Clock::time_point>();
};

struct NpuGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  c10::Device exchangeDevice(c10::Device device) const override { return device_of(exchange_card(device.index())); }
  c10::Device getDevice() const override { return device_of(t_card); }
  void setDevice(c10::Device device) const override { exchange_card(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { t_card = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return kCards; }

  static c10::Stream stream_of(c10::Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, device, id);
  }
  static c10::Device concrete(c10::Device device) { return device.has_index() ? device : device_of(t_card); }
  c10::Stream getStream(c10::Device device) const override {
    device = concrete(device);
    return stream_of(device, t_streams[device.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(concrete(device), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream_of(concrete(device), 1 + next_stream++ % kPooledStreams);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto device = stream.device();
    return stream_of(device, std::exchange(t_streams[device.index()], stream.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  // Answers "not yet" once, then completes the work: a caller that polls may have no other way to make progress.
  static bool query(const Moment& moment) {
    if (reached(moment)) return true;
    reach(moment);
    return false;
  }
  bool queryStream(const c10::Stream& stream) const override { return query(end_of(stream.device_index(), stream.id())); }
  void synchronizeStream(const c10::Stream& stream) const override {
    if (is_late(stream.device_index())) reach_end_of(stream.device_index(), stream.id());
  }
  void synchronizeDevice(const c10::DeviceIndex card) const override {
    if (is_late(card < 0 ? t_card : card)) reach_all(card < 0 ? t_card : card);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_allocator()->recordStream(data, stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event();
    auto& it = *static_cast<Event*>(*event);
    const int card = stream.device_index();
    it.moment = is_late(card) ? end_of(card, stream.id()) : Moment{};
    if (reached(it.moment)) {
      *it.done_at = Clock::now();
      return;
    }
    it.done_at = std::make_shared<Clock::time_point>();
    enqueue(card, stream.id(), [done_at = it.done_at] { *done_at = Clock::now(); });
    it.moment = end_of(card, stream.id());
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) enqueue_wait(stream.device_index(), stream.id(), static_cast<Event*>(event)->moment);
  }
  bool queryEvent(void* event) const override { return event == nullptr || query(static_cast<Event*>(event)->moment); }
  void synchronizeEvent(void* event) const override {
    if (event) reach(static_cast<Event*>(event)->moment);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    TORCH_CHECK(from && to, "both events must be recorded before elapsed_time()");
    const auto &start = *static_cast<Event*>(from), &end = *static_cast<Event*>(to);
    TORCH_CHECK(reached(start.moment) && reached(end.moment), "both events must be completed: synchronize() first");
    return std::chrono::duration<double, std::milli>(*end.done_at - *start.done_at).count();
  }
};

struct NpuHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kCards; }
  void setCurrentDevice(c10::DeviceIndex card) const override { exchange_card(card); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(t_card); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex card) const override {
    return static_cast<c10::DeviceIndex>(exchange_card(card));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex card) const override {
    return card < 0 ? getCurrentDevice() : exchangeDevice(card);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex card) const override { return default_generator(card); }
  at::Generator getNewGenerator(c10::DeviceIndex card) const override {
    return at::make_generator<NpuGenerator>(card < 0 ? t_card : card);
  }
  at::Device getDeviceFromPtr(void*) const override { return device_of(t_card); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return at::getHostAllocator(c10::kPrivateUse1); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};

} // namespace

int current_card() {
  return t_card;
}

void check_card(int card) {
  TORCH_CHECK_VALUE(card >= 0 && card < kCards, "npu:", card, ": an emulated node has ", kCards, " cards");
}

c10::StreamId current_stream(int card) {
  return t_streams[card];
}

int exchange_card(int card) {
  check_card(card);
  return std::exchange(t_card, card);
}

bool in_forked_child() {
  return forked_child.load(std::memory_order_relaxed);
}

const at::Generator& default_generator(int card) {
  static auto* generators = [] {
    auto* all = new std::vector<at::Generator>();
    for (int i = 0; i < kCards; ++i) all->push_back(at::make_generator<NpuGenerator>(i));
    return all;
  }();
  if (card < 0) card = t_card;
  check_card(card);
  return (*generators)[card];
}

at::Generator host_generator(const at::Generator& generator) {
  TORCH_CHECK(
      generator.device().type() == c10::kPrivateUse1, "Expected a 'npu' device type for generator but found '",
      generator.device().type(), "'");
  return static_cast<NpuGenerator*>(generator.unsafeGetGeneratorImpl())->inside;
}

void install_runtime() {
  pthread_atfork(nullptr, nullptr, [] { forked_child = true; });
  c10::impl::registerDeviceGuard(c10::kPrivateUse1, new NpuGuard());
  at::RegisterPrivateUse1HooksInterface(new NpuHooks());
}

} // namespace npu
