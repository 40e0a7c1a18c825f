#include "cpu/isa/convert.h"

#include "common/bf16.h"

namespace MOK_ISA_NS {
namespace {

void add(int64_t count, const float *a, const float *b, float *out) {
  for (int64_t i = 0; i < count; ++i) out[i] = mok::f32::canonical(a[i] + b[i]);
}

void to_bf16(int64_t count, const float *in, uint16_t *out) {
  for (int64_t i = 0; i < count; ++i) out[i] = mok::to_bf16(in[i]);
}

}  // namespace

extern const ConvertTable convert_table = {add, to_bf16};

}  // namespace MOK_ISA_NS
