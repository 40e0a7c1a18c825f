#include "cpu/isa/product.h"

#include "cpu/isa/product_step.h"

namespace MOK_ISA_NS {
namespace {

void chain_bf16(const mok::SerialProduct &p, int64_t i, int64_t j, float *acc) {
  const uint16_t *a = static_cast<const uint16_t *>(p.a) + i * p.a_row;
  const uint16_t *b = static_cast<const uint16_t *>(p.b) + j * p.b_column;
  for (int64_t begin = 0; begin < p.k; begin += 16) {
    uint16_t a16[16] = {}, b16[16] = {};
    for (int64_t q = 0; q < 16 && begin + q < p.k; ++q) {
      a16[q] = a[(begin + q) * p.a_depth];
      b16[q] = b[(begin + q) * p.b_depth];
    }
    *acc = tensor_core_step(*acc, a16, b16);
  }
}

void chain_fp32(const mok::SerialProduct &p, int64_t i, int64_t j, float *acc) {
  const float *a = static_cast<const float *>(p.a) + i * p.a_row;
  const float *b = static_cast<const float *>(p.b) + j * p.b_column;
  for (int64_t q = 0; q < p.k; ++q) *acc = __builtin_fmaf(a[q * p.a_depth], b[q * p.b_depth], *acc);
}

}  // namespace

size_t serial_product_scratch(int32_t, int64_t, int64_t, int64_t) { return 0; }

void serial_product(const mok::SerialProduct *product, mok::Scratch *) {
  const mok::SerialProduct &p = *product;
  for (int64_t i = 0; i < p.m; ++i) {
    for (int64_t j = 0; j < p.n; ++j) {
      float acc = p.initial == nullptr ? 0.0f : p.initial[i * p.c_row + j];
      if (p.precision == MOK_BF16) {
        chain_bf16(p, i, j, &acc);
      } else {
        chain_fp32(p, i, j, &acc);
      }
      p.c[i * p.c_row + j] = canonical_nan(acc + 0.0f);
    }
  }
}

extern const ProductTable product_table = {serial_product_scratch, serial_product};

}  // namespace MOK_ISA_NS
