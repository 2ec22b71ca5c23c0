# A CMake toolchain for AArch64 with Linux; CROSS_CXX in the environment names another compiler.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
if(DEFINED ENV{CROSS_CXX})
  set(CMAKE_CXX_COMPILER $ENV{CROSS_CXX})
else()
  set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
endif()
