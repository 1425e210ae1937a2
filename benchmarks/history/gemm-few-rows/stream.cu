// How fast does TMA read a weight [N, K] of bytes from memory, by the shape and order of its boxes? No MMAs.
#include <cuda.h>
#include <cuda_runtime.h>
#include <cstdio>
#include <cstdint>
#include <vector>
#include <algorithm>
#define CHECK(x) do { auto e = (x); if (e != cudaSuccess) { printf("%s: %s\n", #x, cudaGetErrorString(e)); exit(1); } } while (0)
__device__ __forceinline__ uint32_t sa(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void wait(uint64_t* b, uint32_t parity) {
    asm volatile("{\n.reg .pred p;\nL: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra D;\nbra L;\nD:\n}" :: "r"(sa(b)), "r"(parity) : "memory");
}
// boxes of BROWS x 128 bytes; a stage has ROWS rows and KB k-blocks, issued row box by row box, k-blocks next to each other
template <int ROWS, int BROWS, int KB, int STAGES, int MAP, bool ROT>
__global__ void __launch_bounds__(128, 1) stream(const __grid_constant__ CUtensorMap map, int n_tiles, int k_blocks, int* out) {
    extern __shared__ __align__(1024) uint8_t shared_[];
    uint8_t* shared = (uint8_t*)(((uintptr_t)shared_ + 1023) & ~(uintptr_t)1023);
    __shared__ uint64_t full[STAGES];
    constexpr int bytes = ROWS * KB * 128;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(sa(full + s)));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        const int groups = k_blocks / KB;
        int first, count, step;  // units: MAP 0, tiles cta, cta + grid, ...; MAP 1, neighboring tiles; MAP 2, even parts of all
        if (MAP == 0) { first = blockIdx.x * groups; step = gridDim.x; count = ((n_tiles - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x) * groups; }
        else { long total = (long)n_tiles * groups; first = total * blockIdx.x / gridDim.x; count = total * (blockIdx.x + 1) / gridDim.x - first; step = 1;
               if (MAP == 1) { first = (long)n_tiles * blockIdx.x / gridDim.x * groups; count = (long)n_tiles * (blockIdx.x + 1) / gridDim.x * groups - first; } }
        int issue_tile = first / groups, issue_g = first % groups, issued = 0, stage = 0;
        auto issue = [&](int s) {
            asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(sa(full + s)), "r"(bytes) : "memory");
            int g = ROT ? (issue_g + blockIdx.x * 5) % groups : issue_g;
#pragma unroll
            for (int r = 0; r < ROWS / BROWS; ++r)
#pragma unroll
                for (int kb = 0; kb < KB; ++kb) {
                    uint32_t to = sa(shared + s * bytes + kb * ROWS * 128 + r * BROWS * 128);
                    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                        :: "r"(to), "l"(&map), "r"(sa(full + s)), "r"((g * KB + kb) * 128), "r"(issue_tile * ROWS + r * BROWS) : "memory");
                }
            if (++issue_g == groups) { issue_g = 0; issue_tile += step; }
            ++issued;
        };
        for (int s = 0; s < STAGES && s < count; ++s) issue(s);
        uint32_t parity = 0;
        for (int i = 0; i < count; ++i) {
            wait(full + stage, parity);
            if (issued < count) issue(stage);
            if (++stage == STAGES) { stage = 0; parity ^= 1; }
        }
        if (count < 0) *out = shared[0];
    }
}
// whole rows by 1D bulk copies: CHUNK contiguous bytes a stage
template <int CHUNK, int STAGES>
__global__ void __launch_bounds__(128, 1) bulk(const uint8_t* data, long total, int* out) {
    extern __shared__ __align__(1024) uint8_t shared[];
    __shared__ uint64_t full[STAGES];
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(sa(full + s)));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        long units = total / CHUNK; int count = (units - (long)blockIdx.x + gridDim.x - 1) / gridDim.x;
        auto issue = [&](int s, long i) {
            asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(sa(full + s)), "r"(CHUNK) : "memory");
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                :: "r"(sa(shared + s * CHUNK)), "l"(data + (blockIdx.x + i * gridDim.x) * CHUNK), "r"(CHUNK), "r"(sa(full + s)) : "memory");
        };
        for (int s = 0; s < STAGES && s < count; ++s) issue(s, s);
        int stage = 0; uint32_t parity = 0;
        for (int i = 0; i < count; ++i) {
            wait(full + stage, parity);
            if (i + STAGES < count) issue(stage, i + STAGES);
            if (++stage == STAGES) { stage = 0; parity ^= 1; }
        }
        if (count < 0) *out = shared[0];
    }
}
__global__ void __launch_bounds__(1024) sum(const uint4* data, long n, int* out) {
    uint4 t{}; long i = blockIdx.x * 1024L + threadIdx.x, s = gridDim.x * 1024L;
    for (; i + 7 * s < n; i += 8 * s) {
        uint4 v[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = __ldcs(data + i + j * s);
#pragma unroll
        for (int j = 0; j < 8; ++j) { t.x ^= v[j].x; t.y ^= v[j].y; t.z ^= v[j].z; t.w ^= v[j].w; }
    }
    for (; i < n; i += s) { uint4 v = __ldcs(data + i); t.x ^= v.x; t.y ^= v.y; t.z ^= v.z; t.w ^= v.w; }
    if ((t.x ^ t.y ^ t.z ^ t.w) == 0x12345678) *out = 1;
}
typedef CUresult (*Encode)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
Encode encode;
uint8_t* data; int* out; const long SIZE = 3L << 30;
template <class F> void timed(const char* name, long bytes, int copies, F launch) {
    cudaEvent_t a, b; cudaEventCreate(&a); cudaEventCreate(&b);
    std::vector<float> times;
    const int many = std::max(8, (int)(3e9 / bytes / 2));
    for (int round = 0; round < 5; ++round) {
        cudaEventRecord(a); for (int i = 0; i < many; ++i) launch(i % copies); cudaEventRecord(b); CHECK(cudaEventSynchronize(b));
        float ms; cudaEventElapsedTime(&ms, a, b); times.push_back(ms / many);
    }
    CHECK(cudaGetLastError()); std::sort(times.begin(), times.end());
    printf("  %-52s %8.2f us  %6.3f TB/s\n", name, times[2] * 1e3, bytes / times[2] / 1e9); fflush(stdout);
}
template <int ROWS, int BROWS, int KB, int STAGES, int MAP, bool ROT>
void run(int n, int k, int fetch) {
    const long bytes = (long)n * k; const int copies = std::max(1L, std::min(SIZE / bytes, 40L));
    std::vector<CUtensorMap> maps(copies);
    for (int i = 0; i < copies; ++i) {
        cuuint64_t shape[] = {(cuuint64_t)k, (cuuint64_t)n}, strides[] = {(cuuint64_t)k}; cuuint32_t box[] = {128, BROWS}, one[] = {1, 1};
        CUresult e = encode(&maps[i], CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, data + i * bytes, shape, strides, box, one, CU_TENSOR_MAP_INTERLEAVE_NONE,
            CU_TENSOR_MAP_SWIZZLE_128B, fetch == 256 ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : fetch == 128 ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
        if (e) { printf("encode %d\n", e); return; }
    }
    auto kernel = stream<ROWS, BROWS, KB, STAGES, MAP, ROT>;
    const int shared = ROWS * KB * 128 * STAGES + 1024;
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    char name[128]; snprintf(name, 128, "rows %d, boxes of %d rows, %d k-blocks, %d stages, %d KiB, map %d%s, fetch %d", ROWS, BROWS, KB, STAGES, shared >> 10, MAP, ROT ? " rot" : "", fetch);
    if (k / 128 % KB || n % ROWS) { return; }
    timed(name, bytes, copies, [&](int i) { kernel<<<132, 128, shared>>>(maps[i], n / ROWS, k / 128, out); });
}
template <int CHUNK, int STAGES> void run_bulk(long bytes) {
    const int copies = std::max(1L, std::min(SIZE / bytes, 40L));
    auto kernel = bulk<CHUNK, STAGES>; const int shared = CHUNK * STAGES;
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    char name[128]; snprintf(name, 128, "bulk copies of %d bytes, %d stages, %d KiB", CHUNK, STAGES, shared >> 10);
    timed(name, bytes, copies, [&](int i) { kernel<<<132, 128, shared>>>(data + i * bytes, bytes, out); });
}
int main() {
    cudaDriverEntryPointQueryResult q; CHECK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", (void**)&encode, cudaEnableDefault, &q));
    CHECK(cudaMalloc(&data, SIZE)); CHECK(cudaMalloc(&out, 4)); CHECK(cudaMemset(data, 0x35, SIZE));
    { cudaEvent_t a, b; cudaEventCreate(&a); cudaEventCreate(&b); for (int i = 0; i < 20; ++i) { cudaEventRecord(a); cudaMemcpyAsync(data, data + SIZE / 2, SIZE / 2, cudaMemcpyDeviceToDevice); cudaEventRecord(b); cudaEventSynchronize(b); }
      float ms; cudaEventElapsedTime(&ms, a, b); printf("copy %.3f TB/s read and written\n", SIZE / ms / 1e9); }
    const int shapes[][2] = {{180224, 2048}, {131072, 1408}, {24576, 1536}, {7168, 16384}, {4096, 7168}};
    for (auto& s : shapes) {
        const int n = s[0], k = s[1]; const long bytes = (long)n * k;
        printf("%d x %d, %.1f MB\n", n, k, bytes / 1e6);
        timed("sum by threads, 2 blocks an SM", bytes, (int)std::max(1L, std::min(SIZE / bytes, 40L)), [&](int i) { sum<<<264, 1024>>>((uint4*)(data + i * bytes), bytes / 16, out); });
        run_bulk<2048, 96>(bytes); run_bulk<4096, 48>(bytes); run_bulk<16384, 12>(bytes); run_bulk<16384, 6>(bytes); run_bulk<16384, 4>(bytes); run_bulk<32768, 6>(bytes); run_bulk<512, 128>(bytes);
        // as the GEMMs do
        run<128, 128, 1, 12, 0, false>(n, k, 256); run<128, 128, 1, 8, 0, false>(n, k, 256); run<128, 128, 1, 6, 0, false>(n, k, 256); run<128, 128, 1, 4, 0, false>(n, k, 256); run<128, 128, 1, 12, 0, false>(n, k, 128); run<128, 128, 1, 12, 0, false>(n, k, 0);
        run<64, 64, 1, 24, 0, false>(n, k, 256); run<64, 64, 1, 12, 0, false>(n, k, 256); run<64, 64, 1, 8, 0, false>(n, k, 256);
        run<128, 128, 1, 12, 1, false>(n, k, 256); run<128, 128, 1, 12, 2, false>(n, k, 256); run<128, 128, 1, 12, 0, true>(n, k, 256); run<64, 64, 1, 24, 2, false>(n, k, 256);
        // k-blocks next to each other
        run<128, 128, 2, 6, 0, false>(n, k, 256); run<128, 32, 2, 6, 0, false>(n, k, 256); run<128, 8, 2, 6, 0, false>(n, k, 256);
        run<128, 32, 4, 3, 0, false>(n, k, 256); run<64, 64, 2, 12, 0, false>(n, k, 256); run<64, 16, 4, 6, 0, false>(n, k, 256); run<64, 16, 4, 4, 0, false>(n, k, 256); run<64, 16, 8, 3, 0, false>(n, k, 256); run<64, 8, 8, 3, 0, false>(n, k, 256); run<64, 16, 8, 3, 2, false>(n, k, 256);
        run<32, 32, 4, 12, 0, false>(n, k, 256); run<32, 8, 16, 3, 0, false>(n, k, 256); run<16, 16, 16, 6, 0, false>(n, k, 256); run<16, 16, 4, 24, 0, false>(n, k, 256); run<16, 16, 4, 12, 0, false>(n, k, 256); run<16, 16, 4, 24, 2, false>(n, k, 256);
    }
}
