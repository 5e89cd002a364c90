// Replays a trace (trace.py) through the C ABI and compares every buffer it gives with the recorded bytes.
//
//   replay TRACE INSTRUCTION_SET THREADS
//
// A trace is a sequence of records: a name, then the arguments of ferrum_<name> as Argument<type> below reads them.
// Everything in it is a multiple of 8 bytes, little-endian. Objects are numbered by kind, in the order in which a case
// makes them. Ends with 1 where bytes differ, with 2 where a call fails or the trace makes no sense.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "ferrum.h"

namespace {

constexpr int kMostMessages = 20;

struct Bytes {
    const uint8_t *data;
    uint64_t size;
};

template <class T>
struct Objects {
    void (*release)(T **);
    std::vector<T *> all;
    void clear() {
        for (T *&object : all) release(&object);
        all.clear();
    }
};

struct Player {
    std::string trace;
    size_t at = 0;
    std::string label, call;
    ferrum_device *device = nullptr;
    std::tuple<Objects<ferrum_buffer>, Objects<ferrum_state>, Objects<ferrum_attention>, Objects<ferrum_ring>> objects{
        {ferrum_buffer_release, {}},
        {ferrum_state_release, {}},
        {ferrum_attention_release, {}},
        {ferrum_ring_release, {}}};
    uint64_t calls = 0, outputs = 0, compared = 0, differences = 0;

    [[noreturn]] void broken(const char *why) {
        fprintf(stderr, "%s: %s: %s\n", label.c_str(), call.c_str(), why);
        exit(2);
    }
    Bytes take(uint64_t size) {
        const uint64_t padded = (size + 7) / 8 * 8;
        if (padded < size || padded > trace.size() - at) broken("the trace ends");
        const Bytes bytes{reinterpret_cast<const uint8_t *>(trace.data()) + at, size};
        at += padded;
        return bytes;
    }
    uint64_t word() {
        uint64_t value;
        memcpy(&value, take(8).data, 8);
        return value;
    }
    Bytes bytes() {
        const uint64_t size = word();
        return take(size);
    }
    std::string text() {
        const Bytes b = bytes();
        return std::string(reinterpret_cast<const char *>(b.data), b.size);
    }
    template <class T>
    std::vector<T *> &all() {
        return std::get<Objects<T>>(objects).all;
    }
    template <class T>
    T *object() {
        const uint64_t number = word();
        if (number >= all<T>().size()) broken("the trace names an object that is not there");
        return all<T>()[number];
    }
    ferrum_tensor tensor() {
        ferrum_tensor tensor{};
        tensor.buffer = object<ferrum_buffer>();
        tensor.format = uint32_t(word());
        tensor.rank = uint32_t(word());
        for (uint64_t &length : tensor.shape) length = word();
        return tensor;
    }
    void compare(ferrum_buffer *buffer, Bytes expected) {
        void *data;
        uint64_t size;
        if (ferrum_buffer_contents(buffer, &data, &size)) broken(ferrum_last_error());
        const auto *found = static_cast<const uint8_t *>(data);
        if (size != expected.size) broken("a buffer has another size");
        compared += size;
        outputs++;
        uint64_t first = size, count = 0;
        for (uint64_t i = size; i-- > 0;)
            if (found[i] != expected.data[i]) first = i, count++;
        if (count && ++differences <= kMostMessages) {
            first = first / 4 * 4;
            fprintf(stderr, "%s: %s, output %llu: %llu of %llu bytes differ; from byte %llu: expected ", label.c_str(),
                    call.c_str(), (unsigned long long)outputs, (unsigned long long)count, (unsigned long long)size,
                    (unsigned long long)first);
            for (uint64_t i = first; i < first + 4 && i < size; i++) fprintf(stderr, "%02x", expected.data[i]);
            fprintf(stderr, ", got ");
            for (uint64_t i = first; i < first + 4 && i < size; i++) fprintf(stderr, "%02x", found[i]);
            fprintf(stderr, "\n");
        }
    }
};

// ---- Arguments by their type: how the trace gives one, what the function gets, and what is done after the call

template <class T>
struct Argument;

template <class T>
struct Given {
    T value;
    T get() { return value; }
    void done(Player &) {}
};
template <>
struct Argument<uint32_t> : Given<uint32_t> {
    explicit Argument(Player &p) : Given{uint32_t(p.word())} {}
};
template <>
struct Argument<uint64_t> : Given<uint64_t> {
    explicit Argument(Player &p) : Given{p.word()} {}
};
template <>
struct Argument<float> : Given<float> {
    explicit Argument(Player &p) : Given{} {
        const uint64_t bits = p.word();
        memcpy(&value, &bits, 4);
    }
};
template <>
struct Argument<ferrum_device *> : Given<ferrum_device *> {
    explicit Argument(Player &p) : Given{p.device} {}
};
// An object that an earlier call made.
template <class T>
struct Argument<T *> : Given<T *> {
    explicit Argument(Player &p) : Given<T *>{p.object<T>()} {}
};
template <class T>
struct Argument<T *const *> {
    std::vector<T *> values;
    explicit Argument(Player &p) : values(p.word()) {
        for (T *&value : values) value = p.object<T>();
    }
    T *const *get() { return values.data(); }
    void done(Player &) {}
};
// Plain data: a struct, or numbers.
template <class T>
struct Argument<const T *> {
    std::vector<T> values;
    explicit Argument(Player &p) {
        const Bytes b = p.bytes();
        values.resize(b.size / sizeof(T));
        memcpy(values.data(), b.data, values.size() * sizeof(T));
    }
    const T *get() { return values.data(); }
    void done(Player &) {}
};
template <>
struct Argument<const ferrum_tensor *> {
    std::vector<ferrum_tensor> values;
    explicit Argument(Player &p) : values(p.word()) {
        for (ferrum_tensor &value : values) value = p.tensor();
    }
    const ferrum_tensor *get() { return values.empty() ? nullptr : values.data(); }
    void done(Player &) {}
};
template <>
struct Argument<const ferrum_attention_weights *> {
    ferrum_attention_weights value{};
    explicit Argument(Player &p) {
        static_assert(sizeof(value) % sizeof(ferrum_tensor) == 0);
        for (size_t i = 0; i < sizeof(value) / sizeof(ferrum_tensor); i++)
            if (p.word()) reinterpret_cast<ferrum_tensor *>(&value)[i] = p.tensor();
    }
    const ferrum_attention_weights *get() { return &value; }
    void done(Player &) {}
};
// What the function makes: objects are kept until the case ends; buffers and numbers are compared.
template <class T>
struct Made {
    std::vector<T *> values;
    std::vector<T **> slots;
    explicit Made(uint64_t count) : values(count) {}
    T **const *array() {
        for (T *&value : values) slots.push_back(&value);
        return slots.data();
    }
    void done(Player &p) { p.all<T>().insert(p.all<T>().end(), values.begin(), values.end()); }
};
template <class T>
struct Argument<T **> : Made<T> {
    explicit Argument(Player &) : Made<T>(1) {}
    T **get() { return this->values.data(); }
};
template <class T>
struct Argument<T **const *> : Made<T> {
    explicit Argument(Player &p) : Made<T>(p.word()) {}
    T **const *get() { return this->array(); }
};
struct Results : Made<ferrum_buffer> {
    std::vector<Bytes> expected;
    Results(Player &p, uint64_t count) : Made(count), expected(count) {
        for (Bytes &bytes : expected) bytes = p.bytes();
    }
    void done(Player &p) {
        for (size_t i = 0; i < values.size(); i++) {
            p.compare(values[i], expected[i]);
            ferrum_buffer_release(&values[i]);
        }
    }
};
template <>
struct Argument<ferrum_buffer **> : Results {
    explicit Argument(Player &p) : Results(p, 1) {}
    ferrum_buffer **get() { return values.data(); }
};
template <>
struct Argument<ferrum_buffer **const *> : Results {
    explicit Argument(Player &p) : Results(p, p.word()) {}
    ferrum_buffer **const *get() { return array(); }
};
template <>
struct Argument<uint64_t *> {
    uint64_t expected, value = 0;
    explicit Argument(Player &p) : expected(p.word()) {}
    uint64_t *get() { return &value; }
    void done(Player &p) {
        if (value != expected) p.broken("a number differs");
    }
};

// ---- Records

template <class... T>
std::function<void(Player &)> record(int32_t (*function)(T...)) {
    return [function](Player &p) {
        std::tuple<Argument<T>...> arguments{Argument<T>(p)...};  // braces: read from left to right
        if (std::apply([&](auto &...a) { return function(a.get()...); }, arguments)) p.broken(ferrum_last_error());
        std::apply([&](auto &...a) { (a.done(p), ...); }, arguments);
        p.calls++;
        p.outputs = 0;
    };
}

#define RECORD(name) {#name, record(ferrum_##name)}
const std::map<std::string, std::function<void(Player &)>> kRecords = {
    {"case",
     [](Player &p) {
         std::apply([](auto &...objects) { (objects.clear(), ...); }, p.objects);
         p.label = p.text();
     }},
    {"buffer",
     [](Player &p) {
         const Bytes bytes = p.bytes();
         ferrum_buffer *buffer;
         void *data;
         uint64_t size;
         if (ferrum_buffer_new(p.device, bytes.size, &buffer) || ferrum_buffer_contents(buffer, &data, &size))
             p.broken(ferrum_last_error());
         if (size) memcpy(data, bytes.data, size);
         p.all<ferrum_buffer>().push_back(buffer);
     }},
    RECORD(argmax),
    RECORD(attention_new),
    RECORD(causal_attention),
    RECORD(cross_entropy),
    RECORD(dflash2_attention),
    RECORD(dflash2_commit),
    RECORD(dflash2_conv),
    RECORD(dflash2_heads),
    RECORD(dflash2_mask),
    RECORD(dflash2_mask_rows),
    RECORD(dflash2_pack),
    RECORD(dflash2_select),
    RECORD(embed),
    RECORD(linear),
    RECORD(residual_add),
    RECORD(ring_load),
    RECORD(ring_new),
    RECORD(ring_read),
    RECORD(rms_norm),
    RECORD(state_append),
    RECORD(state_new),
    RECORD(state_read),
    RECORD(state_truncate),
    RECORD(swiglu),
    RECORD(top_k),
    RECORD(weight_prepare),
};

}  // namespace

int main(int count, char **arguments) {
    if (count != 4) {
        fprintf(stderr, "usage: replay TRACE INSTRUCTION_SET THREADS\n");
        return 2;
    }
    Player p;
    std::ifstream file(arguments[1], std::ios::binary);
    p.trace.assign(std::istreambuf_iterator<char>(file), {});
    p.label = arguments[1];
    p.call = "open";
    if (p.trace.empty()) p.broken("no trace");
    ferrum_device_options options{};
    options.instruction_set = arguments[2];
    options.threads = uint32_t(atoi(arguments[3]));
    options.poison = 1;
    if (ferrum_device_new("cpu", &options, &p.device)) p.broken(ferrum_last_error());
    while (p.at < p.trace.size()) {
        p.call = p.text();
        const auto found = kRecords.find(p.call);
        if (found == kRecords.end()) p.broken("no such record");
        found->second(p);
    }
    std::apply([](auto &...objects) { (objects.clear(), ...); }, p.objects);
    ferrum_device_summary summary;
    if (ferrum_device_describe(p.device, &summary)) p.broken(ferrum_last_error());
    printf("%s, %u threads: %llu calls, %llu bytes, %llu outputs differ\n", summary.instruction_set, summary.threads,
           (unsigned long long)p.calls, (unsigned long long)p.compared, (unsigned long long)p.differences);
    ferrum_device_release(&p.device);
    return p.differences ? 1 : 0;
}
