// Runs every operation that has no kernel of its own: by the CPU's kernel, on aliases.
//
// An operation that only writes to its arguments (`add_`, `add.out`, and nearly every structured
// operation arrives so) goes into the queue of the stream.  One that makes its results itself
// waits for the stream, as its results' sizes are known only afterwards.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/op_registration/op_registration.h>
#include <torch/library.h>

#include "copies.h"

namespace sim {

using Values = std::vector<c10::IValue>;

// What the arguments of one call say about where it runs.
class Place {
 public:
  void see(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    if (on_device(tensor)) {
      see(tensor.device());
    } else if (tensor.dim() > 0) {
      host_ = true;
    }
  }

  void see(const c10::Device& device) {
    const int index = checked_device(device.index());
    if (device_ >= 0 && device_ != index) refuse(std::to_string(index));
    device_ = index;
  }

  int device() const {
    TORCH_INTERNAL_ASSERT(device_ >= 0, "an operation without a tensor of sim");
    if (host_) refuse("");
    return device_;
  }

 private:
  void refuse(const std::string& other) const {
    TORCH_CHECK(
        false, "Expected all tensors to be on the same device, but found at least two devices, ",
        other.empty() ? "cpu" : "sim:" + other, " and sim:", device_, "!");
  }

  int device_ = -1;
  bool host_ = false;
};

inline Place place_of(const Values& arguments) {
  Place place;
  for (const auto& value : arguments) {
    if (value.isTensor()) {
      place.see(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) place.see(tensor);
    } else if (value.isOptionalTensorList()) {  // indices may lie on the host, as with CUDA
      for (const auto& item : value.toListRef()) {
        if (item.isTensor() && on_device(item.toTensor())) place.see(item.toTensor());
      }
    } else if (value.isDevice() && value.toDevice().type() == c10::kPrivateUse1) {
      place.see(value.toDevice());
    }
  }
  return place;
}

// The same call with CPU tensors.
class CpuCall {
 public:
  CpuCall(const c10::FunctionSchema& schema, const Values& arguments, int device)
      : device_(device) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      values.push_back(translated(schema.arguments()[i], arguments[i]));
    }
  }

  Values values;
  bool takes_generator = false;
  // Empty outputs that the CPU's kernel sizes, and their tensors on the device.
  std::vector<std::pair<at::Tensor, at::Tensor>> to_be_sized;

 private:
  c10::IValue translated(const c10::Argument& argument, const c10::IValue& value) {
    if (value.isTensor()) return tensor(argument, value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& item : value.toTensorVector()) list.push_back(of(item));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& item : value.toListRef()) {
        list.push_back(item.isTensor() ? std::optional(of(item.toTensor())) : std::nullopt);
      }
      return list;
    }
    if (value.isDevice()) return c10::Device(c10::kCPU);
    if (is_generator(argument)) {
      takes_generator = true;
      return cpu_generator(
          value.isNone() ? std::nullopt : std::optional(value.toGenerator()), device_);
    }
    return value;
  }

  static bool is_generator(const c10::Argument& argument) {
    const auto optional = argument.type()->cast<c10::OptionalType>();
    const auto type = optional == nullptr ? argument.type() : optional->getElementType();
    return type->kind() == c10::TypeKind::GeneratorType;
  }

  at::Tensor tensor(const c10::Argument& argument, const at::Tensor& given) {
    if (on_device(given) && given.numel() == 0 && argument.is_out()) {
      at::Tensor unsized = at::empty({0}, at::device(at::kCPU).dtype(given.dtype()));
      to_be_sized.emplace_back(unsized, given);
      return unsized;
    }
    return of(given);
  }

  at::Tensor of(const at::Tensor& given) {
    if (!given.defined()) return given;
    return on_device(given) ? aliases_.of(given) : taken(given);
  }

  Aliases aliases_;
  int device_;
};

inline bool writes(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// Whether the call gives back nothing but arguments that it has written to.
inline bool only_writes(const c10::FunctionSchema& schema) {
  for (const auto& made : schema.returns()) {
    TORCH_CHECK(
        made.alias_info() == nullptr || made.alias_info()->isWrite(), "sim has no kernel for ",
        schema.operator_name(), ", which gives a view");
    if (!writes(made)) return false;
  }
  return std::any_of(schema.arguments().begin(), schema.arguments().end(), writes);
}

// The arguments that a call which only writes gives back.
inline Values written(const c10::FunctionSchema& schema, const Values& arguments) {
  Values found;
  for (const auto& made : schema.returns()) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto* info = schema.arguments()[i].alias_info();
      if (info != nullptr && *info == *made.alias_info()) {
        found.push_back(arguments[i]);
        break;
      }
    }
  }
  TORCH_INTERNAL_ASSERT(found.size() == schema.returns().size());
  return found;
}

inline void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

inline bool draws(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::nondeterministic_seeded);
}

// Draws into a tensor of the host now, in the order of the program, and copies later.  So a
// stream's work does not wait for dropout and the like, and numbers do not depend on the mode.
inline bool drawn_ahead(
    const c10::OperatorHandle& op, const Values& arguments, const CpuCall& call, int device) {
  size_t tensors = 0;
  for (const auto& value : arguments) tensors += value.isTensor() ? 1 : 0;
  const auto& self = call.values.front();
  if (tensors != 1 || !self.isTensor() || self.toTensor().numel() == 0) return false;
  const at::Tensor target = self.toTensor();
  const PlainKernels plain;
  std::optional<DefaultReplaced> replaced;
  if (!call.takes_generator) replaced.emplace(cpu_generator(std::nullopt, device));
  at::Tensor numbers = at::empty_strided(target.sizes(), target.strides(), target.options());
  torch::jit::Stack stack = call.values;
  stack.front() = numbers;
  on_cpu(op, stack);
  issue(device, [target, numbers] {
    const PlainKernels within;
    target.copy_(numbers);
  });
  return true;
}

inline c10::IValue onto_device(int device, const c10::IValue& value) {
  if (value.isTensor()) return onto_device(device, value.toTensor());
  if (!value.isTensorList()) return value;
  c10::List<at::Tensor> list;
  for (const at::Tensor& item : value.toTensorVector()) list.push_back(onto_device(device, item));
  return list;
}

inline Values run_now(const c10::OperatorHandle& op, CpuCall& call, int device) {
  torch::jit::Stack stack = call.values;
  compute_now(device, [&] {
    std::optional<DefaultReplaced> replaced;
    if (draws(op) && !call.takes_generator) replaced.emplace(cpu_generator(std::nullopt, device));
    on_cpu(op, stack);
    return 0;
  });
  for (auto& [sized, target] : call.to_be_sized) {
    target.resize_(sized.sizes());
    target.copy_(sized);
  }
  return stack;
}

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  const Values arguments(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  const int device = place_of(arguments).device();
  use();
  const bool writes_only = only_writes(schema);
  CpuCall call(schema, arguments, device);
  Values results;
  if (!writes_only || !call.to_be_sized.empty()) {
    results = run_now(op, call, device);
  } else if (draws(op)) {
    if (!drawn_ahead(op, arguments, call, device)) run_now(op, call, device);
  } else {
    issue(device, [op, values = std::move(call.values)]() mutable {
      const PlainKernels plain;
      torch::jit::Stack later = std::move(values);
      on_cpu(op, later);
    });
  }
  if (writes_only) {
    results = written(schema, arguments);
  } else {
    for (auto& value : results) value = onto_device(device, value);
  }
  torch::jit::drop(*stack, count);
  for (auto& value : results) torch::jit::push(*stack, std::move(value));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace sim
