// Answers what torch asks of every accelerator: devices, streams, events, pinned memory.
#pragma once

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "autocast.h"

namespace sim {

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(device_count());
  }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    if (device.has_index()) setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(current_device())};
  }
  void setDevice(c10::Device device) const override {
    current_device() = checked_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device() = device.index();
  }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(checked_device(device.index()));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(checked_device(device.index()), 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<int> made{0};
    return stream_of(checked_device(device.index()), 1 + made++ % Streams::kPool);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int device = checked_device(stream.device_index());
    const c10::Stream before = current_stream(device);
    current_stream_id(device) = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    const Locked locked(device_lock());
    return streams().reached_meanwhile(streams().now(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize_stream(stream); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronize_device(checked_device(device));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    allocator().recordStream(data, stream);
  }

  void record(
      void** event, const c10::Stream& stream, const c10::DeviceIndex,
      const c10::EventFlag) const override {
    use();
    if (*event == nullptr) *event = new Event();
    sim::record(*static_cast<Event*>(*event), stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    const Locked locked(device_lock());
    streams().wait_for(stream, static_cast<Event*>(event)->point);
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    const Locked locked(device_lock());
    return streams().reached_meanwhile(static_cast<Event*>(event)->point);
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    const Locked locked(device_lock());
    streams().run_until(static_cast<Event*>(event)->point);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    const auto* begin = static_cast<Event*>(from);
    const auto* end = static_cast<Event*>(to);
    const Locked locked(device_lock());
    TORCH_CHECK(
        streams().reached(begin->point) && streams().reached(end->point),
        "Both events must be completed before calculating elapsed time.");
    return std::chrono::duration<double, std::milli>(*end->reached_at - *begin->reached_at)
        .count();
  }
};

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return fork_rule().used; }
  void init() const override { use(); }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(device_count());
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    current_device() = checked_device(device);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = getCurrentDevice();
    setCurrentDevice(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device);
  }
  at::Device getDeviceFromPtr(void* address) const override {
    TORCH_CHECK(fork_rule().used && memory().contains(address), "this is no address of sim");
    const auto offset = static_cast<size_t>(static_cast<char*>(address) - memory().begin(0));
    return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(offset / kSpace)};
  }
  bool isPinnedPtr(const void* address) const override { return pinned().is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Loading the backend makes nothing on a device, so that a process may load it and fork.
static const bool registered = [] {
  watch_forks();
  c10::SetAllocator(c10::kPrivateUse1, &allocator());
  at::setHostAllocator(c10::kPrivateUse1, &pinned());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace sim
