// Streams as threads, events, and what is recorded of both. Objects of the process are never
// destroyed: threads may outlive main().
#pragma once

#include <ATen/Parallel.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/GPUTrace.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <sys/prctl.h>

#include <array>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <string>
#include <thread>

extern "C" {  // in torch's libraries, where they were built with them
__attribute__((weak)) void omp_set_num_threads(int);
__attribute__((weak)) int MKL_Set_Num_Threads_Local(int);
}

namespace {

using c10::DeviceIndex;
using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC, as time.perf_counter_ns in Python
using Lock = std::unique_lock<std::mutex>;
using us = std::chrono::microseconds;

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 2;
constexpr int64_t kPool = 32;  // streams of a device to hand out, of either priority

int64_t now_ns() { return std::chrono::nanoseconds(Clock::now().time_since_epoch()).count(); }

// How the devices behave; changed while no work is queued.
struct Behaviour {
  std::atomic<int64_t> late_us{0};        // > 0: work for which nobody waits starts this much late
  std::atomic<int64_t> pool{kPool};       // how many streams are handed out; 0: the default stream
  std::atomic<bool> event_timing{true};   // false: elapsed_time raises
  std::atomic<bool> record_stream{true};  // false: Tensor.record_stream raises
  std::atomic<bool> poison{false};        // freed memory is overwritten
  std::atomic<int64_t> link_us{0};        // a copy from or to the host takes so long per MiB
  // What the host pays on a real device:
  std::atomic<int64_t> launch_us{0};         // for each kernel that it launches
  std::atomic<int64_t> queue{0};             // > 0: it waits while so many items are in the queue
  std::atomic<bool> pageable_blocks{false};  // for a copy from memory that is not pinned: all of it
} behaviour;

std::atomic<bool> stopping{false};  // the process ends: work is dropped, and no wait blocks
// Another thread that waits then sleeps for good: Python would end it inside C++, which aborts.
thread_local bool returns_when_stopping = false;
std::atomic<bool> forked{false};    // a forked child: it has the locks, but not the threads

void check_usable() {
  TORCH_CHECK(!forked, "sim: a forked child cannot use the device; start processes with 'spawn'");
}

// Reports to the callbacks in torch.sim._gpu_trace, as CUDA does to its own. It takes the interpreter
// lock, which a thread that waits for a lock of these files may hold: call it without any of them.
template <class F>
void trace(F report) {
  const auto* interpreter = forked ? nullptr : c10::impl::GPUTrace::get_trace();
  if (interpreter) report(*interpreter);
}

// What streams have executed, in the order in which it ended; and each device's first failure since
// the host last waited for it, which that wait raises.
struct Record {
  struct Entry {
    DeviceIndex device;
    int64_t stream;
    std::string name;
    int64_t start_ns, end_ns;
  };
  std::mutex mutex;
  std::deque<Entry> log;  // the newest million
  std::array<std::string, kDevices> failure;

  void add(Entry entry, const std::string& failed) {
    Lock lock(mutex);
    auto& first = failure[entry.device];
    if (first.empty() && !failed.empty())
      first = c10::str("sim:", int(entry.device), ": ", entry.name, " on stream ", entry.stream,
                       " failed: ", failed);
    if (!entry.name.empty()) log.push_back(std::move(entry));
    if (log.size() > 1'000'000) log.pop_front();
  }
  void raise(DeviceIndex device) {
    Lock lock(mutex);
    std::string text = std::exchange(failure[device], {});
    TORCH_CHECK(text.empty(), text);
  }
};
Record& record = *new Record;

// ------------------------------------------------------------------------------------- streams

// A thread that executes items of work in the order of submission, numbered from 1.
//
// Guarantees: submit() does not wait for work. An item starts when the one before has ended; what
// it wrote is seen by whom wait() or done() told that it ended. No lock is held while work runs.
// Late streams start an item when someone waits for it or for a later one, or else after a random
// delay. The thread starts with the first item, and runs until the process ends.
class Stream {
 public:
  const DeviceIndex device;
  const int64_t id;  // 0: the default stream; 1 to kPool: to hand out; above: of high priority

  Stream(DeviceIndex device, int64_t id)
      : device(device), id(id), random_(id * kDevices + device + 1) {}

  // Returns the item's number. Work without a name is not logged.
  uint64_t submit(std::string name, std::function<void()> run) {
    check_usable();
    if (const int64_t cost = name.empty() ? 0 : behaviour.launch_us.load())
      for (const auto end = Clock::now() + us(cost); Clock::now() < end;) continue;
    Lock lock(mutex_);
    if (const int64_t most = behaviour.queue)
      done_.wait(lock, [&] { return stopping || int64_t(queue_.size()) < most; });
    if (stopping) return submitted_;
    auto due = Clock::now();
    if (const int64_t late = behaviour.late_us) due += us(random_() % late);
    queue_.push_back({std::move(name), std::move(run), due});
    if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
    arrived_.notify_one();
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
    return ended_ >= item || stopping;
  }
  void wait(uint64_t item) {
    check_usable();
    Lock lock(mutex_);
    wanted_ = std::max(wanted_, item);
    arrived_.notify_one();
    done_.wait(lock, [&] { return ended_ >= item || stopping; });
    if (ended_ >= item || returns_when_stopping) return;
    lock.unlock();
    while (true) ::pause();
  }
  void drain() { wait(submitted()); }

  // Once `stopping` is set: ends all waits.
  void wake() {
    Lock lock(mutex_);  // whoever did not see `stopping` is asleep by now
    arrived_.notify_all();
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

  void loop() {
    returns_when_stopping = true;
    at::get_num_threads();  // torch sets a thread's number of threads when first asked
    if (omp_set_num_threads) omp_set_num_threads(1);
    if (MKL_Set_Num_Threads_Local) MKL_Set_Num_Threads_Local(1);
    prctl(PR_SET_TIMERSLACK, 1);  // in ns: sleeps end on time
    c10::impl::ExcludeDispatchKeyGuard no_autograd(
        c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    Lock lock(mutex_);
    while (true) {
      arrived_.wait(lock, [&] { return stopping || !queue_.empty(); });
      while (!stopping && wanted_ <= ended_ && Clock::now() < queue_.front().due)
        arrived_.wait_until(lock, queue_.front().due);
      if (stopping) return;
      Item item = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      execute(item);
      item.run = nullptr;  // releases what it holds before it counts as ended
      lock.lock();
      ++ended_;
      done_.notify_all();
    }
  }
  void execute(Item& item) {
    const int64_t start = now_ns();
    std::string failed;
    try {
      item.run();
    } catch (const c10::Error& error) {
      failed = error.what_without_backtrace();
    } catch (const std::exception& error) { failed = error.what(); }
    record.add({device, id, std::move(item.name), start, now_ns()}, failed);
  }

  std::mutex mutex_;
  std::condition_variable arrived_, done_;
  std::deque<Item> queue_;
  uint64_t submitted_ = 0, ended_ = 0, wanted_ = 0;
  std::mt19937 random_;
  std::thread thread_;
};

std::array<std::deque<Stream>, kDevices>& streams = *[] {
  auto* all = new std::array<std::deque<Stream>, kDevices>;
  for (DeviceIndex device = 0; device < kDevices; ++device)
    for (int64_t id = 0; id <= 2 * kPool; ++id) (*all)[device].emplace_back(device, id);
  return all;
}();

thread_local DeviceIndex current_device = 0;
thread_local std::array<int64_t, kDevices> current_ids{};

DeviceIndex index_of(c10::Device device) {
  const DeviceIndex index = device.has_index() ? device.index() : current_device;
  TORCH_CHECK(index >= 0 && index < kDevices, "sim: no device ", int(index), "; there are ",
              int(kDevices));
  return index;
}
Stream& get_stream(const c10::Stream& stream) {
  auto& all = streams[index_of(stream.device())];
  TORCH_CHECK(stream.id() >= 0 && stream.id() < int64_t(all.size()), "sim: no stream ",
              stream.id());
  return all[stream.id()];
}
Stream& current_stream(c10::Device device) {
  return streams[index_of(device)][current_ids[index_of(device)]];
}
c10::Stream as_torch(const Stream& stream) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, stream.device), stream.id);
}
Stream& stream_from_pool(c10::Device device, bool high_priority) {
  static std::array<std::array<std::atomic<int64_t>, 2>, kDevices> handed_out;
  const DeviceIndex index = index_of(device);
  const int64_t size = behaviour.pool;
  if (size == 0) return streams[index][0];
  return streams[index][1 + kPool * high_priority + handed_out[index][high_priority]++ % size];
}

// A stream as the trace callbacks name it.
uintptr_t traced(const Stream& stream) { return uintptr_t(stream.device) << 16 | stream.id; }

// The host's waits, which raise what failed.
void wait_on_host(Stream& stream, uint64_t item) {
  stream.wait(item);
  record.raise(stream.device);
}
void wait_on_host(Stream& stream) {
  wait_on_host(stream, stream.submitted());
  trace([&](auto& python) { python->trace_gpu_stream_synchronization(kSim, traced(stream)); });
}

// -------------------------------------------------------------------------------------- events

// A point in a stream's work, after its first `item` items; reached where there is no stream.
struct Mark {
  Stream* stream = nullptr;
  uint64_t item = 0;
  std::shared_ptr<std::atomic<int64_t>> time_ns = {};  // of events with timing

  bool done() const { return !stream || stream->done(item); }
};

// What is submitted to `stream` from now on starts when `mark` is reached.
void wait_on_stream(Stream& stream, const Mark& mark) {
  if (mark.stream != &stream && !mark.done())
    stream.submit("", [mark] { mark.stream->wait(mark.item); });
}

// What is submitted to `stream` from now on starts when `other` has done what it was given so far.
void wait_on_stream(Stream& stream, Stream& other) {
  if (&stream == &other) return;
  const Mark mark{&other, other.submitted()};
  wait_on_stream(stream, mark);
  trace([&](auto& python) {
    const auto event = reinterpret_cast<uintptr_t>(&mark);
    python->trace_gpu_event_record(kSim, event, traced(other));
    python->trace_gpu_event_wait(kSim, event, traced(stream));
  });
}

// A wait is for what was recorded last when the wait was submitted, whenever it is executed: an
// event can be recorded again while others still wait for its older mark. Threads may share it.
class Event {
 public:
  Mark mark() {
    Lock lock(mutex_);
    return mark_;
  }
  void record(Stream& stream, bool timing) {
    Mark mark{&stream, 0};
    if (timing) {
      mark.time_ns = std::make_shared<std::atomic<int64_t>>(0);
      mark.item = stream.submit("", [time = mark.time_ns] { *time = now_ns(); });
    } else {
      mark.item = stream.submitted();
    }
    {
      Lock lock(mutex_);
      mark_ = std::move(mark);
    }
    trace([&](auto& python) { python->trace_gpu_event_record(kSim, name(), traced(stream)); });
  }
  uintptr_t name() const { return reinterpret_cast<uintptr_t>(this); }

 private:
  std::mutex mutex_;
  Mark mark_;
};

}  // namespace
