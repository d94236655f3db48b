// Copies between the host and devices, and from device to device.
//
// As on CUDA, the host goes on during a copy only if it asked for that (`non_blocking`), the host
// memory is pinned, and no conversion is needed.  A copy between devices runs after the work of
// both, and both go on after it.
#pragma once

#include "aliases.h"

namespace sim {

inline bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.dtype() == b.dtype() && a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg() &&
      a.sizes() == b.sizes() && a.strides() == b.strides() &&
      a.is_non_overlapping_and_dense();
}

inline bool may_run_later(const at::Tensor& host, const at::Tensor& device, bool non_blocking) {
  return non_blocking && same_layout(host, device) &&
      pinned().is_pinned(host.storage().data_ptr().get());
}

// Copies raw bytes later; the pinned block stays until then.
inline void copy_later(const at::Tensor& host, const at::Tensor& device, bool to_device) {
  check_reach(device);
  char* there = memory().twin(device.data_ptr());
  char* here = static_cast<char*>(host.data_ptr());
  const size_t bytes = host.nbytes();
  const int index = device.device().index();
  issue(index, [=] { std::memcpy(to_device ? there : here, to_device ? here : there, bytes); });
  pinned().used_by(here, current_stream(index));
}

inline void copy_with_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const bool to_device = on_device(to);
  const at::Tensor& host = to_device ? from : to;
  const at::Tensor& device = to_device ? to : from;
  if (may_run_later(host, device, non_blocking)) return copy_later(host, device, to_device);
  Aliases aliases;
  at::Tensor alias = aliases.of(device);
  compute_now(device.device().index(), [&] {
    (to_device ? alias : to).copy_(to_device ? from : alias);
  });
}

inline void copy_between(const at::Tensor& from, const at::Tensor& to) {
  Aliases aliases;
  const at::Tensor source = aliases.of(from), target = aliases.of(to);
  const int here = from.device().index(), there = to.device().index();
  const Locked locked(device_lock());
  const auto reads = current_stream(here), writes = current_stream(there);
  streams().wait_for(reads, streams().now(writes));
  streams().issue(reads, [source, target] {
    const PlainKernels plain;
    target.copy_(source);
  });
  streams().wait_for(writes, streams().now(reads));
}

inline at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  if (on_device(from) && on_device(to)) {
    copy_between(from, to);
  } else {
    copy_with_host(from, to, non_blocking);
  }
  return to;
}

// Makes a device's tensor of a result that the CPU computed.
inline at::Tensor onto_device(int device, at::Tensor computed) {
  if (!computed.defined()) return computed;
  TORCH_CHECK(computed.layout() == c10::kStrided, "sim has strided tensors only");
  computed = computed.resolve_conj().resolve_neg();
  if (!computed.is_non_overlapping_and_dense()) computed = computed.contiguous();
  at::Tensor made =
      empty_on(device, computed.sizes(), computed.strides(), computed.scalar_type());
  if (computed.numel() == 0) return made;
  Aliases aliases;
  issue(device, [target = aliases.of(made), computed] {
    const PlainKernels plain;
    target.copy_(computed);
  });
  return made;
}

}  // namespace sim
