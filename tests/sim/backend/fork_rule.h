// Keeps CUDA's rule: a process that has used a device passes nothing of it to its forks.
//
// A fork made before the first use is free to use devices, as the zygote's residents do.
#pragma once

#include <pthread.h>

#include <atomic>
#include <functional>

#include "settings.h"

namespace sim {

struct ForkRule {
  std::atomic<bool> used{false};
  std::atomic<bool> forked_after_use{false};
  // Runs in the child; it may only make system calls.
  void (*in_child)() = nullptr;
};

inline ForkRule& fork_rule() {
  static auto* rule = new ForkRule();
  return *rule;
}

inline void watch_forks() {
  pthread_atfork(nullptr, nullptr, [] {
    if (!fork_rule().used) return;
    fork_rule().forked_after_use = true;
    if (fork_rule().in_child != nullptr) fork_rule().in_child();
  });
}

inline bool in_bad_fork() { return fork_rule().forked_after_use; }

inline void refuse_in_bad_fork() {
  TORCH_CHECK(
      !in_bad_fork(),
      "Cannot re-initialize sim in forked subprocess. To use sim with multiprocessing, you must "
      "use the 'spawn' start method");
}

}  // namespace sim
