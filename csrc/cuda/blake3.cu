// BLAKE3 (O'Connor, Aumasson, Neves, Wilcox-O'Hearn: "BLAKE3, one function, fast everywhere", 2020) of many buffers at once.
//
// A buffer is cut into chunks of 1,024 bytes, one a thread. A CTA joins its 256 chunks into one node of the hash tree; a second
// kernel joins the nodes of each buffer. Joining neighbours level by level, a last odd node going up unchanged, gives the tree of
// the paper.
#include "cuda/blake3.h"

#include <vector>

#include "cuda/context.h"

namespace mok::cuda {
namespace {

constexpr int kChunkBytes = 1024;
constexpr int kBlockBytes = 64;
constexpr int kChunks = 256;   // of a CTA
constexpr int kJoiners = 512;  // threads that join a buffer's nodes
constexpr int64_t kNodeBytes = static_cast<int64_t>(kChunks) * kChunkBytes;

constexpr uint32_t kChunkStart = 1, kChunkEnd = 2, kParent = 4, kRoot = 8;
__device__ constexpr uint32_t kInitial[8] = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
                                             0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};
// Word of the message that position i of round r reads: the permutation of the paper, applied r times.
__device__ constexpr int kSchedule[7][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8},
    {3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1}, {10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6},
    {12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4}, {9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7},
    {11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13}};

struct Buffer {
  const uint8_t *data;
  int64_t length;
  int64_t first_node;  // nodes of the buffers before this one
};

struct Node {
  uint32_t word[8];
};

__device__ __forceinline__ void quarter(uint32_t &a, uint32_t &b, uint32_t &c, uint32_t &d, uint32_t x, uint32_t y) {
  a = a + b + x;
  d = __byte_perm(d ^ a, 0, 0x1032);
  c = c + d;
  b = __funnelshift_r(b ^ c, b ^ c, 12);
  a = a + b + y;
  d = __byte_perm(d ^ a, 0, 0x0321);
  c = c + d;
  b = __funnelshift_r(b ^ c, b ^ c, 7);
}

// The compression function, cut to the 8 words that chain.
__device__ __forceinline__ Node compress(const Node &chain, const uint32_t (&message)[16], uint64_t counter, uint32_t bytes,
                                         uint32_t flags) {
  uint32_t v[16];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    v[i] = chain.word[i];
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[8 + i] = kInitial[i];
  }
  v[12] = static_cast<uint32_t>(counter);
  v[13] = static_cast<uint32_t>(counter >> 32);
  v[14] = bytes;
  v[15] = flags;
#pragma unroll
  for (int round = 0; round < 7; ++round) {
    const int (&m)[16] = kSchedule[round];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      quarter(v[i], v[4 + i], v[8 + i], v[12 + i], message[m[2 * i]], message[m[2 * i + 1]]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      quarter(v[i], v[4 + (i + 1) % 4], v[8 + (i + 2) % 4], v[12 + (i + 3) % 4], message[m[8 + 2 * i]],
              message[m[8 + 2 * i + 1]]);
    }
  }
  Node out;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    out.word[i] = v[i] ^ v[8 + i];
  }
  return out;
}

__device__ __forceinline__ Node initial_node() {
  Node node;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    node.word[i] = kInitial[i];
  }
  return node;
}

// A block of `bytes` bytes (64 at most) at data, zeros after them.
__device__ __forceinline__ void load_block(uint32_t (&message)[16], const uint8_t *data, int64_t bytes, bool aligned) {
  if (aligned && bytes >= kBlockBytes) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 four = __ldg(reinterpret_cast<const uint4 *>(data) + i);
      message[4 * i] = four.x;
      message[4 * i + 1] = four.y;
      message[4 * i + 2] = four.z;
      message[4 * i + 3] = four.w;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    message[i] = 0;
    for (int j = 0; j < 4; ++j) {
      if (4 * i + j < bytes) {
        message[i] |= static_cast<uint32_t>(__ldg(data + 4 * i + j)) << (8 * j);
      }
    }
  }
}

// The chaining value of one chunk; `bytes` are what is left of the buffer at `data`.
__device__ __forceinline__ Node hash_chunk(const uint8_t *data, int64_t bytes, uint64_t index, bool root) {
  const bool aligned = reinterpret_cast<uintptr_t>(data) % 16 == 0;
  const int32_t length = static_cast<int32_t>(bytes < kChunkBytes ? bytes : kChunkBytes);
  const int32_t blocks = length == 0 ? 1 : (length + kBlockBytes - 1) / kBlockBytes;
  Node chain = initial_node();
  uint32_t next[16];
  load_block(next, data, length, aligned);
#pragma unroll 1
  for (int32_t block = 0; block < blocks; ++block) {
    uint32_t message[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      message[i] = next[i];
    }
    const int32_t after = (block + 1) * kBlockBytes;
    if (block + 1 < blocks) {
      load_block(next, data + after, length - after, aligned);
    }
    const bool last = block + 1 == blocks;
    const uint32_t flags = (block == 0 ? kChunkStart : 0) | (last ? kChunkEnd : 0) | (last && root ? kRoot : 0);
    chain = compress(chain, message, index, static_cast<uint32_t>(last ? length - block * kBlockBytes : kBlockBytes), flags);
  }
  return chain;
}

__device__ __forceinline__ Node join(const Node &left, const Node &right, bool root) {
  uint32_t message[16];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    message[i] = left.word[i];
    message[8 + i] = right.word[i];
  }
  return compress(initial_node(), message, 0, kBlockBytes, kParent | (root ? kRoot : 0));
}

__device__ __forceinline__ void store_digest(uint8_t *out, const Node &node) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    out[i] = static_cast<uint8_t>(node.word[i / 4] >> (i % 4 * 8));
  }
}

__device__ __forceinline__ int64_t nodes_of(int64_t length) { return length == 0 ? 1 : (length + kNodeBytes - 1) / kNodeBytes; }

// The buffer that holds node `node`.
__device__ __forceinline__ int64_t find_buffer(const Buffer *buffers, int64_t count, int64_t node) {
  int64_t first = 0;
  int64_t beyond = count;
  while (beyond - first > 1) {
    const int64_t middle = (first + beyond) / 2;
    if (buffers[middle].first_node <= node) {
      first = middle;
    } else {
      beyond = middle;
    }
  }
  return first;
}

// A CTA a node: hashes its chunks and joins them.
__global__ void __launch_bounds__(kChunks) chunks_kernel(const Buffer *buffers, int64_t count, Node *nodes, uint8_t *out) {
  __shared__ uint32_t words[8][kChunks];
  const int64_t node = blockIdx.x;
  const int64_t at = find_buffer(buffers, count, node);
  const Buffer buffer = buffers[at];
  const int64_t first_byte = (node - buffer.first_node) * kNodeBytes;
  const int64_t bytes = buffer.length - first_byte;
  const bool whole = nodes_of(buffer.length) == 1;
  int32_t live = static_cast<int32_t>(bytes >= kNodeBytes ? kChunks : bytes == 0 ? 1 : (bytes + kChunkBytes - 1) / kChunkBytes);
  const int32_t thread = threadIdx.x;
  Node own;
  if (thread < live) {
    const int64_t offset = static_cast<int64_t>(thread) * kChunkBytes;
    own = hash_chunk(buffer.data + first_byte + offset, bytes - offset,
                     static_cast<uint64_t>((first_byte + offset) / kChunkBytes), whole && live == 1);
  }
  while (live > 1) {
    if (thread < live) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        words[i][thread] = own.word[i];
      }
    }
    __syncthreads();
    const int32_t pairs = live / 2;
    Node left, right;
    if (thread < pairs + live % 2) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        left.word[i] = words[i][2 * thread];
        right.word[i] = words[i][thread < pairs ? 2 * thread + 1 : 2 * thread];
      }
      own = thread < pairs ? join(left, right, whole && live == 2) : left;
    }
    __syncthreads();
    live = pairs + live % 2;
  }
  if (thread == 0) {
    if (whole) {
      store_digest(out + at * 32, own);
    } else {
      nodes[node] = own;
    }
  }
}

// A CTA a buffer: joins its nodes, level by level, between two arrays.
__global__ void __launch_bounds__(kJoiners) join_kernel(const Buffer *buffers, Node *nodes, Node *other, uint8_t *out) {
  const Buffer buffer = buffers[blockIdx.x];
  int64_t live = nodes_of(buffer.length);
  if (live == 1) return;  // chunks_kernel has stored it
  Node *from = nodes + buffer.first_node;
  Node *to = other + buffer.first_node;
  while (live > 1) {
    const int64_t pairs = live / 2;
    for (int64_t i = threadIdx.x; i < pairs; i += kJoiners) {
      to[i] = join(from[2 * i], from[2 * i + 1], live == 2);
    }
    if (live % 2 != 0 && threadIdx.x == 0) {
      to[pairs] = from[live - 1];
    }
    __syncthreads();
    live = pairs + live % 2;
    Node *const swap = from;
    from = to;
    to = swap;
  }
  if (threadIdx.x == 0) {
    store_digest(out + static_cast<int64_t>(blockIdx.x) * 32, from[0]);
  }
}

mok_status run(mok_context *context, const mok_blake3_args *args) {
  MOK_REQUIRE(args->count >= 0, "count is %" PRId64 "; allowed: 0 or more", args->count);
  MOK_REQUIRE_POINTER(args->pointers, args->count);
  MOK_REQUIRE_POINTER(args->lengths, args->count);
  MOK_REQUIRE_POINTER(args->out, args->count);
  if (args->count == 0) return MOK_OK;
  std::vector<Buffer> buffers(static_cast<size_t>(args->count));
  int64_t nodes = 0;
  for (int64_t i = 0; i < args->count; ++i) {
    const int64_t length = args->lengths[i];
    MOK_REQUIRE(length >= 0, "lengths[%" PRId64 "] is %" PRId64 "; allowed: 0 or more", i, length);
    MOK_REQUIRE(args->pointers[i] != nullptr || length == 0,
                "pointers[%" PRId64 "] is NULL; allowed: a pointer to %" PRId64 " bytes", i, length);
    buffers[static_cast<size_t>(i)] = Buffer{static_cast<const uint8_t *>(args->pointers[i]), length, nodes};
    nodes += length == 0 ? 1 : divide_up(length, kNodeBytes);
  }
  MOK_REQUIRE(nodes < INT32_MAX && args->count < INT32_MAX,
              "the buffers hold %" PRId64 " nodes of 256 KiB; allowed: less than 2^31", nodes);
  const size_t buffer_bytes = buffers.size() * sizeof(Buffer);
  const size_t node_bytes = static_cast<size_t>(nodes) * sizeof(Node);
  Scratch scratch(context->stream);
  MOK_TRY(scratch.take(2 * node_bytes + buffer_bytes));
  auto *first = scratch.as<Node>();
  Node *second = first + nodes;
  auto *device_buffers = reinterpret_cast<Buffer *>(second + nodes);
  MOK_CUDA(cudaMemcpyAsync(device_buffers, buffers.data(), buffer_bytes, cudaMemcpyHostToDevice, context->stream));
  chunks_kernel<<<static_cast<unsigned>(nodes), kChunks, 0, context->stream>>>(device_buffers, args->count, first, args->out);
  MOK_LAUNCHED();
  join_kernel<<<static_cast<unsigned>(args->count), kJoiners, 0, context->stream>>>(device_buffers, first, second, args->out);
  MOK_LAUNCHED();
  return MOK_OK;
}

}  // namespace
}  // namespace mok::cuda

extern "C" MOK_API mok_status mok_blake3(mok_context *context, const mok_blake3_args *args) {
  return mok::cuda::enter("mok_blake3", context, args, [&] { return mok::cuda::run(context, args); });
}
