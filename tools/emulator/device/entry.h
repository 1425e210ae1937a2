// The entry point of a kernel: the core calls it with an array of pointers to arguments, as cuLaunchKernel takes them.
#pragma once
#include <utility>

namespace emulator {

struct Entry {
    void (*call)(void** arguments);
    const size_t* sizes;
    size_t count;
};

template <auto kernel, class... P>
Entry entry_of(void (*)(P...)) {
    static const size_t sizes[] = {sizeof(P)..., 0};
    auto call = [](void** arguments) {
        [&]<size_t... i>(std::index_sequence<i...>) {
            kernel(*static_cast<P*>(arguments[i])...);
        }(std::index_sequence_for<P...>());
    };
    return {call, sizes, sizeof...(P)};
}

}  // namespace emulator
