// Gives devices memory that the host cannot touch.
//
// The addresses that tensors carry lie in a mapping without any access, so a host that reads
// `data_ptr()` dies of SIGSEGV, as on a real accelerator.  Kernels reach the bytes by adding a
// constant to the address: the twin.  Nothing is ever unprotected, so nothing can race.
//
// The twin is shared memory: the kernel then counts it apart from the process's own pages.
#pragma once

#include <sys/mman.h>

#include "fork_rule.h"

namespace sim {

constexpr size_t kSpace = size_t{64} << 30;  // addresses of one device, not its bytes

class Memory {
 public:
  Memory() {
    const size_t all = kSpace * std::max(1, device_count());
    begin_ = map(all, PROT_NONE, MAP_PRIVATE);
    twin_ = map(all, PROT_READ | PROT_WRITE, MAP_SHARED);
    size_ = all;
    // A fork must not hold on to a device's bytes after their process has ended.
    madvise(twin_, all, MADV_DONTFORK);
    madvise(twin_, all, MADV_DONTDUMP);
  }

  char* begin(int device) const { return begin_ + kSpace * device; }

  bool contains(const void* address) const {
    const auto* at = static_cast<const char*>(address);
    return at >= begin_ && at < begin_ + size_;
  }

  bool contains_twin(const void* address) const {
    const auto* at = static_cast<const char*>(address);
    return at >= twin_ && at < twin_ + size_;
  }

  char* twin(const void* address) const {
    return twin_ + (static_cast<const char*>(address) - begin_);
  }

  // Gives the pages back to the host; what is read there next is zero.
  void give_back(void* address, size_t bytes) const {
    madvise(twin(address), bytes, MADV_REMOVE);
  }

 private:
  static char* map(size_t bytes, int protection, int sharing) {
    void* at = mmap(nullptr, bytes, protection, sharing | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(at != MAP_FAILED, "no address space for the simulated accelerator");
    return static_cast<char*>(at);
  }

  char* begin_ = nullptr;
  char* twin_ = nullptr;
  size_t size_ = 0;
};

inline Memory& memory() {
  static auto* made = new Memory();
  return *made;
}

}  // namespace sim
