# Metal in software: the shaders as CPU code (first half), the API around them (second half).
# Included by the Makefile; paths are relative to the repository's root. Also usable alone: make -f tests/softmetal/softmetal.mk
#
# softmetal-emulator              $(EMULATOR_LIB): emulator and shaders; link with $(EMULATOR_LDLIBS)
# softmetal-emulator-asan, -tsan  the same under AddressSanitizer with UBSan, and under ThreadSanitizer
# softmetal-runners               build/softmetal/{plain,asan,tsan}/run: programs that run one shader (emulator/run.cpp)
# softmetal-faults                …/run-faults: the same with the planted faults instead
# softmetal-outside               …/run-outside: with another project's kernels (tests/test_outside_kernel.py brings them)

BUILD  ?= build
PYTHON ?= python3
CLANG  ?= clang-19

SOFT     := $(BUILD)/softmetal
EMULATOR := tests/softmetal/emulator

EMULATOR_LIB    := $(SOFT)/emulator.a
EMULATOR_LDLIBS := -lboost_context -lstdc++ -lm -lpthread

# As the kernels' contract says: float16 is rounded after each operation, nothing is contracted, 1.1 is a float.
SHADER_FLAGS := -std=c++20 -fno-strict-aliasing -ffp-contract=off -fno-math-errno -fvisibility=hidden \
                -Xclang -ffloat16-excess-precision=none -Xclang -fbfloat16-excess-precision=none \
                -Xclang -cl-single-precision-constant -Wall -Wextra -Werror -Wno-unknown-attributes -Wno-unused-function \
                -Wno-pass-failed
SHADER_INCLUDES := -DFERRUM_EMULATED -D__METAL_VERSION__=300 -I$(EMULATOR) -Ishaders -Inative/include \
                   -include emulated_metal.h
EMULATOR_FLAGS  := -std=c++20 -fvisibility=hidden -Wall -Wextra -Werror
# Conversions of float16 in hardware, where there are any.
EMULATOR_ARCH := $(shell grep -qw f16c /proc/cpuinfo 2>/dev/null && grep -qw avx2 /proc/cpuinfo && echo -march=x86-64-v3)

# Of a shader, of the emulator, and of a link; ThreadSanitizer watches the shaders only.
VARIANTS       := plain asan tsan
COMMON_plain   := -O2 -g1 -fPIC $(EMULATOR_ARCH)
COMMON_asan    := -O1 -g -fPIC -fno-omit-frame-pointer $(EMULATOR_ARCH) -DEMU_ASAN -fsanitize=address,undefined,float-cast-overflow \
                  -fno-sanitize=vptr,function -fno-sanitize-recover=all -fsanitize-address-use-after-return=never
COMMON_tsan    := -O1 -g -fPIC -fno-omit-frame-pointer $(EMULATOR_ARCH) -DEMU_TSAN
SHADER_plain   :=
SHADER_asan    :=
SHADER_tsan    := -fsanitize=thread
LINK_plain     :=
LINK_asan      := -fsanitize=address,undefined
LINK_tsan      := -fsanitize=thread

EMULATOR_SOURCES := emulator failure threadgroup
SHADER_STEMS     := $(patsubst shaders/%.metal,%,$(wildcard shaders/*.metal))
FAULT_STEMS      := $(patsubst tests/softmetal/faults/%.metal,%,$(wildcard tests/softmetal/faults/*.metal))
OUTSIDE_STEMS    := $(patsubst tests/softmetal/outside/%.metal,%,$(wildcard tests/softmetal/outside/*.metal))

# ---- Sets of shaders, $(SOFT)/<set>/: trampolines of each file, and table.cpp, whatever the variant

# $(1): name of the set, $(2): its folder, $(3): its files
define SET_RULES
$(SOFT)/$(1)/%.i: $(2)/%.metal $(EMULATOR)/emulated_metal.h
	@mkdir -p $$(@D)
	$(CLANG) -E -P -x c++ $(SHADER_INCLUDES) -I$(SOFT)/$(1) -DFERRUM_GENERATE -MMD -MP -MT $$@ -MF $$(@:.i=.i.d) $$< -o $$@
$(SOFT)/$(1)/%.inc: $(SOFT)/$(1)/%.i $(EMULATOR)/generate.py
	$(PYTHON) $(EMULATOR)/generate.py file $$* $$< $$@
# Written anew only where the list of files has changed.
$(SOFT)/$(1)/table.cpp: $(EMULATOR)/generate.py $(SOFT)/$(1)/files
	$(PYTHON) $(EMULATOR)/generate.py table $$@ $(3)
$(SOFT)/$(1)/files: softmetal-always
	@mkdir -p $$(@D)
	@echo '$(3)' | cmp -s - $$@ || echo '$(3)' > $$@
endef

# Its objects in a variant. $(1): set, $(2): folder, $(3): variant
define OBJECT_RULES
$(SOFT)/$(3)/$(1)/%.o: $(2)/%.metal $(SOFT)/$(1)/%.inc tests/softmetal/softmetal.mk
	@mkdir -p $$(@D)
	$(CLANG) $(SHADER_FLAGS) $(COMMON_$(3)) $(SHADER_$(3)) $(SHADER_INCLUDES) -I$(SOFT)/$(1) -MMD -MP -include $$< -x c++ -c $(SOFT)/$(1)/$$*.inc -o $$@
$(SOFT)/$(3)/$(1)/table.o: $(SOFT)/$(1)/table.cpp
	@mkdir -p $$(@D)
	$(CLANG) $(EMULATOR_FLAGS) $(COMMON_$(3)) -I$(EMULATOR) -c $$< -o $$@
endef

$(eval $(call SET_RULES,shaders,shaders,$(SHADER_STEMS)))
$(eval $(call SET_RULES,faults,tests/softmetal/faults,$(FAULT_STEMS)))
$(eval $(call SET_RULES,outside,tests/softmetal/outside,$(OUTSIDE_STEMS)))

# ---- Runtime, archives and programs of a variant

# $(1): variant, $(2): what its archive is called
define VARIANT_RULES
$(call OBJECT_RULES,shaders,shaders,$(1))
$(call OBJECT_RULES,faults,tests/softmetal/faults,$(1))
$(call OBJECT_RULES,outside,tests/softmetal/outside,$(1))
$(SOFT)/$(1)/%.o: $(EMULATOR)/%.cpp tests/softmetal/softmetal.mk
	@mkdir -p $$(@D)
	$(CLANG) $(EMULATOR_FLAGS) $(COMMON_$(1)) -I$(EMULATOR) -MMD -MP -c $$< -o $$@

RUNTIME_$(1) := $(EMULATOR_SOURCES:%=$(SOFT)/$(1)/%.o)
$(2): $$(RUNTIME_$(1)) $(SHADER_STEMS:%=$(SOFT)/$(1)/shaders/%.o) $(SOFT)/$(1)/shaders/table.o
	@rm -f $$@
	ar rcs $$@ $$^
$(SOFT)/$(1)/run: $(SOFT)/$(1)/run.o $(2)
	$(CLANG) $(LINK_$(1)) $$^ $(EMULATOR_LDLIBS) -o $$@
$(SOFT)/$(1)/run-faults: $(SOFT)/$(1)/run.o $$(RUNTIME_$(1)) $(FAULT_STEMS:%=$(SOFT)/$(1)/faults/%.o) $(SOFT)/$(1)/faults/table.o
	$(CLANG) $(LINK_$(1)) $$^ $(EMULATOR_LDLIBS) -o $$@
$(SOFT)/$(1)/run-outside: $(SOFT)/$(1)/run.o $$(RUNTIME_$(1)) $(OUTSIDE_STEMS:%=$(SOFT)/$(1)/outside/%.o) $(SOFT)/$(1)/outside/table.o
	$(CLANG) $(LINK_$(1)) $$^ $(EMULATOR_LDLIBS) -o $$@
endef
$(eval $(call VARIANT_RULES,plain,$(SOFT)/emulator.a))
$(eval $(call VARIANT_RULES,asan,$(SOFT)/emulator-asan.a))
$(eval $(call VARIANT_RULES,tsan,$(SOFT)/emulator-tsan.a))

softmetal-emulator: $(SOFT)/emulator.a
softmetal-emulator-asan: $(SOFT)/emulator-asan.a
softmetal-emulator-tsan: $(SOFT)/emulator-tsan.a
softmetal-runners: $(VARIANTS:%=$(SOFT)/%/run)
softmetal-faults: $(VARIANTS:%=$(SOFT)/%/run-faults)
softmetal-outside: $(VARIANTS:%=$(SOFT)/%/run-outside)
softmetal-always:
.PHONY: softmetal-emulator softmetal-emulator-asan softmetal-emulator-tsan softmetal-runners softmetal-faults \
        softmetal-outside softmetal-always
.SECONDARY:

-include $(shell find $(SOFT) -name '*.d' 2>/dev/null)

# ---- Second half: SoftMetal itself
#
# softmetal          $(SOFTMETAL_LIBRARY): core, cpu, native/metal and SoftMetal in one; PYFERRUM_LIBRARY names it
# softmetal-strict   build/softmetal/strict/: programs that do one thing wrong each, for tests/test_softmetal.py
# softmetal-analyze  clang's static analyzer over all Objective-C: retains and releases among them

SOFTMETAL_LIBRARY := $(SOFT)/libferrum.so

# Manual retain and release: Debian ships no runtime for ARC. Without it a wrong selector is only a warning, hence -Werror.
SOFT_C_FLAGS := -std=gnu11 -O2 -g1 -fPIC -fvisibility=hidden -Wall -Wextra -Werror -D_GNU_SOURCE
OBJC_FLAGS   := $(SOFT_C_FLAGS) -fno-objc-arc -fobjc-runtime=gcc -fobjc-exceptions -fexceptions -fblocks \
              -fconstant-string-class=NSConstantString -D_NATIVE_OBJC_EXCEPTIONS -DGNUSTEP -Itests/softmetal \
              -isystem /usr/include/GNUstep -isystem $(shell gcc -print-file-name=include 2>/dev/null)
# In this order: gnustep-base has a _Block_copy of its own, which gives a pointer into the stack.
OBJC_LDLIBS := -lBlocksRuntime -lgnustep-base -lobjc -lpthread

METAL_OBJC   := $(wildcard native/metal/*.m)
METAL_CXX    := $(wildcard native/metal/*.cpp)
SOFT_OBJC    := $(wildcard tests/softmetal/*.m)
SOFT_OBJECTS := $(SOFT_OBJC:tests/softmetal/%.m=$(SOFT)/soft/%.o) $(SOFT)/soft/memory.o
# Of the core only what asks for FERRUM_METAL differs from the library without it.
METAL_CORE   := $(shell grep -l FERRUM_METAL native/core/*.cpp)

$(SOFT)/soft/%.o: tests/softmetal/%.m tests/softmetal/softmetal.mk
	@mkdir -p $(@D)
	$(CLANG) $(OBJC_FLAGS) -MMD -MP -c $< -o $@
$(SOFT)/soft/%.o: tests/softmetal/%.c tests/softmetal/softmetal.mk
	@mkdir -p $(@D)
	$(CLANG) $(SOFT_C_FLAGS) -MMD -MP -c $< -o $@
$(SOFT)/metal/%.o: native/metal/%.m tests/softmetal/softmetal.mk
	@mkdir -p $(@D)
	$(CLANG) $(OBJC_FLAGS) -MMD -MP -c $< -o $@
$(SOFT)/metal/%.o: native/metal/%.cpp Makefile
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) -DFERRUM_METAL -MMD -MP -c $< -o $@
$(SOFT)/core/%.o: native/core/%.cpp Makefile
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) -DFERRUM_METAL -MMD -MP -c $< -o $@

SOFTMETAL_OBJECTS := $(filter-out $(METAL_CORE:native/%.cpp=$(BUILD)/%.o),$(OBJECTS)) \
                     $(METAL_CORE:native/%.cpp=$(SOFT)/%.o) $(METAL_CXX:native/%.cpp=$(SOFT)/%.o) \
                     $(METAL_OBJC:native/%.m=$(SOFT)/%.o) $(SOFT_OBJECTS) $(BUILD)/embedded.o
$(SOFTMETAL_LIBRARY): $(SOFTMETAL_OBJECTS) $(EMULATOR_LIB) tests/softmetal/exports.map
	$(CLANG) -shared -Wl,--no-undefined -Wl,-soname,libferrum.so -Wl,--version-script=tests/softmetal/exports.map \
	    $(SOFTMETAL_OBJECTS) $(EMULATOR_LIB) $(OBJC_LDLIBS) $(EMULATOR_LDLIBS) -o $@

# The same with the shaders under a sanitizer, for a Python that preloads its runtime.
SANITIZE_asan := address,undefined
SANITIZE_tsan := thread
$(SOFT)/libferrum-%.so: $(SOFTMETAL_OBJECTS) $(SOFT)/emulator-%.a tests/softmetal/exports.map
	$(CLANG) -shared -Wl,-soname,libferrum.so -Wl,--version-script=tests/softmetal/exports.map -shared-libsan \
	    -fsanitize=$(SANITIZE_$*) $(SOFTMETAL_OBJECTS) $(SOFT)/emulator-$*.a $(OBJC_LDLIBS) $(EMULATOR_LDLIBS) -o $@
softmetal-sanitized: $(SOFT)/libferrum-asan.so $(SOFT)/libferrum-tsan.so
.PHONY: softmetal-sanitized

# Kernels of its own, so that it stands without the shaders.
$(eval $(call SET_RULES,strict,tests/softmetal/strict,strict))
$(SOFT)/plain/strict/strict.o: tests/softmetal/strict/strict.metal $(SOFT)/strict/strict.inc
	@mkdir -p $(@D)
	$(CLANG) $(SHADER_FLAGS) $(COMMON_plain) $(SHADER_INCLUDES) -include $< -x c++ -c $(SOFT)/strict/strict.inc -o $@
$(SOFT)/plain/strict/table.o: $(SOFT)/strict/table.cpp
	@mkdir -p $(@D)
	$(CLANG) $(EMULATOR_FLAGS) $(COMMON_plain) -I$(EMULATOR) -c $< -o $@
$(SOFT)/strict/strict: tests/softmetal/strict/strict.m $(SOFT_OBJECTS) $(RUNTIME_plain) \
                       $(SOFT)/plain/strict/strict.o $(SOFT)/plain/strict/table.o
	$(CLANG) $(OBJC_FLAGS) $^ $(OBJC_LDLIBS) $(EMULATOR_LDLIBS) -o $@

$(SOFT)/strict/metallib: tests/softmetal/strict/metallib.c $(METAL_OBJC:native/%.m=$(SOFT)/%.o) $(SOFT_OBJECTS) $(RUNTIME_plain) \
                         $(SOFT)/plain/strict/strict.o $(SOFT)/plain/strict/table.o
	$(CLANG) $(SOFT_C_FLAGS) $^ $(OBJC_LDLIBS) $(EMULATOR_LDLIBS) -o $@

# Retain counts are checked on Apple's systems only, unless asked for.
ANALYZE := $(CLANG) --analyze -Xclang -analyzer-checker=osx -Xclang -analyzer-output=text -Xclang -analyzer-werror
softmetal-analyze:
	@for file in $(METAL_OBJC) $(SOFT_OBJC) tests/softmetal/strict/strict.m $(ANALYZE_MORE); do \
	    $(ANALYZE) $(OBJC_FLAGS) $$file -o /dev/null || exit 1; done

softmetal: $(SOFTMETAL_LIBRARY)
softmetal-strict: $(SOFT)/strict/strict $(SOFT)/strict/metallib
.PHONY: softmetal softmetal-strict softmetal-analyze
