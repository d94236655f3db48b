// Reads the settings of the simulated accelerator from the environment, once, at first need.
#pragma once

#include <ATen/ATen.h>

#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

namespace sim {

constexpr int kMaxDevices = 8;

enum class Mode { eager, lazy, random };

inline std::string variable(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : otherwise;
}

struct Settings {
  Mode mode;
  uint64_t seed;               // of the dice of mode `random`
  uint64_t memory_bytes;       // of each device, for all processes together
  uint64_t context_bytes;      // that a process takes of each device by its first use
  std::string home;            // folder of the budget; "": this process has a budget of its own
  std::vector<int> physical;   // number of a visible device -> its number on the host
};

inline Mode mode_named(const std::string& name) {
  if (name == "eager") return Mode::eager;
  if (name == "random") return Mode::random;
  TORCH_CHECK(name == "lazy", "SIM_MODE must be eager, lazy or random, not '", name, "'");
  return Mode::lazy;
}

// As CUDA reads CUDA_VISIBLE_DEVICES: the first number that names no device ends the list.
inline std::vector<int> visible_of(int devices) {
  std::vector<int> found;
  const char* value = std::getenv("SIM_VISIBLE_DEVICES");
  if (value == nullptr) {
    for (int i = 0; i < devices; ++i) found.push_back(i);
    return found;
  }
  std::stringstream given(value);
  for (std::string part; std::getline(given, part, ',');) {
    char* end = nullptr;
    const long number = std::strtol(part.c_str(), &end, 10);
    if (end == part.c_str() || number < 0 || number >= devices) break;
    found.push_back(static_cast<int>(number));
  }
  return found;
}

inline Settings& mutable_settings() {
  static Settings* read = [] {
    const int devices =
        std::min(kMaxDevices, std::max(0, std::atoi(variable("SIM_DEVICES", "1").c_str())));
    return new Settings{
        mode_named(variable("SIM_MODE", "lazy")),
        std::strtoull(variable("SIM_SEED", "0").c_str(), nullptr, 10),
        std::strtoull(variable("SIM_MEMORY_BYTES", "4294967296").c_str(), nullptr, 10),
        std::strtoull(variable("SIM_CONTEXT_BYTES", "0").c_str(), nullptr, 10),
        variable("SIM_HOME", ""),
        visible_of(devices)};
  }();
  return *read;
}

inline const Settings& settings() { return mutable_settings(); }

inline int device_count() { return static_cast<int>(settings().physical.size()); }

}  // namespace sim
