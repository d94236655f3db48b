// Draws the random numbers of a device.
//
// Kernels are the CPU's, so each generator has a CPU generator within; the same seed gives the
// same numbers as on the CPU.  Making and seeding a generator does not use the device.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>

#include "pinned.h"

namespace sim {

class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(int device, at::Generator within = at::detail::createCPUGenerator())
      : GeneratorImpl(
            c10::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(device)),
            c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        within_(std::move(within)) {}

  const at::Generator& within() const { return within_; }

  void set_current_seed(uint64_t seed) override { within_.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { within_.set_offset(offset); }
  uint64_t get_offset() const override { return within_.get_offset(); }
  uint64_t current_seed() const override { return within_.current_seed(); }
  uint64_t seed() override { return within_.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    within_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return within_.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  Generator* clone_impl() const override { return new Generator(device_.index(), within_.clone()); }

  at::Generator within_;
};

inline at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<Generator>(device < 0 ? current_device() : device);
}

inline const at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (int i = 0; i < kMaxDevices; ++i) {
      made->push_back(new_generator(static_cast<c10::DeviceIndex>(i)));
    }
    return made;
  }();
  return all->at(static_cast<size_t>(checked_device(device)));
}

// Returns the CPU generator to draw from; without one given, that of the device's default.
inline at::Generator cpu_generator(const std::optional<at::Generator>& given, int device) {
  const at::Generator& drawn = given && given->defined() ? *given : default_generator(device);
  TORCH_CHECK(
      drawn.device().type() == c10::kPrivateUse1,
      "Expected a 'sim' device type for generator but found '", drawn.device().type(), "'");
  return static_cast<Generator*>(drawn.unsafeGetGeneratorImpl())->within();
}

// While one exists, kernels that ask for the CPU's default generator draw from another one.
class DefaultReplaced {
 public:
  explicit DefaultReplaced(const at::Generator& drawn) : drawn_(drawn) { swap(); }
  ~DefaultReplaced() { swap(); }
  DefaultReplaced(const DefaultReplaced&) = delete;
  DefaultReplaced& operator=(const DefaultReplaced&) = delete;

 private:
  void swap() {
    at::Generator own = at::detail::getDefaultCPUGenerator();
    const std::scoped_lock locked(own.mutex(), drawn_.mutex());
    auto* a = own.get<at::CPUGeneratorImpl>();
    auto* b = drawn_.get<at::CPUGeneratorImpl>();
    const auto engine = a->engine();
    const auto next_float = a->next_float_normal_sample();
    const auto next_double = a->next_double_normal_sample();
    a->set_engine(b->engine());
    a->set_next_float_normal_sample(b->next_float_normal_sample());
    a->set_next_double_normal_sample(b->next_double_normal_sample());
    b->set_engine(engine);
    b->set_next_float_normal_sample(next_float);
    b->set_next_double_normal_sample(next_double);
  }

  at::Generator drawn_;
};

}  // namespace sim
