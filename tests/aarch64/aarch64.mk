# The library for aarch64 and a program that replays traces, both run under qemu-user by tests/test_aarch64.py.
# Included by the Makefile, whose own rules build the library with another compiler.
#
# aarch64   build/aarch64/libferrum.so and build/aarch64/replay; and build/replay, the same program for this machine

# clang, as on macOS, where these kernels run; with the C and C++ libraries of the package g++-aarch64-linux-gnu.
AARCH64_CXX ?= clang++-19 --target=aarch64-linux-gnu

$(BUILD)/replay: tests/aarch64/replay.cpp native/include/ferrum.h $(LIBRARY)
	$(CXX) $(CXXFLAGS) -Inative/include $< $(LIBRARY) -Wl,-rpath,$(abspath $(dir $(LIBRARY))) -pthread -o $@

aarch64: $(BUILD)/replay
	$(MAKE) --no-print-directory MACHINE=aarch64 CXX='$(AARCH64_CXX)' BUILD=$(BUILD)/aarch64 \
	    LIBRARY=$(BUILD)/aarch64/libferrum.so $(BUILD)/aarch64/replay
.PHONY: aarch64
