// Knows the host memory that copies may reach while the host goes on.
//
// Memory is pinned if this allocator made it or somebody registered it.  A block that was freed
// while a copy in some stream still needs it stays until that stream has passed the copy.
#pragma once

#include <ATen/core/CachingHostAllocator.h>

#include "allocator.h"

namespace sim {

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device where(c10::kCPU);
    if (bytes == 0) return {nullptr, nullptr, &release, where};
    use();
    const Locked locked(device_lock());
    free_what_is_passed(false);
    void* address = nullptr;
    TORCH_CHECK(posix_memalign(&address, 4096, bytes) == 0, "no memory to pin");
    blocks_[static_cast<char*>(address)] = {bytes, {}, false};
    return {address, address, &release, where};
  }

  // Called by torch's own copies; ours use `used_by`.
  bool record_event(void* address, void*, c10::Stream stream) override {
    return used_by(address, stream);
  }

  bool used_by(const void* address, const c10::Stream& stream) {
    const Locked locked(device_lock());
    const auto found = block_around(address);
    if (found == blocks_.end()) return false;
    found->second.used_by.push_back(streams().now(stream));
    return true;
  }

  bool is_pinned(const void* address) {
    const Locked locked(device_lock());
    return block_around(address) != blocks_.end() || is_registered(address);
  }

  void register_range(char* address, size_t bytes) {
    use();
    const Locked locked(device_lock());
    TORCH_CHECK(!is_registered(address), "sim error: this host memory is registered already");
    registered_[address] = bytes;
  }

  void unregister(char* address) {
    for (int device = 0; device < device_count(); ++device) synchronize_device(device);
    const Locked locked(device_lock());
    TORCH_CHECK(registered_.erase(address) == 1, "sim error: this host memory is not registered");
  }

  void empty_cache() override {
    const Locked locked(device_lock());
    free_what_is_passed(true);
  }

  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  struct HostBlock {
    size_t bytes;
    std::vector<Point> used_by;
    bool freed;
  };
  using Blocks = std::map<char*, HostBlock>;

  static void release(void* address);

  Blocks::iterator block_around(const void* address) {
    auto found = blocks_.upper_bound(static_cast<char*>(const_cast<void*>(address)));
    if (found == blocks_.begin()) return blocks_.end();
    --found;
    return static_cast<const char*>(address) < found->first + found->second.bytes ? found
                                                                                   : blocks_.end();
  }

  bool is_registered(const void* address) {
    auto found = registered_.upper_bound(static_cast<char*>(const_cast<void*>(address)));
    if (found == registered_.begin()) return false;
    --found;
    return static_cast<const char*>(address) < found->first + found->second;
  }

  void free_what_is_passed(bool wait) {
    for (auto at = blocks_.begin(); at != blocks_.end();) {
      bool reached = at->second.freed;
      for (const Point& point : at->second.used_by) {
        if (!reached) break;
        if (wait) streams().run_until(point);
        reached = streams().reached(point);
      }
      if (reached) std::free(at->first);
      at = reached ? blocks_.erase(at) : std::next(at);
    }
  }

  Blocks blocks_;
  std::map<char*, size_t> registered_;
};

inline PinnedAllocator& pinned() {
  static auto* made = new PinnedAllocator();
  return *made;
}

inline void PinnedAllocator::release(void* address) {
  if (address == nullptr || in_bad_fork()) return;
  const Locked locked(device_lock());
  pinned().blocks_.at(static_cast<char*>(address)).freed = true;
  pinned().free_what_is_passed(false);
}

}  // namespace sim
