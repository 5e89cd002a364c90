# The Metal device in the build. Included by the Makefile once OBJECTS is known and before the library's own rule.
#
# On macOS it becomes part of the library. Elsewhere only tests/softmetal/softmetal.mk uses it, and
# metal-check SDK=…   compiles and links the library for arm64 macOS against the SDK of whoever has one

METAL_SOURCES := $(wildcard native/metal/*.m native/metal/*.cpp)
SHADER_FILES  := $(wildcard shaders/*.metal shaders/*.h native/include/*.h)
OBJC_WARNINGS := -Wall -Wextra $(WERROR)
METAL_LINK    := -framework Foundation -framework Metal -framework CoreGraphics

# ---- The shaders, embedded: as source, and compiled where Apple's tools are

ifeq ($(UNAME),Darwin)
  METALLIB := $(shell xcrun -sdk macosx metal --version >/dev/null 2>&1 && echo $(BUILD)/ferrum.metallib)
endif

$(BUILD)/shaders.metal: $(SHADER_FILES) native/generate.py | $(PYTHON)
	@mkdir -p $(@D)
	$(PYTHON) native/generate.py shaders $@

$(BUILD)/ferrum.metallib: $(BUILD)/shaders.metal
	xcrun -sdk macosx metal -std=metal3.0 -mmacosx-version-min=13.0 -fno-fast-math -O2 $< -o $@

$(BUILD)/embedded.c: $(BUILD)/shaders.metal $(METALLIB)
	$(PYTHON) native/generate.py embed $@ ferrum_shader_source=$< ferrum_metallib=$(METALLIB)

$(BUILD)/embedded.o: $(BUILD)/embedded.c
	$(CC) -O1 -fPIC -fvisibility=hidden -c $< -o $@

# ---- macOS

ifeq ($(UNAME),Darwin)
  CXXFLAGS += -DFERRUM_METAL -mmacosx-version-min=13.0
  LDFLAGS  += $(METAL_LINK) '-Wl,-exported_symbol,_ferrum_*'
  OBJECTS  += $(patsubst native/%,$(BUILD)/%.o,$(basename $(METAL_SOURCES))) $(BUILD)/embedded.o

$(BUILD)/%.o: native/%.m Makefile
	@mkdir -p $(@D)
	$(CC) -std=gnu11 -O2 -g1 -fvisibility=hidden -fno-objc-arc -mmacosx-version-min=13.0 \
	    -ffile-prefix-map=$(CURDIR)=. $(OBJC_WARNINGS) -MMD -MP -c $< -o $@
endif

# ---- metal-check

ZIG         := $(VENV)/bin/python -m ziglang
CHECK       := $(BUILD)/metal-check
CHECK_FLAGS := -target aarch64-macos.13.0 -F$(SDK)/System/Library/Frameworks -isystem $(SDK)/usr/include
CHECK_STEMS := $(patsubst native/%,%,$(basename $(wildcard native/core/*.cpp native/cpu/*.cpp) $(METAL_SOURCES)))

$(VENV)/zig: | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet ziglang==0.17.1
	@touch $@

$(CHECK)/%.o: native/%.cpp $(VENV)/zig Makefile
	@mkdir -p $(@D)
	$(ZIG) c++ $(CHECK_FLAGS) $(CXXFLAGS) -DFERRUM_METAL -DFERRUM_CPU_ISA=portable -MMD -MP -c $< -o $@
$(CHECK)/%.o: native/%.m $(VENV)/zig Makefile
	@mkdir -p $(@D)
	$(ZIG) cc $(CHECK_FLAGS) -std=gnu11 -O2 -g1 -fvisibility=hidden -fno-objc-arc -fblocks $(OBJC_WARNINGS) -MMD -MP -c $< -o $@
$(CHECK)/%.o: $(BUILD)/%.cpp $(VENV)/zig
	@mkdir -p $(@D)
	$(ZIG) c++ $(CHECK_FLAGS) $(CXXFLAGS) -c $< -o $@
$(CHECK)/embedded.o: $(BUILD)/embedded.c $(VENV)/zig
	@mkdir -p $(@D)
	$(ZIG) cc $(CHECK_FLAGS) -O1 -fvisibility=hidden -c $< -o $@

$(CHECK)/libferrum.dylib: $(CHECK_STEMS:%=$(CHECK)/%.o) $(CHECK)/fingerprint.o $(CHECK)/embedded.o
	$(ZIG) c++ $(CHECK_FLAGS) -L$(SDK)/usr/lib -dynamiclib -install_name @rpath/libferrum.dylib $^ $(METAL_LINK) -lobjc -o $@

metal-check:
	@test -d "$(SDK)/System/Library/Frameworks/Metal.framework" || \
	    { echo "usage: make metal-check SDK=…/MacOSX.sdk, with Metal.framework in it" >&2; exit 1; }
	@$(MAKE) --no-print-directory $(CHECK)/libferrum.dylib
	$(VENV)/bin/python native/metal/exports.py $(CHECK)/libferrum.dylib native/include/ferrum.h
.PHONY: metal-check
