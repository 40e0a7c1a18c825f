// Errors of the C ABI: a status and, for mok_last_error(), a sentence that names the entry, the argument, its value, what is
// allowed, and the source line. Functions that can fail return a mok_status; nothing throws on purpose.
#pragma once

#include "mok.h"

namespace mok {

// Records "<entry>: <message> (<file>:<line>)" for mok_last_error() of this thread and returns status.
[[gnu::format(printf, 4, 5)]] mok_status fail(mok_status status, const char *file, int line, const char *format, ...) noexcept;

// The entry point that this thread is in; named in messages.
void set_entry(const char *name) noexcept;

}  // namespace mok

#define MOK_FAIL(status, ...) return ::mok::fail(status, __FILE__, __LINE__, __VA_ARGS__)

// The caller's mistake: MOK_REQUIRE(args->count >= 0, "count is %" PRId64 "; allowed: 0 or more", args->count)
#define MOK_REQUIRE(condition, ...)       \
  do {                                    \
    if (!(condition)) [[unlikely]] {      \
      MOK_FAIL(MOK_INVALID, __VA_ARGS__); \
    }                                     \
  } while (0)

// A pointer that may be NULL only if `elements` is 0.
#define MOK_REQUIRE_POINTER(pointer, elements) \
  MOK_REQUIRE((pointer) != nullptr || (elements) == 0, #pointer " is NULL; allowed: a pointer to its elements")

// Hands an error of a helper on.
#define MOK_TRY(expression)                                                                      \
  do {                                                                                           \
    if (const mok_status mok_try_status = (expression); mok_try_status != MOK_OK) [[unlikely]] { \
      return mok_try_status;                                                                     \
    }                                                                                            \
  } while (0)
