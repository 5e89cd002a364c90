#include "error.h"

#include <cstdarg>
#include <cstdio>

namespace ferrum {

namespace {
// A fixed array, so that recording a failure never allocates.
thread_local char last_error[1024] = "";
}  // namespace

void fail(int32_t code, const char *format, ...) {
    char text[sizeof(last_error)];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    throw Error{code, text};
}

std::string shape_text(const uint64_t *shape, uint32_t rank) {
    std::string text = "[";
    for (uint32_t i = 0; i < rank; i++) text += (i ? ", " : "") + std::to_string(shape[i]);
    return text + "]";
}

int32_t record_failure(int32_t code, const char *message) noexcept {
    snprintf(last_error, sizeof(last_error), "%s", message);
    return code;
}

}  // namespace ferrum

const char *ferrum_last_error(void) {
    return ferrum::last_error;
}
