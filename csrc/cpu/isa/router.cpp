#include "cpu/isa/router.h"

#include <cstring>

#include "common/functions.h"
#include "common/sums.h"
#include "cpu/isa/operand.h"

namespace MOK_ISA_NS {
namespace {

// The fixed-point term of a reported sum: 2^30 at most, a NaN counts as 0 (docs/arithmetic.md 10.6).
int64_t sum_term(float x) {
  const float high = x < 0x1p30f ? x : 0x1p30f, limited = high > -0x1p30f ? high : -0x1p30f;
  return mok::fixed_point(x == x ? limited : 0.0f);
}

bool all_finite(int64_t count, const float *x) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t magnitude = mok::f32::bits(x[i]) & 0x7FFFFFFFu;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest < 0x7F800000u;
}

// p = softmax(logits); returns log-sum-exp.
float softmax(int64_t experts, const float *__restrict logits, float *__restrict p) {
  float maximum = logits[0];
  for (int64_t e = 1; e < experts; ++e) maximum = logits[e] > maximum ? logits[e] : maximum;
  for (int64_t e = 0; e < experts; ++e) p[e] = mok::f32::exp(logits[e] - maximum);
  const float sum = mok::row_sum(experts, [=](float lane, int64_t e) { return lane + p[e]; });
  const float recip = 1.0f / sum;
  for (int64_t e = 0; e < experts; ++e) p[e] = mok::f32::canonical(p[e] * recip);
  return maximum + mok::f32::log(sum);
}

// The k experts with the largest logits, descending; of equal ones the lower index first. Distinct, whatever the logits are.
void choose(int64_t experts, int64_t top_k, const float *logits, int32_t *chosen) {
  int64_t count = 0;
  for (int64_t e = 0; e < experts; ++e) {
    int64_t place = count;
    while (place > 0 && logits[e] > logits[chosen[place - 1]]) --place;
    if (place == top_k) continue;
    if (count < top_k) ++count;
    for (int64_t k = count - 1; k > place; --k) chosen[k] = chosen[k - 1];
    chosen[place] = static_cast<int32_t>(e);
  }
}

// The sum of the chosen probabilities in top-k order.
float chosen_sum(int64_t top_k, const float *p, const int32_t *chosen) {
  float sum = p[chosen[0]];
  for (int64_t k = 1; k < top_k; ++k) sum = sum + p[chosen[k]];
  return sum;
}

bool forward(const mok_router_forward_args *args, int64_t begin, int64_t end) {
  const int64_t experts = args->experts, top_k = args->top_k;
  bool finite = true;
  for (int64_t t = begin; t < end; ++t) {
    const float *const logits = args->logits + t * experts;
    float *const p = args->probabilities + t * experts;
    int32_t *const chosen = args->expert_index + t * top_k;
    float *const weights = args->expert_weight + t * top_k;
    finite = all_finite(experts, logits) && finite;
    args->log_sum_exp[t] = mok::f32::canonical(softmax(experts, logits, p));
    choose(experts, top_k, logits, chosen);
    const float sum = chosen_sum(top_k, p, chosen);
    for (int64_t k = 0; k < top_k; ++k) {
      weights[k] = args->renormalise != 0 ? mok::f32::canonical(p[chosen[k]] / sum) : p[chosen[k]];
    }
  }
  return !finite;
}

size_t backward_scratch(int64_t experts) { return mok::float_bytes(experts); }

// The gradient of the probabilities, without the auxiliary loss.
void probability_gradient(const mok_router_backward_args *args, int64_t t, const float *p, float *dp) {
  const int64_t top_k = args->top_k;
  const int32_t *const chosen = args->expert_index + t * top_k;
  const float *const dw = args->grad_weight + t * top_k, *const w = args->expert_weight + t * top_k;
  memset(dp, 0, static_cast<size_t>(args->experts) * sizeof(float));
  if (args->renormalise == 0) {
    for (int64_t k = 0; k < top_k; ++k) dp[chosen[k]] = dw[k];
    return;
  }
  float q = 0.0f;
  for (int64_t k = 0; k < top_k; ++k) q = mok::f32::fma(dw[k], w[k], q);
  const float sum = chosen_sum(top_k, p, chosen);
  for (int64_t k = 0; k < top_k; ++k) dp[chosen[k]] = (dw[k] - q) / sum;
}

void backward(const mok_router_backward_args *args, int64_t begin, int64_t end, mok::Scratch *scratch) {
  const int64_t experts = args->experts;
  float *const dp = mok::take_floats(scratch, experts);
  for (int64_t t = begin; t < end; ++t) {
    void *const out = mok::operand_at(args->precision, args->grad_logits, t * experts);
    if (args->token_mask[t] == 0) {
      memset(out, 0, static_cast<size_t>(experts) * mok::operand_bytes(args->precision));
      continue;
    }
    const float *const p = args->probabilities + t * experts;
    probability_gradient(args, t, p, dp);
    if (args->aux_scale != nullptr) {
      const float scale = args->aux_scale[t / args->group_tokens];
      const int32_t *const counts = args->counts + t / args->group_tokens * experts;
      for (int64_t e = 0; e < experts; ++e) dp[e] = mok::f32::fma(scale, static_cast<float>(counts[e]), dp[e]);
    }
    const float sum = mok::row_sum(experts, [=](float lane, int64_t e) { return mok::f32::fma(dp[e], p[e], lane); });
    for (int64_t e = 0; e < experts; ++e) dp[e] = p[e] * (dp[e] - sum);
    if (args->z_scale != 0.0f) {
      const float scale = args->z_scale * args->log_sum_exp[t];
      for (int64_t e = 0; e < experts; ++e) dp[e] = mok::f32::fma(scale, p[e], dp[e]);
    }
    mok::store_row(args->precision, experts, dp, out);
  }
}

void sums(const mok_router_sums_args *args, int64_t begin, int64_t end, int64_t *probability_sum, int64_t *z_sum) {
  for (int64_t t = begin; t < end; ++t) {
    if (args->token_mask[t] == 0) continue;
    const float *const p = args->probabilities + t * args->experts;
    for (int64_t e = 0; e < args->experts; ++e) probability_sum[e] += sum_term(p[e]);
    const float lse = args->log_sum_exp[t];
    *z_sum += sum_term(lse * lse);
  }
}

}  // namespace

extern const RouterTable router_table = {forward, backward_scratch, backward, sums};

}  // namespace MOK_ISA_NS
