// Makes CPU tensors over the twin of a device's memory, with the same sizes, strides and offset.
//
// CPU kernels then read and write the device's own bytes: nothing is copied, so the results are
// the CPU's bit by bit.  An alias holds no tensor of the caller: work in a queue must never drop
// something of Python's.  The memory stays, because blocks are reused in the order of streams.
#pragma once

#include <ATen/EmptyTensor.h>
#include <c10/core/GradMode.h>

#include "generator.h"

namespace sim {

inline bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::kPrivateUse1;
}

inline void check_reach(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return;
  const size_t reach = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.itemsize(),
      static_cast<size_t>(tensor.storage_offset()));
  TORCH_CHECK(
      reach <= tensor.storage().nbytes(), "a tensor reaches over ", reach,
      " bytes of a storage of ", tensor.storage().nbytes());
}

// The aliases of one call: what shares a storage on the device shares one on the CPU.
class Aliases {
 public:
  at::Tensor of(const at::Tensor& tensor) {
    const auto* impl = tensor.unsafeGetTensorImpl();
    for (const auto& [known, alias] : tensors_) {
      if (known == impl) return alias;
    }
    TORCH_CHECK(tensor.layout() == c10::kStrided, "sim has strided tensors only");
    check_reach(tensor);
    auto alias = at::detail::make_tensor<c10::TensorImpl>(
        storage_of(tensor), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    auto* made = alias.unsafeGetTensorImpl();
    made->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (impl->is_wrapped_number()) made->set_wrapped_number(true);
    if (tensor.is_conj()) alias._set_conj(true);
    if (tensor.is_neg()) alias._set_neg(true);
    tensors_.emplace_back(impl, alias);
    return alias;
  }

 private:
  c10::Storage storage_of(const at::Tensor& tensor) {
    const auto& storage = tensor.storage();
    const auto* impl = storage.unsafeGetStorageImpl();
    for (const auto& [known, alias] : storages_) {
      if (known == impl) return alias;
    }
    void* address = storage.data_ptr().get();
    c10::Storage alias(
        c10::Storage::use_byte_size_t(), storage.nbytes(),
        c10::DataPtr(address == nullptr ? nullptr : memory().twin(address), c10::kCPU));
    storages_.emplace_back(impl, alias);
    return alias;
  }

  c10::SmallVector<std::pair<const c10::TensorImpl*, at::Tensor>, 8> tensors_;
  c10::SmallVector<std::pair<const c10::StorageImpl*, c10::Storage>, 8> storages_;
};

// Copies a tensor of the host as it is now: the host may change it before the work runs.
inline at::Tensor taken(const at::Tensor& tensor) {
  at::Tensor copy = tensor.detach().clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return copy;
}

// While one exists, this thread's operations reach the CPU's kernels and nothing else: work in a
// queue runs on any thread, in the middle of whatever that thread does.
class PlainKernels {
 public:
  PlainKernels()
      : keys_(
            c10::default_included_set,
            c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset) {}

 private:
  c10::impl::ForceDispatchKeyGuard keys_;
  c10::NoGradGuard no_grad_;
};

inline void issue(int device, std::function<void()> work) {
  const Locked locked(device_lock());
  streams().issue(current_stream(device), std::move(work));
}

// Waits for the current stream, and computes at once.
template <typename Compute>
auto compute_now(int device, Compute compute) {
  synchronize_stream(current_stream(device));
  const PlainKernels plain;
  return compute();
}

inline at::Tensor empty_on(
    int device, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type) {
  const c10::DeviceGuard guard(
      c10::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(device)));
  return at::detail::empty_strided_generic(
      sizes, strides, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
}

}  // namespace sim
