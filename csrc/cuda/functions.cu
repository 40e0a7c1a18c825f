// Elementwise operations: conversion, addition and the functions of docs/arithmetic.md section 3.
#include <cstring>

#include "cpu/floating.h"
#include "cuda/rows.cuh"

namespace mok::cuda {
namespace {

// A thread takes eight elements, one by one at the end and where addresses don't allow runs.
__global__ void __launch_bounds__(kRowThreads) to_bf16_kernel(const __grid_constant__ mok_to_bf16_args args, bool runs) {
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x) * 8;
  if (runs && first + 8 <= args.count) {
    float value[8];
    load_eight(value, args.in + first);
    store_eight_operands<true>(args.out, first, value);
    return;
  }
  for (int64_t i = first; i < first + 8 && i < args.count; ++i) args.out[i] = to_bf16(args.in[i]);
}

__global__ void __launch_bounds__(kRowThreads) add_kernel(const __grid_constant__ mok_add_args args, bool runs) {
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x) * 8;
  if (runs && first + 8 <= args.count) {
    float a[8], b[8];
    load_eight(a, args.a + first);
    load_eight(b, args.b + first);
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i] = f32::add(a[i], b[i]);
    store_eight(args.out + first, a);
    return;
  }
  for (int64_t i = first; i < first + 8 && i < args.count; ++i) args.out[i] = f32::canonical(f32::add(args.a[i], args.b[i]));
}

#define MOK_FUNCTION(NAME)                                              \
  struct Apply_##NAME {                                                 \
    static constexpr const char *kName = #NAME;                         \
    __device__ float operator()(float x) const { return f32::NAME(x); } \
  };
MOK_FUNCTION(exp)
MOK_FUNCTION(exp2)
MOK_FUNCTION(log)
MOK_FUNCTION(sigmoid)
MOK_FUNCTION(silu)
MOK_FUNCTION(silu_grad)
MOK_FUNCTION(rsqrt)
MOK_FUNCTION(sqrt)
MOK_FUNCTION(recip)
MOK_FUNCTION(sin)
MOK_FUNCTION(cos)
#undef MOK_FUNCTION

template <class Apply>
__global__ void __launch_bounds__(kRowThreads) function_kernel(int64_t count, const float *in, float *out) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
  if (i < count) out[i] = Apply()(in[i]);
}

// Launches the one of `Applies` that has the name; false if none has.
template <class... Applies>
bool launch_function(const mok_context *context, const mok_function_args *args) {
  bool found = false;
  const auto attempt = [&](auto apply) {
    using Apply = decltype(apply);
    if (found || std::strcmp(args->name, Apply::kName) != 0) return;
    found = true;
    if (args->count > 0) {
      function_kernel<Apply>
          <<<grid_of(args->count, kRowThreads), kRowThreads, 0, context->stream>>>(args->count, args->in, args->out);
    }
  };
  (attempt(Applies{}), ...);
  return found;
}

mok_status function(const mok_context *context, const mok_function_args *args) {
  MOK_REQUIRE(args->name != nullptr, "name is NULL; allowed: the name of a function of section 3");
  MOK_REQUIRE(args->count >= 0, "count is %" PRId64 "; allowed: 0 or more", args->count);
  MOK_REQUIRE_POINTER(args->in, args->count);
  MOK_REQUIRE_POINTER(args->out, args->count);
  const bool found = launch_function<Apply_exp, Apply_exp2, Apply_log, Apply_sigmoid, Apply_silu, Apply_silu_grad, Apply_rsqrt,
                                     Apply_sqrt, Apply_recip, Apply_sin, Apply_cos>(context, args);
  MOK_REQUIRE(found, "name is \"%.40s\"; allowed: exp, exp2, log, sigmoid, silu, silu_grad, rsqrt, sqrt, recip, sin, cos",
              args->name);
  MOK_LAUNCHED();
  return MOK_OK;
}

// On the host, as in every backend.
mok_status scalar(mok_scalar_args *args) {
  MOK_REQUIRE(args->name != nullptr, "name is NULL; allowed: pow, cos, exp, log");
  const bool is_pow = std::strcmp(args->name, "pow") == 0;
  const bool is_log = std::strcmp(args->name, "log") == 0;
  const bool is_cos = std::strcmp(args->name, "cos") == 0;
  const bool is_exp = std::strcmp(args->name, "exp") == 0;
  MOK_REQUIRE(is_pow || is_log || is_cos || is_exp, "name is \"%.40s\"; allowed: pow, cos, exp, log", args->name);
  const double x = args->x;
  const double y = args->y;
  MOK_REQUIRE(__builtin_isfinite(x), "x is %g; allowed: a finite number", x);
  MOK_REQUIRE(!(is_pow || is_log) || x > 0.0, "x is %.17g; allowed for %s: above 0", x, args->name);
  MOK_REQUIRE(!is_pow || __builtin_isfinite(y), "y is %g; allowed: a finite number", y);
  MOK_REQUIRE(!is_cos || f64::absolute(x) <= f64::kCircleMax, "x is %.17g; allowed for cos: -2^31 to 2^31", x);
  const FloatingEnvironment environment;
  args->out = is_pow ? f64::pow(x, y) : is_log ? f64::log(x) : is_cos ? f64::cos(x) : f64::exp(x);
  return MOK_OK;
}

}  // namespace
}  // namespace mok::cuda

extern "C" MOK_API mok_status mok_to_bf16(mok_context *context, const mok_to_bf16_args *args) {
  using namespace mok::cuda;
  return enter("mok_to_bf16", context, args, [&] {
    MOK_REQUIRE(args->count >= 0, "count is %" PRId64 "; allowed: 0 or more", args->count);
    MOK_REQUIRE_POINTER(args->in, args->count);
    MOK_REQUIRE_POINTER(args->out, args->count);
    if (args->count == 0) return MOK_OK;
    const bool runs = runs_of_eight(0, args->in, args->out);
    to_bf16_kernel<<<grid_of(args->count, 8 * kRowThreads), kRowThreads, 0, context->stream>>>(*args, runs);
    MOK_LAUNCHED();
    return MOK_OK;
  });
}

extern "C" MOK_API mok_status mok_add(mok_context *context, const mok_add_args *args) {
  using namespace mok::cuda;
  return enter("mok_add", context, args, [&] {
    MOK_REQUIRE(args->count >= 0, "count is %" PRId64 "; allowed: 0 or more", args->count);
    MOK_REQUIRE_POINTER(args->a, args->count);
    MOK_REQUIRE_POINTER(args->b, args->count);
    MOK_REQUIRE_POINTER(args->out, args->count);
    if (args->count == 0) return MOK_OK;
    const bool runs = runs_of_eight(0, args->a, args->b, args->out);
    add_kernel<<<grid_of(args->count, 8 * kRowThreads), kRowThreads, 0, context->stream>>>(*args, runs);
    MOK_LAUNCHED();
    return MOK_OK;
  });
}

extern "C" MOK_API mok_status mok_function(mok_context *context, const mok_function_args *args) {
  return mok::cuda::enter("mok_function", context, args, [&] { return mok::cuda::function(context, args); });
}

extern "C" MOK_API mok_status mok_scalar(mok_context *context, mok_scalar_args *args) {
  return mok::cuda::enter("mok_scalar", context, args, [&] { return mok::cuda::scalar(args); });
}
