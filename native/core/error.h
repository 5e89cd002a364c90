// Failures inside the library: thrown as Error, turned into a status and a message at the C boundary.
#pragma once

#include <cstdint>
#include <exception>
#include <new>
#include <string>
#include <utility>

#include "../include/ferrum.h"

namespace ferrum {

struct Error {
    int32_t code;
    std::string message;
};

[[noreturn]] void fail(int32_t code, const char *format, ...) __attribute__((format(printf, 2, 3)));

// "[576, 49152]"
std::string shape_text(const uint64_t *shape, uint32_t rank);

int32_t record_failure(int32_t code, const char *message) noexcept;

// Runs `body`; whatever it throws becomes a status code and the calling thread's last error.
template <class Body>
int32_t guard(Body &&body) noexcept {
    try {
        std::forward<Body>(body)();
        return FERRUM_OK;
    } catch (const Error &error) {
        return record_failure(error.code, error.message.c_str());
    } catch (const std::bad_alloc &) {
        return record_failure(FERRUM_OUT_OF_MEMORY, "the system has no memory left for this call");
    } catch (const std::exception &error) {
        return record_failure(FERRUM_INTERNAL_ERROR, error.what());
    } catch (...) {
        return record_failure(FERRUM_INTERNAL_ERROR, "unknown exception");
    }
}

// NULL arguments are a caller's bug, but must not crash it.
template <class T>
T *required(T *pointer, const char *name) {
    if (!pointer) fail(FERRUM_INVALID_ARGUMENT, "%s: expected a pointer, got NULL", name);
    return pointer;
}

}  // namespace ferrum
