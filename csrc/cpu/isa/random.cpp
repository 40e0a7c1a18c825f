#include "cpu/isa/random.h"

#include "common/philox.h"

namespace MOK_ISA_NS {
namespace {

namespace f64 = mok::f64;

void normal(const mok_random_normal_args *args, int64_t begin, int64_t end) {
  constexpr uint64_t kPairs = 256;
  double even[kPairs], odd[kPairs];
  const uint64_t first = static_cast<uint64_t>(args->first + begin), last = static_cast<uint64_t>(args->first + end);
  const uint64_t seed = args->seed, stream = args->stream;
  for (uint64_t pair = first / 2; 2 * pair < last; pair += kPairs) {
    const uint64_t left = (last + 1) / 2 - pair, pairs = left < kPairs ? left : kPairs;
    for (uint64_t p = 0; p < pairs; ++p) mok::normal_pair(seed, stream, pair + p, &even[p], &odd[p]);
    for (uint64_t p = 0; p < pairs; ++p) {
      const uint64_t i = 2 * (pair + p);
      float *const out = args->out + begin + static_cast<int64_t>(i - first);
      if (i >= first) out[0] = static_cast<float>(f64::mul(args->std, even[p]));
      if (i + 1 < last) out[1] = static_cast<float>(f64::mul(args->std, odd[p]));
    }
  }
}

void rope_frequencies(int64_t head_size, double base, double *frequency) {
  const double log_base = f64::log(base);
  for (int64_t i = 0; i < head_size / 2; ++i) {
    const double exponent = f64::div(static_cast<double>(-2 * i), static_cast<double>(head_size));
    frequency[i] = f64::exp(f64::mul(exponent, log_base));
  }
}

void rope_rows(const mok_rope_table_args *args, const double *frequency, int64_t begin, int64_t end) {
  const int64_t half = args->head_size / 2;
  for (int64_t position = begin; position < end; ++position) {
    float *const cos = args->cos_sin + position * args->head_size, *const sin = cos + half;
    const double at = static_cast<double>(position);
    for (int64_t i = 0; i < half; ++i) {
      const double angle = f64::mul(at, frequency[i]);
      cos[i] = static_cast<float>(f64::cos(angle));
      sin[i] = static_cast<float>(f64::sin(angle));
    }
  }
}

}  // namespace

extern const RandomTable random_table = {normal, rope_frequencies, rope_rows};

}  // namespace MOK_ISA_NS
