// What the sanitizers have to be told about fibers and about memory that is used again. Empty without them.
#pragma once

#include <cstddef>

#ifdef EMU_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

#ifdef EMU_TSAN
extern "C" {
void *__tsan_get_current_fiber();
void *__tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void *fiber);
void __tsan_switch_to_fiber(void *fiber, unsigned flags);
void __tsan_acquire(void *object);
void __tsan_release(void *object);
void __tsan_java_init(unsigned long begin, unsigned long bytes);
void __tsan_java_alloc(unsigned long address, unsigned long bytes);
}
#endif

namespace emu {

#ifdef EMU_TSAN
constexpr bool races_checked = true;
inline void *race_fiber_of_caller() {
    return __tsan_get_current_fiber();
}
inline void *new_race_fiber() {
    return __tsan_create_fiber(0);
}
inline void delete_race_fiber(void *fiber) {
    __tsan_destroy_fiber(fiber);
}
// 1: a switch orders nothing; only barriers do.
inline void switch_race_fiber(void *fiber) {
    __tsan_switch_to_fiber(fiber, 1);
}
inline void acquire(void *object) {
    __tsan_acquire(object);
}
inline void release(void *object) {
    __tsan_release(object);
}
// Fresh memory, whatever it was before. Only the interface for Java's heaps can say so without a call of the system.
inline void heap_is(void *memory, size_t bytes) {
    __tsan_java_init((unsigned long)memory, bytes);
}
inline void renew(void *memory, size_t bytes) {
    __tsan_java_alloc((unsigned long)memory, bytes);
}
#else
constexpr bool races_checked = false;
inline void *race_fiber_of_caller() {
    return nullptr;
}
inline void *new_race_fiber() {
    return nullptr;
}
inline void delete_race_fiber(void *) {}
inline void switch_race_fiber(void *) {}
inline void acquire(void *) {}
inline void release(void *) {}
inline void heap_is(void *, size_t) {}
inline void renew(void *, size_t) {}
#endif

}  // namespace emu
