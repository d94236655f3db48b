// Hands out a device's memory as CUDA's caching allocator does.
//
// Requests are rounded to 512 bytes.  Requests up to 1 MiB share segments of 2 MiB, requests up to
// 10 MiB segments of 20 MiB; larger ones get a segment of their own.  A freed block can be used
// again at once by work of the same stream, because that work comes later in the queue.  Work of
// another stream must have been named by `record_stream`, or the block's stream must wait for it
// before the block is used again; otherwise it finds poison.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <set>
#include <unordered_map>

#include "streams.h"

namespace sim {

constexpr size_t kRound = 512;
constexpr size_t kSmall = size_t{1} << 20;
constexpr size_t kSmallSegment = size_t{2} << 20;
constexpr size_t kLarge = size_t{10} << 20;
constexpr size_t kLargeSegment = size_t{20} << 20;
constexpr size_t kRoundLarge = size_t{2} << 20;
constexpr int kPoison = 0xDB;

inline size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

struct Block {
  int device;
  c10::StreamId stream;
  char* address;
  size_t bytes;
  bool small;
  size_t requested = 0;
  bool allocated = false;
  Block* before = nullptr;  // in the same segment
  Block* after = nullptr;
  std::vector<Point> used_by{};  // other streams, as `record_stream` named them

  bool is_segment() const { return before == nullptr && after == nullptr; }
};

struct Smaller {
  bool operator()(const Block* a, const Block* b) const {
    return std::tie(a->stream, a->bytes, a->address) < std::tie(b->stream, b->bytes, b->address);
  }
};

// Gives ranges of a device's addresses to segments.
class Addresses {
 public:
  char* take(char* begin, size_t bytes) {
    for (auto range = free_.begin(); range != free_.end(); ++range) {
      if (range->second < bytes) continue;
      const auto [offset, size] = *range;
      free_.erase(range);
      if (size > bytes) free_[offset + bytes] = size - bytes;
      return begin + offset;
    }
    const size_t offset = next_;
    TORCH_CHECK(offset + bytes <= kSpace, "sim: the device's addresses are used up");
    next_ += bytes;
    return begin + offset;
  }

  void give_back(char* begin, char* address, size_t bytes) {
    auto range = free_.emplace(address - begin, bytes).first;
    const auto after = std::next(range);
    if (after != free_.end() && range->first + range->second == after->first) {
      range->second += after->second;
      free_.erase(after);
    }
    if (range != free_.begin() && std::prev(range)->first + std::prev(range)->second == range->first) {
      std::prev(range)->second += range->second;
      free_.erase(range);
    }
  }

 private:
  std::map<size_t, size_t> free_;  // offset -> bytes
  size_t next_ = 0;
};

class OneDevice {
 public:
  using Stats = c10::CachingDeviceAllocator::DeviceStats;

  Block* allocate(int device, const c10::Stream& stream, size_t requested) {
    const size_t bytes = std::max(kRound, round_up(requested, kRound));
    finish_pending(false);
    Block* block = find(stream.id(), bytes);
    if (block == nullptr) block = grow(device, stream.id(), bytes);
    if (block == nullptr) {  // as CUDA: wait for what other streams hold, give back, try again
      ++stats.num_alloc_retries;
      finish_pending(true);
      block = find(stream.id(), bytes);
    }
    if (block == nullptr) {
      release_cached();
      block = grow(device, stream.id(), bytes);
    }
    if (block == nullptr) refuse(device, requested);
    split(block, bytes);
    mark_allocated(block, requested);
    poison(block);
    return block;
  }

  void free(Block* block) {
    block->allocated = false;
    count(stats.allocation, *block, -1);
    count(stats.allocated_bytes, *block, -static_cast<int64_t>(block->bytes));
    count(stats.requested_bytes, *block, -static_cast<int64_t>(block->requested));
    if (block->used_by.empty()) {
      put_back(block);
    } else {
      for (Point& point : block->used_by) point = streams().now(stream_of(point.device, point.stream));
      pending_.push_back(block);
    }
  }

  void release_cached() {
    finish_pending(true);
    for (auto* pool : {&small_, &large_}) {
      for (auto at = pool->begin(); at != pool->end();) {
        Block* block = *at;
        at = block->is_segment() ? (pool->erase(at)) : std::next(at);
        if (block->is_segment()) release(block);
      }
    }
  }

  void set_cap(uint64_t bytes) { cap_ = bytes; }

  Stats stats;

 private:
  Block* find(c10::StreamId stream, size_t bytes) {
    const bool small = bytes <= kSmall;
    auto& pool = small ? small_ : large_;
    Block wanted{0, stream, nullptr, bytes, small};
    const auto found = pool.lower_bound(&wanted);
    if (found == pool.end() || (*found)->stream != stream) return nullptr;
    Block* block = *found;
    pool.erase(found);
    return block;
  }

  static size_t segment_bytes(size_t bytes) {
    if (bytes <= kSmall) return kSmallSegment;
    return bytes < kLarge ? kLargeSegment : round_up(bytes, kRoundLarge);
  }

  Block* grow(int device, c10::StreamId stream, size_t bytes) {
    const size_t size = segment_bytes(bytes);
    const auto reserved = static_cast<uint64_t>(stats.reserved_bytes[0].current);
    if (reserved + size > cap_ || !budget().take(device, size)) return nullptr;
    char* address = addresses_.take(memory().begin(device), size);
    auto* block = new Block{device, stream, address, size, bytes <= kSmall};
    count(stats.segment, *block, 1);
    count(stats.reserved_bytes, *block, static_cast<int64_t>(size));
    ++stats.num_device_alloc;
    return block;
  }

  void split(Block* block, size_t bytes) {
    const size_t rest = block->bytes - bytes;
    if (rest < kRound || (!block->small && rest <= kSmall)) return;
    auto* right = new Block{
        block->device, block->stream, block->address + bytes, rest, block->small};
    right->before = block;
    right->after = block->after;
    if (right->after != nullptr) right->after->before = right;
    block->after = right;
    block->bytes = bytes;
    pool_of(right).insert(right);
  }

  void mark_allocated(Block* block, size_t requested) {
    block->allocated = true;
    block->requested = requested;
    const auto bytes = static_cast<int64_t>(block->bytes);
    count(stats.allocation, *block, 1);
    count(stats.allocated_bytes, *block, bytes);
    count(stats.active, *block, 1);
    count(stats.active_bytes, *block, bytes);
    count(stats.requested_bytes, *block, static_cast<int64_t>(requested));
  }

  // Fills a block that is about to be used, in the order of its stream: whatever other streams still
  // read of its former content is gone.
  static void poison(const Block* block) {
    streams().issue(
        stream_of(block->device, block->stream),
        [at = memory().twin(block->address), bytes = block->requested] {
          std::memset(at, kPoison, bytes);
        });
  }

  // Joins the block with its free neighbours.
  void put_back(Block* block) {
    block->used_by.clear();
    count(stats.active, *block, -1);
    count(stats.active_bytes, *block, -static_cast<int64_t>(block->bytes));
    join(block, block->before);
    join(block, block->after);
    pool_of(block).insert(block);
  }

  // Takes `other` into `block` if it is free.
  void join(Block* block, Block* other) {
    if (other == nullptr || pool_of(other).erase(other) == 0) return;
    if (other == block->before) {
      block->address = other->address;
      block->before = other->before;
      if (block->before != nullptr) block->before->after = block;
    } else {
      block->after = other->after;
      if (block->after != nullptr) block->after->before = block;
    }
    block->bytes += other->bytes;
    delete other;
  }

  void release(Block* segment) {
    streams().run_until(streams().now(stream_of(segment->device, segment->stream)));
    memory().give_back(segment->address, segment->bytes);
    addresses_.give_back(memory().begin(segment->device), segment->address, segment->bytes);
    budget().give_back(segment->device, segment->bytes);
    count(stats.segment, *segment, -1);
    count(stats.reserved_bytes, *segment, -static_cast<int64_t>(segment->bytes));
    ++stats.num_device_free;
    delete segment;
  }

  void finish_pending(bool wait) {
    std::vector<Block*> still;
    for (Block* block : pending_) {
      bool reached = true;
      for (const Point& point : block->used_by) {
        if (wait) streams().run_until(point);
        reached = reached && streams().reached(point);
      }
      if (reached) {
        put_back(block);
      } else {
        still.push_back(block);
      }
    }
    pending_ = std::move(still);
  }

  [[noreturn]] void refuse(int device, size_t requested) {
    ++stats.num_ooms;
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "sim out of memory. Tried to allocate ", requested,
        " bytes. Device ", device, " has ", settings().memory_bytes, " bytes, of which ",
        budget().free_bytes(device), " are free; this process holds ",
        stats.reserved_bytes[0].current, " of at most ",
        std::min<uint64_t>(cap_, settings().memory_bytes), " and uses ",
        stats.allocated_bytes[0].current);
  }

  std::set<Block*, Smaller>& pool_of(const Block* block) { return block->small ? small_ : large_; }

  static void count(c10::CachingAllocator::StatArray& stat, const Block& block, int64_t change) {
    for (const size_t kind : {size_t{0}, block.small ? size_t{1} : size_t{2}}) {
      if (change >= 0) {
        stat[kind].increase(static_cast<size_t>(change));
      } else {
        stat[kind].decrease(static_cast<size_t>(-change));
      }
    }
  }

  std::set<Block*, Smaller> small_, large_;
  std::vector<Block*> pending_;  // freed, but a stream that was recorded has not passed yet
  Addresses addresses_;
  uint64_t cap_ = UINT64_MAX;
};

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override { return allocate_on(current_device(), bytes); }

  c10::DataPtr allocate_on(int device, size_t bytes) {
    const c10::Device where(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(device));
    if (bytes == 0) return {nullptr, nullptr, &release, where};
    use();
    checked_device(device);
    const Locked locked(device_lock());
    Block* block = devices_[device].allocate(device, current_stream(device), bytes);
    blocks_[block->address] = block;
    return {block->address, block->address, &release, where};
  }

  bool initialized() override { return fork_rule().used; }
  void emptyCache(c10::MempoolId_t) override {
    if (!initialized() || in_bad_fork()) return;
    const Locked locked(device_lock());
    for (auto& device : devices_) device.release_cached();
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (data.get() == nullptr) return;
    const Locked locked(device_lock());
    const auto found = blocks_.find(data.get());
    TORCH_CHECK(found != blocks_.end(), "sim: no block begins at this address");
    Block* block = found->second;
    if (block->stream == stream.id() && block->device == stream.device_index()) return;
    block->used_by.push_back(streams().now(stream));
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const Locked locked(device_lock());
    return devices_[checked_device(device)].stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    for_each_stat(device, [](auto& stat) { stat.reset_accumulated(); });
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    for_each_stat(device, [](auto& stat) { stat.reset_peak(); });
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    use();
    return {budget().free_bytes(checked_device(device)), settings().memory_bytes};
  }

  void set_cap(int device, double fraction) {
    const Locked locked(device_lock());
    devices_[checked_device(device)].set_cap(
        static_cast<uint64_t>(fraction * static_cast<double>(settings().memory_bytes)));
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    const Locked locked(device_lock());
    auto work = [a = memory().twin(to), b = memory().twin(from), bytes] { std::memcpy(a, b, bytes); };
    streams().issue(current_stream(current_device()), work);
  }

 private:
  static void release(void* address);

  template <typename Change>
  void for_each_stat(int device, Change change) {
    const Locked locked(device_lock());
    auto& stats = devices_[checked_device(device)].stats;
    for (auto* array :
         {&stats.allocation, &stats.segment, &stats.active, &stats.inactive_split,
          &stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes,
          &stats.inactive_split_bytes, &stats.requested_bytes}) {
      for (auto& stat : *array) change(stat);
    }
  }

  std::array<OneDevice, kMaxDevices> devices_;
  std::unordered_map<void*, Block*> blocks_;
};

inline Allocator& allocator() {
  static auto* made = new Allocator();
  return *made;
}

inline void Allocator::release(void* address) {
  // A fork inherits tensors of its parent; dropping them must not touch the parent's books.
  if (address == nullptr || in_bad_fork()) return;
  const Locked locked(device_lock());
  auto& blocks = allocator().blocks_;
  const auto found = blocks.find(address);
  Block* block = found->second;
  blocks.erase(found);
  allocator().devices_[block->device].free(block);
}

}  // namespace sim
