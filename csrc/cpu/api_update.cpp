#include <vector>

#include "cpu/checks.h"
#include "cpu/context.h"
#include "cpu/isa/update.h"

namespace {

constexpr int64_t kChunk = 1 << 13;  // elements of a task: their weights are still in the first cache when they become bf16

int64_t blocks_of(int64_t count, int64_t block) { return count / block + (count % block != 0); }

mok_status check_sizes(const mok_sum_squares_args *args) {
  MOK_REQUIRE(args->matrices >= 0 && args->rows >= 0 && args->columns >= 0,
              "matrices, rows, columns are %" PRId64 ", %" PRId64 ", %" PRId64 "; allowed: 0 or more", args->matrices, args->rows,
              args->columns);
  int64_t elements;
  MOK_REQUIRE(!__builtin_mul_overflow(args->rows, args->columns, &elements) &&
                  !__builtin_mul_overflow(elements, args->matrices, &elements) && elements <= INT64_MAX / 4,
              "matrices, rows, columns are %" PRId64 ", %" PRId64 ", %" PRId64 "; allowed: a product that fits memory",
              args->matrices, args->rows, args->columns);
  MOK_REQUIRE_POINTER(args->in, elements);
  MOK_REQUIRE_POINTER(args->out, args->matrices);
  return MOK_OK;
}

}  // namespace

extern "C" MOK_API mok_status mok_sum_squares(mok_context *context, const mok_sum_squares_args *args) {
  return mok::enter("mok_sum_squares", context, args, [&] {
    MOK_TRY(check_sizes(args));
    const int64_t block_rows = blocks_of(args->rows, kSquareBlock);
    const int64_t block_columns = blocks_of(args->columns, kSquareBlock);
    const int64_t blocks = block_rows * block_columns;  // of a matrix
    const int64_t run = mok::min_block(context, kSquareBlocks), runs = blocks_of(block_columns, run);
    std::vector<float> sums(static_cast<size_t>(args->matrices * blocks));
    const UpdateTable &table = MOK_ISA_PICK(context->isa, update_table);
    MOK_TRY(mok::parallel_for(context, args->matrices * block_rows * runs, 0, [&](int64_t task, mok::Scratch *) {
      const int64_t row = task / runs, matrix = row / block_rows, block_row = row % block_rows;
      const int64_t first = task % runs * run;
      table.square_blocks(args->rows, args->columns, args->in + matrix * args->rows * args->columns, block_row, first,
                          std::min(block_columns, first + run), sums.data() + row * block_columns + first);
    }));
    return mok::parallel_for(context, args->matrices, 0, [&](int64_t matrix, mok::Scratch *) {
      args->out[matrix] = table.tree(blocks, sums.data() + matrix * blocks);
    });
  });
}

extern "C" MOK_API mok_status mok_adamw(mok_context *context, const mok_adamw_args *args) {
  return mok::enter("mok_adamw", context, args, [&] {
    MOK_REQUIRE(args->count >= 0, "count is %" PRId64 "; allowed: 0 or more", args->count);
    MOK_REQUIRE_POINTER(args->weight, args->count);
    MOK_REQUIRE_POINTER(args->first, args->count);
    MOK_REQUIRE_POINTER(args->second, args->count);
    MOK_REQUIRE_POINTER(args->grad, args->count);
    MOK_REQUIRE(args->status != nullptr, "status is NULL; allowed: a pointer to the step's status");
    if (*args->status != 0) return MOK_OK;
    const UpdateTable &table = MOK_ISA_PICK(context->isa, update_table);
    return mok::parallel_chunks(context, args->count, kChunk, [&](int64_t begin, int64_t end) { table.adamw(args, begin, end); });
  });
}
