#include <vector>

#include "common/philox.h"
#include "cpu/checks.h"
#include "cpu/context.h"
#include "cpu/isa/random.h"

namespace {

constexpr int64_t kNormalChunk = 1 << 13;
constexpr int64_t kPermutationChunk = 1 << 8;
constexpr int64_t kRopeElements = 1 << 12;

}  // namespace

extern "C" MOK_API mok_status mok_random_normal(mok_context *context, const mok_random_normal_args *args) {
  return mok::enter("mok_random_normal", context, args, [&] {
    int64_t last;
    MOK_REQUIRE(args->first >= 0 && args->count >= 0 && !__builtin_add_overflow(args->first, args->count, &last) &&
                    last < INT64_MAX,
                "first and count are %" PRId64 " and %" PRId64 "; allowed: 0 or more, with a sum below 2^63 - 1", args->first,
                args->count);
    MOK_REQUIRE(__builtin_isfinite(args->std) && args->std >= 0.0, "std is %g; allowed: a finite number, 0 or more", args->std);
    MOK_REQUIRE_POINTER(args->out, args->count);
    const RandomTable &table = MOK_ISA_PICK(context->isa, random_table);
    return mok::parallel_chunks(context, args->count, kNormalChunk,
                                [&](int64_t begin, int64_t end) { table.normal(args, begin, end); });
  });
}

extern "C" MOK_API mok_status mok_permutation(mok_context *context, const mok_permutation_args *args) {
  return mok::enter("mok_permutation", context, args, [&] {
    MOK_REQUIRE_RANGE(args, n, 1, mok::kPermutationMax);
    MOK_REQUIRE_RANGE(args, first, 0, args->n);
    MOK_REQUIRE_RANGE(args, count, 0, args->n - args->first);
    MOK_REQUIRE_POINTER(args->out, args->count);
    return mok::parallel_chunks(context, args->count, kPermutationChunk, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        args->out[i] = static_cast<int64_t>(mok::permute(args->seed, args->stream, static_cast<uint64_t>(args->n),
                                                         static_cast<uint64_t>(args->first + i)));
      }
    });
  });
}

extern "C" MOK_API mok_status mok_philox(mok_context *context, mok_philox_args *args) {
  return mok::enter("mok_philox", context, args, [&] {
    const mok::PhiloxBlock block = mok::philox(args->key[0], args->key[1],
                                               {{args->counter[0], args->counter[1], args->counter[2], args->counter[3]}});
    for (int i = 0; i < 4; ++i) args->out[i] = block.word[i];
    return MOK_OK;
  });
}

extern "C" MOK_API mok_status mok_rope_table(mok_context *context, const mok_rope_table_args *args) {
  return mok::enter("mok_rope_table", context, args, [&] {
    MOK_REQUIRE_RANGE(args, positions, 0, mok::kRowsMax);
    MOK_REQUIRE_RANGE(args, head_size, 2, mok::kWidthMax);
    MOK_REQUIRE(args->head_size % 2 == 0, "head_size is %" PRId64 "; allowed: an even number", args->head_size);
    MOK_REQUIRE(args->base >= 1.0 && __builtin_isfinite(args->base), "base is %g; allowed: 1 or more, finite", args->base);
    MOK_REQUIRE_POINTER(args->cos_sin, args->positions);
    const RandomTable &table = MOK_ISA_PICK(context->isa, random_table);
    std::vector<double> frequency(static_cast<size_t>(args->head_size / 2));
    table.rope_frequencies(args->head_size, args->base, frequency.data());
    return mok::parallel_chunks(context, args->positions, std::max<int64_t>(1, kRopeElements / args->head_size),
                                [&](int64_t begin, int64_t end) { table.rope_rows(args, frequency.data(), begin, end); });
  });
}
