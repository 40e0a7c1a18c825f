// The router (docs/arithmetic.md section 10): a warp a token.
#include <cmath>

#include "cuda/rows.cuh"

namespace mok::cuda {
namespace {

// A candidate for the next place of a top-k: logits descending, of equal ones (IEEE) the lower index.
struct Candidate {
  float logit;
  int32_t expert;  // INT32_MAX: none
};

__device__ __forceinline__ bool before(const Candidate &a, const Candidate &b) {
  if (a.expert == INT32_MAX || b.expert == INT32_MAX) return b.expert == INT32_MAX && a.expert != INT32_MAX;
  return a.logit > b.logit || (a.logit == b.logit && a.expert < b.expert);
}

// The best expert of the whole warp after `last`, in every lane.
__device__ __forceinline__ Candidate next_best(const float *logits, int64_t experts, const Candidate &last) {
  Candidate best{0.0f, INT32_MAX};
  for (int64_t e = lane_index(); e < experts; e += 32) {
    const Candidate candidate{logits[e], static_cast<int32_t>(e)};
    if (before(last, candidate) && before(candidate, best)) best = candidate;
  }
  for (int32_t distance = 16; distance > 0; distance /= 2) {
    const Candidate other{__shfl_xor_sync(kAllLanes, best.logit, distance), __shfl_xor_sync(kAllLanes, best.expert, distance)};
    if (before(other, best)) best = other;
  }
  return best;
}

__global__ void __launch_bounds__(kRowThreads) forward_kernel(const __grid_constant__ mok_router_forward_args args) {
  const int64_t token = warp_row();
  if (token >= args.tokens) return;
  const int64_t experts = args.experts;
  const float *const logits = args.logits + token * experts;
  float *const p = args.probabilities + token * experts;
  int32_t high = INT32_MIN;
  int32_t low = INT32_MAX;
  for (int64_t e = lane_index(); e < experts; e += 32) {
    const int32_t key = ordered(logits[e]);
    high = max(high, key);
    low = min(low, key);
  }
  high = __reduce_max_sync(kAllLanes, high);
  low = __reduce_min_sync(kAllLanes, low);
  const bool finite = high < kOrderedInfinity && low > kOrderedMinusInfinity;
  const float maximum = from_ordered(high);
  const float sum =
      warp_row_sum(experts, [&](float lane, int64_t e) { return f32::add(lane, f32::exp(f32::sub(logits[e], maximum))); });
  const float recip = f32::div(1.0f, sum);
  for (int64_t e = lane_index(); e < experts; e += 32)
    p[e] = f32::canonical(f32::mul(f32::exp(f32::sub(logits[e], maximum)), recip));
  __syncwarp();
  int32_t *const chosen = args.expert_index + token * args.top_k;
  float *const weights = args.expert_weight + token * args.top_k;
  float chosen_sum = 0.0f;
  Candidate last{f32::infinity(), -1};
  for (int64_t k = 0; k < args.top_k; ++k) {
    // With a logit that is not finite only the status is promised: any distinct experts will do.
    last = finite ? next_best(logits, experts, last) : Candidate{0.0f, static_cast<int32_t>(k)};
    const float probability = p[last.expert];
    chosen_sum = k == 0 ? probability : f32::add(chosen_sum, probability);
    if (lane_index() == 0) {
      chosen[k] = last.expert;
      weights[k] = probability;
    }
  }
  __syncwarp();
  if (args.renormalise != 0) {
    for (int64_t k = lane_index(); k < args.top_k; k += 32) weights[k] = f32::canonical(f32::div(weights[k], chosen_sum));
  }
  if (lane_index() == 0) {
    args.log_sum_exp[token] = f32::canonical(f32::add(maximum, f32::log(sum)));
    if (!finite) *args.status = 1;
  }
}

// dp of one expert without the auxiliary loss: found among the chosen.
__device__ __forceinline__ float probability_gradient(const mok_router_backward_args &args, int64_t token, int64_t expert,
                                                      float q, float sum) {
  for (int64_t k = token * args.top_k; k < (token + 1) * args.top_k; ++k) {
    if (args.expert_index[k] == expert) {
      return args.renormalise != 0 ? f32::div(f32::sub(args.grad_weight[k], q), sum) : args.grad_weight[k];
    }
  }
  return 0.0f;
}

template <bool BF16>
__global__ void __launch_bounds__(kRowThreads) backward_kernel(const __grid_constant__ mok_router_backward_args args) {
  const int64_t token = warp_row();
  if (token >= args.tokens) return;
  const int64_t experts = args.experts;
  if (args.token_mask[token] == 0) {
    for (int64_t e = lane_index(); e < experts; e += 32) store_operand<BF16>(args.grad_logits, token * experts + e, 0.0f);
    return;
  }
  const float *const p = args.probabilities + token * experts;
  float q = 0.0f;
  float chosen = 0.0f;
  for (int64_t k = 0; k < args.top_k && args.renormalise != 0; ++k) {
    const int64_t slot = token * args.top_k + k;
    const int32_t expert = args.expert_index[slot];
    const float probability = expert >= 0 && expert < experts ? p[expert] : 0.0f;
    q = f32::fma(args.grad_weight[slot], args.expert_weight[slot], q);
    chosen = k == 0 ? probability : f32::add(chosen, probability);
  }
  const int64_t group = token / args.group_tokens;
  const auto gradient = [&](int64_t e) {
    const float dp = probability_gradient(args, token, e, q, chosen);
    return args.aux_scale != nullptr ? f32::fma(args.aux_scale[group], static_cast<float>(args.counts[group * experts + e]), dp)
                                     : dp;
  };
  const float dot = warp_row_sum(experts, [&](float sum, int64_t e) { return f32::fma(gradient(e), p[e], sum); });
  const float z = args.z_scale != 0.0f ? f32::mul(args.z_scale, args.log_sum_exp[token]) : 0.0f;
  for (int64_t e = lane_index(); e < experts; e += 32) {
    float dl = f32::mul(p[e], f32::sub(gradient(e), dot));
    if (args.z_scale != 0.0f) dl = f32::fma(z, p[e], dl);
    store_operand<BF16>(args.grad_logits, token * experts + e, dl);
  }
}

constexpr int64_t kSumTokens = 64;  // of a CTA

// The fixed-point term of a reported sum: 2^30 at most, a NaN counts as 0 (10.6).
__device__ __forceinline__ unsigned long long sum_term(float x) {
  const float limited = x < 0x1p+30f ? (x > -0x1p+30f ? x : -0x1p+30f) : 0x1p+30f;
  return static_cast<unsigned long long>(fixed_point(x == x ? limited : 0.0f));
}

// A CTA takes some tokens of one group: integers, so the order of the atomic adds can't matter.
__global__ void __launch_bounds__(kRowThreads) sums_kernel(const __grid_constant__ mok_router_sums_args args, int64_t parts) {
  const int64_t group = blockIdx.x / parts;
  const int64_t begin = group * args.group_tokens + blockIdx.x % parts * kSumTokens;
  const int64_t end = min(min(args.tokens, (group + 1) * args.group_tokens), begin + kSumTokens);
  auto *const out = reinterpret_cast<unsigned long long *>(args.probability_sum + group * args.experts);
  for (int64_t e = threadIdx.x; e < args.experts; e += kRowThreads) {
    unsigned long long sum = 0;
    for (int64_t t = begin; t < end; ++t) {
      if (args.token_mask[t] != 0) sum += sum_term(args.probabilities[t * args.experts + e]);
    }
    atomicAdd(out + e, sum);
  }
  const int64_t t = begin + threadIdx.x;
  if (t < end && args.token_mask[t] != 0) {
    const float lse = args.log_sum_exp[t];
    atomicAdd(reinterpret_cast<unsigned long long *>(args.z_sum), sum_term(f32::mul(lse, lse)));
  }
}

template <typename Args>
mok_status check_choice(const Args *args) {
  MOK_REQUIRE_RANGE(args, tokens, 0, kRowsMax);
  MOK_REQUIRE_RANGE(args, experts, 1, kWidthMax);
  MOK_REQUIRE_RANGE(args, top_k, 1, args->experts);
  MOK_REQUIRE(args->tokens * args->top_k <= kRowsMax, "tokens * top_k is %" PRId64 "; allowed: at most %" PRId64,
              args->tokens * args->top_k, kRowsMax);
  return MOK_OK;
}

mok_status forward(const mok_context *context, const mok_router_forward_args *args) {
  MOK_TRY(check_choice(args));
  MOK_REQUIRE_POINTER(args->logits, args->tokens);
  MOK_REQUIRE_POINTER(args->probabilities, args->tokens);
  MOK_REQUIRE_POINTER(args->log_sum_exp, args->tokens);
  MOK_REQUIRE_POINTER(args->expert_index, args->tokens);
  MOK_REQUIRE_POINTER(args->expert_weight, args->tokens);
  MOK_REQUIRE_POINTER(args->status, 1);
  if (args->tokens == 0) return MOK_OK;
  forward_kernel<<<grid_of(args->tokens, kRowWarps), kRowThreads, 0, context->stream>>>(*args);
  MOK_LAUNCHED();
  return MOK_OK;
}

mok_status backward(const mok_context *context, const mok_router_backward_args *args) {
  MOK_TRY(check_precision(args->precision));
  MOK_TRY(check_choice(args));
  MOK_REQUIRE_RANGE(args, group_tokens, 1, kRowsMax);
  MOK_REQUIRE(std::isfinite(args->z_scale), "z_scale is %g; allowed: finite numbers", static_cast<double>(args->z_scale));
  MOK_REQUIRE_POINTER(args->probabilities, args->tokens);
  MOK_REQUIRE_POINTER(args->expert_weight, args->tokens);
  MOK_REQUIRE_POINTER(args->expert_index, args->tokens);
  MOK_REQUIRE_POINTER(args->grad_weight, args->tokens);
  MOK_REQUIRE_POINTER(args->token_mask, args->tokens);
  MOK_REQUIRE_POINTER(args->grad_logits, args->tokens);
  if (args->aux_scale != nullptr) MOK_REQUIRE_POINTER(args->counts, args->tokens);
  if (args->z_scale != 0) MOK_REQUIRE_POINTER(args->log_sum_exp, args->tokens);
  if (args->tokens == 0) return MOK_OK;
  for_precision(args->precision, [&](auto bf16) {
    backward_kernel<bf16.value><<<grid_of(args->tokens, kRowWarps), kRowThreads, 0, context->stream>>>(*args);
  });
  MOK_LAUNCHED();
  return MOK_OK;
}

mok_status sums(const mok_context *context, const mok_router_sums_args *args) {
  MOK_REQUIRE_RANGE(args, tokens, 0, kRowsMax);
  MOK_REQUIRE_RANGE(args, experts, 1, kWidthMax);
  MOK_REQUIRE_RANGE(args, group_tokens, 1, kRowsMax);
  MOK_REQUIRE_POINTER(args->probabilities, args->tokens);
  MOK_REQUIRE_POINTER(args->log_sum_exp, args->tokens);
  MOK_REQUIRE_POINTER(args->token_mask, args->tokens);
  MOK_REQUIRE_POINTER(args->probability_sum, args->tokens);
  MOK_REQUIRE_POINTER(args->z_sum, 1);
  if (args->tokens == 0) return MOK_OK;
  const int64_t group_tokens = std::min(args->group_tokens, args->tokens);
  const int64_t parts = divide_up(group_tokens, kSumTokens);
  const int64_t groups = divide_up(args->tokens, args->group_tokens);
  sums_kernel<<<static_cast<unsigned>(groups * parts), kRowThreads, 0, context->stream>>>(*args, parts);
  MOK_LAUNCHED();
  return MOK_OK;
}

}  // namespace
}  // namespace mok::cuda

extern "C" MOK_API mok_status mok_router_forward(mok_context *context, const mok_router_forward_args *args) {
  return mok::cuda::enter("mok_router_forward", context, args, [&] { return mok::cuda::forward(context, args); });
}

extern "C" MOK_API mok_status mok_router_backward(mok_context *context, const mok_router_backward_args *args) {
  return mok::cuda::enter("mok_router_backward", context, args, [&] { return mok::cuda::backward(context, args); });
}

extern "C" MOK_API mok_status mok_router_sums(mok_context *context, const mok_router_sums_args *args) {
  return mok::cuda::enter("mok_router_sums", context, args, [&] { return mok::cuda::sums(context, args); });
}
