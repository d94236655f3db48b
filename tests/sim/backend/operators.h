// Offers the Python module what torch's own interfaces do not: `torch.ops.sim`.
#pragma once

#include "hooks.h"

namespace sim {

TORCH_LIBRARY(sim, m) {
  m.def("device_count() -> int", [] { return static_cast<int64_t>(device_count()); });
  m.def("use() -> ()", [] { use(); });
  m.def("is_used() -> bool", [] { return static_cast<bool>(fork_rule().used); });
  m.def("in_bad_fork() -> bool", [] { return in_bad_fork(); });
  m.def("physical(int device) -> int", [](int64_t device) {
    return static_cast<int64_t>(
        settings().physical.at(static_cast<size_t>(checked_device(static_cast<int>(device)))));
  });
  m.def("memory_bytes() -> int", [] { return static_cast<int64_t>(settings().memory_bytes); });
  m.def("set_mode(str mode, int seed) -> ()", [](std::string mode, int64_t seed) {
    set_mode(mode, seed);
  });
  m.def("default_generator(int device) -> Generator?", [](int64_t device) {
    return default_generator(static_cast<int>(device));
  });
  m.def("host_register(int address, int size) -> ()", [](int64_t address, int64_t size) {
    pinned().register_range(reinterpret_cast<char*>(address), static_cast<size_t>(size));
  });
  m.def("host_unregister(int address) -> ()", [](int64_t address) {
    pinned().unregister(reinterpret_cast<char*>(address));
  });
  m.def("set_memory_fraction(float fraction, int device) -> ()", [](double fraction, int64_t device) {
    allocator().set_cap(static_cast<int>(device), fraction);
  });
}

}  // namespace sim
