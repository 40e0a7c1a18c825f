// Argument checks that several entries share. Each returns MOK_OK or records the sentence (error.h).
#pragma once

#include <cinttypes>

#include "cpu/error.h"

namespace mok {

constexpr int64_t kWidthMax = 1 << 20;  // columns, heads, experts: keeps products of sizes far from overflow
constexpr int64_t kRowsMax = INT32_MAX;  // rows and tokens: their indices are int32

inline mok_status check_precision(int32_t precision) {
  MOK_REQUIRE(precision == MOK_FP32 || precision == MOK_BF16, "precision is %d; allowed: 0 (fp32), 1 (bf16)", precision);
  return MOK_OK;
}

inline mok_status check_range(const char *name, int64_t value, int64_t least, int64_t most) {
  MOK_REQUIRE(value >= least && value <= most, "%s is %" PRId64 "; allowed: %" PRId64 " to %" PRId64, name, value, least, most);
  return MOK_OK;
}

}  // namespace mok

// Requires args->field in [least, most].
#define MOK_REQUIRE_RANGE(args, field, least, most) MOK_TRY(::mok::check_range(#field, (args)->field, least, most))
