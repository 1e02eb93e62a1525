// "sim": an accelerator simulated on the CPU, for tests.
//
// Two devices whose streams are threads. Kernels are the CPU's own, run by the stream's thread on
// the same memory, so that results have the CPU's bits; the caller goes on as soon as they are
// queued.
//
//     host      submit ─ submit ─ record e ─ submit ─ synchronize
//     stream 0  [ kernel 1 ][ kernel 2 ]
//     stream 1                         [ wait e ][ kernel 3 ]
//
// Each file builds on the one before: streams.h (and events), memory.h, device.h (what torch asks
// of a device), and this one: kernels, and what the tests control.

#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "device.h"

namespace at::autocast {
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType);  // its header includes all operators
}

namespace {

using at::Tensor;
using c10::IValue;

bool on_sim(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

// The same memory as a CPU tensor, which keeps nothing alive.
Tensor host_view(const Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  void* data = tensor.unsafeGetTensorImpl()->mutable_data();
  Tensor view = at::from_blob(data, tensor.sizes(), tensor.strides(), options);
  view._set_conj(tensor.is_conj());
  view._set_neg(tensor.is_neg());
  return view;
}

template <class F>
void map_tensors(IValue& value, F fn) {
  if (value.isTensor()) {
    value = fn(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> mapped;
    for (const Tensor& tensor : value.toTensorVector()) mapped.push_back(fn(tensor));
    value = std::move(mapped);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> mapped;
    for (const auto& tensor : value.toOptionalTensorVector())
      mapped.push_back(tensor ? std::optional<Tensor>(fn(*tensor)) : std::nullopt);
    value = std::move(mapped);
  }
}

// A call of any operator, run by the CPU's kernel.
//
// Asynchronous on the current stream where the outputs are known beforehand: those given (in place,
// out=), or new ones of the shapes that the meta kernel tells. Otherwise it is torch's CPU
// fallback, which waits for the stream. Tensors from the host (indices, scalars) are read by the
// call itself.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : op_(op),
        schema_(op.schema()),
        stack_(stack),
        first_(stack.size() - schema_.arguments().size()) {}

  void run() {
    find_device();
    c10::OptionalDeviceGuard on(device_);
    draw();
    if (!device_ || !all_strided_ || !find_outputs()) return at::native::cpu_fallback(op_, &stack_);
    auto arguments = mapped_arguments([](const Tensor& tensor) {
      if (on_sim(tensor)) return host_view(tensor);
      return !tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number()
                 ? tensor
                 : tensor.clone();
    });
    std::vector<Tensor> made;
    for (const Tensor& output : made_)
      made.push_back(output.defined() ? host_view(output) : output);
    auto run = [op = op_, arguments = std::move(arguments), made = std::move(made)]() mutable {
      op.callBoxed(arguments);
      for (size_t i = 0; i < made.size(); ++i)
        if (made[i].defined()) made[i].copy_(arguments[i].toTensor());
    };
    const std::string& name = op_.operator_name().name;
    current_stream(*device_).submit(name.substr(name.find("::") + 2), std::move(run));
    torch::jit::drop(stack_, schema_.arguments().size());
    for (const Tensor& output : outputs_) stack_.emplace_back(output);
  }

 private:
  template <class F>
  torch::jit::Stack mapped_arguments(F fn) {
    torch::jit::Stack arguments(stack_.begin() + first_, stack_.end());
    for (IValue& argument : arguments) map_tensors(argument, fn);
    return arguments;
  }

  void find_device() {
    mapped_arguments([this](const Tensor& tensor) {
      if (on_sim(tensor)) {
        if (!device_) device_ = tensor.device();
        TORCH_CHECK(*device_ == tensor.device(), op_.operator_name(), ": expected all tensors on ",
                    *device_, ", but found one on ", tensor.device());
      }
      all_strided_ &=
          !tensor.defined() || (tensor.layout() == at::kStrided && tensor.has_storage());
      return tensor;
    });
  }

  // Gives a random operator the generator of this one draw.
  void draw() {
    if (!op_.hasTag(at::Tag::nondeterministic_seeded)) return;
    auto index = schema_.argumentIndexWithName("generator");
    TORCH_CHECK_NOT_IMPLEMENTED(index, op_.operator_name(), ": sim has no random kernel for it");
    IValue& given = stack_[first_ + *index];
    at::Generator generator = given.isNone() ? default_generator(-1) : given.toGenerator();
    if (generator.device().type() == kSim) given = generator.get<Generator>()->draw();
  }

  // Fills outputs_, and made_ if they are new; false where they are not known beforehand.
  bool find_outputs() {
    if (op_.hasTag(at::Tag::data_dependent_output) || op_.hasTag(at::Tag::dynamic_output_shape))
      return false;
    for (const auto& result : schema_.returns()) {
      if (result.type()->kind() != c10::TypeKind::TensorType) return false;
      if (!result.alias_info()) continue;
      for (size_t i = 0; i < schema_.arguments().size(); ++i) {
        const auto* alias = schema_.arguments()[i].alias_info();
        if (alias && alias->isWrite() && *alias == *result.alias_info())
          outputs_.push_back(stack_[first_ + i].toTensor());
      }
      // A view, an output on the host, or one that may have to be resized.
      if (outputs_.empty() || !on_sim(outputs_.back()) || outputs_.back().numel() == 0)
        return false;
    }
    return outputs_.size() == schema_.returns().size() ? !outputs_.empty()
                                                       : outputs_.empty() && make_outputs();
  }

  bool make_outputs() {
    auto metas = mapped_arguments([](const Tensor& t) {
      return t.defined() ? at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta))
                         : t;
    });
    for (IValue& argument : metas)
      if (argument.isDevice()) argument = c10::Device(at::kMeta);
    try {
      op_.callBoxed(metas);
    } catch (const std::exception&) {
      return false;  // no meta kernel; if the arguments are wrong, the CPU's kernel says so
    }
    for (const IValue& result : metas) {
      const Tensor& meta = result.toTensor();
      auto options = at::TensorOptions().device(*device_);
      made_.push_back(!meta.defined() ? meta
                                      : at::empty_strided(meta.sizes(), meta.strides(),
                                                          options.dtype(meta.dtype())));
    }
    outputs_ = made_;
    return true;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack& stack_;
  const size_t first_;  // of the operator's arguments, on the stack
  std::optional<c10::Device> device_;
  bool all_strided_ = true;
  std::vector<Tensor> outputs_, made_;
};

void any_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op, *stack).run();
}
void on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

constexpr c10::DispatchKeySet kKey(c10::DispatchKey::PrivateUse1);

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard on(device);
  return at::detail::empty_generic(size, &memory, kKey, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard on(device);
  return at::detail::empty_strided_generic(size, stride, &memory, kKey,
                                           c10::dtype_or_default(dtype));
}

void keep_busy(int64_t lag_us) {
  const auto end = Clock::now() + us(lag_us);
  while (Clock::now() < end && !stopping)
    std::this_thread::sleep_until(std::min(end, Clock::now() + us(20'000)));
}

// Copies in one direction take turns on the link, whichever streams they are on.
void on_link(bool to_device, int64_t link_us) {
  static std::array<std::mutex, 2>& links = *new std::array<std::mutex, 2>;
  if (link_us == 0) return;
  Lock turn(links[to_device]);
  keep_busy(link_us);
}

// A non-blocking copy from or to pinned memory reads or writes it when the stream gets there. Other
// host memory is read by the call, and written before the call returns. A copy between devices runs
// on the source's stream, after what is on the destination's and before what comes to it.
Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  const bool between = on_sim(source) && on_sim(target);
  const Tensor& host = on_sim(source) ? target : source;
  const bool is_pinned = !between && pinned.holds(host.const_data_ptr());
  Tensor from = source;
  if (!on_sim(source) && non_blocking && !is_pinned) from = source.clone();
  Stream& stream = current_stream((on_sim(source) ? source : target).device());
  Stream& other = current_stream((on_sim(target) ? target : source).device());
  c10::Storage held = between ? c10::Storage() : (on_sim(source) ? target : from).storage();
  wait_on_stream(stream, other);
  stream.submit("copy_",
                [from = host_view(from), to = host_view(target), held, between,
                 to_device = on_sim(target)] {
                  // The host's memory is read, or written, at the end of the time on the link.
                  const int64_t link_us = behaviour.link_us * int64_t(to.nbytes()) / (1 << 20);
                  if (!between) on_link(to_device, link_us);
                  to.copy_(from);
                });
  wait_on_stream(other, stream);
  const bool asynchronous = is_pinned || (on_sim(target) && !behaviour.pageable_blocks);
  if (!between && !(non_blocking && asynchronous)) wait_on_host(stream);
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar_dense(const Tensor& tensor) {
  wait_on_host(current_stream(tensor.device()));
  return at::_local_scalar_dense(host_view(tensor));
}

const Tensor& resize(const Tensor& tensor, c10::IntArrayRef size,
                     std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard on(tensor.device());
  wait_on_host(current_stream(tensor.device()));  // the host copies what is in it
  return at::native::resize_(tensor, size, format);
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p,
                                          std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) return {input.clone(), at::ones_like(input, at::kBool)};
  Tensor mask = at::empty(input.sizes(), input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0 : 1 / (1 - p)), mask};
}

void record_stream(Tensor& tensor, c10::Stream user) {
  TORCH_CHECK_NOT_IMPLEMENTED(behaviour.record_stream,
                              "Could not run 'aten::record_stream' on sim");
  memory.record(tensor.storage().data_ptr(), get_stream(user));
}

// Autocast: these compute in the autocast type, all others in the type of their arguments.
void in_autocast_type(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard once(c10::DispatchKey::AutocastPrivateUse1);
  auto cast = [dtype = at::autocast::get_autocast_dtype(kSim)](const Tensor& tensor) {
    return on_sim(tensor) && tensor.scalar_type() == at::kFloat ? tensor.to(dtype) : tensor;
  };
  for (IValue& value : *stack) map_tensors(value, cast);
  op.callBoxed(stack);
}

template <auto kernel>
torch::CppFunction boxed() {
  return torch::CppFunction::makeFromBoxedFunction<kernel>();
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (auto* name : {"mm", "addmm", "bmm", "matmul", "linear"})
    m.impl(name, boxed<&in_autocast_type>());
}
// A copy reads conjugated and negated views itself.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(boxed<&any_operator>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("resize_", resize);
  m.impl("native_dropout", native_dropout);
  m.impl("record_stream", record_stream);
  // Views.
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  // What torch would decompose, though the CPU has a kernel; or whose out= kernel changes its
  // output's shape.
  for (auto* name : {"native_layer_norm", "native_group_norm", "mse_loss", "smooth_l1_loss"})
    m.impl(name, boxed<&any_operator>());
  // The CPU's outputs have other shapes than the meta kernel tells.
  for (auto* name : {"_embedding_bag", "_embedding_bag_forward_only"})
    m.impl(name, boxed<&on_host>());
}

// -------------------------------------------------------------------------- what tests control

void lag_on(int64_t device, int64_t lag_us) {
  current_stream({kSim, DeviceIndex(device)}).submit("lag", [lag_us] { keep_busy(lag_us); });
}
void lag(const Tensor& tensor, int64_t lag_us) { lag_on(tensor.device().index(), lag_us); }

// A stream that comes to a gate waits until it is opened; if nobody does so in time, it fails.
struct Gates {
  std::mutex mutex;
  std::condition_variable changed;
  std::set<int64_t> closed;
  int64_t made = 0;
};
Gates& gates = *new Gates;

int64_t gate(int64_t device, double deadline_s) {
  Lock lock(gates.mutex);
  const int64_t number = gates.made++;
  gates.closed.insert(number);
  lock.unlock();
  current_stream({kSim, DeviceIndex(device)}).submit("gate", [number, deadline_s] {
    Lock lock(gates.mutex);
    auto open = [number] { return !gates.closed.count(number) || stopping; };
    const bool in_time =
        gates.changed.wait_for(lock, std::chrono::duration<double>(deadline_s), open);
    TORCH_CHECK(in_time, "nobody opened it within ", deadline_s, " s");
  });
  return number;
}
void open_gate(int64_t number) {
  Lock lock(gates.mutex);
  gates.closed.erase(number);
  gates.changed.notify_all();
}
void open_gates() {
  Lock lock(gates.mutex);
  gates.closed.clear();
  gates.changed.notify_all();
}

std::tuple<Tensor, std::vector<std::string>> read_log() {
  Lock lock(record.mutex);
  Tensor numbers = at::empty({int64_t(record.log.size()), 4}, at::kLong);
  std::vector<std::string> names;
  int64_t* cell = numbers.mutable_data_ptr<int64_t>();
  for (const auto& entry : record.log) {
    for (int64_t n : {int64_t(entry.device), entry.stream, entry.start_ns, entry.end_ns})
      *cell++ = n;
    names.push_back(entry.name);
  }
  return {numbers, names};
}
void clear_log() {
  Lock lock(record.mutex);
  record.log.clear();
}

void behave(int64_t late_us, int64_t pool, bool event_timing, bool record_stream, bool poison,
            int64_t link_us) {
  behaviour.late_us = late_us;
  behaviour.pool = std::min(pool, kPool);
  behaviour.event_timing = event_timing;
  behaviour.record_stream = record_stream;
  behaviour.poison = poison;
  behaviour.link_us = link_us;
}
void charge(int64_t launch_us, int64_t queue, bool pageable_blocks) {
  behaviour.launch_us = launch_us;
  behaviour.queue = queue;
  behaviour.pageable_blocks = pageable_blocks;
}

// Before the interpreter ends: no stream may run while the process takes itself down.
void shut_down() {
  if (forked || stopping.exchange(true)) return;
  returns_when_stopping = true;
  { Lock lock(gates.mutex); }
  gates.changed.notify_all();
  for (auto& all : streams)
    for (Stream& stream : all) stream.wake();
  for (auto& all : streams)
    for (Stream& stream : all) stream.join();
}

TORCH_LIBRARY(sim, m) {
  m.def("lag(Tensor tensor, int us) -> ()");
  m.def("lag_on", lag_on);
  m.def("gate", gate);
  m.def("open_gate", open_gate);
  m.def("open_gates", open_gates);
  m.def("log", read_log);
  m.def("clear_log", clear_log);
  m.def("behave", behave);
  m.def("charge", charge);
  m.def("priority", [](int64_t stream_id) { return int64_t(stream_id > kPool ? -1 : 0); });
  m.def("is_forked", [] { return forked.load(); });
  m.def("default_generator", [](int64_t device) { return default_generator(device); });
  m.def("shut_down", shut_down);
}
TORCH_LIBRARY_IMPL(sim, PrivateUse1, m) { m.impl("lag", lag); }

}  // namespace
