#include <atomic>

#include "cpu/checks.h"
#include "cpu/context.h"
#include "cpu/isa/loss.h"

namespace {

constexpr int64_t kTaskElements = 1 << 14;
constexpr int64_t kVocabularyMax = 1 << 24;

mok_status check(const mok_cross_entropy_args *args) {
  MOK_TRY(mok::check_precision(args->precision));
  MOK_REQUIRE_RANGE(args, rows, 0, mok::kRowsMax);
  MOK_REQUIRE_RANGE(args, vocabulary, 1, kVocabularyMax);
  MOK_REQUIRE_POINTER(args->logits, args->rows);
  MOK_REQUIRE_POINTER(args->labels, args->rows);
  MOK_REQUIRE_POINTER(args->loss_sum, args->rows);
  MOK_REQUIRE_POINTER(args->status, args->rows);
  for (int64_t r = 0; r < args->rows; ++r) {
    const int32_t label = args->labels[r];
    MOK_REQUIRE(label >= -1 && label < args->vocabulary, "labels[%" PRId64 "] is %d; allowed: -1 to %" PRId64, r, label,
                args->vocabulary - 1);
  }
  return MOK_OK;
}

}  // namespace

extern "C" MOK_API mok_status mok_cross_entropy(mok_context *context, const mok_cross_entropy_args *args) {
  return mok::enter("mok_cross_entropy", context, args, [&] {
    MOK_TRY(check(args));
    const LossTable &table = MOK_ISA_PICK(context->isa, loss_table);
    const int64_t chunk = mok::min_block(context, std::max<int64_t>(1, kTaskElements / args->vocabulary));
    const int64_t tasks = args->rows / chunk + (args->rows % chunk != 0);
    const size_t room_bytes = static_cast<size_t>(args->vocabulary) * sizeof(float);
    std::atomic<int64_t> total{0};  // integers: the order can't matter
    std::atomic<bool> finite{true};
    MOK_TRY(mok::parallel_for(context, tasks, mok::scratch_bytes(room_bytes), [&](int64_t task, mok::Scratch *scratch) {
      const int64_t end = std::min(args->rows, (task + 1) * chunk);
      float *const room = static_cast<float *>(mok::scratch_take(scratch, room_bytes));
      int64_t sum = 0;
      for (int64_t row = task * chunk; row < end; ++row) {
        if (args->labels[row] < 0) {
          table.ignored_row(args, row);
          continue;
        }
        int64_t loss;
        if (!table.row(args, row, &loss, room)) finite = false;
        sum += loss;
      }
      total += sum;
    }));
    if (args->rows == 0) return MOK_OK;
    *args->loss_sum += total;
    if (!finite) *args->status = 1;
    return MOK_OK;
  });
}
