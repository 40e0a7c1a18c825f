#include <cstring>

#include "common/functions.h"
#include "cpu/context.h"
#include "cpu/isa/functions.h"

namespace {

constexpr int64_t kChunk = 1 << 14;  // elements of a task

}  // namespace

extern "C" MOK_API mok_status mok_function(mok_context *context, const mok_function_args *args) {
  return mok::enter("mok_function", context, args, [&] {
    MOK_REQUIRE(args->name != nullptr, "name is NULL; allowed: the name of a function of section 3");
    MOK_REQUIRE(args->count >= 0, "count is %" PRId64 "; allowed: 0 or more", args->count);
    MOK_REQUIRE_POINTER(args->in, args->count);
    MOK_REQUIRE_POINTER(args->out, args->count);
    int index = 0;
    while (index < kFunctions && strcmp(args->name, kFunctionNames[index]) != 0) ++index;
    MOK_REQUIRE(index < kFunctions,
                "name is \"%.40s\"; allowed: exp, exp2, log, sigmoid, silu, silu_grad, rsqrt, sqrt, recip, sin, cos", args->name);
    const auto apply = MOK_ISA_PICK(context->isa, functions_table).apply[index];
    return mok::parallel_chunks(context, args->count, kChunk, [&](int64_t begin, int64_t end) {
      apply(end - begin, args->in + begin, args->out + begin);
    });
  });
}

extern "C" MOK_API mok_status mok_scalar(mok_context *context, mok_scalar_args *args) {
  return mok::enter("mok_scalar", context, args, [&] {
    MOK_REQUIRE(args->name != nullptr, "name is NULL; allowed: pow, cos, exp, log");
    const bool is_pow = strcmp(args->name, "pow") == 0, is_log = strcmp(args->name, "log") == 0;
    const bool is_cos = strcmp(args->name, "cos") == 0, is_exp = strcmp(args->name, "exp") == 0;
    MOK_REQUIRE(is_pow || is_log || is_cos || is_exp, "name is \"%.40s\"; allowed: pow, cos, exp, log", args->name);
    const double x = args->x, y = args->y;
    MOK_REQUIRE(__builtin_isfinite(x), "x is %g; allowed: a finite number", x);
    MOK_REQUIRE(!(is_pow || is_log) || x > 0.0, "x is %.17g; allowed for %s: above 0", x, args->name);
    MOK_REQUIRE(!is_pow || __builtin_isfinite(y), "y is %g; allowed: a finite number", y);
    MOK_REQUIRE(!is_cos || mok::f64::absolute(x) <= mok::f64::kCircleMax, "x is %.17g; allowed for cos: -2^31 to 2^31", x);
    args->out = is_pow ? mok::f64::pow(x, y) : is_log ? mok::f64::log(x) : is_cos ? mok::f64::cos(x) : mok::f64::exp(x);
    return MOK_OK;
  });
}
