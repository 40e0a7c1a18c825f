// Random streams (docs/arithmetic.md section 14) and the rotary table (section 8).
#include "common/philox.h"
#include "cpu/floating.h"
#include "cuda/rows.cuh"

namespace mok::cuda {
namespace {

// A thread a pair of elements.
__global__ void __launch_bounds__(kRowThreads) normal_kernel(const __grid_constant__ mok_random_normal_args args) {
  const int64_t pair = args.first / 2 + static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
  const int64_t last = args.first + args.count;
  if (2 * pair >= last) return;
  double even = 0.0;
  double odd = 0.0;
  normal_pair(args.seed, args.stream, static_cast<uint64_t>(pair), &even, &odd);
  if (2 * pair >= args.first) args.out[2 * pair - args.first] = static_cast<float>(f64::mul(args.std, even));
  if (2 * pair + 1 < last) args.out[2 * pair + 1 - args.first] = static_cast<float>(f64::mul(args.std, odd));
}

__global__ void __launch_bounds__(kRowThreads) rope_kernel(const __grid_constant__ mok_rope_table_args args) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
  const int64_t half = args.head_size / 2;
  if (at >= args.positions * half) return;
  const int64_t position = at / half;
  const int64_t i = at % half;
  const double exponent = f64::div(static_cast<double>(-2 * i), static_cast<double>(args.head_size));
  const double frequency = f64::exp(f64::mul(exponent, f64::log(args.base)));
  const double angle = f64::mul(static_cast<double>(position), frequency);
  float *const row = args.cos_sin + position * args.head_size;
  row[i] = static_cast<float>(f64::cos(angle));
  row[half + i] = static_cast<float>(f64::sin(angle));
}

mok_status random_normal(const mok_context *context, const mok_random_normal_args *args) {
  int64_t last = 0;
  MOK_REQUIRE(
      args->first >= 0 && args->count >= 0 && !__builtin_add_overflow(args->first, args->count, &last) && last < INT64_MAX,
      "first and count are %" PRId64 " and %" PRId64 "; allowed: 0 or more, with a sum below 2^63 - 1", args->first, args->count);
  MOK_REQUIRE(__builtin_isfinite(args->std) && args->std >= 0.0, "std is %g; allowed: a finite number, 0 or more", args->std);
  MOK_REQUIRE_POINTER(args->out, args->count);
  if (args->count == 0) return MOK_OK;
  const int64_t pairs = (last + 1) / 2 - args->first / 2;
  normal_kernel<<<grid_of(pairs, kRowThreads), kRowThreads, 0, context->stream>>>(*args);
  MOK_LAUNCHED();
  return MOK_OK;
}

mok_status rope_table(const mok_context *context, const mok_rope_table_args *args) {
  MOK_REQUIRE_RANGE(args, positions, 0, kRowsMax);
  MOK_REQUIRE_RANGE(args, head_size, 2, kWidthMax);
  MOK_REQUIRE(args->head_size % 2 == 0, "head_size is %" PRId64 "; allowed: an even number", args->head_size);
  MOK_REQUIRE(args->base >= 1.0 && __builtin_isfinite(args->base), "base is %g; allowed: 1 or more, finite", args->base);
  MOK_REQUIRE_POINTER(args->cos_sin, args->positions);
  if (args->positions == 0) return MOK_OK;
  rope_kernel<<<grid_of(args->positions * (args->head_size / 2), kRowThreads), kRowThreads, 0, context->stream>>>(*args);
  MOK_LAUNCHED();
  return MOK_OK;
}

// Host memory, as in every backend.
mok_status permutation(const mok_permutation_args *args) {
  MOK_REQUIRE_RANGE(args, n, 1, kPermutationMax);
  MOK_REQUIRE_RANGE(args, first, 0, args->n);
  MOK_REQUIRE_RANGE(args, count, 0, args->n - args->first);
  MOK_REQUIRE_POINTER(args->out, args->count);
  for (int64_t i = 0; i < args->count; ++i) {
    args->out[i] = static_cast<int64_t>(
        permute(args->seed, args->stream, static_cast<uint64_t>(args->n), static_cast<uint64_t>(args->first + i)));
  }
  return MOK_OK;
}

}  // namespace
}  // namespace mok::cuda

extern "C" MOK_API mok_status mok_random_normal(mok_context *context, const mok_random_normal_args *args) {
  return mok::cuda::enter("mok_random_normal", context, args, [&] { return mok::cuda::random_normal(context, args); });
}

extern "C" MOK_API mok_status mok_rope_table(mok_context *context, const mok_rope_table_args *args) {
  return mok::cuda::enter("mok_rope_table", context, args, [&] { return mok::cuda::rope_table(context, args); });
}

extern "C" MOK_API mok_status mok_permutation(mok_context *context, const mok_permutation_args *args) {
  return mok::cuda::enter("mok_permutation", context, args, [&] { return mok::cuda::permutation(args); });
}

extern "C" MOK_API mok_status mok_philox(mok_context *context, mok_philox_args *args) {
  return mok::cuda::enter("mok_philox", context, args, [&] {
    const mok::PhiloxBlock block =
        mok::philox(args->key[0], args->key[1], {{args->counter[0], args->counter[1], args->counter[2], args->counter[3]}});
    for (int i = 0; i < 4; ++i) args->out[i] = block.word[i];
    return MOK_OK;
  });
}
