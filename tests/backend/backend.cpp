// "sim": an accelerator simulated on the CPU, for tests.
//
// Two devices whose streams are threads. Kernels are the CPU's own, run on the stream's thread on
// the same memory, so results have the CPU's bits; the caller returns as soon as work is queued.
//
//     host      submit ─ submit ─ record(e) ───────────── synchronize
//     stream 0  [ kernel 1 ][ kernel 2 ]                       (FIFO, a thread)
//     stream 1                          [wait e][ kernel 3 ]   (FIFO, a thread)
//
// Lines below are in the order in which each builds on the one before: streams, events, memory,
// random numbers, the interfaces that torch asks for, kernels, and the controls of the tests.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <thread>

namespace {

using at::Tensor;
using c10::DeviceIndex;
using c10::IValue;
using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC, as Python's time.perf_counter_ns
using Lock = std::unique_lock<std::mutex>;

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;
constexpr int64_t kMaxStreams = 4096;  // of one device, over the life of the process

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch())
      .count();
}

// How the device behaves; the tests change it while no work is queued.
struct Behaviour {
  std::atomic<int64_t> late_us{0};         // > 0: unless waited for, work starts this much late
  std::atomic<bool> event_timing{true};    // false: elapsed_time raises
  std::atomic<bool> record_stream{true};   // false: Tensor.record_stream raises
  std::atomic<int64_t> stream_pool{32};    // how many streams there are to hand out; 0: the default
  std::atomic<bool> poison{false};         // freed memory is overwritten at once
} behaviour;

std::atomic<bool> stopping{false};  // the process ends: no work is accepted, no wait blocks
std::atomic<bool> forked{false};    // this is a forked child: the streams' threads are not here

void check_usable() {
  TORCH_CHECK(!forked, "sim: a forked child cannot use the device; start processes with 'spawn'");
}

// ------------------------------------------------------------------------------ log and errors

struct Executed {
  DeviceIndex device;
  int64_t stream;
  std::string name;
  int64_t start_ns, end_ns;
};

// What the streams have executed, in the order in which it ended; the newest million.
struct Log {
  std::mutex mutex;
  std::deque<Executed> entries;

  void add(Executed entry) {
    Lock lock(mutex);
    entries.push_back(std::move(entry));
    if (entries.size() > 1'000'000) entries.pop_front();
  }
};
Log& the_log = *new Log;

// The first failure of a device's kernels. The next wait of the host for that device raises it.
struct Failures {
  std::mutex mutex;
  std::array<std::string, kDevices> first;

  void add(DeviceIndex device, std::string text) {
    Lock lock(mutex);
    if (first[device].empty()) first[device] = std::move(text);
  }
  void raise(DeviceIndex device) {
    Lock lock(mutex);
    std::string text = std::exchange(first[device], {});
    TORCH_CHECK(text.empty(), text);
  }
};
Failures& failures = *new Failures;

// ------------------------------------------------------------------------------------- streams

// A thread that executes work in the order of submission.
//
// Guarantees: submit() never blocks on work. Items are numbered from 1; item n starts when item
// n - 1 has ended, and everything written by item n is visible to whom wait(n) or done(n) told so.
// wait() holds no lock of another object. With late streams an item starts when someone waits for
// it or for a later one, or after its random delay, whichever is first. The thread starts with the
// first item and runs until the process ends. Stream objects are never destroyed.
class Stream {
 public:
  const DeviceIndex device;
  const int64_t id;
  const int priority;

  Stream(DeviceIndex device, int64_t id, int priority)
      : device(device), id(id), priority(priority), random_(id * kDevices + device + 1) {}

  // Work without a name is not logged.
  uint64_t submit(std::string name, std::function<void()> run) {
    check_usable();
    Lock lock(mutex_);
    if (stopping) return submitted_;
    auto due = Clock::now();
    if (int64_t late = behaviour.late_us) due += std::chrono::microseconds(random_() % late);
    queue_.push_back({std::move(name), std::move(run), due});
    if (!thread_.joinable()) start();
    work_.notify_one();
    return ++submitted_;
  }

  uint64_t submitted() {
    if (forked) return 0;
    Lock lock(mutex_);
    return submitted_;
  }

  bool done(uint64_t item) {
    if (forked) return true;
    Lock lock(mutex_);
    return finished_ >= item || stopping;
  }

  void wait(uint64_t item) {
    check_usable();
    Lock lock(mutex_);
    demanded_ = std::max(demanded_, item);
    work_.notify_one();
    done_.wait(lock, [&] { return finished_ >= item || stopping; });
  }

  // After `stopping` is set: all waits end, and the rest of the queue is dropped.
  void wake() {
    { Lock lock(mutex_); }  // whoever read `stopping` before it was set has gone to sleep by now
    work_.notify_all();
    done_.notify_all();
  }
  void join() {
    if (thread_.joinable()) thread_.join();
  }

 private:
  struct Item {
    std::string name;
    std::function<void()> run;
    Clock::time_point due;
  };

  // torch's thread count is process-wide for threads to come, and per thread for those that
  // exist: the new thread sets it to 1 for itself, then the old value is set again here.
  void start() {
    const int threads = at::get_num_threads();
    std::atomic<bool> ready{false};
    thread_ = std::thread([this, &ready] {
      at::set_num_threads(1);
      prctl(PR_SET_TIMERSLACK, 1);  // ns: sleeps end when they should
      ready = true;
      loop();
    });
    while (!ready) std::this_thread::yield();
    at::set_num_threads(threads);
  }

  void loop() {
    c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    Lock lock(mutex_);
    while (true) {
      work_.wait(lock, [&] { return stopping || !queue_.empty(); });
      while (!stopping && demanded_ <= finished_ && Clock::now() < queue_.front().due)
        work_.wait_until(lock, queue_.front().due);
      if (stopping) return;
      Item item = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      execute(item);
      item.run = nullptr;  // what it held is released before it counts as done
      lock.lock();
      ++finished_;
      done_.notify_all();
    }
  }

  void execute(Item& item) {
    const int64_t start = now_ns();
    try {
      item.run();
    } catch (const std::exception& error) {
      failures.add(device, c10::str("sim:", int(device), " stream ", id, ": ", item.name,
                                    " failed: ", error.what()));
    }
    if (!item.name.empty()) the_log.add({device, id, std::move(item.name), start, now_ns()});
  }

  std::mutex mutex_;
  std::condition_variable work_, done_;
  std::deque<Item> queue_;
  uint64_t submitted_ = 0, finished_ = 0, demanded_ = 0;
  std::minstd_rand random_;
  std::thread thread_;
};

// All streams. Stream 0 of a device is its default stream; more are made when first handed out,
// then handed out in turn, a pool for each priority.
class Streams {
 public:
  Streams() {
    for (DeviceIndex d = 0; d < kDevices; ++d) make(d, 0);
  }

  Stream& get(DeviceIndex device, int64_t id) {
    TORCH_CHECK(device >= 0 && device < kDevices, "sim: no device ", int(device));
    Stream* found = id >= 0 && id < kMaxStreams ? all_[device][id].load() : nullptr;
    TORCH_CHECK(found, "sim:", int(device), " has no stream ", id);
    return *found;
  }

  Stream& from_pool(DeviceIndex device, int priority) {
    Stream& first = get(device, 0);
    const int64_t size = behaviour.stream_pool;
    if (size == 0) return first;
    Lock lock(mutex_);
    auto& [pool, next] = pools_[device][priority];
    const size_t turn = next++ % size;
    while (pool.size() <= turn) pool.push_back(&make(device, priority));
    return *pool[turn];
  }

  template <class F>
  void each(F visit) {
    for (DeviceIndex d = 0; d < kDevices; ++d) each_of(d, visit);
  }

  template <class F>
  void each_of(DeviceIndex device, F visit) {
    for (auto& slot : all_[device])
      if (Stream* stream = slot) visit(*stream);
      else return;
  }

 private:
  struct Pool {
    std::vector<Stream*> streams;
    size_t next = 0;
  };

  Stream& make(DeviceIndex device, int priority) {
    const int64_t id = made_[device]++;
    TORCH_CHECK(id < kMaxStreams, "sim: more than ", kMaxStreams, " streams");
    Stream* made = new Stream(device, id, priority);
    all_[device][id] = made;
    return *made;
  }

  std::mutex mutex_;
  std::array<std::array<std::atomic<Stream*>, kMaxStreams>, kDevices> all_{};
  std::array<int64_t, kDevices> made_{};
  std::array<std::map<int, Pool>, kDevices> pools_;
};
Streams& streams = *new Streams;

thread_local DeviceIndex current_device = 0;
thread_local std::array<Stream*, kDevices> current_streams{};

Stream& current_stream(DeviceIndex device) {
  if (device < 0) device = current_device;
  TORCH_CHECK(device < kDevices, "sim: no device ", int(device));
  Stream* stream = current_streams[device];
  return stream ? *stream : streams.get(device, 0);
}
Stream& current_stream(const Tensor& tensor) { return current_stream(tensor.device().index()); }

Stream& stream_of(const c10::Stream& s) { return streams.get(s.device_index(), s.id()); }
c10::Stream as_torch(const Stream& s) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, s.device), s.id);
}

// A wait of the host, which is also told of what failed.
void wait_on_host(Stream& stream, uint64_t item) {
  stream.wait(item);
  failures.raise(stream.device);
}
void wait_on_host(Stream& stream) { wait_on_host(stream, stream.submitted()); }

// -------------------------------------------------------------------------------------- events

// A point in a stream: after its first `item` items. Never recorded means reached.
struct Mark {
  Stream* stream = nullptr;
  uint64_t item = 0;
  std::shared_ptr<std::atomic<int64_t>> time_ns;  // of events with timing only

  bool done() const { return !stream || stream->done(item); }
  void wait() const {
    if (stream) stream->wait(item);
  }
};

Mark mark_here(Stream& stream) { return {&stream, stream.submitted(), nullptr}; }

// Work submitted to `stream` from now on starts when `mark` is reached.
void wait_on_stream(Stream& stream, Mark mark) {
  if (mark.stream != &stream && !mark.done()) stream.submit("", [mark] { mark.wait(); });
}

// What is waited for is the mark of the latest record() at the time of the wait's submission, so
// an event can be recorded again while others still wait for its older mark.
struct Event {
  std::mutex mutex;
  Mark latest;

  Mark mark() {
    Lock lock(mutex);
    return latest;
  }
  void record(Stream& stream, bool timing) {
    Mark mark{&stream, 0, nullptr};
    if (timing) {
      mark.time_ns = std::make_shared<std::atomic<int64_t>>(0);
      mark.item = stream.submit("", [time = mark.time_ns] { *time = now_ns(); });
    } else {
      mark.item = stream.submitted();
    }
    Lock lock(mutex);
    latest = std::move(mark);
  }
};

// -------------------------------------------------------------------------------------- memory

// Memory of one device, cached by the stream that was current when it was allocated.
//
// Guarantees: a freed block is given again to its own stream only, and as soon as that stream
// asks for its size, since whatever the stream does next comes later. Other streams that use a
// block are not known unless recorded: then the block stays out of use until all that was
// submitted to them by the time of the free is done. With `poison`, a block is filled with 0xFF
// (NaN, −1) on its own stream as soon as it could be reused: who reads it late reads poison.
class Memory final : public c10::DeviceAllocator {
  struct Block {
    void* data;
    size_t size;
    Stream* owner;
    std::vector<Stream*> users;
    std::vector<Mark> last_uses;
  };

 public:
  c10::DataPtr allocate(size_t bytes) override {
    check_usable();
    const c10::Device device(kSim, current_device);
    if (bytes == 0) return {nullptr, device};
    const size_t size = (bytes + 511) / 512 * 512;
    Stream& owner = current_stream(current_device);
    Lock lock(mutex_);
    collect();
    auto& free = free_[{&owner, size}];
    Block* block;
    if (free.empty()) {
      block = new Block{nullptr, size, &owner, {}, {}};
      TORCH_CHECK(posix_memalign(&block->data, 64, size) == 0, "sim: out of memory");
      stats_[current_device].reserved_bytes[0].increase(size);
    } else {
      block = free.back();
      free.pop_back();
    }
    stats_[current_device].allocated_bytes[0].increase(size);
    return {block->data, block, &Memory::release, device};
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { record(data, stream_of(stream)); }

  void record(const c10::DataPtr& data, Stream& user) {
    if (data.get_deleter() != &Memory::release) return;  // empty, or not ours
    Block* block = static_cast<Block*>(data.get_context());
    Lock lock(mutex_);
    auto& users = block->users;
    if (&user != block->owner && std::find(users.begin(), users.end(), &user) == users.end())
      users.push_back(&user);
  }

  void emptyCache(c10::MempoolId_t) override {
    check_usable();
    streams.each([](Stream& stream) { stream.wait(stream.submitted()); });
    Lock lock(mutex_);
    collect();
    streams.each([](Stream& stream) { stream.wait(stream.submitted()); });  // for the poison
    for (auto& [key, blocks] : free_) {
      for (Block* block : blocks) {
        stats_[block->owner->device].reserved_bytes[0].decrease(block->size);
        std::free(block->data);
        delete block;
      }
    }
    free_.clear();
  }

  bool initialized() override { return true; }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    Lock lock(mutex_);
    return stats_.at(device);
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override {
    Lock lock(mutex_);
    stats_.at(device).allocated_bytes[0].reset_peak();
    stats_.at(device).reserved_bytes[0].reset_peak();
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    wait_on_host(current_stream(current_device));
    std::memcpy(to, from, bytes);
  }

 private:
  static void release(void* context);

  // Takes back the blocks whose recorded streams are past.
  void collect() {
    auto in_use = [this](Block* block) {
      for (const Mark& use : block->last_uses)
        if (!use.done()) return true;
      reuse(block);
      return false;
    };
    pending_.erase(std::remove_if(pending_.begin(), pending_.end(), std::not_fn(in_use)), pending_.end());
  }

  void reuse(Block* block) {
    block->users.clear();
    block->last_uses.clear();
    if (behaviour.poison)
      block->owner->submit("", [data = block->data, size = block->size] { std::memset(data, 0xFF, size); });
    free_[{block->owner, block->size}].push_back(block);
  }

  std::mutex mutex_;
  std::map<std::pair<Stream*, size_t>, std::vector<Block*>> free_;
  std::vector<Block*> pending_;
  std::array<c10::CachingDeviceAllocator::DeviceStats, kDevices> stats_;
};
Memory& memory = *new Memory;

void Memory::release(void* context) {
  if (forked) return;  // a lock may be held for ever by a thread that was not forked
  Block* block = static_cast<Block*>(context);
  Lock lock(memory.mutex_);
  memory.stats_[block->owner->device].allocated_bytes[0].decrease(block->size);
  for (Stream* user : block->users) block->last_uses.push_back(mark_here(*user));
  if (block->last_uses.empty()) memory.reuse(block);
  else memory.pending_.push_back(block);
}

// Page-locked host memory: copies to and from it are asynchronous, and hold it until they are done.
class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 64, std::max<size_t>(bytes, 1)) == 0, "sim: out of memory");
    Lock lock(mutex_);
    sizes_[data] = std::max<size_t>(bytes, 1);
    return {data, data, &PinnedMemory::release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &PinnedMemory::release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

  bool holds(const void* data) {
    if (forked) return false;
    Lock lock(mutex_);
    auto after = sizes_.upper_bound(data);
    if (after == sizes_.begin()) return false;
    auto [begin, size] = *std::prev(after);
    return data < static_cast<const char*>(begin) + size;
  }

 private:
  static void release(void* data);

  std::mutex mutex_;
  std::map<const void*, size_t> sizes_;
};
PinnedMemory& pinned = *new PinnedMemory;

void PinnedMemory::release(void* data) {
  if (forked) return;
  {
    Lock lock(pinned.mutex_);
    pinned.sizes_.erase(data);
  }
  std::free(data);
}

// ------------------------------------------------------------------------------ random numbers

// A device's generator: a seed and the number of draws so far, as on CUDA.
//
// Guarantees: each random kernel draws from a CPU generator of its own, seeded from the two when
// the kernel is submitted. So its numbers depend on the order of submission, never on timing.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(DeviceIndex device)
      : GeneratorImpl(c10::Device(kSim, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  at::Generator draw() {
    Lock lock(mutex_);
    uint64_t x = seed_ + 0x9E3779B97F4A7C15 * ++draws_;  // splitmix64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return at::detail::createCPUGenerator(x ^ (x >> 31));
  }
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    draws_ = 0;
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_offset(uint64_t offset) override { draws_ = offset; }
  uint64_t get_offset() const override { return draws_; }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({16}, at::kByte);
    auto* words = static_cast<uint64_t*>(state.mutable_data_ptr());
    words[0] = seed_;
    words[1] = draws_;
    return state.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.dtype() == caffe2::TypeMeta::Make<uint8_t>(),
                "sim: a generator's state is 16 bytes");
    const auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0];
    draws_ = words[1];
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->seed_ = seed_;
    copy->draws_ = draws_;
    return copy;
  }
  uint64_t seed_ = c10::default_rng_seed_val, draws_ = 0;
};

const at::Generator& default_generator(DeviceIndex device) {
  static auto& all = *new std::array<at::Generator, kDevices>{
      at::make_generator<Generator>(DeviceIndex(0)), at::make_generator<Generator>(DeviceIndex(1))};
  return all.at(device < 0 ? current_device : device);
}

// ----------------------------------------------------------------------- what torch asks for

// Devices, streams and events, for torch's guards, torch.accelerator, torch.Stream, torch.Event
// and the autograd engine. The current device and streams are the thread's own.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  c10::Device getDevice() const override { return {kSim, current_device}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "sim: no device ", int(device.index()), "; there are ", kDevices);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const override { return as_torch(current_stream(device.index())); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return as_torch(streams.get(device.has_index() ? device.index() : current_device, 0));
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return as_torch(streams.from_pool(device.has_index() ? device.index() : current_device, priority));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high) const override {
    return getNewStream(device, high ? -1 : 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    Stream& before = current_stream(stream.device_index());
    current_streams[stream.device_index()] = &stream_of(stream);
    return as_torch(before);
  }
  bool queryStream(const c10::Stream& s) const override { return mark_here(stream_of(s)).done(); }
  void synchronizeStream(const c10::Stream& s) const override { wait_on_host(stream_of(s)); }
  void synchronizeDevice(DeviceIndex device) const override {
    streams.each_of(device, [](Stream& stream) { stream.wait(stream.submitted()); });
    failures.raise(device);
  }

  void record(void** event, const c10::Stream& s, DeviceIndex, c10::EventFlag flag) const override {
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->record(stream_of(s), flag == c10::EventFlag::BACKEND_DEFAULT);
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event) wait_on_stream(stream_of(s), static_cast<Event*>(event)->mark());
  }
  bool queryEvent(void* event) const override { return !event || static_cast<Event*>(event)->mark().done(); }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    Mark mark = static_cast<Event*>(event)->mark();
    if (mark.stream) wait_on_host(*mark.stream, mark.item);
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, DeviceIndex) const override {
    TORCH_CHECK(behaviour.event_timing, "sim: this device does not time events");
    Mark a = static_cast<Event*>(first)->mark(), b = static_cast<Event*>(second)->mark();
    TORCH_CHECK(a.time_ns && b.time_ns, "sim: both events must be recorded with timing");
    TORCH_CHECK(a.done() && b.done(), "sim: the device has not reached both events yet");
    return double(*b.time_ns - *a.time_ns) * 1e-6;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    if (behaviour.record_stream) memory.record(data, stream_of(s));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

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
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return pinned.holds(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::OptionalDeviceGuard on(storage.device());
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

// ------------------------------------------------------------------------------------- kernels

bool on_sim(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

// The same memory as a CPU tensor, which keeps nothing alive.
Tensor host_view(const Tensor& tensor) {
  Tensor view = at::from_blob(tensor.unsafeGetTensorImpl()->mutable_data(), tensor.sizes(), tensor.strides(),
                              at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU));
  view._set_conj(tensor.is_conj());
  view._set_neg(tensor.is_neg());
  return view;
}

template <class F>
void map_tensors(IValue& value, F fn) {
  if (value.isTensor()) {
    value = fn(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> mapped;
    for (const Tensor& tensor : value.toTensorVector()) mapped.push_back(fn(tensor));
    value = mapped;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> mapped;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
      mapped.push_back(tensor ? std::optional<Tensor>(fn(*tensor)) : std::nullopt);
    value = mapped;
  }
}

// A call of any operator, run by the CPU's kernel on the current stream.
//
// Asynchronous where the outputs are known before it runs: given (in place, out=), or of shapes
// that the meta kernel tells. Otherwise torch's CPU fallback runs it, which waits for the stream.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : op_(op), schema_(op.schema()), stack_(stack), first_(stack.size() - schema_.arguments().size()) {}

  void run() {
    find_device();
    c10::OptionalDeviceGuard on(device_);
    draw();
    if (!device_ || !all_plain_ || !find_outputs()) return at::native::cpu_fallback(op_, &stack_);
    torch::jit::Stack arguments(stack_.begin() + first_, stack_.end()), results;
    for (IValue& argument : arguments) map_tensors(argument, as_read_later);
    for (const Tensor& output : made_) results.emplace_back(output.defined() ? IValue(host_view(output)) : IValue());
    current_stream(device_->index()).submit(op_.operator_name().name.substr(6),  // after "aten::"
        [op = op_, arguments = std::move(arguments), results = std::move(results)]() mutable {
          op.callBoxed(arguments);
          for (size_t i = 0; i < results.size(); ++i)
            if (results[i].isTensor()) results[i].toTensor().copy_(arguments[i].toTensor());
        });
    torch::jit::drop(stack_, schema_.arguments().size());
    for (const Tensor& output : outputs_) stack_.emplace_back(output);
  }

 private:
  // An operand from the host is read now: it may change before the kernel runs.
  static Tensor as_read_later(const Tensor& tensor) {
    if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
    return on_sim(tensor) ? host_view(tensor) : tensor.clone();
  }

  void find_device() {
    for (size_t i = first_; i < stack_.size(); ++i) {
      map_tensors(stack_[i], [this](const Tensor& tensor) {
        if (on_sim(tensor)) {
          TORCH_CHECK(!device_ || *device_ == tensor.device(), op_.operator_name(),
                      ": tensors are on ", *device_, " and ", tensor.device());
          device_ = tensor.device();
        }
        all_plain_ &= !tensor.defined() || (tensor.layout() == at::kStrided && tensor.has_storage());
        return tensor;
      });
    }
  }

  void draw() {
    if (!op_.hasTag(at::Tag::nondeterministic_seeded)) return;
    auto index = schema_.argumentIndexWithName("generator");
    TORCH_CHECK_NOT_IMPLEMENTED(index, op_.operator_name(), ": sim has no random kernel for it");
    IValue& given = stack_[first_ + *index];
    const auto& generator = given.isNone() ? default_generator(-1) : given.toGenerator();
    if (generator.device().type() == kSim) given = generator.get<Generator>()->draw();
  }

  // Fills outputs_, and made_ with those that are new; false where they cannot be known.
  bool find_outputs() {
    if (op_.hasTag(at::Tag::data_dependent_output) || op_.hasTag(at::Tag::dynamic_output_shape)) return false;
    size_t given = 0;
    for (const auto& result : schema_.returns()) {
      if (result.type()->kind() != c10::TypeKind::TensorType) return false;
      const auto* alias = result.alias_info();
      if (!alias) continue;
      for (size_t i = 0; alias->isWrite() && i < schema_.arguments().size(); ++i) {
        const auto* written = schema_.arguments()[i].alias_info();
        if (!written || !(*written == *alias)) continue;
        const Tensor& output = stack_[first_ + i].toTensor();
        if (!on_sim(output) || output.numel() == 0) return false;  // may have to be resized
        outputs_.push_back(output);
        ++given;
      }
    }
    if (given == schema_.returns().size()) return !schema_.returns().empty();
    return given == 0 && make_outputs();
  }

  bool make_outputs() {
    auto as_meta = [](const Tensor& t) {
      return t.defined() ? at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta)) : t;
    };
    torch::jit::Stack arguments(stack_.begin() + first_, stack_.end());
    for (IValue& argument : arguments) {
      map_tensors(argument, as_meta);
      if (argument.isDevice()) argument = c10::Device(at::kMeta);
    }
    try {
      op_.callBoxed(arguments);
    } catch (const std::exception&) {
      return false;  // no meta kernel; if the arguments are wrong, the CPU's kernel says so
    }
    for (const IValue& result : arguments) {
      const Tensor& meta = result.toTensor();
      made_.push_back(!meta.defined() ? meta : at::empty_strided(
          meta.sizes(), meta.strides(), at::TensorOptions().dtype(meta.dtype()).device(*device_)));
    }
    outputs_ = made_;
    return true;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack& stack_;
  const size_t first_;
  std::optional<c10::Device> device_;
  bool all_plain_ = true;
  std::vector<Tensor> outputs_, made_;
};

void any_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, *stack).run(); }

at::Device device_or_current(std::optional<at::Device> device) {
  return {kSim, device && device->has_index() ? device->index() : current_device};
}

constexpr c10::DispatchKeySet kKey(c10::DispatchKey::PrivateUse1);

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard on(device_or_current(device));
  return at::detail::empty_generic(size, &memory, kKey, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard on(device_or_current(device));
  return at::detail::empty_strided_generic(size, stride, &memory, kKey, c10::dtype_or_default(dtype));
}

// Between a device and pinned memory a non-blocking copy reads and writes when the stream comes to
// it. Unpinned memory is read at once, or written before the return. A copy from device to device
// runs on the source's stream, after and before what is on the destination's.
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  Stream& stream = current_stream(on_sim(from) ? from : to);
  Stream& other = current_stream(on_sim(to) ? to : from);
  const Tensor& host = on_sim(from) ? to : from;
  const bool both = on_sim(from) && on_sim(to), is_pinned = !both && pinned.holds(host.const_data_ptr());
  Tensor source = from;
  if (!on_sim(from) && non_blocking && !is_pinned) source = from.clone();
  std::vector<c10::Storage> held;
  if (!both) held.push_back(on_sim(from) ? to.storage() : source.storage());
  wait_on_stream(stream, mark_here(other));
  stream.submit("copy_", [source = host_view(source), target = host_view(to), held = std::move(held)] {
    target.copy_(source);
  });
  wait_on_stream(other, mark_here(stream));
  if (!both && !(non_blocking && (is_pinned || !on_sim(from)))) wait_on_host(stream);
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const Tensor& tensor) {
  wait_on_host(current_stream(tensor));
  return at::_local_scalar_dense(host_view(tensor));
}

const Tensor& resize(const Tensor& tensor, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  wait_on_host(current_stream(tensor));  // the host copies what is in it
  c10::DeviceGuard on(tensor.device());
  return at::native::resize_(tensor, size, format);
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) return {input.clone(), at::ones_like(input, at::kBool)};
  Tensor mask = at::empty(input.sizes(), input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0. : 1 / (1 - p)), mask};
}

void record_stream(Tensor& tensor, c10::Stream stream) {
  TORCH_CHECK_NOT_IMPLEMENTED(behaviour.record_stream, "Could not run 'aten::record_stream' on sim");
  memory.record(tensor.storage().data_ptr(), stream_of(stream));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operator>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("resize_", resize);
  m.impl("native_dropout", native_dropout);
  m.impl("record_stream", record_stream);
  // Kernels of the CPU that touch sizes and strides only.
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  // Operators that torch would decompose, or whose out= kernel changes the shape of its output.
  for (const char* name : {"native_layer_norm", "native_group_norm", "mse_loss", "smooth_l1_loss"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&any_operator>());
}

// --------------------------------------------------------------------- controls of the tests

void lag_on(int64_t device, int64_t us) {
  current_stream(device).submit("lag", [us] {
    const auto end = Clock::now() + std::chrono::microseconds(us);
    for (auto now = Clock::now(); now < end && !stopping; now = Clock::now())
      std::this_thread::sleep_until(std::min(end, now + std::chrono::milliseconds(20)));
  });
}

void lag(const Tensor& tensor, int64_t us) { lag_on(tensor.device().index(), us); }

// Gates by number. A stream that comes to a gate waits until it is opened; an unopened gate's
// deadline is a failure of the device.
struct Gates {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<int64_t, bool> open;
  int64_t next = 0;
};
Gates& gates = *new Gates;

int64_t gate(int64_t device, double deadline_s) {
  Lock lock(gates.mutex);
  const int64_t number = gates.next++;
  gates.open[number] = false;
  lock.unlock();
  current_stream(device).submit("gate", [number, deadline_s] {
    Lock lock(gates.mutex);
    const bool in_time = gates.changed.wait_for(lock, std::chrono::duration<double>(deadline_s),
                                                [&] { return gates.open[number] || stopping; });
    gates.open.erase(number);
    TORCH_CHECK(in_time, "nobody opened it within ", deadline_s, " s");
  });
  return number;
}

void open_gate(int64_t number) {
  Lock lock(gates.mutex);
  auto found = gates.open.find(number);
  if (found != gates.open.end()) found->second = true;
  gates.changed.notify_all();
}

std::tuple<Tensor, std::vector<std::string>> read_log() {
  Lock lock(the_log.mutex);
  const int64_t rows = the_log.entries.size();
  Tensor numbers = at::empty({rows, 4}, at::kLong);
  std::vector<std::string> names;
  int64_t* cell = numbers.mutable_data_ptr<int64_t>();
  for (const Executed& done : the_log.entries) {
    for (int64_t value : {int64_t(done.device), done.stream, done.start_ns, done.end_ns}) *cell++ = value;
    names.push_back(done.name);
  }
  return {numbers, names};
}

void clear_log() {
  Lock lock(the_log.mutex);
  the_log.entries.clear();
}

void behave(int64_t late_us, bool event_timing, bool record_stream, int64_t stream_pool, bool poison) {
  behaviour.late_us = late_us;
  behaviour.event_timing = event_timing;
  behaviour.record_stream = record_stream;
  behaviour.stream_pool = stream_pool;
  behaviour.poison = poison;
}

int64_t priority(int64_t device, int64_t stream) { return streams.get(device, stream).priority; }

bool is_forked() { return forked; }

// Before the interpreter is finalized: no stream may run when the process tears itself down.
void shut_down() {
  if (forked || stopping.exchange(true)) return;
  { Lock lock(gates.mutex); }
  gates.changed.notify_all();
  streams.each([](Stream& stream) { stream.wake(); });
  streams.each([](Stream& stream) { stream.join(); });
}

TORCH_LIBRARY(sim, m) {
  m.def("lag(Tensor tensor, int us) -> ()");
  m.def("lag_on", lag_on);
  m.def("gate", gate);
  m.def("open_gate", open_gate);
  m.def("log", read_log);
  m.def("clear_log", clear_log);
  m.def("behave", behave);
  m.def("priority", priority);
  m.def("is_forked", is_forked);
  m.def("default_generator", [](int64_t device) { return default_generator(device); });
  m.def("shut_down", shut_down);
}

TORCH_LIBRARY_IMPL(sim, PrivateUse1, m) { m.impl("lag", lag); }

}  // namespace
