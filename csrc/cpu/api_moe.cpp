#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "cpu/checks.h"
#include "cpu/context.h"
#include "cpu/isa/experts.h"
#include "cpu/isa/router.h"

namespace {

constexpr int64_t kTaskElements = 1 << 14;
constexpr int64_t kSegmentRows = 16;  // (expert, group) segments of rows are padded to multiples of it: docs/arithmetic.md 10.3

int64_t ceil_divide(int64_t a, int64_t b) { return a / b + (a % b != 0); }

// Rows of `columns` elements in a task.
int64_t task_rows(const mok_context *context, int64_t columns) {
  return mok::min_block(context, std::max<int64_t>(1, kTaskElements / columns));
}

// body(begin, end, scratch) over [0, rows) in runs of at most `chunk`.
template <typename Body>
mok_status parallel_rows(mok_context *context, int64_t rows, int64_t chunk, size_t scratch_bytes, const Body &body) {
  return mok::parallel_for(context, ceil_divide(rows, chunk), scratch_bytes, [&](int64_t task, mok::Scratch *scratch) {
    body(task * chunk, std::min(rows, (task + 1) * chunk), scratch);
  });
}

// The checks of tokens, experts and top_k.
template <typename Args>
mok_status check_choice(const Args *args) {
  MOK_REQUIRE_RANGE(args, tokens, 0, mok::kRowsMax);
  MOK_REQUIRE_RANGE(args, experts, 1, mok::kWidthMax);
  MOK_REQUIRE_RANGE(args, top_k, 1, args->experts);
  MOK_REQUIRE(args->tokens * args->top_k <= mok::kRowsMax, "tokens * top_k is %" PRId64 "; allowed: at most %" PRId64,
              args->tokens * args->top_k, mok::kRowsMax);
  return MOK_OK;
}

// Every chosen expert exists and no token has chosen one twice.
mok_status check_chosen(const mok_routing_plan_args *args) {
  for (int64_t t = 0; t < args->tokens; ++t) {
    if (args->token_mask[t] == 0) continue;
    const int32_t *const chosen = args->expert_index + t * args->top_k;
    for (int64_t k = 0; k < args->top_k; ++k) {
      MOK_REQUIRE(chosen[k] >= 0 && chosen[k] < args->experts,
                  "expert_index[%" PRId64 ",%" PRId64 "] is %d; allowed: 0 to %" PRId64, t, k, chosen[k], args->experts - 1);
      for (int64_t other = 0; other < k; ++other) {
        MOK_REQUIRE(chosen[other] != chosen[k],
                    "expert_index[%" PRId64 ",%" PRId64 "] is %d, which the token has chosen before", t, k, chosen[k]);
      }
    }
  }
  return MOK_OK;
}

std::vector<int32_t> count_routed(const mok_routing_plan_args *args) {
  std::vector<int32_t> counts(static_cast<size_t>(args->groups * args->experts), 0);
  for (int64_t t = 0; t < args->tokens; ++t) {
    if (args->token_mask[t] == 0) continue;
    int32_t *const group = counts.data() + t / args->group_tokens * args->experts;
    for (int64_t k = 0; k < args->top_k; ++k) ++group[args->expert_index[t * args->top_k + k]];
  }
  return counts;
}

// Where each (group, expert) segment starts, laid out like counts; offsets [experts + 1].
std::vector<int32_t> segment_starts(const mok_routing_plan_args *args, const std::vector<int32_t> &counts,
                                    std::vector<int64_t> *offsets) {
  std::vector<int32_t> starts(counts.size());
  int64_t row = 0;
  for (int64_t e = 0; e < args->experts; ++e) {
    (*offsets)[static_cast<size_t>(e)] = row;
    for (int64_t g = 0; g < args->groups; ++g) {
      const size_t segment = static_cast<size_t>(g * args->experts + e);
      starts[segment] = static_cast<int32_t>(row);
      row += ceil_divide(counts[segment], kSegmentRows) * kSegmentRows;
    }
  }
  (*offsets)[static_cast<size_t>(args->experts)] = row;
  return starts;
}

// Fills the outputs; `next` holds the next free row of each segment.
void write_plan(const mok_routing_plan_args *args, std::vector<int32_t> next) {
  std::fill_n(args->row_token, args->rows_capacity, -1);
  std::fill_n(args->row_slot, args->rows_capacity, -1);
  std::fill_n(args->slot_row, args->tokens * args->top_k, -1);
  for (int64_t t = 0; t < args->tokens; ++t) {
    if (args->token_mask[t] == 0) continue;
    int32_t *const group = next.data() + t / args->group_tokens * args->experts;
    for (int64_t slot = t * args->top_k; slot < (t + 1) * args->top_k; ++slot) {
      const int32_t row = group[args->expert_index[slot]]++;
      args->row_token[row] = static_cast<int32_t>(t);
      args->row_slot[row] = static_cast<int32_t>(slot);
      args->slot_row[slot] = row;
    }
  }
}

mok_status check_swiglu(int32_t precision, int64_t rows, int64_t intermediate) {
  MOK_TRY(mok::check_precision(precision));
  MOK_TRY(mok::check_range("rows", rows, 0, mok::kRowsMax));
  return mok::check_range("intermediate", intermediate, 1, mok::kWidthMax);
}

}  // namespace

extern "C" MOK_API mok_status mok_router_forward(mok_context *context, const mok_router_forward_args *args) {
  return mok::enter("mok_router_forward", context, args, [&] {
    MOK_TRY(check_choice(args));
    MOK_REQUIRE_POINTER(args->logits, args->tokens);
    MOK_REQUIRE_POINTER(args->probabilities, args->tokens);
    MOK_REQUIRE_POINTER(args->log_sum_exp, args->tokens);
    MOK_REQUIRE_POINTER(args->expert_index, args->tokens);
    MOK_REQUIRE_POINTER(args->expert_weight, args->tokens);
    MOK_REQUIRE_POINTER(args->status, 1);
    const RouterTable &table = MOK_ISA_PICK(context->isa, router_table);
    std::atomic<bool> failed{false};
    const int64_t rows = task_rows(context, args->experts);
    MOK_TRY(parallel_rows(context, args->tokens, rows, 0, [&](int64_t begin, int64_t end, mok::Scratch *) {
      if (table.forward(args, begin, end)) failed.store(true, std::memory_order_relaxed);
    }));
    if (failed.load(std::memory_order_relaxed)) *args->status = 1;
    return MOK_OK;
  });
}

extern "C" MOK_API mok_status mok_routing_plan(mok_context *context, const mok_routing_plan_args *args) {
  return mok::enter("mok_routing_plan", context, args, [&] {
    MOK_TRY(check_choice(args));
    MOK_REQUIRE_RANGE(args, group_tokens, 1, mok::kRowsMax);
    MOK_REQUIRE(args->groups == ceil_divide(args->tokens, args->group_tokens),
                "groups is %" PRId64 "; allowed: %" PRId64 " for %" PRId64 " tokens in groups of %" PRId64, args->groups,
                ceil_divide(args->tokens, args->group_tokens), args->tokens, args->group_tokens);
    MOK_REQUIRE_RANGE(args, rows_capacity, 0, mok::kRowsMax);
    MOK_REQUIRE_POINTER(args->expert_index, args->tokens);
    MOK_REQUIRE_POINTER(args->token_mask, args->tokens);
    MOK_REQUIRE_POINTER(args->row_token, args->rows_capacity);
    MOK_REQUIRE_POINTER(args->row_slot, args->rows_capacity);
    MOK_REQUIRE_POINTER(args->slot_row, args->tokens);
    MOK_REQUIRE_POINTER(args->expert_offsets, 1);
    MOK_REQUIRE_POINTER(args->counts, args->groups);
    MOK_TRY(check_chosen(args));
    const std::vector<int32_t> counts = count_routed(args);
    std::vector<int64_t> offsets(static_cast<size_t>(args->experts + 1));
    std::vector<int32_t> starts = segment_starts(args, counts, &offsets);
    MOK_REQUIRE(offsets.back() <= args->rows_capacity,
                "rows_capacity is %" PRId64 "; allowed: %" PRId64 " or more for this routing", args->rows_capacity,
                offsets.back());
    std::copy(counts.begin(), counts.end(), args->counts);
    std::copy(offsets.begin(), offsets.end(), args->expert_offsets);
    write_plan(args, std::move(starts));
    return MOK_OK;
  });
}

extern "C" MOK_API mok_status mok_router_backward(mok_context *context, const mok_router_backward_args *args) {
  return mok::enter("mok_router_backward", context, args, [&] {
    MOK_TRY(mok::check_precision(args->precision));
    MOK_TRY(check_choice(args));
    MOK_REQUIRE_RANGE(args, group_tokens, 1, mok::kRowsMax);
    MOK_REQUIRE(std::isfinite(args->z_scale), "z_scale is %g; allowed: finite numbers", static_cast<double>(args->z_scale));
    MOK_REQUIRE_POINTER(args->probabilities, args->tokens);
    MOK_REQUIRE_POINTER(args->expert_weight, args->tokens);
    MOK_REQUIRE_POINTER(args->expert_index, args->tokens);
    MOK_REQUIRE_POINTER(args->grad_weight, args->tokens);
    MOK_REQUIRE_POINTER(args->token_mask, args->tokens);
    MOK_REQUIRE_POINTER(args->grad_logits, args->tokens);
    if (args->aux_scale != nullptr) MOK_REQUIRE_POINTER(args->counts, args->tokens);
    if (args->z_scale != 0) MOK_REQUIRE_POINTER(args->log_sum_exp, args->tokens);
    const RouterTable &table = MOK_ISA_PICK(context->isa, router_table);
    return parallel_rows(context, args->tokens, task_rows(context, args->experts), table.backward_scratch(args->experts),
                         [&](int64_t begin, int64_t end, mok::Scratch *scratch) { table.backward(args, begin, end, scratch); });
  });
}

extern "C" MOK_API mok_status mok_router_sums(mok_context *context, const mok_router_sums_args *args) {
  return mok::enter("mok_router_sums", context, args, [&] {
    MOK_REQUIRE_RANGE(args, tokens, 0, mok::kRowsMax);
    MOK_REQUIRE_RANGE(args, experts, 1, mok::kWidthMax);
    MOK_REQUIRE_RANGE(args, group_tokens, 1, mok::kRowsMax);
    MOK_REQUIRE_POINTER(args->probabilities, args->tokens);
    MOK_REQUIRE_POINTER(args->log_sum_exp, args->tokens);
    MOK_REQUIRE_POINTER(args->token_mask, args->tokens);
    MOK_REQUIRE_POINTER(args->probability_sum, args->tokens);
    MOK_REQUIRE_POINTER(args->z_sum, 1);
    const RouterTable &table = MOK_ISA_PICK(context->isa, router_table);
    const int64_t experts = args->experts, chunk = std::min(args->group_tokens, task_rows(context, experts));
    const int64_t group_chunks = ceil_divide(args->group_tokens, chunk);
    const int64_t groups = ceil_divide(args->tokens, args->group_tokens);
    const size_t bytes = static_cast<size_t>(experts + 1) * sizeof(int64_t);
    return mok::parallel_for(context, groups * group_chunks, mok::scratch_bytes(bytes), [&](int64_t task, mok::Scratch *scratch) {
      const int64_t group = task / group_chunks, begin = group * args->group_tokens + task % group_chunks * chunk;
      const int64_t end = std::min({args->tokens, (group + 1) * args->group_tokens, begin + chunk});
      int64_t *const sums = static_cast<int64_t *>(mok::scratch_take(scratch, bytes));
      memset(sums, 0, bytes);
      table.sums(args, begin, end, sums, sums + experts);
      int64_t *const out = args->probability_sum + group * experts;  // integers: the order of the adds can't matter
      for (int64_t e = 0; e < experts; ++e) std::atomic_ref<int64_t>(out[e]).fetch_add(sums[e], std::memory_order_relaxed);
      std::atomic_ref<int64_t>(*args->z_sum).fetch_add(sums[experts], std::memory_order_relaxed);
    });
  });
}

extern "C" MOK_API mok_status mok_swiglu_forward(mok_context *context, const mok_swiglu_forward_args *args) {
  return mok::enter("mok_swiglu_forward", context, args, [&] {
    MOK_TRY(check_swiglu(args->precision, args->rows, args->intermediate));
    MOK_REQUIRE_POINTER(args->gate_up, args->rows);
    MOK_REQUIRE_POINTER(args->out, args->rows);
    const ExpertsTable &table = MOK_ISA_PICK(context->isa, experts_table);
    const auto body = [&](int64_t begin, int64_t end, mok::Scratch *memory) { table.swiglu_forward(args, begin, end, memory); };
    const size_t scratch_bytes = table.swiglu_scratch(args->intermediate);
    return parallel_rows(context, args->rows, task_rows(context, args->intermediate), scratch_bytes, body);
  });
}

extern "C" MOK_API mok_status mok_swiglu_backward(mok_context *context, const mok_swiglu_backward_args *args) {
  return mok::enter("mok_swiglu_backward", context, args, [&] {
    MOK_TRY(check_swiglu(args->precision, args->rows, args->intermediate));
    MOK_REQUIRE_RANGE(args, slots, 0, mok::kRowsMax);
    MOK_REQUIRE_POINTER(args->gate_up, args->rows);
    MOK_REQUIRE_POINTER(args->grad_act, args->rows);
    MOK_REQUIRE_POINTER(args->grad_gate_up, args->rows);
    MOK_REQUIRE(args->row_slot != nullptr || (args->slot_weight == nullptr && args->grad_slot_weight == nullptr),
                "row_slot is NULL; allowed with slot_weight or grad_slot_weight: a pointer to each row's slot");
    for (int64_t row = 0; args->row_slot != nullptr && row < args->rows; ++row) {
      MOK_REQUIRE(args->row_slot[row] >= -1 && args->row_slot[row] < args->slots,
                  "row_slot[%" PRId64 "] is %d; allowed: -1 to %" PRId64, row, args->row_slot[row], args->slots - 1);
    }
    const ExpertsTable &table = MOK_ISA_PICK(context->isa, experts_table);
    const size_t scratch_bytes = table.swiglu_scratch(args->intermediate);
    const int64_t slots = args->grad_slot_weight != nullptr ? args->slots : 0;
    MOK_TRY(parallel_rows(context, slots, kTaskElements, scratch_bytes, [&](int64_t begin, int64_t end, mok::Scratch *) {
      std::fill(args->grad_slot_weight + begin, args->grad_slot_weight + end, 0.0f);  // of slots without a row
    }));
    const auto body = [&](int64_t begin, int64_t end, mok::Scratch *memory) { table.swiglu_backward(args, begin, end, memory); };
    return parallel_rows(context, args->rows, task_rows(context, args->intermediate), scratch_bytes, body);
  });
}

extern "C" MOK_API mok_status mok_combine(mok_context *context, const mok_combine_args *args) {
  return mok::enter("mok_combine", context, args, [&] {
    MOK_TRY(mok::check_precision(args->precision));
    MOK_REQUIRE_RANGE(args, tokens, 0, mok::kRowsMax);
    MOK_REQUIRE_RANGE(args, top_k, 0, mok::kWidthMax);
    MOK_REQUIRE_RANGE(args, hidden, 1, mok::kWidthMax);
    MOK_REQUIRE_POINTER(args->rows, args->tokens * args->top_k);
    MOK_REQUIRE_POINTER(args->slot_row, args->tokens * args->top_k);
    MOK_REQUIRE_POINTER(args->out, args->tokens);
    const ExpertsTable &table = MOK_ISA_PICK(context->isa, experts_table);
    return parallel_rows(context, args->tokens, task_rows(context, args->hidden), table.combine_scratch(args->hidden),
                         [&](int64_t begin, int64_t end, mok::Scratch *scratch) { table.combine(args, begin, end, scratch); });
  });
}
