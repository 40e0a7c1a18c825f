# Writes OUTPUT, three string macros for mok_build_info().
#
# The source digest, so that anyone can recompute it: take every file below csrc/include, csrc/common, csrc/cpu and csrc/cmake whose
# name ends in .h, .cpp or .cmake, and csrc/CMakeLists.txt; sort by path relative to csrc ("/" between parts, by bytes); for each
# one write the line "<lower-case hex SHA-256 of the file><two spaces><relative path>\n"; the digest is the lower-case hex SHA-256
# of those lines. In a shell:  cd csrc && LC_ALL=C ls FILES | xargs sha256sum | sha256sum
set(files CMakeLists.txt)
foreach(folder include common cpu cmake)
  foreach(ending h cpp cmake)
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
file(WRITE "${OUTPUT}.new" "#define MOK_BUILD_COMPILER \"${COMPILER}\"\n#define MOK_BUILD_FLAGS \"${FLAGS}\"\n\
#define MOK_BUILD_SOURCE_DIGEST \"${source_digest}\"\n")
file(COPY_FILE "${OUTPUT}.new" "${OUTPUT}")
