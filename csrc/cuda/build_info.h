// What mok_build_info() says; the build passes the macros (CMakeLists.txt).
#pragma once

#ifndef MOK_CUDA_SOURCE_DIGEST
#define MOK_CUDA_SOURCE_DIGEST ""
#endif
#ifndef MOK_CUDA_FLAGS
#define MOK_CUDA_FLAGS ""
#endif
#ifndef MOK_CUDA_ARCHITECTURES
#define MOK_CUDA_ARCHITECTURES ""
#endif
#define MOK_CUDA_TEXT_OF(x) #x
#define MOK_CUDA_TEXT(x) MOK_CUDA_TEXT_OF(x)
#define MOK_CUDA_COMPILER "nvcc " MOK_CUDA_TEXT(__CUDACC_VER_MAJOR__) "." MOK_CUDA_TEXT(__CUDACC_VER_MINOR__)
