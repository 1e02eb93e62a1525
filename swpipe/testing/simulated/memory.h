// Memory of the devices, and pinned memory of the host.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <vector>

#include "streams.h"

namespace {

void* allocate_on_host(size_t bytes) {
  void* data = nullptr;
  TORCH_CHECK(posix_memalign(&data, 64, bytes) == 0, "sim: out of memory");
  return data;
}

// Device memory, cached by the stream that was current at the allocation, its owner.
//
// Guarantees: a freed block goes to its owner's next allocation of the same size (rounded up to 512
// bytes) and to no other stream. Its other users must be recorded: then it stays out of use until
// all is done that was submitted to them before the free. Poison, 0xFF in each byte (NaN, −1), is
// written on the owner's stream as soon as the block may be reused, so a late reader sees it.
class Memory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    check_usable();
    const c10::Device device(kSim, current_device);
    if (bytes == 0) return {nullptr, device};
    const size_t size = (bytes + 511) / 512 * 512;
    Stream& owner = current_stream(device);
    Lock lock(mutex_);
    reuse_pending();
    auto& free = free_[{&owner, size}];
    if (free.empty()) {
      free.push_back(new Block{allocate_on_host(size), size, &owner});
      stats_[device.index()].reserved_bytes[0].increase(size);
    }
    Block* block = free.back();
    free.pop_back();
    stats_[device.index()].allocated_bytes[0].increase(size);
    stats_[device.index()].active_bytes[0].increase(size);
    return {block->data, block, &release, device};
  }
  void record(const c10::DataPtr& data, Stream& user) {
    if (data.get_deleter() != &release) return;  // empty
    Block* block = static_cast<Block*>(data.get_context());
    Lock lock(mutex_);
    if (&user != block->owner) block->users.insert(&user);
  }
  void recordStream(const c10::DataPtr& data, c10::Stream user) override {
    record(data, get_stream(user));
  }
  void emptyCache(c10::MempoolId_t) override {
    decltype(free_) unused;
    for (auto& all : streams)
      for (Stream& stream : all) stream.drain();
    {
      Lock lock(mutex_);
      reuse_pending();
      unused.swap(free_);
    }
    for (auto& [key, blocks] : unused) {
      key.first->drain();  // poison
      for (Block* block : blocks) {
        stats_[key.first->device].reserved_bytes[0].decrease(block->size);
        std::free(block->data);
        delete block;
      }
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    Lock lock(mutex_);
    return stats_.at(device);
  }
  void resetPeakStats(DeviceIndex device) override {
    Lock lock(mutex_);
    stats_.at(device).allocated_bytes[0].reset_peak();
    stats_.at(device).active_bytes[0].reset_peak();
    stats_.at(device).reserved_bytes[0].reset_peak();
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  bool initialized() override { return true; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    wait_on_host(current_stream(c10::Device(kSim)));
    std::memcpy(to, from, bytes);
  }

 private:
  struct Block {
    void* data;
    size_t size;
    Stream* owner;
    std::set<Stream*> users = {};
    std::vector<Mark> last_uses = {};
  };

  static void release(void* context);

  void reuse_pending() {
    auto is_past = [this](Block* block) {
      auto& uses = block->last_uses;
      const bool past =
          std::all_of(uses.begin(), uses.end(), [](const Mark& use) { return use.done(); });
      if (past) reuse(block);
      return past;
    };
    pending_.erase(std::remove_if(pending_.begin(), pending_.end(), is_past), pending_.end());
  }
  void reuse(Block* block) {
    stats_[block->owner->device].active_bytes[0].decrease(block->size);
    block->users.clear();
    block->last_uses.clear();
    if (behaviour.poison)
      block->owner->submit(
          "", [data = block->data, size = block->size] { std::memset(data, 0xFF, size); });
    free_[{block->owner, block->size}].push_back(block);
  }

  std::mutex mutex_;
  std::map<std::pair<Stream*, size_t>, std::vector<Block*>> free_;
  std::vector<Block*> pending_;  // freed, and perhaps still in use
  std::array<c10::CachingDeviceAllocator::DeviceStats, kDevices> stats_;
};
Memory& memory = *new Memory;

void Memory::release(void* context) {
  if (forked) return;
  Block* block = static_cast<Block*>(context);
  Lock lock(memory.mutex_);
  memory.stats_[block->owner->device].allocated_bytes[0].decrease(block->size);
  for (Stream* user : block->users) block->last_uses.push_back({user, user->submitted()});
  memory.pending_.push_back(block);
  memory.reuse_pending();
}

// Pinned host memory: copies to and from it are asynchronous, and keep it until they are done.
class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = allocate_on_host(bytes + 1);
    Lock lock(mutex_);
    end_[data] = static_cast<char*>(data) + bytes + 1;
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  bool holds(const void* data) {
    if (forked) return false;
    Lock lock(mutex_);
    auto after = end_.upper_bound(data);
    return after != end_.begin() && data < std::prev(after)->second;
  }

 private:
  static void release(void* data);

  std::mutex mutex_;
  std::map<const void*, const void*> end_;
};
PinnedMemory& pinned = *new PinnedMemory;

void PinnedMemory::release(void* data) {
  if (forked) return;
  Lock lock(pinned.mutex_);
  pinned.end_.erase(data);
  std::free(data);
}

}  // namespace
