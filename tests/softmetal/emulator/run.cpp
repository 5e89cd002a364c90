// Runs dispatches that a test wrote down: a program, so that a sanitizer can be part of it and may end it.
//
//   run DIRECTORY < commands
//
//   order SEED
//   buffer NAME FILE          contents of DIRECTORY/FILE, in a block of memory of exactly that size
//   zeros NAME BYTES          a block of zeros
//   table NAME BUFFER...      a page table: addresses of buffers
//   dispatch KERNEL CONSTANTS THREADGROUP_BYTES gx gy gz tx ty tz SLOT=BUFFER...
//   save NAME FILE            the buffer as it is now
//
// Ends with 0, or with 3 and the emulator's message on stderr, or as the sanitizer ends it.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "emulator.h"

struct Block {
    char *data;
    size_t bytes;
};

static Block block_of(const std::vector<char> &contents) {
    // Aligned as Metal's buffers are, and from malloc itself, so that AddressSanitizer knows where it ends.
    void *memory = nullptr;
    if (posix_memalign(&memory, 256, contents.size())) abort();
    Block block = {(char *)memory, contents.size()};
    memcpy(block.data, contents.data(), contents.size());
    return block;
}

[[noreturn]] static void refuse(const std::string &why) {
    fprintf(stderr, "run: %s\n", why.c_str());
    exit(2);
}

int main(int argc, char **argv) {
    if (argc != 2) refuse("expected a directory");
    const std::string directory = std::string(argv[1]) + "/";
    static auto &blocks = *new std::map<std::string, Block>;  // lives to the end, so nothing leaks
    const auto find = [](const std::string &name) -> Block & {
        const auto found = blocks.find(name);
        if (found == blocks.end()) refuse("no buffer " + name);
        return found->second;
    };
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream words(line);
        std::string word, name, file;
        if (!(words >> word)) continue;
        if (word == "order") {
            uint64_t seed;
            words >> seed;
            emu_set_order(seed);
        } else if (word == "buffer") {
            words >> name >> file;
            std::ifstream in(directory + file, std::ios::binary);
            if (!in) refuse("cannot read " + file);
            blocks[name] = block_of(std::vector<char>(std::istreambuf_iterator<char>(in), {}));
        } else if (word == "zeros") {
            size_t bytes;
            words >> name >> bytes;
            blocks[name] = block_of(std::vector<char>(bytes));
        } else if (word == "table") {
            words >> name;
            std::vector<char> addresses;
            for (std::string page; words >> page;) {
                const char *const data = find(page).data;
                addresses.insert(addresses.end(), (const char *)&data, (const char *)&data + 8);
            }
            blocks[name] = block_of(addresses);
        } else if (word == "dispatch") {
            uint32_t constants, threadgroup_bytes, groups[3], threads[3];
            words >> name >> constants >> threadgroup_bytes;
            for (uint32_t &n : groups) words >> n;
            for (uint32_t &n : threads) words >> n;
            if (!words) refuse("not a dispatch: " + line);
            std::vector<emu_binding> bindings;
            for (std::string binding; words >> binding;) {
                const size_t equals = binding.find('=');
                if (equals == std::string::npos) refuse("not a binding: " + binding);
                bindings.push_back({(uint32_t)std::stoul(binding), find(binding.substr(equals + 1)).data});
            }
            const emu_kernel *kernel = emu_find_kernel(name.c_str());
            if (!kernel) refuse("no kernel " + name);
            char message[1000];
            if (emu_dispatch(kernel, constants, bindings.data(), (uint32_t)bindings.size(), groups, threads,
                             threadgroup_bytes, message, sizeof(message))) {
                fprintf(stderr, "%s\n", message);
                return 3;
            }
        } else if (word == "save") {
            words >> name >> file;
            const Block &block = find(name);
            std::ofstream(directory + file, std::ios::binary).write(block.data, (std::streamsize)block.bytes);
        } else {
            refuse("what is " + word + "?");
        }
    }
}
