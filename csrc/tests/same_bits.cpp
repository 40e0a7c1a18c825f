// Runs operations of mok.h on fixed inputs and prints a checksum of each one's output bytes, so that libraries built for other
// processors can be compared: the lines must be the same everywhere.
//
//   c++ -std=c++20 -Icsrc/include csrc/tests/same_bits.cpp PATH/libmok.so -Wl,-rpath,PATH -o same_bits && ./same_bits
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "mok.h"

namespace {

mok_context *context;

void must(mok_status status, const char *what) {
  if (status != MOK_OK) {
    std::fprintf(stderr, "%s: %s\n", what, mok_last_error());
    std::exit(1);
  }
}

template <typename T>
void print(const char *name, const std::vector<T> &values) {
  uint64_t sum = 0xCBF29CE484222325;  // FNV-1a, 64 bits
  const unsigned char *bytes = reinterpret_cast<const unsigned char *>(values.data());
  for (size_t i = 0; i < values.size() * sizeof(T); i++) {
    sum = (sum ^ bytes[i]) * 0x100000001B3;
  }
  std::printf("%-24s %016llx\n", name, static_cast<unsigned long long>(sum));
}

std::vector<float> normal(size_t count, uint64_t stream) {
  std::vector<float> out(count);
  const mok_random_normal_args args{.seed = 11, .stream = stream, .first = 0, .count = static_cast<int64_t>(count), .std = 1.0,
                                    .out = out.data()};
  must(mok_random_normal(context, &args), "mok_random_normal");
  return out;
}

std::vector<uint16_t> operand(const std::vector<float> &values) {
  std::vector<uint16_t> out(values.size());
  const mok_to_bf16_args args{.count = static_cast<int64_t>(values.size()), .in = values.data(), .out = out.data()};
  must(mok_to_bf16(context, &args), "mok_to_bf16");
  return out;
}

void functions() {
  std::vector<float> in(1 << 16), out(1 << 16);
  for (size_t i = 0; i < in.size(); i++) {
    const uint32_t bits = static_cast<uint32_t>(i) * 65537u;
    std::memcpy(&in[i], &bits, sizeof bits);
  }
  for (const char *name : {"exp", "exp2", "log", "sigmoid", "silu", "silu_grad", "rsqrt", "sqrt", "recip", "sin", "cos"}) {
    const mok_function_args args{.name = name, .count = static_cast<int64_t>(in.size()), .in = in.data(), .out = out.data()};
    must(mok_function(context, &args), name);
    print(name, out);
  }
}

void products() {
  const int64_t m = 67, n = 83, k = 131;
  const std::vector<float> a = normal(m * k, 1), b = normal(n * k, 2);
  const std::vector<uint16_t> a16 = operand(a), b16 = operand(b);
  std::vector<float> c(m * n);
  for (int32_t precision : {MOK_FP32, MOK_BF16}) {
    const void *left = precision == MOK_BF16 ? static_cast<const void *>(a16.data()) : a.data();
    const void *right = precision == MOK_BF16 ? static_cast<const void *>(b16.data()) : b.data();
    const mok_product_args args{.precision = precision, .out_bf16 = 0, .trans_a = 0, .trans_b = 1, .m = m, .n = n, .k = k,
                                .lda = k, .ldb = k, .ldc = n, .a = left, .b = right, .c = c.data(), .initial = nullptr,
                                .addend = nullptr};
    must(mok_product(context, &args), "mok_product");
    print(precision == MOK_BF16 ? "product bf16" : "product fp32", c);
  }
}

void attention() {
  const int64_t sequences = 2, length = 37, heads = 4, kv_heads = 2, size = 24, tokens = sequences * length;
  const std::vector<uint16_t> q = operand(normal(tokens * heads * size, 3)), k = operand(normal(tokens * kv_heads * size, 4)),
                              v = operand(normal(tokens * kv_heads * size, 5));
  std::vector<uint16_t> out(tokens * heads * size);
  std::vector<float> row_max(tokens * heads), row_recip(tokens * heads);
  const mok_attention_forward_args args{.precision = MOK_BF16, .sequences = sequences, .length = length, .heads = heads,
                                        .kv_heads = kv_heads, .head_size = size, .ld_v = kv_heads * size, .scale = 0.2f,
                                        .q = q.data(), .k = k.data(), .v = v.data(), .out = out.data(),
                                        .row_max = row_max.data(), .row_recip = row_recip.data()};
  must(mok_attention_forward(context, &args), "mok_attention_forward");
  print("attention", out);
  print("attention row_recip", row_recip);
}

void norm_and_loss() {
  const int64_t rows = 19, columns = 301;
  const std::vector<float> x = normal(rows * columns, 6), weight = normal(columns, 7);
  std::vector<float> out(rows * columns), rstd(rows), gradient(rows * columns);
  const mok_rmsnorm_forward_args norm{.precision = MOK_FP32, .rows = rows, .columns = columns, .epsilon = 1e-6f, .x = x.data(),
                                      .weight = weight.data(), .out = out.data(), .rstd = rstd.data()};
  must(mok_rmsnorm_forward(context, &norm), "mok_rmsnorm_forward");
  print("rmsnorm", out);
  std::vector<int32_t> labels(rows), status(1);
  for (int64_t i = 0; i < rows; i++) {
    labels[i] = static_cast<int32_t>(i * 13 % columns);
  }
  std::vector<int64_t> loss(1);
  const mok_cross_entropy_args entropy{.precision = MOK_FP32, .rows = rows, .vocabulary = columns, .logits = out.data(),
                                       .labels = labels.data(), .loss_sum = loss.data(), .grad_logits = gradient.data(),
                                       .status = status.data()};
  must(mok_cross_entropy(context, &entropy), "mok_cross_entropy");
  print("cross entropy gradient", gradient);
  print("loss sum", loss);
}

}  // namespace

int main() {
  const mok_context_options options{.threads = 2, .isa = MOK_ISA_AUTO, .device = 0, .tile_limit = 0, .stream = nullptr};
  must(mok_context_create(&options, &context), "mok_context_create");
  print("normal", normal(4096, 1));
  functions();
  products();
  attention();
  norm_and_loss();
  mok_context_destroy(context);
  return 0;
}
