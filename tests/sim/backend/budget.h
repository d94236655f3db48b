// Counts the bytes that all processes of a host hold of each device.
//
// Each process owns a slot of a table in a file, and a lock on its slot for as long as it lives.
// The kernel drops the lock of a process that is killed, and its bytes are free again.  Locks of
// an open file description hold across PID namespaces, where process ids say nothing.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <mutex>

#include "memory.h"

namespace sim {

class Budget {
 public:
  Budget() {
    if (!settings().home.empty()) open_table();
    if (table_ == nullptr) table_ = new Table();  // a budget of this process alone
    take_slot();
    fork_rule().in_child = [] {  // or the child's descriptor would keep the slot alive
      if (open_file() >= 0) close(open_file());
    };
  }

  // Takes `bytes` of a visible device; false if they are not there.
  bool take(int device, uint64_t bytes) {
    const auto held = lock();
    if (used_by_all(device) + bytes > settings().memory_bytes) return false;
    mine(device) += bytes;
    return true;
  }

  void give_back(int device, uint64_t bytes) {
    const auto held = lock();
    mine(device) -= bytes;
  }

  uint64_t free_bytes(int device) {
    const auto held = lock();
    const uint64_t used = used_by_all(device);
    return used < settings().memory_bytes ? settings().memory_bytes - used : 0;
  }

 private:
  static constexpr int kSlots = 512;
  static constexpr off_t kLockOfTable = kSlots;  // one byte after those of the slots
  struct Table {
    uint64_t used[kSlots][kMaxDevices] = {};
  };

  // Holds the table's lock until it goes out of scope.
  struct Held {
    explicit Held(Budget& budget) : budget(budget), threads(budget.threads_) {
      budget.lock_byte(F_OFD_SETLKW, F_WRLCK, kLockOfTable);
    }
    ~Held() { budget.lock_byte(F_OFD_SETLKW, F_UNLCK, kLockOfTable); }
    Budget& budget;
    std::lock_guard<std::mutex> threads;
  };
  Held lock() { return Held(*this); }

  static int& open_file() {
    static int file = -1;
    return file;
  }

  void open_table() {
    const std::string path = settings().home + "/budget";
    const int file = opened(path);
    fchmod(file, 0666);  // residents have users of their own; only the owner may, and needs to
    TORCH_CHECK(
        ftruncate(file, sizeof(Table)) == 0, "cannot size ", path, ": ", std::strerror(errno));
    void* at = mmap(nullptr, sizeof(Table), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    TORCH_CHECK(at != MAP_FAILED, "cannot map ", path, ": ", std::strerror(errno));
    close(file);
    table_ = static_cast<Table*>(at);
    // Opened once more for the locks: a fork keeps the mapping, and with it what was mapped.
    open_file() = opened(path);
  }

  static int opened(const std::string& path) {
    const int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    TORCH_CHECK(file >= 0, "cannot open ", path, ": ", std::strerror(errno));
    return file;
  }

  bool lock_byte(int how, short kind, off_t at) {
    if (open_file() < 0) return true;
    struct flock wanted = {};
    wanted.l_type = kind;
    wanted.l_whence = SEEK_SET;
    wanted.l_start = at;
    wanted.l_len = 1;
    int answer = 0;
    do {
      answer = fcntl(open_file(), how, &wanted);
    } while (answer != 0 && errno == EINTR);
    return answer == 0;
  }

  void take_slot() {
    const auto held = lock();
    for (slot_ = 0; slot_ < kSlots; ++slot_) {
      if (lock_byte(F_OFD_SETLK, F_WRLCK, slot_)) break;
    }
    TORCH_CHECK(slot_ < kSlots, "too many processes use the simulated accelerator");
    std::memset(table_->used[slot_], 0, sizeof(table_->used[slot_]));
  }

  bool is_alive(int slot) {
    if (slot == slot_) return true;
    struct flock asked = {};
    asked.l_type = F_WRLCK;
    asked.l_whence = SEEK_SET;
    asked.l_start = slot;
    asked.l_len = 1;
    return fcntl(open_file(), F_OFD_GETLK, &asked) == 0 && asked.l_type != F_UNLCK;
  }

  uint64_t& mine(int device) { return table_->used[slot_][settings().physical[device]]; }

  uint64_t used_by_all(int device) {
    const int physical = settings().physical[device];
    uint64_t sum = 0;
    for (int slot = 0; slot < kSlots; ++slot) {
      const uint64_t used = table_->used[slot][physical];
      if (used != 0 && is_alive(slot)) sum += used;
    }
    return sum;
  }

  Table* table_ = nullptr;
  int slot_ = 0;
  std::mutex threads_;
};

inline Budget& budget() {
  static auto* made = new Budget();
  return *made;
}

// Marks the first use of a device by this process.
inline void use() {
  refuse_in_bad_fork();
  static std::once_flag once;
  std::call_once(once, [] {
    TORCH_CHECK(device_count() > 0, "No sim devices are available");
    memory();
    budget();
    fork_rule().used = true;
    for (int device = 0; device < device_count(); ++device) {
      TORCH_CHECK_WITH(
          OutOfMemoryError,
          budget().take(device, settings().context_bytes),
          "sim out of memory. No room for this process's context on device ",
          device);
    }
  });
}

}  // namespace sim
