# Writes OUTPUT, the string macros of mok_build_info() of the CUDA library.
#
# The source digest is made by the rule of ../cmake/build_info.cmake over the files below csrc/include, csrc/common and csrc/cuda
# that end in .h, .cuh, .cu or .cmake, and csrc/cuda/CMakeLists.txt, and csrc/cpu/{checks.h,error.h,error.cpp,floating.h}.
set(files cuda/CMakeLists.txt cpu/checks.h cpu/error.h cpu/error.cpp cpu/floating.h)
foreach(folder include common cuda)
  foreach(ending h cuh cu cmake)
    file(GLOB_RECURSE found RELATIVE "${SOURCE_DIR}" "${SOURCE_DIR}/${folder}/*.${ending}")
    list(APPEND files ${found})
  endforeach()
endforeach()
list(SORT files COMPARE STRING)
set(lines "")
foreach(path IN LISTS files)
  file(SHA256 "${SOURCE_DIR}/${path}" digest)
  string(APPEND lines "${digest}  ${path}\n")
endforeach()
string(SHA256 source_digest "${lines}")
file(WRITE "${OUTPUT}.new" "#define MOK_CUDA_COMPILER \"${COMPILER}\"\n#define MOK_CUDA_FLAGS \"${FLAGS}\"\n\
#define MOK_CUDA_ARCHITECTURES \"${ARCHITECTURES}\"\n#define MOK_CUDA_SOURCE_DIGEST \"${source_digest}\"\n")
file(COPY_FILE "${OUTPUT}.new" "${OUTPUT}")
