#include <vector>

#include "common/sums.h"
#include "cpu/checks.h"
#include "cpu/context.h"
#include "cpu/isa/rows.h"

namespace {

constexpr int64_t kTaskElements = 1 << 15;
constexpr int64_t kTaskColumns = 512;  // of tasks that run down the rows

int64_t blocks_of(int64_t count, int64_t block) { return count / block + (count % block != 0); }

int64_t rows_of_task(int64_t columns) { return std::max<int64_t>(1, kTaskElements / columns); }

mok_status check_ids(int64_t tokens, int64_t vocabulary, const int32_t *ids) {
  for (int64_t t = 0; t < tokens; ++t) {
    MOK_REQUIRE(ids[t] >= 0 && ids[t] < vocabulary, "ids[%" PRId64 "] is %d; allowed: 0 to %" PRId64, t, ids[t], vocabulary - 1);
  }
  return MOK_OK;
}

}  // namespace

extern "C" MOK_API mok_status mok_embedding_forward(mok_context *context, const mok_embedding_forward_args *args) {
  return mok::enter("mok_embedding_forward", context, args, [&] {
    MOK_TRY(mok::check_precision(args->precision));
    MOK_REQUIRE_RANGE(args, tokens, 0, mok::kRowsMax);
    MOK_REQUIRE_RANGE(args, vocabulary, 1, mok::kRowsMax);
    MOK_REQUIRE_RANGE(args, hidden, 1, mok::kWidthMax);
    MOK_REQUIRE_POINTER(args->ids, args->tokens);
    MOK_REQUIRE_POINTER(args->table, args->tokens);
    MOK_REQUIRE_POINTER(args->out, args->tokens);
    MOK_TRY(check_ids(args->tokens, args->vocabulary, args->ids));
    const RowsTable &table = MOK_ISA_PICK(context->isa, rows_table);
    return mok::parallel_chunks(context, args->tokens, rows_of_task(args->hidden),
                                [&](int64_t begin, int64_t end) { table.embedding_forward(args, begin, end); });
  });
}

extern "C" MOK_API mok_status mok_embedding_backward(mok_context *context, const mok_embedding_backward_args *args) {
  return mok::enter("mok_embedding_backward", context, args, [&] {
    MOK_REQUIRE_RANGE(args, tokens, 0, mok::kRowsMax);
    MOK_REQUIRE_RANGE(args, vocabulary, 1, mok::kRowsMax);
    MOK_REQUIRE_RANGE(args, hidden, 1, mok::kWidthMax);
    MOK_REQUIRE_POINTER(args->ids, args->tokens);
    MOK_REQUIRE_POINTER(args->grad_out, args->tokens);
    MOK_REQUIRE_POINTER(args->grad_table, args->tokens);
    MOK_TRY(check_ids(args->tokens, args->vocabulary, args->ids));
    // Tokens by id, then position; one run of equal ids is one row.
    std::vector<int32_t> tokens(static_cast<size_t>(args->tokens));
    for (size_t t = 0; t < tokens.size(); ++t) tokens[t] = static_cast<int32_t>(t);
    const int32_t *const ids = args->ids;
    std::sort(tokens.begin(), tokens.end(),
              [ids](int32_t a, int32_t b) { return ids[a] != ids[b] ? ids[a] < ids[b] : a < b; });
    std::vector<size_t> starts;
    for (size_t t = 0; t < tokens.size(); ++t) {
      if (t == 0 || ids[tokens[t]] != ids[tokens[t - 1]]) starts.push_back(t);
    }
    const int64_t runs = static_cast<int64_t>(starts.size());
    starts.push_back(tokens.size());
    const int64_t width = mok::min_block(context, kTaskColumns), parts = blocks_of(args->hidden, width);
    const RowsTable &table = MOK_ISA_PICK(context->isa, rows_table);
    return mok::parallel_for(context, runs * parts, 0, [&](int64_t task, mok::Scratch *) {
      const size_t run = static_cast<size_t>(task / parts);
      const int64_t begin = task % parts * width;
      table.embedding_backward(args, tokens.data() + starts[run], static_cast<int64_t>(starts[run + 1] - starts[run]), begin,
                               std::min(args->hidden, begin + width));
    });
  });
}

extern "C" MOK_API mok_status mok_rmsnorm_forward(mok_context *context, const mok_rmsnorm_forward_args *args) {
  return mok::enter("mok_rmsnorm_forward", context, args, [&] {
    MOK_TRY(mok::check_precision(args->precision));
    MOK_REQUIRE_RANGE(args, rows, 0, mok::kRowsMax);
    MOK_REQUIRE_RANGE(args, columns, 1, mok::kWidthMax);
    MOK_REQUIRE(args->epsilon >= 0.0f, "epsilon is %g; allowed: 0 or more", static_cast<double>(args->epsilon));
    MOK_REQUIRE_POINTER(args->x, args->rows);
    MOK_REQUIRE_POINTER(args->weight, args->rows);
    MOK_REQUIRE_POINTER(args->out, args->rows);
    MOK_REQUIRE_POINTER(args->rstd, args->rows);
    const RowsTable &table = MOK_ISA_PICK(context->isa, rows_table);
    return mok::parallel_chunks(context, args->rows, rows_of_task(args->columns),
                                [&](int64_t begin, int64_t end) { table.rmsnorm_forward(args, begin, end); });
  });
}

extern "C" MOK_API mok_status mok_rmsnorm_backward(mok_context *context, const mok_rmsnorm_backward_args *args) {
  return mok::enter("mok_rmsnorm_backward", context, args, [&] {
    MOK_REQUIRE_RANGE(args, rows, 0, mok::kRowsMax);
    MOK_REQUIRE_RANGE(args, columns, 1, mok::kWidthMax);
    MOK_REQUIRE_POINTER(args->x, args->rows);
    MOK_REQUIRE_POINTER(args->weight, args->rows);
    MOK_REQUIRE_POINTER(args->rstd, args->rows);
    MOK_REQUIRE_POINTER(args->grad_out, args->rows);
    MOK_REQUIRE_POINTER(args->grad_x, args->rows);
    const int64_t rows = args->rows, columns = args->columns;
    const RowsTable &table = MOK_ISA_PICK(context->isa, rows_table);
    if (args->grad_weight != nullptr) {  // before grad_x: on failure nothing has been written
      const int64_t width = mok::min_block(context, kTaskColumns), parts = blocks_of(columns, width);
      const int64_t blocks = blocks_of(rows, mok::kTokenBlock);
      std::vector<float> sums(static_cast<size_t>(std::max<int64_t>(1, blocks) * columns));
      MOK_TRY(mok::parallel_for(context, blocks * parts, 0, [&](int64_t task, mok::Scratch *) {
        const int64_t block = task / parts, first = block * mok::kTokenBlock, begin = task % parts * width;
        table.rmsnorm_weight_block(args, first, std::min(rows, first + mok::kTokenBlock), begin, std::min(columns, begin + width),
                                   sums.data() + block * columns);
      }));
      MOK_TRY(mok::parallel_for(context, parts, 0, [&](int64_t task, mok::Scratch *) {
        const int64_t begin = task * width;
        table.rmsnorm_weight_join(args, blocks, begin, std::min(columns, begin + width), sums.data());
      }));
    }
    return mok::parallel_chunks(context, rows, rows_of_task(columns),
                                [&](int64_t begin, int64_t end) { table.rmsnorm_backward(args, begin, end); });
  });
}
