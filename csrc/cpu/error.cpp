#include "cpu/error.h"

#include <cstdarg>
#include <cstdio>

namespace mok {
namespace {

thread_local const char *entry_name = "mok";
thread_local char last_error[1024] = "";

}  // namespace

void set_entry(const char *name) noexcept { entry_name = name; }

mok_status fail(mok_status status, const char *file, int line, const char *format, ...) noexcept {
  char message[768];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  std::snprintf(last_error, sizeof last_error, "%s: %s (%s:%d)", entry_name, message, file, line);
  return status;
}

}  // namespace mok

extern "C" MOK_API const char *mok_last_error(void) { return mok::last_error; }
