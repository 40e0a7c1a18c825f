// BLAKE3 on the GPU against digests of the official test pattern (byte i is i mod 251), computed with the reference
// implementation.
#include "cuda/blake3.h"
#include "tests/cuda_harness.cuh"

using namespace mok::test;

namespace {

struct Known {
  int64_t length;
  const char *digest;
};
const Known kKnown[] = {
    {0, "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"},
    {1, "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213"},
    {2, "7b7015bb92cf0b318037702a6cdd81dee41224f734684c2c122cd6359cb1ee63"},
    {3, "e1be4d7a8ab5560aa4199eea339849ba8e293d55ca0a81006726d184519e647f"},
    {63, "e9bc37a594daad83be9470df7f7b3798297c3d834ce80ba85d6e207627b7db7b"},
    {64, "4eed7141ea4a5cd4b788606bd23f46e212af9cacebacdc7d1f4c6dc7f2511b98"},
    {65, "de1e5fa0be70df6d2be8fffd0e99ceaa8eb6e8c93a63f2d8d1c30ecb6b263dee"},
    {127, "d81293fda863f008c09e92fc382a81f5a0b4a1251cba1634016a0f86a6bd640d"},
    {128, "f17e570564b26578c33bb7f44643f539624b05df1a76c81f30acd548c44b45ef"},
    {129, "683aaae9f3c5ba37eaaf072aed0f9e30bac0865137bae68b1fde4ca2aebdcb12"},
    {1023, "10108970eeda3eb932baac1428c7a2163b0e924c9a9e25b35bba72b28f70bd11"},
    {1024, "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7"},
    {1025, "d00278ae47eb27b34faecf67b4fe263f82d5412916c1ffd97c8cb7fb814b8444"},
    {2047, "58830fbf51a4423c573b164471690570e544cfe793bead46225664796b4b1467"},
    {2048, "e776b6028c7cd22a4d0ba182a8bf62205d2ef576467e838ed6f2529b85fba24a"},
    {2049, "5f4d72f40d7a5f82b15ca2b2e44b1de3c2ef86c426c95c1af0b6879522563030"},
    {3072, "b98cb0ff3623be03326b373de6b9095218513e64f1ee2edd2525c7ad1e5cffd2"},
    {3073, "7124b49501012f81cc7f11ca069ec9226cecb8a2c850cfe644e327d22d3e1cd3"},
    {4096, "015094013f57a5277b59d8475c0501042c0b642e531b0a1c8f58d2163229e969"},
    {4097, "9b4052b38f1c5fc8b1f9ff7ac7b27cd242487b3d890d15c96a1c25b8aa0fb995"},
    {5121, "628bd2cb2004694adaab7bbd778a25df25c47b9d4155a55f8fbd79f2fe154cff"},
    {8192, "aae792484c8efe4f19e2ca7d371d8c467ffb10748d8a5a1ae579948f718a2a63"},
    {8193, "bab6c09cb8ce8cf459261398d2e7aef35700bf488116ceb94a36d0f5f1b7bc3b"},
    {31744, "62b6960e1a44bcc1eb1a611a8d6235b6b4b78f32e7abc4fb4c6cdcce94895c47"},
    {102400, "bc3e3d41a1146b069abffad3c0d44860cf664390afce4d9661f7902e7943e085"},
    {262143, "4fbb10c248894f1b56ec8298555b96e597147150a061b1cf1af19f16dbc0557b"},
    {262144, "d57dc906e20d3fd326ffaa85535500486f46a0979f5a323f028dcabfd381fd4a"},
    {262145, "531c319935cf78f34869faebd865e5748266b1799039103bfb851a680d9ed30c"},
    {524288, "b467afa334cd7dedd76e3a9a4b0e8a5ed278713f2f4e220a682aa30c7fcd140b"},
    {524289, "7978ac1ee80f7f7c115d25551f9c54cb3a2974cfcb8f5ab93de706350d143286"},
    {786433, "5599c118148036c9342db6d8be1d586d21948df6ace7479efb33c6ff37c47ef5"},
    {1048577, "2f053cd7472cf0cd2f9adaf45c1180255b91b9a865404a63671a0ee5f792ed33"},
    {5242880, "54c35c1e2f19bca26898eb1d23bbee04deff9b67f1f0544a3e38423961eb6bd5"},
    {33554433, "afecfe49a931b4641b0590b05fa687cbe0c5a6777d82b2e538ac96e49aaf48e0"},
    {70000001, "8d1ad16a431b34728868c32de91cee2e119cb0b3994fda2ff5e54ce0be0552c8"},
};

std::string hexadecimal(const uint8_t *bytes) {
  std::string text;
  for (int i = 0; i < 32; ++i) {
    char two[3];
    std::snprintf(two, sizeof two, "%02x", bytes[i]);
    text += two;
  }
  return text;
}

// All known buffers in one call, each starting `offset` bytes after a multiple of 256.
void check(mok_context *context, const uint8_t *pattern, size_t offset) {
  const size_t count = std::size(kKnown);
  std::vector<void *> memory(count);
  std::vector<const void *> pointers(count);
  std::vector<int64_t> lengths(count);
  for (size_t i = 0; i < count; ++i) {
    lengths[i] = kKnown[i].length;
    need(cudaMalloc(&memory[i], static_cast<size_t>(lengths[i]) + offset + 1), "cudaMalloc");
    uint8_t *data = static_cast<uint8_t *>(memory[i]) + offset;
    need(cudaMemcpy(data, pattern, static_cast<size_t>(lengths[i]), cudaMemcpyHostToDevice), "upload");
    pointers[i] = data;
  }
  Device<uint8_t> out(count * 32);
  mok_blake3_args args{static_cast<int64_t>(count), pointers.data(), lengths.data(), out.data()};
  if (ok(mok_blake3(context, &args), "mok_blake3")) {
    const std::vector<uint8_t> got = out.download();
    for (size_t i = 0; i < count; ++i) {
      ++compared;
      const std::string digest = hexadecimal(got.data() + 32 * i);
      if (digest != kKnown[i].digest) {
        report("length " + std::to_string(lengths[i]) + " offset " + std::to_string(offset) + ": got " + digest + ", want " +
               kKnown[i].digest);
      }
    }
  }
  for (void *each : memory) cudaFree(each);
}

}  // namespace

int main() {
  mok_context *context = context_with(0);
  std::vector<uint8_t> pattern(70000001);
  for (size_t i = 0; i < pattern.size(); ++i) pattern[i] = static_cast<uint8_t>(i % 251);
  for (const size_t offset : {size_t{0}, size_t{1}, size_t{4}, size_t{16}}) check(context, pattern.data(), offset);
  mok_context_destroy(context);
  return finish("cuda_digests");
}
