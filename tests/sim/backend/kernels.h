// Holds the operations that the fallback cannot take: those that make tensors, change what a
// tensor reaches, or would be computed in another way than on the CPU.
#pragma once

#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>

#include "fallback.h"

namespace sim {

// --- tensors --------------------------------------------------------------------------------------

inline int index_of(const std::optional<at::Device>& device) {
  return checked_device(device && device->has_index() ? device->index() : -1);
}

inline at::Tensor filled_if_deterministic(at::Tensor made) {
  const auto& context = at::globalContext();
  if (context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory()) {
    at::native::fill_empty_deterministic_(made);
  }
  return made;
}

inline at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  use();
  const c10::DeviceGuard guard(
      c10::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(index_of(device))));
  return filled_if_deterministic(at::detail::empty_generic(
      size, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(type), format));
}

inline at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> type,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  use();
  return filled_if_deterministic(
      empty_on(index_of(device), size, stride, c10::dtype_or_default(type)));
}

// --- what a tensor reaches ------------------------------------------------------------------------

// Gives a storage another size; what fits is kept, in the order of the current stream.
inline void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  TORCH_CHECK(storage->resizable(), "Trying to resize storage that is not resizable");
  const int device = storage->device().index();
  auto data = allocator().allocate_on(device, bytes);
  const size_t kept = std::min(bytes, storage->nbytes());
  if (kept > 0) {
    issue(device, [to = memory().twin(data.get()), from = memory().twin(storage->data()), kept] {
      std::memcpy(to, from, kept);
    });
  }
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

inline void make_reach(c10::TensorImpl* tensor, size_t bytes) {
  auto* storage = tensor->unsafe_storage().unsafeGetStorageImpl();
  if (tensor->numel() > 0 && bytes > storage->nbytes()) resize_storage(storage, bytes);
}

inline const at::Tensor& resize(
    const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    impl->set_sizes_contiguous(size);
    make_reach(
        impl,
        at::detail::computeStorageNbytesContiguous(
            size, self.itemsize(), static_cast<size_t>(self.storage_offset())));
  }
  if (format) impl->empty_tensor_restride(*format);
  return self;
}

inline at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
    at::IntArrayRef stride) {
  at::native::checkSetStorage(self, std::move(source), offset, size, stride);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  if (stride.data() != nullptr) {
    impl->set_sizes_and_strides(size, stride);
  } else {
    impl->set_sizes_contiguous(size);
  }
  make_reach(
      impl,
      at::detail::computeStorageNbytes(
          self.sizes(), self.strides(), self.itemsize(), static_cast<size_t>(offset)));
  return self;
}

inline at::Tensor& set_to_storage(at::Tensor& self, at::Storage source) {
  const auto elements = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, elements, {});
}

inline at::Tensor& set_to_nothing(at::Tensor& self) {
  c10::Storage none(
      c10::Storage::use_byte_size_t(), 0,
      allocator().allocate_on(self.device().index(), 0), &allocator(), true);
  return set_storage(self, std::move(none), 0, 0, {});
}

// Without this, `module.to` and `.data =` between host and device make new parameters.
inline bool may_share_data(const at::Tensor& a, const at::Tensor& b) {
  return a.layout() == c10::kStrided && b.layout() == c10::kStrided;
}

inline void record_stream(at::Tensor& self, c10::Stream stream) {
  allocator().recordStream(self.storage().data_ptr(), stream);
}

// --- what would otherwise be computed in another way ----------------------------------------------

inline at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups) {
  Aliases of;
  const at::Tensor x = of.of(input), w = of.of(weight);
  const auto b = bias && bias->defined() ? std::optional(of.of(*bias)) : std::nullopt;
  const int device = input.device().index();
  return onto_device(device, compute_now(device, [&] {
    return at::convolution(
        x, w, b, stride, padding, dilation, transposed, output_padding, groups);
  }));
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight,
    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> wanted) {
  Aliases of;
  const at::Tensor g = of.of(gradient), x = of.of(input), w = of.of(weight);
  const std::vector<int64_t> bias{transposed ? weight.size(1) * groups : weight.size(0)};
  const int device = input.device().index();
  auto [dx, dw, db] = compute_now(device, [&] {
    return at::convolution_backward(
        g, x, w, bias, stride, padding, dilation, transposed, output_padding, groups, wanted);
  });
  return {onto_device(device, dx), onto_device(device, dw), onto_device(device, db)};
}

// Attention by plain operations; the CPU's fused kernel has a name of its own for the CPU.
inline int64_t sdp_choice(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
    double, bool, std::optional<double>, bool) {
  return 0;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_to_storage);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_", &set_to_nothing);
  m.impl("view", &at::native::view);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("_has_compatible_shallow_copy_type", &may_share_data);
  m.impl("record_stream", &record_stream);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("_fused_sdp_choice", &sdp_choice);
  m.impl("_copy_from", [](const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
    return copy_from(from, to, non_blocking);
  });
  m.impl("_copy_from_and_resize", [](const at::Tensor& from, const at::Tensor& to) {
    to.resize_(from.sizes());
    return copy_from(from, to, false);
  });
  // Torch has kernels made of other operations for these, which round in another way than the
  // CPU's own; they would come before the fallback.
  for (const char* name :
       {"native_layer_norm", "native_layer_norm_backward", "native_group_norm",
        "native_group_norm_backward", "_stack", "_stack.out", "addr", "addr.out", "all.dims",
        "any.dims", "all.dims_out", "any.dims_out", "linalg__powsum"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

// A copy resolves a lazy conjugate itself; resolving it first would copy again without end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace sim
