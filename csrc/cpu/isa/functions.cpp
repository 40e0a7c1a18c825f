#include "cpu/isa/functions.h"

#include "common/functions.h"

namespace MOK_ISA_NS {
namespace {

#define MOK_APPLY(name)                                            \
  void apply_##name(int64_t count, const float *in, float *out) {  \
    for (int64_t i = 0; i < count; ++i) out[i] = mok::f32::name(in[i]); \
  }
MOK_APPLY(exp)
MOK_APPLY(exp2)
MOK_APPLY(log)
MOK_APPLY(sigmoid)
MOK_APPLY(silu)
MOK_APPLY(silu_grad)
MOK_APPLY(rsqrt)
MOK_APPLY(sqrt)
MOK_APPLY(recip)
MOK_APPLY(sin)
MOK_APPLY(cos)
#undef MOK_APPLY

}  // namespace

extern const FunctionsTable functions_table = {{apply_exp, apply_exp2, apply_log, apply_sigmoid, apply_silu, apply_silu_grad,
                                                apply_rsqrt, apply_sqrt, apply_recip, apply_sin, apply_cos}};

}  // namespace MOK_ISA_NS
