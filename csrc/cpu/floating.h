// The floating-point environment of docs/arithmetic.md section 2: nearest even, subnormals kept. Other libraries leak
// flush-to-zero into their threads, so every entry sets it and puts the caller's back.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace mok {

class FloatingEnvironment {
 public:
  FloatingEnvironment() noexcept : saved_(read()) { write(kOurs); }
  ~FloatingEnvironment() { write(saved_); }
  FloatingEnvironment(const FloatingEnvironment &) = delete;
  FloatingEnvironment &operator=(const FloatingEnvironment &) = delete;

 private:
#if defined(__x86_64__)
  using Register = uint32_t;
  static constexpr Register kOurs = 0x1F80;
  static Register read() noexcept { return _mm_getcsr(); }
  static void write(Register value) noexcept { _mm_setcsr(value); }
#elif defined(__aarch64__)
  using Register = uint64_t;
  static constexpr Register kOurs = 0;
  static Register read() noexcept {
    Register value;
    __asm__ volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void write(Register value) noexcept { __asm__ volatile("msr fpcr, %0" : : "r"(value)); }
#else
#error "say here how this processor's rounding mode and flush-to-zero are set"
#endif
  Register saved_;
};

}  // namespace mok
