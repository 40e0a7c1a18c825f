#include "cpu/isa/product.h"

#include "common/bf16.h"
#include "cpu/isa/product_bf16.h"
#include "cpu/isa/product_fp32.h"

namespace MOK_ISA_NS {
namespace {

constexpr int64_t kDepthsAtOnce = 2048;          // of A packed at a time, a multiple of kFp32Depth
constexpr int64_t kRowsMost = 288;               // of a task; a multiple of every kernel's rows
constexpr size_t kRowsBytes = 896 * 1024;        // of A packed at a time: most of a second-level cache
constexpr size_t kOverrun = 16 * sizeof(float);  // fp32_pack writes whole rows of 16

int64_t panel_width(int32_t precision) { return precision == MOK_BF16 ? kPanel : kFp32Columns; }
int64_t row_group(int32_t precision) { return precision == MOK_BF16 ? kGroup : kFp32Rows; }

int64_t panel_columns(int32_t precision, int64_t tile_limit) {
  const int64_t width = panel_width(precision);
  return tile_limit > 0 ? least(width, tile_limit) : width;
}

int64_t depths_at_once(int64_t tile_limit) { return tile_limit > 0 ? least(kDepthsAtOnce, kBlock * tile_limit) : kDepthsAtOnce; }

// Depths of a block of a kernel's work in precision fp32.
int64_t fp32_depths(int64_t depths_most) { return least(kFp32Depth, depths_most); }

size_t panel_bytes(int32_t precision, int64_t k) {
  if (precision == MOK_BF16) return panel_header_bytes(k) + static_cast<size_t>(blocks_of(k, kBlock)) * sizeof(ColumnBlock);
  return mok::scratch_bytes(static_cast<size_t>(k) * kFp32Columns * sizeof(float) + kOverrun);
}

void pack_panel(int32_t precision, const mok::ProductOperand *b, int64_t k, int64_t first_column, int64_t columns, void *panel) {
  if (precision == MOK_BF16) {
    bf16_pack_panel(b, k, first_column, columns, panel);
  } else {
    fp32_pack(b, first_column, columns, fp32_vectors(columns) * kLanes, 0, k, static_cast<float *>(panel));
  }
}

int64_t rows_block(int32_t precision, int64_t k, int64_t tile_limit) {
  const size_t row_bytes = static_cast<size_t>(most(1, least(k, kDepthsAtOnce))) * (precision == MOK_BF16 ? 8 : 4);
  int64_t rows = least(kRowsMost, static_cast<int64_t>(kRowsBytes / row_bytes) / 12 * 12);
  return tile_limit > 0 ? least(rows, tile_limit) : rows;
}

// The memory of one task: packed rows of A for some depths, and the accumulators of one panel, or of all if A comes in parts.
struct Work {
  int64_t depths, groups, panels, tile_rows;
  size_t info_bytes, rows_bytes, tile_bytes, state_bytes;
};

Work plan_work(int32_t precision, int64_t m, int64_t panels, int64_t k, int64_t depths_most) {
  Work work = {};
  work.depths = depths_most;
  const int64_t depths = least(k, work.depths), blocks = blocks_of(depths, kBlock);
  work.groups = blocks_of(m, row_group(precision));
  work.tile_rows = work.groups * row_group(precision);
  work.panels = k > work.depths ? panels : 1;
  if (precision == MOK_BF16) {
    work.info_bytes = mok::scratch_bytes(static_cast<size_t>(work.groups * blocks) * sizeof(BlockInfo));
    work.rows_bytes = static_cast<size_t>(work.groups * blocks) * sizeof(RowBlock);
    work.state_bytes = static_cast<size_t>(work.tile_rows) * kVectors;
  } else {
    const int64_t parts = blocks_of(depths, fp32_depths(depths_most)) * work.groups;
    work.rows_bytes = mok::scratch_bytes(static_cast<size_t>(m * depths + parts * kTile) * sizeof(float));
  }
  work.tile_bytes = static_cast<size_t>(work.tile_rows * panel_width(precision)) * sizeof(float);
  return work;
}

size_t work_bytes(const Work *work, int64_t panels) {
  return work->info_bytes + work->rows_bytes + mok::scratch_bytes(static_cast<size_t>(panels) * work->tile_bytes) +
         mok::scratch_bytes(static_cast<size_t>(panels) * work->state_bytes);
}

size_t rows_scratch(int32_t precision, int64_t m, int64_t n, int64_t k, int64_t tile_limit) {
  const Work work = plan_work(precision, m, blocks_of(n, panel_columns(precision, tile_limit)), k, depths_at_once(tile_limit));
  return work_bytes(&work, work.panels);
}

// Element [i, j] of c.
int64_t output_offset(const mok::ProductRows *product, int64_t i, int64_t j) {
  return product->turned != 0 ? j * product->ldc + i : i * product->ldc + j;
}

// Accumulators of a panel before the chain: the initial values or +0; rows and columns that don't exist are +0.
void start_tile(const mok::ProductRows *product, const Work *work, int64_t column, int64_t columns, const Scales *scales,
                float *tile, uint8_t *plain) {
  const int64_t width = panel_width(product->precision);
  if (product->initial == nullptr || columns < width || product->m < work->tile_rows) memset(tile, 0, work->tile_bytes);
  for (int64_t i = 0; i < product->m && product->initial != nullptr; ++i) {
    const float *const from = product->initial + output_offset(product, i, column);
    if (product->turned != 0) {
      for (int64_t j = 0; j < columns; ++j) tile[i * width + j] = from[j * product->ldc];
    } else {
      memcpy(tile + i * width, from, static_cast<size_t>(columns) * sizeof(float));
    }
  }
  if (product->precision != MOK_BF16) return;
  memset(plain, scales->window ? 0 : 1, work->state_bytes);
  if (product->initial == nullptr || !scales->window) return;
  for (int64_t s = 0; s < work->tile_rows * kVectors; ++s) plain[s] = enter_window(scales, tile + s * kTile) ? 0 : 1;
}

// Finished chains of a row to the output: + 0.0f, the addend, the output's type (4.3, 4.4).
void finish_row_fp32(const float *from, int64_t columns, const float *addend, float *to) {
  if (addend != nullptr) {
    for (int64_t j = 0; j < columns; ++j) to[j] = mok::f32::canonical(addend[j] + (from[j] + 0.0f));
  } else {
    for (int64_t j = 0; j < columns; ++j) to[j] = mok::f32::canonical(from[j] + 0.0f);
  }
}

void finish_row_bf16(const float *from, int64_t columns, const float *addend, uint16_t *to) {
  if (addend != nullptr) {
    for (int64_t j = 0; j < columns; ++j) to[j] = mok::to_bf16(addend[j] + (from[j] + 0.0f));
  } else {
    for (int64_t j = 0; j < columns; ++j) to[j] = mok::to_bf16(from[j] + 0.0f);
  }
}

// The same for columns `stride` apart.
void finish_apart(bool out_bf16, const float *from, int64_t columns, const float *addend, int64_t stride, void *to) {
  float values[kPanel > kFp32Columns ? kPanel : kFp32Columns];
  for (int64_t j = 0; j < columns; ++j) values[j] = addend != nullptr ? addend[j * stride] + (from[j] + 0.0f) : from[j] + 0.0f;
  for (int64_t j = 0; j < columns; ++j) {
    if (out_bf16) {
      static_cast<uint16_t *>(to)[j * stride] = mok::to_bf16(values[j]);
    } else {
      static_cast<float *>(to)[j * stride] = mok::f32::canonical(values[j]);
    }
  }
}

void finish_tile(const mok::ProductRows *product, int64_t column, int64_t columns, const Scales *scales, float *tile,
                 const uint8_t *plain) {
  const int64_t width = panel_width(product->precision);
  for (int64_t i = 0; i < product->m; ++i) {
    float *const from = tile + i * width;
    for (int v = 0; v < kVectors && product->precision == MOK_BF16; ++v) {
      if (plain[i * kVectors + v] == 0) leave_window(scales, from + v * kTile);
    }
    const int64_t at = output_offset(product, i, column);
    const float *const addend = product->addend != nullptr ? product->addend + at : nullptr;
    void *const to = static_cast<unsigned char *>(product->c) + at * (product->out_bf16 != 0 ? 2 : 4);
    if (product->turned != 0) {
      finish_apart(product->out_bf16 != 0, from, columns, addend, product->ldc, to);
    } else if (product->out_bf16 != 0) {
      finish_row_bf16(from, columns, addend, static_cast<uint16_t *>(to));
    } else {
      finish_row_fp32(from, columns, addend, static_cast<float *>(to));
    }
  }
}

// The header of a task's rows, for all the panels that they meet.
Header task_header(const mok::ProductRows *product) {
  int64_t below = 0, lowest = 0;
  const unsigned char *panel = product->panels;
  for (int64_t j = 0; j < product->n; j += product->panel_columns, panel += panel_bytes(MOK_BF16, product->k)) {
    const Header *const header = reinterpret_cast<const Header *>(panel);
    below = most(below, header->largest - header->lowest);
    lowest = least(lowest, header->lowest);
  }
  return rows_header(&product->a, product->first_row, product->m, product->k, static_cast<int32_t>(below),
                     static_cast<int32_t>(lowest));
}

void product_rows(const mok::ProductRows *product, mok::Scratch *scratch) {
  if (product->m == 0 || product->n == 0) return;
  const bool bf16 = product->precision == MOK_BF16;
  const int64_t k = product->k, columns = product->panel_columns;
  const Work work =
      plan_work(product->precision, product->m, blocks_of(product->n, columns), k, depths_at_once(product->tile_limit));
  const size_t used = scratch->used;
  BlockInfo *const info = static_cast<BlockInfo *>(mok::scratch_take(scratch, work.info_bytes));
  void *const rows = mok::scratch_take(scratch, work.rows_bytes);
  float *const tiles = static_cast<float *>(mok::scratch_take(scratch, static_cast<size_t>(work.panels) * work.tile_bytes));
  uint8_t *const states = static_cast<uint8_t *>(mok::scratch_take(scratch, static_cast<size_t>(work.panels) * work.state_bytes));
  const Header header = bf16 ? task_header(product) : Header{};
  const int64_t fp32_block = fp32_depths(work.depths);

  int64_t depth = 0;
  do {
    const int64_t depths = least(work.depths, k - depth);
    const bool first = depth == 0, last = depth + depths == k;
    if (bf16) {
      bf16_pack_rows(&product->a, &header, product->first_row, product->m, depth, depths, info, static_cast<RowBlock *>(rows));
    } else {
      fp32_pack_rows(&product->a, product->first_row, product->m, depth, depths, fp32_block, static_cast<float *>(rows));
    }
    const unsigned char *panel = product->panels;
    for (int64_t j = 0, q = 0; j < product->n; j += columns, ++q, panel += panel_bytes(product->precision, k)) {
      const int64_t held = least(columns, product->n - j), slot = work.panels > 1 ? q : 0;
      float *const tile = tiles + static_cast<size_t>(slot) * (work.tile_bytes / sizeof(float));
      uint8_t *const plain = states + static_cast<size_t>(slot) * work.state_bytes;
      const Scales scales = bf16 ? make_scales(&header, reinterpret_cast<const Header *>(panel), k) : Scales{};
      const int64_t element = product->out_bf16 != 0 ? 2 : 4;
      const unsigned char *const out = static_cast<const unsigned char *>(product->c) + j * element;
      const Output output = {last && product->turned == 0 ? out : nullptr, product->ldc * element, held * element, product->m};
      if (first) start_tile(product, &work, j, held, &scales, tile, plain);
      if (bf16) {
        const int64_t block = depth / kBlock;
        bf16_multiply(&scales, work.groups, blocks_of(depths, kBlock), info, static_cast<RowBlock *>(rows),
                      panel_info(panel) + block, panel_blocks(panel, k) + block, &output, tile, plain);
      } else {
        const float *const b = reinterpret_cast<const float *>(panel) + depth * fp32_vectors(held) * kLanes;
        fp32_multiply(product->m, held, depths, fp32_block, static_cast<float *>(rows), b, &output, tile);
      }
      if (last) finish_tile(product, j, held, &scales, tile, plain);
    }
    depth += depths;
  } while (depth < k);
  scratch->used = used;
}

}  // namespace

size_t serial_product_scratch(int32_t precision, int64_t m, int64_t n, int64_t k) {
  const int64_t panels = blocks_of(n, panel_width(precision));
  const Work work = plan_work(precision, least(m, kRowsMost), panels, k, kDepthsAtOnce);
  return static_cast<size_t>(panels) * panel_bytes(precision, k) + work_bytes(&work, panels);  // a tile limit keeps all tiles
}

void serial_product(const mok::SerialProduct *product, mok::Scratch *scratch) {
  const mok::SerialProduct &p = *product;
  const mok::ProductOperand a = {p.a, p.a_depth == 1 ? p.a_row : p.a_depth, nullptr, p.a_depth == 1};
  const mok::ProductOperand b = {p.b, p.b_depth == 1 ? p.b_column : p.b_depth, nullptr, p.b_depth == 1};
  const size_t used = scratch->used, bytes = panel_bytes(p.precision, p.k);
  const int64_t columns = panel_width(p.precision), panels = blocks_of(p.n, columns);
  unsigned char *const packed = static_cast<unsigned char *>(mok::scratch_take(scratch, static_cast<size_t>(panels) * bytes));
  for (int64_t q = 0; q < panels; ++q) {
    pack_panel(p.precision, &b, p.k, q * columns, least(columns, p.n - q * columns), packed + static_cast<size_t>(q) * bytes);
  }
  const int64_t block = rows_block(p.precision, p.k, p.tile_limit);
  for (int64_t i = 0; i < p.m; i += block) {
    mok::ProductRows rows = {};
    rows.precision = p.precision;
    rows.tile_limit = p.tile_limit;
    rows.m = least(block, p.m - i);
    rows.n = p.n;
    rows.k = p.k;
    rows.a = a;
    rows.first_row = i;
    rows.panels = packed;
    rows.panel_columns = columns;
    rows.c = p.c + i * p.c_row;
    rows.ldc = p.c_row;
    rows.initial = p.initial == nullptr ? nullptr : p.initial + i * p.c_row;
    product_rows(&rows, scratch);
  }
  scratch->used = used;
}

extern const ProductTable product_table = {
    serial_product_scratch, serial_product, panel_columns, panel_bytes, pack_panel, rows_block, rows_scratch, product_rows};

}  // namespace MOK_ISA_NS
