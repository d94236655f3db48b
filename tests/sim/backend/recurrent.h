// Computes LSTM and GRU by the operations, and in the order, of the CPU's plain kernels.
//
// Torch sends these to fused cells on every accelerator.  Fused cells add biases and gradients in
// another order, so their bits would differ.  Packed sequences and projections are missing.
#pragma once

#include "kernels.h"

namespace sim {

struct Weights {
  at::Tensor ih, hh, bias_ih, bias_hh;
};

inline std::vector<Weights> weights_of(at::TensorList given, bool has_biases, int64_t cells) {
  const size_t each = has_biases ? 4 : 2;
  TORCH_CHECK(
      given.size() == each * static_cast<size_t>(cells), "sim has no recurrent projections");
  std::vector<Weights> found;
  for (size_t i = 0; i < given.size(); i += each) {
    found.push_back(
        has_biases ? Weights{given[i], given[i + 1], given[i + 2], given[i + 3]}
                   : Weights{given[i], given[i + 1], {}, {}});
  }
  return found;
}

struct LstmState {
  at::Tensor hidden, cell;
};

inline at::Tensor output_of(const LstmState& state) { return state.hidden; }
inline at::Tensor output_of(const at::Tensor& state) { return state; }

inline LstmState step(const at::Tensor& from_input, const LstmState& state, const Weights& w) {
  const at::Tensor gates = at::linear(state.hidden, w.hh, w.bias_hh).add_(from_input);
  const auto parts = gates.unsafe_chunk(4, 1);
  const at::Tensor in = parts[0].sigmoid_(), forget = parts[1].sigmoid_();
  const at::Tensor candidate = parts[2].tanh_(), out = parts[3].sigmoid_();
  const at::Tensor cell = (forget * state.cell).add_(in * candidate);
  return {out * cell.tanh(), cell};
}

inline at::Tensor step(const at::Tensor& from_input, const at::Tensor& hidden, const Weights& w) {
  const auto input = from_input.unsafe_chunk(3, 1);
  const auto state = at::linear(hidden, w.hh, w.bias_hh).unsafe_chunk(3, 1);
  const at::Tensor reset = state[0].add_(input[0]).sigmoid_();
  const at::Tensor update = state[1].add_(input[1]).sigmoid_();
  const at::Tensor candidate = input[2].add(state[2].mul_(reset)).tanh_();
  return (hidden - candidate).mul_(update).add_(candidate);
}

// Runs one direction of one layer over [time, batch, features]; returns the outputs.
template <typename State>
at::Tensor run_direction(const at::Tensor& input, State& state, const Weights& w, bool backwards) {
  auto steps = at::linear(input, w.ih, w.bias_ih).unbind(0);
  if (backwards) std::reverse(steps.begin(), steps.end());
  std::vector<at::Tensor> outputs;
  for (const at::Tensor& from_input : steps) {
    state = step(from_input, state, w);
    outputs.push_back(output_of(state));
  }
  if (backwards) std::reverse(outputs.begin(), outputs.end());
  return at::stack(outputs, 0);
}

struct Shape {
  int64_t layers;
  double dropout;
  bool train, bidirectional, batch_first;
};

// `states` holds one state for each layer and direction, and ends as the last ones.
template <typename State>
at::Tensor run_layers(
    const at::Tensor& given, std::vector<State>& states, const std::vector<Weights>& weights,
    const Shape& shape) {
  at::Tensor sequence = shape.batch_first ? given.transpose(0, 1) : given;
  const int directions = shape.bidirectional ? 2 : 1;
  size_t cell = 0;
  for (int64_t layer = 0; layer < shape.layers; ++layer) {
    std::vector<at::Tensor> outputs;
    for (int direction = 0; direction < directions; ++direction, ++cell) {
      outputs.push_back(
          run_direction(sequence, states[cell], weights[cell], direction == 1));
    }
    sequence = directions == 1 ? outputs[0] : at::cat(outputs, -1);
    if (shape.dropout != 0 && shape.train && layer + 1 < shape.layers) {
      sequence = at::dropout(sequence, shape.dropout, true);
    }
  }
  return shape.batch_first ? sequence.transpose(0, 1) : sequence;
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm(
    const at::Tensor& input, at::TensorList state, at::TensorList params, bool has_biases,
    int64_t layers, double dropout, bool train, bool bidirectional, bool batch_first) {
  const auto hidden = state[0].unbind(0), cell = state[1].unbind(0);
  std::vector<LstmState> states;
  for (size_t i = 0; i < hidden.size(); ++i) states.push_back({hidden[i], cell[i]});
  const auto weights = weights_of(params, has_biases, layers * (bidirectional ? 2 : 1));
  const auto output =
      run_layers(input, states, weights, {layers, dropout, train, bidirectional, batch_first});
  std::vector<at::Tensor> last_hidden, last_cell;
  for (const auto& last : states) {
    last_hidden.push_back(last.hidden);
    last_cell.push_back(last.cell);
  }
  return {output, at::stack(last_hidden, 0), at::stack(last_cell, 0)};
}

inline std::tuple<at::Tensor, at::Tensor> gru(
    const at::Tensor& input, const at::Tensor& hidden, at::TensorList params, bool has_biases,
    int64_t layers, double dropout, bool train, bool bidirectional, bool batch_first) {
  auto states = hidden.unbind(0);
  const auto weights = weights_of(params, has_biases, layers * (bidirectional ? 2 : 1));
  const auto output =
      run_layers(input, states, weights, {layers, dropout, train, bidirectional, batch_first});
  return {output, at::stack(states, 0)};
}

inline std::tuple<at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& input, at::TensorList state, const at::Tensor& ih, const at::Tensor& hh,
    const std::optional<at::Tensor>& bias_ih, const std::optional<at::Tensor>& bias_hh) {
  const Weights w{ih, hh, bias_ih.value_or(at::Tensor()), bias_hh.value_or(at::Tensor())};
  const auto next = step(at::linear(input, ih, w.bias_ih), {state[0], state[1]}, w);
  return {next.hidden, next.cell};
}

inline at::Tensor gru_cell(
    const at::Tensor& input, const at::Tensor& hidden, const at::Tensor& ih, const at::Tensor& hh,
    const std::optional<at::Tensor>& bias_ih, const std::optional<at::Tensor>& bias_hh) {
  const Weights w{ih, hh, bias_ih.value_or(at::Tensor()), bias_hh.value_or(at::Tensor())};
  return step(at::linear(input, ih, w.bias_ih), hidden, w);
}

inline void register_recurrent(torch::Library& m) {
  m.impl("lstm.input", &lstm);
  m.impl("gru.input", &gru);
  m.impl("lstm_cell", &lstm_cell);
  m.impl("gru_cell", &gru_cell);
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { register_recurrent(m); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { register_recurrent(m); }

}  // namespace sim
