#include "cpu/context.h"
#include "cpu/isa/convert.h"

namespace {

constexpr int64_t kChunk = 1 << 15;  // elements of a task

}  // namespace

extern "C" MOK_API mok_status mok_add(mok_context *context, const mok_add_args *args) {
  return mok::enter("mok_add", context, args, [&] {
    MOK_REQUIRE(args->count >= 0, "count is %" PRId64 "; allowed: 0 or more", args->count);
    MOK_REQUIRE_POINTER(args->a, args->count);
    MOK_REQUIRE_POINTER(args->b, args->count);
    MOK_REQUIRE_POINTER(args->out, args->count);
    const ConvertTable &table = MOK_ISA_PICK(context->isa, convert_table);
    return mok::parallel_chunks(context, args->count, kChunk, [&](int64_t begin, int64_t end) {
      table.add(end - begin, args->a + begin, args->b + begin, args->out + begin);
    });
  });
}

extern "C" MOK_API mok_status mok_to_bf16(mok_context *context, const mok_to_bf16_args *args) {
  return mok::enter("mok_to_bf16", context, args, [&] {
    MOK_REQUIRE(args->count >= 0, "count is %" PRId64 "; allowed: 0 or more", args->count);
    MOK_REQUIRE_POINTER(args->in, args->count);
    MOK_REQUIRE_POINTER(args->out, args->count);
    const ConvertTable &table = MOK_ISA_PICK(context->isa, convert_table);
    return mok::parallel_chunks(context, args->count, kChunk, [&](int64_t begin, int64_t end) {
      table.to_bf16(end - begin, args->in + begin, args->out + begin);
    });
  });
}
