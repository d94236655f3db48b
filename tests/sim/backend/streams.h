// Runs the work of streams without threads.
//
// A stream is a queue.  Mode `eager` runs work as it is issued.  Mode `lazy` runs work only when
// somebody waits for it, on the thread that waits: a forgotten wait then gives wrong bytes every
// time, not once in a thousand runs.  Mode `random` throws dice, from a seed.
//
// Work that waits for an event of another stream first runs that stream as far as the event.
// Events are recorded before they are waited for, so there are no circles.
#pragma once

#include <c10/core/Stream.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <chrono>
#include <deque>
#include <map>
#include <mutex>
#include <random>

#include "budget.h"

namespace sim {

using Clock = std::chrono::steady_clock;

// One lock for all queues and allocators.  It is never held while anything of Python's is
// dropped, because dropping such a thing waits for the interpreter's lock.
inline std::recursive_mutex& device_lock() {
  static auto* lock = new std::recursive_mutex();
  return *lock;
}
using Locked = std::lock_guard<std::recursive_mutex>;

// A point in a stream: all work issued before it.
struct Point {
  int device = 0;
  c10::StreamId stream = 0;
  uint64_t issued = 0;
};

class Queue {
 public:
  uint64_t issued() const { return issued_; }
  bool reached(uint64_t point) const { return done_ >= point; }

  void add(std::function<void()> work) {
    work_.push_back(std::move(work));
    ++issued_;
  }

  void run_one() {
    auto work = std::move(work_.front());
    work_.pop_front();
    ++done_;  // even if it fails: the error belongs to whoever waits now, not to the next too
    work();
  }

  void run_until(uint64_t point) {
    while (!reached(point)) run_one();
  }

 private:
  std::deque<std::function<void()>> work_;
  uint64_t issued_ = 0, done_ = 0;
};

class Streams {
 public:
  static constexpr int kPool = 32;          // as many as CUDA takes in turn
  static constexpr uint64_t kLongest = 1024;  // then issuing waits, as a driver's queue does

  Queue& of(int device, c10::StreamId stream) { return queues_[{device, stream}]; }

  Point now(const c10::Stream& stream) {
    return {stream.device_index(), stream.id(), of(stream.device_index(), stream.id()).issued()};
  }

  bool reached(const Point& point) { return of(point.device, point.stream).reached(point.issued); }
  void run_until(const Point& point) { of(point.device, point.stream).run_until(point.issued); }

  void issue(const c10::Stream& stream, std::function<void()> work) {
    Queue& queue = of(stream.device_index(), stream.id());
    queue.add(std::move(work));
    switch (settings().mode) {
      case Mode::eager:
        queue.run_until(queue.issued());
        break;
      case Mode::lazy:
        if (queue.issued() > kLongest) queue.run_until(queue.issued() - kLongest);
        break;
      case Mode::random:
        throw_dice();
        break;
    }
  }

  void wait_for(const c10::Stream& stream, const Point& point) {
    if (point.device == stream.device_index() && point.stream == stream.id()) return;
    if (reached(point)) return;
    issue(stream, [this, point] { run_until(point); });
  }

  void run_device(int device) {
    for (auto& [key, queue] : queues_) {
      if (key.first == device) queue.run_until(queue.issued());
    }
  }

  void reseed(uint64_t seed) { dice_.seed(seed); }

  // Time passes for a host that asks again and again whether a point is reached.
  bool reached_meanwhile(const Point& point) {
    Queue& queue = of(point.device, point.stream);
    if (!queue.reached(point.issued)) {
      queue.run_one();
      return false;
    }
    return true;
  }

 private:
  void throw_dice() {
    for (auto& [key, queue] : queues_) {
      const uint64_t waiting = dice_() % 4 == 0 ? dice_() % 8 : 0;
      for (uint64_t i = 0; i < waiting && !queue.reached(queue.issued()); ++i) queue.run_one();
    }
  }

  std::map<std::pair<int, c10::StreamId>, Queue> queues_;
  std::mt19937_64 dice_{settings().seed};
};

inline Streams& streams() {
  static auto* made = new Streams();
  return *made;
}

// --- what is current on a thread ------------------------------------------------------------------

inline int& current_device() {
  thread_local int device = 0;
  return device;
}

inline c10::StreamId& current_stream_id(int device) {
  thread_local std::array<c10::StreamId, kMaxDevices> ids{};
  return ids[device];
}

inline c10::Stream stream_of(int device, c10::StreamId id) {
  return c10::Stream(
      c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(device)),
      id);
}

inline c10::Stream current_stream(int device) {
  return stream_of(device, current_stream_id(device));
}

inline int checked_device(int device) {
  if (device < 0) device = current_device();
  TORCH_CHECK(
      device < device_count(),
      "sim error: invalid device ordinal ", device, "; ", device_count(), " are visible");
  return device;
}

inline void synchronize_device(int device) {
  const Locked locked(device_lock());
  streams().run_device(device);
}

inline void synchronize_stream(const c10::Stream& stream) {
  const Locked locked(device_lock());
  streams().run_until(streams().now(stream));
}

// Runs all that is queued, then goes on in another mode.
inline void set_mode(const std::string& name, int64_t seed) {
  const Locked locked(device_lock());
  for (int device = 0; device < device_count(); ++device) streams().run_device(device);
  mutable_settings().mode = mode_named(name);
  streams().reseed(static_cast<uint64_t>(seed));
}

// --- events ---------------------------------------------------------------------------------------

// One recording of an event; recording again makes another one.
struct Event {
  Point point;
  std::shared_ptr<Clock::time_point> reached_at = std::make_shared<Clock::time_point>();
};

inline void record(Event& event, const c10::Stream& stream) {
  const Locked locked(device_lock());
  event.reached_at = std::make_shared<Clock::time_point>();
  streams().issue(stream, [at = event.reached_at] { *at = Clock::now(); });
  event.point = streams().now(stream);
}

}  // namespace sim
