// Every form of the matrix products on the GPU against the definition, bit for bit: bf16 against the integer model of
// common/tensor_core_rule.h, fp32 against a plain fma chain. Each tile of the table, ragged sizes, unaligned operands, gathered
// rows.
#include <functional>
#include <type_traits>

#include "common/tensor_core_rule.h"
#include "tests/cuda_harness.cuh"

using namespace mok;
using namespace mok::test;

namespace {

// An output element by the definition. Strides are in elements.
struct Reference {
  const void *a, *b;
  int64_t a_row, a_k, b_column, b_k;  // strides
  const int32_t *a_rows, *b_rows;     // gathered: of the strided dimension that mok.h names
  bool rows_are_depth;                // by depth: the gathered index is k
  int64_t k, k_end;
  const float *initial, *addend;
  void *c;
  int64_t m, n, ldc;
  bool bf16, out_bf16;
};

__device__ int64_t at(const int32_t *rows, int64_t i) { return rows == nullptr ? i : rows[i]; }

template <typename T>
__device__ T element(const T *base, int64_t outer, int64_t outer_stride, int64_t k, int64_t k_stride, const int32_t *rows,
                     bool rows_are_depth) {
  const int64_t o = rows_are_depth ? outer : at(rows, outer);
  const int64_t d = rows_are_depth ? at(rows, k) : k;
  return o < 0 || d < 0 ? T(0) : base[o * outer_stride + d * k_stride];
}

__global__ void reference_kernel(Reference r) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < r.m * r.n; i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t row = i / r.n;
    const int64_t column = i % r.n;
    const float start = r.initial == nullptr ? 0.0f : r.initial[row * r.ldc + column];
    float chain = start;
    if (r.bf16) {
      const auto *a = static_cast<const uint16_t *>(r.a);
      const auto *b = static_cast<const uint16_t *>(r.b);
      chain = f32::from_bits(rule::chain(
          f32::bits(start), r.k_end - r.k,
          [&](int64_t k) { return element(a, row, r.a_row, r.k + k, r.a_k, r.a_rows, r.rows_are_depth); },
          [&](int64_t k) { return element(b, column, r.b_column, r.k + k, r.b_k, r.b_rows, r.rows_are_depth); }));
    } else {
      const auto *a = static_cast<const float *>(r.a);
      const auto *b = static_cast<const float *>(r.b);
      for (int64_t k = r.k; k < r.k_end; ++k) {
        chain = f32::fma(element(a, row, r.a_row, k, r.a_k, r.a_rows, r.rows_are_depth),
                         element(b, column, r.b_column, k, r.b_k, r.b_rows, r.rows_are_depth), chain);
      }
    }
    chain = f32::add(chain, 0.0f);
    if (r.addend != nullptr) chain = f32::add(r.addend[row * r.ldc + column], chain);
    if (r.out_bf16) {
      static_cast<uint16_t *>(r.c)[row * r.ldc + column] = to_bf16(chain);
    } else {
      static_cast<float *>(r.c)[row * r.ldc + column] = chain;
    }
  }
}

void run_reference(const Reference &reference) {
  if (reference.m * reference.n == 0) return;
  reference_kernel<<<1024, 128>>>(reference);
  need(cudaGetLastError(), "reference");
}

template <typename T>
constexpr bool kIsBf16 = std::is_same_v<T, uint16_t>;

struct Dense {
  int64_t m, n, k;
  int ta, tb;
  int64_t pad;    // elements more in each leading dimension
  size_t offset;  // bytes that operands and outputs are off their alignment
  bool out_bf16, initial, addend, in_place;
  Values values;
};

template <typename T>
void check_dense(mok_context *context, const Dense &d, const std::string &tile) {
  const int64_t lda = (d.ta ? d.m : d.k) + d.pad;
  const int64_t ldb = (d.tb ? d.k : d.n) + d.pad;
  const int64_t ldc = d.n + d.pad;
  Device<T> a(static_cast<size_t>((d.ta ? d.k : d.m) * lda), d.offset),
      b(static_cast<size_t>((d.tb ? d.n : d.k) * ldb), d.offset);
  Device<float> extra(static_cast<size_t>(d.m * ldc), d.offset * 2);
  Device<float> got(static_cast<size_t>(d.m * ldc), d.offset * 2), want(static_cast<size_t>(d.m * ldc), d.offset * 2);
  fill(a, 1, d.values);
  fill(b, 2, d.values);
  fill(extra, 3, d.values);
  if (d.in_place) {
    got.copy_from(extra);
    want.copy_from(extra);
  }
  const float *own = d.in_place ? got.data() : extra.data();
  mok_product_args args{kIsBf16<T> ? MOK_BF16 : MOK_FP32,
                        d.out_bf16,
                        d.ta,
                        d.tb,
                        d.m,
                        d.n,
                        d.k,
                        lda,
                        ldb,
                        ldc,
                        a.data(),
                        b.data(),
                        got.data(),
                        d.initial ? own : nullptr,
                        d.addend ? own : nullptr};
  char text[200];
  std::snprintf(text, sizeof text,
                "%s %s dense %" PRId64 "x%" PRId64 "x%" PRId64 " ta=%d tb=%d pad=%" PRId64
                " offset=%zu out_bf16=%d initial=%d addend=%d values=%d",
                tile.c_str(), kIsBf16<T> ? "bf16" : "fp32", d.m, d.n, d.k, d.ta, d.tb, d.pad, d.offset, d.out_bf16, d.initial,
                d.addend, static_cast<int>(d.values));
  if (!ok(mok_product(context, &args), text)) return;
  run_reference(Reference{a.data(), b.data(), d.ta ? 1 : lda, d.ta ? lda : 1, d.tb ? ldb : 1, d.tb ? 1 : ldb, nullptr, nullptr,
                          false, 0, d.k, d.initial ? extra.data() : nullptr, d.addend ? extra.data() : nullptr, want.data(), d.m,
                          d.n, ldc, kIsBf16<T>, d.out_bf16});
  same<uint32_t>(got.data(), want.data(), got.count(), text);
}

void dense_tests(mok_context *context, const std::string &tile) {
  const int64_t sizes[][3] = {{1, 1, 1},     {64, 128, 64},  {128, 256, 128}, {77, 131, 33}, {300, 520, 200}, {257, 129, 1000},
                              {130, 40, 17}, {5, 1000, 640}, {1000, 7, 64},   {256, 512, 0}, {384, 776, 328}};
  int count = 0;
  for (const auto &size : sizes) {
    for (int trans = 0; trans < 4; ++trans) {
      for (const auto &[pad, offset] : {std::pair<int64_t, size_t>{0, 0}, {8, 0}, {3, 0}, {8, 2}}) {
        ++count;
        Dense d{size[0], size[1], size[2], trans & 1, trans >> 1, pad,
                offset,  false,   false,   false,     false,      static_cast<Values>(count % 3)};
        d.initial = count % 4 == 1;
        d.addend = count % 4 == 2;
        d.in_place = count % 8 < 4;
        d.out_bf16 = count % 4 == 3;
        check_dense<uint16_t>(context, d, tile);
        d.offset *= 2;
        check_dense<float>(context, d, tile);
      }
    }
  }
}

// Runs of rows: some empty, some ragged; `multiple` is what their lengths are rounded up to.
std::vector<int32_t> offsets_of(int groups, int multiple, uint64_t seed) {
  std::vector<int32_t> offsets{0};
  for (int g = 0; g < groups; ++g) {
    const auto random = static_cast<int32_t>(mixed(seed + static_cast<uint64_t>(g)) % 400);
    const int32_t rows = random % 5 == 0 ? 0 : random;
    offsets.push_back(offsets.back() + (rows + multiple - 1) / multiple * multiple);
  }
  return offsets;
}

std::vector<int32_t> gathered(int64_t count, int64_t source_rows, uint64_t seed) {
  std::vector<int32_t> rows(static_cast<size_t>(count));
  for (size_t i = 0; i < rows.size(); ++i) {
    const uint64_t random = mixed(seed + i);
    rows[i] = random % 11 == 0 ? -1 : static_cast<int32_t>((random >> 8) % static_cast<uint64_t>(source_rows));
  }
  return rows;
}

template <typename T>
void check_by_rows(mok_context *context, int groups, int64_t n, int64_t k, int tb, bool gather, bool out_bf16,
                   const std::string &tile) {
  const std::vector<int32_t> offsets = offsets_of(groups, 1, 77 + static_cast<uint64_t>(groups));
  const int64_t rows = offsets.back();
  const int64_t capacity = rows + 100;  // rows beyond the last run are not touched
  const int64_t sources = gather ? 211 : capacity;
  Device<int32_t> device_offsets(offsets.size()), indices(static_cast<size_t>(capacity));
  device_offsets.upload(offsets);
  indices.upload(gathered(capacity, sources, 5));
  Device<T> a(static_cast<size_t>(sources * k)), b(static_cast<size_t>(groups * n * k));
  Device<float> got(static_cast<size_t>(capacity * n)), want(static_cast<size_t>(capacity * n));
  fill(a, 11, Values::kSpread);
  fill(b, 12, Values::kSpread);
  mok_grouped_product_args args{};
  args.precision = kIsBf16<T> ? MOK_BF16 : MOK_FP32;
  args.out_bf16 = out_bf16;
  args.trans_b = tb;
  args.groups = groups;
  args.m = capacity;
  args.n = n;
  args.k = k;
  args.row_offsets = device_offsets.data();
  args.a_rows = gather ? indices.data() : nullptr;
  args.a = a.data();
  args.b = b.data();
  args.c = got.data();
  char text[160];
  std::snprintf(text, sizeof text, "%s %s by rows groups=%d n=%" PRId64 " k=%" PRId64 " tb=%d gather=%d out_bf16=%d",
                tile.c_str(), kIsBf16<T> ? "bf16" : "fp32", groups, n, k, tb, gather, out_bf16);
  if (!ok(mok_grouped_product_by_rows(context, &args), text)) return;
  for (int g = 0; g < groups; ++g) {
    const int64_t first = offsets[static_cast<size_t>(g)];
    const T *own = b.data() + g * n * k;
    char *c = reinterpret_cast<char *>(want.data()) + first * n * (out_bf16 ? 2 : 4);
    run_reference(Reference{gather ? a.data() : a.data() + first * k, own, k, 1, tb ? k : 1, tb ? 1 : n,
                            gather ? indices.data() + first : nullptr, nullptr, false, 0, k, nullptr, nullptr, c,
                            offsets[static_cast<size_t>(g) + 1] - first, n, n, kIsBf16<T>, out_bf16});
  }
  same<uint32_t>(got.data(), want.data(), got.count(), text);
}

template <typename T>
void check_by_depth(mok_context *context, int groups, int64_t m, int64_t n, int gather, bool initial, const std::string &tile) {
  const std::vector<int32_t> offsets = offsets_of(groups, 16, 99 + static_cast<uint64_t>(groups));
  const int64_t capacity = offsets.back() + 48;
  const int64_t sources = capacity;
  Device<int32_t> device_offsets(offsets.size()), a_rows(static_cast<size_t>(capacity)), b_rows(static_cast<size_t>(capacity));
  device_offsets.upload(offsets);
  a_rows.upload(gathered(capacity, sources, 6));
  b_rows.upload(gathered(capacity, sources, 7));
  Device<T> a(static_cast<size_t>(sources * m)), b(static_cast<size_t>(sources * n));
  Device<float> got(static_cast<size_t>(groups * m * n)), want(static_cast<size_t>(groups * m * n)),
      start(static_cast<size_t>(groups * m * n));
  fill(a, 21, Values::kSpread);
  fill(b, 22, Values::kSpread);
  fill(start, 23, Values::kSpread);
  got.copy_from(start);
  mok_grouped_product_args args{};
  args.precision = kIsBf16<T> ? MOK_BF16 : MOK_FP32;
  args.groups = groups;
  args.m = m;
  args.n = n;
  args.k = capacity;
  args.row_offsets = device_offsets.data();
  args.a_rows = gather & 1 ? a_rows.data() : nullptr;
  args.b_rows = gather & 2 ? b_rows.data() : nullptr;
  args.a = a.data();
  args.b = b.data();
  args.c = got.data();
  args.initial = initial ? got.data() : nullptr;
  char text[160];
  std::snprintf(text, sizeof text, "%s %s by depth groups=%d m=%" PRId64 " n=%" PRId64 " gather=%d initial=%d", tile.c_str(),
                kIsBf16<T> ? "bf16" : "fp32", groups, m, n, gather, initial);
  if (!ok(mok_grouped_product_by_depth(context, &args), text)) return;
  for (int g = 0; g < groups; ++g) {
    run_reference(Reference{a.data(), b.data(), 1, m, 1, n, args.a_rows, args.b_rows, true, offsets[static_cast<size_t>(g)],
                            offsets[static_cast<size_t>(g) + 1], initial ? start.data() + g * m * n : nullptr, nullptr,
                            want.data() + g * m * n, m, n, n, kIsBf16<T>, false});
  }
  same<uint32_t>(got.data(), want.data(), got.count(), text);
}

void grouped_tests(mok_context *context, const std::string &tile) {
  for (int variant = 0; variant < 8; ++variant) {
    const int tb = variant & 1;
    const bool gather = variant & 2;
    const bool out_bf16 = variant & 4;
    check_by_rows<uint16_t>(context, 9, 200, 136, tb, gather, out_bf16, tile);
    check_by_rows<uint16_t>(context, 40, 264, 72, tb, gather, out_bf16, tile);
    check_by_rows<uint16_t>(context, 3, 33, 45, tb, gather, out_bf16, tile);
    check_by_rows<float>(context, 9, 200, 136, tb, gather, out_bf16, tile);
    check_by_rows<float>(context, 3, 33, 45, tb, gather, out_bf16, tile);
  }
  for (int gather = 0; gather < 4; ++gather) {
    for (const bool initial : {false, true}) {
      check_by_depth<uint16_t>(context, 9, 136, 264, gather, initial, tile);
      check_by_depth<uint16_t>(context, 5, 67, 45, gather, initial, tile);
      check_by_depth<float>(context, 9, 136, 200, gather, initial, tile);
      check_by_depth<float>(context, 5, 67, 45, gather, initial, tile);
    }
  }
}

// A large product: every output against the model, and 20 runs against the first.
void large_test(mok_context *context) {
  const int64_t m = 2048, n = 2304, k = 1088;
  Dense d{m, n, k, 0, 1, 0, 0, false, true, false, false, Values::kSpread};
  check_dense<uint16_t>(context, d, "best");
  check_dense<float>(context, d, "best");
  Device<uint16_t> a(m * k), b(n * k);
  Device<float> first(m * n), again(m * n);
  fill(a, 1, Values::kSpread);
  fill(b, 2, Values::kSpread);
  for (int run = 0; run < 20; ++run) {
    Device<float> &c = run == 0 ? first : again;
    mok_product_args args{MOK_BF16, 0, 0, 1, m, n, k, k, k, n, a.data(), b.data(), c.data(), nullptr, nullptr};
    if (!ok(mok_product(context, &args), "repeated product")) return;
    if (run > 0) same<uint32_t>(again.data(), first.data(), first.count(), "repeated product, run " + std::to_string(run));
  }
}

}  // namespace

int main() {
  for (int tile = 0; tile <= 5; ++tile) {
    mok_context *context = context_with(tile);
    if (tile == 0) std::printf("%s\n", mok_context_info(context));
    const std::string name = "tile " + std::to_string(tile);
    dense_tests(context, name);
    grouped_tests(context, name);
    if (tile == 0) large_test(context);
    mok_context_destroy(context);
    std::printf("%s: %" PRId64 " words so far, %d failures\n", name.c_str(), compared, failures);
  }
  return finish("cuda_products");
}
