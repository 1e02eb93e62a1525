// What torch asks of a device: generators, guards and hooks.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>

#include "memory.h"

namespace {

// A seed, and the number of draws so far.
//
// Guarantees: each random kernel has a CPU generator of its own, seeded from the two when it is
// submitted. Its numbers depend on the order of submission, and not on timing.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(DeviceIndex device)
      : GeneratorImpl({kSim, device}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  at::Generator draw() {
    Lock lock(mutex_);
    std::seed_seq mix{seed_, seed_ >> 32, ++draws_, draws_ >> 32};
    std::array<uint32_t, 2> seed;
    mix.generate(seed.begin(), seed.end());
    return at::detail::createCPUGenerator(uint64_t(seed[0]) << 32 | seed[1]);
  }
  void set_current_seed(uint64_t seed) override {
    std::tie(seed_, draws_) = std::make_pair(seed, 0);
  }
  void set_offset(uint64_t offset) override { draws_ = offset; }
  uint64_t get_offset() const override { return draws_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.itemsize() == 1,
                "sim: the state of a generator has 16 bytes");
    const auto* words = static_cast<const uint64_t*>(state.data());
    std::tie(seed_, draws_) = std::make_pair(words[0], words[1]);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({16}, at::kByte);
    auto* words = static_cast<uint64_t*>(state.mutable_data_ptr());
    std::tie(words[0], words[1]) = std::make_pair(seed_, draws_);
    return state.getIntrusivePtr();
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    std::tie(copy->seed_, copy->draws_) = std::make_pair(seed_, draws_);
    return copy;
  }
  uint64_t seed_ = c10::default_rng_seed_val, draws_ = 0;
};

const at::Generator& default_generator(DeviceIndex device) {
  static auto& all = *new std::array<at::Generator, kDevices>{
      at::make_generator<Generator>(DeviceIndex(0)), at::make_generator<Generator>(DeviceIndex(1))};
  return all[index_of({kSim, device})];
}

// Devices, streams and events, for torch's guards, torch.accelerator, torch.Stream, torch.Event and
// the autograd engine. The current device and the current streams are each thread's own.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Device getDevice() const override { return {kSim, current_device}; }
  void setDevice(c10::Device device) const override { current_device = index_of(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kSim, std::exchange(current_device, index_of(device))};
  }

  c10::Stream getStream(c10::Device device) const override {
    return as_torch(current_stream(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return as_torch(streams[index_of(device)][0]);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return as_torch(stream_from_pool(device, priority < 0));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    return as_torch(stream_from_pool(device, high_priority));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    Stream& before = current_stream(stream.device());
    current_ids[before.device] = get_stream(stream).id;
    return as_torch(before);
  }
  bool queryStream(const c10::Stream& stream) const override {
    Stream& asked = get_stream(stream);
    const bool done = asked.done(asked.submitted());
    if (done) trace([&](auto& python) { python->trace_gpu_stream_synchronization(kSim, traced(asked)); });
    return done;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    wait_on_host(get_stream(stream));
  }
  void synchronizeDevice(DeviceIndex device) const override {
    for (Stream& stream : streams[index_of({kSim, device})]) stream.drain();
    trace([](auto& python) { python->trace_gpu_device_synchronization(kSim); });
    ::record.raise(index_of({kSim, device}));
  }

  void record(void** event, const c10::Stream& stream, DeviceIndex,
              c10::EventFlag flag) const override {
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->record(get_stream(stream),
                                        flag == c10::EventFlag::BACKEND_DEFAULT);
  }
  void block(void* event, const c10::Stream& stream) const override {
    wait_on_stream(get_stream(stream), mark_of(event));
    trace([&](auto& python) {
      const auto name = reinterpret_cast<uintptr_t>(event);
      python->trace_gpu_event_wait(kSim, name, traced(get_stream(stream)));
    });
  }
  bool queryEvent(void* event) const override {
    const bool done = mark_of(event).done();
    if (done) trace_synchronization(event);
    return done;
  }
  void synchronizeEvent(void* event) const override {
    const Mark mark = mark_of(event);
    if (mark.stream) wait_on_host(*mark.stream, mark.item);
    trace_synchronization(event);
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    const auto name = reinterpret_cast<uintptr_t>(event);
    trace([&](auto& python) { python->trace_gpu_event_deletion(kSim, name); });
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, DeviceIndex) const override {
    TORCH_CHECK(behaviour.event_timing, "sim: this device does not time events");
    const Mark a = mark_of(first), b = mark_of(second);
    TORCH_CHECK(a.time_ns && b.time_ns, "sim: both events must be recorded with timing");
    TORCH_CHECK(a.done() && b.done(), "sim: the device has not reached both events yet");
    return double(*b.time_ns - *a.time_ns) * 1e-6;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& user) const override {
    if (behaviour.record_stream) memory.record(data, get_stream(user));
  }

 private:
  static void trace_synchronization(void* event) {
    const auto name = reinterpret_cast<uintptr_t>(event);
    trace([&](auto& python) { python->trace_gpu_event_synchronization(kSim, name); });
  }
  static Mark mark_of(void* event) { return event ? static_cast<Event*>(event)->mark() : Mark(); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// The same for torch's code that is common to all accelerators, and generators and pinned memory.
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice({kSim, device}); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return Guard().exchangeDevice({kSim, device}).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  bool isPinnedPtr(const void* data) const override { return pinned.holds(data); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(index_of({kSim, device}));
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DeviceGuard on(storage.device());
    c10::DataPtr data = memory.allocate(bytes);
    memory.copy_data(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.set_data_ptr(std::move(data));
    storage.set_nbytes(bytes);
  }
};

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::SetAllocator(kSim, &memory);
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
  return true;
}();

}  // namespace
